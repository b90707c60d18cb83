"""Registered variants: names, configurations, arguments, and bit-identical outputs with linear connections."""
import dataclasses
import json
from functools import partial

import pytest
import timm
import torch
from helpers.host_comparison import compare_with_host, model_on_meta
from timm.layers import GroupNorm1
from timm.models import MetaFormer, MlpMixer, build_model_with_cfg, get_pretrained_cfg, list_models, model_entrypoint

import timm_ortho
from timm_ortho import sites
from timm_ortho.convert import SUFFIXES, base_name
from timm_ortho.lab.planning.recipe import load as load_recipe
from timm_ortho.models import coverage, variants
from timm_ortho.models.coverage import bases
from timm_ortho.models.paper import ARCHITECTURES
from timm_ortho.weights.pretrained import ENTRIES

# The paper's families. For further families, blocks/test_timm.py tests one model per block class.
MODULES = ("vision_transformer", "deit", "resnetv2")
# If a variant has weights, its configuration can differ from timm's, for example in the number of classes. Therefore
# tests/weights tests the configurations of these variants.
WITH_WEIGHTS = {base_name(name.partition(".")[0]) for name in ENTRIES}
ALL_BASES = [name for name in bases() if name not in WITH_WEIGHTS]
BASES = [name for module in MODULES for name in list_models(module=module)
         if get_pretrained_cfg(name) and name not in WITH_WEIGHTS]
VARIANTS = [base + suffix for base in BASES for suffix in ("_ortho", "_orthog")]
COVERED = {base: count for row in coverage.timm_modules() for base, count in row.covered.items()}
PAPER = [base + suffix for base in ARCHITECTURES for suffix in ("_ortho", "_orthog", "_linear")]
SPREAD = [name for name in (
    "test_vit_ortho", "vit_tiny_patch16_224_orthog", "deit_tiny_distilled_patch16_224_ortho", "resnetv2_18_orthog",
    "resnetv2_50_ortho", "vit_small_ortho", "resnetv2_18_cifar_orthog") if base_name(name) not in WITH_WEIGHTS]

# By default, some of SMALLEST run at full width and depth. The marker `slow` adds some more of them. The marker
# `whole` adds tests that build all architectures, and that run architectures of up to RUN_UP_TO parameters.
SMALLEST = [base for base in BASES if base.startswith(("test_", "vit_tiny", "deit_tiny", "resnetv2_18"))]
RUN_UP_TO = 350e6  # 6 GB of memory


def test_all_names_are_registered():
    assert len(BASES) > 150
    assert set(VARIANTS + PAPER) <= set(list_models())
    assert {"vit_base_patch16_224_ortho", "resnetv2_50_orthog", "resnetv2_101_cifar_linear"} <= set(list_models())


def whole_but(quick, slow):
    """Return all architectures as test cases: ``quick`` unmarked, ``slow`` marked slow, the rest marked whole."""
    slow_or_quick = dict.fromkeys(slow, pytest.mark.slow) | dict.fromkeys(quick, ())
    return [pytest.param(base, marks=slow_or_quick.get(base, pytest.mark.whole)) for base in ALL_BASES]


# The tag in the pretrained configuration determines the size of these architectures.
BY_TAG = [base for base in ALL_BASES if base.startswith(("deepseek_vit", "qwen3_vit")) and not base.endswith("m")]


# Architectures with shared or nested blocks, whose sites are easily miscounted.
NESTED = [base for base in ("mobilevit_xxs", "pit_ti_224", "hardcorenas_a", "hrnet_w18_small") if base in ALL_BASES]


@pytest.mark.parametrize("base", whole_but(
    ALL_BASES[::400] + BASES[::120] + BY_TAG[:1] + NESTED[:2], ALL_BASES[::40] + BASES[::20] + BY_TAG + NESTED))
