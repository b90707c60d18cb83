"""The tables of a report: metrics beside the paper's, differences to the baseline, every run, and further tables.

Runs that differ in nothing but the seed are a group. Each metric of a group is an `Entry`, at a place of the table.
"""
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import fmean, median, stdev
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Optional, Sequence

from ..._text import finite
from .. import paper
from .layout import MEASURES, TRACES, Layout, Place, Run, grouped, shown
from .page import Table
from .statistics import Difference, holm, paired_difference, pooled_differences, reading, sees

NOT_RUN, NONE = "not run", "–"
Group = tuple[tuple[tuple[str, Any], ...], str]  # the cell of the grid, and the connection


@dataclass(frozen=True)
class Entry:
    """One measure of a group of runs."""

    group: Group
    place: Place  # where it stands in the table
    measure: str
    title: str
    values: Mapping[int, float]  # the finite ones, by seed
    runs: int  # that are finished; those that are not in `values` had no finite value
    planned: int  # seeds of the study
    paper: Optional[Sequence[float]] = None  # mean and standard deviation
    baseline: Optional[Place] = None  # what it is compared with; its own place if it is the baseline
    difference: Optional[Difference] = None  # over the seeds that both have
    pooled: Optional[Difference] = None  # the same with the variance of all cells
    holm: Optional[float] = None  # p of the difference, adjusted for all comparisons of the study; None without p
    effects: Mapping[str, float] = field(default_factory=dict)  # the paper's differences, see `sees`

    @property
    def digits(self) -> int:
        return MEASURES[self.measure].digits

    @property
    def p(self) -> Optional[float]:
        return self.difference.p if self.difference else None

    @property
    def is_compared(self) -> bool:
        return self.baseline not in (None, self.place)

    @property
    def is_detected(self) -> bool:
        """Whether the difference is significant at 5 % after adjustment for all comparisons."""
        return self.holm is not None and self.holm <= 0.05

    @property
    def reading(self) -> str:
        """The interval in words, which is not adjusted for the number of comparisons, and whether p is."""
        said = reading(self.difference)
        return f"{said}, but not after Holm" if said in ("higher", "lower") and not self.is_detected else said

    @cached_property
    def moments(self) -> list[float]:
        """Mean, and standard deviation of two or more."""
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
        """The difference to the baseline; the baseline says that it is one."""
        if self.baseline == self.place:
            return "baseline"
        return NONE if self.difference is None else self.difference.text(self.digits)


def _spread(figure: Sequence[float], digits: int) -> str:
    """`91.00 ± 0.14`, or the mean alone."""
    return " ± ".join(f"{value:,.{digits}f}" for value in figure[:2])


# ----------------------------------------------------------------------------------------------- entries
def entries(runs: Sequence[Run], layout: Layout) -> list[Entry]:
    """An entry for each group and each measure that at least one of its runs has, group by group."""
    groups = grouped(runs, _group)
    found = [entry for measure in layout.measures
             for entry in _with_pooled(_of_measure(groups, measure, layout), layout)]
    adjusted = iter(holm([entry.p for entry in found if entry.difference]))
    found = [replace(entry, holm=next(adjusted)) if entry.difference else entry for entry in found]
    return sorted(found, key=lambda entry: list(groups).index(entry.group))


def _group(run: Run) -> Group:
    return tuple(run["cell"].items()), run["connection"]


def _of_measure(groups: Mapping[Group, list[Run]], name: str, layout: Layout) -> list[Entry]:
    read, study = MEASURES[name].read, layout.study
    keys = {group: layout.keys(runs[0], name) for group, runs in groups.items()
            if any(read(run) is not None for run in runs)}
    places = _places({group: layout.place(found) for group, found in keys.items()})
    values = {group: {run["seed"]: read(run) for run in sorted(groups[group], key=lambda run: run["seed"])
                      if finite(read(run))} for group in keys}
    found = []
    for group, place in places.items():
        compared, baseline = {}, _baseline(groups, group, study["baseline"])
        if baseline in places:
            seeds = sorted(values[group].keys() & values[baseline].keys()) if baseline != group else []
            pair = [[values[side][seed] for seed in seeds] for side in (group, baseline)]
            compared = dict(baseline=places[baseline], effects=_effects(keys[group], keys[baseline], layout),
                            difference=paired_difference(*pair) if seeds else None)
        found.append(Entry(group, place, name, layout.label("measure", name), values[group], len(groups[group]),
                           len(study["seeds"]), layout.stated.get(place), **compared))
    return found


