#!/usr/bin/env python3
"""Measure the time that Python needs for one residual addition, forward and backward, without a GPU.

    python -m scripts.checks.host_cost

Every launch of a Triton kernel is replaced by a function that does nothing, and the stream is so small that arithmetic
takes no time. The measured time is that of the host: module calls, autograd, allocations, and the preparation of
launches. On a GPU this time is the limit for small models and small batches. The candidates are measured in turns. A
ratio is the median over the repetitions of the ratio within one repetition.

| row | measured | relative to |
| --- | --- | --- |
| add | ``x + f`` | |
| connection | ``FeatureConnection()(x, f)`` with the backend ``triton`` | add |
| add, norm | ``x + f``, then a LayerNorm | |
| connection with norm | ``FeatureConnection().with_norm(x, f, norm)`` | add, norm |
"""
import os

os.environ["TRITON_INTERPRET"] = "1"  # lets the backend `triton` accept tensors on the CPU

import argparse
import statistics
import time
from typing import Callable, Dict, List, Optional, Sequence
from unittest.mock import patch

import torch
from torch import nn

from timm_ortho import FeatureConnection
from timm_ortho.functional import use_backend
from timm_ortho.update import backend, plan as planning

WIDTH = 384
RELATIVE_TO = {"connection": "add", "connection with norm": "add, norm"}


class NoLaunch(planning.Launch):
    """A launch that reads the addresses and starts no kernel."""

    def __call__(self, *tensors: Optional[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor is not None:
                tensor.data_ptr()


def candidates() -> Dict[str, Callable[[], Sequence[torch.Tensor]]]:
    """Return the functions to measure. Each returns the gradients of its inputs."""
    x, f = (torch.randn(1, 1, WIDTH, requires_grad=True) for _ in range(2))
    connection, norm = FeatureConnection(), nn.LayerNorm(WIDTH)
    inputs = [x, f, *norm.parameters()]
    g, both = torch.randn(1, 1, WIDTH), torch.randn(2, 1, 1, WIDTH).unbind()

    def add_norm() -> Sequence[torch.Tensor]:
        y = x + f
        return torch.autograd.grad((y, norm(y)), inputs, both)

    return {
        "add": lambda: torch.autograd.grad(x + f, inputs[:2], g),
        "connection": lambda: torch.autograd.grad(connection(x, f), inputs[:2], g),
        "add, norm": add_norm,
        "connection with norm": lambda: torch.autograd.grad(connection.with_norm(x, f, norm), inputs, both),
    }


def measure(repeats: int, calls: int) -> Dict[str, List[float]]:
    """Return the microseconds per call of each candidate, one value for each repetition."""
    with use_backend("triton"):
        functions = candidates()
        times: Dict[str, List[float]] = {name: [] for name in functions}
        for repeat in range(repeats + 1):
            for name, function in functions.items():
                began = time.perf_counter()
                for _ in range(calls):
                    function()
                if repeat:  # the first repetition is the warm-up
                    times[name].append((time.perf_counter() - began) / calls * 1e6)
    return times


def main(arguments: Sequence[str] = ()) -> Dict[str, float]:
    """Print the table, and return the ratios."""
    parser = argparse.ArgumentParser(prog="python -m scripts.checks.host_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30, help="number of repetitions (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=200, help="calls in each repetition (default: %(default)s)")
    options = parser.parse_args(arguments or None)
    with patch.object(planning, "Launch", NoLaunch), patch.dict(backend.plans, clear=True):
        times = measure(options.repeats, options.calls)
    ratios = {}
    print(f"{'forward and backward of':24}{'us':>8}{'ratio':>8}")
    for name, values in times.items():
        line = f"{name:24}{statistics.median(values):8.1f}"
        if name in RELATIVE_TO:
            pairs = zip(values, times[RELATIVE_TO[name]], strict=True)
            ratios[name] = statistics.median(ours / base for ours, base in pairs)
            line += f"{ratios[name]:8.2f}"
        print(line)
    return ratios


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
