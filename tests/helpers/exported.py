"""Tiny models for exports, and functions that read exported folders."""
import json

import timm
import torch

from .trained_runs import TINY

VIT = dict(TINY, num_classes=7)


def tiny(name="vit_small_ortho", seed=0, **kwargs):
    torch.manual_seed(seed)
    return timm.create_model(name, **{**VIT, **kwargs}).eval()


def loaded(folder):
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def config(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def logits(model, chans=3, size=16):
    images = torch.randn(2, chans, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(images)
