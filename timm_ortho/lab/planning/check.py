"""Check that the trainer of a request, the lab's own loop or timm's `train.py`, can train its study.

One model of each architecture is built, and run on blank images of its size. The checks write no files.
"""
import inspect
import json
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import timm
import torch
from timm.layers import PatchEmbed
from torch import nn

from ..._images import data_config
from ..._text import CONSTRUCTOR_ERRORS, error_text, print_line
from .. import LabError, device_images
from ..data import Source, open_source
from ..folder import Variant
from ..image_folder import STREAMED, is_here
from ..running.loop import Training, build_model
from ..train_options import DEVICE_OPTIONS, defaults, known_options, options_with
from . import recipe
from .request import Request

_WITHOUT_WEIGHTS = {"pretrained": False, "initial_checkpoint": "", "seed": 0}
_OF_ARCHITECTURE = (
    "model", "num_classes", "in_chans", "img_size", "input_size", "gp", "drop", "drop_path", "drop_block",
    "bn_momentum", "bn_eps", "pretrained", "pretrained_path", "initial_checkpoint")


def check(
        request: Request, variants: Sequence[Variant],
) -> tuple[list[Variant], Optional[Source], list[list[int]], int]:
    """Check machines, data set, models and options of a request.

    Returns:
        The variants with the options that follow from the data set and the models, the opened data set (None if only
        `train.py` opens it), height and width of each variant's images, and the number of parameters of the first
        model.

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
        source, of_data, of_script = *_for_lab(request, variants), {}
    else:
        of_script = vars(recipe.of_script(request.train_py).parse_args([]))
        source, of_data = _for_script(request, variants[0].options)
    checked, sizes, parameters, last, built = [], [], 0, "", set()
    for variant in (variant.with_options(**of_data) for variant in variants):
        architecture = _architecture(variant.options)
        if architecture != last:
            with _refused(f"{variant.options.model} with connection '{variant.stages[0].connection}'"):
                found, size = _size(variant.options)
                # timm's script may find the initial weights only on another machine
                without = {} if request.train_py is None else _WITHOUT_WEIGHTS
                model = _run(variant.with_options(**found, **without).options, size)
            last, parameters = architecture, parameters or sum(each.numel() for each in model.parameters())
        variant = variant.with_options(**found)
        for stage in variant.stages:
            with _refused(f"{variant.options.model} with connection '{stage.connection}'"):
                _on_meta(Namespace(**stage.options))
        if request.train_py is None:
            variant = _loop_variant(variant, size, source, request)
            if (settings := str({**vars(variant.options), "model_kwargs": architecture})) not in built:
                _build_training(variant, source, model)
                built.add(settings)
        else:
            variant = _script_variant(variant, of_script, request.train_py)
        checked.append(variant)
        sizes.append(size)
    return checked, source, sizes, parameters


def _warn_of_ignored(text: str, names: Sequence[str]) -> None:
    if names:
        print_line(f"timm-ortho: {text.format(', '.join(dict.fromkeys(names)))}")


# ------------------------------------------------------------------------------------------------ the models
def _architecture(options: Namespace) -> str:
    """Return a text that is equal for options whose models differ at most in the connection."""
    arguments = {key: value for key, value in options.model_kwargs.items() if not key.startswith("connection")}
    return json.dumps([arguments, *(getattr(options, name) for name in _OF_ARCHITECTURE)], default=str)


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
    if other_size and takes_img_size(model) and "img_size" not in options.model_kwargs:
        found["model_kwargs"] = {"img_size": height if height == width else [height, width]}
    return found, [height, width]


def _run(options: Namespace, size: list[int]) -> nn.Module:
    """Build a model, run it on two blank images, and return it."""
    height, width = size
    model = build_model(options, options.num_classes, options.in_chans or 3)
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


def _on_meta(options: Namespace) -> nn.Module:
    """Build a model whose tensors have no memory."""
    with torch.device("meta"):
        return build_model(
            Namespace(**{**vars(options), **_WITHOUT_WEIGHTS}), options.num_classes, options.in_chans or 3)


@contextmanager
def _refused(subject: str) -> Iterator[None]:
    """Turn an error of timm or torch into a LabError whose message begins with `subject`."""
    try:
        yield
    except LabError:
        raise
    except KeyError as error:  # timm's tables of layers raise KeyError for an unknown name
        raise LabError(f"{subject}: unknown name {error}") from None
    except (*CONSTRUCTOR_ERRORS, OSError) as error:
        raise LabError(f"{subject}: {error_text(error)}") from None


def takes_img_size(model: nn.Module) -> bool:
    """Return whether the model's class or a base class has an argument `img_size`."""
    return any("img_size" in inspect.signature(vars(cls)["__init__"]).parameters
               for cls in type(model).__mro__[:-1] if "__init__" in vars(cls))


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


def _loop_variant(variant: Variant, size: Sequence[int], source: Any, request: Request) -> Variant:
    """Return a variant with the options of its images. Options of images on the device have no effect on a loader."""
    if device_images.decide(variant.options, size, source, request.options):
        return variant.with_options(device_images=True)
    return variant.without(DEVICE_OPTIONS)


def _build_training(variant: Variant, source: Any, model: nn.Module) -> None:
    """Make the optimizer, schedule and loaders of a run once."""
    divided = variant.with_divided_batch()
    if not torch.cuda.is_available():  # the runs may train on a node of a cluster
        divided = divided.with_options(device="cpu")
    with _refused("timm cannot build a run from these options"):
        Training(divided, divided.stages[0], Path(), source, divided.options, model)


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
    limits = [] if first.dataset.partition("/")[0] in STREAMED else limits
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


def _script_variant(variant: Variant, of_script: dict[str, Any], script: Optional[Path]) -> Variant:
    """Return a variant with the options of a `train.py` that may be of another timm release, with other defaults."""
    variant = variant.without(DEVICE_OPTIONS)
    unset = [key for key, value in vars(variant.options).items() if value == known_options()[key]["default"]]
    missing = [key for key in vars(variant.options) if key not in unset and key not in of_script]
    if missing:
        raise LabError(f"{script} has no option {missing[0]}: the script is of another timm release")
    own = {key: of_script[key] for key in unset if key in of_script and key != "model_kwargs"}
    return variant.with_options(**own).without([key for key in unset if key not in of_script])
