"""Draw the plots that a study's layout lists.

Lines show means over seeds, and shaded areas one standard deviation, where those of a panel do not overlap. Small dots
show runs. Bars show one standard deviation about the mean or, in the plot of differences, confidence intervals. Means
and deviations omit values that are not finite. A line has a gap where no seed has a finite value. The colours are those
of Okabe and Ito, which colour-blind readers can distinguish. As in the paper, linear is red and orthogonal is blue.
Line styles and markers differ too.
"""
import math
import re
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from textwrap import fill
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Sequence, Union

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter
from scipy.stats import pearsonr

from ..._text import finite
from ...connections import CONNECTIONS
from .. import paper, value_text
from .layout import MEASURES, TRACES, Layout, Run, grouped
from .page import Picture
from .tables import Entry, group_of

_LOOKS = (  # colour, line style and marker of each connection, in the order of their registry
    ("#d55e00", "--", "s"), ("#0072b2", "-", "o"), ("#009e73", "-.", "^"), ("#cc79a7", ":", "D"),
    ("#e69f00", (0, (3, 1, 1, 1)), "v"), ("#56b4e9", (0, (6, 1)), "P"), ("#000000", (0, (1, 3)), "X"))
STYLES = {name: dict(zip(("color", "linestyle", "marker"), look, strict=True))
          for name, look in zip(CONNECTIONS, _LOOKS, strict=False)}
STYLES |= {paper.name("connection", name): look for name, look in STYLES.items()}
_COLORS = ("#e69f00", "#56b4e9", "#000000", "#cc79a7", "#009e73", "#0072b2", "#d55e00")  # of all other lines
_LINES, _MARKERS = ("-", "--", "-.", ":"), "vPX<>d*h"

Name = Callable[[Run], str]
Points = Callable[[Run], Mapping[float, Optional[float]]]  # returns the points of a run's curve, y by x
Names = Optional[Sequence[str]]
By = Union[str, Sequence[str]]
Pictures = Iterator[Picture]


@dataclass
class Panel:
    """One panel of a line chart. A line has a style, the values of x, and a curve for each seed."""

    title: str
    lines: dict[str, tuple[Mapping[str, Any], Sequence[float], list[Sequence[Optional[float]]]]]
    below: str  # title of the x axis
    marks: Sequence[float] = ()  # x of dotted vertical lines
    ticks: Sequence[str] = ()  # labels of x = 0, 1, ...; by default whole numbers
    points: bool = False  # whether to draw each run as a dot, and bars instead of shades
    log_x: bool = False  # whether the axis is logarithmic
    log: bool = False  # the same for the y axis
    zero: bool = False  # whether to draw a dashed line at y = 0


