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
sums of resolutions, position embeddings, concatenations. ``NOT_STREAMS`` names the classes that have nothing else.

To support another block class, add its line to ``FAMILIES`` and its architectures to the tests. Routed classes are
attributes of this module (``families.vision_transformer_Block``), made when they are first asked for, so that pickle
and ``torch.load`` find them in a fresh process. Of a block with a sum that its configuration rules out only the others
are routed, and the name says which: ``families.visformer_Block__mlp``.
"""
import ast
import importlib
import inspect
import textwrap
from functools import cache
from typing import Callable, Dict, NamedTuple, Optional, Set, Tuple, Union

import timm
from timm.models import is_notrace_module, register_notrace_module
from torch import nn

from .routing import Route, Sum

__all__ = ["FAMILIES", "NOT_STREAMS", "Family", "family_of", "is_residual", "routed_class", "written_class"]

TIMM = f"timm {timm.__version__}"


class Family(NamedTuple):
    """One block class of timm.

    Attributes:
        module: timm's module that defines it.
        block: Name of the class.
        stream: What stands for the stream in an addition: one expression, or one for each addition (or several, where
            the sides of an ``if`` write it differently).
        kinds: Kind of each addition to the stream, in the order of the source, no two alike: ``attention``, ``mlp``,
            ``conv``, ``mixer`` (of tokens, by other means), ``parallel`` (attention and MLP at once) or ``branch`` (a
            wrapper around any of them), numbered where there are several. Additions on the two sides of an ``if`` count
            once. None stands for an addition that is no site.
        dim: Channel axis of the stream: one for all additions, one for each, or a function of the block.
        width: Channels of the stream, of a block: one number for all additions or one for each. What its last linear
            layer or convolution puts out, unless the table says otherwise.
        projection: Of a block with one addition, the layer that puts out its stream, where nothing comes between them:
            a transform of the stream can go into its weights. None without such a layer.
        keep: ``"branch"`` where the block changes the sum in place afterwards, so that it cannot be kept for the
            backward pass (see :func:`timm_ortho.functional.residual_update`).
        method: The method with the additions; ``forward`` where a release of timm has no such method.
        unless: Says of a block that its sums stay what they are.
        tokens_apart: Whether the global scope is each token by itself here.
    """

    module: str
    block: str
    stream: Union[str, Tuple[Union[str, Tuple[str, ...]], ...]]
    kinds: Tuple[Optional[str], ...]
    dim: Union[int, Tuple[int, ...], Callable[[nn.Module], int]]
    keep: str = "output"
    method: str = "forward"
    unless: Callable[[nn.Module], bool] = lambda block: False
    tokens_apart: bool = False
    width: Callable[[nn.Module], Union[int, Tuple[int, ...]]] = lambda block: _last_width(block)
    projection: Callable[[nn.Module], Optional[nn.Module]] = lambda block: None

    @property
    def routed_name(self) -> str:
        return f"{self.module.rpartition('.')[2]}_{self.block}"

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

    @property
    def branch_first(self) -> Dict[str, bool]:
        """By kind of site whether the host writes the branch before the stream."""
        return dict(zip(self.kinds, _route(self, self.kinds).branch_first, strict=True))

    def reached(self, block: nn.Module) -> Tuple[str, ...]:
        """The kinds of sites that a block has, as it is configured."""
        if self.unless(block):
            return ()
        reached = _route(self, self.kinds).reached(block)
        return tuple(kind for kind, can_be in zip(self.kinds, reached, strict=True) if kind and can_be)


def _of_mlp(block: nn.Module) -> int:
    """Channels come first where the MLP is made of convolutions."""
    return 1 if any(isinstance(module, nn.Conv2d) for module in block.mlp.modules()) else -1


def _last_width(block: nn.Module) -> int:
    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    last = [module for module in block.modules() if isinstance(module, kinds)][-1]
    return last.out_features if isinstance(last, nn.Linear) else last.out_channels


def _shortcut_width(block: nn.Module) -> int:
    """Of a block whose branch ends in channels from two convolutions: its projected shortcut's, or its input's."""
    if any(True for _ in block.shortcut.parameters()):
        return _last_width(block.shortcut)
    return next(module for module in block.modules() if isinstance(module, nn.Conv2d)).in_channels


def _of_bn3(block: nn.Module) -> int:
    """Of a block whose last convolution may be a mixture, of kernels or of experts."""
    return len(block.bn3.weight)


def _tnt_widths(block: nn.Module) -> Tuple[int, ...]:
    pixel, patch = _last_width(block.mlp_in), _last_width(block.mlp)
    return pixel, pixel, patch, patch, patch


def _preact_projection(block: nn.Module) -> Optional[nn.Module]:
    """The convolution of the shortcut, unless a norm follows it."""
    downsample = block.downsample
    return getattr(downsample, "conv", None) if isinstance(getattr(downsample, "norm", None), nn.Identity) else None


def _is_folded(block: nn.Module) -> bool:
    """A shortcut around one depthwise convolution, which ``fuse`` folds into it."""
    wrapped = block.m if hasattr(block, "m") else block.module
    return type(wrapped).__name__ in ("Conv2dNorm", "ConvNorm")


_TOKENS, _NHWC, _NCHW = -1, -1, 1  # channel axis of B N C, B H W C and B C H W
_TRANSFORMER = ("attention", "mlp")


def _family(name: str, *columns, **more) -> Family:
    module, _, block = name.partition(".")
    return Family(f"timm.models.{module}", block, *columns, **more)


FAMILIES: Tuple[Family, ...] = (
    # ------------------------------------------------------------------------------------------ tokens, B N C
    _family("vision_transformer.Block", "x", _TRANSFORMER, _TOKENS),
    _family("vision_transformer.ResPostBlock", "x", _TRANSFORMER, _TOKENS),
    _family("vision_transformer.ParallelScalingBlock", "x", ("parallel",), _TOKENS),
    _family("vision_transformer.DiffParallelScalingBlock", "x", ("parallel",), _TOKENS),
    _family("vision_transformer.ParallelThingsBlock", "x", _TRANSFORMER, _TOKENS),
    _family("vision_transformer_relpos.RelPosBlock", "x", _TRANSFORMER, _TOKENS),
    _family("vision_transformer_relpos.ResPostRelPosBlock", "x", _TRANSFORMER, _TOKENS),
    _family("beit.Block", "x", _TRANSFORMER, _TOKENS),
    _family("eva.EvaBlock", "x", _TRANSFORMER, _TOKENS),
    _family("eva.EvaBlockPostNorm", "x", _TRANSFORMER, _TOKENS),
    _family("deepseek_vit.DeepseekVitBlock", "x", _TRANSFORMER, _TOKENS),
    _family("gemma4_vit.Gemma4Block", "residual", _TRANSFORMER, _TOKENS),
    _family("cait.LayerScaleBlock", "x", _TRANSFORMER, _TOKENS),
    _family("cait.LayerScaleBlockClassAttn", "x_cls", _TRANSFORMER, _TOKENS),  # the class token alone
    # the branch of a patch token is that token, in the first sum after the norm
    _family("xcit.ClassAttentionBlock", ("x", "x_res"), _TRANSFORMER, _TOKENS, tokens_apart=True),
    _family("xcit.XCABlock", "x", ("attention", "conv", "mlp"), _TOKENS),
    _family("volo.Outlooker", "x", _TRANSFORMER, _NHWC),
    _family("volo.Transformer", "x", _TRANSFORMER, _NHWC),
    _family("volo.ClassBlock", "cls_embed", _TRANSFORMER, _TOKENS),
    _family("convit.Block", "x", _TRANSFORMER, _TOKENS),
    _family("crossvit.CrossAttentionBlock", "x[:, 0:1, ...]", ("attention",), _TOKENS),
    _family("coat.ConvPosEnc", "feat", ("conv",), _NCHW),
    _family("coat.SerialBlock", "x", _TRANSFORMER, _TOKENS),
    _family(
        "coat.ParallelBlock", ("x2", "x3", "x4", "x2", "x3", "x4"),
        ("attention_2", "attention_3", "attention_4", "mlp_2", "mlp_3", "mlp_4"), _TOKENS),
    _family(
        "tnt.Block", ("pixel_embed", "pixel_embed", "patch_embed[:, 1:]", "patch_embed", "patch_embed"),
        ("attention_pixel", "mlp_pixel", "mixer", "attention", "mlp"), _TOKENS, width=_tnt_widths),
    _family("twins.Block", "x", _TRANSFORMER, _TOKENS),
    _family("twins.PosConv", "cnn_feat_token", ("conv",), _NCHW),
    _family("pvt_v2.Block", "x", _TRANSFORMER, _TOKENS),
    _family(
        "mvitv2.MultiScaleBlock", "x_shortcut", _TRANSFORMER, _TOKENS,
        width=lambda block: (len(block.norm2.weight), _last_width(block.mlp))),
    _family("hiera.HieraBlock", "x", _TRANSFORMER, _TOKENS),
    _family("nest.TransformerLayer", "x", _TRANSFORMER, _TOKENS),  # B T N C: all windows T of a sample
    _family("levit.LevitBlock", "x", _TRANSFORMER, _of_mlp),
    _family("levit.LevitDownsample", "x", ("mlp",), _of_mlp),
    _family("mlp_mixer.MixerBlock", "x", ("mixer", "mlp"), _TOKENS),
    _family("mlp_mixer.ResBlock", "x", ("mixer", "mlp"), _TOKENS),
    _family("mlp_mixer.SpatialGatingBlock", "x", ("mlp",), _TOKENS),
    # ---------------------------------------------------------------------------------------- windows, B H W C
    _family("swin_transformer.SwinTransformerBlock", "x", _TRANSFORMER, _NHWC),
    _family("swin_transformer_v2.SwinTransformerV2Block", "x", _TRANSFORMER, _NHWC),
    _family("swin_transformer_v2_cr.SwinTransformerV2CrBlock", "x", _TRANSFORMER, _NHWC),
    _family("vision_transformer_sam.Block", ("shortcut", "x"), _TRANSFORMER, _NHWC),
    _family("hieradet_sam2.MultiScaleBlock", ("shortcut", "x"), _TRANSFORMER, _NHWC),
    _family("gcvit.GlobalContextVitBlock", "x", _TRANSFORMER, _NHWC),
    _family("gcvit.MbConvBlock", "shortcut", ("conv",), _NCHW),
    _family("tiny_vit.TinyVitBlock", ("shortcut", "x"), _TRANSFORMER, _NHWC),
    _family("tiny_vit.MBConv", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("davit.ConvPosEnc", "x", ("conv",), _NCHW),
    _family("davit.SpatialBlock", ("shortcut", "x"), _TRANSFORMER, _TOKENS),
    _family("davit.ChannelBlock", "x", _TRANSFORMER, _TOKENS),
    _family("maxxvit.MbConvBlock", "shortcut", ("conv",), _NCHW),
    _family("maxxvit.ConvNeXtBlock", "shortcut", ("conv",), _NCHW),
    _family("maxxvit.TransformerBlock2d", ("self.shortcut(x)", "x"), _TRANSFORMER, _NCHW),
    _family("maxxvit.PartitionAttention2d", "x", _TRANSFORMER, _NCHW),
    _family("maxxvit.PartitionAttentionCl", "x", _TRANSFORMER, _NHWC),
    _family("maxxvit.ParallelPartitionAttention", "x", _TRANSFORMER, _NHWC),
    _family("sequencer.Sequencer2dBlock", "x", ("mixer", "mlp"), _NHWC),
    _family("mambaout.GatedConvBlock", "shortcut", ("conv",), _NHWC),
    # ------------------------------------------------------------------- transformers on feature maps, B C H W
    _family(
        "metaformer.MetaFormerBlock", ("self.res_scale1(x)", "self.res_scale2(x)"), ("mixer", "mlp"), _of_mlp),
    _family("focalnet.FocalNetBlock", ("shortcut", "x"), ("mixer", "mlp"), _NCHW),
    _family("edgenext.ConvBlock", "shortcut", ("conv",), _NCHW),
    _family(  # a position encoding, which depends on the image's size alone, then tokens, then the feature map
        "edgenext.SplitTransposeBlock", ("x", "x", "shortcut"), (None, "attention", "mlp"), (_TOKENS, _TOKENS, _NCHW)),
    # a call that attends to another map has its own addition, on the other side of an if
    _family("mobilevit.LinearTransformerBlock", (("x", "res"), "x"), _TRANSFORMER, _NCHW),
    _family("efficientformer.MetaBlock1d", "x", _TRANSFORMER, _TOKENS),
    _family("efficientformer.MetaBlock2d", "x", ("mixer", "mlp"), _NCHW),
    _family("efficientformer_v2.EfficientFormerV2Block", "x", _TRANSFORMER, _NCHW),
    _family("efficientformer_v2.Downsample", "out", ("attention",), _NCHW),  # the convolution is the shortcut
    _family("efficientvit_mit.ResidualBlock", "self.shortcut(x)", ("branch",), _NCHW),
    _family("efficientvit_msra.ResidualDrop", "x", ("branch",), _NCHW),
    _family("lowformer.ResidualBlock", "self.shortcut(x)", ("branch",), _NCHW),
    _family("cpubone.ResidualBlock", "self.shortcut(x)", ("branch",), _NCHW),
    _family("swiftformer.ConvEncoder", "input", ("conv",), _NCHW),
    _family("swiftformer.LocalRepresentation", "skip", ("conv",), _NCHW),
    _family("swiftformer.Block", "x", _TRANSFORMER, _NCHW),
    _family("visformer.Block", "x", _TRANSFORMER, _NCHW),
    _family("nextvit.NextConvBlock", "x", ("conv", "mlp"), _NCHW),
    _family(
        "nextvit.NextTransformerBlock", ("x", "out", "x"), ("attention", "conv", "mlp"), _NCHW,
        width=lambda block: (block.mhsa_out_chs, block.mhca_out_chs, block.out_chs)),
    _family("fastvit.RepMixerBlock", "x", ("mlp",), _NCHW),  # its mixer is folded into one convolution
    _family("fastvit.AttentionBlock", "x", _TRANSFORMER, _NCHW),
    _family("repvit.RepViTBlock", "identity", ("mlp",), _NCHW),  # likewise
    _family("repvit.RepVitDownsample", "identity", ("mlp",), _NCHW),
    _family("shvit.Residual", "x", ("branch",), _NCHW, unless=_is_folded),
    _family("iformer.Residual", "x", ("branch",), _NCHW, unless=_is_folded),
    _family(  # its depthwise convolutions are folded
        "efficientvim.EfficientViMBlock", ("x", "x_prev", "x", "x"), (None, "mixer", None, "mlp"), _NCHW),
    _family("csatv2.Block", "shortcut", ("conv",), _NCHW, width=lambda block: _last_width(block.pwconv2)),
    _family("csatv2.TransformerBlock", "shortcut", _TRANSFORMER, _NCHW),
    # --------------------------------------------------------------------------------- convolutions, B C H W
    # In these the stream is the shortcut: the block's input or, where the shape changes, its projection.
    # keep: an activation may work in place on the sum, in the block or at the start of the next one.
    _family("resnetv2.PreActBasic", "shortcut", ("conv",), _NCHW, projection=_preact_projection),
    _family("resnetv2.PreActBottleneck", "shortcut", ("conv",), _NCHW, projection=_preact_projection),
    _family("resnetv2.Bottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("resnet.BasicBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("resnet.Bottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("resnest.ResNestBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("res2net.Bottle2neck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("sknet.SelectiveKernelBasic", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("sknet.SelectiveKernelBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("senet.SEBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("senet.SEResNetBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("senet.SEResNeXtBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("senet.SEResNetBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("tresnet.BasicBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("tresnet.Bottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("dla.DlaBasic", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("dla.DlaBottleneck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("dla.DlaBottle2neck", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("dla.DlaRoot", "x_children[0]", ("conv",), _NCHW, keep="branch"),
    _family("regnet.Bottleneck", "self.downsample(shortcut)", ("conv",), _NCHW, keep="branch"),
    _family("regnet.PreBottleneck", "self.downsample(shortcut)", ("conv",), _NCHW),
    _family("nfnet.NormFreeBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("byobnet.BasicBlock", "self.shortcut(shortcut)", ("conv",), _NCHW, keep="branch"),
    _family("byobnet.BottleneckBlock", "self.shortcut(shortcut)", ("conv",), _NCHW, keep="branch"),
    _family("byobnet.DarkBlock", "self.shortcut(shortcut)", ("conv",), _NCHW, keep="branch"),
    _family("byobnet.EdgeBlock", "self.shortcut(shortcut)", ("conv",), _NCHW, keep="branch"),
    _family("byobnet.SelfAttnBlock", "self.shortcut(shortcut)", ("attention",), _NCHW, keep="branch"),
    _family("cspnet.BottleneckBlock", "shortcut", ("conv",), _NCHW, keep="branch"),
    _family("cspnet.DarkBlock", "shortcut", ("conv",), _NCHW),
    _family("cspnet.EdgeBlock", "shortcut", ("conv",), _NCHW),
    _family("cspnext.CspNextBlock", "x", ("conv",), _NCHW),
    _family("convnext.ConvNeXtBlock", "self.shortcut(shortcut)", ("conv",), _NCHW),
    _family("inception_next.MetaNeXtBlock", "shortcut", ("conv",), _NCHW),
    _family("convmixer.Residual", "x", ("conv",), _NCHW),
    _family("starnet.Block", "residual", ("conv",), _NCHW),
    _family("fasternet.MLPBlock", "shortcut", ("conv",), _NCHW, width=lambda block: _last_width(block.mlp)),
    _family("hgnet.HighPerfGpuBlock", "identity", ("conv",), _NCHW),
    _family("vovnet.OsaBlock", "output[0]", ("conv",), _NCHW),
    _family("vitamin.MbConvLNBlock", "shortcut", ("conv",), _NCHW),
    _family(  # the channels that the input has
        "rexnet.LinearBottleneck", "shortcut", ("conv",), _NCHW, width=lambda block: block.in_channels),
    _family(  # the residual half of the two paths
        "dpn.DualPathBlock", "x_s1", ("conv",), _NCHW, width=lambda block: block.num_1x1_c),
    _family("ghostnet.GhostBottleneck", "self.shortcut(shortcut)", ("conv",), _NCHW, width=_shortcut_width),
    _family("ghostnet.GhostBottleneckV3", "self.shortcut(shortcut)", ("conv",), _NCHW, width=_shortcut_width),
    _family("repghost.RepGhostBottleneck", "self.shortcut(shortcut)", ("conv",), _NCHW),
    _family("lcnetv2.RepDepthwiseSeparable", "shortcut", ("conv",), _NCHW),
    _family("inception_resnet_v2.Block35", "x", ("conv",), _NCHW, keep="branch"),
    _family("inception_resnet_v2.Block17", "x", ("conv",), _NCHW, keep="branch"),
    _family("inception_resnet_v2.Block8", "x", ("conv",), _NCHW, keep="branch"),
    _family("xception.Block", "skip", ("conv",), _NCHW, keep="branch"),
    _family("xception_aligned.XceptionModule", "skip", ("conv",), _NCHW, keep="branch", method="_residual"),
    _family("xception_aligned.PreXceptionModule", "self.shortcut(skip)", ("conv",), _NCHW, method="_residual"),
    _family("_efficientnet_blocks.ConvBnAct", "shortcut", ("conv",), _NCHW),
    _family("_efficientnet_blocks.DepthwiseSeparableConv", "shortcut", ("conv",), _NCHW),
    _family("_efficientnet_blocks.InvertedResidual", "shortcut", ("conv",), _NCHW, width=_of_bn3),
    _family("_efficientnet_blocks.CondConvResidual", "shortcut", ("conv",), _NCHW, width=_of_bn3),
    _family("_efficientnet_blocks.EdgeResidual", "shortcut", ("conv",), _NCHW),
    _family("_efficientnet_blocks.UniversalInvertedResidual", "shortcut", ("conv",), _NCHW),
    _family("_efficientnet_blocks.MobileAttention", ("x", "shortcut"), ("conv", "attention"), _NCHW),
)

# Classes that add what follows from their input to each other and have no stream, and why.
NOT_STREAMS: Dict[str, str] = {
    f"timm.{module}.{cls}": why
    for why, modules in {
        "parallel branches, folded into one convolution by a re-parameterisation": {
            "models.byobnet": "RepVggBlock MobileOneBlock",
            "models.efficientvim": "PatchMerging",
            "models.fastvit": "MobileOneBlock RepConditionalPosEnc RepMixer ReparamLargeKernelConv",
            "models.ghostnet": "GhostModuleV3",
            "models.repghost": "RepGhostModule",
            "models.repvit": "RepVggDw",
        },
        "cells of parallel branches, joined by concatenation": {
            "models.nasnet": "CellStem0 CellStem1 FirstCell NormalCell ReductionCell0 ReductionCell1",
            "models.pnasnet": "Cell CellStem0",
        },
        "inside a branch": {
            "layers.bottleneck_attn": "BottleneckAttn PosEmbedRel",
            "layers.halo_attn": "HaloAttn PosEmbedRel",
            "layers.lambda_layer": "LambdaLayer",
            "layers.non_local_attn": "BatNonLocalAttn NonLocalAttn",
            "models.coat": "FactorAttnConvRelPosEnc",
            "models.csatv2": "PosConv",
            "models.cspnext": "SPPBottleneck",
            "models.efficientformer_v2": "Attention2d Attention2dDownsample LocalGlobalQuery",
            "models.efficientvim": "HSMSSD",
            "models.efficientvit_msra": "CascadedGroupAttention",
            "models.focalnet": "FocalModulation",
            "models.mvitv2": "MultiScaleAttention MultiScaleAttentionPoolFirst",
            "models.sequencer": "LSTM2d RNN2dBase",
            "models.swiftformer": "EfficientAdditiveAttention",
            "models.vision_transformer_sam": "Attention",
        },
        "a gate or a norm of a branch": {
            "layers.cbam": "ChannelAttn LightChannelAttn LightSpatialAttn",
            "layers.coord_attn": "CoordAttn EfficientLocalAttn SimpleCoordAttn StripAttn",
            "layers.evo_norm": "EvoNorm2dB0",
            "layers.gather_excite": "GatherExcite",
            "layers.global_context": "GlobalContext",
            "layers.grn": "GlobalResponseNorm",
            "layers.squeeze_excite": "SEModule EffectiveSEModule",
        },
        "one channel, across which nothing is": {"models.csatv2": "SpatialTransformerBlock"},
        "a position embedding": {"models.gemma4_vit": "Gemma4PatchEmbed"},
        "a sum of resolutions": {"models.hrnet": "HighResolutionModule"},
        "the mean of two classifiers": {"models.iformer": "RepVitClassifier", "models.repvit": "RepVitClassifier"},
        "pools for the head, after the last block": {
            "layers.adaptive_avgmax_pool": "FastAdaptiveAvgMaxPool",
            "layers.attention_pool": "AttentionPoolLatent",
            "layers.ml_decoder": "TransformerDecoderLayerOptimal",
            "layers.other_pool": "LsePlus1d LsePlus2d",
        },
    }.items()
    for module, classes in modules.items()
    for cls in classes.split()
}

_BY_CLASS = {f"{family.module}.{family.block}": family for family in FAMILIES}
_BY_ROUTED_NAME = {family.routed_name: family for family in FAMILIES}


def family_of(module: nn.Module) -> Optional[Family]:
    """The table's line for a block, converted or not; None for any other module.

    Subclasses of a block class are other classes: their ``forward`` may be anything.
    """
    cls = written_class(module)
    if cls.__module__ == __name__:
        return _BY_ROUTED_NAME.get(cls.__name__.partition("__")[0])
    return _BY_CLASS.get(f"{cls.__module__}.{cls.__qualname__}")


def written_class(module: nn.Module) -> type:
    """A module's class as its author wrote it; ``fully_shard`` and parametrizations put a subclass in its place."""
    cls = type(module)
    while cls.__module__.startswith("torch.") and "forward" not in vars(cls):
        cls = cls.__bases__[-1]
    return cls


