"""reporting/tables.py and report.py: means, differences, the answer and what it says of diverged runs."""
import csv
import math
import random
import statistics
from pathlib import Path

import pytest
import scipy.stats
from helpers.made_up_runs import DATA, accuracy, run_of, runs_of, study_of
from helpers.reports import lines_of, parsed, results, tables_of, texts, write

from timm_ortho.lab.reporting import collect

pytestmark = pytest.mark.usefixtures("undrawn_module")
BOTH = {"linear": [90.0, 91.0, 92.5], "feature": [90.5, 93.0, 93.5]}
MINE = dict(name="mine", paper="", table="", report={"measures": ["top1"]}, changed=[])


def title_of(folder):
    return parsed(folder).find("body/main/h1").text


def test_numbers_are_those_of_the_runs(tmp_path):
    text = write(*accuracy(BOTH), [], tmp_path)
    for connection, name in (("linear", "Linear"), ("feature", "Orthogonal-F")):
        mean, std = statistics.fmean(BOTH[connection]), statistics.stdev(BOTH[connection])
        assert lines_of(tmp_path)["ViT-S", name, "digits, top-1 %"]["mean"] == f"{mean:.2f} ± {std:.2f}"
    truth = scipy.stats.ttest_rel(BOTH["feature"], BOTH["linear"])
    low, high = truth.confidence_interval(0.95)
    expected = f"{(low + high) / 2:+.2f} [{low:+.2f}, {high:+.2f}]"
    assert expected in text
    row = lines_of(tmp_path)["ViT-S", "Orthogonal-F", "digits, top-1 %, five best test epochs"]
    assert row["difference [95 % CI]"] == expected
    assert row["p (Holm)"] == f"{min(1, 2 * truth.pvalue):.2g}"
    assert row["the paper's difference"] == (
        "+0.79 (CIFAR-10), +1.94 (CIFAR-100), +1.27 (Tiny ImageNet), +1.77 (ImageNet-1k), "
        "+2.75 (ImageNet-1k (first version))")
    found = results(tmp_path)["summary"][-1]
    assert (found["measure"], found["values"]) == ("top1", BOTH["feature"])
    assert found["difference"]["half_width"] == pytest.approx((high - low) / 2)
    assert found["difference"]["p_holm"] == pytest.approx(min(1, 2 * truth.pvalue))
    assert found["difference"]["pairs"] == 3


def test_the_papers_number_of_the_same_data_set_is_in_the_line(tmp_path):
    write(*accuracy(BOTH, dataset="torch/cifar10"), [], tmp_path)
    row = lines_of(tmp_path)["ViT-S", "Orthogonal-F", "CIFAR-10, top-1 %, five best test epochs"]
    assert (row["paper"], row["the paper's difference"]) == ("90.61 ± 0.21", "+0.79")


@pytest.mark.parametrize(("name", "measure", "expected"), [
    ("switch_kept", "best5", 77.8), ("switch_kept", "best5_top5", 97.8),  # Table 10: epochs 0, 1, 2, 4 and 5
    ("switch_reinitialised", "final5", 74.5), ("switch_reinitialised", "final5_top5", 94.5)])  # Table 3: epochs 4 to 7
def test_studies_have_the_measure_of_the_papers_table(tmp_path, name, measure, expected):
    study, (run, *_) = study_of(name), runs_of(name)
    history = [{"epoch": epoch, "eval_top1": value, "eval_top5": value + 20}
               for epoch, value in enumerate([79.0, 78.0, 77.0, 70.0, 78.0, 77.0, 72.0, 71.0])]
    write(study, [{**run, "history": history, "switch_epoch": 4}], [], tmp_path)
    entries = {entry["measure"]: entry["mean"] for entry in results(tmp_path)["summary"]}
    assert entries[measure] == pytest.approx(expected)
    assert entries["top1"] == run["top1"]


@pytest.mark.parametrize(("feature", "detected"), [
    ([91.0, 92.0, 93.1], True), ([89.0, 90.0, 90.9], True), ([91.0, 90.0, 92.1], False)])