def _places(places: Mapping[Group, Place]) -> dict[Group, Place]:
    """Where two groups would stand at one place, the connection is named as well."""
    taken = list(places.values())
    return {group: ((*row[:-1], f"{row[-1]}, {group[1]}"), column) if taken.count((row, column)) > 1 else (row, column)
            for group, (row, column) in places.items()}


def _baseline(groups: Iterable[Group], group: Group, baseline: Mapping[str, Any]) -> Optional[Group]:
    """The group that this one is compared with: its cell and connection, changed as the study's baseline says.

    Where the baseline changes the cell alone, the connection may have to follow (no block that carries one is all
    linear): then it is the one that the changed cell was run with.
    """
    changed = {axis: baseline.get(axis, value) for axis, value in group[0]}
    candidates = [other for other in groups if dict(other[0]) == changed]
    wanted = baseline.get("connection", group[1])
    same = [other for other in candidates if other[1] == wanted]
    return same[0] if same else candidates[0] if len(candidates) == 1 and "connection" not in baseline else None


def _effects(keys: Mapping[str, str], baseline: Mapping[str, str], layout: Layout) -> dict[str, float]:
    """The paper's differences of means: of the same data set, or of each that the paper has."""
    datasets = dict.fromkeys(leaf["dataset"] for leaf, _ in layout.leaves() if "dataset" in leaf)
    found = {}
    for name, changed in (("", {}), *((layout.label("dataset", key), {"dataset": key}) for key in datasets)):
        places = [layout.place({**side, **changed}) for side in (keys, baseline)]
        if places[0] != places[1] and all(place in layout.stated for place in places):
            found[name] = layout.stated[places[0]][0] - layout.stated[places[1]][0]
    return {"": found[""]} if "" in found else found


def _with_pooled(found: Sequence[Entry], layout: Layout) -> list[Entry]:
    """With differences by the variance of all cells; a cell is what the baseline leaves alone."""
    def cell(entry: Entry) -> tuple:
        return tuple(axis for axis in entry.group[0] if axis[0] not in layout.study["baseline"])

    cells = grouped(found, cell)
    compared = [(list(cells).index(cell(entry)), entry.place, entry.baseline) for entry in found if entry.difference]
    pooled = iter(pooled_differences(
        [{entry.place: entry.values for entry in members} for members in cells.values()], compared))
    return [replace(entry, pooled=next(pooled)) if entry.difference else entry for entry in found]


def plain(entry: Entry) -> dict[str, Any]:
    """The entry as JSON has it, without the last digits, which another release of a library may round otherwise."""
    def said(difference: Optional[Difference]) -> Optional[dict]:
        return difference and {**{key: round(value, 6) + 0.0 if isinstance(value, float) else value  # no -0.0
                                  for key, value in asdict(difference).items()}, "p": _short(difference.p)}

    mean, std = [*entry.moments, None, None][:2]
    difference = entry.difference and {
        **said(entry.difference), "reading": reading(entry.difference), "pooled": said(entry.pooled),
        "p_holm": _short(entry.holm), "sees": sees(entry.difference, entry.effects, entry.digits),
        "paper": entry.effects}
    return {
        "row": entry.place[0], "column": entry.place[1], "measure": entry.measure,
        "cell": {**dict(entry.group[0]), "connection": entry.group[1]}, "seeds": list(entry.values),
        "values": list(entry.values.values()), "mean": mean, "std": std, "not_finite": entry.runs - len(entry.values),
        "paper": entry.paper, "difference": difference,
    }


def _short(p: Optional[float]) -> Optional[float]:
    return p if p is None else float(f"{p:.6g}")


# ------------------------------------------------------------------------------------------ the main table
def main_table(found: Sequence[Entry], layout: Layout) -> Table:
    """The paper's table with the measured one beside it; without a paper, with the differences."""
    scale = layout.study["scale"]
    title = "here" if scale == "paper" else f"here ({scale})"
    here = {entry.place: str(entry) for entry in found}
    if not layout.study["paper"]:
        compared = {entry.place: entry.compared() for entry in found}
        return side_by_side(layout.names, here, compared, (title, "difference [95 % CI]"), (NOT_RUN, NONE))
    digits = {layout.label("measure", name): MEASURES[name].digits for name in layout.measures}
    stated = {(row, column): _spread(figure, next((digits[name] for name in (*column, *row) if name in digits), 2))
              for (row, column), figure in layout.stated.items()}
    order = layout.rows.index(layout.order) if layout.order else None
    return side_by_side(layout.names, stated, here, ("paper", title), (layout.unstated, NOT_RUN), order)


