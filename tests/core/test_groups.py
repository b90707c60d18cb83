"""One projection per group of channels: memory, masks, models and exports. test_parity.py compares with float64."""

import pytest
import timm
import torch
from helpers.kernel_cases import needs_triton
from helpers.oracle import truth

import timm_ortho
from timm_ortho import connect, create_connection, sites
from timm_ortho.diagnostics.dynamics import measure
from timm_ortho.diagnostics.show import as_text, measured_sites
from timm_ortho.functional import use_backend

EPS = 1e-3


def looped(x, f, groups, dim, a=0.0, b=1.0, eps=EPS):
    """Return the oracle's update of each group of channels, concatenated."""
    parts = zip(x.tensor_split(groups, dim), f.tensor_split(groups, dim), strict=True)
    return torch.cat([truth(x, f, a, b, [dim], eps) for x, f in parts], dim)


def drawn(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


# --------------------------------------------------------------------------------------------- the connection
@needs_triton
def test_kernels_compute_groups(calls):
    x, f, _ = (t.requires_grad_() for t in drawn((2, 5, 12), torch.float32))
    with use_backend("triton"):
        create_connection("feature", groups=3)(x, f).sum().backward()
    assert calls == {"update": 1, "gradients": 1}


def test_a_probability_is_drawn_for_all_groups():
    x, f, _ = drawn((2, 5, 12))
    connection = create_connection("feature", eps=EPS, groups=4, prob=0.25)
    torch.manual_seed(0)
    results = [connection(x, f) for _ in range(20)]
    assert {torch.allclose(y, looped(x, f, 4, -1)) for y in results} == {True, False}


def test_padding_does_not_affect_real_tokens():
    x, f, _ = drawn((2, 5, 12))
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]]).view(2, 1, 1, 5)
    connection = create_connection("feature", groups=3)
    y = connection(x, f, attn_mask=mask)
    assert torch.equal(y, connection(x, f))
    x[1, 2:] = torch.nan
    assert torch.equal(connection(x, f, attn_mask=mask)[1, :2], y[1, :2])


# ------------------------------------------------------------------------------------------------- in a model
MODELS = {
    "ViT": lambda: timm.create_model("vit_test_linear"),
    "Swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, embed_dim=48, depths=(1, 2, 1, 1), num_classes=5),
    "ConvNeXt": lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(24, 24, 48, 48), num_classes=5),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_site_of_a_model_loops_over_its_groups(name):
    model = connect(MODELS[name](), "feature", groups=4).double().eval()
    reached = []

    def check(connection, inputs, y):
        torch.testing.assert_close(y, looped(*inputs, 4, connection.dim, eps=connection.eps))
        reached.append(connection)

    for site in sites(model):
        site.connection.register_forward_hook(check)
    model(torch.randn(2, *((3, 8, 8) if name == "ViT" else (3, 64, 64)), dtype=torch.float64))
    assert reached == [site.connection for site in sites(model)] != []


# ------------------------------------------------------------------------------------------------- bad input
def test_groups_must_divide_the_channels():
    with pytest.raises(ValueError, match="groups=5 does not divide the 32 channels of the stream"):
        connect(MODELS["ViT"](), "feature", groups=5)(torch.randn(1, 3, 8, 8))


# ------------------------------------------------------------------------------------------------- diagnostics
def test_diagnostics_measure_each_group():
    torch.manual_seed(0)
    x, f, _ = drawn((2, 12, 3, 4))
    connection = create_connection("feature", dim=1, groups=3)
    values = measure(connection, x + f / 2, x, f)
    groups = [(u.movedim(1, -1), v.movedim(1, -1)) for u, v in zip(x.chunk(3, 1), f.chunk(3, 1), strict=True)]
    cosines = torch.stack([torch.cosine_similarity(u, v, -1).mean() for u, v in groups])
    parallel = sum((((u * v).sum(-1) / u.norm(dim=-1)) ** 2).mean() for u, v in groups)
    branch = f.square().sum(1).mean()
    s = torch.stack([((u * v).sum(-1) / u.square().sum(-1)).mean() for u, v in groups]).mean()
    expected = torch.stack([x.square().sum(1).mean(), parallel, branch - parallel, cosines.mean(), s, s / 2, *cosines])
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def test_rows_and_tables_contain_the_cosines_of_groups():
    model = timm.create_model("vit_test_ortho", connection_groups=4, connection_kinds="mlp")
    with timm_ortho.record(model, every=1) as recorder:
        model.train()(torch.randn(2, 3, 8, 8))
    for row in recorder.rows:
        assert ("cosines" in row) == (row["kind"] == "mlp")
        if row["kind"] == "mlp":
            assert sum(row["cosines"]) / 4 == pytest.approx(row["cosine"], abs=1e-6)
    measured = measured_sites(model, torch.randn(2, 3, 8, 8))
    head, attention, mlp, *_ = as_text(measured).splitlines()
    assert head.endswith("cosines of groups")
    assert " to " not in attention
    cosines = measured[1][1].cosines
    assert mlp.endswith(f"{min(cosines):+.3f} to {max(cosines):+.3f}")
