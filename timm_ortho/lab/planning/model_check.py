"""Check the models of a study: build each one, and run it on blank images of its size."""
import inspect
from argparse import Namespace
from contextlib import contextmanager
from typing import Any, Iterator, Mapping

import torch
from timm.layers import PatchEmbed

from ..._images import data_config
from ..._text import error_text
from .. import LabError
from ..running.loop import build_model
from .design import Variant, of_connection
from .request import Request

Size = tuple[list[int], str]  # height and width of the model's images, and where this size comes from


def check_models(request: Request, variant: Variant) -> Size:
    """Check the model of a variant with its connections at the start and at the end of the training.

    The image size is set in the variant's options.
    """
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

    def build() -> torch.nn.Module:
        kwargs = of_connection(options.model_kwargs, connection)
        trial = {"pretrained": False, "initial_checkpoint": "", "seed": 0, "model_kwargs": kwargs}
        return build_model(Namespace(**{**vars(options), **trial}), options.num_classes, channels)

    with refused(f"{options.model} with connection '{connection}'"):
        model = build()
        if options.img_size is None and options.input_size is None:
            size = options.model_kwargs.get("img_size")
            if isinstance(size, (tuple, list)):  # train.py's --img-size is one number
                options.input_size = [channels, *size]
            else:
                options.img_size = size
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
