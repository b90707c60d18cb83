"""Defaults of `timm-ortho bench`, and the checks of its options."""
from argparse import Namespace
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence

import timm
import torch
from timm.layers import to_2tuple

from .._text import CONSTRUCTOR_ERRORS, UserError, did_you_mean, error_text
from ..convert import bases_with_variants, suffix_of
from ..functional import choose_backend
from ..model_sites import sites

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# dtypes of x and f in the part `operator`; under autocast, a ViT's stream stays in float32
PAIRS = {**{name: (dtype, dtype) for name, dtype in DTYPES.items()}, "mixed": (torch.float32, torch.bfloat16)}
PARTS, SCOPES, STEPS = ("operator", "models"), ("feature", "global"), ("forward", "backward", "both")
MODES, MODEL_STEPS = ("eager", "compiled"), ("training", "inference")

# Defaults by device. Shapes with three axes are batch, tokens and channels. Shapes with four axes are batch, channels,
# height and width, and are measured in two memory formats: contiguous and channels-last. The models have their batch
# size after a colon. On a GPU, torch.compile would take most of the time, and is measured only on request.
DEFAULTS = {
    "cpu": dict(
        what=PARTS, shapes=("16x197x384", "8x256x56x56"), scopes=SCOPES, dtypes=("float32",), compile=True,
        models=("vit_small_ortho:16", "resnetv2_50_ortho:8"), batch_size=8, repeats=11, copy_bytes=256 << 20),
    "cuda": dict(
        what=PARTS, shapes=("256x197x768", "128x256x56x56"), scopes=SCOPES, dtypes=("bfloat16",), compile=False,
        models=("vit_small_patch16_224_ortho:128", "vit_small_patch16_224_ortho:256",
                "vit_base_patch16_224_ortho:128", "resnetv2_50_ortho:128"),
        batch_size=128, repeats=20, copy_bytes=512 << 20),
}


class BenchError(UserError, ValueError):
    """An invalid option of `timm-ortho bench`; the message is one line."""


class Architecture(NamedTuple):
    """A model to measure."""

    base: str  # the name of the variants without their suffix
    variants: Mapping[str, str]  # name of a candidate -> name of its variant
    arguments: Mapping[str, Any]  # of `timm.create_model`
    batch: tuple[int, ...]  # the shape of the images, `[B, C, H, W]`
    layouts: Sequence[str]  # memory layouts to measure

    @property
    def label(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.base}({arguments})" if arguments else self.base


def resolve(requested: Mapping[str, Any]) -> Namespace:
    """Complete the requested options with the defaults of the device, and check them.

    Args:
        requested: The names in `DEFAULTS[device]`, `device`, `img_size`, `model_kwargs` and `modes`; None selects the
            default.

    Returns:
        The options as attributes. `shapes` contains tuples, and `models` contains `Architecture` objects.

    Raises:
        BenchError: A model is unknown, a shape or batch size is invalid, or the device is not available.

    >>> options = resolve(dict(device="cpu", what=["operator"], shapes=["2x5x16"]))
    >>> options.shapes, options.repeats
    ([(2, 5, 16)], 11)
    """
    requested = {key: value for key, value in requested.items() if value is not None}
    device = _device(requested.pop("device", None))
    given = Namespace(**{"img_size": None, "model_kwargs": {}, **DEFAULTS[device.type], **requested}, device=device)
    given.modes = requested.get("modes") or (MODES if given.compile else MODES[:1])
    given.shapes = [_shape(text) for text in given.shapes]
    models = given.models if "models" in given.what else ()
    batches = _batches(models, given.batch_size, overrides="batch_size" in requested)
    given.models = [architecture(name, batch, given.img_size, given.model_kwargs) for name, batch in batches]
    return given


def _batches(models: Iterable[str], default: int, overrides: bool) -> list[tuple[str, int]]:
    """Split `NAME:BATCH`. The default is for names without a batch size, or for all names if it `overrides`."""
    pairs = []
    for text in models:
        name, colon, batch = text.partition(":")
        if colon and not (batch.isdecimal() and int(batch)):
            raise BenchError(f"--models must be NAME or NAME:BATCH, got {text!r}")
        pairs.append((name, int(batch) if batch and not overrides else default))
    return list(dict.fromkeys(pairs))


def _device(name: Optional[str]) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        choose_backend(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))
    # the device is unknown, or the backend in TIMM_ORTHO_BACKEND cannot run on it
    except (AssertionError, RuntimeError, ValueError) as error:
        raise BenchError(f"--device {name}: {error_text(error)}") from None
    if device.type not in DEFAULTS:
        raise BenchError(f"--device must be cpu or cuda, got {name}")
    return device


def _shape(text: str) -> tuple[int, ...]:
    words = text.split("x")
    if len(words) not in (3, 4) or not all(word.isdecimal() and int(word) for word in words):
        raise BenchError(f"--shapes must be tokens (16x197x384) or NCHW (8x256x56x56), got '{text}'")
    return tuple(map(int, words))


def shape_label(shape: tuple[int, ...]) -> str:
    """Return a shape as text, for example `2x5x16`."""
    return "x".join(map(str, shape))


def architecture(name: str, batch: int, img_size: Optional[int], arguments: Mapping[str, Any]) -> Architecture:
    """Check a model's name and arguments, and return its description.

    Args:
        name: Name of a variant. Without a suffix, the variants `_ortho` and `_orthog` are measured.
        batch: Batch size.
        img_size: Image size, None for the model's default.
        arguments: Arguments of `timm.create_model`.

    Raises:
        BenchError: The variant does not exist, or it cannot be built with these arguments.

    >>> architecture("vit_small", 2, 32, {"depth": 1}).batch
    (2, 3, 32, 32)
    """
    suffix = suffix_of(name)
    base = name.removesuffix(suffix)
    if suffix == "_linear" or "." in name or not timm.is_model(f"{base}_ortho"):
        raise BenchError(
            f"no orthogonal variant {name!r}{did_you_mean(base, bases_with_variants())} (see timm-ortho list)")
    cfg = timm.get_pretrained_cfg(f"{base}_ortho")
    if img_size and cfg.fixed_input_size:  # models without a fixed size have no img_size argument
        arguments = {"img_size": img_size, **arguments}
    variants = {each[1:]: base + each for each in ([suffix] if suffix else ["_ortho", "_orthog"])}
    try:
        with torch.device("meta"):
            models = [timm.create_model(variant, **arguments) for variant in variants.values()]
    except CONSTRUCTOR_ERRORS as error:
        raise BenchError(f"{name} cannot be built with {dict(arguments)}: {error_text(error)}") from None
    channels, height, width = cfg.input_size
    height, width = to_2tuple(img_size or arguments.get("img_size") or (height, width))
    images = (batch, arguments.get("in_chans", channels), height, width)
    layouts = ("nchw", "channels_last") if sites(models[0])[0].connection.dim == 1 else ("tokens",)
    return Architecture(base, variants, arguments, images, layouts)
