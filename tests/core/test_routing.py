"""Routing replaces additions in the `forward` of a block with calls of connections, or raises an error."""
import functools
import importlib
import inspect
import linecache
import traceback

import pytest
import torch
from helpers.derived import derived, route_of
from torch import nn

from timm_ortho.routing import RoutingError

SCALE = 2.0  # a global that `forward` of the blocks reads


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x, bias: float = 0.0, *, positive=True):
        """Routing keeps this docstring."""
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
    return derived(block, [(stream, name) for name in names])


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
    block.connection_one, block.connection_two = Recorder(calls, "one"), Recorder(calls, "two")
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


@pytest.mark.parametrize(("mask", "handed_on"), [("bias", True), ("attn_mask", False), ("", False)])
def test_masks_are_passed_to_connections(mask, handed_on):
    source = inspect.getsource(derived(Block, [("x", "one"), ("x", "two")], mask=mask).forward)
    # addition `two` is on both sides of a conditional expression
    assert source.count(", attn_mask=bias)") == (3 if handed_on else 0)
    call = "self.connection_one(x, self.first(x * SCALE), attn_mask=bias)"
    assert (call in source) == ("attn_mask" in source) == handed_on


def test_the_host_is_the_unchanged_base_class():
    before = inspect.getsource(Block.forward), Block.forward, dict(vars(Block))
    cls = routed()
    assert issubclass(cls, Block)
    assert (inspect.getsource(Block.forward), Block.forward, dict(vars(Block))) == before
    assert cls.forward.__defaults__ == Block.forward.__defaults__
    assert cls.forward.__kwdefaults__ == Block.forward.__kwdefaults__
    assert cls.forward.__doc__ == Block.forward.__doc__
    assert cls.forward.__globals__ is Block.forward.__globals__  # global names resolve in the host's module
    assert "Routed" not in globals()


def test_the_generated_source_is_visible():
    cls = routed()
    linecache.checkcache()
    source = inspect.getsource(cls.forward)
    assert "self.connection_one(x, self.first(x * SCALE))" in source
    assert "offset = x.mean() + bias" in source  # unchanged, because it does not add to the stream
    block, _ = instance(cls)
    block.second = None
    try:
        block(torch.ones(1, 4))
    except TypeError:
        assert "x = self.connection_two(x, self.second(x))" in traceback.format_exc()
    else:
        pytest.fail("did not raise")


@pytest.mark.parametrize(("block", "names", "words"), [
    (Block, ("one",), ["test_routing.Block: ", "expected 1 addition to 'x'", "found 3", "at most 2 of them in one call",
                       "x + self.first(x * SCALE)"]),
    (Block, ("one", "two", "three", "four"), ["expected 4 additions to 'x'", "found 3"]),
    (Nested, ("one",), ["found 2"]),
    (nn.Identity, ("one",), ["expected 1 addition to 'x' in forward, found 0 (none)"]),
])
def test_a_wrong_number_of_additions(block, names, words):
    with pytest.raises(RoutingError) as error:
        routed(block, names)
    assert all(word in str(error.value) for word in words), error.value


def test_forward_with_a_closure():
    with pytest.raises(RoutingError, match=r"enclosing scope: super\(\) \(write super\(UsesSuper, self\)\)$"):
        routed(UsesSuper, ("one",))

    def nested(factor):
        class Block(nn.Module):
            def forward(self, x):
                return x + factor * x.exp()
        return Block

    with pytest.raises(RoutingError, match=r"enclosing scope: factor \(write self.factor\)$"):
        routed(nested(2.0), ("one",))


class Private(nn.Module):
    """A block whose methods use names of the class body: a default value, a private method and an alias of a method."""

    HALF = 0.5

    def __branch(self, x, scale):
        return scale * x.relu()

    def _forward(self, x, scale=HALF):
        return x + self.__branch(x, scale)

    forward = _forward


def test_methods_that_depend_on_their_class_body():
    block, calls, x = routed(Private, ("one",))(), [], torch.randn(3, 4)
    block.connection_one = Recorder(calls, "one")
    assert torch.equal(block(x), Private()(x))
    assert len(calls) == 1


class Drawing(nn.Module):
    def dropped(self):
        return torch.rand(()).item() < 0.5

    def forward(self, x):
        if self.dropped():
            return x
        return x + x.relu()


def test_random_conditions_are_not_evaluated():
    before = torch.get_rng_state()
    route = route_of(Drawing, [("x", "one")])
    assert [route.reached(Drawing()) for _ in range(9)] == [("one",)] * 9
    assert torch.equal(torch.get_rng_state(), before)


