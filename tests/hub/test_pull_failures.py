"""Test that failures of the Hub, the network and the cache are reported soon, in one line with the cause."""
import pytest
from helpers.hub_models import BY_NAME, BY_PULL, BY_TIMM, NO_HUB, NO_PAUSES, SHORT_TIMEOUT, check_refused, fill_cache

CONSTANTS = "constants = huggingface_hub.constants\n"
NO_SERVER = CONSTANTS + """constants.ENDPOINT = "http://127.0.0.1:9"
constants.HUGGINGFACE_CO_URL_TEMPLATE = "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
"""


@pytest.mark.parametrize(("way", "fault", "text"), [
    (BY_NAME, dict(what=401), "Client error '401 Unauthorized' .*Invalid credentials"),
    (BY_NAME, dict(what=403, code="GatedRepo"), "GatedRepoError: 403 Client Error. Cannot access gated repo"),
    (BY_PULL, dict(what=404, code="RepoNotFound"), "RepositoryNotFoundError: 404 Client Error. .*Please make sure"),
    (BY_PULL, dict(what=503), "Server error '503 Service Unavailable'"),
    (BY_NAME, dict(what="silence"), "TimeoutError: timed out$"),
])
def test_an_error_of_the_hub(hub, client, way, fault, text):
    hub.fail(path="/me/vit/", **fault)
    file = "config.json" if way == BY_PULL else "model.safetensors"
    start = f"^WeightsError: hf-hub:me/vit: {file} cannot be downloaded from {hub.endpoint}: "
    check_refused(client.run(SHORT_TIMEOUT + way), start + f".*{text}", hub.add_user("me"))
    assert len([request for request in hub.requests if "/me/vit/" in request.path]) == 1  # no retries


@pytest.mark.parametrize("repository", [dict(private=True), dict(gated=True)])
def test_a_repository_of_another_user(hub, client, saved, repository):
    hub.create_repo("them/vit", **repository)
    hub.commit("them/vit", saved["me/vit"][0])
    check_refused(client.run("timm_ortho.pull('them/vit')"), "40[34] Client Error", hub.add_user("me"))
    owner = hub.add_user("them")
    result = client.run(f"os.environ['HF_TOKEN'] = {owner!r}; answer(logits(timm_ortho.pull('them/vit')))")
    assert result.answer == saved["me/vit"][1], result.output
    assert owner not in result.output
    assert hub.leaks(owner) == hub.leaks(hub.add_user("me")) == []


def test_a_missing_revision(hub, client):
    check_refused(client.run("timm_ortho.pull('me/vit@v9')"), "config.json .*RevisionNotFoundError: 404 Client Error")


@pytest.mark.parametrize(("broken", "text"), [
    (NO_SERVER, "ConnectionRefusedError"), (NO_HUB, "FileMetadataError"),
    (CONSTANTS + "constants.HF_HUB_OFFLINE = True\n", "offline mode is enabled. .*unset the `HF_HUB_OFFLINE`"),
])
def test_without_the_hub_only_the_cache_loads(hub, client, saved, broken, text):
    for way in (BY_NAME, BY_PULL):
        client.forget()
        check_refused(client.run(broken + way), text)
        fill_cache(client, saved["me/vit"][0])
        assert client.run(f"{broken}answer(logits({way}))").answer == saved["me/vit"][1]
    assert hub.requests == []


# ------------------------------------------------------------------------------------ interrupted downloads
@pytest.mark.parametrize("way", [BY_NAME, BY_PULL, BY_TIMM])
def test_a_cut_download_leaves_nothing_and_the_next_call_completes_it(hub, client, saved, way):
    hub.fail("cut", path="/blobs/", after=20_000)
    check_refused(client.run(NO_PAUSES + way), r"hf-hub:me/vit\S*: model.safetensors cannot be downloaded from \S+: "
                                               "RemoteProtocolError: peer closed connection")
    assert not [path for path in client.home.rglob("*") if path.is_file() and path.stat().st_size >= 20_000]
    assert not list(client.home.rglob("model.safetensors"))
    hub.heal()
    assert client.run(f"answer(logits({way}))").answer == saved["me/vit"][1]


def test_storage_that_does_not_answer(hub, client):
    """The API answers, but the host of large files does not. huggingface_hub's timeout for downloads applies."""
    hub.fail("silence", path="/blobs/")
    check_refused(
        client.run(f"{NO_PAUSES}huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT = 0.2\n{BY_NAME}"),
        "model.safetensors cannot be downloaded from .*: TimeoutError")


def test_a_cache_that_cannot_be_written(hub, client, tmp_path):
    (tmp_path / "file").write_text("")
    check_refused(
        client.run(f"small(cache_dir={str(tmp_path / 'file')!r})"),
        "model.safetensors cannot be downloaded from .*: (NotADirectoryError|FileExistsError): .*file")


def test_a_truncated_file_in_the_cache(hub, client, saved):
    files = saved["me/vit"][0]
    fill_cache(client, {**files, "model.safetensors": files["model.safetensors"][:-100]})
    check_refused(client.run(BY_NAME), r"^WeightsError: \S+model.safetensors cannot be read as a checkpoint \(it is d")
