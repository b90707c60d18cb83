"""Figures of the runs in model_cards/results/studies, and what of them scripts/evidence.py compares.

A number is a contrast: a weighted sum over the settings of a study, seed by seed, with Student's interval of its mean.
So a difference, a slope over the learning rate, a main effect and an interaction are one formula.
"""
import json
import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Callable, Mapping, Optional, Sequence

import numpy as np
from scipy import stats

from timm_ortho.lab.statistics import Difference, paired_difference

RESULTS = Path(__file__).parents[1] / "model_cards" / "results"

Weights = Mapping[tuple, float]  # values of a study's axes and the connection -> weight
Run = Mapping[str, Any]


def results_file(study: str) -> Path:
    return RESULTS / "studies" / study / "results.json"


@cache
def results(study: str) -> Mapping[str, Any]:
    return json.loads(results_file(study).read_text(encoding="utf-8"))


def runs_of(study: str) -> Sequence[Run]:
    return results(study)["runs"]


def settings_of(study: str) -> list[list[Run]]:
    """Runs that differ in nothing but the seed, together."""
    found: dict[tuple, list[Run]] = {}
    for run in runs_of(study):
        found.setdefault((*run["cell"].values(), run["connection"]), []).append(run)
    return list(found.values())


def top1(run: Run) -> float:
    return run["top1"]


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of settings for each seed that all of them have.

    Attributes:
        label: What is compared, in words.
        parts: Folder in `results/studies` and the weights of its settings, others taking no part; of several parts the
            mean.
        read: The figure of a run.
        unit: Of the figure.
        paper: The same sum of the paper's table, by data set.
        bases: The connection that others are compared with, of a sum that has settings of both signs besides, as a
            slope has; empty where all settings of negative weight are compared with.
    """

    label: str
    parts: Sequence[tuple[str, Weights]]
    read: Callable[[Run], float] = top1
    unit: str = "points"
    paper: Mapping[str, float] = field(default_factory=dict)
    bases: str = ""

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """Of each part ``[seeds, settings]``."""
        by_seed = [self._by_seed(*part) for part in self.parts]
        seeds = [seed for seed in by_seed[0] if all(seed in rows for rows in by_seed)]
        return [np.array([[rows[seed][setting] for setting in weights] for seed in seeds])
                for rows, (_, weights) in zip(by_seed, self.parts, strict=True)]

    def _by_seed(self, study: str, weights: Weights) -> dict[int, dict[tuple, float]]:
        rows: dict[int, dict[tuple, float]] = {}
        for run in runs_of(study):
            setting = (*run["cell"].values(), run["connection"])
            if setting in weights:
                rows.setdefault(run["seed"], {})[setting] = self.read(run)
        return {seed: row for seed, row in rows.items() if len(row) == len(weights)}

    @cached_property
    def values(self) -> list[float]:
        """By seed."""
        weights = [np.array(list(weights.values())) for _, weights in self.parts]
        return list(np.mean([table @ of for table, of in zip(self.tables, weights, strict=True)], axis=0))

    @cached_property
    def found(self) -> Difference:
        return paired_difference(self.values, [0.0] * len(self.values))

    @property
    def pooled(self) -> Optional[Difference]:
        """With one variance for all settings once each seed's mean is removed (randomised blocks); None for a single
        setting, which that leaves nothing of."""
        squares = freedom = leverage = 0.0
        for table, (_, weights) in zip(self.tables, self.parts, strict=True):
            rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
            squares += (rest ** 2).sum()
            freedom += (table.shape[0] - 1) * (table.shape[1] - 1)
            leverage += sum(weight ** 2 for weight in weights.values()) / len(table) / len(self.parts) ** 2
        if not freedom:
            return None
        half_width = float(stats.t.ppf(0.975, freedom)) * math.sqrt(squares / freedom * leverage)
        return Difference(self.found.mean, half_width, self.found.pairs)

    def within(self, bound: float) -> bool:
        """Equivalence by two one-sided tests: whether the 90 % interval lies within [-bound, bound]."""
        count = len(self.values)
        half = float(stats.t.ppf(0.95, count - 1)) * stdev(self.values) / math.sqrt(count)
        return abs(self.found.mean) + half <= bound

    @property
    def room(self) -> float:
        """The sum if whatever gains from it were at 100 %, and never below what it is compared with; infinite for sums
        that compare nothing."""
        bases = [[min(weight, 0.0) if self.bases in ("", setting[-1]) else 0.0 for setting, weight in weights.items()]
                 for _, weights in self.parts]
        if self.read is not top1 or not (self.bases or all(math.isclose(sum(base), -1.0) for base in bases)):
            return math.inf
        return fmean((table.mean(0) - 100) @ base for table, base in zip(self.tables, bases, strict=True))

    @property
    def of_paper(self) -> str:
        """`+0.79 to +2.75`, empty where the paper has no such effect."""
        return _span(list(self.paper.values())) if self.paper else ""

    def sees(self) -> str:
        """What the interval says of the paper's effects."""
        if not self.paper:
            return "the paper has no number"
        if min(self.paper.values()) > self.room:
            return f"no, only {self.room:.2f} points are left up to 100 % ({self.of_paper})"
        low, high = self.found.ends
        inside, span = [effect for effect in self.paper.values() if low <= effect <= high], self.of_paper
        if not inside:
            return f"yes, and excludes it ({span})"
        if low <= 0 <= high:
            return f"no ({span})" if len(inside) == len(self.paper) else f"in part ({span})"
        return f"yes, and agrees ({span})"

    def __str__(self) -> str:
        return self.found.text(3 if self.unit != "points" and abs(self.found.mean) < 10 else 2)


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:+.2f}" if len(values) == 1 else f"{low:+.2f} to {high:+.2f}"


