"""Run the papers' experiments: plan the runs, train each one in a process, and report what the run folders contain.

| module | purpose |
| --- | --- |
| `commands` | contains the functions behind `timm-ortho study` and `timm-ortho compare` |
| `costs` | puts parameters, FLOPs and throughput of models beside the paper's tables (`timm-ortho cost`) |
| `reporting` | makes tables, plots and a page from run folders |
| `planning` | makes one folder for each run of a study, which is defined by a YAML file |
| `running` | trains each run in a process of its own, with the lab's own loop or with timm's `train.py` |
| `folder` | reads and writes the files of a run |
| `train_options` | lists the options of timm's `train.py` |
| `data`, `image_folder` | open data sets, create loaders, and check the layout of image folders |
| `device_images`, `augmentation` | keep the images on the device, and augment whole batches there |
| `paper` | contains the papers' numbers |
| `representation` | compares the features of two models |
| `rewrites` | rewrites a network with skip transforms as an equivalent network |

Planning, running and reporting pass results only through the folders. `import timm_ortho` does not import the lab.
"""
import json
import os
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, Iterable, Iterator

from .._text import UserError, did_you_mean, error_text, without_nan
from .._yaml import YAMLError, load_yaml


class LabError(UserError, ValueError):
    """An error in the input of the lab."""


def one_line(error: BaseException) -> str:
    """Return an error as one line.

    For an OSError with the operating system's reason, the line is this reason. For a UserError, it is the message. For
    any other error, it is the class and the message.

    >>> one_line(KeyError("epochs"))
    "KeyError: 'epochs'"
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, UserError) else error_text(error, named=True)


def check_names(names: Iterable[Any], known: Iterable[Any], owner: str, noun: str = "key") -> None:
    """Raise a LabError if a name is unknown: "OWNER accepts no NOUN 'NAME'; did you mean 'KNOWN NAME'?"."""
    for name in names:
        if name not in known:
            raise LabError(f"{owner} accepts no {noun} '{name}'{did_you_mean(name, known, listed=True)}")


def shipped_files(folder: str) -> dict[str, Path]:
    """Return the paths of the YAML files in a folder of this package, by their names without suffix."""
    return {path.stem: path for path in sorted(Path(str(files(__package__).joinpath(folder))).glob("*.yaml"))}


def value_text(value: Any) -> str:
    """Return a value as text, with very small and very large numbers in short scientific notation.

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
    """Return the contents of a user's YAML file. If it is not YAML, raise a LabError that begins with `subject`."""
    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise LabError(f"{subject} is not YAML: {error_text(error)}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an error of the block, which writes a file, to a LabError in one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save raises a RuntimeError in place of the OSError of a full disk, and of the SystemExit after a signal
        cause = error.__context__ if isinstance(error.__context__, (OSError, SystemExit)) else error
        if isinstance(cause, SystemExit):
            raise cause from None
        raise LabError(f"{path} cannot be written ({one_line(cause)}): free disk space or correct the permissions, and "
                       "repeat the command") from None


@contextmanager
def whole_file(path: Path, writer: str = "") -> Iterator[BinaryIO]:
    """Open a temporary file, and rename it to `path` at the end. The file at `path` is never incomplete.

    Args:
        path: The final path.
        writer: Part of the temporary file's name. Processes that write the same file need different values.

    Raises:
        LabError: The file cannot be written, for example on a full disk.
    """
    partial = path.with_name(f".{path.name}{writer}.partial")
    with writing(path):
        try:
            partial.unlink(missing_ok=True)  # of a killed process, or another person's link to a file elsewhere
            with open(partial, "xb") as file:
                yield file
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        os.replace(partial, path)


def refuse_links(*folders: Path, inside: bool = True) -> None:
    """Raise a LabError if a folder is a symbolic link or, if `inside` is true, contains one.

    Another person may have made the folder. Writing through its links would change files elsewhere.
    """
    for path in (path for folder in folders for path in (folder, *(folder.rglob("*") if inside else ()))):
        if path.is_symlink():
            raise LabError(f"{path} is a link, and nothing is written through links: replace it by what it links to")


def write_text(path: Path, text: str) -> None:
    r"""Write a text file, which replaces an existing file in one step.

    Bytes of a file name that are not UTF-8, which Python reads as surrogates, are written as in `\udce9`.
    """
    with whole_file(path, f".{os.getpid()}") as file:
        file.write(text.encode(errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file with a line for each list or object of plain values. NaN and infinities become null."""
    write_text(path, _json(without_nan(value)) + "\n")


def _json(value: Any, indent: str = "") -> str:
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or not any(isinstance(item, (dict, list)) for item in items):
        return json.dumps(value, ensure_ascii=False)
    inner, keys, (first, last) = indent + " ", [""] * len(value), "[]"
    if isinstance(value, dict):
        keys, (first, last) = [f"{json.dumps(key, ensure_ascii=False)}: " for key in value], "{}"
    lines = ",\n".join(f"{inner}{key}{_json(item, inner)}" for key, item in zip(keys, items, strict=True))
    return f"{first}\n{lines}\n{indent}{last}"
