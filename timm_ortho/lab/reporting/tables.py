"""Make the tables of a report: results with their differences and the paper's numbers, every run, and further tables.

Runs that differ only in the seed are a group. Each metric of a group is an `Entry`.
"""
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence

from ..._text import finite
from .. import value_text
from .layout import MEASURES, TRACES, Layout, Position, Run, grouped
from .page import Table
from .statistics import Difference, holm, paired_difference

NONE = "–"
Group = tuple[tuple[tuple[str, Any], ...], str]  # (axis, value) pairs of the grid's cell, and the connection


@dataclass(frozen=True)
class Entry:
    """One metric of a group of runs."""

    group: Group
    position: Position  # names of the row and of the column
    names: Sequence[str]  # the same outside the table, such as `depth = 2` for a row `2`
    measure: str
    title: str
    values: Mapping[int, float]  # finite values by seed
    runs: int  # number of finished runs; runs without a finite value are not in `values`
    planned: int  # number of seeds that the study sets
    paper: Optional[Sequence[float]] = None  # mean and standard deviation in the paper
    baseline: Optional[Position] = None  # position of the baseline; equal to `position` for the baseline itself
    pairs: Mapping[int, float] = field(default_factory=dict)  # differences to the baseline by seed
    difference: Optional[Difference] = None  # over the seeds that both have
    holm: Optional[float] = None  # p, adjusted for all comparisons of the study; None without p
    effects: Mapping[str, float] = field(default_factory=dict)  # the paper's differences by data set

    @property
    def digits(self) -> int:
        return MEASURES[self.measure].digits

    @property
    def is_compared(self) -> bool:
        """Whether the entry has a baseline other than itself."""
        return self.baseline not in (None, self.position)

    @property
    def label(self) -> str:
        """The names of row and column without that of the measure."""
        return ", ".join(name for name in self.names if name != self.title)

    @cached_property
    def moments(self) -> list[float]:
        """The mean, and the standard deviation if there are two or more values."""
        values = list(self.values.values())
        return [fmean(values), stdev(values)] if len(values) > 1 else values

    def __str__(self) -> str:
        if not self.values:
            return f"not finite ({self.runs} run{'s' * (self.runs != 1)})"
        notes = []
        if len(self.values) < self.runs:
            notes.append(f"{self.runs - len(self.values)} of {self.runs} not finite")
        if self.runs < self.planned:
            notes.append(f"{self.runs} of {self.planned} seeds")
        elif self.runs == 1:
            notes.append("1 seed")
        return _spread(self.moments, self.digits) + (f" ({', '.join(notes)})" if notes else "")

    def compared(self) -> str:
        """Return the difference to the baseline as text, or why there is none."""
        if self.baseline == self.position:
            return "baseline"
        if self.difference is None:
            return "no pair of finite runs" if self.is_compared else NONE
        pairs = self.difference.pairs
        if self.difference.half_width is None and pairs > 1:
            return f"{self.difference.text(self.digits)} ({self.difference.why_no_interval}, no interval)"
        note = f" ({pairs} pair{'s' * (pairs > 1)})" if pairs < self.planned else ""
        return f"{self.difference.text(self.digits)}{note}"

    def effects_text(self) -> str:
        """Return the paper's differences, such as `+0.60 (CIFAR-10), +1.20 (CIFAR-100)`."""
        return ", ".join(f"{effect:+.{self.digits}f}{f' ({name})' if name else ''}"
                         for name, effect in self.effects.items()) or NONE


def _spread(moments: Sequence[float], digits: int) -> str:
    """Return mean and standard deviation as `91.00 ± 0.14`, or the mean alone."""
    return " ± ".join(f"{value:,.{digits}f}" for value in moments[:2])


