"""Private names of torch and timm that this package uses, each once, and what for; tests/test_compat.py tries them."""
from typing import Optional

from timm.models._features import feature_take_indices  # what `indices` of a forward_intermediates means
from timm.models._hub import save_config_for_hf  # config.json as timm writes it, without an upload
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # every operation that runs, to count its FLOPs

__all__ = [
    "TorchDispatchMode", "compiled_model", "feature_take_indices", "is_compiled_in_place", "is_sharded",
    "save_config_for_hf",
]


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP manages a module's parameters; the public class is only that of the module that it was called on."""
    return getattr(module, "_is_fsdp_managed_module", False)


def compiled_model(module: nn.Module) -> Optional[nn.Module]:
    """The model that ``torch.compile(model)`` wrapped, None of any other module."""
    return module._modules.get("_orig_mod")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None
