"""Small models in repositories of the mock Hub, and checks of a client's results."""
import hashlib
import re

import timm
import torch
from safetensors.torch import load, save

from timm_ortho import sites

VIT = dict(img_size=8, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5, connection_eps=1e-4)
RESNET = dict(layers=[1, 1, 1, 1], channels=[8, 16, 24, 32], num_classes=5, connection="feature", connection_layers=[1])
MODELS = {"me/vit": ("vit_small_ortho", VIT), "me/resnet": ("resnetv2_18_cifar_orthog", RESNET)}
IMPORTS = f"VIT = {VIT!r}" + """
import hashlib, json, os, pathlib, runpy, sys
import huggingface_hub, timm, torch
import timm_ortho
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download
from timm_ortho import cli, hub

torch.manual_seed(0)
def logits(model, chans=3, size=8):
    with torch.no_grad():
        y = model.eval()(torch.linspace(-2, 2, chans * size * size).reshape(1, chans, size, size))
    return hashlib.sha256(y.numpy().tobytes()).hexdigest()
def connections(model):
    return [repr(site.connection) for site in timm_ortho.sites(model)]
def small(**kwargs):
    overlay = dict(hf_hub_id="me/vit", num_classes=5, input_size=(3, 8, 8))
    return timm.create_model("vit_small_ortho", pretrained=True, pretrained_cfg_overlay=overlay, **{**VIT, **kwargs})
def make(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **kwargs).eval()
def tiny(seed=0):
    torch.manual_seed(seed)
    return timm.create_model("vit_small_ortho", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2).eval()
def pull(name):
    return timm.create_model("hf-hub:" + name, pretrained=True).eval()
"""
BY_NAME, BY_PULL = "small()", "timm_ortho.pull('hf-hub:me/vit')"
BY_TIMM = "timm.create_model('hf-hub:me/vit', pretrained=True)"
# Code that a client runs before a call, so that a test waits less.
SHORT_TIMEOUT = "huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT = 1.0\n"
NO_PAUSES = "import time; time.sleep = lambda seconds: None\n"  # between huggingface_hub's attempts to download
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
"""  # a server that is not a Hub


def digest(model):
    """Return a hash of a model's logits."""
    with torch.no_grad():
        y = model.eval()(torch.linspace(-2, 2, 192).reshape(1, 3, 8, 8))
    return hashlib.sha256(y.numpy().tobytes()).hexdigest()


def saved_models(folder):
    """Return ``{repository: (files that timm saves, digest of the logits, connections)}``."""
    saved = {}
    for repo_id, (name, kwargs) in MODELS.items():
        torch.manual_seed(1)
        model, target = timm.create_model(name, **kwargs), folder / name
        timm.models.save_for_hf(model, target, model_args=kwargs, safe_serialization=True)
        files = {path.name: path.read_bytes() for path in target.iterdir()}
        saved[repo_id] = (files, digest(model), [repr(site.connection) for site in sites(model)])
    return saved


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def commit_changed(server, saved, change):
    """Commit the ViT's weights after ``change`` has modified the dict of tensors."""
    tensors = load(saved["me/vit"][0]["model.safetensors"])
    change(tensors)
    server.commit("me/vit", {"model.safetensors": save(tensors)})


def shifted(tensors):
    tensors.update({name: tensor + 1 for name, tensor in tensors.items()})


def fill_cache(client, files):
    """Put the ViT's files into the client's cache, in huggingface_hub's layout."""
    folder = client.home / "hub" / "models--me--vit"
    snapshot = folder / "snapshots" / ("c0ffee" + 34 * "0")
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    write(snapshot, files)


def check_refused(result, text, token=None):
    """Check that a run failed with a one-line error that matches ``text``, and printed no token."""
    assert result.error, f"no error, but {result.answer}"
    assert result.error.startswith("WeightsError: "), result.output
    assert "\n" not in result.error
    assert re.search(text, result.error), result.error
    assert token is None or token not in result.output