# ----------------------------------------------------------------------------------------------- entries
def entries_of(runs: Sequence[Run], layout: Layout) -> list[Entry]:
    """Return an entry for each group and each measure that a run of the group has, sorted by group."""
    groups = grouped(runs, group_of)
    unadjusted = [entry for measure in layout.measures for entry in _of_measure(groups, measure, layout)]
    adjusted = iter(holm([entry.difference.p for entry in unadjusted if entry.difference]))
    with_holm = [replace(entry, holm=next(adjusted)) if entry.difference else entry for entry in unadjusted]
    return sorted(with_holm, key=lambda entry: list(groups).index(entry.group))


def group_of(run: Run) -> Group:
    return tuple(run["cell"].items()), run["connection"]


def _of_measure(groups: Mapping[Group, list[Run]], name: str, layout: Layout) -> list[Entry]:
    read, study = MEASURES[name].read, layout.study
    keys = {group: layout.keys(runs[0], name) for group, runs in groups.items()
            if any(read(run) is not None for run in runs)}
    positions = _distinct({group: layout.position(of_group) for group, of_group in keys.items()})
    values = {group: {run["seed"]: read(run) for run in sorted(groups[group], key=lambda run: run["seed"])
                      if finite(read(run))} for group in keys}
    entries = []
    for group, position in positions.items():
        compared, baseline = {}, baseline_of(groups, group, study["baseline"])
        if baseline in positions:
            seeds = sorted(values[group].keys() & values[baseline].keys()) if baseline != group else []
            pair = [[values[side][seed] for seed in seeds] for side in (group, baseline)]
            compared = dict(baseline=positions[baseline], effects=_effects(keys[group], keys[baseline], layout),
                            pairs={seed: values[group][seed] - values[baseline][seed] for seed in seeds},
                            difference=paired_difference(*pair) if seeds else None)
        row = [layout.named(dimension, keys[group][dimension], text)
               for dimension, text in zip(layout.rows, position[0], strict=True)]
        entries.append(Entry(group, position, [*row, *position[1]], name, layout.label("measure", name), values[group],
                             len(groups[group]), len(study["seeds"]), layout.stated.get(position), **compared))
    return entries


def _distinct(positions: Mapping[Group, Position]) -> dict[Group, Position]:
    """Add the connection, or the axes in which they differ, to the names of groups that would share a position."""
    sharing = grouped(positions, positions.__getitem__)

    def added(group: Group) -> list[str]:
        others = sharing[positions[group]]
        names = [setting(axis, value) for axis, value in group[0]
                 if any((axis, value) not in other[0] for other in others)]
        return [*names, group[1]] if any(other[1] != group[1] for other in others) else names

    return {group: ((*row[:-1], ", ".join([row[-1], *added(group)])), column)
            for group, (row, column) in positions.items()}


def baseline_of(groups: Iterable[Group], group: Group, baseline: Mapping[str, Any]) -> Optional[Group]:
    """Return the group that is the baseline of a group, or None if it has no runs.

    Its axes and connection have the values that the study's baseline sets. All other values are those of the compared
    group. If the study's baseline sets no connection, and only one connection was run with these values of the axes,
    such as linear with `layers: none`, this group is the baseline of groups with any connection.
    """
    changed = {axis: baseline.get(axis, value) for axis, value in group[0]}
    candidates = [other for other in groups if dict(other[0]) == changed]
    connection = baseline.get("connection", group[1])
    same = [other for other in candidates if other[1] == connection]
    return same[0] if same else candidates[0] if len(candidates) == 1 and "connection" not in baseline else None


def _effects(keys: Mapping[str, str], baseline: Mapping[str, str], layout: Layout) -> dict[str, float]:
    """Return the paper's difference of means for the entry's data set.

    If the paper has no such difference, return the difference for each data set of the paper.
    """
    datasets = dict.fromkeys(leaf["dataset"] for leaf, _ in layout.leaves() if "dataset" in leaf)
    effects = {}
    for name, changed in (("", {}), *((layout.label("dataset", key), {"dataset": key}) for key in datasets)):
        own, base = (layout.position({**side, **changed}) for side in (keys, baseline))
        if own != base and own in layout.stated and base in layout.stated:
            effects[name] = layout.stated[own][0] - layout.stated[base][0]
    return {"": effects[""]} if "" in effects else effects


