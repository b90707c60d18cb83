"""reporting/statistics.py: comparison with SciPy, explicit formulas, and examples from the literature."""
import math
import statistics

import numpy as np
import pytest
import scipy.stats

from timm_ortho.lab.reporting.statistics import (
    Difference,
    holm,
    paired_difference,
    pooled_contrasts,
    reach,
    reading,
    sees,
)

LINEAR, FEATURE, GLOBAL = [90.0, 91.0, 92.5, 90.2], [90.5, 93.0, 93.5, 90.1], [89.0, 90.5, 92.0, 91.0]


def by_seed(*columns):
    return [dict(enumerate(column)) for column in columns]


def pooled_differences(blocks, pairs):
    """Return treatment minus baseline in a cell for each triple (cell, treatment, baseline)."""
    return pooled_contrasts(blocks, [{(cell, of): 1.0, (cell, base): -1.0} for cell, of, base in pairs])


def test_one_pair_has_no_interval():
    assert paired_difference([2.0], [1.0]) == Difference(1.0, None, 1, None)
    assert str(paired_difference([2.0], [1.0])) == "+1.00 (one pair, no interval)"


def test_the_sign_of_zero_does_not_depend_on_rounding():
    """A sum that should be zero is 1e-16 on some machines and -1e-16 on others."""
    assert str(Difference(-1e-16, 0.001, 3)) == "+0.00 [0.00, +0.00]"
    assert str(Difference(-0.025 - 1e-14, 0.1, 3)) == str(Difference(-0.025 + 1e-14, 0.1, 3))
    assert str(Difference(0.003, 0.0034, 3)) == "+0.00 [0.00, +0.01]"  # no sign: the interval contains zero


@pytest.mark.parametrize("shift", [-1.0, 0.0, 0.1])
@pytest.mark.parametrize("seeds", [2, 3, 17])
def test_without_variance_there_is_no_interval_and_no_verdict(shift, seeds):
    """Two equally good networks can differ by the same number of test images for each seed."""
    baseline = [90.0 + seed / 3 for seed in range(seeds)]
    found = paired_difference([value + shift for value in baseline], baseline)  # equal differences, up to rounding
    assert (found.mean, found.half_width, found.p) == (pytest.approx(shift), None, None)
    assert found.ends == (-math.inf, math.inf)
    pairs = "both pairs" if seeds == 2 else f"all {seeds} pairs"
    assert reading(found) == f"no interval: {pairs} have the same difference"
    assert sees(found, {"": 1.0}) == "–"
    assert str(found) == f"{shift:+.2f} ({pairs} have the same difference, no interval)"


def test_float32_accuracies_of_the_same_images_are_equal():
    """With both seeds, the networks differ by one image. Float32 rounding makes the two differences unequal."""
    def top1(correct):
        return [float(np.mean([np.float32(count) * np.float32(100) / np.float32(12) for count in batches]))
                for batches in correct]

    values, baseline = top1([[11, 11, 8], [5, 7, 11]]), top1([[10, 11, 8], [5, 7, 10]])
    assert len({value - base for value, base in zip(values, baseline, strict=True)}) == 2
    assert paired_difference(values, baseline).half_width is None
    assert paired_difference([97.221, 98.33], [97.22, 98.33]).half_width > 0  # 0.001 % is one image of 100,000


def test_reach():
    """`reach` is the half-width divided by the standard deviation of the differences. It is about 9 for two pairs."""
    assert reach(2) == pytest.approx(8.98, abs=0.01)
    assert reach(3) == pytest.approx(2.48, abs=0.01)
    differences = [1.0, 2.0, 4.0]
    assert paired_difference(differences, [0.0] * 3).half_width == pytest.approx(
        reach(3) * statistics.stdev(differences))


