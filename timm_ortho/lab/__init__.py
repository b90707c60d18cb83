"""The lab: re-runs the papers' experiments on real data. It plans runs, starts processes that train them, and reads the
folders that they leave.

| module | does |
| --- | --- |
| `design`, `recipe` | read a study's YAML, and timm's training YAML |
| `plan` | makes a study, a scale, a data set and seeds into folders, one for each run |
| `launch` | starts a process for each folder, here or on Slurm |
| `run` | is that process: the lab's own loop (`train`, `data`), or timm's `train.py` (`train_py`) |
| `folder` | says what is in a run's folder |
| `collect`, `report` | read folders, and make tables, figures and a page of them |
| `study` | strings these together: `timm-ortho study`, `timm-ortho compare` |

`import timm_ortho` imports nothing of it.
"""
import difflib
import json
import os
from pathlib import Path
from typing import Any, Iterable

from .._checks import aligned, without_nan

__all__ = ["LabError", "aligned", "check_names", "one_line", "write_json", "write_text"]


class LabError(ValueError):
    """What the user gave cannot be run; the message is one line that says what is wrong and what to do."""


def one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return text if isinstance(error, LabError) else f"{type(error).__name__}: {text[:200]}"


def check_names(given: Iterable[Any], known: Iterable[Any], where: str, what: str = "key") -> None:
    """Raises a LabError that has the nearest known name if a given one is not known."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), map(str, known), n=1, cutoff=0.0)
            raise LabError(f"{where} has no {what} '{name}'; the nearest is '{near[0]}'")


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: whoever finds `path` finds all of it, whenever the process dies."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk every block counts
        raise
    os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all; numbers that JSON does not have (NaN, infinities) become null."""
    write_text(path, json.dumps(without_nan(value), indent=1, allow_nan=False) + "\n")
