"""Block classes that users write: registration, connect, disconnect, and one-line errors."""
import copy
import functools
import pickle

import numpy as np
import pytest
import timm
import torch
from helpers.own_block import MyBlock, Single, Written, tokens
from torch import nn

import timm_ortho
from timm_ortho import (
    FeatureConnection,
    GlobalConnection,
    LinearConnection,
    RoutingError,
    UnsupportedModelError,
    connect,
    create_connection,
    disconnect,
    sites,
)
from timm_ortho.blocks import lookup
from timm_ortho.connections import SiteSpec

pytestmark = pytest.mark.usefixtures("restored")


class Embedding(nn.Module):
    """A class that has no stream, but whose addition looks residual."""

    def forward(self, x):
        return x + x.mean(1, keepdim=True)


def test_a_users_block(registered):
    model, x = nn.Sequential(registered(), registered()), tokens()
    host = copy.deepcopy(model)
    assert torch.equal(connect(model, "linear")(x), host(x))
    assert [(site.layer, site.kind, site.name) for site in sites(model)] == [
        (layer, kind, f"{layer}.connection_{kind}") for layer in (0, 1) for kind in ("attention", "mlp")]
    f = host[0].f(host[0].norm(x))
    first = x + f - (x * f).sum(-1, keepdim=True) / ((x * x).sum(-1, keepdim=True) + 1e-6) * x
    seen = []
    connect(model, "feature")[0].connection_attention.register_forward_hook(lambda *args: seen.append(args[-1]))
    model(x)
    torch.testing.assert_close(seen[0], first)
    again = pickle.loads(pickle.dumps(connect(model, "global")))
    assert type(again[0]) is type(model[0])
    assert type(again[0]).__bases__ == (MyBlock,)
    assert torch.equal(again(x), model(x))
    disconnect(model)
    assert [type(block) for block in model] == [MyBlock] * 2
    assert torch.equal(model(x), host(x))
    assert not sites(model)


def test_a_copy_that_was_assigned_again_is_a_branch():
    timm_ortho.register_block(NotSwapped, stream="x", kinds=("attention", "mlp"))
    for block, stream in ((Swapped, "shortcut"), (SwappedInPlace, "identity"), (SwappedPair, "r")):
        timm_ortho.register_block(block, stream=stream, kinds=("mlp",))


def test_one_layer_and_another_method():
    class Block(MyBlock):
        def inner(self, x):
            return x.add(1.0) + self.f(x)

        def forward(self, x):
            return self.inner(x)

    timm_ortho.register_block(Block, stream="x.add(1.0)", kinds=["conv"], dim=-1, keep="branch", method="inner")
    model = connect(nn.Sequential(Block(), Block()), "global", layers=[1])
    assert [type(site.connection) for site in sites(model)] == [LinearConnection, GlobalConnection]
    assert sites(model)[1].connection.keep == "branch"
    model(tokens()).sum().backward()


class Reordered(nn.Module):
    """Both summands draw random numbers, the branch first. It also works in place on the input of the shortcut."""

    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 8))
        self.shortcut, self.norm = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), nn.LayerNorm(8)

    def forward(self, x):
        return self.f(x) + self.shortcut(x)


class ReorderedWithNorm(Reordered):
    def forward(self, x):
        y = self.f(x) + self.shortcut(x)
        return self.norm(y)


@pytest.mark.parametrize("block", [Reordered, ReorderedWithNorm])
def test_the_summands_are_computed_in_their_order(block):
    timm_ortho.register_block(block, stream="self.shortcut(x)", kinds=("mlp",))
    model = nn.Sequential(block())
    host = copy.deepcopy(model)
    results = []
    for each in (host, connect(model, "linear"), torch.jit.script(model)):
        torch.manual_seed(0)
        results.append(each(tokens()))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def doubled(function):
    @functools.wraps(function)
    def wrapper(self, x):
        return 2 * function(self, x)
    return wrapper


