"""The paper's table with the measured one beside it, and differences to the baseline, seed by seed.

A study's figures stand at places: the names of a row and those of a column, of which the first is the data set where
the paper's table has several. Which run belongs where, and what the paper has there, is said in `study_specs`.
"""
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

from . import paper as paper_figures
from .page import Table
from .plots import finite
from .report import Difference, paired_difference

__all__ = [
    "NOT_IN_PAPER", "Entry", "Measure", "Place", "compared", "connection_name", "difference_table", "entries",
    "group_runs",
    "interval", "plain", "reading", "side_by_side", "spread", "with_differences",
]

NOT_RUN, NOT_IN_PAPER = "not run", "not in the paper"
Place = tuple[tuple[str, ...], tuple[str, ...]]
Cell = tuple[tuple[tuple[str, Any], ...], str]  # the cell of the grid, and the connection
Paper = Mapping[Place, Sequence[Optional[float]]]  # mean, and standard deviation where there is one


@dataclass(frozen=True)
class Measure:
    """One number of a run.

    Attributes:
        title: What it is, with its unit.
        read: From a run to the number; None or NaN where it has none.
        digits: After the point.
    """

    title: str
    read: Callable[[Mapping[str, Any]], Optional[float]]
    digits: int = 2


@dataclass(frozen=True)
class Entry:
    """One measure of the runs that differ in nothing but the seed.

    Attributes:
        place: Where it stands in the table.
        measure: Name of the measure.
        title: Its title.
        digits: After the point.
        cell: Axes and values of the grid, and the connection.
        values: The finite values, by seed.
        runs: How many runs are finished; those that are not in `values` had no finite value.
        planned: How many seeds the study has.
        paper: The paper's mean and standard deviation.
        is_baseline: Whether the differences are to this one.
        baseline: Where the difference is to; None where there is nothing to compare with.
        difference: Over the seeds that both have.
    """

    place: Place
    measure: str
    title: str
    digits: int
    cell: Mapping[str, Any]
    values: Mapping[int, float]
    runs: int
    planned: int
    paper: Optional[Sequence[Optional[float]]] = None
    is_baseline: bool = False
    baseline: Optional[Place] = None
    difference: Optional[Difference] = None

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
        text = spread(*_moments(self.values.values()), self.digits)
        return f"{text} ({', '.join(notes)})" if notes else text


def group_runs(runs: Iterable[Mapping[str, Any]]) -> dict[Cell, list[Mapping[str, Any]]]:
    """Runs that differ in nothing but the seed, in the order of their first appearance."""
    groups: dict[Cell, list] = {}
    for run in runs:
        groups.setdefault((tuple(run["cell"].items()), run["connection"]), []).append(run)
    return groups


def connection_name(connection: str) -> str:
    """As the paper calls it."""
    return paper_figures.figures()["connections"].get(connection, connection)


def entries(
        study: Mapping[str, Any],
        runs: Sequence[Mapping[str, Any]],
        measures: Mapping[str, Measure],
        place: Callable[[Mapping[str, Any], Mapping[str, Any], str, Measure], Place],
        paper: Paper,
) -> list[Entry]:
    """One entry for each group of runs and each measure that at least one of the runs has."""
    groups, found = group_runs(runs), []
    for name, measure in measures.items():
        places = _places(groups, lambda run, name=name, measure=measure: place(study, run, name, measure))
        for key, group in groups.items():
            if all(measure.read(run) is None for run in group):
                continue  # the baseline has no CKA with itself
            values = _values(measure, group)
            reference = _baseline(groups, key, study["baseline"])
            baseline = difference = None
            if reference not in (None, key) and any(measure.read(run) is not None for run in groups[reference]):
                baseline = places[reference]
                difference = _difference(values, _values(measure, groups[reference]))
            found.append(Entry(
                place=places[key], measure=name, title=measure.title, digits=measure.digits,
                cell={**group[0]["cell"], "connection": group[0]["connection"]},
                values=values, runs=len(group), planned=len(study["seeds"]), paper=paper.get(places[key]),
                is_baseline=reference == key, baseline=baseline, difference=difference))
    order = list(groups)
    return sorted(found, key=lambda entry: order.index(_key(entry.cell)))


