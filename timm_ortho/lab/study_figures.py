"""The figures of the studies, in the paper's layout, from the runs alone.

Lines are means over seeds, shades the range of the seeds; points are runs, and bars one standard deviation about their
mean, as the paper's captions say. A value that is not finite leaves a gap.
"""
from functools import partial
from itertools import accumulate
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import pearsonr

from .plots import band, finite, label, style
from .study_tables import Entry, Measure, connection_name

__all__ = [
    "component_norms", "correlation", "curves", "differences", "final_site", "learned_weights", "overheads", "points",
    "site_names", "trace", "traces", "training",
]

Run = Mapping[str, Any]
Series = Callable[[Run], str]
TITLES = {
    "stream": "|x|²", "parallel": "|f∥|²", "orthogonal": "|f⊥|²", "branch": "|f|²",
    "cosine": "cosine of x and f", "rho": "ρ", "theta": "θ",
}


def training(runs: Sequence[Run], series: Series) -> Figure:
    """Training loss and top-1 by epoch, and top-1 by the time spent in training (Figure 2)."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    loss, accuracy, time = figure.subplots(1, 3)
    longest = max((run["seconds"] for run in runs if finite(run["seconds"])), default=0)
    unit, units = (1, "seconds") if longest < 120 else (60, "minutes") if longest < 7200 else (3600, "hours")
    for name, group in _by(series, runs):
        look = _line(name, series, runs)
        epochs = _epochs(group)
        band(loss, epochs, _history(group, "train_loss"), name, **look)
        band(accuracy, epochs, _history(group, "eval_top1"), name, **look)
        band(time, [second / unit for second in _seconds(group)], _history(group, "eval_top1"), name, **look)
    label(loss, "training loss", "epoch")
    label(accuracy, "validation top-1, %", "epoch")
    label(time, "validation top-1, %", f"{units} of training, mean of the seeds")
    _legend(figure, loss)
    return figure


def curves(
        runs: Sequence[Run],
        key: str,
        title: str,
        series: Series,
        panel: Series = lambda run: "",
) -> Figure:
    """One of the history's columns by epoch, a panel for each value of `panel` (Figures 6 and 9).

    A vertical line is where a connection was switched.
    """
    panels = _by(panel, runs)
    figure = Figure(figsize=(max(6.0, 3.6 * len(panels)), 3.4), layout="constrained")
    for axes, (name, group) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        for line, members in _by(series, group):
            band(axes, _epochs(members), _history(members, key), line, **_line(line, series, runs))
        for epoch in {run["switch_epoch"] for run in group if run.get("switch_epoch")}:
            axes.axvline(epoch, color="#555555", linewidth=1.1, linestyle=":")
        label(axes, f"{name}: {title}" if name else title, "epoch")
    _legend(figure, *figure.axes)
    return figure


def points(
        runs: Sequence[Run],
        x: Callable[[Run], Any],
        measures: Sequence[Measure],
        series: Series,
        below: str,
        *,
        log: bool = False,
        pearson: bool = False,
) -> Figure:
    """A panel for each measure over `x`: every run, and mean and standard deviation of the seeds (Figures 4 and 5).

    Args:
        runs: The runs.
        x: Where a run stands; numbers, or names that are set side by side.
        measures: One panel each.
        series: Runs of one series are joined by a line, if `x` is a number.
        below: Title of the x axis.
        log: Whether that axis is logarithmic.
        pearson: Whether to write Pearson's correlation of the runs and its p into each panel.
    """
    places = list(dict.fromkeys(x(run) for run in runs))
    numeric = all(isinstance(place, (int, float)) and not isinstance(place, bool) for place in places)
    figure = Figure(figsize=(max(5.0, 5.0 * len(measures)), 3.6), layout="constrained")
    groups = _by(series, runs)
    names = [name for name, _ in groups]
    beside = 0.0 if len({(x(run), series(run)) for run in runs}) == len(places) else 0.18  # one series at each place
    for axes, measure in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True):
        for index, (name, group) in enumerate(groups):
            look, where = dict(style(name, names)), x
            if not numeric:
                aside = beside * (index - (len(names) - 1) / 2)
                look["linestyle"] = ""
                where = partial(_at_name, x, places, aside)
            _errorbars(axes, group, where, measure, name, look)
        if log:
            axes.set_xscale("log")
        if not numeric:
            axes.set_xticks(range(len(places)), [str(place) for place in places])
            axes.set_xlim(-0.5, len(places) - 0.5)
        label(axes, measure.title, below)
        if pearson:
            axes.text(0.02, 0.98, correlation(runs, x, measure), transform=axes.transAxes, va="top", fontsize=9)
    _legend(figure, *figure.axes)
    return figure


def correlation(runs: Sequence[Run], x: Callable[[Run], float], measure: Measure) -> str:
    """Pearson's r of all runs and its two-sided p, as text; without variation on either side there is none."""
    pairs = [(x(run), measure.read(run)) for run in runs if finite(measure.read(run))]
    if len(pairs) < 3 or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return f"r undefined ({len(pairs)} runs)"
    result = pearsonr(*zip(*pairs, strict=True))
    return f"r = {result.statistic:+.2f}, p = {result.pvalue:.2g}, {len(pairs)} runs"