def test_has_timms_parameters(base):
    host = model_on_meta(base).state_dict()
    for suffix, connection in (("_ortho", "FeatureConnection"), ("_orthog", "GlobalConnection")):
        variant = model_on_meta(base + suffix)
        assert [(name, tensor.shape) for name, tensor in variant.state_dict().items()] == [
            (name, tensor.shape) for name, tensor in host.items()]
        assert len(sites(variant)) == COVERED.get(base, len(sites(variant))) > 0
        assert {type(site.connection).__name__ for site in sites(variant)} == {connection}
        assert not variant.pretrained_cfg.get("tag")


def test_the_tag_determines_the_sizes():
    base, tag = "deepseek_vit_412m_enc", "deepseek_v4_flash_vision_exp"
    if base not in bases():
        pytest.skip(f"this timm has no {base}")
    variant = model_on_meta(base + "_ortho", pretrained_cfg={"tag": tag})
    assert variant.aligner.out_features == model_on_meta(f"{base}.{tag}").aligner.out_features
    assert variant.pretrained_cfg["tag"] == tag


@pytest.mark.parametrize("base", whole_but(SMALLEST[::6], SMALLEST[::2]))
def test_linear_is_timms_model_bit_for_bit(base):
    if sum(p.numel() for p in model_on_meta(base).parameters()) > RUN_UP_TO:
        pytest.skip(f"more than {RUN_UP_TO / 1e6:.0f} million parameters")
    compare_with_host(base)


def test_configurations():
    for name in VARIANTS:
        cfg, host = get_pretrained_cfg(name), get_pretrained_cfg(name.rpartition("_ortho")[0])
        assert cfg.architecture == name
        assert not cfg.has_weights, name
        assert not any((cfg.url, cfg.file, cfg.hf_hub_id, cfg.hf_hub_filename, cfg.state_dict, cfg.source,
                        cfg.custom_load)), name
        for field in ("input_size", "mean", "std", "interpolation", "crop_pct", "num_classes", "first_conv",
                      "classifier", "pool_size", "fixed_input_size"):
            assert getattr(cfg, field) == getattr(host, field), (name, field)
        json.dumps(dataclasses.asdict(cfg))


@pytest.mark.parametrize(("name", "recipe"), [("vit_small", "vit_s_imagenet1k"), ("vit_base", "vit_b_cifar10")])
def test_the_papers_vits_are_validated_as_their_recipes_do(name, recipe):
    """Without options, timm's validate.py takes the registered configuration."""
    assert {get_pretrained_cfg(name + suffix).crop_pct for suffix in SUFFIXES} == {load_recipe(recipe)["crop_pct"]}


@pytest.mark.parametrize("name", SPREAD)
def test_weights_of_the_linear_model_are_not_loaded(name):
    assert not timm.is_model_pretrained(name)
    base = base_name(name)
    advice = rf"{name} has no weights of its own, .*timm.create_model\('{base}', pretrained=True\), '(feature|global)'"
    message = advice if timm.is_model_pretrained(base) else "No pretrained weights exist for"
    with pytest.raises(RuntimeError, match=message):
        timm.create_model(name, pretrained=True)


def test_unknown_pretrained_tag():
    with pytest.raises(RuntimeError, match=r"Invalid pretrained tag \(augreg_in21k\) for vit_tiny_patch16_224_ortho"):
        timm.create_model("vit_tiny_patch16_224_ortho.augreg_in21k", pretrained=True)


# ------------------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize("name", SPREAD)
def test_arguments_of_the_base(name):
    size = 32 if "cifar" in name else 64
    kwargs = {"img_size": size} if "resnet" not in name else {}
    model = timm.create_model(name, num_classes=0, in_chans=1, drop_path_rate=0.2, **kwargs).eval()
    x = torch.randn(2, 1, size, size)
    assert model(x).shape == (2, model.num_features)
    assert any(module.drop_prob > 0 for module in model.modules() if isinstance(module, timm.layers.DropPath))
    model.reset_classifier(7)
    y = model(x)
    assert (y[0] if isinstance(y, tuple) else y).shape == (2, 7)


