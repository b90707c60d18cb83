"""Put the results of a finished `timm-ortho compare` into the project: the numbers, the figure, and the README's rows.

    python scripts/readme_results.py OUTPUT_FOLDER NAME

writes ``model_cards/compare_NAME.svg`` and ``model_cards/results/NAME.json``, with settings, versions, the commit that
was checked out when the runs began, and every run's figures (of the sites only the last epoch's). It prints the table
as Markdown; the README quotes nothing else.
"""
import json
import subprocess
import sys
from pathlib import Path

from matplotlib import rc_context

from timm_ortho.lab import report

ROOT = Path(__file__).parents[1]


def main(folder: Path, name: str) -> None:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    if results["unfinished"]:
        raise SystemExit(f"{folder} has unfinished runs: {', '.join(results['unfinished'])}")
    began = f"--before={int((folder / 'compare.yaml').stat().st_mtime)}"
    command = ["git", "rev-list", "-1", began, "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    draw(results["runs"], ROOT / "model_cards" / f"compare_{name}.svg")
    kept = {**results, "runs": [{**run, "dynamics": run["dynamics"][-1]} for run in results["runs"]]}
    target = ROOT / "model_cards" / "results" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"commit": commit.stdout.strip(), **kept}, indent=1) + "\n", encoding="utf-8")
    print(table(results["summary"]))


def draw(runs: list, path: Path) -> None:
    with rc_context({"svg.hashsalt": path.stem}):
        report.profile_figure(runs).savefig(path, format="svg", metadata={"Date": None})


def table(summary: list) -> str:
    lines = ["| connection | top-1 %, mean ± std | difference to linear [95 % interval] | seeds |", "| --- " * 4 + "|"]
    for row in summary:
        difference = "-" if row["difference"] is None else str(report.Difference(**row["difference"]))
        top1 = f"{row['top1_mean']:.2f} ± {row['top1_std']:.2f}"
        lines.append(f"| {row['connection']} | {top1} | {difference} | {', '.join(map(str, row['seeds']))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2])
