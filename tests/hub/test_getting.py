"""Getting weights: by a registered name, from a repository, from a folder; what goes wrong, and how soon that is said.

The models are in processes of their own (`hub_client.py`) that know no other Hub than the one of `hub_server.py`. Their
logits are compared bit for bit with this process's, so all have as many threads: one, by `conftest.py`.
"""
import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest
import timm
import torch
from helpers.hub_client import SOON, HubClient
from helpers.hub_server import HubServer
from safetensors.torch import load, save

from timm_ortho.connections import sites

pytestmark = pytest.mark.skipif(
    not timm.models._hub.has_hf_hub(), reason="this timm does not know the installed huggingface_hub (1.0.24 does)")

VIT = dict(img_size=8, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5, connection_eps=1e-4)
RESNET = dict(layers=[1, 1, 1, 1], channels=[8, 16, 24, 32], num_classes=5, connection="feature", connection_layers=[1])
MODELS = {"me/vit": ("vit_small_ortho", VIT), "me/resnet": ("resnetv2_18_cifar_orthog", RESNET)}
IMPORTS = f"VIT = {VIT!r}" + """
import hashlib, json, os, pathlib
import huggingface_hub, timm, torch
import timm_ortho

torch.manual_seed(0)
def logits(model):
    with torch.no_grad():
        y = model.eval()(torch.linspace(-2, 2, 192).reshape(1, 3, 8, 8))
    return hashlib.sha256(y.numpy().tobytes()).hexdigest()
def connections(model):
    return [repr(site.connection) for site in timm_ortho.sites(model)]
def small(**kwargs):
    overlay = dict(hf_hub_id="me/vit", num_classes=5, input_size=(3, 8, 8))
    return timm.create_model("vit_small_ortho", pretrained=True, pretrained_cfg_overlay=overlay, **{**VIT, **kwargs})
"""
BY_NAME, BY_PULL = "small()", "timm_ortho.pull('hf-hub:me/vit')"
BY_TIMM = "timm.create_model('hf-hub:me/vit', pretrained=True)"


def digest(model):
    with torch.no_grad():
        y = model.eval()(torch.linspace(-2, 2, 192).reshape(1, 3, 8, 8))
    return hashlib.sha256(y.numpy().tobytes()).hexdigest()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of each model: the files that timm saves, the digest of its logits, its connections."""
    made = {}
    for repo_id, (name, kwargs) in MODELS.items():
        torch.manual_seed(1)
        model = timm.create_model(name, **kwargs)
        folder = tmp_path_factory.mktemp("model")
        timm.models.save_for_hf(model, folder, model_args=kwargs, safe_serialization=True)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        made[repo_id] = (files, digest(model), [repr(site.connection) for site in sites(model)])
    return made


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def commit_changed(server, saved, change):
    """The ViT's weights once more, after ``change`` has been at its tensors."""
    tensors = load(saved["me/vit"][0]["model.safetensors"])
    change(tensors)
    server.commit("me/vit", {"model.safetensors": save(tensors)})


def shifted(tensors):
    tensors.update({name: tensor + 1 for name, tensor in tensors.items()})


@pytest.fixture
def server(server, saved):
    for repo_id, (files, _, _) in saved.items():
        server.commit(repo_id, files)
    return server


def refused(result, text, token=None):
    """Whether a run ended as it should: soon, with this in one line, and without the token."""
    assert result.error, f"nothing went wrong: {result.answer}"
    assert result.error.startswith("WeightsError: "), result.output
    assert "\n" not in result.error
    assert re.search(text, result.error), result.error
    assert result.seconds < SOON
    assert token is None or token not in result.output


def test_the_processes_have_one_thread_as_this_one(client):
    assert client.run("answer(torch.get_num_threads())").answer == torch.get_num_threads() == 1


# ------------------------------------------------------------------------------------------- what is there
@pytest.mark.parametrize("repo_id", list(MODELS))
@pytest.mark.parametrize("way", ["timm.create_model('hf-hub:{}', pretrained=True)", "timm_ortho.pull('{}')"])
def test_a_repository_restores_weights_architecture_and_connections(server, client, saved, repo_id, way):
    result = client.run(f"model = {way.format(repo_id)}; cfg = model.pretrained_cfg\n"
                        "answer([logits(model), connections(model), cfg.get('hf_hub_id'), cfg.get('file')])")
    assert result.answer == [*saved[repo_id][1:], repo_id, None], result.output
    assert not any(".bin" in request.path for request in server.requests)


