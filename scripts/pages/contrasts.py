"""Define comparisons of published runs, and functions that read the compared metrics.

A contrast is a weighted sum of a metric over the settings of a study. It is computed for each seed, and its mean over
the seeds has Student's interval. Differences, slopes over the learning rate, main effects and interactions are
contrasts that differ in their weights. `Unpaired` (Welch) and `Effect` (a factor of a fractional factorial design) are
not contrasts, because their standard errors are computed differently.
"""
import math
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, variance
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence, Union

import numpy as np
from scipy import stats

from timm_ortho.lab.reporting.layout import grouped
from timm_ortho.lab.reporting.published import STUDY
from timm_ortho.lab.reporting.report import Part
from timm_ortho.lab.reporting.statistics import Difference, paired_difference, pooled_contrasts, student_interval

from . import studies
from .marked import span

Weights = Mapping[tuple, float]  # values of a study's axes and the connection -> weight
Run = Mapping[str, Any]


def is_published(study: str) -> bool:
    return (studies.RESULTS / "studies" / study / STUDY).is_file()


def published(study: str) -> Part:
    return studies.part(studies.RESULTS / "studies" / study)


def summary_of(study: str) -> Sequence[Mapping[str, Any]]:
    return studies.summary(studies.RESULTS / "studies" / study)


def runs_of(study: str) -> Sequence[Run]:
    return published(study).runs


def setting_of(run: Run) -> tuple:
    """Return the values of the study's axes and, as the last item, the connection."""
    return (*run["cell"].values(), run["connection"])


def settings_of(study: str) -> dict[tuple, list[Run]]:
    """Return the runs of each setting. The runs of a setting differ only in the seed."""
    return grouped(runs_of(study), setting_of)


def top1(run: Run) -> float:
    return run["top1"]


class Comparison:
    """A measured difference, and the paper's values of this difference.

    Attributes:
        label: The comparison in words.
        parts: Folders in `results/studies`, each with the weights of its settings.
        unit: Unit of `difference`.
        paper: The paper's value of this difference, by data set.
        pooled: The difference with one error variance for all settings of the study, or None.
        room: The difference if all settings except the baseline had an accuracy of 100 %.
    """

    label: str
    parts: Sequence[tuple[str, Weights]]
    unit: str = "points"
    paper: Mapping[str, float] = {}
    pooled: Optional[Difference] = None
    room: float = math.inf

    @property
    def is_run(self) -> bool:
        return all(is_published(study) for study, _ in self.parts)

    @property
    def seeds(self) -> Union[int, str]:
        return self.difference.pairs

    @property
    def of_paper(self) -> str:
        """The range of the paper's effects, such as `+0.79 to +2.75`; empty if the paper has no such effect."""
        return span(self.paper.values(), "{:+.2f}") if self.paper else ""

    def measured(self, level: float = 0.95) -> Difference:
        """Return the mean difference with its two-sided interval."""
        raise NotImplementedError

    @cached_property
    def difference(self) -> Difference:
        """The mean difference with its 95 % interval."""
        return self.measured()

    def within(self, bound: float) -> bool:
        """Return whether two one-sided 5 % tests show equivalence: the 90 % interval is within [-bound, bound]."""
        return max(map(abs, self.measured(0.9).ends)) <= bound

    def compatible(self) -> str:
        """Return whether the interval contains the paper's effects, in words."""
        if not self.paper:
            return "the paper has no number"
        if min(self.paper.values()) > self.room:
            return f"untestable: 100 % accuracy would give {self.room:+.2f} ({self.of_paper})"
        inside = self.difference.contained(self.paper)
        if inside:
            answer = "yes" if len(inside) == len(self.paper) else "in part"
        else:
            side = [", larger" if effect < self.difference.ends[0] else ", smaller" for effect in self.paper.values()]
            answer = f"no{side[0] if len(set(side)) == 1 else ''}"
        return f"{answer} ({self.of_paper}){', and zero' if inside and self.difference.contains(0) else ''}"

    def __str__(self) -> str:
        size = abs(self.difference.mean)
        return self.difference.text(2 if self.unit == "points" or size >= 10 else 3 if size >= 0.05 else 4)


