"""Plans and launches of the Triton kernels, imported on first use.

A :class:`Plan` contains everything that depends only on shapes, strides and dtypes, because the time to start a kernel
dominates small models.
"""
import math
from itertools import compress
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
import triton
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._compat import current_cuda_device, is_eager, own_parameters, raw_cuda_stream
from .._text import error_text
from .formula import formula, in_dtype
from .gradient import KernelFailed, KernelUpdate
from .kernels import gradients_kernel, sums_kernel, update_kernel
from .norm import BACKWARD_PER_THREAD, LONGEST_NORM, WARPS, norm_gradients_kernel

LONGEST_ROW, LONGEST_COLUMN = 8192, 2048  # longest projections in one tile
TILE = 512  # elements of each tensor in a tile of rows (at least one row): one warp then sums a row without a barrier
LONG_TILE, MOST_PIECES = 4096, 1024  # of a long row: elements in a tile, and most pieces that are summed separately
COLUMNS, MOST_BYTES, PIXELS = 4096, 32768, 16  # per tile of columns: elements, most bytes, least pixels
PER_THREAD = 16  # elements of each tensor per thread: two 16-byte loads in half precision, four in float32
PER_THREAD_OF_COLUMNS = 8  # with 16, a kernel needs more than 64 registers, and half as many warps run at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ----------------------------------------------------------------------------------------------------- launches
# Releases of Triton whose compiled kernels take all arguments of the kernel, constants included. Other releases launch
# through JITFunction each time.
LAUNCHES_DIRECTLY = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
_runtime = triton.knobs.runtime


class Launch:
    """A launch of one kernel with constant sizes. The kernel's arguments are pointers, then constants.

    Triton derives a kernel's types and alignments from its arguments at each launch. Here only addresses change. If all
    are aligned to 16 bytes, a compiled kernel is launched again directly, in a quarter of the time. Hooks
    of kernels, for example of a profiler, need a launch by Triton.
    """

    def __init__(self, kernel: Any, programs: int, warps: int, constants: Tuple[Any, ...], device: torch.device):
        self.kernel, self.programs, self.warps, self.constants = kernel, programs, warps, constants
        self.device = device.index  # None for the CPU
        self.compiled: Any = None

    def __call__(self, *tensors: Optional[Tensor]) -> None:
        """Launch the kernel. The same tensors must be None at each launch."""
        if self.device is not None and current_cuda_device() != self.device:
            with torch.cuda.device(self.device):
                return self(*tensors)
        addresses = 0
        for tensor in tensors:
            if tensor is not None:
                addresses |= tensor.data_ptr()
        if self.compiled is not None and addresses % 16 == 0 and not (
                _runtime.launch_enter_hook.calls or self.kernel.pre_run_hooks):
            compiled = self.compiled
            compiled.run(self.programs, 1, 1, raw_cuda_stream(self.device), compiled.function, compiled.packed_metadata,
                         None, None, None, *tensors, *self.constants)
            return None
        try:  # enable_fp_fusion: the present default, which future releases of Triton will change
            compiled = self.kernel[self.programs,](
                *tensors, *self.constants, num_warps=self.warps, enable_fp_fusion=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's compiler may raise any type of error
            raise KernelFailed(f"could not be launched ({error_text(error, named=True)})") from error
        if addresses % 16 == 0 and LAUNCHES_DIRECTLY:
            self.compiled = compiled  # None in the interpreter
        return None


# ------------------------------------------------------------------------------------------------------- plans
def view_of(x: Tensor, f: Tensor, dims: Sequence[int]) -> Optional[Tuple[int, int, int, Dict[str, Any]]]:
    """Return ``outer, width, inner`` of the view that the kernels read, and sizes and strides of s and n.

    None if there are no kernels for these tensors: other dtypes, gaps in memory, different strides of x and f, axes
    ``dims`` that are not adjacent in memory, long columns, no axes, and no elements.
    """
    if not (x.dtype in DTYPES and f.dtype in DTYPES and x.device == f.device and x.shape == f.shape
            and x.stride() == f.stride() and x.dim() and x.numel()):
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
        size=[1 if axis in reduced else size for axis, size in enumerate(x.shape)], stride=tuple(strides))