@pytest.mark.parametrize(("name", "arguments"), [
    ("test_vit_ortho", dict(img_size=64)), ("vit_small_ortho", dict(img_size=64, depth=2)),
    ("resnetv2_50_ortho", dict(layers=(1, 2))), ("resnetv2_18_cifar_orthog", dict(layers=(1, 2))),
])
def test_gradient_checkpointing_changes_nothing(name, arguments):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **arguments).train()
    x = torch.randn(2, 3, 64, 64)
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224_ortho", "resnetv2_50_orthog", "resnetv2_18_cifar_ortho"])
def test_features_only(name):
    base = name.rpartition("_ortho")[0]
    base = base + "_linear" if base in ARCHITECTURES else base
    kwargs = {"img_size": 64} if "vit" in name else {}
    torch.manual_seed(0)
    host = timm.create_model(base, features_only=True, **kwargs)
    model = timm.create_model(name, features_only=True, connection="linear", **kwargs)
    model.load_state_dict(host.state_dict())
    assert model.feature_info.channels() == host.feature_info.channels()
    x = torch.randn(2, 3, 64, 64)
    assert sites(model)
    assert all(torch.equal(a, b) for a, b in zip(model.eval()(x), host.eval()(x), strict=True))
    orthogonal = timm.create_model(name, features_only=True, **kwargs).eval()
    orthogonal.load_state_dict(host.state_dict())
    assert not torch.equal(orthogonal(x)[-1], host(x)[-1])


