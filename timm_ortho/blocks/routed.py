"""Routed classes: subclasses of residual blocks in which calls of connection modules replace ``x + f``.

A routed class is named after its block class, for example ``timm__models__vision_transformer__Block``. Each residual
addition is a site, and each site has a kind, such as ``mlp``. If the configuration of a block excludes some sites, the
name of the routed class ends with the kinds of the remaining sites: ``timm__models__visformer__Block__mlp``.
"""
import copyreg
import inspect
import re
from functools import cache
from typing import Any, Optional, Tuple

import torch
from timm.models import is_notrace_module, register_notrace_module
from torch import nn

from ..routing import Route, subclass_of
from . import lookup
from .spec import BlockSpec


def written_class(module: nn.Module) -> type:
    """Return the class of a module before ``fully_shard`` or a parametrization replaced it by a subclass.

    Classes of torch that inherit ``forward`` are skipped, also layers such as ``BatchNorm2d``.
    """
    cls = type(module)
    while (cls.__module__.startswith("torch.") and cls.__module__ != "torch.nn.modules.container"
           and lookup.method_of(cls, "forward") is lookup.method_of(cls.__bases__[-1], "forward")):
        cls = cls.__bases__[-1]
    return cls


def host_class(module: nn.Module) -> type:
    """Return the class that a module has without connections."""
    cls = written_class(module)
    return cls.__bases__[0] if cls.__module__ == __name__ else cls


def routed_class(host: type, spec: BlockSpec, kinds: Optional[Tuple[str, ...]] = None) -> type:
    """Return the routed subclass of a block class.

    Args:
        host: The block class.
        spec: Description of the block class.
        kinds: Kinds of sites that get connections, as :meth:`Route.reached` returns them; None for all kinds.

    Raises:
        timm_ortho.RoutingError: The additions of the class do not match the spec.
    """
    return _routed_class(route(host, spec, kinds))


@cache
def _routed_class(made: Route) -> type:
    name = re.sub(r"\W+", "__", made.spec.name)
    if made.kinds != tuple(made.spec.sites):
        name += "__" + "_and_".join(made.kinds)
    return _made(made.block, made.kinds, made.name, made.source, name)


def _made(*parts: Any) -> type:
    """Return a new routed class, given the arguments of :func:`_unpickled`."""
    host, _, method, source, name = parts
    routed: Any = subclass_of(host, method, source, name=name, module=__name__)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        made, *rest = host.__reduce_ex__(self, protocol)
        if type(self) is not routed or made is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return (made, *rest)
        return (_unpickled, parts, *rest[1:])

    routed._parts, routed.__reduce_ex__ = parts, __reduce_ex__
    return register_notrace_module(routed) if is_notrace_module(host) else routed


def _unpickled(host: Any, kinds: Tuple[str, ...], method: str, source: str, name: str) -> nn.Module:
    """Return an empty instance of a routed class, for pickles and copies of blocks.

    Pickles refer to the block class, because a fresh process does not have the routed class. If the process has no spec
    either, ``source`` is the source of the method. Worker processes of joblib, Ray and submitit, for example, receive
    classes of ``__main__`` by value (cloudpickle), without their registration and source file.
    """
    parts = host, kinds, method, source, name
    cls: Any = next((cls for cls in host.__subclasses__() if vars(cls).get("_parts") == parts), None)
    spec = lookup.spec_of_class(host)
    if cls is None and spec and set(kinds) <= set(spec.sites):
        cls = routed_class(host, spec, kinds)
    elif cls is None:
        inspect.unwrap(getattr(host, method)).__globals__.setdefault("torch", torch)  # cloudpickle omits unused names
        cls = _made(*parts)
    return cls.__new__(cls)


def route(host: type, spec: BlockSpec, kinds: Optional[Tuple[str, ...]] = None) -> Route:
    """Return the :class:`Route` of a block class, which replaces the additions of the selected kinds."""
    name = spec.method if hasattr(host, spec.method) else "forward"
    return _route(host, spec, tuple(spec.sites) if kinds is None else kinds, name, getattr(host, name))


@cache  # a method that was replaced after the first call needs a new route
def _route(host: type, spec: BlockSpec, kinds: Tuple[str, ...], name: str, method: Any) -> Route:
    return Route(host, spec, kinds, name)
