"""The architectures of "Revisiting Residual Connections" (Oh et al., NeurIPS 2025).

They follow the paper's text and the authors' code, and are built from timm's VisionTransformer and ResNetV2:
``vit_small`` (384 wide, 6 blocks, 6 heads), ``vit_base`` (768, 12, 12) and ``resnetv2_{18,34,50,101}_cifar``. The paper
contradicts itself about ViT-S: Section 4.1 has 6 blocks, which have 11.4 million parameters, and Section 4.2 has 22.0
million parameters, which 12 blocks have (``depth=12``). Each name exists with the suffixes ``_ortho``, ``_orthog`` and
``_linear``. ``_linear`` is the baseline with plain additions, which is registered here because timm does not have these
architectures. ``vit_test`` (32, 4, 2) is a ViT of the same class that is small enough to ship with trained weights.

Difference from the authors' code: if a ResNetV2 block changes the stream's shape, its shortcut convolution receives the
output of the first norm and activation, as in timm and He et al. In the authors' code it receives the block's input.
Weights are initialized as in timm. The authors' code has PyTorch's defaults, with the standard deviation 1 / sqrt(3 n)
for n inputs: 0.0241 instead of 0.0589 for 3x3 convolutions of 64 channels, 0.0256 instead of 0.01 for the classifier of
ResNetV2-18, and 0.0295 instead of 0.02 for the attention, the MLPs' first layers and the classifier of ViT-S.
"""
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any, Dict

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import BatchNormAct2d, LayerNorm, NormMlpClassifierHead, create_conv2d, get_norm_act_layer
from timm.models import PretrainedCfg
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from .._checks import known_name
from ..weights.pretrained import checkpoint_filter_fn
from .build import Architecture, register_own

default_cfgs: Dict[str, Any] = {}  # read by timm's registry
__all__ = ["CifarResNetV2", "PaperVisionTransformer"]  # timm's registry appends the names of models


def _block(**kwargs) -> Block:
    """Return timm's Block with LayerNorms that have no weight or bias. The norm before the head has both."""
    return Block(**dict(kwargs, norm_layer=partial(LayerNorm, eps=1e-6, affine=False)))


class PaperVisionTransformer(VisionTransformer):
    """The paper's ViT: tanh-GELU, position embeddings for patches only, and a class token initialized with zeros."""

    def __init__(self, *args, **kwargs) -> None:
        norm = partial(LayerNorm, eps=1e-6)
        details = dict(act_layer="gelu_tanh", no_embed_class=True, norm_layer=norm, block_fn=_block)
        super().__init__(*args, **{**details, **kwargs})

    def init_weights(self, *args, **kwargs) -> None:
        super().init_weights(*args, **kwargs)
        if self.cls_token is not None:
            nn.init.zeros_(self.cls_token)


# None: timm's init_weights already uses kaiming.
_WEIGHT_INIT = {"kaiming": None, "xavier": nn.init.xavier_normal_, "orthogonal": nn.init.orthogonal_}


def keep_size(model: ResNetV2, **stem: nn.Module) -> None:
    """Replace the stem, which divides the size of images by 4 in timm, and remove the norm after the last stage.

    The model must have been built with 4 times the requested ``output_stride``.
    """
    model.stem = nn.Sequential(OrderedDict(stem))
    model.stem_feat_idx = len(stem) - 1
    model.norm = nn.Identity()
    model.feature_info[0].update(module=f"stem.{[*stem][-1]}", reduction=1)
    for info in model.feature_info[1:]:
        info["reduction"] //= 4