def test_unknown_connection_argument():
    with pytest.raises(ValueError, match=r"unknown argument 'connection_epsilon'.*did you mean 'connection_eps'"):
        timm.create_model("test_vit_ortho", connection_epsilon=1e-6)
    with pytest.raises(TypeError):
        timm.create_model("test_vit_ortho", no_such_argument=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'embed_dims'"):
        timm.create_model("mixer_s32_224_ortho", embed_dim=32, embed_dims=3)


def test_entry_points_are_importable():
    assert model_entrypoint("vit_base_patch16_224_ortho") is timm_ortho.variants.vit_base_patch16_224_ortho


# ------------------------------------------------------------------------------ the papers' own architectures
@pytest.mark.parametrize(("name", "millions"), [
    ("vit_small_linear", 11.4), ("vit_base_linear", 86.5), ("resnetv2_18_cifar_linear", 11.2),
    ("resnetv2_34_cifar_linear", 21.3), ("resnetv2_50_cifar_linear", 23.5), ("resnetv2_101_cifar_linear", 42.6),
])
def test_sizes(name, millions):
    assert sum(p.numel() for p in model_on_meta(name).parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_vit_has_the_papers_layers():
    model = timm.create_model("vit_small_ortho", img_size=32, patch_size=4, num_classes=10)
    assert (model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads) == (384, 6, 6)
    assert model.pos_embed.shape == (1, 64, 384)  # the class token has no position embedding
    assert not model.cls_token.any()
    assert all(block.norm1.weight is None and block.norm2.bias is None for block in model.blocks)
    assert model.norm.weight is not None
    assert {norm.eps for norm in model.modules() if isinstance(norm, torch.nn.LayerNorm)} == {1e-6}
    x = torch.linspace(-3, 3, 50)
    assert torch.equal(model.blocks[0].mlp.act(x), torch.nn.functional.gelu(x, approximate="tanh"))
    assert model.blocks[0].attn.qkv.bias is not None
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnetv2_18_cifar_ortho", "resnetv2_50_cifar_ortho"])
def test_resnetv2_has_the_papers_layers(name):
    model = timm.create_model(name)
    assert model.stem.conv.kernel_size == (3, 3)
    assert model.stem.conv.stride == (1, 1)
    assert len(model.stem) == 2  # no pooling
    assert isinstance(model.norm, torch.nn.Identity)
    assert all(m.bias is not None for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    x = torch.randn(2, 3, 32, 32)
    assert model.forward_features(x).shape[-2:] == (4, 4)
    assert model(x).shape == (2, 10)
    widths = [info["num_chs"] for info in model.feature_info]
    assert widths == ([64, 64, 128, 256, 512] if "18" in name else [64, 256, 512, 1024, 2048])
    features = timm.create_model(name, features_only=True)
    info = features.feature_info
    sizes = [(c, 32 // r, 32 // r) for c, r in zip(info.channels(), info.reduction(), strict=True)]
    assert [tuple(f.shape[1:]) for f in features(x)] == sizes


def test_norm_before_the_classifier():
    model = timm.create_model("resnetv2_18_cifar_linear", head_norm=True).eval()
    assert {"head.norm.weight", "head.norm.bias"} == set(model.state_dict()) - set(
        timm.create_model("resnetv2_18_cifar_linear").state_dict())
    pooled = model.forward_head(model.forward_features(torch.randn(4, 3, 32, 32)), pre_logits=True)
    torch.testing.assert_close(pooled.mean(1), torch.zeros(4), atol=1e-5, rtol=0)
    model.reset_classifier(3)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("arguments", [{}, dict(norm_layer="batchnorm2d")])
def test_the_stem_has_the_requested_activation(arguments):
    model = timm.create_model("resnetv2_18_cifar_ortho", act_layer="silu", **arguments)
    assert not any(isinstance(module, torch.nn.ReLU) for module in model.modules())


def test_weight_init():
    """The initializations of the paper's Table 7 change the weights of convolutions. The biases are zero."""
    def convolution(weight_init):
        model = timm.create_model("resnetv2_18_cifar_ortho", weight_init=weight_init)
        convs = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
        assert all(not m.bias.any() for m in convs)
        return model.stages[1].blocks[1].conv1.weight.flatten(1)  # 128 filters of 128 x 3 x 3

    orthogonal = convolution("orthogonal")
    torch.testing.assert_close(orthogonal @ orthogonal.T, torch.eye(128), atol=1e-4, rtol=0)
    fan_in = fan_out = 128 * 9
    assert convolution("xavier").std().item() == pytest.approx((2 / (fan_in + fan_out)) ** 0.5, rel=0.02)
    assert convolution("kaiming").std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.02)
    with pytest.raises(ValueError, match="unknown weight_init 'xavir', known are 'kaiming', 'xavier', 'orthogonal'"):
        timm.create_model("resnetv2_18_cifar_ortho", weight_init="xavir")


@pytest.mark.parametrize(("one", "other"), [
    (("resnetv2_18_cifar_ortho", {}), ("resnetv2_18_cifar_ortho", dict(weight_init="kaiming"))),
    (("vit_small_linear", dict(depth=1)), ("vit_small_ortho", dict(depth=1, connection="linear"))),
])
def test_equal_initial_weights(one, other):
    states = []
    for name, arguments in (one, other):
        torch.manual_seed(0)
        states.append(timm.create_model(name, **arguments).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


# All arguments of poolformer_s12 except its sizes.
POOLFORMER = dict(
    downsample_norm=None, mlp_act=torch.nn.GELU, mlp_bias=True, norm_layers=GroupNorm1, layer_scale_init_values=1e-5,
    res_scale_init_values=None, use_mlp_head=False)


@pytest.mark.parametrize(("name", "plain", "sizes", "count"), [
    ("mixer_s32_224", MlpMixer, dict(patch_size=8, num_blocks=2, embed_dim=32), 4),
    ("poolformer_s12", partial(MetaFormer, **POOLFORMER), dict(depths=[1, 2], dims=[16, 32]), 6),
])
def test_arguments_override_an_entry_points_sizes(name, plain, sizes, count):
    """timm's entry points refuse these arguments. Arguments that are not overridden keep the entry point's values."""
    with pytest.raises(TypeError, match="multiple values"):
        timm.create_model(name, **sizes)
    torch.manual_seed(0)
    model = timm.create_model(f"{name}_ortho", connection="linear", num_classes=5, **sizes).eval()
    torch.manual_seed(0)
    plain = plain(num_classes=5, **sizes).eval()
    x = torch.randn(2, 3, 224, 224)
    assert torch.equal(model(x), plain(x))
    assert len(sites(model)) == count
    assert model.pretrained_cfg["architecture"] == f"{name}_ortho"


def even(count):
    return odd(count - 1) if count else build_model_with_cfg()


def odd(count):
    return even(count - 1)


def test_functions_of_an_entry_points_module_may_call_each_other():
    assert variants._entered(even, lambda: "built", count=4) == "built"
