"""Choose a backend for the update, compile one, and verify the Triton kernels at run time.

| backend | implementation | chosen by ``auto`` |
| --- | --- | --- |
| ``torch`` | the operations of :mod:`timm_ortho.functional` | on the CPU |
| ``inductor`` | the same, by ``torch.compile`` but called from eager mode | never: it compiles for half a minute |
| ``triton`` | the kernels of :mod:`timm_ortho.kernels` | on CUDA, as long as they agree with ``torch`` |

Under ``torch.compile`` and within a dispatch mode all of them are ``torch``: a compiler fuses its operations with those
around them, and a mode records them. A backend is a pair of functions, see :class:`Backend`.
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

_default = os.environ.get(BACKEND_VARIABLE) or "auto"  # read once; an unknown name raises in choose_backend


def accumulate_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of products, sums and divisions for a stream of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Backend(NamedTuple):
    """``update(x, f, a, b, dims, eps, keep) -> y, s, n``, and ``gradients`` as in :mod:`timm_ortho.kernels`."""

    update: Callable[..., Any]
    gradients: Callable[..., Any]


def default() -> str:
    """What runs where nobody names a backend: what the environment said, or :func:`use_backend` says."""
    return _default


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within this context ``name`` is what TIMM_ORTHO_BACKEND in the environment is for the whole process.

    Args:
        name: ``"auto"``, ``"torch"``, ``"inductor"`` or ``"triton"``.

    Raises:
        ValueError: There is no such backend.
    """
    global _default
    before, _default = _default, known_name("backend", name, BACKENDS)
    try:
        yield
    finally:
        _default = before


def choose_backend(x: Tensor, f: Tensor, backend: Optional[str] = None) -> str:
    """The backend that :func:`timm_ortho.residual_update` takes for these tensors, here and now.

    Args:
        x: Stream.
        f: Branch output.
        backend: ``"auto"``, ``"torch"``, ``"inductor"`` or ``"triton"``. None uses the environment variable
            TIMM_ORTHO_BACKEND, read when this package was imported, or ``"auto"`` if it was not set.

    Returns:
        ``"torch"``, ``"inductor"`` or ``"triton"``. ``"auto"`` is resolved. Under ``torch.compile`` and within a
        dispatch mode the result is always ``"torch"``.

    Raises:
        ValueError: There is no such backend.
        RuntimeError: The one that was asked for cannot run; the message says why.
    """
    name = _default if backend is None else backend
    if name == "torch" or (name == "auto" and x.is_cpu):
        return "torch"
    if name == "auto":
        # Not measured, but counted: of the stream's size Triton's kernels read or write 3 + 5 tensors, forward and
        # backward, PyTorch's operations 9 + 15.
        takes_triton = x.is_cuda and is_plain(x) and is_plain(f) and _why_not("triton", x, f) is None
        return "triton" if takes_triton and not _is_followed() else "torch"
    source = BACKEND_VARIABLE if backend is None else "backend"
    reason = _why_not(known_name(source, name, BACKENDS), x, f)
    if reason is not None:
        raise RuntimeError(f"{source} {name!r} cannot run: {reason}; choose 'torch' or 'auto'")
    return "torch" if _is_followed() else name


def _is_followed() -> bool:
    """Whether a compiler or a dispatch mode wants the operations themselves."""
    return torch.compiler.is_compiling() or dispatch_mode_is_active()


