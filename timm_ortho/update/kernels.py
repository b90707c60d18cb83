"""Triton kernels for the residual update and its gradients, imported on first use.

The docstring of :mod:`timm_ortho.update.formula` lists the equations. Products, sums and divisions are in float32.
Results are rounded once, when they are stored.

A projection is the set of elements that one inner product sums over, and a tile is what one program loads at once.
Tensors are read as ``[outer, width, inner]``, and each projection sums over ``width``, see :func:`view_of`:

| kind | elements of a projection | memory traffic, in tensors of the stream's size: forward, backward |
| --- | --- | --- |
| ``rows`` | adjacent (tokens, channels-last), up to 8192 | 3, 5 (the lower bound: every input and result once) |
| ``columns`` | ``inner`` apart (NCHW), up to 2048; a program reads adjacent pixels | 3, 5 |
| ``long`` | adjacent, more than 8192 (``global``); one kernel for the sums, one for the result | 5, 7 |

There are no kernels for other layouts, for float64, and for weights that are tensors: torch computes them.

A :class:`Plan` contains everything that depends only on shapes, strides and dtypes, because the time to start a kernel
dominates small models. Sums have a fixed order and use no atomics, so results are deterministic. The kernels do not
synchronise the device and can be captured in a CUDA graph.
"""
import math
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._compat import current_cuda_device, raw_cuda_stream
from .._text import error_text
from .formula import plain_update
from .gradient import KernelFailed, KernelUpdate, torch_gradients

