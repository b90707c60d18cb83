"""Check a study before its first run: data sets, models, optimizers, schedules, and timm's `train.py`.

Every problem raises a LabError. The checks write no files.
"""
import inspect
import sys
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import torch
from timm.layers import PatchEmbed

from ..._images import data_config
from ..._text import error_text
from .. import LabError, device_images
from ..data import Source, open_source
from ..folder import RunPlan
from ..image_folder import is_here
from ..options import DEVICE_OPTIONS, defaults, known_options, options_with
from ..running.loop import Training, build_model
from . import recipe
from .design import Variant
from .request import Request

Size = tuple[list[int], str]  # height and width of the model's images, and where this size comes from


def check(request: Request, variants: Sequence[Variant]) -> tuple[Optional[Source], list[Size]]:
    """Check the data set and the models of a request.

    A variant is one cell of the study's grid with one connection, or with the two connections of a `switch`. Options
    that follow from the data set, such as `num_classes`, are set in place in the variants.

    Returns:
        The opened data set, and the image size of each variant. The data set is None if only `train.py` opens it.
    """
    return (_check_for_lab if request.trainer == "lab" else _check_for_script)(request, variants)


def _check_for_lab(request: Request, variants: Sequence[Variant]) -> tuple[Source, list[Size]]:
    ignored = dict.fromkeys(key for variant in variants for key in sorted(options_with("lab", "unused"))
                            if getattr(variant.options, key) != defaults()[key])
    if ignored:
        print(f"timm-ortho: the lab's own loop ignores {', '.join(ignored)}", file=sys.stderr)
    source = open_source(variants[0].options, request.design.hold_out)
    for variant in variants:
        variant.options.num_classes, variant.options.in_chans = source.num_classes, source.in_chans
        variant.options.val_split = source.val_split
    sizes = [_check_models(request, variant) for variant in variants]
    for variant, (size, _) in zip(variants, sizes, strict=True):
        variant.options.device_images = device_images.decide(variant.options, size, source, request.options)
        if not variant.options.device_images:
            _drop_device_options(variant.options)
    return source, sizes


def _drop_device_options(options: Namespace) -> None:
    """Remove the options of images on the device, which have no effect on a run that uses a loader."""
    for key in DEVICE_OPTIONS:
        delattr(options, key)


def _check_for_script(request: Request, variants: Sequence[Variant]) -> tuple[Optional[Source], list[Size]]:
    """Check that the user's `train.py` has all requested options.

    The data set is opened, and thereby checked, if it is an image folder on this machine or `num_classes` is not set.
    """
    if request.train_py is None:
        raise LabError("scale 'paper' needs timm's train.py: add --train-py FILE, or set TIMM_DIR to the "
                       "folder of train.py")
    parser = recipe.of_script(request.train_py)
    defaults = vars(parser.parse_args([]))
    if request.options.get("device_images"):
        raise LabError("train.py loads its own images: remove --device-images or --train-py")
    if request.design.hold_out:
        raise LabError("train.py cannot hold images out: remove --train-py, or set val_split in the study")
    first, source, sizes = variants[0].options, None, []
    dataset, ignored = first.dataset, {}
    if dataset.partition("/")[0] not in ("hfids", "tfds", "wds"):
        ignored = {key: None for key in ("train_num_samples", "val_num_samples") if getattr(first, key) is not None}
    if ignored:
        print(f"timm-ortho: train.py uses {' and '.join(ignored)} for streamed data sets only, and takes all "
              f"images of '{dataset or first.data_dir}'", file=sys.stderr)
    unknown = first.num_classes is None  # open the data set to count its classes; the paper's recipes set num_classes
    if unknown or is_here(first):
        source = open_source(Namespace(**{**vars(first), **ignored}))
        for options in (variant.options for variant in variants):
            options.val_split = source.val_split
            if unknown:
                options.num_classes, options.in_chans = source.num_classes, source.in_chans
    for variant in variants:
        _drop_device_options(variant.options)
        if variant.options.dataset == "digits":
            raise LabError("train.py has no data set digits: choose another --dataset, or remove --train-py")
        sizes.append(_check_models(request, variant))
        for key, option in known_options().items():
            if key in DEVICE_OPTIONS:
                continue
            if getattr(variant.options, key) != option["default"]:
                if key not in defaults:
                    raise LabError(f"{request.train_py} has no option {key}: the script is of another timm release")
            elif key in defaults:
                setattr(variant.options, key, defaults[key])  # the script may be from a timm with other defaults
            else:
                delattr(variant.options, key)
    return source, sizes


