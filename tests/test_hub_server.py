"""The Hub of `hub_server.py` against the real client: what holds here is what the other tests of the Hub stand on."""
import hashlib
import os
import random
from pathlib import Path

import pytest
from hub_client import SOON, HubClient
from hub_server import HubServer

IMPORTS = """
import hashlib, pathlib
from huggingface_hub import CommitOperationAdd, HfApi, get_hf_file_metadata, hf_hub_url
from huggingface_hub import hf_hub_download, snapshot_download
api = HfApi()
read = lambda revision, **kwargs: pathlib.Path(
    hf_hub_download("me/model", "config.json", revision=revision, **kwargs)).read_text()
metadata = lambda **kwargs: get_hf_file_metadata(hf_hub_url("me/model", "config.json"), **kwargs)
"""
LARGE = random.Random(0).randbytes(11_000_000)  # larger than what the Hub takes inside a commit
FILES = {"config.json": b'{"a": 1}', "README.md": b"---\ntags: []\n---\n# Card\n", "model.safetensors": LARGE}

PUSH = """
api.create_repo("me/model", exist_ok=True)
info = api.upload_folder(repo_id="me/model", folder_path={folder!r}, commit_message="first")
answer(info.oid)
"""
PULL = """
folder = pathlib.Path(snapshot_download("me/model", revision={revision!r}))
answer({{p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != ".gitattributes"}})
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return str(folder)


def digests(files):
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


@pytest.mark.parametrize(("uploads", "part_size"), [
    ("regular", None), ("lfs", None), ("lfs", 5_000_000), ("xet", None)])
def test_what_is_pushed_comes_back(tmp_path, files, uploads, part_size):
    xet = {"HF_HUB_DISABLE_XET": "0" if uploads == "xet" else "1"}
    with HubServer(tmp_path, uploads, part_size) as server:
        token = server.add_user("me")
        with HubClient(tmp_path, server.endpoint, token, IMPORTS, **xet) as client:
            pushed = client.run(PUSH.format(folder=files))
            assert pushed.error is None, pushed.output
            client.forget()
            pulled = client.run(PULL.format(revision="main"))
        assert pulled.answer == digests(FILES), pulled.output
        assert server.repositories["me/model"].find("main").oid == pushed.answer
        assert server.leaks(token) == []
        assert {r.token for r in server.requests if "/commit/" in r.path} == {token}
        large = server.repositories["me/model"].find("main").files["model.safetensors"]
        puts = [r for r in server.requests if r.method == "PUT"]
        assert (large.large, large.xet is not None, len(puts)) == {
            "regular": (False, False, 0), "lfs": (True, False, 3 if part_size else 1), "xet": (True, True, 0),
        }[uploads]


def test_branches_tags_and_commits_are_revisions(server, client):
    first = server.commit("me/model", {"config.json": b"1"})
    result = client.run("""
api.create_tag("me/model", tag="v1")
api.create_branch("me/model", branch="next")
api.upload_file(path_or_fileobj=b"2", path_in_repo="config.json", repo_id="me/model", revision="next")
refs = api.list_repo_refs("me/model")
answer([read("main"), read("v1"), read("next"), [b.name for b in refs.branches], [t.name for t in refs.tags]])
""")
    assert result.answer == ["1", "1", "2", ["main", "next"], ["v1"]], result.output
    assert client.run(f"answer(read({first!r}))").answer == "1"
    missing = client.run("read('v2')")
    assert missing.error.startswith("RevisionNotFoundError: 404")


def test_a_pull_request_is_a_revision_and_main_stays(server, client):
    server.commit("me/model", {"config.json": b"1"})
    result = client.run("""
