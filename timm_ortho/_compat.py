"""Every private name of torch and timm that this package uses, once, and why. ``tests/test_compat.py`` tries each."""
from torch import nn


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP manages a module's parameters; its public classes are only those of the modules it was called on."""
    return getattr(module, "_is_fsdp_managed_module", False)  # torch.compile reads it, too
