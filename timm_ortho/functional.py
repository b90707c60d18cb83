"""The orthogonal residual update: the one formula of this package, forward and backward.

A residual block hands on ``y = x + f``. Split the branch output ``f`` along the stream ``x``, with every sum and
inner product taken over the axes ``dim``::

    n = <x, x> + eps          s = <x, f> / n          f_par = s x          f_orth = f - s x
    y = x + a f_par + b f_orth  =  b f + (1 + (a - b) s) x

``a = b = 1`` is the linear residual connection; ``a = 0, b = 1`` is the orthogonal update of "Revisiting Residual
Connections: Orthogonal Updates for Stable and Efficient Deep Networks" (Oh et al., NeurIPS 2025), Eq. 4, with
Algorithm 1 (``dim`` the channel axis) and Algorithm 2 (``dim`` every axis but the batch).

Numerics: float16 and bfloat16 inputs are multiplied, summed and divided in float32, float64 stays float64, and the
result is cast once to the dtype that ``x + f`` has. ``eps`` is added in that accumulation dtype; it is in units of
|x|^2, makes x = 0 give y = b f, and leaves <x, f_orth> = <x, f> eps / n instead of zero.

Where this differs from the authors' code, and why:
  * they cast ``s`` to the dtype of ``x`` and square ``x`` in it, which overflows in float16 for |x| > 256;
  * their global scope for convolutions silently becomes the feature scope; here it is Algorithm 2.
"""
import math
from typing import Any, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

__all__ = ["decompose", "plain_update", "residual_update"]

Dim = Union[int, Tuple[int, ...], None]
Weight = Union[float, Tensor]


# ------------------------------------------------------------------------------------- the formula, plainly
def _accumulate_in(x: Tensor, f: Tensor) -> torch.dtype:
    """float64 if either input is, float32 otherwise."""
    if x.dtype == torch.float64 or f.dtype == torch.float64:
        return torch.float64
    return torch.float32


def _project(x: Tensor, f: Tensor, dims: List[int], eps: float) -> Tuple[Tensor, Tensor]:
    """``s`` and ``n``, one of each for a projection, in the dtype of ``x`` and ``f``: the accumulation dtype."""
    n = (x * x).sum(dims, keepdim=True) + eps
    return (x * f).sum(dims, keepdim=True) / n, n


def _combine(x: Tensor, f: Tensor, s: Tensor, parallel: Weight, orthogonal: Weight) -> Tensor:
    """``b f + (1 + (a - b) s) x``."""
    return torch.addcmul(_times(orthogonal, f), 1 + _times(parallel, s) - _times(orthogonal, s), x)


def _times(weight: Weight, x: Tensor) -> Tensor:
    if isinstance(weight, Tensor):  # not redundant: TorchScript has no product with a float-or-tensor
        return weight * x
    else:
        return x if weight == 1.0 else weight * x


def _axes(ndim: int, dims: Optional[List[int]]) -> List[int]:
    """``dims``, or every axis but the batch for None (the global scope)."""
    if dims is None:
        return list(range(1, ndim))
    return dims


def plain_update(
        x: Tensor,
        f: Tensor,
        parallel: Weight,
        orthogonal: Weight,
        dims: Optional[List[int]],
        eps: float,
) -> Tensor:
    """The update without its closed-form gradients: the reference, and what compilers and tracers are given.

    Its results equal those of :func:`residual_update` in eager mode bit for bit: a deep network with random weights
    makes any difference in rounding visible.
    """
    dtype = _accumulate_in(x, f)
    x_acc, f_acc = x.to(dtype), f.to(dtype)
    s, _ = _project(x_acc, f_acc, _axes(x.dim(), dims), eps)
    return _combine(x_acc, f_acc, s, parallel, orthogonal).to(torch.promote_types(x.dtype, f.dtype))


# ------------------------------------------------------------------------ the formula, with its gradients
def _as_float(weight: Weight) -> Optional[float]:
    return None if isinstance(weight, Tensor) else float(weight)


