"""Build models without memory for their parameters."""
from typing import ContextManager

import timm
import torch
from torch.overrides import TorchFunctionMode


def on_meta() -> ContextManager:
    """Return a context in which models are built on the meta device.

    >>> with on_meta():
    ...     model = timm.create_model("vit_base_ortho")
    >>> next(model.parameters()).device
    device(type='meta')
    """
    release = tuple(int(part) for part in timm.__version__.split(".")[:3])
    return torch.device("meta") if release >= (1, 0, 21) else _ParametersOnMeta()


class _ParametersOnMeta(TorchFunctionMode):
    """Create the tensors of ``torch.empty``, ``torch.zeros`` and further ``_CREATORS`` on the meta device.

    Parameters and buffers are such tensors. Before 1.0.21, timm reads drop path rates from a tensor of
    ``torch.linspace``, which must have values.
    """

    _CREATORS = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full})

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in self._CREATORS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)
