"""Exported folders in transformers: TimmWrapper, pipelines, backbones, and the error without `import timm_ortho`."""
import subprocess
import sys
from types import SimpleNamespace

import pytest
import timm
import torch
from helpers.pages import text_of
from PIL import Image
from timm.data import create_transform
from torch.testing import assert_close as same

import timm_ortho
from timm_ortho import hub

transformers = pytest.importorskip("transformers", minversion="5")

VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
SWIN = dict(img_size=56, embed_dim=24, depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4), num_classes=5)
RESNET = dict(channels=(8, 8, 8, 8), stem_chs=8, num_classes=5)
MODELS = {
    "hybrid": ("vit_small_ortho", dict(VIT, connection="hybrid", connection_start="linear"), 32),
    "global in one layer": ("vit_small_orthog", dict(VIT, connection_prob=0.5, connection_layers=[1]), 32),
    "one channel": ("vit_small_ortho", dict(VIT, in_chans=1), 32),
    "Swin's position index": ("swin_tiny_patch4_window7_224_ortho", SWIN, 56),
    "BatchNorm": ("resnetv2_18_ortho", RESNET, 64),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def trained(name, arguments, size):
    """Return a model whose weights and BatchNorm statistics have changed, and images."""
    torch.manual_seed(0)
    model, channels = timm.create_model(name, **arguments).train(), arguments.get("in_chans", 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        for _ in range(3):
            model(1 + 3 * torch.randn(4, channels, size, size))
    return model.eval(), torch.randn(2, channels, size, size)


def connections(model):
    return [(site.kind, str(site.connection)) for site in timm_ortho.sites(model)]


@pytest.mark.parametrize("case", MODELS)
def test_an_exported_folder_loads_with_the_same_logits(case, tmp_path):
    model, images = trained(*MODELS[case])
    hub.export(model, tmp_path / "exported", "me/model")
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "exported").eval()
    same(loaded(images).logits, model(images))  # memory alignment can change the last bit of a convolution
    assert connections(loaded) == connections(model)
    features = transformers.AutoModel.from_pretrained(tmp_path / "exported").eval()
    same(features(images).last_hidden_state, model.forward_features(images))
    loaded.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "saved").eval()
    same(again(images).logits, model(images))
    same(timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()(images), model(images))


def test_pipeline(tmp_path):
    model, _ = trained(*MODELS["BatchNorm"])
    hub.export(model, tmp_path, "me/model", labels=list("abcde"))
    image = Image.effect_noise((80, 60), 90).convert("RGB")
    scores = transformers.pipeline("image-classification", model=str(tmp_path))(image)
    pixels = create_transform(**timm.data.resolve_data_config({}, model=model))(image)[None]
    expected = dict(zip("abcde", model(pixels).softmax(-1)[0].tolist(), strict=True))
    assert {score["label"]: score["score"] for score in scores} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("case", ["BatchNorm", "Swin's position index"])
def test_backbones_with_their_state_loaded_again(case, tmp_path):
    """transformers 5.24 resets BatchNorm statistics of timm backbones. The lines in docs/neighbours.md restore them."""
    model, images = trained(*MODELS[case])
    hub.export(model, tmp_path, "me/model")
    name = f"local-dir:{tmp_path}"
    config = transformers.TimmBackboneConfig(backbone=name, out_indices=(1, 2))
    for backbone in (transformers.TimmBackbone.from_pretrained(name, out_indices=(1, 2)),
                     transformers.AutoBackbone.from_config(config, pretrained=True)):
        timms = timm.create_model(name, pretrained=True, features_only=True, out_indices=(1, 2)).eval()
        backbone._backbone.load_state_dict(timms.state_dict())
        same(list(backbone.eval()(images).feature_maps), timms(images))
        assert connections(backbone) == connections(timms) != []


def test_auto_backbone_refuses_a_pushed_model(tmp_path, monkeypatch):
    hub.export(trained(*MODELS["hybrid"])[0], tmp_path, "me/model")
    found = SimpleNamespace(repo_exists=lambda name: True)
    monkeypatch.setattr("transformers.models.auto.auto_factory.hf_api", lambda: found)
    with pytest.raises(ValueError, match=r"Unrecognized configuration class .*TimmWrapperConfig"):
        transformers.AutoBackbone.from_pretrained(tmp_path)


@pytest.mark.slow
def test_the_error_without_the_import_names_the_import(tmp_path):
    model, _ = trained(*MODELS["hybrid"])
    hub.export(model, tmp_path, "me/model")
    code = """
import sys, timm, transformers
for load in (lambda folder: timm.create_model("local-dir:" + folder),
             transformers.AutoModelForImageClassification.from_pretrained,
             lambda folder: transformers.pipeline("image-classification", model=folder)):
    try:
        load(sys.argv[1])
    except (RuntimeError, ImportError) as error:
        print(f"{type(error).__name__}: {error}")
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["RuntimeError:", "ImportError:", "ImportError:"], done.stderr
    assert all("vit_small_ortho.import_timm_ortho" in line for line in lines)
    quoted = text_of("hub.md")
    assert all(line.partition(" (1.")[0].replace("vit_small", "vit_base") in quoted for line in lines)