@pytest.mark.parametrize("way", [
    "timm.create_model('local-dir:{}', pretrained=True)", "timm_ortho.pull('local-dir:{}')",
    "timm_ortho.pull(pathlib.Path('{}'))"])
def test_a_folder_does_too_and_asks_nobody(server, client, saved, tmp_path, way):
    files, logits, connections = saved["me/vit"]
    write(tmp_path, files)
    result = client.run(f"model = {way.format(tmp_path)}; cfg = model.pretrained_cfg\n"
                        "answer([logits(model), connections(model), cfg['source'], cfg['file']])")
    assert result.answer == [logits, connections, "local-dir", str(tmp_path)], result.output
    assert server.requests == []


def test_a_registered_name_downloads_once_and_then_asks_nobody(server, client, saved):
    code = "model = small(); answer([logits(model), model.pretrained_cfg['hf_hub_id'], 'file' in model.pretrained_cfg])"
    first = client.run(code)
    assert first.answer == [saved["me/vit"][1], "me/vit", False], first.output
    assert [r.status for r in server.requests if r.path == "/me/vit/resolve/main/model.safetensors"] == [302, 302]
    server.requests.clear()
    assert client.run(code).answer == first.answer
    assert server.requests == []


def test_a_revision_is_its_own(server, client, saved):
    server.repositories["me/vit"].tags["v1"] = server.repositories["me/vit"].branches["main"]
    commit_changed(server, saved, shifted)
    for way in ("timm_ortho.pull('me/vit{}')", "timm.create_model('hf-hub:me/vit{}', pretrained=True)"):
        tagged, newest = (client.run(f"answer(logits({way.format(at)}))").answer for at in ("@v1", ""))
        assert tagged == saved["me/vit"][1]
        assert newest not in (None, tagged)


def test_pull_takes_what_is_new_and_the_cache_where_there_is_no_hub(server, client, saved):
    code = "answer(logits(timm_ortho.pull('me/vit')))"
    assert client.run(code).answer == saved["me/vit"][1]
    commit_changed(server, saved, shifted)
    newest = client.run(code).answer
    assert newest not in (None, saved["me/vit"][1])
    server.fail(503)
    assert client.run(code).answer == newest


def test_another_cache_is_used_if_it_is_given(server, client, saved, tmp_path):
    result = client.run(f"answer(logits(small(cache_dir={str(tmp_path)!r})))")
    assert result.answer == saved["me/vit"][1], result.output
    assert list(tmp_path.glob("models--me--vit/snapshots/*/model.safetensors"))
    assert not list(client.home.glob("hub/models--*"))


def test_arguments_of_the_call_adapt_the_weights(server, client, saved):
    weights = load(saved["me/vit"][0]["model.safetensors"])
    result = client.run("""
model = timm_ortho.pull("me/vit", num_classes=3, in_chans=1, connection="hybrid")
features = timm_ortho.pull("me/vit", features_only=True, out_indices=[1])
answer([model.patch_embed.proj.weight.tolist(), model.head.weight.shape[0], connections(model)[0],
        features.model.blocks[0].mlp.fc1.weight.tolist(), model.blocks[0].mlp.fc1.weight.tolist()])
""")
    assert result.error is None, result.output
    stem, classes, connection, in_features, in_model = result.answer
    torch.testing.assert_close(torch.tensor(stem), weights["patch_embed.proj.weight"].sum(1, keepdim=True))
    assert classes == 3
    assert connection.startswith("HybridConnection")
    assert in_features == in_model == weights["blocks.0.mlp.fc1.weight"].tolist()


