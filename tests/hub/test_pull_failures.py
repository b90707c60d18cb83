"""Test that failures of the Hub, the network and the cache are reported soon, in one line with the cause."""
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hub_client import HubClient
from helpers.hub_models import (
    BY_NAME,
    BY_PULL,
    BY_TIMM,
    IMPORTS,
    NO_PAUSES,
    SHORT_TIMEOUT,
    SLOW_DNS,
    check_refused,
    fill_cache,
)
from helpers.hub_server import HubServer

NO_HUB = """
from http.server import BaseHTTPRequestHandler, HTTPServer
import threading
class Page(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()
    log_message = lambda *arguments: None
page = HTTPServer(("127.0.0.1", 0), Page)
threading.Thread(target=page.serve_forever, daemon=True).start()
constants = huggingface_hub.constants
constants.ENDPOINT = f"http://127.0.0.1:{page.server_port}"
constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + "/{repo_id}/{revision}/{filename}"
small()
"""


# ------------------------------------------------------------------------------------ refusals of the Hub
@pytest.mark.parametrize("way", [BY_NAME, BY_PULL])
@pytest.mark.parametrize(("fault", "text"), [
    (dict(what=401), r"the Hub does not accept the token \(401 from \S+\); log in with another account \(`hf auth "
                     "login`\\) and unset HF_TOKEN, or set it to a token with read access"),
    (dict(what=401, code="RepoNotFound"), r"the repository does not exist, or is private and not yours \(401\); check"),
    (dict(what=403), r"gives the token no read access to me/vit \(403 from \S+\); use a token with read access$"),
    (dict(what=403, code="GatedRepo"), r"is gated \(403\); ask for access at http://127.0.0.1:\d+/me/vit and log in"),
    (dict(what=404),
     r"the Hub has no repository me/vit that the token can read, or the repository has no such revision "
     r"\(404 from \S+\); check the names of the repository and the revision"),
    (dict(what=404, code="RepoNotFound"), r"the repository does not exist, or is private and not yours \(404\)"),
    (dict(what=418), r"the Hub refuses the request \(418 from \S+\); Client error '418"),
    (dict(what=429), r"the Hub limits the rate of requests \(429 from \S+\); try again in 60 s, or log in with"),
    (dict(what=500), r"the Hub failed \(500 from \S+\); try again later, see https://status.huggingface"),
    (dict(what=503), r"the Hub failed \(503"),
])
def test_an_error_status(hub, client, way, fault, text):
    hub.fail(path="/me/vit/", **fault)
    file = "config.json" if way == BY_PULL else "model.safetensors"
    check_refused(client.run(way), rf"^WeightsError: hf-hub:me/vit: {file} .*{text}", hub.add_user("me"))
    assert len([request for request in hub.requests if "/me/vit/" in request.path]) == 1  # no retries


@pytest.mark.parametrize(("repository", "text"), [
    (dict(private=True), r"the repository does not exist, or is private and not yours \(404\)"),
    (dict(gated=True), r"is gated \(403\); ask for access at"),
])
def test_a_repository_of_another_user(hub, client, saved, repository, text):
    hub.create_repo("them/vit", **repository)
    hub.commit("them/vit", saved["me/vit"][0])
    check_refused(client.run("timm_ortho.pull('them/vit')"), text, hub.add_user("me"))
    owner = hub.add_user("them")
    result = client.run(f"os.environ['HF_TOKEN'] = {owner!r}; answer(logits(timm_ortho.pull('them/vit')))")
    assert result.answer == saved["me/vit"][1], result.output
    assert owner not in result.output
    assert hub.leaks(owner) == hub.leaks(hub.add_user("me")) == []


def test_a_missing_revision_or_file(hub, client):
    check_refused(
        client.run("timm_ortho.pull('me/vit@v9')"),
        r"hf-hub:me/vit@v9: config.json cannot be downloaded: the repository has no revision 'v9' \(404\); see .*/refs")
    hub.create_repo("me/vit")
    check_refused(
        client.run("timm_ortho.pull('me/vit')"),
        r"config.json cannot be downloaded: it is not in the repository \(404\); see .*/tree/main$")


# --------------------------------------------------------------------------------------------- no answers
@pytest.mark.parametrize("way", [SHORT_TIMEOUT + BY_NAME, SHORT_TIMEOUT + BY_PULL, SLOW_DNS + BY_NAME])
def test_no_answer(hub, client, way):
    hub.fail("silence")
    check_refused(client.run(way), r"http://127.0.0.1:\d+ does not answer in time; try again later, or check")


