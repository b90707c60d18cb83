"""The table of transformers' residual blocks, those of its image classifiers.

:mod:`timm_ortho.blocks.timm` says what a site is. transformers is never imported here: its classes are known by name.
Its releases before 5 have other blocks, of which :func:`timm_ortho.connect` says what it found in them.
"""
from typing import Dict, Tuple

from .spec import BlockSpec

__all__ = ["BLOCKS", "NOT_RESIDUAL"]


def _name(short: str) -> str:
    """The full name of ``vit.ViTLayer``, or of ``folder/file.Class`` where folder and file have different names."""
    module, _, cls = short.rpartition(".")
    folder, _, file = module.partition("/")
    return f"transformers.models.{folder}.modeling_{file or folder}.{cls}"


def _block(short: str, *columns, **more) -> BlockSpec:
    return BlockSpec(_name(short), *columns, mask="attention_mask", **more)


_TOKENS, _NCHW = -1, 1  # channel axis of B N C (B H W C) and B C H W
_TRANSFORMER = ("attention", "mlp")

BLOCKS: Tuple[BlockSpec, ...] = (
    # ------------------------------------------------------------------------------------------ tokens, B N C
    _block("vit.ViTLayer", "residual", _TRANSFORMER, _TOKENS),
    _block("deit.DeiTLayer", "residual", _TRANSFORMER, _TOKENS),
    _block("beit.BeitLayer", "residual", _TRANSFORMER, _TOKENS),
    _block("dinov2.Dinov2Layer", "residual", _TRANSFORMER, _TOKENS),
    _block("dinov2_with_registers.Dinov2WithRegistersLayer", "residual", _TRANSFORMER, _TOKENS),
    _block("dinov3_vit.DINOv3ViTLayer", "residual", _TRANSFORMER, _TOKENS),
    _block("vit_msn.ViTMSNLayer", "residual", _TRANSFORMER, _TOKENS),
    _block("vit_mae.ViTMAELayer", "residual", _TRANSFORMER, _TOKENS),
    _block("ijepa.IJepaLayer", "residual", _TRANSFORMER, _TOKENS),
    _block("clip.CLIPEncoderLayer", "residual", _TRANSFORMER, _TOKENS),  # of its text tower as well
    _block("metaclip_2.MetaClip2EncoderLayer", "residual", _TRANSFORMER, _TOKENS),  # likewise
    _block("siglip.SiglipEncoderLayer", "residual", _TRANSFORMER, _TOKENS),  # likewise
    _block("siglip2.Siglip2EncoderLayer", "residual", _TRANSFORMER, _TOKENS),  # likewise
    _block("segformer.SegformerLayer", "residual", _TRANSFORMER, _TOKENS),
    _block("data2vec/data2vec_vision.Data2VecVisionLayer", "hidden_states", _TRANSFORMER, _TOKENS),
    _block("swin.SwinLayer", ("shortcut", "residual"), _TRANSFORMER, _TOKENS),
    _block("swinv2.Swinv2Layer", ("shortcut", "hidden_states"), _TRANSFORMER, _TOKENS),
    _block("donut/donut_swin.DonutSwinLayer", ("shortcut", "hidden_states"), _TRANSFORMER, _TOKENS),
    _block("hiera.HieraLayer", ("hidden_states", "residual"), _TRANSFORMER, _TOKENS),
    _block("pvt.PvtLayer", "hidden_states", _TRANSFORMER, _TOKENS),
    _block("pvt_v2.PvtV2BlockLayer", "hidden_states", _TRANSFORMER, _TOKENS),
    _block("focalnet.FocalNetLayer", ("shortcut", "hidden_state"), ("mixer", "mlp"), _TOKENS),
    _block("levit.LevitResidualLayer", "hidden_state", ("branch",), _TOKENS),
    # two classes share a block; the second is in the first, so both are of one layer
    _block("cvt.CvtLayer", "hidden_state", ("attention",), _TOKENS),
    _block("cvt.CvtOutput", "input_tensor", ("mlp",), _TOKENS),
    # patches share the first axis with the batch, as in timm's mobilevit
    _block("mobilevit.MobileViTTransformerLayer", "hidden_states", ("attention",), _TOKENS),
    _block("mobilevit.MobileViTOutput", "input_tensor", ("mlp",), _TOKENS),
    _block("perceiver.PerceiverLayer", "attention_output", ("mlp",), _TOKENS),
    _block("perceiver.PerceiverAttention", "hidden_states", ("attention",), _TOKENS),
    # ------------------------------------------------------------------- transformers on feature maps, B C H W
    _block("poolformer.PoolFormerLayer", "hidden_states", ("mixer", "mlp"), _NCHW),
    _block("mobilevitv2.MobileViTV2TransformerLayer", "hidden_states", _TRANSFORMER, _NCHW),
    _block("swiftformer.SwiftFormerConvEncoder", "input", ("conv",), _NCHW),
    _block("swiftformer.SwiftFormerLocalRepresentation", "input", ("conv",), _NCHW),
    _block("swiftformer.SwiftFormerEncoderBlock", "x", _TRANSFORMER, _NCHW),
    # --------------------------------------------------------------------------------- convolutions, B C H W
    # activations are not in place in transformers (ACT2FN), so each sum can be kept
    _block("resnet.ResNetBasicLayer", "residual", ("conv",), _NCHW),
    _block("resnet.ResNetBottleNeckLayer", "residual", ("conv",), _NCHW),
    _block("regnet.RegNetXLayer", "residual", ("conv",), _NCHW),
    _block("regnet.RegNetYLayer", "residual", ("conv",), _NCHW),
    _block("bit.BitPreActivationBottleneckLayer", "shortcut", ("conv",), _NCHW),
    _block("bit.BitBottleneckLayer", "shortcut", ("conv",), _NCHW),
    _block("convnext.ConvNextLayer", "residual", ("conv",), _NCHW),
    _block("convnextv2.ConvNextV2Layer", "residual", ("conv",), _NCHW),
    _block("dinov3_convnext.DINOv3ConvNextLayer", "residual", ("conv",), _NCHW),
    _block("efficientnet.EfficientNetFinalBlockLayer", "embeddings", ("conv",), _NCHW),
    _block("mobilenet_v2.MobileNetV2InvertedResidual", "residual", ("conv",), _NCHW),
    _block("mobilevit.MobileViTInvertedResidual", "residual", ("conv",), _NCHW),
    _block("mobilevitv2.MobileViTV2InvertedResidual", "residual", ("conv",), _NCHW),
    _block("hgnet_v2.HGNetV2BasicLayer", "identity", ("conv",), _NCHW),
)

NOT_RESIDUAL: Dict[str, str] = {
    _name(name): why
    for why, names in {
        "mask tokens in the place of masked ones": "hiera.HieraDecoder perceiver.PerceiverMultimodalPreprocessor",
        "parallel branches, folded into one convolution by a re-parameterisation": "textnet.TextNetRepConvLayer",
        "inside a branch": "focalnet.FocalNetModulation swiftformer.SwiftFormerEfficientAdditiveAttention",
        "a gate or a norm of a branch": "convnextv2.ConvNextV2GRN",
        "the mean of two classifiers": """
            deit.DeiTForImageClassificationWithTeacher levit.LevitForImageClassificationWithTeacher
            swiftformer.SwiftFormerForImageClassification""",
        "pools for the head, after the last block":
            "siglip.SiglipMultiheadAttentionPoolingHead siglip2.Siglip2MultiheadAttentionPoolingHead",
        "outputs, put together": "perceiver.PerceiverModel",
    }.items()
    for name in names.split()
}
NOT_RESIDUAL.update(
    (f"transformers.activations.{cls}", "inside a branch") for cls in ("NewGELUActivation", "AccurateGELUActivation"))