def routed_class(family: Family, kinds: Optional[Tuple[str, ...]] = None) -> type:
    """The routed subclass of a family's block class.

    Args:
        family: Line of the table.
        kinds: The sites that are routed, as :meth:`Family.reached` has them; None for all.

    Raises:
        timm_ortho.routing.RoutingError: The installed timm's block has another number of additions.
    """
    return _routed_class(family, tuple(family.sites) if kinds is None else kinds)


@cache  # one class of a name: pickle compares
def _routed_class(family: Family, kinds: Tuple[str, ...]) -> type:
    name = family.routed_name
    if kinds != tuple(family.sites):
        name += "__" + "_and_".join(kinds)
    found = _route(family, kinds)
    routed = found.subclass(name=name, module=__name__)
    return register_notrace_module(routed) if is_notrace_module(found.block) else routed


@cache
def _route(family: Family, kinds: Tuple[Optional[str], ...]) -> Route:
    """The additions of a family's block class in the installed timm, of which those of some kinds are routed."""
    block = getattr(importlib.import_module(family.module), family.block)
    streams = family.stream if isinstance(family.stream, tuple) else (family.stream,) * len(family.kinds)
    sums = [
        Sum(stream, f"connection_{kind}" if kind in kinds and kind else None)
        for stream, kind in zip(streams, family.kinds, strict=True)
    ]
    method = family.method if hasattr(block, family.method) else "forward"
    return Route(block, sums, method=method, mask="attn_mask", host=TIMM)


