"""What is known of a residual block: which variable is its stream, and where something is added to it."""
from typing import Callable, Dict, NamedTuple, Optional, Tuple, Union

from torch import nn


class BlockSpec(NamedTuple):
    """One block class of some library.

    Attributes:
        name: The class, with its module: ``timm.models.vision_transformer.Block``.
        stream: What stands for the stream in an addition: one expression, or one for each addition (or several, where
            the sides of an ``if`` write it differently).
        kinds: Kind of each addition to the stream, in the order of the source, no two alike: ``attention``, ``mlp``,
            ``conv``, ``mixer`` (of tokens, by other means), ``parallel`` (attention and MLP at once) or ``branch`` (a
            wrapper around any of them), numbered where there are several. Additions on the two sides of an ``if`` count
            once. None stands for an addition that is no site.
        dim: Channel axis of the stream: one for all additions, one for each, or a function of the block.
        keep: ``"branch"`` where the sum is changed in place afterwards, so that it cannot be kept for the backward
            pass (see :func:`timm_ortho.functional.residual_update`).
        method: The method with the additions; ``forward`` where a release of the library has no such method.
        mask: The argument of that method, if it has one, that connections are handed as ``attn_mask``.
        mask_layout: How that mask is read where its shape allows two readings, see
            :func:`timm_ortho.connections.real_tokens`.
        unless: Says of a block that its sums stay what they are.
        tokens_apart: Whether the global scope is each token by itself here.
        width: Channels of the stream, of a block: one number for all additions or one for each. What its last linear
            layer or convolution puts out, unless the table says otherwise.
    """

    name: str
    stream: Union[str, Tuple[Union[str, Tuple[str, ...]], ...]]
    kinds: Tuple[Optional[str], ...]
    dim: Union[int, Tuple[int, ...], Callable[[nn.Module], int]] = -1
    keep: str = "output"
    method: str = "forward"
    mask: str = "attn_mask"
    mask_layout: str = "scores"
    unless: Callable[[nn.Module], bool] = lambda block: False
    tokens_apart: bool = False
    width: Callable[[nn.Module], Union[int, Tuple[int, ...]]] = lambda block: last_width(block)

    @property
    def sites(self) -> Dict[str, str]:
        """Attribute of the connection, by kind of site."""
        return {kind: f"connection_{kind}" for kind in self.kinds if kind}

    def dims(self, block: nn.Module) -> Dict[str, int]:
        """Channel axis of a block's stream, by kind of site."""
        return self._by_kind(self.dim(block) if callable(self.dim) else self.dim)

    def widths(self, block: nn.Module) -> Dict[str, int]:
        """Channels of a block's stream, by kind of site."""
        return self._by_kind(self.width(block))

    def _by_kind(self, value: Union[int, Tuple[int, ...]]) -> Dict[str, int]:
        each = value if isinstance(value, tuple) else (value,) * len(self.kinds)
        return {kind: one for kind, one in zip(self.kinds, each, strict=True) if kind}


def last_width(block: nn.Module) -> int:
    """What the last linear layer or convolution of a block puts out."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
    last = next((module for module in reversed([*block.modules()]) if isinstance(module, kinds)), None)
    if last is None:
        raise ValueError(f"{type(block).__name__} has no linear layer and no convolution that says how wide its stream "
                         "is, which a skip has to know")
    return last.out_features if isinstance(last, nn.Linear) else last.out_channels