@dataclass(frozen=True)
class Contrast(Comparison):
    """A weighted sum of a metric over settings, for each seed that has runs of all these settings.

    Attributes:
        parts: See `Comparison`. Settings without a weight are ignored. The sums of several parts are averaged.
        read: Returns the metric of a run.
        bases: Connection of the baseline. The baseline is the settings with negative weight; if `bases` is not empty,
            only those of this connection. A slope needs this attribute, because each connection has settings with
            negative weight.
    """

    label: str
    parts: Sequence[tuple[str, Weights]]
    read: Callable[[Run], float] = top1
    unit: str = "points"
    paper: Mapping[str, float] = field(default_factory=dict)
    bases: str = ""

    @cached_property
    def rows(self) -> list[dict[int, dict[tuple, float]]]:
        """The metric by seed and setting for each part. Seeds that a part lacks are left out of all parts."""
        parts = [table(*part, self.read) for part in self.parts]
        return [{seed: row for seed, row in rows.items() if all(seed in other for other in parts)} for rows in parts]

    @cached_property
    def by_seed(self) -> dict[int, float]:
        """The weighted sum by seed."""
        return {seed: fmean(sum(weight * rows[seed][setting] for setting, weight in weights.items())
                            for rows, (_, weights) in zip(self.rows, self.parts, strict=True))
                for seed in self.rows[0]}

    def mean(self, part: int, setting: tuple) -> float:
        return fmean(row[setting] for row in self.rows[part].values())

    @property
    def runs(self) -> list[Run]:
        """The runs of the settings with a weight."""
        return [run for study, weights in self.parts for run in runs_of(study) if setting_of(run) in weights]

    @property
    def values(self) -> list[float]:
        return list(self.by_seed.values())

    def measured(self, level: float = 0.95) -> Difference:
        return _paired(self.values, level)

    def without(self, *seeds: int) -> tuple[Difference, tuple[float, float]]:
        """Return the difference without the runs of these seeds, and its 90 % interval."""
        values = [value for seed, value in self.by_seed.items() if seed not in seeds]
        return _paired(values), _paired(values, 0.9).ends

    @property
    def pooled(self) -> Optional[Difference]:
        """The difference with one error variance for all settings of the study, after subtracting each seed's mean.

        None if the weights do not sum to zero. See `statistics.pooled_contrasts`.
        """
        blocks = [{setting: {run["seed"]: self.read(run) for run in runs}
                   for setting, runs in settings_of(study).items()} for study, _ in self.parts]
        weights = {(index, setting): weight / len(self.parts)
                   for index, (_, settings) in enumerate(self.parts) for setting, weight in settings.items()}
        return pooled_contrasts(blocks, [weights])[0]

    @property
    def room(self) -> float:
        """The weighted sum if all settings except the baseline had 100 % accuracy.

        Infinity if the metric is not top-1, or if `bases` is empty and the negative weights do not sum to -1.
        """
        bases = [{setting: min(weight, 0.0) for setting, weight in weights.items() if self.bases in ("", setting[-1])}
                 for _, weights in self.parts]
        if self.read is not top1 or not (
                self.bases or all(math.isclose(sum(base.values()), -1.0) for base in bases)):
            return math.inf
        return fmean(sum(weight * (self.mean(part, setting) - 100) for setting, weight in base.items())
                     for part, base in enumerate(bases))


@dataclass(frozen=True)
class Unpaired(Comparison):
    """The mean of contrast `one` minus the mean of `other`, with Welch's interval. Their runs are not paired."""

    label: str
    one: Contrast
    other: Contrast

    @property
    def parts(self) -> Sequence[tuple[str, Weights]]:
        return [*self.one.parts, *self.other.parts]

    @property
    def seeds(self) -> str:
        return f"{self.one.seeds} and {self.other.seeds}"

    def measured(self, level: float = 0.95) -> Difference:
        return unpaired(self.one.values, self.other.values, level)