# ------------------------------------------------------------------------------------- what the Hub refuses
@pytest.mark.parametrize("way", [BY_NAME, BY_PULL])
@pytest.mark.parametrize(("fault", "text"), [
    (dict(what=401), r"the Hub does not know the token \(401 from \S+\); log in as somebody else \(`hf auth login`\) "
                     "and unset HF_TOKEN, or set it to a token with read access"),
    (dict(what=401, code="RepoNotFound"), r"no such repository, or it is private and not yours \(401\); check the na"),
    (dict(what=403), r"the Hub gives the token no read access to me/vit \(403 from \S+\); use one that has it$"),
    (dict(what=403, code="GatedRepo"), r"is gated \(403\); ask for access at http://127.0.0.1:\d+/me/vit and log in"),
    (dict(what=404), r"the Hub has no me/vit for the token, or not that revision \(404 from \S+\); check both names"),
    (dict(what=418), r"the Hub refuses it \(418 from \S+\); Client error '418"),
    (dict(what=404, code="RepoNotFound"), r"no such repository, or it is private and not yours \(404\)"),
    (dict(what=429), r"the Hub asks to slow down \(429 from \S+\); try again in 60 s, or log in as somebody else"),
    (dict(what=500), r"has a failure of its own \(500 from \S+\); try again later, see https://status.huggingface"),
    (dict(what=503), r"the Hub has a failure of its own \(503"),
])
def test_a_status_is_told_by_its_cause(server, client, way, fault, text):
    server.fail(path="/me/vit/", **fault)
    file = "config.json" if way == BY_PULL else "model.safetensors"
    refused(client.run(way), rf"^WeightsError: hf-hub:me/vit: {file} .*{text}", server.add_user("me"))
    assert len([r for r in server.requests if "/me/vit/" in r.path]) == 1


NO_NAMES = "import socket, time; socket.getaddrinfo = lambda *a, **k: time.sleep(60)\n"


@pytest.mark.parametrize("way", [BY_NAME, BY_PULL, NO_NAMES + BY_NAME])
def test_silence_is_told(server, client, way):
    server.fail("silence")
    refused(client.run(way), r"http://127.0.0.1:\d+ does not answer within 7 s; try again later, or check the network")


def test_a_server_that_is_no_hub_is_told(server, client):
    result = client.run("""
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
""")
    refused(result, r"answers, but not as a Hugging Face Hub does; check HF_ENDPOINT, the proxy and the firewall")


@pytest.mark.parametrize(("repository", "text"), [
    (dict(private=True), r"no such repository, or it is private and not yours \(404\)"),
    (dict(gated=True), r"is gated \(403\); ask for access at"),
])
def test_whose_repository_it_is(server, client, saved, repository, text):
    server.create_repo("them/vit", **repository)
    server.commit("them/vit", saved["me/vit"][0])
    refused(client.run("timm_ortho.pull('them/vit')"), text, server.add_user("me"))
    owner = server.add_user("them")
    result = client.run(f"os.environ['HF_TOKEN'] = {owner!r}; answer(logits(timm_ortho.pull('them/vit')))")
    assert result.answer == saved["me/vit"][1], result.output
    assert owner not in result.output
    assert server.leaks(owner) == server.leaks(server.add_user("me")) == []


def test_a_revision_and_a_file_that_are_not_there(server, client, saved):
    refused(client.run("timm_ortho.pull('me/vit@v9')"), r"hf-hub:me/vit@v9: config.json cannot be downloaded: the "
                                                        r"repository has no revision 'v9' \(404\); see .*/me/vit/refs")
    server.create_repo("me/vit")
    refused(client.run("timm_ortho.pull('me/vit')"),
            r"config.json cannot be downloaded: it is not in the repository \(404\); see .*/tree/main$")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A client whose Hub has gone: nothing listens at its port."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with HubServer(folder) as gone:
        endpoint = gone.endpoint
    with HubClient(folder, endpoint, imports=IMPORTS) as client:
        yield client


def cache_of(client, files):
    """A cache in which the ViT's files lie as huggingface_hub leaves them."""
    folder = client.home / "hub" / "models--me--vit"
    snapshot = folder / "snapshots" / ("c0ffee" + 34 * "0")
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    write(snapshot, files)


@pytest.mark.parametrize("way", [BY_NAME, BY_PULL])
def test_without_a_network_it_is_told_and_the_cache_loads(elsewhere, saved, way):
    elsewhere.forget()
    refused(elsewhere.run(way), r"http://127.0.0.1:\d+ cannot be reached \(Conn.*\); check the network, the proxy and "
                                r"HF_ENDPOINT")
    cache_of(elsewhere, saved["me/vit"][0])
    assert elsewhere.run(f"answer(logits({way}))").answer == saved["me/vit"][1]


