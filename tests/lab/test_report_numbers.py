"""reporting/tables.py: means, differences and their readings (such as "higher") in reports on made-up runs."""
import math
import random
import statistics
from pathlib import Path

import pytest
import scipy.stats
from helpers.made_up_runs import DATA, accuracy, run_of, runs_of, study_of
from helpers.reports import differences, results, side_by_side, tables_of, texts, write

from timm_ortho.lab.reporting import collect, report

pytestmark = pytest.mark.usefixtures("undrawn_module")
BOTH = {"linear": [90.0, 91.0, 92.5], "feature": [90.5, 93.0, 93.5]}


def test_numbers_are_those_of_the_runs(tmp_path):
    text = write(*accuracy(BOTH), [], tmp_path)
    last = "digits, top-1 %"
    for connection, name in (("linear", "Linear"), ("feature", "Orthogonal-F")):
        mean, std = statistics.fmean(BOTH[connection]), statistics.stdev(BOTH[connection])
        assert side_by_side(tmp_path)[("ViT-S", name), last] == ("not in the paper", f"{mean:.2f} ± {std:.2f}")
    truth = scipy.stats.ttest_rel(BOTH["feature"], BOTH["linear"])
    low, high = truth.confidence_interval(0.95)
    expected = f"{(low + high) / 2:+.2f} [{low:+.2f}, {high:+.2f}]"
    assert expected in text
    row = differences(tmp_path)["ViT-S", "Orthogonal-F", "digits, top-1 %, five best test epochs"]
    assert row == {
        "against": "Linear", "difference [95 % CI]": expected, "pooled variance [95 % CI]": expected,
        "p (Holm)": f"{min(1, 2 * truth.pvalue):.2g}", "reading": "not detected",
        "half-width; the paper's differences": f"± {(high - low) / 2:.2f}; contains zero and the paper's "
        "+0.79 (CIFAR-10), +1.94 (CIFAR-100), +1.27 (Tiny ImageNet), +1.77 (ImageNet-1k), "
        "+2.75 (ImageNet-1k (first version))"}
    found = results(tmp_path)["summary"][-1]
    assert (found["measure"], found["values"]) == ("top1", BOTH["feature"])
    assert found["difference"]["half_width"] == pytest.approx((high - low) / 2)
    assert found["difference"]["p_holm"] == pytest.approx(min(1, 2 * truth.pvalue))
    assert (found["difference"]["pairs"], found["difference"]["reading"]) == (3, "not detected")


@pytest.mark.parametrize(("name", "measure", "expected"), [
    ("switch_kept", "best5", 77.8), ("switch_kept", "best5_top5", 97.8),  # Table 10: epochs 0, 1, 2, 4 and 5
    ("switch_reinitialised", "final5", 74.5), ("switch_reinitialised", "final5_top5", 94.5),  # Table 3: epochs 4 to 7
    ("head_norm", "best5", 77.8)])  # Table 9
def test_studies_have_the_measure_of_the_papers_table(tmp_path, name, measure, expected):
    study, (run, *_) = study_of(name), runs_of(name)
    history = [{"epoch": epoch, "eval_top1": value, "eval_top5": value + 20}
               for epoch, value in enumerate([79.0, 78.0, 77.0, 70.0, 78.0, 77.0, 72.0, 71.0])]
    write(study, [{**run, "history": history, "switch_epoch": 4}], [], tmp_path)
    entries = {entry["measure"]: entry["mean"] for entry in results(tmp_path)["summary"]}
    assert entries[measure] == pytest.approx(expected)
    assert entries["top1"] == run["top1"]


@pytest.mark.parametrize(("feature", "reading"), [
    ([91.0, 92.0, 93.1], "higher"), ([89.0, 90.0, 90.9], "lower"), ([91.0, 90.0, 92.1], "not detected"),
    ([90.403, 90.597, 92.0], "not detected")])  # half-width: 1 point
def test_the_interval_determines_the_reading(tmp_path, feature, reading):
    study, runs = accuracy({"linear": [90.0, 91.0, 92.0], "feature": feature}, name="mine", paper="", table="",
                           report={"measures": ["top1"]})
    text = write(study, runs, [], tmp_path)
    assert differences(tmp_path)["Orthogonal-F", "top-1 %"]["reading"] == reading
    found = results(tmp_path)["summary"][-1]["difference"]
    told = "No difference between the connections was detected. With 3 pairs" if reading == "not detected" else (
        f"The difference between the connections was detected: Orthogonal-F {found['mean']:+.2f} "
        f"[{found['mean'] - found['half_width']:+.2f}, {found['mean'] + found['half_width']:+.2f}] in top-1 %. With 3 "
        "pairs")
    half = found["half_width"]
    points = "1 point" if f"{half:.2g}" == "1" else f"{half:.2g} points"
    assert f"{told} of runs, the half-width of the 95 % interval in top-1 is {points}." in text


