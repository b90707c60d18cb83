"""Turn the measurements of `bench` into text tables and `bench.csv`.

| metric | definition |
| --- | --- |
| `ms` | milliseconds of one call |
| `ratio` | `ms` divided by `ms` of `linear` in the same repetition; empty for `backward`, where `linear` does nothing |
| `appendix_ratio` | `ms` divided by `ms` of the formula in the paper's appendix; 0.25 means four times as fast |
| `images_per_s` | images that a model processes per second; only for models |
| `gb_per_s` | gigabytes (1e9 bytes) that a call must read and write, divided by its seconds |
| `share_of_copy` | `gb_per_s` divided by `gb_per_s` of copying a large tensor in the same repetition |
| `peak_memory` | bytes on a GPU: the candidate's tensors plus the most that a call allocates at any time |
| `peak_ratio` | `peak_memory` divided by `peak_memory` of `linear` |
| `saved_bytes` | bytes that autograd saves for the backward pass, each storage once, without parameters |
| `saved_ratio` | `saved_bytes` divided by `saved_bytes` of `linear` |

The first three metrics have the quantiles p20, p50 and p80 over the repetitions. The remaining metrics are medians or
single values. None marks a value that could not be measured, and "" marks a value that does not apply. If a candidate
failed, all its metrics are None. None and "" are empty cells in the CSV.
"""
import os
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import torch

from .._text import aligned, csv_text
from ..run_folder import environment, made_on

QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}
METRICS = (
    *(f"{name}_{q}" for name in ("ms", "ratio", "appendix_ratio") for q in QUANTILES),
    "images_per_s", "gb_per_s", "share_of_copy", "peak_memory", "peak_ratio", "saved_bytes", "saved_ratio",
)
LABELS = ("what", "model", "shape", "layout", "scope", "dtype", "mode", "step")
MACHINE = (
    "device", "cpu", "threads", "driver", "cuda", "system", "python", "torch", "triton", "timm", "timm_ortho",
    "commit", "date", "command",
)
COLUMNS = (*LABELS, "candidate", "backend", "baseline", "repeats", "calls", *METRICS, "note", *MACHINE)

Measurement = dict[str, Any]  # one line of bench.csv, by column


@dataclass
class Result:
    """Measurements of one candidate."""

    name: str  # `linear` is the baseline, and `copy` measures the bandwidth
    moved: int = 0  # as in `clock.Candidate`
    once: Measurement = field(default_factory=dict)  # `backend`, `calls` per repetition, `peak_memory`, `saved_bytes`
    ms: list[float] = field(default_factory=list)  # milliseconds of one call, a number for each repetition
    note: str = ""  # the reason why the candidate was not measured, in one line; empty if it was


# ----------------------------------------------------------------------------------------- the measurements
def rows(labels: Mapping[str, str], images: int, results: Sequence[Result]) -> list[Measurement]:
    """Return one measurement for each candidate of a group. The columns of :func:`machine` are empty.

    Args:
        labels: Columns with the same value for the whole group.
        images: Images per call, 0 for an operator.
        results: The results of the group. One of them has the name `linear`.

    >>> results = [Result("linear", ms=[2.0]), Result("ortho", ms=[3.0])]
    >>> [(one["candidate"], one["ratio_p50"]) for one in rows({"what": "models", "step": "training"}, 8, results)]
    [('linear', 1.0), ('ortho', 1.5)]
    """
    by_name = {result.name: result for result in results}
    return [_row(labels, images, result, by_name) for result in results]


def _row(labels: Mapping[str, str], images: int, result: Result, by_name: Mapping[str, Result]) -> Measurement:
    linear = by_name["linear"]
    row = {**dict.fromkeys(COLUMNS, ""), **labels, **result.once, "candidate": result.name, "baseline": linear.name,
           "repeats": len(result.ms), "note": result.note, "threads": torch.get_num_threads()}
    if result.note:
        return {**row, **dict.fromkeys(METRICS)}
    row |= _spread("ms", result.ms)
    if result.name != "copy":
        if row["step"] != "backward":
            row |= _spread("ratio", _over(result, linear))
        if "appendix" in by_name:
            row |= _spread("appendix_ratio", _over(result, by_name["appendix"]))
    if images:
        row["images_per_s"] = 1e3 * images / row["ms_p50"]
    if result.moved:
        row["gb_per_s"] = result.moved / row["ms_p50"] / 1e6
    if result.moved and "copy" in by_name:
        ratios = _over(by_name["copy"], result)
        row["share_of_copy"] = ratios and quantiles(ratios)[1] * result.moved / by_name["copy"].moved
    if "peak_memory" not in result.once:  # on a CPU
        row |= {"peak_memory": None, "peak_ratio": None}
    for metric, ratio in (("peak_memory", "peak_ratio"), ("saved_bytes", "saved_ratio")):
        baseline = linear.once.get(metric)
        if row[metric] and (baseline or linear.note):
            row[ratio] = row[metric] / baseline if baseline else None
    return row


