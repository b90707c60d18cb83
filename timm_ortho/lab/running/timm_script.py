"""Train a stage of a run with timm's `train.py`, in a separate process, or with `torchrun` in one process per GPU."""
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

from ...run_folder import LAST, OPTIONS, RECORDS
from ...weights.files import load_checkpoint
from .. import LabError, one_line
from ..data import check_shards, open_source
from ..folder import Stage, Variant, with_last_words
from ..image_folder import is_here
from ..train_options import defaults

_SECONDS_TO_STOP = 30


class Died(LabError):
    """`train.py` was killed, or ended with too few or too many epochs after a new one. The launcher starts it again."""


def train(plan: Variant, stage: Stage, folder: Path) -> None:
    """Train a stage, or its remaining epochs if the stage has a checkpoint.

    Raises:
        LabError: `train.py` ended early (the reason is in its output in the run's `log.txt`), a checkpoint is damaged
            or has too many epochs, or the data set does not have the planned `val_split`.
    """
    last = folder / stage.folder / LAST
    before = _epochs(last)
    if before > stage.last_epoch:  # train.py was stopped too late, and so the next stage would start too late
        raise LabError(f"{last} has {before} epochs, but its stage ends after {stage.last_epoch}: remove {folder} "
                       "to train the run again")
    if before == stage.last_epoch:
        return
    _check_data(Namespace(**{**defaults(), **stage.options}))
    environment = {
        **os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "TIMM_DATASET_MAX_RETRIES": "1"}  # without this, timm replaces an unreadable image by a different one
    if plan.record is not None:
        environment.update(
            TIMM_ORTHO_RECORD=str((folder / RECORDS).absolute()), TIMM_ORTHO_RECORD_EVERY=str(plan.record))
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
        raise kind(with_last_words(folder, f"{plan.script} ended with exit status {process.returncode} after {done} of "
                                           f"{stage.last_epoch} epochs"))


def _check_data(options: Namespace) -> None:
    """Check an image folder again, because the machine on which the run was planned may not have had this folder."""
    check_shards(options)
    if is_here(options):
        split = open_source(options).val_split
        if split != options.val_split:
            raise LabError(f"the run was planned with val_split '{options.val_split}', but {options.data_dir} has only "
                           f"'{split}': use --option val_split={split}")


def command(plan: Variant, stage: Stage, folder: Path) -> list[str]:
    """Return the command line that trains a stage, or continues from its last checkpoint if it has one."""
    last, before = (folder / where / LAST for where in (stage.folder, plan.stages[0].folder))
    words = [
        sys.executable, *torchrun(plan), plan.script, "-c", str(folder / stage.folder / OPTIONS),
        "--output", str(folder.absolute().parent),
        "--experiment", os.path.normpath(Path(folder.absolute().name, stage.folder))]
    if stage.begins_with == "weights":
        words += ["--initial-checkpoint", str(before)]
    if last.is_file() or stage.begins_with == "checkpoint":
        words += ["--resume", str(last if last.is_file() else before)]
    return words


def torchrun(plan: Variant) -> Sequence[str]:
    """Return the part of the command line that starts a process for each GPU, () if the run requests no GPUs."""
    if not plan.gpus:
        return ()
    where = ["--standalone"]
    if plan.nodes > 1:
        where = ["--nnodes", str(plan.nodes), "--node-rank", os.environ.get("NODE_RANK", "0"),
                 "--master-addr", os.environ.get("MASTER_ADDR", "localhost"),
                 "--master-port", os.environ.get("MASTER_PORT", "29500")]
    return "-m", "torch.distributed.run", *where, "--nproc-per-node", str(plan.gpus)


def _epochs(checkpoint: Path) -> int:
    """Return the number of finished epochs in a checkpoint, 0 if the file does not exist."""
    if not checkpoint.is_file():
        return 0
    try:
        return load_checkpoint(checkpoint)["epoch"] + 1
    except FileNotFoundError:  # train.py is replacing the file
        return 0
    except Exception as error:  # noqa: BLE001 damaged files raise many kinds of errors
        raise LabError(f"{checkpoint} cannot be read ({one_line(error)}): remove {checkpoint.parent} to train "
                       "the run again") from None


def _wait_for_epoch(process: subprocess.Popen, checkpoint: Path, epochs: int) -> None:
    """Wait until the checkpoint has this many epochs or the script ends.

    The script would continue to the end of its schedule, so the caller ends its process.
    """
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
    """On Linux, let the kernel send SIGTERM to this process when its parent process ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
