"""Triton kernels for the residual update and its gradients; :mod:`timm_ortho.functional` imports them on first use.

The docstring of :mod:`timm_ortho.functional` lists the equations. Products, sums and divisions are in the accumulation
dtype (float32, or float64 for float64 inputs). Results are rounded once, when they are stored.

Memory traffic for a stream of S bytes (k S means k tensors of that size):

| | forward | backward |
| --- | --- | --- |
| lower bound: read every input once, write every result once | 3 S, like ``x + f`` | 5 S: g, x, y (or f), 2 gradients |
| a tile contains the whole projection (``feature`` of up to 512 channels in NCHW, 8192 elsewhere) | 3 S | 5 S |
| a projection is larger than a tile (``global``) | 5 S: x, f again after the sums | 7 S; 8 S with learned weights |

A projection here is the set of elements that one inner product sums over. A tile is the set of elements that a program
loads at once.

Tensors are viewed as ``[outer, width, inner]``, and each projection sums over ``width`` (:mod:`timm_ortho._views`).
Contiguous NCHW is not transposed: a program reads several of the ``inner`` pixels at once.

Sums have a fixed order and use no atomics, so results are deterministic. The kernels do not synchronise the device and
can be captured in a CUDA graph.
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

TILE = 4096  # elements of each tensor in a tile; 8192 if a whole row or column then fits
LONGEST_ROW = 8192  # longest row (adjacent elements) in one tile; longer rows are split into pieces
LONGEST_COLUMN = 512  # longest column (channels of a pixel in NCHW) in one tile; longer columns are read twice
PIXELS = 16  # smallest number of adjacent pixels in a tile: 32 bytes in half precision, one memory transaction
PER_THREAD = 16  # elements of each tensor per thread: two 16-byte loads in half precision, four in float32
MOST_PIECES = 1024  # most pieces of a row; every program of the row adds the sums of all pieces in one step


# --------------------------------------------------------------------------------------- the formula, in Triton
@triton.jit
def _combine(x, f, s, a, b):
    """Return ``y = b f + (1 + (a - b) s) x``."""
    return b * f + (1.0 + (a - b) * s) * x


@triton.jit
def _branch(x, kept, s, RECOVER: tl.constexpr):
    """Return ``f``. If RECOVER, `kept` contains y, and ``f = y - (1 - s) x``, which requires a = 0 and b = 1."""
    if RECOVER:
        kept = kept - (1.0 - s) * x
    return kept


@triton.jit
def _stream_gradient(x, f, g, s, t, a, b):
    """Return ``dL/dx = (1 + k s) g + k t f - 2 k s t x``, where k = a - b and t = <x, g> / n."""
    return (1.0 + (a - b) * s) * g + (a - b) * t * (f - 2.0 * s * x)


@triton.jit
def _branch_gradient(x, g, t, a, b):
    """Return ``dL/df = b g + k t x``, where k = a - b and t = <x, g> / n."""
    return b * g + (a - b) * t * x


@triton.jit
def _weight(number, pointer, ACC: tl.constexpr):
    """Return a weight in the accumulation dtype: the value at the pointer, or the number if there is no pointer."""
    if pointer is None:
        return tl.full([], number, ACC)
    else:
        return tl.load(pointer).to(ACC)


# ------------------------------------------------------------------------------------------- tiles of a program
# A tile has the shape [BLOCK_P projections, BLOCK_W elements] and strides `step_p` and `step_w`. One stride is 1, and
# Triton orders the threads along that axis. A program's start is a 64-bit offset; offsets from the start have 32 bits.
@triton.jit
def tile_index(
        width, count, step_p, step_w, step_outer, pieces, piece_width, REVERSED: tl.constexpr, BLOCK_P: tl.constexpr,
):
    """Return the position of this program.

    Returns:
        The offset of the program's first element, the index of its first projection, the indices of its projections
        counted from this first one, whether each of them exists, the index of its piece, and the width of the piece.
    """
    program = tl.program_id(0)
    if REVERSED:  # begin with the elements that the previous kernel read last: they are still in the cache
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
    """Return the offsets of a tile's elements from the program's first element, and whether each element exists."""
    return p[:, None] * step_p + w[None, :] * step_w, valid[:, None] & (w < width)[None, :]


@triton.jit
def _load(pointer, offsets, mask, ACC: tl.constexpr):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(ACC)


@triton.jit
def _sums(
        p_ptr, q_ptr, r_ptr, p, valid, step_p, step_w, width,
        SAME: tl.constexpr, BOTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, ACC: tl.constexpr,
):
    """Return ``<p, r>`` and, if BOTH, ``<q, r>`` over ``width`` elements. SAME: p_ptr equals r_ptr."""
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
    """Return the sum over all pieces of each projection, in a fixed order."""
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
    """Store ``<p, r>`` and, if BOTH, ``<q, r>`` of one piece, for projections that are split into pieces."""
    start, projection, p, valid, piece, width = tile_index(
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
    """Forward: store y and, if STORE, also ``n = <x, x> + eps`` and ``s = <x, f> / n`` of each projection.

    If ONCE, a tile contains the whole projection. If not ONCE and BLOCK_PIECES is 0, a program reads its projection
    twice. If BLOCK_PIECES is not 0, a program reads one piece, and it reads the sums of all pieces from `xx_ptr` and
    `xf_ptr`.
    """
    CUT: tl.constexpr = BLOCK_PIECES > 0
    start, projection, p, valid, piece, width = tile_index(
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
    if STORE:  # noqa: SIM102 STORE is known at compile time, the inner condition at run time
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
    """Backward: store dL/dx if FOR_X, dL/df if FOR_F, and <x, g> and <f, g> of each projection if FOR_WEIGHTS.

    If RECOVER, `kept_ptr` contains y, otherwise f. :func:`_update_kernel` describes ONCE and BLOCK_PIECES.
    """
    CUT: tl.constexpr = BLOCK_PIECES > 0
    start, projection, p, valid, piece, width = tile_index(
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
    else:  # FOR_WEIGHTS excludes RECOVER, so `kept_ptr` contains f
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


# ----------------------------------------------------------------------------------------------------- launches
@functools.lru_cache(maxsize=1024)
def launch_of(outer: int, width: int, inner: int) -> Tuple[int, Dict[str, int]]:
    """Return the number of programs and the kernel arguments for a view ``[outer, width, inner]``."""
    rows = inner == 1
    pieces, block_pieces, piece_width = 1, 0, width
    block_w = triton.next_power_of_2(width)
    if rows and width > LONGEST_ROW:
        # a full piece has at least four tiles, and there are at most MOST_PIECES pieces
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
        enable_fp_fusion=True,  # the present default, which future releases of Triton will change
    )


def update(
        x: Tensor, f: Tensor, a: Weight, b: Weight, dims: Sequence[int], eps: float, keep: bool = True,
) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """Compute :func:`timm_ortho.functional.residual_update` for checked arguments and tensors of any strides.

    Args:
        keep: Whether to return s and n. If False, only y is allocated.

    Returns:
        ``(y, s, n)``. y has the shape and memory format of ``x``. s and n have size 1 along ``dims`` and the
        accumulation dtype; they are None unless ``keep``.
    """
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, f.dtype))
    acc = accumulate_in(y.dtype)
    view = view_of(tuple(x.shape), x.stride(), tuple(dims))
    s, n = (_projections(x, view, dims, acc) for _ in range(2)) if keep else (None, None)
    if x.numel() == 0:  # an empty projection has s = 0
        return y, s if s is None else s.zero_(), n if n is None else n.fill_(eps)
    x_view, f_view, y_view = arranged(x, view), arranged(f, view), arranged(y, view)
    programs, options = launch_of(*view[1:])
    with torch.cuda.device_of(x):
        xx, xf = _partial_sums(x_view, f_view, x_view, programs, options, acc, both=True)
        _update_kernel[(programs,)](
            x_view, f_view, y_view, s, n, xx, xf, *_weights(a, b, x), eps, **options,
            STORE=keep, ONCE=_once(options), ACC=triton_dtype(acc))
    put_back(y_view, y, view)
    return y, s, n


def gradients(
        x: Tensor, kept: Tensor, g: Tensor, s: Tensor, n: Tensor, a: Weight, b: Weight, dims: Sequence[int],
        recover: bool, branch_dtype: torch.dtype, needed: Sequence[bool] = (True, True, True),
) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Compute the gradients of :func:`update`.

    Args:
        x: Stream.
        kept: The result y if ``recover``, otherwise the branch output f.
        g: dL/dy.
        s, n: Results of :func:`update`.
        a, b, dims: Arguments of :func:`update`.
        recover: Whether to recover f from y, which requires a = 0 and b = 1.
        branch_dtype: Dtype of f and of dL/df.
        needed: Whether to compute dL/dx, dL/df, and the two inner products.

    Returns:
        ``(dL/dx, dL/df, <x, g>, <f, g>)``, with None for results that are not needed. The gradients have the shape and
        memory format of ``x``, the inner products have the shape and dtype of ``s``.
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
    programs, options = launch_of(*view[1:])
    with torch.cuda.device_of(x):
        parts = _partial_sums(*views, programs, options, n.dtype, both=for_weights)
        _gradients_kernel[(programs,)](
            *views, s_view, n_view, *outs, xg, fg, *parts, *_weights(a, b, x), **options,
            RECOVER=recover, FOR_X=for_x, FOR_F=for_f, FOR_WEIGHTS=for_weights, ONCE=_once(options),
            ACC=triton_dtype(n.dtype))
    for out, grad in zip(outs, (grad_x, grad_f), strict=True):
        if grad is not None:
            put_back(out, grad, view)
    return grad_x, grad_f, xg, fg


def _partial_sums(
        p: Tensor, q: Tensor, r: Tensor, programs: int, options: Dict[str, int], acc: torch.dtype, both: bool,
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """Return ``<p, r>`` and, if ``both``, ``<q, r>`` of every piece; None if projections are not split into pieces."""
    if not options["BLOCK_PIECES"]:
        return None, None
    pr, qr = (p.new_empty(programs, dtype=acc) if wanted else None for wanted in (True, both))
    _partial_sums_kernel[(programs,)](p, q, r, pr, qr, **options, SAME=p is r, BOTH=both, ACC=triton_dtype(acc))
    return pr, qr


def _once(options: Dict[str, int]) -> bool:
    return options["pieces"] == 1 and options["width"] <= options["BLOCK_W"]


def _projections(x: Tensor, view: View, dims: Sequence[int], acc: torch.dtype) -> Tensor:
    """Return an uninitialized tensor of the shape of x, but with size 1 along ``dims``: one number per projection."""
    reduced = {d % x.dim() for d in dims}
    shape = [1 if axis in reduced else x.shape[axis] for axis in view.order]
    return x.new_empty(shape, dtype=acc).permute(view.inverse)


def _weights(a: Weight, b: Weight, x: Tensor) -> List[Any]:
    """Return a_ptr, b_ptr, a, b for the kernels. Pointers to learned weights avoid a synchronisation."""
    tensors = [w.to(x.device) if isinstance(w, Tensor) else None for w in (a, b)]
    return [*tensors, *(0.0 if isinstance(w, Tensor) else float(w) for w in (a, b))]


def triton_dtype(acc: torch.dtype):
    return tl.float64 if acc == torch.float64 else tl.float32
