"""The residual update and its gradients, written from the paper and without the package.

The parallel component of f is f_par = <x, f> / n x with n = <x, x> + eps (Oh et al. 2025, Eq. 2). The orthogonal
component is f_orth = f - f_par (Eq. 3). The update is y = x + a f_par + b f_orth. :func:`truth` is the float64
reference of the tests. :func:`rounded` shows how exact the formula can be in a lower precision.
"""
import math

import torch


def truth(x, f, a, b, dims, eps, mask=None):
    """Return y for float64 tensors. :class:`_Update` defines its gradients.

    Args:
        x, f: Stream and branch output.
        a, b: Weights of f_par and f_orth, floats or 0-d tensors.
        dims: Axes over which one projection sums; None for all axes except the first.
        eps: Added to <x, x>.
        mask: True for positions that are not padding.
    """
    if mask is not None:
        x, f = torch.where(mask, x, 0.0), torch.where(mask, f, 0.0)
    dims = list(range(1, x.ndim)) if dims is None else [d % x.ndim for d in dims]
    kept = [d for d in range(x.ndim) if d not in dims]
    order, sizes = kept + dims, [math.prod(x.shape[d] for d in axes) for axes in (kept, dims)]
    rows = [t.permute(order).reshape(sizes) for t in (x, f)]
    y = _Update.apply(*rows, a, b, eps).reshape([x.shape[d] for d in order])
    return y.permute([order.index(d) for d in range(x.ndim)])


class _Update(torch.autograd.Function):
    """Compute y for the rows of two matrices.

    With s = <x, f> / n, g = dL/dy and c = <x, g> / n, the Jacobian of f_par (Eq. 8) gives::

        (df_par/df)^T g = c x                 (df_par/dx)^T g = s g + c f - 2 s c x
    """

    @staticmethod
    def forward(ctx, x, f, a, b, eps):
        assert x.dtype == f.dtype == torch.float64
        n = torch.einsum("ij,ij->i", x, x) + eps
        s = torch.einsum("ij,ij->i", x, f) / n
        f_par = s[:, None] * x
        ctx.saved, ctx.weights = (x, f, f_par, n, s), (float(a), float(b))
        return x + float(a) * f_par + float(b) * (f - f_par)

    @staticmethod
    def backward(ctx, g):
        (x, f, f_par, n, s), (a, b) = ctx.saved, ctx.weights
        c, s = (torch.einsum("ij,ij->i", x, g) / n)[:, None], s[:, None]
        through_x, through_f = s * g + c * f - 2 * s * c * x, c * x
        grad_x = g + a * through_x - b * through_x
        grad_f = a * through_f + b * (g - through_f)
        grad_a = (f_par * g).sum() if ctx.needs_input_grad[2] else None
        grad_b = ((f - f_par) * g).sum() if ctx.needs_input_grad[3] else None
        return grad_x, grad_f, grad_a, grad_b, None


def rounded(x, f, a, b, dims, eps, mask=None):
    """Return y, computed in float32 or float64 and cast once at the end. Autograd differentiates the operations.

    An implementation's error should be about as large as the error of this function.
    """
    result = torch.promote_types(x.dtype, f.dtype)
    x, f = (t.to(torch.promote_types(result, torch.float32)) for t in (x, f))
    if mask is not None:
        x, f = torch.where(mask, x, 0.0), torch.where(mask, f, 0.0)
    dims = list(range(1, x.ndim)) if dims is None else dims
    s = (x * f).sum(dims, keepdim=True) / ((x * x).sum(dims, keepdim=True) + eps)
    return (b * f + (1.0 + (a - b) * s) * x).to(result)