def test_offline_it_is_told_and_the_cache_loads(served, tmp_path, saved):
    server, _ = served
    with HubClient(tmp_path, server.endpoint, imports=IMPORTS, HF_HUB_OFFLINE="1") as client:
        server.requests.clear()
        refused(client.run(BY_NAME), "hf-hub:me/vit: model.safetensors is not in the cache, and HF_HUB_OFFLINE forbids "
                                     "to download it; unset that, or run `hf download me/vit model.safetensors` where")
        cache_of(client, saved["me/vit"][0])
        for way in (BY_NAME, BY_PULL):
            result = client.run(f"answer(logits({way}))")
            assert result.answer == saved["me/vit"][1], result.output
        assert server.requests == []


# ------------------------------------------------------------------------------------------- interrupted
@pytest.mark.parametrize("way", [BY_NAME, BY_PULL, BY_TIMM])
def test_a_cut_download_leaves_nothing_and_the_next_completes_it(server, client, saved, way):
    server.fail("cut", path="/blobs/", after=20_000)
    refused(client.run(way), r"hf-hub:me/vit\S*: model.safetensors cannot be downloaded: the download was interrupted "
                             r"\(.*\) and nothing was kept; try again, and check that")
    assert not [path for path in client.home.rglob("*") if path.is_file() and path.stat().st_size >= 20_000]
    assert not list(client.home.rglob("model.safetensors"))
    server.heal()
    assert client.run(f"answer(logits({way}))").answer == saved["me/vit"][1]


def test_a_storage_that_is_silent_is_told_by_its_own_name(server, client):
    """The Hub answers and the host that holds the content does not. How long that takes is the client's to say."""
    server.fail("silence", path="/blobs/")
    result = client.run(f"huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT = 0.2\n{BY_NAME}")
    refused(result, r"the download was interrupted \(TimeoutError.*\) and nothing was kept; try again")


def test_a_cache_that_cannot_be_written_is_told(server, client, tmp_path):
    (tmp_path / "file").write_text("")
    refused(client.run(f"small(cache_dir={str(tmp_path / 'file')!r})"),
            r"model.safetensors cannot be downloaded: (NotADirectoryError|FileExistsError): .*file")


def test_a_file_that_was_cut_short_in_the_cache_is_told(server, client, saved):
    files = saved["me/vit"][0]
    cache_of(client, {**files, "model.safetensors": files["model.safetensors"][:-100]})
    result = client.run(BY_NAME)
    refused(result, r"^WeightsError: hf-hub:me/vit: model.safetensors cannot be read \(.*\); delete \S+ and try again")
    Path(re.search(r"delete (\S+) and", result.error)[1]).unlink()
    assert client.run("answer(logits(small()))").answer == saved["me/vit"][1]


# ------------------------------------------------------------------------------------------ what is in it
class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("way", [BY_NAME, BY_PULL, BY_TIMM, "timm.create_model('local-dir:{}', pretrained=True)",
                                 "timm_ortho.pull('local-dir:{}')"])
def test_a_pickle_is_never_read(server, client, saved, tmp_path, way):
    mark, folder = tmp_path / "executed", tmp_path / "folder"
    files = {"config.json": saved["me/vit"][0]["config.json"], "pytorch_model.bin": pickle.dumps(Evil(mark))}
    write(folder, files)
    server.create_repo("me/vit")
    server.commit("me/vit", files)
    text = (r"is not in the repository \(404\); see .*/tree/\w+; pickles, such as pytorch_model.bin, are never read$"
            if "{}" not in way else "there is no model.safetensors among config.json, pytorch_model.bin; pickles are n")
    refused(client.run(way.format(folder)), text)
    assert not mark.exists()
    assert not any("/blobs/" in request.path for request in server.requests)
    pickle.loads(files["pytorch_model.bin"]).close()
    assert mark.exists()  # it would have


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_a_configuration_that_names_a_pickle_is_refused(server, client, name):
    code = f"timm.create_model('vit_small_ortho', pretrained=True, pretrained_cfg_overlay=dict(hf_hub_id='me/vit', " \
           f"hf_hub_filename={name!r}))"
    refused(client.run(code), f"hf-hub:me/vit: {name} is not a safetensors file, and pickles are never read")
    assert server.requests == []


