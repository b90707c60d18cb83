"""List residual blocks of torchvision. So far, these are blocks of its classification networks for images and videos.

:mod:`timm_ortho.blocks.timm` defines which additions are sites. In MaxViT's partitioned attention the stream has the
shape [B, windows, tokens, C], so a projection in the global scope covers the whole sample.
"""
from typing import Any, Dict, Tuple

from .spec import BlockSpec, last_width


def _block(name: str, *columns: Any, **more: Any) -> BlockSpec:
    return BlockSpec(f"torchvision.models.{name}", *columns, **more)


_TOKENS, _NHWC, _NCHW = -1, -1, 1  # channel axis of B N C, B H W C and B C H W
_TRANSFORMER = ("attention", "mlp")

BLOCKS: Tuple[BlockSpec, ...] = (
    _block("vision_transformer.EncoderBlock", ("input", "x"), _TRANSFORMER, _TOKENS),
    _block("swin_transformer.SwinTransformerBlock", "x", _TRANSFORMER, _NHWC),  # video: B T H W C
    _block("swin_transformer.SwinTransformerBlockV2", "x", _TRANSFORMER, _NHWC),
    _block("maxvit.MBConv", "res", ("conv",), _NCHW),
    _block("maxvit.PartitionAttentionLayer", "x", _TRANSFORMER, _TOKENS),  # B windows N C
    _block("resnet.BasicBlock", "identity", ("conv",), _NCHW, keep="branch"),
    _block("resnet.Bottleneck", "identity", ("conv",), _NCHW, keep="branch"),
    _block("regnet.ResBottleneckBlock", (("self.proj(x)", "x"),), ("conv",), _NCHW, keep="branch"),
    _block("convnext.CNBlock", "input", ("conv",), _NCHW),
    _block("efficientnet.MBConv", "input", ("conv",), _NCHW),
    _block("efficientnet.FusedMBConv", "input", ("conv",), _NCHW),
    _block("mobilenetv2.InvertedResidual", "x", ("conv",), _NCHW),
    _block("mobilenetv3.InvertedResidual", "input", ("conv",), _NCHW),
    _block("mnasnet._InvertedResidual", "input", ("conv",), _NCHW),
    # video, B C T H W and B N C
    _block("video.resnet.BasicBlock", "residual", ("conv",), _NCHW, keep="branch"),
    _block("video.resnet.Bottleneck", "residual", ("conv",), _NCHW, keep="branch"),
    _block(
        "video.mvit.MultiscaleBlock", ("x_skip", "x_proj"), _TRANSFORMER, _TOKENS,
        width=lambda block: (block.norm2.normalized_shape[0], last_width(block.mlp))),
)

NOT_RESIDUAL: Dict[str, str] = {
    **{f"torchvision.{name}": "a sum of feature maps of different resolutions" for name in (
        "models.detection.retinanet.RetinaNet", "models.segmentation.lraspp.LRASPPHead",
        "ops.feature_pyramid_network.FeaturePyramidNetwork")},
    "torchvision.models.detection.anchor_utils.DefaultBoxGenerator": "the corners of boxes",
}