def quantiles(values: Sequence[float]) -> list[float]:
    """Return p20, p50 and p80, linearly interpolated.

    >>> quantiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    [2.0, 3.5, 5.0]
    """
    levels = torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(levels).tolist()


def _spread(name: str, values: Optional[Sequence[float]]) -> Measurement:
    spread = quantiles(values) if values else [None] * len(QUANTILES)
    return {f"{name}_{q}": value for q, value in zip(QUANTILES, spread, strict=True)}


def _over(result: Result, other: Result) -> Optional[list[float]]:
    """Return `result`'s time divided by `other`'s for each repetition, or None if a candidate failed."""
    if result.note or other.note:
        return None
    return [ms / base for ms, base in zip(result.ms, other.ms, strict=True)]


# ---------------------------------------------------------------------------------------------- the machine
def machine(device: torch.device, command: str) -> Measurement:
    """Return the columns in `MACHINE` except `threads`."""
    made, known, gpu = made_on(), environment(), device.type == "cuda"
    return {
        **{name: known[name.replace("_", "-")] for name in MACHINE if name.replace("_", "-") in known},
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "python": platform.python_version(),
        "driver": made["driver"] if gpu else "",
        "commit": made.get("commit", ""),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# ------------------------------------------------------------------------------------------------ table, CSV
TABLES = {  # part -> header of the table -> column of bench.csv, or function that returns the cell's text
    "operator": {
        "shape": "shape", "layout": "layout", "scope": "scope", "dtype": "dtype", "step": "step",
        "candidate": "candidate", "ms": lambda row: _cell(row, "ms_p50", "{:.3f}"),
        "ms over linear [p20, p80]": lambda row: _interval(row, "ratio"),
        "ms over appendix": lambda row: _cell(row, "appendix_ratio_p50", "{:.3f}"),
        "GB/s": lambda row: _cell(row, "gb_per_s", "{:.1f}"),
        "GB/s over copy": lambda row: _cell(row, "share_of_copy", "{:.0%}"),
        "saved for backward": lambda row: _cell(row, "saved_bytes", "{:,.1f} MiB", 2**20), "note": "note",
    },
    "models": {
        "model": "model", "layout": "layout", "dtype": "dtype", "mode": "mode", "step": "step",
        "candidate": "candidate", "backend": "backend", "ms": lambda row: _cell(row, "ms_p50", "{:.1f}"),
        "ms over linear [p20, p80]": lambda row: _interval(row, "ratio"),
        "images/s": lambda row: _cell(row, "images_per_s", "{:,.1f}"),
        "saved for backward": lambda row: _cell(row, "saved_bytes", "{:,.0f} MiB", 2**20),
        "saved over linear": lambda row: _cell(row, "saved_ratio", "{:.4f}"),
        "peak memory": lambda row: _cell(row, "peak_memory", "{:,.0f} MiB", 2**20),
        "peak over linear": lambda row: _cell(row, "peak_ratio", "{:.4f}"), "note": "note",
    },
}


def _cell(row: Measurement, column: str, form: str, unit: float = 1) -> str:
    value = row[column]
    return "not measured" if value is None else "-" if value == "" else form.format(value / unit)


def _interval(row: Measurement, name: str) -> str:
    middle = _cell(row, f"{name}_p50", "{:.3f}")
    return f"{middle} [{row[f'{name}_p20']:.3f}, {row[f'{name}_p80']:.3f}]" if row[f"{name}_p50"] else middle


def tables(rows: Sequence[Measurement]) -> str:
    """Return a text table for each part.

    >>> labels = dict(what="models", model="vit", layout="tokens", dtype="float32", mode="eager", step="inference")
    >>> text = tables(rows(labels, 8, [Result("linear", ms=[2.0], once={"backend": "torch"})]))
    >>> text.splitlines()[-1].split()[5:9]
    ['linear', 'torch', '2.0', '1.000']
    """
    return "\n\n".join(_table([row for row in rows if row["what"] == part], part) for part in TABLES
                       if any(row["what"] == part for row in rows))


def _table(rows: Sequence[Measurement], part: str) -> str:
    table = TABLES[part]
    lines = [[str(row[cell]) if isinstance(cell, str) else cell(row) for cell in table.values()] for row in rows]
    text = aligned([list(table), *lines])
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def write_rows(folder: Path, rows: Sequence[Measurement]) -> None:
    """Write `bench.csv`, which replaces an existing file in one step."""
    texts = [{key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    partial_file = folder / ".bench.csv.partial"
    partial_file.unlink(missing_ok=True)  # a link of another person to a file elsewhere
    partial_file.write_text(csv_text(texts, COLUMNS), encoding="utf-8")
    os.replace(partial_file, folder / "bench.csv")
