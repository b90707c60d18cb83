"""Where the confirming runs were made: commits, processors and torch versions.

`evidence.py` records the history of the repository in model_cards/results/provenance/commits.json, so that a checkout
without history can check the page.
"""
import json
import subprocess
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

from . import studies
from .contrasts import Run, is_published, runs_of

ROOT = Path(__file__).parents[2]
RULES = {"one": "## P1: accuracy", "two": "## Rules for part two"}  # a line that came with each part
FILE = studies.RESULTS / "provenance" / "commits.json"


def studies_of(part: str) -> list[str]:
    """Folders of the published studies that a part of hypotheses.md plans."""
    prefixes = {"one": ("confirm_",), "two": ("cifar_", "tiny_imagenet_")}[part]
    return [folder.name for folder in studies.folders() if folder.name.startswith(prefixes)]


def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def record() -> None:
    """Write `FILE` anew, where the whole history is known."""
    history = read_history()
    if history:
        FILE.write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")


def read_history(
        pages: Sequence[str] = ("docs/hypotheses.md", "model_cards/hypotheses.md"),
) -> Optional[dict[str, Any]]:
    """By part: the commit that brought its rules, and of each commit that a run names whether it comes after; None
    where git or the history is lacking."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return None
    histories = {}
    for part, line in RULES.items():
        added = (_git("log", "--reverse", "--format=%H %cI", "-S", line, "--", *pages) or "").splitlines()
        if not added:
            return None
        commit, _, date = added[0].partition(" ")
        named = {run["made_with"]["commit"] for study in studies_of(part) for run in runs_of(study)}
        histories[part] = {"rules": commit, "date": date,
                       "commits": {name: _place(commit, name) for name in sorted(filter(None, named))}}
    return histories


def _place(rules: str, commit: str) -> str:
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
    """By study, the runs that name no commit after the rules: their number, seeds, commits, and when the last ended."""
    others = {}
    for study in studies_of(part):
        after = {commit for commit, place in history[part]["commits"].items() if place == "after"}
        runs = [run for run in runs_of(study) if run["made_with"].get("commit") not in after]
        if runs:
            others[study] = {"runs": len(runs), "seeds": sorted({run["seed"] for run in runs}),
                            "commits": sorted({run["made_with"]["commit"][:7] for run in runs}),
                            "last": max(run["made_with"].get("end") or "" for run in runs)[:16].replace("T", " ")}
    return others


def mixed_pairs(part: str) -> list[dict[str, Any]]:
    """The seeds of a study whose runs name two processors, with what else differs."""
    pairs = []
    for study in filter(lambda study: is_published(study), studies_of(part)):
        for seed in sorted({run["seed"] for run in runs_of(study)}):
            mine = [run for run in runs_of(study) if run["seed"] == seed]
            cpus, torches = _named(mine, "cpu"), _named(mine, "torch")
            if len(cpus) > 1 or len(torches) > 1:
                pairs.append({"study": study, "seed": seed, "cpus": cpus, "torches": torches})
    return pairs


def _named(runs: Iterable[Run], key: str) -> list[str]:
    return sorted({run["made_with"][key] for run in runs if run["made_with"].get(key)})