add = [CommitOperationAdd("config.json", b"2")]
info = api.create_commit("me/model", add, commit_message="change", create_pr=True)
answer([info.pr_num, read(info.pr_revision)])
""")
    assert result.answer == [1, "2"], result.output
    assert server.files("me/model")["config.json"] == b"1"


def test_an_unchanged_folder_makes_no_second_commit(server, client, files):
    first = client.run(PUSH.format(folder=files))
    assert client.run(PUSH.format(folder=files)).answer == first.answer
    assert len(server.repositories["me/model"].commits) == 2  # the repository's own, and the folder


@pytest.mark.parametrize(("repository", "token", "error"), [
    (dict(private=True), "owner", None),
    (dict(private=True), "other", "RepositoryNotFoundError: 404"),
    (dict(private=True), None, "RepositoryNotFoundError: 401"),
    (dict(gated=True), "owner", None),
    (dict(gated=True), "other", "GatedRepoError: 403"),
    (dict(gated=True), None, "GatedRepoError: 401"),
    (dict(), None, None),
    (dict(), "invalid", "HfHubHTTPError: Client error '401 Unauthorized'"),
])
def test_who_may_read(server, client, repository, token, error):
    server.create_repo("me/model", **repository)
    server.commit("me/model", {"config.json": b"1"})
    tokens = {"owner": server.add_user("me"), "other": server.add_user("other"), "invalid": "hf_" + "x" * 34}
    result = client.run(f"read('main', token={tokens.get(token, False)!r})")
    assert (result.error or "None").startswith(str(error)), result.output


def test_who_may_write(server, client):
    server.create_repo("me/model")
    upload = "api.upload_file(path_or_fileobj=b'1', path_in_repo='a', repo_id='me/model', token={!r})"
    assert client.run(upload.format(server.add_user("me"))).error is None
    for token in (server.add_user("me", role="read"), server.add_user("other")):
        assert "403 Forbidden" in client.run(upload.format(token)).error
    assert "403 Forbidden" in client.run("api.create_repo('them/model')").error


@pytest.mark.parametrize("what", [401, 403, 404, 429, 500, 503])
def test_a_status_as_asked_for_and_no_longer(server, client, what):
    server.commit("me/model", {"config.json": b"1"})
    server.fail(what, path="config.json", times=1)
    assert str(what) in client.run("metadata()").error
    assert client.run("metadata()").error is None
    assert [r.status for r in server.requests if "config.json" in r.path] == [what, 200]


def test_silence_lasts_until_it_is_healed(server, client):
    server.commit("me/model", {"config.json": b"1"})
    server.fail("silence", path="config.json")
    result = client.run("metadata(timeout=1)")
    assert result.error.startswith("ReadTimeout")
    assert 1 < result.seconds < SOON


def test_a_cut_download_is_continued_where_it_was_cut(server, client):
    server.commit("me/model", {"model.safetensors": LARGE})
    server.fail("cut", path="/blobs/", times=1, after=10_700_000)
    result = client.run("answer(hashlib.sha256(open(hf_hub_download('me/model', 'model.safetensors'), 'rb').read())"
                        ".hexdigest())")
    assert result.answer == hashlib.sha256(LARGE).hexdigest(), result.output
    parts = [(r.headers.get("range"), r.status) for r in server.requests if "/blobs/" in r.path]
    assert parts == [(None, 0), ("bytes=10485760-", 206)]  # the client writes 10 MiB at a time


def test_a_cut_upload_is_not_there(server, client, files):
    server.fail("cut", path="/blobs/", method="PUT", after=4_000_000)
    failed = client.run("from huggingface_hub import lfs\n"
                        "lfs.http_backoff = __import__('functools').partial(lfs.http_backoff, max_retries=0)\n"
                        + PUSH.format(folder=files))
    assert failed.error
    assert server.blobs.keys().isdisjoint(digests(FILES).values())
    assert set(server.files("me/model")) == {".gitattributes"}
    server.heal()
    assert client.run(PUSH.format(folder=files)).error is None
    assert server.files("me/model")["model.safetensors"] == LARGE


def test_a_large_file_that_has_not_come_in_cannot_be_committed(server, client):
    server.create_repo("me/model")
    result = client.run("""
add = CommitOperationAdd("model.safetensors", b"1" * 600)
add._upload_mode, add._is_uploaded = "lfs", True
api.create_commit("me/model", [add], commit_message="nothing behind it")
""")
    assert "has not come in whole" in result.error


def test_a_token_where_it_does_not_belong_is_found(server):
    import urllib.request

    token = server.add_user("me")
    server.commit("me/model", {"model.safetensors": b"1" * 100})
    headers = {"Authorization": f"Bearer {token}"}
    urllib.request.urlopen(urllib.request.Request(  # follows to the other host, header and all
        f"{server.endpoint}/me/model/resolve/main/model.safetensors", headers=headers)).close()
    urllib.request.urlopen(f"{server.endpoint}/api/agent-harnesses?token={token}").close()
    assert server.leaks(token) == [
        f"GET {server.storage}/blobs/{hashlib.sha256(b'1' * 100).hexdigest()}",
        f"GET /api/agent-harnesses?token={token}"]


def test_the_client_reaches_nothing_but_this_machine(client):
    result = client.run("__import__('urllib.request').request.urlopen('http://192.0.2.1/', timeout=1)")
    assert result.error
    assert client.run("__import__('socket').create_connection(('192.0.2.1', 80), 1)").error == (
        "OSError: a test tried to reach 192.0.2.1")
    assert client.run("__import__('socket').create_connection(('example.com', 80), 1)").error == (
        "OSError: a test tried to reach example.com")


def test_each_run_is_a_process_of_its_own(client):
    first = client.run("import os; hf_hub_download = None; answer(os.getpid())").answer
    second = client.run("import os; answer([os.getpid(), hf_hub_download is None, os.environ['HF_HOME']])").answer
    assert second[0] not in (first, os.getpid())
    assert second[1:] == [False, str(client.home)]
    assert Path(client.home).is_dir()