def test_a_longer_timeout_of_huggingface_hub_is_used(monkeypatch):
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "60")
    code = "from timm_ortho.hub_client.errors import *; print(REQUEST_TIMEOUT, TOTAL_TIMEOUT)"
    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert printed.split() == ["60.0", "62.0"]


def test_a_server_that_is_not_a_hub(hub, client):
    check_refused(
        client.run(NO_HUB), "does not answer like a Hugging Face Hub; check HF_ENDPOINT, the proxy and the firewall")


@pytest.fixture(scope="module")
def disconnected(tmp_path_factory):
    """Return a client whose endpoint has no server."""
    folder = tmp_path_factory.mktemp("disconnected")
    with HubServer(folder) as gone:
        endpoint = gone.endpoint
    with HubClient(folder, endpoint, IMPORTS) as client:
        yield client


@pytest.mark.parametrize("way", [BY_NAME, BY_PULL])
def test_without_a_network_only_the_cache_loads(disconnected, saved, way):
    disconnected.forget()
    check_refused(
        disconnected.run(way),
        r"http://127.0.0.1:\d+ cannot be reached \(Conn.*\); check the network, the proxy and HF_ENDPOINT")
    fill_cache(disconnected, saved["me/vit"][0])
    assert disconnected.run(f"answer(logits({way}))").answer == saved["me/vit"][1]


def test_offline_only_the_cache_loads(server, tmp_path, saved):
    with HubClient(tmp_path, server.endpoint, IMPORTS, HF_HUB_OFFLINE="1") as client:
        check_refused(
            client.run(BY_NAME), "hf-hub:me/vit: model.safetensors is not in the cache, and HF_HUB_OFFLINE forbids "
                                 "downloads; unset it, or run `hf download me/vit model.safetensors` on a machine")
        check_refused(client.run(BY_PULL.replace("me/vit", "me/vit@v1")), r"`hf download me/vit \S+ --revision v1` on")
        assert client.run("hub.push(tiny(), 'me/model')").error == (
            "PublishError: HF_HUB_OFFLINE is set, so me/model cannot be reached: unset it, or write the files without "
            "uploading them (--dry-run, hub.export)")
        fill_cache(client, saved["me/vit"][0])
        for way in (BY_NAME, BY_PULL):
            result = client.run(f"answer(logits({way}))")
            assert result.answer == saved["me/vit"][1], result.output
        assert server.requests == []


# ------------------------------------------------------------------------------------ interrupted downloads
@pytest.mark.parametrize("way", [BY_NAME, BY_PULL, BY_TIMM])
def test_a_cut_download_leaves_nothing_and_the_next_call_completes_it(hub, client, saved, way):
    hub.fail("cut", path="/blobs/", after=20_000)
    check_refused(client.run(NO_PAUSES + way), r"hf-hub:me/vit\S*: model.safetensors cannot be downloaded: the "
                                               r"download was interrupted \(.*\) and nothing was kept; try again, and")
    assert not [path for path in client.home.rglob("*") if path.is_file() and path.stat().st_size >= 20_000]
    assert not list(client.home.rglob("model.safetensors"))
    hub.heal()
    assert client.run(f"answer(logits({way}))").answer == saved["me/vit"][1]


def test_storage_that_does_not_answer(hub, client):
    """The API answers, but the host of large files does not. huggingface_hub's timeout for downloads applies."""
    hub.fail("silence", path="/blobs/")
    check_refused(
        client.run(f"{NO_PAUSES}huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT = 0.2\n{BY_NAME}"),
        r"the download was interrupted \(TimeoutError.*\) and nothing was kept; try again")


def test_a_cache_that_cannot_be_written(hub, client, tmp_path):
    (tmp_path / "file").write_text("")
    check_refused(
        client.run(f"small(cache_dir={str(tmp_path / 'file')!r})"),
        r"model.safetensors cannot be downloaded: (NotADirectoryError|FileExistsError): .*file")


def test_a_truncated_file_in_the_cache(hub, client, saved):
    files = saved["me/vit"][0]
    fill_cache(client, {**files, "model.safetensors": files["model.safetensors"][:-100]})
    result = client.run(BY_NAME)
    check_refused(result, r"^WeightsError: hf-hub:me/vit: model.safetensors cannot be read \(.*\); delete \S+ and try")
    Path(re.search(r"delete (\S+) and", result.error)[1]).unlink()
    assert client.run("answer(logits(small()))").answer == saved["me/vit"][1]
