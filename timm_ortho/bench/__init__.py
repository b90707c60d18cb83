"""`timm-ortho bench`: what the orthogonal update costs on this machine, alone and in whole models, in time and memory.

Candidates that stand for the same work form a group: the formulas on one tensor, or a model's variants and its twin
with linear connections and the same weights. A group is measured in turns, each candidate once in every repetition. A
ratio is taken within a repetition, to the linear candidate beside it, and only then are quantiles taken, so that a
machine that is slow for a while is slow for both. Times of different groups, let alone of different runs, are not to
be compared. What the figures are is said in `report`.

A training step is forward, cross entropy and backward; an optimizer costs every model the same and would make the ratio
smaller. As in timm's train.py, on a GPU float32 matrix products may use TF32 and cuDNN may search for its fastest
convolution. Precisions other than float32 are dtypes of the operator's tensors, and autocast in models.

The part `launch` writes no buffer before a call: a GPU would hide the launches behind it, and from a CPU's cache it
would drive the interpreter.
"""
import gc
import os
from argparse import Namespace
from pathlib import Path
from typing import Any, Mapping

import torch
from tqdm import tqdm

from . import report
from .clock import Clock, Group, as_in_training, measure
from .launch import launch_groups
from .models import model_groups
from .operator import operator_groups
from .options import BenchError, resolve

__all__ = ["BenchError", "Clock", "Group", "as_in_training", "bench", "measure", "model_groups", "resolve"]


def bench(given: Mapping[str, Any], environment: Mapping[str, str], output: Path, command: str) -> int:
    """Measures, prints the tables, and writes `bench.csv` and `bench.svg`, of what is finished if Ctrl-C stops it.

    Args:
        given: Options that replace the defaults of the device: those of `DEFAULTS`, `device`, `quick`, `img_size`,
            `model_kwargs`, `skips`.
        environment: Versions and machine, as `timm-ortho env` prints them.
        output: Folder of the files.
        command: The command line, for the CSV.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        BenchError: Something that was given cannot be measured; nothing has been, then.
    """
    options = resolve(given)
    groups = [*operator_groups(options), *model_groups(options), *launch_groups(options)]
    machine = report.machine(options.device, environment, command)
    _check_output(output)
    rows, status = [], 0
    try:
        # disable=None: no bar where the output is not a terminal
        with as_in_training(options.device), tqdm(groups, leave=False, disable=None) as bar:
            for group in bar:
                bar.set_description(" ".join(filter(None, group.labels.values())))
                torch.compiler.reset()  # groups share code, and its limit of recompilations
                gc.collect()  # the last group's models may be held by a cycle
                rows += [{**row, **machine} for row in _rows(group, options)]
    except KeyboardInterrupt:
        status = 130
    finally:
        if rows:
            report.write(output, rows)
    print(f"{report.tables(rows)}\n\nwritten: {output / 'bench.csv'}, {output / 'bench.svg'}" if rows
          else "no group was finished: nothing is written")
    return status


def _rows(group: Group, options: Namespace) -> list[report.Row]:
    launch, threads = group.labels["what"] == "launch", torch.get_num_threads()
    torch.set_num_threads(1 if launch else threads)
    try:
        clock, repeats = Clock(options.device, flushes=not launch), options.repeats * (5 if launch else 1)
        results = measure(group.build(), repeats, clock, most_calls=2000 if launch else 50)
        return report.rows(group.labels, group.images, results)
    finally:
        torch.set_num_threads(threads)


def _check_output(folder: Path) -> None:
    """That it can be written is known before the measurement; it is made afterwards, if there is something to write."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        reason = "is not writable" if there.is_dir() else "is a file"
        raise BenchError(f"--output {folder} cannot be written: {there} {reason}")