def check_runs(runs: Mapping[str, RunPlan], places: Sequence[dict], seed: int, source: Source) -> None:
    """Check the runs of one seed: build the model, optimizer, schedule and loaders of each run's last stage."""
    for name in dict.fromkeys(place["run"] for place in places if place["seed"] == seed):
        stage = runs[name].stages[-1]
        options = Namespace(**stage.options)
        if options.epochs < 1:
            raise LabError(f"epochs must be at least 1, got {options.epochs}")
        with refused("timm cannot build a run from these options"):
            Training(runs[name], stage, Path(), source, options)


def _check_models(request: Request, variant: Variant) -> Size:
    origin = _origin_of_size(request, variant)
    for connection in dict.fromkeys((variant.connection, variant.final_connection)):
        size = _check_model(variant.options, connection)
    return size, origin


def _origin_of_size(request: Request, variant: Variant) -> str:
    """Return the origin of the image size as text. Call this before `_check_model`, which changes the options."""
    def sets(options: Mapping[str, Any]) -> bool:
        return any(options.get(key) is not None for key in ("img_size", "input_size"))

    design = request.design
    cells = (changes.get("options", {}) for values in design.grid.values() for changes in values.values())
    if sets(request.options):
        return "--img-size" if design.is_comparison else "--option img_size"
    if sets(design.options) or any(map(sets, cells)):
        return f"study {design.name}"
    if sets(vars(variant.options)):
        return f"recipe {variant.recipe}"
    return "--model-kwargs img_size" if sets(variant.options.model_kwargs) else "the model's default"


def _check_model(options: Namespace, connection: str) -> list[int]:
    """Build the model, run it on two blank images, and return the height and width of these images.

    If the model's class has an argument `img_size`, the image size is added to `options.model_kwargs`, unless the model
    already has this size.
    """
    channels = options.in_chans or 3

    def build() -> torch.nn.Module:  # on the CPU: timm 1.0.16 reads drop path rates from tensors, which fails on meta
        kwargs = {**options.model_kwargs, "connection": connection}
        trial = {"pretrained": False, "initial_checkpoint": "", "seed": 0, "model_kwargs": kwargs}
        return build_model(Namespace(**{**vars(options), **trial}), options.num_classes, channels)

    with refused(f"{options.model} with connection '{connection}'"):
        model = build()
        if options.img_size is None and options.input_size is None:
            options.img_size = options.model_kwargs.get("img_size")
        _, height, width = data_config(model, vars(options), channels)["input_size"]
        if options.img_size is None and options.input_size is None and channels != 3:  # train.py assumes three channels
            options.input_size = [channels, height, width]
        own = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if _takes_img_size(model) and (own is None or (height, width) != tuple(own)):
            options.model_kwargs.setdefault("img_size", height if height == width else [height, width])
            model = build()
        patches = getattr(model, "patch_embed", None)
        if isinstance(patches, PatchEmbed) and not patches.dynamic_img_pad:
            rows, columns = patches.patch_size
            if height % rows or width % columns:  # timm cuts the rest off
                raise LabError(f"images of {height} x {width} pixels are not whole numbers of patches of {rows} x "
                               f"{columns}: set an image size or patch size that fits, such as --img-size "
                               f"{max(1, height // rows) * rows}")
        with torch.no_grad():
            model.eval()(torch.zeros(2, channels, height, width))
    return [height, width]


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


def _takes_img_size(model: torch.nn.Module) -> bool:
    """Return whether the model's class or a base class has an argument `img_size`."""
    constructors = [vars(cls)["__init__"] for cls in type(model).__mro__
                    if "__init__" in vars(cls) and cls is not object]
    return any("img_size" in inspect.signature(init).parameters for init in constructors)
