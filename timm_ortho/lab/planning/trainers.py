"""Choose the trainer of a study's runs: the lab's own loop or timm's `train.py`.

A trainer checks a study before its first run: machines, options, data set, models and optimizers. Every problem raises
a LabError. The checks write no files.
"""
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Optional, Sequence

from .. import LabError, device_images
from ..data import Source, open_source
from ..folder import RunPlan, Stage
from ..image_folder import is_here
from ..running.loop import Training
from ..train_options import DEVICE_OPTIONS, defaults, known_options, options_with
from . import recipe
from .design import Variant
from .memory import fit_cells
from .model_check import Size, check_models, refused
from .request import Request

# The opened data set or None, the image size of each variant, and for each cell a line about its memory.
Checked = tuple[Optional[Source], list[Size], list[str]]


class LabLoop:
    """The lab's own training loop, which trains a run in one process on one device."""

    def __init__(self, request: Request) -> None:
        if request.gpu_memory is not None:
            raise LabError("--gpu-memory needs timm's train.py: add --train-py")
        if request.gpus or request.nodes > 1:
            raise LabError("--gpus and --nodes need timm's train.py: add --train-py, or use only --device cuda")
        self.request = request

    def run_plan(self, stages: Sequence[Stage], **of_design: Any) -> RunPlan:
        """Return the plan of a run."""
        return RunPlan("lab", stages, **of_design)

    def check(self, variants: Sequence[Variant]) -> Checked:
        """Check the variants. Options that follow from the data set, such as `num_classes`, are set in place."""
        for variant in variants:
            check_options(variant.options)
        ignored = dict.fromkeys(key for variant in variants for key in sorted(options_with("lab", "unused"))
                                if getattr(variant.options, key) != defaults()[key])
        if ignored:
            print(f"timm-ortho: the lab's own loop ignores {', '.join(ignored)}", file=sys.stderr)
        source, sizes = open_source(variants[0].options, self.request.design.hold_out), []
        for variant in variants:
            options = variant.options
            options.num_classes, options.in_chans = source.num_classes, source.in_chans
            options.val_split = source.val_split
            sizes.append(check_models(self.request, variant))
            options.device_images = device_images.decide(options, sizes[-1][0], source, self.request.options)
            if not options.device_images:
                _drop_device_options(options)
        for variant in variants:
            _check_training(variant, source)
        return source, sizes, []


class TimmScript:
    """timm's `train.py`, which trains a run with a process for each GPU of each node."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def run_plan(self, stages: Sequence[Stage], **of_design: Any) -> RunPlan:
        """Return the plan of a run, with the batch divided among the processes."""
        request = self.request
        run = RunPlan(str(request.train_py.absolute()), stages, **of_design, gpus=request.gpus, nodes=request.nodes)
        return run.with_divided_batch()

    def check(self, variants: Sequence[Variant]) -> Checked:
        """Check the variants, and that the user's `train.py` has all their options.

        The data set is opened, and thereby checked, if it is an image folder on this machine or `num_classes` is not
        set. Options that follow from the data set and from the memory of the GPUs are set in place.
        """
        request, script = self.request, self.request.train_py
        of_script = vars(recipe.of_script(script).parse_args([]))
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
        unknown = first.num_classes is None  # open the data set to count classes; the paper's recipes set num_classes
        if unknown or is_here(first):
            source = open_source(Namespace(**{**vars(first), **ignored}))
            for options in (variant.options for variant in variants):
                options.val_split = source.val_split
                if unknown:
                    options.num_classes, options.in_chans = source.num_classes, source.in_chans
        for variant in variants:
            options = variant.options
            _drop_device_options(options)
            if options.dataset == "digits":
                raise LabError("train.py has no data set digits: choose another --dataset, or remove --train-py")
            sizes.append(check_models(request, variant))
            for key, value in list(vars(options).items()):
                if value != known_options()[key]["default"]:
                    if key not in of_script:
                        raise LabError(f"{script} has no option {key}: the script is of another timm release")
                elif key in of_script:
                    setattr(options, key, of_script[key])  # the script may be from a timm with other defaults
                else:
                    delattr(options, key)
        return source, sizes, fit_cells(request, variants)


Trainer = LabLoop | TimmScript


def choose(request: Request) -> Trainer:
    """Return the trainer of the runs: `train.py` if the request has a script, otherwise the lab's own loop."""
    if request.gpus < 0 or request.nodes < 1:
        raise LabError(f"--gpus must be at least 0 and --nodes at least 1, got {request.gpus} and {request.nodes}")
    if request.train_py is not None:
        return TimmScript(request)
    if request.design.scale == "paper":
        raise LabError("scale 'paper' needs timm's train.py: add --train-py FILE, or set TIMM_DIR to the folder of "
                       "train.py")
    return LabLoop(request)


def check_options(options: Namespace) -> None:
    """Raise a LabError if the lab's loop lacks the schedule, or an option whose value is not the default."""
    supported = options_with("lab", "used", "unused") | {"data"}
    missing = [f"'{key}'" for key, value in vars(options).items()
               if key not in supported and not recipe.is_default(key, value)]
    if missing:
        raise LabError(f"timm's train.py has {', '.join(missing)}, but the lab's own loop does not: remove the option, "
                       "or train with --train-py")
    if options.sched in ("plateau", "none"):
        raise LabError(f"the lab's own loop has no schedule '{options.sched}': choose another, such as constant, or "
                       "train with --train-py")


def _check_training(variant: Variant, source: Source) -> None:
    """Build the model, optimizer, schedule and loaders of a variant, with the connection at the end of training."""
    kwargs = {**variant.options.model_kwargs, "connection": variant.final_connection}
    options = Namespace(**{**vars(variant.options), "model_kwargs": kwargs})
    if options.epochs < 1:
        raise LabError(f"epochs must be at least 1, got {options.epochs}")
    stage = Stage(".", vars(options))
    with refused("timm cannot build a run from these options"):
        Training(RunPlan("lab", [stage]), stage, Path(), source, options)


def _drop_device_options(options: Namespace) -> None:
    """Remove the options of images on the device, which have no effect on a run that uses a loader."""
    for key in DEVICE_OPTIONS:
        delattr(options, key)
