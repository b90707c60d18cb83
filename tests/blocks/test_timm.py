"""The table of timm's residual blocks: each row on a small model, and additions that connections do not replace."""
import copy
import importlib
import inspect
import pickle
import pkgutil
import re
import textwrap
from typing import Optional

import pytest
import timm
import torch
from helpers.branches import branches
from helpers.small_models import LARGER, MADE, SHARED_BLOCKS, SMALL, build, class_of, host, of_modules, step
from timm.models import list_modules

from timm_ortho import connect, sites
from timm_ortho.blocks import lookup, routed, routed_class, spec_of, specs, timm as table
from timm_ortho.blocks.detection import looks_residual
from timm_ortho.models import coverage

TIMM = specs("timm")
ALL = [*SMALL, *MADE, *LARGER]
SCOPE = {name: ("feature", "global")[index % 2] for index, name in enumerate([*ALL, *SHARED_BLOCKS])}
MODELS = [*SMALL, *MADE, *(pytest.param(name, marks=pytest.mark.whole) for name in LARGER)]
SHAPES = [pytest.param(name, marks=pytest.mark.whole if index % 3 or name in LARGER else ())
          for index, name in enumerate([*ALL, *SHARED_BLOCKS])]


@pytest.mark.parametrize("name", MODELS)
def test_linear_is_timms_model_and_other_connections_train(name):
    """Linear connections change no bit. Other connections change the output, but no parameter loses its gradient.

    The row of each block names the correct stream, and the correct kind of each branch.
    """
    host, size = build(name)
    model = connect(copy.deepcopy(host), "linear")
    expected = step(host, size)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(step(model, size), expected, strict=True))
    parameters = branches(connect(model, SCOPE[name]))
    result = step(model, size)
    assert not torch.equal(result[0], expected[0])
    assert all(tensor is None or torch.isfinite(tensor).all() for tensor in result)
    assert [tensor is None for tensor in result] == [tensor is None for tensor in expected]
    assert parameters.keys() == {site.name for site in sites(model)}
    for site in sites(model):
        # An edgenext block adds the output of its MLP to its own input. The attention comes before the MLP and is
        # therefore part of the MLP's branch.
        if site.kind in ("attention", "mlp") and (name, site.kind) != ("edgenext_xx_small", "mlp"):
            attends = any(re.search("att|mhsa|xca|qkv", parameter) for parameter in parameters[site.name])
            assert attends == (site.kind == "attention"), (
                f"{site.name}: the branch with {parameters[site.name]} is not of kind {site.kind}; correct `kinds`")
    transformed = outputs(connect(model, SCOPE[name], skip="orthogonal_tp"), torch.randn(2, 3, size, size))
    assert all(torch.isfinite(tensor).all() for tensor in transformed)


def outputs(model, x):
    with torch.no_grad():
        y = model.eval()(x)
    return y if isinstance(y, tuple) else (y,)


@pytest.mark.parametrize("name", SHAPES)
def test_streams_have_the_width_in_the_table(name):
    """Check output shapes, and the width of stream and branch at every site. Skip transforms need this width."""
    with torch.device("meta"):
        model, size = build(name)
        expected = [tensor.shape for tensor in outputs(model, torch.empty(2, 3, size, size))]
    connect(model, SCOPE[name], skip="orthogonal_tp")
    seen = {}
    for site in sites(model):
        block = model.get_submodule(site.name.rpartition(".")[0])
        width = spec_of(block).widths(block)[site.kind]
        site.connection.register_forward_pre_hook(
            lambda module, inputs, key=(site.name, width): seen.update(
                {key: [tensor.shape[module.dim] for tensor in inputs]}))
    with torch.device("meta"):
        assert [tensor.shape for tensor in outputs(model, torch.empty(2, 3, size, size))] == expected
    assert sorted(name for name, _ in seen) == sorted(site.name for site in sites(model))
    assert {key: widths for key, widths in seen.items() if set(widths) != {key[1]}} == {}


def test_every_covered_module_has_a_model_here():
    covered = {row.module for row in coverage.timm_modules() if row.covered}
    assert covered <= set(of_modules())


@pytest.mark.slow
def test_every_row_of_the_table_has_a_model_here():
    with torch.device("meta"):
        models = [build(name)[0] for name in [*ALL, *SHARED_BLOCKS] if name in MADE or timm.is_model(name)]
    covered = {spec.name for model in models for module in model.modules()
             if (spec := spec_of(module)) and routed.route(routed.host_class(module), spec).reached(module)}
    assert {spec.name for spec in TIMM if host(spec)} - covered == set(), "each row needs a model in tests/helpers"


def test_every_row_is_valid_for_the_installed_timm():
    found = [spec for spec in TIMM if host(spec)]
    assert len(found) > 130
    for spec in found:
        cls = routed_class(host(spec), spec)
        assert cls is routed_class(host(spec), spec)
        source = inspect.getsource(getattr(cls, spec.method, cls.forward))
        assert all(f"self.{attribute}(" in source for attribute in spec.sites.values()), spec.name
        assert len(set(spec.sites.values())) == sum(kind is not None for kind in spec.kinds), spec.name


