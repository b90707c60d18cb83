"""Register block classes, and find out which modules are residual blocks."""
from dataclasses import replace
from inspect import signature
from typing import Any, Optional, cast

from torch import nn

from .._bytecode import uses
from ..routing import RoutingError, bypass_of_helper, variables_of
from . import lookup
from .detection import calls_forward_of_base, looks_residual
from .routed import host_class, route, routed_class
from .spec import BlockSpec


def register_block(block: type, *, mask: Optional[str] = None, bypass: bool = False, **fields: Any) -> type:
    """Register a class of residual blocks for :func:`timm_ortho.connect`.

    A residual block adds the output of its branch to the stream, the tensor that the block receives and returns. After
    the registration, ``connect`` replaces this addition in instances of the class by a connection. The class itself
    stays unchanged, and is returned. A subclass needs its own registration only if it overrides ``forward`` or
    ``method``.

    Args:
        block: An ``nn.Module`` class with a method that contains the addition, such as ``x + self.f(self.norm(x))``.
        mask: See :class:`timm_ortho.blocks.BlockSpec`. None for the mask of a registered base class. Other classes
            need a value if the name of an argument contains ``mask``.
        bypass: True if some calls of the block are meant to compute their result without the additions, for example in
            training. These calls do not use the connections.
        fields: Other fields of :class:`timm_ortho.blocks.BlockSpec`: ``stream`` and ``kinds``, and if necessary
            ``dim``, ``width``, ``keep``, ``method``, ``causal``, ``text`` and ``sides_differ``.

    Raises:
        TypeError: ``block`` is not a module class, or a field is unknown or missing.
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
        raise TypeError(f"block must be a class of torch.nn.Module, got {type(block).__name__}")
    name = lookup.class_name(block)
    spec = BlockSpec(name, mask=mask or "", **fields)
    if not callable(getattr(block, spec.method, None)):
        raise ValueError(f"{name} has no method {spec.method!r}")
    spec = replace(spec, mask=_mask(block, spec.method, mask))
    known = lookup.SPECS.get(name, spec)
    if replace(known, width=spec.width) != spec and lookup.REGISTERED.get(name, block) is block:
        old, new = (vars(each) for each in (known, spec))
        differing = [f"{field}={old[field]!r}" for field in old if field != "width" and old[field] != new[field]]
        raise ValueError(f"{name} is already registered with {', '.join(differing)}: connect without registering it "
                         "again, define the class again, or register a subclass")
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


def _check_bypass(block: type, spec: BlockSpec) -> None:
    """Raise RoutingError if some calls of a block compute their result without its additions."""
    meant = "or pass bypass=True if these calls are meant to ignore the connections"
    if spec.method != "forward" and not uses(block, spec.method, nn.Module):
        raise RoutingError(f"{spec.name}: forward does not call {spec.method}, which contains the additions: register "
                           f"the method that forward calls, {meant}")
    found = {"forward": bypass_of_helper(block, spec), spec.method: route(block, spec).bypass}
    for method, when in found.items():
        if when:
            raise RoutingError(f"{spec.name}: {method} bypasses an addition if {when}: write each residual addition as "
                               f"x + f, {meant}")


def not_residual(block: type, reason: str) -> type:
    """Declare that a class is not a residual block, although it adds two tensors that depend on its input.

    ``reason`` describes the addition, for example ``"the sum of two encoders"``. The class is returned.

    Example:
        >>> import torch, timm_ortho
        >>> class Centered(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + x.mean(1, keepdim=True)
        >>> _ = timm_ortho.not_residual(Centered, "adds the mean of the tokens")
    """
    lookup.NOT_RESIDUAL[lookup.class_name(block)] = str(reason)
    return block


def spec_of(module: nn.Module) -> Optional[BlockSpec]:
    """Return the :class:`BlockSpec` of a block, with or without connections; None for any other module."""
    return lookup.spec_of_class(host_class(module))


def is_residual(cls: type) -> bool:
    """Return whether a class without a :class:`BlockSpec` looks like a residual block."""
    if lookup.class_name(cls) in lookup.NOT_RESIDUAL:
        return False
    inherits = calls_forward_of_base(cls) and any(
        lookup.class_name(base) in lookup.SPECS or is_residual(base) for base in cls.__bases__)
    return inherits or looks_residual(cls)
