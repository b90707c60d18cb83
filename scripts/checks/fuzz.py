"""Compare `residual_update` with float64 on random inputs, for a limited time.

    python -m scripts.checks.fuzz --device cuda --seconds 40
    TRITON_INTERPRET=1 python -m scripts.checks.fuzz --device cpu --backend triton
    python -m scripts.checks.fuzz --device cuda --case 17    # one case, as a failure names it

A case is a seed. From it follow the shape (2 to 5 axes), the axes of the projection, and the dtypes, memory layouts and
values of x, f and the gradient of y. Weights are floats or 0-d tensors, and some cases have a mask. The result and all
gradients are checked. tests/helpers/parity.py defines the bound of their errors. A warning counts as a failure, because
the backend `auto` warns when it replaces a kernel. The exit status is 1 if a case fails or no case was run.

A CUDA error, such as a failed device-side assertion, ends the process: the device is unusable afterwards.
"""
import argparse
import math
import random
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from timm_ortho.functional import BACKENDS, choose_backend, residual_update

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from helpers.parity import problem_of_update

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("contiguous", "channels-last", "transposed", "expanded", "sliced", "unaligned")
ELEMENTS = {"cuda": 2_000_000, "cpu": 20_000, "interpreter": 1_500}  # most elements of a tensor
EPS = 1e-3  # so large that a missing eps exceeds the bound


@dataclass(frozen=True)
class Case:
    """Arguments of `residual_update`. `text` describes them for a reader, and `seed` repeats them."""

    seed: int
    shape: tuple[int, ...]
    dim: Union[int, tuple[int, ...], None]
    dtypes: tuple[torch.dtype, torch.dtype]
    layouts: tuple[str, str, str]
    weights: tuple[Union[float, str], Union[float, str]]
    keep: str
    masked: bool
    needed: str
    scale: float

    @classmethod
    def of(cls, seed: int, elements: int) -> "Case":
        """Draw a case with at most this number of elements."""
        rng = random.Random(seed)
        shape = _shape(rng, elements)
        ndim = len(shape)
        weight = partial(rng.choice, ["learned", "tensor", 0.0, 1.0, 0.3, -0.5])
        axes = [axis - ndim * rng.randrange(2) for axis in rng.sample(range(ndim), rng.randint(1, ndim))]
        pair = (rng.choice(DTYPES), rng.choice(DTYPES))
        same = rng.choice(LAYOUTS)
        return cls(
            seed, shape,
            dim=rng.choice([-1, 1, None, axes[0], axes[0], tuple(axes), tuple(axes)]),
            dtypes=rng.choice([pair, pair[:1] * 2, pair[:1] * 2, (torch.float32, torch.bfloat16)]),
            layouts=(same, same, same) if rng.random() < 0.5 else tuple(rng.choice(LAYOUTS) for _ in range(3)),
            weights=(0.0, 1.0) if rng.random() < 0.6 else (weight(), weight()),
            keep=rng.choice(["output", "output", "branch"]), masked=rng.random() < 0.2,
            needed=rng.choice(["xf", "xf", "xf", "x", "f", ""]), scale=rng.choice([1e-3, 1.0, 1.0, 30.0]))

    @property
    def dims(self) -> list[int]:
        dim = tuple(range(1, len(self.shape))) if self.dim is None else self.dim
        return [dim] if isinstance(dim, int) else list(dim)

    @property
    def text(self) -> str:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return (f"x, f {list(self.shape)} ({dtypes}; {', '.join(self.layouts)}), dim={self.dim}, "
                f"parallel={self.weights[0]}, orthogonal={self.weights[1]}, keep={self.keep!r}, "
                f"mask={self.masked}, gradients of {self.needed or 'nothing'}, x times {self.scale:g}")


def _shape(rng: random.Random, elements: int) -> tuple[int, ...]:
    """Draw a shape of 2 to 5 axes. One in four has a long axis, and one in twelve an empty axis."""
    ndim, shape = rng.randint(2, 5), []
    for _ in range(ndim):
        room = max(1, elements // math.prod(shape))
        shape.append(min(room, rng.choice([1, 2, 3, 4, 8, 16, rng.randint(1, 70), rng.randint(1, 200)])))
    if rng.randrange(4) == 0:
        axis = rng.randrange(ndim)
        room = elements // max(1, math.prod(shape) // shape[axis])
        shape[axis] = max(1, min(room, rng.choice([384, 768, 1024, 1280, 2048, 4097, 9000, 40_000])))
    if rng.randrange(12) == 0:
        shape[rng.randrange(ndim)] = 0
    return tuple(shape)


class Inputs(NamedTuple):
    x: Tensor
    f: Tensor
    g: Tensor
    a: Union[float, Tensor]
    b: Union[float, Tensor]
    mask: Optional[Tensor]


def inputs(case: Case, device: torch.device) -> Inputs:
    """Return the tensors of a case. Values are drawn on the CPU, so that all devices get the same values."""
    generator = torch.Generator().manual_seed(case.seed)
    result = torch.promote_types(*case.dtypes)
    x, f, g = (
        laid_out((scale * torch.randn(case.shape, generator=generator, dtype=torch.float64)).to(device, dtype),
                 layout, case.seed)
        for scale, dtype, layout in zip((case.scale, 1.0, 1.0), (*case.dtypes, result), case.layouts, strict=True))
    mask = None
    if case.masked:
        projected = {axis % len(case.shape) for axis in case.dims}
        sizes = [1 if axis in projected else size for axis, size in enumerate(case.shape)]
        mask = (torch.rand(sizes, generator=generator) < 0.7).to(device)
    acc = torch.promote_types(result, torch.float32)
    a, b = (torch.tensor(0.625, dtype=acc, device=device) if isinstance(w, str) else w for w in case.weights)
    return Inputs(x, f, g, a, b, mask)


def laid_out(t: Tensor, layout: str, seed: int) -> Tensor:
    """Return a tensor with the same shape and this memory layout. Only `expanded` changes values."""
    if layout == "channels-last" and t.dim() in (4, 5):
        return t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)
    order = random.Random(seed).sample(range(t.dim()), t.dim())
    if layout == "transposed":
        inverse = [order.index(axis) for axis in range(t.dim())]
        return t.permute(order).contiguous().permute(inverse)
    if layout == "expanded":
        return t.narrow(order[0], 0, min(1, t.shape[order[0]])).expand_as(t)
    if layout == "sliced":
        return torch.stack([t, t], order[0] + 1).flatten(order[0], order[0] + 1)[
            tuple(slice(None, None, 2) if axis == order[0] else slice(None) for axis in range(t.dim()))]
    if layout == "unaligned":
        return torch.cat([t.flatten()[:1], t.flatten()])[min(1, t.numel()):].view(t.shape)
    return t.contiguous()


