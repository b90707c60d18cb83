"""The networks of "Orthogonal and Idempotent Transformations for Learning Deep Neural Networks" (Wang et al., 2017).

A network for images of 32 x 32 has a 3x3 convolution, three stages of K residual blocks, average pooling and a linear
layer: 6 K + 2 layers in all. The second and third stages begin with stride 2. A block has one branch, four parallel
branches or one branch per channel. Each branch is BN, convolution, BN, ReLU, convolution (Section 4.2).

| name | branches | widths of the stages |
| --- | --- | --- |
| ``skipnet_{20,32,56,110}`` | 1 | 16, 32, 64 |
| ``skipnet_{20,32,56,110}_branch4`` | 4 | 32, 64, 128 in total |
| ``skipnet_{20,32,56,110}_depthwise`` | one per channel | 64, 128, 256 |

Each name exists with suffixes ``_linear``, ``_ortho`` and ``_orthog``. The argument ``skip`` sets the skip transform.
An idempotent transform divides the channels into B groups and mixes these groups. As in the paper, B is 4 in the
networks with four branches. In all other networks, B is the number of channels. ``skip_branches`` sets another B.
``skip_rank`` sets the rank of P instead.

The paper does not specify the following choices:
  * Where the width doubles, a 1x1 convolution of stride 2 projects the stream, separately for each branch.
    In a ``_linear`` network without a transform, the branches therefore never mix. A transform acts on the projected
    stream.
  * The projection takes the output of the block's first norm, as in timm's pre-activation blocks.
  * Convolutions have no bias, and no norm follows the last stage.
  * Each branch is initialized like a separate convolution, with normal weights (He et al.) for the branch's fan-out.
"""
import math
from dataclasses import replace
from functools import partial
from typing import Any, Dict, List, Optional, Union

import torch
from timm.layers import BatchNormAct2d, create_conv2d
from timm.models.resnetv2 import ResNetV2
from torch import nn

from .._compat import feature_take_indices
from .build import Architecture, register_own
from .paper import CIFAR_CFG, keep_size

default_cfgs: Dict[str, Any] = {}  # read by timm's registry
__all__ = ["SkipNetwork"]  # timm's registry appends the names of models

Indices = Optional[Union[int, List[int]]]


def _branch_conv(in_chs: int, out_chs: int, kernel_size: int, branches: Optional[int] = 1, **kwargs) -> nn.Module:
    """Return a convolution with separate branches; ``branches=None`` means one branch per channel."""
    if kernel_size == 7:  # timm's stem, which is replaced later
        branches = 1
    return create_conv2d(in_chs, out_chs, kernel_size, **{**kwargs, "groups": branches or in_chs})


class SkipNetwork(ResNetV2):
    """The paper's network: timm's pre-activation blocks without their first ReLU.

    The feature maps have the reductions 1, 1, 2 and 4.

    >>> SkipNetwork(layers=(1, 1, 1), branches=4, num_classes=10)(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 10])

    Args:
        branches: Number of branches of a block; None for one per channel.
        output_stride: 4 by default. Lower values dilate later stages instead of halving the resolution.
    """

    def __init__(
            self,
            *args,
            branches: Optional[int] = 1,
            output_stride: int = 4,
            channels: tuple = (16, 32, 64),
            in_chans: int = 3,
            zero_init_last: bool = False,
            **kwargs,
    ) -> None:
        details = dict(basic=True, bottle_ratio=1.0, norm_layer=BatchNormAct2d, stem_chs=channels[0])
        conv = partial(_branch_conv, branches=branches)
        super().__init__(
            *args, channels=channels, in_chans=in_chans, output_stride=4 * output_stride, conv_layer=conv,
            **{**details, **kwargs})
        factory = {key: kwargs[key] for key in ("device", "dtype") if key in kwargs}
        keep_size(self, conv=create_conv2d(in_chans, self.feature_info[0]["num_chs"], 3, **factory))
        self.skip_branches = None if branches == 1 else branches  # default of connect's argument skip_branches
        for stage in self.stages:
            for block in stage.blocks:
                block.norm1.act = nn.Identity()
        self.init_weights(zero_init_last=zero_init_last)

    def forward_intermediates(self, x: torch.Tensor, indices: Indices = None, *args, **kwargs):
        """Call timm's method for the stem and three stages; timm's version expects four stages."""
        return super().forward_intermediates(x, self._levels(indices), *args, **kwargs)

    def prune_intermediate_layers(self, indices: Indices = 1, *args, **kwargs):
        """Call timm's method for the stem and three stages."""
        return super().prune_intermediate_layers(self._levels(indices), *args, **kwargs)

    def _levels(self, indices: Indices) -> List[int]:
        return feature_take_indices(len(self.feature_info), indices)[0]

    def init_weights(self, zero_init_last: bool = True) -> None:
        super().init_weights(zero_init_last=zero_init_last)
        for name, module in self.named_modules():
            grouped = isinstance(module, nn.Conv2d) and module.groups > 1
            if grouped and not (zero_init_last and name.endswith("conv2")):
                # counts the outputs of one branch; timm's initialization counts all branches
                fan_out = module.out_channels // module.groups * math.prod(module.kernel_size)
                nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))


_KINDS = {
    "": dict(branches=1, channels=(16, 32, 64)),
    "_branch4": dict(branches=4, channels=(32, 64, 128)),
    "_depthwise": dict(branches=None, channels=(64, 128, 256)),
}
ARCHITECTURES: Dict[str, Architecture] = {
    f"skipnet_{depth}{kind}": (
        SkipNetwork, replace(CIFAR_CFG, pool_size=(8, 8)), dict(layers=((depth - 2) // 6,) * 3, **arguments))
    for kind, arguments in _KINDS.items() for depth in (20, 32, 56, 110)
}
register_own(__name__, ARCHITECTURES, {
    SkipNetwork: dict(feature_cfg=dict(flatten_sequential=True, out_indices=(0, 1, 2, 3)))})
