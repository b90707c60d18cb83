"""The orthogonal residual update and its gradients.

A residual block returns ``y = x + f``. The update splits the branch output ``f`` into components parallel and
orthogonal to the stream ``x``, with every inner product taken over the axes ``dim``::

    n = <x, x> + eps          s = <x, f> / n          f_par = s x          f_orth = f - s x
    y = x + a f_par + b f_orth  =  b f + (1 + k s) x          k = a - b

The gradients, with g = dL/dy and t = <x, g> / n::

    dL/df = b g + k t x               dL/dx = (1 + k s) g + k t f - 2 k s t x
    dL/da = sum s <x, g>              dL/db = sum (<f, g> - s <x, g>)

``a = b = 1`` is the linear residual connection. ``a = 0, b = 1`` is the orthogonal update, Eq. 4 of "Revisiting
Residual Connections: Orthogonal Updates for Stable and Efficient Deep Networks" (Oh et al., NeurIPS 2025). The
channel axis as ``dim`` gives the paper's Algorithm 1, and all axes but the batch give Algorithm 2.

Numerics: float16 and bfloat16 inputs are multiplied, summed and divided in float32, and float64 stays float64. The
result is cast once, to the dtype of ``x + f``. ``eps`` has the units of |x|^2 and is added before that cast. For x = 0
the result is y = b f. Because of eps, <x, f_orth> is <x, f> eps / n instead of zero.

Differences from the authors' code:
  * Their code computes <x, x> and rounds ``s`` in the dtype of ``x``. In float16 <x, x> overflows if |x| exceeds 256.
    Here both are in float32, or in float64 for float64 inputs.
  * For convolutions their code silently uses Algorithm 1 when Algorithm 2 is requested. Here Algorithm 2 also works for
    convolutions.

``_update`` and ``_gradients`` are the backend ``torch``. :mod:`timm_ortho.backends` chooses one of the backends.
"""
from numbers import Integral
from types import ModuleType
from typing import Any, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from ._checks import check_eps, check_mask, check_tensors, check_weight, known_name
from ._compat import dispatch_mode_is_active, is_batched, is_observed, is_recorded, is_transformed
from ._views import folded
from .backends import BACKENDS, Backend, accumulate_in, checked, choose_backend, compiled, default, use_backend

__all__ = ["BACKENDS", "choose_backend", "decompose", "plain_update", "residual_update", "use_backend"]

Dim = Union[int, Tuple[int, ...], None]
Weight = Union[float, Tensor]
KEEPS = ("output", "branch")  # autograd saves the result of the addition, or the branch output


