"""What the figures of all reports share: colours, lines with the spread of the seeds, and plain axes.

Colours are Okabe and Ito's, which colour-blind readers tell apart, and near the paper's (red is linear, blue is
orthogonal); line styles and markers differ as well.
"""
import math
from itertools import zip_longest
from statistics import fmean
from typing import Any, Iterable, Optional, Sequence

from matplotlib.axes import Axes

__all__ = ["STYLES", "band", "finite", "label", "style"]

STYLES = {
    "linear": {"color": "#d55e00", "linestyle": "--", "marker": "s"},
    "feature": {"color": "#0072b2", "linestyle": "-", "marker": "o"},
    "global": {"color": "#009e73", "linestyle": "-.", "marker": "^"},
    "hybrid": {"color": "#cc79a7", "linestyle": ":", "marker": "D"},
}
_COLORS = ("#e69f00", "#56b4e9", "#000000", "#cc79a7", "#009e73", "#0072b2", "#d55e00")
_LINES = ("-", "--", "-.", ":")
_MARKERS = "vPX<>d*h"


def style(name: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Colour, line style and marker of a connection, or of the series `name` among `names`."""
    if name in STYLES:
        return STYLES[name]
    index = [other for other in names if other not in STYLES].index(name) if name in names else 0
    return {"color": _COLORS[index % len(_COLORS)], "linestyle": _LINES[index % len(_LINES)],
            "marker": _MARKERS[index % len(_MARKERS)]}


def band(axes: Axes, x: Iterable[float], curves: Sequence[Sequence[float]], name: str, **look: Any) -> None:
    """The mean of the curves and the range of their values; curves may be of different lengths and hold NaN."""
    columns = [[value for value in column if value is not None and math.isfinite(value)]
               for column in zip_longest(*curves)]
    x = list(x)[:len(columns)]
    look = {"label": name, "linewidth": 1.5, **look}
    if len(columns) == 1:
        look["marker"] = "o"  # a line of one point is not to be seen
    (line,) = axes.plot(x, [fmean(column) if column else math.nan for column in columns], **look)
    low, high = ([end(column) if column else math.nan for column in columns] for end in (min, max))
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def label(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(below, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)


def finite(value: Optional[float]) -> bool:
    """False for NaN, for infinities, and for the null that JSON makes of them."""
    return value is not None and math.isfinite(value)
