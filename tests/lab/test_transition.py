"""reporting/transition.py: the step from which two connections' traces (metrics by step) differ, if any."""
import math

import numpy as np
import pytest

from timm_ortho.lab.reporting.transition import transition_point, transition_points

STEPS = 200


def rise(point, slope, seeds=3, noise=0.0, seed=0):
    """Return one trace per seed, [seeds, steps], that approaches 100 and has an additional slope after step `point`."""
    steps = np.arange(STEPS)
    trace = 100 * (1 - np.exp(-steps / 10)) + slope * np.clip(steps - point, 0, None)
    return trace + noise * np.random.default_rng(seed).standard_normal((seeds, STEPS))


@pytest.mark.parametrize(("point", "noise", "seeds", "sign"), [
    (20, 0.0, 3, 1), (120, 0.0, 1, -1), (20, 2.0, 5, -1), (60, 2.0, 3, 1)])
def test_a_known_point(point, noise, seeds, sign):
    linear, orthogonal = (rise(point, slope * sign, seeds, noise, i) for i, slope in enumerate((-1.0, 1.0)))
    found = transition_point(linear, orthogonal)
    height = np.ptp(np.stack([linear.mean(0), orthogonal.mean(0)]))
    visible = point + 0.1 * height / 2  # the traces' distance, 2 per step, is then height / 10
    assert found == pytest.approx(visible, abs=1.01 if noise == 0 else 5)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("seeds", "noise"), [(2, 1.0), (5, 30.0)])
def test_noise_has_no_transition(seed, seeds, noise):
    assert transition_point(rise(0, 0, seeds, noise, seed), rise(0, 0, seeds, noise, seed + 1000)) is None


def test_flat_traces_have_no_transition():
    assert transition_point(np.ones((3, STEPS)), np.ones((3, STEPS))) is None


AT = np.arange(STEPS)
DIFFERENCES = {
    "a small offset of every seed, 5 % of the traces' height": (5, None),
    "a large offset": (20, 0),
    "an offset whose sign depends on the seed": (np.array([[60.0], [-50.0], [80.0]]), None),
    "a later crossing does not hide the transition": (40 * np.cos(AT * np.pi / STEPS), 0),  # from 40 through 0 to -40
    "a temporary difference": (np.where((AT > 40) & (AT < 80), 50.0, 0.0), None),
    "the last steps alone": (np.where(AT >= 185, 50.0, 0.0), None),
    "the last steps": (np.where(AT >= 170, 50.0, 0.0), 170),
}


@pytest.mark.parametrize(("difference", "step"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_differences_from_one_trace(difference, step):
    assert transition_point(rise(0, 0), rise(0, 0) + difference) == step


def test_a_single_pair_has_no_variance():
    assert transition_point(rise(0, 0, seeds=1), rise(0, 0, seeds=1) + 60) == 0


def test_runs_are_paired_by_seed():
    base = rise(50, 0) + np.array([[0.0], [200.0], [400.0]])  # seeds differ more than connections do
    assert transition_point(base, base + 4 * np.clip(np.arange(STEPS) - 50, 0, None)) == pytest.approx(69, abs=5)


def test_a_run_that_diverged():
    linear, orthogonal = rise(20, -1.0), rise(20, 1.0)
    orthogonal[0, 100:] = math.nan
    assert transition_point(linear, orthogonal) is None
    orthogonal[0, :] = math.nan
    assert transition_point(linear, orthogonal) is None


def rows(traces_by_site, every=50):
    return [{"step": index * every, "layer": layer, "kind": kind, "stream": value, "cosine": 0.0}
            for (layer, kind), trace in traces_by_site.items() for index, value in enumerate(trace)]


def test_every_site_has_its_own_transition():
    linear = [rows({(0, "mlp"): trace, (1, "attention"): other})
              for trace, other in zip(rise(20, -1.0), rise(0, 0), strict=True)]
    orthogonal = [rows({(0, "mlp"): trace, (1, "attention"): other})
                  for trace, other in zip(rise(20, 1.0), rise(0, 0), strict=True)]
    orthogonal[0] = orthogonal[0][:-1]  # one run lacks the last step of block 1
    first, second = transition_points(linear, orthogonal)
    assert first == {"layer": 0, "kind": "mlp", "measure": "stream", "step": first["step"]}
    assert first["step"] == pytest.approx(50 * (20 + 0.05 * np.ptp([rise(20, -1), rise(20, 1)])), abs=100)
    assert second == {"layer": 1, "kind": "attention", "measure": "stream", "step": None}
    assert [point["step"] for point in transition_points(linear, orthogonal, "cosine")] == [None, None]


def test_null_counts_as_nan():
    linear, orthogonal = [5.0] * 35, [None] * 4 + [14.0] * 31
    point, = transition_points([rows({(0, "mlp"): linear})], [rows({(0, "mlp"): orthogonal})])
    assert point["step"] == 200


def test_runs_without_a_common_step_have_no_transition():
    """A user's own run of train.py may record different steps, or no step of a site."""
    late = [{**row, "step": row["step"] + 1} for row in rows({(0, "mlp"): [1.0, 2.0]})]
    for linear, other in (([rows({(0, "mlp"): [1.0, 2.0]})], [late]), ([late] * 2, [rows({(1, "mlp"): [1.0]})] * 2)):
        assert {point["step"] for point in transition_points(linear, other)} == {None}
