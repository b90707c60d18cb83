"""The table of timm's residual blocks, line by line: on a small model for each, and on what it leaves out."""
import copy
import dataclasses
import importlib.util
import inspect
import pickle
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
    list_modules,
    maxxvit,
    metaformer,
    mlp_mixer,
    mvitv2,
    nest,
    volo,
    vovnet,
)
from torch import nn

from timm_ortho import UnsupportedModelError, connect, families, sites
from timm_ortho.families import FAMILIES, NOT_STREAMS, family_of, is_residual, routed_class
from timm_ortho.models import coverage
from timm_ortho.models._build import on_meta

# timm's architectures, with fewer and narrower blocks where they take arguments for that: image size, arguments
SMALL = {
    "test_vit": (64, dict(img_size=64)),
    "vit_small_patch16_18x2_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "vit_base_patch16_rpn_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "vit_pwee_patch16_reg1_gap_256": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "vit_dpwee_patch16_reg1_gap_256": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "test_vit_relpos": (64, dict(img_size=64)),
    "vit_relpos_small_patch16_rpn_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "beit_base_patch16_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "eva02_tiny_patch14_224": (56, dict(img_size=56, embed_dim=48, depth=1, num_heads=2)),
    "eva02_enormous_patch14_clip_224": (56, dict(img_size=56, embed_dim=48, depth=1, num_heads=2)),
    "deepseek_vit_412m": (56, dict(img_size=56, embed_dim=48, depth=1, num_heads=2)),
    "cait_xxs24_224": (64, dict(img_size=64, depth=1, depth_token_only=1)),
    "xcit_nano_12_p8_224": (64, dict(img_size=64, depth=1, cls_attn_layers=1)),
    "convit_tiny": (64, dict(img_size=64, depth=2, local_up_to_layer=1, embed_dim=48, num_heads=2)),
    "coat_tiny": (64, dict(img_size=64, serial_depths=(1, 1, 1, 1), parallel_depth=1, embed_dims=(32, 32, 32, 32))),
    "tnt_s_legacy_patch16_224": (64, dict(img_size=64, depth=1, embed_dim=48, inner_dim=12, num_heads_outer=2)),
    "twins_svt_small": (64, dict(
        img_size=64, depths=(1, 1, 1, 1), embed_dims=(16, 32, 32, 48), num_heads=(1, 1, 2, 2))),
    "pvt_v2_b0": (64, dict(depths=(1, 1, 1, 1))),
    "hiera_tiny_224": (64, dict(img_size=64, embed_dim=24, stages=(1, 1, 1, 1))),
    "levit_128s": (64, dict(img_size=64, embed_dim=(32, 48, 64), depth=(1, 1, 1))),
    "levit_conv_128s": (64, dict(img_size=64, embed_dim=(32, 48, 64), depth=(1, 1, 1))),
    "swin_tiny_patch4_window7_224": (64, dict(img_size=64, embed_dim=24, depths=(2, 1, 1, 1))),
    "swinv2_tiny_window8_256": (64, dict(img_size=64, embed_dim=24, depths=(2, 1, 1, 1))),
    "swinv2_cr_tiny_224": (64, dict(img_size=64, embed_dim=24, depths=(2, 1, 1, 1))),
    "samvit_base_patch16_224": (64, dict(
        img_size=64, embed_dim=48, depth=2, num_heads=2, global_attn_indexes=(1,), window_size=2)),
    "tiny_vit_5m_224": (64, dict(depths=(1, 1, 1, 1), embed_dims=(32, 32, 64, 64), num_heads=(1, 1, 2, 2))),
    "davit_tiny": (64, dict(depths=(1, 1, 1, 1), embed_dims=(24, 24, 48, 48), num_heads=(2, 2, 2, 2))),
    "test_coatnet": (64, dict(img_size=64)),
    "test_maxvit": (64, dict(img_size=64)),
    "maxvit_tiny_pm_256": (64, dict(img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64))),
    "sequencer2d_s": (64, dict(img_size=64, layers=(1, 1, 1, 1), embed_dims=(24, 48, 48, 48))),
    "test_mambaout": (64, dict()),
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
    "resnetv2_18": (64, dict(layers=(1, 1, 1, 1))),
    "resnetv2_50": (64, dict(layers=(1, 1, 1, 1))),
    "test_resnet": (64, dict()),
    "resnet18": (64, dict(layers=(1, 1, 1, 1))),
    "res2net50_14w_8s": (64, dict(layers=(1, 1, 1, 1))),
    "skresnet18": (64, dict(layers=(1, 1, 1, 1))),
    "skresnet50": (64, dict(layers=(1, 1, 1, 1))),
    "legacy_seresnet18": (64, dict(layers=(1, 1, 1, 1))),
    "legacy_seresnet50": (64, dict(layers=(1, 1, 1, 1))),
    "legacy_seresnext26_32x4d": (64, dict(layers=(1, 1, 1, 1))),
    "tresnet_m": (64, dict(layers=(1, 1, 1, 1), width_factor=0.5)),
    "regnetx_002": (64, dict()),
    "test_nfnet": (64, dict()),
    "test_byobnet": (64, dict()),
    "cs3darknet_focus_s": (64, dict()),
    "cspnext_tiny": (64, dict()),
    "test_convnext": (64, dict()),
    "inception_next_atto": (64, dict(depths=(1, 1, 1, 1), dims=(16, 32, 48, 64))),
    "starnet_s050": (64, dict()),
    "fasternet_t0": (64, dict()),
    "hgnetv2_b0": (64, dict()),
    "rexnet_100": (64, dict()),
    "ghostnet_050": (64, dict()),
    "ghostnetv3_050": (64, dict()),
    "repghostnet_050": (64, dict()),
    "lcnetv2_small": (64, dict()),
    "efficientnet_es": (64, dict()),
    "mobilenetv4_conv_small_035": (64, dict()),
    "mobilenetv4_hybrid_medium_075": (64, dict()),
}
LARGER = {  # ten million parameters and more, or large images
    "vit_small_r26_s32_224": (64, dict(img_size=64, embed_dim=48, depth=1, num_heads=2)),
    "crossvit_tiny_240": (240, dict(depth=((1, 1, 0),), embed_dim=(24, 48), num_heads=(2, 2))),
    "efficientformer_l1": (224, dict(depths=(1, 1, 1, 2), embed_dims=(16, 32, 48, 64))),
    "nextvit_small": (64, dict(depths=(1, 1, 5, 1))),
    "resnest14d": (64, dict()),
    "legacy_senet154": (64, dict(layers=(1, 1, 1, 1))),
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
    """A network of one block, for those that no small model has."""
    return nn.Sequential(nn.Conv2d(3, channels, 4, 4), block, nn.Flatten(2), nn.AdaptiveAvgPool1d(1))


MADE = {  # models whose architectures fix their sizes, and blocks of large ones
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
        "coatnext_nano_rw_224", img_size=64, depths=(1, 1, 1, 1), embed_dim=(64, 64, 64, 64), num_classes=5),
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
MODELS = [*SMALL, *MADE, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)]


