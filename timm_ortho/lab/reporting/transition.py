"""Find the paper's Transition Point: the step at which the traces of linear and orthogonal training diverge.

The paper reads this point from its plots (Section 3.5, Figure 3: the point around which the trends of stream norm and
cosine of the two connections begin to diverge). Here two traces are *apart* at a recorded step if two conditions hold:

  * visible: the means over the seeds differ by more than a tenth of the range of both traces over the whole training;
  * reliable: the two-sided 95 % Student interval of the differences of runs with the same seed excludes zero. With one
    pair, or if all differences are equal, there is no interval, and the first condition alone decides. Real-valued
    differences are hardly ever equal by chance, so equal differences count as reliable. The second condition alone is
    not enough: even at step 0, the stream of a deep block is slightly shorter with orthogonal connections, which drop
    the parallel part.

The transition point is the first step at which the traces are apart and from which on they are apart at three quarters
or more of the steps. The last tenth of the training is excluded, because too few steps follow.
"""
import math
from typing import Any, Mapping, Optional, Sequence

import numpy as np
from scipy import stats

Rows = Sequence[Mapping[str, Any]]

VISIBLE = 0.1  # minimal difference, as a share of the range of both traces
MOSTLY = 0.75  # minimal share of steps with traces apart, among the steps from the transition to the end
SEEN = 0.1  # the steps from the transition to the end must be more than this share of all steps


def transition_point(linear: Sequence[Sequence[float]], orthogonal: Sequence[Sequence[float]]) -> Optional[int]:
    """Return the index of the recorded step at which two sets of traces diverge, or None if they do not.

    Args:
        linear: Traces of shape ``[seeds, steps]``. NaN, from a diverged run, counts as not apart.
        orthogonal: Traces of the same seeds in the same order.

    >>> transition_point([[1, 1, 1, 1, 1, 1]], [[1, 1, 2, 3, 4, 5]])
    2
    """
    linear, orthogonal = np.asarray(linear, dtype=float), np.asarray(orthogonal, dtype=float)
    means = np.stack([linear.mean(0), orthogonal.mean(0)])
    finite = means[np.isfinite(means)]
    apart = np.abs(means[1] - means[0]) > VISIBLE * (np.ptp(finite) if finite.size else math.nan)
    if len(linear) > 1:
        interval = stats.t.ppf(0.975, len(linear) - 1) * stats.sem(orthogonal - linear)
        apart &= np.abs(means[1] - means[0]) > interval
    steps = len(apart)
    share_from = np.cumsum(apart[::-1])[::-1] / np.arange(steps, 0, -1)  # from each step on, share of apart steps
    early = np.arange(steps) < steps - max(1, SEEN * steps)
    candidates = np.flatnonzero(apart & early & (share_from >= MOSTLY))
    return int(candidates[0]) if len(candidates) else None


def transition_points(linear: Sequence[Rows], orthogonal: Sequence[Rows], measure: str = "stream") -> list[dict]:
    """Return ``layer``, ``kind``, ``measure`` and the transition's ``step`` (or None) for each site of the model.

    Args:
        linear: For each seed, the rows that :func:`timm_ortho.record` wrote in the linear run.
        orthogonal: The rows of the orthogonal runs, for the same seeds in the same order.
        measure: A column of the rows. The paper uses ``stream`` and ``cosine``.
    """
    runs = [[_traces(rows, measure) for rows in runs] for runs in (linear, orthogonal)]
    points = []
    for layer, kind in dict.fromkeys(site for connection in runs for run in connection for site in run):
        traces = [[run.get((layer, kind), {}) for run in connection] for connection in runs]
        steps = sorted(set.intersection(*(set(trace) for connection in traces for trace in connection)))
        point = transition_point(*([[trace[step] for step in steps] for trace in seeds] for seeds in traces))
        step = None if point is None else steps[point]
        points.append({"layer": layer, "kind": kind, "measure": measure, "step": step})
    return points


def _traces(rows: Rows, measure: str) -> dict[tuple[int, str], dict[int, float]]:
    """Return the values of each site by step. JSON files have null for NaN and infinities; null is read as NaN."""
    traces: dict = {}
    for row in rows:
        value = math.nan if row[measure] is None else row[measure]
        traces.setdefault((row["layer"], row["kind"]), {})[row["step"]] = value
    return traces
