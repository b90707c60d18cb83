"""Run `timm-ortho bench` on tiny shapes and models, and read its CSV."""
import csv
from functools import partial

import torch

from timm_ortho import cli
from timm_ortho.bench.options import architecture

TINY_VIT = ["--models", "vit_small", "--img-size", "32", "--model-kwargs", "depth=1", "embed_dim=32", "num_heads=2"]
# This backend traces and differentiates like torch.compile, but skips code generation, which takes a minute.
TRACED = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")


def read(folder):
    with open(folder / "bench.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run(folder, *arguments):
    assert cli.main(["bench", "--device", "cpu", "--output", str(folder), *arguments]) == 0
    return read(folder)


def tiny_vit(name="vit_small_ortho"):
    return architecture(name, 2, None, dict(img_size=32, depth=1, embed_dim=32, num_heads=2))
