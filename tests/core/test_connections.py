"""Connections as modules: results, parameters, random draws, repr and errors."""
import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from helpers.half_connection import HalfConnection
from helpers.messages import not_taken, taking

from timm_ortho import CONNECTIONS, Connection, FeatureConnection, create_connection, create_skip

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ", ".join(map(repr, CONNECTIONS))
IS_IT_IMPORTED = " (import the module that registers it; with train.py, pass --device-modules timm_ortho my_module)"
X, F = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).chunk(2, dim=-1)


@pytest.mark.parametrize("connection", [*CONNECTIONS, HalfConnection])
def test_the_sum_and_its_norm(connection):
    made, norm = create_connection(connection).double(), torch.nn.LayerNorm(4).double()
    x, f = X.flatten(1, 2), F.flatten(1, 2)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    mask[1, ..., 9:] = False
    expected = made(x, f, attn_mask=mask)
    calls = []
    for module in (made, norm):
        module.register_forward_hook(lambda module, *_: calls.append(module))
    y, normed = made.with_norm(x, f, norm, attn_mask=mask)
    assert calls == [made, norm]
    assert torch.equal(y, expected)
    assert torch.equal(normed, norm(expected))


def test_hybrid_can_start_linear():
    hybrid = create_connection("hybrid", start="linear").double()
    torch.testing.assert_close(hybrid(X, F), X + F, rtol=1e-6, atol=1e-6)
    assert (hybrid.rho.item(), hybrid.theta.item()) == pytest.approx((math.sqrt(2), math.pi / 4))


@pytest.mark.parametrize(
    ("rho", "theta", "a", "b"), [(-0.5, 0.3, 0.0, 0.0), (1.0, 2.0, 1.0, 0.0), (1.0, -2.0, -1.0, 0.0)])
def test_hybrid_stays_in_its_range_and_can_return(rho, theta, a, b):
    hybrid = create_connection("hybrid").double()
    with torch.no_grad():
        hybrid.rho.fill_(rho)
        hybrid.theta.fill_(theta)
    assert [w.item() for w in hybrid.weights()] == pytest.approx([a, b], abs=1e-12)
    (hybrid.weights()[0] + hybrid.weights()[1]).backward()
    assert hybrid.rho.grad.item() != 0


@pytest.mark.parametrize("name", CONNECTIONS)
def test_state(name):
    """Checkpoints contain only parameters."""
    connection = create_connection(name, device="meta", dtype=torch.float64)
    state = connection.state_dict()
    assert list(state) == [parameter for parameter, _ in connection.named_parameters()]
    assert all((value.device.type, value.dtype) == ("meta", torch.float64) for value in state.values())
    assert all(value.dim() for value in state.values()), "FSDP2 does not support 0-d parameters: use the shape [1]"


@pytest.mark.parametrize("name", taking("prob"))
def test_probability_is_drawn_in_training_and_averaged_in_evaluation(name):
    connection = create_connection(name, prob=0.3).double()
    orthogonal = create_connection(name).double()(X, F)
    torch.manual_seed(0)
    drawn = [connection(X, F) for _ in range(400)]
    share = sum(torch.allclose(y, orthogonal) for y in drawn) / len(drawn)
    assert all(torch.allclose(y, orthogonal) or torch.allclose(y, X + F) for y in drawn)
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / len(drawn))
    torch.testing.assert_close(connection.eval()(X, F), 0.3 * orthogonal + 0.7 * (X + F))


def test_probability_0_is_linear_bit_for_bit():
    x, f = X.float(), F.float()
    assert torch.equal(create_connection("feature", prob=0.0)(x, f), x + f)


def test_repr_of_connections():
    drawn = create_connection("feature", dim=1, eps=1e-5, prob=0.5)
    assert repr(drawn) == "FeatureConnection(dim=1, eps=1e-05, prob=0.5)"
    assert repr(create_connection("global")) == "GlobalConnection(dim=-1, eps=1e-06)"
    assert repr(create_connection("linear")) == "LinearConnection(dim=-1)"
    assert repr(create_connection("hybrid", start="linear")) == "HybridConnection(dim=-1, eps=1e-06, start='linear')"


def test_fx_draws_at_each_call():
    traced = torch.fx.symbolic_trace(create_connection("feature", prob=0.5).double())
    torch.manual_seed(0)
    assert len({tuple(traced(X, F).flatten().tolist()) for _ in range(40)}) == 2


class Uncarried(FeatureConnection):
    def forward(self, x, f, attn_mask=None):
        return x + 0.5 * f


class Helped(Connection):
    def combined(self, x, f):
        return self.join(x, f, 0.5, 1.0, None)

    def forward(self, x, f, attn_mask=None):
        return self.combined(x, f)


def test_a_skip_reaches_join_through_other_methods():
    skip = create_skip("orthogonal_tp", 3, dim=1)
    connected = create_connection(Helped, dim=1, skip=skip).double()
    torch.testing.assert_close(connected(X, F), create_connection(Helped, dim=1).double()(skip(X), F))


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"connection": "featur"},
     f"unknown connection 'featur', known are {KNOWN}; did you mean 'feature'?{IS_IT_IMPORTED}"),
    ({"connection": "feature", "eps": -1.0}, "eps must be in [2**-126, 2**127], got -1.0"),
    ({"connection": "linear", "eps": 1e-50}, "eps must be in [2**-126, 2**127], got 1e-50"),
    ({"connection": "feature", "eps": "1e-6"}, "eps must be in [2**-126, 2**127], got '1e-6'"),
    ({"connection": "global", "prob": "0.5"}, "prob must be in [0, 1], got '0.5'"),
    ({"connection": "feature", "groups": 0}, "groups must be a whole number of at least 1, got 0"),
    ({"connection": "feature", "dim": None}, "dim must be a whole number, got None"),
    ({"connection": "feature", "groups": "heads"}, "groups must be a whole number of at least 1, got 'heads'"),
    ({"connection": "global", "groups": 2}, not_taken("global", "groups")),
    ({"connection": HalfConnection, "groups": 2}, not_taken("HalfConnection", "groups")),
    ({"connection": HalfConnection, "prob": 0.5}, not_taken("HalfConnection", "prob")),
    ({"connection": Uncarried, "skip": create_skip("scaled", 8)},
     "Uncarried.forward ignores skip: omit skip, or begin with x = self.carried(x)"),
    ({"connection": "orthogonal"},
     f"unknown connection 'orthogonal', known are {KNOWN}; did you mean 'feature'?{IS_IT_IMPORTED}"),
    ({"connection": "global", "keep": "both"}, "unknown keep 'both', known are 'output', 'branch'"),
    ({"connection": "global", "prob": 1.5}, "prob must be in [0, 1], got 1.5"),
    ({"connection": "linear", "keep": "branch"}, not_taken("linear", "keep")),
    ({"connection": "hybrid", "prob": 0.5}, not_taken("hybrid", "prob")),
    ({"connection": "hybrid", "start": "lineal"}, "unknown start 'lineal', known are 'orthogonal', 'linear'; "
                                                  "did you mean 'linear'?"),
])
def test_bad_input_of_create_connection(kwargs, message):
    message = f"^{re.escape(message)}$"
    with pytest.raises(ValueError, match=message):
        create_connection(**kwargs)
    make, arguments = CONNECTIONS.get(str(kwargs["connection"])), {**kwargs}
    del arguments["connection"]
    if make and arguments.keys() <= inspect.signature(make).parameters.keys():
        with pytest.raises(ValueError, match=message):
            make(**arguments)