def plain(entry: Entry) -> dict[str, Any]:
    """Return an entry for JSON. Differences are rounded, because their last digits depend on library versions."""
    mean, std = [*entry.moments, None, None][:2]
    difference = entry.difference and {
        **{key: round(value, 6) + 0.0 if isinstance(value, float) else value  # -0.0 becomes 0.0
           for key, value in asdict(entry.difference).items()},
        "p": _short(entry.difference.p), "p_holm": _short(entry.holm), "paper": entry.effects}
    return {
        "row": entry.position[0], "column": entry.position[1], "measure": entry.measure,
        "cell": {**dict(entry.group[0]), "connection": entry.group[1]}, "seeds": list(entry.values),
        "values": list(entry.values.values()), "mean": mean, "std": std, "not_finite": entry.runs - len(entry.values),
        "paper": entry.paper, "difference": difference,
    }


def _short(p: Optional[float]) -> Optional[float]:
    return p if p is None else float(f"{p:.6g}")


# ------------------------------------------------------------------------------------------------- tables
def results(entries: Sequence[Entry], layout: Layout) -> Table:
    """Return a line for each metric of a group: its mean, the difference to the baseline, and the paper's numbers."""
    columns = list(dict.fromkeys(", ".join(entry.position[1]) for entry in entries))
    named = [layout.column_title] if len(columns) > 1 else []
    here = columns[0] if len(columns) == 1 else "mean"
    optional = {  # a column is left out if no line has a text in it
        "p (Holm)": lambda entry: NONE if entry.holm is None else f"{entry.holm:.2g}",
        "paper": lambda entry: _spread(entry.paper, entry.digits) if entry.paper else NONE,
        "the paper's difference": lambda entry: entry.effects_text()}
    shown = {title: text for title, text in optional.items() if any(text(entry) != NONE for entry in entries)}
    if layout.order:
        entries = sorted(entries, key=lambda entry: dict(entry.group[0])[layout.order])
    return Table([*layout.names, *named, here, "difference [95 % CI]", *shown],
                 [[*entry.position[0], *(", ".join(entry.position[1]) for _ in named), str(entry), entry.compared(),
                   *(text(entry) for text in shown.values())] for entry in entries],
                 len(layout.names) + len(named), "results")


def setting(axis: str, value: Any) -> str:
    return f"{axis} = {value_text(value)}"


def _with_digits(digits: int) -> Callable[[Optional[float]], str]:
    return lambda value: f"{value:,.{digits}f}" if finite(value) else "not finite"


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "model": ("model", lambda name: (name or "unknown").removesuffix("_ortho")),
    "parameters": ("parameters", "{:,}".format),
    "top1": ("top-1 %", _with_digits(2)), "top5": ("top-5 %", _with_digits(2)),
    "best_top1": ("best top-1 %", _with_digits(2)), "loss": ("loss", _with_digits(4)), "epochs": ("epochs", str),
    "peak_memory": ("peak memory", lambda value: f"{value / 2**20:,.0f} MiB" if value else "unknown"),
    "trainer": ("trainer", str),
}


def every_run(runs: Sequence[Run], layout: Layout) -> Table:
    """Return a table with a row for each run, omitting columns that no run has.

    Model and parameters are columns only if the models differ.
    """
    several = len({run.get("model") for run in runs}) > 1
    columns = [(key, *column) for key, column in _COLUMNS.items()
               if any(key in run for run in runs) and layout.varies(key)
               and (several or key not in ("model", "parameters"))]
    return Table(
        ["run", "seed", *(title for _, title, _ in columns)],
        [[layout.run_name(run), str(run["seed"]), *(text(run[key]) if key in run else NONE for key, _, text in columns)]
         for run in runs], 2, "every run")


