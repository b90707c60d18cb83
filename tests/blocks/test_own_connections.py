"""Connections that users write: classes, functions and registered names in blocks, variants, config.json and cards."""
import copy
import json
import os
import runpy
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from helpers.own_block import MyBlock, tokens
from helpers.pages import blocks, text_of
from torch import nn

import timm_ortho
from timm_ortho import Connection, FeatureConnection, connect, create_connection, hub, sites

ROOT = Path(timm_ortho.__file__).parents[1]

pytestmark = pytest.mark.usefixtures("restored")


class Clipped(Connection):
    """A connection that clips the parallel component to the length tau |x| + kappa |f_orth|."""

    def __init__(self, dim=-1, eps=1e-6, tau=0.1, kappa=0.5):
        super().__init__(dim, eps)
        self.tau, self.kappa = tau, kappa

    def forward(self, x, f, attn_mask=None):
        x = self.carried(x)
        parallel, orthogonal = timm_ortho.decompose(x, f, self.dim, self.eps)
        length = partial(torch.linalg.vector_norm, dim=self.dim, keepdim=True)
        limit = self.tau * length(x) + self.kappa * length(orthogonal)
        return x + orthogonal + parallel * (limit / length(parallel).clamp_min(self.eps)).clamp(max=1.0)


def write_examples(path, first, *others):
    """Write examples of the page into a module."""
    examples = blocks(text_of("own_blocks.md"))
    path.write_text("\n".join(examples[number] for number in (first, *others)))


def test_the_examples_of_the_page(tmp_path):
    write_examples(tmp_path / "mine.py", 0, 1)
    names = runpy.run_path(str(tmp_path / "mine.py"))
    assert {type(site.connection).__name__ for site in sites(names["model"])} == {"Clipped"}
    block = timm_ortho.connect(names["MyBlock"](64), "feature")
    assert [site.kind for site in sites(block)] == ["mlp"]
    x, f = torch.randn(2, 64, 8), torch.randn(2, 64, 8)
    torch.testing.assert_close(names["Clipped"]()(x, f).double(), clipped_in_float64(x, f), rtol=1e-5, atol=1e-6)