class _ResidualUpdate(torch.autograd.Function):
    """The update with its gradients in closed form (g = dL/dy, t = <x, g> / n, k = a - b)::

        dL/df = b g + k t x               dL/dx = (1 + k s) g + k t f - 2 k s t x
        dL/da = sum s <x, g>              dL/db = sum (<f, g> - s <x, g>)

    For a = 0 and b = 1 the branch output is not kept: f = y - (1 - s) x, and x and y are kept anyway by the
    normalisations on either side, so the backward pass costs two numbers a projection in memory.

    ``s`` and ``n`` are outputs, not only intermediates. They carry no gradient in a first backward pass; in a second
    one they are, with ``y``, differentiable functions of x and f like any other output, so backward may use them
    freely and derivatives of every order come out right.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, f, a, b, dims, eps, keep_branch):
        dtype = _accumulate_in(x, f)
        x_acc, f_acc = x.to(dtype), f.to(dtype)
        s, n = _project(x_acc, f_acc, dims, eps)
        y = _combine(x_acc, f_acc, s, a, b)
        return y.to(torch.promote_types(x.dtype, f.dtype)), s, n

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, f, a, b, ctx.dims, _, keep_branch = inputs
        y, s, n = output
        ctx.recover = _is_orthogonal(a, b) and not keep_branch
        ctx.weights = _as_float(a), _as_float(b)
        ctx.like = [(i.dtype, i.device) if isinstance(i, Tensor) else None for i in (x, f, a, b)]
        ctx.save_for_backward(x, y if ctx.recover else f, s, n, *(w for w in (a, b) if isinstance(w, Tensor)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g, grad_s, grad_n):
        x, kept, s, n, *tensors = ctx.saved_tensors
        a, b = (tensors.pop(0) if w is None else w for w in ctx.weights)
        x, kept = x.to(n.dtype), kept.to(n.dtype)
        # r = f - 2 s x, which is n ds/dx; from y it is one pass as well, since f = y - (1 - s) x
        r = torch.addcmul(kept, 1 + s if ctx.recover else 2 * s, x, value=-1)
        grad_x = grad_f = grad_a = grad_b = None
        if g is not None:
            g = g.to(n.dtype)
            k, xg = a - b, (x * g).sum(ctx.dims, keepdim=True)
            kt = k * xg / n
            if ctx.needs_input_grad[0]:
                grad_x = torch.addcmul((1 + k * s) * g, kt, r)
            if ctx.needs_input_grad[1]:
                grad_f = torch.addcmul(b * g, kt, x)
            if ctx.needs_input_grad[2]:
                grad_a = (s * xg).sum()
            if ctx.needs_input_grad[3]:
                grad_b = (kept * g).sum() - (s * xg).sum()  # b is learned, so what was kept is f
        if grad_s is not None:  # only in a double backward pass
            grad_x = _add(grad_x, r * (grad_s / n))
            grad_f = _add(grad_f, x * (grad_s / n))
        if grad_n is not None:  # likewise: n = <x, x> + eps
            grad_x = _add(grad_x, 2 * grad_n * x)
        grads = (_as(grad, like) for grad, like in zip((grad_x, grad_f, grad_a, grad_b), ctx.like, strict=True))
        return (*grads, None, None, None)


def _is_orthogonal(a: Weight, b: Weight) -> bool:
    return _as_float(a) == 0.0 and _as_float(b) == 1.0


def _add(left: Optional[Tensor], right: Tensor) -> Tensor:
    return right if left is None else left + right


def _as(grad: Optional[Tensor], like: Optional[Tuple[torch.dtype, torch.device]]) -> Optional[Tensor]:
    return None if grad is None else grad.to(dtype=like[0], device=like[1])


# -------------------------------------------------------------------------------------- what others call
def decompose(x: Tensor, f: Tensor, dim: Dim = -1, eps: float = 1e-6) -> Tuple[Tensor, Tensor]:
    """Split the branch output into its parts along and across the stream (paper, Eq. 2 and 3).

    Args:
        x: Stream, of any shape.
        f: Branch output, of the same shape.
        dim: Axis or axes of one projection; None stands for every axis but the first (the batch).
        eps: Added to |x|^2, in the accumulation dtype.

    Returns:
        ``(parallel, orthogonal)`` with ``parallel = <x, f> / (|x|^2 + eps) x`` and ``parallel + orthogonal = f``,
        each of the shape of ``f`` and in the dtype of ``x + f``.

    Raises:
        ValueError: Shapes differ, a dtype is not floating, ``dim`` does not exist, or ``eps`` is not positive.
    """
    dims = _check(x, f, dim, eps)
    dtype = _accumulate_in(x, f)
    x_acc, f_acc = x.to(dtype), f.to(dtype)
    parallel = _project(x_acc, f_acc, dims, eps)[0] * x_acc
    result = torch.promote_types(x.dtype, f.dtype)
    return parallel.to(result), (f_acc - parallel).to(result)


def residual_update(
        x: Tensor,
        f: Tensor,
        *,
        parallel: Weight = 0.0,
        orthogonal: Weight = 1.0,
        dim: Dim = -1,
        eps: float = 1e-6,
        keep: str = "output",
) -> Tensor:
    """Add to the stream the weighted parts of the branch output along and across it, ``x + a f_par + b f_orth``.

    In eager mode this is an autograd function with closed-form gradients, differentiable any number of times. Under
    ``torch.compile``, ``torch.export`` and FX it is :func:`plain_update`, which their compilers fuse. TorchScript
    compiles no keyword-only arguments: call :func:`plain_update` in code that is to be scripted.

    Args:
        x: Stream, of any shape.
        f: Branch output, of the same shape.
        parallel: ``a``, a float or a 0-d tensor that may require gradients. 0 drops the part along the stream.
        orthogonal: ``b``, likewise. ``a = b = 1.0`` is ``x + f``, bit for bit.
        dim: Axis or axes of one projection: the channel axis gives one for each token or pixel (Algorithm 1). None
            stands for every axis but the first: one for each sample (Algorithm 2).
        eps: Added to |x|^2, in the accumulation dtype (float32, or float64 for float64 inputs).
        keep: What autograd keeps beside ``x`` when ``a`` is 0 and ``b`` is 1: ``"output"`` (the result, which must
            then not be changed in place) or ``"branch"`` (``f``). Other weights always keep ``f``.

    Returns:
        The new stream, of the shape of ``x`` and in the dtype of ``x + f``.

    Raises:
        ValueError: Shapes differ, a dtype is not floating, ``dim`` does not exist, a weight is not a scalar, or
            ``eps`` is not positive.
    """
    if has_torch_function_variadic(x, f):  # FX proxies and tensor subclasses: one call of the plain formula
        dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
        return handle_torch_function(plain_update, (x, f), x, f, parallel, orthogonal, dims, eps)
    dims = _check(x, f, dim, eps)
    for name, weight in (("parallel", parallel), ("orthogonal", orthogonal)):
        if isinstance(weight, Tensor) and weight.dim() > 0:
            raise ValueError(f"{name} must be a float or a 0-d tensor, got a tensor of shape {tuple(weight.shape)}")
    if keep not in ("output", "branch"):
        raise ValueError(f"keep must be 'output' or 'branch', got {keep!r}")
    if _as_float(parallel) == 1.0 and _as_float(orthogonal) == 1.0:
        return x + f
    if torch.compiler.is_compiling():
        return plain_update(x, f, parallel, orthogonal, dims, eps)
    return _ResidualUpdate.apply(x, f, parallel, orthogonal, dims, eps, keep == "branch")[0]


def _check(x: Tensor, f: Tensor, dim: Any, eps: float) -> List[int]:
    """The axes as a list, or a ValueError that says what is wrong with the arguments."""
    shapes = f"x of shape {tuple(x.shape)} and f of shape {tuple(f.shape)}"
    if x.shape != f.shape:
        raise ValueError(f"stream and branch output must have the same shape, got {shapes}")
    if not (x.is_floating_point() and f.is_floating_point()):
        raise ValueError(f"stream and branch output must be floating-point, got {x.dtype} and {f.dtype}; {shapes}")
    check_eps(eps)
    if dim is None:
        return _axes(x.dim(), None)
    dims = [dim] if isinstance(dim, int) else list(dim)
    outside = [d for d in dims if not -x.dim() <= d < x.dim()]
    if outside or not dims or len({d % x.dim() for d in dims}) < len(dims):
        raise ValueError(
            f"dim must name one or more different axes in [{-x.dim()}, {x.dim() - 1}], got {dim}; {shapes}")
    return dims


def check_eps(eps: float) -> None:
    """Raise ValueError unless ``eps`` is a positive, finite number."""
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be positive and finite, got {eps}")
