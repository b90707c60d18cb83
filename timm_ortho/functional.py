"""The orthogonal residual update as functions. :mod:`timm_ortho.update.formula` has its equations and numerics.

:func:`residual_update` returns the stream plus the weighted parts of the branch output, and :func:`decompose` returns
the two parts. :func:`choose_backend` and :func:`use_backend` select the implementation.
"""
from typing import Any, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function_variadic

from ._checks import check_eps, check_mask, check_tensors, check_weight, known_name, listed_axes
from ._compat import (
    has_hooks,
    hooks_saved_tensors,
    is_eager,
    is_recorded,
    is_transformed,
    own_parameters,
    returns_views,
)
from .update.backend import BACKENDS, NORMS, by_kernels, choose_backend, requested_kernels, use_backend
from .update.formula import Weight, accumulate_in, formula, is_large, plain_update, without_padding
from .update.gradient import TorchUpdate, weights_equal

__all__ = ["BACKENDS", "choose_backend", "decompose", "plain_update", "residual_update", "use_backend"]

Dim = Union[int, Tuple[int, ...], None]
KEEPS = ("output", "branch")  # autograd saves the result of the addition, or the branch output


def decompose(x: Tensor, f: Tensor, dim: Dim = -1, eps: float = 1e-6) -> Tuple[Tensor, Tensor]:
    """Split the branch output into its components parallel and orthogonal to the stream (paper, Eq. 2 and 3).

    Args:
        x: Stream, of any shape.
        f: Branch output, of the same shape.
        dim: Axis or axes over which one projection sums; None for all axes but the first (the batch).
        eps: Added to |x|^2, in float32, or in float64 for float64 inputs.

    Returns:
        ``(parallel, orthogonal)`` with ``parallel = <x, f> / (|x|^2 + eps) x`` and ``parallel + orthogonal = f``,
        each of the shape of ``f`` and in the dtype of ``x + f``.

    Raises:
        ValueError: Shapes differ, a dtype is not floating-point, ``dim`` does not exist, or ``eps`` is not in
            [2**-126, 2**127].

    Example:
        >>> decompose(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]))
        (tensor([0.3600, 0.4800]), tensor([ 0.6400, -0.4800]))
    """
    check_eps(eps)
    dims = check_tensors(x, f, listed_axes(dim))
    result = torch.promote_types(x.dtype, f.dtype)
    x, f = x.to(accumulate_in(result)), f.to(accumulate_in(result))
    parallel = (x * f).sum(dims, True) / (x * x).sum(dims, True).add(eps) * x
    return parallel.to(result), (f - parallel).to(result)


def residual_update(
        x: Tensor,
        f: Tensor,
        *,
        parallel: Weight = 0.0,
        orthogonal: Weight = 1.0,
        dim: Dim = -1,
        eps: float = 1e-6,
        mask: Optional[Tensor] = None,
        keep: str = "output",
        backend: Optional[str] = None,
) -> Tensor:
    """Return ``x + a f_par + b f_orth``, the stream plus the weighted parts of the branch output.

    The gradients are in closed form, can be differentiated again, and are fused by ``torch.compile``. Under
    ``torch.export``, ``torch.jit.trace``, FX, ``torch.func`` and forward-mode differentiation, and for gradients of
    tensor subclasses such as MONAI's MetaTensor, this function runs the operations of :func:`plain_update`. Scripted
    code must call :func:`plain_update` itself, because TorchScript does not compile keyword-only arguments.

    Args:
        x: Stream, of any shape. If |x|^2 or <x, f> exceeds the range of float32 (3.4e38), or of float64 for float64
            inputs, the result is NaN, except for ``a = b = 1.0``.
        f: Branch output, of the same shape.
        parallel: Weight ``a``, a float or a 0-d tensor that may require gradients. 0 drops the parallel part.
        orthogonal: Weight ``b``, a float or a 0-d tensor. ``a = b = 1.0`` is bit-identical to ``x + f``.
        dim: Axis or axes over which one projection sums. The channel axis gives one projection per token or pixel
            (Algorithm 1). None means all axes but the first, which gives one projection per sample (Algorithm 2).
        eps: Added to |x|^2, in float32, or in float64 for float64 inputs.
        mask: Boolean tensor that broadcasts to the shape of x, for example ``[B, N, 1]`` for the tokens of a padded
            batch. True marks real positions. Padding may contain any value: sums exclude it, and its results and
            gradients are zero. None if there is no padding.
        keep: Tensor that autograd saves beside ``x`` if ``a`` is 0 and ``b`` is 1. ``"output"`` saves the result, which
            must then not be changed in place. ``"branch"`` saves ``f``. For all other weights, ``f`` is saved.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``; None for the default. See :func:`choose_backend`.

    Returns:
        The new stream, of the shape of ``x`` and in the dtype of ``x + f``.

    Raises:
        ValueError: Shapes or devices differ, a dtype is not floating-point, ``dim`` does not exist, a weight is not a
            scalar, ``eps`` is not in [2**-126, 2**127], ``mask`` is not boolean or does not broadcast, ``keep`` or
            ``backend`` is unknown, or a tensor is nested.
        RuntimeError: The requested backend cannot run.

    Example:
        >>> x, f = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
        >>> residual_update(x, f)
        tensor([3.6400, 3.5200])
        >>> residual_update(x, f, parallel=1.0)
        tensor([4., 4.])
    """
    check_eps(eps)
    check_weight("parallel", parallel)
    check_weight("orthogonal", orthogonal)
    known_name("keep", keep, KEEPS)
    if backend is not None:
        known_name("backend", backend, BACKENDS)
    return checked_update(x, f, parallel, orthogonal, listed_axes(dim), float(eps), mask, keep == "branch", backend)


