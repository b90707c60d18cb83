"""The lab: re-runs the papers' experiments on real data with timm's own factories.

`recipe` reads timm's training YAML, `data` opens data sets, `training` does one run and `checkpoints` keeps its files;
`grid` has what every grid of runs needs and `workers` does several at once; `compare` and `study` are such grids;
`report` turns finished runs into a table, a page and a file of numbers, and `study_report` those of a study, beside the
paper's (`study_specs` and `cost_specs` say how each is laid out). `import timm_ortho` imports nothing of it.
"""
import json
import math
import os
from pathlib import Path
from typing import Any

__all__ = ["DiskError", "LabError", "RunError", "own_version", "write_json", "write_text"]


class LabError(ValueError):
    """What the user gave cannot be run; the message is one line that says what is wrong and what to do."""


class DiskError(LabError):
    """A file cannot be written, and the next one will not be either."""


class RunError(LabError):
    """A run ended in an error that nobody foresaw, after which its process is not to be trusted with another run."""


def own_version() -> str:
    """The version of timm-ortho, which results carry."""
    from .. import __version__
    return __version__


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
    write_text(path, json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
