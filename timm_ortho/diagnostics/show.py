"""A model's residual additions, one line each: where they are, what joins them, and what they do to one batch.

`timm-ortho show` prints :func:`as_text` and writes :func:`as_svg`.
"""
import math
from pathlib import Path
from typing import Any, List, Mapping, Optional, Tuple

import torch
from timm.data import create_transform
from torch import Tensor, nn

from .._images import data_config, opened
from .._text import aligned
from ..connections import Site, sites
from .dynamics import SiteDynamics, record_dynamics

_BAR = 10  # characters to either side of zero


Lines = List[Tuple[Site, SiteDynamics]]  # a site and its averages over the batch


def lines(model: nn.Module, images: Tensor) -> Lines:
    """Run ``model`` once, in evaluation mode, on ``images`` of shape ``[B, C, H, W]``.

    Raises:
        ValueError: The model has no connections.
    """
    found = sites(model)
    if not found:
        raise ValueError("the model has no connections: give a variant, or connect it first")
    return list(zip(found, record_dynamics(model, images, found), strict=True))


def as_text(found: Lines) -> str:
    """A table for a terminal; the cosine also as a bar from -1 to 1."""
    scale = "-1".ljust(_BAR) + "0" + "1".rjust(_BAR)
    rows: List[Tuple[str, ...]] = [("block", "site", "connection", "|x|²", "|f∥|²", "|f⊥|²", "cosine", scale)]
    for (layer, kind, _, connection), of in found:
        figures = [f"{value:.4g}" for value in (of.stream, of.parallel, of.orthogonal)]
        rows.append((str(layer), kind, connection.name, *figures, f"{of.cosine:+.3f}", _bar(of.cosine)))
    return "\n".join(aligned(rows, "><<>>>><"))


def _bar(cosine: float) -> str:
    """`       ===|          ` for -0.3."""
    filled = 0 if math.isnan(cosine) else min(_BAR, round(abs(cosine) * _BAR))
    if cosine < 0:
        return ("=" * filled).rjust(_BAR) + "|" + " " * _BAR
    return " " * _BAR + "|" + ("=" * filled).ljust(_BAR)


def as_svg(found: Lines, path: Path, title: str = "") -> None:
    """Stream norm and cosine of each site, from the first block at the top to the last; needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(site.connection.name for site, _ in found))
    colors = [f"C{names.index(site.connection.name)}" for site, _ in found]
    figure = Figure(figsize=(9, 1.2 + 0.22 * len(found)), layout="constrained")
    norm, cosine = figure.subplots(1, 2, sharey=True)
    rows = range(len(found))
    norm.barh(rows, [of.stream for _, of in found], color=colors)
    cosine.barh(rows, [of.cosine for _, of in found], color=colors)
    cosine.axvline(0, color="#222222", linewidth=0.9)
    cosine.set_xlim(-1, 1)
    for axes, below in ((norm, "|x|², the stream that the site receives"), (cosine, "cosine of x and f")):
        axes.set_xlabel(below)
        axes.spines[["top", "right"]].set_visible(False)
    norm.set_yticks(rows, [f"block {site.layer}  {site.kind}" for site, _ in found], fontsize=8)
    norm.invert_yaxis()
    for index, name in enumerate(names):
        cosine.bar([0], [0], color=f"C{index}", label=name)
    cosine.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def batch(model: nn.Module, image: Optional[Path] = None, config: Optional[Mapping[str, Any]] = None) -> Tensor:
    """Return an image as timm prepares it for a model, or four of noise, the same at each call.

    Args:
        model: Its configuration describes the images unless ``config`` does.
        image: A file.
        config: A data configuration of timm.

    Raises:
        ValueError: The file is no image, or it is grey with 16 or 32 bits.
    """
    config = config or data_config(model, {})
    if image is None:
        return torch.randn(4, *config["input_size"], generator=torch.Generator().manual_seed(0))
    try:
        picture = opened(image, "L" if config["input_size"][0] == 1 else "RGB")
    except OSError as error:
        raise ValueError(f"{image} is not an image: {error.strerror or 'its format is not known'}") from None
    except ValueError as error:
        raise ValueError(f"image {image} cannot be used: {error}") from None
    return create_transform(**config, is_training=False)(picture)[None]
