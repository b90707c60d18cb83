"""Choose the backend (implementation) that computes the residual update, and verify the Triton kernels at run time.

| backend | implementation | chosen by ``auto`` |
| --- | --- | --- |
| ``torch`` | the operations of :mod:`timm_ortho.update.formula` | on the CPU |
| ``triton`` | the kernels of :mod:`timm_ortho.update.kernels` | on CUDA, if their results agree with ``torch`` |

The kernels can also compute the update together with the norm that follows it (:mod:`timm_ortho.update.norm`). Under
``torch.compile`` and inside a dispatch mode of torch, such as a FLOP counter, the backend is always ``torch``. A
compiler can then fuse its operations with neighbouring operations, and a dispatch mode can record them.
"""
import importlib.util
import os
import threading
import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable, Dict, Iterable, Iterator, Optional, Sequence, Tuple

import torch
from timm.layers import LayerNorm, RmsNorm
from torch import Tensor, nn

from .._checks import known_name
from .._compat import dispatch_mode_is_active, functorch_is_active, has_hooks, is_plain, own_parameters
from .._text import error_text

BACKENDS = ("auto", "torch", "triton")
BACKEND_VARIABLE, NORM_VARIABLE = "TIMM_ORTHO_BACKEND", "TIMM_ORTHO_FUSE_NORM"
TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None

# Name of the default backend, and whether kernels may include the norm. `_own` has the values of a thread's own
# context, so that overlapping contexts in several threads do not affect each other. A thread without a context uses the
# main thread's, because CUDA's backward passes run in threads of their own, which compute checkpointed blocks again.
_own: ContextVar[Optional[Tuple[str, bool]]] = ContextVar("timm_ortho_backend", default=None)
_main = [(os.environ.get(BACKEND_VARIABLE) or "auto", os.environ.get(NORM_VARIABLE) != "0")]


def default() -> str:
    """Return the default backend, which :func:`use_backend` or TIMM_ORTHO_BACKEND sets."""
    return (_own.get() or _main[-1])[0]


def fuses_norm() -> bool:
    """Return whether kernels may compute the update together with the norm that follows it."""
    return (_own.get() or _main[-1])[1]


@contextmanager
def use_backend(name: str, fuse_norm: Optional[bool] = None) -> Iterator[None]:
    """Set the default backend inside a context. This overrides the environment variable TIMM_ORTHO_BACKEND.

    A context of the main thread also applies to threads without a context of their own.

    Args:
        name: ``"auto"``, ``"torch"`` or ``"triton"``.
        fuse_norm: Whether Triton kernels may compute the update together with the norm that follows it. None keeps the
            present value, which is True unless the environment variable TIMM_ORTHO_FUSE_NORM is ``0``.

    Raises:
        ValueError: The name is unknown.

    Example:
        >>> with use_backend("torch"):
        ...     choose_backend(torch.ones(1), torch.ones(1))
        'torch'
    """
    values = _known("backend", name), fuses_norm() if fuse_norm is None else fuse_norm
    is_main = threading.current_thread() is threading.main_thread()
    token = _own.set(values)
    if is_main:
        _main.append(values)
    try:
        yield
    finally:
        _own.reset(token)
        if is_main:
            _main.pop()


def choose_backend(x: Tensor, f: Tensor, backend: Optional[str] = None, norm: Optional[Any] = None) -> str:
    """Return the backend that :func:`timm_ortho.residual_update` would use for these tensors.

    Args:
        x: Stream.
        f: Branch output.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``. None means the default, which :func:`use_backend` sets.
            Outside its context, the default is the value of the environment variable TIMM_ORTHO_BACKEND when this
            package was imported, or ``"auto"``.
        norm: Module that reads the sum next, for the orthogonal update along the last axis.

    Returns:
        ``"torch"`` or ``"triton"``; ``"triton with norm"`` if one kernel computes the update and the norm. Under
        ``torch.compile`` and inside a dispatch mode the result is always ``"torch"``.

    Raises:
        ValueError: The name is unknown.
        RuntimeError: The requested backend cannot run; the message contains the reason.

    Example:
        >>> choose_backend(torch.ones(2, 3), torch.ones(2, 3), "torch")
        'torch'
    """
    if torch.compiler.is_compiling():  # before the context variable is read, which torch.compile cannot trace
        if backend is not None:
            _known("backend", backend)
        return "torch"
    name = default() if backend is None else backend
    if name == "torch" or (name == "auto" and not x.is_cuda):
        return "torch"
    if name == "auto":
        # Triton is preferred because of its memory traffic. Its kernels read or write 3 tensors of the stream's size in
        # the forward pass and 5 in the backward pass. PyTorch's operations read or write 9 and 15.
        if not (is_plain(x) and is_plain(f)) or functorch_is_active() or (
                _unsupported("cuda", x.dtype, f.dtype) is not None):
            return "torch"
    else:
        _known("backend" if backend else BACKEND_VARIABLE, name)
        reason = why_not_triton(x, f)
        if reason is not None:
            source = "" if backend else f" (set by use_backend or {BACKEND_VARIABLE})"
            raise RuntimeError(f"backend {name!r}{source} cannot run: {reason}; choose 'torch' or 'auto'")
    if dispatch_mode_is_active():
        return "torch"
    with_norm = (
        norm is not None and fuses_norm() and has_kernels(norm) and norm.normalized_shape == x.shape[-1:]
        and x.is_contiguous() and f.is_contiguous() and 1 < x.shape[-1] <= LONGEST_NORM and x.numel() > 0)
    return "triton with norm" if with_norm else "triton"


