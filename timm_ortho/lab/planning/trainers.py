"""Check that the trainer of a request can train its study: the lab's own loop or timm's `train.py`.

The checks write no files.
"""
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence

import timm
import torch
from torch import nn

from .. import LabError, device_images
from ..data import Source, open_source
from ..folder import Variant
from ..image_folder import is_here
from ..running.loop import Training
from ..train_options import DEVICE_OPTIONS, defaults, known_options, options_with
from . import recipe
from .model_check import Models, origin_of_size, refused
from .request import Request


class Checked(NamedTuple):
    """The results of `check`."""

    variants: list[Variant]  # with the options that follow from the data set and the models
    source: Optional[Source]  # the opened data set, None if only `train.py` opens it
    sizes: list[tuple[list[int], str]]  # of each variant: height and width of its images, and where this size is from
    parameters: int  # of the first model


def check(request: Request, variants: Sequence[Variant]) -> Checked:
    """Check machines, data set, models and options of a request.

    Raises:
        LabError: The trainer cannot train the variants as requested.
    """
    if request.gpus < 0 or request.nodes < 1:
        raise LabError(f"--gpus must be at least 0 and --nodes at least 1, got {request.gpus} and {request.nodes}")
    for options in (variant.options for variant in variants):
        if options.pretrained_path and not options.pretrained:
            raise LabError("pretrained_path has no effect without pretrained: set pretrained to true, too")
        if options.pretrained and not options.pretrained_path and not timm.is_model_pretrained(options.model):
            raise LabError(f"there are no pretrained weights of {options.model}: remove pretrained, and start from a "
                           "file with --weights FILE of timm-ortho compare, or with the option weights in a study")
    return (_check_for_lab if request.train_py is None else _check_for_script)(request, variants)


def _check_for_lab(request: Request, variants: Sequence[Variant]) -> Checked:
    if request.design.scale == "paper":
        raise LabError("scale 'paper' needs timm's train.py: add --train-py FILE, or set TIMM_DIR to the folder of "
                       "train.py")
    if request.gpus > request.slurm or request.nodes > 1:  # a job of Slurm may need one GPU
        raise LabError("--gpus and --nodes need timm's train.py: add --train-py, or use only --device cuda, and on "
                       "Slurm --gpus 1")
    for variant in variants:
        check_loop_options(variant.options)
    _warn_of_ignored("the lab's own loop ignores {}", [
        key for variant in variants for key in sorted(options_with("lab", "unused"))
        if getattr(variant.options, key) != defaults()[key]])
    source, models = open_source(variants[0].options, request.design.hold_out), Models(weights=True)
    checked, sizes, parameters, trained = [], [], [], set()
    for variant in variants:
        origin = origin_of_size(request, variant)
        variant = models.checked(variant.with_options(
            num_classes=source.num_classes, in_chans=source.in_chans, val_split=source.val_split))
        if device_images.decide(variant.options, models.size, source, request.options):
            variant = variant.with_options(device_images=True)
        else:  # these options have no effect on a run that uses a loader
            variant = variant.without(DEVICE_OPTIONS)
        settings = str({**vars(variant.options), "model_kwargs": None, "of": models.key})
        if settings not in trained:
            _check_training(variant, source, models.model)
            trained.add(settings)
        checked.append(variant)
        sizes.append((models.size, origin))
        parameters.append(sum(parameter.numel() for parameter in models.model.parameters()))
    return Checked(checked, source, sizes, parameters[0])


def _warn_of_ignored(text: str, names: Sequence[str]) -> None:
    if names:
        print(f"timm-ortho: {text.format(', '.join(dict.fromkeys(names)))}", file=sys.stderr)


def check_loop_options(options: Namespace) -> None:
    """Raise a LabError if the lab's loop lacks the schedule, or an option whose value is not the default."""
    missing = [f"'{key}'" for key, value in vars(options).items()
               if key not in options_with("lab", "used", "unused") and not recipe.is_unset(key, value)]
    if missing:
        raise LabError(f"timm's train.py has {', '.join(missing)}, but the lab's own loop does not: remove the option, "
                       "or train with --train-py")
    if options.sched in ("plateau", "none"):
        raise LabError(f"the lab's own loop has no schedule '{options.sched}': choose another, such as constant, or "
                       "train with --train-py")


def _check_training(variant: Variant, source: Source, model: nn.Module) -> None:
    """Make the optimizer, schedule and loaders of a variant. `model` has its architecture, but another connection."""
    if variant.options.epochs < 1:
        raise LabError(f"epochs must be at least 1, got {variant.options.epochs}")
    variant = variant.with_divided_batch()
    if not torch.cuda.is_available():  # the runs may train on a node of a cluster
        variant = variant.with_options(device="cpu")
    with refused("timm cannot build a run from these options"):
        Training(variant, variant.stages[0], Path(), source, variant.options, model)


def _check_for_script(request: Request, variants: Sequence[Variant]) -> Checked:
    """Check that the user's `train.py` has all requested options.

    The data set is opened, and thereby checked, if it is an image folder on this machine or `num_classes` is not set.
    """
    of_script = vars(recipe.of_script(request.train_py).parse_args([]))
    if request.options.get("device_images"):
        raise LabError("train.py loads its own images: remove --device-images or --train-py")
    if request.design.hold_out:
        raise LabError("train.py cannot hold images out: remove --train-py, or set val_split in the study")
    first, source, models = variants[0].options, None, Models(weights=False)
    if first.dataset == "digits":
        raise LabError("train.py has no data set digits: choose another --dataset, or remove --train-py")
    limits = [key for key in ("train_num_samples", "val_num_samples") if getattr(first, key) is not None]
    limits = [] if first.dataset.partition("/")[0] in ("hfids", "tfds", "wds") else limits
    _warn_of_ignored(f"train.py uses {{}} for streamed data sets only, and takes all images of "
                     f"'{first.dataset or first.data_dir}'", limits)
    unknown = first.num_classes is None  # open the data set to count its classes; the paper's recipes set num_classes
    of_data: dict[str, Any] = {}
    if unknown or is_here(first):
        source = open_source(Namespace(**{**vars(first), **dict.fromkeys(limits)}))
        of_data["val_split"] = source.val_split
        if unknown:
            of_data.update(num_classes=source.num_classes, in_chans=source.in_chans)
    half = request.device().startswith("cuda") and {**request.design.options, **request.options}.get("amp") is None
    of_data.update(dict(amp=True, amp_dtype="bfloat16") if half else {})
    checked, sizes, parameters = [], [], []
    for variant in variants:
        origin = origin_of_size(request, variant)
        variant = models.checked(variant.with_options(**of_data).without(DEVICE_OPTIONS))
        checked.append(_for_script(variant, of_script, str(request.train_py)))
        sizes.append((models.size, origin))
        parameters.append(sum(parameter.numel() for parameter in models.model.parameters()))
    return Checked(checked, source, sizes, parameters[0])


def _for_script(variant: Variant, of_script: dict[str, Any], script: str) -> Variant:
    """Return a variant with the options of a `train.py` that may be of another timm release, with other defaults."""
    unset = [key for key, value in vars(variant.options).items() if value == known_options()[key]["default"]]
    missing = [key for key in vars(variant.options) if key not in unset and key not in of_script]
    if missing:
        raise LabError(f"{script} has no option {missing[0]}: the script is of another timm release")
    own = {key: of_script[key] for key in unset if key in of_script and key != "model_kwargs"}
    return variant.with_options(**own).without([key for key in unset if key not in of_script])
