"""Triton kernels for the residual update and its gradients, imported on first use.

The docstring of :mod:`timm_ortho.update.formula` lists the equations. Products, sums and divisions are in the
accumulation dtype (float32, or float64 for float64 inputs). Results are rounded once, when they are stored.

Memory traffic for a stream of S bytes (k S means k tensors of that size):

| | forward | backward |
| --- | --- | --- |
| lower bound: read every input once, write every result once | 3 S, like ``x + f`` | 5 S: g, x, y (or f), 2 gradients |
| a tile contains the whole projection (``feature`` of up to 2048 channels in NCHW, 8192 elsewhere) | 3 S | 5 S |
| a projection is larger than a tile (``global``) | 5 S: x, f again after the sums | 7 S; 8 S with learned weights |

A projection here is the set of elements that one inner product sums over. A tile is the set of elements that a program
loads at once.

Tensors are viewed as ``[outer, width, inner]``, and each projection sums over ``width``, see
:mod:`timm_ortho.update.views`. Contiguous NCHW is not transposed: a program reads several of the ``inner`` pixels at
once.

A :class:`Plan` contains everything that depends only on shapes, strides and dtypes. It is made once and cached, because
the time to start a kernel dominates small models.

Sums have a fixed order and use no atomics, so results are deterministic. The kernels do not synchronise the device and
can be captured in a CUDA graph.
"""
import functools
import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import formula
from .backend import default, plan_key, plans, verified
from .formula import Weight, accumulate_in
from .views import arranged, put_back, view_of

