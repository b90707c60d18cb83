"""Small models for each block class, and for each Python module of timm.models, that the package covers."""
import dataclasses
import importlib
from functools import cache

import pytest
import timm
import torch
from timm.models import (
    _efficientnet_blocks as efficientnet_blocks,
    convmixer,
    cspnet,
    dla,
    focalnet,
    gcvit,
    maxxvit,
    metaformer,
    mlp_mixer,
    mvitv2,
    nest,
    volo,
    vovnet,
)
from timm.models._registry import _model_to_module
from torch import nn

# Image size and arguments of timm's architectures. Models have fewer and narrower blocks if the arguments allow it.
SMALL = {
    "test_vit": (64, dict(img_size=64)),
    "vit_small_patch16_18x2_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "vit_base_patch16_rpn_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "vit_pwee_patch16_reg1_gap_256": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "vit_dpwee_patch16_reg1_gap_256": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "vit_relpos_small_patch16_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "vit_relpos_small_patch16_rpn_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "beit_base_patch16_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "eva02_tiny_patch14_224": (56, dict(img_size=56, embed_dim=48, depth=1, num_heads=2)),
    "eva02_enormous_patch14_clip_224": (56, dict(img_size=56, embed_dim=48, depth=1, num_heads=2)),
    "deepseek_vit_412m": (56, dict(img_size=56, embed_dim=48, depth=1, num_heads=2)),
    "cait_xxs24_224": (64, dict(img_size=64, depth=1, depth_token_only=1)),
    "xcit_nano_12_p8_224": (64, dict(img_size=64, depth=1, cls_attn_layers=1)),
    "convit_tiny": (64, dict(img_size=64, depth=2, local_up_to_layer=1, embed_dim=48, num_heads=2)),
    "tnt_s_legacy_patch16_224": (64, dict(img_size=64, depth=1, embed_dim=48, inner_dim=12, num_heads_outer=2)),
    "twins_svt_small": (64, dict(
        img_size=64, depths=(1, 1, 1, 1), embed_dims=(16, 32, 32, 48), num_heads=(1, 1, 2, 2))),
    "pvt_v2_b0": (64, dict(depths=(1, 1, 1, 1))),
    "hiera_tiny_224": (64, dict(img_size=64, embed_dim=24, stages=(1, 1, 1, 1))),
    "levit_conv_128s": (64, dict(img_size=64, embed_dim=(32, 48, 64), depth=(1, 1, 1))),
    "swin_tiny_patch4_window7_224": (64, dict(img_size=64, embed_dim=24, depths=(2, 1, 1, 1))),
    "swinv2_cr_tiny_224": (64, dict(img_size=64, embed_dim=24, depths=(2, 1, 1, 1))),
    "samvit_base_patch16_224": (64, dict(
        img_size=64, embed_dim=48, depth=2, num_heads=2, global_attn_indexes=(1,), window_size=2)),
    "davit_tiny": (64, dict(depths=(1, 1, 1, 1), embed_dims=(24, 24, 48, 48), num_heads=(2, 2, 2, 2))),
    "maxvit_pico_rw_256": (32, dict(
        img_size=32, embed_dim=(24, 48), depths=(1, 1), stem_width=16, transformer_window_size=(4, 4),
        transformer_grid_size=(4, 4), transformer_dim_head=12)),
    "test_mambaout": (64, dict()),
    "resnetv2_18": (64, dict(layers=(1, 1, 1, 1))),
    "test_resnet": (64, dict()),
    "resnet18": (64, dict(layers=(1, 1, 1, 1))),
    "test_nfnet": (64, dict()),
    "test_byobnet": (64, dict()),
    "cspnext_tiny": (64, dict()),
    "test_convnext": (64, dict()),
    "inception_next_atto": (64, dict(depths=(1, 1, 1, 1), dims=(16, 32, 48, 64))),
    "starnet_s050": (64, dict()),
    "fasternet_t0": (64, dict()),
    "mobilenetv4_conv_small_035": (64, dict()),
    "ghostnet_050": (64, dict()),
}
LARGER = {  # slow models: they have many different convolutions, over ten million parameters, or large images
    "coat_tiny": (64, dict(img_size=64, serial_depths=(1, 1, 1, 1), parallel_depth=1, embed_dims=(32, 32, 32, 32))),
    "levit_128s": (64, dict(img_size=64, embed_dim=(32, 48, 64), depth=(1, 1, 1))),
    "swinv2_tiny_window8_256": (64, dict(img_size=64, embed_dim=24, depths=(2, 1, 1, 1))),
    "tiny_vit_5m_224": (64, dict(depths=(1, 1, 1, 1), embed_dims=(32, 32, 64, 64), num_heads=(1, 1, 2, 2))),
    "test_coatnet": (64, dict(img_size=64)),
    "maxvit_tiny_pm_256": (64, dict(img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64))),
    "sequencer2d_s": (64, dict(img_size=64, layers=(1, 1, 1, 1), embed_dims=(24, 48, 48, 48))),
    "edgenext_xx_small": (64, dict()),
    "mobilevitv2_050": (64, dict()),
    "efficientformerv2_s0": (64, dict(img_size=64, depths=(1, 1, 2, 2))),
    "efficientvit_b0": (64, dict()),
    "efficientvit_m0": (64, dict(img_size=64)),
    "cpubone_nano": (64, dict()),
    "swiftformer_xs": (64, dict(img_size=64, layers=(2, 1, 1, 1))),
    "visformer_tiny": (64, dict(img_size=64, embed_dim=48, depth=(1, 1, 1))),
    "fastvit_t8": (64, dict(layers=(1, 1, 1, 1), embed_dims=(16, 32, 64, 128))),
    "fastvit_mci0": (64, dict(layers=(1, 1, 1, 1), embed_dims=(16, 32, 64, 128))),
    "repvit_m1": (64, dict(depth=(1, 1, 1, 1), embed_dim=(16, 32, 48, 64))),
    "shvit_s1": (64, dict()),
    "iformer_t": (64, dict()),
    "efficientvim_m1": (64, dict()),
    "resnetv2_50": (64, dict(layers=(2, 1, 1, 1))),
    "res2net50_14w_8s": (64, dict(layers=(2, 1, 1, 1))),
    "skresnet18": (64, dict(layers=(1, 1, 1, 1))),
    "skresnet50": (64, dict(layers=(2, 1, 1, 1))),
    "legacy_seresnet18": (64, dict(layers=(1, 1, 1, 1))),
    "legacy_seresnet50": (64, dict(layers=(2, 1, 1, 1))),
    "legacy_seresnext26_32x4d": (64, dict(layers=(2, 1, 1, 1))),
    "tresnet_m": (64, dict(layers=(1, 1, 2, 1), width_factor=0.5)),
    "regnetx_002": (64, dict()),
    "cs3darknet_focus_s": (64, dict()),
    "hgnetv2_b0": (64, dict()),
    "rexnet_100": (64, dict()),
    "ghostnetv3_050": (64, dict()),
    "repghostnet_050": (64, dict()),
    "lcnetv2_small": (64, dict()),
    "efficientnet_es": (64, dict()),
    "mobilenetv4_hybrid_medium_075": (64, dict()),
    "vit_small_r26_s32_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "crossvit_tiny_240": (240, dict(depth=((1, 1, 0),), embed_dim=(24, 48), num_heads=(2, 2))),
    "efficientformer_l1": (224, dict(depths=(1, 1, 1, 2), embed_dims=(16, 32, 48, 64))),
    "nextvit_small": (64, dict(depths=(1, 1, 5, 1))),
    "resnest14d": (64, dict()),
    "legacy_senet154": (64, dict(layers=(2, 1, 1, 1))),
    "regnetv_040": (64, dict()),
    "eca_botnext26ts_256": (64, dict(img_size=64)),
    "vitamin_small_224": (64, dict(img_size=64)),
    "dpn48b": (64, dict()),
    "inception_resnet_v2": (96, dict()),
    "legacy_xception": (64, dict()),
    "xception41": (64, dict()),
    "xception41p": (64, dict()),
    "efficientnet_cc_b0_4e": (64, dict()),
    "sam2_hiera_tiny": (64, dict(stages=(1, 1, 1, 1))),
    "csatv2": (64, dict()),
    "lowformer_b0": (64, dict()),
}
SHARED_BLOCKS = {  # models of Python modules that use the block classes of another module
    "deit_tiny_distilled_patch16_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "pit_ti_224": (64, dict(img_size=64, depth=(1, 1, 1))),
    "naflexvit_base_patch16_gap": (64, dict(embed_dim=48, depth=1, num_heads=2)),
    "qwen3_vit_88m": (64, dict(embed_dim=48, depth=1, num_heads=2)),
    "gemma4_vit_167m": (96, dict(embed_dim=48, depth=1, num_heads=2, head_dim=24, intermediate_size=96)),
    "hardcorenas_a": (64, dict()),
    "hrnet_w18_small": (64, dict()),
    "mobilenetv5_base": (64, dict(channel_multiplier=0.1)),
}