def __getattr__(name: str) -> type:
    family = _BY_ROUTED_NAME.get(name.partition("__")[0])
    kinds = tuple(name.partition("__")[2].split("_and_")) if "__" in name else None
    if family is None or not set(kinds or ()) <= set(family.sites):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return routed_class(family, kinds)


@cache
def is_residual(cls: type) -> bool:
    """Whether a class that is not in the table looks like a residual block, from the source of its ``forward``.

    That is: two things that both follow from the input are added, by ``+``, ``torch.add`` or the tensor's own methods.
    It errs towards yes, so that no model is converted by half: what looks residual and is not belongs in
    ``NOT_STREAMS``. Sums in other methods, of arguments or by other means (``sum``) are not seen.
    """
    if f"{cls.__module__}.{cls.__qualname__}" in NOT_STREAMS:
        return False
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(cls.forward))).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError):  # built in, generated, or without a forward
        return False
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return False
    derived = _derived(function, function.args.args[1].arg)
    return any(_adds(node, derived) for node in ast.walk(function))


_ADDING = ("add", "add_", "add_relu")
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)


def _derived(function: ast.FunctionDef, source: str) -> Set[str]:
    """Variables that are computed from one argument, shapes and sizes of it left out."""
    names: Set[str] = set()
    grown = {source}
    while grown - names:
        names |= grown
        for node in ast.walk(function):
            if isinstance(node, _ASSIGNMENTS) and node.value is not None and _mentions(node.value, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                grown |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def _adds(node: ast.AST, derived: Set[str]) -> bool:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return _mentions(node.target, derived) and _mentions(node.value, derived)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _mentions(node.left, derived) and _mentions(node.right, derived)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
        summands = [node.func.value, *node.args[:2]]  # of torch.add the first mentions nothing
        return sum(_mentions(summand, derived) for summand in summands) >= 2
    return False


def _mentions(node: ast.AST, names: Set[str]) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "size", "ndim", "device", "dtype"):
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    return any(_mentions(child, names) for child in ast.iter_child_nodes(node))
