"""The update as autograd functions with closed-form gradients.

For a = 0 and b = 1 the backward pass recovers the branch output as f = y - (1 - s) x. The neighbouring layers save x
and y anyway, so the only extra memory is two numbers per projection, s and n.

The sums are a second output, so that a double backward pass can differentiate s. Compiled code has no double backward
pass, and Dynamo would pass zeros as the gradient of the sums, so there y is the only output. The functions do not
support ``torch.func``, because the support would cost 70 us per call.
"""
import torch
from torch import Tensor

from .._compat import is_eager
from . import formula
from .formula import Weight, in_dtype


class TorchUpdate(torch.autograd.Function):
    """The update by the operations of :mod:`timm_ortho.update.formula`."""

    @staticmethod
    def forward(ctx, x, f, a, b, dims, eps, keep_branch):
        y, xf, n = formula.formula(x, f, a, b, dims, eps, reuse=formula.is_large(x) and is_eager(x, f))
        s = xf / n
        ctx.recover = not keep_branch and weights_equal(a, b, 0.0, 1.0)
        a_tensor, ctx.a = (a, None) if isinstance(a, Tensor) else (None, a)
        b_tensor, ctx.b = (b, None) if isinstance(b, Tensor) else (None, b)
        ctx.save_for_backward(x, y if ctx.recover else f, s, n, a_tensor, b_tensor)
        ctx.set_materialize_grads(False)
        ctx.dims, ctx.eps, ctx.branch_dtype = dims, eps, f.dtype
        return y if torch.compiler.is_compiling() else (y, s)

    @staticmethod
    def backward(ctx, g, grad_s=None):  # autograd can record it; grad_s is None except in a double backward pass
        x, kept, s, n, a, b = ctx.saved_tensors
        a, b = ctx.a if a is None else a, ctx.b if b is None else b
        for_x, for_f, for_a, for_b, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # n as a function of x
            n = x.to(n.dtype).square().sum(ctx.dims, True).add(ctx.eps)
        grad_x = grad_f = grad_a = grad_b = None
        if g is not None:
            grad_x, grad_f, xg, fg = formula.gradients(
                x, kept, g, s, n, a, b, ctx.dims, ctx.recover, ctx.branch_dtype, (for_x, for_f, for_a or for_b))
            grad_a = (s * xg).sum().to(a) if for_a else None
            grad_b = (fg - s * xg).sum().to(b) if for_b else None
        if grad_s is not None:  # n ds/dx = f - 2 s x and n ds/df = x
            of_x = torch.addcmul(in_dtype(kept, n.dtype), 1 + s if ctx.recover else 2 * s, x, value=-1) * (grad_s / n)
            of_f = x * (grad_s / n)
            grad_x = of_x if grad_x is None else grad_x + of_x
            grad_f = of_f if grad_f is None else grad_f + of_f
        return grad_x, grad_f, grad_a, grad_b, None, None, None


class KernelFailed(RuntimeError):
    """A kernel could not be launched."""


class KernelUpdate(torch.autograd.Function):
    """The update by the kernels of a :class:`timm_ortho.update.plan.Plan`.

    The norm after it, if any, has the weight w and the bias c. Without a norm, it saves as many tensors as
    :class:`TorchUpdate`, with the same shapes, so a checkpointed block can be recomputed with another backend.
    """

    @staticmethod
    def forward(ctx, x, f, w, c, plan):
        outputs, saved = plan.update(x, f, w, c)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        return ctx.plan.backward(ctx.saved_tensors, grads)


def weights_equal(a: Weight, b: Weight, a_value: float, b_value: float) -> bool:
    """Return whether both weights are numbers with these values. Comparing a tensor would synchronise its device."""
    return not isinstance(a, Tensor) and a == a_value and not isinstance(b, Tensor) and b == b_value
