"""Choose the backend (implementation) that computes the residual update, and test the Triton kernels at first use.

| backend | implementation | chosen by ``auto`` |
| --- | --- | --- |
| ``torch`` | operations of :mod:`timm_ortho.update.formula` | on the CPU; under ``torch.compile``; in dispatch modes |
| ``triton`` | kernels of :mod:`timm_ortho.update.kernels` | on CUDA, if the kernels pass a test |

The kernels can also compute the update together with the norm that follows it (:mod:`timm_ortho.update.norm`). With
either backend, torch computes the cases for which there are no kernels: tensors in float64 or with gaps in memory, and
weights that are tensors. It also computes everything under ``torch.compile``, so that the compiler can fuse operations,
and inside a dispatch mode of torch, such as a FLOP counter, which records them.
"""
import importlib.util
import os
import threading
import warnings
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

import torch
from timm.layers import LayerNorm, RmsNorm
from torch import Tensor, nn

from .._checks import check_tensors, known_name, listed_axes
from .._compat import is_eager, own_parameters
from . import node
from .gradient import KernelFailed

BACKENDS = ("auto", "torch", "triton")
BACKEND_VARIABLE, CPP_VARIABLE = "TIMM_ORTHO_BACKEND", "TIMM_ORTHO_CPP"
TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None

# Default backends of the main thread, and whether autograd functions are in C++: the environment's, then those of its
# contexts. They also apply to threads without a context of their own, because CUDA's backward passes run in such
# threads, and compute checkpointed blocks again.
_main: List[List[Any]] = [[os.environ.get(BACKEND_VARIABLE) or "auto", os.environ.get(CPP_VARIABLE) == "1"]]


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.active = _main if threading.current_thread() is threading.main_thread() else []


_contexts = _Contexts()


def default() -> str:
    """Return the default backend, which :func:`use_backend` or TIMM_ORTHO_BACKEND sets."""
    return (_contexts.active or _main)[-1][0]


def uses_cpp() -> bool:
    """Return whether the autograd function of the kernels is that in C++, see :mod:`timm_ortho.update.node`."""
    return (_contexts.active or _main)[-1][1]


@contextmanager
def use_backend(name: str, cpp: Optional[bool] = None) -> Iterator[None]:
    """Set the default backend inside a context. This overrides the environment variable TIMM_ORTHO_BACKEND.

    A context of the main thread also applies to threads without a context of their own. Contexts may end in any order:
    the default is the name of the last one that is active.

    Args:
        name: ``"auto"``, ``"torch"`` or ``"triton"``.
        cpp: Whether kernels use the autograd function in C++ (:mod:`timm_ortho.update.node`), which is built at first
            use. None keeps the present value, which is False unless the environment variable TIMM_ORTHO_CPP is ``1``.

    Raises:
        ValueError: The name is unknown.

    Example:
        >>> with use_backend("torch"):
        ...     choose_backend(torch.ones(1), torch.ones(1))
        'torch'
    """
    active, entry = _contexts.active, [known_name("backend", name, BACKENDS), uses_cpp() if cpp is None else cpp]
    active.append(entry)
    try:
        yield
    finally:
        active[:] = [each for each in active if each is not entry]


def choose_backend(
        x: Tensor, f: Tensor, backend: Optional[str] = None, dim: Union[int, Tuple[int, ...], None] = -1) -> str:
    """Return the backend that :func:`timm_ortho.residual_update` would use for these tensors and weights a, b = 0, 1.

    Args:
        x: Stream.
        f: Branch output.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``. None means the default, which :func:`use_backend` sets.
            Outside its context, the default is the value of the environment variable TIMM_ORTHO_BACKEND when this
            package was imported, or ``"auto"``.
        dim: See :func:`timm_ortho.residual_update`.

    Returns:
        ``"torch"`` or ``"triton"``. Under ``torch.compile`` and inside a dispatch mode it is always ``"torch"``.

    Raises:
        ValueError: The name is unknown.
        RuntimeError: The requested backend cannot run; the message contains the reason.

    Example:
        >>> choose_backend(torch.ones(2, 3), torch.ones(2, 3), "torch")
        'torch'
    """
    if backend is not None:
        known_name("backend", backend, BACKENDS)
    name = requested_kernels(x, backend) if is_eager(x, f) else None
    if name is None or not can_run(name, x):
        return "torch"
    from .plan import make_plan

    plan = make_plan(x, f, None, check_tensors(x, f, listed_axes(dim)), 1e-6, 0.0, 1.0, False)
    return "triton" if plan and (name != "auto" or _passed.get(plan.case, True)) else "torch"


def requested_kernels(x: Tensor, backend: Optional[str] = None) -> Optional[str]:
    """Return the name of the backend if it may select kernels for a stream, or None. This check is fast."""
    name = default() if backend is None else backend
    return None if name == "torch" or (name == "auto" and not x.is_cuda) else name


