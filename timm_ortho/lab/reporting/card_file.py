"""Write the numbers of a study into the `card.json` of its runs, from which `timm-ortho push` makes model cards."""
from pathlib import Path
from typing import Any

from ..._text import finite
from ..folder import RESULT, RunPlan
from ..planning.design import COMPARISON
from ..planning.plan import read
from . import tables
from .report import Part


def write(folder: Path, part: Part) -> None:
    """Write the `card.json` of each finished run in the output folder of a study."""
    compared = comparison(part)
    split = (part.study.get("data") or {}).get("validation_split")
    for name, cell in {cell["run"]: cell for cell in read(folder)["places"]}.items():
        of_cell = {run["seed"]: run for run in part.runs
                   if (run["cell"], run["connection"]) == (cell["cell"], cell["connection"])}
        run = of_cell.get(cell["seed"])
        if run is not None and (folder / name / RESULT).is_file():  # otherwise a run by hand, in another folder
            top1 = {seed: other["top1"] for seed, other in sorted(of_cell.items()) if finite(other.get("top1"))}
            plan = RunPlan.read(folder / name)
            plan.write_card(folder / name, run, top1=top1, split=split, comparison=compared)


def comparison(part: Part) -> list[dict[str, Any]]:
    """Return the rows of the comparison on a model card; empty if the study is not `timm-ortho compare`."""
    if part.study["name"] != COMPARISON:
        return []
    rows = [tables.plain(entry) for entry in part.entries if entry.measure == "top1" and entry.values]
    return [{"connection": row["cell"]["connection"], "baseline": part.study["baseline"]["connection"],
             "seeds": row["seeds"], "top1_mean": row["mean"], "top1_std": row["std"], "difference": row["difference"]}
            for row in rows]
