"""Routed classes: the subclasses of block classes whose additions are calls of connections.

Each is an attribute of this module under its block class' full name, ``timm__models__vision_transformer__Block``, made
when it is first asked for: pickle and ``torch.load`` find it in a fresh process. Of a block with a sum that its
configuration rules out only the others are routed, and the name says which: ``timm__models__visformer__Block__mlp``.
"""
import inspect
import re
import sys
from functools import cache
from typing import Any, Dict, Optional, Tuple

from timm.models import is_notrace_module, register_notrace_module
from torch import nn

from ..routing import Route, Sum
from .spec import BlockSpec


def written_class(module: nn.Module) -> type:
    """A module's class as its author wrote it; ``fully_shard`` and parametrizations put a subclass in its place."""
    cls = type(module)
    while (cls.__module__.startswith("torch.") and cls.__module__ != "torch.nn.modules.container"
           and _forward(cls) is _forward(cls.__bases__[-1])):
        cls = cls.__bases__[-1]
    return cls


def _forward(cls: type) -> Any:
    """As it is written: transformers wraps that of each subclass of its layers again."""
    return inspect.unwrap(getattr(cls, "forward", None))


def host_class(module: nn.Module) -> type:
    """The class that a module has without connections."""
    cls = written_class(module)
    return cls.__bases__[0] if cls.__module__ == __name__ else cls


def routed_name(class_name: str) -> str:
    return re.sub(r"\W+", "__", class_name)


def routed_class(host: type, spec: BlockSpec, kinds: Optional[Tuple[str, ...]] = None) -> type:
    """The routed subclass of a block class.

    Args:
        host: The class.
        spec: What is known of it.
        kinds: The sites that are routed, as :func:`reached` has them; None for all.

    Raises:
        timm_ortho.routing.RoutingError: The class has other additions.
    """
    return _routed_class(host, spec, tuple(spec.sites) if kinds is None else kinds)


@cache  # one class of a name: pickle compares
def _routed_class(host: type, spec: BlockSpec, kinds: Tuple[str, ...]) -> type:
    name = routed_name(spec.name)
    if kinds != tuple(spec.sites):
        name += "__" + "_and_".join(kinds)
    routed = route(host, spec, kinds).subclass(name=name, module=__name__)
    return register_notrace_module(routed) if is_notrace_module(host) else routed


def reached(block: nn.Module, spec: BlockSpec) -> Tuple[str, ...]:
    """The kinds of sites that a block has, as it is configured."""
    if spec.unless(block):
        return ()
    can_be = route(host_class(block), spec, spec.kinds).reached(block)
    return tuple(kind for kind, here in zip(spec.kinds, can_be, strict=True) if kind and here)


def branch_first(host: type, spec: BlockSpec) -> Dict[str, bool]:
    """By kind of site whether the host writes the branch before the stream."""
    return dict(zip(spec.kinds, route(host, spec, spec.kinds).branch_first, strict=True))


@cache
def route(host: type, spec: BlockSpec, kinds: Tuple[Optional[str], ...]) -> Route:
    """The additions of a block class, of which those of some kinds are routed."""
    streams = spec.stream if isinstance(spec.stream, tuple) else (spec.stream,) * len(spec.kinds)
    sums = [
        Sum(stream, f"connection_{kind}" if kind in kinds and kind else None)
        for stream, kind in zip(streams, spec.kinds, strict=True)
    ]
    method = spec.method if hasattr(host, spec.method) else "forward"
    return Route(host, sums, method=method, mask=spec.mask, library=library_of(host))


def library_of(cls: type) -> str:
    """Where a class is from, for errors: ``timm 1.0.31``."""
    library = cls.__module__.partition(".")[0]
    return f"{library} {getattr(sys.modules.get(library), '__version__', '')}".strip()


def __getattr__(name: str) -> type:
    if name.startswith("__") and name.endswith("__"):  # what Python asks of modules; no block of a script's __main__
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .registry import host_and_spec

    for class_name, kinds in ((name, None), (name.rpartition("__")[0], tuple(name.rpartition("__")[2].split("_and_")))):
        host, spec = host_and_spec(class_name)
        if spec is not None and set(kinds or ()) <= set(spec.sites):
            return routed_class(host, spec, kinds)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}: a block of timm_ortho.register_block has to be registered "
        "before a model with it is loaded")
