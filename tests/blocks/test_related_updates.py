"""Sections of docs/own_blocks.md: comparison of the updates with formulas in float64, and a few training steps."""
import copy
import runpy
from functools import partial

import pytest
import timm
import torch
from helpers.pages import blocks, section
from timm.optim import create_optimizer_v2
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import timm_ortho
from timm_ortho import sites

pytestmark = pytest.mark.usefixtures("restored")
NAMES = ("rezero", "gated", "one_sided", "rotation", "delta")
EPS = 1e-6


@pytest.fixture
def page(request, tmp_path):
    """Run the examples of a section of the page, by default "Related updates", and return their global variables."""
    code = blocks(section("own_blocks.md", getattr(request, "param", "Related updates")))
    (tmp_path / "related.py").write_text("\n".join(["import timm", "import timm_ortho", "import torch", *code]))
    return runpy.run_path(str(tmp_path / "related.py"))


def rezero(c, x, f, s, orthogonal):
    c.alpha.data.fill_(0.4)
    return x + 0.4 * orthogonal


def gated(c, x, f, s, orthogonal):
    weights = torch.sigmoid(torch.einsum("oi,bi...->bo...", c.gate.weight, x) + c.gate.bias[:, None, None])
    return x + weights[:, :1] * s * x + weights[:, 1:] * orthogonal


def one_sided(c, x, f, s, orthogonal):
    assert (s > 0.1).any()
    assert (s < 0.1).any()
    return x + torch.where(s < 0.1, s, 0.1) * x + orthogonal


def rotation(c, x, f, s, orthogonal):
    length, step = (torch.sqrt((t * t).sum(1, keepdim=True)) for t in (x, orthogonal))
    y = x * torch.cos(step / length) + length * orthogonal / step * torch.sin(step / length)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1), rtol=1e-4, atol=1e-4)  # not exact because of eps
    return y


def delta(c, x, f, s, orthogonal):
    out = torch.einsum("oi,bi...->bo...", c.gate_and_value.weight, x) + c.gate_and_value.bias[:, None, None]
    k = f / torch.sqrt((f * f).sum(1, keepdim=True))
    return x + 2 / (1 + torch.exp(-out[:, :1])) * (out[:, 1:] - (k * x).sum(1, keepdim=True)) * k


