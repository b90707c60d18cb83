"""Check the models of a study: build one model of each architecture, and run it on blank images of its size."""
import inspect
import json
from argparse import Namespace
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, NamedTuple

import torch
from timm.layers import PatchEmbed
from torch import nn

from ..._images import data_config
from ..._text import error_text
from .. import LabError
from ..folder import Variant
from ..running.loop import build_model

_WITHOUT_WEIGHTS = {"pretrained": False, "initial_checkpoint": "", "seed": 0}
_OF_ARCHITECTURE = (
    "model", "num_classes", "in_chans", "img_size", "input_size", "gp", "drop", "drop_path", "drop_block",
    "bn_momentum", "bn_eps", "pretrained", "pretrained_path", "initial_checkpoint")


class Built(NamedTuple):
    """A checked variant and its model."""

    variant: Variant  # with the options that set the size of its images
    model: nn.Module  # has another connection if an earlier variant has the same architecture
    size: list[int]  # height and width of the images
    architecture: str  # variants with equal texts share one model


def built(variants: Iterable[Variant], weights: bool) -> Iterator[Built]:
    """Yield each variant with its model. Successive variants that differ only in connection and training share one.

    Args:
        variants: The variants.
        weights: Whether to load the initial weights. timm's script may find them only on another machine.

    Raises:
        LabError: A model cannot be built with one of its connections, or cannot process the images.
    """
    last = None
    for variant in variants:
        options = variant.options
        arguments = {key: value for key, value in options.model_kwargs.items() if not key.startswith("connection")}
        key = json.dumps([arguments, *(getattr(options, name) for name in _OF_ARCHITECTURE)], default=str)
        if key != last:
            with refused(f"{options.model} with connection '{variant.stages[0].connection}'"):
                found, size = _size(options)
                model = _run(variant.with_options(**found, **({} if weights else _WITHOUT_WEIGHTS)).options, size)
            last = key
        variant = variant.with_options(**found)
        for stage in variant.stages:
            with refused(f"{options.model} with connection '{stage.connection}'"):
                _on_meta(Namespace(**stage.options))
        yield Built(variant, model, size, key)


def _size(options: Namespace) -> tuple[dict[str, Any], list[int]]:
    """Return the options that give the model and its images the same size, and this height and width.

    If the model's class has an argument `img_size`, it is among them, unless the model already has this size.
    """
    model, channels = _on_meta(options), options.in_chans or 3
    found: dict[str, Any] = {}
    if options.img_size is None and options.input_size is None:
        size = options.model_kwargs.get("img_size")
        if isinstance(size, (tuple, list)):  # train.py's --img-size is one number
            found["input_size"] = [channels, *size]
        else:
            found["img_size"] = size
    _, height, width = data_config(model, {**vars(options), **found}, channels)["input_size"]
    sizes = [{**vars(options), **found}[key] for key in ("img_size", "input_size")]
    if sizes == [None, None] and channels != 3:  # train.py assumes three channels
        found["input_size"] = [channels, height, width]
    own = getattr(getattr(model, "patch_embed", None), "img_size", None)
    other_size = own is None or (height, width) != tuple(own)
    if other_size and _takes_img_size(model) and "img_size" not in options.model_kwargs:
        found["model_kwargs"] = {"img_size": height if height == width else [height, width]}
    return found, [height, width]


def _run(options: Namespace, size: list[int]) -> nn.Module:
    """Build a model, run it on two blank images, and return it."""
    height, width = size
    model = _build(options)
    patches = getattr(model, "patch_embed", None)
    if isinstance(patches, PatchEmbed) and not patches.dynamic_img_pad:
        rows, columns = patches.patch_size
        if height % rows or width % columns:  # timm cuts the rest off
            raise LabError(f"images of {height} x {width} pixels are not whole numbers of patches of {rows} x "
                           f"{columns}: set an image size or patch size that fits, such as --img-size "
                           f"{max(1, height // rows) * rows}")
    with torch.no_grad():
        model.eval()(torch.zeros(2, options.in_chans or 3, height, width))
    return model


def _build(options: Namespace) -> nn.Module:
    return build_model(options, options.num_classes, options.in_chans or 3)


def _on_meta(options: Namespace) -> nn.Module:
    """Build a model whose tensors have no memory."""
    with torch.device("meta"):
        return _build(Namespace(**{**vars(options), **_WITHOUT_WEIGHTS}))


@contextmanager
def refused(subject: str) -> Iterator[None]:
    """Turn an error of timm or torch into a LabError whose message begins with `subject`."""
    try:
        yield
    except LabError:
        raise
    except KeyError as error:  # timm's tables of layers raise KeyError for an unknown name
        raise LabError(f"{subject}: unknown name {error}") from None
    except (ValueError, TypeError, RuntimeError, AssertionError, OSError) as error:
        raise LabError(f"{subject}: {error_text(error)}") from None


def _takes_img_size(model: nn.Module) -> bool:
    """Return whether the model's class or a base class has an argument `img_size`."""
    constructors = [vars(cls)["__init__"] for cls in type(model).__mro__
                    if "__init__" in vars(cls) and cls is not object]
    return any("img_size" in inspect.signature(init).parameters for init in constructors)
