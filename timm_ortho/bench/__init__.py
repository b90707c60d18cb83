"""Measure the time and memory of the orthogonal update, alone and in whole models (`timm-ortho bench`).

Candidates that do the same work form a group. They are formulas of the update on the same tensors, or the variants of a
model and a linear baseline with the same weights. A group is measured in turns, each candidate once per repetition.
Ratios to the linear candidate are computed within a repetition, so that a temporary slowdown of the machine affects
both times. Quantiles are computed over the repetitions. Times from different groups or runs are not comparable.
`results` defines the metrics.

A training step is forward, cross entropy and backward. The optimizer is excluded: it costs the same for all models and
would bring the ratio closer to 1. On a GPU, the settings are as in timm's train.py: matrix products of float32
tensors may use TF32, and cuDNN searches for its fastest convolution. In half precision, the operator's tensors have the
half-precision dtype, and models use autocast.

On a GPU, the part `operator` measures the time of the kernels without their launches.
"""
import gc
from argparse import Namespace
from pathlib import Path
from typing import Any, Mapping

import torch
from tqdm import tqdm

from . import results
from .clock import BUSY, Clock, Group, as_in_training, measure
from .models import model_groups
from .operator import operator_groups
from .options import BenchError, resolve

__all__ = ["BenchError", "Clock", "Group", "as_in_training", "bench", "measure", "model_groups", "resolve"]


def bench(requested: Mapping[str, Any], output: Path, command: str) -> int:
    """Measure, print the tables, and write `bench.csv`.

    The file is written after each group. Ctrl-C also prints the tables of the finished groups.

    Args:
        requested: Options by name, see `options.resolve`.
        output: Folder for the file.
        command: Command line, for the CSV.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        BenchError: An option is invalid; raised before the first measurement.

    >>> import tempfile
    >>> options = dict(device="cpu", what=["operator"], shapes=["1x2x4"], scopes=["feature"], repeats=1, compile=False,
    ...                copy_bytes=1024)
    >>> bench(options, Path(tempfile.mkdtemp()), "example")  # doctest: +ELLIPSIS
    shape...
    0
    """
    options = resolve(requested)
    groups = [*operator_groups(options), *model_groups(options)]
    machine = results.machine(options.device, command)
    results.write_rows(output, [])  # a folder that cannot be written is an error before the first measurement
    rows, status = [], 0
    try:
        # disable=None: no progress bar if the output is not a terminal
        with as_in_training(options.device), tqdm(groups, leave=False, disable=None) as bar:
            for group in bar:
                bar.set_description(" ".join(filter(None, group.labels.values())))
                torch.compiler.reset()  # groups share code, whose recompilations torch limits
                gc.collect()  # reference cycles may keep the last group's models in memory
                rows += [{**row, **machine} for row in _rows(group, options)]
                results.write_rows(output, rows)
    except KeyboardInterrupt:
        status = 130
    print(f"{results.tables(rows)}\n\nwritten: {output / 'bench.csv'}" if rows else "no group was finished")
    return status


def _rows(group: Group, options: Namespace) -> list[results.Measurement]:
    busy = group.labels["what"] == "operator" and options.device.type == "cuda"
    clock = Clock(options.device, flushes=BUSY if busy else 1)
    measured = measure(group.build(), options.repeats, clock, most_calls=5 if busy else 50)
    return results.rows(group.labels, group.images, measured)