def test_the_title_and_the_lead_are_the_answer(tmp_path, feature, detected):
    study, runs = accuracy({"linear": [90.0, 91.0, 92.0], "feature": feature}, **MINE)
    text = write(study, runs, [], tmp_path)
    found = results(tmp_path)["summary"][-1]["difference"]
    mean, half = found["mean"], found["half_width"]
    interval = f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"
    assert title_of(tmp_path) == f"vit_small on digits, 1 epoch: Orthogonal-F {interval}"
    told = "The difference was not detected."
    if detected:
        told = f"1 of 1 difference detected: Orthogonal-F {interval} in top-1 %."
    assert f"{told} The 95 % intervals in top-1 % are ± {half:.2g}." in text


def test_differences_are_paired_by_seed(tmp_path):
    """If only one connection has a run with seed 2, the run counts in its connection's mean, but in no difference."""
    study, runs = accuracy({"linear": [90.0, 80.0], "feature": [91.0, 82.0]}, seeds=[0, 1, 2])
    runs.append(run_of("feature", 2, top1=10.0, epochs=1))
    random.Random(0).shuffle(runs)
    write(study, runs, ["linear-seed2"], tmp_path)
    feature = next(entry for entry in results(tmp_path)["summary"] if entry["cell"]["connection"] == "feature")
    assert (feature["seeds"], feature["mean"]) == ([0, 1, 2], pytest.approx(61.0))
    assert (feature["difference"]["mean"], feature["difference"]["pairs"]) == (pytest.approx(1.5), 2)
    found = lines_of(tmp_path)
    assert found["ViT-S", "Linear", "digits, top-1 %"]["mean"] == "85.00 ± 7.07 (2 of 3 seeds)"
    row = found["ViT-S", "Orthogonal-F", "digits, top-1 %"]
    assert row["difference [95 % CI]"] == "+1.50 [-4.85, +7.85] (2 pairs)"


def test_a_baseline_whose_first_seed_failed_is_the_first_row(monkeypatch):
    places = [{"run": f"{connection}-{seed}", "cell": {}, "connection": connection, "seed": seed}
              for seed in (0, 1) for connection in ("linear", "feature")]
    monkeypatch.setattr(collect, "_run", lambda folder: None if folder.name in ("linear-0", "feature-1") else {})
    monkeypatch.setattr(collect, "state", lambda folder: {"linear-0": ("failed", "no space")}.get(
        folder.name, ("stopped", "epoch 1 of 2")))
    _, runs, unfinished = collect._of_study(
        Path("study"), {"study": {"dataset": "digits"}, "places": places, "left_out": ["global"]})
    assert [(run["connection"], run["seed"]) for run in runs] == [("linear", 1), ("feature", 0)]
    assert unfinished == ["linear-0 (failed: no space)", "feature-1", "global"]


@pytest.mark.parametrize(("linear", "feature", "cell", "why"), [
    ([90.0], [91.0], "+1.00", "one pair"),
    ([90.0, 91.0], [89.0, 90.0], "-1.00 (both pairs have the same difference, no interval)",
     "both pairs have the same difference")])
def test_differences_without_variance_have_no_interval_and_no_verdict(tmp_path, linear, feature, cell, why):
    """If all seeds have the same difference, for example of one test image, a t test would give p = 0."""
    text = write(*accuracy({"linear": linear, "feature": feature}, **MINE), [], tmp_path)
    row = lines_of(tmp_path)["Orthogonal-F",]
    assert row == {"mean": row["mean"], "difference [95 % CI]": cell}
    assert f"1 difference could not be tested: {why}." in text
    assert "LayerScale" not in text
    assert title_of(tmp_path) == f"vit_small on digits, 1 epoch: Orthogonal-F {cell}"


def test_equal_accuracies_hint_at_layer_scale(tmp_path):
    text = write(*accuracy({"linear": [90.0, 91.0], "feature": [90.0, 91.0]}), [], tmp_path)
    assert "If the model has LayerScale, its branches may be too small: see docs/settings.md." in text


def test_detected_differences_are_counted_among_all(tmp_path):
    """Orthogonal-F differs detectably. Orthogonal-G differs equally for all seeds. The top-1 of Hybrid is nan."""
    study, runs = accuracy(
        {"linear": [90.0, 91.0, 92.0], "feature": [80.0, 81.01, 82.0], "global": [89.0, 90.0, 91.0],
         "hybrid": [math.nan] * 3}, **MINE)
    write(study, runs, [], tmp_path)
    lead = results(tmp_path)["lead"]
    assert lead.startswith("1 of 3 differences detected: Orthogonal-F -10.00 [")
    assert lead.endswith(
        "2 differences could not be tested: all 3 pairs have the same difference; no pair of finite runs.")
    assert "comparisons of the study (2)" in texts(tmp_path)[0]  # without Hybrid


