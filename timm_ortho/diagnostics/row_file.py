"""Rows of :func:`timm_ortho.record` as JSON lines, asked for by the environment where a script has no option for it.

With ``TIMM_ORTHO_RECORD=FILE.jsonl`` every variant that is created records itself while it trains, every 50 passes or
every ``TIMM_ORTHO_RECORD_EVERY``: in timm's own ``train.py``, say. It is a variable and not an argument of the model,
because arguments are stored with a model, and whoever loads it would record too. timm's own names stay as they are: the
baseline of ``vit_base_patch16_224_ortho`` that is recorded is the same name with ``--model-kwargs connection=linear``.

A row is a line. Of several processes the first writes, its own share of each batch. A file that is there is gone on
with: its steps go on increasing, since how many passes the checkpoint that a script resumes from had seen is not known
here. What a run had recorded after its last checkpoint when it was killed stays.
"""
import json
import os
import warnings
from pathlib import Path
from typing import List, Optional, TypeVar

import torch
from torch import nn

from .._text import without_nan
from .dynamics import Row, record

FILE, EVERY = "TIMM_ORTHO_RECORD", "TIMM_ORTHO_RECORD_EVERY"
ModelT = TypeVar("ModelT", bound=nn.Module)


def record_as_asked(model: ModelT) -> ModelT:
    """The same model, recorded if the environment asks for it.

    Raises:
        ValueError: The file cannot be one of rows, or the number of passes is none; the message is one line.
    """
    if not os.environ.get(FILE):
        return model
    every = os.environ.get(EVERY) or "50"
    if not every.isdecimal() or not int(every):
        raise ValueError(f"{EVERY} must be a whole number of passes, at least 1, got '{every}'")
    path = Path(os.environ[FILE])
    last = _last_step(path)
    recorder = record(model, int(every), sink=_RowFile(path).append)
    if last is not None:
        recorder.step = (last // recorder.every + 1) * recorder.every
    return model


def _last_step(path: Path) -> Optional[int]:
    """The step of a file's last complete line, None of a file that is not there or has none."""
    if not path.parent.is_dir():
        raise ValueError(f"{FILE}={path}: there is no folder {path.parent}")
    try:
        lines = _complete(path.read_bytes()).splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{FILE}={path} cannot be read: {error.strerror}") from None
    try:
        return json.loads(lines[-1])["step"] if lines else None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{FILE}={path} is there and holds something else than rows; name another file") from None


def _complete(content: bytes) -> bytes:
    """Without what follows the last line break: the piece of a line that a killed process or a full disk left."""
    return content[:content.rfind(b"\n") + 1]


class _RowFile:
    """Appends rows; stops with a warning, and does not end the training, where that is no longer possible."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the script may go elsewhere
        self.begun = False
        self.failed = False

    def append(self, rows: List[Row]) -> None:
        if self.failed or not _is_first_process():
            return
        try:
            self._begin()
            text = "".join(json.dumps(without_nan(row)) + "\n" for row in rows)
            with open(self.path, "ab", buffering=0) as file:  # one write: whole lines, also of two processes
                file.write(text.encode())
        except OSError as error:
            self.failed = True
            warnings.warn(f"{FILE}={self.path}: {error.strerror}; nothing more is recorded", stacklevel=2)

    def _begin(self) -> None:
        if not self.begun and self.path.exists():
            os.truncate(self.path, len(_complete(self.path.read_bytes())))
        self.begun = True


def _is_first_process() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
