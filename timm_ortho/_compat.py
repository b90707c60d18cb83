"""Wrap private names of torch, timm and submitit. All other modules import the wrappers."""
import inspect
from functools import partial
from typing import Any, Dict, ItemsView, Mapping, Optional, Tuple

import timm
import torch
from timm.data.dataset_factory import _search_split as search_split  # finds the folder of a split
from timm.models._features import feature_take_indices  # resolves the argument `indices` of forward_intermediates
from timm.models._hub import load_model_config_from_path  # reads the config.json in a folder
from timm.models._prune import adapt_model_from_file  # gives layers the widths of a pruned model
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _modules  # hooks of all modules
from torch.utils._python_dispatch import TorchDispatchMode  # used to count FLOPs

# Names that this module only imports; ruff would report them as unused.
__all__ = [
    "TorchDispatchMode", "adapt_model_from_file", "feature_take_indices", "load_model_config_from_path", "search_split"]

# Return the arguments that rebuild a timm model. Before timm 1.0.31, only this package stores them, in variants.
current_arguments: Any = getattr(timm.models, "get_model_args", lambda model: dict(vars(model).get("_model_args", {})))

# Whether timm's filters of checkpoints use the arguments of the model that was saved, from timm 1.0.31 on.
takes_source_arguments = "pretrained_model_args" in inspect.signature(timm.models.build_model_with_cfg).parameters

# Return whether a transform of torch.func is active. torch has no public function for this.
functorch_is_active = torch._C._are_functorch_transforms_active

# Return the current CUDA device's index, and the address of a device's current stream. Builds without CUDA have none.
current_cuda_device, raw_cuda_stream = (
    getattr(torch._C, name, None) for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"))

# Return whether a tensor is a batch of gradients in ``torch.autograd.grad(is_grads_batched=True)``.
is_batched = torch._C._functorch.is_legacy_batchedtensor


def hooks_saved_tensors() -> bool:
    """Return whether hooks of saved tensors are active, for example in a checkpointed block."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_transformed() -> bool:
    """Return whether ``torch.func`` or forward-mode differentiation (``forward_ad.dual_level()``) is active."""
    return functorch_is_active() or forward_ad._current_level >= 0


def is_eager(*tensors: Optional[Tensor]) -> bool:
    """Return whether eager code computes with plain tensors: no compiler, tracer, transform, mode or subclass.

    Gradients in ``torch.autograd.grad(is_grads_batched=True)`` are not plain. None is ignored.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or (
            torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
            or torch._C._is_tracing()):
        return False
    for tensor in tensors:  # noqa: SIM110 a generator takes longer
        if tensor is not None and (type(tensor) not in _PLAIN or is_batched(tensor)):
            return False
    return True


_PLAIN = (Tensor, nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain Tensor or Parameter. Subclasses can override every operation."""
    return type(tensor) in _PLAIN


def returns_views(tensor: Tensor) -> bool:
    """Return whether operations convert their results to the tensor's class, as ``Tensor.__torch_function__`` does.

    A converted result is a view. If an autograd function returns a view, autograd allows no change in place.
    """
    return not is_plain(tensor) and type(tensor).__torch_function__ is not torch._C._disabled_torch_function_impl


def is_recorded() -> bool:
    """Return whether ``torch.export`` or ``torch.jit.trace`` is recording.

    Dynamo of torch 2.10 and 2.11 replaces ``torch.compiler.is_exporting()`` by True in all compiled code. This function
    therefore reads the flag that ``is_exporting`` returns.
    """
    return torch.jit.is_tracing() or torch.compiler._is_exporting_flag


def is_compiler_error(error: Exception) -> bool:
    """Return whether ``torch.compile`` or Triton defines the class of an error. Class names depend on the release."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.", "triton."))


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP manages a module's parameters.

    ``isinstance(module, FSDPModule)`` is true only for modules passed to ``fully_shard``, not for their submodules.
    """
    return getattr(module, "_is_fsdp_managed_module", False)


class Observer(partial):
    """A forward hook that only reads the tensors of a call. :func:`has_hooks` ignores it."""


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs other code than its class's ``forward``, such as hooks."""
    return bool(
        (module._forward_hooks and not all(isinstance(hook, Observer) for hook in module._forward_hooks.values()))
        or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or _modules._global_forward_hooks or _modules._global_forward_pre_hooks or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks or "forward" in vars(module) or is_compiled_in_place(module))


def observe(module: nn.Module, inputs: Tuple[Any, ...], options: Dict[str, Any], output: Any) -> None:
    """Call the observers of a module without other hooks, see :class:`Observer`."""
    for observer in module._forward_hooks.values():
        observer(module, inputs, options, output)


def all_children(module: nn.Module) -> ItemsView[str, Optional[nn.Module]]:
    """Return a module's children by name. ``module.named_children()`` would omit None and repeated modules."""
    return module._modules.items()


def own_parameters(module: nn.Module) -> Mapping[str, Optional[nn.Parameter]]:
    """Return a module's own parameters by name. Attributes of a module take longer to read."""
    return module._parameters


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None
