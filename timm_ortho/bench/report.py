"""What `bench` measured, as rows of figures, as tables, as `bench.csv` and as `bench.svg`.

| figure | is |
| --- | --- |
| `ms` | one call, in milliseconds |
| `ratio` | of `ms` to the linear candidate's, within a repetition; not of `backward`, where an addition does no work |
| `appendix_ratio` | of `ms` to that of the formula as the paper's appendix writes it; 0.25 is four times as fast |
| `shortest_ratio` | of `ms` to that of the formula in its shortest form; in the part `launch` only |
| `gb_per_s` | the bytes that a call must move, in units of 1e9, over its time |
| `share_of_copy` | that over the bytes a second of copying a large tensor, in the same repetition |
| `peak_memory` | bytes on a GPU: what the candidate holds, and the most that a call allocates beside it |
| `saved_bytes` | what autograd keeps for the backward pass, each storage once, parameters left out |

The first four have p20, p50 and p80 over the repetitions, further figures the median or a single value. A value that
could not be measured is None, one that does not apply is ""; a CSV holds an empty cell for both.
"""
import csv
import io
import os
import platform
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .._text import aligned
from ..runs.provenance import made_on

QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}
FIGURES = (
    *(f"{name}_{q}" for name in ("ms", "ratio", "appendix_ratio", "shortest_ratio") for q in QUANTILES),
    "images_per_s", "gb_per_s", "share_of_copy", "peak_memory", "peak_ratio", "saved_bytes", "saved_ratio",
)
LABELS = ("what", "model", "shape", "layout", "scope", "dtype", "mode", "step")
MACHINE = (
    "device", "cpu", "threads", "driver", "cuda", "system", "python", "torch", "triton", "timm", "timm_ortho",
    "commit", "date", "command",
)
COLUMNS = (*LABELS, "candidate", "backend", "baseline", "repeats", "calls", *FIGURES, "note", *MACHINE)

Row = dict[str, Any]


@dataclass
class Result:
    """What was measured of one candidate.

    Attributes:
        name: `linear` is the baseline, `copy` the measure of bandwidth.
        moved: Bytes that a call must move; 0 for none, or where they are not counted.
        once: Columns that are taken one time: `backend`, `calls` in a sample, `peak_memory`, `saved_bytes`.
        ms: Milliseconds of a call, one number for each repetition.
        note: The error that ended it, one line.
    """

    name: str
    moved: int = 0
    once: Row = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)
    note: str = ""


# ------------------------------------------------------------------------------------------------- the rows
def rows(labels: Mapping[str, str], images: int, results: Sequence[Result]) -> list[Row]:
    """A row for each candidate of a group, without the columns of :func:`machine`.

    Args:
        labels: Columns that the group shares.
        images: Images that a call sees, 0 for an operator.
        results: The group's results, `linear` among them.
    """
    others = {result.name: result for result in results}
    return [_row(labels, images, result, others) for result in results]


def _row(labels: Mapping[str, str], images: int, result: Result, others: Mapping[str, Result]) -> Row:
    linear = others["linear"]
    row = {**dict.fromkeys(COLUMNS, ""), **labels, **result.once, "candidate": result.name, "baseline": linear.name,
           "repeats": len(result.ms), "note": result.note, "threads": torch.get_num_threads()}
    if result.note:
        return {**row, **dict.fromkeys(FIGURES)}
    row |= _spread("ms", result.ms)
    if result.name != "copy":
        if row["step"] != "backward":
            row |= _spread("ratio", _over(result, linear))
        for name in ("appendix", "shortest"):
            if name in others:
                row |= _spread(f"{name}_ratio", _over(result, others[name]))
    if images:
        row["images_per_s"] = 1e3 * images / row["ms_p50"]
    if result.moved:
        row["gb_per_s"] = result.moved / row["ms_p50"] / 1e6
    if result.moved and "copy" in others:
        times_as_long = _over(others["copy"], result)
        row["share_of_copy"] = times_as_long and (
            quantiles(times_as_long)[1] * result.moved / others["copy"].moved)
    if "peak_memory" not in result.once:  # on a CPU
        row |= {"peak_memory": None, "peak_ratio": None}
    for figure, ratio in (("peak_memory", "peak_ratio"), ("saved_bytes", "saved_ratio")):
        if row[figure] and linear.once.get(figure):
            row[ratio] = row[figure] / linear.once[figure]
    return row


def quantiles(values: Sequence[float]) -> list[float]:
    """p20, p50 and p80, interpolated linearly."""
    wanted = torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(wanted).tolist()


def _spread(name: str, values: Optional[Sequence[float]]) -> Row:
    found = quantiles(values) if values else [None] * len(QUANTILES)
    return {f"{name}_{q}": value for q, value in zip(QUANTILES, found, strict=True)}


def _over(result: Result, other: Result) -> Optional[list[float]]:
    """Ratios within the repetitions; None if either failed."""
    if result.note or other.note:
        return None
    return [ms / base for ms, base in zip(result.ms, other.ms, strict=True)]