@pytest.mark.parametrize("architecture", ["vit_small_ortho", "test_vit"])
def test_a_repository_that_names_a_pickle_is_refused(server, client, saved, tmp_path, architecture):
    mark = tmp_path / "executed"

    def change(config):
        config.update(architecture=architecture, model_args={})
        config["pretrained_cfg"]["hf_hub_filename"] = "evil.bin"

    server.commit("me/vit", {**with_config(saved["me/vit"][0], change), "evil.bin": pickle.dumps(Evil(mark))})
    refused(client.run(BY_PULL), "hf-hub:me/vit: evil.bin is not a safetensors file, and pickles are never read")
    assert not mark.exists()


def with_config(files, change):
    config = json.loads(files["config.json"])
    change(config)
    return {**files, "config.json": json.dumps(config).encode()}


CONFIGS = {
    "unknown argument": (
        lambda config: config["model_args"].update(width=3), [BY_PULL, BY_TIMM],
        r"config.json and of the call do not make a model: .*__init__\(\) got an unexpected keyword argument 'width'"),
    "unknown argument of the connection": (
        lambda config: config["model_args"].update(connection_epsilon=1), [BY_PULL, BY_TIMM],
        "do not make a model: unknown argument 'connection_epsilon'.*did you mean 'connection_eps'"),
    "unknown connection": (
        lambda config: config["model_args"].update(connection="futile"), [BY_PULL, BY_TIMM],
        "do not make a model: unknown connection 'futile', known are 'linear', 'feature'"),
    "unknown architecture": (
        lambda config: config.update(architecture="vit_smal_ortho"), [BY_PULL],
        r"its config.json names the architecture 'vit_smal_ortho', which is not registered with timm \S+: import the "
        "package that has it, or update timm; did you mean 'vit_small_ortho'"),
    "no architecture": (lambda config: config.pop("architecture"), [BY_PULL],
                        "its config.json is none of timm's: KeyError: 'architecture'"),
}


@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind, (_, ways, _) in CONFIGS.items() for way in ways])
@pytest.mark.parametrize("place", ["hf-hub:me/vit", "local-dir:{}"])
def test_a_config_that_makes_no_model(server, client, saved, tmp_path, kind, way, place):
    change, _, text = CONFIGS[kind]
    files = with_config(saved["me/vit"][0], change)
    server.commit("me/vit", files)
    write(tmp_path, files)
    result = client.run(way.replace("hf-hub:me/vit", place).format(tmp_path))
    refused(result, rf"{re.escape(place.format(tmp_path))}(@\w+)?: .*{text}")


def test_timm_itself_tells_an_unknown_architecture(server, client, saved):
    server.commit("me/vit", with_config(saved["me/vit"][0], CONFIGS["unknown architecture"][0]))
    result = client.run(BY_TIMM)
    assert result.error == "RuntimeError: Unknown model (vit_smal_ortho)"
    assert result.seconds < SOON


def test_a_config_that_is_no_json(server, client):
    server.commit("me/vit", {"config.json": b"<html>"})
    refused(client.run(BY_PULL), "hf-hub:me/vit: its config.json is none of timm's: JSONDecodeError: Expecting value")


def test_a_folder_without_a_config(client, tmp_path):
    folder = f"local-dir:{tmp_path}"
    refused(client.run(f"timm_ortho.pull('{folder}')"), f"{folder}: there is no config.json in it")


@pytest.mark.parametrize("name", ["", "a/b/c", "/some/folder"])
def test_a_name_that_is_none(client, name):
    refused(client.run(f"timm_ortho.pull({name!r})"), f"'{name}' is not the name of a repository: give it as "
            f"owner/name, of letters, digits, '-', '_' and '.'; and a folder as 'local-dir:{name or 'DIR'}'")


def nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[:2] = float("nan")
    return tensor


