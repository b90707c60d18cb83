"""Start a process on this machine for each unfinished run.

Each run has its own process, so a crash does not affect other runs. The process writes progress, result and errors into
the folder of the run, where the launcher reads them. If the user starts the same command again, finished runs are
skipped, and unfinished runs continue.
"""
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context, parent_process, set_start_method
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import torch

from ..._text import print_line
from ...run_folder import LOG, own_modules
from .. import LabError
from ..folder import Variant, epochs_done, history, last_line, record, top1_text, with_last_words
from ..image_folder import NETWORK, is_local
from . import run as run_module

_SECONDS_BETWEEN_LINES = 20  # at least this long between two lines about finished epochs
ATTEMPTS = 3  # a run is started at most this many times, if its process dies


class _Progress:
    """Print finished epochs and finished runs."""

    def __init__(self, root: Path, runs: Mapping[str, Variant]) -> None:
        self.root, self.runs, self.failed = root, runs, {}
        self.finished = set(runs) - set(waiting(root, runs))
        self.epochs = {name: epochs_done(history(root / name, run)) for name, run in runs.items()}
        self.total, self.before = sum(run.epochs for run in runs.values()), sum(self.epochs.values())
        self.began, self.next_look = time.monotonic(), 0.0
        if self.finished:
            print_line(f"{len(self.finished)} of {len(runs)} runs are already finished")

    def fail(self, name: str, error: Optional[str], ended: str, pid: Optional[int] = None) -> None:
        """Store the reason why a run failed in `failed` and in the run's folder, and print it. See `note_failure`.

        Args:
            name: The run.
            error: The error that the run's process recorded. None: the reason is `ended` and the last line of its log.
            ended: How the process ended.
            pid: The process, for `note_failure`.
        """
        reason = error or with_last_words(self.root / name, ended)
        run_module.note_failure(self.root / name, reason, pid)
        self.failed[name] = f"{reason}, see {self.root / name / LOG}"
        print_line(f"timm-ortho: {name} failed: {self.failed[name]}")

    def update(self, names: Iterable[str]) -> None:
        """Print the last epoch of a named run that has new epochs, at most one line in `_SECONDS_BETWEEN_LINES`."""
        now, latest = time.monotonic(), None
        if now < self.next_look:
            return
        for name in names:
            rows = history(self.root / name, self.runs[name])
            if epochs_done(rows) > self.epochs[name]:
                self.epochs[name], latest = epochs_done(rows), (name, rows[-1])
        self.next_look = now + (_SECONDS_BETWEEN_LINES if latest else 1)
        if latest:
            (name, row), done = latest, sum(self.epochs.values())
            left = timedelta(seconds=round((now - self.began) / max(1, done - self.before) * (self.total - done)))
            loss = "nan" if row.get("train_loss") is None else f"{row['train_loss']:.3f}"
            print_line(f"{name}: epoch {self.epochs[name]}/{self.runs[name].epochs}, loss {loss}, "
                       f"{top1_text(row.get('eval_top1'))}; {done}/{self.total} epochs, {left} left")

    def ended(self, name: str) -> None:
        """Count a run as finished, and print its top-1 accuracy and time."""
        self.finished.add(name)
        self.epochs[name] = self.runs[name].epochs
        result = record(self.root / name).result or {}
        seconds = f" in {result['seconds']:.0f} s" if "seconds" in result else ""
        print_line(f"[{len(self.finished)}/{len(self.runs)}] {name}: {top1_text(result.get('top1'))}{seconds}")


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM. This exception stops a command as Ctrl-C does."""


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM inside the context."""
    def terminated(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def waiting(root: Path, runs: Mapping[str, Variant]) -> list[str]:
    """Return the names of the runs without a result, in order. `root` is the folder of the study."""
    return [name for name in runs if record(root / name).result is None]


def local(root: Path, runs: Mapping[str, Variant], parallel: int = 1, threads: int = 1) -> dict[str, str]:
    """Train the runs on this machine, in order.

    Args:
        root: The folder of the study.
        runs: The runs by name.
        parallel: Number of simultaneous runs.
        threads: Number of CPU threads of each run.

    Returns:
        The reasons why runs failed, by the name of the run.

    Raises:
        LabError: A run needs more GPUs than this machine has.
    """
    slots = _slots(runs, parallel)
    queue, at_work, attempts = waiting(root, runs), {}, Counter()
    progress = _Progress(root, runs)
    # Fork the processes from a server that has already imported the package. This saves seconds for each run.
    context = get_context("forkserver" if sys.platform != "win32" else "spawn")
    context.set_forkserver_preload([run_module.__name__])
    try:
        while queue or at_work:
            while queue and slots:
                name, slot = queue.pop(0), slots.pop(0)
                words = ["--threads", str(threads), *words_of([runs[name]])]
                process = context.Process(target=_work, args=(root / name, words, {**os.environ, **slot}))
                process.start()
                at_work[process] = (name, slot)
            time.sleep(0.1)
            progress.update(name for name, _ in at_work.values())
            for process in [process for process in at_work if not process.is_alive()]:
                name, slot = at_work.pop(process)
                slots.append(slot)
                attempts[name] += 1
                found, ended = record(root / name), _exit(process.exitcode)
                session = found.last_session
                # another launcher may train the run: ignore the error of a session that belongs to another process
                error = session.get("error") if session.get("pid") == process.pid else None
                if process.exitcode == run_module.REFUSED:
                    error = error or last_line(root / name, of_lab=True)
                if found.result is not None:
                    progress.ended(name)
                elif not error and attempts[name] < ATTEMPTS:
                    print_line(f"timm-ortho: {name} {ended}; it is started again")
                    queue.append(name)
                else:
                    progress.fail(name, error, f"its process {ended}", process.pid)
    finally:
        for process in at_work:
            process.terminate()
        for process in at_work:
            process.join()
    return progress.failed


def _slots(runs: Mapping[str, Variant], parallel: int) -> list[dict[str, str]]:
    """Return the environment variables of each simultaneous run, which set its visible GPUs.

    A run of `train.py` does not share its requested GPUs with other runs. A run of the lab's loop needs one GPU, which
    it may share.

    Raises:
        LabError: This machine has fewer GPUs than a run needs, or a run needs several nodes.
    """
    each, nodes = (max(getattr(run, attribute) for run in runs.values()) for attribute in ("gpus", "nodes"))
    there = torch.cuda.device_count()
    if each > there or nodes > 1:
        raise LabError(f"a run needs {each} GPUs per node and {nodes} node{'s' * (nodes > 1)}, but this machine is one "
                       f"node with {there} GPUs: change --gpus and --nodes, or use --launcher slurm")
    named = any(":" in str(run.stages[0].options["device"]) for run in runs.values())
    if not there or named:
        return [{}] * parallel
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(there)]
    groups = [[gpus[number % there]] for number in range(parallel)]
    if each:
        groups = [gpus[first:first + each] for first in range(0, there - each + 1, each)][:parallel]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def words_of(runs: Sequence[Variant]) -> list[str]:
    """Return the options of `lab.running.run` that name the script, the modules and the network access of one study.

    The plans contain these names too, but a run's process does not trust the files that it reads.
    """
    script, options = runs[0].script, runs[0].stages[0].options
    data = [] if is_local(options["dataset"]) else ["--dataset", options["dataset"]]
    for key in NETWORK:
        if value := options.get(key):
            data += [f"--{key.replace('_', '-')}", *([] if value is True else [value])]
    modules = dict.fromkeys(name for run in runs for name in own_modules(run.stages[0].options.get("device_modules")))
    return [*(["--train-py", script] if script else []), *data, *(["--device-modules", *modules] if modules else [])]


def _work(folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Train the run in a folder. This is the main function of a run's process."""
    # `local` started this process with forkserver. With this method, each worker of a data loader would import torch
    # again in every epoch. The argument None restores the platform's default method.
    set_start_method(None, force=True)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the launcher ends this one
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # file descriptors, because C++ code does not use sys.stdout
        os.dup2(log, stream)
    sys.exit(run_module.main([str(folder), *words]))


def _end_with_launcher() -> None:
    """Wait until the launcher ends, then end this process.

    The operating system does not end it: its parent there is the fork server, which may outlive the launcher.
    """
    parent_process().join()  # multiprocessing's parent process is the launcher
    os.kill(os.getpid(), signal.SIGTERM)


def _exit(status: int) -> str:
    return f"ended with exit status {status}" if status >= 0 else f"was killed ({signal.Signals(-status).name})"
