"""Defaults of `timm-ortho bench`, and the checks of its options."""
from argparse import Namespace
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence

import timm
import torch

from .._checks import known_name
from .._text import UserError, did_you_mean, error_text
from ..convert import bases_with_variants, suffix_of
from ..functional import choose_backend
from ..model_sites import sites
from ..skips import SKIPS

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
# Options that DEFAULTS does not contain.
OPTIONAL = ("device", "img_size", "model_kwargs", "skips", "groups", "modes")


class BenchError(UserError, ValueError):
    """An invalid option of `timm-ortho bench`; the message is one line."""


class Architecture(NamedTuple):
    """A model to measure.

    Attributes:
        base: Name of the variants without their suffix.
        variants: Models to measure by the name of their candidate: the name of a model, and arguments of its own.
        arguments: Arguments of `timm.create_model`.
        batch: Shape of the images, `[B, C, H, W]`.
        layouts: Memory layouts to measure.
    """

    base: str
    variants: Mapping[str, tuple[str, Mapping[str, Any]]]
    arguments: Mapping[str, Any]
    batch: tuple[int, ...]
    layouts: Sequence[str]

    @property
    def label(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.base}({arguments})" if arguments else self.base


def resolve(requested: Mapping[str, Any]) -> Namespace:
    """Complete the requested options with the defaults of the device, and check them.

    Args:
        requested: Options by name; None selects the default.

    Returns:
        The options as attributes: `device`, `modes`, the names in `DEFAULTS[device]`, and the requested options.
        `shapes` contains tuples, and `models` contains `Architecture` objects.

    Raises:
        BenchError: An option or name is unknown, a shape or number is invalid, or the device is not available.

    >>> options = resolve(dict(device="cpu", what=["operator"], shapes=["2x5x16"]))
    >>> options.shapes, options.repeats
    ([(2, 5, 16)], 11)
    """
    _check_known("option", requested, (*DEFAULTS["cpu"], *OPTIONAL))
    requested = {key: value for key, value in requested.items() if value is not None}
    device = _device(requested.pop("device", None))
    options = Namespace(**{**DEFAULTS[device.type], **requested}, device=device)
    skips = requested.get("skips", ())
    _check_known("part", options.what, PARTS)
    _check_known("scope", options.scopes, SCOPES)
    _check_known("dtype", options.dtypes, DTYPES if "models" in options.what else PAIRS)
    _check_known("skip", skips, SKIPS)
    for name in ("repeats", "batch_size", "img_size"):
        if getattr(options, name, 1) < 1:
            raise BenchError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    options.modes = requested.get("modes") or (MODES if options.compile else MODES[:1])
    _check_known("mode", options.modes, MODES)
    options.shapes = [_shape(text) for text in options.shapes]
    options.models = [
        architecture(
            name, batch, requested.get("img_size"), requested.get("model_kwargs", {}), skips,
            requested.get("groups", ()))
        for name, batch in _batches(options.models if "models" in options.what else (), options.batch_size,
                                    overrides="batch_size" in requested)]
    return options


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
    _check_known("device", [name.partition(":")[0]], DEFAULTS)
    try:
        device = torch.device(name)
        choose_backend(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))
    # the device is unknown, or the backend in TIMM_ORTHO_BACKEND cannot run on it
    except (AssertionError, RuntimeError, ValueError) as error:
        raise BenchError(f"--device {name}: {error_text(error)}") from None
    return device


def _check_known(kind: str, names: Iterable[str], known: Any) -> None:
    try:
        for name in names:
            known_name(kind, name, known)
    except ValueError as error:
        raise BenchError(error) from None


def _shape(text: str) -> tuple[int, ...]:
    words = text.split("x")
    if len(words) not in (3, 4) or not all(word.isdecimal() and int(word) for word in words):
        raise BenchError(f"--shapes must be tokens (16x197x384) or NCHW (8x256x56x56), got '{text}'")
    return tuple(map(int, words))


def shape_label(shape: tuple[int, ...]) -> str:
    """Return a shape as text, for example `2x5x16`."""
    return "x".join(map(str, shape))


def architecture(
        name: str, batch: int, img_size: Optional[int], arguments: Mapping[str, Any],
        skips: Sequence[str] = (), groups: Sequence[int] = (),
) -> Architecture:
    """Check a model's name and arguments, and return its description.

    Args:
        name: Name of a variant. Without a suffix, the variants `_ortho` and `_orthog` are measured.
        batch: Batch size.
        img_size: Image size, None for the model's default.
        arguments: Arguments of `timm.create_model`.
        skips: Skip transforms to measure instead of variants, with linear connections.
        groups: Values of `groups` for additional candidates, see :class:`timm_ortho.FeatureConnection`.

    Raises:
        BenchError: The variant does not exist, or it cannot be built with these arguments.

    >>> architecture("vit_small", 2, 32, {"depth": 1}).batch
    (2, 3, 32, 32)
    """
    suffix = suffix_of(name)
    base = name.removesuffix(suffix)
    if suffix == "_linear" or not timm.is_model(f"{base}_ortho"):
        raise BenchError(
            f"no orthogonal variant {name!r}{did_you_mean(base, bases_with_variants())} (see timm-ortho list)")
    cfg = timm.get_pretrained_cfg(f"{base}_ortho")
    if img_size and cfg.fixed_input_size:  # models without a fixed size have no img_size argument
        arguments = {"img_size": img_size, **arguments}
    if skips:
        variants = {skip: (f"{base}_ortho", dict(connection="linear", skip=skip)) for skip in skips}
    else:
        variants = {each[1:]: (base + each, {}) for each in ([suffix] if suffix else ["_ortho", "_orthog"])}
    variants |= {f"ortho_groups_{each}": (f"{base}_ortho", dict(connection_groups=each)) for each in groups}
    channels, height, width = cfg.input_size
    size = img_size or arguments.get("img_size")
    batch = (batch, arguments.get("in_chans", channels), size or height, size or width)
    try:
        with torch.device("meta"):
            models = [timm.create_model(variant, **{**arguments, **own}) for variant, own in variants.values()]
            for model in models if groups else ():  # the forward pass checks the number of groups
                model(torch.empty(batch))
    except (TypeError, ValueError, RuntimeError) as error:
        raise BenchError(f"{name} cannot be built with {dict(arguments)}: {error_text(error)}") from None
    layouts = ("nchw", "channels_last") if sites(models[0])[0].connection.dim == 1 else ("tokens",)
    return Architecture(base, variants, arguments, batch, layouts)
