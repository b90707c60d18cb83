"""Find the connections of a model. :func:`sites` lists them, :func:`connection_arguments` tells how they were made."""
import inspect
import warnings
from collections.abc import Iterable, Iterator
from copy import deepcopy
from types import MethodType
from typing import Any, NamedTuple, Optional, cast

from torch import nn

from ._bytecode import names_in, uses
from ._compat import all_children
from .blocks import BlockSpec, host_class, spec_of, written_class
from .connections import CONNECTIONS, Connection


class Site(NamedTuple):
    """One residual addition of a model with connections.

    Attributes:
        layer: Index of the block's layer in the model, from 0.
        kind: Kind of the branch, such as ``attention``, ``mlp`` or ``conv``, see :class:`timm_ortho.blocks.BlockSpec`.
            If the block's own class creates the connection, the kind is the name of the connection's attribute in
            the block, without the prefix ``connection_``.
        name: Name of the connection in ``named_modules()``, for example ``blocks.0.connection_attention``.
        connection: The connection, a module with ``forward(x, f)``.
    """

    layer: int
    kind: str
    name: str
    connection: Connection


class FoundModule(NamedTuple):
    """A module of a model that is neither a connection nor inside one."""

    name: str  # in ``named_modules()``
    module: nn.Module
    spec: Optional[BlockSpec]  # of its class without connections; None if this is no supported block
    connections: dict[str, Connection]  # among its children, by attribute; wrappers of connections are seen through

    @property
    def layer(self) -> str:
        """Name of the module that ``connect(layers=...)`` counts as this block's layer: the block or a parent of it."""
        parts = self.name.split(".")
        return ".".join(parts[:max(len(parts) - (self.spec.depth if self.spec else 0), 0)])

    @property
    def is_derived(self) -> bool:
        """Whether :func:`timm_ortho.connect` replaced the class of the module by a derived class."""
        return host_class(self.module) is not written_class(self.module)

    def own(self) -> list[str]:
        """Return the attributes of those connections that the module's own code contains."""
        added = self.spec.sites.values() if self.spec and self.is_derived else ()
        return [name for name, connection in self.connections.items() if name not in added and not (
            connection.site.routed and (self.is_derived or not uses(cast(type, type(self.module)), name)))]


def find_modules(model: nn.Module) -> list[FoundModule]:
    """Return the modules of a model in the order of ``named_modules()``, without connections and their wrappers."""
    found = []
    inside: set[nn.Module] = set()  # connections, wrappers and the modules inside them; a parent precedes its children
    for name, module in model.named_modules():
        if module in inside:
            continue
        connections = {attribute: connection for attribute, child in all_children(module)
                       if (connection := _connection_in(attribute, child)) is not None}
        for attribute in connections:
            inside.update(module.get_submodule(attribute).modules())
        found.append(FoundModule(name, module, spec_of(module), connections))
    return found


def _connection_in(attribute: str, child: Optional[nn.Module]) -> Optional[Connection]:
    """Return the connection that a child of a block is or wraps; None for any other child.

    PEFT's ``modules_to_save``, for example, replaces a connection by a wrapper with the original and a trained copy.
    """
    if isinstance(child, Connection):
        return child
    if child is None or not (attribute.startswith("connection_")
                             or isinstance(getattr(child, "original_module", None), Connection)):
        return None
    inner = [module for module in child.modules() if isinstance(module, Connection)]
    active = getattr(getattr(child, "with_norm", None), "__self__", None)  # a wrapper passes on the attribute
    return active if active in inner else inner[-1] if inner else None