class Conditions(nn.Module):
    """Methods with conditions. Only `hasattr` can be evaluated before a call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("flag", torch.ones((), device="meta"))

    def guarded(self, x):
        if callable(getattr(self, "scale", None)):
            return x + x.exp() if self.scale > 0 else x
        return x

    def on_meta(self, x):
        if self.flag:
            x = x + x.exp()
        return x

    def asked_for_an_attribute(self, x, y=None):
        if y is not None:
            if not hasattr(self, "scale"):  # decoders check like this whether they have cross-attention
                raise ValueError("no scale")
            x = x + y
        return x


def test_conditions_before_a_call():
    route = functools.partial(route_of, Conditions, [("x", "one")])
    for method in ("guarded", "on_meta"):
        assert route(method=method).reached(Conditions()) == ("one",)
    block = Conditions()
    assert route(method="asked_for_an_attribute").reached(block) == ()
    block.scale = 1.0
    assert route(method="asked_for_an_attribute").reached(block) == ("one",)


HOST = """
from __future__ import annotations
from torch import nn

class Block(nn.Module):
    def forward(self, x: Nowhere, scale: missing.Type = 2.0) -> list[Nowhere]:
        return x + scale * x
"""


def test_annotations_are_not_evaluated(tmp_path, monkeypatch):
    """Annotations may contain names that exist only for type checkers."""
    (tmp_path / "host_of_future.py").write_text(HOST)
    monkeypatch.syspath_prepend(tmp_path)
    block = importlib.import_module("host_of_future").Block
    cls = routed(block, ("one",))
    assert cls.forward.__annotations__ == block.forward.__annotations__ == {
        "x": "Nowhere", "scale": "missing.Type", "return": "list[Nowhere]"}
    assert routed().forward.__annotations__ == {"bias": float}  # this file evaluates its annotations


# --------------------------------------------------------------------------------------- forms of additions
class InPlace(nn.Module):
    def forward(self, x):
        shortcut = x
        x = x * 2.0
        x += shortcut
        shortcut += x * 3.0
        return x + 1.0


class Expressions(nn.Module):
    def __init__(self, shortcut=None):
        super().__init__()
        self.shortcut = shortcut

    def forward(self, x):
        y = [x * 3.0]
        if self.shortcut is not None:
            y[0] = y[0] + self.shortcut (x)  # ast.unparse would remove the space
        return torch.cat([x[:, 0:1] + y[0][:, :1], y[0][:, 1:]], dim=1)


class Sides(nn.Module):
    """A block with conditions as in timm's blocks. The sum of the constants shows which sides have run."""

    def __init__(self, gamma=None, mixer=True, fused=False):
        super().__init__()
        self.gamma, self.mixer, self.fused = gamma, mixer, fused

    def forward(self, x, mask=None):
        x = x * 1.0 if self.fused else x + 1.0
        if self.mixer:
            if mask is None:
                x = x + 10.0
            else:
                res = x
                x = 20.0 + res
        if self.gamma is None:
            return x + 100.0
        if self.training and self.gamma > 5.0:
            return x + 200.0
        return x + 300.0


class Named(nn.Module):
    """A connection that adds 0.5."""

    def forward(self, x, f):
        return x + f + 0.5


def with_connections(cls, made, *names):
    block = made
    block.__class__ = derived(cls, names)
    for _, name in names:
        if name:
            setattr(block, f"connection_{name}", Named())
    return block


def test_in_place_sums():
    names = [("shortcut", "one"), ("shortcut", "two")]
    block = with_connections(InPlace, InPlace(), *names)
    x = torch.tensor([1.0])
    assert block(x).item() == 1.0 + 2.0 + 0.5 + 1.0
    assert x.item() == 1.0  # unlike the host class, a connection does not change its input in place
    source = inspect.getsource(type(block).forward)
    assert "x = self.connection_one(shortcut, x)" in source
    assert "shortcut = self.connection_two(shortcut, x * 3.0)" in source


def test_streams_that_are_expressions():
    names = [("self.shortcut(x)", "one"), ("x[:, 0:1]", "two")]
    x = torch.ones(1, 2)
    block = with_connections(Expressions, Expressions(nn.Identity()), *names)
    assert block(x).tolist() == [[1.0 + 4.5 + 0.5, 4.5]]
    assert route_of(Expressions, names).branch_first == {"one": True, "two": False}
    assert route_of(Expressions, names).reached(Expressions()) == ("two",)
    assert route_of(Expressions, names).reached(Expressions(nn.Identity())) == ("one", "two")


def test_an_unrouted_addition():
    names = [("self.shortcut(x)", None), ("x[:, 0:1]", "two")]
    block = with_connections(Expressions, Expressions(nn.Identity()), *names)
    assert block(torch.ones(1, 2)).tolist() == [[1.0 + 4.0 + 0.5, 4.0]]
    block = with_connections(InPlace, InPlace(), *[("shortcut", None), ("shortcut", "two")])
    assert block(torch.ones(1)).item() == 1.0 + 2.0 + 1.0
    assert "x += shortcut" in inspect.getsource(type(block).forward)


