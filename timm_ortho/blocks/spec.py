"""Describe a residual block: its stream variable and its additions."""
from typing import Callable, Dict, NamedTuple, Optional, Tuple, Union

from torch import nn


def last_width(block: nn.Module) -> int:
    """Return the output width of the last linear layer or convolution of a block.

    Convolutions of one axis count only if there is no other layer, because timm's ``EcaModule`` applies such a
    convolution along the channel axis.

    Raises:
        ValueError: The block has no such layer.

    Example:
        >>> last_width(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()))
        8
    """
    of_channels = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    for layers in (of_channels, (nn.Conv1d, nn.ConvTranspose1d)):
        for module in reversed([*block.modules()]):
            if isinstance(module, layers):
                return module.out_features if isinstance(module, nn.Linear) else module.out_channels
    raise ValueError(f"{type(block).__name__} has no linear layer and no convolution, so connect cannot determine the "
                     "width of its stream for skip: pass width= to register_block")


class BlockSpec(NamedTuple):
    """Description of one class of residual blocks.

    :func:`timm_ortho.register_block` describes ``stream``, ``mask``, ``causal`` and ``sides_differ``, and most of the
    remaining fields.

    Attributes:
        name: Full name of the class, for example ``timm.models.vision_transformer.Block``.
        kinds: Kind of each addition to the stream, in the order of the source. The kinds are ``attention``,
            ``cross_attention``, ``mlp``, ``conv``, ``mixer`` (token mixing other than attention), ``parallel``
            (attention and MLP in one sum) and ``branch`` (a wrapper around any module). Further additions of a kind
            have names such as ``mlp_2`` or ``mlp_pixel``. None leaves an addition unchanged.
        dim: Channel axis of the stream: one axis for all additions, one for each, or a function of the block.
        keep: ``"branch"`` if this block or the next one changes the sum in place.
        method: The method with the additions. ``forward`` is used if the installed release has no such method.
        unless: Function of a block. If it returns True, the additions of that block stay unchanged.
        tokens_apart: True if ``global``, which otherwise has one projection per sample, must project each token of this
            block separately.
        width: Number of channels of the stream, or a function of the block. The function returns one number for all
            additions, or one for each.
        text: Whether the block is part of a language model. ``connect`` then refuses one projection per sample.
        depth: Number of levels from a block up to its layer. For example, a ``BertOutput`` is one level below its
            ``BertLayer``. All sites of a layer have the same index. Blocks inside another block share its index without
            a depth. A depth is needed if the layer is not a block itself and contains several blocks.

    Example:
        >>> spec = BlockSpec("my_module.MyBlock", stream="x", kinds=("attention", None, "mlp"))
        >>> spec.sites
        {'attention': 'connection_attention', 'mlp': 'connection_mlp'}
    """

    name: str
    stream: Union[str, Tuple[Union[str, Tuple[str, ...]], ...]]
    kinds: Tuple[Optional[str], ...]
    dim: Union[int, Tuple[int, ...], Callable[[nn.Module], int]] = -1
    keep: str = "output"
    method: str = "forward"
    mask: str = "attn_mask"
    unless: Callable[[nn.Module], bool] = lambda block: False
    tokens_apart: bool = False
    width: Union[int, Callable[[nn.Module], Union[int, Tuple[int, ...]]]] = last_width
    causal: bool = False
    text: bool = False
    depth: int = 0
    sides_differ: bool = False

    @property
    def sites(self) -> Dict[str, str]:
        """Map each kind of site to the block attribute that holds its connection."""
        return {kind: f"connection_{kind}" for kind in self.kinds if kind}

    def dims(self, block: nn.Module) -> Dict[str, int]:
        """Return the channel axis of the stream by kind of site."""
        return self._by_kind(self.dim(block) if callable(self.dim) else self.dim)

    def widths(self, block: nn.Module) -> Dict[str, int]:
        """Return the number of channels of the stream by kind of site."""
        return self._by_kind(self.width(block) if callable(self.width) else self.width)

    def _by_kind(self, value: Union[int, Tuple[int, ...]]) -> Dict[str, int]:
        values = value if isinstance(value, tuple) else (value,) * len(self.kinds)
        return {kind: each for kind, each in zip(self.kinds, values, strict=True) if kind}