def _places(groups: Mapping[Cell, list], place: Callable[[Mapping[str, Any]], Place]) -> dict[Cell, Place]:
    """Where each group stands; where two would stand at one place, the connection is named as well."""
    places = {key: place(group[0]) for key, group in groups.items()}
    taken = list(places.values())
    for key, (row, column) in places.items():
        if taken.count((row, column)) > 1:
            places[key] = ((*row[:-1], f"{row[-1]}, {key[1]}"), column)
    return places


def _key(cell: Mapping[str, Any]) -> Cell:
    return tuple((axis, value) for axis, value in cell.items() if axis != "connection"), cell["connection"]


def _values(measure: Measure, runs: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    values = {run["seed"]: measure.read(run) for run in runs}
    return {seed: values[seed] for seed in sorted(values) if finite(values[seed])}


def _baseline(groups: Mapping[Cell, Any], key: Cell, baseline: Mapping[str, Any]) -> Optional[Cell]:
    """The group that this one is compared with: its cell and connection, changed as the study's baseline says.

    Where the baseline changes the cell alone, the connection may have to follow (no block that carries a connection is
    all linear): then it is the one that the changed cell was run with.
    """
    changed = {axis: baseline.get(axis, value) for axis, value in key[0]}
    candidates = [group for group in groups if dict(group[0]) == changed]
    wanted = baseline.get("connection", key[1])
    for group in candidates:
        if group[1] == wanted:
            return group
    return candidates[0] if len(candidates) == 1 and "connection" not in baseline else None


def _difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Optional[Difference]:
    seeds = sorted(values.keys() & baseline.keys())
    return paired_difference(*([side[seed] for seed in seeds] for side in (values, baseline))) if seeds else None


# -------------------------------------------------------------------------------------------- side by side
def side_by_side(
        names: Sequence[str],
        here: Mapping[Place, str],
        paper: Mapping[Place, str],
        *,
        title: str = "here",
        unstated: str = NOT_IN_PAPER,
        order: Optional[Callable[[tuple[str, ...]], Any]] = None,
) -> Table:
    """A table with two columns, the paper's and this run's, for each column of either; first the columns that were run.

    Args:
        names: Titles of the names of a row.
        here: What was measured, by place.
        paper: What the paper has, by place.
        title: Title of the measured columns.
        unstated: What stands where the paper has no figure.
        order: Sorts the rows; without it they stand as in the paper, and others below those of the same first name.
    """
    rows = list(dict.fromkeys(row for row, _ in (*paper, *here)))
    run = {column for _, column in here}
    columns = sorted(dict.fromkeys(column for _, column in (*paper, *here)), key=lambda column: column not in run)
    first = list(dict.fromkeys(row[0] for row in rows))
    rows = sorted(rows, key=order or (lambda row: first.index(row[0])))
    return Table(
        header=[*names, *(["paper", title] * len(columns))],
        rows=[[*row, *(text for column in columns for text in _pair(paper, here, (row, column), unstated))]
              for row in rows],
        names=len(names),
        groups=[(", ".join(column), 2) for column in columns],
    )


def _pair(paper: Mapping[Place, str], here: Mapping[Place, str], place: Place, unstated: str) -> tuple[str, str]:
    if place not in paper and place not in here:
        return "–", "–"
    return paper.get(place, unstated), here.get(place, NOT_RUN)


def with_differences(found: Sequence[Entry], names: Sequence[str], *, title: str = "here") -> Table:
    """The table of a study that no paper has: beside each column, where the paper's would be, the differences."""
    at = {entry.place: entry for entry in found}
    rows, columns = (list(dict.fromkeys(place[side] for place in at)) for side in (0, 1))
    return Table(
        header=[*names, *([title, "difference [95 %]"] * len(columns))],
        rows=[[*row, *(text for column in columns for text in _with_difference(at.get((row, column))))]
              for row in rows],
        names=len(names),
        groups=[(", ".join(column), 2) for column in columns],
    )


def _with_difference(entry: Optional[Entry]) -> tuple[str, str]:
    return (str(entry), compared(entry)) if entry else (NOT_RUN, "–")


# ------------------------------------------------------------------------------------------- differences
def difference_table(found: Sequence[Entry], names: Sequence[str], paper: Optional[Paper], unstated: str) -> Table:
    """Every entry that has a baseline: the difference, how it reads, and the paper's unless there is no paper."""
    rows = [[
        *entry.place[0], ", ".join(entry.place[1]), ", ".join(_against(entry)),
        interval(entry.difference, entry.digits), reading(entry.difference),
        *([] if paper is None else [_paper_difference(entry, paper) or unstated]),
    ] for entry in found if entry.baseline is not None]
    header = [*names, "figure", "against", "difference [95 %]", "reading", "difference in the paper"]
    return Table(header[:-1] if paper is None else header, rows, names=len(names) + 1)


def compared(entry: Entry) -> str:
    """The difference to the baseline; the baseline says that it is one."""
    if entry.baseline is None:
        return "baseline" if entry.is_baseline else "–"
    return interval(entry.difference, entry.digits)


def _against(entry: Entry) -> list[str]:
    """The baseline's names, as far as they differ from the entry's."""
    names, others = ([*row, *column] for row, column in (entry.place, entry.baseline))
    return [other for name, other in zip(names, others, strict=True) if name != other]


def reading(difference: Optional[Difference]) -> str:
    """An interval in words; what holds zero is not told apart."""
    if difference is None:
        return "no pair of finite runs"
    if difference.half_width is None:
        return "one pair: no interval"
    if abs(difference.mean) <= difference.half_width:
        return "not told apart"
    return "higher" if difference.mean > 0 else "lower"


def _paper_difference(entry: Entry, paper: Paper) -> str:
    """The difference of the paper's means at the same places, or on the data sets that the paper has."""
    own = _paper_pair(paper, entry.place, entry.baseline)
    if own is not None:
        return f"{own:+.{entry.digits}f}"
    texts = []
    for dataset in dict.fromkeys(column[0] for _, column in paper):
        places = [(row, (dataset, *column[1:])) for row, column in (entry.place, entry.baseline)]
        value = _paper_pair(paper, *places)
        if value is not None:
            texts.append(f"{dataset} {value:+.{entry.digits}f}")
    return "; ".join(texts)


def _paper_pair(paper: Paper, place: Place, baseline: Place) -> Optional[float]:
    if place == baseline or place not in paper or baseline not in paper:
        return None
    return paper[place][0] - paper[baseline][0]


# ------------------------------------------------------------------------------------------------- numbers
def spread(mean: Optional[float], std: Optional[float] = None, digits: int = 2) -> str:
    """`91.00 ± 0.14`, or the mean alone."""
    if mean is None:
        return "unknown"
    return f"{mean:,.{digits}f}" if std is None else f"{mean:,.{digits}f} ± {std:,.{digits}f}"


def plain(entry: Entry) -> dict[str, Any]:
    """The entry as JSON has it."""
    mean, std = _moments(entry.values.values())
    difference = None
    if entry.difference is not None:
        difference = {**asdict(entry.difference), "reading": reading(entry.difference)}
    return {
        "row": list(entry.place[0]), "column": list(entry.place[1]), "measure": entry.measure, "cell": dict(entry.cell),
        "seeds": list(entry.values), "values": list(entry.values.values()), "mean": mean, "std": std,
        "not_finite": entry.runs - len(entry.values), "paper": list(entry.paper) if entry.paper else None,
        "difference": difference,
    }


def _moments(values: Iterable[float]) -> tuple[Optional[float], Optional[float]]:
    values = list(values)
    return (fmean(values) if values else None), (stdev(values) if len(values) > 1 else None)


def interval(difference: Optional[Difference], digits: int) -> str:
    """`+0.12 [-0.30, +0.54]`; a single pair has no interval."""
    if difference is None:
        return "–"
    if difference.half_width is None:
        return f"{difference.mean:+.{digits}f}"
    low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
    return f"{difference.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
