"""List timm's residual blocks: the stream variable of each class, and its additions.

A site is an addition of the stream and the branch output, which the block computes from the stream. The stream is the
input of the block, or the output of the block's shortcut. The branch output includes its norm, LayerScale and drop
path. An activation or a norm may follow the sum. In the global scope, a connection has one projection per sample, over
all axes but the first. Special cases:

  * Class and register tokens count as tokens. Padding does not count.
  * Some models split the stream of a sample into pieces, which they stack along the batch axis. In ``mobilevit`` a
    piece has the pixels with the same position inside their patch; in ``tnt`` a piece of the pixel stream has the
    pixels of one patch. The global scope then has one projection per piece. Swin, MaxViT and SAM cut windows
    inside the branch, so one projection covers the whole sample.
  * The class attention of ``xcit`` computes a new class token. For the patch tokens, its branch output f contains
    copies of the stream x (normalised in the first addition). These copies would dominate the sums of one projection
    over all tokens. In the second addition the coefficient s would then be near 1, and the update x + f - s x would
    remove the stream of the class token. In this block the global scope therefore projects each token separately.

These additions are not sites:

  * sums of parallel branches that a re-parameterisation folds into one convolution; the folding would remove a
    connection
  * sums inside a branch, except in transformer blocks inside a branch (``edgenext``, ``mobilevit``)
  * additions to a stream of one channel, which has no orthogonal component
  * sums of feature maps of different resolutions, additions of position embeddings, and concatenations

``NOT_RESIDUAL`` lists classes that look residual but have no site.
"""
from typing import Dict, List, Tuple

from torch import nn

from .spec import BlockSpec, last_width


def _of_mlp(block: nn.Module) -> int:
    """Return the channel axis of a block: 1 if its MLP contains convolutions, otherwise -1."""
    return 1 if any(isinstance(module, nn.Conv2d) for module in block.mlp.modules()) else -1


def _shortcut_width(block: nn.Module) -> int:
    """Return the stream width of a block whose branch concatenates the outputs of two convolutions.

    It is the output width of the shortcut's last convolution, or the input width if the shortcut has no convolution.
    """
    if any(True for _ in block.shortcut.parameters()):
        return last_width(block.shortcut)
    return next(module for module in block.modules() if isinstance(module, nn.Conv2d)).in_channels


def _of_bn3(block: nn.Module) -> int:
    """Return the stream width of a block from its last norm, because ``last_width`` ignores ``CondConv2d``."""
    return len(block.bn3.weight)


def _tnt_widths(block: nn.Module) -> Tuple[int, ...]:
    pixel, patch = last_width(block.mlp_in), last_width(block.mlp)
    return pixel, pixel, patch, patch, patch


def _is_folded(block: nn.Module) -> bool:
    """Return whether ``fuse`` folds the shortcut of a block into its depthwise convolution."""
    wrapped = block.m if hasattr(block, "m") else block.module
    return type(wrapped).__name__ in ("Conv2dNorm", "ConvNorm")


_TOKENS, _NHWC, _NCHW = -1, -1, 1  # channel axis of B N C, B H W C and B C H W
_TRANSFORMER = ("attention", "mlp")


def _blocks(names: str, *columns, **more) -> List[BlockSpec]:
    return [BlockSpec(f"timm.models.{name}", *columns, **more) for name in names.split()]


