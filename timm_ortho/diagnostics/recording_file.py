"""Write the rows of :func:`timm_ortho.record` to a JSON lines file that an environment variable names.

Variants are the models that this package registers, such as ``vit_base_patch16_224_ortho``. If a variant is created
with ``TIMM_ORTHO_RECORD=FILE.jsonl`` in the environment, every 50th of its training passes is recorded.
``TIMM_ORTHO_RECORD_EVERY`` sets another interval. The variables work in scripts such as timm's ``train.py``. Recording
is not a model argument, because loading a saved model would then start a recording. timm's own models are not recorded.

Each line is one row. In distributed training, only the first process writes rows, for its share of the batch. Rows are
appended to an existing file. Their step numbers continue with the next multiple of the interval. If a run
resumes from a checkpoint that is older than the last row, it repeats some passes, and the rows of the first attempt
remain in the file.
"""
import json
import os
import warnings
from pathlib import Path
from typing import List, Optional, TypeVar

import torch
from torch import nn

from .._text import whole_lines, without_nan
from .dynamics import RecordedRow, record

FILE, EVERY = "TIMM_ORTHO_RECORD", "TIMM_ORTHO_RECORD_EVERY"
ModelT = TypeVar("ModelT", bound=nn.Module)


def record_if_requested(model: ModelT) -> ModelT:
    """Record a model with connections if the environment requests it, and return the model."""
    if not os.environ.get(FILE):
        return model
    every = os.environ.get(EVERY) or "50"
    if not every.isdecimal() or not int(every):
        raise ValueError(f"{EVERY} must be a positive integer, got '{every}'")
    path = Path(os.environ[FILE])
    last = _last_step(path)
    recorder = record(model, int(every), sink=_RecordingFile(path).append)
    if last is not None:
        recorder.step = (last // recorder.every + 1) * recorder.every
    return model


def _last_step(path: Path) -> Optional[int]:
    """Return the step of a file's last complete line, or None for a missing or empty file."""
    if not path.parent.is_dir():
        raise ValueError(f"{FILE}={path}: the folder {path.parent} does not exist")
    try:
        lines = whole_lines(path.read_bytes()).splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{FILE}={path} cannot be read: {error.strerror}") from None
    try:
        return json.loads(lines[-1])["step"] if lines else None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{FILE}={path} exists and is not a file of recorded rows; choose another file") from None


class _RecordingFile:
    """Append rows to a file. If writing fails, warn once and record nothing more; training continues."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the script may change its working directory
        self.is_clean = False
        self.failed = False

    def append(self, rows: List[RecordedRow]) -> None:
        if self.failed or not _is_first_process():
            return
        try:
            self._remove_incomplete_line()
            text = "".join(json.dumps(without_nan(row)) + "\n" for row in rows)
            with open(self.path, "ab", buffering=0) as file:  # one write keeps lines whole if two processes append
                file.write(text.encode())
        except OSError as error:
            self.failed = True
            warnings.warn(f"{FILE}={self.path}: {error.strerror}; nothing more is recorded", stacklevel=2)

    def _remove_incomplete_line(self) -> None:
        if not self.is_clean and self.path.exists():
            os.truncate(self.path, len(whole_lines(self.path.read_bytes())))
        self.is_clean = True


def _is_first_process() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
