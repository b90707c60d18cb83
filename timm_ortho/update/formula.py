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

:func:`formula` and :func:`gradients` are the backend ``torch``. :class:`timm_ortho.update.plan.Plan` has the Triton
counterparts, and :mod:`timm_ortho.update.backend` chooses one of the backends.
"""
from typing import List, Optional, Tuple, Union

import torch
from torch import Tensor

from .._compat import is_eager, is_recorded

Weight = Union[float, Tensor]


def accumulate_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products, sums and divisions for a result of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def formula(
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
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        gain = (n + a * xf - _times(b, xf)) / n
    else:
        gain = n.add(xf, alpha=a - b) / n
    f = _times(b, f)
    if x.stride() != f.stride():
        y = x * gain + f  # the first term determines the memory format
    elif reuse:
        y = torch.addcmul(f, gain, x, out=products)
    else:
        y = f.addcmul(gain, x)
    return y if y.dtype == result else y.to(result), xf, n


def recorded_formula(x: Tensor, f: Tensor, a: Weight, b: Weight, dims: List[int], eps: float) -> Tensor:
    """Return y in operations that other programs convert: only ``mul``, ``add``, ``sub``, ``div`` and ``sum``.

    Exported programs use it. For example, Core ML's converter drops the factor ``alpha`` of an addition. The result
    equals that of :func:`formula` up to rounding.

    Programs are often converted to float16 later. Its largest number is 65504, but |x|^2 of a whole sample can be
    millions. Sums over several axes are therefore scaled by 2^-12, which is exact in float32. A sum over the channels
    of one token is not scaled, because float16 would then round eps to 0, and x can be 0.
    """
    result = x.dtype if x.dtype == f.dtype else torch.promote_types(x.dtype, f.dtype)
    x, f = in_dtype(x, accumulate_in(result)), in_dtype(f, accumulate_in(result))
    scale = 2.0**-12 if len(dims) > 1 else 1.0
    scaled = _times(scale, x)
    n = (x * scaled).sum(dims, True) + scale * eps
    f_par = (f * scaled).sum(dims, True) / n * x
    y = x + _times(b, f - f_par)
    if isinstance(a, Tensor):  # noqa: SIM114 TorchScript needs a case for each type
        y = y + a * f_par
    elif a != 0.0:
        y = y + a * f_par
    return in_dtype(y, result)


def _times(weight: Weight, x: Tensor) -> Tensor:
    if isinstance(weight, Tensor):  # TorchScript cannot multiply a tensor by a Union
        return weight * x
    else:
        return x if weight == 1.0 else weight * x


def in_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``y``; if it has the dtype, recorded graphs contain no cast."""
    return y if y.dtype == dtype else y.to(dtype)


def without_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` with zeros where ``mask`` is False. Padding then affects no sum or gradient, even if it is NaN."""
    return x.masked_fill(mask.logical_not(), 0.0)


def plain_update(
        x: Tensor, f: Tensor, parallel: Weight, orthogonal: Weight, dims: Optional[List[int]], eps: float,
        mask: Optional[Tensor] = None,
) -> Tensor:
    """Compute the update in plain operations, which autograd differentiates.

    Tracers, TorchScript and ``torch.func`` use this function. In eager mode, its results are bit-identical to the
    results of :func:`residual_update` with the backend ``torch``: a deep network would amplify any difference in
    rounding. TorchScript, ``torch.jit.trace`` and ``torch.export`` record :func:`recorded_formula`. Arguments are not
    checked.

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
    if not torch.jit.is_scripting():
        proxy = f if isinstance(x, Tensor) else x
        if not isinstance(proxy, Tensor):
            # FX records one call of this function, also if it traces the recorded graph again. handle_torch_function
            # would first call active torch-function modes, which record each operation of this function.
            call = (x, f, parallel, orthogonal, dims, eps, mask)
            return proxy.__torch_function__(plain_update, (type(proxy),), call, {})
    if mask is not None:
        x, f = without_padding(x, mask), without_padding(f, mask)
    axes = list(range(1, x.dim())) if dims is None else dims
    if not torch.jit.is_scripting():  # noqa: SIM102 TorchScript compiles the rest of a longer condition
        if not is_recorded():
            return formula(x, f, parallel, orthogonal, axes, eps)[0]
    return recorded_formula(x, f, parallel, orthogonal, axes, eps)


# ------------------------------------------------------------------------ the backend "torch": forward and backward
def is_large(x: Tensor) -> bool:
    """Return whether ``x`` is so large that allocating another buffer of its size takes longer than reusing one, 4 us.

    False in compiled code.
    """
    return not torch.compiler.is_compiling() and x.numel() >= 2**17


def gradients(
        x: Tensor, kept: Tensor, g: Tensor, s: Tensor, n: Tensor, a: Weight, b: Weight, dims: List[int],
        recover: bool, branch_dtype: torch.dtype, needed: Tuple[bool, bool, bool],
) -> Tuple[Optional[Tensor], Optional[Tensor], Tensor, Optional[Tensor]]:
    """Return ``dL/dx, dL/df, <x, g>, <f, g>``. Results that are not needed are None, except ``<x, g>``.

    ``kept`` is y if ``recover``, otherwise f.
    """
    for_x, for_f, for_weights = needed
    stream_dtype, acc = x.dtype, n.dtype
    a, b = (in_dtype(w, acc) if isinstance(w, Tensor) else w for w in (a, b))
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
        reuse = is_large(x) and not torch.is_grad_enabled() and is_eager(x, g)
        addcmul = torch.Tensor.addcmul_ if reuse else torch.Tensor.addcmul
        grad_x = addcmul(g.addcmul(ks, g, value=k), t, kept, value=k)
        grad_x = addcmul(grad_x, t.addcmul(s, t) if recover else 2.0 * s * t, x, value=-k)
        grad_x = in_dtype(grad_x, stream_dtype)
    if for_weights:  # ``kept`` is f if a weight is learned
        fg = (kept * g).sum(dims, True)
    return grad_x, grad_f, xg, fg
