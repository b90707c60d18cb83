"""Test that the values of record_dynamics equal explicit sums, and that measuring has no side effects."""
import math

import pytest
import timm
import torch
from helpers.one_site import OneSite
from torch import nn

import timm_ortho  # registers the variants
from timm_ortho.diagnostics import record_dynamics


def measure(x, f, connection="feature", dim=-1):
    model = OneSite(f, connection, dim)
    return record_dynamics(model, x, timm_ortho.sites(model))[0]


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("connection", timm_ortho.CONNECTIONS)
def test_every_connection_is_measured_over_channels(connection, dim):
    x, f = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    record = measure(x, f, connection, dim)
    assert record.stream == pytest.approx((x * x).sum(dim).mean().item(), rel=1e-5)
    assert record.parallel + record.orthogonal == pytest.approx((f * f).sum(dim).mean().item(), rel=1e-4)
    cosine = (x * f).sum(dim) / ((x * x).sum(dim) * (f * f).sum(dim)).sqrt()
    assert record.cosine == pytest.approx(cosine.mean().item(), abs=1e-5)


class Subtracted(timm_ortho.Connection):
    def forward(self, x, f, attn_mask=None):
        return x - 2.0 * f


@pytest.mark.parametrize(("connection", "share"), [
    ("linear", 1.0), ("feature", 0.0), (lambda dim, eps=1e-6: timm_ortho.HybridConnection(dim, eps, "linear"), 1.0),
    (Subtracted, -2.0)])
@pytest.mark.parametrize("dim", [-1, 1])
def test_the_coefficient_of_what_is_added(connection, share, dim):
    x, f = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    x = torch.nn.functional.normalize(x, dim=dim)  # a small |x|^2 would magnify rounding errors
    record = measure(x, f, connection, dim)
    s = ((x * f).sum(dim) / ((x * x).sum(dim) + 1e-6)).mean().item()
    assert record.s == pytest.approx(s, rel=1e-4, abs=1e-5)
    assert record.s_added == pytest.approx(share * s, rel=1e-4, abs=1e-5)


def test_global_adds_nothing_parallel_on_average_over_tokens():
    """One projection covers all tokens: the coefficients of the tokens, weighted by |x|^2, have the mean zero."""
    x, f = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    x = x / x.norm(dim=-1, keepdim=True)  # equal weights
    record = measure(x, f, "global")
    assert abs(record.s) > 1e-3
    assert record.s_added == pytest.approx(0.0, abs=1e-6)


def test_measuring_has_no_side_effects():
    model = timm.create_model("test_vit_ortho", drop_path_rate=0.5).train()
    model.blocks[0].eval()  # users do this with a frozen block
    modes = [module.training for module in model.modules()]
    sites = timm_ortho.sites(model)
    records = record_dynamics(model, torch.randn(2, 3, 160, 160), sites)
    assert [(r.layer, r.kind, r.name) for r in records] == [(s.layer, s.kind, s.name) for s in sites]
    assert all(math.isfinite(value) for record in records for value in record[3:7])
    state = torch.get_rng_state()
    record_dynamics(model, torch.zeros(2, 3, 160, 160), sites)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert not any(site.connection._forward_hooks for site in sites)


class Unused(nn.Module):
    """A model with two connections. It calls `auxiliary` in training mode, otherwise `connection`."""

    def __init__(self):
        super().__init__()
        self.connection, self.auxiliary = timm_ortho.FeatureConnection(), timm_ortho.FeatureConnection()

    def forward(self, x):
        return self.connection(x, x.relu()) if not self.training else self.auxiliary(x, x.relu())


def test_an_unused_site_is_nan():
    used, unused = record_dynamics(model := Unused(), torch.randn(2, 5), timm_ortho.sites(model))
    assert all(math.isfinite(value) for value in used[3:7])
    assert all(math.isnan(value) for value in unused[3:7])
