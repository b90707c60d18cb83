"""One projection per group of channels: memory, masks, models and exports. test_parity.py compares with float64."""
import copy

import pytest
import timm
import torch
from helpers.kernel_cases import needs_triton
from helpers.messages import not_taken, taking
from helpers.oracle import truth
from torch import nn

import timm_ortho
from timm_ortho import Connection, connect, create_connection, sites
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
@pytest.mark.parametrize(("shape", "dim"), [((2, 5, 12), -1), ((2, 12, 3, 4), 1)], ids=["tokens", "NCHW"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_kernels_compute_groups(shape, dim, memory_format, calls):
    x, f, g = (t if t.dim() < 4 else t.contiguous(memory_format=memory_format) for t in drawn(shape, torch.float32))
    inputs = x.requires_grad_(), f.requires_grad_()
    with use_backend("triton"):
        y = create_connection("feature", dim=dim, eps=EPS, groups=3)(x, f)
        gradients = torch.autograd.grad(y, inputs, g)
    assert calls == {"update": 1, "gradients": 1}
    expected = looped(*(t.double() for t in inputs), 3, dim)
    torch.testing.assert_close(y, expected.float())
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, g.double()))


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


def test_a_changed_output_is_an_error_unless_the_branch_is_kept():
    x, f, g = drawn((2, 5, 12))
    for keep in ("output", "branch"):
        y = create_connection("feature", eps=EPS, groups=3, keep=keep)(x.requires_grad_(), f.requires_grad_())
        y.relu_()
        if keep == "branch":
            expected = torch.autograd.grad(looped(x, f, 3, -1).relu(), (x, f), g)
            torch.testing.assert_close(torch.autograd.grad(y, (x, f), g), expected)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(y, (x, f), g)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised in the exporter
@pytest.mark.parametrize(("shape", "dim"), [((2, 5, 12), -1), ((2, 12, 3, 4), 1)])
def test_onnx(shape, dim):
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    import onnxruntime

    x, f, _ = drawn(shape, torch.float32)
    connection = create_connection("feature", dim=dim, groups=4).eval()
    program = torch.onnx.export(connection, (x, f), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    inputs = dict(zip((node.name for node in session.get_inputs()), (x.numpy(), f.numpy()), strict=True))
    torch.testing.assert_close(torch.from_numpy(session.run(None, inputs)[0]), connection(x, f))


# ------------------------------------------------------------------------------------------------- in a model
class Looped(Connection):
    """A connection that computes the update of ``feature`` with :func:`looped`."""

    def __init__(self, dim=-1, eps=1e-6, groups=1):
        super().__init__(dim, eps)
        self.groups = groups

    def forward(self, x, f, attn_mask=None):
        return looped(self.carried(x), f, self.groups, self.dim, eps=self.eps)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.f = nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, x):
        return x + self.f(self.norm(x))


def own():
    timm_ortho.register_block(Own, stream="x", kinds=("mlp",))
    return nn.Sequential(nn.Flatten(2), nn.LazyLinear(24), Own(), Own(), nn.LazyLinear(5))


MODELS = {
    "ViT": lambda: timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=2, num_heads=6, num_classes=5),
    "Swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, embed_dim=48, depths=(1, 2, 1, 1), num_classes=5),
    "ConvNeXt": lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(24, 24, 48, 48), num_classes=5),
    "own block": own,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_a_model_that_loops_over_groups(name):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64 if name == "Swin" else 32, 64 if name == "Swin" else 32, dtype=torch.float64)
    model = MODELS[name]().double().eval()
    model(x)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    twin = connect(copy.deepcopy(model), Looped, groups=6)
    y, expected = connect(model, "feature", groups=6)(x), twin(x)
    assert {site.connection.groups for site in sites(model)} == {6}
    torch.testing.assert_close(y, expected)
    assert not torch.allclose(y, connect(copy.deepcopy(model), "feature")(x))
    gradients = [torch.autograd.grad(output.square().sum(), list(network.parameters()))
                 for network, output in ((model, y), (twin, expected))]
    torch.testing.assert_close(*gradients)


# ------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(("connection", "groups", "message"), [
    *(("feature", groups, f"groups must be a whole number of at least 1, got {groups!r}")
      for groups in ("heads", 0, 2.0, True)),
    ("global", 6, not_taken("global", "groups")),
])
def test_bad_groups_leave_the_model_unchanged(connection, groups, message):
    model = connect(MODELS["ViT"](), "linear")
    before = [(module, type(module)) for module in model.modules()]
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole message is compared
        connect(model, connection, groups=groups)
    assert str(error.value) == message
    assert [(module, type(module)) for module in model.modules()] == before


def test_groups_that_do_not_divide_the_channels():
    model = connect(MODELS["ViT"](), "feature", groups=5)
    with pytest.raises(ValueError, match="groups=5 does not divide the 48 channels of the stream"):
        model(torch.randn(1, 3, 32, 32))


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


@pytest.mark.parametrize("connection", taking("groups"))
def test_recorded_rows_list_the_cosines_of_groups(connection):
    model = timm.create_model("vit_test_ortho", connection=connection, connection_groups=4, connection_kinds="mlp")
    with timm_ortho.record(model, every=1) as recorder:
        model.train()(torch.randn(2, 3, 8, 8))
    for row in recorder.rows:
        assert ("cosines" in row) == (row["kind"] == "mlp")
        if row["kind"] == "mlp":
            assert len(row["cosines"]) == 4
            assert sum(row["cosines"]) / 4 == pytest.approx(row["cosine"], abs=1e-6)
            assert (row["rho"], row["theta"]) == ((1.0, 0.0) if connection == "hybrid" else (None, None))


def test_show_prints_the_range_over_groups():
    model = timm.create_model("vit_test_ortho", connection_groups=4, connection_kinds="mlp")
    measured = measured_sites(model, torch.randn(2, 3, 8, 8))
    head, attention, mlp, *_ = as_text(measured).splitlines()
    assert head.endswith("cosines of groups")
    assert " to " not in attention
    cosines = measured[1][1].cosines
    assert mlp.endswith(f"{min(cosines):+.3f} to {max(cosines):+.3f}")
