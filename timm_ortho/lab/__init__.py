"""The lab: re-runs the papers' experiments on real data. It plans runs, starts processes that train them, and reads the
folders that they leave.

| module | does |
| --- | --- |
| `design`, `recipe` | read a study's YAML, and timm's training YAML |
| `plan` | makes a study, a scale, a data set and seeds into folders, one for each run |
| `launch` | starts a process for each folder, here or on Slurm |
| `run` | is that process: the lab's own loop (`train`, `data`), or timm's `train.py` (`train_py`) |
| `image_folder` | finds the splits of an image folder, and refuses layouts that give wrong results |
| `folder` | says what is in a run's folder |
| `collect`, `report` | read folders, and make tables, figures and a page of them |
| `study` | strings these together: `timm-ortho study`, `timm-ortho compare` |

`import timm_ortho` imports nothing of it.
"""
import difflib
import json
import os
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Iterable, Iterator

import yaml

from .._text import without_nan


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
            raise LabError(f"{where} has no {what} '{name}'; the nearest is '{nearest(name, known)[0]}'")


def nearest(name: Any, known: Iterable[Any], count: int = 1) -> list[str]:
    """The known names that are most like a given one."""
    return difflib.get_close_matches(str(name), map(str, known), n=count, cutoff=0.0)


def shipped_files(folder: str) -> dict[str, Path]:
    """The YAML files in a folder of this package, by name."""
    return {path.stem: path for path in sorted(Path(str(files(__package__).joinpath(folder))).glob("*.yaml"))}


def read_user_yaml(path: Path, what: str) -> Any:
    """What somebody wrote; a LabError that says `what` it was to be if that is not YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LabError(f"{what} is not YAML: {' '.join(str(error).split())}") from None


@contextmanager
def whole_file(path: Path, writer: str = "") -> Iterator[Path]:
    """Where to write a file that takes the name `path` at the end: whoever finds `path` finds all of it.

    Files that several processes may write at once need the name of the `writer`.
    """
    partial = path.with_name(f".{path.name}{writer}.partial")
    try:
        yield partial
    except BaseException:
        if partial.exists():  # on a full disk every block counts, also of a file that torch's writer still has open
            os.truncate(partial, 0)
            partial.unlink()
        raise
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all, whenever the process or the machine dies."""
    with whole_file(path, f".{os.getpid()}") as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all; numbers that JSON does not have (NaN, infinities) become null."""
    write_text(path, json.dumps(without_nan(value), indent=1, allow_nan=False) + "\n")
