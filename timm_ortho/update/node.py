"""The autograd function of the kernels in C++ (``node.cpp``), which takes less time than Python's on the host.

It is built at first use, which takes a minute, and cached in torch's folder of extensions. It needs a C++ compiler,
ninja, and a release of torch after 2.10. Without them, Python's function is used. Python's function also computes
``global``, calls without gradients, the first call of each case, tensors that are not aligned to 16 bytes, and calls
while hooks of saved tensors or of kernels are active. The backward pass in C++ calls Python if autograd records it, for
batched gradients, and inside dispatch modes.
"""
import functools
import math
import struct
import warnings
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from .._text import error_text

MOST_NODES = 256  # graphs may need a node after its plan is forgotten, so nodes are kept
_plans: Dict[Tuple[Any, ...], Any] = {}  # plans in C++ by case, and Triton's settings
_count = 0


@functools.cache
def extension() -> Any:
    """Build and import the extension. Return None, after a warning, if that fails."""
    try:
        from torch.utils import cpp_extension  # imports setuptools

        name = "timm_ortho_node_" + "".join(c if c.isalnum() else "_" for c in torch.__version__)
        return cpp_extension.load(name, [str(Path(__file__).with_name("node.cpp"))], extra_cflags=["-O2"])
    except Exception as error:  # noqa: BLE001 of the compiler, ninja, the file system or the linker
        warnings.warn(f"timm_ortho's node in C++ could not be built ({error_text(error, named=True)}). It needs a C++ "
                      "compiler, ninja and a release of torch after 2.10. Python is used instead", RuntimeWarning,
                      stacklevel=2)
        return None


def call(case: Tuple[Any, ...], x: Tensor, f: Tensor, w: Optional[Tensor] = None, c: Optional[Tensor] = None) -> Any:
    """Return y, or y and the norm of y, or None if Python's function must compute them."""
    plans = _plans.get(case)
    return None if plans is None or plans[1].launch_enter_hook.calls else plans[0](x, f, w, c)


def add(case: Tuple[Any, ...], plan: Any, *tensors: Optional[Tensor]) -> None:
    """Let :func:`call` use a :class:`timm_ortho.update.plan.Plan` for tensors like these."""
    global _count
    plan.in_cpp = True
    module = extension() if plan.kind != "long" and _count < MOST_NODES else None
    kernels = [_kernel(module, launch) for launch in (plan.forward[True], plan.backward_launch)] if module else [None]
    if module is None or None in kernels:
        return
    norm, size, stride = plan.norm, plan.sums["size"], plan.sums["stride"]
    if case not in _plans:
        from triton.knobs import runtime

        _plans[case] = module.Plans(), runtime
    dtypes = plan.dtype, plan.branch_dtype, norm.dtype if norm else plan.dtype
    parts = plan.parts["size"] if plan.parts else []
    _plans[case][0].add(module.Plan(
        plan, *kernels, plan.recover, norm is not None, *dtypes, size, stride, parts, math.prod(size)), *tensors)
    _count += 1


def _kernel(module: Any, launch: Any) -> Any:
    """Return a compiled kernel with its arguments, None if it needs more than a plain launch."""
    compiled, values, slots = launch.compiled, [], []
    about = compiled.metadata
    if about.num_ctas > 1 or about.global_scratch_size or about.profile_scratch_size or about.launch_cooperative_grid:
        return None
    types = [*compiled.src.signature.values()]
    for i, kind in enumerate(types):
        if kind.startswith("*"):
            values.append(0)
            slots.append(i)
        elif kind != "constexpr":
            value = launch.constants[i - len(types)]
            values.append(struct.unpack("<i", struct.pack("<f", value))[0] if kind == "fp32" else value)
            slots.append(-1)
    return module.Kernel(compiled.function, launch.programs, 32 * about.num_warps, about.shared, values, slots)
