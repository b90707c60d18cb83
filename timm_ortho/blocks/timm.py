"""The table of timm's residual blocks: which variable is the stream, and where something is added to it.

What is a site: one summand is the stream, that is the block's input or what the block's own shortcut makes of it, and
the other is what the block's module computed from it. Whether an activation follows the sum (``resnet``) or a norm ends
the branch (Swin V2) plays no part: the branch output is what is added, after its norm, LayerScale and drop path. So

  * a LayerScale of 1e-6 or a last norm of zeros makes a small or no branch output at the start, which changes nothing:
    the projection is linear in it, and ``eps`` is added to the stream's square alone;
  * class and register tokens are tokens: the global scope sums over them too, as over every axis but the first, and
    leaves out padding alone;
  * where a stream comes cut into pieces that share the first axis with the batch (``mobilevit``'s patches, ``tnt``'s
    pixels), the global scope is one projection for each piece. Swin, MaxViT, SAM and others cut inside the branch:
    there the stream is whole, and so is the scope;
  * where a module works on the class token alone and hands copies of the others on as its output (``xcit``), they would
    make up the global scope's inner product and take the class token's own stream away: there each token has its own;
  * with one channel nothing is across the stream of a pixel, so there is no site on such a stream.

What is none: sums of parallel branches that a re-parameterisation folds into one convolution (the connection would not
survive it), sums inside a branch (unless they are a transformer's: ``edgenext``'s attention, ``mobilevit``'s blocks),
sums of resolutions, position embeddings, concatenations. ``NOT_RESIDUAL`` names the classes that have nothing else.
"""
from typing import Dict, Tuple

from torch import nn

from .spec import BlockSpec, last_width

__all__ = ["BLOCKS", "NOT_RESIDUAL"]


def _of_mlp(block: nn.Module) -> int:
    """Channels come first where the MLP is made of convolutions."""
    return 1 if any(isinstance(module, nn.Conv2d) for module in block.mlp.modules()) else -1


def _shortcut_width(block: nn.Module) -> int:
    """Of a block whose branch ends in channels from two convolutions: its projected shortcut's, or its input's."""
    if any(True for _ in block.shortcut.parameters()):
        return last_width(block.shortcut)
    return next(module for module in block.modules() if isinstance(module, nn.Conv2d)).in_channels


def _of_bn3(block: nn.Module) -> int:
    """Of a block whose last convolution may be a mixture, of kernels or of experts."""
    return len(block.bn3.weight)


def _tnt_widths(block: nn.Module) -> Tuple[int, ...]:
    pixel, patch = last_width(block.mlp_in), last_width(block.mlp)
    return pixel, pixel, patch, patch, patch


def _is_folded(block: nn.Module) -> bool:
    """A shortcut around one depthwise convolution, which ``fuse`` folds into it."""
    wrapped = block.m if hasattr(block, "m") else block.module
    return type(wrapped).__name__ in ("Conv2dNorm", "ConvNorm")


_TOKENS, _NHWC, _NCHW = -1, -1, 1  # channel axis of B N C, B H W C and B C H W
_TRANSFORMER = ("attention", "mlp")


def _block(name: str, *columns, **more) -> BlockSpec:
    return BlockSpec(f"timm.models.{name}", *columns, **more)


