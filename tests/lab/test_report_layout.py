"""reporting/layout.py: rows, columns and the paper's numbers in the tables of reports on made-up runs."""
import math
import re
import statistics

import pytest
import scipy.stats
from helpers.made_up_runs import STUDIES, accuracy, recorded, run_of, runs_of, study_of
from helpers.reports import lines_of, results, tables_of, texts, write

from timm_ortho.lab import LabError
from timm_ortho.lab.reporting import report
from timm_ortho.lab.reporting.transition import transition_points

pytestmark = pytest.mark.usefixtures("undrawn_module")


def test_paper_numbers_of_each_table():
    """Check how many of the paper's numbers each layout contains, and four of these numbers."""
    stated = {name: report.layout_of(study_of(name)).stated for name in STUDIES}
    assert {name: len(found) for name, found in stated.items() if found} == {
        "accuracy": 56, "switch_reinitialised": 24, "switch_kept": 24, "layer_pattern": 16, "learning_rate": 32,
        "initialisation": 12, "head_norm": 6, "representation": 7, "skips_single": 24, "skips_branch4": 40,
        "cifar_vit_small": 56, "cifar_resnet18": 56,
        "skips_depthwise": 24}
    assert stated["learning_rate"][("5e-4",), ("CIFAR-10", "Linear")] == [90.41, 0.15]
    five_best = ("CIFAR-10", "top-5 %, five best test epochs")
    assert stated["switch_kept"][("Orthogonal → Linear",), five_best] == [99.72, 0.03]
    assert stated["representation"][("linear CKA with the baseline",), ("Orthogonal-F",)] == [0.546]
    assert stated["skips_depthwise"][("56", "Orthogonal-Random"), ("SVHN",)] == [97.058, 0.055]


def test_the_paper_has_no_numbers_for_an_added_axis(tmp_path):
    study = study_of("accuracy", axes={"model": ["vit_s"], "lr": [0.1]})
    study["report"] = {**study["report"], "rows": ["model", "lr", "connection"]}
    write(study, [run_of("linear", 0, {"model": "vit_s", "lr": 0.1})], [], tmp_path)
    assert lines_of(tmp_path)["ViT-S", "0.1", "Linear", "digits, top-1 %"]["mean"] == "90.00 (1 of 3 seeds)"


def test_learning_rates_are_sorted_and_compared_at_equal_rates(tmp_path):
    runs = [*runs_of("learning_rate"), run_of("linear", 0, {"lr": 1e-4}), run_of("linear", 0, {"lr": 7.5e-4})]
    next(run for run in runs if run["cell"] == {"lr": 1e-3} and run["connection"] == "feature")["top1"] += 0.3
    write(study_of("learning_rate", dataset="torch/cifar10"), runs, [], tmp_path)
    rates = [row[0] for row in tables_of(tmp_path)[0][1:]]
    assert {"1e-4", "7.5e-4"} < set(rates)
    assert [float(rate) for rate in rates] == sorted(map(float, rates))
    half = scipy.stats.t.ppf(0.975, 2) * statistics.stdev([0.0, 0.0, 0.3]) / math.sqrt(3)
    row = lines_of(tmp_path)["1e-3", "CIFAR-10, Orthogonal-F"]
    assert row["difference [95 % CI]"] == f"+1.10 [{1.1 - half:+.2f}, {1.1 + half:+.2f}]"
    assert row["the paper's difference"] == "+0.41"


def test_two_groups_at_one_position_are_distinguished(tmp_path):
    runs = [run_of(connection, 0, {"layers": "all"}, top1=value)
            for connection, value in (("feature", 90.0), ("global", 80.0))]
    write(study_of("layer_pattern"), runs, [], tmp_path)
    found = lines_of(tmp_path)
    assert found["all, feature", "top-1 %"]["mean"].startswith("90.00")
    assert found["all, global", "top-1 %"]["mean"].startswith("80.00")


