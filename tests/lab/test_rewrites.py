"""Test that absorb and diagonalise rewrite the skip transforms of a model without changing its outputs."""
import pytest
import timm
import torch
from helpers.half_connection import HalfConnection
from timm.models import resnetv2, vision_transformer as vit
from torch import nn

from timm_ortho import CONNECTIONS, connect, create_connection, create_skip, sites
from timm_ortho.lab.rewrites import ChangeOfBasis, Coordinates, SkipRewriteError, absorb, diagonalise

MODELS = {
    "vit": lambda: vit.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=3, init_values=0.5, pre_norm=True),
    "basic": lambda: resnet(basic=True, layers=(2, 1)),
    "bottleneck": lambda: resnet(layers=(2, 2)),
    "single": lambda: timm.create_model("skipnet_20_linear", layers=(2, 2, 1)),
    "branch4": lambda: timm.create_model("skipnet_20_branch4_linear", layers=(2, 2, 1)),
    "depthwise": lambda: timm.create_model("skipnet_20_depthwise_linear", layers=(1, 2, 1), channels=(8, 16, 32)),
}
CASES = [(kind, "linear") for kind in MODELS] + [*zip(("vit", "basic", "branch4") * 2, (
    name for name in CONNECTIONS if name != "linear"), strict=False)]


def resnet(**kwargs):
    return resnetv2.ResNetV2(
        channels=(32, 64), num_classes=3, stem_chs=16, norm_layer=timm.layers.BatchNormAct2d, **kwargs)


def build(kind, connection="linear", **kwargs):
    """Return a model in float64 with perturbed parameters and running statistics."""
    torch.manual_seed(0)
    model = connect(MODELS[kind](), connection, **kwargs).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.add_(0.3 * torch.rand_like(buffer))
    return model


def images():
    return torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def changes(model):
    return [module for module in model.modules() if type(module) is ChangeOfBasis]


@pytest.mark.parametrize("skip", ["orthogonal_tp", "orthogonal_random"])
@pytest.mark.parametrize(("kind", "connection"), CASES)
def test_absorb(kind, connection, skip):
    model = build(kind, connection, skip=skip)
    expected = model(images())
    other = absorb(model)
    torch.testing.assert_close(other(images()), expected, rtol=0, atol=1e-5)
    assert all(site.connection.skip is None for site in sites(other))
    assert len(changes(other)) > len(sites(other))
    assert not changes(model)
    assert torch.equal(model(images()), expected)
    learned = any(list(site.connection.parameters()) for site in sites(other))
    without = other if learned else connect(other, connection)  # connect resets learned weights
    torch.testing.assert_close(without(images()), expected, rtol=0, atol=1e-5)  # absorb has removed all skips
    assert (connect(model, connection)(images()) - expected).abs().max() > 1e-3  # skips affect the original model


@pytest.mark.parametrize("skip", ["idempotent_mr", "idempotent_cmr"])
@pytest.mark.parametrize(("kind", "connection"), CASES)
def test_diagonalise(kind, connection, skip):
    model = build(kind, connection, skip=skip, skip_branches=4)
    expected = model(images())
    other = diagonalise(model)
    torch.testing.assert_close(other(images()), expected, rtol=0, atol=1e-5)
    for site, before in zip(sites(other), sites(model), strict=True):
        skip = site.connection.skip
        assert isinstance(skip, Coordinates)
        assert set(skip.matrix.tolist()) <= {0.0, 1.0}
        assert skip.matrix.sum().item() == before.connection.skip.rank
    assert (connect(model, connection)(images()) - expected).abs().max() > 1e-3