@pytest.mark.parametrize(("name", "norms"), {
    "vision_transformer.Block": {"attention": "norm2"},
    "vision_transformer.ResPostBlock": {},
    "beit.Block": {"attention": "norm2"},  # the additions are on the two sides of an `if`
    "cait.LayerScaleBlockClassAttn": {"attention": "norm2"},
    "coat.ParallelBlock": {"attention_2": "norm22", "attention_3": "norm23", "attention_4": "norm24"},
    "gemma4_vit.Gemma4Block": {"attention": "norm3"},
    "metaformer.MetaFormerBlock": {},  # self.res_scale2(x) comes before the norm
    "resnet.BasicBlock": {},
    "swin_transformer.SwinTransformerBlock": {},  # reshapes the sum before the norm
    "tnt.Block": {"attention_pixel": "norm_mlp_in", "attention": "norm_mlp"},
    "xcit.ClassAttentionBlock": {},  # the norm is on one side of an `if`
    "xcit.XCABlock": {"attention": "norm3", "conv": "norm2"},
}.items())
def test_sums_that_enter_a_norm_next(name, norms):
    spec = lookup.SPECS[f"timm.models.{name}"]
    if not host(spec):
        pytest.skip(f"timm {timm.__version__} has no {spec.name}")
    assert routed.route(host(spec), spec).next_norms == norms


# --------------------------------------------------------------------------------- additions that are not sites
def test_a_block_with_one_of_its_two_sums():
    model, size = build("visformer_tiny")
    connect(model, "hybrid", start="linear")
    halves = [module for module in model.modules() if type(module).__qualname__.endswith("visformer__Block__mlp")]
    assert halves
    assert not any(hasattr(half, "connection_attention") for half in halves)
    again = pickle.loads(pickle.dumps(model))
    assert [type(a) for a in again.modules()] == [type(a) for a in model.modules()]
    assert all(torch.equal(a, b) for a, b in zip(step(again, size), step(model, size), strict=True))


@pytest.mark.parametrize("name", [
    "repvit_m1", "shvit_s1",
    *(pytest.param(name, marks=pytest.mark.whole) for name in ("efficientvim_m1", "fastvit_t8")),
])
def test_folding_a_model_changes_nothing(name):
    """Re-parameterisation folds some additions into convolutions, so connections must not replace these additions."""
    model, size = build(name)
    model = connect(model, "feature").eval()
    step(model, size)  # changes BatchNorm's initial mean 0 and variance 1
    x = torch.randn(2, 3, size, size)
    folded = timm.utils.reparameterize_model(model.eval())
    torch.testing.assert_close(folded(x), model(x), rtol=1e-3, atol=1e-3)
    assert len(sites(folded)) == len(sites(model))


def test_the_list_of_classes_without_a_stream_is_needed():
    """Classes in NOT_RESIDUAL look residual, except pnasnet's cells. The table of blocks omits them."""
    assert not set(table.NOT_RESIDUAL) & {spec.name for spec in TIMM}
    here = [cls for cls in map(class_of, table.NOT_RESIDUAL) if cls]
    assert len(here) > 30
    names = {cls.__name__ for cls in here if not looks_residual(cls)}
    assert names <= {"Cell", "CellStem0"}  # pnasnet's cells do not look residual, but are listed too


def test_every_class_of_timm_that_looks_residual_is_in_a_table():
    """`connect` refuses models with a class that looks residual, unless blocks/timm.py lists the class.

    A base class of a listed class may be missing from blocks/timm.py.
    """
    names = {f"timm.layers.{info.name}" for info in pkgutil.iter_modules(timm.layers.__path__)}
    names |= {f"timm.models.{name}" for name in list_modules() if coverage.architectures(name)}
    in_table = {host(spec) for spec in TIMM} - {None}
    names |= {cls.__module__ for cls in in_table}
    classes = {
        cls for name in names for cls in vars(importlib.import_module(name)).values()
        if inspect.isclass(cls) and issubclass(cls, torch.nn.Module) and cls.__module__ == name
    }
    assert len(classes) > 600
    missing = {cls for cls in classes - in_table if is_residual(cls)}
    assert {cls for cls in missing if not any(issubclass(block, cls) for block in in_table)} == set()


def is_residual(cls):
    return f"{cls.__module__}.{cls.__qualname__}" not in lookup.NOT_RESIDUAL and looks_residual(cls)