@pytest.mark.parametrize(("rows", "columns", "row", "column"), [
    (["depth"], ["connection"], "4", "Orthogonal-F, top-1 %"),
    (["depth"], [], "4, feature", "top-1 %"),
    (["connection"], ["measure"], "Orthogonal-F, depth = 4", "top-1 %"),
    (["measure"], ["connection"], "top-1 %, depth = 4", "Orthogonal-F"),
])
def test_every_value_has_its_own_labelled_cell(tmp_path, rows, columns, row, column):
    """A layout may lack the measure, the connection or an axis."""
    runs = [run_of(connection, 0, {"depth": depth, "lr": 1e-4}, top1=10 * depth + (connection == "feature"))
            for depth in (2, 4) for connection in ("linear", "feature")]
    study = study_of("mine", axes={"depth": [2, 4], "lr": [1e-4]}, seeds=[0])
    printed = write({**study, "report": {"rows": rows, "columns": columns, "plots": []}}, runs, [], tmp_path)
    found = lines_of(tmp_path)
    assert (found[row, column]["mean"], found[row, column]["difference [95 % CI]"]) == ("41.00 (1 seed)", "+1.00")
    assert len(found) == 8
    assert re.search(rf"^{row} +{column} +41.00", printed, re.MULTILINE)


def test_values_outside_their_column_are_named(tmp_path):
    """A label, or a name of the paper, needs no axis."""
    cells = [{"prob": prob, "where": where, "skip": "identity"} for prob in (0.0, 1.0) for where in ("all", "mlp")]
    runs = [run_of("feature", seed, cell, top1=90.0 + seed) for cell in cells for seed in range(2)]
    axes = {"prob": [0.0, 1.0], "where": ["all", "mlp"], "skip": ["identity"]}
    study = study_of("mine", axes=axes, seeds=[0, 1], baseline={"prob": 0.0})
    measures = {"measures": ["top1"], "titles": {"prob": "π"}, "labels": {"where": {"mlp": "MLP", "all": "–"}},
                "protocol": "Not {mean}, but on {images} images."}
    write({**study, "report": measures}, runs, [], tmp_path)
    markdown = texts(tmp_path)[1]
    assert "differences to π = 0 with the same seed. Not {mean}, but on test images." in markdown
    assert "The rows are: π = 1, where = –, Identity, Orthogonal-F; π = 1, MLP, Identity, Orthogonal-F." in markdown
    assert {row[0] for row in tables_of(tmp_path)[1][1:3]} == {"π = 0, where = –, skip = Identity, Orthogonal-F"}
    write({**study, "report": {**measures, "rows": ["where", "skip"], "columns": ["prob"]}}, runs, [], tmp_path)
    assert ("MLP", "Identity", "π = 1") in lines_of(tmp_path)
    assert tables_of(tmp_path)[0][0][:4] == ["where", "skip", "π", "mean"]


def test_own_study_has_a_row_for_each_cell(tmp_path):
    runs = [run_of(connection, seed, {"depth": depth, "lr": 1e-4}, top1=depth + seed)
            for seed in range(2) for depth in (2, 4) for connection in ("linear", "feature")]
    study = study_of("mine", axes={"depth": [2, 4], "lr": [1e-4]}, seeds=[0, 1])
    write(study, runs, [], tmp_path)
    assert lines_of(tmp_path)["4", "1e-4", "Linear", "top-1 %"]["mean"] == "4.50 ± 0.71"
    laid_out = {"rows": ["depth"], "columns": ["connection", "measure"], "measures": ["loss"],
                "titles": {"depth": "blocks"}, "labels": {"depth": {4: "four"}},
                "plots": [{"points": {"x": "depth"}}]}
    write({**study, "report": laid_out}, runs, [], tmp_path)
    row = lines_of(tmp_path)["four", "Orthogonal-F, test loss"]
    assert (row["mean"], row["difference [95 % CI]"]) == (
        "0.5000 ± 0.0000", "+0.0000 (both pairs have the same difference, no interval)")


