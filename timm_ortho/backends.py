"""Choose the backend (implementation) that computes the residual update, and verify the Triton kernels at run time.

| backend | implementation | chosen by ``auto`` |
| --- | --- | --- |
| ``torch`` | the operations of :mod:`timm_ortho.functional` | on the CPU |
| ``inductor`` | the same operations, compiled and called from eager mode | never, because compiling takes 30 s |
| ``triton`` | the kernels of :mod:`timm_ortho.kernels` | on CUDA, as long as their results agree with ``torch`` |

Under ``torch.compile`` and inside a dispatch mode of torch, such as a FLOP counter, the backend is always ``torch``. A
compiler can then fuse its operations with neighbouring operations, and a dispatch mode can record them.
"""
import functools
import importlib.util
import os
import shutil
import sys
import types
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ._checks import known_name
from ._compat import dispatch_mode_is_active, functorch_is_active, is_compiler_error, is_plain, is_recompile_limit
from ._text import error_text

BACKENDS = ("auto", "torch", "inductor", "triton")
BACKEND_VARIABLE = "TIMM_ORTHO_BACKEND"
TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None

_default = os.environ.get(BACKEND_VARIABLE) or "auto"  # choose_backend checks the name


def accumulate_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products, sums and divisions for a stream of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Backend(NamedTuple):
    """The two functions of a backend. :mod:`timm_ortho.kernels` has functions with the same names and arguments."""

    update: Callable[..., Any]
    gradients: Callable[..., Any]


def default() -> str:
    """Return the default backend, which :func:`use_backend` or TIMM_ORTHO_BACKEND sets."""
    return _default


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Set the default backend inside a context. This overrides the environment variable TIMM_ORTHO_BACKEND.

    Args:
        name: ``"auto"``, ``"torch"``, ``"inductor"`` or ``"triton"``.

    Raises:
        ValueError: The name is unknown.

    Example:
        >>> with use_backend("torch"):
        ...     choose_backend(torch.ones(1), torch.ones(1))
        'torch'
    """
    global _default
    before, _default = _default, known_name("backend", name, BACKENDS)
    try:
        yield
    finally:
        _default = before


def choose_backend(x: Tensor, f: Tensor, backend: Optional[str] = None) -> str:
    """Return the backend that :func:`timm_ortho.residual_update` would use for these tensors.

    Args:
        x: Stream.
        f: Branch output.
        backend: ``"auto"``, ``"torch"``, ``"inductor"`` or ``"triton"``. None means the default, which
            :func:`use_backend` sets. Outside its context, the default is the value of the environment variable
            TIMM_ORTHO_BACKEND when this package was imported, or ``"auto"``.

    Returns:
        ``"torch"``, ``"inductor"`` or ``"triton"``. Under ``torch.compile`` and inside a dispatch mode the result is
        always ``"torch"``.

    Raises:
        ValueError: The name is unknown.
        RuntimeError: The requested backend cannot run; the message contains the reason.

    Example:
        >>> choose_backend(torch.ones(2, 3), torch.ones(2, 3), "torch")
        'torch'
    """
    name = _default if backend is None else backend
    if name == "torch" or (name == "auto" and x.is_cpu):
        return "torch"
    if name == "auto":
        # Triton is preferred because of its memory traffic, not because of a measurement. Its kernels read or write 3
        # tensors of the stream's size in the forward pass and 5 in the backward pass. PyTorch's operations read or
        # write 9 and 15.
        takes_triton = x.is_cuda and is_plain(x) and is_plain(f) and _why_not("triton", x, f) is None
        return "triton" if takes_triton and not _is_recorded() else "torch"
    known_name("backend" if backend else BACKEND_VARIABLE, name, BACKENDS)
    reason = _why_not(name, x, f)
    if reason is not None:
        source = "" if backend else f" (set by use_backend or {BACKEND_VARIABLE})"
        raise RuntimeError(f"backend {name!r}{source} cannot run: {reason}; choose 'torch' or 'auto'")
    return "torch" if _is_recorded() else name


def _is_recorded() -> bool:
    """Return whether a compiler or a dispatch mode records the operations."""
    return torch.compiler.is_compiling() or dispatch_mode_is_active()


def _why_not(name: str, x: Tensor, f: Tensor) -> Optional[str]:
    """Return why ``"triton"`` or ``"inductor"`` cannot run on these tensors, or None if it can."""
    device = x.device.type
    if name == "triton" and not TRITON_IS_INSTALLED:
        return "Triton is not installed"
    if device not in ("cuda", "cpu"):
        return f"there are no kernels for tensors on '{device}'"
    if device == "cpu" and name == "triton" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "the tensors are on the CPU, which requires TRITON_INTERPRET=1 in the environment before Python starts"
    # compiled code skips the search for a C++ compiler, because torch.compile cannot trace that search
    if device == "cpu" and name == "inductor" and not (torch.compiler.is_compiling() or _cpp_compiler_is_installed()):
        return "there is no C++ compiler: install one (apt install g++), or set CXX in the environment"
    if not {x.dtype, f.dtype} <= {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        return f"there are no kernels for {x.dtype} and {f.dtype}"
    if name == "triton" and {x.dtype, f.dtype} == {torch.float64, torch.bfloat16}:
        return "there are no kernels for float64 and bfloat16, which Triton's interpreter casts incorrectly"
    return "it does not support the transforms of torch.func" if functorch_is_active() else None


@functools.cache
def _cpp_compiler_is_installed() -> bool:
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


# ------------------------------------------------------------------------------------------------- "inductor"
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a backend function with dynamic sizes, for calls from eager mode without gradients.

    A case is a combination of dtypes, axes of size 1 and the values of arguments that are not tensors. If a case
    reaches torch's recompilation limit, a RuntimeWarning is issued, and further calls of this case run in eager mode.
    """
    in_eager_mode = set()  # cases that reached the limit

    @functools.cache
    def compiled_for(*case: Any) -> Callable[..., Any]:
        # torch.compile limits the recompilations of one code object, so each case has its own code object
        fresh = types.FunctionType(function.__code__.replace(), function.__globals__, argdefs=function.__defaults__)
        return torch.compile(fresh, fullgraph=True, dynamic=True)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        args = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
        case = tuple(map(_static, args))
        if case in in_eager_mode:
            return function(*args)
        try:
            return compiled_for(*case)(*args)
        except Exception as error:
            if not is_compiler_error(error):
                raise
            reason = error_text(error)
            if not is_recompile_limit(error):
                raise RuntimeError(f"backend 'inductor' cannot compile: {reason}; choose 'torch' or 'auto'") from error
        in_eager_mode.add(case)
        warnings.warn(
            "timm_ortho's backend 'inductor' reached torch._dynamo.config.recompile_limit; tensors like these use the "
            f"backend 'torch' from now on (x of shape {tuple(args[0].shape)}): {reason}", RuntimeWarning,
            stacklevel=2)
        return function(*args)

    return call


