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

Two backends compute it: ``torch``, the operations below, and ``triton``, the kernels of :mod:`timm_ortho.kernels`.
:func:`choose_backend` says which one runs.
"""
import difflib
import importlib.util
import itertools
import math
import os
from numbers import Real
from types import ModuleType
from typing import Any, Collection, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

__all__ = ["BACKENDS", "choose_backend", "decompose", "plain_update", "residual_update"]

Dim = Union[int, Tuple[int, ...], None]
Weight = Union[float, Tensor]

BACKENDS = ("auto", "torch", "triton")
BACKEND_VARIABLE = "TIMM_ORTHO_BACKEND"
TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None

# What "auto" takes, by kind of device and situation; "torch" wherever nothing is said and wherever Triton cannot run.
# On the CPU this was measured: under torch.compile Inductor fuses the closed form. The rows for CUDA are not measured:
# they follow from what has to move, forward and backward: 3 + 5 times the stream for the kernels, 10 + 15 times for the
# operations of eager mode, while Inductor fuses these as well and needs no kernel of ours.
AUTO = {
    ("cuda", "eager"): "triton",
    ("cuda", "inference"): "triton",
    ("cuda", "compiled"): "torch",
}


# ------------------------------------------------------------------------------------- the formula, plainly
def _accumulate_in(x: Tensor, f: Tensor) -> torch.dtype:
    """float64 if either input is, float32 otherwise."""
    if x.dtype == torch.float64 or f.dtype == torch.float64:
        return torch.float64
    return torch.float32


def _dot(u: Tensor, v: Tensor, dims: List[int], scratch: Optional[Tensor] = None) -> Tensor:
    """``<u, v>``, with ``dims`` kept as axes of size 1; ``scratch`` is memory for the products."""
    products = u * v if scratch is None else torch.mul(u, v, out=scratch)
    return products.sum(dims, keepdim=True)


def _project(
        x: Tensor, f: Tensor, dims: List[int], eps: float, scratch: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """``s`` and ``n``, one of each for a projection, in the dtype of ``x`` and ``f``: the accumulation dtype."""
    n = _dot(x, x, dims, scratch) + eps
    return _dot(x, f, dims, scratch) / n, n


def _combine(
        x: Tensor, f: Tensor, s: Tensor, parallel: Weight, orthogonal: Weight, out: Optional[Tensor] = None) -> Tensor:
    """``b f + (1 + (a - b) s) x``."""
    branch, stream = _times(orthogonal, f), 1 + _times(parallel, s) - _times(orthogonal, s)
    if out is None:
        return torch.addcmul(_laid_out_as(x, branch), stream, x)
    return torch.addcmul(branch, stream, x, out=out)


def _laid_out_as(x: Tensor, f: Tensor) -> Tensor:
    """``f`` in the memory format of ``x``: a sum has that of its first term, and the stream is to keep its own."""
    if x.is_contiguous():
        return f.contiguous()
    if x.dim() > 2 and x.stride(1) == 1 and f.stride(1) != 1:  # channels-last
        return f.movedim(1, -1).contiguous().movedim(-1, 1)
    if x.dim() > 2 and x.movedim(-1, 1).is_contiguous():  # channels first, seen as [..., channels]: MaxViT's stream
        return f.movedim(-1, 1).contiguous().movedim(1, -1)
    return f


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
        mask: Optional[Tensor] = None,
) -> Tensor:
    """The update without its closed-form gradients: the reference, and what compilers and tracers are given.

    Its results equal those of :func:`residual_update` in eager mode bit for bit: a deep network with random weights
    makes any difference in rounding visible.
    """
    if mask is not None:
        x, f = without_padding(x, mask), without_padding(f, mask)
    dtype = _accumulate_in(x, f)
    x_acc, f_acc = x.to(dtype), f.to(dtype)
    s, _ = _project(x_acc, f_acc, _axes(x.dim(), dims), eps)
    return in_dtype(_combine(x_acc, f_acc, s, parallel, orthogonal), torch.promote_types(x.dtype, f.dtype))


def in_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast, none where there is nothing to cast: torch 2.6 exports no activation in place behind one."""
    return y if y.dtype == dtype else y.to(dtype)


