"""Inputs, layouts and pytest marks for the tests of the kernels."""
import importlib

import pytest
import torch

from timm_ortho.update import backend as backends

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
EPS = 1e-2  # so large that tests fail if an implementation omits eps

why_not = backends.why_not_triton(DEVICE)
needs_triton = pytest.mark.skipif(why_not is not None, reason=str(why_not))
both = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
planning = importlib.import_module("timm_ortho.update.plan") if backends.TRITON_IS_INSTALLED else None


def tensors(shape, dtypes=(SINGLE, SINGLE), seed=0):
    """Return a stream, a branch output and an upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(shape, dtype=DOUBLE, generator=generator) for _ in range(3))
    return [t.to(DEVICE, dtype) for t, dtype in zip(drawn, (*dtypes, torch.promote_types(*dtypes)), strict=True)]


def weight(value, dtype=SINGLE):
    """Return a number unchanged. For the name of a learned weight, return a tensor of 0.625, exact in every dtype."""
    return torch.tensor(0.625, dtype=dtype, device=DEVICE) if isinstance(value, str) else value


def nhwc(t):
    return t.contiguous(memory_format=torch.channels_last)


def inputs_with_gradients(shape=(3, 5, 20)):
    x, f, _ = tensors(shape)
    return x.requires_grad_(), f.requires_grad_()


# Shape of the stream, and axes over which one projection sums. Elements along these axes are a row if they are adjacent
# in memory, otherwise a column. The kernels cut long rows into pieces.
LAYOUTS = {
    "row": ((7, 13, 197), -1),
    "cut row": ((2, 70, 300), None),
    "column": ((5, 33, 9, 11), 1),
    "long column": ((1, 1100, 3, 3), 1),
}
WEIGHTS = [(0.0, 1.0), (0.3, 0.7), ("a", 1.0), (0.0, "b"), ("a", "b")]
layouts = pytest.mark.parametrize("layout", LAYOUTS)
