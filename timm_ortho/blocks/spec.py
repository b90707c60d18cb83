"""Describe a residual block: its stream variable and its additions."""
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

from torch import nn

from .._checks import check_count, known_name
from ..functional import KEEPS


def last_width(block: nn.Module) -> int:
    """Return the output width of the last linear layer or convolution of a block.

    Convolutions of one axis count only if there is no other layer, because timm's ``EcaModule`` applies such a
    convolution along the channel axis.

    Raises:
        ValueError: The block has no such layer.
    """
    of_channels = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    for layers in (of_channels, (nn.Conv1d, nn.ConvTranspose1d)):
        for module in reversed([*block.modules()]):
            if isinstance(module, layers):
                return module.out_features if isinstance(module, nn.Linear) else module.out_channels
    raise ValueError(f"{type(block).__name__} has no linear layer and no convolution, so connect cannot determine the "
                     "width of its stream for skip: pass width= to register_block")


@dataclass(frozen=True)
class BlockSpec:
    """Description of one class of residual blocks, from a library's table or :func:`timm_ortho.register_block`.

    Attributes:
        name: Full name of the class, for example ``timm.models.vision_transformer.Block``.
        stream: The stream in an addition, as written in the source: one expression for all additions, or one for each.
            If the two sides of an ``if`` write the stream of an addition differently, give this addition a sequence
            with the expression of each side, for example ``stream=[("x", "residual"), "x"]`` for two additions.
        kinds: One name for each addition to the stream, in the order of the source. The tables have the kinds
            ``attention``, ``cross_attention``, ``mlp``, ``conv``, ``mixer`` (token mixing other than attention),
            ``parallel`` (attention and MLP in one sum) and ``branch`` (a wrapper around any module), and names such as
            ``mlp_2`` for further additions of a kind; any identifier is allowed, once. None leaves an addition
            unchanged. Two additions on the two sides of an ``if`` count as one, unless ``sides_differ``.
        dim: Channel axis of the stream, -1 for tokens and 1 for B C H W: one axis for all additions, one for each, or a
            function of the block.
        keep: Tensor that autograd saves for the backward pass: ``"output"`` (the sum) or ``"branch"`` (the branch
            output), if this block or the next one changes the sum in place, for example by an activation.
        method: The method with the additions. ``forward`` is used if the installed release has no such method.
        mask: Name of the method's argument with the attention mask, or an expression with this argument, such as
            ``"mask[:, None, None]"`` for masks ``[B, N]``. The expression is not evaluated if the argument is None, and
            ignored if the method has no such argument. Connections with one projection per sample use the mask to
            exclude padding, see :func:`timm_ortho.connections.real_tokens`. True must allow attention, as in
            ``scaled_dot_product_attention``. ``""`` for a mask with the opposite meaning or without padding.
        unless: Function of a block. If it returns True, the additions of that block stay unchanged.
        tokens_apart: True if ``global``, which otherwise has one projection per sample, must project each token of this
            block separately.
        width: Number of channels of the stream, or a function of the block that returns one number for all additions,
            or one for each. ``connect`` needs it only for its argument ``skip``. None for :func:`last_width`.
        causal: Whether the attention is always causal. ``connect`` then refuses one projection per sample.
        text: Whether the block is part of a language model, causal or not. ``connect`` then refuses the same.
        depth: Number of levels from a block up to its layer. For example, a ``BertOutput`` is one level below its
            ``BertLayer``. All sites of a layer have the same index. Blocks inside another block share its index without
            a depth. A depth is needed if the layer is not a block itself and contains several blocks.
        sides_differ: True if the two sides of an ``if`` have additions of different kinds, such as a parallel block on
            one side and a sequential block on the other side. ``kinds`` then names the additions of both sides.

    Raises:
        ValueError: A value is invalid.

    Example:
        >>> spec = BlockSpec("my_module.MyBlock", stream="x", kinds=("attention", None, "mlp"))
        >>> spec.sites
        {'attention': 'connection_attention', 'mlp': 'connection_mlp'}
    """

    name: str
    stream: Union[str, Sequence[Union[str, Sequence[str]]]]
    kinds: Sequence[Optional[str]]
    dim: Union[int, Sequence[int], Callable[[nn.Module], int]] = -1
    keep: str = "output"
    method: str = "forward"
    mask: str = "attn_mask"
    unless: Callable[[nn.Module], bool] = lambda block: False
    tokens_apart: bool = False
    width: Union[int, Callable[[nn.Module], Union[int, Sequence[int]]], None] = None
    causal: bool = False
    text: bool = False
    depth: int = 0
    sides_differ: bool = False

    def __post_init__(self) -> None:
        for field in ("kinds", "stream", "dim"):
            value = getattr(self, field)
            if isinstance(value, (list, tuple)):  # tuples can be hashed
                self._set(field, tuple(tuple(each) if isinstance(each, list) else each for each in value))
        named = [kind for kind in self.kinds or () if kind is not None]
        if not (isinstance(self.kinds, tuple) and named and len(set(named)) == len(named)
                and all(map(str.isidentifier, named))):
            raise ValueError(
                f"kinds must be a tuple of different identifiers, one for each addition, got {self.kinds!r}")
        for field in ("stream", "dim"):
            value = getattr(self, field)
            if isinstance(value, tuple) and len(value) != len(self.kinds):
                raise ValueError(f"{field} needs one value, or {len(self.kinds)} (one for each kind), got {len(value)} "
                                 "in a sequence")
        known_name("keep", self.keep, KEEPS)
        if self.width is not None and not callable(self.width):
            self._set("width", check_count("width", self.width))

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)  # the class is frozen

    @property
    def sites(self) -> Dict[str, str]:
        """Map each kind of site to the block attribute that holds its connection."""
        return {kind: f"connection_{kind}" for kind in self.kinds if kind}

    @property
    def streams(self) -> Tuple[Tuple[str, ...], ...]:
        """The expressions of the stream in each addition."""
        return tuple((each,) if isinstance(each, str) else each for each in self._each(self.stream))

    def dims(self, block: nn.Module) -> Dict[str, int]:
        """Return the channel axis of the stream by kind of site."""
        return self._by_kind(self.dim(block) if callable(self.dim) else self.dim)

    def widths(self, block: nn.Module) -> Dict[str, int]:
        """Return the number of channels of the stream by kind of site."""
        width = last_width if self.width is None else self.width
        return self._by_kind(width(block) if callable(width) else width)

    def _by_kind(self, value: Any) -> Dict[str, int]:
        return {kind: each for kind, each in zip(self.kinds, self._each(value), strict=True) if kind}

    def _each(self, value: Any) -> Tuple[Any, ...]:
        return value if isinstance(value, tuple) else (value,) * len(self.kinds)