def difference(*cell: Any, of: str = "feature", base: str = "linear") -> Weights:
    return {(*cell, of): 1.0, (*cell, base): -1.0}


def placed(mixer: str, where: str) -> Weights:
    """Feature in these branches of each block less linear in all, with this mixer."""
    return {(mixer, where, "feature"): 1.0, (mixer, "nowhere", "linear"): -1.0}


def slope(places: Sequence[float], settings: Callable[[int], Weights]) -> Weights:
    """Least squares over `places`: the settings of the i-th count (x_i - mean) / sum (x - mean)^2."""
    centred = np.array(places) - np.mean(places)
    shares = centred / (centred ** 2).sum()
    return {setting: float(share) * weight
            for index, share in enumerate(shares) for setting, weight in settings(index).items()}


def rates_slope(rates: Sequence[float]) -> Weights:
    """Points a decade by which feature less linear rises with the learning rate."""
    return slope([math.log10(rate) for rate in rates], lambda index: difference(rates[index]))


def switch(first: float, last: float) -> Weights:
    """Main effects of an orthogonal start and an orthogonal end."""
    return {(pair, connection): (first * (1 if pair[0] == "O" else -1) + last * (1 if pair[1] == "O" else -1)) / 2
            for pair, connection in (("LL", "linear"), ("LO", "feature"), ("OL", "linear"), ("OO", "feature"))}


def transforms(*skips: str) -> Weights:
    """The mean of the transforms of the stream less the identity."""
    return {(20, "identity", "linear"): -1.0, **{(20, skip, "linear"): 1.0 / len(skips) for skip in skips}}


BRANCH4 = transforms("idempotent_cmr", "idempotent_mr", "orthogonal_tp", "orthogonal_random")
OTHERS = transforms("idempotent_cmr", "orthogonal_tp", "orthogonal_random")


def mlp_cosine(*layers: int) -> Callable[[Run], float]:
    """Mean cosine of x and f over the MLP sites of some blocks, on one batch after training."""
    return lambda run: fmean(
        site["cosine"] for site in run["probe"][-1]["sites"] if site["kind"] == "mlp" and site["layer"] in layers)


def late_cosine(run: Run) -> float:
    """Mean cosine over the MLP sites of the last two blocks in the last epoch's records."""
    rows = [row for row in run["dynamics"] if row["kind"] == "mlp"]
    last, step = max(row["layer"] for row in rows), max(row["step"] for row in rows) * (1 - 1 / run["epochs"])
    return fmean(row["cosine"] for row in rows if row["layer"] >= last - 1 and row["step"] > step)


def learned_theta(run: Run) -> float:
    """theta of the MLP sites less that of the attention sites, at the last record."""
    last = max(row["step"] for row in run["dynamics"])
    theta = {kind: fmean(row["theta"] for row in run["dynamics"] if row["step"] == last and row["kind"] == kind)
             for kind in ("mlp", "attention")}
    return theta["mlp"] - theta["attention"]


def last_branch(study: str) -> Callable[[Run], float]:
    """|f|² of the last branch at the last record, which the report found in the whole records."""
    runs = runs_of(study)
    found = {(*run["cell"].values(), run["connection"], run["seed"]): ends["last"]
             for run, ends in zip(runs, results(study)["recorded"]["last_branch"], strict=True)}
    return lambda run: found[(*run["cell"].values(), run["connection"], run["seed"])]