def test_differences_are_paired_by_seed(tmp_path):
    """If only one connection has a run with seed 2, the run counts in its connection's mean, but in no difference."""
    study, runs = accuracy({"linear": [90.0, 80.0], "feature": [91.0, 82.0]}, seeds=[0, 1, 2])
    runs.append(run_of("feature", 2, top1=10.0, epochs=1))
    random.Random(0).shuffle(runs)
    write(study, runs, ["linear-seed2"], tmp_path)
    feature = next(entry for entry in results(tmp_path)["summary"] if entry["cell"]["connection"] == "feature")
    assert (feature["seeds"], feature["mean"]) == ([0, 1, 2], pytest.approx(61.0))
    assert (feature["difference"]["mean"], feature["difference"]["pairs"]) == (pytest.approx(1.5), 2)
    assert side_by_side(tmp_path)[("ViT-S", "Linear"), "digits, top-1 %"][1] == "85.00 ± 7.07 (2 of 3 seeds)"
    row = differences(tmp_path)["ViT-S", "Orthogonal-F", "digits, top-1 %"]
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


def test_single_seed_has_no_interval(tmp_path):
    text = write(*accuracy({"linear": [90.0], "feature": [91.0]}), [], tmp_path)
    row = differences(tmp_path)["ViT-S", "Orthogonal-F", "digits, top-1 %"]
    assert list(row.values())[1:] == ["+1.00", "–", "–", "no interval: one pair", "–"]
    assert "No difference could be tested (one pair): a confidence interval needs at least two" in text


@pytest.mark.usefixtures("drawn")
def test_differences_without_variance_have_no_interval_and_no_verdict(tmp_path):
    """If all seeds have the same difference, for example of one test image, a t test would give p = 0."""
    study, runs = accuracy({"linear": [90.0, 91.0], "feature": [89.0, 90.0], "global": [89.0, 92.0]},
                           name="mine", paper="", table="", report={"measures": ["top1"]})
    text = write(study, runs, [], tmp_path)
    found = {entry["cell"]["connection"]: entry["difference"] for entry in results(tmp_path)["summary"]}
    assert [found["feature"][key] for key in ("half_width", "p", "p_holm", "pairs")] == [None, None, None, 2]
    assert (found["feature"]["mean"], found["feature"]["reading"]) == (
        -1.0, "no interval: both pairs have the same difference")
    assert found["global"]["p_holm"] == pytest.approx(min(1, 2 * found["global"]["p"]))  # two comparisons
    row = differences(tmp_path)["Orthogonal-F", "top-1 %"]
    assert (row["difference [95 % CI]"], row["p (Holm)"], row["half-width"]) == ("-1.00", "–", "–")
    assert row["reading"] == "no interval: both pairs have the same difference"
    assert "-1.00 (both pairs have the same difference, no interval)" in text
    assert "No difference between the connections was detected. With 2 pairs of runs" in text
    assert "1 difference could not be tested: both pairs have the same difference." in text
    assert "adjusted for 2 comparisons. A difference without interval counts as p = 1." in texts(tmp_path)[0]
    assert "p and the reading use only the paired differences" in texts(tmp_path)[0]
    half_width = scipy.stats.t.ppf(0.975, 1) / math.sqrt(2)
    assert f"in standard deviations of the differences, by number of seeds: {half_width:.1f} with 2." in (
        texts(tmp_path)[0])
    study, runs = accuracy({"linear": [90.0, 91.0], "feature": [89.0, 90.0]})
    text = write(study, runs, [], tmp_path)
    assert "No difference could be tested (both pairs have the same difference)" in text
    assert "LayerScale" not in text
    text = write(*accuracy({"linear": [90.0, 91.0], "feature": [90.0, 91.0]}), [], tmp_path)
    assert "that vary. If the model has LayerScale, its branches may be too small: see docs/settings.md." in text


def test_detected_differences_are_counted_among_all(tmp_path):
    """Orthogonal-F differs detectably. Orthogonal-G differs equally for all seeds. The top-1 of Hybrid is nan."""
    study, runs = accuracy(
        {"linear": [90.0, 91.0, 92.0], "feature": [80.0, 81.01, 82.0], "global": [89.0, 90.0, 91.0],
         "hybrid": [math.nan] * 3}, name="mine", paper="", table="", report={"measures": ["top1"]})
    write(study, runs, [], tmp_path)
    lead = results(tmp_path)["lead"]
    assert lead.startswith("1 of 3 differences between the connections was detected: Orthogonal-F -10.00 [")
    assert "1 difference could not be tested: all 3 pairs have the same difference." in lead
    assert "1 difference could not be tested: no pair of finite runs." in lead
    assert "adjusted for 2 comparisons." in texts(tmp_path)[0]  # without Hybrid


