"""The networks of Wang et al. (2017): shapes, order of layers, and independent branches."""
import pytest
import timm
import torch
from torch import nn

from timm_ortho import connect, connection_arguments, sites
from timm_ortho.models.skip_networks import ARCHITECTURES

KINDS = ["skipnet_20", "skipnet_20_branch4", "skipnet_20_depthwise"]


def small(name, **kwargs):
    return timm.create_model(name, layers=(1, 1, 1), **kwargs)


@pytest.mark.parametrize("base", ARCHITECTURES)
def test_depth_is_that_of_the_name(base):
    with torch.device("meta"):
        model = timm.create_model(f"{base}_linear")
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(layers) + 1 == int(base.split("_")[1])
    assert len(sites(model)) == (len(layers) - 1) // 2
    assert {f"{base}_ortho", f"{base}_orthog"} <= set(timm.list_models("skipnet*"))


@pytest.mark.parametrize(("name", "widths", "groups"), [
    ("skipnet_20", [16, 16, 32, 64], {1}),
    ("skipnet_20_branch4", [32, 32, 64, 128], {1, 4}),
    ("skipnet_20_depthwise", [64, 64, 128, 256], {1, 64, 128, 256}),
])
def test_widths_and_branches(name, widths, groups):
    model = timm.create_model(f"{name}_ortho", features_only=True).eval()
    features = model(torch.randn(2, 3, 32, 32))
    assert [tuple(f.shape[1:]) for f in features] == [
        (c, 32 // r, 32 // r) for c, r in zip(widths, (1, 1, 2, 4), strict=True)]
    assert model.feature_info.reduction() == [1, 1, 2, 4]
    assert {m.groups for m in model.modules() if isinstance(m, nn.Conv2d)} == groups


@pytest.mark.parametrize("name", KINDS)
def test_order_of_a_branch(name):
    """A branch is BN, convolution, BN, ReLU, convolution. Its convolutions have no bias. No norm follows the blocks."""
    model = small(f"{name}_linear").eval()
    x = torch.randn(2, 3, 16, 16)
    y = nn.functional.conv2d(x, model.stem.conv.weight, padding=1)
    for stage, stride in zip(model.stages, (1, 2, 2), strict=True):
        block = stage.blocks[0]
        normed = y / (1 + block.norm1.eps) ** 0.5  # a BatchNorm with initial statistics
        h = nn.functional.conv2d(normed, block.conv1.weight, stride=stride, padding=1, groups=block.conv1.groups)
        h = (h / (1 + block.norm2.eps) ** 0.5).relu()
        f = nn.functional.conv2d(h, block.conv2.weight, padding=1, groups=block.conv2.groups)
        y = (y if stride == 1 else block.downsample(normed)) + f
    torch.testing.assert_close(model.forward_features(x), y)
    pooled = y.mean((2, 3)) @ model.head.fc.weight.flatten(1).T + model.head.fc.bias
    torch.testing.assert_close(model(x), pooled)
    assert all(m.bias is None for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1))


@pytest.mark.parametrize(("skip", "mixes"), [
    ("identity", False), ("scaled", False), ("idempotent_mr", True), ("idempotent_cmr", True), ("orthogonal_tp", True),
    ("orthogonal_random", True)])
@pytest.mark.parametrize("name", KINDS[1:])
def test_only_skip_transforms_mix_branches(name, skip, mixes):
    model = small(f"{name}_linear", skip=skip).eval()
    x = torch.randn(1, model.num_features // 4, 8, 8, requires_grad=True)  # the stream after the stem
    y = model.stages(x)
    each = y.shape[1] // 4
    (gradient,) = torch.autograd.grad(y[:, :each].square().sum(), x)
    assert bool(gradient[:, x.shape[1] // 4:].any()) is mixes


def test_idempotent_skips_have_the_branches_of_the_network():
    def branches(name, **kwargs):
        return [site.connection.skip.branches for site in sites(small(name, skip="idempotent_cmr", **kwargs))]

    assert branches("skipnet_20_branch4_linear") == [4, 4, 4]
    assert branches("skipnet_20_linear") == [16, 32, 64]
    assert branches("skipnet_20_depthwise_ortho") == [64, 128, 256]
    assert branches("skipnet_20_branch4_linear", skip_branches=8) == [8, 8, 8]
    assert branches("skipnet_20_branch4_linear", skip_rank=0) == [1, 1, 1]
    model = connect(small("skipnet_20_branch4_linear"), "linear", skip="idempotent_cmr")
    assert connection_arguments(model) == {"connection": "linear", "skip": "idempotent_cmr", "skip_branches": 4}
    assert [site.connection.skip.branches for site in sites(model)] == [4, 4, 4]


@pytest.mark.parametrize("name", KINDS)
def test_branches_are_initialised_separately(name):
    torch.manual_seed(0)
    model = timm.create_model(f"{name}_linear")
    for stage in model.stages:
        for conv in (stage.blocks[1].conv1, stage.blocks[1].conv2):
            fan_out = 9 * conv.out_channels // conv.groups
            assert conv.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.08)