LONGEST_ROW, LONGEST_COLUMN = 8192, 2048  # longest projections in one tile
TILE = 512  # elements of each tensor in a tile of rows (at least one row): one warp then sums a row without a barrier
LONG_TILE, MOST_PIECES = 4096, 1024  # of a long row: elements in a tile, and most pieces that are summed separately
COLUMNS, MOST_COLUMNS, PIXELS = 4096, 16384, 16  # elements in a tile of columns, most elements, and least pixels
PER_THREAD = 16  # elements of each tensor per thread: two 16-byte loads in half precision, four in float32
PER_THREAD_OF_COLUMNS = 8  # with 16, a kernel needs more than 64 registers, and half as many warps run at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------------------------------- the kernels
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
    elif KIND == "rows":
        width = width // UNIT * UNIT
        first = program.to(tl.int64) * BLOCK_P
        start = first * width
        projection = first + p
        valid = projection < outer
        offsets = p[:, None] * width + w[None, :]
    else:  # in reverse: the elements that the kernel of the sums read last are still in the cache
        program = tl.num_programs(0) - 1 - program
        width = width // UNIT * UNIT
        tiles = tl.cdiv(width, BLOCK_W)
        begin = program % tiles * BLOCK_W
        start = (program // tiles).to(tl.int64) * width + begin
        projection = (program // tiles).to(tl.int64) + p
        valid = p < BLOCK_P
        width = width - begin
        offsets = p[:, None] + w[None, :]
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
def _sums_kernel(
        p_ptr, q_ptr, parts_ptr, width, pieces, piece_width,
        UNIT: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr,
):
    """Store <p, q> and, if SQUARES, <p, p> of one piece of a long row in ``parts [2, outer, pieces]``."""
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
        if SQUARES:
            pp += p * p
    tl.store(parts_ptr + program, tl.sum(pq, 0))
    if SQUARES:
        tl.store(parts_ptr + tl.num_programs(0) + program, tl.sum(pp, 0))


@triton.jit(do_not_specialize=["outer"])
def _update_kernel(
        x_ptr, f_ptr, y_ptr, s_ptr, n_ptr, parts_ptr, b, k, eps, outer, width, inner, pieces,
        KIND: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
        BLOCK_PIECES: tl.constexpr,
):
    """Store ``y = b f + (1 + k s) x``, ``s = <x, f> / n`` and ``n = <x, x> + eps``; s and n unless s_ptr is None."""
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
    tl.store(y_ptr + start + offsets, b * f + (1.0 + k * s)[:, None] * x, mask=mask)


@triton.jit(do_not_specialize=["outer"])
def _gradients_kernel(
        x_ptr, kept_ptr, g_ptr, s_ptr, n_ptr, parts_ptr, grad_x_ptr, grad_f_ptr, b, k, outer, width, inner, pieces,
        KIND: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
        BLOCK_PIECES: tl.constexpr, RECOVER: tl.constexpr,
):
    """Store ``dL/dx = (1 + k s) g + k t (f - 2 s x)`` and ``dL/df = b g + k t x``, unless the pointer is None.

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
    if grad_x_ptr is not None:
        f = _load(kept_ptr, start, offsets, mask)
        if RECOVER:
            f = f - (1.0 - s) * x
        tl.store(grad_x_ptr + start + offsets, (1.0 + k * s) * g + k * t * (f - 2.0 * s * x), mask=mask)
    if grad_f_ptr is not None:
        tl.store(grad_f_ptr + start + offsets, b * g + k * t * x, mask=mask)


# ----------------------------------------------------------------------------------------------------- launches
# Releases of Triton whose compiled kernels take all arguments of the kernel, constants included. Other releases launch
# through JITFunction each time.
LAUNCHES_DIRECTLY = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
_runtime = triton.knobs.runtime


class Launch:
    """A launch of one kernel with constant sizes.

    Triton derives a kernel's types and alignments from its arguments at each launch. Here only addresses change, so a
    compiled kernel is launched again directly if all addresses are aligned to 16 bytes, in a quarter of the time. Hooks
    of kernels, for example of a profiler, need a launch by Triton.

    Args:
        kernel: The kernel. Its arguments are pointers and constants, in this order.
        programs: Number of programs.
        constants: The arguments that are the same at each launch.
        device: Device of the tensors.
        options: ``num_warps`` and other options of Triton.
    """

    def __init__(self, kernel: Any, programs: int, constants: Tuple[Any, ...], device: torch.device, **options: Any):
        self.kernel, self.programs, self.constants = kernel, programs, constants
        self.device = device.index  # None for the CPU
        # enable_fp_fusion: the present default, which future releases of Triton will change
        self.options = dict(options, enable_fp_fusion=True)
        self.compiled: Any = None

    def __call__(self, given: Sequence[Optional[Tensor]], made: Sequence[Optional[Tensor]]) -> None:
        """Launch the kernel with tensors that may be unaligned, and with tensors that torch has just allocated."""
        if self.device is not None and current_cuda_device() != self.device:
            with torch.cuda.device(self.device):
                return self(given, made)
        addresses = 0
        for tensor in given:
            if tensor is not None:
                addresses |= tensor.data_ptr()
        if self.compiled is not None and addresses % 16 == 0 and not (
                _runtime.launch_enter_hook.calls or self.kernel.pre_run_hooks):
            run, function, metadata = self.compiled
            run(self.programs, 1, 1, raw_cuda_stream(self.device), function, metadata, None, None, None, *given, *made,
                *self.constants)
            return None
        try:
            compiled = self.kernel[self.programs,](*given, *made, *self.constants, **self.options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's compiler may raise any type of error
            raise KernelFailed(f"could not be launched ({error_text(error, named=True)})") from error
        if addresses % 16 == 0 and compiled is not None and LAUNCHES_DIRECTLY:  # the interpreter returns None
            self.compiled = compiled.run, compiled.function, compiled.packed_metadata
        return None


# ------------------------------------------------------------------------------------------------------- plans
def view_of(x: Tensor, f: Tensor, dims: Sequence[int]) -> Optional[Tuple[int, int, int, Dict[str, Any]]]:
    """Return ``outer, width, inner`` of the view that the kernels read, and sizes and strides of s and n.

    None if there are no kernels for these tensors: other dtypes, gaps in memory, different strides of x and f, axes
    ``dims`` that are not adjacent in memory, long columns, and no elements.
    """
    if not (x.dtype in DTYPES and f.dtype in DTYPES and x.shape == f.shape and x.stride() == f.stride() and x.numel()):
        return None
    reduced = {axis % x.dim() for axis in dims}
    sizes, strides, part = [1, 1, 1], [1] * x.dim(), 2
    for axis in sorted((axis for axis in range(x.dim()) if x.shape[axis] > 1), key=lambda axis: x.stride(axis)):
        if x.stride(axis) != math.prod(sizes):
            return None
        if (axis in reduced) != (part == 1):  # from the innermost part of the view to the next
            part -= 1
            if part < 0:
                return None
        strides[axis] = sizes[0] * sizes[2]
        sizes[part] *= x.shape[axis]
    outer, width, inner = sizes
    if inner > 1 and (width > LONGEST_COLUMN or width * inner >= 2**31):  # offsets in a sample have 32 bits
        return None
    return outer, width, inner, dict(
        size=[1 if axis in reduced else size for axis, size in enumerate(x.shape)], stride=strides)


class Plan:
    """What an update needs besides its tensors: everything that depends on shapes, strides, dtypes and numbers.

    Args:
        x, f: Stream and branch output.
        dims: Axes over which one projection sums.
        eps: Added to |x|^2.
        a, b: Weights.
        keep_branch: Whether autograd saves f even if a = 0 and b = 1.

    Attributes:
        recover: Whether the backward pass recovers f from y, which requires a = 0 and b = 1.
        case: What the test of the kernels depends on, see :func:`timm_ortho.update.backend.add_plan`.
        fails: Called with a :class:`KernelFailed`.
    """

    fails: Any

    def __init__(self, x: Tensor, f: Tensor, dims: Sequence[int], eps: float, a: float = 0.0, b: float = 1.0,
                 keep_branch: bool = False) -> None:
        self.dims, self.eps, self.a, self.b = list(dims), eps, float(a), float(b)
        self.recover = not keep_branch and a == 0.0 and b == 1.0
        self.strides, self.device = x.stride(), x.device
        self.stream_dtype, self.branch_dtype, self.dtype = x.dtype, f.dtype, torch.promote_types(x.dtype, f.dtype)
        outer, width, inner, sums = view_of(x, f, dims)  # type: ignore[misc]
        self.view, self.sums = (outer, width, inner), dict(**sums, dtype=torch.float32, device=x.device)
        kept = torch.empty_like(x, dtype=self.dtype, device="meta") if self.recover else f
        self.saved = [(t.stride(), t.dtype) for t in (x, kept, *2 * [torch.empty_strided(**self.sums)])]
        self.launches: Dict[Any, Launch] = {}
        block_w, unit = triton.next_power_of_2(width), math.gcd(width if inner == 1 else inner, 16)
        block_p, pieces, block_pieces, per_thread = 1, 1, 1, PER_THREAD
        if inner > 1:
            self.kind, per_thread = "columns", PER_THREAD_OF_COLUMNS
            block_p = min(max(PIXELS, COLUMNS // block_w), MOST_COLUMNS // block_w,
                          max(PIXELS, triton.next_power_of_2(inner)))
            self.programs = outer * triton.cdiv(inner, block_p)
        elif width <= LONGEST_ROW:
            self.kind = "rows"
            block_p = max(1, TILE // block_w)
            self.programs = triton.cdiv(outer, block_p)
        else:
            self.kind, block_w = "long", LONG_TILE
            self.programs = outer * triton.cdiv(width, block_w)
            # a full piece has at least four tiles, and there are at most MOST_PIECES pieces
            piece_width = max(4 * block_w, triton.cdiv(triton.cdiv(width, MOST_PIECES), block_w) * block_w)
            pieces = triton.cdiv(width, piece_width)
            block_pieces = triton.next_power_of_2(pieces)
            self.pieces = outer * pieces, (width, pieces, piece_width, unit, block_w)
        self.warps = min(16, max(1, block_p * block_w // (32 * per_thread)))
        self.constants = outer, width, inner, pieces, self.kind, unit, block_p, block_w, block_pieces
        self.case: Tuple[Any, ...] = (x.device, x.dtype, f.dtype, self.kind)

    def __call__(self, x: Tensor, f: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or f.requires_grad):
            return KernelUpdate.apply(x, f, self)[0]
        return self.update(x, f, keep=False)[0][0]

    def update(self, x: Tensor, f: Tensor, keep: bool = True) -> Tuple[Any, Any]:
        """Return the outputs ``(y, s)`` of the autograd function, and the tensors to save; only y unless ``keep``."""
        y = torch.empty_like(x) if self.dtype == x.dtype else torch.empty_like(x, dtype=self.dtype)
        s = n = None
        if keep:
            s, n = torch.empty_strided(**self.sums), torch.empty_strided(**self.sums)
        parts = self._parts(x, f, True) if self.kind == "long" else None
        launch = self.launches.get(keep) or self._launch(
            keep, _update_kernel, self.b, self.a - self.b, self.eps, *self.constants)
        launch((x, f), (y, s, n, parts))
        return (y, s), (x, y if self.recover else f, s, n)

    def takes(self, saved: Sequence[Tensor]) -> bool:
        """Return whether saved tensors are unchanged. Hooks of saved tensors may change strides and dtypes."""
        return self.saved == [(t.stride(), t.dtype) for t in saved if t is not None]

    def gradients(self, saved: Any, grads: Any, needed: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
        """Return dL/dx, dL/df and None, by kernels."""
        x, kept, s, n = saved
        g = grads[0]
        if g.stride() != self.strides:
            g = torch.empty_strided(g.shape, self.strides, dtype=g.dtype, device=g.device).copy_(g)
        grad_x = torch.empty_like(x) if needed[0] else None
        grad_f = None
        if needed[1]:  # an argument dtype takes time
            same = self.branch_dtype == x.dtype
            grad_f = torch.empty_like(x) if same else torch.empty_like(x, dtype=self.branch_dtype)
        parts = self._parts(x, g, False) if self.kind == "long" else None
        launch = self.launches.get(needed) or self._launch(
            needed, _gradients_kernel, self.b, self.a - self.b, *self.constants, self.recover)
        launch((x, kept, g, s, n), (parts, grad_x, grad_f))
        return grad_x, grad_f, None

    def torch_gradients(self, saved: Any, grads: Any, needed: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
        """Return dL/dx, dL/df and None, by operations that autograd can record."""
        x, kept, s, n = saved
        return *torch_gradients(
            x, kept, *grads, s, n, self.a, self.b, self.dims, self.eps, self.recover, self.branch_dtype,
            (needed[0], needed[1], False, False))[:2], None

    def _parts(self, p: Tensor, q: Tensor, squares: bool) -> Tensor:
        """Return <p, q> and, if ``squares``, <p, p> of every piece of every long row."""
        programs, constants = self.pieces
        parts = p.new_empty((2, programs), dtype=torch.float32)
        key = "parts", squares
        if key not in self.launches:
            self.launches[key] = Launch(
                _sums_kernel, programs, (*constants, squares), self.device, num_warps=self.warps)
        self.launches[key]((p, q), (parts,))
        return parts

    def _launch(self, key: Any, kernel: Any, *constants: Any) -> Launch:
        """Make and store the launch of a kernel. The key determines which pointers are None."""
        launch = self.launches[key] = Launch(kernel, self.programs, constants, self.device, num_warps=self.warps)
        return launch

    # ------------------------------------------------------------------------------ for the test of the kernels
    def small(self) -> Tuple["Plan", Sequence[Tensor]]:
        """Return a plan for a few projections, with the same kernels, and its inputs."""
        outer, width, inner = self.view
        x, f = (waves((min(outer, 5), width, inner), dtype, self.device, i) for i, dtype in enumerate(
            (self.stream_dtype, self.branch_dtype)))
        return Plan(x, f, [1], self.eps, self.a, self.b, not self.recover), (x, f)

    def by_torch(self, x: Tensor, f: Tensor) -> Any:
        return plain_update(x, f, self.a, self.b, self.dims, self.eps)

    def problem(self) -> str:
        """Compare kernels with torch, forward and backward, on a few projections, and return the problem or ""."""
        measured = []  # for each result: largest error divided by the tolerance, which is relative to the largest value
        with (torch.inference_mode(False), torch.enable_grad(), torch.autocast(self.device.type, enabled=False),
              torch.autograd.graph.saved_tensors_hooks(_same, _same)):  # a checkpoint counts all saved tensors
            small, inputs = self.small()
            small.fails = self.fails
            try:
                results, expected = (_with_gradients(update, inputs) for update in (small, small.by_torch))
            except KernelFailed as error:
                return str(error)
            for result, value in zip(results, expected, strict=True):
                allowed = (4 * torch.finfo(result.dtype).eps + 1e-4) * value.abs().max()
                measured.append(((result - value).abs().max() / allowed).float())
        worst = torch.stack(measured).max().item()
        return "" if worst <= 1.0 else f"are inaccurate: the error is {worst:.2g} times the tolerance"


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _with_gradients(update: Callable[..., Any], inputs: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
    inputs = [t if t is None else t.detach().requires_grad_() for t in inputs]
    outputs = update(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = torch.autograd.grad(outputs, [t for t in inputs if t is not None], [
        waves(y.shape, y.dtype, y.device, seed) for seed, y in enumerate(outputs, 2)])
    return *(y.detach() for y in outputs), *grads


def waves(size: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return different numbers that depend on no random generator. Their size is about 1."""
    t = torch.arange(math.prod(size), dtype=torch.float32, device=device)
    return (t * (1.1 + 0.7 * seed) + seed).sin().mul(1.4).to(dtype).view(tuple(size))
