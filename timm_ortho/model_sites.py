"""Sites: :func:`sites` lists the residual additions of a model with connections."""
import inspect
import warnings
from types import MethodType
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Tuple, cast

from torch import nn

from ._bytecode import names_in, uses
from .connections import Connection


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


def sites(model: nn.Module) -> List[Site]:
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
    connections = [
        (name, block, attribute, connection) for name, block in named_outside(model)
        for attribute, child in block.named_children() if (connection := connection_in(attribute, child)) is not None
    ]
    unused = {}
    for name, block, attribute, connection in connections:
        if is_unused(block, attribute, connection):
            unused[name] = type(block).__name__
        elif connection.site.routed and _hides_connection(block, attribute):
            unused[name] = vars(block)["forward"].__qualname__
    if unused:
        warnings.warn(
            f"the additions of {len(unused)} blocks are linear (the first block is {next(iter(unused))!r}): their "
            f"class or forward was replaced after connect, and the new code does not call connections: "
            f"{', '.join(dict.fromkeys(unused.values()))}. Replace a class before connect, and register the new "
            "class with timm_ortho.register_block. If an instance has its own forward, delete this attribute",
            stacklevel=2)
    layers = layers_of(layer_name(name, connection.site.depth) for name, _, _, connection in connections)
    return [
        Site(layer, attribute.removeprefix("connection_"),
             ".".join(filter(None, (name, attribute, _path(block.get_submodule(attribute), connection)))), connection)
        for layer, (name, block, attribute, connection) in zip(layers, connections, strict=True)
    ]


def named_outside(model: nn.Module) -> Iterator[Tuple[str, nn.Module]]:
    """Yield ``model.named_modules()`` without connections, wrappers of connections and the modules inside them."""
    inside = {inner for module in model.modules() for name, child in module.named_children()
              if connection_in(name, child) is not None for inner in child.modules()}
    return model.named_modules(inside)


def connection_in(attribute: str, child: Optional[nn.Module]) -> Optional[Connection]:
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


def _path(wrapper: nn.Module, connection: Connection) -> str:
    return next(name for name, module in wrapper.named_modules() if module is connection)


def is_unused(block: nn.Module, attribute: str, connection: nn.Module) -> bool:
    """Return whether the class of the block was replaced and no longer calls the connection that was added."""
    return (isinstance(connection, Connection) and connection.site.routed
            and not uses(cast(type, type(block)), attribute))


def _hides_connection(block: nn.Module, attribute: str) -> bool:
    """Return whether an instance has its own ``forward``, without the connection that its class's ``forward`` calls.

    If the instance's ``forward`` may call another ``forward``, return False, because that one may call the connection.
    """
    forward: Any = vars(block).get("forward")
    code, hidden = (getattr(inspect.unwrap(each), "__code__", None) for each in (forward, type(block).forward))
    names = names_in(code)
    return (isinstance(forward, MethodType) and forward.__self__ is block and code is not None and not code.co_freevars
            and attribute in names_in(hidden) - names and not any("forward" in name for name in names))


def layer_name(block: str, depth: int) -> str:
    """Return the name of the module ``depth`` levels above a block."""
    parts = block.split(".")
    return ".".join(parts[:max(len(parts) - depth, 0)])


def layers_of(blocks: Iterable[str]) -> Iterator[int]:
    """Yield the layer index of each block, given the names of the blocks or of their layers in model order.

    A block inside another block, such as the position encoding of ``davit``'s blocks, belongs to the outer layer.

    Example:
        >>> list(layers_of(["blocks.0", "blocks.0.cpe", "blocks.1"]))
        [0, 0, 1]
    """
    outer: Optional[str] = None
    layer = -1
    for name in blocks:
        if outer is None or not (name == outer or outer == "" or name.startswith(f"{outer}.")):
            outer, layer = name, layer + 1
        yield layer
