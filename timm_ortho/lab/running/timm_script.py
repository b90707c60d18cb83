"""Train a stage with timm's `train.py`, in separate processes and, on GPUs, under `torchrun`."""
import ctypes
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Sequence

import torch

from ...runs.folders import load_checkpoint
from .. import LabError, one_line
from ..data import open_source
from ..folder import RunPlan, Stage
from ..image_folder import is_here
from ..options import defaults

_SECONDS_TO_STOP = 30


class Died(LabError):
    """The script was killed, or ended after some epochs. A launcher starts such a script again."""


def train(plan: RunPlan, stage: Stage, folder: Path) -> None:
    """Train a stage, or its remaining epochs.

    Raises:
        LabError: The script ended early. The run's log has its output.
    """
    last = folder / stage.folder / "last.pth.tar"
    before = _epochs(last)
    if before > stage.last_epoch:  # the script stopped too late, so the next stage would start too late
        raise LabError(f"{last} has {before} epochs, but its stage ends after {stage.last_epoch}: remove {folder} "
                       "to train the run again")
    if before == stage.last_epoch:
        return
    _check_data(Namespace(**{**defaults(), **stage.options}))
    environment = {
        **os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "TIMM_DATASET_MAX_RETRIES": "1"}  # otherwise timm replaces an unreadable image by a different image
    if plan.record is not None:
        environment.update(
            TIMM_ORTHO_RECORD=str((folder / "records.jsonl").absolute()), TIMM_ORTHO_RECORD_EVERY=str(plan.record))
    process = subprocess.Popen(command(plan, stage, folder), env=environment, preexec_fn=die_with_parent)
    try:
        if stage.stop_epoch is None:
            process.wait()
        else:
            _wait_for_epoch(process, last, stage.stop_epoch)
    finally:
        _stop(process)
    done = _epochs(last)
    if done != stage.last_epoch:
        kind = Died if process.returncode < 0 or done > before else LabError
        raise kind(f"{plan.trainer} ended with exit status {process.returncode} after {done} of {stage.last_epoch} "
                   "epochs")


def _check_data(options: Namespace) -> None:
    """Check the image folder again, because the run may have been planned on a machine without it."""
    if is_here(options):
        split = open_source(options).val_split
        if split != options.val_split:
            raise LabError(f"the run was planned with val_split '{options.val_split}', but {options.data_dir} has only "
                           f"'{split}': use --option val_split={split}")


def command(plan: RunPlan, stage: Stage, folder: Path) -> list[str]:
    """Return the command line of a stage, which continues from its last checkpoint if there is one."""
    last, before = (folder / where / "last.pth.tar" for where in (stage.folder, plan.stages[0].folder))
    words = [
        sys.executable, *torchrun(plan), plan.trainer, "-c", str(folder / stage.folder / "args.yaml"),
        "--output", str(folder.absolute().parent),
        "--experiment", os.path.normpath(Path(folder.absolute().name, stage.folder))]
    if stage.begins_with == "weights":
        words += ["--initial-checkpoint", str(before)]
    if last.is_file() or stage.begins_with == "checkpoint":
        words += ["--resume", str(last if last.is_file() else before)]
    if stage.stop_epoch is not None and "--stop-epoch" in Path(plan.trainer).read_text(encoding="utf-8"):
        words += ["--stop-epoch", str(stage.stop_epoch)]
    return words


def torchrun(plan: RunPlan) -> Sequence[str]:
    """Return the part of the command line that starts one process per GPU, () on the CPU."""
    if not plan.gpus:
        return ()
    where = ["--standalone"]
    if plan.nodes > 1:
        where = ["--nnodes", str(plan.nodes), "--node-rank", os.environ.get("NODE_RANK", "0"),
                 "--master-addr", os.environ.get("MASTER_ADDR", "localhost"),
                 "--master-port", os.environ.get("MASTER_PORT", "29500")]
    return "-m", "torch.distributed.run", *where, "--nproc-per-node", str(plan.gpus)


def _epochs(checkpoint: Path) -> int:
    """Return the number of epochs of a checkpoint, 0 if there is none."""
    if not checkpoint.is_file():
        return 0
    try:
        return load_checkpoint(checkpoint)["epoch"] + 1
    except FileNotFoundError:  # train.py is replacing the file
        return 0
    except Exception as error:  # noqa: BLE001 torch, pickle and zipfile raise many kinds for damaged files
        raise LabError(f"{checkpoint} cannot be read ({one_line(error)}): remove {checkpoint.parent} to train "
                       "the run again") from None


def _wait_for_epoch(process: subprocess.Popen, checkpoint: Path, epochs: int) -> None:
    """Wait until the checkpoint has this many epochs, or the script ends. Older timm has no --stop-epoch."""
    seen = None
    while process.poll() is None:
        time.sleep(0.2)
        changed = checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
        if changed != seen:  # skip an unchanged file, because reading a checkpoint is slow
            seen = changed
            if _epochs(checkpoint) >= epochs:
                return


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
