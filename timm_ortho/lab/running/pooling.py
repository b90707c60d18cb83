"""Register variants of `poolformerv2_s12_plain`: a PoolFormer with token mixer pool(x) instead of timm's pool(x) - x.

Each variant has a suffix, as in `poolformerv2_s12_plain_ortho`. The study `confirm_poolformer` uses these variants, and
imports this module with timm's option `device_modules`.
"""
from typing import Any, Callable, Dict

from timm.models import get_pretrained_cfg
from timm.models.metaformer import GroupNorm1NoBias, MetaFormer, Pooling
from torch import Tensor, nn

from ...models.build import create, register_own, unpretrained

default_cfgs: Dict[str, Any] = {}  # timm's registry reads it
__all__ = []  # timm's registry appends the name of the model


class PlainPooling(Pooling):
    """timm's 3 x 3 average pooling as a token mixer, without timm's subtraction of the input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled input. Input and output have the shape (N, C, H, W)."""
        return self.pool(x)


def _create(name: str, base: str, default: str, /, **kwargs) -> nn.Module:
    def entry(build: Callable[..., nn.Module], pretrained: bool, **kwargs) -> nn.Module:
        defaults = dict(
            depths=[2, 2, 6, 2], dims=[64, 128, 320, 512], token_mixers=PlainPooling, norm_layers=GroupNorm1NoBias,
            use_mlp_head=False)
        return build(MetaFormer, name, pretrained, feature_cfg=dict(out_indices=(0, 1, 2, 3)), **{**defaults, **kwargs})

    return create(name, default, entry, **kwargs)


_BASE = "poolformerv2_s12_plain"
register_own(__name__, {_BASE: unpretrained(get_pretrained_cfg("poolformerv2_s12"), _BASE)}, _create)
