"""A Triton kernel for the maps of the stream; :mod:`timm_ortho.skips` imports it on first use.

It moves what an addition moves: x and f are read once and P x + f is written once, 3 S for a stream of S bytes, and the
backward pass reads g and writes P^T g, 2 S. The operations of PyTorch take a pass over the stream for each of a map's
matrices, and two more for half precision.

A program holds some pixels or tokens with all their channels, as [pixels, upper, lower]: channel c is row c // lower
and column c % lower. There each map is small:

| map | upper x lower | what is done |
| --- | --- | --- |
| a Kronecker product of two matrices, A ⊗ B | rows of A x rows of B | A X B^T for each pixel |
| of one matrix, B | 1 x rows of B | X B^T |
| ``own`` I + ``mean`` P_MR of B branches | B x C/B | ``own`` X + ``mean`` (mean of the rows of X) |

Products of more matrices are taken two at a time, from the last. Sides are padded with zeros to powers of two, and to
the 16 that a tensor core takes. Products are in float32, on tensor cores as three products of TF32 each, which leave
about float32's own rounding. Means of float64 are in float64, products of it are left to PyTorch.
"""
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import (
    PER_THREAD,
    PIXELS,
    TILE,
    accumulate_in,
    arranged,
    on_device_of,
    place,
    put_back,
    triton_dtype,
    view_of,
)

__all__ = ["operator", "transform", "why_not"]

LARGEST = 2 * TILE  # channels of a pixel, padded, that a program can hold
MOST_ROWS = 64  # of a matrix; two of these spill 144 bytes of a thread at compute capability 8.0, none at 9.0
PRECISION = "tf32x3" if torch.version.hip is None else "ieee"  # of products in float32
OLDEST = (3, 3)  # release of Triton: 3.2 aborts when it compiles the products
RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
LEAST = 16  # rows and columns that a tensor core multiplies


# ------------------------------------------------------------------------------------------------- the kernel
@triton.jit
def _matrix(pointer, index, size, TRANSPOSED: tl.constexpr):
    """``[from, to]`` of the matrix M at the pointer, so that a row of a stream times it is M's product with the row."""
    if TRANSPOSED:
        offsets = index[:, None] * size + index[None, :]
    else:
        offsets = index[None, :] * size + index[:, None]
    return tl.load(pointer + offsets, mask=(index < size)[:, None] & (index < size)[None, :], other=0.0)


@triton.jit
def _transform_kernel(
        x_ptr, f_ptr, y_ptr, left_ptr, right_ptr, own: tl.float64, mean: tl.float64,
        width, count, step_p, step_w, step_outer, upper, lower,
        TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
        BLOCK_P: tl.constexpr, UPPER: tl.constexpr, LOWER: tl.constexpr,
):
    """``y = P x``, or ``P x + f`` if there is an f: see the table at the head of this file."""
    start, _, p, valid, _, _ = place(width, count, step_p, step_w, step_outer, 1, width, False, BLOCK_P)
    i = tl.arange(0, UPPER)
    j = tl.arange(0, LOWER)
    channels = (i * lower)[None, :, None] + j[None, None, :]
    offsets = p[:, None, None] * step_p + channels * step_w
    mask = valid[:, None, None] & (i < upper)[None, :, None] & (j < lower)[None, None, :]
    y = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(ACC)
    if right_ptr is None:
        means = tl.sum(y, 1)[:, None, :] / upper
        y = tl.full([], own, ACC) * y + tl.full([], mean, ACC) * means
    else:
        right = _matrix(right_ptr, j, lower, TRANSPOSED)
        rows = tl.reshape(y, [BLOCK_P * UPPER, LOWER])
        y = tl.reshape(tl.dot(rows, right, input_precision=PRECISION, out_dtype=ACC), [BLOCK_P, UPPER, LOWER])
    if left_ptr is not None:
        left = _matrix(left_ptr, i, upper, TRANSPOSED)
        rows = tl.reshape(tl.permute(y, (0, 2, 1)), [BLOCK_P * LOWER, UPPER])
        columns = tl.reshape(tl.dot(rows, left, input_precision=PRECISION, out_dtype=ACC), [BLOCK_P, LOWER, UPPER])
        y = tl.permute(columns, (0, 2, 1))
    if f_ptr is not None:
        y = y + tl.load(f_ptr + start + offsets, mask=mask, other=0.0)
    tl.store(y_ptr + start + offsets, y, mask=mask)


# ------------------------------------------------------------------------------------------- how it is launched
class Shape(NamedTuple):
    """How a program sees the channels of a pixel: the sizes, and these padded."""

    upper: int
    lower: int
    padded_upper: int
    padded_lower: int


def shape_of(rows: Sequence[int], channels: int, branches: int) -> Shape:
    """For one or two matrices of so many rows each; for none, the mean over the branches of so many channels."""
    if not rows:
        upper, lower = branches, channels // branches
        return Shape(upper, lower, triton.next_power_of_2(upper), triton.next_power_of_2(lower))
    upper, lower = (1, *rows)[-2:]
    padded = [max(LEAST, triton.next_power_of_2(size)) for size in (upper, lower)]
    return Shape(upper, lower, padded[0] if len(rows) > 1 else 1, padded[1])


