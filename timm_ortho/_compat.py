"""Private names of torch, timm and submitit, each used here and nowhere else; all are tested on old releases too."""
from typing import Any, ItemsView, Optional

import timm
import torch
from timm.data.dataset_factory import _search_split as search_split  # the folder that timm reads for a split
from timm.models._features import feature_take_indices  # what `indices` of a forward_intermediates means
from timm.models._hub import save_config_for_hf  # config.json as timm writes it, without an upload
from timm.models._prune import adapt_model_from_file  # narrower layers, before they get connections
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_variadic
from torch.utils._python_dispatch import TorchDispatchMode  # every operation that runs, to count its FLOPs

__all__ = [
    "adapt_model_from_file", "compiled_model", "current_arguments", "dispatch_mode_is_active", "feature_take_indices",
    "functorch_is_active", "is_batched", "is_compiled_in_place", "is_compiler_error", "is_observed", "is_plain",
    "is_recompile_limit", "is_recorded", "is_sharded", "is_transformed", "named_children", "save_config_for_hf",
    "search_split", "submission_script", "TorchDispatchMode",
]

# The arguments that make a model as it is now, reset_classifier() and set_input_size() included; timm 1.0.31 has it.
current_arguments = getattr(timm.models, "get_model_args", lambda model: {})

# Whether a transform of torch.func is active, which no public function tells.
functorch_is_active = torch._C._are_functorch_transforms_active

# Whether a tensor is a batch of gradients of ``torch.autograd.grad(is_grads_batched=True)``, which predates torch.func.
is_batched = torch._C._functorch.is_legacy_batchedtensor

# Public from torch 2.7 on. Before, and to 2.7's own compiler, exporting cannot be told from compiling.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def forward_mode_is_active() -> bool:
    """Whether this is within ``torch.autograd.forward_ad.dual_level()``."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation transforms what runs."""
    return functorch_is_active() or forward_mode_is_active()


def dispatch_mode_is_active() -> bool:
    """Whether a mode receives every operation: ``make_fx``, fake tensors, selective checkpointing, FLOP counters."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_observed(*tensors: Tensor) -> bool:
    """Whether operations on these tensors may be recorded and replayed, so that none may be in place.

    Autograd is not covered, see ``torch.is_grad_enabled()``.
    """
    return (torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed()
            or dispatch_mode_is_active() or has_torch_function_variadic(*tensors)
            or any(is_batched(tensor) or not is_plain(tensor) for tensor in tensors))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of no subclass, which may replace every operation."""
    return type(tensor) in (Tensor, nn.Parameter)


def is_recorded() -> bool:
    """Whether what is called ends up in a file: by ``torch.export`` or ``torch.jit.trace``."""
    return torch.jit.is_tracing() or _is_exporting()


def is_compiler_error(error: Exception) -> bool:
    """Whether it says that something could not be compiled; the classes themselves move between releases."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.", "triton."))


def is_recompile_limit(error: Exception) -> bool:
    """Whether a compiler error says that ``torch.compile`` reached its limit of recompilations; torch renamed it."""
    return type(error).__name__ in ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP manages a module's parameters; the public class is only that of the module that it was called on."""
    return getattr(module, "_is_fsdp_managed_module", False)


def compiled_model(module: nn.Module) -> Optional[nn.Module]:
    """The model that ``torch.compile(model)`` wrapped, None of any other module."""
    return module._modules.get("_orig_mod")


def named_children(module: nn.Module) -> ItemsView[str, Optional[nn.Module]]:
    """As the method of this name, but one that has two names is there twice."""
    return module._modules.items()


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def submission_script(executor: Any) -> str:
    """What a Slurm executor of submitit would hand to sbatch."""
    return executor._make_submission_file_text(executor._submitit_command_str, "plan")