def _known(kind: str, name: str) -> str:
    if name == "inductor":
        raise ValueError(f"{kind} 'inductor' was removed: compile the whole model with torch.compile, or choose "
                         "'torch' or 'auto'")
    return known_name(kind, name, BACKENDS)


def why_not_triton(x: Tensor, f: Tensor) -> Optional[str]:
    """Return why the kernels cannot run on these tensors, or None if they can."""
    reason = _unsupported(x.device.type, x.dtype, f.dtype)
    return reason or ("it does not support the transforms of torch.func" if functorch_is_active() else None)


def _unsupported(device: str, *dtypes: torch.dtype) -> Optional[str]:
    """Return why there are no kernels for a type of device and these dtypes of x and f."""
    if not TRITON_IS_INSTALLED:
        return "Triton is not installed"
    if device not in ("cuda", "cpu"):
        return f"there are no kernels for tensors on '{device}'"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "the tensors are on the CPU, which requires TRITON_INTERPRET=1 in the environment before Python starts"
    if not all(dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64) for dtype in dtypes):
        return f"there are no kernels for {dtypes[0]} and {dtypes[1]}"
    if {*dtypes} == {torch.float64, torch.bfloat16}:
        return "there are no kernels for float64 and bfloat16, which Triton's interpreter casts incorrectly"
    return None


# Plans of the kernels, see timm_ortho.update.kernels.plan_of and timm_ortho.update.norm.make_plan.
plans: Dict[Tuple[Any, ...], Any] = {}
norm_plans: Dict[Tuple[Any, ...], Any] = {}


def plan_key(
        x: Tensor, f: Tensor, dims: Optional[Sequence[int]], eps: float, a: Any, b: Any, keep_branch: bool, name: str,
) -> Tuple[Any, ...]:
    """Return everything on which a plan depends."""
    return (x.shape, f.shape, x.stride(), f.stride(), x.dtype, f.dtype, x.device, f.device,
            dims if dims is None else tuple(dims), eps, None if isinstance(a, Tensor) else a,
            None if isinstance(b, Tensor) else b, keep_branch, name)


def norm_plan_key(
        x: Tensor, f: Tensor, norm: Any, w: Optional[Tensor], c: Optional[Tensor], eps: float, name: str,
) -> Tuple[Any, ...]:
    """Return everything on which the plan of an update and the norm after it depends. w and c are the norm's."""
    device = x.device
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return (x.shape, f.shape, x.stride(), f.stride(), x.dtype, f.dtype, device, f.device, eps, type(norm), norm.eps,
            norm.normalized_shape, type(w), None if w is None else w.dtype, type(c), None if c is None else c.dtype,
            vars(norm).get("_fast_norm"), autocast, name)


def kernels_for(x: Tensor, backend: Optional[str] = None) -> Optional[str]:
    """Return the name of the backend if it may select kernels, or None. This is the first and fastest check."""
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return None
    name = default() if backend is None else backend
    return None if name == "torch" or (name == "auto" and not x.is_cuda) else name


# Norms that the kernels can compute together with the update, and whether they subtract the mean.
NORMS: Dict[type, bool] = {nn.LayerNorm: True, LayerNorm: True, nn.RMSNorm: False, RmsNorm: False}
LONGEST_NORM = 4096  # longer rows would not fit the registers of the backward kernel