def tidy(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield a row for each run, epoch and metric of the history. Epochs are counted from 1."""
    for run in runs:
        names = {**run["cell"], "connection": run["connection"], "seed": run["seed"]}
        for row in run.get("history") or ():
            yield from ({**names, "epoch": row["epoch"] + 1, "metric": metric, "value": value}
                        for metric, value in row.items() if metric != "epoch")


# ----------------------------------------------------------------------------------------- further tables
Extra = tuple[Table, str]  # an additional table, whose label is its title, and a note below it


def _transitions(runs: Sequence[Run], layout: Layout, recorded: Mapping[str, Any]) -> Extra:
    steps: dict[tuple[str, int], dict[str, str]] = {}
    for point in recorded.get("transitions") or ():
        step = "none" if point["step"] is None else f"step {point['step']:g}"
        steps.setdefault((point["kind"], point["layer"]), {})[TRACES[point["measure"]]] = step
    measures = list(next(iter(steps.values()), {}))
    table = Table(["branch", "block", *measures], [[kind, str(layer), *by_measure.values()]
                                                   for (kind, layer), by_measure in sorted(steps.items())],
                  2, "Transition points")
    return table, (
        "The transition point is the first training step at which the mean traces of linear and feature are apart, and "
        "from which on they are apart at three quarters or more of the recorded steps. Traces are apart if they differ "
        "by more than a tenth of the range of both. If the paired differences vary between seeds, their confidence "
        "interval must also exclude zero. “none” means that there is no such step.")


def _last_branch(runs: Sequence[Run], layout: Layout, recorded: Mapping[str, Any]) -> Extra:
    measured = [(run, ends) for run, ends in zip(runs, recorded.get("last_branch") or (), strict=False) if ends]
    rows, dimensions = [], [*layout.study["axes"], "connection"]
    for names, members in grouped(measured, lambda pair: tuple(
            layout.label(dimension, layout.key(dimension, pair[0])) for dimension in dimensions)).items():
        first, highest, last = (fmean(ends[key] for _, ends in members) for key in ("first", "highest", "last"))
        rows.append([*names, *(f"{value:.4g}" for value in (first, highest, last)),
                     f"{last / first:.3g}" if first else "unknown"])
    table = Table([*(layout.titles.get(dimension, dimension) for dimension in dimensions),
                   "first", "highest", "last", "last / first"], rows, len(dimensions), "The last branch's output")
    return table, (
        "The table has |f|² of the last branch: the sum over the channels, averaged over pixels and seeds. The columns "
        "are the value at the first record, the highest value, the value at the last record, and the ratio of last to "
        "first.")


def _learned_weights(runs: Sequence[Run], layout: Layout, recorded: Mapping[str, Any]) -> Extra:
    learned = [(layout.label("start", layout.key("start", run)), row)
               for run in runs if run["connection"] == "hybrid" and run.get("dynamics")
               for row in run["dynamics"] if row["step"] == run["dynamics"][-1]["step"]]
    by_kind = grouped(learned, lambda pair: (pair[0], pair[1]["kind"]))

    def spread(members: Sequence[tuple[str, Mapping[str, Any]]], key: str) -> str:
        values = [row[key] for _, row in members if finite(row.get(key))]
        return f"{fmean(values):.3f} [{min(values):.3f}, {max(values):.3f}]" if values else "not finite"

    table = Table(["start", "branch", "ρ", "θ"], [
        [f"{start} start", kind, *(spread(members, key) for key in ("rho", "theta"))]
        for (start, kind), members in by_kind.items()], 2, "Learned weights")
    return table, ("The table has the means of ρ and θ over blocks and seeds at the last record. Brackets have minimum "
                   "and maximum.")


EXTRAS: dict[str, Callable[[Sequence[Run], Layout, Mapping[str, Any]], Extra]] = {
    "transitions": _transitions, "last_branch": _last_branch, "learned_weights": _learned_weights,
}