def launch_of(outer: int, width: int, inner: int, shape: Shape, is_product: bool) -> Tuple[int, Dict[str, Any]]:
    """Number of programs, and the arguments that say what each of them works on."""
    channels = shape.padded_upper * shape.padded_lower
    rows = inner == 1
    # products with matrices of 64 rows take twice the registers: half as many elements for a thread
    share = 2 if is_product and max(shape) >= MOST_ROWS else 1
    block_p = max(1, TILE // share // channels)
    if not rows:
        block_p = max(block_p, min(PIXELS, LARGEST // share // channels))
    count = outer if rows else inner
    programs = (1 if rows else outer) * triton.cdiv(count, block_p)
    return programs, dict(
        width=width, count=count, step_p=width if rows else 1, step_w=1 if rows else inner,
        step_outer=0 if rows else width * inner, upper=shape.upper, lower=shape.lower,
        BLOCK_P=block_p, UPPER=shape.padded_upper, LOWER=shape.padded_lower,
        num_warps=min(16 // share, max(1, block_p * channels * share // (32 * PER_THREAD))),
        enable_fp_fusion=True,  # as in kernels.py
    )


def why_not(rows: Sequence[int], width: int, branches: int, dtype: torch.dtype) -> Optional[str]:
    """What keeps the kernel from a map of streams of this dtype with matrices of so many rows, or None."""
    if RELEASE < OLDEST:
        return f"it takes Triton {'.'.join(map(str, OLDEST))} or newer, this is {triton.__version__}"
    if rows and dtype == torch.float64:
        return "its products are in float32"
    if max(rows, default=0) > MOST_ROWS:
        return f"its matrices have {MOST_ROWS} rows at most, a stream of {width} channels takes {max(rows)}"
    if not rows and triton.next_power_of_2(branches) * triton.next_power_of_2(width // branches) > LARGEST:
        return f"it takes means over {LARGEST} channels at most, the stream has {width}"
    return None


def transform(
        x: Tensor,
        f: Optional[Tensor],
        own: float,
        mean: float,
        branches: int,
        matrices: Sequence[Tensor],
        dim: int,
        transposed: bool = False,
) -> Tensor:
    """``P x``, or ``P x + f``; arguments as in :func:`timm_ortho.skips.plain_skip`, taken to be checked.

    Args:
        matrices: Contiguous, on the device of ``x``, in the dtype that products are in.

    Returns:
        A tensor of the shape and memory format of ``x``, in the dtype of ``x + f``.
    """
    y = _room_for_sum(x, f)
    if x.numel() == 0:
        return y
    acc = accumulate_in(x)
    view = view_of(tuple(x.shape), x.stride(), (dim,))
    _, outer, width, inner = view
    source, branch, target = arranged(x, view), None if f is None else arranged(f, view), arranged(y, view)
    steps = [list(matrices)]
    while len(steps[0]) > 2:  # the last two first
        steps[:1] = [steps[0][:-2], steps[0][-2:]]
    with on_device_of(x):
        for step in reversed(steps):
            is_last = step is steps[0]
            shape = shape_of([len(matrix) for matrix in step], width, branches)
            channels = shape.upper * shape.lower
            programs, where = launch_of(outer * width // channels, channels, inner, shape, bool(step))
            out = target if is_last else torch.empty_like(target, dtype=acc)
            left, right = (None, None, *step)[-2:]
            _transform_kernel[(programs,)](
                source, branch if is_last else None, out, left, right, own, mean, **where,
                TRANSPOSED=transposed, PRECISION=PRECISION, ACC=triton_dtype(acc))
            source, width, inner = out, width // channels, inner * channels
    put_back(target, y, view)
    return y


def _room_for_sum(x: Tensor, f: Optional[Tensor]) -> Tensor:
    return torch.empty_like(x, dtype=x.dtype if f is None else torch.promote_types(x.dtype, f.dtype))


# ------------------------------------------------------------------------- as an operator that compilers can handle
@torch.library.custom_op("timm_ortho::skip", mutates_args=())
def operator(
        x: Tensor, f: Optional[Tensor], own: float, mean: float, branches: int, matrices: List[Tensor], dim: int,
        transposed: bool,
) -> Tensor:
    """:func:`transform`, for use inside ``torch.compile``."""
    return transform(x, f, own, mean, branches, matrices, dim, transposed)


@operator.register_fake
def _(x, f, own, mean, branches, matrices, dim, transposed):
    return _room_for_sum(x, f)


def _setup_context(ctx, inputs, output) -> None:
    x, f, *ctx.numbers, matrices, ctx.dim, ctx.transposed = inputs
    ctx.dtypes = x.dtype, None if f is None else f.dtype
    ctx.save_for_backward(*matrices)


def _backward(ctx, g):
    for_x, for_f = ctx.needs_input_grad[:2]
    grad_x = operator(g, None, *ctx.numbers, list(ctx.saved_tensors), ctx.dim, not ctx.transposed) if for_x else None
    return (
        None if grad_x is None else grad_x.to(ctx.dtypes[0]), g.to(ctx.dtypes[1]) if for_f else None,
        None, None, None, [None] * len(ctx.saved_tensors), None, None)


operator.register_autograd(_backward, setup_context=_setup_context)
