"""Push models to the mock Hub, from Python and the command line, and load them in new processes without a cache."""
import re

import pytest
from helpers.hub_models import SHORT_TIMEOUT
from helpers.tiny_study import result_of

from timm_ortho import hub

MODELS = {  # the ViT's weights exceed 10 MB, the real Hub's limit for files inside a commit request
    "me/vit": ("vit_small_orthog", dict(img_size=32, patch_size=8, depth=2, num_classes=7, connection_prob=0.5)),
    "me/resnet": ("resnetv2_18_cifar_ortho", dict(
        channels=[16, 16, 32, 32], head_norm=True, num_classes=5, connection_layers=[0, 3])),
}


@pytest.fixture
def run(client):
    """Return a function that runs code in the client, which must not fail, and returns its answer."""
    def run(code):
        result = client.run(code)
        assert result.error is None, result.output
        return result.answer
    return run


def equals(revision, seed, name="me/model"):
    return f"answer(logits(pull('{name}{revision}'), 3, 16) == logits(tiny({seed}), 3, 16))"


@pytest.mark.parametrize("repo_id", MODELS)
def test_pushed_models_load_bit_for_bit(server, client, repo_id):
    token, (name, kwargs) = server.add_user("me"), MODELS[repo_id]
    described = "answer([logits(model, size=32), [repr(site) for site in timm_ortho.sites(model)]])"
    pushed = client.run(f"model = make({name!r}, **{kwargs!r}); hub.push(model, {repo_id!r}); {described}")
    assert pushed.error is None, pushed.output
    client.forget()
    pulled = client.run(f"model = pull({repo_id!r}); {described}")
    assert pulled.answer == pushed.answer, pulled.output
    assert token not in pushed.output + pulled.output
    assert server.leaks(token) == []
    files = server.files(repo_id)
    assert files.keys() == {".gitattributes", "model.safetensors", "config.json", "README.md"}
    assert (len(files["model.safetensors"]) > 10_000_000) is (repo_id == "me/vit")


def test_a_run_from_the_command_line(server, client, run, grid, tmp_path):
    folder = grid / "feature-seed0"
    words = ["push", str(folder), "me/digits", "--message", "First", "--license", "mit"]
    pushed = client.run(f"answer(cli.main({words!r}))")
    assert pushed.answer == 0, pushed.output
    commit = server.repositories["me/digits"].find("main")
    assert commit.title == "First"
    assert f"{server.endpoint}/me/digits/commit/{commit.oid}\n" in pushed.output
    assert commit.files.keys() >= {"training.png", "README.md"}
    card = server.files("me/digits")["README.md"].decode()
    assert "license: mit" in card
    assert f"| top-1 of these weights, % | {result_of(folder)['top1']:.2f} |" in card
    hub.export(folder, tmp_path / "out", "me/digits")
    exported = f"timm.create_model('local-dir:{tmp_path / 'out'}', pretrained=True).eval()"
    assert run("answer(logits(pull('me/digits'), 1, 16))") == run(f"answer(logits({exported}, 1, 16))")
    shown = client.run("answer(cli.main(['show', 'hf-hub:me/digits']))")
    assert shown.answer == 0, shown.output
    assert len([line for line in shown.output.splitlines() if " feature " in line]) == 4


def test_revisions_and_pull_requests_leave_main(server, client, run):
    run("hub.push(tiny(), 'me/model')")
    run("hub.push(tiny(1), 'me/model', revision='v2')")
    url = run("answer(hub.push(tiny(2), 'me/model', create_pr=True).pr_url)")
    assert url == f"{server.endpoint}/me/model/discussions/1"
    client.forget()
    for revision, seed in (("", 0), ("@v2", 1), ("@refs/pr/1", 2)):
        assert run(equals(revision, seed)) is True
    assert 'hf-hub:me/model@v2"' in server.files("me/model", "v2")["README.md"].decode()
    run("hub.push(tiny(2), 'me/model', revision='v2')")  # the branch exists
    line = client.run("sys.exit(cli.main(['push', 'none', 'me/model', '--create-pr']))")
    assert "there is no checkpoint or run folder 'none'" in line.output


def test_private(server, client, run):
    for seed in (0, 1):
        run(f"hub.push(tiny({seed}), 'me/secret', private=True)")
    assert server.repositories["me/secret"].private
    run("hub.push(tiny(), 'me/open')")
    before = server.files("me/open")
    refused = client.run("hub.push(tiny(1), 'me/open', private=True)")
    assert refused.error.startswith("PublishError: me/open exists and is public")
    assert server.files("me/open") == before


@pytest.mark.parametrize(("what", "path", "method"), [(403, "/blobs/", "PUT"), ("cut", "/commit/", "POST")])
def test_an_interrupted_upload_changes_nothing(server, client, run, what, path, method):
    run("hub.push(tiny(), 'me/model')")
    before = server.files("me/model")
    # PUT fails with 403. If its connection were cut, the client would retry the upload for half a minute.
    server.fail(what, path, method, after=100)
    for name in ("me/model", "me/new"):
        broken = client.run(f"hub.push(tiny(1), {name!r})")
        assert re.match(rf"PublishError: {name} cannot be written at \S+: (\w+: 403 Forbidden|Remote)", broken.error)
    assert server.files("me/model") == before
    assert server.files("me/new").keys() == {".gitattributes"}
    server.heal()
    run("hub.push(tiny(1), 'me/model')")
    client.forget()
    assert run(equals("", 1)) is True


@pytest.mark.parametrize(("fault", "change", "cause"), [
    ((401, ""), "", r"\w+: Client error '401 Unauthorized' .*Invalid credentials in Authorization header"),
    ((403, ""), "", r"\w+: 403 Forbidden: .*Make sure your token has the correct permissions\.$"),
    ((503, "/commit/"), "", r"\w+: Server error '503 Service Unavailable'"),
    (("silence", ""), SHORT_TIMEOUT, "TimeoutError: timed out$"),
    (None, "huggingface_hub.constants.ENDPOINT = 'http://127.0.0.1:9'\n", "ConnectionRefusedError: "),
    (None, "huggingface_hub.constants.HF_HUB_OFFLINE = True\n", "OfflineModeIsEnabled: "),
])
def test_failures_of_the_hub_and_the_network(server, client, fault, change, cause):
    if fault:
        server.fail(*fault)
    result = client.run(f"{change}hub.push(tiny(), 'me/model')")
    assert re.match(rf"PublishError: me/model cannot be written at \S+: {cause}", result.error)
    assert "\n" not in result.error
    assert sum(request.path.endswith(("/repos/create", "/commit/main")) for request in server.requests) <= 2  # no retry
    assert "During handling" not in result.output  # there is no traceback from huggingface_hub


def test_tokens_are_only_in_the_header(server, client, run):
    other, reader = server.add_user("other"), server.add_user("me", role="read")
    server.create_repo("me/model")
    before = server.files("me/model")
    bad = "hf_" + "x" * 34
    for token in (other, reader, bad):
        result = client.run(f"hub.push(tiny(), 'me/model', token={token!r})")
        assert ("401 Unauthorized" if token == bad else "403 Forbidden") in result.error
        assert token not in result.output + result.error
        assert server.leaks(token) == []
    assert server.files("me/model") == before
    assert "401 Unauthorized" in client.run("hub.push(tiny(), 'me/model', token=False)").error
    run("hub.push(tiny(), 'me/other', token=True)")  # the token in HF_TOKEN
