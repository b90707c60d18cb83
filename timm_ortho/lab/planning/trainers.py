"""Check that the trainer of a request can train its study: the lab's own loop or timm's `train.py`.

The checks write no files.
"""
import sys
from argparse import Namespace
from pathlib import Path
from typing import Optional, Sequence

import timm

from .. import LabError, device_images
from ..data import Source, open_source
from ..folder import RunPlan, Stage
from ..image_folder import is_here
from ..running.loop import Training
from ..train_options import DEVICE_OPTIONS, defaults, known_options, options_with
from . import recipe
from .design import Variant, of_connection
from .model_check import Size, check_models, refused
from .request import Request

# The opened data set, None if only `train.py` opens it; the image size of each variant.
Checked = tuple[Optional[Source], list[Size]]


def check(request: Request, variants: Sequence[Variant]) -> Checked:
    """Check machines, data set, models and options of a request.

    A variant is one cell of the study's grid with one connection, or with the two connections of a `switch`. Options
    that follow from the data set, such as `num_classes`, are set in place in the variants.

    Raises:
        LabError: The trainer cannot train the variants as requested.
    """
    if request.gpus < 0 or request.nodes < 1:
        raise LabError(f"--gpus must be at least 0 and --nodes at least 1, got {request.gpus} and {request.nodes}")
    if any(variant.options.pretrained_path and not variant.options.pretrained for variant in variants):
        raise LabError("pretrained_path has no effect without pretrained: set pretrained to true, too")
    for options in (variant.options for variant in variants):
        if options.pretrained and not options.pretrained_path and not timm.is_model_pretrained(options.model):
            raise LabError(f"there are no pretrained weights of {options.model}: remove pretrained, and start from a "
                           "file with --weights FILE of timm-ortho compare, or with the option weights in a study")
    return (_check_for_lab if request.train_py is None else _check_for_script)(request, variants)


def _check_for_lab(request: Request, variants: Sequence[Variant]) -> Checked:
    if request.design.scale == "paper":
        raise LabError("scale 'paper' needs timm's train.py: add --train-py FILE, or set TIMM_DIR to the folder of "
                       "train.py")
    if request.gpus or request.nodes > 1:
        raise LabError("--gpus and --nodes need timm's train.py: add --train-py, or use only --device cuda")
    for variant in variants:
        check_loop_options(variant.options)
    ignored = dict.fromkeys(key for variant in variants for key in sorted(options_with("lab", "unused"))
                            if getattr(variant.options, key) != defaults()[key])
    if ignored:
        print(f"timm-ortho: the lab's own loop ignores {', '.join(ignored)}", file=sys.stderr)
    source, sizes = open_source(variants[0].options, request.design.hold_out), []
    for variant in variants:
        options = variant.options
        options.num_classes, options.in_chans, options.val_split = source.num_classes, source.in_chans, source.val_split
        sizes.append(check_models(request, variant))
        options.device_images = device_images.decide(options, sizes[-1][0], source, request.options)
        if not options.device_images:
            _drop_device_options(options)
        _check_training(variant, source)
    return source, sizes


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


def _check_training(variant: Variant, source: Source) -> None:
    """Build the model, optimizer, schedule and loaders of a variant, with the connection at the end of training."""
    kwargs = of_connection(variant.options.model_kwargs, variant.final_connection)
    options = Namespace(**{**vars(variant.options), "model_kwargs": kwargs})
    if options.epochs < 1:
        raise LabError(f"epochs must be at least 1, got {options.epochs}")
    plan = RunPlan("lab", [Stage(".", vars(options))]).with_divided_batch()
    (stage,) = plan.stages
    with refused("timm cannot build a run from these options"):
        Training(plan, stage, Path(), source, Namespace(**stage.options))


def _check_for_script(request: Request, variants: Sequence[Variant]) -> Checked:
    """Check that the user's `train.py` has all requested options.

    The data set is opened, and thereby checked, if it is an image folder on this machine or `num_classes` is not set.
    """
    of_script = vars(recipe.of_script(request.train_py).parse_args([]))
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
    for variant in variants:
        options = variant.options
        if source is not None:
            options.val_split = source.val_split
            if unknown:
                options.num_classes, options.in_chans = source.num_classes, source.in_chans
        _drop_device_options(options)
        if options.dataset == "digits":
            raise LabError("train.py has no data set digits: choose another --dataset, or remove --train-py")
        sizes.append(check_models(request, variant))
        for key, value in list(vars(options).items()):
            if value != known_options()[key]["default"]:
                if key not in of_script:
                    raise LabError(f"{request.train_py} has no option {key}: the script is of another timm release")
            elif key in of_script:
                setattr(options, key, of_script[key])  # the script may be from a timm with other defaults
            else:
                delattr(options, key)
    return source, sizes


def _drop_device_options(options: Namespace) -> None:
    """Remove the options of images on the device, which have no effect on a run that uses a loader."""
    for key in DEVICE_OPTIONS:
        delattr(options, key)