@pytest.mark.parametrize(("given", "message"), [
    ({"row": ["connection"]}, "report accepts no key 'row'; did you mean 'rows'"),
    ({"rows": ["depht"]}, "report: rows accepts no entry 'depht'; did you mean 'depth'"),
    ({"measures": []}, "report: rows and measures need at least one entry each"),
    ({"plots": ["trainings"]}, "report: plots accepts no entry 'trainings'; did you mean 'training'"),
    ({"tables": ["transition"]}, "report: tables accepts no entry 'transition'; did you mean 'transitions'"),
    ({"order": "connection"}, "report: order needs an axis whose values are numbers, not 'connection'"),
    ({"plots": [{"training": {"name": "norms"}}]}, "report: plot 'training' accepts no option 'name'; known are by"),
    ({"plots": ["points"]}, "report: plot 'points' needs the option 'x'"),
    ({"plots": [{"curves": {"column": "top1"}}]}, "report: plot 'curves': column accepts no entry 'top1'"),
    ({"plots": [{"points": {"x": "depth", "measures": ["top2"]}}]},
     "report: plot 'points': measures accepts no entry 'top2'"),
    ({"plots": [{"points": {"x": "measure"}}]}, "plot 'points': x accepts no entry 'measure'"),
    (["rows"], r"report is \['rows'\], but must be a mapping"),
    ({"rows": "depth"}, "report: rows is 'depth', but must be a list"),
    ({"measures": "loss"}, "report: measures is 'loss', but must be a list"),
    ({"titles": ["depth"]}, r"report: titles is \['depth'\], but must be a mapping"),
    ({"titles": {"depth": 2}}, "report: titles.depth is 2, but must be text"),
    ({"labels": {"depth": {2: 2}}}, "report: labels.depth.2 is 2, but must be text"),
    ({"columns": [["depth"]]}, r"report: columns\[0\] is \['depth'\], but must be text"),
    ({"plots": [2]}, r"report: plots\[0\] is 2, but must be text or a mapping"),
    ({"plots": [{"training": {"by": 2}}]}, "plot 'training': by is 2, but must be text or a list"),
    ({"plots": [{"training": {"lines": "depth"}}]}, "plot 'training': lines is 'depth', but must be a list"),
    ({"plots": [{"points": {"x": "connection", "pearson": True}}]}, "pearson needs an axis whose values are numbers"),
])
def test_bad_layouts(given, message):
    with pytest.raises(LabError, match=message):
        report.layout_of(study_of("mine", axes={"depth": [2]}, report=given))


def test_an_axis_with_the_name_of_a_dimension():
    with pytest.raises(LabError, match="an axis cannot have the name 'measure', which is a dimension of each report"):
        report.layout_of(study_of("mine", axes={"measure": [2]}))


def test_the_papers_protocol_and_the_last_epoch_are_both_shown(tmp_path):
    study, runs = accuracy({"linear": [0.0]})
    for epoch, value in enumerate([10.0, 60.0, 50.0, 70.0, 20.0, 40.0, 30.0]):
        runs[0]["history"] += [{**runs[0]["history"][0], "epoch": epoch + 1, "eval_top1": value}]
    write(study, runs, [], tmp_path)
    found = lines_of(tmp_path)
    assert found["ViT-S", "Linear", "digits, top-1 %, five best test epochs"]["mean"] == "50.00 (1 seed)"
    assert found["ViT-S", "Linear", "digits, top-1 %"]["mean"] == "0.00 (1 seed)"
    write({**study, "validation": "hold-out"}, runs, [], tmp_path)
    for told in texts(tmp_path):
        assert "digits, top-1 %, five best hold-out epochs" in told
        assert "on the hold-out images" in told
        assert "test" not in told


def test_probability_has_pearsons_r(tmp_path):
    runs = runs_of("probability")
    expected = scipy.stats.pearsonr([run["cell"]["probability"] for run in runs], [run["top1"] for run in runs])
    write(study_of("probability"), runs, [], tmp_path)
    assert lines_of(tmp_path)["0.5", "top-1 %"]["mean"] == "82.00 ± 1.00"
    assert (f"top-1 %: r = {expected.statistic:+.2f}, p = {expected.pvalue:.2g}, 9 runs; top-5 %: r undefined (9 runs)."
            in texts(tmp_path)[1])


