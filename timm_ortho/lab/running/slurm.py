"""Submit runs as jobs of a Slurm cluster. The jobs write into the folders of the runs, as `study status` shows."""
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Mapping, Sequence

from ..._text import error_text
from ...run_folder import LOG
from .. import LabError
from ..folder import Variant, is_at_work, record, save, work_on
from . import run as run_module
from .launcher import waiting, words_of
from .timm_script import die_with_parent

_SECONDS_TO_PREEMPT = 300  # after a signal ended its training, a job stays alive this long for submitit to requeue it


@dataclass(frozen=True)
class _Task:
    """The function that a Slurm job calls with the folder of a run.

    submitit pickles this object. If the job is preempted or reaches its time limit, submitit calls `checkpoint` and
    requeues the job.
    """

    words: Sequence[str]  # options of `lab.running.run`

    def __call__(self, folder: str) -> int:
        from submitit.helpers import TorchDistributedEnvironment

        nodes = TorchDistributedEnvironment()
        os.environ.update(MASTER_ADDR=nodes.master_addr, MASTER_PORT=str(nodes.master_port),
                          NODE_RANK=os.environ.get("SLURM_NODEID", "0"))
        # train in a separate process, because run.main would replace submitit's signal handlers
        command = [sys.executable, "-m", run_module.__name__, folder, *self.words]
        with open(Path(folder, LOG), "a", encoding="utf-8") as log:
            status = subprocess.run(command, stdout=log, stderr=log, preexec_fn=die_with_parent).returncode
        if status in (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGUSR2):
            # If a job is preempted or reaches its time limit, Slurm signals all its processes, also the training.
            # submitit can only requeue a job that is still running, so wait.
            time.sleep(_SECONDS_TO_PREEMPT)
        return status

    def checkpoint(self, folder: str) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)


@dataclass(frozen=True)
class Slurm:
    """The options of an array of Slurm jobs. A job is requeued and continues if it is preempted or out of time."""

    parallel: int = 1  # number of simultaneous runs
    threads: int = 1  # number of CPU threads of each run
    minutes: int = 24 * 60  # time limit of a job in minutes
    options: Mapping[str, Any] = field(default_factory=dict)  # options of sbatch, such as `partition`, `qos` and `mem`

    def executor(self, root: Path, run: Variant) -> Any:
        """Return submitit's executor for jobs that have as many nodes and GPUs as `run` requests.

        Raises:
            LabError: submitit or Slurm is missing.
        """
        try:
            import submitit
        except ImportError:
            raise LabError('--launcher slurm needs submitit: pip install "timm-ortho[cluster]"') from None
        try:
            executor = submitit.SlurmExecutor(folder=root / ".slurm", max_num_timeout=100)
        except RuntimeError:
            raise LabError("--launcher slurm needs Slurm, but sbatch is missing: run the command on a login node, or "
                           "without --launcher") from None
        executor.update_parameters(
            job_name="timm-ortho", time=self.minutes, signal_delay_s=60, array_parallelism=self.parallel,
            nodes=run.nodes, ntasks_per_node=1, cpus_per_task=max(1, self.threads, 8 * run.gpus),
            additional_parameters=dict(self.options), **({"gpus_per_node": run.gpus} if run.gpus else {}))
        return executor

    def submit(self, root: Path, runs: Mapping[str, Variant]) -> str:
        """Submit the runs that are neither finished nor in the queue. Return a line with the numbers of runs.

        Raises:
            LabError: submitit or Slurm is missing, or squeue or sbatch failed. Without squeue's answer, a run could be
                submitted twice.
        """
        executor = self.executor(root, next(iter(runs.values())))
        unfinished, queue = waiting(root, runs), _queue()
        todo = [name for name in unfinished if not _is_queued(root / name, queue)]
        if todo:
            task = _Task(["--threads", str(self.threads), *words_of([runs[name] for name in todo])])
            try:
                jobs = executor.map_array(task, [str((root / name).absolute()) for name in todo])
            except RuntimeError as error:  # submitit's FailedJobError is one
                raise LabError(f"sbatch failed: {error_text(error)}") from None
            for name, job in zip(todo, jobs, strict=True):
                with suppress(LabError), work_on(root / name, wait=1):  # a job that has started has stored its id
                    save(root / name, replace(record(root / name), job=job.job_id))
        return (f"{len(todo)} runs submitted, at most {self.parallel} at the same time; {len(unfinished) - len(todo)} "
                f"were already in the queue, {len(runs) - len(unfinished)} are finished")


def _queue() -> set[str]:
    """Return the ids of the user's jobs that are waiting or running, in the form 12 or 12_3."""
    listed = subprocess.run(
        ["squeue", "--noheader", "--array", "--me", "--format=%i"], capture_output=True, text=True)
    if listed.returncode:
        raise LabError(f"squeue failed: {' '.join(listed.stderr.split())}")
    return set(listed.stdout.split())


def _is_queued(folder: Path, queue: set[str]) -> bool:
    found = record(folder)
    return bool({found.job, found.last_session.get("job")} & queue) or is_at_work(folder)