def test_holm():
    """A worked example from encyclopaedias: hypotheses 4 and 1 are rejected at 5 %, 3 and 2 are not."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_holm_counts_comparisons_without_p():
    assert holm([None, 0.01, None, 0.04]) == [None, pytest.approx(0.04), None, pytest.approx(0.12)]
    assert holm([None, None]) == [None, None]


def test_pooled_is_the_analysis_of_randomised_blocks():
    """Connection t = 1 ... T with seed s = 1 ... S has the residual y_ts - mean_t - mean_s + mean.

    The residuals have (T - 1)(S - 1) degrees of freedom.
    """
    table = np.array([LINEAR, FEATURE, GLOBAL])
    residuals = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    half = scipy.stats.t.ppf(0.975, 6) * math.sqrt((residuals ** 2).sum() / 6 * 2 / 4)
    block = dict(zip("LFG", by_seed(*table), strict=True))
    found, = pooled_differences([block], [(0, "F", "L")])
    assert found.mean == pytest.approx(statistics.fmean(FEATURE) - statistics.fmean(LINEAR))
    assert found.half_width == pytest.approx(half)
    assert found.p == pytest.approx(2 * scipy.stats.t.sf(
        found.mean / (half / scipy.stats.t.ppf(0.975, 6)), 6))


def test_pooled_over_cells_adds_their_squares():
    cells = [dict(zip("LF", by_seed(LINEAR, side), strict=True)) for side in (FEATURE, GLOBAL)]
    variance = sum((len(LINEAR) - 1) * statistics.variance(a - b for a, b in zip(side, LINEAR, strict=True)) / 2
                   for side in (FEATURE, GLOBAL)) / 6
    found = pooled_differences(cells, [(0, "F", "L"), (1, "F", "L")])
    half = scipy.stats.t.ppf(0.975, 6) * math.sqrt(variance * 2 / 4)
    assert [difference.half_width for difference in found] == pytest.approx([half, half])


def test_pooled_with_a_missing_value_is_least_squares():
    block = dict(zip("LFG", by_seed(LINEAR, FEATURE, GLOBAL), strict=True))
    del block["F"][2]
    rows = [(t, s, y) for t, values in enumerate(block.values()) for s, y in values.items()]
    design = np.array([[t == 1, t == 2, *(s == seed for seed in range(4))] for t, s, _ in rows], dtype=float)
    b, squares, rank, _ = np.linalg.lstsq(design, np.array([y for *_, y in rows]), rcond=None)
    error = math.sqrt(squares[0] / (len(rows) - rank) * np.linalg.inv(design.T @ design)[0, 0])
    found, = pooled_differences([block], [(0, "F", "L")])
    assert (found.mean, found.pairs) == (pytest.approx(b[0]), 3)
    assert found.half_width == pytest.approx(scipy.stats.t.ppf(0.975, len(rows) - rank) * error)


def test_pooled_needs_degrees_of_freedom_and_pairs():
    assert pooled_differences([{"L": {0: 1.0}, "F": {0: 2.0}}], [(0, "F", "L")]) == [None]
    apart = {"L": {0: 1.0, 1: 2.0}, "F": {2: 3.0, 3: 4.0}, "G": {0: 1.0, 1: 2.5}}
    assert pooled_differences([apart], [(0, "F", "L")]) == [None]
    assert pooled_differences([{"L": {}, "F": {}}], []) == []


def test_pooled_without_residuals_has_no_interval():
    block = dict(zip("LF", by_seed([90.1, 91.3], [89.1, 90.3]), strict=True))  # F - L = -1 for each seed
    found, = pooled_differences([block], [(0, "F", "L")])
    assert (found.mean, found.half_width, found.p, found.pairs) == (pytest.approx(-1.0), None, None, 2)
    other = dict(zip("LF", by_seed(LINEAR, FEATURE), strict=True))  # has residuals, so there is a pooled variance
    found = pooled_differences([block, other], [(0, "F", "L"), (1, "F", "L")])
    assert all(difference.half_width > 0 for difference in found)


@pytest.mark.parametrize(("difference", "said", "effects", "seen"), [
    (None, "no pair of finite runs", {"": 1.0}, "–"),
    (Difference(1.0, None, 1), "no interval: one pair", {"": 1.0}, "–"),
    (Difference(0.2, 0.5, 3), "not detected", {}, "± 0.50"),
    (Difference(0.2, 0.5, 3), "not detected", {"": 0.3}, "± 0.50; contains zero and the paper's +0.30"),
    (Difference(0.2, 0.5, 3), "not detected", {"": 6.82}, "± 0.50; excludes the paper's +6.82"),
    (Difference(1.0, 0.5, 3), "higher", {"A": 0.7, "B": 3.0},
     "± 0.50; excludes the paper's +3.00 (B); contains the paper's +0.70 (A)"),
    (Difference(-1.0, 0.5, 3), "lower", {"": 1.0}, "± 0.50; excludes the paper's +1.00"),
])
def test_an_interval_in_words(difference, said, effects, seen):
    assert reading(difference) == said
    assert sees(difference, effects) == seen