@pytest.mark.parametrize("formula", [rezero, gated, one_sided, rotation, delta], ids=NAMES)
def test_formulas(page, formula):
    x, f = torch.randn(2, 6, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(-1)
    transform = timm_ortho.create_skip("orthogonal_tp", 6, dim=1)
    connection = timm_ortho.create_connection(formula.__name__, dim=1, skip=transform, dtype=torch.float64)
    connection(x, f)  # initializes the lazy layers
    stream, x = x, transform(x)
    s = (x * f).sum(1, keepdim=True) / ((x * x).sum(1, keepdim=True) + EPS)
    expected = formula(connection, x, f, s, f - s * x)
    torch.testing.assert_close(connection(stream, f), expected)


def exclusive(attention, x, gate=1.0):
    """Return the output of exclusive self-attention with the weights of an attention module, in float64."""
    q, k, v = attention.heads(x)
    k, v = (t.repeat_interleave(len(q[0]) // len(t[0]), 1) for t in (k, v))
    z = scaled_dot_product_attention(q, k, v)
    z = z - gate * (z * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
    return attention.proj(z.transpose(1, 2).flatten(2))


def test_exclusive_attention(page):
    class Grouped(page["ExclusiveAttention"]):
        def heads(self, x):
            q, k, v = super().heads(x)
            return q, k[:, :1], v[:, :1]

    model, x = page["exclusive"].double(), torch.randn(2, 5, 32, dtype=torch.float64)
    assert {site.kind for site in sites(model) if site.connection.name == "feature"} == {"value"}
    assert [site.layer for site in sites(page["late"]) if site.connection.name == "feature"] == [2, 3]
    attention = model.blocks[0].attn
    torch.testing.assert_close(attention(x), exclusive(attention, x), rtol=1e-3, atol=1e-4)
    attention.__class__ = Grouped
    timm_ortho.connect(model, "feature", kinds="value")
    torch.testing.assert_close(attention(x), exclusive(attention, x), rtol=1e-3, atol=1e-4)
    gates = [site.connection.gate for site in sites(page["gated"]) if site.kind == "value"]
    assert [gate.item() for gate in gates] == [0.0] * 4
    gates[0].data.fill_(0.5)
    attention = page["gated"].blocks[0].attn.double()
    expected = exclusive(attention, x, gate=torch.tensor(0.5).double().tanh())
    torch.testing.assert_close(attention(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["gated", "delta", "exclusive"])
def test_trains(page, name):
    torch.manual_seed(0)
    model = page["exclusive"] if name == "exclusive" else timm.create_model("vit_test_ortho", connection=name)
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    model(images)  # initializes the lazy layers
    optimizer = create_optimizer_v2(model, "adamw", lr=3e-3, weight_decay=0.05)
    losses = []
    for _ in range(25):
        loss = cross_entropy(model.train()(images), labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses


@pytest.mark.parametrize("page", ["Earlier streams"], indirect=True)
def test_streams_of_earlier_additions(page):
    """Each addition is orthogonal to its stream and to two earlier ones. It equals f minus a least-squares fit."""
    model = page["higher_order"].double().train()
    connections, calls = page["connections"], []
    for connection in connections:
        connection.eps = 1e-30
        connection.register_forward_hook(lambda module, inputs, y: calls.append((*inputs, y)))
    model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
    assert len(calls) == len(connections) == 8
    assert [len(connection.earlier) for connection in connections] == [0, 1, *[2] * 6]
    for number, (x, f, y) in enumerate(calls):
        streams = torch.stack([stream for stream, _, _ in calls[max(0, number - 2):number + 1]], -1)
        fit = (streams @ (torch.linalg.pinv(streams) @ f[..., None])).squeeze(-1)
        torch.testing.assert_close(y, x + f - fit, rtol=1e-6, atol=1e-9)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    again = copy.deepcopy(model)  # after training: ModelEma copies a model
    assert [site.connection for site in sites(again)][1].earlier[0] is sites(again)[0].connection


@pytest.mark.parametrize("page", ["Groups of channels"], indirect=True)
def test_a_projection_for_each_head(page):
    model, images = timm.create_model("vit_test_linear"), torch.randn(2, 3, 8, 8)  # two heads of 16 channels
    y = timm_ortho.connect(model, partial(page["PerHead"], head_dim=16))(images)
    assert torch.equal(y, timm_ortho.connect(model, "feature", groups=2)(images))
    swin = page["swin"]
    swin(torch.randn(1, 3, 64, 64))
    heads = [block.attn.num_heads for stage in swin.layers for block in stage.blocks]
    assert [site.connection.groups for site in sites(swin)] == [count for count in heads for _ in range(2)]


@pytest.mark.parametrize("page", ["A DiT block"], indirect=True)
def test_a_dit_block(page):
    block, modulate = page["dit"][0].double(), page["modulate"]
    x, c = torch.randn(2, 5, 64, dtype=torch.float64), torch.randn(2, 64, dtype=torch.float64)
    assert [(site.kind, site.connection.name) for site in sites(page["dit"])] == [
        ("attention", "feature"), ("mlp", "feature")] * 2
    assert torch.equal(block(x, c), x)  # adaLN-Zero
    for parameter in block.modulation.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(c)[:, None].chunk(6, -1)

    def added(x, f):
        return x + f - (x * f).sum(-1, keepdim=True) / ((x * x).sum(-1, keepdim=True) + EPS) * x

    y = added(x, gate1 * block.attn(modulate(block.norm1(x), shift1, scale1)))
    y = added(y, gate2 * block.mlp(modulate(block.norm2(y), shift2, scale2)))
    torch.testing.assert_close(block(x, c), y)
    plain = timm_ortho.disconnect(copy.deepcopy(block))
    assert torch.equal(timm_ortho.connect(block, "linear")(x, c), plain(x, c))
    skips = [site.connection.skip for site in sites(timm_ortho.connect(block, "feature", skip="orthogonal_tp"))]
    assert [skip.width for skip in skips] == [64, 64]  # the default width is that of the modulation, 384
