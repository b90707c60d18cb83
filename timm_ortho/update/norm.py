"""The orthogonal update (a = 0, b = 1) together with the LayerNorm or RMSNorm that follows it, in one Triton kernel.

In a pre-norm block the sum goes straight into a norm. Both are limited by memory traffic and by launches, so one kernel
computes them. s is the coefficient of :mod:`timm_ortho.update.formula`, and the norm has weight w, bias c and eps e::

    y = f + (1 - s) x           m = mean(y)           r = 1 / sqrt(mean((y - m)^2) + e)
    z = (y - m) r               h = w z + c

    u = w dL/dh                 g = dL/dy + r (u - mean(u) - z mean(u z))
    dL/dw = sum z dL/dh         dL/dc = sum dL/dh

``dL/dx`` and ``dL/df`` follow from the total gradient g as in :mod:`timm_ortho.update.formula`. RMSNorm has m = 0 and
no term mean(u). y is rounded to its dtype before it is normalised, as in two separate steps.

Memory traffic, in tensors of the stream's size: 4 in the forward pass (two steps: 3 + 2) and 6 in the backward pass
(two steps: 5 + 4).
"""
import math
from typing import Any, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._compat import own_parameters
from .backend import NORMS, has_kernels
from .formula import plain_update
from .gradient import KernelUpdate, torch_gradients
from .kernels import DTYPES, PER_THREAD, Launch, Plan, waves

LONGEST_NORM = 4096  # longer rows would not fit the registers of the backward kernel

