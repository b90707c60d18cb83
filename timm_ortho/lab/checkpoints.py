"""The files of one run: written so that every moment is safe to die in, read so that a run goes on where it was.

Beside timm's `args.yaml`, `summary.csv`, `last.pth.tar`, `checkpoint-<epoch>.pth.tar` and `model_best.pth.tar`:

| file | written | holds |
| --- | --- | --- |
| `history.json` | before each checkpoint | one row an epoch, the exact numbers behind `summary.csv` |
| `dynamics.json` | before each checkpoint | the sites' norms and cosines before training and after each epoch |
| `records.json` | before each checkpoint | where asked for: what `timm_ortho.record` saw, and how far each epoch got |
| `features.npy` | before the result | where asked for: features of the validation images, see `features` |
| `result.json` | once, at the end | the run's figures; a folder without it is an unfinished run |

`last.pth.tar` is replaced in one step, and whatever was written for an epoch that it does not hold yet is cut off when
the run continues. Should it be damaged all the same, the newest of the older checkpoints takes its place: an epoch's
random numbers follow from seed and epoch, so the epochs that are lost come out again as they were.
"""
import errno
import json
import math
import sys
from argparse import Namespace
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import torch
from timm.utils import CheckpointSaver, update_summary

from ..runs.folders import load_checkpoint
from . import DiskError, LabError, write_json

__all__ = ["Checkpoints", "disk_errors", "one_line", "read_json", "read_result"]


def read_result(folder: Path) -> Optional[dict]:
    """The figures of a finished run, None of an unfinished one."""
    path = folder / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_json(path: Path) -> Any:
    """What one of a run's files holds.

    Raises:
        LabError: It is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path} cannot be read ({one_line(error)}); remove {path.parent} to train it anew") from None


_FULL = errno.ENOSPC, errno.EDQUOT


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Makes one line of whatever the operating system or torch's writer says about a file that cannot be written."""
    try:
        yield
    except LabError:
        raise
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            (folder / "tmp.pth.tar").unlink()  # half a checkpoint
        advice = "make room" if isinstance(error, RuntimeError) or error.errno in _FULL else "see to the folder"
        raise DiskError(f"cannot write in {folder} ({one_line(error)}): {advice} and give the same command again; what "
                        "is finished stays, and this run continues from its last checkpoint") from None


class Checkpoints(CheckpointSaver):
    """timm's saver for one run's folder, with the records that belong to a checkpoint, and the way back.

    Args:
        folder: The run's.
        options: timm's options: `eval_metric` ranks the epochs, `checkpoint_hist` says how many are kept.
        parts: `model`, `optimizer`, `model_ema` and `amp_scaler`, as timm's saver takes them.
    """

    def __init__(self, folder: Path, options: Namespace, **parts: Any) -> None:
        super().__init__(
            args=options,
            checkpoint_dir=str(folder),
            recovery_dir=str(folder),
            decreasing=options.eval_metric == "loss",
            max_history=options.checkpoint_hist,
            **parts,
        )
        self.folder = folder
        self.metric = f"eval_{options.eval_metric}"
        # With hard links timm removes last.pth.tar before it moves the new one there: killed in between, a run is lost.
        self.can_hardlink = False

    @property
    def last(self) -> Path:
        return self.folder / "last.pth.tar"

    def save(self, history: Sequence[dict], records: Mapping[str, Any]) -> None:
        """Saves the state after the last epoch of `history`; `records` are further JSON files, by name."""
        with disk_errors(self.folder):
            for name, value in {"history": history, **records}.items():
                write_json(self.folder / f"{name}.json", value)
            self.save_checkpoint(history[-1]["epoch"], metric=history[-1][self.metric])
            self._write_summary(history)

    def load(self) -> Optional[dict]:
        """The newest checkpoint that can be read, None if there is none at all.

        Raises:
            LabError: There are some, and all are damaged.
        """
        if not self.last.is_file():
            return None
        checkpoint = self._read(self.last)
        if isinstance(checkpoint, dict):
            return checkpoint
        older = [self._read(path) for path in self.folder.glob("*.pth.tar") if path not in (self.last, self._partial)]
        readable = [found for found in older if isinstance(found, dict)]
        if not readable:
            raise LabError(f"{self.last} cannot be continued ({checkpoint}); remove {self.folder} to train it anew")
        newest = max(readable, key=lambda found: found["epoch"])
        print(f"timm-ortho: {self.last} cannot be read ({checkpoint}): going back to epoch {newest['epoch'] + 1}",
              file=sys.stderr)
        with disk_errors(self.folder):
            torch.save(newest, self._partial)
            self._partial.replace(self.last)
        return newest

    def take_up(self, history: Sequence[dict]) -> None:
        """Restores what the saver knew of the best epochs, and the copies of `last.pth.tar` that a crash cut short."""
        sign = 1 if self.decreasing else -1
        ranked = sorted(
            ((row[self.metric], row["epoch"]) for row in history),
            key=lambda item: (math.inf if item[0] is None else sign * item[0], item[1]),
        )
        last = history[-1]["epoch"]
        names = {epoch: self.folder / f"checkpoint-{epoch}.pth.tar" for _, epoch in ranked[:self.max_history]}
        self.best_metric, self.best_epoch = ranked[0]
        with disk_errors(self.folder):
            if last in names:
                _copy(self.last, names[last])
            if last == self.best_epoch:
                _copy(self.last, self.folder / "model_best.pth.tar")
            self._write_summary(history)
        kept = [(str(names[epoch]), metric) for metric, epoch in ranked if epoch in names and names[epoch].is_file()]
        self.checkpoint_files = kept
        for path in self.folder.glob("checkpoint-*.pth.tar"):
            if str(path) not in {name for name, _ in kept}:
                path.unlink()

    @property
    def _partial(self) -> Path:
        return self.folder / "tmp.pth.tar"  # timm's name for a checkpoint that is being written

    def _read(self, path: Path) -> dict | str:
        """A checkpoint, or in words why it is none."""
        try:
            checkpoint = load_checkpoint(path)
            return checkpoint if {"epoch", "state_dict", "optimizer"} <= checkpoint.keys() else "it lacks a part"
        except Exception as error:  # noqa: BLE001 whatever a damaged file makes torch, pickle or zipfile raise
            return one_line(error)

    def _write_summary(self, history: Sequence[dict]) -> None:
        """`summary.csv` anew from the history, by timm's own writer, so that a continued run repeats no row."""
        partial_file = self.folder / ".summary.csv.partial"
        partial_file.unlink(missing_ok=True)
        for index, row in enumerate(history):
            update_summary(
                row["epoch"],
                {"loss": row["train_loss"]},
                {key: row[f"eval_{key}"] for key in ("loss", "top1", "top5")},
                filename=str(partial_file),
                lr=row["lr"],
                write_header=index == 0,
            )
        if history:
            partial_file.replace(self.folder / "summary.csv")


def _copy(source: Path, target: Path) -> None:
    partial_file = target.with_name(f".{target.name}.partial")
    partial_file.write_bytes(source.read_bytes())
    partial_file.replace(target)


def one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