class Scene(NamedTuple):
    """The input of the plots: runs with thinned records, their layout, and a summary of the complete records."""

    runs: Sequence[Run]
    layout: Layout
    recorded: Mapping[str, Any]

    def having(self, key: str) -> list[Run]:
        """Return the runs with a value for a key."""
        return [run for run in self.runs if run.get(key)]

    def named(self, lines: Names, *elsewhere: Any) -> Name:
        """Return a function that names a run's line by `lines`; by default, by the axes not in `elsewhere`."""
        own = [*(axis for axis in self.layout.study["axes"] if axis not in elsewhere), "connection"]
        return self.layout.name(own if lines is None else lines)

    def divided(self, by: Optional[By], lines: Names) -> tuple[By, Name]:
        """Return the dimensions of the panels, and a function that names a run's line in a panel.

        By default, a panel has the runs that are compared with one baseline.
        """
        if by is None and lines is None:
            lines = list(self.layout.study["baseline"])
            by = [axis for axis in self.layout.study["axes"] if axis not in lines]
            connections = grouped({group_of(run) for run in self.runs}, lambda group: group[0]).values()
            if "connection" not in lines and max(map(len, connections), default=0) > 1:
                by.append("connection")
        return by or (), self.named(lines, by)

    def parts(self, by: By, runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
        """Group the runs by one or several dimensions. Without a dimension, all runs form one unnamed group."""
        return list(grouped(runs, self.layout.name([by] if isinstance(by, str) else by)).items())


def drawings(scene: Scene) -> list[Picture]:
    """Return the plots of the layout, and `training` if it does not list it. Plots without data are left out."""
    plots = list(scene.layout.plot_options())
    if "training" not in dict(plots):
        plots.insert(0, ("training", {}))
    return [drawing for name, options in plots for drawing in DRAWINGS[name](scene, **options)]


# ------------------------------------------------------------------------------------------ shared functions
def style(name: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return colour, line style and marker of a connection, or of the series `name` among `names`.

    >>> style("linear")
    {'color': '#d55e00', 'linestyle': '--', 'marker': 's'}
    """
    if name in STYLES:
        return STYLES[name]
    index = [other for other in names if other not in STYLES].index(name) if name in names else 0
    return {"color": _COLORS[index % len(_COLORS)], "linestyle": _LINES[index % len(_LINES)],
            "marker": _MARKERS[index % len(_MARKERS)]}


def _title(axes: Axes, title: str, below: str) -> None:
    axes.set_title(fill(title, 38), fontsize=10, loc="left")
    axes.set_xlabel(below, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)


def _finished(figure: Figure) -> Figure:
    """Add one legend above the panels, in as many columns as fit."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles = {**dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)), **handles}
    if handles:
        column = 50 + 5.5 * max(map(len, handles))  # width of handle, gaps, and text of size 9, in points
        columns = max(1, min(6, len(handles), int(72 * figure.get_figwidth() // column)))
        figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=columns, frameon=False,
                      fontsize=9)
    return figure


# --------------------------------------------------------------------------------------------- line charts
def lines_chart(panels: Sequence[Panel], shared: bool = False) -> Figure:
    """Draw line charts in one or two columns of panels, row by row. `shared` gives all panels the same range of y."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(5.5, 3.5 * columns), 0.9 + (2.5 if rows > 1 else 2.8) * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, sharey=shared, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel)
    for axes in grid[len(panels):]:
        axes.remove()
    return _finished(figure)


def _draw(axes: Axes, panel: Panel) -> None:
    # matplotlib refuses lists with whole numbers of more than 64 bits
    bands = {name: (np.array(x, dtype=float), *_spread(curves)) for name, (_, x, curves) in panel.lines.items()}
    for name, (look, x, curves) in panel.lines.items():
        if panel.points:
            _, means, spread = bands[name]
            axes.errorbar(x, means, yerr=np.where(spread > 0, spread, math.nan), label=name, capsize=3, linewidth=1.3,
                          markersize=5, **{**look, **({"linestyle": ""} if panel.ticks else {})})
            dots = [(at, value) for curve in curves for at, value in zip(x, curve, strict=True) if finite(value)]
            axes.scatter(*zip(*dots, strict=True), s=9, color=look["color"], alpha=0.45, linewidths=0)
        else:
            _band(axes, name, look, bands)
    _title(axes, panel.title, panel.below)
    _x_axis(axes, panel)
    values = [value for _, _, curves in panel.lines.values() for value in chain(*curves) if finite(value)]
    if panel.log and max(values, default=0) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for mark in panel.marks:
        axes.axvline(mark, color="#555555", linewidth=1.1, linestyle=":")
    if panel.zero:
        axes.axhline(0, color="#222222", linewidth=0.9, linestyle="--")


def _x_axis(axes: Axes, panel: Panel) -> None:
    """Set ticks at names, or at the points whose labels do not overlap. Lines have ticks at round numbers."""
    values = sorted({at for _, x, _ in panel.lines.values() for at in x})
    if panel.ticks:
        step = max(1, len(panel.ticks) // 12)
        rotation = 60 if len("".join(panel.ticks)) > 24 else 0
        axes.set_xticks(range(0, len(panel.ticks), step), panel.ticks[::step], rotation=rotation)
        axes.set_xlim(-0.5, len(panel.ticks) - 0.5)
    elif panel.points:
        scale = math.log if panel.log_x else float
        kept = values[:1]
        for value in values[1:]:
            if scale(value) - scale(kept[-1]) > 0.17 * (scale(values[-1]) - scale(values[0])):
                kept.append(value)
        axes.set_xscale("log" if panel.log_x else "linear")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(kept, list(map(value_text, kept)))
    else:
        whole = all(isinstance(at, int) for at in values)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=whole, min_n_ticks=1))


def _spread(curves: Sequence[Sequence[Optional[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return means and standard deviations of curves at each x. Values may be None or NaN."""
    finite_values = np.ma.masked_invalid(np.array(curves, dtype=float))
    if len(curves) == 1:
        return finite_values[0].filled(math.nan), np.zeros(finite_values.shape[1])
    return finite_values.mean(0).filled(math.nan), finite_values.std(0, ddof=1).filled(0.0)


def _band(axes: Axes, name: str, look: Mapping, bands: Mapping[str, tuple]) -> None:
    """Draw the mean of a line, and one standard deviation above and below it where no other line's band is."""
    x, means, spread = bands[name]
    look = {"label": name, "linewidth": 1.5, **look, "marker": look.get("marker", "o") if len(x) == 1 else ""}
    axes.plot(x, means, markersize=3, **look)
    others = [dict(zip(at, zip(mean, by, strict=True), strict=True))
              for other, (at, mean, by) in bands.items() if other != name]
    apart = [all(abs(mean - there[at][0]) > by + there[at][1] for there in others if at in there)
             for at, mean, by in zip(x, means, spread, strict=True)]
    axes.fill_between(x, means - spread, means + spread, where=apart, color=look["color"], alpha=0.15, linewidth=0)


def _panel(
        title: str, below: str, runs: Sequence[Run], name: Name, curve: Points, among: Sequence[Run] = (),
        **options: Any,
) -> Panel:
    """Return a panel with a line for each name. A curve has None where its run has no point.

    Lines of the same name have the same style in all panels with the same `among` (by default, `runs`).
    """
    names, lines = list(grouped(among or runs, name)), {}
    for line, members in grouped(runs, name).items():
        by_run = list(map(curve, members))
        every_x = sorted(set().union(*by_run))
        lines[line] = style(line, names), every_x, [[of_run.get(at) for at in every_x] for of_run in by_run]
    return Panel(title, lines, below, **options)


def _titled(part: str, title: str) -> str:
    return f"{part}: {title}" if part else title


def _drawing(name: str, caption: str, panels: Sequence[Panel], shared: bool = False) -> Picture:
    """Return a line chart. Sentences about the axes and the lines are appended to `caption`."""
    lines = dict.fromkeys(line for panel in panels for line in panel.lines)
    belows = dict.fromkeys(panel.below for panel in panels)
    titles = "; ".join(dict.fromkeys(panel.title for panel in panels))
    runs = {len(curves) for panel in panels for _, _, curves in panel.lines.values()}
    count = f"{'up to ' if len(runs) > 1 else ''}{max(runs)}"
    sentences = [caption, f"x ax{'is' if len(belows) == 1 else 'es'}: {', '.join(belows)}.",
                 "Each line is one run." if max(runs) == 1 else
                 f"Lines: means over {count} runs. Shaded: one standard deviation, where shades do not overlap."]
    return Picture("_".join(re.findall(r"\w+", name.lower())), " ".join(filter(None, sentences)),
                   f"Line charts by {', '.join(belows)}: {titles}. Lines: {', '.join(lines)}.",
                   partial(lines_chart, panels, shared))


# ------------------------------------------------------------------------------------------------ training
HISTORY = {"train_loss": "training loss", "eval_loss": "{} loss", "eval_top1": "{} top-1, %",
           "eval_top5": "{} top-5, %"}


def _history(
        scene: Scene, runs: Sequence[Run], column: str, name: Name, part: str = "", steps: Optional[int] = None,
) -> Panel:
    """Return a panel with a column of the history by epoch or, if `steps` is the number of steps per epoch, by step."""
    def points(run: Run) -> dict[float, Optional[float]]:
        return {(row["epoch"] + 1) * (steps or 1): row.get(column) for row in run["history"]}

    return _panel(
        _titled(part, HISTORY[column].format(scene.layout.images)), "training step" if steps else "epoch",
        runs, name, points, scene.having("history"), log=column.endswith("loss"),
        marks=sorted({run["switch_epoch"] * (steps or 1) for run in runs if run.get("switch_epoch")}))


def _steps(scene: Scene, runs: Sequence[Run]) -> Optional[int]:
    """Return the training steps per epoch of runs with one batch size; None if it or the number of images is unknown.

    timm's loader drops an incomplete last batch.
    """
    images, sizes = (scene.layout.study.get("data") or {}).get("train"), {run.get("batch_size") for run in runs}
    size = sizes.pop() if len(sizes) == 1 else None
    return images // size if images and size else None


def progress(scene: Scene, runs: Sequence[Run], name: Name, part: str = "") -> tuple[Panel, Panel]:
    """Return two panels: training loss by step, and top-1 by epoch."""
    loss = _history(scene, runs, "train_loss", name, part, _steps(scene, runs))
    return loss, _history(scene, runs, "eval_top1", name, part)


def _training(scene: Scene, *, by: Optional[By] = None, lines: Names = None) -> Pictures:
    """Draw the loss by step, and top-1 by epoch."""
    by, line = scene.divided(by, lines)
    panels = [panel for part, members in scene.parts(by, scene.having("history"))
              for panel in progress(scene, members, line, part)]
    if panels:
        caption = (f"Training loss, with a logarithmic y axis, and accuracy on the {scene.layout.images} images. A "
                   "point of the loss is its mean over an epoch.")
        yield _drawing("training", caption, panels)


def _curves(
        scene: Scene, *, by: By = (), lines: Names = None, column: str = "eval_top1", name: str = "curves",
        caption: str = "",
) -> Pictures:
    """Draw one column of the history by training step, or by epoch if the steps of an epoch are unknown."""
    line, runs = scene.named(lines, by), scene.having("history")
    panels = [_history(scene, members, column, line, part, _steps(scene, members))
              for part, members in scene.parts(by, runs)]
    if panels and scene.layout.varies(column):
        caption = caption or f"{HISTORY[column].format(scene.layout.images)}."
        yield _drawing(name, caption, panels, shared=True)


# ---------------------------------------------------------------------------------------------- the stream
_PROBES = {
    "stream norm |x|": lambda site: math.sqrt(site["stream"]) if finite(site.get("stream")) else None,
    "cosine of x and f": lambda site: site["cosine"],
}


def _stream(scene: Scene) -> Pictures:
    """Draw the norm and cosine of the stream at each site. Only the lab's loop measures them (`probe.jsonl`)."""
    by, name = scene.divided(None, None)
    runs, panels = scene.having("probe"), []
    for part, members in scene.parts(by, runs):
        by_sites = grouped(members, _sites_of)  # models with other sites have other panels
        for sites, of_sites in by_sites.items():
            subject = ", ".join(dict.fromkeys(filter(None, [
                part, *(map(name, of_sites) if len(by_sites) > 1 else ())])))
            panels += [_panel(_titled(subject, title), "site, from the first block to the last", of_sites, name,
                              lambda run, read=read: dict(enumerate(map(read, run["probe"][-1]["sites"]))),
                              runs, ticks=sites) for title, read in _PROBES.items()]
    if panels:
        yield _drawing(
            "profile", "Norm |x| of the stream that a block receives, and cosine of x and the branch output f, after "
            f"training. Both are computed over the channels of each token or pixel of one batch of "
            f"{scene.layout.images} images. The plot shows the root of the mean of |x|², and the mean cosine.", panels)


def _sites_of(run: Run) -> tuple[str, ...]:
    return tuple(f"{site['layer']} {site['kind']}" for site in run["probe"][-1]["sites"])


_TRANSITION = "A dotted line marks the transition point."
_CAPTIONS = {  # measure -> where the paper has it, and a sentence
    "stream": (" (the paper's Figure 3)", _TRANSITION), "cosine": (" (the paper's Figures 3 and 12)", _TRANSITION),
    "parallel": (" (the paper's Figures 3 and 10)", _TRANSITION),
    "orthogonal": (" (the paper's Figures 10 and 12)", _TRANSITION),
    "s": (" (the paper's Appendix D)",
          "s = <x, f> / (|x|² + ε) is the signed coefficient of the parallel component s x of the branch output f."),
    "s_added": ("", "The connection returns y and so adds y − x to the stream x. s of y − x is <x, y − x> / (|x|² + "
                    "ε). For linear, it is s of f. For Orthogonal-F, it is zero, up to rounding."),
}


def _traces(scene: Scene) -> Pictures:
    """Draw the squared norms, cosines and coefficients recorded by `timm_ortho.record`. Older records lack some."""
    runs, name = scene.having("dynamics"), scene.named(None)
    steps = {(point["measure"], point["layer"], point["kind"]): point["step"]
             for point in scene.recorded.get("transitions") or () if point["step"] is not None}
    for (kind, sites), (measure, (source, about)) in product(_sites(runs).items(), _CAPTIONS.items()):
        if any(finite(row.get(measure)) for run in runs for row in run["dynamics"]):
            panels = [_panel(f"block {layer}: {TRACES[measure]}", "training step", runs, name, _trace(site, measure),
                             marks=[step for key, step in steps.items() if key == (measure, layer, kind)],
                             zero=measure == "cosine") for layer, site in sites]
            yield _drawing(f"{measure} {kind}", f"{TRACES[measure]} in the {kind} branches, with a panel for each "
                           f"block{source}. {about}", panels)


def _trace(site: str, measure: str) -> Points:
    """Return a function that reads a measure by step from a site's records."""
    return lambda run: {row["step"]: branch(row) if measure == "branch" else row.get(measure)
                        for row in run["dynamics"] if row["name"] == site}


def branch(row: Mapping[str, Any]) -> Optional[float]:
    """Return |f|², the sum of the squared norms of the parallel and the orthogonal part; None if not finite."""
    parts = (row.get("parallel"), row.get("orthogonal"))
    return sum(parts) if all(map(finite, parts)) else None


def _sites(runs: Sequence[Run]) -> dict[str, list[tuple[int, str]]]:
    """Return the sites (layer, name) of each kind, from the first block to the last."""
    by_kind: dict[str, dict[tuple[int, str], None]] = {}
    for run in runs:
        for row in run["dynamics"]:
            by_kind.setdefault(row["kind"], {})[row["layer"], row["name"]] = None
    return {kind: sorted(sites) for kind, sites in by_kind.items()}


def last_branch(rows: Sequence[Mapping[str, Any]]) -> Optional[str]:
    """Return the name of the last site of the last block."""
    return max(reversed(rows), key=lambda row: row["layer"])["name"] if rows else None


def _last_branch(scene: Scene, *, by: By = (), caption: str = "") -> Pictures:
    """Draw the squared norms of the last branch's output by training step."""
    name = scene.named(None, by)
    for part, runs in scene.parts(by, scene.having("dynamics")):
        site = last_branch(runs[0]["dynamics"])
        panels = [_panel(_titled(part, TRACES[measure]), "training step", runs, name, _trace(site, measure), log=True)
                  for measure in ("orthogonal", "parallel", "branch")]
        norms = (f"Squared norms of the last branch's output and of its parts{f', {part}' if part else ''}, on "
                 f"logarithmic y axes. {caption}")
        yield _drawing(f"norms {part}", norms.rstrip(), panels)


# -------------------------------------------------------------------------------------------------- points
def _points(
        scene: Scene, *, x: str, lines: Names = None, measures: Names = None, log: bool = False, pearson: bool = False,
        name: str = "", caption: str = "",
) -> Pictures:
    """Draw measures over the dimension `x`, with every run, and the mean and standard deviation over the seeds.

    Lines join the means of an `x` with numbers. `log` makes its axis logarithmic, and `pearson` adds the correlation.
    """
    def at(run: Run) -> Any:
        return run["cell"].get(x, run.get(x))

    layout, line = scene.layout, scene.named(lines, x)
    values = list(dict.fromkeys(map(at, scene.runs)))
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    below, panels, correlations = layout.titles.get(x, x), [], []
    for measure in filter(layout.varies, layout.measures if measures is None else measures):
        title, read = layout.label("measure", measure), MEASURES[measure].read
        runs = [run for run in scene.runs if finite(read(run))]
        if runs:
            panels.append(_panel(
                title, below, runs, line,
                lambda run, read=read: {at(run) if numeric else values.index(at(run)): read(run)}, scene.runs,
                points=True, log_x=log and numeric and min(values) > 0,
                ticks=() if numeric else [layout.label(x, value_text(value)) for value in values]))
            correlations += [f"{title}: {correlation(runs, x, read)}"] if pearson else []
    if not panels:
        return
    caption = (f"{caption or f'By {x}.'} x axis: {below}. Small dots: runs. Markers and bars: mean and standard "
               "deviation over the seeds.")
    if pearson:
        caption = f"{caption} Pearson's correlation over the runs: {'; '.join(correlations)}."
    titles = " and ".join(panel.title for panel in panels)
    yield Picture(name or x, caption, f"{titles} over {below}. Lines: {', '.join(grouped(scene.runs, line))}.",
                  partial(lines_chart, panels))


def correlation(runs: Sequence[Run], x: str, read: Callable[[Run], Optional[float]]) -> str:
    """Return Pearson's r of a metric with an axis of the grid over all runs, and its two-sided p.

    r is undefined for fewer than three runs, or if the axis or the metric does not vary.
    """
    pairs = [(float(run["cell"][x]), read(run)) for run in runs if finite(read(run))]
    if len(pairs) < 3 or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return f"r undefined ({len(pairs)} runs)"
    result = pearsonr(*zip(*pairs, strict=True))
    return f"r = {result.statistic:+.2f}, p = {result.pvalue:.2g}, {len(pairs)} runs"


# ----------------------------------------------------------------------------------------------- differences
def forest(entries: Sequence[Entry]) -> list[Picture]:
    """Return a plot of all differences beside the paper's, or an empty list if there are no differences."""
    compared = [entry for entry in entries if entry.difference]
    if not compared:
        return []
    rows, effects = "; ".join(dict.fromkeys(entry.label for entry in compared)), any(row.effects for row in compared)
    caption = ("Differences to the baseline (x axes), with a row for each comparison. Markers are means, bars are 95 % "
               "confidence intervals, and small dots are the differences of the seeds. A marker without a bar has no "
               f"interval.{' Red diamonds are the paper’s differences.' if effects else ''} The vertical line is zero.")
    return [Picture("differences", caption, f"Differences to the baseline as points with bars. The rows are: {rows}.",
                    partial(_draw_forest, compared))]


def _draw_forest(compared: Sequence[Entry]) -> Figure:
    """Draw intervals, with a panel for each measure and a row for each comparison."""
    rows = list(dict.fromkeys(entry.label for entry in compared))
    titles = list(dict.fromkeys(entry.title for entry in compared))
    size = (1.5 + 0.07 * max(map(len, rows)) + 3.4 * len(titles), 1.3 + 0.36 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    for axes, title in zip(figure.subplots(1, len(titles), squeeze=False, sharey=True).flat, titles, strict=True):
        mine = [(rows.index(entry.label), entry) for entry in compared if entry.title == title]
        bars = [math.nan if entry.difference.half_width is None else entry.difference.half_width for _, entry in mine]
        # the rounding errors of differences that are all zero would otherwise set the range of the axis
        means = [round(entry.difference.mean, 9) for _, entry in mine]
        axes.errorbar(means, [at for at, _ in mine], xerr=bars, label="mean, 95 % CI", capsize=2.5, markersize=4.5,
                      linewidth=1.6, **{**STYLES["feature"], "linestyle": ""})
        dots = [(round(value, 9), at + 0.22) for at, entry in mine for value in entry.pairs.values()]
        axes.scatter(*zip(*dots, strict=True), s=9, color="#777777", linewidths=0, label="each seed")
        effects = [(effect, at) for at, entry in mine for effect in entry.effects.values()]
        if effects:
            axes.scatter(*zip(*effects, strict=True), marker="D", s=22, label="the paper", facecolors="none",
                         edgecolors=STYLES["linear"]["color"], linewidths=1.0)
        axes.axvline(0, color="#222222", linewidth=0.9)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        _title(axes, title, "difference to the baseline")
    return _finished(figure)


# The plots that a layout can list. Their keyword arguments are the options. `by` is a dimension: each of its values has
# a plot or panel. `lines` are the dimensions that name a line. `name` is the name of the file.
DRAWINGS: dict[str, Callable[..., Pictures]] = {
    "training": _training, "curves": _curves, "points": _points, "stream": _stream, "traces": _traces,
    "last_branch": _last_branch,
}