# ------------------------------------------------------------------------------------------------- the formula
def _formula(
        x: Tensor, f: Tensor, a: Weight, b: Weight, dims: List[int], eps: float, reuse: bool = False,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Return ``y, <x, f>, n``. ``<x, f>`` and n have size 1 along ``dims``; y has the memory format of ``x + f``.

    ``1 + k s`` is computed as ``(n + k <x, f>) / n``, because adding a Python number to a tensor is slower to launch
    than adding two tensors, and launches dominate the time of small models. If ``reuse`` is true, the products and the
    result share one buffer, because allocations cost as much as arithmetic in large models on a CPU. Autograd and
    tracers do not support ``reuse``.
    """
    result = x.dtype
    if x.dtype != torch.float32 or f.dtype != torch.float32:
        result = torch.promote_types(x.dtype, f.dtype)
        x, f = in_dtype(x, accumulate_in(result)), in_dtype(f, accumulate_in(result))
    products = x * f
    xf = products.sum(dims, True)
    products = torch.mul(x, x, out=products) if reuse else x * x
    n = products.sum(dims, True).add(eps)  # an addition in place would add eps to each partial sum of a DTensor
    gain, f = _weighted(f, xf, n, a, b)
    if x.stride() != f.stride():
        y = x * gain + f  # the first term determines the memory format
    elif reuse:
        y = torch.addcmul(f, gain, x, out=products)
    else:
        y = f.addcmul(gain, x)
    return y if y.dtype == result else y.to(result), xf, n


def _weighted(f: Tensor, xf: Tensor, n: Tensor, a: Weight, b: Weight) -> Tuple[Tensor, Tensor]:
    """Return ``1 + k s`` and ``b f``. TorchScript needs a case for each combination of tensors and numbers."""
    if isinstance(a, Tensor):
        return (n + a * xf - _times(b, xf)) / n, _times(b, f)
    elif isinstance(b, Tensor):
        return (n + a * xf - b * xf) / n, b * f
    else:
        return n.add(xf, alpha=a - b) / n, f if b == 1.0 else b * f


def _times(weight: Weight, x: Tensor) -> Tensor:
    if isinstance(weight, Tensor):  # TorchScript cannot multiply a tensor by a Union
        return weight * x
    else:
        return x if weight == 1.0 else weight * x


def in_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``y`` if necessary. torch 2.6 cannot export an in-place activation after a cast to the same dtype."""
    return y if y.dtype == dtype else y.to(dtype)


def without_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` with zeros where ``mask`` is False. Padding then affects no sum or gradient, even if it is NaN."""
    return x.masked_fill(mask.logical_not(), 0.0)


def plain_update(
        x: Tensor, f: Tensor, parallel: Weight, orthogonal: Weight, dims: Optional[List[int]], eps: float,
        mask: Optional[Tensor] = None,
) -> Tensor:
    """Compute the update in plain operations, which autograd differentiates.

    Tracers, TorchScript and ``torch.func`` use this function. Its results are bit-identical to the results of
    :func:`residual_update` in eager mode with the backend ``torch``: a deep network would amplify any difference in
    rounding. Arguments are not checked.

    Args:
        x: Stream, of any shape.
        f: Branch output, of the same shape.
        parallel: Weight ``a`` of the parallel part, a float or a 0-d tensor.
        orthogonal: Weight ``b`` of the orthogonal part, a float or a 0-d tensor.
        dims: Axes over which one projection sums; None for all axes but the first.
        eps: Added to |x|^2, in float32, or in float64 for float64 inputs.
        mask: True for real positions, see :func:`residual_update`.

    Returns:
        The new stream, of the shape of ``x`` and in the dtype of ``x + f``.

    Example:
        >>> x, f = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
        >>> torch.jit.script(plain_update)(x, f, 0.0, 1.0, [-1], 1e-6)
        tensor([3.6400, 3.5200])
    """
    if mask is not None:
        x, f = without_padding(x, mask), without_padding(f, mask)
    return _formula(x, f, parallel, orthogonal, list(range(1, x.dim())) if dims is None else dims, eps)[0]


# ------------------------------------------------------------------------ the backend "torch": forward and backward
def _update(
        x: Tensor, f: Tensor, a: Weight, b: Weight, dims: List[int], eps: float, keep: bool = True,
) -> Tuple[Tensor, Optional[Tensor], Tensor]:
    """Return ``y, s, n``; s is None unless ``keep``. Autograd must not record the call."""
    y, xf, n = _formula(x, f, a, b, dims, eps, reuse=_is_large(x) and not is_observed(x, f))
    return y, xf / n if keep else None, n


def _is_large(x: Tensor) -> bool:
    """Return whether ``x`` is so large that allocating another buffer of its size takes longer than reusing one, 4 us.

    False in compiled code.
    """
    return not torch.compiler.is_compiling() and x.numel() >= 2**17


def _gradients(
        x: Tensor, kept: Tensor, g: Tensor, s: Tensor, n: Tensor, a: Weight, b: Weight, dims: List[int],
        recover: bool, branch_dtype: torch.dtype, needed: Tuple[bool, bool, bool],
) -> Tuple[Optional[Tensor], Optional[Tensor], Tensor, Optional[Tensor]]:
    """Return ``dL/dx, dL/df, <x, g>, <f, g>``. Results that are not needed are None, except ``<x, g>``.

    ``kept`` is y if ``recover``, otherwise f.
    """
    for_x, for_f, for_weights = needed
    stream_dtype, acc = x.dtype, n.dtype
    k = a if not isinstance(b, Tensor) and b == 0.0 else a - b  # torch 2.14 cannot compile a - 0.0
    if x.dtype != acc or kept.dtype != acc or g.dtype != acc:
        x, kept, g = in_dtype(x, acc), in_dtype(kept, acc), in_dtype(g, acc)
    # For example, the gradient of a mean is an expanded tensor. Compiled code must not read the strides of g, which
    # Dynamo does not know: it would copy g to a contiguous tensor, in NCHW order also for channels-last.
    if not torch.compiler.is_compiling() and g.stride() != x.stride():
        g = torch.zeros_like(x) + g
    xg = (x * g).sum(dims, True)
    t, ks = xg / n, s
    if isinstance(k, Tensor):
        t, ks, k = k * t, k * s, 1.0
    grad_x = grad_f = fg = None
    if for_f:
        grad_f = in_dtype(_times(b, g).addcmul(t, x, value=k), branch_dtype)
    if for_x:  # (1 + k s) g + k t (f - 2 s x); if f is recovered, f - 2 s x = y - (1 + s) x
        reuse = _is_large(x) and not torch.is_grad_enabled() and not is_observed(x, g)
        addcmul = torch.Tensor.addcmul_ if reuse else torch.Tensor.addcmul
        grad_x = addcmul(g.addcmul(ks, g, value=k), t, kept, value=k)
        grad_x = addcmul(grad_x, t.addcmul(s, t) if recover else 2.0 * s * t, x, value=-k)
        grad_x = in_dtype(grad_x, stream_dtype)
    if for_weights:  # ``kept`` is f if a weight is learned
        fg = (kept * g).sum(dims, True)
    return grad_x, grad_f, xg, fg


class _ResidualUpdate(torch.autograd.Function):
    """The update with closed-form gradients.

    For a = 0 and b = 1 the backward pass recovers the branch output as f = y - (1 - s) x. The neighbouring layers save
    x and y anyway, so the only extra memory is two numbers per projection, s and n.

    ``s`` is a second output, so that a double backward pass can differentiate it. Compiled code has no double backward
    pass, and Dynamo would pass zeros as the gradient of ``s``, so there ``y`` is the only output. This class does not
    support ``torch.func``, because the support would cost 70 us per call.
    """

    @staticmethod
    def forward(ctx, x, f, a, b, dims, eps, keep_branch, backend):
        y, s, n = backend.update(x, f, a, b, dims, eps)
        ctx.recover = not keep_branch and _are(a, b, 0.0, 1.0)
        a_tensor, ctx.a = (a, None) if isinstance(a, Tensor) else (None, a)
        b_tensor, ctx.b = (b, None) if isinstance(b, Tensor) else (None, b)
        ctx.save_for_backward(x, y if ctx.recover else f, s, n, a_tensor, b_tensor)
        ctx.set_materialize_grads(False)
        ctx.dims, ctx.eps, ctx.backend, ctx.branch_dtype = dims, eps, backend, f.dtype
        return y if torch.compiler.is_compiling() else (y, s)

    @staticmethod
    def backward(ctx, g, grad_s=None):
        x, kept, s, n, a, b = ctx.saved_tensors
        a, b = ctx.a if a is None else a, ctx.b if b is None else b
        for_x, for_f, for_a, for_b, *_ = ctx.needs_input_grad
        backend, dims = ctx.backend, ctx.dims
        if torch.is_grad_enabled():  # double backward
            backend, n = TORCH, x.to(n.dtype).square().sum(dims, True).add(ctx.eps)
        elif backend is not TORCH and g is not None and (
                is_batched(g) or is_transformed() or dispatch_mode_is_active()):
            backend = TORCH
        grad_x = grad_f = grad_a = grad_b = None
        if g is not None:
            grad_x, grad_f, xg, fg = backend.gradients(
                x, kept, g, s, n, a, b, dims, ctx.recover, ctx.branch_dtype, (for_x, for_f, for_a or for_b))
            grad_a = (s * xg).sum().to(a) if for_a else None
            grad_b = (fg - s * xg).sum().to(b) if for_b else None
        if grad_s is not None:  # in a double backward pass, with n ds/dx = f - 2 s x and n ds/df = x
            of_x = torch.addcmul(in_dtype(kept, n.dtype), 1 + s if ctx.recover else 2 * s, x, value=-1) * (grad_s / n)
            of_f = x * (grad_s / n)
            grad_x = of_x if grad_x is None else grad_x + of_x
            grad_f = of_f if grad_f is None else grad_f + of_f
        return grad_x, grad_f, grad_a, grad_b, None, None, None, None


def _is_learned(weight: Weight) -> bool:
    return isinstance(weight, Tensor) and weight.requires_grad


def _are(a: Weight, b: Weight, a_value: float, b_value: float) -> bool:
    """Return whether both weights are numbers with these values. Comparing a tensor would synchronise its device."""
    return not isinstance(a, Tensor) and a == a_value and not isinstance(b, Tensor) and b == b_value


TORCH = Backend(_update, _gradients)
INDUCTOR = Backend(folded(compiled(_update)), folded(compiled(_gradients)))


def _kernels() -> ModuleType:
    """Import :mod:`timm_ortho.kernels` on first use: Triton is optional and slow to import."""
    from . import kernels

    return kernels


TRITON = Backend(lambda *args: _kernels().update(*args), lambda *args: _kernels().gradients(*args))
CHECKED = Backend(checked("forward", TRITON.update, _update), checked("backward", TRITON.gradients, _gradients))


# ----------------------------------------------------------------------------------- the public functions
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
        ValueError: Shapes differ, a dtype is not floating-point, ``dim`` does not exist, or ``eps`` is not positive and
            finite.

    Example:
        >>> decompose(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]))
        (tensor([0.3600, 0.4800]), tensor([ 0.6400, -0.4800]))
    """
    check_eps(eps)
    dims = check_tensors(x, f, _listed(dim))
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
    ``torch.export``, ``torch.jit.trace``, FX, ``torch.func`` and forward-mode differentiation this function runs the
    operations of :func:`plain_update`. Scripted code must call :func:`plain_update` itself, because TorchScript does
    not compile keyword-only arguments. In eager mode x and f may be jagged nested tensors ``[B, *, C]``, if ``dim`` is
    the channel axis.

    Args:
        x: Stream, of any shape. If |x|^2 exceeds the range of float32 (|x| above 1.8e19), or of float64 for float64
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
        backend: ``"auto"``, ``"torch"``, ``"inductor"`` or ``"triton"``; None for the default. See
            :func:`choose_backend`.

    Returns:
        The new stream, of the shape of ``x`` and in the dtype of ``x + f``.

    Raises:
        ValueError: Shapes or devices differ, a dtype is not floating-point, ``dim`` does not exist, a weight is not a
            scalar, ``eps`` is not positive and finite, ``mask`` is not boolean or does not broadcast, or ``keep`` or
            ``backend`` is unknown.
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
    return checked_update(x, f, parallel, orthogonal, _listed(dim), eps, mask, keep == "branch", backend)


def checked_update(
        x: Tensor, f: Tensor, a: Weight, b: Weight, dims: Optional[List[int]], eps: float,
        mask: Optional[Tensor] = None, keep_branch: bool = False, backend: Optional[str] = None,
) -> Tensor:
    """Compute :func:`residual_update` for weights and eps that are already validated.

    Only the tensors and ``dims`` are checked here. Connections check their arguments at construction, because repeated
    checks take a noticeable share of a small model's time.
    """
    if has_torch_function_variadic(x, f) and not (isinstance(x, Tensor) and isinstance(f, Tensor)):  # FX proxies
        # The proxy's __torch_function__ records one call of plain_update. handle_torch_function would first call active
        # torch-function modes, which record each operation inside plain_update.
        proxy = f if isinstance(x, Tensor) else x
        return proxy.__torch_function__(plain_update, (type(proxy),), (x, f, a, b, dims, eps, mask), {})
    if x.is_nested or f.is_nested:
        return _nested_update(x, f, a, b, dims, eps, mask, keep_branch, backend)
    ndim = x.dim()
    if (dims is None or len(dims) != 1 or not -ndim <= dims[0] < ndim or x.shape != f.shape or x.device != f.device
            or not x.is_floating_point() or not f.is_floating_point()):
        dims = check_tensors(x, f, dims)
    if mask is not None:
        check_mask(mask, x)
        x, f = without_padding(x, mask), without_padding(f, mask)
    name = choose_backend(x, f, backend)
    if _are(a, b, 1.0, 1.0):
        return x + f
    needs_gradient = torch.is_grad_enabled() and (
        x.requires_grad or f.requires_grad or _is_learned(a) or _is_learned(b))
    if name == "torch" and not needs_gradient and not _is_large(x):
        return _formula(x, f, a, b, dims, eps)[0]
    if is_recorded() or is_transformed():
        return plain_update(x, f, a, b, dims, eps)
    computed_by = TORCH if name == "torch" else _backend(name, backend)
    if needs_gradient:
        y = _ResidualUpdate.apply(x, f, a, b, dims, eps, keep_branch, computed_by)
        return y if isinstance(y, Tensor) else y[0]
    return computed_by.update(x, f, a, b, dims, eps, False)[0]


def _backend(name: str, requested: Optional[str]) -> Backend:
    """Return the backend of this name; ``triton`` is verified against ``torch`` if ``auto`` chose it."""
    if name == "inductor":
        return INDUCTOR
    return CHECKED if (requested or default()) == "auto" else TRITON


def _nested_update(x: Any, f: Tensor, a: Weight, b: Weight, dims: Optional[List[int]], *args: Any) -> Tensor:
    """Compute :func:`checked_update` for jagged nested tensors on their packed tokens, ``[sum of lengths, C]``."""
    if not x.layout == f.layout == torch.jagged:  # other nested tensors have no shape
        raise ValueError(f"nested tensors must both have the layout torch.jagged, got x of layout {x.layout} and f of "
                         f"layout {f.layout}: pass layout=torch.jagged to torch.nested.nested_tensor")
    ragged = [axis for axis, size in enumerate(x.shape) if not isinstance(size, int)]
    channels = x.dim() - 1
    if not ragged or x.shape != f.shape or dims not in ([-1], [channels]) or ragged == [channels]:
        raise ValueError(
            "nested tensors must have the same offsets, and one projection per token (dim=-1, connection 'feature' or "
            f"'hybrid'), got x of shape {tuple(x.shape)}, f of shape {tuple(f.shape)}, dim={dims}; to project over "
            "other axes, convert x and f to padded tensors (x.to_padded_tensor) and pass a mask")
    y = checked_update(x.values(), f.values(), a, b, [-1], *args)
    return torch.nested.nested_tensor_from_jagged(y, x.offsets(), x.lengths(), jagged_dim=ragged[0])


def _listed(dim: Dim) -> Optional[List[int]]:
    axes = dim if dim is None or isinstance(dim, (tuple, list)) else [dim]
    if axes is not None and not all(isinstance(axis, (int, Integral)) for axis in axes):
        raise ValueError(f"dim must be a whole number, a tuple of whole numbers or None, got {dim!r}")
    return None if axes is None else [int(axis) for axis in axes]