TILE = 4096  # elements of each tensor in a tile of rows; 8192 if a whole row then fits
LONGEST_ROW = 8192  # longest row (adjacent elements) in one tile; longer rows are split into pieces
COLUMNS = 8192  # elements of each tensor in a tile of columns; 16384 if whole columns then fit
LONGEST_COLUMN = 2048  # longest column (channels of a pixel in NCHW) in one tile; longer columns are read twice
PIXELS = 16  # adjacent pixels in a tile of long columns: 32 bytes in half precision, one memory transaction
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
# A tile has the shape [BLOCK_P projections, BLOCK_W elements]. Its elements are adjacent along one of these axes: along
# a projection if ROWS (the view has inner = 1), otherwise along the pixels. Triton orders the threads along that axis.
# A program's start is a 64-bit offset; offsets from the start have 32 bits.
@triton.jit
def tile_index(
        outer, width, inner, pieces, piece_width,
        ROWS: tl.constexpr, REVERSED: tl.constexpr, BLOCK_P: tl.constexpr, UNIT: tl.constexpr,
):
    """Return the position of this program in a view ``[outer, width, inner]``.

    Returns:
        The offset of the program's first element, the index of its first projection, the indices of its projections
        counted from this first one, whether each of them exists, the index of its piece, the width of the piece, and
        the number of elements from one row to the next if ROWS, otherwise the number of pixels. Only rows have more
        than one piece.
    """
    # Triton itself recognises only multiples of 16. With multiples of 2, 4 and 8, it can load several elements at once.
    if ROWS:
        width = width // UNIT * UNIT
        piece_width = piece_width // UNIT * UNIT
        step = width
    else:
        inner = inner // UNIT * UNIT
        step = inner
    program = tl.program_id(0)
    if REVERSED:  # begin with the elements that the previous kernel read last: they are still in the cache
        program = tl.num_programs(0) - 1 - program
    piece = program % pieces
    begin = piece * piece_width
    p = tl.arange(0, BLOCK_P)
    if ROWS:
        first = (program // pieces).to(tl.int64) * BLOCK_P
        start = first * width + begin
        valid = first + p < outer
        projection = first
    else:
        blocks = tl.cdiv(inner, BLOCK_P)
        sample = (program // blocks).to(tl.int64)
        pixel = program % blocks * BLOCK_P
        start = sample * width * inner + pixel
        valid = pixel + p < inner
        projection = sample * inner + pixel
    return start, projection, p, valid, piece, tl.minimum(width - begin, piece_width), step


@triton.jit
def _offsets(p, w, valid, step, width, ROWS: tl.constexpr):
    """Return the offsets of a tile's elements from the program's first element, and whether each element exists.

    Args:
        p, w: Indices of the projections, and of the elements of a projection.
        valid: Whether each projection exists.
        step: Number of elements from one row to the next if ROWS, otherwise the number of pixels.
        width: Number of elements of each projection in this program.
    """
    mask = valid[:, None] & (w < width)[None, :]
    if ROWS:
        return p[:, None] * step + w[None, :], mask
    else:
        return p[:, None] + w[None, :] * step, mask


@triton.jit
def _load(pointer, offsets, mask, ACC: tl.constexpr):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(ACC)


@triton.jit
def _sums(
        p_ptr, q_ptr, r_ptr, p, valid, step, width,
        SAME: tl.constexpr, BOTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
        ACC: tl.constexpr,
):
    """Return ``<p, r>`` and, if BOTH, ``<q, r>`` over ``width`` elements. SAME: p_ptr equals r_ptr."""
    pr = tl.zeros([BLOCK_P, BLOCK_W], ACC)
    qr = tl.zeros([BLOCK_P, BLOCK_W], ACC)
    for begin in range(0, width, BLOCK_W):
        offsets, mask = _offsets(p, begin + tl.arange(0, BLOCK_W), valid, step, width, ROWS)
        r_tile = _load(r_ptr, offsets, mask, ACC)
        if SAME:
            pr += r_tile * r_tile
        else:
            pr += _load(p_ptr, offsets, mask, ACC) * r_tile
        if BOTH:
            qr += _load(q_ptr, offsets, mask, ACC) * r_tile
    return tl.sum(pr, 1), tl.sum(qr, 1)


@triton.jit
def _total(parts_ptr, projection, p, valid, pieces, BLOCK_P: tl.constexpr, BLOCK_PIECES: tl.constexpr):
    """Return the sum over all pieces of each projection, in a fixed order."""
    piece = tl.arange(0, BLOCK_PIECES)
    offsets = (projection + p)[:, None] * pieces + piece[None, :]
    return tl.sum(tl.load(parts_ptr + offsets, mask=valid[:, None] & (piece < pieces)[None, :], other=0.0), 1)


# ------------------------------------------------------------------------------------------------- the kernels
@triton.jit
def _partial_sums_kernel(
        p_ptr, q_ptr, r_ptr, parts_ptr,
        outer, width, inner, projections, pieces, piece_width, ROWS: tl.constexpr, ONCE: tl.constexpr,
        UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_PIECES: tl.constexpr, ACC: tl.constexpr,
        SAME: tl.constexpr, BOTH: tl.constexpr,
):
    """Store ``<p, r>`` of each piece in the first half of ``parts`` and, if BOTH, ``<q, r>`` in its second half."""
    start, projection, p, valid, piece, part, step = tile_index(
        outer, width, inner, pieces, piece_width, ROWS, False, BLOCK_P, UNIT)
    pr, qr = _sums(
        p_ptr + start, q_ptr + start, r_ptr + start, p, valid, step, part,
        SAME, BOTH, ROWS, BLOCK_P, BLOCK_W, ACC)
    offsets = (projection + p) * pieces + piece
    tl.store(parts_ptr + offsets, pr, mask=valid)
    if BOTH:
        tl.store(parts_ptr + tl.num_programs(0) + offsets, qr, mask=valid)


@triton.jit
def _update_kernel(
        x_ptr, f_ptr, y_ptr, sums_ptr, parts_ptr, a_ptr, b_ptr, a: tl.float64, b: tl.float64, eps: tl.float64,
        outer, width, inner, projections, pieces, piece_width, ROWS: tl.constexpr, ONCE: tl.constexpr,
        UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_PIECES: tl.constexpr, ACC: tl.constexpr,
):
    """Forward: store y and, in ``sums [2, projections]``, ``s = <x, f> / n`` and ``n = <x, x> + eps``.

    If ONCE, a tile contains the whole projection. If not ONCE and BLOCK_PIECES is 0, a program reads its projection
    twice. If BLOCK_PIECES is not 0, a program reads one piece, and it reads the sums of all pieces from ``parts``.
    """
    CUT: tl.constexpr = BLOCK_PIECES > 0
    start, projection, p, valid, piece, part, step = tile_index(
        outer, width, inner, pieces, piece_width, ROWS, CUT, BLOCK_P, UNIT)
    x_ptr += start
    f_ptr += start
    y_ptr += start
    if ONCE:
        offsets, mask = _offsets(p, tl.arange(0, BLOCK_W), valid, step, part, ROWS)
        x = _load(x_ptr, offsets, mask, ACC)
        f = _load(f_ptr, offsets, mask, ACC)
        xx = tl.sum(x * x, 1)
        xf = tl.sum(x * f, 1)
    elif CUT:
        xx = _total(parts_ptr, projection, p, valid, pieces, BLOCK_P, BLOCK_PIECES)
        xf = _total(parts_ptr + tl.num_programs(0), projection, p, valid, pieces, BLOCK_P, BLOCK_PIECES)
    else:
        xx, xf = _sums(
            x_ptr, f_ptr, x_ptr, p, valid, step, part, True, True, ROWS, BLOCK_P, BLOCK_W, ACC)
    n = xx + tl.full([], eps, ACC)
    s = xf / n
    if sums_ptr is not None:  # a mask, because a branch on the piece makes the kernel four times slower
        first_piece = valid & (p + piece == p)  # Triton 3.9 cannot interpret a scalar condition here
        tl.store(sums_ptr + projection + p, s, mask=first_piece)
        tl.store(sums_ptr + projections + projection + p, n, mask=first_piece)
    a_value = _weight(a, a_ptr, ACC)
    b_value = _weight(b, b_ptr, ACC)
    if ONCE:
        tl.store(y_ptr + offsets, _combine(x, f, s[:, None], a_value, b_value), mask=mask)
    else:
        for begin in range(0, part, BLOCK_W):
            offsets, mask = _offsets(p, begin + tl.arange(0, BLOCK_W), valid, step, part, ROWS)
            x = _load(x_ptr, offsets, mask, ACC)
            f = _load(f_ptr, offsets, mask, ACC)
            tl.store(y_ptr + offsets, _combine(x, f, s[:, None], a_value, b_value), mask=mask)


@triton.jit
def _gradients_kernel(
        x_ptr, kept_ptr, g_ptr, sums_ptr, grad_x_ptr, grad_f_ptr, products_ptr, parts_ptr, a_ptr, b_ptr,
        a: tl.float64, b: tl.float64,
        outer, width, inner, projections, pieces, piece_width, ROWS: tl.constexpr, ONCE: tl.constexpr,
        UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_PIECES: tl.constexpr, ACC: tl.constexpr,
        RECOVER: tl.constexpr,
):
    """Backward: store dL/dx, dL/df, and, in ``products [2, projections]``, <x, g> and <f, g>.

    None instead of a pointer omits the result. If RECOVER, `kept_ptr` contains y, otherwise f. :func:`_update_kernel`
    describes ONCE and BLOCK_PIECES.
    """
    CUT: tl.constexpr = BLOCK_PIECES > 0
    FOR_X: tl.constexpr = grad_x_ptr is not None
    FOR_WEIGHTS: tl.constexpr = products_ptr is not None
    start, projection, p, valid, piece, part, step = tile_index(
        outer, width, inner, pieces, piece_width, ROWS, CUT, BLOCK_P, UNIT)
    x_ptr += start
    kept_ptr += start
    g_ptr += start
    s = tl.load(sums_ptr + projection + p, mask=valid, other=0.0)
    n = tl.load(sums_ptr + projections + projection + p, mask=valid, other=1.0)
    if ONCE:
        offsets, mask = _offsets(p, tl.arange(0, BLOCK_W), valid, step, part, ROWS)
        x = _load(x_ptr, offsets, mask, ACC)
        g = _load(g_ptr, offsets, mask, ACC)
        xg = tl.sum(x * g, 1)
        if FOR_X or FOR_WEIGHTS:
            f = _branch(x, _load(kept_ptr, offsets, mask, ACC), s[:, None], RECOVER)
        if FOR_WEIGHTS:
            fg = tl.sum(f * g, 1)
    elif CUT:
        xg = _total(parts_ptr, projection, p, valid, pieces, BLOCK_P, BLOCK_PIECES)
        if FOR_WEIGHTS:
            fg = _total(parts_ptr + tl.num_programs(0), projection, p, valid, pieces, BLOCK_P, BLOCK_PIECES)
    else:  # FOR_WEIGHTS excludes RECOVER, so `kept_ptr` contains f
        xg, fg = _sums(
            x_ptr, kept_ptr, g_ptr, p, valid, step, part,
            False, FOR_WEIGHTS, ROWS, BLOCK_P, BLOCK_W, ACC)
    if FOR_WEIGHTS:
        first_piece = valid & (p + piece == p)
        tl.store(products_ptr + projection + p, xg, mask=first_piece)
        tl.store(products_ptr + projections + projection + p, fg, mask=first_piece)
    t = (xg / n)[:, None]
    s = s[:, None]
    a_value = _weight(a, a_ptr, ACC)
    b_value = _weight(b, b_ptr, ACC)
    if ONCE:
        if FOR_X:
            tl.store(grad_x_ptr + start + offsets, _stream_gradient(x, f, g, s, t, a_value, b_value), mask=mask)
        if grad_f_ptr is not None:
            tl.store(grad_f_ptr + start + offsets, _branch_gradient(x, g, t, a_value, b_value), mask=mask)
    else:
        for begin in range(0, part, BLOCK_W):
            offsets, mask = _offsets(p, begin + tl.arange(0, BLOCK_W), valid, step, part, ROWS)
            x = _load(x_ptr, offsets, mask, ACC)
            g = _load(g_ptr, offsets, mask, ACC)
            if FOR_X:
                f = _branch(x, _load(kept_ptr, offsets, mask, ACC), s, RECOVER)
                tl.store(grad_x_ptr + start + offsets, _stream_gradient(x, f, g, s, t, a_value, b_value), mask=mask)
            if grad_f_ptr is not None:
                tl.store(grad_f_ptr + start + offsets, _branch_gradient(x, g, t, a_value, b_value), mask=mask)


# ----------------------------------------------------------------------------------------------------- launches
class Tiles(NamedTuple):
    """How the programs of a launch divide a view ``[outer, width, inner]``.

    The fields after ``programs`` and ``num_warps`` are the last arguments of every kernel.
    """

    programs: int
    num_warps: int
    outer: int
    width: int
    inner: int
    projections: int
    pieces: int
    piece_width: int
    ROWS: bool
    ONCE: bool
    UNIT: int
    BLOCK_P: int
    BLOCK_W: int
    BLOCK_PIECES: int


@functools.lru_cache(maxsize=1024)
def tiles_of(outer: int, width: int, inner: int) -> Tiles:
    """Return the tiles of a view ``[outer, width, inner]``."""
    rows = inner == 1
    pieces, block_pieces, piece_width = 1, 0, width
    block_w = triton.next_power_of_2(max(1, width))
    if rows and width > LONGEST_ROW:
        # a full piece has at least four tiles, and there are at most MOST_PIECES pieces
        piece_width = max(4 * TILE, triton.cdiv(triton.cdiv(width, MOST_PIECES), TILE) * TILE)
        pieces = triton.cdiv(width, piece_width)
        block_w, block_p, block_pieces = TILE, 1, triton.next_power_of_2(pieces)
    elif rows:
        block_p = max(1, min(TILE // block_w, triton.next_power_of_2(max(1, outer))))
    else:
        block_w = min(block_w, LONGEST_COLUMN if width <= LONGEST_COLUMN else COLUMNS // PIXELS)
        block_p = min(max(PIXELS, COLUMNS // block_w), 2 * COLUMNS // block_w)
        block_p = min(block_p, max(PIXELS, triton.next_power_of_2(inner)))
    programs = triton.cdiv(outer, block_p) * pieces if rows else outer * triton.cdiv(inner, block_p)
    return Tiles(
        programs, min(16, max(1, block_p * block_w // (32 * PER_THREAD))), outer, width, inner,
        outer * inner, pieces, piece_width, rows, pieces == 1 and width <= block_w,
        math.gcd(width if rows else inner, 16), block_p, block_w, block_pieces)


class Launch:
    """A launch of one kernel with constant sizes.

    Triton derives a kernel's types and alignments from its arguments at each launch. Here only addresses change, so a
    compiled kernel is launched again directly if all addresses are aligned to 16 bytes. This saves 25 us per launch.

    Args:
        kernel: The kernel. Its arguments are pointers and constants, in this order.
        programs: Number of programs.
        constants: The arguments that are the same at each launch.
        num_warps: Number of warps of each program.
        device: Device of the tensors.
    """

    __slots__ = ("again", "constants", "device", "kernel", "options", "programs")

    def __init__(self, kernel: Any, programs: int, constants: Tuple[Any, ...], num_warps: int, device: torch.device):
        self.kernel, self.programs, self.constants = kernel, programs, constants
        self.device = device.index  # None for the CPU
        # enable_fp_fusion: the present default, which future releases of Triton will change
        self.options = dict(num_warps=num_warps, enable_fp_fusion=True)
        self.again: Any = None

    def __call__(self, addresses: int, *pointers: Optional[Tensor]) -> None:
        """Launch the kernel.

        Args:
            addresses: Result of `addresses_of` for the tensors that may be unaligned. Tensors that torch has just
                allocated are aligned.
            pointers: The kernel's tensors.
        """
        if self.device is not None and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(addresses, *pointers)
        if addresses % 16 == 0 and self.again is not None and not getattr(self.kernel, "pre_run_hooks", None):
            return self.again(*pointers, *self.constants)
        compiled = self.kernel[self.programs,](*pointers, *self.constants, **self.options)
        if addresses % 16 == 0 and compiled is not None and TAKES_ALL_ARGUMENTS:  # the interpreter returns None
            self.again = compiled[self.programs, 1, 1]
        return None


# Releases of Triton whose compiled kernels take all arguments of the kernel, constants included. Other releases launch
# through JITFunction each time.
TAKES_ALL_ARGUMENTS = (3, 3) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)


def addresses_of(*tensors: Optional[Tensor]) -> int:
    """Return the addresses combined with ``|``, which is divisible by 16 if all addresses are."""
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return addresses


def _with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def everything(value: Any) -> Any:
    return value


def _dtypes(a: Optional[Tensor], b: Optional[Tensor]) -> Tuple[Optional[torch.dtype], Optional[torch.dtype]]:
    return a if a is None else a.dtype, b if b is None else b.dtype


class Plan:
    """What an update needs besides its tensors: everything that depends on shapes, strides, dtypes and numbers.

    Args:
        x, f: Stream and branch output.
        dims: Axes over which one projection sums.
        eps: Added to |x|^2.
        a, b: Weights; None for a weight that is a tensor.
        keep_branch: Whether autograd saves f even if a = 0 and b = 1.

    Attributes:
        recover: Whether the backward pass recovers f from y, which requires a = 0 and b = 1.
        is_direct: Whether one kernel reads and writes the tensors themselves, not copies or pieces.
        forward, backward: :meth:`update` and :meth:`gradients`, or functions that verify them at the first call.
    """

    def __init__(self, x: Tensor, f: Tensor, dims: Tuple[int, ...], eps: float, a: Optional[float],
                 b: Optional[float], keep_branch: bool) -> None:
        self.dims, self.eps, self.a, self.b = dims, eps, a, b
        self.recover = not keep_branch and a == 0.0 and b == 1.0
        self.numbers = 0.0 if a is None else a, 0.0 if b is None else b
        self.shape, self.strides, self.device, self.branch_dtype = x.shape, x.stride(), x.device, f.dtype
        self.dtype = torch.promote_types(x.dtype, f.dtype)
        self.acc = accumulate_in(self.dtype)
        self.acc_in_triton = tl.float64 if self.acc == torch.float64 else tl.float32
        self.view = view_of(tuple(x.shape), self.strides, dims)
        self.tiles = tiles_of(*self.view[1:])
        self.has_order = all(t.permute(self.view.order).is_contiguous() for t in (x, f))
        self.is_direct = self.has_order and x.numel() > 0 and not self.tiles.BLOCK_PIECES
        self.kept_strides = (torch.empty_like(x, device="meta") if self.recover else f).stride()
        self.label = f"{'feature' if len(dims) == 1 else 'global'} scope"
        self.case = (x.device, x.dtype, f.dtype, x.stride(dims[-1]) == 1, *(x.shape[d] for d in dims),
                     self.recover, a is None, b is None, *self.tiles[8:])
        self.like_sums = x.new_empty(1, dtype=self.acc).expand(2, self.tiles.projections)  # for torch.empty_like
        self.launches: Dict[Any, Launch] = {}
        self.forward: Any = self.update
        self.backward: Any = self.gradients

    def update(
            self, x: Tensor, f: Tensor, a: Optional[Tensor] = None, b: Optional[Tensor] = None, keep: bool = True,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Return y and, if ``keep``, the sums ``[2, projections]`` with s and n in the order of the view.

        y has the shape and memory format of ``x``. The weights a and b are passed only if they are tensors.
        """
        y = torch.empty_like(x) if self.dtype == x.dtype else torch.empty_like(x, dtype=self.dtype)
        sums = torch.empty_like(self.like_sums) if keep else None
        into, parts = y, None
        if not self.is_direct:
            if not x.numel():  # an empty projection has s = 0
                if sums is not None:
                    sums[0], sums[1] = 0.0, self.eps
                return y, sums
            if not self.has_order:
                x, f, into = (arranged(t, self.view) for t in (x, f, y))
            if self.tiles.BLOCK_PIECES:
                parts = self._partial_sums(x, f, x, True)
        key: Any = keep
        addresses = x.data_ptr() | f.data_ptr()
        if a is not None or b is not None:
            key, addresses = (keep, *_dtypes(a, b)), addresses | addresses_of(a, b)
        launch = self.launches.get(key) or self._launch(key, _update_kernel, (*self.numbers, self.eps))
        launch(addresses, x, f, into, sums, parts, a, b)
        if into is not y:
            put_back(into, y, self.view)
        return y, sums

    def gradients(
            self, x: Tensor, kept: Tensor, g: Tensor, sums: Tensor, a: Optional[Tensor], b: Optional[Tensor],
            needed: Tuple[bool, bool, bool],
    ) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
        """Return dL/dx, dL/df, and the inner products ``[2, projections]`` <x, g> and <f, g>, or None if not needed.

        Args:
            x: Stream.
            kept: The result y if ``recover``, otherwise the branch output f.
            g: dL/dy.
            sums: Result of :meth:`update`.
            a, b: Arguments of :meth:`update`.
            needed: Whether to compute each result.
        """
        for_x, for_f, for_weights = needed
        if self.has_order and (x.stride() != self.strides or kept.stride() != self.kept_strides):
            # a hook of saved tensors changed them: save_on_cpu(pin_memory=True) loses channels-last
            x, kept = _with_strides(x, self.strides), _with_strides(kept, self.kept_strides)
        grad_x = torch.empty_like(x) if for_x else None
        grad_f = None
        if for_f:  # an argument dtype takes time
            same = self.branch_dtype == x.dtype
            grad_f = torch.empty_like(x) if same else torch.empty_like(x, dtype=self.branch_dtype)
        products = torch.empty_like(sums) if for_weights else None
        into_x, into_f, parts = grad_x, grad_f, None
        if g.stride() != self.strides or not self.has_order:
            g = arranged(g, self.view)
        if not self.is_direct:
            if not x.numel():
                return grad_x, grad_f, products if products is None else products.zero_()
            if not self.has_order:
                x, kept = arranged(x, self.view), arranged(kept, self.view)
                into_x, into_f = (None if t is None else arranged(t, self.view) for t in (grad_x, grad_f))
            if self.tiles.BLOCK_PIECES:
                parts = self._partial_sums(x, kept, g, for_weights)
        key: Any = needed
        addresses = x.data_ptr() | kept.data_ptr() | g.data_ptr() | sums.data_ptr()
        if a is not None or b is not None:
            key, addresses = (needed, *_dtypes(a, b)), addresses | addresses_of(a, b)
        launch = self.launches.get(key) or self._launch(key, _gradients_kernel, self.numbers, self.recover)
        launch(addresses, x, kept, g, sums, into_x, into_f, products, parts, a, b)
        if not self.is_direct:
            for into, grad in ((into_x, grad_x), (into_f, grad_f)):
                if into is not grad and grad is not None and into is not None:
                    put_back(into, grad, self.view)
        return grad_x, grad_f, products

    def _partial_sums(self, p: Tensor, q: Tensor, r: Tensor, both: bool) -> Tensor:
        """Return <p, r> and, if ``both``, <q, r> of every piece of every projection."""
        parts = p.new_empty((2 if both else 1, self.tiles.programs), dtype=self.acc)
        key = "parts", p is r, both
        launch = self.launches.get(key) or self._launch(key, _partial_sums_kernel, (), p is r, both)
        launch(addresses_of(p, q, r), p, q, r, parts)
        return parts

    def _launch(self, key: Any, kernel: Any, numbers: Tuple[float, ...], *constants: Any) -> Launch:
        """Make and store the launch of a kernel. The key determines which pointers are None, and their dtypes."""
        launch = self.launches[key] = Launch(
            kernel, self.tiles.programs, (*numbers, *self.tiles[2:], self.acc_in_triton, *constants),
            self.tiles.num_warps, self.device)
        return launch

    def statistics(self, sums: Tensor) -> Tuple[Tensor, Tensor]:
        """Return two numbers per projection, such as s and n, with the shape of x and size 1 along ``dims``."""
        reduced = {d % len(self.shape) for d in self.dims}
        shape = [1 if axis in reduced else self.shape[axis] for axis in self.view.order]
        first, second = (half.view(shape).permute(self.view.inverse) for half in sums)
        return first, second

    # ------------------------------------------------------------ the same by torch, to verify or replace kernels
    def unpacked(self, results: Sequence[Optional[Tensor]]) -> List[Optional[Tensor]]:
        """Return results of :meth:`update` or :meth:`gradients` in the form of :mod:`timm_ortho.update.formula`."""
        *streams, sums = results
        return [*streams, *(() if sums is None else self.statistics(sums))]

    def packed(self, results: Sequence[Optional[Tensor]]) -> Tuple[Optional[Tensor], ...]:
        """Return results of :mod:`timm_ortho.update.formula` in the form of :meth:`update` or :meth:`gradients`."""
        *streams, first, second = results
        if first is None or second is None:
            return *streams, None
        return *streams, torch.stack([t.permute(self.view.order).flatten() for t in (first, second)])

    def torch_update(
            self, x: Tensor, f: Tensor, a: Any = None, b: Any = None, keep: bool = True,
            sample: Any = everything, results: Any = None,
    ) -> Tuple[Optional[Tensor], ...]:
        a, b = self.a if a is None else a, self.b if b is None else b
        return formula.update(sample(x), sample(f), a, b, list(self.dims), self.eps, keep)

    def torch_gradients(
            self, x: Tensor, kept: Tensor, g: Tensor, sums: Tensor, a: Any, b: Any, needed: Any,
            sample: Any = everything, results: Any = None,
    ) -> Tuple[Optional[Tensor], ...]:
        a, b = self.a if a is None else a, self.b if b is None else b
        tensors = map(sample, (x, kept, g, *self.statistics(sums)))
        return formula.gradients(*tensors, a, b, list(self.dims), self.recover, self.branch_dtype, needed)


def plan_of(
        x: Tensor, f: Tensor, dims: Tuple[int, ...], eps: float, a: Weight, b: Weight, keep_branch: bool,
        backend: Optional[str],
) -> Plan:
    """Return the plan of an update with checked arguments, and store it for similar tensors.

    Args:
        x, f, dims, eps, keep_branch: See :class:`Plan`.
        a, b: Weights.
        backend: Requested backend. Unless this is ``"triton"``, the kernels are verified at their first call.
    """
    name = backend or default()
    key = plan_key(x, f, dims, eps, a, b, keep_branch, name)
    plan = plans.get(key)
    if plan is None:
        numbers = [None if isinstance(weight, Tensor) else float(weight) for weight in (a, b)]
        plan = Plan(x, f, dims, eps, *numbers, keep_branch)
        if name == "auto":
            plan.forward = verified(plan, "forward", plan.update, plan.torch_update)
            plan.backward = verified(plan, "backward", plan.gradients, plan.torch_gradients)
        if len(plans) >= 1024:  # many different shapes or weights: start again
            plans.clear()
        plans[key] = plan
    return plan
