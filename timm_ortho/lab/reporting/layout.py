"""How a study's table and figures are laid out: the key `report` of its YAML file, read and checked.

| key | says | without it |
| --- | --- | --- |
| `rows`, `columns` | dimensions that name a row and a column | the grid's axes and `connection`; `measure` |
| `measures` | which numbers of a run are shown, the first foremost: names in `MEASURES` | `top1`, `top5` |
| `titles` | dimension -> what it is called | its name |
| `labels` | dimension -> value -> what it is called | the paper's name |
| `paper` | dimensions along which the paper's figures are nested in the study's `table` | no figures |
| `order` | the dimension by whose number the rows are sorted | the paper's order |
| `unstated` | what stands where the paper has no figure | not in the paper |
| `protocol` | how the numbers are taken | of the last epoch |
| `figures` | names of figures, or `{name: {option: value}}`, see `FIGURES` | `training`, `stream` |
| `tables` | further tables: `transitions`, `last_branch`, `learned_weights` | none |

Dimensions are the axes of the study's grid, `model`, `dataset`, `connection` and `measure`. A figure of the paper is a
list, mean and standard deviation of the measures one after the other, or of one measure where `paper` ends in
`measure`.
"""
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, Callable, Hashable, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence

from ..._text import finite
from .. import LabError, check_names, paper
from ..planning.design import read, shipped

Run = Mapping[str, Any]
Place = tuple[tuple[str, ...], tuple[str, ...]]  # names of the row, names of the column


class Measure(NamedTuple):
    """One number of a run."""

    title: str  # with its unit; `{images}` stands for the images that it was measured on
    read: Callable[[Run], Optional[float]]  # None where the run has none, NaN where it is not finite
    digits: int = 2  # after the point


def _number(key: str) -> Callable[[Run], Optional[float]]:
    """A number that results have: null is one that JSON does not have."""
    def read(run: Run) -> Optional[float]:
        if key not in run:
            return None
        return float("nan") if run[key] is None else run[key]
    return read


def _represented(key: str) -> Callable[[Run], Optional[float]]:
    return lambda run: (run.get("representation") or {}).get(key)


def _five_best(run: Run) -> Optional[float]:
    """The mean of a run's five best epochs, the paper's protocol for Table 2."""
    if not run.get("history"):
        return None
    values = sorted(row["eval_top1"] for row in run["history"] if finite(row.get("eval_top1")))
    return fmean(values[-5:]) if values else float("nan")


MEASURES = {
    "top1": Measure("top-1 %", _number("top1")),
    "top5": Measure("top-5 %", _number("top5")),
    "best5": Measure("top-1 %, five best {images} epochs", _five_best),
    "best_top1": Measure("top-1 %, best {images} epoch", _number("best_top1")),
    "loss": Measure("{images} loss", _number("loss"), 4),
    "effective_rank": Measure("effective rank", _represented("effective_rank"), 1),
    "spectral_entropy": Measure("spectral entropy", _represented("spectral_entropy"), 3),
    "linear_cka": Measure("linear CKA between the two", _represented("linear_cka"), 3),
    "feature_std": Measure("feature standard deviation", _represented("feature_std"), 3),
}


TRACES = {  # columns of what is recorded at each site, and `branch`, the sum of both parts
    "stream": "|x|²", "parallel": "|f∥|²", "orthogonal": "|f⊥|²", "branch": "|f|²", "cosine": "cosine of x and f",
    "rho": "ρ", "theta": "θ",
}

# What can be drawn, and by which options. Every figure has `name`, of its file, and `caption`; `by` is the dimension
# with a figure or panel for each of its values, `lines` are those that name a line.
FIGURES = {
    "training": ("by", "lines"),  # loss and top-1 by epoch
    "curves": ("by", "lines", "column"),  # a column of the history by epoch
    "points": ("x", "lines", "measures", "log", "pearson"),  # measures over the numbers or names of a dimension
    "stream": ("lines",),  # norm and cosine at each site, from the probes
    "traces": ("lines",),  # the recorded norms and cosines at each site, by training step
    "last_branch": ("by", "lines"),  # norms of the last branch's output, by training step
    "learned_weights": ("by",),  # rho and theta by training step
}
FIGURES = {name: (*options, "name", "caption") for name, options in FIGURES.items()}
TABLES = ("transitions", "last_branch", "learned_weights")