def has_kernels(norm: Any) -> bool:
    """Return whether kernels exist for a norm: it has an eps, plain parameters and no hooks.

    Subclasses of the supported norms do not count, and neither do parametrized norms, which are such subclasses.
    """
    return (type(norm) in NORMS and norm.eps is not None and not has_hooks(norm)
            and {*map(type, own_parameters(norm).values())} <= {nn.Parameter, type(None)})


# -------------------------------------------------------------------------------- the check of kernels at run time
_SAMPLE = 2 ** 22  # approximate number of elements that a check compares, in well under a millisecond on a GPU
_agrees: Dict[Tuple[Any, ...], bool] = {}  # case -> whether the kernels agreed with "torch" in this process


def verified(
        plan: Any, direction: str, kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a plan so that the first call of each case is compared with the torch backend.

    A case is a combination of ``plan.case`` and the direction. If the results differ beyond tolerance or the launch
    fails, a RuntimeWarning is issued, and this call and all later calls of the case return the results of the
    reference. If memory is too small for the kernel, an out-of-memory error is raised; if it is too small for the
    reference, the kernel is used without a comparison. Calls during the capture of a CUDA graph are not compared. If a
    result of the reference is not finite, the comparison is repeated at the next call. After the comparison, the
    attribute ``direction`` of the plan is ``kernel`` or the reference itself, without a wrapper.

    Args:
        plan: A :class:`timm_ortho.update.kernels.Plan`.
        direction: ``"forward"`` or ``"backward"``.
        kernel: Function that launches kernels.
        reference: Function with the same arguments, and two more: ``sample`` is applied to each tensor first, and
            ``results`` are the kernel's. It returns at least the tensors of ``plan.unpacked(results)``.
    """
    case = direction, *plan.case

    def packed(*args: Any) -> Any:
        return plan.packed(reference(*args))

    def call(x: Tensor, *args: Any) -> Any:
        if case not in _agrees:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return kernel(x, *args)
            problem: Optional[str]
            try:
                results = kernel(x, *args)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 Triton's compiler may raise any type of error
                problem = f"could not be launched ({error_text(error, named=True)})"
            else:
                sample = _sampling(x, plan.dims)
                try:
                    expected = reference(x, *args, sample=sample, results=results)
                    problem = _difference(map(sample, plan.unpacked(results)), expected)
                except torch.cuda.OutOfMemoryError:  # the reference needs more memory; to repeat it would take long
                    problem = ""
                if problem == "":
                    _agrees[case] = True
                    setattr(plan, direction, kernel)
                if not problem:
                    return results
            _agrees[case] = False
            warnings.warn(
                f"timm_ortho's Triton kernel ({direction}, {plan.label}, stream of shape {tuple(x.shape)} and "
                f"{x.dtype} on {x.device}) {problem}; the torch backend is used from now on. Please report this. "
                f"{BACKEND_VARIABLE}=torch avoids the check", RuntimeWarning, stacklevel=2)
        use = kernel if _agrees[case] else packed
        setattr(plan, direction, use)
        return use(x, *args)

    return call


def _sampling(x: Tensor, dims: Sequence[int]) -> Callable[[Any], Any]:
    """Return a function that selects evenly spaced samples of the batch from tensors with the axes of ``x``.

    It selects all samples if a projection sums over the batch axis.
    """
    if 0 in [d % x.dim() for d in dims] or x.numel() <= _SAMPLE:
        return lambda value: value
    index = torch.linspace(0, len(x) - 1, max(2, _SAMPLE * len(x) // x.numel()), device=x.device).long()
    return lambda value: value[index] if isinstance(value, Tensor) and value.dim() == x.dim() else value


def _difference(results: Iterable[Optional[Tensor]], expected: Iterable[Optional[Tensor]]) -> Optional[str]:
    """Return how results differ from expected values, "" if they agree, None if an expected value is not finite."""
    measured = []  # for each result: largest error divided by the relative tolerance, and largest expected value
    for result, value in zip(results, expected, strict=False):
        if result is not None and value is not None and result.numel():
            allowed = 2 * torch.finfo(result.dtype).eps + (1e-10 if result.dtype == torch.float64 else 1e-4)
            error = (result - value).abs().max() / allowed
            measured.append(torch.stack([error.double(), value.abs().max().double()]))
    for distance, size in torch.stack(measured).tolist() if measured else ():
        if not size < float("inf"):
            return None
        if not distance <= size:
            return f"is inaccurate: its error is {distance / size:.2g} times the tolerance"
    return ""
