"""The table of timm's residual blocks: which variable is the stream, and where something is added to it.

To support another block class, add its line to ``FAMILIES`` and its architectures to the tests. Routed classes are
attributes of this module (``families.vision_transformer_Block``), made when they are first asked for, so that pickle
and ``torch.load`` find them in a fresh process.
"""
import ast
import importlib
import inspect
import textwrap
from functools import cache
from typing import Dict, NamedTuple, Optional, Set, Tuple

import timm
from torch import nn

from .routing import route

__all__ = ["FAMILIES", "Family", "family_of", "is_residual", "routed_class"]

TIMM = f"timm {timm.__version__}"


class Family(NamedTuple):
    """One block class of timm.

    Attributes:
        module: timm's module that defines it.
        block: Name of the class.
        stream: Variable in its ``forward`` that carries the stream.
        kinds: Kind of each addition to the stream, in the order of the source: ``attention``, ``mlp``, ``conv`` or
            ``parallel`` (both at once). Additions of one kind are branches of an ``if`` and share a connection.
        dim: Channel axis of the stream.
        keep: ``"branch"`` where the block changes the sum in place afterwards, so that it cannot be kept for the
            backward pass (see :func:`timm_ortho.functional.residual_update`).
    """

    module: str
    block: str
    stream: str
    kinds: Tuple[str, ...]
    dim: int
    keep: str = "output"

    @property
    def routed_name(self) -> str:
        return f"{self.module.rpartition('.')[2]}_{self.block}"

    @property
    def sites(self) -> Dict[str, str]:
        """Attribute of the connection, by kind of site."""
        return {kind: f"connection_{kind}" for kind in dict.fromkeys(self.kinds)}


_VIT = "timm.models.vision_transformer"
_RESNETV2 = "timm.models.resnetv2"

FAMILIES: Tuple[Family, ...] = (
    Family(_VIT, "Block", "x", ("attention", "mlp"), -1),
    Family(_VIT, "ResPostBlock", "x", ("attention", "mlp"), -1),
    Family(_VIT, "ParallelScalingBlock", "x", ("parallel",), -1),
    Family(_VIT, "DiffParallelScalingBlock", "x", ("parallel",), -1),
    Family(_VIT, "ParallelThingsBlock", "x", ("attention", "attention", "mlp"), -1),  # masked or not, then the MLPs
    # the stream is the shortcut: the block's input or, where the shape changes, its projection
    Family(_RESNETV2, "PreActBasic", "shortcut", ("conv",), 1),
    Family(_RESNETV2, "PreActBottleneck", "shortcut", ("conv",), 1),
    Family(_RESNETV2, "Bottleneck", "shortcut", ("conv",), 1, keep="branch"),  # act3 works in place on the sum
)

# Residual sums that no stream of the network passes through.
NOT_STREAMS = {
    "timm.layers.attention_pool.AttentionPoolLatent": "pools the tokens for the head, after the last block",
}

_BY_CLASS = {f"{family.module}.{family.block}": family for family in FAMILIES}
_BY_ROUTED_NAME = {family.routed_name: family for family in FAMILIES}


def family_of(module: nn.Module) -> Optional[Family]:
    """The table's line for a block, converted or not; None for any other module.

    Subclasses of a block class are other classes: their ``forward`` may be anything.
    """
    cls = type(module)
    if cls.__module__ == __name__:
        return _BY_ROUTED_NAME.get(cls.__name__)
    return _BY_CLASS.get(f"{cls.__module__}.{cls.__qualname__}")


@cache
def routed_class(family: Family) -> type:
    """The routed subclass of a family's block class.

    Raises:
        timm_ortho.routing.RoutingError: The installed timm's block has another number of additions.
    """
    block = getattr(importlib.import_module(family.module), family.block)
    return route(
        block,
        family.stream,
        [f"connection_{kind}" for kind in family.kinds],
        name=family.routed_name,
        module=__name__,
        host=TIMM,
    )


def __getattr__(name: str) -> type:
    if name in _BY_ROUTED_NAME:
        return routed_class(_BY_ROUTED_NAME[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def is_residual(cls: type) -> bool:
    """Whether a class that is not in the table looks like a residual block, from the source of its ``forward``.

    That is: two things that both follow from the input are added. It errs towards yes, so that no model is converted by
    half: what looks residual and is not belongs in ``NOT_STREAMS``.
    """
    if f"{cls.__module__}.{cls.__qualname__}" in NOT_STREAMS:
        return False
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(cls.forward))).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError):  # built in, generated, or without a forward
        return False
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return False
    derived = _derived(function, function.args.args[1].arg)
    return any(_adds(node, derived) for node in ast.walk(function))


def _derived(function: ast.FunctionDef, source: str) -> Set[str]:
    """Variables that are computed from one argument, shapes and sizes of it left out."""
    names: Set[str] = set()
    grown = {source}
    while grown - names:
        names |= grown
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _mentions(node.value, names):
                grown |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def _adds(node: ast.AST, derived: Set[str]) -> bool:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return _mentions(node.target, derived) and _mentions(node.value, derived)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _mentions(node.left, derived) and _mentions(node.right, derived)
    return False


def _mentions(node: ast.AST, names: Set[str]) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "size", "ndim", "device", "dtype"):
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    return any(_mentions(child, names) for child in ast.iter_child_nodes(node))
