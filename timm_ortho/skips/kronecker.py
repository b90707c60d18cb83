"""Make the matrices whose Kronecker products are the orthogonal skip transforms. Each matrix is a list of rows."""
import math
import random
from statistics import NormalDist
from typing import List

import torch
from sympy import factorint

Matrix = List[List[float]]

_FUSED = (8, 16, 32, 64)  # limits for the number of rows of a product of adjacent factors


def hartley(p: int) -> Matrix:
    """Return the p x p Hartley matrix with its rows in reverse order. For p = 2 it is Eq. 26 of Wang et al. (2017)."""
    def cas(turns: int) -> float:
        angle = 2 * math.pi * (turns % p) / p
        return math.cos(angle) + math.sin(angle)

    return [[cas((p - 1 - j) * k) / math.sqrt(p) for k in range(p)] for j in range(p)]


def rotation(p: int, draw: random.Random) -> Matrix:
    """Draw a rotation uniformly from SO(p).

    For p > 2 the rotation is Q of the QR decomposition of normal draws, with column i multiplied by the sign of R_ii.
    If its determinant is -1, the first column is negated.
    """
    if p == 2:
        angle = 2 * math.pi * draw.random()
        return [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    normal = NormalDist()
    entries = [[normal.inv_cdf(draw.random() or 0.5) for _ in range(p)] for _ in range(p)]  # inv_cdf rejects 0.0
    q, r = torch.linalg.qr(torch.tensor(entries, dtype=torch.float64, device="cpu"))
    q = q * r.diagonal().sign()
    if torch.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]
    return q.tolist()


def factors(width: int, seed: str = "") -> List[Matrix]:
    """Return matrices whose Kronecker product acts on ``width`` channels.

    There is one factor per prime factor of ``width``: a Hartley matrix or, if a seed is set, a random rotation.
    Adjacent factors are multiplied, up to the lowest limit of rows in ``_FUSED`` that gives the fewest matrices.
    """
    draw = random.Random(seed)  # random() draws the same numbers on every machine and in every release of Python
    made = [rotation(p, draw) if seed else hartley(p) for p in sorted(factorint(width, multiple=True), reverse=True)]
    return min((_grouped(made, most) for most in _FUSED), key=len)


def _grouped(factors: List[Matrix], most: int) -> List[Matrix]:
    groups: List[Matrix] = []
    for factor in factors:
        if groups and len(groups[-1]) * len(factor) <= most:
            groups[-1] = [[a * b for a in upper for b in lower] for upper in groups[-1] for lower in factor]
        else:
            groups.append(factor)
    return groups