def build(name):
    if name not in MADE and not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    size, arguments = {**SMALL, **LARGER}.get(name, (64, {}))
    torch.manual_seed(0)
    model = MADE[name]() if name in MADE else timm.create_model(name, num_classes=5, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():  # no branch that starts at zero
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model, size


def step(model, size):
    """Output, gradients and buffers of one training step."""
    torch.manual_seed(1)
    model.zero_grad()
    y = model.train()(torch.randn(2, 3, size, size))
    outputs = y if isinstance(y, tuple) else (y,)
    sum(output.square().sum() for output in outputs).backward()
    return [*outputs, *(p.grad for p in model.parameters()), *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.parametrize("name", MODELS)
def test_linear_is_timms_model_and_the_others_train(name):
    """Bit for bit; otherwise every site is reached, changes the output, and every parameter keeps its gradient."""
    host, size = build(name)
    model = connect(copy.deepcopy(host), "linear")
    expected = step(host, size)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(step(model, size), expected, strict=True))
    for connection in ("feature", "global"):
        reached = set()
        for site in sites(connect(model, connection)):
            site.connection.register_forward_hook(lambda *_, name=site.name, reached=reached: reached.add(name))
        result = step(model, size)
        assert not torch.equal(result[0], expected[0])
        assert all(tensor is None or torch.isfinite(tensor).all() for tensor in result)
        assert [tensor is None for tensor in result] == [tensor is None for tensor in expected]
        assert reached == {site.name for site in sites(model)}


def test_every_line_of_the_table_has_a_model_here():
    with on_meta():
        models = [build(name)[0] for name in (*SMALL, *LARGER, *MADE) if name in MADE or timm.is_model(name)]
    found = {family for model in models for module in model.modules()
             if (family := family_of(module)) and family.reached(module)}
    not_here = {"timm.models.gemma4_vit.Gemma4Block"}  # it takes patches: the variants' tests have it
    missing = {f"{family.module}.{family.block}" for family in FAMILIES if exists(family) and family not in found}
    assert missing <= not_here


@cache
def exists(family):
    try:
        return hasattr(importlib.import_module(family.module), family.block)
    except ModuleNotFoundError:  # an older timm
        return False


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.routed_name)
def test_every_line_holds_for_the_installed_timm(family):
    if not exists(family):
        pytest.skip(f"timm {timm.__version__} has no {family.module}.{family.block}")
    cls = routed_class(family)
    assert cls is getattr(families, family.routed_name)
    source = inspect.getsource(getattr(cls, family.method, cls.forward))
    assert all(f"self.{attribute}(" in source for attribute in family.sites.values())
    assert len(set(family.sites.values())) == sum(kind is not None for kind in family.kinds)