def problem(case: Case, device: torch.device, backend: Optional[str]) -> str:
    """Run a case, and return what is wrong, or an empty text."""
    def update(x: Tensor, f: Tensor, a: Any, b: Any) -> Tensor:
        return residual_update(x, f, parallel=a, orthogonal=b, dim=case.dim, eps=EPS, mask=given.mask, keep=case.keep,
                               backend=backend)

    given = inputs(case, device)
    needed = [*case.needed]
    if needed:  # otherwise the case has no gradients
        needed += [name for name, weight in zip("ab", case.weights, strict=True) if weight == "learned"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return problem_of_update(
                update, dict(zip("xfab", (given.x, given.f, given.a, given.b), strict=True)), given.g,
                None if case.dim is None else case.dims, EPS, given.mask, needed)
    except Exception as error:  # noqa: BLE001 any error of the code under test is a finding
        if device.type == "cuda":
            torch.cuda.synchronize()  # raises if the device is unusable
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Outcome(NamedTuple):
    """Number of cases that each backend computed, and what failed, by case."""

    backends: Mapping[str, int]
    failures: Sequence[tuple[Case, str]]
    lost: str = ""  # why the process stopped early


def run(options: argparse.Namespace, job: int = 0) -> Outcome:
    """Run cases until the time is over. Each of several jobs runs its share of the cases."""
    device, failures, backends, lost = torch.device(options.device), [], Counter(), ""
    elements = ELEMENTS["interpreter" if device.type == "cpu" and options.backend == "triton" else device.type]
    end = time.monotonic() + options.seconds
    for seed in count(options.first + job, options.jobs) if options.case is None else [options.case]:
        if time.monotonic() > end:
            break
        case = Case.of(seed, options.elements or elements)
        if device.type == "cpu" and options.backend == "triton" and {torch.bfloat16, torch.float64} == set(case.dtypes):
            continue  # Triton's interpreter returns NaN
        try:
            found = problem(case, device, options.backend)
            ones = (torch.ones(1, dtype=dtype, device=device) for dtype in case.dtypes)
            backends[choose_backend(*ones, options.backend)] += 1
        except RuntimeError as error:
            if device.type != "cuda":
                raise
            failures.append((case, f"the device is unusable afterwards: {' '.join(str(error).split())[:300]}"))
            lost = f"job {job} stopped at case {seed}; --first {seed + 1} continues"
            break
        if found:
            failures.append((case, found))
    return Outcome(backends, failures, lost)


def report(options: argparse.Namespace, outcomes: Sequence[Outcome]) -> int:
    """Print the first failures and the counts, and return the exit status."""
    failures = sorted((pair for outcome in outcomes for pair in outcome.failures), key=lambda pair: pair[0].seed)
    command = f"python -m scripts.checks.fuzz --device {options.device}" + (
        f" --backend {options.backend}" if options.backend else "") + (
        f" --elements {options.elements}" if options.elements else "")
    for case, found in failures[:options.show]:
        print(f"FAILED {found}\n    {case.text}\n    {command} --case {case.seed}")
    for outcome in outcomes:
        if outcome.lost:
            print(outcome.lost)
    counts = sum((Counter(outcome.backends) for outcome in outcomes), Counter())
    total = ", ".join(f"{number} cases with {name}" for name, number in sorted(counts.items())) or "no case was run"
    print(f"fuzz on {options.device}: {total}; {len(failures)} failed")
    return 1 if failures or not counts else 0


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.checks.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--backend", choices=BACKENDS, help="default: auto")
    parser.add_argument("--seconds", type=float, default=40, help="when to stop, default 40")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device, default 1")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first case, default 0")
    parser.add_argument("--case", type=int, metavar="SEED", help="run only this case")
    parser.add_argument("--elements", type=int, metavar="N", help="most elements of a tensor, default by device")
    parser.add_argument("--show", type=int, default=5, metavar="N", help="number of failures to print, default 5")
    options = parser.parse_args(arguments)
    if options.case is not None:
        options.jobs = 1
    if options.jobs == 1:
        return report(options, [run(options)])
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        return report(options, list(pool.map(partial(run, options), range(options.jobs))))


if __name__ == "__main__":
    sys.exit(main())
