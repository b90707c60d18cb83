"""Transforms of the user: the examples of docs/transformations.md, their registration, and errors."""
import json
import runpy
from unittest import mock

import pytest
import timm
import torch
from helpers.pages import blocks, section
from torch import nn

import timm_ortho
from timm_ortho import SKIPS, connect, connection_arguments, create_skip, hub, register_skip, sites
from timm_ortho.lab.rewrites import SkipRewriteError, absorb, diagonalise


@pytest.fixture(autouse=True)
def restored():
    with mock.patch.dict(SKIPS):
        yield


@pytest.fixture
def page(tmp_path):
    """Run the example of the page, and return its names."""
    example, = blocks(section("transformations.md", "Your own transformation"))
    (tmp_path / "mine.py").write_text(f"import timm\nimport timm_ortho\nimport torch\n{example}", encoding="utf-8")
    return runpy.run_path(str(tmp_path / "mine.py"))


def matrix(name, width=8):
    """Return P: the columns are the images of the unit vectors."""
    return create_skip(name, width)(torch.eye(width, dtype=torch.float64)).T


@pytest.mark.usefixtures("page")
def test_the_examples_satisfy_the_conditions_of_section_3_4():
    """The absolute values of the eigenvalues are at most 1, and at least one is 1. A periodic P has P^(N+1) = P."""
    p = matrix("periodic")
    powers = [torch.linalg.matrix_power(p, k) for k in range(1, 5)]
    assert torch.equal(powers[3], p)
    assert not any(torch.equal(power, p) for power in powers[1:3])  # N = 3, so P is not idempotent
    assert not torch.equal(p @ p.T, torch.eye(8, dtype=torch.float64))
    sizes = torch.linalg.eigvals(p).abs()
    torch.testing.assert_close(sizes.sort().values, torch.tensor([0.0] * 2 + [1.0] * 6, dtype=torch.float64))
    sizes = torch.linalg.eigvals(matrix("relaxed")).abs()
    torch.testing.assert_close(sizes.sort().values, torch.tensor([0.9] * 7 + [1.0], dtype=torch.float64))


def test_a_registered_name_in_a_model_and_its_files(page, tmp_path):
    assert {type(site.connection.skip).__name__ for site in sites(page["model"])} == {"Periodic"}
    model = timm.create_model("vit_test_ortho", skip="periodic").eval()
    assert connection_arguments(model) == {"connection": "feature", "eps": 1e-6, "skip": "periodic"}
    card = hub.export(model, tmp_path / "out", "me/periodic")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_args"]["skip"] == "periodic"
    assert "periodic: four branches: sets the first to zero and rotates the others" in str(card)
    again = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))
    for rewrite in (absorb, diagonalise):
        with pytest.raises(SkipRewriteError, match="got Periodic"):
            rewrite(model)
    del SKIPS["periodic"]
    with pytest.raises(timm_ortho.WeightsError, match=r"unknown skip 'periodic', .*import the module that registers"):
        timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)


class Matrix(nn.Module):
    def __init__(self, width, dim, count=0, seed=0, site=0, **_):
        super().__init__()
        self.arguments = (width, dim, count, seed, site)
        self.register_buffer("p", torch.eye(width), persistent=False)

    def forward(self, x):
        return x @ self.p


def test_arguments_device_and_dtype():
    register_skip("matrix", Matrix)
    register_skip("matrix", Matrix)  # the cell of a notebook may run twice
    model = timm.create_model("vit_test_linear").double()
    keys = list(model.state_dict())
    connect(model, "feature", skip="matrix", skip_seed=3)
    skips = [site.connection.skip for site in sites(model)]
    assert [skip.arguments for skip in skips] == [(32, -1, len(skips), 3, site) for site in range(len(skips))]
    assert {skip.p.dtype for skip in skips} == {torch.float64}
    assert list(model.state_dict()) == keys
    model(torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="matrix has no choice of ranks"):
        connect(model, skip="matrix", skip_rank=2)


@pytest.mark.parametrize(("name", "make", "message"), [
    ("scaled", Matrix, "skip 'scaled' already exists: choose another name"),
    ("a b", Matrix, "the name of a skip must be an identifier, got 'a b'"),
    ("mine", nn.Identity(), "must (be a class|accept width and dim)"),
    ("mine", lambda width: nn.Identity(), r"must accept width and dim, may accept branches, count, .*got \(width\)"),
    ("mine", lambda width, dim, angle: nn.Identity(), r"needs defaults for other arguments; got \(width, dim, angle\)"),
])
def test_a_wrong_registration(name, make, message):
    before = dict(SKIPS)
    with pytest.raises(ValueError, match=message) as caught:
        register_skip(name, make)
    assert "\n" not in str(caught.value)
    assert before == SKIPS


@pytest.mark.parametrize("connection", ["linear", "feature"])
def test_a_transform_that_changes_the_shape(connection):
    class Mean(nn.Module):
        def __init__(self, width, dim):
            super().__init__()
            self.dim = dim

        def forward(self, x):
            return x.mean(self.dim, keepdim=True)

    register_skip("mean", Mean)
    model = timm.create_model("vit_test_ortho", connection=connection, skip="mean")
    with pytest.raises(ValueError, match=r"must have the same shape; x of shape \(2, 17, 1\) and f of shape"):
        model(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("skip", [nn.Linear(32, 32), torch.eye(32)])
def test_a_module_instead_of_a_name(skip):
    model = timm.create_model("vit_test_linear")
    for call in (lambda: connect(model, skip=skip), lambda: timm.create_model("vit_test_ortho", skip=skip)):
        with pytest.raises(ValueError, match="skip") as caught:
            call()
        assert "register" in str(caught.value)
    assert all(site.connection.skip is None for site in sites(model))