def without_padding(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` with zeros where ``mask`` is False: what stood there, NaN too, is in no sum and in no gradient any more."""
    return x.masked_fill(mask.logical_not(), 0.0)


# ------------------------------------------------------------------------ the formula, with its gradients
# `_update` and `_gradients` are the backend "torch"; `update` and `gradients` of `kernels` are "triton".
def _update(
        x: Tensor, f: Tensor, a: Weight, b: Weight, dims: List[int], eps: float) -> Tuple[Tensor, Tensor, Tensor]:
    """``y, s, n``. New memory costs most on a CPU, where its pages are mapped anew: products go where y comes later."""
    dtype, result = _accumulate_in(x, f), torch.promote_types(x.dtype, f.dtype)
    x, f = x.to(dtype), f.to(dtype)
    projections = []
    y = _room_like(x)
    for x_piece, f_piece, room in _pieces(dims, x, f, y):
        s, n = _project(x_piece, f_piece, dims, eps, room)
        summed = _combine(x_piece, f_piece, s, a, b, room)
        projections.append((s, n))
    s, n = (_joined(pieces) for pieces in zip(*projections, strict=True))
    return (summed if y is None else y).to(result), s, n


def _gradients(
        x: Tensor, kept: Tensor, g: Tensor, s: Tensor, n: Tensor, a: Weight, b: Weight, dims: List[int],
        recover: bool, branch_dtype: torch.dtype, needed: Tuple[bool, bool, bool],
) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """``dL/dx, dL/df, <x, g>, <f, g>``, None for what is not needed; ``kept`` is y if ``recover``, otherwise f."""
    stream_dtype = x.dtype
    x, kept, g = x.to(n.dtype), kept.to(n.dtype), g.to(n.dtype)
    grad_x, grad_f = (_room_like(x) if wanted else None for wanted in needed[:2])
    products = []
    for piece in _pieces(dims, x, kept, g, s, n, grad_x, grad_f):
        of_x, of_f, xg, fg = _gradients_of(*piece, a - b, b, dims, recover, needed)
        products.append((xg, fg))
    xg, fg = (_joined(pieces) for pieces in zip(*products, strict=True))
    grad_x, grad_f = of_x if grad_x is None else grad_x, of_f if grad_f is None else grad_f
    return _to(grad_x, stream_dtype), _to(grad_f, branch_dtype), xg, fg


def _gradients_of(
        x: Tensor, kept: Tensor, g: Tensor, s: Tensor, n: Tensor, room_x: Optional[Tensor], room_f: Optional[Tensor],
        k: Weight, b: Weight, dims: List[int], recover: bool, needed: Tuple[bool, bool, bool],
) -> Tuple[Optional[Tensor], Optional[Tensor], Tensor, Optional[Tensor]]:
    """:func:`_gradients` of one piece, in the accumulation dtype, with ``k = a - b``."""
    for_x, for_f, for_weights = needed
    scratch = room_x if room_f is None else room_f
    xg = _dot(x, g, dims, scratch)
    fg = _dot(kept, g, dims, scratch) if for_weights else None  # with learned weights it is f that was kept
    kt = k * xg / n
    grad_x = grad_f = None
    if for_f:
        grad_f = torch.addcmul(_times(b, g), kt, x, out=room_f)
    if for_x:  # (1 + k s) g + k t (f - 2 s x), where f - 2 s x = y - (1 + s) x
        grad_x = torch.mul(1 + k * s, g, out=room_x)
        grad_x = torch.addcmul(grad_x, kt, kept, out=room_x)
        grad_x = torch.addcmul(grad_x, (1 + s if recover else 2 * s) * kt, x, value=-1, out=room_x)
    return grad_x, grad_f, xg, fg


def _room_like(x: Tensor) -> Optional[Tensor]:
    """Memory for a result, or None where results must not be written into memory that is there already."""
    recorded = torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0
    if recorded or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    return torch.empty_like(x)


_PIECE = 2 ** 20  # elements; a few tensors of them fit a CPU's last cache


def _pieces(dims: List[int], x: Tensor, *others: Optional[Tensor]) -> List[Tuple[Optional[Tensor], ...]]:
    """``x`` and the others cut along the batch, so that a CPU reads from memory once what several operations need.

    Only where it is faster and every sum stays what it was, bit for bit: where the rows to be summed lie side by side
    (tokens, channels-last), and there are many of them in a piece. Otherwise one piece is all of it.

    Args:
        dims: Axes of one projection.
        x: The first tensor.
        others: Tensors of the same batch size, the last of them the memory for a result; None stays None.
    """
    length = x.shape[0]
    if x.device.type == "cpu" and others[-1] is not None and x.numel() > _PIECE and _sums_rows(x, dims):
        length = max(1, _PIECE * length // x.numel())
    if length >= x.shape[0]:
        return [(x, *others)]
    cut = [itertools.repeat(None) if tensor is None else tensor.split(length) for tensor in (x, *others)]
    return list(zip(*cut, strict=False))


def _sums_rows(x: Tensor, dims: List[int]) -> bool:
    return len(dims) == 1 and x.stride(dims[0]) == 1 and 64 * x.shape[dims[0]] <= _PIECE and x.dim() > 1


def _joined(pieces: Sequence[Optional[Tensor]]) -> Optional[Tensor]:
    return pieces[0] if len(pieces) == 1 or pieces[0] is None else torch.cat(list(pieces))


def _to(tensor: Optional[Tensor], *like: Any) -> Optional[Tensor]:
    return None if tensor is None else tensor.to(*like)


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
    def forward(x, f, a, b, dims, eps, keep_branch, backend):
        update = _kernels().update if backend == "triton" else _update
        return update(x, f, a, b, dims, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, f, a, b, ctx.dims, _, keep_branch, ctx.backend = inputs
        y, s, n = output
        ctx.recover = _is_orthogonal(a, b) and not keep_branch
        ctx.weights = _as_float(a), _as_float(b)
        ctx.like = [(i.device, i.dtype) if isinstance(i, Tensor) else () for i in (x, f, a, b)]
        ctx.save_for_backward(x, y if ctx.recover else f, s, n, *(w for w in (a, b) if isinstance(w, Tensor)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g, grad_s, grad_n):
        x, kept, s, n, *tensors = ctx.saved_tensors
        a, b = (tensors.pop(0) if w is None else w for w in ctx.weights)
        for_x, for_f, for_a, for_b = ctx.needs_input_grad[:4]
        grad_x = grad_f = grad_a = grad_b = None
        if g is not None:
            use_kernels = ctx.backend == "triton" and not torch.is_grad_enabled()  # they have no derivative
            grad_x, grad_f, xg, fg = (_kernels().gradients if use_kernels else _gradients)(
                x, kept, g, s, n, a, b, ctx.dims, ctx.recover, ctx.like[1][1], (for_x, for_f, for_a or for_b))
            grad_a = (s * xg).sum() if for_a else None
            grad_b = (fg - s * xg).sum() if for_b else None
        if grad_s is not None:  # only in a double backward pass; n ds/dx = f - 2 s x, ds/df = x / n
            r = torch.addcmul(kept.to(n.dtype), 1 + s if ctx.recover else 2 * s, x.to(n.dtype), value=-1)
            grad_x = _add(grad_x, r * (grad_s / n))
            grad_f = _add(grad_f, x * (grad_s / n))
        if grad_n is not None:  # likewise: n = <x, x> + eps
            grad_x = _add(grad_x, 2 * grad_n * x)
        grads = (_to(grad, *like) for grad, like in zip((grad_x, grad_f, grad_a, grad_b), ctx.like, strict=True))
        return (*grads, None, None, None, None)


def _as_float(weight: Weight) -> Optional[float]:
    return None if isinstance(weight, Tensor) else float(weight)


def _is_orthogonal(a: Weight, b: Weight) -> bool:
    return _as_float(a) == 0.0 and _as_float(b) == 1.0


def _add(left: Optional[Tensor], right: Tensor) -> Tensor:
    return right if left is None else left + right


# ---------------------------------------------------------------------------------------------- backends
def choose_backend(
        x: Tensor,
        f: Tensor,
        backend: Optional[str] = None,
        auto: Optional[Mapping[Tuple[str, str], str]] = None,
) -> str:
    """The backend that :func:`residual_update` takes for these tensors, here and now.

    Args:
        x: Stream.
        f: Branch output.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``. None stands for what the environment variable
            TIMM_ORTHO_BACKEND says, and for ``"auto"`` where it is not set.
        auto: What ``"auto"`` takes, by kind of device and situation. None stands for :data:`AUTO`, the update's.

    Returns:
        ``"torch"`` or ``"triton"``; for ``"auto"`` what the table says of the device and of the situation: inside
        ``torch.compile``, with gradients, or without.

    Raises:
        ValueError: There is no such backend.
        RuntimeError: ``"triton"`` was asked for and cannot run; the message says why.
    """
    source = BACKEND_VARIABLE if backend is None else "backend"
    name = known_name(source, backend or os.environ.get(BACKEND_VARIABLE) or "auto", BACKENDS)
    if name == "auto":
        name = (auto or AUTO).get((x.device.type, _situation(x, f)), "torch")
        return name if name == "torch" or _why_not_triton(x, f) is None else "torch"
    if name == "triton":
        reason = _why_not_triton(x, f)
        if reason is not None:
            raise RuntimeError(f"{source} 'triton' cannot run: {reason}; choose 'torch' or 'auto'")
    return name


def _situation(x: Tensor, f: Tensor) -> str:
    if torch.compiler.is_compiling():
        return "compiled"
    return "eager" if torch.is_grad_enabled() and (x.requires_grad or f.requires_grad) else "inference"


def _why_not_triton(x: Tensor, f: Tensor) -> Optional[str]:
    """What keeps the kernels from running on these tensors, or None."""
    if not TRITON_IS_INSTALLED:
        return "Triton is not installed"
    if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "the tensors are on the CPU, which takes TRITON_INTERPRET=1 in the environment from the start"
    if x.device.type not in ("cuda", "cpu"):
        return f"there are no kernels for tensors on '{x.device.type}'"
    known = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if x.dtype not in known or f.dtype not in known:
        return f"there are no kernels for {x.dtype} and {f.dtype}"
    if torch._C._are_functorch_transforms_active():
        return "the kernels know nothing of torch.func's transforms"
    return None


def _kernels() -> ModuleType:
    """:mod:`timm_ortho.kernels`, on first use: Triton takes a while to import, and need not be there."""
    from . import kernels

    return kernels


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
        mask: Optional[Tensor] = None,
        keep: str = "output",
        backend: Optional[str] = None,
) -> Tensor:
    """Add to the stream the weighted parts of the branch output along and across it, ``x + a f_par + b f_orth``.

    An autograd function with closed-form gradients, differentiable any number of times, which ``torch.compile`` fuses.
    Under ``torch.export``, ``torch.jit.trace``, FX and forward-mode differentiation it is :func:`plain_update`,
    whatever the backend. TorchScript compiles no keyword-only arguments: call :func:`plain_update` in code that is to
    be scripted.

    Args:
        x: Stream, of any shape.
        f: Branch output, of the same shape.
        parallel: ``a``, a float or a 0-d tensor that may require gradients. 0 drops the part along the stream.
        orthogonal: ``b``, likewise. ``a = b = 1.0`` is ``x + f``, bit for bit.
        dim: Axis or axes of one projection: the channel axis gives one for each token or pixel (Algorithm 1). None
            stands for every axis but the first: one for each sample (Algorithm 2).
        eps: Added to |x|^2, in the accumulation dtype (float32, or float64 for float64 inputs).
        mask: What is real, a boolean tensor that broadcasts to the shape of x: ``[B, N, 1]`` for the tokens of a padded
            batch. The rest may hold anything; it is left out of every sum, and its results and gradients are zero. None
            if all is real.
        keep: What autograd keeps beside ``x`` when ``a`` is 0 and ``b`` is 1: ``"output"`` (the result, which must
            then not be changed in place) or ``"branch"`` (``f``). Other weights always keep ``f``.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``, see :func:`choose_backend`. None stands for what the
            environment variable TIMM_ORTHO_BACKEND says, and for ``"auto"`` where it is not set.

    Returns:
        The new stream, of the shape of ``x`` and in the dtype of ``x + f``.

    Raises:
        ValueError: Shapes or devices differ, a dtype is not floating, ``dim`` does not exist, a weight is not a scalar,
            ``eps`` is not positive, ``mask`` is not boolean or does not broadcast, or ``keep`` or ``backend`` is
            unknown.
        RuntimeError: The backend asked for cannot run.
    """
    if has_torch_function_variadic(x, f):  # FX proxies and tensor subclasses: one call of the plain formula
        dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
        return handle_torch_function(plain_update, (x, f), x, f, parallel, orthogonal, dims, eps, mask)
    dims = _check(x, f, dim, eps)
    for name, weight in (("parallel", parallel), ("orthogonal", orthogonal)):
        if isinstance(weight, Tensor) and weight.dim() > 0:
            raise ValueError(f"{name} must be a float or a 0-d tensor, got a tensor of shape {tuple(weight.shape)}")
    if keep not in ("output", "branch"):
        raise ValueError(f"keep must be 'output' or 'branch', got {keep!r}")
    if mask is not None:
        _check_mask(mask, x)
        x, f = without_padding(x, mask), without_padding(f, mask)
    chosen = choose_backend(x, f, backend)
    if _as_float(parallel) == 1.0 and _as_float(orthogonal) == 1.0:
        return x + f
    if chosen == "triton" and torch.compiler.is_compiling():
        return _kernels().operator(x, f, parallel, orthogonal, dims, eps, keep == "branch")
    if is_recorded() or torch.autograd.forward_ad._current_level >= 0:  # the closed form has no forward mode
        return plain_update(x, f, parallel, orthogonal, dims, eps)
    if not _needs_gradient(x, f, parallel, orthogonal):
        return _without_gradient(x, f, parallel, orthogonal, dims, eps, chosen)
    return _ResidualUpdate.apply(x, f, parallel, orthogonal, dims, eps, keep == "branch", chosen)[0]


def _without_gradient(x: Tensor, f: Tensor, a: Weight, b: Weight, dims: List[int], eps: float, backend: str) -> Tensor:
    """The update with nothing kept, and no detour through autograd."""
    if backend == "triton":
        return _kernels().update(x, f, a, b, dims, eps, keep=False)[0]
    return _update(x, f, a, b, dims, eps)[0]


def _needs_gradient(*inputs: Weight) -> bool:
    return torch.is_grad_enabled() and any(isinstance(i, Tensor) and i.requires_grad for i in inputs)


def is_recorded() -> bool:
    """Whether what is called ends up in a file: by ``torch.export`` or ``torch.jit.trace``."""
    is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # the first from torch 2.7
    return is_exporting() or torch.jit.is_tracing()


def _check(x: Tensor, f: Tensor, dim: Any, eps: float) -> List[int]:
    """The axes as a list, or a ValueError that says what is wrong with the arguments."""
    shapes = f"x of shape {tuple(x.shape)} and f of shape {tuple(f.shape)}"
    if x.shape != f.shape:
        raise ValueError(f"stream and branch output must have the same shape, got {shapes}")
    if not (x.is_floating_point() and f.is_floating_point()):
        raise ValueError(f"stream and branch output must be floating-point, got {x.dtype} and {f.dtype}; {shapes}")
    if x.device != f.device:
        raise ValueError(
            f"stream and branch output must be on the same device, got x on {x.device} and f on {f.device}; {shapes}")
    check_eps(eps)
    dims = [dim] if isinstance(dim, int) else _axes(x.dim(), None if dim is None else list(dim))
    outside = [d for d in dims if not -x.dim() <= d < x.dim()]
    if outside or not dims or len({d % x.dim() for d in dims}) < len(dims):
        raise ValueError(
            f"dim must name one or more different axes in [{-x.dim()}, {x.dim() - 1}], got {dim}; {shapes}")
    return dims


def _check_mask(mask: Tensor, x: Tensor) -> None:
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dtype != torch.bool or mask.dim() > x.dim() or any(size not in (1, of_x) for size, of_x in sizes):
        raise ValueError(
            f"mask must be boolean and broadcast to the shape of x, got {mask.dtype} of shape {tuple(mask.shape)}; "
            f"x of shape {tuple(x.shape)}")


def check_eps(eps: float) -> None:
    """Raise ValueError unless ``eps`` is a positive, finite number."""
    if not (isinstance(eps, Real) and 0.0 < eps < math.inf):  # comparisons: a compiler can follow these with any eps
        raise ValueError(f"eps must be positive and finite, got {eps!r}")


def known_name(kind: str, name: str, known: Collection[str]) -> str:
    """``name`` if it is one of ``known``, otherwise a ValueError that lists them and suggests the nearest."""
    if isinstance(name, str) and name in known:
        return name
    nearest = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown {kind} {name!r}, known are {', '.join(repr(k) for k in known)}{hint}")