def _why_not(name: str, x: Tensor, f: Tensor) -> Optional[str]:
    """What keeps ``"triton"`` or ``"inductor"`` from running on these tensors, or None."""
    device = x.device.type
    if name == "triton" and not TRITON_IS_INSTALLED:
        return "Triton is not installed"
    if device not in ("cuda", "cpu"):
        return f"there are no kernels for tensors on '{device}'"
    if device == "cpu" and name == "triton" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "the tensors are on the CPU, which takes TRITON_INTERPRET=1 in the environment from the start"
    # torch.compile cannot trace the search for a compiler.
    if device == "cpu" and name == "inductor" and not (torch.compiler.is_compiling() or _cpp_compiler_is_installed()):
        return "there is no C++ compiler: install one (apt install g++), or name yours as CXX in the environment"
    if not {x.dtype, f.dtype} <= {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        return f"there are no kernels for {x.dtype} and {f.dtype}"
    if name == "triton" and {x.dtype, f.dtype} == {torch.float64, torch.bfloat16}:
        return "Triton's interpreter stores float64 results as bfloat16 wrongly"
    return "it knows nothing of torch.func's transforms" if functorch_is_active() else None


@functools.cache
def _cpp_compiler_is_installed() -> bool:
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


# ------------------------------------------------------------------------------------------------- "inductor"
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a backend function with dynamic sizes, to be called from eager mode and without gradients.

    At torch's limit of recompilations a RuntimeWarning is given, and the case that reached it runs in eager mode.
    """
    in_eager_mode = set()  # cases that reached the limit

    @functools.cache
    def of(*case: Any) -> Callable[..., Any]:
        # torch.compile limits how often a code object is compiled anew: each case has one of its own
        fresh = types.FunctionType(function.__code__.replace(), function.__globals__, argdefs=function.__defaults__)
        return torch.compile(fresh, fullgraph=True, dynamic=True)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        args = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
        case = tuple(map(_static, args))
        if case in in_eager_mode:
            return function(*args)
        try:
            return of(*case)(*args)
        except Exception as error:
            if not is_compiler_error(error):
                raise
            reason = error_text(error)
            if not is_recompile_limit(error):
                raise RuntimeError(f"backend 'inductor' cannot compile: {reason}; choose 'torch' or 'auto'") from error
        in_eager_mode.add(case)
        warnings.warn(
            "timm_ortho's backend 'inductor' reached torch._dynamo.config.recompile_limit and uses the backend 'torch' "
            f"for tensors like these from now on (x of shape {tuple(args[0].shape)}): {reason}", RuntimeWarning,
            stacklevel=2)
        return function(*args)

    return call


def _static(argument: Any) -> Any:
    """The properties of an argument that the compiled code depends on; torch.compile treats sizes of 1 as constants."""
    if isinstance(argument, Tensor):
        return argument.dtype, tuple(size == 1 for size in argument.shape)
    return tuple(map(_static, argument)) if isinstance(argument, list) else argument


# ----------------------------------------------------------------------------------- "triton", taken by "auto"
_SAMPLE = 2 ** 22  # elements of the stream that are computed again: well under a millisecond on a GPU
_agrees: Dict[Tuple[Any, ...], bool] = {}  # of each case in this process, whether the kernels gave what "torch" gives


def checked(direction: str, kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, compared with the torch backend at the first call of each case: direction, scope, layout and dtypes.

    If they differ beyond tolerance or the launch fails, a RuntimeWarning is given and the reference runs from then on.
    Nothing is compared while a CUDA graph is captured, and nothing is decided by results that are not finite.
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
        except Exception as error:  # noqa: BLE001 Triton's compiler may raise anything; the warning quotes it
            problem = f"could not be launched ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
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
            "Please report it. TIMM_ORTHO_BACKEND=torch avoids this check", RuntimeWarning, stacklevel=2)
        return reference(x, other, *args)

    return call


def _difference(results: Any, reference: Callable[..., Any], args: Tuple[Any, ...], whole: bool) -> Optional[str]:
    """Return the fault of the results, "" if there is none, None if infinities or NaN prevent a decision.

    Samples from the first to the last are computed again by the reference, or the ``whole`` batch.
    """
    x = args[0]
    count = len(x) if whole or not len(x) else min(len(x), max(2, _SAMPLE * len(x) // max(1, x.numel())))
    index = torch.linspace(0, len(x) - 1, count, device=x.device).long()

    def sample(tensor: Any) -> Any:
        return tensor[index] if isinstance(tensor, Tensor) and tensor.dim() == x.dim() else tensor

    figures = []  # for each result: largest error over the allowed relative error, and the largest expected value
    for result, expected in zip(results, reference(*map(sample, args)), strict=True):
        if result is not None and result.numel():
            result, allowed = sample(result), 2 * torch.finfo(result.dtype).eps
            allowed += 1e-10 if result.dtype == torch.float64 else 1e-4
            size = expected.abs().max().double()
            figures.append(torch.stack([(result - expected).abs().max() / allowed, size]))
    for distance, size in torch.stack(figures).tolist() if figures else ():
        if not size < float("inf"):
            return None
        if not distance <= size:
            return f"is off: {distance / size:.2g} times what is allowed"
    return ""
