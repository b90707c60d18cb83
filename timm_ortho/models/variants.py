"""Orthogonal variants of timm's own architectures: ``<name>_ortho`` (feature scope) and ``<name>_orthog`` (global).

An entry point builds timm's model, with all of its arguments and its own ``PretrainedCfg``, and connects it. There is
one function for all of them; the names come from timm's registry and from ``coverage.json``, which says which modules
of timm have blocks that can be connected and what of them cannot: see :mod:`timm_ortho.models.coverage`.
"""
import ast
import inspect
import sys
from functools import cache, partial
from types import FunctionType
from typing import Any, Callable, Dict, FrozenSet

from timm.models import build_model_with_cfg, get_pretrained_cfg, model_entrypoint, resolve_pretrained_cfg
from torch import nn

from .build import create, register, unpretrained
from .coverage import bases
from .names import SUFFIXES

default_cfgs: Dict[str, Any] = {}  # timm's registry reads it
__all__ = []  # and appends to it


def _create(name: str, base: str, default: str, /, **kwargs) -> nn.Module:
    def entry(build: Callable[..., nn.Module], **kwargs) -> nn.Module:
        # the projectors of deepseek_vit and qwen3_vit are as wide as the tag of the weights says
        overlay = kwargs.pop("pretrained_cfg_overlay", None)
        tag = resolve_pretrained_cfg(name, kwargs["pretrained_cfg"], overlay).tag or get_pretrained_cfg(base).tag
        kwargs["pretrained_cfg_overlay"] = {**(overlay or {}), "tag": tag}
        return _entered(model_entrypoint(base), build, kwargs)

    return create(name, default, entry, **kwargs)


def _entered(function: FunctionType, build: Callable[..., nn.Module], kwargs: Dict[str, Any]) -> nn.Module:
    """Call an entry point of timm with ``build``; what it fixes itself, as an MLP-Mixer its width, can be given too.

    Half of timm's entry points let the caller's arguments win, the others hand them on beside their own, which Python
    refuses. There the argument goes past the entry point, to the class of the model.
    """
    past = {name: value for name, value in kwargs.items() if name in _fixed(function)}
    kwargs = {name: value for name, value in kwargs.items() if name not in past}
    return _rebound(function, lambda *args, **own: build(*args, **{**own, **past}))(**kwargs)


@cache
def _fixed(function: FunctionType) -> FrozenSet[str]:
    """The arguments that an entry point hands on beside its caller's: ``dict(embed_dim=512, **kwargs)``."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(function))) if isinstance(node, ast.Call)]
    beside = [call for call in calls if any(
        keyword.arg is None and isinstance(keyword.value, ast.Name) for keyword in call.keywords)]
    named = {keyword.arg for call in beside for keyword in call.keywords if keyword.arg}
    return frozenset(named - set(inspect.signature(function).parameters))


def _rebound(function: FunctionType, build: Callable[..., nn.Module]) -> FunctionType:
    """A copy of an entry point of timm for which ``build_model_with_cfg``, however deep it is called, is ``build``.

    This is how connections get into a model between its construction and the loading of its weights, without a line
    of timm's builders being copied and without anything in timm being changed.
    """
    namespace = dict(function.__globals__)
    for name in function.__code__.co_names:
        if name == build_model_with_cfg.__name__:
            namespace[name] = build
        elif _builds(function, name):
            namespace[name] = _rebound(namespace[name], build)
    copy = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@cache
def _builds(caller: FunctionType, name: str) -> bool:
    """Whether the global ``name`` of a function is a function of the same module that builds models."""
    function = caller.__globals__.get(name)
    if not isinstance(function, FunctionType) or function.__globals__ is not caller.__globals__ or function is caller:
        return False
    names = function.__code__.co_names
    return build_model_with_cfg.__name__ in names or any(_builds(function, inner) for inner in names)


def _register_variants() -> None:
    home = sys.modules[__name__]
    names = []
    for base in bases():
        given = sys.modules[model_entrypoint(base).__module__].default_cfgs.get(base)
        if given is None:  # vit_betwixt_patch16_gap_256 of timm 1.0.16: it borrows that of another architecture
            continue
        for suffix in ("_ortho", "_orthog"):
            name, connection = base + suffix, SUFFIXES[suffix]
            entry = partial(_create, name, base, connection)
            doc = f"timm's {base}, {connection} connection; arguments as there, ``connection*`` and ``skip*``."
            register(__name__, name, entry, unpretrained(given.default, name), doc)
            names += home.__all__
            home.__all__ = []  # the registry looks for every name in it before it appends the next
    home.__all__ = names


_register_variants()
