"""Several runs at once: processes that each train one run after another.

A process that dies takes one run with it, which is reported with its log; another process takes its place, as it does
after an error that nobody foresaw (CUDA's outlive the run). Nothing outlives the command: the processes end with it,
whether it finishes, is interrupted or is killed.
"""
import os
import signal
import sys
from collections import deque
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch

from . import LabError, RunError
from .checkpoints import disk_errors
from .data import open_source
from .grid import LOG, Job, train_job
from .training import Progress, Run

__all__ = ["train_all"]

_SECONDS_TO_STOP = 15

# Told of each run that ends: the run, and its result or the error that ended it.
Tell = Callable[[Job, dict | LabError], None]


def train_all(jobs: Sequence[Job], count: int, threads: int, tell: Tell) -> None:
    """Trains the runs, `count` at a time.

    Args:
        jobs: The runs, in the order in which they begin; all on one data set.
        count: Processes; where there are GPUs each takes the next one.
        threads: CPU threads of each process.
        tell: Told of each run that ends; what it raises stops all others.
    """
    waiting, at_work = deque(jobs), {}

    def employ(number: int) -> None:
        if waiting:
            worker = _Worker(number, threads)
            at_work[worker.pipe] = worker
            worker.give(waiting.popleft())

    try:
        for number in range(count):
            employ(number)
        while at_work:
            for pipe in wait(list(at_work)):
                worker = at_work[pipe]
                job, ended = worker.job, worker.take()
                if waiting and not isinstance(ended, RunError):
                    worker.give(waiting.popleft())
                else:
                    del at_work[pipe]
                    worker.stop()
                    employ(worker.number)
                tell(job, ended)
    finally:
        for worker in at_work.values():
            worker.process.terminate()
        for worker in at_work.values():
            worker.stop()


class _Worker:
    """A process, and the run that it is at."""

    def __init__(self, number: int, threads: int) -> None:
        # spawned, not forked: a process that has used CUDA or threads must not be forked
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.number = number
        self.job: Optional[Job] = None
        self.process = context.Process(target=_work, args=(theirs, number, threads))
        self.process.start()
        theirs.close()  # or the end of the process would not be noticed here

    def give(self, job: Job) -> None:
        self.job = job
        with suppress(OSError):  # it died: then `take` says so
            self.pipe.send(job)

    def take(self) -> dict | LabError:
        """What became of the run: its result or the error that ended it."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return RunError(f"its process died ({_exit(self.process.exitcode)}), see {self.job.folder / LOG}")

    def stop(self) -> None:
        self.pipe.close()  # for a process that waits for a run this is the end
        self.process.join(_SECONDS_TO_STOP)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _exit(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


# --------------------------------------------------------------------------------------- in the processes
def _work(pipe: Connection, number: int, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of the terminal's processes: the parent decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the loader's processes are ended, too
    torch.set_num_threads(threads)
    source: Any = None
    while (job := _next(pipe)) is not None:
        if job.options.device == "cuda":  # a device that was given by number is meant
            torch.cuda.set_device(number % torch.cuda.device_count())
        try:
            _log_to(job.folder)
            source = source or open_source(job.options)
            ended: dict | LabError = train_job(job, source, _watch)
        except LabError as error:
            ended = error
        pipe.send(ended)


def _next(pipe: Connection) -> Optional[Job]:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _log_to(folder: Path) -> None:
    """From here on standard output and error, also of C++ code that crashes, go to the run's log."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _watch(run: Run) -> Progress:
    def progress(updates: int, row: Optional[dict]) -> None:
        if not parent_process().is_alive():  # killed: nobody is left who would stop this process
            sys.exit(1)
        if row is not None:
            print(f"epoch {row['epoch'] + 1}/{run.epochs}: top-1 {row['eval_top1']:.2f} %", flush=True)

    return progress