def test_a_wrapper_that_the_source_does_not_contain_is_refused():
    class Wrapped(MyBlock):
        def forward(self, x):
            return x + self.f(x)

    class Decorated(MyBlock):
        @doubled
        def forward(self, x):
            return x + self.f(x)

    Wrapped.forward = doubled(Wrapped.forward)
    with pytest.raises(RoutingError, match="forward was replaced by a wrapper that its source does not contain: write"):
        timm_ortho.register_block(Wrapped, stream="x", kinds=("mlp",))
    timm_ortho.register_block(Decorated, stream="x", kinds=("mlp",))
    block = Decorated()
    host = copy.deepcopy(block)
    assert torch.equal(connect(block, "linear")(tokens()), host(tokens()))


class Looped(MyBlock):
    adapters, fast = (), True

    def forward(self, x):
        for adapter in self.adapters:
            x = adapter(x)
            if self.fast:
                return x
        return x + self.f(x)


def test_a_loop_may_run_zero_times():
    """A condition inside the loop does not decide whether a call reaches the addition after the loop."""
    timm_ortho.register_block(Looped, stream="x", kinds=("mlp",), bypass=True)
    assert len(sites(connect(nn.Sequential(Looped()), "feature"))) == 1


def test_a_cell_that_registers_a_class_again():
    for _ in range(2):
        timm_ortho.register_block(Single, stream="x", kinds=("mlp",), width=lambda block: block.f.out_features)
    assert connect(Single(), skip="scaled").connection_mlp.skip.width == 8
    timm_ortho.register_block(Single, stream="x", kinds=("mlp",), width=4)
    assert connect(Single(), skip="scaled").connection_mlp.skip.width == 4
    with pytest.raises(ValueError, match=r"already registered with stream='x', kinds=\('mlp',\): connect without"):
        timm_ortho.register_block(Single, stream="y", kinds=("conv",))


def test_a_class_that_is_defined_again_needs_its_own_registration():
    """A notebook cell that runs twice defines its class twice."""
    def define():
        class Block(MyBlock):
            def forward(self, x):
                return x + self.f(x)
        return timm_ortho.register_block(Block, stream="x", kinds=("mlp",))

    old, new = define(), define()
    assert len(sites(connect(nn.Sequential(new()), "feature"))) == 1
    with pytest.raises(UnsupportedModelError):
        connect(nn.Sequential(old()), "feature")


def test_not_residual():
    model = nn.Sequential(Embedding(), timm.models.vision_transformer.Block(8, 2))
    with pytest.raises(UnsupportedModelError, match=r"not supported: test_register_block\.Embedding"):
        connect(model)
    timm_ortho.not_residual(Embedding, "a mean")
    assert len(sites(connect(model))) == 2


class Wrong(nn.Module):
    def forward(self, x):
        y = x.relu()
        return y + x.exp()


class Swapped(MyBlock):
    """A block whose stream is not `x` at the addition."""

    def forward(self, x):
        shortcut = x
        x = self.f(x)
        return shortcut + x


class SwappedInPlace(MyBlock):
    def forward(self, x):
        identity = x
        out = self.f(x)
        out += identity
        return out


class SwappedPair(MyBlock):
    def forward(self, x):
        r, x = x, self.f(x)
        return x + r


class NotSwapped(MyBlock):
    """A block whose branch was once a copy of the stream."""

    def forward(self, x):
        y = x
        y = self.f(y)
        x = x + y
        y = x
        y, _ = self.g(y), None
        return x + y


class Twice(MyBlock):
    def forward(self, x):
        return x + self.f(x) + self.g(x)


class Added(MyBlock):
    def forward(self, x):
        return torch.add(x, self.f(x))


class Static(MyBlock):
    @staticmethod
    def add(x, f):
        return x + f


class Lambda(MyBlock):
    forward = lambda self, x: x + self.f(x)  # noqa: E731


class Tagged(MyBlock):
    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)

    def forward(self, x):
        return x + self.f(x)


def enclosed():
    factor = 2.0

    class Block(MyBlock):
        def forward(self, x, factor=factor):
            return x + factor * self.f(x)

    return Block