def test_channel_axes():
    """The axis of each site has as many entries as a stream there has channels, wherever that can be told."""
    def axes(name):
        model, size = build(name)
        connect(model, "feature")
        seen = {}
        for site in sites(model):
            site.connection.register_forward_hook(
                lambda module, inputs, _, name=site.name: seen.update({name: inputs[0].shape[module.dim]}))
        step(model, size)
        return seen

    seen = axes("caformer")
    assert [seen[f"stages.{i}.blocks.0.connection_mixer"] for i in range(4)] == [32, 32, 96, 96]
    assert set(axes("nest").values()) == {24, 48, 96}
    assert set(axes("levit_conv_128s").values()) == set(axes("levit_128s").values()) == {32, 48, 64}
    edgenext = axes("edgenext_xx_small")
    for kind in ("attention", "mlp"):
        assert {size for name, size in edgenext.items() if name.endswith(kind)} == {48, 88, 168}


# ----------------------------------------------------------------------------------------------- what is no site
def test_blocks_without_a_sum_as_configured_stay_as_they_are():
    with on_meta():
        model = connect(timm.create_model("mobilenetv3_small_050"), "feature")
    blocks = [module for module in model.modules() if isinstance(module, efficientnet_blocks.InvertedResidual)]
    with_skip = [block for block in blocks if block.has_skip]
    assert 0 < len(with_skip) < len(blocks)
    assert [site.layer for site in sites(model)] == list(range(len(with_skip)))
    assert all((type(block) is efficientnet_blocks.InvertedResidual) != block.has_skip for block in blocks)


def test_a_block_with_half_of_its_sums():
    model, size = build("visformer_tiny")
    connect(model, "hybrid", start="linear")
    halves = [module for module in model.modules() if type(module) is families.visformer_Block__mlp]
    assert halves
    assert not any(hasattr(half, "connection_attention") for half in halves)
    again = pickle.loads(pickle.dumps(model))
    assert [type(a) for a in again.modules()] == [type(a) for a in model.modules()]
    assert all(torch.equal(a, b) for a, b in zip(step(again, size), step(model, size), strict=True))
    with pytest.raises(AttributeError):
        families.visformer_Block__nothing  # noqa: B018