USE = """
import my_module, timm, timm_ortho
from timm_ortho.lab.planning.recipe import resolve_variant
timm.models.register_model(my_module.my_other)
try:
    resolve_variant({"model": "my_other"}, "digits")
except timm_ortho.lab.LabError as error:
    assert "of 'my_other'; call timm_ortho.register_variants in the module that reg" in str(error)
else:
    raise AssertionError
for name, connection in (("my_net_ortho", "FeatureConnection"), ("my_net_orthog", "GlobalConnection")):
    model = timm.create_model(name, depth=3, num_classes=7, in_chans=1)
    assert [type(site.connection).__name__ for site in timm_ortho.sites(model)] == [connection] * 3
timm_ortho.hub.export(model, "exported", "me/my-net")
again = timm_ortho.pull("local-dir:exported")
assert (len(timm_ortho.sites(again)), again.num_classes) == (3, 7)
timm_ortho.register_variants("my_net")  # again, as in a notebook
assert timm.create_model("my_net").blocks[0].__class__ is my_module.MyBlock  # the architecture itself is unchanged
for name in ("my_nett", "my_net.untrained", my_module.my_net):
    try:
        timm_ortho.register_variants(name)
    except ValueError as error:
        assert f"timm has no architecture {name!r} with a configuration" in str(error)
    else:
        raise AssertionError(name)
"""
COMPARE = """
import sys
from timm_ortho import cli
options = dict(model="my_net", device_modules="my_module", dataset="digits", epochs=1, seeds=1, output="out")
arguments = [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]
assert cli.main(["compare", "--connections", "linear", "feature", "--model-kwargs", "depth=1", *arguments]) == 0
cli.main(["push", "out/feature-seed0", "me/my-net", "--dry-run", "--device-modules", "my_module", "--output", "pushed"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [pytest.param(USE, id="use"), pytest.param(COMPARE, id="compare")])
def test_an_architecture_of_the_page_has_variants(tmp_path, code):
    """The names stay registered, so this test uses a new process."""
    write_examples(tmp_path / "my_module.py", 0, 2)
    with (tmp_path / "my_module.py").open("a") as file:
        file.write("def my_other(**kwargs): return my_net(**kwargs)\n")
    script = f"if __name__ == '__main__':{textwrap.indent(code, '    ')}"  # the forkserver imports the script
    (tmp_path / "script.py").write_text(script)
    path = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if code is COMPARE:
        config = json.loads((tmp_path / "pushed" / "config.json").read_text())
        assert config["architecture"].startswith("my_net_ortho.")


def clipped_in_float64(x, f, tau=0.1, kappa=0.5):
    x, f = x.double(), f.double()
    s = (x * f).sum(-1, keepdim=True) / ((x * x).sum(-1, keepdim=True) + 1e-6)
    parallel, orthogonal = s * x, f - s * x
    limit = tau * x.norm(dim=-1, keepdim=True) + kappa * orthogonal.norm(dim=-1, keepdim=True)
    return x + orthogonal + parallel * (limit / parallel.norm(dim=-1, keepdim=True)).clamp(max=1)


def test_a_connection_as_a_class_and_as_a_function(registered):
    model = connect(nn.Sequential(registered()), Clipped)
    assert {(type(site.connection), site.connection.name) for site in sites(model)} == {(Clipped, "Clipped")}
    model(tokens()).sum().backward()
    connect(model, lambda dim, eps=1e-6: Clipped(dim, eps, tau=0.0, kappa=0.0))
    expected = connect(copy.deepcopy(model), "feature")(tokens())
    torch.testing.assert_close(model(tokens()), expected)
    for arguments, kappa in (({}, 0.25), (dict(kappa=1.0), 1.0)):
        connect(model, partial(Clipped, kappa=0.25), **arguments)
        assert {site.connection.kappa for site in sites(model)} == {kappa}


def test_a_connection_by_name(tmp_path):
    """A variant accepts a registered name. Exports store it in config.json and the card, and loading restores it."""
    timm_ortho.register_connection("clipped", Clipped)
    timm_ortho.register_connection("clipped", Clipped)  # the cell of a notebook may run twice
    model = timm.create_model("vit_test_ortho", connection="clipped", connection_eps=1e-4).eval()
    assert {(type(site.connection), site.connection.eps) for site in sites(model)} == {(Clipped, 1e-4)}
    card = hub.export(model, str(tmp_path / "out"), "me/clipped")  # a str is accepted as well as a Path
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_args"].items() >= {"connection": "clipped", "connection_eps": 1e-4}.items()
    assert "clipped" in str(card)
    again = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))


def test_a_connection_without_a_name_cannot_be_exported(tmp_path):
    model = connect(timm.create_model("vit_test_linear"), Clipped)
    with pytest.raises(hub.PublishError, match=r"timm_ortho\.register_connection"):
        hub.export(model, tmp_path / "out", "me/clipped")


class WithoutDim(Connection):
    def __init__(self, eps=1e-6):
        super().__init__(-1, eps)


class WithoutModule(Connection):
    def __init__(self, dim=-1, eps=1e-6):
        self.dim = dim


class WithoutDefault(Connection):
    def __init__(self, tau, dim=-1, eps=1e-6):
        super().__init__(dim, eps)


@pytest.mark.parametrize(("connection", "message"), [
    (WithoutModule, r"must return a timm_ortho.Connection whose constructor calls super\(\).__init__\(dim, eps\)"),
    (WithoutDefault, r"connection 'WithoutDefault': WithoutDefault.*missing 1 required positional argument: 'tau'"),
    (lambda dim, eps, tau: Clipped(dim, eps), "missing 2 required positional arguments: 'eps' and 'tau'"),
    (Connection(), "connection must be a name, a class or a function .*, got an instance of Connection"),
    (WithoutDim, "WithoutDim must accept dim and eps "),
    (lambda dim, eps=1e-6: nn.Identity(), "must return a timm_ortho.Connection .*, got Identity"),
    (3, "connection must be a name, a class or a function .*, got "),
])
def test_a_wrong_connection(registered, connection, message):
    model = nn.Sequential(registered())
    for call in (lambda: connect(model, connection), lambda: timm_ortho.register_connection("other", connection)):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert type(model[0]) is MyBlock
    assert "other" not in timm_ortho.CONNECTIONS


@pytest.mark.parametrize(("name", "message"), [
    ("feature", r"connection 'feature' already exists: choose another name"), ("a b", "must be an identifier")])
def test_a_wrong_name_of_a_connection(name, message):
    with pytest.raises(ValueError, match=message):
        timm_ortho.register_connection(name, Clipped)


def test_a_connection_that_is_defined_again_replaces_the_first():
    """A notebook cell that runs twice defines its class twice."""
    def define():
        class Cell(FeatureConnection):
            pass
        return Cell

    for cell in (define(), define()):
        timm_ortho.register_connection("clipped", cell)
        assert type(create_connection("clipped")) is cell
    timm_ortho.CONNECTIONS["clipped"] = partial(Clipped, tau=0.0)
    with pytest.raises(ValueError, match=r"connection 'clipped' already exists: choose another name"):
        timm_ortho.register_connection("clipped", partial(Clipped, tau=1.0))