TWO, ONE = dict(stream="x", kinds=("attention", "mlp")), dict(stream="x", kinds=("mlp",))
TIMMS = timm.models.vision_transformer.Block


@pytest.mark.parametrize(("block", "arguments", "error", "message"), [
    (Wrong, dict(stream="z", kinds=("mlp",)), RoutingError,
     r"Wrong.*: expected 1 addition to 'z' in forward, found 0 \(additions to other expressions: y \+ x.exp\(\)\)"),
    (MyBlock, ONE, RoutingError,
     r"expected 1 addition to 'x' in forward, found 2 \(x \+ self.f\(self.norm\(x\)\); x \+ self.g\(x\)\)"),
    (MyBlock, dict(stream="x", kinds=("mlp", "mlp")), ValueError, "kinds must be "),
    (MyBlock, dict(stream="x", kinds="mlp"), ValueError, "kinds must be .*, got 'mlp'"),
    (MyBlock, dict(stream="x", kinds=("a b", "mlp")), ValueError, "kinds must be "),
    (MyBlock, {**TWO, "stream": ("x",)}, ValueError, r"stream needs one value, or 2 \(one .*\), got 1 in a sequence"),
    (MyBlock, {**TWO, "dim": (1,)}, ValueError, r"dim needs one value, or 2 \(one .*\), got 1 in a sequence"),
    (MyBlock, {**TWO, "keep": "all"}, ValueError, "unknown keep 'all'"),
    (MyBlock, {**TWO, "width": 0}, ValueError, "width must be a whole number of at"),
    (MyBlock, {**TWO, "method": "no"}, ValueError, "has no method 'no'"),
    (type("Built", (nn.Module,), {"forward": eval("lambda self, x: x + 1")}), ONE, RoutingError,
     "the source of forward cannot be read: define the class in a file"),
    (TIMMS, dict(stream="x", kinds=("mlp", "attention"), dim=1), ValueError,
     r"Block is already registered with kinds=\('attention', 'mlp'\), dim=-1: connect without registering it again, "
     "define the class again, or register a subclass$"),
    (Added, ONE, RoutingError,
     r"found 0 \(none\); 'torch.add\(x, self.f\(x\)\)' is not replaced: write it as x \+ f or"),
    (nn.TransformerEncoderLayer, {**TWO, "mask": ""}, RoutingError, "a fused operation"),
    (Twice, dict(stream="x", kinds=("parallel",)), RoutingError, r"'x \+ .*self.g\(x\)' is not replaced: write"),
    (Swapped, ONE, RoutingError,
     r"found 1 \(shortcut \+ x\); in 'shortcut \+ x', 'shortcut' is a copy of 'x': pass stream='shortcut'$"),
    (SwappedInPlace, dict(stream="out", kinds=("mlp",)), RoutingError,
     r"in 'out \+= identity', 'identity' is a copy of 'x': pass stream='identity'$"),
    (SwappedPair, ONE, RoutingError, "'r' is a copy of 'x': pass stream='r'$"),
    (Static, {**ONE, "method": "add"}, RoutingError, "add is a static or class method"),
    (Lambda, ONE, RoutingError, "forward cannot be rebuilt in a subclass: KeyError"),
    (Tagged, ONE, RoutingError, "forward cannot be rebuilt in a subclass: TypeError"),
    (enclosed(), ONE, RoutingError, "forward cannot be rebuilt in a subclass: NameError"),
    (len, TWO, TypeError, "must be a class of torch.nn.Module"),
    (MyBlock(), TWO, TypeError, "class of torch.nn.Module, got (a )?MyBlock$"),
])
def test_a_wrong_registration(block, arguments, error, message):
    before = dict(lookup.SPECS)
    with pytest.raises(error, match=message) as caught:
        timm_ortho.register_block(block, **arguments)
    assert "\n" not in str(caught.value)
    assert before == lookup.SPECS


