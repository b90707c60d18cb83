"""Orthogonal variants of timm's own architectures: ``<name>_ortho`` (feature scope) and ``<name>_orthog`` (global).

The entry point of a variant builds timm's model with the variant's own ``PretrainedCfg`` and passes it to ``connect``,
which replaces the residual additions. All variants share one function. The names come from timm's registry and from
``coverage.json``, which lists the architectures of timm that can be connected, see :mod:`timm_ortho.models.coverage`.
"""
import ast
import inspect
import sys
from functools import cache, partial
from types import FunctionType
from typing import Any, Callable, Dict, FrozenSet, Set

from timm.models import (
    PretrainedCfg,
    build_model_with_cfg,
    get_pretrained_cfg,
    model_entrypoint,
    resolve_pretrained_cfg,
)
from torch import nn

from ..convert import SUFFIXES, bases_with_variants
from ..routing import syntax_tree
from .build import create, register, unpretrained
from .coverage import bases

default_cfgs: Dict[str, Any] = {}  # read by timm's registry
__all__ = ["register_variants"]  # timm's registry appends the names of models


def _create(name: str, base: str, default: str, /, **kwargs) -> nn.Module:
    def entry(build: Callable[..., nn.Module], **kwargs) -> nn.Module:
        # timm derives the width of the projectors of deepseek_vit and qwen3_vit from the tag
        overlay = kwargs.pop("pretrained_cfg_overlay", None)
        tag = resolve_pretrained_cfg(name, kwargs["pretrained_cfg"], overlay).tag or get_pretrained_cfg(base).tag
        kwargs["pretrained_cfg_overlay"] = {**(overlay or {}), "tag": tag}
        return _entered(model_entrypoint(base), build, **kwargs)

    return create(name, default, entry, **kwargs)


def create_plain(architecture: str, **kwargs) -> nn.Module:
    """Build a registered architecture without connections, and check its weights like the weights of a variant."""
    return create(architecture, None, partial(_entered, model_entrypoint(architecture)), **kwargs)


def _entered(function: FunctionType, build: Callable[..., nn.Module], /, **kwargs) -> nn.Module:
    """Call an entry point of timm with ``build`` instead of ``build_model_with_cfg``.

    About half of timm's entry points set arguments as in ``dict(embed_dim=512, **kwargs)``, which fails if the caller
    passes ``embed_dim`` too. Such arguments are passed directly to the class of the model.
    """
    direct = {name: value for name, value in kwargs.items() if name in _fixed(function)}
    kwargs = {name: value for name, value in kwargs.items() if name not in direct}
    return _rebound(function, lambda *args, **own: build(*args, **{**own, **direct}))(**kwargs)


@cache
def _fixed(function: FunctionType) -> FrozenSet[str]:
    """Return the names of arguments that an entry point sets itself, as in ``dict(embed_dim=512, **kwargs)``."""
    calls = [node for node in ast.walk(syntax_tree(function)) if isinstance(node, ast.Call)]
    forwarding = [call for call in calls if any(
        keyword.arg is None and isinstance(keyword.value, ast.Name) for keyword in call.keywords)]
    named = {keyword.arg for call in forwarding for keyword in call.keywords if keyword.arg}
    return frozenset(named - set(inspect.signature(function).parameters))


def _rebound(function: FunctionType, build: Callable[..., nn.Module]) -> FunctionType:
    """Return a copy of an entry point that calls ``build`` instead of ``build_model_with_cfg``, directly or indirectly.

    It lets :func:`create` connect a model between its construction and the loading of its weights.
    """
    namespace = {**function.__globals__, build_model_with_cfg.__name__: build}

    def copied(original: FunctionType) -> FunctionType:
        copy = FunctionType(
            original.__code__, namespace, original.__name__, original.__defaults__, original.__closure__)
        copy.__kwdefaults__ = original.__kwdefaults__
        return copy

    namespace.update({name: copied(namespace[name]) for name in _builders(function)})
    return copied(function)


@cache
def _builders(function: FunctionType) -> FrozenSet[str]:
    """Return the names of functions in an entry point's module that lead to a call of ``build_model_with_cfg``."""
    own = {name: each for name, each in function.__globals__.items()
           if isinstance(each, FunctionType) and each.__globals__ is function.__globals__}
    found: Set[str] = set()
    grown = {build_model_with_cfg.__name__}
    while grown - found:
        found |= grown
        grown |= {name for name, each in own.items() if not found.isdisjoint(each.__code__.co_names)}
    return frozenset(found & own.keys())


def register_variants(architecture: str) -> None:
    """Register the variants ``<architecture>_ortho`` and ``<architecture>_orthog`` of your own architecture.

    All commands and functions that take the name of a model then take these names: ``timm.create_model``,
    ``train.py --device-modules``, ``timm-ortho compare``, ``timm_ortho.hub.push``. If the variants are already
    registered, as for the architectures of timm, the call has no effect. docs/own_blocks.md has a complete example.

    >>> register_variants("resnet18")
    >>> timm.is_model("resnet18_ortho")
    True

    Args:
        architecture: Name under which ``timm.models.register_model`` registered the entry point. Its module needs
            ``default_cfgs`` with this name. Classes of residual blocks that are not in timm need
            :func:`timm_ortho.register_block`.

    Raises:
        ValueError: timm has no architecture or no configuration of this name.
    """
    cfg = get_pretrained_cfg(architecture) if isinstance(architecture, str) else None
    if cfg is None or "." in architecture:  # a name with the tag of weights
        raise ValueError(f"timm has no architecture {architecture!r} with a configuration: add the name to "
                         "default_cfgs of the module, then register the entry point with timm.models.register_model")
    if architecture not in bases_with_variants():
        _register(architecture, cfg)


def _register(base: str, cfg: PretrainedCfg) -> None:
    for suffix, connection in SUFFIXES.items():
        if connection != "linear":  # timm's own name
            name = base + suffix
            entry = partial(_create, name, base, connection)
            doc = f"{base} with {connection} connections. Takes the arguments of {base}, ``connection*`` and ``skip*``."
            register(__name__, name, entry, unpretrained(cfg, name), doc)


for _base in bases():
    _register(_base, sys.modules[model_entrypoint(_base).__module__].default_cfgs[_base].default)
