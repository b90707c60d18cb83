"""Where the traces of linear and orthogonal training part: the paper's Transition Point, as a rule.

The paper describes it (Section 3.5, Figure 3: the point around which the trends of stream norm and cosine for the two
connections begin to diverge) and reads it off its figures. Here the two are *apart* at a recorded step if both hold:

  * visibly: the means over the seeds differ by more than a tenth of the range that both take over the whole training;
  * reliably: zero is outside the two-sided 95 % Student interval of the differences of runs with the same seed. Without
    an interval, for a single pair or for differences that are all equal, the first rule decides: traces are real
    numbers, so differences are equal only where they do not depend on the seed. The second rule alone is not enough:
    with the same initial weights the stream of a deep block is a little shorter without the parallel parts from step 0.

The transition point is the first step at which they are apart and from which on they are at three of four recorded
steps. What begins in the last tenth of the training is none: too little has been seen of it.
"""
import math
from typing import Any, Mapping, Optional, Sequence

import numpy as np
from scipy import stats

Rows = Sequence[Mapping[str, Any]]

VISIBLE = 0.1  # of the range of both traces
MOSTLY = 0.75  # of the steps from the transition on
SEEN = 0.1  # of all steps, after the transition


def transition_point(linear: Sequence[Sequence[float]], orthogonal: Sequence[Sequence[float]]) -> Optional[int]:
    """Index of the recorded step at which two sets of traces part, None if they do not.

    Both are ``[seeds, steps]`` of the same seeds in the same order, or it is a ValueError. NaN, of a run that diverged,
    counts as not apart.
    """
    linear, orthogonal = np.asarray(linear, dtype=float), np.asarray(orthogonal, dtype=float)
    if linear.ndim != 2 or linear.shape != orthogonal.shape:
        raise ValueError(
            f"traces must be [seeds, steps] and the same for both connections, got {list(linear.shape)} and "
            f"{list(orthogonal.shape)}")
    means = np.stack([linear.mean(0), orthogonal.mean(0)])
    finite = means[np.isfinite(means)]
    apart = np.abs(means[1] - means[0]) > VISIBLE * (np.ptp(finite) if finite.size else math.nan)
    if len(linear) > 1:
        interval = stats.t.ppf(0.975, len(linear) - 1) * stats.sem(orthogonal - linear)
        apart &= np.abs(means[1] - means[0]) > interval
    steps = len(apart)
    share_from = np.cumsum(apart[::-1])[::-1] / np.arange(steps, 0, -1)  # of the steps from each one on
    early = np.arange(steps) < steps - max(1, SEEN * steps)
    found = np.flatnonzero(apart & early & (share_from >= MOSTLY))
    return int(found[0]) if len(found) else None


def transition_points(linear: Sequence[Rows], orthogonal: Sequence[Rows], measure: str = "stream") -> list[dict]:
    """The transition point of each site: ``layer``, ``kind``, ``measure`` and ``step``, None where they do not part.

    Args:
        linear: For each seed the rows of a run with linear connections, as :func:`timm_ortho.record` gives them.
        orthogonal: For the same seeds in the same order those of runs with orthogonal ones.
        measure: A column of the rows: ``stream`` and ``cosine`` are the paper's.

    Raises:
        ValueError: The runs have not the same sites, there is no such column, or no step that all have recorded.
    """
    runs = [[_traces(rows, measure) for rows in runs] for runs in (linear, orthogonal)]
    points = []
    for layer, kind in dict.fromkeys(site for connection in runs for run in connection for site in run):
        traces = [[run.get((layer, kind), {}) for run in connection] for connection in runs]
        steps = sorted(set.intersection(*(set(trace) for connection in traces for trace in connection)))
        if not steps:
            raise ValueError(f"the runs have no step in common at which all recorded {kind} of block {layer}")
        point = transition_point(*([[trace[step] for step in steps] for trace in seeds] for seeds in traces))
        step = None if point is None else steps[point]
        points.append({"layer": layer, "kind": kind, "measure": measure, "step": step})
    return points


def _traces(rows: Rows, measure: str) -> dict[tuple[int, str], dict[int, float]]:
    """By site the values by step; a value that JSON does not have is null there and NaN here."""
    traces: dict = {}
    for row in rows:
        if measure not in row:
            raise ValueError(f"there is no column {measure!r} in the rows, only {', '.join(row)}")
        value = math.nan if row[measure] is None else row[measure]
        traces.setdefault((row["layer"], row["kind"]), {})[row["step"]] = value
    return traces
