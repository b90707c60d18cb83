"""Test scripts/evidence.py, which recomputes the decisions of hypotheses from the published runs."""
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from scripts import evidence
from timm_ortho.lab.reporting.statistics import Difference

ROOT = Path(__file__).parents[2]
C1 = "cifar_accuracy-cifar10-small"
FILES = ("README.md", "docs/evidence.md", "model_cards/decisions.csv", "model_cards/results/SHA256SUMS")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Return the root of a copy of the archives and of the generated files, which a test may change."""
    shutil.copytree(ROOT / "model_cards" / "results", tmp_path / "model_cards" / "results")
    (tmp_path / "docs").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "model_cards" / "results")
    evidence.archive.cache_clear()
    yield tmp_path
    evidence.archive.cache_clear()


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def check(root, capsys):
    status = evidence.main(["--check"], root)
    return status, capsys.readouterr().out.splitlines()


def test_results_equal_the_published_runs(capsys):
    assert check(ROOT, capsys) == (0, [])


def test_changed_digits_are_named(checkout, capsys):
    file = checkout / "model_cards" / "results" / "studies" / C1 / "study.json"
    edit(file, '"top1": 69.08', '"top1": 69.18')
    edit(checkout / "README.md", "+0.63 [+0.38, +0.87]", "+0.64 [+0.38, +0.87]")
    status, lines = check(checkout, capsys)
    assert status == 1
    assert re.fullmatch(f"model_cards/results/SHA256SUMS: [+][0-9a-f]{{64}}  studies/{C1}/study.json", lines[2])
    assert lines[3] == "model_cards/decisions.csv: @@ -2 +2 @@"
    assert "model_cards/decisions.csv: -C1,F is more" in lines[4]
    assert ",+1.6100," in lines[4]
    assert ",+1.6000," in lines[5]
    assert "README.md" in [line.partition(": ")[0] for line in lines[6:]]
    assert evidence.main([], checkout) == 0
    assert check(checkout, capsys) == (0, [])


def test_c1_by_hand():
    """Compute C1 from the JSON file with SciPy. Its family has four hypotheses, so Holm's factor is 3 or 4."""
    runs = json.loads((evidence.RESULTS / "studies" / C1 / "study.json").read_text())["runs"]
    top1 = {(run["connection"], run["seed"]): run["top1"] for run in runs}
    leads = [top1["feature", seed] - top1["linear", seed] for seed in range(210, 220)]
    t = stats.ttest_1samp(leads, 0)
    row = next(row for row in evidence.decisions() if row["id"] == "C1")
    low, high = t.confidence_interval()
    assert [row["difference"], row["low"], row["high"]] == [f"{value:+.4f}" for value in (np.mean(leads), low, high)]
    assert row["p_holm"] == f"{3 * t.pvalue:.2g}"  # C2 has a smaller p


def test_estimators():
    one, other = [1.0, 2.0, 4.0, 3.5], [0.0, 3.0, 1.5]
    measured, expected = evidence.welch(one, other, 0.95), stats.ttest_ind(one, other, equal_var=False)
    assert measured.p == pytest.approx(expected.pvalue)
    assert measured.ends == pytest.approx(expected.confidence_interval())
    x, y = [0.0, 1.0, 3.0], [2.0, 2.5, 7.0]
    weights = evidence.slope(x, [{(value,): 1.0} for value in x])
    assert sum(weights[(at,)] * value for at, value in zip(x, y, strict=True)) == pytest.approx(np.polyfit(x, y, 1)[0])


@pytest.mark.parametrize(("mean", "p", "changes", "words"), [
    (1.0, 0.04, {}, "confirmed"),
    (1.0, 0.04, {"of_interest": 2.0},
     "confirmed, but the mean is below 2 points, the smallest difference of interest"),
    (-1.0, 0.04, {}, "contradicted"),
    (1.0, 0.06, {}, "not confirmed"),
    (1.0, 0.06, {"equivalent": 2.2}, "equivalent within 2.2"),
    (1.0, 0.06, {"equivalent": 2.1}, "not confirmed"),
    (1.0, 0.04, {"claim": "different"}, "above zero"),
    (-1.0, 0.04, {"claim": "different"}, "below zero"),
    (1.0, 0.04, {"claim": "equal", "equivalent": 0.5}, "contradicted"),
])
def test_decisions_in_words(mean, p, changes, words):
    one = next(one for one in evidence.HYPOTHESES if one.id == "C1")  # its intervals end at 2.14 (90 %) and 2.27 (95 %)
    one = one._replace(**{"equivalent": 0.0, **changes})
    assert evidence.decision(one, Difference(mean, 1.0, 10, p), p) == words


def test_pairs_of_fine_tuning_have_one_seed_and_any_pretraining(monkeypatch):
    runs = [{"cell": {"pretraining": weights, "arm": arm}, "connection": "x", "seed": seed, "top1": top1}
            for weights, seed, of in (("a", 410, (50.0, 51.0)), ("b", 415, (60.0, 63.0)), ("b", 416, (60.0,)))
            for arm, top1 in zip(("linear", "feature"), of, strict=False)]
    monkeypatch.setattr(evidence, "archive", lambda name: ({}, runs))
    one = next(one for one in evidence.HYPOTHESES if one.id == "F2")
    assert evidence.by_seed(one.contrast, one.metric, one.setting) == [1.0, 3.0]