# ---------------------------------------------------------------------------------------------- the machine
def machine(device: torch.device, environment: Mapping[str, str], command: str) -> Row:
    """The columns that say on what, with what (`environment` as `timm-ortho env` prints it) and how it was measured."""
    made, gpu = made_on(), device.type == "cuda"
    return {
        **{name: environment[name.replace("_", "-")] for name in MACHINE if name.replace("_", "-") in environment},
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "python": platform.python_version(),
        "driver": made["driver"] if gpu else "",
        "commit": made.get("commit", ""),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


# ----------------------------------------------------------------------------------------- table, CSV, plot
_SHOWN = {  # part: header, and the cell's text or the column
    "operator": {
        "shape": "shape", "layout": "layout", "scope": "scope", "dtype": "dtype", "step": "step",
        "candidate": "candidate", "ms": lambda row: _cell(row, "ms_p50", "{:.3f}"),
        "over linear [p20, p80]": lambda row: _interval(row, "ratio"),
        "over appendix": lambda row: _cell(row, "appendix_ratio_p50", "{:.3f}"),
        "GB/s": lambda row: _cell(row, "gb_per_s", "{:.1f}"),
        "of copy": lambda row: _cell(row, "share_of_copy", "{:.0%}"),
        "kept": lambda row: _cell(row, "saved_bytes", "{:,.1f} MiB", 2**20), "note": "note",
    },
    "models": {
        "model": "model", "layout": "layout", "dtype": "dtype", "mode": "mode", "step": "step",
        "candidate": "candidate", "backend": "backend", "ms": lambda row: _cell(row, "ms_p50", "{:.1f}"),
        "over linear [p20, p80]": lambda row: _interval(row, "ratio"),
        "images/s": lambda row: _cell(row, "images_per_s", "{:,.1f}"),
        "kept": lambda row: _cell(row, "saved_bytes", "{:,.0f} MiB", 2**20),
        "over linear": lambda row: _cell(row, "saved_ratio", "{:.4f}"),
        "peak": lambda row: _cell(row, "peak_memory", "{:,.0f} MiB", 2**20),
        "over linear ": lambda row: _cell(row, "peak_ratio", "{:.4f}"), "note": "note",
    },
    "launch": {
        "model": "model", "shape": "shape", "step": "step", "candidate": "candidate", "backend": "backend",
        "us": lambda row: _cell(row, "ms_p50", "{:.1f}", 1e-3),
        "over linear [p20, p80]": lambda row: _interval(row, "ratio"),
        "over appendix [p20, p80]": lambda row: _interval(row, "appendix_ratio"),
        "over shortest [p20, p80]": lambda row: _interval(row, "shortest_ratio"), "note": "note",
    },
}


def _cell(row: Row, column: str, form: str, unit: float = 1) -> str:
    value = row[column]
    return "not measured" if value is None else "-" if value == "" else form.format(value / unit)


def _interval(row: Row, name: str) -> str:
    middle = _cell(row, f"{name}_p50", "{:.3f}")
    return f"{middle} [{row[f'{name}_p20']:.3f}, {row[f'{name}_p80']:.3f}]" if row[f"{name}_p50"] else middle


def tables(rows: Sequence[Row]) -> str:
    """A text table for each part."""
    return "\n\n".join(_table([row for row in rows if row["what"] == what], what) for what in _SHOWN
                       if any(row["what"] == what for row in rows))


def _table(rows: Sequence[Row], what: str) -> str:
    shown = _SHOWN[what]
    lines = [[str(row[show]) if isinstance(show, str) else show(row) for show in shown.values()] for row in rows]
    lines = [[header.strip() for header in shown], *map(_without_repeats, [[], *lines], lines)]
    text = aligned(lines)
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _without_repeats(above: Sequence[str], line: Sequence[str]) -> list[str]:
    """The line, with blanks in place of the first cells where they say what the line above says."""
    same = next((i for i, cells in enumerate(zip(above, line, strict=False)) if cells[0] != cells[1]), len(above))
    return ["" if i < same else cell for i, cell in enumerate(line)]


def write(folder: Path, rows: Sequence[Row]) -> None:
    """`bench.csv` and `bench.svg`, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    image = io.StringIO()
    with rc_context({"svg.hashsalt": "bench"}):
        figure(rows).savefig(image, format="svg", metadata={"Date": None})
    for name, content in (("bench.csv", text.getvalue()), ("bench.svg", image.getvalue())):
        partial_file = folder / f".{name}.partial"
        partial_file.write_text(content, encoding="utf-8")
        os.replace(partial_file, folder / name)


def figure(rows: Sequence[Row]) -> Figure:
    """Ratios to linear, p50 with whiskers from p20 to p80: a panel for each part, a line for each group."""
    drawn = [row for row in rows if row["candidate"] != "linear" and row["ratio_p50"]]
    parts = [what for what in _SHOWN if any(row["what"] == what for row in drawn)] or ["operator"]
    lines = {what: list(dict.fromkeys(_line(row) for row in drawn if row["what"] == what)) for what in parts}
    heights = [max(2, len(lines[what])) for what in parts]
    whole = Figure(figsize=(10, 1.2 * len(parts) + 0.35 * sum(heights)), layout="constrained")
    panels = whole.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, what in zip(panels, parts, strict=True):
        _panel(axes, [row for row in drawn if row["what"] == what], lines[what])
        axes.set_title(f"{what}: time over linear, p20 to p80", fontsize=10, loc="left")
    return whole


def _line(row: Row) -> str:
    return " ".join(row[label] for label in LABELS[1:] if row[label])


def _panel(axes: Axes, rows: Sequence[Row], lines: Sequence[str]) -> None:
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    for place, name in enumerate(names):
        mine = [row for row in rows if row["candidate"] == name]
        middle = [row["ratio_p50"] for row in mine]
        whiskers = [[row["ratio_p50"] - row["ratio_p20"] for row in mine],
                    [row["ratio_p80"] - row["ratio_p50"] for row in mine]]
        height = [lines.index(_line(row)) + 0.7 * ((place + 0.5) / len(names) - 0.5) for row in mine]
        axes.errorbar(middle, height, xerr=whiskers, fmt="o", markersize=4, capsize=2, linewidth=1, label=name)
    axes.axvline(1.0, color="#555555", linewidth=1)
    axes.set_yticks(range(len(lines)), lines, fontsize=7)
    axes.set_ylim(max(1, len(lines)) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        axes.legend(frameon=False, fontsize=8)
