"""Put finished studies into the project: reports, figures, numbers, and the list in model_cards/README.md.

    python scripts/study_results.py FOLDER ...    output folders of timm-ortho study; adds or replaces them
    python scripts/study_results.py               the list anew, from what model_cards/results/studies holds

A study goes to ``model_cards/results/studies/NAME-DATASET-SCALE/``: ``report.md`` with ``figures/``, and
``results.json`` with the commit that was checked out when it began. Nothing but what the runs gave is in them.
"""
import json
import subprocess
import sys
from pathlib import Path
from typing import Mapping, Sequence

from timm_ortho.lab import study_report
from timm_ortho.lab.design import shipped

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- studies: made by scripts/study_results.py -->", "<!-- end of studies -->"


def main(folders: Sequence[Path], cards: Path = ROOT / "model_cards") -> None:
    for folder in folders:
        publish(folder, cards / "results" / "studies")
    page = cards / "README.md"
    before = page.read_text(encoding="utf-8")
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no '{BEGIN}' with '{END}' behind it")
    page.write_text(f"{head}{BEGIN}\n\n{listing(cards)}\n\n{END}{tail}", encoding="utf-8")


def publish(folder: Path, results: Path) -> None:
    values = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    study = values["study"]
    if values["unfinished"]:
        raise SystemExit(f"{folder} has unfinished runs: {', '.join(values['unfinished'])}")
    study["versions"]["commit"] = commit_before(folder / "study.yaml")
    name = "-".join(filter(None, [study["name"], (study["dataset"] or "").replace("/", "_"), study["scale"]]))
    scratch = folder / "with_commit.json"
    scratch.write_text(json.dumps(values), encoding="utf-8")
    study_report.rewrite(scratch, results / name)
    scratch.unlink()
    (results / name / "report.html").unlink()  # says the same as report.md


def commit_before(file: Path) -> str:
    """The commit that was checked out when a file was last written."""
    command = ["git", "rev-list", "-1", f"--before={int(file.stat().st_mtime)}", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()[:12]


def listing(cards: Path) -> str:
    """A Markdown table of all studies that are there, in the order in which the package lists them."""
    order = list(shipped())
    found = [(path, json.loads(path.read_text(encoding="utf-8")))
             for path in sorted((cards / "results" / "studies").glob("*/results.json"))]
    found.sort(key=lambda item: order.index(item[1]["study"]["name"]))
    lines = ["| study | in the paper | run on | what came out |", "| --- " * 4 + "|"]
    return "\n".join(lines + [_line(path.parent.relative_to(cards), values) for path, values in found])


def _line(folder: Path, values: Mapping) -> str:
    study = values["study"]
    where = f"{study['dataset']}, {study['scale']}, {len(study['seeds'])} seeds" if study["dataset"] else "-"
    read = values["lead"] or "see the table"
    return f"| [{study['title']}]({folder}/report.md) | {study['paper'] or '-'} | {where} | {read} |"


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
