"""Put the results of a finished `timm-ortho compare` into the project: the numbers, the figure, and a table.

    python scripts/readme_results.py OUTPUT_FOLDER NAME

writes ``model_cards/compare_NAME.svg`` and ``model_cards/results/NAME.json``, the folder's ``results.json`` with the
commit that was checked out when the runs began, and of the probes the last epoch's only. It prints the table of
docs/evidence.md as Markdown.
"""
import json
import sys
from pathlib import Path

from study_results import ROOT, commit_before

from timm_ortho.lab.reporting import page, plots as figures, report


def main(folder: Path, name: str, cards: Path = ROOT / "model_cards") -> None:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    if results["unfinished"]:
        raise SystemExit(f"{folder} has unfinished runs: {', '.join(results['unfinished'])}")
    runs = [{**run, "probe": run["probe"][-1:]} for run in results["runs"]]
    draw(runs, cards / f"compare_{name}.svg")
    (cards / "results").mkdir(exist_ok=True)
    kept = {"commit": commit_before(folder / "study.yaml"), **results, "runs": runs}
    (cards / "results" / f"{name}.json").write_text(report.as_json(kept), encoding="utf-8")
    print(table(results["summary"]))


def draw(runs: list, path: Path) -> None:
    path.write_text(page.svg(lambda: figures.profile(runs), path.stem), encoding="utf-8")


def table(summary: list) -> str:
    lines = ["| connection | top-1 %, mean ± std | difference to linear [95 % interval] | seeds |", "| --- " * 4 + "|"]
    for row in (row for row in summary if row["measure"] == "top1"):
        difference, std = row["difference"], "" if row["std"] is None else f" ± {row['std']:.2f}"
        said = "-" if difference is None else f"{difference['mean']:+.2f}"
        if difference and difference["half_width"] is not None:
            low, high = (difference["mean"] + sign * difference["half_width"] for sign in (-1, 1))
            said += f" [{low:+.2f}, {high:+.2f}]"
        seeds = ", ".join(map(str, row["seeds"]))
        lines.append(f"| {row['cell']['connection']} | {row['mean']:.2f}{std} | {said} | {seeds} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2])
