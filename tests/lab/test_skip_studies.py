"""Recipes and studies of skip transforms: agreement with Wang et al. (2017), and two studies from run to report."""
import pytest
import timm
import torch
from helpers.tiny_study import in_this_process

from timm_ortho import cli, sites
from timm_ortho.lab import paper
from timm_ortho.lab.planning import design, recipe, study_file
from timm_ortho.lab.reporting import report

NUMBERS = paper.numbers()
TABLES = ["skips_single", "skips_branch4", "skips_depthwise"]


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "svhn"])
def test_recipe_is_the_papers(data):
    values, given = recipe.load(f"skipnet_{data}"), {**NUMBERS["skip_recipe"], **NUMBERS["skip_recipe"][data]}
    # timm's optimizer "sgd" uses Nesterov momentum, and its optimizer "momentum" uses plain momentum.
    assert (values["opt"], values["momentum"], values["lr"]) == ("sgd", given["momentum"], given["lr"])
    assert (values["weight_decay"], values["batch_size"]) == (given["weight_decay"], given["batch"])
    assert (values["epochs"], values["decay_rate"]) == (given["epochs"], given["decay_factor"])
    assert values["decay_milestones"] == [share * given["epochs"] for share in given["decay_at"]]
    assert values["hflip"] == given["hflip"]
    assert values.get("val_split", "validation") == ("test" if data == "svhn" else "validation")
    assert values.get("no_aug", False) is (given["crop"] is None)
    text = " ".join(recipe.text(f"skipnet_{data}").split("\n# "))
    for skip, figures in NUMBERS["skips_branch4"]["20"].items():
        mean, std = figures[data]
        assert f"{NUMBERS['skips'][skip]} {mean:.2f} +- {std:.2f}" in text
    assert timm.is_model(values["model"])


@pytest.mark.parametrize("name", TABLES)
def test_study_has_the_cells_of_the_table(name):
    """Check the depths and skip transforms of the grid, and the transforms of the networks.

    Also check the depth in the networks' names, and the number of branches of idempotent transforms.
    """
    found, table = design.load(name, "paper"), NUMBERS[name]
    depths = [depth for depth in table if depth.isdecimal()]
    assert [str(depth) for depth in found.axes["depth"]] == depths
    assert found.axes["skip"] == list(table[depths[0]])
    assert found.seeds == table["runs"]
    for variant in found.variants({"dataset": "cifar10", "device": "cpu"}):
        assert variant.options.epochs == 300
        assert f"_{variant.cell['depth']}" in variant.options.model
        with torch.device("meta"):
            model = timm.create_model(variant.options.model, **variant.options.model_kwargs)
        names = {getattr(site.connection.skip, "name", "identity") for site in sites(model)}
        assert names == {variant.cell["skip"]}
        branches = {site.connection.skip.branches for site in sites(model) if site.connection.skip is not None}
        if variant.cell["skip"].startswith("idempotent"):
            assert branches == ({4} if name == "skips_branch4" else set(model.stages and [
                block.conv2.out_channels for stage in model.stages for block in stage.blocks]))


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "svhn"])
def test_scale_paper_has_the_cells_with_numbers_of_the_data_set(data):
    found, left_out = design.load("skips_branch4", "paper").expand({"dataset": data, "device": "cpu"})
    table = NUMBERS["skips_branch4"]
    stated = [depth for depth in table if depth.isdecimal() and data in table[depth]["identity"]]
    assert [*dict.fromkeys(str(variant.cell["depth"]) for variant in found)] == stated
    assert bool(left_out) == (data != "cifar100")
    assert not left_out or left_out[0] == f"Table 2 of Wang et al. (2017) has no depth 32, skip identity on {data}"


@pytest.mark.parametrize("scale", study_file.SCALES)
def test_ranks_equal_the_values_of_the_axis(scale):
    data = "cifar10" if scale == "paper" else "digits"
    for variant in design.load("skip_rank", scale).variants({"dataset": data, "device": "cpu"}):
        with torch.device("meta"):
            model = timm.create_model(variant.options.model, **variant.options.model_kwargs)
        skips = [site.connection.skip for site in sites(model)]
        shares = {1.0 if skip is None else skip.rank / skip.width for skip in skips}
        assert shares == {float(variant.cell["rank"])}


@pytest.mark.parametrize(("depth", "skip", "stated"), [
    (32, "identity", [68.158, 0.119]),
    (32, "idempotent_cmr", [70.372, 0.419]),
    (32, "idempotent_mr", [70.942, 0.331]),
    (32, "orthogonal_tp", [70.786, 0.37]),
    (32, "orthogonal_random", [70.926, 0.307]),
    (56, "orthogonal_tp", [72.716, 0.314]),
])
def test_the_papers_numbers_are_beside_the_runs(depth, skip, stated):
    """If the paper's table covers a run's data set, the layout contains the paper's number for this run."""
    study = {"name": "skips_branch4", "table": "skips_branch4", "axes": {"depth": [depth], "skip": [skip]},
             "dataset": "torch/cifar100", "paper": "Wang et al.",
             "report": design.load("skips_branch4", "small").report}
    run = {"cell": {"depth": depth, "skip": skip}, "connection": "linear"}
    laid_out = report.layout_of(study)
    assert laid_out.stated[laid_out.position(laid_out.keys(run, "top1"))] == stated


@pytest.mark.usefixtures("undrawn")
def test_from_run_to_report(tmp_path, monkeypatch, capsys):
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["study", "run", "skips_depthwise", "--scale", "smoke", "--output", "out"]) == 0
    assert "Orthogonal-Random" in capsys.readouterr().out
    table = NUMBERS["skips_depthwise"]["20"]
    gain = table["orthogonal_random"]["cifar10"][0] - table["identity"]["cifar10"][0]
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"{gain:+.2f} (CIFAR-10)" in text
    assert f"{NUMBERS['skips_depthwise']['table']} of Wang et al. (2017)" in text