def side_by_side(
        names: Sequence[str], left: Mapping[Place, str], right: Mapping[Place, str],
        titles: tuple[str, str] = ("paper", "here"), missing: tuple[str, str] = ("not in the paper", NOT_RUN),
        order: Optional[int] = None,
) -> Table:
    """Two columns for each column of either; first those that the right has.

    Args:
        names: Titles of the names of a row.
        left, right: Texts by place.
        titles: Of the left and the right columns.
        missing: What stands where only the other has a text; where neither has one there are dashes.
        order: Which name's number sorts the rows, else they stand as on the left, others below the same first name.
    """
    rows = list(dict.fromkeys(row for row, _ in (*left, *right)))
    first = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: first.index(row[0]) if order is None else (float(row[order].split(",")[0]), *row))
    having = {column for _, column in right}
    columns = sorted(dict.fromkeys(column for _, column in (*left, *right)), key=lambda column: column not in having)

    def pair(place: Place) -> list[str]:
        in_either = place in left or place in right
        return [side.get(place, text if in_either else NONE) for side, text in zip((left, right), missing, strict=True)]

    return Table([*names, *(titles * len(columns))],
                 [[*row, *(text for column in columns for text in pair((row, column)))] for row in rows],
                 len(names), [(", ".join(column), 2) for column in columns])


def overview(runs: Sequence[Run], found: Sequence[Entry], layout: Layout) -> Table:
    """A row for each group, as `timm-ortho compare` prints it; speed and memory are medians, as machines may differ."""
    axes, baseline = layout.study["axes"], ", ".join(
        layout.label(axis, shown(value)) for axis, value in layout.study["baseline"].items())
    rows = []
    for entry in (entry for entry in found if entry.measure == "top1"):
        members = [run for run in runs if _group(run) == entry.group]
        rows.append([
            *(shown(value) for _, value in entry.group[0]), layout.label("connection", entry.group[1]),
            str(entry.runs), str(entry),
            _middle(fmean, members, "best_top1", _with_digits(2)),
            "-" if entry.baseline == entry.place else str(entry.difference or "-"),
            _middle(median, members, "images_per_second", _with_digits(0)),
            _middle(median, members, "peak_memory", _memory)])
    return Table([*axes, "connection", "seeds", "top-1 % (last epoch)", "best epoch %",
                  f"difference to {baseline} [95 % CI]", "images/s", "peak memory"], rows, len(axes) + 1)


def _middle(of: Callable, runs: Sequence[Run], key: str, shown: Callable[[float], str]) -> str:
    values = [run[key] for run in runs if finite(run.get(key))]
    return shown(of(values)) if values else "unknown"


def _memory(value: Optional[float]) -> str:
    return f"{value / 2**20:,.0f} MiB" if value else "unknown"


# ------------------------------------------------------------------------------- differences, and every run
def differences(found: Sequence[Entry], layout: Layout) -> Table:
    """Every entry that has a baseline, with the half-width of its interval."""
    def against(entry: Entry) -> str:
        names, others = ([*row, *column] for row, column in (entry.place, entry.baseline))
        return ", ".join(other for name, other in zip(names, others, strict=True) if name != other)

    half_width = "half-width; the paper's differences" if any(entry.effects for entry in found) else "half-width"
    return Table(
        [*layout.names, "metric", "against", "difference [95 % CI]", "pooled variance [95 % CI]", "p (Holm)", "reading",
         half_width],
        [[*entry.place[0], ", ".join(entry.place[1]), against(entry), entry.compared(),
          entry.pooled.text(entry.digits) if entry.pooled else NONE,
          NONE if entry.holm is None else f"{entry.holm:.2g}", entry.reading,
          sees(entry.difference, entry.effects, entry.digits)] for entry in found if entry.is_compared],
        len(layout.rows) + 1)


def printed(found: Sequence[Entry], layout: Layout) -> Table:
    """What the command prints: a line for each metric of a group."""
    stated = [] if not layout.study["paper"] else ["paper"]
    return Table(
        [*layout.names, "metric", *stated, "here", "difference [95 % CI]", "reading"],
        [[*entry.place[0], ", ".join(entry.place[1]),
          *(_spread(entry.paper, entry.digits) if entry.paper else layout.unstated for _ in stated), str(entry),
          entry.compared(), entry.reading if entry.is_compared else ""] for entry in found],
        len(layout.rows) + 1)


def run_name(run: Run) -> str:
    cell = [f"{axis} {shown(value)}" for axis, value in run["cell"].items()]
    return ", ".join([*cell, paper.name("connection", run["connection"])])


