"""Checks of arguments that several files share: a ValueError says what was given and what is allowed."""
import difflib
import math
from numbers import Real
from typing import Collection

__all__ = ["check_eps", "check_prob", "known_name"]


def check_eps(eps: float) -> None:
    """Raise ValueError unless ``eps`` is a positive, finite number."""
    if not (isinstance(eps, Real) and 0.0 < eps < math.inf):  # comparisons: a compiler can follow these with any eps
        raise ValueError(f"eps must be positive and finite, got {eps!r}")


def check_prob(prob: float) -> None:
    """Raise ValueError unless ``prob`` is a probability."""
    if not (isinstance(prob, Real) and 0.0 <= prob <= 1.0):
        raise ValueError(f"prob must be in [0, 1], got {prob!r}")


def known_name(kind: str, name: str, known: Collection[str]) -> str:
    """``name`` if it is one of ``known``, otherwise a ValueError that lists them and suggests the nearest."""
    if isinstance(name, str) and name in known:
        return name
    nearest = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown {kind} {name!r}, known are {', '.join(repr(k) for k in known)}{hint}")
