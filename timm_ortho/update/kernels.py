"""Triton kernels for the residual update and its gradients, imported on first use.

The docstring of :mod:`timm_ortho.update.formula` lists the equations. Products, sums and divisions are in float32.
Results are rounded once, when they are stored.

A projection is the set of elements that one inner product sums over, and a tile is what one program loads at once.
Tensors are read as ``[outer, width, inner]``, and each projection sums over ``width``
(:func:`timm_ortho.update.plan.view_of`):

| kind | elements of a projection | memory traffic, in tensors of the stream's size: forward, backward |
| --- | --- | --- |
| ``rows`` | adjacent (tokens, channels-last), up to 8192 | 3, 5 (the lower bound: every input and result once) |
| ``columns`` | ``inner`` apart (NCHW), up to 2048; a program reads adjacent pixels | 3, 5 |
| ``long`` | adjacent, more than 8192 (``global``); one kernel for the sums, one for the result | 5, 7 |

There are no kernels for other layouts, for float64, and for weights that are tensors: torch computes them. Sums have a
fixed order and use no atomics, so results are deterministic. The kernels do not synchronise the device and can be
captured in a CUDA graph.
"""
import triton
import triton.language as tl


@triton.jit
def _tile(
        outer, width, inner, KIND: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return the tile ``[BLOCK_P projections, BLOCK_W elements]`` of this program.

    Returns:
        The 64-bit offset of the first element, the 32-bit offsets of the elements from there, whether each element
        exists, the indices of the projections, and whether each projection exists.
    """
    program = tl.program_id(0)
    p = tl.arange(0, BLOCK_P)
    w = tl.arange(0, BLOCK_W)
    # Triton itself recognises only multiples of 16. With multiples of 2, 4 and 8, it can load several elements at once.
    if KIND == "columns":
        inner = inner // UNIT * UNIT
        blocks = tl.cdiv(inner, BLOCK_P)
        sample = (program // blocks).to(tl.int64)
        pixel = program % blocks * BLOCK_P
        start = sample * width * inner + pixel
        projection = sample * inner + pixel + p
        valid = pixel + p < inner
        offsets = p[:, None] + w[None, :] * inner
    else:
        width = width // UNIT * UNIT
        tiles = 1
        if KIND == "long":  # in reverse: the elements that the kernel of the sums read last are still in the cache
            tiles = tl.cdiv(width, BLOCK_W)
            program = tl.num_programs(0) - 1 - program
        begin = program % tiles * BLOCK_W
        projection = (program // tiles).to(tl.int64) * BLOCK_P + p
        valid = projection < outer
        start = (program // tiles).to(tl.int64) * BLOCK_P * width + begin
        offsets = p[:, None] * width + w[None, :]
        width = width - begin
    return start, offsets, valid[:, None] & (w < width)[None, :], projection, valid


@triton.jit
def _load(pointer, start, offsets, mask):
    return tl.load(pointer + start + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _total(parts_ptr, projection, pieces, BLOCK_PIECES: tl.constexpr):
    """Return the sum over the pieces of each projection, in a fixed order."""
    piece = tl.arange(0, BLOCK_PIECES)
    offsets = projection[:, None] * pieces + piece[None, :]
    return tl.sum(tl.load(parts_ptr + offsets, mask=(piece < pieces)[None, :], other=0.0), 1)


@triton.jit
def sums_kernel(
        p_ptr, q_ptr, parts_ptr, width, pieces, piece_width, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Store <p, q> and <p, p> of one piece of a long row in ``parts [2, outer, pieces]``."""
    program = tl.program_id(0)
    width = width // UNIT * UNIT
    begin = program % pieces * piece_width // UNIT * UNIT
    start = (program // pieces).to(tl.int64) * width + begin
    end = tl.minimum(width - begin, piece_width)
    pq = tl.zeros([BLOCK], tl.float32)
    pp = tl.zeros([BLOCK], tl.float32)
    for first in range(0, end, BLOCK):
        w = first + tl.arange(0, BLOCK)
        p = _load(p_ptr, start, w, w < end)
        pq += p * _load(q_ptr, start, w, w < end)
        pp += p * p
    tl.store(parts_ptr + program, tl.sum(pq, 0))
    tl.store(parts_ptr + tl.num_programs(0) + program, tl.sum(pp, 0))


@triton.jit(do_not_specialize=["outer"])
def update_kernel(
        x_ptr, f_ptr, w_ptr, c_ptr, y_ptr, s_ptr, n_ptr, h_ptr, parts_ptr,
        b, k, eps, norm_eps, outer, width, inner, pieces,
        KIND: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
        BLOCK_PIECES: tl.constexpr, CENTERED: tl.constexpr,
):
    """Store ``y = b f + (1 + k s) x`` and, unless s_ptr is None, ``s = <x, f> / n`` and ``n = <x, x> + eps``.

    Unless h_ptr is None, store also the norm h of y, which requires rows, and its moments m and r after n, see
    :mod:`timm_ortho.update.norm`.
    """
    start, offsets, mask, projection, valid = _tile(outer, width, inner, KIND, UNIT, BLOCK_P, BLOCK_W)
    x = _load(x_ptr, start, offsets, mask)
    f = _load(f_ptr, start, offsets, mask)
    if KIND == "long":
        xf = _total(parts_ptr, projection, pieces, BLOCK_PIECES)
        n = _total(parts_ptr + outer * pieces, projection, pieces, BLOCK_PIECES) + eps
    else:
        xf = tl.sum(x * f, 1)
        n = tl.sum(x * x, 1) + eps
    s = xf / n
    if s_ptr is not None:  # all programs of a long row store the same numbers
        tl.store(s_ptr + projection, s, mask=valid)
        tl.store(n_ptr + projection, n, mask=valid)
    y = (b * f + (1.0 + k * s)[:, None] * x).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + start + offsets, y, mask=mask)
    if h_ptr is not None:  # of y as it is stored, as in two separate steps
        y = y.to(tl.float32)
        width = width // UNIT * UNIT
        m = tl.zeros([BLOCK_P], tl.float32)
        if CENTERED:
            m = tl.sum(y, 1) / width
        y = tl.where(mask, y - m[:, None], 0.0)
        r = 1.0 / tl.sqrt(tl.sum(y * y, 1) / width + norm_eps)
        w = tl.arange(0, BLOCK_W)
        h = y * r[:, None]
        if w_ptr is not None:
            h = h * _load(w_ptr, 0, w, w < width)[None, :]
        if c_ptr is not None:
            h = h + _load(c_ptr, 0, w, w < width)[None, :]
        tl.store(h_ptr + start + offsets, h, mask=mask)
        if n_ptr is not None:
            tl.store(n_ptr + outer + projection, m, mask=valid)
            tl.store(n_ptr + outer + outer + projection, r, mask=valid)


@triton.jit(do_not_specialize=["outer"])
def gradients_kernel(
        x_ptr, kept_ptr, g_ptr, s_ptr, n_ptr, grad_x_ptr, grad_f_ptr, parts_ptr, b, k, outer, width, inner, pieces,
        KIND: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
        BLOCK_PIECES: tl.constexpr, RECOVER: tl.constexpr,
):
    """Store ``dL/dx = (1 + k s) g + k t (f - 2 s x)`` and ``dL/df = b g + k t x``.

    If RECOVER, ``kept`` is y, and ``f = y - (1 - s) x``, which requires a = 0 and b = 1. Otherwise it is f.
    """
    start, offsets, mask, projection, valid = _tile(outer, width, inner, KIND, UNIT, BLOCK_P, BLOCK_W)
    x = _load(x_ptr, start, offsets, mask)
    g = _load(g_ptr, start, offsets, mask)
    s = tl.load(s_ptr + projection, mask=valid, other=0.0)[:, None]
    n = tl.load(n_ptr + projection, mask=valid, other=1.0)[:, None]
    if KIND == "long":
        xg = _total(parts_ptr, projection, pieces, BLOCK_PIECES)
    else:
        xg = tl.sum(x * g, 1)
    t = xg[:, None] / n
    f = _load(kept_ptr, start, offsets, mask)
    if RECOVER:
        f = f - (1.0 - s) * x
    tl.store(grad_x_ptr + start + offsets, (1.0 + k * s) * g + k * t * (f - 2.0 * s * x), mask=mask)
    tl.store(grad_f_ptr + start + offsets, b * g + k * t * x, mask=mask)