def _at_name(x: Callable[[Run], Any], places: Sequence[Any], aside: float, run: Run) -> float:
    return places.index(x(run)) + aside


def _errorbars(
        axes: Axes,
        group: Sequence[Run],
        where: Callable[[Run], float],
        measure: Measure,
        name: str,
        look: Mapping[str, Any],
) -> None:
    found: dict[float, list[float]] = {}
    for run in group:
        if finite(measure.read(run)):
            found.setdefault(where(run), []).append(measure.read(run))
    at = sorted(found)
    means = [fmean(found[place]) for place in at]
    bars = [stdev(found[place]) if len(found[place]) > 1 else 0.0 for place in at]
    axes.errorbar(at, means, yerr=bars, label=name, capsize=3, linewidth=1.3, markersize=5, **look)
    flat = [(place, value) for place in at for value in found[place]]
    if flat:
        axes.scatter(*zip(*flat, strict=True), s=9, color=look["color"], alpha=0.45, linewidths=0)


# ------------------------------------------------------------------------------------------- the stream
def site_names(runs: Sequence[Run]) -> dict[str, list[tuple[int, str]]]:
    """For each kind of site its sites, (layer, name), from the first block to the last."""
    found: dict[str, dict[tuple[int, str], None]] = {}
    for run in runs:
        for row in run["dynamics"]:
            found.setdefault(row["kind"], {})[row["layer"], row["name"]] = None
    return {kind: sorted(sites) for kind, sites in found.items()}


def trace(run: Run, site: str, measure: str) -> tuple[list[int], list[Optional[float]]]:
    """Steps and values of one site."""
    rows = [row for row in run["dynamics"] if row["name"] == site]
    return [row["step"] for row in rows], [_measured(row, measure) for row in rows]


def _measured(row: Mapping[str, Any], measure: str) -> Optional[float]:
    if measure != "branch":
        return row[measure]
    parts = (row["parallel"], row["orthogonal"])  # |f|² of the two parts, which are orthogonal to each other
    return sum(parts) if all(finite(part) for part in parts) else None