def checked_update(
        x: Tensor, f: Tensor, a: Weight, b: Weight, dims: Optional[List[int]], eps: float,
        mask: Optional[Tensor] = None, keep_branch: bool = False, backend: Optional[str] = None,
) -> Tensor:
    """Compute :func:`residual_update` for weights and eps that are already validated.

    Only the tensors and ``dims`` are checked here. Connections check their arguments at construction, because repeated
    checks take a noticeable share of a small model's time.
    """
    if not (isinstance(x, Tensor) and isinstance(f, Tensor)) and has_torch_function_variadic(x, f):  # FX proxies
        return plain_update(x, f, a, b, dims, eps, mask)
    if x.is_nested or f.is_nested:
        raise ValueError("nested tensors are not supported: pass their packed tokens, x.values() and f.values()")
    dims = check_tensors(x, f, dims)
    if mask is not None:
        check_mask(mask, x)
        x, f = without_padding(x, mask), without_padding(f, mask)
    if weights_equal(a, b, 1.0, 1.0):
        return x + f
    learned = isinstance(a, Tensor) or isinstance(b, Tensor)
    name = None if learned or torch.compiler.is_compiling() else requested_kernels(x, backend)
    y = None if name is None else by_kernels((tuple(dims), eps, a, b, keep_branch), name, x, f)
    if y is not None:
        return y
    eager = is_eager(x, f)
    with_gradients = torch.is_grad_enabled() and (
        x.requires_grad or f.requires_grad
        or (learned and any(isinstance(weight, Tensor) and weight.requires_grad for weight in (a, b))))
    if not eager and (is_recorded() or is_transformed() or (with_gradients and (returns_views(x) or returns_views(f)))):
        return plain_update(x, f, a, b, dims, eps)
    if with_gradients:
        if x is f:  # the compiler of torch 2.11 halves the gradient of a tensor that is passed twice; 2.14 breaks
            f = f.view_as(f)
        y = TorchUpdate.apply(x, f, a, b, dims, eps, keep_branch)
        return y if isinstance(y, Tensor) else y[0]
    return formula(x, f, a, b, dims, eps, reuse=eager and is_large(x))[0]


def update_with_norm(x: Tensor, f: Tensor, norm: Any, eps: float, name: str) -> Optional[Tuple[Tensor, Tensor]]:
    """Return the orthogonal update y along the last axis, and ``norm(y)``, from one kernel.

    None if two steps must compute them: without kernels, for other norms than LayerNorm and RMSNorm, for norms with
    hooks or with a weight that is not their own dense parameter (as in a replica of ``nn.DataParallel``), and for
    tensors with gaps in memory. None also while hooks of saved tensors are active, because a checkpointed block may be
    recomputed with another backend, and two steps save the same tensors with each backend.

    Args:
        name: Name of the backend, from :func:`timm_ortho.update.backend.requested_kernels`.
    """
    own = own_parameters(norm) if type(norm) in NORMS else {}
    if own.keys() != NORMS.get(type(norm)) or has_hooks(norm) or hooks_saved_tensors():
        return None
    for p in own.values():
        if p is not None and not (type(p) is nn.Parameter and p.shape == norm.normalized_shape and p.is_contiguous()
                                  and p.device == x.device):
            return None
    return by_kernels(((-1,), eps, 0.0, 1.0, False), name, x, f, norm)
