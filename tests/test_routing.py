"""Routing on blocks made for the test: what is replaced, what is kept, what is refused."""
import inspect
import linecache
import math
import traceback

import pytest
import torch
from torch import nn

from timm_ortho.routing import Route, RoutingError, Sum, route

SCALE = 2.0  # a global that the blocks below use


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x, bias: float = 0.0, *, positive=True):
        """Says hello."""
        offset = x.mean() + bias
        x = x + self.first(x * SCALE)
        x = self.second(x) + x if positive else x + self.second(x - offset)
        return x


class Nested(nn.Module):
    def forward(self, x):
        return x + (x + 1.0)


class UsesSuper(Block):
    def forward(self, x):
        return x + super().forward(x)


def routed(block=Block, names=("one", "two"), stream="x"):
    sums = [Sum(stream, name) for name in names]
    return route(block, sums, name="Routed", module="tests.somewhere", host="timm 9.9")


class Recorder(nn.Module):
    def __init__(self, calls, name):
        super().__init__()
        self.calls, self.name = calls, name

    def forward(self, x, f):
        self.calls.append((self.name, x, f))
        return x + f


def instance(cls):
    torch.manual_seed(0)
    block, calls = Block(), []
    block.__class__ = cls
    block.one, block.two = Recorder(calls, "one"), Recorder(calls, "two")
    return block, calls


def plain():
    torch.manual_seed(0)
    return Block()


@pytest.mark.parametrize("kwargs", [{}, {"bias": 3.0}, {"positive": False, "bias": 1.0}], ids=str)
def test_same_numbers_through_connections(kwargs):
    block, calls = instance(routed())
    x = torch.randn(3, 4)
    assert torch.equal(block(x, **kwargs), plain()(x, **kwargs))
    (first, x0, f0), (second, x1, f1) = calls
    assert (first, second) == ("one", "two")
    assert torch.equal(x0, x)
    assert torch.equal(x1, x0 + f0)
    assert torch.equal(f0, block.first(x * SCALE))
    assert f1.shape == x.shape


def test_the_host_is_untouched_and_is_the_base_class():
    before = inspect.getsource(Block.forward), Block.forward, dict(vars(Block))
    cls = routed()
    assert issubclass(cls, Block)
    assert (inspect.getsource(Block.forward), Block.forward, dict(vars(Block))) == before
    assert cls.forward.__defaults__ == Block.forward.__defaults__
    assert cls.forward.__kwdefaults__ == Block.forward.__kwdefaults__
    assert cls.forward.__doc__ == Block.forward.__doc__
    assert cls.forward.__globals__ is Block.forward.__globals__  # names resolve where the host's do, later too
    assert "Routed" not in globals()


def test_the_source_is_what_tools_show():
    cls = routed()
    linecache.checkcache()
    source = inspect.getsource(cls.forward)
    assert "self.one(x, self.first(x * SCALE))" in source
    assert "offset = x.mean() + bias" in source  # no stream is added to here
    block, _ = instance(cls)
    block.second = None
    try:
        block(torch.ones(1, 4))
    except TypeError:
        assert "x = self.two(x, self.second(x))" in traceback.format_exc()
    else:
        pytest.fail("did not raise")


@pytest.mark.parametrize("names", [("one",), ("one", "two", "three", "four")])
def test_another_number_of_additions(names):
    with pytest.raises(RoutingError) as error:
        routed(names=names)
    words = ("Block", "timm 9.9", f"expected {len(names)} additions to 'x'", "found 2", "x + self.first(x * SCALE)")
    assert all(word in str(error.value) for word in words), error.value


def test_additions_inside_additions_are_counted():
    with pytest.raises(RoutingError, match="found 2"):
        routed(Nested, ("one",))


def test_no_addition_at_all():
    with pytest.raises(RoutingError, match=r"found 0 \(none\)"):
        routed(nn.Identity, ("one",))


def test_forward_with_a_closure():
    with pytest.raises(RoutingError, match="__class__"):
        routed(UsesSuper, ("one",))


def test_globals_are_read_when_called(monkeypatch):
    block, _ = instance(routed())
    monkeypatch.setitem(globals(), "SCALE", math.pi)
    x = torch.randn(3, 4)
    assert torch.equal(block(x), plain()(x))
