"""Register block classes, and find out which modules are residual blocks."""
import ast
from inspect import signature
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union, cast

from torch import nn

from .._bytecode import reaches
from .._checks import check_count, known_name
from ..functional import KEEPS
from ..routing import RoutingError, variables_of
from . import lookup
from .bypass import bypass_of, bypass_of_route
from .detection import calls_forward_of_base, looks_residual
from .routed import host_class, route, routed_class, written_class
from .spec import BlockSpec, last_width


def register_block(
        block: type,
        *,
        stream: Union[str, Sequence[Union[str, Sequence[str]]]],
        kinds: Sequence[Optional[str]],
        dim: Union[int, Sequence[int]] = -1,
        width: Union[int, Callable[[nn.Module], int], None] = None,
        keep: str = "output",
        method: str = "forward",
        mask: Optional[str] = None,
        causal: bool = False,
        sides_differ: bool = False,
        bypass: bool = False,
) -> type:
    """Register a class of residual blocks for :func:`timm_ortho.connect`.

    A residual block adds the output of its branch to the stream, the tensor that the block receives and returns. After
    the registration, ``connect`` replaces this addition in instances of the class by a connection. The class itself
    stays unchanged. A subclass needs its own registration only if it overrides ``forward`` or ``method``.

    Args:
        block: An ``nn.Module`` class with a method that contains the addition, such as ``x + self.f(self.norm(x))``.
        stream: The stream in an addition, as written in the source: one expression for all additions, or one for each.
            If the two sides of an ``if`` write the stream of an addition differently, give this addition a sequence
            with the expression of each side, for example ``stream=[("x", "residual"), "x"]`` for two additions.
        kinds: One name for each addition to the stream, in the order of the source: ``"attention"``, ``"mlp"``,
            ``"conv"`` or any identifier. Use each name once. None leaves an addition unchanged. Two additions on the
            two sides of an ``if`` count as one, unless ``sides_differ``.
        dim: Channel axis of the stream, -1 for tokens and 1 for B C H W: one axis for all additions, or one for each.
        width: Number of channels of the stream, or a function of the block that returns this number. ``connect`` needs
            it only for its argument ``skip``. None for the output width of the block's last linear layer or
            convolution.
        keep: Tensor that autograd saves for the backward pass: ``"output"`` (the sum) or ``"branch"`` (the branch
            output). Use ``"branch"`` if the block changes the sum in place, for example by an activation.
        method: Name of the method with the additions.
        mask: Name of the method's argument with the attention mask, or an expression with this argument, such as
            ``"mask[:, None, None]"`` for masks ``[B, N]``. The expression is not evaluated if the argument is None.
            Connections with one projection per sample use the mask to exclude padding, see
            :func:`timm_ortho.connections.real_tokens`. True must allow attention, as in
            ``scaled_dot_product_attention``. Pass ``""`` for a mask with the opposite meaning, as in
            ``nn.MultiheadAttention``, or without padding. None for the mask of a registered base class. Other classes
            need a value if the name of an argument contains ``mask``.
        causal: True if a token must not depend on later tokens, as in a language model. ``connect`` then refuses
            connections with one projection per sample.
        sides_differ: True if the two sides of an ``if`` have additions of different kinds, such as a parallel block on
            one side and a sequential block on the other side. ``kinds`` then names the additions of both sides.
        bypass: True if some calls of the block are meant to compute their result without the additions, for example in
            training. These calls do not use the connections.

    Returns:
        The class.

    Raises:
        TypeError: ``block`` is not a module class.
        ValueError: A value is invalid, or the class is already registered with different values.
        timm_ortho.RoutingError: The source of the method cannot be read, or does not contain the expected additions.
            The message lists the additions that it contains. Or ``bypass`` is False, and some calls do not reach the
            additions.

    Example:
        >>> import torch, timm_ortho
        >>> from timm.layers import Mlp
        >>> class MyBlock(torch.nn.Module):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.norm, self.mlp = torch.nn.LayerNorm(dim), Mlp(dim)
        ...     def forward(self, x):
        ...         return x + self.mlp(self.norm(x))
        >>> _ = timm_ortho.register_block(MyBlock, stream="x", kinds=["mlp"])
        >>> model = timm_ortho.connect(torch.nn.Sequential(MyBlock(8), MyBlock(8)), "feature")
        >>> [site.name for site in timm_ortho.sites(model)]
        ['0.connection_mlp', '1.connection_mlp']
    """
    if not (isinstance(block, type) and issubclass(block, nn.Module)):
        raise TypeError(f"block must be a class of torch.nn.Module, got {_shown(block)}")
    kinds = _tuple("kinds must be a sequence of names", kinds, (str, type(None)))
    named = [kind for kind in kinds if kind is not None]
    if not named or len(set(named)) < len(named) or not all(str(kind).isidentifier() for kind in named):
        raise ValueError(f"kinds must be different identifiers, one for each addition, got {kinds!r}")
    known_name("keep", keep, KEEPS)
    expected = "stream must be an expression or a sequence of expressions"
    streams = stream if isinstance(stream, str) else tuple(
        each if isinstance(each, str) else _tuple(expected, each, str) for each in _tuple(expected, stream, object))
    for argument, expression in (*(("stream", each) for each in _flat(streams)), ("mask", mask or "None")):
        try:
            ast.parse(expression, mode="eval")
        except SyntaxError:
            raise ValueError(f"{argument} {expression!r} is not an expression") from None
    dims = dim if isinstance(dim, int) else _tuple("dim must be an axis or a sequence of axes", dim, int)
    for argument, values in (("stream", streams), ("dim", dims)):
        if isinstance(values, tuple) and len(values) != len(kinds):
            raise ValueError(f"{argument} needs one value, or {len(kinds)} (one for each kind), got {len(values)} in a "
                             "sequence")
    width = last_width if width is None else width if callable(width) else check_count("width", width)
    name = lookup.class_name(block)
    if not callable(getattr(block, method, None)):
        raise ValueError(f"{name} has no method {method!r}")
    spec = BlockSpec(
        name, streams, kinds, dims, keep=keep, method=method, mask=_mask(block, method, mask),
        causal=bool(causal), sides_differ=bool(sides_differ), width=width)
    known = lookup.SPECS.get(name, spec)
    if known._replace(width=spec.width) == spec and _code(known.width) == _code(width):  # a cell that runs again
        spec = known
    if known != spec and lookup.REGISTERED.get(name, block) is block:
        differing = [f"{field}={getattr(known, field)!r}" for field in signature(register_block).parameters
                     if getattr(known, field, None) != getattr(spec, field, None)]
        raise ValueError(f"{name} is already registered with {', '.join(differing) or 'another description'}: connect "
                         "without registering it again, define the class again, or register a subclass")
    routed_class(cast(type, block), spec)  # raises if the source does not match
    if not bypass:
        _check_bypass(cast(type, block), spec)
    lookup.SPECS[name], lookup.REGISTERED[name] = spec, block
    return block


