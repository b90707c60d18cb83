"""Skip transforms with every connection: in models, as arguments of variants, and in the rows that `record` saves."""
import pytest
import timm
import torch
from timm.models import resnetv2, vision_transformer as vit

from timm_ortho import CONNECTIONS, SKIPS, connect, create_connection, create_skip, record, register_block, sites

SKIP_NAMES = [name for name in SKIPS if name != "identity"]


def tiny(kind):
    torch.manual_seed(0)
    if kind == "vit":
        return vit.VisionTransformer(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=3)
    plain = dict(conv_layer=timm.layers.create_conv2d) if kind.startswith("plain") else {}  # no weight standardization
    return resnetv2.ResNetV2(
        layers=(1, 2), channels=(32, 64), num_classes=3, stem_chs=16, basic=kind.endswith("basic"),
        norm_layer=timm.layers.BatchNormAct2d, **plain)


def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("connection", "skip"), [*zip(CONNECTIONS, SKIP_NAMES, strict=False), ("global", "scaled")])
def test_projects_against_the_transformed_stream(connection, skip):
    x, f = torch.randn(2, 2, 12, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    transform = create_skip(skip, 12, dim=1, branches=4, count=3)
    module, plain = (create_connection(connection, dim=1, skip=skip).double() for skip in (transform, None))
    torch.testing.assert_close(module(x, f), plain(transform(x), f))


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_gradients_through_skip_and_connection(connection):
    x, f = (torch.randn(3, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    module = create_connection(connection, skip=create_skip("orthogonal_random", 12)).double()
    assert torch.autograd.gradcheck(module, (x, f))


@pytest.mark.parametrize("skip", SKIP_NAMES)
@pytest.mark.parametrize("kind", ["vit", "basic", "bottleneck"])
def test_every_site_of_a_model(kind, skip):
    """Each connection returns P x + f, where P has the width of the stream, and every parameter gets a gradient."""
    model = connect(tiny(kind), "linear", skip=skip)
    all_sites = sites(model)
    checked = []

    def check(site):
        def hook(module, inputs, y):
            x, f = inputs
            p = module.skip.matrix(x.dtype)
            expected = (x.movedim(module.dim, -1) @ p.T).movedim(-1, module.dim) + f
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
            checked.append(site.name)
        return hook

    for site in all_sites:
        site.connection.register_forward_hook(check(site))
    model(images()).square().sum().backward()
    assert checked == [site.name for site in all_sites]
    assert all(p.grad is not None for p in model.parameters())


def test_transforms_of_a_model():
    def transforms(**arguments):
        return [site.connection.skip for site in sites(connect(tiny("basic"), "feature", **arguments))]

    assert [skip.width for skip in transforms(skip="orthogonal_tp")] == [32, 64, 64]
    assert [skip.branches for skip in transforms(skip="idempotent_mr")] == [32, 64, 64]
    assert [skip.rank for skip in transforms(skip="idempotent_cmr", skip_branches=4)] == [24, 48, 48]
    assert [skip.branches for skip in transforms(skip="idempotent_mr", skip_rank=16)] == [2, 4, 4]
    assert [skip.own for skip in transforms(skip="scaled")] == [1 / 3] * 3
    second, third = transforms(skip="orthogonal_random")[1:]
    assert not torch.equal(second.matrix(), third.matrix())
    other = transforms(skip="orthogonal_random", skip_seed=1)[1]
    assert not torch.equal(second.matrix(), other.matrix())
    assert [site.connection.skip.own for site in sites(connect(tiny("vit"), skip="scaled"))] == [1 / 4] * 4
    assert transforms() == [None] * 3


def test_bad_arguments_leave_the_model_as_it_was():
    model = connect(tiny("basic"), "global", skip="orthogonal_tp")
    before = [site.connection for site in sites(model)]
    with pytest.raises(ValueError, match=r"branches must divide .* got branches=64 for 32 channels"):
        connect(model, "feature", skip="idempotent_mr", skip_branches=64)
    assert [site.connection for site in sites(model)] == before


def test_arguments_of_variants():
    model = timm.create_model("test_vit_ortho", num_classes=2, skip="idempotent_cmr", skip_branches=4, img_size=32)
    assert {site.connection.skip.branches for site in sites(model)} == {4}
    with pytest.raises(ValueError, match=r"unknown argument 'skip_branch'.*did you mean 'skip_branches'"):
        timm.create_model("test_vit_ortho", skip_branch=4)


def test_recorded_streams_are_transformed():
    model = connect(tiny("plain basic"), "feature", skip="idempotent_cmr", skip_rank=0)  # P = 0: the stream is zero
    with record(model, every=1) as recorder:
        model(images())
    assert {row["stream"] for row in recorder.rows} == {0.0}
    model = connect(tiny("plain basic"), "linear", skip="orthogonal_tp")
    with record(model, every=1) as recorder:
        model(images())
    assert min(row["stream"] for row in recorder.rows) > 0


def test_compiled_models_use_the_skips_of_another_connect():
    """Compiled code uses the new skips after `connect` is called with another seed."""
    torch._dynamo.reset()
    model, x, results = vit.Block(24, 2).double().eval(), torch.randn(2, 5, 24, dtype=torch.float64), []
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for seed in (0, 1, 0):
        connect(model, "feature", skip="orthogonal_random", skip_seed=seed)
        results.append(compiled(x))
        torch.testing.assert_close(results[-1], model(x))
    assert torch.equal(results[0], results[2])
    assert not torch.allclose(results[0], results[1])


def test_an_unknown_width_is_refused():
    class Block(torch.nn.Module):
        def forward(self, x):
            return x + x.exp()

    register_block(Block, stream="x", kinds=("mlp",))
    with pytest.raises(ValueError, match=r"no convolution, so connect cannot determine the width .*: pass"):
        connect(Block(), skip="orthogonal_tp")
