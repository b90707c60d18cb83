"""Plot the measurements of `bench`: `bench.svg`. This file needs matplotlib."""
from typing import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .results import LABELS, TABLES, Measurement


def plot(rows: Sequence[Measurement]) -> Figure:
    """Plot times relative to linear: p50 with whiskers from p20 to p80, one panel per part, one y tick per group."""
    drawn = [row for row in rows if row["candidate"] != "linear" and row["ratio_p50"]]
    parts = [part for part in TABLES if any(row["what"] == part for row in drawn)] or ["operator"]
    lines = {part: list(dict.fromkeys(_line(row) for row in drawn if row["what"] == part)) for part in parts}
    heights = [max(2, len(lines[part])) for part in parts]
    figure = Figure(figsize=(10, 1.2 * len(parts) + 0.35 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, part in zip(panels, parts, strict=True):
        _panel(axes, [row for row in drawn if row["what"] == part], lines[part])
        axes.set_title(f"{part}: time relative to linear, p20 to p80", fontsize=10, loc="left")
    return figure


def _line(row: Measurement) -> str:
    return " ".join(row[label] for label in LABELS[1:] if row[label])


def _panel(axes: Axes, rows: Sequence[Measurement], lines: Sequence[str]) -> None:
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    for index, name in enumerate(names):
        points = [row for row in rows if row["candidate"] == name]
        middle = [row["ratio_p50"] for row in points]
        whiskers = [[row["ratio_p50"] - row["ratio_p20"] for row in points],
                    [row["ratio_p80"] - row["ratio_p50"] for row in points]]
        height = [lines.index(_line(row)) + 0.7 * ((index + 0.5) / len(names) - 0.5) for row in points]
        axes.errorbar(middle, height, xerr=whiskers, fmt="o", markersize=4, capsize=2, linewidth=1, label=name)
    axes.axvline(1.0, color="#555555", linewidth=1)
    axes.set_yticks(range(len(lines)), lines, fontsize=7)
    axes.set_ylim(max(1, len(lines)) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        axes.legend(frameon=False, fontsize=8)