def _static(argument: Any) -> Any:
    """Return the properties of an argument on which compiled code depends. torch.compile treats size 1 as constant."""
    if isinstance(argument, Tensor):
        return argument.dtype, tuple(size == 1 for size in argument.shape)
    return tuple(map(_static, argument)) if isinstance(argument, list) else argument


# ---------------------------------------------------------------------------------- "triton", chosen by "auto"
_SAMPLE = 2 ** 22  # approximate number of elements that a check compares, in well under a millisecond on a GPU
_agrees: Dict[Tuple[Any, ...], bool] = {}  # case -> whether the kernels agreed with "torch" in this process


def checked(direction: str, kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel so that the first call of each case is compared with the torch backend.

    A case is a combination of direction, device, dtypes, the sizes of the projected axes, and whether the last of these
    axes has stride 1. If the results differ beyond tolerance or the launch fails, a RuntimeWarning is issued, and this
    call and all later calls of the case return the results of the reference. An out-of-memory error is raised instead.
    Calls during the capture of a CUDA graph are not compared. If a result of the reference is not finite, the
    comparison is repeated at the next call.

    Args:
        direction: ``"forward"`` or ``"backward"``, for the warning.
        kernel: Function of the backend ``triton``.
        reference: Function of the backend ``torch`` with the same arguments.
    """
    def call(x: Tensor, other: Tensor, *args: Any) -> Any:
        dims = next(arg for arg in args if isinstance(arg, list))
        width = [x.shape[d] for d in dims]
        case = (direction, x.device, x.dtype, other.dtype, x.stride(dims[-1]) == 1, *width)
        if case in _agrees:
            return (kernel if _agrees[case] else reference)(x, other, *args)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return kernel(x, other, *args)
        problem: Optional[str]
        try:
            results = kernel(x, other, *args)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 Triton's compiler may raise any type of error
            problem = f"could not be launched ({error_text(error, named=True)})"
        else:
            problem = _difference(results, reference, (x, other, *args), 0 in [d % x.dim() for d in dims])
            if problem == "":
                _agrees[case] = True
            if not problem:
                return results
        _agrees[case] = False
        warnings.warn(
            f"timm_ortho's Triton kernel ({direction}, {'feature' if len(dims) == 1 else 'global'} scope, stream of "
            f"shape {tuple(x.shape)} and {x.dtype} on {x.device}) {problem}; the torch backend is used from now on. "
            "Please report this. TIMM_ORTHO_BACKEND=torch avoids the check", RuntimeWarning, stacklevel=2)
        return reference(x, other, *args)

    return call


def _difference(results: Any, reference: Callable[..., Any], args: Tuple[Any, ...], whole: bool) -> Optional[str]:
    """Return how the results differ from the reference, "" if they agree, None if the reference is not finite.

    The comparison covers evenly spaced samples of the batch, or the whole batch if ``whole`` is true.
    """
    x = args[0]
    count = len(x) if whole or not len(x) else min(len(x), max(2, _SAMPLE * len(x) // max(1, x.numel())))
    index = torch.linspace(0, len(x) - 1, count, device=x.device).long()

    def sample(tensor: Any) -> Any:
        return tensor[index] if isinstance(tensor, Tensor) and tensor.dim() == x.dim() else tensor

    measured = []  # for each result: largest error divided by the relative tolerance, and largest expected value
    for result, expected in zip(results, reference(*map(sample, args)), strict=True):
        if result is not None and result.numel():
            result, allowed = sample(result), 2 * torch.finfo(result.dtype).eps
            allowed += 1e-10 if result.dtype == torch.float64 else 1e-4
            size = expected.abs().max().double()
            measured.append(torch.stack([(result - expected).abs().max() / allowed, size]))
    for distance, size in torch.stack(measured).tolist() if measured else ():
        if not size < float("inf"):
            return None
        if not distance <= size:
            return f"is inaccurate: its error is {distance / size:.2g} times the tolerance"
    return ""