def csp(name):
    cfg = cspnet.model_cfgs[name]
    stages = dataclasses.replace(cfg.stages, depth=(1, 1, 1, 1), out_chs=(32, 32, 48, 64))
    return cspnet.CspNet(dataclasses.replace(cfg, stages=stages), num_classes=5)


def small_dla(block, **kwargs):
    levels, channels = (1, 1, 1, 2, 1, 1), (16, 32, 32, 64, 64, 64)
    return dla.DLA(levels, channels, block=block, num_classes=5, **kwargs)


def mixer(**kwargs):
    return mlp_mixer.MlpMixer(img_size=64, embed_dim=48, num_blocks=2, num_classes=5, **kwargs)


def around(block, channels):
    """Return a network around one block. Use this function for blocks that no small model contains."""
    return nn.Sequential(nn.Conv2d(3, channels, 4, 4), block, nn.Flatten(2), nn.AdaptiveAvgPool1d(1))


# Functions that make small models. The entry points of most of these architectures fix the sizes. Some entries make
# single blocks that only large models contain.
MADE = {
    "nest": lambda: nest.Nest(
        img_size=64, embed_dims=(24, 48, 96), depths=(1, 1, 1), num_heads=(1, 2, 4), num_classes=5),
    "mixer": mixer,
    "resmlp": lambda: mixer(block_layer=mlp_mixer.ResBlock, mlp_ratio=4, norm_layer=mlp_mixer.Affine),
    "gmlp": lambda: mixer(block_layer=mlp_mixer.SpatialGatingBlock, mlp_ratio=6, mlp_layer=timm.layers.GatedMlp),
    "volo": lambda: volo.VOLO(
        layers=(1, 1, 1, 1), img_size=64, embed_dims=(24, 48, 48, 48), num_heads=(2, 2, 2, 2), stem_hidden_dim=16,
        num_classes=5),
    "gcvit": lambda: gcvit.GlobalContextVit(
        img_size=64, depths=(1, 1, 1, 1), embed_dim=32, num_heads=(1, 2, 4, 8), num_classes=5),
    "poolformer": lambda: metaformer.MetaFormer(
        depths=(1, 1, 1, 1), dims=(16, 32, 48, 64), token_mixers=metaformer.Pooling, num_classes=5),
    "caformer": lambda: metaformer.MetaFormer(
        depths=(1, 1, 1, 1), dims=(32, 32, 96, 96), num_classes=5,
        token_mixers=[metaformer.SepConv] * 2 + [metaformer.Attention] * 2,
        norm_layers=[metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2),
    "focalnet": lambda: focalnet.FocalNet(depths=(1, 1, 1, 1), embed_dim=24, num_classes=5),
    "convmixer": lambda: convmixer.ConvMixer(dim=48, depth=2, num_classes=5),
    "mvitv2": lambda: mvitv2.MultiScaleVit(
        mvitv2.MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=24), img_size=64, num_classes=5),
    "cs3edgenet": lambda: csp("cs3edgenet_x"),
    "cspresnet": lambda: csp("cspresnet50"),
    "coatnext": lambda: timm.create_model(
        "coatnext_nano_rw_224", img_size=64, depths=(2, 1, 1, 1), embed_dim=(64, 64, 64, 64), num_classes=5),
    "dla basic": lambda: small_dla(dla.DlaBasic),
    "dla bottleneck": lambda: small_dla(dla.DlaBottleneck, shortcut_root=True),
    "dla bottle2neck": lambda: small_dla(dla.DlaBottle2neck, cardinality=1, base_width=28),
    "vovnet": lambda: vovnet.VovNet(dict(
        stem_chs=[16, 16, 16], stage_conv_chs=[16, 16, 16, 16], stage_out_chs=[32, 32, 48, 48], layer_per_block=3,
        block_per_stage=[2, 1, 1, 1], residual=True, depthwise=False, attn="ese"), num_classes=5),
    "partition attention, channels first": lambda: around(maxxvit.PartitionAttention2d(
        32, cfg=maxxvit.MaxxVitTransformerCfg(window_size=(8, 8), grid_size=(8, 8))), 32),
    "convolution": lambda: around(efficientnet_blocks.ConvBnAct(8, 8, 3, skip=True), 8),
    "depthwise separable": lambda: around(efficientnet_blocks.DepthwiseSeparableConv(8, 8), 8),
}
OF_MODULES_MADE = dict(  # Python modules whose small model is in MADE
    convmixer="convmixer", dla="dla basic", focalnet="focalnet", gcvit="gcvit", metaformer="poolformer",
    mlp_mixer="mixer", mvitv2="mvitv2", nest="nest", volo="volo", vovnet="vovnet")


