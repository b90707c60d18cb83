"""reporting/statistics.py: comparison with SciPy, explicit formulas, and examples from the literature."""
import math

import numpy as np
import pytest
import scipy.stats

from timm_ortho.lab.reporting.statistics import Difference, holm, paired_difference

LINEAR, FEATURE, GLOBAL = [90.0, 91.0, 92.5, 90.2], [90.5, 93.0, 93.5, 90.1], [89.0, 90.5, 92.0, 91.0]


@pytest.mark.parametrize("seeds", [2, 3, 4])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_paired_difference_is_scipys(seeds, level):
    for values in (FEATURE, GLOBAL):
        truth = scipy.stats.ttest_rel(values[:seeds], LINEAR[:seeds])
        found = paired_difference(values[:seeds], LINEAR[:seeds], level)
        assert found.p == pytest.approx(truth.pvalue)
        assert found.ends == pytest.approx(tuple(truth.confidence_interval(level)))


def test_one_pair_has_no_interval():
    assert paired_difference([2.0], [1.0]) == Difference(1.0, None, 1, None)
    found = paired_difference([2.0], [1.0])
    assert (found.text(), found.why_no_interval) == ("+1.00", "one pair")


def test_the_sign_of_zero_does_not_depend_on_rounding():
    """A sum that should be zero is 1e-16 on some machines and -1e-16 on others."""
    assert Difference(-1e-16, 0.001, 3).text() == "+0.00 [0.00, +0.00]"
    assert Difference(-0.025 - 1e-14, 0.1, 3).text() == Difference(-0.025 + 1e-14, 0.1, 3).text()
    assert Difference(0.003, 0.0034, 3).text() == "+0.00 [0.00, +0.01]"  # no sign: the interval contains zero


@pytest.mark.parametrize(("shift", "seeds"), [(-1.0, 2), (0.0, 3), (0.1, 17)])
def test_without_variance_there_is_no_interval_and_no_verdict(shift, seeds):
    """Two equally good networks can differ by the same number of test images for each seed."""
    baseline = [90.0 + seed / 3 for seed in range(seeds)]
    found = paired_difference([value + shift for value in baseline], baseline)  # equal differences, up to rounding
    assert (found.mean, found.half_width, found.p) == (pytest.approx(shift), None, None)
    assert found.ends == (-math.inf, math.inf)
    pairs = "both pairs" if seeds == 2 else f"all {seeds} pairs"
    assert (found.text(), found.why_no_interval) == (f"{shift:+.2f}", f"{pairs} have the same difference")


def test_float32_accuracies_of_the_same_images_are_equal():
    """With both seeds, the networks differ by one image. Float32 rounding makes the two differences unequal."""
    def top1(correct):
        return [float(np.mean([np.float32(count) * np.float32(100) / np.float32(12) for count in batches]))
                for batches in correct]

    values, baseline = top1([[11, 11, 8], [5, 7, 11]]), top1([[10, 11, 8], [5, 7, 10]])
    assert len({value - base for value, base in zip(values, baseline, strict=True)}) == 2
    assert paired_difference(values, baseline).half_width is None
    assert paired_difference([97.221, 98.33], [97.22, 98.33]).half_width > 0  # 0.001 % is one image of 100,000


def test_holm():
    """A worked example from encyclopaedias: hypotheses 4 and 1 are rejected at 5 %, 3 and 2 are not."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_holm_counts_comparisons_without_p():
    assert holm([None, 0.01, None, 0.04]) == [None, pytest.approx(0.04), None, pytest.approx(0.12)]
    assert holm([None, None]) == [None, None]
