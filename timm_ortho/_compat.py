"""Every private name of torch that this package uses, each once; ``tests/test_compat.py`` holds them to what they do."""
import torch
from torch.autograd import forward_ad

__all__ = ["forward_mode_is_active", "functorch_is_active", "is_compiler_error", "is_recorded"]

# Whether a transform of torch.func is active, which no public function tells.
functorch_is_active = torch._C._are_functorch_transforms_active

# Public from torch 2.7 on. Before, exporting cannot be told from compiling.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def forward_mode_is_active() -> bool:
    """Whether this is within ``torch.autograd.forward_ad.dual_level()``."""
    return forward_ad._current_level >= 0


def is_recorded() -> bool:
    """Whether what is called ends up in a file: by ``torch.export`` or ``torch.jit.trace``."""
    return torch.jit.is_tracing() or _is_exporting()


def is_compiler_error(error: Exception) -> bool:
    """Whether it says that something could not be compiled; the classes themselves move between releases."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.", "triton."))