def _with_digits(digits: int) -> Callable[[Optional[float]], str]:
    return lambda value: f"{value:,.{digits}f}" if finite(value) else "not finite"


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "model": ("model", lambda name: name.removesuffix("_ortho")), "parameters": ("parameters", "{:,}".format),
    "top1": ("top-1 %", _with_digits(2)), "top5": ("top-5 %", _with_digits(2)),
    "best_top1": ("best top-1 %", _with_digits(2)), "loss": ("loss", _with_digits(4)), "epochs": ("epochs", str),
    "images_per_second": ("images/s", _with_digits(0)), "peak_memory": ("peak memory", _memory),
    "seconds": ("seconds", _with_digits(1)), "trainer": ("trainer", str),
}


def every_run(runs: Sequence[Run]) -> Table:
    """A row for each run, with the columns that any of them has; models only where there are several."""
    several = len({run.get("model") for run in runs}) > 1
    columns = [(key, *column) for key, column in _COLUMNS.items()
               if any(key in run for run in runs) and (several or key not in ("model", "parameters"))]
    return Table(
        ["run", "seed", *(title for _, title, _ in columns)],
        [[run_name(run), str(run["seed"]), *(text(run[key]) if key in run else NONE for key, _, text in columns)]
         for run in runs], 2)


# ----------------------------------------------------------------------------------------- further tables
class Extra(NamedTuple):
    """A table of what was measured that has no counterpart in the paper's tables."""

    title: str
    note: str
    table: Table


def _transitions(runs: Sequence[Run], layout: Layout, recorded: Mapping[str, Any]) -> Extra:
    steps: dict[tuple[str, int], dict[str, str]] = {}
    for point in recorded.get("transitions", ()):
        step = "none" if point["step"] is None else f"step {point['step']:g}"
        steps.setdefault((point["kind"], point["layer"]), {})[TRACES[point["measure"]]] = step
    measures = list(next(iter(steps.values()), {}))
    return Extra(
        "Transition points",
        "The training step from which on the means of the linear and the feature traces are mostly apart, by more than "
        "a tenth of the range of both and, where the paired differences vary between seeds, with a confidence interval "
        "that excludes zero; “none” where there is no such step.",
        Table(["branch", "block", *measures], [[kind, str(layer), *found.values()]
                                               for (kind, layer), found in sorted(steps.items())], 2))


def _last_branch(runs: Sequence[Run], layout: Layout, recorded: Mapping[str, Any]) -> Extra:
    measured = [(run, ends) for run, ends in zip(runs, recorded.get("last_branch", ()), strict=False) if ends]
    rows = []
    for names, members in grouped(measured, lambda pair: layout.place(layout.keys(pair[0], "top1"))[0]).items():
        first, highest, last = (fmean(ends[key] for _, ends in members) for key in ("first", "highest", "last"))
        rows.append([*names, *(f"{value:.4g}" for value in (first, highest, last)),
                     f"{last / first:.3g}" if first else "unknown"])
    return Extra(
        "The last branch's output",
        "|f|² of the last branch, over the channels of a pixel, means of the seeds: at the first record, the highest, "
        "and at the last, which is so many times the first.",
        Table([*layout.names, "first", "highest", "last", "last / first"], rows, len(layout.rows)))


def _learned_weights(runs: Sequence[Run], layout: Layout, recorded: Mapping[str, Any]) -> Extra:
    learned = [(layout.label("start", layout.key("start", run)), row)
               for run in runs if run["connection"] == "hybrid" and run.get("dynamics")
               for row in run["dynamics"] if row["step"] == run["dynamics"][-1]["step"]]
    found = grouped(learned, lambda pair: (pair[0], pair[1]["kind"]))

    def spread(members: Sequence[tuple[str, Mapping[str, Any]]], key: str) -> str:
        values = [row[key] for _, row in members if finite(row.get(key))]
        return f"{fmean(values):.3f} [{min(values):.3f}, {max(values):.3f}]" if values else "not finite"

    return Extra(
        "What was learned", "ρ and θ at the last record: mean over blocks and seeds, and in brackets the least and the "
        "greatest.", Table(["start", "branch", "ρ", "θ"], [
            [f"{start} start", kind, *(spread(members, key) for key in ("rho", "theta"))]
            for (start, kind), members in found.items()], 2))


EXTRAS: dict[str, Callable[[Sequence[Run], Layout, Mapping[str, Any]], Extra]] = {
    "transitions": _transitions, "last_branch": _last_branch, "learned_weights": _learned_weights,
}