RESIDUAL = [  # arguments and statements of a forward pass whose sums look residual
    ("x", "y = self.f(x)\n#   y = y.relu()\nreturn x + y"), ("x", "z: torch.Tensor = self.f(x)\nreturn z + x"),
    ("x", "def inner(t):\n    return t + self.f(t)\nreturn checkpoint(inner, x)"),
    ("x", "return checkpoint(lambda t, *, flag=None: t + self.f(t), x)"), ("x", "return torch.add(x, self.f(x))"),
    ("x", "return self.f(x).add_(x)"), ("x", "return self.sum.add_relu(self.f(x), x)"),
    ("x", "return self.g(y := self.f(x)) + y"), ("*args", "return args[0] + self.f(args[0])"),
    ("xs", "return [x + self.f(x) for x in xs]"),
    ("hidden_states, input_tensor", "return self.f(hidden_states) + input_tensor"),
    ("mask, *, residual, branch: Optional[torch.Tensor] = None", "return torch.add(branch, residual)"),
    ("first, *others", "return others[0] + others[1]"),
]
OTHERS = [
    ("x, attn_mask, mask=None, rel_pos_bias=None, pixel_pos=None",
     "return (x @ x) + attn_mask + mask + rel_pos_bias + pixel_pos"),
    ("x, attention_mask, encoder_states",
     "attention_mask = self.f(encoder_states) if self.cross else attention_mask\nreturn (x @ x) + attention_mask"),
    ("x, start: int, scale: Optional[float] = None", "return self.f(x, start + len(x)) * (scale + start)"),
    ("x, children", "return self.f([x] + children)"), ("x", "return x + self.pos_embed(x).to(x)"),
    ("x, token_type_ids, position_ids", "return x + self.token_type_embeddings(token_type_ids) + self.f(position_ids)"),
    ("x", "return torch.add(x, 1.0)"), ("x", "seen = set()\nseen.add(x)\nreturn x"),
    ("x", "y = self.f(x)\nreturn y + self.g(y)[1:]"), ("x", "return x + self.interpolate_pos_encoding(x)"),
]


@pytest.mark.parametrize(("arguments", "body", "residual"), [
    *((*case, True) for case in RESIDUAL), *((*case, False) for case in OTHERS)])
def test_looks_residual(tmp_path, arguments, body, residual):
    header = f"class Block(torch.nn.Module):\n    def forward(self, {arguments}):\n"
    (tmp_path / "block.py").write_text(header + textwrap.indent(body, 8 * " "))
    names = {"torch": torch, "Optional": Optional, "__name__": __name__}
    exec(compile((tmp_path / "block.py").read_text(), tmp_path / "block.py", "exec"), names)
    assert looks_residual(names["Block"]) is residual


# ---------------------------------------------------------------------------------------------- scope of tokens
def test_the_global_scope_projects_each_token_of_xcits_class_attention():
    """The branch outputs contain copies of the patch tokens. These would dominate a projection over all tokens."""
    model, size = build("xcit_nano_12_p8_224")
    connect(model, "global").eval()
    checked = []

    def measure(connection, inputs, y):
        (x, f), y = (tensor[:, 0] for tensor in inputs[:2]), y[:, 0]
        across = y - x
        torch.testing.assert_close((across * x).sum(-1), torch.zeros(len(x)), atol=1e-4, rtol=0.0)
        torch.testing.assert_close(across, f - (f * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True) * x)
        checked.append(connection)

    own = [site for site in sites(model) if site.name.startswith("cls_attn_blocks")]
    for site in own:
        site.connection.register_forward_hook(measure)
    outputs(model, torch.randn(2, 3, size, size))
    assert len(own) == 2
    assert checked == [site.connection for site in own]
    assert {site.connection.dims is None for site in sites(model) if site not in own} == {True}


# ------------------------------------------------------------------------------------------------------ coverage
def test_coverage_lists_every_architecture_of_the_registry():
    rows = {row.module: row for row in coverage.timm_modules()}
    assert set(rows) == {name for name in list_modules() if coverage.architectures(name)}
    for row in rows.values():
        assert sorted([*row.covered, *row.left_out]) == sorted(coverage.architectures(row.module))
    assert sum(len(row.covered) for row in rows.values()) > 1000
    assert rows["vgg"].covered == {}
    assert set(rows["vgg"].left_out.values()) == {"no residual additions"}
    assert rows["resnet"].covered["resnet18"] == 8
    assert rows["resnet"].before_norm == {}
    assert coverage.cells(rows["convit"]) == ("convit", "3", "24", "12", "")
    assert all(row.before_norm.keys() <= row.covered.keys() for row in rows.values())
    assert "re-parameterisation" in rows["byobnet"].left_out["repvgg_a0"]


def test_every_covered_architecture_is_registered():
    names = set(timm.list_models())
    bases = coverage.bases()
    assert len(bases) > 1000
    assert {base + suffix for base in bases for suffix in ("_ortho", "_orthog")} <= names
    assert not {name for row in coverage.timm_modules() for name in row.left_out if name + "_ortho" in names}


def test_architectures_of_a_newer_timm_are_reported(monkeypatch):
    monkeypatch.setattr(coverage, "load", lambda: {"timm": "1.0.0", "modules": {
        "resnet": {"covered": {"resnet18": 8}, "left_out": {}, "before_norm": {}}}})
    rows = {row.module: row for row in coverage.timm_modules()}
    assert rows["resnet"].left_out["resnet34"] == coverage.UNKNOWN
    assert set(rows["vgg"].left_out.values()) == {coverage.UNKNOWN}
    assert "resnet34" in coverage.bases()  # registered because its module is known; creating a variant may raise
    assert "vgg11" not in coverage.bases()
