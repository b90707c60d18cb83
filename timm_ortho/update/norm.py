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
from typing import Any, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._compat import own_parameters
from .backend import NORMS, has_kernels
from .gradient import torch_gradients
from .kernels import DTYPES, Launch, Plan, waves

LONGEST_NORM = 4096  # longer rows would not fit the registers of the backward kernel

# With more than four elements of each tensor per thread, the backward kernel needs more than 128 registers per thread,
# and too few programs run at once to hide the latency of memory.
BACKWARD_PER_THREAD = 4
WARPS = 32  # warps of the backward kernel per multiprocessor; each program adds the gradients of w and c of its rows


@triton.jit(do_not_specialize=["rows"])
def norm_gradients_kernel(
        x_ptr, y_ptr, grad_y_ptr, grad_h_ptr, s_ptr, n_ptr, w_ptr, moments_ptr, grad_x_ptr, grad_f_ptr, parts_ptr,
        rows, width, CENTERED: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
):
    """Store dL/dx, dL/df and, if w_ptr is not None, dL/dw and dL/dc of this program's rows in ``parts``.

    ``parts`` is [2, programs, width].
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
        grad_y = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + p, mask=p < rows, other=0.0)[:, None]
        n = tl.load(n_ptr + p, mask=p < rows, other=1.0)[:, None]
        m = tl.load(moments_ptr + p, mask=p < rows, other=0.0)[:, None]
        r = tl.load(moments_ptr + rows + p, mask=p < rows, other=0.0)[:, None]
        z = tl.where(mask, (y - m) * r, 0.0)
        if w_ptr is not None:
            grad_w += tl.sum(u * z, 0)
            grad_c += tl.sum(u, 0)
            u = u * w[None, :]
        g = u - z * (tl.sum(u * z, 1)[:, None] / width)
        if CENTERED:
            g = g - tl.sum(u, 1)[:, None] / width
        g = tl.where(mask, grad_y + g * r, 0.0)
        t = tl.sum(x * g, 1)[:, None] / n  # f - 2 s x = y - (1 + s) x
        tl.store(grad_x_ptr + offsets, (1.0 - s) * g - t * (y - (1.0 + s) * x), mask=mask)
        tl.store(grad_f_ptr + offsets, g - t * x, mask=mask)
    if w_ptr is not None:
        part = tl.program_id(0) * width + columns
        tl.store(parts_ptr + part, grad_w, mask=exists)
        tl.store(parts_ptr + programs * width + part, grad_c, mask=exists)


class NormPlan(Plan):
    """What an update with its norm needs besides its tensors.

    Args:
        x, f: Stream and branch output, ``[..., C]``, contiguous.
        eps: Added to |x|^2.
        norm_eps: eps of the norm.
        centered: Whether the norm subtracts the mean (LayerNorm).
        dtype: Dtype of the norm's result.
        parameters: Dtypes of the norm's weight and bias, None without.
    """

    def __init__(self, x: Tensor, f: Tensor, eps: float, norm_eps: float, centered: bool, dtype: torch.dtype,
                 parameters: Sequence[Optional[torch.dtype]]) -> None:
        super().__init__(x, f, [-1], eps, norm_eps=norm_eps, centered=centered)
        self.norm_eps, self.centered, self.norm, self.parameters = norm_eps, centered, dtype, parameters
        self.case = *self.case, "norm", centered, dtype, *parameters
        rows, width, _, _, _, unit, block_p, block_w, _ = self.constants
        warps = max(1, block_p * block_w // (32 * BACKWARD_PER_THREAD))
        programs = self.programs
        if x.is_cuda:
            at_once = torch.cuda.get_device_properties(x.device).multi_processor_count * WARPS // warps
            programs = min(programs, at_once)
        self.backward_launch = Launch(
            norm_gradients_kernel, programs, warps, (rows, width, centered, unit, block_p, block_w), x.device)
        self.moments, self.norm_parts = ({"size": size, "dtype": torch.float32, "device": x.device}
                                         for size in ((2, rows), (2, programs, width)))

    def update(  # type: ignore[override]
            self, x: Tensor, f: Tensor, w: Any, c: Any, keep: bool = True) -> Tuple[Any, Any]:
        """Return ``(y, h, s)`` and the tensors to save; only y and h unless ``keep``."""
        y, h = torch.empty_like(x, dtype=self.dtype), torch.empty_like(x, dtype=self.norm)
        s = n = moments = None
        if keep:
            s = torch.empty_strided(**self.sums)
            n, moments = torch.empty_like(s), torch.empty(**self.moments)
        self.forward[keep](x, f, w, c, y, s, n, h, moments, None)
        return (y, h, s), (x, y, s, n, w, moments)

    def takes(self, saved: Sequence[Tensor]) -> bool:
        return True  # no hooks of saved tensors, see timm_ortho.functional.update_with_norm

    def gradients(self, saved: Any, grads: Any) -> Tuple[Optional[Tensor], ...]:
        x, y, s, n, w, moments = saved
        grad_x, grad_f = torch.empty_like(x), torch.empty_like(x, dtype=self.branch_dtype)
        parts = None if w is None else torch.empty(**self.norm_parts)
        grad_y, grad_h = self.placed(grads[0]), self.placed(grads[1])
        self.backward_launch(x, y, grad_y, grad_h, s, n, w, moments, grad_x, grad_f, parts)
        if parts is None:
            return grad_x, grad_f, None, None, None
        grad_w, grad_c = parts.sum(1).unbind()  # to iterate over a tensor takes twice as long
        of_w, of_c = self.parameters
        return grad_x, grad_f, None, grad_w.to(of_w), of_c and grad_c.to(of_c)

    def torch_gradients(self, saved: Any, grads: Any, needed: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
        x, y, s, n, w, _ = saved
        g, grad_h, grad_s = grads
        grad_w = grad_c = None
        if grad_h is not None:
            z, r = self._normalised(y)
            grad_h, rows = grad_h.float(), list(range(y.dim() - 1))
            of_w, of_c = self.parameters
            grad_w = of_w and (grad_h * z).sum(rows).to(of_w)
            grad_c = of_c and grad_h.sum(rows).to(of_c)
            u = grad_h if w is None else grad_h * w
            through_y = u - z * (u * z).mean(-1, True)
            through_y = r * (through_y - u.mean(-1, True) if self.centered else through_y)
            g = through_y if g is None else g + through_y
        grad_x, grad_f, _, _ = torch_gradients(x, y, g, grad_s, s, n, 0.0, 1.0, [-1], self.eps, True, self.branch_dtype,
                                               (needed[0], needed[1], False, False))
        return grad_x, grad_f, None, grad_w, grad_c

    def _normalised(self, y: Tensor) -> Tuple[Tensor, Tensor]:
        """Return z and r of the module's docstring."""
        y = y.float()
        if self.centered:
            y = y - y.mean(-1, True)
        r = (y * y).mean(-1, True).add(self.norm_eps).rsqrt()
        return y * r, r

    def small(self) -> Tuple[Plan, Sequence[Tensor]]:
        _, (x, f) = super().small()
        parameters = [dtype and waves([x.shape[1]], dtype, self.device, i) for i, dtype in enumerate(self.parameters)]
        x, f = x[..., 0], f[..., 0]
        plan = NormPlan(x, f, self.eps, self.norm_eps, self.centered, self.norm, self.parameters)
        return plan, (x, f, *parameters)

    def by_torch(self, x: Tensor, f: Tensor, w: Any, c: Any) -> Sequence[Any]:  # type: ignore[override]
        y, s, n = super().by_torch(x, f)
        h = self._normalised(y)[0] * (1.0 if w is None else w) + (0.0 if c is None else c)
        return y, h.to(self.norm), s, n


def make_norm_plan(x: Tensor, f: Tensor, eps: float, norm: Any) -> Optional[NormPlan]:
    """Return the plan of an update and the norm after it, or None if there are no kernels for them."""
    parameters = [p if p is None else p.dtype for p in map(own_parameters(norm).get, ("weight", "bias"))]
    if not (has_kernels(norm) and x.shape == f.shape and norm.normalized_shape == x.shape[-1:] and x.is_contiguous()
            and f.is_contiguous() and {x.dtype, f.dtype, *parameters} <= {*DTYPES, None} and x.device == f.device
            and 1 < x.shape[-1] <= LONGEST_NORM and x.numel()):
        return None
    with torch.no_grad():  # the norm itself decides on the dtype of its result
        dtype = norm(x.new_empty((0, x.shape[-1]), dtype=torch.promote_types(x.dtype, f.dtype))).dtype
    return NormPlan(x, f, eps, norm.eps, NORMS[type(norm)], dtype, parameters)
