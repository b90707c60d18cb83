"""What `timm-ortho bench` is asked for: names, shapes and numbers as they are given, made into what can be measured."""
from argparse import Namespace
from typing import Any, Mapping, NamedTuple, Optional, Sequence

import timm
import torch

from .._checks import known_name
from .._text import did_you_mean, error_text
from ..backends import choose_backend
from ..connections import sites
from ..models.meta import on_meta
from ..models.names import bases_with_variants, suffix_of
from ..skips import SKIPS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARTS, SCOPES, STEPS = ("operator", "models", "launch"), ("feature", "global"), ("forward", "backward", "both")
MODES, MODEL_STEPS = ("eager", "inductor", "compiled"), ("training", "inference")

# By device. Shapes of three axes are tokens, of four NCHW, measured in both memory formats; models with their batch.
DEFAULTS = {
    "cpu": dict(
        what=PARTS, shapes=("16x197x384", "8x256x56x56"), scopes=SCOPES, dtypes=("float32",), compile=True,
        models={"vit_small_ortho": 16, "resnetv2_50_ortho": 8}, batch_size=8, repeats=11, copy_bytes=256 << 20),
    "cuda": dict(
        what=PARTS, shapes=("256x197x768", "64x256x56x56"), scopes=SCOPES, dtypes=("float32", "bfloat16"), compile=True,
        models=dict.fromkeys(("vit_small_patch16_224", "vit_base_patch16_224", "resnetv2_34", "resnetv2_50"), 256),
        batch_size=256, repeats=20, copy_bytes=512 << 20),
}
# Most of a quick run is torch.compile, whose time grows with the number of blocks: the models are cut short.
QUICK = dict(
    shapes=("4x197x384", "2x256x28x28"), scopes=("feature",), repeats=5, batch_size=4, copy_bytes=64 << 20,
    models={"vit_small_ortho": 4, "resnetv2_18_cifar_ortho": 4})
SHORT = {"vit_small_ortho": dict(depth=1), "resnetv2_18_cifar_ortho": dict(layers=(1,))}


class BenchError(ValueError):
    """What the user gave cannot be measured; the message is one line."""


class Architecture(NamedTuple):
    """A model: its name without suffix, the suffixes of its variants, their arguments, and the shape of a batch.

    With `skips` it is measured with these transforms of the stream in place of variants, all with linear connections,
    and with `pasted` also with the formulas of `operator.PASTED` in place of its connections.
    """

    base: str
    suffixes: Sequence[str]
    arguments: Mapping[str, Any]
    batch: tuple[int, ...]
    layouts: Sequence[str]
    skips: Sequence[str] = ()
    pasted: bool = False

    @property
    def label(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.base}({arguments})" if arguments else self.base


def resolve(given: Mapping[str, Any]) -> Namespace:
    """All options: those of `DEFAULTS` and `device`, with `shapes` as tuples and `models` as `Architecture`s.

    Raises:
        BenchError: An unknown name, a shape or number that is none, a device that is not there.
    """
    given = {key: value for key, value in given.items() if value is not None}
    quick, device = given.pop("quick", False), _device(given.pop("device", None))
    options = Namespace(**{**DEFAULTS[device.type], **(QUICK if quick else {}), **given}, device=device)
    skips = given.get("skips", ())
    _check_known("part", options.what, PARTS)
    _check_known("dtype", options.dtypes, DTYPES)
    _check_known("skip", skips, SKIPS)
    for name in ("repeats", "batch_size", "img_size"):
        if getattr(options, name, 1) < 1:
            raise BenchError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    options.shapes = [_shape(text) for text in options.shapes]
    if "models" in given or "batch_size" in given:
        options.models = dict.fromkeys(options.models, options.batch_size)
    short = SHORT if quick and "models" not in given else {}
    options.models = [
        architecture(
            name, batch, given.get("img_size"), {**short.get(name, {}), **given.get("model_kwargs", {})}, skips)
        for name, batch in options.models.items() if "models" in options.what]
    return options


def _device(name: Optional[str]) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_known("device", [name.partition(":")[0]], DEFAULTS)
    try:
        device = torch.device(name)
        choose_backend(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))
    # no such device, or a backend that the environment asks for and that cannot run there
    except (AssertionError, RuntimeError, ValueError) as error:
        raise BenchError(f"--device {name}: {error_text(error)}") from None
    return device


def _check_known(kind: str, names: Sequence[str], known: Any) -> None:
    try:
        for name in names:
            known_name(kind, name, known)
    except ValueError as error:
        raise BenchError(error) from None


def _shape(text: str) -> tuple[int, ...]:
    words = text.split("x")
    if len(words) not in (3, 4) or not all(word.isdecimal() and int(word) for word in words):
        raise BenchError(f"--shapes takes tokens as 16x197x384 or NCHW as 8x256x56x56, not '{text}'")
    return tuple(map(int, words))


def times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def architecture(
        name: str, batch: int, img_size: Optional[int], arguments: Mapping[str, Any], skips: Sequence[str] = (),
) -> Architecture:
    suffix = suffix_of(name)
    base = name.removesuffix(suffix)
    if suffix == "_linear" or not timm.is_model(f"{base}_ortho"):
        raise BenchError(f"no orthogonal variant {name!r}{did_you_mean(base, bases_with_variants())}")
    cfg = timm.get_pretrained_cfg(f"{base}_ortho")
    if img_size and cfg.fixed_input_size:  # others take any size
        arguments = {"img_size": img_size, **arguments}
    try:
        with on_meta():
            model = timm.create_model(f"{base}_ortho", **arguments)
            for skip in skips:
                timm.create_model(f"{base}_ortho", **{**arguments, "skip": skip})
    except (TypeError, ValueError, RuntimeError) as error:
        raise BenchError(f"{name} cannot be built with {dict(arguments)}: {error_text(error)}") from None
    channels, height, width = cfg.input_size
    size = img_size or arguments.get("img_size")
    batch = (batch, arguments.get("in_chans", channels), size or height, size or width)
    layouts = ("nchw", "channels_last") if sites(model)[0].connection.dim == 1 else ("tokens",)
    return Architecture(base, [suffix] if suffix else ["_ortho", "_orthog"], arguments, batch, layouts, skips)