@dataclass(frozen=True)
class Effect(Comparison):
    """A factor's effect on F − linear in `cifar_factors`: the mean at its second level minus the mean at its first.

    Each combination of levels is a cell. The error variance is estimated from the differences F − linear after
    subtracting the means of cells and seeds.
    """

    label: str
    study: str
    factor: str
    read: Callable[[Run], float] = top1
    unit: str = "points"
    paper: Mapping[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> Sequence[tuple[str, Weights]]:
        return [(self.study, {})]

    @property
    def runs(self) -> Sequence[Run]:
        return runs_of(self.study)

    def measured(self, level: float = 0.95) -> Difference:
        rows = table(self.study, None, self.read)
        cells = dict.fromkeys(setting[0] for row in rows.values() for setting in row)
        leads = {cell: {seed: row[cell, "feature"] - row[cell, "linear"] for seed, row in rows.items()}
                 for cell in cells}
        first, second = FACTORS[self.factor]
        signs = {cell: (second in cell.split("-")) - (first in cell.split("-")) for cell in cells}
        weights = {(0, cell): 2 * sign / len(cells) for cell, sign in signs.items()}
        return pooled_contrasts([leads], [weights], level)[0]


FACTORS = {"width": ("w64", "w128"), "blocks": ("b2", "b6"), "epochs": ("e6", "e24"), "rate": ("r1", "r4"),
           "recipe": ("clipped", "paper")}  # factor -> levels, as in the cell names of cifar_factors


def table(study: str, settings: Optional[Iterable[tuple]] = None,
          read: Callable[[Run], float] = top1) -> dict[int, dict[tuple, float]]:
    """Return a metric by seed and setting, for the seeds with runs of all `settings` (default: all of the study)."""
    runs = {(setting_of(run), run["seed"]): run for run in runs_of(study)}
    wanted = list(settings_of(study) if settings is None else settings)
    return {seed: {setting: read(runs[setting, seed]) for setting in wanted} for seed in dict.fromkeys(
        seed for _, seed in runs) if all((setting, seed) in runs for setting in wanted)}


def unpaired(one: Sequence[float], other: Sequence[float], level: float = 0.95) -> Difference:
    """Return the difference of the means of two groups of runs, with Welch's interval."""
    error = math.sqrt(variance(one) / len(one) + variance(other) / len(other))
    freedom = float(stats.ttest_ind(one, other, equal_var=False).df) if error else 1.0
    scale = max(map(abs, (*one, *other)))
    return student_interval(fmean(one) - fmean(other), error, freedom, min(len(one), len(other)), scale, level)


def _paired(values: Sequence[float], level: float = 0.95) -> Difference:
    return paired_difference(values, [0.0] * len(values), level)


def difference(*cell: Any, of: str = "feature", base: str = "linear") -> Weights:
    return {(*cell, of): 1.0, (*cell, base): -1.0}


def placed(mixer: str, where: str) -> Weights:
    """Return the weights of `feature` in the branches `where` minus `linear` everywhere, for one mixer."""
    return {(mixer, where, "feature"): 1.0, (mixer, "nowhere", "linear"): -1.0}


def apart(one: Weights, other: Weights) -> Weights:
    """Return the weights of `one` minus `other`."""
    return {**one, **{setting: -weight for setting, weight in other.items()}}


def slope(x: Sequence[float], settings: Callable[[int], Weights]) -> Weights:
    """Return the weights of a least-squares slope over x.

    Each weight in `settings(i)` is multiplied by (x_i - mean) / sum (x - mean)^2.
    """
    centred = np.array(x) - np.mean(x)
    shares = centred / (centred ** 2).sum()
    return {setting: float(share) * weight
            for index, share in enumerate(shares) for setting, weight in settings(index).items()}


def rates_slope(rates: Sequence[Union[float, str]]) -> Weights:
    """Return the weights of the slope of feature minus linear, in points per tenfold learning rate."""
    return slope([math.log10(float(rate)) for rate in rates], lambda index: difference(rates[index]))


def switch(first: float, last: float) -> Weights:
    """Return the weights of the sum of `first` * (effect of the first training) and `last` * (effect of the second).

    A setting has two trainings in succession, each linear (L) or orthogonal (O). The effect of a training is the mean
    of the settings with O in this training minus the mean of the settings with L.
    """
    return {(pair, connection): (first * (1 if pair[0] == "O" else -1) + last * (1 if pair[1] == "O" else -1)) / 2
            for pair, connection in (("LL", "linear"), ("LO", "feature"), ("OL", "linear"), ("OO", "feature"))}


def transforms(*skips: str) -> Weights:
    """Return the weights of the mean over some transforms of the stream, minus the identity."""
    return {(20, "identity", "linear"): -1.0, **{(20, skip, "linear"): 1.0 / len(skips) for skip in skips}}


BRANCH4 = transforms("idempotent_cmr", "idempotent_mr", "orthogonal_tp", "orthogonal_random")
OTHERS = transforms("idempotent_cmr", "orthogonal_tp", "orthogonal_random")


def last(key: str) -> Callable[[Run], float]:
    """Return a function that reads a metric of the last epoch: `train_loss`, `eval_loss`, `eval_top1`."""
    return lambda run: run["history"][-1][key]


def at_epoch(epoch: int, key: str = "eval_top1") -> Callable[[Run], float]:
    """Return a function that reads a metric after a number of epochs."""
    return lambda run: run["history"][epoch - 1][key]


def after(share: float) -> Callable[[Run], float]:
    """Return a function that reads the accuracy after a share of the epochs, rounded down, but at least one epoch."""
    return lambda run: at_epoch(max(1, int(share * len(run["history"]))))(run)


def mlp_cosine(*layers: int) -> Callable[[Run], float]:
    """Return a function that reads the mean cosine of x and f over the MLP sites of some blocks, after training."""
    return lambda run: fmean(
        site["cosine"] for site in run["probe"][-1]["sites"] if site["kind"] == "mlp" and site["layer"] in layers)


def late_cosine(run: Run) -> float:
    """Return the mean cosine of x and f over the MLP sites of the last two blocks and the records of the last epoch."""
    rows = [row for row in run["dynamics"] if row["kind"] == "mlp"]
    last, step = max(row["layer"] for row in rows), max(row["step"] for row in rows) * (1 - 1 / run["epochs"])
    return fmean(row["cosine"] for row in rows if row["layer"] >= last - 1 and row["step"] > step)


def learned_theta(run: Run) -> float:
    """Return the mean theta of the MLP sites minus that of the attention sites, at the last recorded step."""
    last = max(row["step"] for row in run["dynamics"])
    theta = {kind: fmean(row["theta"] for row in run["dynamics"] if row["step"] == last and row["kind"] == kind)
             for kind in ("mlp", "attention")}
    return theta["mlp"] - theta["attention"]


def last_branch(study: str) -> Callable[[Run], float]:
    """Return a function that reads |f|² of the last branch at the last recorded step."""
    runs = runs_of(study)
    norms = {(*setting_of(run), run["seed"]): ends["last"]
             for run, ends in zip(runs, published(study).recorded["last_branch"], strict=True)}
    return lambda run: norms[(*setting_of(run), run["seed"])]