def test_theorem_1_for_a_single_q():
    """Eq. 12 and 13 of Wang et al. (2017): with L additions, the rewritten stream starts as Q^L x_1 instead of x_1.

    The branch of addition i, F_i with i from 1 to L, is rewritten as Q^(L-i) F_i Q^(i-L-1).
    """
    model = build("vit", skip="orthogonal_tp")
    q, count = sites(model)[0].connection.skip.matrix(), len(sites(model))
    other = absorb(model)
    torch.testing.assert_close(other.norm_pre[1].matrix, torch.linalg.matrix_power(q, count))
    for index, block in enumerate(other.blocks):
        for number, norm, end in ((2 * index + 1, block.norm1, block.drop_path1), (
                2 * index + 2, block.norm2, block.drop_path2)):
            before = torch.linalg.matrix_power(q.T, count + 1 - number)
            torch.testing.assert_close(norm[0].matrix, before)
            if number < count:
                torch.testing.assert_close(end[1].matrix, torch.linalg.matrix_power(q, count - number))
            else:
                assert isinstance(end, nn.Identity)


def test_a_rewritten_model_saves_and_loads():
    model = build("branch4", skip="orthogonal_random")
    other, fresh = absorb(model), absorb(build("branch4", skip="orthogonal_random", skip_seed=1))
    fresh.load_state_dict(other.state_dict())
    torch.testing.assert_close(fresh(images()), other(images()))


def test_a_rewritten_model_trains():
    other = diagonalise(build("basic", skip="idempotent_cmr", skip_branches=2)).train()
    other(images()).square().sum().backward()
    assert all(p.grad is not None for p in other.parameters())


def with_two_skips():
    model = build("basic", skip="idempotent_mr")
    sites(model)[1].connection.skip = create_skip("idempotent_cmr", 32, dim=1)
    return model


class Written(nn.Module):
    """A model that creates a connection in its own code."""

    def __init__(self):
        super().__init__()
        self.stem = self.norm = nn.Identity()
        self.blocks = nn.ModuleDict({"add": create_connection("linear")})


@pytest.mark.parametrize(("rewrite", "model", "words"), [
    (absorb, lambda: build("basic", skip="scaled"),
     ["absorb requires orthogonal skips", "'scaled'", "stages.0.blocks.0"]),
    (absorb, lambda: build("basic", skip="idempotent_mr"), ["absorb requires orthogonal skips", "'idempotent_mr'"]),
    (diagonalise, lambda: build("basic", skip="orthogonal_tp"), ["requires idempotent skips", "'orthogonal_tp'"]),
    (diagonalise, with_two_skips, ["the same skip at all sites of a width, got different skips after stages.0.blocks"]),
    (absorb, MODELS["vit"], ["cannot absorb VisionTransformer: it has no connections", "timm_ortho.connect"]),
    (absorb, lambda: connect(resnet(layers=(1, 1), preact=False), "linear", skip="orthogonal_tp"),
     ["cannot absorb ResNetV2", "resnetv2.Bottleneck", "normalise, gate or activate", "resnetv2.PreActBasic"]),
    (absorb, lambda: connect(vit.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=2, block_fn=vit.ParallelScalingBlock), "linear"),
     ["cannot absorb VisionTransformer", "ParallelScalingBlock"]),
    (absorb, lambda: connect(nn.Sequential(MODELS["vit"]()), "linear"),
     ["cannot absorb Sequential", "only timm's VisionTransformer and ResNetV2"]),
    (absorb, lambda: build("vit", "feature", groups=4, skip="orthogonal_tp"),
     ["cannot absorb VisionTransformer", "blocks.0.connection_attention, a FeatureConnection with groups=4; use a"]),
    (diagonalise, lambda: build("basic", "hybrid", groups=2), ["cannot diagonalise ResNetV2", "groups=2"]),
    (absorb, lambda: build("vit", HalfConnection, skip="orthogonal_tp", kinds="mlp"),
     ["blocks.0.connection_mlp, a HalfConnection with groups=1; use a connection of timm_ortho with groups=1"]),
    (absorb, lambda: Written(), ["cannot absorb Written: blocks.add is in a ModuleDict"]),
])
def test_refused(rewrite, model, words):
    with pytest.raises(SkipRewriteError) as error:
        rewrite(model())
    assert all(word in str(error.value) for word in words), error.value
