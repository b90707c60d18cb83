"""Find the commits, processors and versions of the runs that test hypotheses.

`python -m scripts.publish` records the commits in model_cards/results/provenance/commits.json, so that the evidence
page can also be checked in a checkout without git history.
"""
import json
import subprocess
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

from . import studies
from .contrasts import Run, is_published, runs_of

ROOT = Path(__file__).parents[2]
# Headings of hypotheses.md. The commit that added a heading is the commit that added the rules of this part.
RULES = {"one": "## P1: accuracy", "two": "## Rules for part two", "three": "## Rules for part three"}
PREFIXES = {  # of the names of studies
    "one": ("confirm_",), "two": ("cifar_accuracy", "cifar_factors", "cifar_rates", "cifar_width", "tiny_imagenet_"),
    "three": ("cifar_resnet18", "cifar_vit_small")}
DIFFERING = {"processors": "cpu", "torch": "torch", "timm": "timm", "commits": "commit"}  # title -> key of a run
FILE = studies.RESULTS / "provenance" / "commits.json"


def studies_of(part: str) -> list[str]:
    """Return the folders of the published studies of one part of hypotheses.md."""
    return [folder.name for folder in studies.folders() if folder.name.startswith(PREFIXES[part])]


def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def record() -> None:
    """Rewrite `FILE` if the checkout has its git history."""
    history = read_history()
    if history:
        FILE.write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")


def read_history(
        pages: Sequence[str] = ("docs/hypotheses.md", "model_cards/hypotheses.md"),
) -> Optional[dict[str, Any]]:
    """Return, for each part, the commit that added the rules, its date, and the position of each run's commit.

    The position is `after` for the commit of the rules and its descendants, `before` for all other commits of the
    history, and `not in the history`. Returns None without git history.
    """
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return None
    histories = {}
    for part, line in RULES.items():
        added = (_git("log", "--reverse", "--format=%H %cI", "-S", line, "--", *pages) or "").splitlines()
        if not added:
            return None
        commit, _, date = added[0].partition(" ")
        named = {run["made_with"].get("commit") for study in studies_of(part) for run in runs_of(study)}
        histories[part] = {"rules": commit, "date": date,
                       "commits": {name: _position(commit, name) for name in sorted(filter(None, named))}}
    return histories


def _position(rules: str, commit: str) -> str:
    if _git("cat-file", "-t", commit) is None:
        return "not in the history"
    return "after" if _git("merge-base", "--is-ancestor", rules, commit) is not None else "before"


def _git(*arguments: str) -> Optional[str]:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def elsewhere(part: str, history: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, by study, a summary of the runs whose commit does not come after the commit of the rules.

    A summary has the number of these runs, their seeds and commits, and the time at which the last run ended.
    """
    return {study: {"runs": len(runs), "seeds": sorted({run["seed"] for run in runs}),
                    "commits": sorted({(run["made_with"].get("commit") or "unknown")[:7] for run in runs}),
                    "last": max(run["made_with"].get("end") or "" for run in runs)[:16].replace("T", " ")}
            for study, runs in _by_study(part, history, after=False)}


def made_after(part: str, history: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, for each study, how many runs record a commit after the rules, with their commits and devices."""
    return [{"study": study.partition("-")[0], "runs": len(runs),
             "devices": _named(runs, "gpu") or _named(runs, "cpu"),
             "commits": sorted({run["made_with"]["commit"][:7] for run in runs})}
            for study, runs in _by_study(part, history, after=True)]


def _by_study(part: str, history: Mapping[str, Any], after: bool) -> Iterator[tuple[str, list[Run]]]:
    """Yield each study with its runs whose commit comes after the commit of the rules, or with all other runs."""
    positions = history[part]["commits"]
    for study in studies_of(part):
        runs = [run for run in runs_of(study)
                if (positions.get(run["made_with"].get("commit")) == "after") is after]
        if runs:
            yield study, runs


def mixed_pairs(part: str) -> list[dict[str, Any]]:
    """Return each study and seed whose runs had several processors, versions or commits, with lists of these."""
    pairs = []
    for study in filter(is_published, studies_of(part)):
        for seed in sorted({run["seed"] for run in runs_of(study)}):
            mine = [run for run in runs_of(study) if run["seed"] == seed]
            several = {title: values for title, key in DIFFERING.items() if len(values := _named(mine, key)) > 1}
            if "commits" in several:
                several["commits"] = [commit[:7] for commit in several["commits"]]
            if several:
                pairs.append({"study": study, "seed": seed, "several": several})
    return pairs


def _named(runs: Iterable[Run], key: str) -> list[str]:
    return sorted({run["made_with"][key] for run in runs if run["made_with"].get(key)})