# The headings name the layout of most entries below them. The constant in each entry gives its channel axis.
BLOCKS: Tuple[BlockSpec, ...] = (
    # ------------------------------------------------------------------------------------------ tokens, B N C
    *_blocks(
        """vision_transformer.Block vision_transformer.ResPostBlock vision_transformer.ParallelThingsBlock
        vision_transformer_relpos.RelPosBlock vision_transformer_relpos.ResPostRelPosBlock beit.Block eva.EvaBlock
        eva.EvaBlockPostNorm deepseek_vit.DeepseekVitBlock cait.LayerScaleBlock convit.Block coat.SerialBlock
        twins.Block pvt_v2.Block hiera.HieraBlock""",
        "x", _TRANSFORMER, _TOKENS),
    *_blocks(
        "vision_transformer.ParallelScalingBlock vision_transformer.DiffParallelScalingBlock",
        "x", ("parallel",), _TOKENS),
    *_blocks("gemma4_vit.Gemma4Block", "residual", _TRANSFORMER, _TOKENS),
    *_blocks("cait.LayerScaleBlockClassAttn", "x_cls", _TRANSFORMER, _TOKENS),  # the stream is the class token
    *_blocks("xcit.ClassAttentionBlock", ("x", "x_res"), _TRANSFORMER, _TOKENS, tokens_apart=True),
    *_blocks("xcit.XCABlock", "x", ("attention", "conv", "mlp"), _TOKENS),
    *_blocks("volo.Outlooker volo.Transformer", "x", _TRANSFORMER, _NHWC),
    *_blocks("volo.ClassBlock", "cls_embed", _TRANSFORMER, _TOKENS),
    *_blocks("crossvit.CrossAttentionBlock", "x[:, 0:1, ...]", ("attention",), _TOKENS),
    *_blocks("coat.ConvPosEnc", "feat", ("conv",), _NCHW),
    *_blocks(
        "coat.ParallelBlock", ("x2", "x3", "x4", "x2", "x3", "x4"),
        ("attention_2", "attention_3", "attention_4", "mlp_2", "mlp_3", "mlp_4"), _TOKENS),
    *_blocks(
        "tnt.Block", ("pixel_embed", "pixel_embed", "patch_embed[:, 1:]", "patch_embed", "patch_embed"),
        ("attention_pixel", "mlp_pixel", "mixer", "attention", "mlp"), _TOKENS, width=_tnt_widths),
    *_blocks("twins.PosConv", "cnn_feat_token", ("conv",), _NCHW),
    *_blocks(
        "mvitv2.MultiScaleBlock", "x_shortcut", _TRANSFORMER, _TOKENS,
        width=lambda block: (len(block.norm2.weight), last_width(block.mlp))),
    *_blocks("nest.TransformerLayer", "x", _TRANSFORMER, _TOKENS),  # B T N C with all windows T of a sample
    *_blocks("levit.LevitBlock", "x", _TRANSFORMER, _of_mlp),
    *_blocks("levit.LevitDownsample", "x", ("mlp",), _of_mlp),
    *_blocks("mlp_mixer.MixerBlock mlp_mixer.ResBlock", "x", ("mixer", "mlp"), _TOKENS),
    *_blocks("mlp_mixer.SpatialGatingBlock", "x", ("mlp",), _TOKENS),
    # ---------------------------------------------------------------------------------------- windows, B H W C
    *_blocks(
        """swin_transformer.SwinTransformerBlock swin_transformer_v2.SwinTransformerV2Block
        swin_transformer_v2_cr.SwinTransformerV2CrBlock gcvit.GlobalContextVitBlock maxxvit.PartitionAttentionCl
        maxxvit.ParallelPartitionAttention""",
        "x", _TRANSFORMER, _NHWC),
    *_blocks(
        "vision_transformer_sam.Block hieradet_sam2.MultiScaleBlock tiny_vit.TinyVitBlock",
        ("shortcut", "x"), _TRANSFORMER, _NHWC),
    *_blocks("gcvit.MbConvBlock maxxvit.MbConvBlock maxxvit.ConvNeXtBlock", "shortcut", ("conv",), _NCHW),
    *_blocks("tiny_vit.MBConv", "shortcut", ("conv",), _NCHW, keep="branch"),
    *_blocks("davit.ConvPosEnc", "x", ("conv",), _NCHW),
    *_blocks("davit.SpatialBlock", ("shortcut", "x"), _TRANSFORMER, _TOKENS),
    *_blocks("davit.ChannelBlock", "x", _TRANSFORMER, _TOKENS),
    *_blocks("maxxvit.TransformerBlock2d", ("self.shortcut(x)", "x"), _TRANSFORMER, _NCHW),
    *_blocks("maxxvit.PartitionAttention2d", "x", _TRANSFORMER, _NCHW),
    *_blocks("sequencer.Sequencer2dBlock", "x", ("mixer", "mlp"), _NHWC),
    *_blocks("mambaout.GatedConvBlock", "shortcut", ("conv",), _NHWC),
    # ------------------------------------------------------------------- transformers on feature maps, B C H W
    *_blocks(
        "metaformer.MetaFormerBlock", ("self.res_scale1(x)", "self.res_scale2(x)"), ("mixer", "mlp"), _of_mlp),
    *_blocks("focalnet.FocalNetBlock", ("shortcut", "x"), ("mixer", "mlp"), _NCHW),
    *_blocks("edgenext.ConvBlock", "shortcut", ("conv",), _NCHW),
    *_blocks(  # the first addition is a position encoding, the second is on tokens, the third on the feature map
        "edgenext.SplitTransposeBlock", ("x", "x", "shortcut"), (None, "attention", "mlp"), (_TOKENS, _TOKENS, _NCHW)),
    # self-attention adds to x; the second side of an if is cross-attention, which adds to res
    *_blocks("mobilevit.LinearTransformerBlock", (("x", "res"), "x"), _TRANSFORMER, _NCHW),
    *_blocks("efficientformer.MetaBlock1d", "x", _TRANSFORMER, _TOKENS),
    *_blocks("efficientformer.MetaBlock2d", "x", ("mixer", "mlp"), _NCHW),
    *_blocks(
        "efficientformer_v2.EfficientFormerV2Block swiftformer.Block visformer.Block fastvit.AttentionBlock",
        "x", _TRANSFORMER, _NCHW),
    *_blocks("efficientformer_v2.Downsample", "out", ("attention",), _NCHW),  # the stream is a convolution's output
    *_blocks(
        "efficientvit_mit.ResidualBlock lowformer.ResidualBlock cpubone.ResidualBlock",
        "self.shortcut(x)", ("branch",), _NCHW),
    *_blocks("efficientvit_msra.ResidualDrop", "x", ("branch",), _NCHW),
    *_blocks("swiftformer.ConvEncoder", "input", ("conv",), _NCHW),
    *_blocks("swiftformer.LocalRepresentation", "skip", ("conv",), _NCHW),
    *_blocks("nextvit.NextConvBlock", "x", ("conv", "mlp"), _NCHW),
    *_blocks(
        "nextvit.NextTransformerBlock", ("x", "out", "x"), ("attention", "conv", "mlp"), _NCHW,
        width=lambda block: (block.mhsa_out_chs, block.mhca_out_chs, block.out_chs)),
    # in the next two blocks the mixer has no site, because it is folded into one convolution
    *_blocks("fastvit.RepMixerBlock", "x", ("mlp",), _NCHW),
    *_blocks("repvit.RepViTBlock repvit.RepVitDownsample", "identity", ("mlp",), _NCHW),
    *_blocks("shvit.Residual iformer.Residual", "x", ("branch",), _NCHW, unless=_is_folded),
    *_blocks(  # None: an addition that is folded into a depthwise convolution
        "efficientvim.EfficientViMBlock", ("x", "x_prev", "x", "x"), (None, "mixer", None, "mlp"), _NCHW),
    *_blocks("csatv2.Block", "shortcut", ("conv",), _NCHW, width=lambda block: last_width(block.pwconv2)),
    *_blocks("csatv2.TransformerBlock", "shortcut", _TRANSFORMER, _NCHW),
    # --------------------------------------------------------------------------------- convolutions, B C H W
    # The stream is the shortcut: the input of the block, or a convolution of the input if the shape changes.
    # keep="branch": an in-place activation may follow the sum, in this block or at the start of the next block.
    *_blocks(
        """resnetv2.PreActBasic resnetv2.PreActBottleneck cspnet.DarkBlock cspnet.EdgeBlock inception_next.MetaNeXtBlock
        vitamin.MbConvLNBlock lcnetv2.RepDepthwiseSeparable _efficientnet_blocks.ConvBnAct
        _efficientnet_blocks.DepthwiseSeparableConv _efficientnet_blocks.EdgeResidual
        _efficientnet_blocks.UniversalInvertedResidual""",
        "shortcut", ("conv",), _NCHW),
    *_blocks(
        """resnetv2.Bottleneck resnet.BasicBlock resnet.Bottleneck resnest.ResNestBottleneck res2net.Bottle2neck
        sknet.SelectiveKernelBasic sknet.SelectiveKernelBottleneck senet.SEBottleneck senet.SEResNetBottleneck
        senet.SEResNeXtBottleneck senet.SEResNetBlock tresnet.BasicBlock tresnet.Bottleneck dla.DlaBasic
        dla.DlaBottleneck dla.DlaBottle2neck nfnet.NormFreeBlock cspnet.BottleneckBlock""",
        "shortcut", ("conv",), _NCHW, keep="branch"),
    *_blocks("dla.DlaRoot", "x_children[0]", ("conv",), _NCHW, keep="branch"),
    *_blocks("regnet.Bottleneck", "self.downsample(shortcut)", ("conv",), _NCHW, keep="branch"),
    *_blocks("regnet.PreBottleneck", "self.downsample(shortcut)", ("conv",), _NCHW),
    *_blocks(
        "byobnet.BasicBlock byobnet.BottleneckBlock byobnet.DarkBlock byobnet.EdgeBlock",
        "self.shortcut(shortcut)", ("conv",), _NCHW, keep="branch"),
    *_blocks("byobnet.SelfAttnBlock", "self.shortcut(shortcut)", ("attention",), _NCHW, keep="branch"),
    *_blocks("cspnext.CspNextBlock convmixer.Residual", "x", ("conv",), _NCHW),
    *_blocks("convnext.ConvNeXtBlock repghost.RepGhostBottleneck", "self.shortcut(shortcut)", ("conv",), _NCHW),
    *_blocks("starnet.Block", "residual", ("conv",), _NCHW),
    *_blocks("fasternet.MLPBlock", "shortcut", ("conv",), _NCHW, width=lambda block: last_width(block.mlp)),
    *_blocks("hgnet.HighPerfGpuBlock", "identity", ("conv",), _NCHW),
    *_blocks("vovnet.OsaBlock", "output[0]", ("conv",), _NCHW),
    *_blocks(  # the input is added to the first channels of a wider branch output
        "rexnet.LinearBottleneck", "shortcut", ("conv",), _NCHW, width=lambda block: block.in_channels),
    *_blocks(  # the stream is the residual path; the dense path of the block is concatenated
        "dpn.DualPathBlock", "x_s1", ("conv",), _NCHW, width=lambda block: block.num_1x1_c),
    *_blocks(
        "ghostnet.GhostBottleneck ghostnet.GhostBottleneckV3",
        "self.shortcut(shortcut)", ("conv",), _NCHW, width=_shortcut_width),
    *_blocks(
        "inception_resnet_v2.Block35 inception_resnet_v2.Block17 inception_resnet_v2.Block8",
        "x", ("conv",), _NCHW, keep="branch"),
    *_blocks("xception.Block", "skip", ("conv",), _NCHW, keep="branch"),
    *_blocks("xception_aligned.XceptionModule", "skip", ("conv",), _NCHW, keep="branch", method="_residual"),
    *_blocks("xception_aligned.PreXceptionModule", "self.shortcut(skip)", ("conv",), _NCHW, method="_residual"),
    *_blocks(
        "_efficientnet_blocks.InvertedResidual _efficientnet_blocks.CondConvResidual",
        "shortcut", ("conv",), _NCHW, width=_of_bn3),
    *_blocks("_efficientnet_blocks.MobileAttention", ("x", "shortcut"), ("conv", "attention"), _NCHW),
)

