"""What runs with the same seeds say about a difference: paired intervals, a pooled analysis, adjusted p values.

The distributions are SciPy's; the formulas stand at each function.
"""
import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Hashable, Mapping, Optional, Sequence

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Difference:
    """A mean difference with its two-sided 95 % interval."""

    mean: float
    half_width: Optional[float]  # None for a single pair, which has no interval
    pairs: int
    p: Optional[float] = None  # two-sided, of the hypothesis that the true mean is zero

    @property
    def ends(self) -> tuple[float, float]:
        return self.mean - (self.half_width or 0.0), self.mean + (self.half_width or 0.0)

    def text(self, digits: int = 2) -> str:
        """`+0.12 [-0.30, +0.54]`; a single pair has no interval."""
        # another machine's sums differ in the last bits: -1e-16 is a zero, and a half is a half; -0.001 remains -0.00
        mean, low, high = (f"{round(value, 9) + 0.0:+.{digits}f}" for value in (self.mean, *self.ends))
        return mean if self.half_width is None else f"{mean} [{low}, {high}]"

    def __str__(self) -> str:
        return self.text() if self.half_width is not None else f"{self.text()} (one pair, no interval)"


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Student's paired t: d = values - baseline, mean(d) ± t(0.975, n - 1) s(d) / sqrt(n), p = P(|T| > |t|).

    Student, "The probable error of a mean", Biometrika 6 (1908). Differences that are all the same have an interval of
    no width, and p is 0, or 1 where they are zero.
    """
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    count, mean = len(differences), fmean(differences)
    if count < 2:
        return Difference(mean, None, count)
    return _interval(mean, stdev(differences) / math.sqrt(count), count - 1, count)


def _interval(mean: float, error: float, freedom: int, pairs: int) -> Difference:
    half_width = float(stats.t.ppf(0.975, freedom)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Difference(mean, half_width, pairs, p)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p values: for p_(1) <= ... <= p_(m) the running maximum of min(1, (m - i + 1) p_(i)).

    Rejecting where the adjusted p is at most 0.05 keeps the chance of any false rejection among the m at 5 %, however
    they depend on each other. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Stat. 6
    (1979).
    """
    order = np.argsort(p, kind="stable")
    scaled = np.minimum(1.0, (len(p) - np.arange(len(p))) * np.asarray(p, dtype=float)[order])
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted.tolist()


Block = Mapping[Hashable, Mapping[int, float]]  # treatment -> seed -> value


def pooled_differences(
        blocks: Sequence[Block], pairs: Sequence[tuple[int, Hashable, Hashable]]) -> list[Optional[Difference]]:
    """Differences with one error variance for all cells of a study.

    In each cell c: y_cts = treatment_ct + seed_cs + error, the error of variance sigma^2 in all cells, fitted by least
    squares. s^2 = sum of squared residuals / f, both summed over the cells, with f = observations - rank; a difference
    c'b has the interval c'b ± t(0.975, f) sqrt(s^2 c'(X'X)^+ c). This is the analysis of randomised blocks (Cochran and
    Cox, "Experimental Designs", 1957, chapter 4); cells may lack values.

    It has more degrees of freedom than paired t, and is right only where the cells scatter alike.

    Args:
        blocks: The values of each cell.
        pairs: Cell, treatment and baseline of each difference.

    Returns:
        In the order of `pairs`; None without degrees of freedom, or where the two have no seed in common.
    """
    fits = [_fit(block) for block in blocks]
    freedom = sum(fit[3] for fit in fits)
    if not freedom:
        return [None] * len(pairs)
    variance = sum(fit[2] for fit in fits) / freedom
    found: list[Optional[Difference]] = []
    for cell, treatment, baseline in pairs:
        coefficients, inverse, _, _, columns = fits[cell]
        common = len(blocks[cell][treatment].keys() & blocks[cell][baseline].keys())
        if not common:
            found.append(None)
            continue
        contrast = np.zeros(len(coefficients))
        contrast[columns[treatment]], contrast[columns[baseline]] = 1.0, -1.0
        error = math.sqrt(variance * float(contrast @ inverse @ contrast))
        found.append(_interval(float(contrast @ coefficients), error, freedom, common))
    return found


def _fit(block: Block) -> tuple[np.ndarray, np.ndarray, float, int, dict[Hashable, int]]:
    """Coefficients, (X'X)^+, sum of squared residuals, degrees of freedom, and the treatments' columns."""
    seeds = sorted({seed for values in block.values() for seed in values})
    columns = {treatment: index for index, treatment in enumerate(block)}
    rows = [(columns[treatment], len(columns) + seeds.index(seed), value)
            for treatment, values in block.items() for seed, value in values.items()]
    design = np.zeros((len(rows), len(columns) + len(seeds)))
    for row, (treatment, seed, _) in enumerate(rows):
        design[row, [treatment, seed]] = 1.0
    observed = np.array([value for *_, value in rows])
    inverse = np.linalg.pinv(design.T @ design, hermitian=True)
    coefficients = inverse @ design.T @ observed
    freedom = len(rows) - int(np.linalg.matrix_rank(design)) if rows else 0
    return coefficients, inverse, float(np.sum((observed - design @ coefficients) ** 2)), freedom, columns


def reading(difference: Optional[Difference]) -> str:
    """An interval in words; what holds zero is not told apart."""
    if difference is None:
        return "no pair of finite runs"
    if difference.half_width is None:
        return "one pair: no interval"
    if abs(difference.mean) <= difference.half_width:
        return "not told apart"
    return "higher" if difference.mean > 0 else "lower"


def sees(difference: Optional[Difference], paper: Mapping[str, float], digits: int = 2) -> str:
    """What the runs could have seen: the half-width, and what the interval says of the paper's effects by data set."""
    if difference is None or difference.half_width is None:
        return "–"
    low, high = difference.ends
    inside, outside = [], []
    for name, effect in paper.items():
        said = f"{effect:+.{digits}f} ({name})" if name else f"{effect:+.{digits}f}"
        (inside if low <= effect <= high else outside).append(said)
    parts = [f"± {difference.half_width:.{digits}f}"]
    if outside:
        parts.append(f"excludes the paper's {', '.join(outside)}")
    if inside and low <= 0 <= high:
        parts.append(f"cannot tell the paper's {', '.join(inside)} from zero")
    elif inside:
        parts.append(f"agrees with the paper's {', '.join(inside)}")
    return "; ".join(parts)
