"""Anyone's residual blocks and connections: registered, connected, disconnected, or refused in one line."""
import copy
import json
import multiprocessing
import pickle
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import yaml
from torch import nn

import timm_ortho
from timm_ortho import (
    Connection,
    FeatureConnection,
    GlobalConnection,
    LinearConnection,
    RoutingError,
    UnsupportedModelError,
    arguments,
    cli,
    connect,
    create_connection,
    disconnect,
    hub,
    sites,
)
from timm_ortho.blocks import routed, tables
from timm_ortho.hub import repository

ROOT = Path(timm_ortho.__file__).parents[1]


class MyBlock(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.norm, self.f, self.g = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + self.f(self.norm(x))
        return x + self.g(x)


class Embedding(nn.Module):
    def forward(self, x):
        return x + x.mean(1, keepdim=True)


class Written(nn.Module):
    """A new architecture's block, which says itself where its connection is."""

    def __init__(self, dim=8):
        super().__init__()
        self.f = nn.Linear(dim, dim)
        self.add = create_connection("feature", dim=-1)

    def forward(self, x):
        return self.add(x, self.f(x))


class Clipped(Connection):
    """At most tau |x| + kappa |f_orth| of the part along the stream gets through."""

    def __init__(self, dim=-1, eps=1e-6, tau=0.1, kappa=0.5):
        super().__init__(dim, eps)
        self.tau, self.kappa = tau, kappa

    def forward(self, x, f, attn_mask=None):
        parallel, orthogonal = timm_ortho.decompose(x, f, self.dim, self.eps)
        length = partial(torch.linalg.vector_norm, dim=self.dim, keepdim=True)
        limit = self.tau * length(x) + self.kappa * length(orthogonal)
        return x + orthogonal + parallel * (limit / length(parallel).clamp_min(self.eps)).clamp(max=1.0)


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """What a test registers is forgotten."""
    for name in ("SPECS", "NOT_RESIDUAL", "REGISTERED"):
        monkeypatch.setattr(tables, name, dict(getattr(tables, name)))
    yield
    timm_ortho.CONNECTIONS.pop("clipped", None)


@pytest.fixture
def known():
    return timm_ortho.register_block(MyBlock, stream="x", kinds=("attention", "mlp"), dim=-1)


def tokens():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def test_the_examples_of_the_pages(tmp_path):
    page = ROOT / "docs" / "own_blocks.md"
    if not page.exists():
        pytest.skip("no checkout")
    examples = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2
    assert examples[0].replace("model =", "mine =") in (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text("\n".join(["import timm", "import timm_ortho", "import torch", *examples]))
    names = runpy.run_path(str(tmp_path / "mine.py"))
    assert {type(site.connection).__name__ for site in sites(names["model"])} == {"Clipped"}
    block = timm_ortho.connect(names["MyBlock"](64), "feature")
    assert [site.kind for site in sites(block)] == ["mlp"]
    x, f = torch.randn(2, 64, 8), torch.randn(2, 64, 8)
    torch.testing.assert_close(names["Clipped"]()(x, f).double(), clipped(x, f), rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------- blocks
def test_a_users_block(known):
    model, x = nn.Sequential(known(), known()), tokens()
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


class Renamed(nn.Module):
    """Its author has another name for ``self``."""

    def __init__(this, twice):
        super().__init__()
        this.f, this.twice = nn.Linear(8, 8), twice

    def forward(this, x):
        x = x + this.f(x)
        if this.twice:
            x = x + this.f(x)
        return x


@pytest.mark.parametrize("twice", [False, True])
def test_self_may_have_another_name(twice):
    timm_ortho.register_block(Renamed, stream="x", kinds=("first", "second"), dim=-1)
    block, x = Renamed(twice), torch.randn(2, 3, 8)
    plain = block(x)
    assert torch.equal(connect(block, "linear")(x), plain)
    assert len(sites(block)) == 1 + twice
    assert not torch.allclose(connect(block, "feature")(x), plain)


def test_a_block_of_a_script_is_pickled():
    class Block(MyBlock):
        __module__ = "__main__"

        def forward(self, x):
            return x + self.f(x)

    timm_ortho.register_block(Block, stream="x", kinds=("mlp",))
    model, x = connect(nn.Sequential(Block()), "feature"), tokens()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    assert not hasattr(routed, "__path__")


SCRIPT = """
import torch, timm_ortho
from torch import multiprocessing, nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.f(x)

def work(rank, model):
    print(len(timm_ortho.sites(model)), model(torch.ones(1, 8)).shape)

timm_ortho.register_block(Block, stream="x", kinds=("mlp",))
if __name__ == "__main__":
    multiprocessing.spawn(work, (timm_ortho.connect(nn.Sequential(Block())),), nprocs=1)
"""


def test_a_block_of_a_script_goes_to_a_spawned_process(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert done.stdout == "1 torch.Size([1, 8])\n", done.stderr


def test_some_layers_and_another_method():
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


def test_a_class_that_is_defined_again_is_another():
    """As a cell of a notebook that runs twice does it."""
    def define():
        class Block(MyBlock):
            def forward(self, x):
                return x + self.f(x)
        return timm_ortho.register_block(Block, stream="x", kinds=("mlp",))

    old, new = define(), define()
    assert len(sites(connect(nn.Sequential(new()), "feature"))) == 1
    with pytest.raises(UnsupportedModelError):
        connect(nn.Sequential(old()), "feature")


def test_what_is_not_residual():
    model = nn.Sequential(Embedding(), timm.models.vision_transformer.Block(8, 2))
    with pytest.raises(UnsupportedModelError, match=r"not supported: test_open_door\.Embedding"):
        connect(model)
    timm_ortho.not_residual(Embedding, "a mean")
    assert len(sites(connect(model))) == 2
    with pytest.raises(TypeError, match=r"must be a class, got a Sequential$"):
        timm_ortho.not_residual(model, "a model")


class Wrong(nn.Module):
    def forward(self, x):
        y = x.relu()
        return y + x.exp()


class Twice(MyBlock):
    def forward(self, x):
        return x + self.f(x) + self.g(x)


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


@pytest.mark.parametrize(("block", "arguments", "error", "message"), [
    (Wrong, dict(stream="z", kinds=("mlp",)), RoutingError,
     r"door.Wrong.*: expected 1 addition to 'z' in forward, found 0 \(none, but to others: y \+ x.exp\(\)\)"),
    (MyBlock, dict(stream="x", kinds=("mlp",)), RoutingError,
     r"expected 1 addition to 'x' in forward, found 2 \(x \+ self.f\(self.norm\(x\)\); x \+ self.g\(x\)\)"),
    (MyBlock, dict(stream="x", kinds=("mlp", "mlp")), ValueError, "kinds must be different identifiers"),
    (MyBlock, dict(stream="x", kinds="mlp"), ValueError, "kinds must be a sequence of names, got 'mlp'"),
    (MyBlock, dict(stream="x", kinds=None), ValueError, "kinds must be a sequence of names, got None"),
    (MyBlock, dict(stream="x", kinds={"attention", "mlp"}), ValueError, "kinds must be a sequence of names, got {"),
    (MyBlock, dict(stream=None, kinds=("mlp",)), ValueError, "stream must be an expression or a sequence of them, got"),
    (MyBlock, dict(stream=[1], kinds=("mlp",)), ValueError, "stream must be an expression or a sequence of them, got"),
    (MyBlock, dict(stream="x", kinds=("attention", "mlp"), dim=1.5), ValueError,
     "dim must be an axis or a sequence of axes, got 1.5"),
    (MyBlock, dict(stream="x", kinds=("attention", "mlp"), dim=(1, None)), ValueError,
     r"dim must be an axis or a sequence of axes, got \(1, None\)"),
    (MyBlock, dict(stream="x", kinds=("a b", "mlp")), ValueError, "kinds must be different identifiers"),
    (MyBlock, dict(stream=("x",), kinds=("attention", "mlp")), ValueError,
     r"stream needs one value, or 2 \(one for each kind\), got 1"),
    (MyBlock, dict(stream="x", kinds=("attention", "mlp"), dim=(1,)), ValueError,
     r"dim needs one value, or 2 \(one for each kind\), got 1"),
    (MyBlock, dict(stream="x", kinds=("attention", "mlp"), keep="all"), ValueError, "unknown keep 'all'"),
    (MyBlock, dict(stream="x", kinds=("attention", "mlp"), method="no"), ValueError, "has no method 'no'"),
    (MyBlock, dict(stream="x +", kinds=("attention", "mlp")), ValueError, "stream 'x [+]' is not an expression"),
    (type("Built", (nn.Module,), {"forward": eval("lambda self, x: x + 1")}), dict(stream="x", kinds=("mlp",)),
     RoutingError, "the source of forward cannot be read: .*; put a class that was typed at Python's prompt in a file"),
    (timm.models.vision_transformer.Block, dict(stream="x", kinds=("mlp", "attention")), ValueError,
     "is already registered"),
    (timm.models.vision_transformer.Block, dict(stream="x", kinds=("mlp",), method="no"), ValueError, "no method 'no'"),
    (nn.TransformerEncoderLayer, dict(stream="x", kinds=("attention", "mlp")), RoutingError, "one fused operation"),
    (Twice, dict(stream="x", kinds=("parallel",)), RoutingError, r"self.g\(x\)' would stay linear in its"),
    (Static, dict(stream="x", kinds=("mlp",), method="add"), RoutingError, "add is called without the block"),
    (Lambda, dict(stream="x", kinds=("mlp",)), RoutingError, "forward cannot be rebuilt in a subclass: KeyError"),
    (Tagged, dict(stream="x", kinds=("mlp",)), RoutingError, "forward cannot be rebuilt in a subclass: TypeError"),
    (enclosed(), dict(stream="x", kinds=("mlp",)), RoutingError, "forward cannot be rebuilt in a subclass: NameError"),
    (len, dict(stream="x", kinds=("attention", "mlp")), TypeError, "must be a class of torch.nn.Module"),
    (MyBlock(), dict(stream="x", kinds=("attention", "mlp")), TypeError, "class of torch.nn.Module, got a MyBlock$"),
])
def test_a_registration_that_does_not_fit(block, arguments, error, message):
    known = dict(tables.SPECS)
    with pytest.raises(error, match=message) as caught:
        timm_ortho.register_block(block, **arguments)
    assert "\n" not in str(caught.value)
    assert known == tables.SPECS


def test_a_dim_outside_the_tensor_is_told_where_it_is_used():
    timm_ortho.register_block(MyBlock, stream="x", kinds=("attention", "mlp"), dim=3)
    with pytest.raises(ValueError, match=r"dim must name one or more different axes in \[-3, 2\], got 3"):
        connect(MyBlock(), "feature")(tokens())


def test_a_block_with_a_forward_of_its_own(known):
    model = nn.Sequential(known())
    model[0].forward = model[0].forward
    with pytest.raises(UnsupportedModelError, match="a MyBlock has an instance attribute forward"):
        connect(model, "feature")
    assert type(model[0]) is MyBlock
    del model[0].forward
    routed_forward = connect(model, "feature")[0].forward
    model[0].forward = lambda x: routed_forward(x)
    connect(model, "global")  # the same class: only the connections are others
    assert {type(site.connection) for site in sites(model)} == {GlobalConnection}
    with pytest.raises(UnsupportedModelError, match="a MyBlock has an instance attribute forward"):
        disconnect(model)
    model(tokens())


def test_an_attribute_of_the_block_is_not_overwritten():
    class Block(MyBlock):
        def __init__(self):
            super().__init__()
            self.connection_mlp = nn.Linear(8, 8)

        def forward(self, x):
            return x + self.connection_mlp(x)

    timm_ortho.register_block(Block, stream="x", kinds=("mlp",))
    model = nn.Sequential(Block())
    with pytest.raises(ValueError, match="0 already has an attribute connection_mlp"):
        connect(model, "feature")
    assert type(model[0].connection_mlp) is nn.Linear


def test_a_mask_of_another_sense():
    class Block(MyBlock):
        def forward(self, x, attn_mask):
            return x + self.f(x)

    forbidden, x = torch.ones(5, 5, dtype=torch.bool).triu(1), tokens()  # as nn.MultiheadAttention has it: causal
    for name, padding in (("attn_mask", True), ("", False)):
        timm_ortho.register_block(Block, stream="x", kinds=("mlp",), mask=name)
        model = connect(Block(), "global")
        assert (model(x, forbidden)[:, 0] == 0).all() == padding
        tables.SPECS.pop(tables.class_name(Block))


def test_names_of_classes_stay_what_they_are(known):
    """FSDP's policies and transformers look for layers by them."""
    model = connect(nn.Sequential(known()), "feature")
    assert type(model[0]).__name__ == "MyBlock"
    assert "MyBlock(" in repr(model)
    assert "timm__" not in repr(connect(timm.create_model("vit_test_linear"), "feature"))


class WrittenInAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.adds = nn.Linear(8, 8), nn.ModuleList(create_connection("feature") for _ in range(2))

    def forward(self, x):
        for add in self.adds:
            x = add(x, self.f(x))
        return x


def test_one_connection_by_two_names():
    block = Written()
    block.other = block.add
    connect(block, "global")
    assert [type(block.add), type(block.other)] == [GlobalConnection] * 2
    disconnect(block)
    assert [type(block.add), type(block.other)] == [LinearConnection] * 2


def test_connections_in_a_list_of_modules():
    model = connect(WrittenInAList(), "global")
    assert [type(site.connection) for site in sites(model)] == [GlobalConnection] * 2
    assert [type(site.connection) for site in sites(disconnect(model))] == [LinearConnection] * 2


def test_connections_that_a_block_was_written_with(known):
    model = nn.Sequential(Written(), known())
    assert [(site.layer, site.kind) for site in sites(model)] == [(0, "add")]
    connect(model, "global", eps=1e-3)
    assert {type(site.connection) for site in sites(model)} == {GlobalConnection}
    assert [site.layer for site in sites(model)] == [0, 1, 1]
    assert sites(model)[0].connection.dim == -1
    assert sites(model)[0].connection.eps == 1e-3
    with pytest.raises(ValueError, match="the width of its stream, which skips require, is unknown"):
        connect(model, "feature", skip="orthogonal_tp")
    disconnect(model)
    assert [type(site.connection) for site in sites(model)] == [LinearConnection]


# ---------------------------------------------------------------------------------------------- connections
def clipped(x, f, tau=0.1, kappa=0.5):
    x, f = x.double(), f.double()
    s = (x * f).sum(-1, keepdim=True) / ((x * x).sum(-1, keepdim=True) + 1e-6)
    parallel, orthogonal = s * x, f - s * x
    limit = tau * x.norm(dim=-1, keepdim=True) + kappa * orthogonal.norm(dim=-1, keepdim=True)
    return x + orthogonal + parallel * (limit / parallel.norm(dim=-1, keepdim=True)).clamp(max=1)


def test_a_connection_as_a_class_and_as_a_function(known):
    x, f = torch.randn(2, 64, 8), torch.randn(2, 64, 8)
    torch.testing.assert_close(Clipped()(x, f).double(), clipped(x, f), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(Clipped()(x, f), FeatureConnection()(x, f))
    model = connect(nn.Sequential(known()), Clipped)
    assert {(type(site.connection), site.connection.name) for site in sites(model)} == {(Clipped, "Clipped")}
    model(tokens()).sum().backward()
    connect(model, lambda dim, eps: Clipped(dim, eps, tau=0.0, kappa=0.0))
    expected = connect(copy.deepcopy(model), "feature")(tokens())
    torch.testing.assert_close(model(tokens()), expected)
    connect(model, partial(Clipped, kappa=0.0))
    assert {site.connection.kappa for site in sites(model)} == {0.0}


def test_arguments_that_a_partial_has_bound(known):
    model = connect(nn.Sequential(known()), partial(FeatureConnection, prob=0.25), prob=1.0)
    assert [site.connection.prob for site in sites(model)] == [0.25] * 2


def test_a_connection_by_name(tmp_path):
    """In variants, in the arguments of train.py, in config.json and from there again, and on the card."""
    timm_ortho.register_connection("clipped", Clipped)
    timm_ortho.register_connection("clipped", Clipped)  # a cell of a notebook that runs twice
    model = timm.create_model("vit_test_ortho", connection="clipped", connection_eps=1e-4).eval()
    assert {(type(site.connection), site.connection.eps) for site in sites(model)} == {(Clipped, 1e-4)}
    card = hub.export(model, str(tmp_path / "out"), "me/clipped")  # a path as text or as a Path
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_args"].items() >= {"connection": "clipped", "connection_eps": 1e-4}.items()
    assert "clipped" in str(card)
    again = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))


def test_an_argument_of_its_own_is_in_config_json(monkeypatch):
    """One that variants take: an entry in ``OF_CONNECTIONS`` is enough for both."""
    monkeypatch.setitem(arguments.OF_CONNECTIONS, "tau", "tau")
    timm_ortho.register_connection("clipped", Clipped)
    model = connect(timm.create_model("vit_test_linear"), "clipped")
    assert repository._connection_arguments(model) == {
        "connection": "clipped", "connection_eps": 1e-6, "connection_tau": 0.1}


def test_a_connection_without_a_name_is_not_published(tmp_path):
    model = connect(timm.create_model("vit_test_linear"), Clipped)
    with pytest.raises(hub.PublishError, match=r"timm_ortho\.register_connection"):
        hub.export(model, tmp_path / "out", "me/clipped")


def test_a_connection_of_a_module_is_compared_by_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import multiprocessing, pathlib, timm_ortho\n"
        "pathlib.Path(__file__).with_suffix('.txt').write_text(multiprocessing.get_context().get_start_method())\n"
        "class Half(timm_ortho.FeatureConnection):\n    def forward(self, x, f, attn_mask=None):\n"
        "        return super().forward(x, 0.5 * f)\ntimm_ortho.register_connection('half', Half)\n")
    monkeypatch.syspath_prepend(tmp_path)
    command = ["compare", "--epochs", "1", "--seeds", "1", "--connections", "linear", "half", "--output",
               str(tmp_path / "out"), "--model-kwargs", "embed_dim=16", "depth=1", "num_heads=2", "--option"]
    try:
        assert cli.main([*command, "device_modules=mine"]) == 0
    finally:
        timm_ortho.CONNECTIONS.pop("half", None)
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line} >= {"Linear", "half"}
    options = yaml.safe_load((tmp_path / "out" / "half-seed0" / "args.yaml").read_text())
    assert options["device_modules"] == ["timm_ortho", "mine"]
    # a run's loaders start their workers as they would in a process of their own, not from a second fork server
    assert (tmp_path / "mine.txt").read_text() == multiprocessing.get_context().get_start_method()
    assert cli.main([*command, "device_modules=nowhere"]) == 2
    assert "option 'device_modules': No module named 'nowhere'" in capsys.readouterr().err


class WithoutDim(Connection):
    def __init__(self, eps=1e-6):
        super().__init__(-1, eps)


class OtherForward(Connection):
    def forward(self, x, f, g):
        return x


class WithoutModule(Connection):
    def __init__(self, dim=-1, eps=1e-6):
        self.dim = dim


class WithoutDefault(Connection):
    def __init__(self, tau, dim=-1, eps=1e-6):
        super().__init__(dim, eps)


@pytest.mark.parametrize(("connection", "message"), [
    (WithoutModule, r"WithoutModule.__init__ must begin with super\(\).__init__\(dim, eps\)"),
    (WithoutDefault, "WithoutDefault must have defaults for its own arguments; without a default: tau"),
    (Connection(), "connection must be a name, a class or a function .*, got an instance of Connection"),
    (WithoutDim, "WithoutDim must accept dim and eps .*; missing: dim"),
    (OtherForward, r"OtherForward.forward must accept \(x, f, attn_mask=None\), got \(x, f, g\)"),
    (lambda dim, eps: nn.Identity(), "must return a timm_ortho.Connection, got Identity"),
    (3, "connection must be a name, a class or a function .*, got 3"),
])
def test_a_connection_of_another_kind(known, connection, message):
    model = nn.Sequential(known())
    for call in (lambda: connect(model, connection), lambda: timm_ortho.register_connection("other", connection)):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert type(model[0]) is MyBlock
    assert "other" not in timm_ortho.CONNECTIONS


@pytest.mark.parametrize(("name", "message"), [
    ("feature", "connection 'feature' already exists, FeatureConnection"), ("a b", "must be an identifier")])
def test_a_name_that_cannot_be_had(name, message):
    with pytest.raises(ValueError, match=message):
        timm_ortho.register_connection(name, Clipped)


def test_a_connection_that_is_defined_again_is_the_same():
    """As a cell of a notebook that runs twice does it."""
    def define():
        class Cell(FeatureConnection):
            pass
        return Cell

    for cell in (define(), define()):
        timm_ortho.register_connection("clipped", cell)
        assert type(create_connection("clipped")) is cell
    timm_ortho.CONNECTIONS["clipped"] = partial(Clipped, tau=0.0)
    with pytest.raises(ValueError, match="connection 'clipped' already exists, partial"):
        timm_ortho.register_connection("clipped", partial(Clipped, tau=1.0))


def test_disconnect_leaves_a_model_of_timm_as_it_was():
    model = timm.create_model("resnetv2_18", num_classes=3)
    classes, names, keys = [type(m) for m in model.modules()], [n for n, _ in model.named_modules()], model.state_dict()
    x = torch.randn(2, 3, 32, 32)
    expected = model.eval()(x)
    connect(model, "hybrid", skip="orthogonal_tp")
    disconnect(model)
    assert [type(module) for module in model.modules()] == classes
    assert [name for name, _ in model.named_modules()] == names
    assert model.state_dict().keys() == keys.keys()
    assert torch.equal(model(x), expected)
    assert disconnect(model) is model