def _mask(block: type, method: str, mask: Optional[str]) -> str:
    """Return the expression of a method's attention mask, "" if there is none."""
    arguments = signature(getattr(block, method)).parameters
    masks = [name for name in arguments if "mask" in name]
    if mask is None:
        known = next(filter(None, (lookup.SPECS.get(lookup.class_name(cls)) for cls in block.__mro__)), None)
        if known and (not masks or variables_of(known.mask).intersection(masks)):
            return known.mask
        if masks:
            raise ValueError(
                f"{masks[0]!r} may be an attention mask: pass mask={masks[0]!r} if True allows attention, or mask='' "
                "if True forbids attention, as in nn.MultiheadAttention, or if the mask does not mark padding")
        return ""
    if mask and not variables_of(mask) & arguments.keys():
        raise ValueError(f"{block.__name__}.{method} has no argument {mask!r}: correct mask, or pass mask=''")
    if mask.endswith("key_padding_mask"):
        raise ValueError(f"mask {mask!r} is True for padding, but connections read True as a real token: pass mask='', "
                         "or an expression of the inverted mask")
    return mask


def _code(width: Any) -> Any:
    """Return what decides whether two widths are equal: of functions the code, because two lambdas are never equal."""
    return getattr(width, "__code__", width)


def _check_bypass(block: type, spec: BlockSpec) -> None:
    """Raise RoutingError if some calls of a block compute their result without its additions."""
    meant = "or pass bypass=True if these calls are meant to ignore the connections"
    if not reaches(block, "forward", spec.method, nn.Module):
        raise RoutingError(f"{spec.name}: forward does not call {spec.method}, which contains the additions: register "
                           f"the method that forward calls, {meant}")
    method, when = spec.method, bypass_of_route(route(block, spec, spec.kinds))
    if not when and method != "forward":
        method, when = "forward", bypass_of(block, spec.method)
    if when:
        raise RoutingError(f"{spec.name}: {method} bypasses an addition if {when}: write each residual addition as "
                           f"x + f, {meant}")


def not_residual(block: type, reason: str) -> type:
    """Declare that a class is not a residual block, although it adds two tensors that depend on its input.

    Args:
        block: The class.
        reason: What the addition computes, for example ``"the sum of two encoders"``.

    Returns:
        The class.

    Raises:
        TypeError: ``block`` is not a class.

    Example:
        >>> import torch, timm_ortho
        >>> class Centered(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + x.mean(1, keepdim=True)
        >>> _ = timm_ortho.not_residual(Centered, "adds the mean of the tokens")
    """
    if not isinstance(block, type):
        raise TypeError(f"block must be a class, got {_shown(block)}")
    lookup.NOT_RESIDUAL[lookup.class_name(block)] = str(reason)
    return block


def spec_of(module: nn.Module) -> Optional[BlockSpec]:
    """Return the :class:`BlockSpec` of a block, with or without connections; None for any other module.

    Example:
        >>> spec_of(timm.create_model("vit_test_ortho").blocks[0]).kinds
        ('attention', 'mlp')
    """
    return lookup.spec_of_class(host_class(module))


def is_residual(module: nn.Module) -> bool:
    """Return whether a module without a :class:`BlockSpec` looks like a residual block.

    Example:
        >>> is_residual(torch.nn.TransformerEncoderLayer(8, 2)), is_residual(torch.nn.Linear(8, 8))
        (True, False)
    """
    return _looks_residual(written_class(module))


def _looks_residual(cls: type) -> bool:
    if lookup.class_name(cls) in lookup.NOT_RESIDUAL:
        return False
    inherits = calls_forward_of_base(cls) and any(
        lookup.class_name(base) in lookup.SPECS or _looks_residual(base) for base in cls.__bases__)
    return inherits or looks_residual(cls)


def _flat(streams: Union[str, tuple]) -> List[str]:
    return [streams] if isinstance(streams, str) else [one for each in streams for one in _flat(each)]


def _shown(value: Any) -> str:
    """Return the text of a value for an error. A module is shown by its class, because its repr has many lines."""
    return f"a {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)


def _tuple(expected: str, values: Sequence, of: Union[type, Tuple[type, ...]]) -> tuple:
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(one, of) for one in values):
        raise ValueError(f"{expected}, got {values!r}")
    return tuple(values)