class Sides(nn.Module):
    """A block like GPT-NeoX's. An argument selects whether it is parallel or sequential."""

    def __init__(self, parallel):
        super().__init__()
        self.f, self.g, self.parallel = nn.Linear(8, 8), nn.Linear(8, 8), parallel

    def forward(self, x):
        if self.parallel:
            return x + (self.f(x) + self.g(x))
        x = x + self.f(x)
        x = x + self.g(x)
        return x


class Summed(Sides):
    """A block like StableLM's. The parallel form adds f(x) and then g(x), not their sum."""

    def forward(self, x):
        if self.parallel:
            x = x + self.f(x) + self.g(x)
        else:
            x = x + self.f(x)
            x = x + self.g(x)
        return x


def test_a_block_whose_sides_differ():
    with pytest.raises(RoutingError, match=r"found 3 .*, at most 2 of them in one call; .*\(None leaves it unch.*"
                                           r"sides of 'if self.parallel' have 1 and 2 additions: pass sides_differ"):
        timm_ortho.register_block(Summed, stream="x", kinds=("attention", "mlp"))
    timm_ortho.register_block(Sides, stream="x", kinds=("parallel", "attention", "mlp"), sides_differ=True)
    x = tokens()
    for parallel, kinds in ((True, ["parallel"]), (False, ["attention", "mlp"])):
        model = nn.Sequential(Sides(parallel))
        host = copy.deepcopy(model)
        assert torch.equal(connect(model, "linear")(x), host(x))
        assert [site.kind for site in sites(connect(model, "feature"))] == kinds
        assert not torch.allclose(model(x), host(x))


def test_a_dim_outside_the_tensor_is_an_error_in_the_forward_pass():
    timm_ortho.register_block(MyBlock, stream="x", kinds=("attention", "mlp"), dim=3)
    with pytest.raises(ValueError, match=r"dim must be one or more different axes in \[-3, 2\], got 3"):
        connect(MyBlock(), "feature")(tokens())


def test_a_block_with_a_forward_on_the_instance(registered):
    model = nn.Sequential(registered())
    model[0].forward = model[0].forward
    with pytest.raises(UnsupportedModelError, match="a MyBlock has an instance attribute forward"):
        connect(model, "feature")
    assert type(model[0]) is MyBlock
    del model[0].forward
    routed_forward = connect(model, "feature")[0].forward
    model[0].forward = lambda x: routed_forward(x)
    connect(model, "global")  # allowed, because replacing a connection does not change the block's class
    assert {type(site.connection) for site in sites(model)} == {GlobalConnection}
    with pytest.raises(UnsupportedModelError, match="a MyBlock has an instance attribute forward"):
        disconnect(model)
    model(tokens())


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.f(x)


class Gated(nn.Module):
    """A block whose last layer does not have the width of the stream."""

    def __init__(self):
        super().__init__()
        self.f, self.gate = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        return x + self.f(x) * self.gate(x).mean(-1, keepdim=True)


@pytest.mark.parametrize(("block", "dim", "width"), [
    (Conv, 1, None), (Gated, -1, 8), (Gated, -1, np.int64(8)), (Gated, -1, lambda block: block.f.out_features)])
def test_skips_use_the_width(block, dim, width):
    for _ in range(2):  # the cell of a notebook may run twice
        timm_ortho.register_block(block, stream="x", kinds=["mlp"], dim=dim, width=width)
    model = connect(block(), "feature", skip="idempotent_mr")
    assert model.connection_mlp.skip.width == 8
    model(torch.randn(2, 8, 8))


def test_an_attribute_of_a_block_is_not_overwritten():
    class Block(MyBlock):
        def __init__(self):
            super().__init__()
            self.connection_mlp = nn.Linear(8, 8)

        def forward(self, x):
            return x + self.connection_mlp(x)

    timm_ortho.register_block(Block, stream="x", kinds=("mlp",))
    for own in (nn.Linear(8, 8), create_connection("global")):
        model = nn.Sequential(Block())
        model[0].connection_mlp = own
        with pytest.raises(ValueError, match=r"^0 \(Block\) already has an attribute connection_mlp"):
            connect(model, "feature")
        assert model[0].connection_mlp is own


