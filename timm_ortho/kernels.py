"""Triton kernels for the residual update and its gradients; :mod:`timm_ortho.functional` imports them on first use.

The equations are those of :mod:`timm_ortho.functional`. Products, sums and divisions are in the accumulation dtype
(float32, or float64 for float64 inputs), with one rounding when a result is stored. What has to move, for a stream of
S bytes, and what these kernels move:

| | forward | backward |
| --- | --- | --- |
| the limit: every input read once, every result written once | 3 S, as ``x + f`` | 5 S: x, y or f, g; two gradients |
| a projection fits one program (``feature``) | 3 S | 5 S |
| a projection is cut into pieces (``global``) | 5 S: x and f again, once their products are known | 7 S |

Tensors are viewed as ``[outer, width, inner]`` with a projection over ``width`` (:mod:`timm_ortho._views`). A program
reads the ``inner`` pixels of contiguous NCHW side by side; no transposed copy is made.

Sums are made in a fixed order and without atomics: the same inputs give the same bits. Nothing waits for the device,
and everything can be captured in a CUDA graph.
"""
import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._views import View, arranged, put_back, view_of
from .backends import accumulate_in

Weight = Union[float, Tensor]

TILE = 4096  # elements of each tensor that a program holds at a time
LONGEST_ROW = 8192  # elements of a row that a program holds whole; longer rows are cut into pieces
LONGEST_COLUMN = 512  # likewise, channels of a pixel in NCHW; longer ones are read twice by the same program
PIXELS = 16  # that a program reads side by side at least: 32 bytes in half precision, the unit of the memory
PER_THREAD = 16  # elements of each tensor: two or four loads of 16 bytes, and three tensors fit the registers
MOST_PIECES = 1024  # of a row, so that one program can add up their sums at once


# --------------------------------------------------------------------------------------- the formula, in Triton
@triton.jit
def _combine(x, f, s, a, b):
    """``y = b f + (1 + (a - b) s) x``"""
    return b * f + (1.0 + (a - b) * s) * x


@triton.jit
def _branch(x, kept, s, RECOVER: tl.constexpr):
    """``f``, or for a = 0 and b = 1 what it was: ``f = y - (1 - s) x``"""
    if RECOVER:
        kept = kept - (1.0 - s) * x
    return kept


@triton.jit
def _stream_gradient(x, f, g, s, t, a, b):
    """``dL/dx = (1 + k s) g + k t f - 2 k s t x``, where k = a - b and t = <x, g> / n"""
    return (1.0 + (a - b) * s) * g + (a - b) * t * (f - 2.0 * s * x)


@triton.jit
def _branch_gradient(x, g, t, a, b):
    """``dL/df = b g + k t x``"""
    return b * g + (a - b) * t * x


@triton.jit
def _weight(number, pointer, ACC: tl.constexpr):
    """A weight in the accumulation dtype: what its pointer holds, or the number where it has none."""
    if pointer is None:
        return tl.full([], number, ACC)
    else:
        return tl.load(pointer).to(ACC)