def test_switches_are_compared_with_no_switch(tmp_path):
    write(study_of("switch_kept", dataset="torch/cifar10"), runs_of("switch_kept"), [], tmp_path)
    found = lines_of(tmp_path)
    best = found["Orthogonal → Linear", "CIFAR-10, top-1 %, five best test epochs"]
    assert (best["paper"], best["mean"]) == ("93.18 ± 0.15", "73.00 ± 1.00")
    last = found["Orthogonal → Linear", "CIFAR-10, top-1 %"]
    assert (last["paper"], last["mean"]) == ("–", "83.00 ± 1.00")
    assert found["Linear → Orthogonal", "CIFAR-10, top-1 %"]["difference [95 % CI]"].startswith("+1.00")
    assert len(found) == 12


def test_cka_has_no_baseline(tmp_path):
    write(study_of("representation"), runs_of("representation"), [], tmp_path)
    found = lines_of(tmp_path)
    of_cka, of_rank = found["linear CKA with the baseline", "Orthogonal-F"], found["effective rank", "Linear"]
    assert (of_cka["paper"], of_cka["mean"], of_cka["difference [95 % CI]"]) == ("0.546", "0.600 ± 0.000", "–")
    assert ("linear CKA with the baseline", "Linear") not in found
    assert (of_rank["paper"], of_rank["mean"]) == ("572.9", "11.0 ± 1.0")


def test_transitions_and_maxima_are_of_all_steps(tmp_path):
    """results.json contains 100 of the 500 recorded steps. The transitions and maxima are at other steps."""
    runs = [run_of(connection, seed, dynamics=recorded(connection, seed, 500))
            for connection in ("linear", "feature") for seed in range(3)]
    for run in runs:
        run["dynamics"][-1]["parallel"] = 2.0
        next(row for row in run["dynamics"] if row["step"] == 1230 and row["name"] == "blocks.1.mlp")["parallel"] = 1e6
    write(study_of("dynamics"), runs, [], tmp_path)
    values = results(tmp_path)
    steps = {row["step"] for row in values["runs"][0]["dynamics"]}
    assert len(steps) == 100
    assert {0, 4990} < steps
    truth = [transition_points(*([run["dynamics"] for run in runs if run["connection"] == name]
                                 for name in ("linear", "feature")), measure) for measure in ("stream", "cosine")]
    points = values["recorded"]["transitions"]
    assert [point for point in points if point["measure"] in ("stream", "cosine")] == [
        point for of_measure in truth for point in of_measure]
    assert points[0]["step"] not in steps
    assert 1230 not in steps
    assert values["recorded"]["last_branch"][0] == {"first": 4.0, "highest": 1e6 + 3.0, "last": 5.0}
    part = report.Part.of(values["study"], values["runs"], [], values["recorded"])  # of a published study
    assert (part.recorded, part.runs) == (values["recorded"], values["runs"])
    assert f"step {points[0]['step']}" in texts(tmp_path)[1]


def test_last_branch_and_learned_weights_are_those_of_the_records(tmp_path):
    write(study_of("head_norm"), runs_of("head_norm"), [], tmp_path)
    table = next(table for table in tables_of(tmp_path) if "last / first" in table[0])
    assert table[1] == ["without", "Linear", "4", "9", "9", "2.25"]
    assert [row[:2] for row in table[1:]] == [
        [norm, name] for norm in ("without", "with") for name in ("Linear", "Orthogonal-F")]
    write(study_of("hybrid"), runs_of("hybrid"), [], tmp_path)
    table = next(table for table in tables_of(tmp_path) if table[0][-2:] == ["ρ", "θ"])
    assert table[1] == ["orthogonal start", "attention", "1.500 [1.500, 1.500]", "0.100 [0.000, 0.200]"]


@pytest.mark.parametrize("name", ["accuracy", "layer_pattern", "skips_single"])
def test_report_without_runs_of_the_baseline(name, tmp_path):
    """If no run of the baseline is finished, a report without differences is still written."""
    study = study_of(name)
    axis, value = next(iter(study["baseline"].items()))
    runs = [run for run in runs_of(name, seeds=(0,)) if {**run["cell"], "connection": run["connection"]}[axis] != value]
    write(study, runs, ["the others"], tmp_path)
    assert {bool(entry["difference"]) for entry in results(tmp_path)["summary"]} == {False}