def can_run(name: str, x: Tensor) -> bool:
    """Return whether kernels can run on the device of a stream. Raise RuntimeError if they were requested by name."""
    reason = why_not_triton(x.device.type)
    if name != "auto":
        known_name(BACKEND_VARIABLE, name, BACKENDS)
        if reason:
            raise RuntimeError(f"backend {name!r} cannot run: {reason}; choose 'torch' or 'auto' in an argument, "
                               f"use_backend or {BACKEND_VARIABLE}")
    return reason is None


def why_not_triton(device: str) -> Optional[str]:
    """Return why the kernels cannot run on a type of device, or None if they can."""
    if not TRITON_IS_INSTALLED:
        return "Triton is not installed"
    if device not in ("cuda", "cpu"):
        return f"there are no kernels for tensors on '{device}'"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "the tensors are on the CPU, which requires TRITON_INTERPRET=1 in the environment before Python starts"
    return None


# Norms that the kernels can compute together with the update, and the names of their parameters. Subclasses, such as
# parametrized norms, are not included.
NORMS = {nn.LayerNorm: {"weight", "bias"}, LayerNorm: {"weight", "bias"}, nn.RMSNorm: {"weight"}, RmsNorm: {"weight"}}


# ------------------------------------------------------------------------------------------ plans, and their test
# The axes of the projection, eps, the weights a and b (numbers), and whether autograd saves the branch output.
Update = Tuple[Tuple[int, ...], float, Any, Any, bool]

# The plan of each case, or False if torch computes it. A key contains everything on which a plan depends.
plans: Dict[Tuple[Any, ...], Any] = {}
_passed: Dict[Tuple[Any, ...], bool] = {}  # whether the kernels passed the test, by device, dtypes and kind of kernel


def by_kernels(update: Update, name: str, x: Tensor, f: Tensor, norm: Any = None) -> Any:
    """Return what kernels compute for tensors, or None if torch computes it.

    Unless the kernels were requested by name, the first plan of its kind is tested.

    Args:
        update: What the kernels compute.
        name: Name of the backend, from :func:`requested_kernels`.
        x, f: Stream and branch output.
        norm: The norm that follows, see :func:`timm_ortho.functional.update_with_norm`, or None.
    """
    cpp, w, c = uses_cpp(), None, None
    of_norm: Tuple[Any, ...] = ()
    if norm is not None:
        own = own_parameters(norm)
        w, c = own.get("weight"), own.get("bias")
        of_norm = type(norm), norm.eps, norm.normalized_shape, vars(norm).get("_fast_norm")
    if cpp:
        outputs = node.call((update, of_norm), x, f, w, c)
        if outputs is not None:
            return outputs
    if not is_eager(x, f):
        return None
    key: Tuple[Any, ...] = (
        update, name, x.shape, f.shape, x.stride(), f.stride(), x.dtype, f.dtype, x.device, f.device)
    if norm is not None:
        device = x.device.type  # the dtype of a norm's result depends on autocast
        key = (*key, *of_norm, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
               w is not None and w.dtype, c is not None and c.dtype)
    plan = plans.get(key)
    if plan is None:
        plan = _add_plan(key, name, update, x, f, norm)
    if not plan:
        return None
    try:
        outputs = plan(x, f, w, c)
    except KernelFailed as error:
        plan.fails(error)
        return None
    if cpp and not plan.in_cpp and plan.forward[True].compiled and plan.backward_launch.compiled:
        node.add((update, of_norm), plan, x, f, w, c)
    return outputs


def _add_plan(key: Tuple[Any, ...], name: str, update: Update, x: Tensor, f: Tensor, norm: Any) -> Any:
    """Make the plan of a case, and test it. Return False if torch computes the case."""
    plan: Any = None
    if can_run(name, x):
        from .plan import make_plan  # Triton is optional and slow to import

        plan = make_plan(x, f, norm, *update)

    def fails(problem: KernelFailed) -> None:
        if name != "auto":
            raise problem
        plans[key] = False
        warnings.warn(
            f"timm_ortho's Triton kernels ({' '.join(map(str, plan.case))}) {problem}; the torch backend is used from "
            f"now on. Please report this. {BACKEND_VARIABLE}=torch avoids the test", RuntimeWarning, stacklevel=2)

    if plan:
        plan.fails = fails
        if name == "auto" and plan.case not in _passed:
            if x.is_cuda and (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode()):
                return plan  # the test synchronises the device: test a later call
            try:
                plan.test()
                _passed[plan.case] = True
            except KernelFailed as error:
                _passed[plan.case] = False
                fails(error)
    if len(plans) >= 1024:  # many different shapes or weights: start again
        plans.clear()
    plans[key] = plan if plan and (name != "auto" or _passed[plan.case]) else False
    return plans[key]
