"""Measure one of the paper's tables of costs, and write it as a report.

The output folder has `report.html`, `report.md` and `results.json`. The measured rows are in `results.json` under the
key `runs`. These functions measure the rows of each table:

| table | functions |
| --- | --- |
| `overhead` (Table 1b) | `measure.overhead` |
| `parameters` (Table 1a) | `measure.flop_table` (rows with the key `module`), then `measure.parameter_table` |
| `gamma` (Table 11) | `measure.gamma_table` |
"""
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import torch

from ...run_folder import made_with
from .. import LabError, read_user_yaml, shipped_files
from ..planning.study_file import COST_STUDIES, SCALES
from ..reporting import report
from ..reporting.page import Block, Grid, Heading, Text, text_table
from . import measure
from .cost_tables import content


def cost(
        name: str, scale: str = "small", device: Optional[str] = None, threads: Optional[int] = None,
        output: Optional[Path] = None, command: str = "") -> str:
    """Measure a table of costs, write its report, and return the table as text.

    Args:
        name: `overhead`, `parameters` or `gamma`.
        scale: `smoke`, `small` or `paper`.
        device: The device on which `overhead` times the models. The default is CUDA if this machine has a GPU.
        threads: Number of CPU threads. The default is PyTorch's.
        output: Folder of the report, by default `output/cost/NAME-SCALE`.
        command: The command line that the report shows.
    """
    if threads is not None and threads < 1:
        raise LabError(f"--threads must be at least 1, got {threads}")
    study, arguments = load(name, scale)
    study.update(command=command, versions=made_with())
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        rows = measure.rows(name, arguments, device)
    finally:
        torch.set_num_threads(before)
    return write(study, rows, output or Path("output", "cost", f"{name}-{scale}"))


def load(name: str, scale: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the description that a table's report shows, and the arguments of the function that measures the table.

    >>> study, arguments = load("gamma", "smoke")
    >>> study["paper"], arguments["models"]
    ('Table 11', ['resnetv2_18_cifar', 'vit_small'])
    """
    if name not in COST_STUDIES:
        raise LabError(f"there is no table of costs '{name}': choose {', '.join(COST_STUDIES)}")
    if scale not in SCALES:
        raise LabError(f"there is no scale '{scale}': choose {', '.join(SCALES)}")
    values = read_user_yaml(shipped_files("costs")[name], name)
    here, paper = ({**values.get("arguments", {}), **(values["scales"][key] or {})} for key in (scale, "paper"))
    changed = [f"{key}: {_argument(here, key)} here; {_argument(paper, key)} at scale paper"
               for key in dict.fromkeys([*here, *paper]) if here.get(key) != paper.get(key)]
    study = {"name": name, "kind": name, "scale": scale, "title": values["title"], "paper": values["paper"],
             "table": values["table"], "dataset": None, "model": None, "seeds": [], "changed": changed}
    return study, here


def _argument(arguments: Mapping[str, Any], key: str) -> str:
    value = arguments.get(key, "not set")
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def write(study: Mapping[str, Any], rows: Sequence[measure.Row], folder: Path) -> str:
    """Write `report.html`, `report.md` and `results.json`, and return the table as text.

    Args:
        study: The description of the table, from `load` or from the key `study` of a `results.json`.
        rows: The measured rows.
        folder: Output folder.
    """
    results = {"study": study, "unfinished": [], "summary": [], "runs": rows}
    title = report.title_of(study)
    report.write_files(title, blocks(study, rows), results, folder)
    printed = text_table(content(study["name"], rows).printed())
    return f"{title}\n\n{_about(study)}\n\n{printed}\n\nreport: {folder / 'report.html'}"


def _about(study: Mapping[str, Any]) -> str:
    return f"Costs “{study['name']}” at scale “{study['scale']}”, measured on untrained models."


def blocks(study: Mapping[str, Any], rows: Sequence[measure.Row]) -> list[Block]:
    """Return the texts and tables below the title of a report, in order."""
    shown = content(study["name"], rows)
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows if row.get("device")))
    return [
        Text(_about(study)),
        Heading("The paper's table and this one"),
        Grid(shown.table(), "the table"), Text(report.note(study, shown.note)), *report.extra_blocks(shown.extras),
        *report.deviations(study),
        *report.origin(study, {"device": devices, **report.made_with(study, rows)}),
    ]