TILE = 512  # elements of each tensor in a tile (at least one row)
# With more than four elements of each tensor per thread, the backward kernel needs more than 128 registers per thread,
# and too few programs run at once to hide the latency of memory.
BACKWARD_PER_THREAD = 4
WARPS = 32  # warps of the backward kernel per multiprocessor; each program adds the gradients of w and c of its rows


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
        x_ptr, f_ptr, w_ptr, c_ptr, y_ptr, h_ptr, sums_ptr, eps, norm_eps, rows, width,
        CENTERED: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
):
    """Store y, h and, in ``sums [4, rows]``, s, n, m and r."""
    width = width // UNIT * UNIT
    p = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    columns = tl.arange(0, BLOCK_W)
    exists = columns < width
    mask = (p < rows)[:, None] & exists[None, :]
    offsets = p[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    n = tl.sum(x * x, 1) + eps
    s = tl.sum(x * f, 1) / n
    y = (f + (1.0 - s)[:, None] * x).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offsets, y, mask=mask)
    y = y.to(tl.float32)
    if CENTERED:
        m = tl.sum(y, 1) / width
    else:
        m = tl.zeros([BLOCK_P], tl.float32)
    y = tl.where(mask, y - m[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(y * y, 1) / width + norm_eps)
    h = y * r[:, None]
    if w_ptr is not None:
        h = h * tl.load(w_ptr + columns, mask=exists, other=0.0).to(tl.float32)[None, :]
    if c_ptr is not None:
        h = h + tl.load(c_ptr + columns, mask=exists, other=0.0).to(tl.float32)[None, :]
    tl.store(h_ptr + offsets, h, mask=mask)
    if sums_ptr is not None:
        tl.store(sums_ptr + p, s, mask=p < rows)
        tl.store(sums_ptr + rows + p, n, mask=p < rows)
        tl.store(sums_ptr + 2 * rows + p, m, mask=p < rows)
        tl.store(sums_ptr + 3 * rows + p, r, mask=p < rows)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
        x_ptr, y_ptr, grad_y_ptr, grad_h_ptr, w_ptr, sums_ptr, grad_x_ptr, grad_f_ptr, parts_ptr,
        rows, width, CENTERED: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
):
    """Store dL/dx, dL/df and, in ``parts [2, programs, width]``, dL/dw and dL/dc of this program's rows.

    A pointer that is None omits the result. If `grad_y_ptr` is None, dL/dy is zero.
    """
    width = width // UNIT * UNIT
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_W)
    exists = columns < width
    if w_ptr is not None:
        w = tl.load(w_ptr + columns, mask=exists, other=0.0).to(tl.float32)
    grad_w = tl.zeros([BLOCK_W], tl.float32)
    grad_c = tl.zeros([BLOCK_W], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_P), programs):
        p = (block * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
        mask = (p < rows)[:, None] & exists[None, :]
        offsets = p[:, None] * width + columns[None, :]
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(grad_h_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if grad_y_ptr is not None:  # here, so that the loads of all tensors overlap
            grad_y = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sums_ptr + p, mask=p < rows, other=0.0)[:, None]
        n = tl.load(sums_ptr + rows + p, mask=p < rows, other=1.0)[:, None]
        m = tl.load(sums_ptr + 2 * rows + p, mask=p < rows, other=0.0)[:, None]
        r = tl.load(sums_ptr + 3 * rows + p, mask=p < rows, other=0.0)[:, None]
        z = tl.where(mask, (y - m) * r, 0.0)
        if parts_ptr is not None:
            grad_w += tl.sum(u * z, 0)
            grad_c += tl.sum(u, 0)
        if w_ptr is not None:
            u = u * w[None, :]
        g = u - z * (tl.sum(u * z, 1)[:, None] / width)
        if CENTERED:
            g = g - tl.sum(u, 1)[:, None] / width
        g = g * r
        if grad_y_ptr is not None:
            g = g + grad_y
        g = tl.where(mask, g, 0.0)
        t = tl.sum(x * g, 1)[:, None] / n
        if grad_x_ptr is not None:  # f - 2 s x = y - (1 + s) x
            tl.store(grad_x_ptr + offsets, (1.0 - s) * g - t * (y - (1.0 + s) * x), mask=mask)
        if grad_f_ptr is not None:
            tl.store(grad_f_ptr + offsets, g - t * x, mask=mask)
    if parts_ptr is not None:
        part = tl.program_id(0) * width + columns
        tl.store(parts_ptr + part, grad_w, mask=exists)
        tl.store(parts_ptr + programs * width + part, grad_c, mask=exists)


class NormPlan(Plan):
    """What an update with its norm needs besides its tensors.

    Args:
        x, f: Stream and branch output, ``[..., C]``, contiguous.
        eps: Added to |x|^2.
        centered: Whether the norm subtracts the mean (LayerNorm).
        norm_eps: eps of the norm.
        dtype: Dtype of the norm's result.
        parameters: Dtypes of the norm's weight and bias, None without.
    """

    def __init__(self, x: Tensor, f: Tensor, eps: float, centered: bool, norm_eps: float, dtype: torch.dtype,
                 parameters: Sequence[Optional[torch.dtype]]) -> None:
        super().__init__(x, f, [-1], eps)
        self.norm = centered, norm_eps, dtype, parameters
        self.centered, self.norm_eps, self.norm_dtype, self.parameters = self.norm
        self.case = *self.case, "norm", centered, dtype, *parameters
        self.rows, self.width, _ = self.view
        like_x, like_y, *_ = self.saved
        self.saved = [like_x, like_y, ((self.rows, 1), torch.float32)]
        if parameters[0] is not None:
            self.saved.insert(2, ((1,), parameters[0]))
        block_w = triton.next_power_of_2(self.width)
        block_p = max(1, TILE // block_w)
        threads = [max(1, block_p * block_w // (32 * each)) for each in (PER_THREAD, BACKWARD_PER_THREAD)]
        programs = triton.cdiv(self.rows, block_p)
        at_once = programs
        if x.is_cuda:
            at_once = torch.cuda.get_device_properties(x.device).multi_processor_count * WARPS // threads[1]
        self.forward_launch = programs, threads[0]
        self.backward_launch = min(programs, at_once), threads[1]
        self.constants = self.rows, self.width, centered, math.gcd(self.width, 16), block_p, block_w

    def __call__(self, x: Tensor, f: Tensor, w: Optional[Tensor] = None, c: Optional[Tensor] = None) -> Any:
        if torch.is_grad_enabled() and (
                x.requires_grad or f.requires_grad or (w is not None and w.requires_grad)
                or (c is not None and c.requires_grad)):
            return KernelUpdate.apply(x, f, self, w, c)[:2]
        return self.update(x, f, w, c, keep=False)[0][:2]

    def update(
            self, x: Tensor, f: Tensor, w: Optional[Tensor] = None, c: Optional[Tensor] = None, keep: bool = True,
    ) -> Tuple[Any, Any]:
        """Return ``(y, h, sums)`` and the tensors to save. ``sums [4, rows]`` has s, n, m and r; None unless `keep`."""
        y = torch.empty_like(x) if self.dtype == x.dtype else torch.empty_like(x, dtype=self.dtype)
        h = torch.empty_like(x) if self.norm_dtype == x.dtype else torch.empty_like(x, dtype=self.norm_dtype)
        sums = x.new_empty((4, self.rows), dtype=torch.float32) if keep else None
        launch = self.launches.get(keep) or self._launch_norm(
            keep, _forward_kernel, self.forward_launch, self.eps, self.norm_eps)
        launch((x, f, w, c), (y, h, sums))
        return (y, h, sums), (x, y, w, sums)

    def gradients(self, saved: Any, grads: Any, needed: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
        x, y, w, sums = saved
        grad_y, grad_h, _ = grads
        if grad_h is None:
            return self.torch_gradients(saved, grads, needed)
        for_x, for_f, _, for_w, for_c = needed
        grad_x = torch.empty_like(x) if for_x else None
        grad_f = torch.empty_like(x, dtype=self.branch_dtype) if for_f else None
        parts = grad_w = grad_c = None
        if for_w or for_c:
            parts = x.new_empty((2, self.backward_launch[0], self.width), dtype=torch.float32)
        key = needed, grad_y is None
        launch = self.launches.get(key) or self._launch_norm(key, _backward_kernel, self.backward_launch)
        launch((x, y, grad_y if grad_y is None else grad_y.contiguous(), grad_h.contiguous(), w, sums),
               (grad_x, grad_f, parts))
        if parts is not None:
            grad_w, grad_c = parts.sum(1).unbind()  # to iterate over a tensor takes twice as long
            grad_w = grad_w.to(self.parameters[0]) if for_w else None
            grad_c = grad_c.to(self.parameters[1]) if for_c else None
        return grad_x, grad_f, None, grad_w, grad_c

    def torch_gradients(self, saved: Any, grads: Any, needed: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
        x, y, w, sums = saved
        g, grad_h, grad_sums = grads
        grad_w = grad_c = None
        if grad_h is not None:
            z, r = self._normalised(y)
            grad_h, rows = grad_h.float(), list(range(y.dim() - 1))
            grad_w = (grad_h * z).sum(rows).to(self.parameters[0]) if needed[3] else None
            grad_c = grad_h.sum(rows).to(self.parameters[1]) if needed[4] else None
            u = grad_h if w is None else grad_h * w
            through_y = u - z * (u * z).mean(-1, True)
            through_y = r * (through_y - u.mean(-1, True) if self.centered else through_y)
            g = through_y if g is None else g + through_y
        s, n = (t.view(*x.shape[:-1], 1) for t in sums[:2])
        grad_x, grad_f, _, _ = torch_gradients(
            x, y, g, None if grad_sums is None else grad_sums[0].view_as(s), s, n, 0.0, 1.0, [-1], self.eps, True,
            self.branch_dtype, (needed[0], needed[1], False, False))
        return grad_x, grad_f, None, grad_w, grad_c

    def _launch_norm(self, key: Any, kernel: Any, programs: Tuple[int, int], *numbers: float) -> Launch:
        launch = self.launches[key] = Launch(
            kernel, programs[0], (*numbers, *self.constants), self.device, num_warps=programs[1])
        return launch

    def _normalised(self, y: Tensor) -> Tuple[Tensor, Tensor]:
        """Return z and r of the module's docstring."""
        y = y.float()
        if self.centered:
            y = y - y.mean(-1, True)
        r = (y * y).mean(-1, True).add(self.norm_eps).rsqrt()
        return y * r, r

    def small(self) -> Tuple[Plan, Sequence[Tensor]]:
        _, (x, f) = super().small()
        x, f = x[..., 0], f[..., 0]
        parameters = [dtype and waves([self.width], dtype, self.device, i) for i, dtype in enumerate(self.parameters)]
        return NormPlan(x, f, self.eps, *self.norm), (x, f, *parameters)

    def by_torch(self, x: Tensor, f: Tensor, w: Optional[Tensor] = None, c: Optional[Tensor] = None) -> Any:
        y = plain_update(x, f, 0.0, 1.0, [-1], self.eps)
        h = self._normalised(y)[0] * (1.0 if w is None else w) + (0.0 if c is None else c)
        return y, h.to(self.norm_dtype)


def make_norm_plan(x: Tensor, f: Tensor, eps: float, norm: Any) -> Optional[NormPlan]:
    """Return the plan of an update and the norm after it, or None if there are no kernels for them."""
    parameters = [p if p is None else p.dtype for p in map(own_parameters(norm).get, ("weight", "bias"))]
    if not (has_kernels(norm) and x.shape == f.shape and norm.normalized_shape == x.shape[-1:] and x.is_contiguous()
            and f.is_contiguous() and {x.dtype, f.dtype, *parameters} <= {*DTYPES, None} and x.device == f.device
            and 1 < x.shape[-1] <= LONGEST_NORM and x.numel()):
        return None
    with torch.no_grad():  # the norm itself decides on the dtype of its result
        dtype = norm(x.new_empty((0, x.shape[-1]), dtype=torch.promote_types(x.dtype, f.dtype))).dtype
    return NormPlan(x, f, eps, NORMS[type(norm)], norm.eps, dtype, parameters)
