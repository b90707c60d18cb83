"""The layout of a report: the key `report` of a study's YAML file.

| key | meaning | default |
| --- | --- | --- |
| `rows`, `columns` | dimensions that name a row and a column | the grid's axes and `connection`; `measure` |
| `measures` | metrics of a run, as keys of `MEASURES`. The first is the main metric | `top1`, `top5` |
| `titles` | dimension -> title | the dimension's name |
| `labels` | dimension -> value -> label | the paper's name |
| `paper` | the dimensions of the nested keys in the section of `paper.json`, from the outermost inwards | none |
| `order` | dimension with numbers as values, by which the rows are sorted | the paper's order |
| `protocol` | a sentence about how the metrics are measured | the values are from the last epoch |
| `plots` | names of plots (`plots.DRAWINGS`), or `{name: {option: value}}`; always `training` | `training`, `stream` |
| `tables` | names of additional tables (`tables.EXTRAS`) | none |

A dimension is an axis of the study's grid, or one of `model`, `dataset`, `connection` and `measure`. If there are
several measures, and `measure` is in neither `rows` nor `columns`, it is added to `columns`. Studies of at most five
classes have no top-5.

The study's key `table` names the section of `paper.json` with the paper's numbers. Its innermost values are lists: mean
and standard deviation of the first measure, then of the second, and so on. If `measure` is in `paper`, each list
belongs to one measure.
"""
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, Callable, Hashable, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence, Union

from ..._text import finite
from .. import paper, value_text

Run = Mapping[str, Any]
Position = tuple[tuple[str, ...], tuple[str, ...]]  # names of the row and of the column in a table


class Measure(NamedTuple):
    """A metric of a run."""

    title: str  # with its unit; `{images}` is replaced by `Layout.images`
    read: Callable[[Run], Optional[float]]  # returns None for a missing value, NaN for a value that is not finite
    digits: int = 2  # decimal places


def _number(key: str) -> Callable[[Run], Optional[float]]:
    """Return a function that reads a number of a result, where null means NaN or infinity."""
    def read(run: Run) -> Optional[float]:
        if key not in run:
            return None
        return float("nan") if run[key] is None else run[key]
    return read


def _represented(key: str) -> Callable[[Run], Optional[float]]:
    return lambda run: _number(key)(run.get("representation") or {})


def _mean_of_five(key: str, best: bool) -> Callable[[Run], Optional[float]]:
    """Return a function that averages five epochs of a run.

    Args:
        key: A column of the run's history.
        best: Average the best epochs, as the paper's Table 2 does. Otherwise, average the last epochs of the last
            stage; Table 3 averages an unknown number of them.
    """
    def read(run: Run) -> Optional[float]:
        if not run.get("history"):
            return None
        first = 0 if best else run.get("switch_epoch") or 0
        values = [row[key] for row in run["history"] if row["epoch"] >= first and finite(row.get(key))]
        return fmean((sorted(values) if best else values)[-5:]) if values else float("nan")
    return read


def _best_loss(run: Run) -> Optional[float]:
    losses = [row["eval_loss"] for row in run.get("history", ()) if finite(row.get("eval_loss"))]
    return min(losses, default=None)


MEASURES = {
    "top1": Measure("top-1 %", _number("top1")),
    "top5": Measure("top-5 %", _number("top5")),
    "best5": Measure("top-1 %, five best {images} epochs", _mean_of_five("eval_top1", best=True)),
    "best5_top5": Measure("top-5 %, five best {images} epochs", _mean_of_five("eval_top5", best=True)),
    "final5": Measure("top-1 %, mean of the last five epochs", _mean_of_five("eval_top1", best=False)),
    "final5_top5": Measure("top-5 %, mean of the last five epochs", _mean_of_five("eval_top5", best=False)),
    "best_top1": Measure("top-1 %, best {images} epoch", _number("best_top1")),
    "best_loss": Measure("{images} loss, best epoch", _best_loss, 4),
    "loss": Measure("{images} loss", _number("loss"), 4),
    "effective_rank": Measure("effective rank", _represented("effective_rank"), 1),
    "spectral_entropy": Measure("spectral entropy", _represented("spectral_entropy"), 3),
    "linear_cka": Measure(  # null for the baseline's runs
        "linear CKA with the baseline", lambda run: (run.get("representation") or {}).get("linear_cka"), 3),
    "feature_std": Measure("feature standard deviation", _represented("feature_std"), 3),
}

TRACES = {  # titles of the records' columns; `branch` is `parallel` + `orthogonal`
    "stream": "|x|²", "parallel": "|f∥|²", "orthogonal": "|f⊥|²", "branch": "|f|²", "cosine": "cosine of x and f",
    "s": "s of f", "s_added": "s of y − x",
}


