"""scripts/study_results.py: what of a study becomes part of the project."""
import json
import os
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from timm_ortho.lab import study_report

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
import study_results  # noqa: E402

STUDY = {
    "name": "gamma", "title": "How wide?", "paper": "Table 11", "table": "gamma", "kind": "gamma", "scale": "small",
    "dataset": None, "model": None, "axes": {}, "connections": [], "seeds": [], "baseline": {}, "changed": [],
    "versions": {"timm-ortho": "0.1.0"}, "command": "timm-ortho study run gamma",
}
ROWS = [{"model": "vit_small", "gamma": 64.0, "width": 384.0, "blocks": 6}]


@pytest.fixture
def cards(tmp_path, monkeypatch):
    monkeypatch.setattr(study_results, "commit_before", lambda file: "0123456789ab")  # a checkout may have no .git
    cards = tmp_path / "cards"
    cards.mkdir()
    (cards / "README.md").write_text(f"before\n{study_results.BEGIN}\nold\n{study_results.END}\nafter\n")
    return cards


def finished(folder, unfinished=()):
    study_report.write(STUDY, ROWS, list(unfinished), folder)
    (folder / "study.yaml").touch()
    return folder


def test_a_study_becomes_a_report_and_a_line_of_the_list(cards, tmp_path):
    study_results.main([finished(tmp_path / "run")], cards)
    kept = cards / "results" / "studies" / "gamma-small"
    assert {path.name for path in kept.iterdir()} == {"report.md", "figures", "results.json"}
    values = json.loads((kept / "results.json").read_text())
    assert values["runs"] == ROWS
    assert values["study"]["versions"]["commit"] == "0123456789ab"
    page = (cards / "README.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| [How wide?](results/studies/gamma-small/report.md) | Table 11 | - | see the table |" in page.splitlines()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "figures", "report.html", "report.md", "results.json", "study.yaml"]


def test_a_study_of_no_paper_has_a_dash_in_the_list(cards, tmp_path):
    study_report.write({**STUDY, "paper": "", "table": ""}, ROWS, [], tmp_path / "run")
    (tmp_path / "run" / "study.yaml").touch()
    study_results.main([tmp_path / "run"], cards)
    page = (cards / "README.md").read_text()
    assert "| [How wide?](results/studies/gamma-small/report.md) | - | - | see the table |" in page.splitlines()


def test_an_unfinished_study_is_refused(cards, tmp_path):
    with pytest.raises(SystemExit, match="unfinished runs: lr=1-linear-seed0"):
        study_results.main([finished(tmp_path / "run", ["lr=1-linear-seed0"])], cards)
    assert not (cards / "results").exists()


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
    cards = ROOT / "model_cards"
    assert study_results.listing(cards) in (cards / "README.md").read_text(encoding="utf-8")