class Norm(NamedTuple):
    """What the kernels compute of the norm after an update, see :mod:`timm_ortho.update.norm`."""

    eps: float
    centered: bool  # whether the norm subtracts the mean (LayerNorm)
    dtype: torch.dtype  # of the result
    weight: Optional[torch.dtype]  # None without a weight
    bias: Optional[torch.dtype]


class Plan:
    """What an update needs besides its tensors: everything that depends on shapes, strides, dtypes and numbers.

    A norm of y requires contiguous tensors ``[..., C]``, ``dims = [-1]``, a = 0 and b = 1.
    """

    fails: Any  # called with a KernelFailed
    in_cpp = False  # whether timm_ortho.update.node has the plan

    def __init__(self, x: Tensor, f: Tensor, dims: Sequence[int], eps: float, a: float = 0.0, b: float = 1.0,
                 keep_branch: bool = False, norm: Optional[Norm] = None) -> None:
        self.dims, self.eps, self.a, self.b, self.norm = list(dims), eps, float(a), float(b), norm
        self.recover = not keep_branch and a == 0.0 and b == 1.0  # whether the backward pass recovers f from y
        self.strides, self.device = x.stride(), x.device
        self.stream_dtype, self.branch_dtype, self.dtype = x.dtype, f.dtype, torch.promote_types(x.dtype, f.dtype)
        outer, width, inner, sums = view_of(x, f, dims)  # type: ignore[misc]
        numbers = dict(dtype=torch.float32, device=x.device)
        self.view, self.sums = (outer, width, inner), dict(**sums, **numbers)
        block_w, unit = triton.next_power_of_2(width), math.gcd(width if inner == 1 else inner, 16)
        block_p, pieces, per_thread = 1, 1, PER_THREAD
        if inner > 1:
            self.kind, per_thread = "columns", PER_THREAD_OF_COLUMNS
            block_p = min(max(PIXELS, COLUMNS // block_w), MOST_BYTES // (block_w * self.dtype.itemsize),
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
        self.warps = min(16, max(1, block_p * block_w // (32 * per_thread)))
        self.constants = outer, width, inner, pieces, self.kind, unit, block_p, block_w, triton.next_power_of_2(pieces)
        self.parts: Any = None  # size, dtype and device of the partial sums, if there are any
        if self.kind == "long":
            self.parts = dict(size=(2, outer * pieces), **numbers)
            self.sums_launch = Launch(
                sums_kernel, outer * pieces, self.warps, (width, pieces, piece_width, unit, block_w), x.device)
        weights, centered = (self.b, self.a - self.b), norm is not None and norm.centered
        forward = *weights, eps, norm.eps if norm else 0.0, *self.constants, centered
        self.forward = {keep: Launch(update_kernel, self.programs, self.warps, forward, x.device)
                        for keep in (False, True)}
        self.case: Tuple[Any, ...] = (x.device, x.dtype, f.dtype, self.kind)  # plans of a case share one test
        if norm is None:
            self.backward_launch = Launch(gradients_kernel, self.programs, self.warps,
                                          (*weights, *self.constants, self.recover), x.device)
            return
        self.case = *self.case, "norm", *norm[1:]
        warps = max(1, block_p * block_w // (32 * BACKWARD_PER_THREAD))
        programs = self.programs
        if x.is_cuda:
            at_once = torch.cuda.get_device_properties(x.device).multi_processor_count * WARPS // warps
            programs = min(programs, at_once)
        self.backward_launch = Launch(norm_gradients_kernel, programs, warps,
                                      (outer, width, centered, unit, block_p, block_w), x.device)
        self.moments = dict(size=(3, outer), **numbers)  # n, m and r
        if norm.weight is not None:
            self.parts = dict(size=(2, programs, width), **numbers)

    def __call__(self, x: Tensor, f: Tensor, w: Optional[Tensor] = None, c: Optional[Tensor] = None) -> Any:
        """Return y, or y and h."""
        if torch.is_grad_enabled() and (x.requires_grad or f.requires_grad or (w is not None and w.requires_grad)
                                        or (c is not None and c.requires_grad)):
            outputs = KernelUpdate.apply(x, f, w, c, self)
        else:
            outputs, _ = self.update(x, f, w, c, keep=False)
        return outputs[0] if self.norm is None else outputs[:2]

    def update(self, x: Tensor, f: Tensor, w: Any = None, c: Any = None, keep: bool = True) -> Tuple[Any, Any]:
        """Return the outputs of the autograd function, ``(y, s)`` or ``(y, h, s)``, and the tensors to save.

        Unless ``keep``, s is None.
        """
        y = torch.empty_like(x, dtype=self.dtype)
        s = n = h = parts = None
        if keep:
            s = torch.empty_strided(**self.sums)
            n = torch.empty_like(s) if self.norm is None else torch.empty(**self.moments)
        if self.norm is not None:
            h = torch.empty_like(x, dtype=self.norm.dtype)
        if self.kind == "long":
            parts = torch.empty(**self.parts)
            self.sums_launch(x, f, parts)
        self.forward[keep](x, f, w, c, y, s, n, h, parts)
        if h is None:
            return (y, s), (x, y if self.recover else f, s, n)
        return (y, h, s), (x, y, s, n, w)

    def backward(self, saved: Any, grads: Any) -> Tuple[Optional[Tensor], ...]:
        """Return the gradients of the inputs of the autograd function, by kernels if possible."""
        if grads[0] is not None and grads[-2] is not None and grads[-1] is None and (
                not torch.is_grad_enabled() and is_eager(*grads) and self.takes(saved)):
            try:
                return self.gradients(saved, grads)
            except KernelFailed as error:
                self.fails(error)
        if not any(g is not None for g in grads):
            return 5 * (None,)
        x, kept, s, *_ = saved
        f = (kept - (1.0 - s) * x).to(self.branch_dtype) if self.recover else kept  # y and s are functions of f
        return self.torch_gradients(x, f, saved[4] if self.norm else None, grads)

    def takes(self, saved: Sequence[Tensor]) -> bool:
        """Return whether saved tensors are unchanged. Hooks of saved tensors may change strides and dtypes."""
        if self.norm is not None:
            return True  # no hooks, see timm_ortho.functional.update_with_norm
        x, kept, s, n = saved
        kept_dtype = self.dtype if self.recover else self.branch_dtype
        return (x.dtype == self.stream_dtype and kept.dtype == kept_dtype and s.dtype == n.dtype == torch.float32
                and x.stride() == kept.stride() == self.strides and s.stride() == n.stride() == self.sums["stride"])

    def gradients(self, saved: Any, grads: Any) -> Tuple[Optional[Tensor], ...]:
        """Return dL/dx, dL/df, dL/dw, dL/dc and None, by kernels."""
        x, kept, s, n, *w = saved
        upstream = [g if g.stride() == self.strides else torch.empty_strided(
            g.shape, self.strides, dtype=g.dtype, device=g.device).copy_(g) for g in grads[:-1]]
        grad_x, grad_f = torch.empty_like(x), torch.empty_like(x, dtype=self.branch_dtype)
        parts = None if self.parts is None else torch.empty(**self.parts)
        if self.kind == "long":
            self.sums_launch(x, upstream[0], parts)
        self.backward_launch(x, kept, *upstream, s, n, *w, grad_x, grad_f, parts)
        if self.norm is None or parts is None:
            return grad_x, grad_f, None, None, None
        grad_w, grad_c = parts.sum(1).unbind()  # to iterate over a tensor takes twice as long
        *_, weight, bias = self.norm
        return grad_x, grad_f, in_dtype(grad_w, weight), None if bias is None else in_dtype(grad_c, bias), None

    # ------------------------------------------------------- by torch: unusual backward passes, and the kernels' test
    def by_torch(self, x: Tensor, f: Tensor, w: Any = None, c: Any = None) -> Sequence[Tensor]:
        """Return the outputs of the autograd function, by operations that autograd can record."""
        y, xf, n = formula(x, f, self.a, self.b, self.dims, self.eps)
        y = y.to(self.dtype)
        if self.norm is None:
            return y, xf / n
        normalise = nn.functional.layer_norm if self.norm.centered else nn.functional.rms_norm
        h = normalise(y.float(), y.shape[-1:], eps=self.norm.eps)
        h = h if w is None else h * w
        return y, (h if c is None else h + c).to(self.norm.dtype), xf / n

    def torch_gradients(self, x: Tensor, f: Tensor, w: Optional[Tensor], grads: Sequence[Optional[Tensor]],
                        ) -> Tuple[Optional[Tensor], ...]:
        """Return what :meth:`gradients` returns. Autograd can record it."""
        recorded, affine = torch.is_grad_enabled(), self.norm is not None and self.norm.bias is not None
        c = torch.zeros_like(w) if w is not None and affine else None
        inputs = [t if t is None else t.view_as(t) if recorded and t.requires_grad else t.detach().requires_grad_()
                  for t in (x, f, w, c)]
        # no comprehensions inside the contexts: on Python 3.13, Dynamo (2.15) fails to compile them
        given, upstream = [t for t in inputs if t is not None], [g for g in grads if g is not None]
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            outputs = tuple(compress(self.by_torch(*inputs), (g is not None for g in grads)))
            found = iter(torch.autograd.grad(outputs, given, upstream, create_graph=recorded, allow_unused=True))
        return *(None if t is None else next(found) for t in inputs), None

    @torch.inference_mode(False)  # the first call may be in inference mode, where autograd cannot record
    def test(self) -> None:
        """Compare kernels with torch, forward and backward, on a few projections; raise KernelFailed if they differ."""
        outer, width, inner = self.view
        size, dtypes = (min(outer, 5), width, inner), [self.stream_dtype, self.branch_dtype]
        norm = self.norm
        inputs = [waves(size[:2] if norm else size, dtype, self.device, i) for i, dtype in enumerate(dtypes)]
        plan = Plan(*inputs[:2], [1], self.eps, self.a, self.b, not self.recover, norm)
        parameters = norm[3:] if norm else (None, None)
        inputs += [dtype and waves(size[1:2], dtype, self.device, i) for i, dtype in enumerate(parameters)]
        with torch.no_grad():
            outputs, saved = plan.update(*inputs)
            grads = [waves(y.shape, y.dtype, self.device, i) for i, y in enumerate(outputs[:-1], 2)] + [None]
            measured = *outputs, *plan.gradients(saved, grads)
            # a checkpoint's hooks would count the tensors that this comparison saves
            with torch.autocast(self.device.type, enabled=False), saved_tensors_hooks(lambda t: t, lambda t: t):
                expected = *plan.by_torch(*inputs), *plan.torch_gradients(*inputs[:3], grads)
            worst = 0.0  # largest error divided by the tolerance, which is relative to the largest value
            for result, value in zip(measured, expected, strict=True):
                if result is not None:
                    allowed = (4 * torch.finfo(result.dtype).eps + 1e-4) * value.abs().max().float().clamp(min=1e-30)
                    worst = max(worst, ((result - value).abs().max() / allowed).nan_to_num(math.inf).item())
        if worst > 1.0:
            raise KernelFailed(f"are inaccurate: the error is {worst:.2g} times the tolerance")


def waves(size: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return different numbers that depend on no random generator. Their size is about 1."""
    t = torch.arange(math.prod(size), dtype=torch.float32, device=device)
    return (t * (1.1 + 0.7 * seed) + seed).sin().mul(1.4).to(dtype).view(tuple(size))


def make_plan(
        x: Tensor, f: Tensor, norm: Any, dims: Any, eps: float, a: float, b: float, keep_branch: bool,
) -> Optional[Plan]:
    """Return the plan of an update, and of the norm after it if any, or None if there are no kernels for them."""
    if view_of(x, f, dims) is None:
        return None
    if norm is None:
        return Plan(x, f, dims, eps, a, b, keep_branch)
    parameters = [own_parameters(norm).get(name) for name in ("weight", "bias")]
    weight, bias = (p if p is None else p.dtype for p in parameters)
    if not (norm.eps is not None and norm.normalized_shape == x.shape[-1:] and 1 < x.shape[-1] <= LONGEST_NORM
            and x.is_contiguous() and {weight, bias} <= {*DTYPES, None} and (bias is None or weight is not None)):
        return None
    with torch.no_grad():  # the norm itself decides on the dtype of its result
        dtype = norm(x.new_empty((0, x.shape[-1]), dtype=torch.promote_types(x.dtype, f.dtype))).dtype
    return Plan(x, f, dims, eps, norm=Norm(norm.eps, isinstance(norm, nn.LayerNorm), dtype, weight, bias))
