"""Check that the trainer of a request can train its study: the lab's own loop or timm's `train.py`.

The checks write no files.
"""
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence

import timm
import torch

from .. import LabError, device_images
from ..data import Source, open_source
from ..folder import Variant
from ..image_folder import is_here
from ..running.loop import Training
from ..train_options import DEVICE_OPTIONS, defaults, known_options, options_with
from . import recipe
from .model_check import Built, built, refused
from .request import Request


class Checked(NamedTuple):
    """The results of `check`."""

    variants: list[Variant]  # with the options that follow from the data set and the models
    source: Optional[Source]  # the opened data set, None if only `train.py` opens it
    sizes: list[list[int]]  # height and width of each variant's images
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
    if request.train_py is None:
        source, of_data = _for_lab(request, variants)
        finished = partial(_loop_variant, request=request, source=source, made=set())
    else:
        of_script = vars(recipe.of_script(request.train_py).parse_args([]))
        source, of_data = _for_script(request, variants[0].options)
        finished = partial(_script_variant, of_script=of_script, script=str(request.train_py))
    checked, sizes, parameters = [], [], 0
    for one in built((variant.with_options(**of_data) for variant in variants), weights=request.train_py is None):
        checked.append(finished(one))
        sizes.append(one.size)
        parameters = parameters or sum(parameter.numel() for parameter in one.model.parameters())
    return Checked(checked, source, sizes, parameters)


def _warn_of_ignored(text: str, names: Sequence[str]) -> None:
    if names:
        print(f"timm-ortho: {text.format(', '.join(dict.fromkeys(names)))}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------ the lab's loop
def _for_lab(request: Request, variants: Sequence[Variant]) -> tuple[Source, dict[str, Any]]:
    """Check a request for the lab's loop. Return the opened data set, and the options that follow from it."""
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
    source = open_source(variants[0].options, request.design.hold_out)
    return source, {"num_classes": source.num_classes, "in_chans": source.in_chans, "val_split": source.val_split}


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
    if options.epochs < 1:
        raise LabError(f"epochs must be at least 1, got {options.epochs}")


def _loop_variant(one: Built, request: Request, source: Source, made: set[str]) -> Variant:
    """Return a variant with the options of its images, after its optimizer, schedule and loaders were made once."""
    variant = one.variant
    if device_images.decide(variant.options, one.size, source, request.options):
        variant = variant.with_options(device_images=True)
    else:  # these options have no effect on a run that uses a loader
        variant = variant.without(DEVICE_OPTIONS)
    settings = str({**vars(variant.options), "model_kwargs": one.architecture})
    if settings not in made:
        made.add(settings)
        divided = variant.with_divided_batch()
        if not torch.cuda.is_available():  # the runs may train on a node of a cluster
            divided = divided.with_options(device="cpu")
        with refused("timm cannot build a run from these options"):
            Training(divided, divided.stages[0], Path(), source, divided.options, one.model)
    return variant


# ------------------------------------------------------------------------------------------------ timm's train.py
def _for_script(request: Request, first: Namespace) -> tuple[Optional[Source], dict[str, Any]]:
    """Check a request for `train.py`. Return the data set, if it is opened, and the options that follow from it.

    The data set is opened, and thereby checked, if it is an image folder on this machine or `num_classes` is not set.
    """
    if request.nodes > 1 and not request.gpus:  # without torchrun, each node would train the run
        raise LabError("--nodes needs --gpus: add the number of GPUs per node")
    if request.options.get("device_images"):
        raise LabError("train.py loads its own images: remove --device-images or --train-py")
    if request.design.hold_out:
        raise LabError("train.py cannot hold images out: remove --train-py, or set val_split in the study")
    if first.dataset == "digits":
        raise LabError("train.py has no data set digits: choose another --dataset, or remove --train-py")
    limits = [key for key in ("train_num_samples", "val_num_samples") if getattr(first, key) is not None]
    limits = [] if first.dataset.partition("/")[0] in ("hfids", "tfds", "wds") else limits
    _warn_of_ignored(f"train.py uses {{}} for streamed data sets only, and takes all images of "
                     f"'{first.dataset or first.data_dir}'", limits)
    source, of_data = None, {}
    unknown = first.num_classes is None  # open the data set to count its classes; the paper's recipes set num_classes
    if unknown or is_here(first):
        source = open_source(Namespace(**{**vars(first), **dict.fromkeys(limits)}))
        of_data = {"val_split": source.val_split}
        of_data |= {"num_classes": source.num_classes, "in_chans": source.in_chans} if unknown else {}
    if request.device().startswith("cuda") and {**request.design.options, **request.options}.get("amp") is None:
        of_data |= {"amp": True, "amp_dtype": "bfloat16"}
    return source, of_data


def _script_variant(one: Built, of_script: dict[str, Any], script: str) -> Variant:
    """Return a variant with the options of a `train.py` that may be of another timm release, with other defaults."""
    variant = one.variant.without(DEVICE_OPTIONS)
    unset = [key for key, value in vars(variant.options).items() if value == known_options()[key]["default"]]
    missing = [key for key in vars(variant.options) if key not in unset and key not in of_script]
    if missing:
        raise LabError(f"{script} has no option {missing[0]}: the script is of another timm release")
    own = {key: of_script[key] for key in unset if key in of_script and key != "model_kwargs"}
    return variant.with_options(**own).without([key for key in unset if key not in of_script])