def traces(
        runs: Sequence[Run],
        kind: str,
        measure: str,
        transitions: Mapping[tuple[int, str], Optional[int]],
) -> Figure:
    """One measure of every site of a kind over the training steps, three panels in a row (Figures 3, 10 to 12).

    Args:
        runs: Runs with dynamics.
        kind: Kind of the sites, `mlp`.
        measure: `stream`, `parallel`, `orthogonal` or `cosine`.
        transitions: For layer and kind the step at which the traces part, a vertical line; None where they do not.
    """
    sites = site_names(runs)[kind]
    rows = -(-len(sites) // 3)
    figure = Figure(figsize=(10, 0.6 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, min(3, len(sites)), squeeze=False).flat
    for axes, (layer, site) in zip(panels, sites, strict=False):
        _trace_lines(axes, runs, site, measure)
        if measure == "cosine":
            axes.axhline(0, color="#222222", linewidth=0.9, linestyle=(0, (4, 3)))
        if transitions.get((layer, kind)) is not None:
            axes.axvline(transitions[layer, kind], color="#555555", linewidth=1.1, linestyle=":")
        label(axes, f"block {layer}: {TITLES[measure]}", "training step")
    for axes in list(figure.axes)[len(sites):]:
        axes.remove()
    _legend(figure, *figure.axes)
    return figure


def final_site(run: Run) -> Optional[str]:
    """The site of the last block whose branch is added last."""
    last = max((row["layer"] for row in run["dynamics"]), default=None)
    names = [row["name"] for row in run["dynamics"] if row["layer"] == last]
    return names[-1] if names else None


def component_norms(runs: Sequence[Run]) -> Figure:
    """The last branch's output and its two parts over the training steps, on logarithmic axes (Figures 7 and 8)."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, measure in zip(figure.subplots(1, 3), ("orthogonal", "parallel", "branch"), strict=True):
        site = next(final_site(run) for run in runs if run["dynamics"])
        _trace_lines(axes, runs, site, measure)
        axes.set_yscale("log")
        label(axes, f"{TITLES[measure]}, last branch", "training step")
    _legend(figure, *figure.axes)
    return figure


def learned_weights(runs: Sequence[Run], kind: str, panel: Series) -> Figure:
    """rho and theta of every block over the training steps, a column for each start of the hybrid connection."""
    columns = _by(panel, runs)
    figure = Figure(figsize=(max(5.5, 4.5 * len(columns)), 5.4), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    for row, measure in enumerate(("rho", "theta")):
        for axes, (name, group) in zip(grid[row], columns, strict=True):
            for layer, site in site_names(group)[kind]:
                look = {"color": _shade(layer, group), "linestyle": ("-", "--", "-.", ":")[layer % 4], "marker": ""}
                _trace_line(axes, group, site, measure, f"block {layer}", look)
            label(axes, f"{name}: {TITLES[measure]}", "training step")
    _legend(figure, *grid.flat)
    return figure


def _shade(layer: int, runs: Sequence[Run]) -> Any:
    last = max(row["layer"] for run in runs for row in run["dynamics"])
    return colormaps["cividis"](0.9 * layer / max(1, last))


def _trace_lines(axes: Axes, runs: Sequence[Run], site: str, measure: str) -> None:
    series = itemgetter("connection")
    for name, group in _by(series, runs):
        _trace_line(axes, group, site, measure, name, _line(name, series, runs))


def _trace_line(
        axes: Axes, runs: Sequence[Run], site: str, measure: str, name: str, look: Mapping[str, Any]) -> None:
    found = [trace(run, site, measure) for run in runs if run["dynamics"]]
    if found:
        steps = max((steps for steps, _ in found), key=len)
        band(axes, steps, [values for _, values in found], name, **look)


def overheads(here: Mapping[str, tuple[float, float, float]], stated: Mapping[str, float]) -> Figure:
    """Overhead in percent, median and the quantiles about it, with the paper's beside it (Table 1b)."""
    figure = Figure(figsize=(7, 1.2 + 0.5 * len(here)), layout="constrained")
    axes = figure.subplots()
    for index, (middle, low, high) in enumerate(here.values()):
        axes.errorbar(middle, index, xerr=[[middle - low], [high - middle]], capsize=3, markersize=5,
                      label="here" if index == 0 else None, **style("feature"))
    known = [(stated[name], index) for index, name in enumerate(here) if name in stated]
    if known:
        axes.scatter(*zip(*known, strict=True), marker="D", color=style("linear")["color"], label="paper", s=24)
    axes.axvline(0, color="#222222", linewidth=0.9)
    axes.set_yticks(range(len(here)), list(here))
    axes.invert_yaxis()
    label(axes, "", "overhead in training, %")
    _legend(figure, axes)
    return figure


def differences(found: Sequence[Entry]) -> Figure:
    """Differences to the baseline with their intervals: a panel for each measure, a row for each first name."""
    rows = list(dict.fromkeys(entry.place[0][0] for entry in found))
    titles = list(dict.fromkeys(entry.title for entry in found))
    series = list(dict.fromkeys(entry.cell["connection"] for entry in found))
    figure = Figure(figsize=(1 + 4.5 * len(titles), 1.2 + 0.5 * len(rows)), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(titles), sharey=True, squeeze=False)[0], titles, strict=True):
        for index, name in enumerate(series):
            group = [entry for entry in found if (entry.title, entry.cell["connection"]) == (title, name)]
            aside = 0.22 * (index - (len(series) - 1) / 2)
            axes.errorbar(
                [entry.difference.mean for entry in group],
                [rows.index(entry.place[0][0]) + aside for entry in group],
                xerr=[entry.difference.half_width or 0.0 for entry in group],
                label=name, capsize=3, linewidth=1.3, markersize=5, **{**style(name, series), "linestyle": ""})
        axes.axvline(0, color="#222222", linewidth=0.9)
        axes.set_yticks(range(len(rows)), rows)
        label(axes, title, "difference to the baseline")
    figure.axes[0].set_ylim(len(rows) - 0.5, -0.5)
    _legend(figure, *figure.axes)
    return figure


# ------------------------------------------------------------------------------------------------ helpers
def _by(key: Series, runs: Iterable[Run]) -> list[tuple[str, list[Run]]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.items())


def _line(name: str, series: Series, runs: Sequence[Run]) -> dict[str, Any]:
    return {**style(name, [other for other, _ in _by(series, runs)]), "marker": ""}


def _epochs(runs: Sequence[Run]) -> range:
    return range(1, max(len(run["history"]) for run in runs) + 1)


def _history(runs: Sequence[Run], key: str) -> list[list[Optional[float]]]:
    return [[row[key] for row in run["history"]] for run in runs]


def _seconds(runs: Sequence[Run]) -> list[float]:
    longest = max((len(run["history"]) for run in runs), default=0)
    times = [list(accumulate(row["seconds"] for row in run["history"])) for run in runs]
    return [fmean(time[epoch] for time in times if len(time) > epoch) for epoch in range(longest)]


def _legend(figure: Figure, *panels: Axes) -> None:
    """One legend above the panels, of the lines of any; integers where the steps are."""
    found = {}
    for axes in panels:
        found.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if axes.get_xlabel() in ("epoch", "training step"):
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    names = [connection_name(name) for name in found]
    figure.legend(list(found.values()), names, loc="outside upper center", ncols=min(6, max(1, len(found))),
                  frameon=False, fontsize=9)
