"""scripts/study_results.py: what of a study becomes part of the project."""
import json
import os
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pytest
import readme_results
import study_results
from helpers.made_up_runs import ROWS, runs_of, study_of
from helpers.tiny_study import planned, request, written

from timm_ortho.hub.card import difference
from timm_ortho.lab.reporting import collect, report
from timm_ortho.lab.running import launch, run

ROOT = Path(__file__).parents[2]

STUDY = study_of("gamma", title="How wide?", paper="Table 11", dataset=None, model=None, seeds=[])


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(study_results, "commit_before", lambda file: "0123456789ab")  # a checkout may have no .git
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / "model_cards").mkdir()
    (root / "docs" / "evidence.md").write_text(f"before\n{study_results.BEGIN}\nold\n{study_results.END}\nafter\n")
    return root


def finished(folder, study=STUDY, runs=ROWS["gamma"], unfinished=()):
    report.write(study, runs, list(unfinished), folder)
    (folder / "study.yaml").touch()
    return folder


def test_a_study_becomes_a_report_and_a_line_of_the_list(root, tmp_path):
    study_results.main([finished(tmp_path / "run")], root)
    kept = root / "model_cards" / "results" / "studies" / "gamma-small"
    assert {path.name for path in kept.iterdir()} == {"report.md", "figures", "results.json"}
    values = json.loads((kept / "results.json").read_text())
    assert values["runs"] == ROWS["gamma"]
    assert values["study"]["versions"]["commit"] == "0123456789ab"
    page = (root / "docs" / "evidence.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "\nold\n" not in page
    line = "| [How wide?](../model_cards/results/studies/gamma-small/report.md) | Table 11 | - | - | - | - |"
    assert line in page.splitlines()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "figures", "report.html", "report.md", "results.json", "study.yaml"]


def test_a_study_of_no_paper_has_a_dash_in_the_list(root, tmp_path):
    study_results.main([finished(tmp_path / "run", {**STUDY, "paper": "", "table": ""})], root)
    page = (root / "docs" / "evidence.md").read_text()
    line = "| [How wide?](../model_cards/results/studies/gamma-small/report.md) | - | - | - | - | - |"
    assert line in page.splitlines()


def test_an_unfinished_study_is_refused(root, tmp_path):
    with pytest.raises(SystemExit, match="unfinished runs: lr=1-linear-seed0"):
        study_results.main([finished(tmp_path / "run", unfinished=["lr=1-linear-seed0"])], root)
    assert not (root / "model_cards" / "results").exists()


def test_finished_runs_are_kept_and_gone_on_from(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(ROOT / "timm_ortho" / "__main__.py"), "study", "run", "a b"])
    study = written(tmp_path, representation=False)
    first = planned(request(study, tmp_path / "here")).folder
    done, waiting = "lr=0.001-linear-seed0", "lr=0.01-feature-seed0"
    run.run(first / done)
    assert study_results.keep(first, tmp_path / "unfinished") == 1
    kept = tmp_path / "unfinished" / "tiny"
    assert {path.name for path in kept.iterdir()} == {"study.yaml", done}
    assert {path.name for path in (kept / done).iterdir()} == {
        "run.yaml", "result.json", "summary.csv", "probe.jsonl", "records.jsonl"}
    text = "".join(path.read_text() for path in kept.rglob("*") if path.is_file())
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
    assert json.loads((kept / done / "result.json").read_text())["made_with"]["command"] == "timm-ortho study run 'a b'"
    records = (kept / done / "records.jsonl").read_text().splitlines()
    assert {json.loads(row)["step"] for row in records} == {4, 6}  # of 2 x 4 steps

    assert collect.status(kept).endswith("1 finished, 3 waiting")

    again = planned(request(study, kept))
    assert done not in launch.waiting(kept, again.runs)
    assert waiting in launch.waiting(kept, again.runs)
    found = [collect.collect([folder])[0] for folder in (kept, first)]
    assert found[0][1][0]["top1"] == found[1][1][0]["top1"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("many", [True, False])
def test_of_many_runs_less_is_kept(root, tmp_path, monkeypatch, many):
    runs = runs_of("dynamics")
    monkeypatch.setattr(study_results, "MANY", len(runs) - many)
    study_results.main([finished(tmp_path / "run", study_of("dynamics"), runs)], root)
    whole = json.loads((tmp_path / "run" / "results.json").read_text())
    kept = json.loads(next(root.glob("model_cards/results/studies/*/results.json")).read_text())
    plot = next(root.glob("model_cards/results/studies/*/figures/differences.svg")).relative_to(root)
    assert f"![differences](../{plot})" in (root / "docs" / "evidence.md").read_text()
    assert kept["summary"] == whole["summary"]
    for less, more in zip(kept["runs"], whole["runs"], strict=True):
        assert less["history"] == more["history"]
        assert less["probe"] == ([more["probe"][0], more["probe"][-1]] if many else more["probe"])
        last = max(row["step"] for row in more["dynamics"])
        steps = {row["step"] for row in less["dynamics"]}
        assert max(steps) == last
        assert (min(steps) > last * (1 - 1 / more["epochs"])) is many


def test_a_comparison_becomes_numbers_a_figure_and_a_table(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readme_results, "commit_before", lambda file: "0123456789ab")
    folder = finished(tmp_path / "run", study_of("compare"), runs_of("compare"))
    readme_results.main(folder, "mine", root / "model_cards")
    assert (root / "model_cards" / "compare_mine.svg").stat().st_size > 1000
    values = json.loads((root / "model_cards" / "results" / "mine.json").read_text())
    assert values["commit"] == "0123456789ab"
    assert {len(run["probe"]) for run in values["runs"]} == {1}
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| linear | 81.00 ± 1.00 | - | 0, 1, 2 |",
        "| feature | 81.00 ± 1.00 | +0.00 | 0, 1, 2 |"]


@pytest.mark.parametrize(("half_width", "pairs", "said"), [
    (0.5, 3, "+1.00 [+0.50, +1.50]"), (None, 1, "+1.00 (one pair, no interval)"),
    (None, 2, "+1.00 (2 equal differences, no interval)")])
def test_a_card_tells_why_there_is_no_interval(half_width, pairs, said):
    assert difference({"mean": 1.0, "half_width": half_width, "pairs": pairs}) == said


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_time(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    git = ["git", "-C", repository, "-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run(["git", "init", "--quiet", repository], check=True)
    for day in (1, 2):
        date = f"2026-01-0{day}T12:00:00Z"
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", f"{day}", "--date", date], check=True,
                       env={**os.environ, "GIT_COMMITTER_DATE": date})
    log = subprocess.run([*git, "log", "--format=%H"], check=True, capture_output=True, text=True)
    file = tmp_path / "study.yaml"
    file.touch()
    noon = datetime(2026, 1, 1, 12, tzinfo=timezone.utc).timestamp()
    os.utime(file, (noon + 3600, noon + 3600))
    monkeypatch.setattr(study_results, "ROOT", repository)
    assert study_results.commit_before(file) == log.stdout.split()[-1][:12]


def test_the_list_in_the_project_is_that_of_its_results():
    assert study_results.listing(ROOT / "model_cards") in (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
