"""Statistics of runs that are paired by seed: confidence intervals and adjusted p-values.

The docstrings of the estimators give the formulas. The distributions are from SciPy.
"""
import math
from dataclasses import dataclass
from typing import Any, Optional, Sequence

import numpy as np
from scipy import stats

ROUNDING = 1e-6  # relative tolerance, above the float32 rounding error of an accuracy


@dataclass(frozen=True)
class Difference:
    """A mean difference with its two-sided confidence interval (95 % by default)."""

    mean: float
    half_width: Optional[float]  # None for a single pair, or if all differences are equal
    pairs: int
    p: Optional[float] = None  # two-sided, for a true mean of zero; None without an interval

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval, or (-inf, inf) if there is no interval."""
        half_width = math.inf if self.half_width is None else self.half_width
        return self.mean - half_width, self.mean + half_width

    @property
    def why_no_interval(self) -> str:
        """The reason why there is no interval, if `half_width` is None."""
        if self.pairs < 2:
            return "one pair"
        return f"{'both' if self.pairs == 2 else f'all {self.pairs}'} pairs have the same difference"

    def text(self, digits: int = 2) -> str:
        """Return mean and interval, or the mean alone.

        >>> Difference(0.12, 0.42, 3).text()
        '+0.12 [-0.30, +0.54]'
        """
        # Round to 9 digits first, so that the rounding error of the machine does not decide the sign: -1e-16 is printed
        # as +0.00. Values that are really negative lose their sign if they are printed as zero: -0.001 is 0.00.
        mean, low, high = (f"{round(value, 9) + 0.0:+.{digits}f}" for value in (self.mean, *self.ends))
        mean, low, high = (text if float(text) else text.removeprefix("-") for text in (mean, low, high))
        return mean if self.half_width is None else f"{mean} [{low}, {high}]"


def paired_difference(values: Sequence[float], baseline: Sequence[float], level: float = 0.95) -> Difference:
    """Return Student's interval of paired differences d = values - baseline.

    The interval is mean(d) ± t(q, n - 1) e with e = s(d) / sqrt(n) and q = (1 + level) / 2. Here t(q, n - 1) is the
    quantile q of Student's distribution with n - 1 degrees of freedom. For T with this distribution,
    p = P(|T| > |mean(d)| / e) (Student, "The probable error of a mean", Biometrika 6, 1908). Accuracies are counts of
    images, so the differences of a few pairs can all be equal by chance, up to `ROUNDING`. Their variance is then
    unknown, and there is neither an interval nor p.

    >>> paired_difference([91.0, 92.0, 93.0], [90.0, 90.0, 90.0]).text()
    '+2.00 [-0.48, +4.48]'
    """
    differences = np.subtract(values, baseline)
    mean, pairs = float(differences.mean()), len(differences)
    if pairs < 2 or stats.sem(differences) <= ROUNDING * np.abs([values, baseline]).max():
        return Difference(mean, None, pairs)
    return of_test(stats.ttest_1samp(differences, 0.0), mean, pairs, level)


def of_test(test: Any, mean: float, pairs: int, level: float = 0.95) -> Difference:
    """Return the difference, its interval and p of one of SciPy's t tests."""
    return Difference(mean, float(test.confidence_interval(level).high) - mean, pairs, float(test.pvalue))


def holm(p: Sequence[Optional[float]]) -> list[Optional[float]]:
    """Return Holm's adjusted p-values: for p_(1) <= ... <= p_(m) the running maximum of min(1, (m - i + 1) p_(i)).

    Rejecting at an adjusted p of at most 0.05 controls the family-wise error rate at 5 % under any dependence (Holm, "A
    simple sequentially rejective multiple test procedure", Scand. J. Stat. 6, 1979). A comparison without p (None)
    counts as p = 1, and its adjusted p is None.

    >>> holm([0.01, 0.04, None])
    [0.03, 0.08, None]
    """
    filled = np.array([1.0 if value is None else value for value in p], dtype=float)
    order = np.argsort(filled, kind="stable")
    scaled = np.minimum(1.0, (len(p) - np.arange(len(p))) * filled[order])
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(scaled)
    return [None if value is None else new for value, new in zip(p, adjusted.tolist(), strict=True)]


def detected(p: Optional[float]) -> bool:
    """Return whether p, in reports Holm's adjusted p, is at most 0.05. A difference without p is not detected.

    >>> detected(0.05), detected(0.06), detected(None)
    (True, False, False)
    """
    return p is not None and p <= 0.05