def sites(model: nn.Module) -> list[Site]:
    """Return the sites of a model, block by block; an empty list for a model without connections.

    A connection inside another connection is no site.

    A warning reports blocks whose class or ``forward`` was replaced after :func:`timm_ortho.connect`, as token merging
    does. The new code does not call the connections, so the additions of these blocks are linear.

    Example:
        >>> import timm
        >>> for layer, kind, name, connection in sites(timm.create_model("vit_test_ortho"))[:2]:
        ...     print(layer, kind, name, connection)
        0 attention blocks.0.connection_attention FeatureConnection(dim=-1, eps=1e-06)
        0 mlp blocks.0.connection_mlp FeatureConnection(dim=-1, eps=1e-06)
    """
    connected = [each for each in find_modules(model) if each.connections]
    unused = {each.name: code for each in connected for name in each.connections if (code := _code_without(each, name))}
    if unused:
        warnings.warn(
            f"the additions of {len(unused)} blocks are linear (the first block is {next(iter(unused))!r}): their "
            f"class or forward was replaced after connect, and the new code does not call connections: "
            f"{', '.join(dict.fromkeys(unused.values()))}. Replace a class before connect, and register the new "
            "class with timm_ortho.register_block. If an instance has its own forward, delete this attribute",
            stacklevel=2)
    names = {module: name for name, module in model.named_modules()}
    layers = layers_of(each.layer for each in connected)
    return [
        Site(layer, attribute.removeprefix("connection_"), names[connection], connection)
        for layer, each in zip(layers, connected, strict=True) for attribute, connection in each.connections.items()
    ]


def _code_without(block: FoundModule, attribute: str) -> str:
    """Return the name of the code that replaced a block's class or forward and does not call a connection, or ""."""
    module = block.module
    if not block.connections[attribute].site.routed:
        return ""
    if not uses(cast(type, type(module)), attribute):
        return type(module).__name__
    forward: Any = vars(module).get("forward")
    code, hidden = (getattr(inspect.unwrap(each), "__code__", None) for each in (forward, type(module).forward))
    names = names_in(code)
    hides = (isinstance(forward, MethodType) and forward.__self__ is module and code is not None
             and not code.co_freevars and attribute in names_in(hidden) - names
             and not any("forward" in name for name in names))
    return forward.__qualname__ if hides else ""


def layers_of(blocks: Iterable[str]) -> Iterator[int]:
    """Yield the layer index of each block, given the names of the blocks or of their layers in model order.

    A block inside another block belongs to the outer layer.

    >>> list(layers_of(["blocks.0", "blocks.0.cpe", "blocks.1"]))
    [0, 0, 1]
    """
    outer: Optional[str] = None
    layer = -1
    for name in blocks:
        if outer is None or not (name == outer or outer == "" or name.startswith(f"{outer}.")):
            outer, layer = name, layer + 1
        yield layer


def connection_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of the call of :func:`timm_ortho.connect` that made a model's connections.

    All values are valid JSON, so they can be saved beside a state dict. To rebuild the connections, call
    ``connect(model, **arguments)``. Attributes of connections that were changed later, such as
    ``eps``, are not included.

    >>> import timm
    >>> connection_arguments(timm.create_model("vit_test_ortho", connection_layers=[1, 2]))
    {'connection': 'feature', 'eps': 1e-06, 'layers': [1, 2]}

    Returns:
        Arguments of ``connect`` by name. Arguments other than ``connection`` and ``eps`` are omitted if they equal
        their default. The dict is empty for a model without connections, and for linear connections that the code of
        the model creates.

    Raises:
        ValueError: The sites are not all sites of one call of ``connect``, or the connection is not registered.
    """
    connections = [site.connection for site in sites(model)]
    if all(made.name == "linear" and not made.site.arguments for made in connections):
        return {}
    specs = [made.site for made in connections]
    arguments, count = specs[0].arguments, specs[0].count
    if any(spec.arguments != arguments for spec in specs):
        raise ValueError("the sites have different connections: connect the whole model with one call")
    if not arguments:
        raise ValueError("the code of the model made its connections, and their arguments are not stored: connect the "
                         "whole model with one call")
    if len(specs) != count:
        raise ValueError(f"the {len(specs)} sites are not the {count} sites of one call of connect: connect the whole "
                         "model with one call, or use the arguments of that call")
    if arguments["connection"] not in CONNECTIONS:
        raise ValueError(f"the model's connection {arguments['connection']} is not registered, so config.json cannot "
                         "store it: register it with timm_ortho.register_connection, and connect the model by its name")
    return deepcopy(arguments)
