"""Show the residual additions of a model for one batch, as a text table or a plot.

`timm-ortho show` prints :func:`as_text` and writes :func:`as_svg`.
"""
import math
from pathlib import Path
from typing import Any, List, Mapping, Optional, Tuple

import torch
from timm.data import create_transform
from torch import Tensor, nn

from .._images import data_config, opened
from .._text import aligned, svg_text
from ..model_sites import Site, sites
from .dynamics import SiteDynamics, record_dynamics

_LARGEST = 2**14  # pixels of an edge
_BAR = 10  # length of the bar of a cosine of 1 or -1, in characters

MeasuredSites = List[Tuple[Site, SiteDynamics]]


def measured_sites(model: nn.Module, images: Tensor) -> MeasuredSites:
    """Run ``model`` once in evaluation mode on images ``[B, C, H, W]``, and measure each site.

    >>> model = timm.create_model("vit_test_ortho")
    >>> as_text(measured_sites(model, batch(model))).splitlines()[0].split()[:7]
    ['block', 'site', 'connection', '|x|²', '|f∥|²', '|f⊥|²', 'cosine']
    """
    connected = sites(model)
    if not connected:
        raise ValueError("the model has no connections; use a variant, or call timm_ortho.connect first")
    return list(zip(connected, record_dynamics(model, images, connected), strict=True))


def as_text(measured: MeasuredSites, ascii_only: bool = False) -> str:
    """Return a text table with a bar for each cosine, from -1 to 1. ``ascii_only`` is for the header.

    If a connection has groups of channels, an additional column shows the range of the groups' cosines.
    """
    scale = "-1".ljust(_BAR) + "0" + "1".rjust(_BAR)
    squares = ("|x|^2", "|f_par|^2", "|f_orth|^2") if ascii_only else ("|x|²", "|f∥|²", "|f⊥|²")
    table: List[Tuple[str, ...]] = [("block", "site", "connection", *squares, "cosine", scale)]
    for (layer, kind, _, connection), means in measured:
        norms = [f"{value:.4g}" for value in (means.stream, means.parallel, means.orthogonal)]
        table.append((str(layer), kind, connection.name, *norms, f"{means.cosine:+.3f}", _bar(means.cosine)))
    if any(means.cosines for _, means in measured):
        ranges = [f"{min(means.cosines):+.3f} to {max(means.cosines):+.3f}" if means.cosines else ""
                  for _, means in measured]
        table = [(*line, text) for line, text in zip(table, ["cosines of groups", *ranges], strict=True)]
    return "\n".join(aligned(table, "><<>>>><<"[:len(table[0])]))


def _bar(cosine: float) -> str:
    """Return a bar, for example `       ===|          ` for -0.3."""
    filled = 0 if math.isnan(cosine) else min(_BAR, round(abs(cosine) * _BAR))
    if cosine < 0:
        return ("=" * filled).rjust(_BAR) + "|" + " " * _BAR
    return " " * _BAR + "|" + ("=" * filled).ljust(_BAR)


def as_svg(measured: MeasuredSites, path: Path, title: str = "") -> None:
    """Plot |x|² and the cosine of each site into an SVG file, the first block at the top. Requires matplotlib."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(site.connection.name for site, _ in measured))
    colors = [f"C{names.index(site.connection.name)}" for site, _ in measured]
    figure = Figure(figsize=(9, 1.2 + 0.22 * len(measured)), layout="constrained")
    norm, cosine = figure.subplots(1, 2, sharey=True)
    positions = range(len(measured))
    norm.barh(positions, [means.stream for _, means in measured], color=colors)
    cosine.barh(positions, [means.cosine for _, means in measured], color=colors)
    cosine.axvline(0, color="#222222", linewidth=0.9)
    cosine.set_xlim(-1, 1)
    for axes, label in ((norm, "|x|² of the stream"), (cosine, "cosine of x and f")):
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    norm.set_yticks(positions, [f"block {site.layer}  {site.kind}" for site, _ in measured], fontsize=8)
    norm.invert_yaxis()
    for index, name in enumerate(names):
        cosine.bar([0], [0], color=f"C{index}", label=name)
    cosine.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10, parse_math=False)  # a path may contain $
    path.write_text(svg_text(figure, title), encoding="utf-8")


def batch(model: nn.Module, image: Optional[Path] = None, config: Optional[Mapping[str, Any]] = None) -> Tensor:
    """Return one image, preprocessed by timm's evaluation transform, or four noise images from a fixed seed.

    Args:
        model: Its data configuration is used if ``config`` is None.
        image: Path of an image file; None for noise. A file that cannot be used raises a ValueError.
        config: A timm data configuration.
    """
    config = config or data_config(model, {})
    channels = config["input_size"][0]
    if image is None:
        return torch.randn(4, *config["input_size"], generator=torch.Generator().manual_seed(0))
    if channels not in (1, 3):
        raise ValueError(f"image {image} has 1 or 3 channels, but the model has {channels} input channels")
    try:
        picture = opened(image, "L" if channels == 1 else "RGB")
    except OSError as error:
        raise ValueError(f"image {image} cannot be read: {error.strerror or 'its format is not known'}") from None
    except ValueError as error:
        raise ValueError(f"image {image} cannot be used: {error}") from None
    if not max(config["input_size"][1:]) <= config["crop_pct"] * _LARGEST:  # a checkpoint may contain the configuration
        raise ValueError(f"image {image} would be resized to more than {_LARGEST} pixels: the model's crop_pct is "
                         f"{config['crop_pct']}")
    return create_transform(**config, is_training=False)(picture)[None]
