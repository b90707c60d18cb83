"""What the entry points of ``variants`` and ``paper`` share: arguments, configurations, registration."""
import sys
from copy import copy
from dataclasses import fields
from typing import Any, Callable, ContextManager, Dict, Union

import timm
import torch
from timm.models import PretrainedCfg, generate_default_cfgs, get_pretrained_cfg, register_model
from torch import nn
from torch.overrides import TorchFunctionMode

from ..connections import CONNECTIONS
from ..convert import connect
from ..functional import known_name

__all__ = [
    "SUFFIXES", "connected", "on_meta", "own_pretrained_cfg", "pop_connection_arguments", "register", "unpretrained",
]

SUFFIXES = {"_ortho": "feature", "_orthog": "global", "_linear": "linear"}  # of a variant's name: its connection

# argument of a variant -> argument of connect
_ARGUMENTS = {
    "connection": "connection",
    "connection_eps": "eps",
    "connection_prob": "prob",
    "connection_layers": "layers",
    "connection_start": "start",
}


def pop_connection_arguments(kwargs: Dict[str, Any], connection: str) -> Dict[str, Any]:
    """Take the connection arguments out of a variant's ``kwargs``, as arguments of :func:`timm_ortho.connect`.

    Raises:
        ValueError: An argument that begins with ``connection`` and is none.
    """
    taken = {"connection": connection}
    for name in [name for name in kwargs if name.startswith("connection")]:
        taken[_ARGUMENTS[known_name("argument", name, _ARGUMENTS)]] = kwargs.pop(name)
    known_name("connection", taken["connection"], CONNECTIONS)
    return taken


def connected(model_cls: Callable[..., nn.Module], arguments: Dict[str, Any]) -> Callable[..., nn.Module]:
    """A constructor of models that have their connections from the start.

    ``build_model_with_cfg`` calls it before it loads weights and before it takes a model apart for ``features_only``:
    a checkpoint with learned connections loads as a whole, and block indices count all blocks.
    """

    def construct(*args, **kwargs) -> nn.Module:
        return connect(model_cls(*args, **kwargs), **arguments)

    return construct


# What in a PretrainedCfg belongs to one set of weights and not to the architecture.
_OF_WEIGHTS = (
    "url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "tag", "custom_load",
    "label_offset", "label_names", "label_descriptions", "origin_url", "notes",
)


_WITHOUT_WEIGHTS = {field.name: field.default for field in fields(PretrainedCfg) if field.name in _OF_WEIGHTS}


def unpretrained(cfg: PretrainedCfg, architecture: str) -> PretrainedCfg:
    """A configuration with the input, mean, std, classifier and first conv of ``cfg`` and none of its weights."""
    own = copy(cfg)  # dataclasses.replace takes several times as long, and there are thousands
    vars(own).update(_WITHOUT_WEIGHTS, architecture=architecture)
    return own


def own_pretrained_cfg(name: str, given: Union[str, Dict, PretrainedCfg, None]) -> Union[Dict, PretrainedCfg]:
    """The configuration that a variant is built with: the one given, or its own by tag, never its base's."""
    if given and not isinstance(given, str):
        return given
    cfg = get_pretrained_cfg(f"{name}.{given}" if given else name, allow_unregistered=False)
    if cfg is None:
        raise RuntimeError(f"Invalid pretrained tag ({given}) for {name}.")
    return cfg


def register(module: str, name: str, entry: Callable[..., nn.Module], cfg: PretrainedCfg, doc: str) -> None:
    """Register an entry point with timm, as an attribute ``name`` of the module of that name."""
    entry.__name__ = entry.__qualname__ = name
    entry.__module__ = module
    entry.__doc__ = doc
    home = sys.modules[module]
    home.default_cfgs.update(generate_default_cfgs({name: cfg}))
    setattr(home, name, register_model(entry))


def on_meta() -> ContextManager:
    """Inside it models are built on the meta device: with all shapes, without memory or time for their parameters."""
    release = tuple(int(part) for part in timm.__version__.split(".")[:3])
    return torch.device("meta") if release >= (1, 0, 21) else _ParametersOnMeta()


class _ParametersOnMeta(TorchFunctionMode):
    """What takes ``torch.device("meta")``'s place before timm 1.0.21.

    There timm reads its drop path rates from tensors, which must therefore stay real; only what parameters are made of
    goes to the meta device.
    """

    _CREATORS = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full})

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in self._CREATORS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)