@dataclass(frozen=True)
class Layout:
    """The attributes are the keys above, and the study that is laid out."""

    study: Mapping[str, Any]
    rows: Sequence[str]
    columns: Sequence[str] = ("measure",)
    measures: Sequence[str] = ("top1", "top5")
    titles: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    paper: Sequence[str] = ()
    order: str = ""
    unstated: str = "not in the paper"
    protocol: str = "Values are those of the last epoch."
    figures: Sequence[Any] = ("training", "stream")
    tables: Sequence[str] = ()
    generic: bool = False

    @classmethod
    def of(cls, study: Mapping[str, Any]) -> "Layout":
        """The study's own layout, checked, else that of the shipped study of its name, if it has the same axes, else a
        row for each cell and connection.
        """
        dimensions = {*study["axes"], "model", "dataset", "connection", "measure"}
        given = study.get("report")
        if given is None and study["name"] in shipped():
            given = read(study["name"]).get("report")
            fits = given and dimensions.issuperset([*given.get("rows", ()), *given.get("columns", ())])
            given = given if fits else None
        if not isinstance(given or {}, Mapping):
            raise LabError(f"report must be a mapping, not {given!r}")
        check_names(given or {}, set(cls.__dataclass_fields__) - {"study", "generic"}, "report")
        generic = not given or not given.keys() & {"rows", "columns"}
        layout = cls(study, **{"rows": [*study["axes"], "connection"], "generic": generic, **(given or {})})
        for key, known in (("rows", dimensions), ("columns", dimensions), ("paper", dimensions), ("titles", dimensions),
                           ("labels", dimensions), ("measures", MEASURES), ("tables", TABLES)):
            check_names(getattr(layout, key), known, f"report: {key}", "entry")
        check_names([layout.order] if layout.order else [], layout.rows, "report: order", "entry")
        for name, options in layout.drawings():
            check_names([name], FIGURES, "report: figures", "entry")
            check_names(options, FIGURES[name], f"report: figure '{name}'", "option")
            named = [options[key] for key in ("x", "by") if key in options]
            check_names([*named, *options.get("lines", ())], dimensions, f"report: figure '{name}'", "dimension")
            check_names(options.get("measures", ()), MEASURES, f"report: figure '{name}'", "measure")
        return layout

    @property
    def images(self) -> str:  # that accuracy is measured on
        images = self.study.get("validation") or "test"
        split = (self.study.get("data") or {}).get("validation_split") or images
        return images if images == split or images != "test" else "validation"

    @property
    def names(self) -> list[str]:  # titles of what names a row
        return [self.titles.get(dimension, dimension) for dimension in self.rows]

    def drawings(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Name and options of each figure."""
        for entry in self.figures:
            for name, options in entry.items() if isinstance(entry, Mapping) else [(entry, {})]:
                yield name, options or {}

    # Where a run stands along a dimension is a key, by the names of `paper.json`; what is shown is its label.
    def key(self, dimension: str, run: Run) -> str:
        value = run.get("cell", {}).get(dimension)
        if value is None:
            value = run.get(dimension) if dimension in ("connection", "dataset") else None
        value = self.study.get(dimension) if value is None else value
        if dimension == "dataset":
            return str(value or "own images").rpartition("/")[2]
        return (paper.architecture(str(value)) if dimension == "model" else None) or shown(value)

    def keys(self, run: Run, measure: str) -> dict[str, str]:
        dimensions = {*self.rows, *self.columns} - {"measure"}
        return {"measure": measure, **{dimension: self.key(dimension, run) for dimension in dimensions}}

    def label(self, dimension: str, key: str) -> str:
        given = {shown(value): text for value, text in self.labels.get(dimension, {}).items()}
        if dimension == "measure":
            return given.get(key) or MEASURES[key].title.format(images=self.images)
        return given.get(key) or paper.name(dimension, key)

    def name(self, dimensions: Iterable[str]) -> Callable[[Run], str]:
        """What a run is called by these dimensions."""
        return lambda run: ", ".join(self.label(dimension, self.key(dimension, run)) for dimension in dimensions)

    def place(self, keys: Mapping[str, str]) -> Place:
        """Where the figure with these keys stands."""
        row, column = (tuple(self.label(dimension, keys[dimension]) for dimension in side)
                       for side in (self.rows, self.columns))
        return row, column

    @cached_property
    def stated(self) -> dict[Place, list[float]]:
        """The paper's figures by place, in the paper's order."""
        found: dict[Place, list[float]] = {}
        for keys, figure in self.leaves():
            by_measure = [(keys["measure"], figure)] if "measure" in keys else [
                (name, figure[2 * index:2 * index + 2]) for index, name in enumerate(self.measures)]
            found |= {self.place({**keys, "measure": name}): values for name, values in by_measure if values}
        return found

    def leaves(self, section: Any = None, depth: int = 0) -> Iterator[tuple[dict[str, str], list[float]]]:
        """Each list of the paper's table that is nested as deep as `paper` says, with its keys; texts are left out."""
        section = paper.section(self.study.get("table")) if section is None else section
        if depth == len(self.paper):
            yield from [({}, section)] if isinstance(section, list) else []
            return
        for key, below in section.items() if isinstance(section, Mapping) else ():
            for keys, leaf in self.leaves(below, depth + 1):
                yield {self.paper[depth]: key, **keys}, leaf


def grouped(items: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Any, list]:
    groups: dict[Any, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def shown(value: Any) -> str:
    """0.1 as `0.1`, 1e-06 as `1e-6`, which is how the paper writes them."""
    if not isinstance(value, float):
        return str(value)
    digits, _, power = f"{value:e}".partition("e")
    if value and not -2 <= int(power) <= 3:
        return f"{float(digits):g}e{int(power)}"
    return f"{value:g}"