SIDES = [("x", "one"), (("x", "res"), "two"), ("x", "three")]


@pytest.mark.parametrize(("block", "kwargs", "expected"), [
    (Sides(), {}, 1.5 + 10.5 + 100.5),
    (Sides(), {"mask": 1}, 1.5 + 20.5 + 100.5),
    (Sides(gamma=7.0), {}, 1.5 + 10.5 + 200.5),
    (Sides(gamma=1.0), {}, 1.5 + 10.5 + 300.5),
    (Sides(mixer=False), {}, 1.5 + 100.5),
    (Sides(fused=True), {}, 10.5 + 100.5),
])
def test_every_branch_uses_its_connections(block, kwargs, expected):
    assert with_connections(Sides, block, *SIDES)(torch.zeros(1), **kwargs).item() == expected


def test_additions_that_an_instance_cannot_reach():
    route = route_of(Sides, SIDES)
    assert route.reached(Sides()) == ("one", "two", "three")
    assert route.reached(Sides(mixer=False)) == ("one", "three")
    assert route.reached(Sides(fused=True)) == ("two", "three")
    assert route.reached(Sides(gamma=1.0).eval()) == ("one", "two", "three")  # train() may be called later


class Uneven(nn.Module):
    def forward(self, x):
        if self.training:
            x = x + 1.0
            x = x + 2.0
        else:
            x = x + 3.0
        return x


def test_sides_with_different_numbers_of_additions():
    with pytest.raises(RoutingError, match=r"the sides of 'if self\.training' have 2 and 1 additions"):
        route_of(Uneven, [("x", "one"), ("x", "two")])


def test_additions_in_another_order():
    with pytest.raises(RoutingError, match=r"' is where an addition to 'self\.shortcut\(x\)' is expected"):
        route_of(Expressions, [("x[:, 0:1]", "two"), ("self.shortcut(x)", "one")])


class Early(nn.Module):
    def __init__(self, shortcut=None):
        super().__init__()
        self.shortcut = shortcut

    def forward(self, x):
        if self.shortcut is None:
            return x * 2.0
        if self.training:
            x = x + 1.0
        return x + 2.0


def test_code_after_a_return_counts_as_the_other_side():
    route = route_of(Early, [("x", "one"), ("x", "two")])
    assert route.reached(Early()) == ()
    assert route.reached(Early(nn.Identity()).eval()) == ("one", "two")  # train() may be called later


SECOND = """
import operator, torch
from torch import nn

class Block(nn.Module):
    def forward(self, x, f):
        x = x + f
        y = x
        {}
        return x
"""


@pytest.mark.parametrize("statement", [
    "x = torch.add(x, f)", "x = torch.add(other=f, input=x)", "x.add_(f)", "x = f.add_(x)", "x = (x + f).add(f)",
    "x = operator.iadd(x, f)", "x = torch.addcmul(x, f, f)", "x = x - (-f)", "x = x - f.mean()", "x -= f",
    "x[:, 1:] += f", "x.data += f", "x = self.ff.add_relu(x, f)",
    "x = torch.subtract(x, f)", "x = torch.stack([x, f]).sum(0)", "x = torch.sum(torch.stack((f, x)), dim=0)",
    "x = sum([x, f])", "x = y + f", "y += f", "y.add_(f)", "z: object = x; x = z + f"])
def test_a_second_sum_that_is_not_replaced(tmp_path, statement):
    (tmp_path / "second.py").write_text(SECOND.format(statement))
    namespace = {"__name__": __name__}
    exec(compile(SECOND.format(statement), tmp_path / "second.py", "exec"), namespace)
    with pytest.raises(RoutingError, match=r" is not replaced: write it as x \+ f or "):
        route_of(namespace["Block"], [("x", "one")])


class InConditions(nn.Module):
    """A block with its second sum in conditions, and operations that are no sums of the stream."""

    def first(self, x, f):
        x = x + f.sub(x.sum(-1, keepdim=True)) * torch.add(x, 1.0)
        if (x := x + f).isfinite().all():
            x = torch.cat([x, f], -1)
        return x

    def second(self, x, f):
        x = x - x.mean()
        x = x + (x - x.mean())
        while (x := f + x).isnan().any():
            pass
        return x


@pytest.mark.parametrize("method", ["first", "second"])
def test_sums_inside_conditions(method):
    with pytest.raises(RoutingError, match=r"expected 1 addition to 'x' in .*, found 2"):
        route_of(InConditions, [("x", "one")], method=method)
    block, both = InConditions(), [("x", "one"), ("x", "two")]
    block.__class__ = derived(InConditions, both, method=method)
    block.connection_one, block.connection_two = Named(), Named()
    x, f = torch.randn(2, 3, 4)
    x, f = x.abs(), f.abs()
    plain = getattr(InConditions(), method)(x, f)
    assert not torch.equal(getattr(block, method)(x, f), plain)
