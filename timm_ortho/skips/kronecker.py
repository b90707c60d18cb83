"""Factors of the Kronecker products that :mod:`timm_ortho.skips` applies to a stream, as lists of rows."""
import math
import random
from statistics import NormalDist
from typing import List

import torch

Matrix = List[List[float]]

_FUSED = (8, 16, 32, 64)  # most rows of a matrix that several steps of a butterfly are fused into


def _primes(width: int) -> List[int]:
    """The prime factors, the largest first."""
    found, p = [], 2
    while p * p <= width:
        while width % p == 0:
            found.append(p)
            width //= p
        p += 1
    return sorted([*found, width] if width > 1 else found, reverse=True)


def hartley(p: int) -> Matrix:
    """Hartley's matrix with its rows in reverse order: Eq. 26 of Wang et al. (2017) for p = 2."""
    def cas(turns: int) -> float:
        angle = 2 * math.pi * (turns % p) / p
        return math.cos(angle) + math.sin(angle)

    return [[cas((p - 1 - j) * k) / math.sqrt(p) for k in range(p)] for j in range(p)]


def rotation(p: int, draw: random.Random) -> Matrix:
    """Uniform over SO(p): an angle, or the Q of a normal matrix's QR decomposition, with the signs that make it so."""
    if p == 2:
        angle = 2 * math.pi * draw.random()
        return [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    normal = NormalDist()
    entries = [[normal.inv_cdf(draw.random() or 0.5) for _ in range(p)] for _ in range(p)]  # 0.0 has no quantile
    q, r = torch.linalg.qr(torch.tensor(entries, dtype=torch.float64, device="cpu"))
    q = q * r.diagonal().sign()
    if torch.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]
    return q.tolist()


def factors(width: int, seed: str = "") -> List[Matrix]:
    """A factor for each prime of the width, Hartley's matrices or, with a seed, rotations drawn from it.

    Neighbours are multiplied out: as few matrices as ``_FUSED`` allows, and of those the smallest.
    """
    draw = random.Random(seed)  # Python's own: its random() gives the same numbers on every machine, in every release
    made = [rotation(p, draw) if seed else hartley(p) for p in _primes(width)]
    return min((_grouped(made, most) for most in _FUSED), key=len)


def _grouped(factors: List[Matrix], most: int) -> List[Matrix]:
    groups: List[Matrix] = []
    for factor in factors:
        if groups and len(groups[-1]) * len(factor) <= most:
            groups[-1] = [[a * b for a in upper for b in lower] for upper in groups[-1] for lower in factor]
        else:
            groups.append(factor)
    return groups
