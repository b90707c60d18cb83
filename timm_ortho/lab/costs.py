"""Put counted and measured costs beside the paper's Tables 1a, 1b and 11 (`timm-ortho cost`)."""
from typing import Callable, Iterator, Optional, Sequence

import timm
import torch
from torch import nn

from .. import bench
from ..bench import flops
from ..connections import CONNECTIONS
from ..convert import connect
from ..model_sites import sites
from . import paper
from .reporting.page import Table, text_table

_VITS = ("vit_small", "vit_base")
_RESNETS = tuple(f"resnetv2_{depth}_cifar" for depth in (18, 34, 50, 101))
_MODULES = {  # a module of a ViT's block -> the paper's FLOPs for s tokens of width d, without the addition
    "attn": ("attention", "8sd² + 4s²d", lambda s, d: 8 * s * d**2 + 4 * s**2 * d),
    "mlp": ("MLP", "16sd²", lambda s, d: 16 * s * d**2)}
_FORMS = {  # connection -> its name in the table, the paper's FLOPs
    "linear": ("Linear", "sd", lambda s, d: s * d),
    "paper": ("Orthogonal, the paper's algorithm", "7sd + 2s", lambda s, d: 7 * s * d + 2 * s),
    "feature": ("Orthogonal-F, this package", "", None)}


def parameters() -> str:
    """Return Table 1a: FLOPs of a branch and of its connection, and parameters and FLOPs of whole models."""
    branches = [row for name in _VITS for row in _branches(name)]
    models = [row for name in (*_VITS, *_RESNETS) for row in _whole(name)]
    return "\n\n".join([
        text_table(Table(["model", "branch", "connection", "branch in the paper", "counted", "connection in the paper",
                          "counted"], branches)),
        text_table(Table(["model", "connection", "parameters", "FLOPs of products", "FLOPs of connections",
                          "added FLOPs, %"], models))])


def _branches(name: str) -> Iterator[list[str]]:
    for module, (branch, formula, stated) in _MODULES.items():
        for connection, (label, of_update, update) in _FORMS.items():
            model = on_meta(name, connection)
            counts, s, d = flops.count(model), model.patch_embed.num_patches + 1, model.embed_dim
            yield [paper.name("model", paper.architecture(name)), branch, label, f"{formula} = {stated(s, d):,}",
                   f"{flops.products(counts, f'blocks.0.{module}'):,}",
                   f"{of_update} = {update(s, d):,}" if update else "not in the paper",
                   f"{flops.updates(model, counts)[module == 'mlp']:,}"]


def _whole(name: str) -> Iterator[list[str]]:
    first: Optional[int] = None
    for connection in CONNECTIONS:
        model = on_meta(name, connection)
        counts = flops.count(model)
        of_branches, of_updates = flops.products(counts), sum(flops.updates(model, counts))
        first = of_updates if first is None else first
        yield [name, paper.name("connection", connection), f"{sum(p.numel() for p in model.parameters()):,}",
               f"{of_branches:,}", f"{of_updates:,}", f"{100 * (of_updates - first) / (of_branches + first):.3f}"]


def on_meta(name: str, connection: str) -> nn.Module:
    """Create a model with a connection on the meta device; `paper` is `flops.PaperConnection`."""
    with torch.device("meta"):
        model = connect(timm.create_model(f"{name}_ortho"), "feature" if connection == "paper" else connection)
    for site in sites(model) if connection == "paper" else ():
        block, _, attribute = site.name.rpartition(".")
        setattr(model.get_submodule(block), attribute, flops.PaperConnection(site.connection.dim, site.connection.eps))
    return model


def gamma() -> str:
    """Return Table 11: the mean width of the stream, divided by the number of blocks."""
    section = paper.numbers()["gamma"]
    rows = [[row["name"], f"{row['width']:g}", str(row["blocks"]), f"{row['gamma']:.2f}"]
            for row in section["models"].values()]
    return "\n\n".join([text_table(Table(["model", "width", "blocks", "γ"], rows)), f"{section['definition']}. "
                        "The ResNet-1001 of He et al. (2016) has 3 x 111 blocks of 64, 128 and 256 channels, γ = 0.45; "
                        "the paper's width is the mean of 16, 32 and 64."])


def overhead(device: Optional[str] = None) -> str:
    """Return Table 1b: training images per second with linear connections and with Orthogonal-F, measured in turns.

    On a GPU, all four models of the paper are measured in bfloat16, on a CPU two in float32 with small images.
    """
    on_gpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cuda")
    own = dict(models=_named((*_RESNETS[1:3], *_VITS))) if on_gpu else dict(
        models=_named(("vit_small", *_RESNETS[1:2])), batch_size=8, img_size=64)
    options = bench.resolve({"what": ["models"], "compile": False, "device": device, **own})
    with bench.as_in_training(options.device):
        rows = [row for group in bench.model_groups(options) if group.labels["step"] == "training"
                for row in _speeds(group, bench.measure(group.build(), options.repeats, bench.Clock(options.device)))]
    header = ["model", "layout", "images/s: linear", "Orthogonal-F", "overhead, %", "paper: linear", "Orthogonal-F",
              "overhead, %"]
    return text_table(Table(header, rows, 2))


def _named(models: Sequence[str]) -> list[str]:
    return [f"{name}_ortho" for name in models]


def _speeds(group: bench.Group, results: Sequence) -> Iterator[list[str]]:
    linear, ortho = bench.results.rows(group.labels, group.images, results)
    name = group.labels["model"].partition("(")[0]
    stated = paper.numbers()["throughput"][paper.architecture(name)]
    measured = ["not measured"] * 3
    if linear["images_per_s"] and ortho["images_per_s"]:
        speeds = linear["images_per_s"], ortho["images_per_s"]
        measured = [*(f"{speed:,.1f}" for speed in speeds), f"{100 * (1 - speeds[1] / speeds[0]):.2f}"]
    yield [group.labels["model"], group.labels["layout"], *measured, *(f"{value:,}" for value in stated)]


TABLES: dict[str, Callable[..., str]] = {"overhead": overhead, "parameters": parameters, "gamma": gamma}
