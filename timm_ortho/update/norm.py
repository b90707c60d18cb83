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
from typing import Any, List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._compat import is_batched, is_intercepted, own_parameters
from . import formula
from .backend import NORMS, norm_plans, verified
from .gradient import torch_gradients
from .kernels import Launch, Plan, addresses_of, everything

# With more than four elements of each tensor per thread, the backward kernel needs more than 128 registers per thread,
# and too few programs run at once to hide the latency of memory.
TILE, PER_THREAD = 512, 4  # elements of each tensor in a tile (at least one row), and per thread
WARPS = 32  # warps of the backward kernel per multiprocessor; each program adds the gradients of w and c of its rows


@triton.jit
def _forward_kernel(
        x_ptr, f_ptr, w_ptr, c_ptr, y_ptr, h_ptr, sums_ptr, eps: tl.float64, norm_eps: tl.float64,
        rows, width, CENTERED: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
        ACC: tl.constexpr,
):
    """Store y, h and, in ``sums [4, rows]``, s, n, m and r."""
    width = width // UNIT * UNIT
    p = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    columns = tl.arange(0, BLOCK_W)
    exists = columns < width
    mask = (p < rows)[:, None] & exists[None, :]
    offsets = p[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(ACC)
    f = tl.load(f_ptr + offsets, mask=mask, other=0.0).to(ACC)
    n = tl.sum(x * x, 1) + tl.full([], eps, ACC)
    s = tl.sum(x * f, 1) / n
    y = (f + (1.0 - s)[:, None] * x).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offsets, y, mask=mask)
    y = y.to(ACC)
    if CENTERED:
        m = tl.sum(y, 1) / width
    else:
        m = tl.zeros([BLOCK_P], ACC)
    y = tl.where(mask, y - m[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(y * y, 1) / width + tl.full([], norm_eps, ACC))
    h = y * r[:, None]
    if w_ptr is not None:
        h = h * tl.load(w_ptr + columns, mask=exists, other=0.0).to(ACC)[None, :]
    if c_ptr is not None:
        h = h + tl.load(c_ptr + columns, mask=exists, other=0.0).to(ACC)[None, :]
    tl.store(h_ptr + offsets, h, mask=mask)
    if sums_ptr is not None:
        tl.store(sums_ptr + p, s, mask=p < rows)
        tl.store(sums_ptr + rows + p, n, mask=p < rows)
        tl.store(sums_ptr + 2 * rows + p, m, mask=p < rows)
        tl.store(sums_ptr + 3 * rows + p, r, mask=p < rows)


@triton.jit
def _backward_kernel(
        x_ptr, y_ptr, grad_y_ptr, grad_h_ptr, w_ptr, sums_ptr, grad_x_ptr, grad_f_ptr, parts_ptr,
        rows, width, CENTERED: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
        ACC: tl.constexpr,
):
    """Store dL/dx, dL/df and, in ``parts [2, programs, width]``, dL/dw and dL/dc of this program's rows.

    A pointer that is None omits the result. If `grad_y_ptr` is None, dL/dy is zero.
    """
    width = width // UNIT * UNIT
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_W)
    exists = columns < width
    if w_ptr is not None:
        w = tl.load(w_ptr + columns, mask=exists, other=0.0).to(ACC)
    grad_w = tl.zeros([BLOCK_W], ACC)
    grad_c = tl.zeros([BLOCK_W], ACC)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_P), programs):
        p = (block * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
        mask = (p < rows)[:, None] & exists[None, :]
        offsets = p[:, None] * width + columns[None, :]
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(ACC)
        u = tl.load(grad_h_ptr + offsets, mask=mask, other=0.0).to(ACC)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(ACC)
        if grad_y_ptr is not None:  # here, so that the loads of all tensors overlap
            grad_y = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(ACC)
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


def tile_of(width: int) -> Tuple[int, int, int]:
    """Return BLOCK_P, BLOCK_W and the number of warps of a program for a number of channels."""
    block_w = triton.next_power_of_2(width)
    block_p = max(1, TILE // block_w)
    return block_p, block_w, block_p * block_w // (32 * PER_THREAD)


class NormPlan(Plan):
    """What an update with its norm needs besides its tensors, see :class:`timm_ortho.update.kernels.Plan`.

    Args:
        x, f: Stream and branch output, ``[..., C]``, contiguous.
        eps: Added to |x|^2.
        centered: Whether the norm subtracts the mean (LayerNorm).
        norm_eps: eps of the norm.
        dtype: Dtype of the norm's result.
        bias_dtype: Dtype of the norm's bias, None without a bias.
    """

    def __init__(
            self, x: Tensor, f: Tensor, eps: float, centered: bool, norm_eps: float, dtype: torch.dtype,
            bias_dtype: Optional[torch.dtype]) -> None:
        super().__init__(x, f, (-1,), eps, 0.0, 1.0, False)
        self.centered, self.norm_eps = centered, norm_eps
        self.norm_dtype, self.bias_dtype = dtype, bias_dtype
        self.label = "feature scope with norm"
        self.case = (*self.case, "norm", centered, dtype)
        rows, width = self.tiles.projections, self.tiles.width
        block_p, block_w, self.warps = tile_of(width)
        self.programs = self.backward_programs = triton.cdiv(rows, block_p)
        if x.is_cuda:
            at_once = torch.cuda.get_device_properties(x.device).multi_processor_count * WARPS // self.warps
            self.backward_programs = min(self.programs, at_once)
        self.constants = rows, width, centered, self.tiles.UNIT, block_p, block_w, self.acc_in_triton
        self.like_sums = x.new_empty(1, dtype=self.acc).expand(4, rows)
        self.like_parts = x.new_empty(1, dtype=self.acc).expand(2, self.backward_programs, width)

    def update(  # type: ignore[override]
            self, x: Tensor, f: Tensor, w: Optional[Tensor], c: Optional[Tensor], keep: bool = True,
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Return y, h and, if ``keep``, the sums ``[4, rows]`` with s, n, m and r."""
        y = torch.empty_like(x) if self.dtype == x.dtype else torch.empty_like(x, dtype=self.dtype)
        h = torch.empty_like(x) if self.norm_dtype == x.dtype else torch.empty_like(x, dtype=self.norm_dtype)
        sums = torch.empty_like(self.like_sums) if keep else None
        key = keep, None if w is None else w.dtype, None if c is None else c.dtype
        launch = self.launches.get(key)
        if launch is None:
            launch = self.launches[key] = Launch(
                _forward_kernel, self.programs, (self.eps, self.norm_eps, *self.constants), self.warps, self.device)
        launch(addresses_of(x, f, w, c), x, f, w, c, y, h, sums)
        return y, h, sums

    def gradients(  # type: ignore[override]
            self, x: Tensor, y: Tensor, grad_y: Optional[Tensor], grad_h: Tensor, w: Optional[Tensor], sums: Tensor,
            needed: Tuple[bool, bool, bool],
    ) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
        """Return dL/dx, dL/df, and ``[2, C]`` with dL/dw and dL/dc, or None if not needed."""
        for_x, for_f, for_parameters = needed
        grad_x = torch.empty_like(x) if for_x else None
        grad_f = torch.empty_like(x, dtype=self.branch_dtype) if for_f else None
        parts = torch.empty_like(self.like_parts) if for_parameters else None
        key = needed, grad_y is None, None if w is None else w.dtype
        launch = self.launches.get(key)
        if launch is None:
            launch = self.launches[key] = Launch(
                _backward_kernel, self.backward_programs, self.constants, self.warps, self.device)
        tensors = x, y, grad_y if grad_y is None else grad_y.contiguous(), grad_h.contiguous(), w, sums
        launch(addresses_of(*tensors), *tensors, grad_x, grad_f, parts)
        return grad_x, grad_f, None if parts is None else parts.sum(1)

    # ------------------------------------------------------------ the same by torch, to verify or replace kernels
    def unpacked(self, results: Any) -> List[Optional[Tensor]]:
        *streams, last = results
        if last is None:
            return streams
        if len(last) == 2:  # dL/dw and dL/dc
            return [*streams, *last]
        return [*streams, *self.statistics(last[:2])]  # m and r are verified by h, and by the backward pass

    def packed(self, results: Any) -> Any:
        first, second, *rows = results
        return first, second, None if rows[0] is None else torch.stack([row.flatten() for row in rows])

    def torch_update(  # type: ignore[override]
            self, x: Tensor, f: Tensor, w: Optional[Tensor], c: Optional[Tensor], keep: bool = True,
            sample: Any = everything, results: Any = None,
    ) -> Tuple[Optional[Tensor], ...]:
        y, s, n = formula.update(sample(x), sample(f), 0.0, 1.0, [-1], self.eps)
        # The norm of the kernel's y: a norm can amplify differences that come from rounding y to its dtype.
        of_y = y if results is None else sample(results[0])
        z, m, r = normalised(of_y.to(self.acc), self.centered, self.norm_eps)
        h = z if w is None else z * w
        return y, (h if c is None else h + c).to(self.norm_dtype), s, n, m, r

    def torch_gradients(  # type: ignore[override]
            self, x: Tensor, y: Tensor, grad_y: Optional[Tensor], grad_h: Tensor, w: Optional[Tensor], sums: Tensor,
            needed: Tuple[bool, bool, bool], sample: Any = everything, results: Any = None,
    ) -> Tuple[Optional[Tensor], ...]:
        s, n = map(sample, self.statistics(sums[:2]))
        some_y = sample(y)
        g = self.through_norm(some_y, None if grad_y is None else sample(grad_y), sample(grad_h), w)
        grad_x, grad_f, _, _ = formula.gradients(
            sample(x), some_y, g, s, n, 0.0, 1.0, [-1], True, self.branch_dtype, (needed[0], needed[1], False))
        return grad_x, grad_f, *(self.of_parameters(y, grad_h) if needed[2] else (None, None))

    def of_parameters(self, y: Tensor, grad_h: Tensor) -> Tuple[Tensor, Tensor]:
        """Return dL/dw and dL/dc by operations that autograd can record."""
        rows = list(range(y.dim() - 1))
        grad_h = grad_h.to(self.acc)
        return (grad_h * normalised(y.to(self.acc), self.centered, self.norm_eps)[0]).sum(rows), grad_h.sum(rows)

    def through_norm(
            self, y: Tensor, grad_y: Optional[Tensor], grad_h: Tensor, w: Optional[Tensor],
    ) -> Tensor:
        """Return the total gradient g by operations that autograd can record."""
        z, _, r = normalised(y.to(self.acc), self.centered, self.norm_eps)
        grad_h = grad_h.to(self.acc)
        u = grad_h if w is None else grad_h * w
        g = u - z * (u * z).mean(-1, True)
        g = r * (g - u.mean(-1, True) if self.centered else g)
        return g if grad_y is None else grad_y + g


def normalised(y: Tensor, centered: bool, eps: float) -> Tuple[Tensor, Tensor, Tensor]:
    """Return z, m and r of the module's docstring."""
    m = y.mean(-1, True) if centered else y.new_zeros(1)
    y = y - m
    r = (y * y).mean(-1, True).add(eps).rsqrt()
    return y * r, m, r


class NormUpdate(torch.autograd.Function):
    """The update and the norm after it, by the kernels of a :class:`NormPlan`. The sums are a third output."""

    @staticmethod
    def forward(ctx, x, f, plan, w, c):
        y, h, sums = plan.forward(x, f, w, c)
        ctx.save_for_backward(x, y, w, sums)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return y, h, sums

    @staticmethod
    def backward(ctx, grad_y, grad_h, grad_sums):
        x, y, w, sums = ctx.saved_tensors
        plan, (for_x, for_f, _, for_w, for_c) = ctx.plan, ctx.needs_input_grad
        grad_w = grad_c = None
        if (grad_h is None or grad_sums is not None or torch.is_grad_enabled() or is_intercepted()
                or (grad_y is not None and is_batched(grad_y)) or is_batched(grad_h)):
            g = grad_y
            if grad_h is not None:
                g = plan.through_norm(y, grad_y, grad_h, w)
                grad_w, grad_c = plan.of_parameters(y, grad_h)
            s, n = plan.statistics(sums[:2])
            grad_s = None if grad_sums is None else plan.statistics(grad_sums[:2])[0]
            grad_x, grad_f, _, _ = torch_gradients(
                x, y, g, grad_s, s, n, 0.0, 1.0, [-1], plan.eps, True, plan.branch_dtype, (for_x, for_f, False, False))
        else:
            grad_x, grad_f, both = plan.backward(x, y, grad_y, grad_h, w, sums, (for_x, for_f, for_w or for_c))
            if both is not None:
                grad_w, grad_c = both.unbind()  # to iterate over a tensor takes twice as long
        return (grad_x, grad_f, None, grad_w.to(w.dtype) if for_w and grad_w is not None else None,
                grad_c.to(plan.bias_dtype) if for_c and grad_c is not None else None)


def make_plan(key: Tuple[Any, ...], x: Tensor, f: Tensor, eps: float, norm: Any, check: bool) -> NormPlan:
    """Make the plan of an update and the norm after it, and store it with a key.

    Args:
        key: Result of :func:`timm_ortho.update.backend.norm_plan_key`.
        x, f: Stream and branch output, contiguous.
        eps: Added to |x|^2.
        norm: An instance of a class in :data:`timm_ortho.update.backend.NORMS`.
        check: Whether to verify the kernels at their first call, see :func:`timm_ortho.update.backend.verified`.
    """
    with torch.no_grad():  # the norm itself decides on the dtype of its result
        dtype = norm(x.new_empty((0, x.shape[-1]), dtype=torch.promote_types(x.dtype, f.dtype))).dtype
    w, c = (None if p is None else p.dtype for p in map(own_parameters(norm).get, ("weight", "bias")))
    plan = NormPlan(x, f, eps, NORMS[type(norm)], norm.eps, dtype, c)
    plan.case = *plan.case, w, c
    if check:
        plan.forward = verified(plan, "forward", plan.update, plan.torch_update)
        plan.backward = verified(plan, "backward", plan.gradients, plan.torch_gradients)
    if len(norm_plans) >= 1024:
        norm_plans.clear()
    norm_plans[key] = plan
    return plan
