"""Run the papers' experiments: plan the runs, train each one in a process, and report what the run folders contain.

| module | purpose |
| --- | --- |
| `commands` | the functions behind `timm-ortho study` and `timm-ortho compare` |
| `costs` | parameters, FLOPs and throughput; nothing is trained |
| `reporting` | makes tables, plots and a page from run folders |
| `planning` | makes one folder for each run from a study's YAML |
| `running` | trains the run in a folder: launchers, the process of a run, the training loop, timm's script |
| `folder` | the files of a run |
| `options` | the options of timm's `train.py` |
| `data`, `image_folder` | data sets, loaders, and the layout of image folders |
| `paper` | the papers' numbers |

Planning, running and reporting share only the folders of the runs. `import timm_ortho` does not import the lab.
"""
import difflib
import json
import os
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Iterable, Iterator

import yaml

from .._text import error_text, without_nan


class LabError(ValueError):
    """The user's input cannot be used. The message is one line with the problem and the remedy."""


def one_line(error: BaseException) -> str:
    """Return an error as one line: the operating system's reason, a LabError's message, or otherwise class and message.

    >>> one_line(KeyError("epochs"))
    "KeyError: 'epochs'"
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, LabError) else error_text(error, named=True)


def check_names(names: Iterable[Any], known: Iterable[Any], owner: str, noun: str = "key") -> None:
    """Raise a LabError that suggests the nearest known name if a name is unknown."""
    for name in names:
        if name not in known:
            raise LabError(f"{owner} has no {noun} '{name}'; the nearest is '{nearest(name, known)[0]}'")


def nearest(name: Any, known: Iterable[Any], count: int = 1) -> list[str]:
    """Return the known names that are most similar to a name.

    >>> nearest("vit_smal", ["vit_small", "vit_base"])
    ['vit_small']
    """
    return difflib.get_close_matches(str(name), map(str, known), n=count, cutoff=0.0)


def shipped_files(folder: str) -> dict[str, Path]:
    """Return the YAML files in a folder of this package, by name."""
    return {path.stem: path for path in sorted(Path(str(files(__package__).joinpath(folder))).glob("*.yaml"))}


def value_text(value: Any) -> str:
    """Return a value as the paper writes it.

    >>> value_text(0.1), value_text(1e-06), value_text("none")
    ('0.1', '1e-6', 'none')
    """
    if not isinstance(value, float):
        return str(value)
    digits, _, power = f"{value:e}".partition("e")
    if value and not -2 <= int(power) <= 3:
        return f"{float(digits):g}e{int(power)}"
    return f"{value:g}"


def read_user_yaml(path: Path, subject: str) -> Any:
    """Return the contents of a user's YAML file. `subject` begins the LabError if it is not YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LabError(f"{subject} is not YAML: {error_text(error)}") from None


@contextmanager
def whole_file(path: Path, writer: str = "") -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` at the end. An incomplete file is therefore never at `path`.

    Args:
        path: The final path.
        writer: Suffix of the temporary path. Processes that write the same file need different suffixes.
    """
    partial = path.with_name(f".{path.name}{writer}.partial")
    try:
        yield partial
    except BaseException:
        if partial.exists():  # free the blocks of a full disk even while torch's writer has the file open
            os.truncate(partial, 0)
            partial.unlink()
        raise
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with whole_file(path, f".{os.getpid()}") as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; NaN and infinities become null."""
    write_text(path, json.dumps(without_nan(value), indent=1, allow_nan=False) + "\n")