BLOCKS: Tuple[BlockSpec, ...] = (
    # ------------------------------------------------------------------------------------------ tokens, B N C
    _block("vision_transformer.Block", "x", _TRANSFORMER, _TOKENS),
    _block("vision_transformer.ResPostBlock", "x", _TRANSFORMER, _TOKENS),
    _block("vision_transformer.ParallelScalingBlock", "x", ("parallel",), _TOKENS),
    _block("vision_transformer.DiffParallelScalingBlock", "x", ("parallel",), _TOKENS),
    _block("vision_transformer.ParallelThingsBlock", "x", _TRANSFORMER, _TOKENS),
    _block("vision_transformer_relpos.RelPosBlock", "x", _TRANSFORMER, _TOKENS),
    _block("vision_transformer_relpos.ResPostRelPosBlock", "x", _TRANSFORMER, _TOKENS),
    _block("beit.Block", "x", _TRANSFORMER, _TOKENS),
    _block("eva.EvaBlock", "x", _TRANSFORMER, _TOKENS),
    _block("eva.EvaBlockPostNorm", "x", _TRANSFORMER, _TOKENS),
    _block("deepseek_vit.DeepseekVitBlock", "x", _TRANSFORMER, _TOKENS),
    _block("gemma4_vit.Gemma4Block", "residual", _TRANSFORMER, _TOKENS),
    _block("cait.LayerScaleBlock", "x", _TRANSFORMER, _TOKENS),
    _block("cait.LayerScaleBlockClassAttn", "x_cls", _TRANSFORMER, _TOKENS),  # the class token alone
    # the branch of a patch token is that token, in the first sum after the norm
    _block("xcit.ClassAttentionBlock", ("x", "x_res"), _TRANSFORMER, _TOKENS, tokens_apart=True),
    _block("xcit.XCABlock", "x", ("attention", "conv", "mlp"), _TOKENS),
    _block("volo.Outlooker", "x", _TRANSFORMER, _NHWC),
    _block("volo.Transformer", "x", _TRANSFORMER, _NHWC),
    _block("volo.ClassBlock", "cls_embed", _TRANSFORMER, _TOKENS),
    _block("convit.Block", "x", _TRANSFORMER, _TOKENS),
    _block("crossvit.CrossAttentionBlock", "x[:, 0:1, ...]", ("attention",), _TOKENS),
    _block("coat.ConvPosEnc", "feat", ("conv",), _NCHW),
    _block("coat.SerialBlock", "x", _TRANSFORMER, _TOKENS),
    _block(
        "coat.ParallelBlock", ("x2", "x3", "x4", "x2", "x3", "x4"),
        ("attention_2", "attention_3", "attention_4", "mlp_2", "mlp_3", "mlp_4"), _TOKENS),
    _block(
        "tnt.Block", ("pixel_embed", "pixel_embed", "patch_embed[:, 1:]", "patch_embed", "patch_embed"),
        ("attention_pixel", "mlp_pixel", "mixer", "attention", "mlp"), _TOKENS, width=_tnt_widths),
    _block("twins.Block", "x", _TRANSFORMER, _TOKENS),
    _block("twins.PosConv", "cnn_feat_token", ("conv",), _NCHW),
    _block("pvt_v2.Block", "x", _TRANSFORMER, _TOKENS),
    _block(
        "mvitv2.MultiScaleBlock", "x_shortcut", _TRANSFORMER, _TOKENS,
        width=lambda block: (len(block.norm2.weight), last_width(block.mlp))),
    _block("hiera.HieraBlock", "x", _TRANSFORMER, _TOKENS),
    _block("nest.TransformerLayer", "x", _TRANSFORMER, _TOKENS),  # B T N C: all windows T of a sample
    _block("levit.LevitBlock", "x", _TRANSFORMER, _of_mlp),
    _block("levit.LevitDownsample", "x", ("mlp",), _of_mlp),
    _block("mlp_mixer.MixerBlock", "x", ("mixer", "mlp"), _TOKENS),
    _block("mlp_mixer.ResBlock", "x", ("mixer", "mlp"), _TOKENS),
    _block("mlp_mixer.SpatialGatingBlock", "x", ("mlp",), _TOKENS),
    # ---------------------------------------------------------------------------------------- windows, B H W C
    _block("swin_transformer.SwinTransformerBlock", "x", _TRANSFORMER, _NHWC),
    _block("swin_transformer_v2.SwinTransformerV2Block", "x", _TRANSFORMER, _NHWC),
    _block("swin_transformer_v2_cr.SwinTransformerV2CrBlock", "x", _TRANSFORMER, _NHWC),
    _block("vision_transformer_sam.Block", ("shortcut", "x"), _TRANSFORMER, _NHWC),
    _block("hieradet_sam2.MultiScaleBlock", ("shortcut", "x"), _TRANSFORMER, _NHWC),
    _block("gcvit.GlobalContextVitBlock", "x", _TRANSFORMER, _NHWC),
    _block("gcvit.MbConvBlock", "shortcut", ("conv",), _NCHW),
    _block("tiny_vit.TinyVitBlock", ("shortcut", "x"), _TRANSFORMER, _NHWC),
    _block("tiny_vit.MBConv", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("davit.ConvPosEnc", "x", ("conv",), _NCHW),
    _block("davit.SpatialBlock", ("shortcut", "x"), _TRANSFORMER, _TOKENS),
    _block("davit.ChannelBlock", "x", _TRANSFORMER, _TOKENS),
    _block("maxxvit.MbConvBlock", "shortcut", ("conv",), _NCHW),
    _block("maxxvit.ConvNeXtBlock", "shortcut", ("conv",), _NCHW),
    _block("maxxvit.TransformerBlock2d", ("self.shortcut(x)", "x"), _TRANSFORMER, _NCHW),
    _block("maxxvit.PartitionAttention2d", "x", _TRANSFORMER, _NCHW),
    _block("maxxvit.PartitionAttentionCl", "x", _TRANSFORMER, _NHWC),
    _block("maxxvit.ParallelPartitionAttention", "x", _TRANSFORMER, _NHWC),
    _block("sequencer.Sequencer2dBlock", "x", ("mixer", "mlp"), _NHWC),
    _block("mambaout.GatedConvBlock", "shortcut", ("conv",), _NHWC),
    # ------------------------------------------------------------------- transformers on feature maps, B C H W
    _block(
        "metaformer.MetaFormerBlock", ("self.res_scale1(x)", "self.res_scale2(x)"), ("mixer", "mlp"), _of_mlp),
    _block("focalnet.FocalNetBlock", ("shortcut", "x"), ("mixer", "mlp"), _NCHW),
    _block("edgenext.ConvBlock", "shortcut", ("conv",), _NCHW),
    _block(  # a position encoding, which depends on the image's size alone, then tokens, then the feature map
        "edgenext.SplitTransposeBlock", ("x", "x", "shortcut"), (None, "attention", "mlp"), (_TOKENS, _TOKENS, _NCHW)),
    # a call that attends to another map has its own addition, on the other side of an if
    _block("mobilevit.LinearTransformerBlock", (("x", "res"), "x"), _TRANSFORMER, _NCHW),
    _block("efficientformer.MetaBlock1d", "x", _TRANSFORMER, _TOKENS),
    _block("efficientformer.MetaBlock2d", "x", ("mixer", "mlp"), _NCHW),
    _block("efficientformer_v2.EfficientFormerV2Block", "x", _TRANSFORMER, _NCHW),
    _block("efficientformer_v2.Downsample", "out", ("attention",), _NCHW),  # the convolution is the shortcut
    _block("efficientvit_mit.ResidualBlock", "self.shortcut(x)", ("branch",), _NCHW),
    _block("efficientvit_msra.ResidualDrop", "x", ("branch",), _NCHW),
    _block("lowformer.ResidualBlock", "self.shortcut(x)", ("branch",), _NCHW),
    _block("cpubone.ResidualBlock", "self.shortcut(x)", ("branch",), _NCHW),
    _block("swiftformer.ConvEncoder", "input", ("conv",), _NCHW),
    _block("swiftformer.LocalRepresentation", "skip", ("conv",), _NCHW),
    _block("swiftformer.Block", "x", _TRANSFORMER, _NCHW),
    _block("visformer.Block", "x", _TRANSFORMER, _NCHW),
    _block("nextvit.NextConvBlock", "x", ("conv", "mlp"), _NCHW),
    _block(
        "nextvit.NextTransformerBlock", ("x", "out", "x"), ("attention", "conv", "mlp"), _NCHW,
        width=lambda block: (block.mhsa_out_chs, block.mhca_out_chs, block.out_chs)),
    _block("fastvit.RepMixerBlock", "x", ("mlp",), _NCHW),  # its mixer is folded into one convolution
    _block("fastvit.AttentionBlock", "x", _TRANSFORMER, _NCHW),
    _block("repvit.RepViTBlock", "identity", ("mlp",), _NCHW),  # likewise
    _block("repvit.RepVitDownsample", "identity", ("mlp",), _NCHW),
    _block("shvit.Residual", "x", ("branch",), _NCHW, unless=_is_folded),
    _block("iformer.Residual", "x", ("branch",), _NCHW, unless=_is_folded),
    _block(  # its depthwise convolutions are folded
        "efficientvim.EfficientViMBlock", ("x", "x_prev", "x", "x"), (None, "mixer", None, "mlp"), _NCHW),
    _block("csatv2.Block", "shortcut", ("conv",), _NCHW, width=lambda block: last_width(block.pwconv2)),
    _block("csatv2.TransformerBlock", "shortcut", _TRANSFORMER, _NCHW),
    # --------------------------------------------------------------------------------- convolutions, B C H W
    # In these the stream is the shortcut: the block's input or, where the shape changes, its projection.
    # keep: an activation may work in place on the sum, in the block or at the start of the next one.
    _block("resnetv2.PreActBasic", "shortcut", ("conv",), _NCHW),
    _block("resnetv2.PreActBottleneck", "shortcut", ("conv",), _NCHW),
    _block("resnetv2.Bottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("resnet.BasicBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("resnet.Bottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("resnest.ResNestBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("res2net.Bottle2neck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("sknet.SelectiveKernelBasic", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("sknet.SelectiveKernelBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("senet.SEBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("senet.SEResNetBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("senet.SEResNeXtBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("senet.SEResNetBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("tresnet.BasicBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("tresnet.Bottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("dla.DlaBasic", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("dla.DlaBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("dla.DlaBottle2neck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("dla.DlaRoot", "x_children[0]", ("conv",), _NCHW, keep="branch"),
    _block("regnet.Bottleneck", "self.downsample(shortcut)", ("conv",), _NCHW, keep="branch"),
    _block("regnet.PreBottleneck", "self.downsample(shortcut)", ("conv",), _NCHW),
    _block("nfnet.NormFreeBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("byobnet.BasicBlock", "self.shortcut(shortcut)", ("conv",), _NCHW, keep="branch"),
    _block("byobnet.BottleneckBlock", "self.shortcut(shortcut)", ("conv",), _NCHW, keep="branch"),
    _block("byobnet.DarkBlock", "self.shortcut(shortcut)", ("conv",), _NCHW, keep="branch"),
    _block("byobnet.EdgeBlock", "self.shortcut(shortcut)", ("conv",), _NCHW, keep="branch"),
    _block("byobnet.SelfAttnBlock", "self.shortcut(shortcut)", ("attention",), _NCHW, keep="branch"),
    _block("cspnet.BottleneckBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _block("cspnet.DarkBlock", "shortcut", ("conv",), _NCHW),
    _block("cspnet.EdgeBlock", "shortcut", ("conv",), _NCHW),
    _block("cspnext.CspNextBlock", "x", ("conv",), _NCHW),
    _block("convnext.ConvNeXtBlock", "self.shortcut(shortcut)", ("conv",), _NCHW),
    _block("inception_next.MetaNeXtBlock", "shortcut", ("conv",), _NCHW),
    _block("convmixer.Residual", "x", ("conv",), _NCHW),
    _block("starnet.Block", "residual", ("conv",), _NCHW),
    _block("fasternet.MLPBlock", "shortcut", ("conv",), _NCHW, width=lambda block: last_width(block.mlp)),
    _block("hgnet.HighPerfGpuBlock", "identity", ("conv",), _NCHW),
    _block("vovnet.OsaBlock", "output[0]", ("conv",), _NCHW),
    _block("vitamin.MbConvLNBlock", "shortcut", ("conv",), _NCHW),
    _block(  # the channels that the input has
        "rexnet.LinearBottleneck", "shortcut", ("conv",), _NCHW, width=lambda block: block.in_channels),
    _block(  # the residual half of the two paths
        "dpn.DualPathBlock", "x_s1", ("conv",), _NCHW, width=lambda block: block.num_1x1_c),
    _block("ghostnet.GhostBottleneck", "self.shortcut(shortcut)", ("conv",), _NCHW, width=_shortcut_width),
    _block("ghostnet.GhostBottleneckV3", "self.shortcut(shortcut)", ("conv",), _NCHW, width=_shortcut_width),
    _block("repghost.RepGhostBottleneck", "self.shortcut(shortcut)", ("conv",), _NCHW),
    _block("lcnetv2.RepDepthwiseSeparable", "shortcut", ("conv",), _NCHW),
    _block("inception_resnet_v2.Block35", "x", ("conv",), _NCHW, keep="branch"),
    _block("inception_resnet_v2.Block17", "x", ("conv",), _NCHW, keep="branch"),
    _block("inception_resnet_v2.Block8", "x", ("conv",), _NCHW, keep="branch"),
    _block("xception.Block", "skip", ("conv",), _NCHW, keep="branch"),
    _block("xception_aligned.XceptionModule", "skip", ("conv",), _NCHW, keep="branch", method="_residual"),
    _block("xception_aligned.PreXceptionModule", "self.shortcut(skip)", ("conv",), _NCHW, method="_residual"),
    _block("_efficientnet_blocks.ConvBnAct", "shortcut", ("conv",), _NCHW),
    _block("_efficientnet_blocks.DepthwiseSeparableConv", "shortcut", ("conv",), _NCHW),
    _block("_efficientnet_blocks.InvertedResidual", "shortcut", ("conv",), _NCHW, width=_of_bn3),
    _block("_efficientnet_blocks.CondConvResidual", "shortcut", ("conv",), _NCHW, width=_of_bn3),
    _block("_efficientnet_blocks.EdgeResidual", "shortcut", ("conv",), _NCHW),
    _block("_efficientnet_blocks.UniversalInvertedResidual", "shortcut", ("conv",), _NCHW),
    _block("_efficientnet_blocks.MobileAttention", ("x", "shortcut"), ("conv", "attention"), _NCHW),
)

# Classes that add what follows from their input to each other and have no stream, and why.
NOT_RESIDUAL: Dict[str, str] = {
    f"timm.{name}": why
    for why, names in {
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
            models.coat.FactorAttnConvRelPosEnc models.csatv2.PosConv models.cspnext.SPPBottleneck
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
        "one channel, across which nothing is": "models.csatv2.SpatialTransformerBlock",
        "a sum of resolutions": "models.hrnet.HighResolutionModule",
        "the mean of two classifiers": "models.iformer.RepVitClassifier models.repvit.RepVitClassifier",
        "pools for the head, after the last block": """
            layers.adaptive_avgmax_pool.FastAdaptiveAvgMaxPool layers.attention_pool.AttentionPoolLatent
            layers.ml_decoder.TransformerDecoderLayerOptimal layers.other_pool.LsePlus1d layers.other_pool.LsePlus2d""",
    }.items()
    for name in names.split()
}