# ----------------------------------------------------------------------------- where a program finds its elements
# A program works on tiles of [BLOCK_P projections, BLOCK_W elements of each], `step_p` and `step_w` apart in memory.
# One of the steps is 1: there Triton lays its threads. Offsets within a program have 32 bits, where it starts has 64.
@triton.jit
def place(
        width, count, step_p, step_w, step_outer, pieces, piece_width, REVERSED: tl.constexpr, BLOCK_P: tl.constexpr,
):
    """This program's first element, the number of its first projection, the places of all, its piece, and its width."""
    program = tl.program_id(0)
    if REVERSED:  # what the program before this kernel read last is still in the cache: begin there
        program = tl.num_programs(0) - 1 - program
    piece = program % pieces
    blocks = tl.cdiv(count, BLOCK_P)
    outer = (program // pieces // blocks).to(tl.int64)
    first = (program // pieces % blocks) * BLOCK_P
    begin = piece * piece_width
    start = outer * step_outer + first.to(tl.int64) * step_p + begin.to(tl.int64) * step_w
    p = tl.arange(0, BLOCK_P)
    return start, outer * count + first, p, first + p < count, piece, tl.minimum(width - begin, piece_width)


@triton.jit
def _offsets(p, valid, w, step_p, step_w, width):
    """Offsets of a tile from the program's first element, and which of them exist."""
    return p[:, None] * step_p + w[None, :] * step_w, valid[:, None] & (w < width)[None, :]


@triton.jit
def _load(pointer, offsets, mask, ACC: tl.constexpr):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(ACC)


@triton.jit
def _sums(
        p_ptr, q_ptr, r_ptr, p, valid, step_p, step_w, width,
        SAME: tl.constexpr, BOTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, ACC: tl.constexpr,
):
    """``<p, r>`` and, if BOTH, ``<q, r>`` over ``width`` elements, a tile at a time. SAME: p and r are one tensor."""
    pr = tl.zeros([BLOCK_P, BLOCK_W], ACC)
    qr = tl.zeros([BLOCK_P, BLOCK_W], ACC)
    for begin in range(0, width, BLOCK_W):
        offsets, mask = _offsets(p, valid, begin + tl.arange(0, BLOCK_W), step_p, step_w, width)
        r_tile = _load(r_ptr, offsets, mask, ACC)
        if SAME:
            pr += r_tile * r_tile
        else:
            pr += _load(p_ptr, offsets, mask, ACC) * r_tile
        if BOTH:
            qr += _load(q_ptr, offsets, mask, ACC) * r_tile
    return tl.sum(pr, 1), tl.sum(qr, 1)


@triton.jit
def _total(partial_ptr, projection, p, valid, pieces, BLOCK_P: tl.constexpr, BLOCK_PIECES: tl.constexpr):
    """The sum over all pieces of each projection, always in the same order."""
    piece = tl.arange(0, BLOCK_PIECES)
    offsets = (projection + p)[:, None] * pieces + piece[None, :]
    return tl.sum(tl.load(partial_ptr + offsets, mask=valid[:, None] & (piece < pieces)[None, :], other=0.0), 1)


# ------------------------------------------------------------------------------------------------- the kernels
@triton.jit
def _partial_sums_kernel(
        p_ptr, q_ptr, r_ptr, pr_ptr, qr_ptr,
        width, count, step_p, step_w, step_outer, pieces, piece_width,
        SAME: tl.constexpr, BOTH: tl.constexpr,
        BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_PIECES: tl.constexpr, ACC: tl.constexpr,
):
    """First of two phases where projections are cut into pieces: ``<p, r>`` and ``<q, r>`` of one piece."""
    start, projection, p, valid, piece, width = place(
        width, count, step_p, step_w, step_outer, pieces, piece_width, False, BLOCK_P)
    pr, qr = _sums(
        p_ptr + start, q_ptr + start, r_ptr + start, p, valid, step_p, step_w, width,
        SAME, BOTH, BLOCK_P, BLOCK_W, ACC)
    offsets = (projection + p) * pieces + piece
    tl.store(pr_ptr + offsets, pr, mask=valid)
    if BOTH:
        tl.store(qr_ptr + offsets, qr, mask=valid)


@triton.jit
def _update_kernel(
        x_ptr, f_ptr, y_ptr, s_ptr, n_ptr, xx_ptr, xf_ptr, a_ptr, b_ptr, a: tl.float64, b: tl.float64, eps: tl.float64,
        width, count, step_p, step_w, step_outer, pieces, piece_width,
        STORE: tl.constexpr, ONCE: tl.constexpr,
        BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_PIECES: tl.constexpr, ACC: tl.constexpr,
):
    """Forward: ``n = <x, x> + eps``, ``s = <x, f> / n``, ``y = b f + (1 + (a - b) s) x``.

    ONCE: a projection is one tile. Otherwise a program reads it twice, or, if BLOCK_PIECES is not 0, reads one piece
    and finds the sums of all pieces in `xx_ptr` and `xf_ptr`. STORE: s and n are wanted.
    """
    CUT: tl.constexpr = BLOCK_PIECES > 0
    start, projection, p, valid, piece, width = place(
        width, count, step_p, step_w, step_outer, pieces, piece_width, CUT, BLOCK_P)
    x_ptr += start
    f_ptr += start
    y_ptr += start
    if ONCE:
        offsets, mask = _offsets(p, valid, tl.arange(0, BLOCK_W), step_p, step_w, width)
        x = _load(x_ptr, offsets, mask, ACC)
        f = _load(f_ptr, offsets, mask, ACC)
        xx = tl.sum(x * x, 1)
        xf = tl.sum(x * f, 1)
    elif CUT:
        xx = _total(xx_ptr, projection, p, valid, pieces, BLOCK_P, BLOCK_PIECES)
        xf = _total(xf_ptr, projection, p, valid, pieces, BLOCK_P, BLOCK_PIECES)
    else:
        xx, xf = _sums(x_ptr, f_ptr, x_ptr, p, valid, step_p, step_w, width, True, True, BLOCK_P, BLOCK_W, ACC)
    n = xx + tl.full([], eps, ACC)
    s = xf / n
    if STORE:  # noqa: SIM102 decided when the kernel is compiled, what is below when it runs
        if piece == 0:
            tl.store(s_ptr + projection + p, s, mask=valid)
            tl.store(n_ptr + projection + p, n, mask=valid)
    a_value = _weight(a, a_ptr, ACC)
    b_value = _weight(b, b_ptr, ACC)
    if ONCE:
        tl.store(y_ptr + offsets, _combine(x, f, s[:, None], a_value, b_value), mask=mask)
    else:
        for begin in range(0, width, BLOCK_W):
            offsets, mask = _offsets(p, valid, begin + tl.arange(0, BLOCK_W), step_p, step_w, width)
            x = _load(x_ptr, offsets, mask, ACC)
            f = _load(f_ptr, offsets, mask, ACC)
            tl.store(y_ptr + offsets, _combine(x, f, s[:, None], a_value, b_value), mask=mask)


@triton.jit
def _gradients_kernel(
        x_ptr, kept_ptr, g_ptr, s_ptr, n_ptr, grad_x_ptr, grad_f_ptr, xg_ptr, fg_ptr, xg_parts_ptr, fg_parts_ptr,
        a_ptr, b_ptr, a: tl.float64, b: tl.float64,
        width, count, step_p, step_w, step_outer, pieces, piece_width,
        RECOVER: tl.constexpr, FOR_X: tl.constexpr, FOR_F: tl.constexpr, FOR_WEIGHTS: tl.constexpr, ONCE: tl.constexpr,
        BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_PIECES: tl.constexpr, ACC: tl.constexpr,
):
    """Backward, with k = a - b and ``t = <x, g> / n``::

        dL/dx = (1 + k s) g + k t f - 2 k s t x          dL/df = b g + k t x

    RECOVER: what was kept is y, and ``f = y - (1 - s) x``. FOR_WEIGHTS: <x, g> and <f, g> of each projection are
    stored, of which dL/da and dL/db are sums. ONCE and BLOCK_PIECES as in :func:`_update_kernel`.
    """
    CUT: tl.constexpr = BLOCK_PIECES > 0
    start, projection, p, valid, piece, width = place(
        width, count, step_p, step_w, step_outer, pieces, piece_width, CUT, BLOCK_P)
    x_ptr += start
    kept_ptr += start
    g_ptr += start
    s = tl.load(s_ptr + projection + p, mask=valid, other=0.0)
    n = tl.load(n_ptr + projection + p, mask=valid, other=1.0)
    if ONCE:
        offsets, mask = _offsets(p, valid, tl.arange(0, BLOCK_W), step_p, step_w, width)
        x = _load(x_ptr, offsets, mask, ACC)
        g = _load(g_ptr, offsets, mask, ACC)
        xg = tl.sum(x * g, 1)
        if FOR_X or FOR_WEIGHTS:
            f = _branch(x, _load(kept_ptr, offsets, mask, ACC), s[:, None], RECOVER)
        if FOR_WEIGHTS:
            fg = tl.sum(f * g, 1)
    elif CUT:
        xg = _total(xg_parts_ptr, projection, p, valid, pieces, BLOCK_P, BLOCK_PIECES)
        if FOR_WEIGHTS:
            fg = _total(fg_parts_ptr, projection, p, valid, pieces, BLOCK_P, BLOCK_PIECES)
    else:  # weights that are learned keep f
        xg, fg = _sums(
            x_ptr, kept_ptr, g_ptr, p, valid, step_p, step_w, width, False, FOR_WEIGHTS, BLOCK_P, BLOCK_W, ACC)
    if FOR_WEIGHTS:  # noqa: SIM102 as in _update_kernel
        if piece == 0:
            tl.store(xg_ptr + projection + p, xg, mask=valid)
            tl.store(fg_ptr + projection + p, fg, mask=valid)
    t = (xg / n)[:, None]
    s = s[:, None]
    a_value = _weight(a, a_ptr, ACC)
    b_value = _weight(b, b_ptr, ACC)
    if ONCE:
        if FOR_X:
            tl.store(grad_x_ptr + start + offsets, _stream_gradient(x, f, g, s, t, a_value, b_value), mask=mask)
        if FOR_F:
            tl.store(grad_f_ptr + start + offsets, _branch_gradient(x, g, t, a_value, b_value), mask=mask)
    else:
        for begin in range(0, width, BLOCK_W):
            offsets, mask = _offsets(p, valid, begin + tl.arange(0, BLOCK_W), step_p, step_w, width)
            x = _load(x_ptr, offsets, mask, ACC)
            g = _load(g_ptr, offsets, mask, ACC)
            if FOR_X:
                f = _branch(x, _load(kept_ptr, offsets, mask, ACC), s, RECOVER)
                tl.store(grad_x_ptr + start + offsets, _stream_gradient(x, f, g, s, t, a_value, b_value), mask=mask)
            if FOR_F:
                tl.store(grad_f_ptr + start + offsets, _branch_gradient(x, g, t, a_value, b_value), mask=mask)


# ------------------------------------------------------------------------------------------ how they are launched
@functools.lru_cache(maxsize=1024)
def launch_of(outer: int, width: int, inner: int) -> Tuple[int, Dict[str, int]]:
    """Number of programs, and the arguments that say what each of them works on."""
    rows = inner == 1
    pieces, block_pieces, piece_width = 1, 0, width
    block_w = triton.next_power_of_2(width)
    if rows and width > LONGEST_ROW:
        # pieces of several tiles, and no more of them than one program can add up
        piece_width = max(4 * TILE, triton.cdiv(triton.cdiv(width, MOST_PIECES), TILE) * TILE)
        pieces = triton.cdiv(width, piece_width)
        block_w, block_p, block_pieces = TILE, 1, triton.next_power_of_2(pieces)
    elif rows:
        block_p = max(1, min(TILE // block_w, triton.next_power_of_2(outer)))
    else:
        block_w = min(block_w, LONGEST_COLUMN if width <= LONGEST_COLUMN else TILE // PIXELS)
        block_p = max(PIXELS, min(TILE // block_w, triton.next_power_of_2(inner)))
    count = outer if rows else inner
    programs = (1 if rows else outer) * triton.cdiv(count, block_p) * pieces
    return programs, dict(
        width=width, count=count, pieces=pieces, piece_width=piece_width,
        step_p=width if rows else 1, step_w=1 if rows else inner, step_outer=0 if rows else width * inner,
        BLOCK_P=block_p, BLOCK_W=block_w, BLOCK_PIECES=block_pieces,
        num_warps=min(16, max(1, block_p * block_w // (32 * PER_THREAD))),
        enable_fp_fusion=True,  # what Triton does today, before it changes its mind and warns of it
    )


def update(
        x: Tensor, f: Tensor, a: Weight, b: Weight, dims: Sequence[int], eps: float, keep: bool = True,
) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """``(y, s, n)`` for arguments of :func:`timm_ortho.functional.residual_update` that are checked, of any strides.

    Args:
        keep: Whether s and n are wanted; None stands for them otherwise, and nothing but y is allocated.

    Returns:
        y of the shape and memory format of ``x``; s and n with the axes ``dims`` of size 1, in the accumulation dtype.
    """
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, f.dtype))
    acc = accumulate_in(y.dtype)
    view = view_of(tuple(x.shape), x.stride(), tuple(dims))
    s, n = (_projections(x, view, dims, acc) for _ in range(2)) if keep else (None, None)
    if x.numel() == 0:  # a projection of no elements has s = 0
        return y, s if s is None else s.zero_(), n if n is None else n.fill_(eps)
    x_view, f_view, y_view = arranged(x, view), arranged(f, view), arranged(y, view)
    programs, where = launch_of(*view[1:])
    with torch.cuda.device_of(x):
        xx, xf = _partial_sums(x_view, f_view, x_view, programs, where, acc, both=True)
        _update_kernel[(programs,)](
            x_view, f_view, y_view, s, n, xx, xf, *_weights(a, b, x), eps, **where,
            STORE=keep, ONCE=_once(where), ACC=triton_dtype(acc))
    put_back(y_view, y, view)
    return y, s, n


def gradients(
        x: Tensor, kept: Tensor, g: Tensor, s: Tensor, n: Tensor, a: Weight, b: Weight, dims: Sequence[int],
        recover: bool, branch_dtype: torch.dtype, needed: Sequence[bool] = (True, True, True),
) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """``(dL/dx, dL/df, <x, g>, <f, g>)`` for what :func:`update` was given and gave.

    Args:
        kept: The result y if ``recover``, otherwise the branch output f.
        g: dL/dy.
        recover: Whether f is to be found from y, which needs a = 0 and b = 1.
        branch_dtype: Of f, and so of dL/df.
        needed: Whether dL/dx, dL/df and the two products are wanted; None stands for what is not.

    Returns:
        Gradients of the shape and memory format of ``x``; products of the shape and dtype of ``s``.
    """
    for_x, for_f, for_weights = needed
    view = view_of(tuple(x.shape), x.stride(), tuple(dims))
    grad_x = torch.empty_like(x) if for_x else None
    grad_f = torch.empty_like(x, dtype=branch_dtype) if for_f else None
    xg, fg = (_projections(x, view, dims, n.dtype) if for_weights else None for _ in range(2))
    if x.numel() == 0:
        return grad_x, grad_f, *(product if product is None else product.zero_() for product in (xg, fg))
    views = [arranged(tensor, view) for tensor in (x, kept, g)]
    outs = [None if grad is None else arranged(grad, view) for grad in (grad_x, grad_f)]
    s_view, n_view = (arranged(projection, view) for projection in (s, n))
    programs, where = launch_of(*view[1:])
    with torch.cuda.device_of(x):
        parts = _partial_sums(*views, programs, where, n.dtype, both=for_weights)
        _gradients_kernel[(programs,)](
            *views, s_view, n_view, *outs, xg, fg, *parts, *_weights(a, b, x), **where,
            RECOVER=recover, FOR_X=for_x, FOR_F=for_f, FOR_WEIGHTS=for_weights, ONCE=_once(where),
            ACC=triton_dtype(n.dtype))
    for out, grad in zip(outs, (grad_x, grad_f), strict=True):
        if grad is not None:
            put_back(out, grad, view)
    return grad_x, grad_f, xg, fg


def _partial_sums(
        p: Tensor, q: Tensor, r: Tensor, programs: int, where: Dict[str, int], acc: torch.dtype, both: bool,
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """``<p, r>`` and, if ``both``, ``<q, r>`` of every piece of every projection; None where none is cut."""
    if not where["BLOCK_PIECES"]:
        return None, None
    pr, qr = (p.new_empty(programs, dtype=acc) if wanted else None for wanted in (True, both))
    _partial_sums_kernel[(programs,)](p, q, r, pr, qr, **where, SAME=p is r, BOTH=both, ACC=triton_dtype(acc))
    return pr, qr


def _once(where: Dict[str, int]) -> bool:
    return where["pieces"] == 1 and where["width"] <= where["BLOCK_W"]


def _projections(x: Tensor, view: View, dims: Sequence[int], acc: torch.dtype) -> Tensor:
    """Room for one number for each projection: the shape of x with the axes of a projection of size 1."""
    reduced = {d % x.dim() for d in dims}
    shape = [1 if axis in reduced else x.shape[axis] for axis in view.order]
    return x.new_empty(shape, dtype=acc).permute(view.inverse)


def _weights(a: Weight, b: Weight, x: Tensor) -> List[Any]:
    """The kernels' a_ptr, b_ptr, a, b: a learned weight is read on the device, so that nothing waits for it."""
    tensors = [w.to(x.device) if isinstance(w, Tensor) else None for w in (a, b)]
    return [*tensors, *(0.0 if isinstance(w, Tensor) else float(w) for w in (a, b))]


def triton_dtype(acc: torch.dtype):
    return tl.float64 if acc == torch.float64 else tl.float32