@pytest.mark.parametrize(("classes", "metrics"), [(5, 1), (6, 2)])
def test_top5_of_five_classes_is_no_metric(tmp_path, classes, metrics):
    study, runs = accuracy(BOTH, **{**MINE, "report": {
        "plots": [{"curves": {"column": "eval_top5"}}, {"points": {"x": "connection"}}]}},
        data={**DATA, "classes": classes})
    write(study, runs, [], tmp_path)
    assert len(lines_of(tmp_path)) == 2 * metrics
    every_run = next(table for table in tables_of(tmp_path) if table[0][:2] == ["run", "seed"])
    assert ("top-5 %" in every_run[0]) == (tmp_path / "figures" / "curves.svg").exists() == (metrics == 2)
    assert ("top-5" in texts(tmp_path)[0]) == (metrics == 2)


def test_an_interval_without_zero_before_adjustment_alone(tmp_path):
    """One of 20 confidence intervals excludes zero. After Holm's adjustment of p, the difference is not detected."""
    axis = {"index": list(range(20))}
    runs = [run_of(connection, seed, {"index": index}, epochs=1, top1=50.0 + (connection == "feature") * gain)
            for index in range(20) for connection in ("linear", "feature")
            for seed, gain in enumerate((1.0, 1.2, 0.7) if index == 0 else (1.0, -1.2, 0.1))]
    study = study_of("mine", axes=axis, report={"measures": ["top1"]})
    text = write(study, runs, [], tmp_path)
    assert "None of 20 differences was detected." in text
    assert title_of(tmp_path) == "What about mine?"  # many comparisons have no short answer
    found = results(tmp_path)["summary"][1]["difference"]
    assert found["mean"] > found["half_width"]


def test_the_csv_has_a_row_for_each_run_epoch_and_metric(tmp_path):
    study, runs = study_of("learning_rate"), runs_of("learning_rate")
    write(study, runs, [], tmp_path)
    with open(tmp_path / "history.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["lr", "connection", "seed", "epoch", "metric", "value"]
    assert len(rows) == sum(len(row) - 1 for run in runs for row in run["history"])
    last = [float(row["value"]) for row in rows if (row["epoch"], row["metric"]) == ("3", "eval_top1")]
    assert last == [run["top1"] for run in runs]
    assert [link.get("href") for link in parsed(tmp_path).iter("a")] == ["history.csv"]


# --------------------------------------------------------------------------------------------- diverged runs
@pytest.mark.parametrize("connections", [["feature"], ["linear"], ["linear", "feature"]])
@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_connection_without_accuracies_is_named(tmp_path, connections, missing):
    study, runs = accuracy(BOTH, **MINE, data=DATA)
    for run in runs:
        if run["connection"] in connections:
            run.update(top1=missing, loss=missing)
    text = write(study, runs, [], tmp_path)
    assert "not finite (3 runs)" in text
    assert "1 difference could not be tested: no pair of finite runs." in text
    assert title_of(tmp_path).endswith(": Orthogonal-F no pair of finite runs")


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("missing", [None, math.nan])
def test_diverged_runs_are_named_and_not_averaged(tmp_path, missing):
    study, runs = study_of("layer_pattern"), runs_of("layer_pattern")
    for run in runs:
        if run["cell"]["layers"] == "all" or (run["cell"]["layers"] == "0,1" and run["seed"] == 1):
            run.update(top1=missing, top5=missing, loss=missing)
            for row in run["history"]:
                row.update(eval_top1=missing, train_loss=missing)
    write(study, runs, [], tmp_path)
    found = lines_of(tmp_path)
    assert found["all", "top-1 %"]["mean"] == "not finite (3 runs)"
    assert found["all", "top-1 %"]["difference [95 % CI]"] == "no pair of finite runs"
    assert found["0,1", "top-1 %"]["mean"] == "82.00 ± 1.41 (1 of 3 not finite)"
    assert found["0,1", "top-1 %"]["difference [95 % CI]"].startswith("+1.00")
    told, _ = texts(tmp_path)
    assert "Diverged, with a loss that is not finite: blocks = all, Orthogonal-F, seed 0; blocks = 0,1" in told
    assert all(word not in (tmp_path / "results.json").read_text() for word in ("NaN", "Infinity"))