class CifarResNetV2(ResNetV2):
    """The paper's pre-activation ResNet for small images.

    The stem is a 3x3 convolution of stride 1 with BatchNorm and ReLU. Convolutions have biases. No norm follows the
    last stage. The feature maps have the reductions 1, 1, 2, 4 and 8.

    >>> model = CifarResNetV2(layers=(1, 1, 1, 1), channels=(8, 16, 24, 32), num_classes=10)
    >>> model(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 10])

    Args:
        head_norm: Whether a LayerNorm follows the pooling (paper, Table 9).
        weight_init: Initialization of the convolutions' weights: ``kaiming`` (timm's: a normal distribution, scaled by
            fan-out), ``xavier`` or ``orthogonal`` (paper, Table 7). Biases are 0 at first, and norms are the identity.
            The classifier is a 1x1 convolution: ``xavier`` and ``orthogonal`` apply to it, too, and ``kaiming``
            leaves timm's standard deviation of 0.01. The paper does not state how classifiers are initialized.
        output_stride: 8 by default. Lower values dilate later stages instead of halving the resolution.

    Raises:
        ValueError: ``weight_init`` is unknown.
    """

    def __init__(
            self,
            *args,
            head_norm: bool = False,
            weight_init: str = "kaiming",
            output_stride: int = 8,
            stem_chs: int = 64,
            in_chans: int = 3,
            global_pool: str = "avg",
            drop_rate: float = 0.0,
            zero_init_last: bool = False,
            **kwargs,
    ) -> None:
        initialise = _WEIGHT_INIT[known_name("weight_init", weight_init, _WEIGHT_INIT)]
        factory = {key: kwargs[key] for key in ("device", "dtype") if key in kwargs}
        conv = kwargs.setdefault("conv_layer", partial(create_conv2d, bias=True))
        norm = get_norm_act_layer(kwargs.setdefault("norm_layer", BatchNormAct2d), kwargs.get("act_layer", nn.ReLU))
        super().__init__(
            *args, output_stride=4 * output_stride, stem_chs=stem_chs, in_chans=in_chans, global_pool=global_pool,
            drop_rate=drop_rate, **kwargs)
        width = self.feature_info[0]["num_chs"]
        keep_size(self, conv=conv(in_chans, width, kernel_size=3, **factory), norm=norm(width, **factory))
        if head_norm:
            self.head = NormMlpClassifierHead(
                self.num_features, self.num_classes, pool_type=global_pool, drop_rate=drop_rate, **factory)
        self.init_weights(zero_init_last=zero_init_last)
        for module in self.modules():
            if initialise and isinstance(module, nn.Conv2d):
                initialise(module.weight)


_VIT_CFG = PretrainedCfg(
    input_size=(3, 224, 224), fixed_input_size=True, interpolation="bicubic",
    crop_pct=1.0,  # the paper's recipes validate on whole images
    mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD,
    num_classes=1000, first_conv="patch_embed.proj", classifier="head",
)
CIFAR_CFG = PretrainedCfg(
    input_size=(3, 32, 32), pool_size=(4, 4), interpolation="bicubic", crop_pct=1.0,
    mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),  # CIFAR-10's statistics
    num_classes=10, first_conv="stem.conv", classifier="head.fc",
)
_TEST_CFG = replace(
    _VIT_CFG, input_size=(3, 8, 8), mean=(0.3, 0.3, 0.3), std=(0.38, 0.38, 0.38), num_classes=10,
)
_BASIC = dict(basic=True, bottle_ratio=1.0, channels=(64, 128, 256, 512))

ARCHITECTURES: Dict[str, Architecture] = {
    "vit_small": (PaperVisionTransformer, _VIT_CFG, dict(patch_size=16, embed_dim=384, depth=6, num_heads=6)),
    "vit_base": (PaperVisionTransformer, _VIT_CFG, dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)),
    "vit_test": (PaperVisionTransformer, _TEST_CFG, dict(patch_size=2, embed_dim=32, depth=4, num_heads=2)),
    "resnetv2_18_cifar": (CifarResNetV2, CIFAR_CFG, dict(layers=(2, 2, 2, 2), **_BASIC)),
    "resnetv2_34_cifar": (CifarResNetV2, CIFAR_CFG, dict(layers=(3, 4, 6, 3), **_BASIC)),
    "resnetv2_50_cifar": (CifarResNetV2, CIFAR_CFG, dict(layers=(3, 4, 6, 3))),
    "resnetv2_101_cifar": (CifarResNetV2, CIFAR_CFG, dict(layers=(3, 4, 23, 3))),
}


register_own(__name__, ARCHITECTURES, {
    PaperVisionTransformer: dict(
        feature_cfg=dict(out_indices=3, feature_cls="getter"), pretrained_filter_fn=checkpoint_filter_fn),
    CifarResNetV2: dict(feature_cfg=dict(flatten_sequential=True)),
})