def of_modules():
    """Return ``{name of a timm module: name of its small model}``."""
    names = {_model_to_module.get(name): name for name in reversed([*SMALL, *LARGER, *SHARED_BLOCKS])}
    names.pop(None, None)  # models that this release of timm lacks
    return dict(sorted({**names, **OF_MODULES_MADE}.items()))


def build(name):
    if name not in MADE and not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    size, arguments = {**SMALL, **LARGER, **SHARED_BLOCKS}.get(name, (64, {}))
    torch.manual_seed(0)
    model = MADE[name]() if name in MADE else timm.create_model(name, num_classes=5, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():  # the initial output of some branches is zero
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model, size


def step(model, size):
    """Return outputs, gradients and buffers of one training step."""
    torch.manual_seed(1)
    model.zero_grad()
    y = model.train()(torch.randn(2, 3, size, size))
    outputs = y if isinstance(y, tuple) else (y,)
    sum(output.square().sum() for output in outputs).backward()
    return [*outputs, *(p.grad for p in model.parameters()), *(buffer.clone() for buffer in model.buffers())]


@cache
def class_of(name):
    """Return a class by its full name, or None if this timm lacks it."""
    module, _, cls = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), cls, None)
    except ModuleNotFoundError:
        return None


def host(spec):
    return class_of(spec.name)