WEIGHTS = {
    "missing": (lambda t: t.pop("blocks.1.mlp.fc1.weight"), "missing: blocks.1.mlp.fc1.weight$"),
    "many missing": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("blocks.1")],
        r"missing: blocks.1.attn.qkv.weight, blocks.1.attn.qkv.bias, blocks.1.attn.proj.weight and 5 more$"),
    "surplus": (lambda t: t.update(extra=torch.zeros(2)), "surplus: extra$"),
    "misshapen": (
        lambda t: t.update({"blocks.0.mlp.fc1.bias": torch.zeros(9)}),
        r"of another shape: blocks.0.mlp.fc1.bias \(\(9,\), not \(128,\)\)$"),
    "of another width of input": (
        lambda t: t.update({"patch_embed.proj.weight": torch.zeros(32, 2, 4, 4)}),
        r"of another shape: patch_embed.proj.weight \(\(32, 2, 4, 4\), not \(32, 3, 4, 4\)\)$"),
    "NaN": (
        lambda t: t.update({"norm.weight": nan(t["norm.weight"])}), r"not finite: norm.weight \(2 of 32 values\)$"),
    "infinite": (
        lambda t: t.update(cls_token=t["cls_token"] + float("inf")), r"not finite: cls_token \(32 of 32 values\)$"),
    "all of it": (
        lambda t: t.update(extra=nan(t.pop("norm.bias"))),
        r"missing: norm.bias; surplus: extra; not finite: extra \(2 of 32 values\)$"),
}


# with another number of classes timm loads some of them without a word, or leaves a layer random
@pytest.mark.parametrize(("kind", "way"), [
    *product(WEIGHTS, [BY_NAME, BY_TIMM]),
    *product(["missing", "surplus", "misshapen", "NaN"], ["small(num_classes=3)"]),
])
def test_weights_that_do_not_fit(server, client, saved, kind, way):
    change, text = WEIGHTS[kind]
    commit_changed(server, saved, change)
    refused(client.run(way), f"^WeightsError: hf-hub:me/vit: the weights do not fit vit_small_ortho: {text}")


def test_a_file_that_is_no_safetensors(server, client):
    server.commit("me/vit", {"model.safetensors": b"<html>no such thing</html>"})
    refused(client.run(BY_NAME), r"model.safetensors cannot be read \(.*\); delete \S+ and try again")


# ---------------------------------------------------------------------------------------- a second opinion
OLAH = os.environ.get("OLAH") or shutil.which("olah-cli")


@pytest.fixture(scope="module")
def olah(tmp_path_factory, saved):
    """An endpoint of olah's, an independent server, with the ViT as a local repository of git and LFS."""
    if OLAH is None:
        pytest.skip("olah is not there: pip install it, in an environment of its own, and give OLAH=.../bin/olah-cli")
    folder = tmp_path_factory.mktemp("olah")
    repository = folder / "mirrors" / "models" / "me" / "vit"
    repository.mkdir(parents=True)
    for name, content in saved["me/vit"][0].items():
        if name.endswith(".safetensors"):
            sha256 = hashlib.sha256(content).hexdigest()
            kept = repository / ".git" / "lfs" / "objects" / sha256[:2] / sha256[2:4] / sha256
            kept.parent.mkdir(parents=True)
            kept.write_bytes(content)
            content = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
        (repository / name).write_bytes(content)
    for arguments in ("init --quiet -b main", "add .", "-c user.name=me -c user.email=me@here commit --quiet -m model"):
        subprocess.run(["git", *arguments.split()], cwd=repository, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "olah.toml").write_text(
        f'[basic]\nhost = "127.0.0.1"\nport = {port}\nrepos-path = "{folder}/repos"\n'
        f'mirrors-path = ["{folder}/mirrors"]\n[accessibility]\noffline = true\n')
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [OLAH, "--config", str(folder / "olah.toml"), "--log-path", str(folder / "logs")],
            stdout=log, stderr=log, cwd=folder, env=environment)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_olah_serves_the_same(olah, tmp_path, saved):
    _, logits, connections = saved["me/vit"]
    with HubClient(tmp_path, olah, imports=IMPORTS) as client:
        for way in (BY_TIMM, BY_PULL, BY_NAME):
            client.forget()
            result = client.run(f"model = {way}; answer([logits(model), connections(model)])")
            assert result.answer == [logits, connections], result.output
        # it answers any missing file as a missing repository
        refused(client.run("timm_ortho.pull('me/none')"),
                "hf-hub:me/none: config.json cannot be downloaded: there is no such")