def test_a_mask_with_the_opposite_meaning():
    class Block(MyBlock):
        def forward(self, x, attn_mask):
            return x + self.f(x)

    forbidden, x = torch.ones(5, 5, dtype=torch.bool).triu(1), tokens()  # True forbids, as in nn.MultiheadAttention
    for name, padding in (("attn_mask", True), ("", False)):
        timm_ortho.register_block(Block, stream="x", kinds=("mlp",), mask=name)
        model = connect(Block(), "global")
        assert (model(x, forbidden)[:, 0] == 0).all() == padding
        lookup.SPECS.pop(lookup.class_name(Block))


def test_class_names_do_not_change(registered):
    """FSDP's policies and transformers identify layers by class names."""
    model = connect(nn.Sequential(registered()), "feature")
    assert type(model[0]).__name__ == "MyBlock"
    assert "MyBlock(" in repr(model)
    assert "timm__" not in repr(connect(timm.create_model("vit_test_linear"), "feature"))


class WrittenInAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.adds = nn.Linear(8, 8), nn.ModuleList(create_connection("feature") for _ in range(2))
        self.again = self.adds[0]


def test_connections_in_a_list_of_modules_and_with_two_attributes():
    block = WrittenInAList()
    to_global = functools.partial(connect, connection="global")
    for change, expected in ((to_global, GlobalConnection), (disconnect, LinearConnection)):
        change(block)
        assert [type(connection) for connection in (*block.adds, block.again)] == [expected] * 3
        assert {type(site.connection) for site in sites(block)} == {expected}


def test_connections_in_a_blocks_own_code(registered):
    model = nn.Sequential(Written(), registered())
    assert [(site.layer, site.kind) for site in sites(model)] == [(0, "add")]
    connect(model, "global", eps=1e-3)
    assert {type(site.connection) for site in sites(model)} == {GlobalConnection}
    assert [site.layer for site in sites(model)] == [0, 1, 1]
    assert sites(model)[0].connection.dim == -1
    assert sites(model)[0].connection.eps == 1e-3
    with pytest.raises(ValueError, match="a skip needs the width of the stream, which is unknown"):
        connect(model, "feature", skip="orthogonal_tp")
    connect(model, "feature", skip_branches=4)  # no skip, so no width
    disconnect(model)
    assert [type(site.connection) for site in sites(model)] == [LinearConnection]


def test_connections_in_a_blocks_own_code_keep_the_details_of_their_author():
    block = Written()
    block.add = create_connection("feature")
    block.add.branch_first, block.add.site = True, SiteSpec(tokens_apart=True)
    for arguments in (dict(keep="branch"), dict(keep="output"), dict(connection="linear"), dict(connection="global")):
        add = connect(block, **arguments).add
        assert (add.dims, add.branch_first) == ([-1], True)
        assert add.keep == arguments.get("keep", "output")
    block.add = FeatureConnection(keep="branch")
    disconnect(connect(block, "feature"))
    assert connect(connect(block, "global", keep="branch"), "feature").add.keep == "branch"


class Mixed(Written):
    def forward(self, x):
        x = x + self.f(x)
        return self.add(x, self.f(x))


def test_a_registered_block_with_a_connection_in_its_own_code():
    timm_ortho.register_block(Mixed, stream="x", kinds=["mlp"])
    model, x = nn.Sequential(Mixed(), Mixed()), tokens()
    for kinds in (["mlp"], ["add"], ["add", "mlp"]):
        connect(model, "global", kinds=kinds)
        assert [(site.layer, site.kind) for site in sites(model)] == [(0, "add"), (0, "mlp"), (1, "add"), (1, "mlp")]
        assert {site.kind for site in sites(model) if site.connection.name == "global"} == set(kinds)
    model[0].connection_mlp = create_connection("hybrid")  # replaced by hand
    disconnect(model)
    assert [(site.kind, site.connection.name) for site in sites(model)] == [("add", "linear")] * 2
    y = x
    for block in model:
        y = y + block.f(y)
        y = y + block.f(y)
    assert torch.equal(model(x), y)