@dataclass(frozen=True)
class Layout:
    """The layout of a report. Its attributes are the study and the keys above."""

    study: Mapping[str, Any]
    rows: Sequence[str]
    columns: Sequence[str] = ("measure",)
    measures: Sequence[str] = ("top1", "top5")
    titles: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    paper: Sequence[str] = ()
    order: str = ""
    protocol: str = "The values are from the last epoch."
    plots: Sequence[Union[str, Mapping[str, Optional[Mapping[str, Any]]]]] = ("training", "stream")
    tables: Sequence[str] = ()

    @property
    def images(self) -> str:
        """The images on which accuracy is measured: `test`, `validation` or `hold-out`."""
        images = self.study.get("validation") or "test"
        split = (self.study.get("data") or {}).get("validation_split") or images
        return images if images == split or images != "test" else "validation"

    @property
    def classes(self) -> Optional[int]:
        return (self.study.get("data") or {}).get("classes")

    @property
    def chance(self) -> Optional[float]:
        """The accuracy of guessing among equally frequent classes, in percent; None if their number is unknown."""
        return 100 / self.classes if self.classes else None

    def varies(self, metric: str) -> bool:
        """Return whether runs can differ in a metric. With at most five classes, top-5 is always 100 %."""
        return "top5" not in metric or not self.classes or self.classes > 5

    @property
    def names(self) -> list[str]:
        """Titles of the first columns of the table, which contain the names of the rows."""
        return [self.titles.get(dimension, dimension) for dimension in self.rows]

    @property
    def column_title(self) -> str:
        """The dimensions of the columns, as the title of a column that contains their names."""
        return ", ".join(self.titles.get(dimension, "metric" if dimension == "measure" else dimension)
                         for dimension in self.columns) or "metric"

    def plot_options(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield name and options of each plot."""
        for entry in self.plots:
            for name, options in entry.items() if isinstance(entry, Mapping) else [(entry, {})]:
                yield name, {key: value for key, value in (options or {}).items() if value is not None}

    def key(self, dimension: str, run: Run) -> str:
        """Return a run's value of a dimension, named as in `paper.json`. `label` turns this value into text."""
        value = run.get("cell", {}).get(dimension)
        if value is None:
            value = run.get(dimension) if dimension in ("connection", "dataset") else None
        value = self.study.get(dimension) if value is None else value
        if dimension == "dataset":
            return str(value or "own images").rpartition("/")[2]
        return (paper.architecture(str(value)) if dimension == "model" else None) or value_text(value)

    def keys(self, run: Run, measure: str) -> dict[str, str]:
        """Return the key of each dimension of the table for a run and a measure."""
        dimensions = {*self.rows, *self.columns} - {"measure"}
        return {"measure": measure, **{dimension: self.key(dimension, run) for dimension in dimensions}}

    def label(self, dimension: str, key: str) -> str:
        """Return the text that a report shows for a key of a dimension."""
        labels = {value_text(value): text for value, text in self.labels.get(dimension, {}).items()}
        if dimension == "measure":
            return labels.get(key) or MEASURES[key].title.format(images=self.images)
        return labels.get(key) or paper.name(dimension, key)

    def named(self, dimension: str, key: str, text: str = "") -> str:
        """Return the label of a key, or `text`. A bare value of an axis is preceded by the axis, as in `prob = 0`."""
        label = self.label(dimension, key)
        bare = dimension in self.study["axes"] and label in (key, "–")
        return f"{self.titles.get(dimension, dimension)} = {text or label}" if bare else text or label

    def name(self, dimensions: Iterable[str]) -> Callable[[Run], str]:
        """Return a function that names a run by these dimensions."""
        return lambda run: ", ".join(self.named(dimension, self.key(dimension, run)) for dimension in dimensions)

    def run_name(self, run: Run) -> str:
        """Return the name of a run without its seed: each axis with its value, and the connection."""
        cell = [f"{self.titles.get(axis, axis)} = {self.label(axis, self.key(axis, run))}" for axis in run["cell"]]
        return ", ".join([*cell, self.label("connection", run["connection"])])

    def position(self, keys: Mapping[str, str]) -> Position:
        """Return the position of these keys in the table."""
        return (tuple(self.label(dimension, keys[dimension]) for dimension in self.rows),
                tuple(self.named(dimension, keys[dimension]) for dimension in self.columns))

    @cached_property
    def stated(self) -> dict[Position, list[float]]:
        """The paper's numbers by position, in the paper's order. The paper has none for other axes."""
        stated: dict[Position, list[float]] = {}
        if not {*self.rows, *self.columns} <= {"measure", *self.paper}:
            return stated
        for keys, numbers in self.leaves():
            by_measure = [(keys["measure"], numbers)] if "measure" in keys else [
                (name, numbers[2 * index:2 * index + 2]) for index, name in enumerate(self.measures)]
            stated |= {self.position({**keys, "measure": name}): values for name, values in by_measure if values}
        return stated

    def leaves(self, section: Any = None, depth: int = 0) -> Iterator[tuple[dict[str, str], list[float]]]:
        """Yield each list of numbers in the paper's table, with its key in each dimension of `self.paper`."""
        section = paper.section(self.study.get("table")) if section is None else section
        if depth == len(self.paper):
            yield from [({}, section)] if isinstance(section, list) else []
            return
        for key, below in section.items() if isinstance(section, Mapping) else ():
            for keys, leaf in self.leaves(below, depth + 1):
                yield {self.paper[depth]: key, **keys}, leaf


def grouped(items: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Any, list]:
    """Group items by key, in the order in which the keys first occur.

    >>> grouped([1, 2, 3, 4], lambda number: number % 2)
    {1: [1, 3], 0: [2, 4]}
    """
    groups: dict[Any, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