@pytest.mark.parametrize(("classes", "metrics"), [(5, ["top-1 %"]), (6, ["top-1 %", "top-5 %"])])
def test_top5_of_five_classes_is_no_metric(tmp_path, classes, metrics):
    study, runs = accuracy(BOTH, name="mine", paper="", table="", data={**DATA, "classes": classes},
                           report={"plots": [{"curves": {"column": "eval_top5"}}, {"points": {"x": "connection"}}]})
    write(study, runs, [], tmp_path)
    assert [metric for _, metric in differences(tmp_path)] == metrics
    assert f"adjusted for {len(metrics)} comparison" in texts(tmp_path)[0]
    every_run = next(table for table in tables_of(tmp_path) if table[0][:2] == ["run", "seed"])
    assert ("top-5 %" in every_run[0]) == (tmp_path / "figures" / "curves.svg").exists() == (len(metrics) == 2)
    assert ("top-5" in texts(tmp_path)[0]) == (len(metrics) == 2)


def test_each_study_is_adjusted_by_itself(tmp_path):
    report.write([report.Part.of(*accuracy(BOTH), []) for _ in range(2)], tmp_path)
    assert "adjusted for the comparisons of each study (2, 2)." in texts(tmp_path)[0]


@pytest.mark.parametrize(("gains", "told"), [
    ((3.0, 0.0), "1 of 2 differences between the connections was detected: Orthogonal-F +3.00 ["),
    ((-3.0, 4.0), "2 of 2 differences between the connections were detected: Orthogonal-F -3.00 ["),
])
def test_the_answer_names_what_was_detected(tmp_path, gains, told):
    noise = [(0.0, 0.0, 0.0, 0.0), (0.01, -0.01, 0.02, -0.02), (0.03, -0.01, -0.03, 0.01)]
    top1 = {connection: [90.0 + seed + gain + noisy[seed] for seed in range(4)] for connection, gain, noisy in zip(
        ("linear", "feature", "global"), (0.0, *gains), noise, strict=True)}
    study, runs = accuracy(top1, name="mine", paper="", table="", report={"measures": ["top1"]})
    write(study, runs, [], tmp_path)
    lead = results(tmp_path)["lead"]
    assert lead.startswith(told)
    halves = [entry["difference"]["half_width"] for entry in results(tmp_path)["summary"][1:]]
    assert (f"With 4 pairs of runs, the half-width of the 95 % intervals in top-1 is {statistics.median(halves):.2g} "
            f"points (median; {min(halves):.2g} to {max(halves):.2g}).") in lead


def test_an_interval_without_zero_before_adjustment_alone(tmp_path):
    """One of 20 confidence intervals excludes zero. After Holm's adjustment of p, the difference is not detected."""
    axis = {"index": list(range(20))}
    runs = [run_of(connection, seed, {"index": index}, epochs=1, top1=50.0 + (connection == "feature") * gain)
            for index in range(20) for connection in ("linear", "feature")
            for seed, gain in enumerate((1.0, 1.2, 0.7) if index == 0 else (1.0, -1.2, 0.1))]
    study = study_of("mine", paper="", table="", axes=axis, report={"measures": ["top1"]})
    text = write(study, runs, [], tmp_path)
    assert "No difference between the connections was detected" in text
    assert "Without adjustment for 20 comparisons, 1 difference would be detected." in text
    assert differences(tmp_path)["0", "Orthogonal-F", "top-1 %"]["reading"] == "higher, but not after Holm's adjustment"
    assert results(tmp_path)["summary"][1]["difference"]["reading"] == "higher"


def test_features_that_are_not_finite_are_named(tmp_path):
    """The features of a diverged run are null in its `result.json`."""
    study, runs = study_of("representation"), runs_of("representation")
    for run in runs:
        if run["connection"] == "feature":
            run["representation"] = dict.fromkeys(run["representation"])
    write(study, runs, [], tmp_path)
    here = {row: value for ((row,), column), (_, value) in side_by_side(tmp_path).items() if column == "Orthogonal-F"}
    assert here == {
        **dict.fromkeys(["effective rank", "spectral entropy", "feature standard deviation"], "not finite (3 runs)"),
        "linear CKA with the baseline": "not run"}


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("missing", [None, math.nan])
def test_diverged_runs_are_named_and_not_averaged(tmp_path, missing):
    study, runs = study_of("layer_pattern"), runs_of("layer_pattern")
    for run in runs:
        if run["cell"]["layers"] == "all" or (run["cell"]["layers"] == "0,1" and run["seed"] == 1):
            run.update(top1=missing, top5=missing, loss=missing, best_top1=missing)
            for row in run["history"]:
                row.update(eval_top1=missing, train_loss=missing)
    write(study, runs, [], tmp_path)
    found, rows = side_by_side(tmp_path), differences(tmp_path)
    assert found[("all",), "top-1 %"] == ("52.98 ± 0.45", "not finite (3 runs)")
    assert found[("0,1",), "top-1 %"][1] == "82.00 ± 1.41 (1 of 3 not finite)"
    assert list(rows["0,1", "top-1 %"].values())[:2] == ["blocks = none", "+1.00 (2 pairs)"]
    assert rows["all", "top-1 %"]["reading"] == "no pair of finite runs"
    told, _ = texts(tmp_path)
    assert "Diverged, with a loss that is not finite: layers = all, Orthogonal-F, seed 0; layers = 0,1" in told
    assert all(word not in (tmp_path / "results.json").read_text() for word in ("NaN", "Infinity"))
