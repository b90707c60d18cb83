"""Write the comparison with other runs into the `run.json` of each run, from which `timm-ortho push` makes cards."""
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..._text import finite
from ...run_folder import read_run
from ..folder import save, work_on
from ..planning.design import COMPARISON
from ..planning.plan import read
from . import tables
from .report import Part

_DIFFERENCE = ("mean", "half_width", "pairs")

def write(folder: Path, part: Part) -> None:
    """Write the comparison of each finished run in the output folder of a study."""
    rows = comparison(part)
    split = (part.study.get("data") or {}).get("validation_split")
    for name, cell in {cell["run"]: cell for cell in read(folder)["places"]}.items():
        top1 = [{"seed": run["seed"], "top1": run["top1"]} for run in sorted(part.runs, key=lambda run: run["seed"])
                if (run["cell"], run["connection"]) == (cell["cell"], cell["connection"]) and finite(run.get("top1"))]
        found = read_run(folder / name)
        compared = {"split": split, "top1": top1, "rows": rows}
        if found is not None and found.result is not None and found.comparison != compared:
            with work_on(folder / name):
                save(folder / name, replace(found, comparison=compared))


def comparison(part: Part) -> list[dict[str, Any]]:
    """Return the rows of the comparison on a model card; empty if the study is not `timm-ortho compare`."""
    if part.study["name"] != COMPARISON:
        return []
    rows = [tables.plain(entry) for entry in part.entries if entry.measure == "top1" and entry.values]
    return [{"connection": row["cell"]["connection"], "baseline": part.study["baseline"]["connection"],
             "seeds": row["seeds"], "top1_mean": row["mean"], "top1_std": row["std"],
             "difference": row["difference"] and {key: row["difference"][key] for key in _DIFFERENCE}}
            for row in rows if finite(row["mean"])]
