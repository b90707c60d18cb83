"""Read the files of a training run of timm's `train.py`, `timm-ortho compare` or `timm-ortho study`."""
import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Union

from .._text import UserError, error_text, without_nan


def read_history(folder: Path) -> list[dict]:
    """Return the metrics of each epoch from `summary.csv`, with None for NaN and infinities.

    If `train.py` resumes or starts again, it appends a second header and its rows to an existing file. A second row for
    an epoch replaces all previous rows of this epoch and of later epochs.

    Args:
        folder: Folder of the run.

    Returns:
        A dict for each epoch, empty if there is no file.

    Raises:
        UserError: The file is damaged.
    """
    path = folder / "summary.csv"
    history: list[dict] = []
    if not path.is_file():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if (row["epoch"] or "").isdecimal()]
        for row in rows:
            epoch = int(row["epoch"])
            history = [earlier for earlier in history if earlier["epoch"] < epoch]
            metrics = {key: float(value) for key, value in row.items() if key and value}
            history.append({**without_nan(metrics), "epoch": epoch})
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{path} is not a table of epochs ({error_text(error, named=True)}): remove it") from None
    return history


def json_lines(text: str) -> list[dict]:
    """Return the rows of a text in JSON Lines format. A last line without a newline is incomplete and is skipped.

    >>> json_lines('{"epoch": 0}\\n{"epo')
    [{'epoch': 0}]
    """
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def class_names(dataset: Any) -> Optional[list[str]]:
    """Return the class names of a data set of torchvision or timm in the order of the labels, or None if unknown."""
    dataset = getattr(dataset, "dataset", dataset)
    index = getattr(getattr(dataset, "reader", None), "class_to_idx", None)
    names = getattr(dataset, "classes", None) or (sorted(index, key=index.get) if index else None)
    return [str(name) for name in names] if names else None


Modules = Union[str, Sequence[str], None]  # the option `device_modules` of timm's `train.py`


def import_modules(modules: Modules) -> None:
    """Import modules that the user names; raise a UserError if one does not exist."""
    for module in _listed(modules):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UserError(f"option 'device_modules': {error}: is its folder in PYTHONPATH?") from None


def _listed(modules: Modules) -> list[str]:
    return [modules] if isinstance(modules, str) else [str(module) for module in modules or ()]


def own_modules(modules: Modules) -> list[str]:
    """Return the modules that are not part of this package."""
    return [module for module in _listed(modules) if module.partition(".")[0] != "timm_ortho"]


def check_options(options: Mapping[str, Any], source: str) -> None:
    """Raise a UserError for options of timm's `train.py` that could run code which the user has not chosen.

    Another person may have written the options, for example in a run's folder. Modules of this package are imported.

    Args:
        options: timm's options by name.
        source: The file or folder of the options, for the message.
    """
    modules = options.get("device_modules")
    for module in own_modules(modules):
        if module not in sys.modules:
            raise UserError(f"option 'device_modules' of {source} names the module '{module}', whose code would run: "
                            f"if you trust it, name it too (--device-modules {module}, or import it in Python)")
    import_modules(modules)  # the modules of this package
    class_map = options.get("class_map")
    if class_map and not str(class_map).lower().endswith(".txt"):
        raise UserError(f"class_map {class_map} is not a text file: write one class name on each line of a .txt file")
    streamed = [str(options.get(key)) for key in ("data_dir", "data", "train_split", "val_split")]
    if str(options.get("dataset")).lower().startswith("wds/") and any("pipe:" in value for value in streamed):
        raise UserError("webdataset would run the command after 'pipe:': set data_dir and the splits to files")
    if options.get("dataset_trust_remote_code"):
        raise UserError("code of data sets is never run: remove the option dataset_trust_remote_code")