# Classes that look residual but have no site, with a description of their additions.
NOT_RESIDUAL: Dict[str, str] = {
    f"timm.{name}": reason
    for reason, names in {
        "parallel branches, folded into one convolution by a re-parameterisation": """
            models.byobnet.RepVggBlock models.byobnet.MobileOneBlock models.efficientvim.PatchMerging
            models.fastvit.MobileOneBlock models.fastvit.RepMixer models.fastvit.ReparamLargeKernelConv
            models.ghostnet.GhostModuleV3 models.repghost.RepGhostModule models.repvit.RepVggDw""",
        "cells of parallel branches, joined by concatenation": """
            models.nasnet.CellStem0 models.nasnet.CellStem1 models.nasnet.FirstCell models.nasnet.NormalCell
            models.nasnet.ReductionCell0 models.nasnet.ReductionCell1 models.pnasnet.Cell models.pnasnet.CellStem0""",
        "inside a branch": """
            layers.bottleneck_attn.PosEmbedRel layers.halo_attn.PosEmbedRel layers.lambda_layer.LambdaLayer
            layers.non_local_attn.BatNonLocalAttn layers.non_local_attn.NonLocalAttn
            models.coat.FactorAttnConvRelPosEnc models.csatv2.PosConv
            models.efficientformer_v2.Attention2d models.efficientformer_v2.Attention2dDownsample
            models.efficientformer_v2.LocalGlobalQuery models.efficientvim.HSMSSD
            models.efficientvit_msra.CascadedGroupAttention models.focalnet.FocalModulation
            models.mvitv2.MultiScaleAttention models.mvitv2.MultiScaleAttentionPoolFirst models.sequencer.LSTM2d
            models.sequencer.RNN2dBase models.swiftformer.EfficientAdditiveAttention
            models.vision_transformer_sam.Attention""",
        "a gate or a norm of a branch": """
            layers.cbam.ChannelAttn layers.cbam.LightChannelAttn layers.cbam.LightSpatialAttn
            layers.coord_attn.CoordAttn layers.coord_attn.EfficientLocalAttn layers.coord_attn.SimpleCoordAttn
            layers.coord_attn.StripAttn layers.evo_norm.EvoNorm2dB0 layers.gather_excite.GatherExcite
            layers.global_context.GlobalContext layers.grn.GlobalResponseNorm layers.squeeze_excite.SEModule
            layers.squeeze_excite.EffectiveSEModule""",
        "a stream of one channel": "models.csatv2.SpatialTransformerBlock",
        "a sum of feature maps of different resolutions": "models.hrnet.HighResolutionModule",
        "the mean of two classifiers": "models.iformer.RepVitClassifier models.repvit.RepVitClassifier",
        "pools for the head, after the last block": """
            layers.adaptive_avgmax_pool.FastAdaptiveAvgMaxPool layers.attention_pool.AttentionPoolLatent
            layers.ml_decoder.TransformerDecoderLayerOptimal layers.other_pool.LsePlus1d layers.other_pool.LsePlus2d""",
    }.items()
    for name in names.split()
}
