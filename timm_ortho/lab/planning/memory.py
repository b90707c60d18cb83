"""Choose precision and gradient accumulation so that a training step of `train.py` fits into the memory of a GPU.

A step needs memory for the weights, their gradients, the optimizer's state and DDP's buckets, and for the tensors that
autograd saves for each image. The saved tensors are counted during a forward pass with tensors that have no memory, so
no GPU is needed. For timm's `vit_small_patch16_224` on an H200, the estimate differs by less than 4 % from the
measured peak (`tests/lab/test_memory.py`).

The images of one update of the weights stay the same. The plan has as few accumulated steps as possible, and uses amp
with bfloat16 only if float32 needs more steps.
"""
import itertools
import math
import warnings
from argparse import Namespace
from functools import cache, partial
from typing import NamedTuple, Optional, Sequence

import torch
from torch import nn
from torch.func import functional_call

from ..._compat import fake_tensors
from ..._images import data_config
from ...bench.clock import saved_bytes
from .. import LabError
from ..running.loop import build_model
from .design import Variant
from .model_check import refused
from .request import Request

GB = 10**9
DEFAULT_GPU = 40.0  # GB; for plans on a machine without a GPU
_USABLE = 0.9  # the rest is for CUDA's context, the libraries' workspaces and fragmentation
_COPIES = 5  # copies of the parameters: weights, gradients, two states as in AdamW, and the buckets of DDP


class StepBytes(NamedTuple):
    """Bytes that a training step needs on a GPU."""

    fixed: int  # for any number of images
    image: int  # for each image

    def gigabytes(self, images: int) -> float:
        """Return the gigabytes of a step with this number of images."""
        return (self.fixed + images * self.image) / GB


class Fit(NamedTuple):
    """Settings of a process with which a training step fits into the memory of a GPU."""

    steps: int  # accumulated steps in one update of the weights
    amp: bool
    images: int  # images in one step
    gigabytes: float  # memory of a step

    def __str__(self) -> str:
        return f"{'amp' if self.amp else 'float32'}, {self.images} images at once, about {self.gigabytes:.0f} GB"


def gpu_memory(requested: float | str | None) -> float:
    """Return the requested gigabytes, or those of the smallest GPU of this machine, or else `DEFAULT_GPU`."""
    if requested is not None:
        try:
            gigabytes = float(requested)
        except ValueError:
            gigabytes = 0
        if not 0 < gigabytes < math.inf:
            raise LabError(f"--gpu-memory is {requested}, but must be a positive number of gigabytes")
        return gigabytes
    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return min(sizes) / GB if sizes else DEFAULT_GPU


def step_bytes(options: Namespace, amp: bool) -> StepBytes:
    """Measure the memory of a training step without a GPU.

    Args:
        options: timm's options. Their model, image size, classes and EMA are used.
        amp: Whether the step uses mixed precision.

    Raises:
        LabError: The model cannot be built, or cannot process images of this size.
    """
    channels = options.in_chans or 3
    trial = {"pretrained": False, "initial_checkpoint": "", "seed": 0}
    with refused(options.model):
        with torch.device("meta"):
            model = build_model(Namespace(**{**vars(options), **trial}), options.num_classes, channels).train()
        size = data_config(model, vars(options), channels)["input_size"]
        two, four = (_saved_bytes(model, (images, *size), amp) for images in (2, 4))
    saved = (four - two) // 2  # the rest does not depend on the number of images: weights that amp converts
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    copies = _COPIES + bool(options.model_ema)
    loaded = 8 * size[0] * size[1] * size[2]  # the next batch, and the copy that MixUp makes
    return StepBytes(copies * parameters + two - 2 * saved, saved + loaded)


def _saved_bytes(model: nn.Module, shape: tuple[int, ...], amp: bool) -> int:
    """Return the bytes that autograd saves in a forward pass, without the model's own tensors.

    The pass is on the CPU, where scaled_dot_product_attention saves as much as the fused kernels of a GPU.
    """
    with fake_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels for the CPU
        own = {name: torch.empty_like(tensor, device="cpu").requires_grad_(tensor.requires_grad)
               for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return saved_bytes(lambda: functional_call(model, own, torch.empty(shape)), list(own.values()))


def fit(
        options: Namespace,
        processes: int,
        memory: float,
        *,
        amp: Optional[bool] = None,
        steps: Optional[int] = None,
) -> Fit:
    """Return the settings with the fewest accumulated steps, in float32 if it fits with the same number of steps.

    Args:
        options: timm's options. Their `batch_size` is the number of images in one update, over all processes.
        processes: Number of processes, each with its own GPU.
        memory: Gigabytes of a GPU.
        amp: Requires amp or float32; None to choose.
        steps: The number of accumulated steps; None to choose.

    Raises:
        LabError: No settings fit, or the model does not fit its options.
    """
    share = max(1, options.batch_size // processes)
    divisors = [number for number in range(1, share + 1) if share % number == 0] if steps is None else [max(1, steps)]
    precisions = [False, True] if amp is None else [amp]
    measured = cache(partial(step_bytes, options))
    for number, precision in itertools.product(divisors, precisions):
        images = max(1, share // number)
        needed = measured(precision).gigabytes(images)
        if needed <= _USABLE * memory:
            return Fit(number, precision, images, needed)
    raise LabError(
        f"{options.model}: a step with {images} image{'s' * (images > 1)} needs {needed:.1f} GB"
        f"{' with amp' * precision}, but a plan uses only {_USABLE * memory:.1f} GB of a GPU with {memory:g} GB: "
        "use larger GPUs, or a smaller model, image size or batch")


def fit_cells(request: Request, variants: Sequence[Variant]) -> list[str]:
    """Set `amp` and `grad_accum_steps` of variants that `train.py` trains on GPUs, equal for all variants of a cell.

    Settings of the user and of the study are kept, and only checked.

    Returns:
        A line for each cell, with the settings and the memory of a step.
    """
    if not request.device().startswith("cuda"):
        return []
    memory, processes = gpu_memory(request.gpu_memory), max(1, request.gpus) * request.nodes
    cells: dict[str, list[Variant]] = {}
    for variant in variants:
        cells.setdefault(", ".join([*map(str, variant.cell.values())] or [variant.options.model]), []).append(variant)
    lines = []
    for cell, members in cells.items():
        first = members[0].options
        amp = True if first.amp else request.options.get("amp", request.design.options.get("amp"))
        steps = first.grad_accum_steps if first.grad_accum_steps > 1 else request.options.get("grad_accum_steps")
        chosen = max(fit(member.options, processes, memory, amp=amp, steps=steps) for member in members)
        for member in members:
            member.options.grad_accum_steps = chosen.steps
            if chosen.amp and not member.options.amp:
                member.options.amp, member.options.amp_dtype = True, "bfloat16"
        lines.append(f"{cell}: {chosen} of {memory:g} GB")
    return lines