@pytest.mark.parametrize("name", ["shvit_s1", "repvit_m1", "efficientvim_m1", "fastvit_t8"])
def test_folding_a_model_changes_nothing(name):
    """What a re-parameterisation folds into a convolution is no site, or the folded model would be another."""
    model, size = build(name)
    model = connect(model, "feature").eval()
    step(model, size)  # batch statistics that are not 0 and 1
    x = torch.randn(2, 3, size, size)
    folded = timm.utils.reparameterize_model(model.eval())
    torch.testing.assert_close(folded(x), model(x), rtol=1e-3, atol=1e-3)
    assert len(sites(folded)) == len(sites(model))


def test_what_is_listed_as_no_stream_is_not_taken_for_one():
    """Nor is it in the table, or it would be left out for nothing."""
    assert not set(NOT_STREAMS) & {f"{family.module}.{family.block}" for family in FAMILIES}
    here = []
    for name in NOT_STREAMS:
        module, _, cls = name.rpartition(".")
        home = importlib.import_module(module) if importlib.util.find_spec(module) else None  # an older timm
        here += [getattr(home, cls)] if hasattr(home, cls) else []
    assert len(here) > 30
    assert not any(map(is_residual, here))


@pytest.mark.parametrize(("name", "words"), [
    ("vgg11", "supported residual blocks found: none"), ("repvgg_a0", "supported residual blocks found: none"),
    ("densenet121", "residual blocks found that are not supported: none"),
])
def test_models_without_a_stream(name, words):
    with on_meta():
        model = timm.create_model(name)
    with pytest.raises(UnsupportedModelError, match=words):
        connect(model, "feature")


# ------------------------------------------------------------------------------------------------------ coverage
def test_coverage_is_what_the_registry_has():
    rows = {row.module: row for row in coverage.rows()}
    assert set(rows) == {name for name in list_modules() if coverage.of_timm(name)}
    for row in rows.values():
        assert sorted([*row.covered, *row.left_out]) == sorted(coverage.architectures(row.module))
    assert sum(len(row.covered) for row in rows.values()) > 1000
    assert rows["vgg"].covered == {}
    assert set(rows["vgg"].left_out.values()) == {"no residual additions"}
    assert rows["resnet"].covered["resnet18"] == 8
    assert "re-parameterisation" in rows["byobnet"].left_out["repvgg_a0"]


def test_every_covered_architecture_is_registered():
    names = set(timm.list_models())
    bases = coverage.bases()
    assert len(bases) > 1000
    registered = {base for base in bases if {base + "_ortho", base + "_orthog"} <= names}
    assert set(bases) - registered <= {"vit_betwixt_patch16_gap_256"}  # timm 1.0.16 gives it no configuration
    assert not {name for row in coverage.rows() for name in row.left_out if name + "_ortho" in names}


def test_what_a_newer_timm_adds_is_reported(monkeypatch):
    monkeypatch.setattr(coverage, "load", lambda: {"timm": "1.0.0", "modules": {
        "resnet": {"covered": {"resnet18": 8}, "left_out": {}}}})
    rows = {row.module: row for row in coverage.rows()}
    assert rows["resnet"].left_out["resnet34"] == coverage.UNKNOWN
    assert set(rows["vgg"].left_out.values()) == {coverage.UNKNOWN}
    assert "resnet34" in coverage.bases()  # of a module that is known: there, and an error if it cannot be connected
    assert "vgg11" not in coverage.bases()


@pytest.mark.parametrize("base", ["gemma4_vit_167m", "mobilevit_xxs", "pit_ti_224", "hardcorenas_a", "hrnet_w18_small"])
def test_sites_are_those_that_were_counted(base):
    if not timm.is_model(base):
        pytest.skip(f"timm {timm.__version__} has no {base}")
    with on_meta():
        model = timm.create_model(base + "_ortho")
    counted = next(row.covered[base] for row in coverage.rows() if base in row.covered)
    assert len(sites(model)) == counted > 0
