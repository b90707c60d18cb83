"""Read the files of a training run of timm's `train.py`, `timm-ortho compare` or `timm-ortho study`."""
import csv
import importlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any, Optional, Sequence

import torch

from .._text import without_nan


def load_checkpoint(path: Path) -> Any:
    """Load a checkpoint, which may contain timm's `args`, on the CPU with torch's restricted unpickler."""
    # Pass Namespace only if the caller has not allowed it: safe_globals forbids the classes passed to it when it exits.
    missing = {Namespace}.difference(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([*missing]):
        return torch.load(path, map_location="cpu", weights_only=True)


def read_history(folder: Path) -> list[dict]:
    """Return the metrics of each epoch from `summary.csv`, with None for NaN and infinities.

    If `train.py` resumes or starts again, it appends a second header and its rows to an existing file. A second row for
    an epoch replaces all previous rows of this epoch and of later epochs.

    Args:
        folder: Folder of the run.

    Returns:
        A dict for each epoch, empty if there is no file.
    """
    if not (folder / "summary.csv").is_file():
        return []
    with open(folder / "summary.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["epoch"] or "").isdecimal()]
    history: list[dict] = []
    for row in rows:
        epoch = int(row["epoch"])
        history = [earlier for earlier in history if earlier["epoch"] < epoch]
        metrics = {key: float(value) for key, value in row.items() if key and value}
        history.append({**without_nan(metrics), "epoch": epoch})
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


def import_modules(modules: Optional[Sequence[str]], error_class: type[ValueError]) -> None:
    """Import the modules of `train.py`'s option `device_modules`; raise ``error_class`` if one does not exist."""
    for module in modules or ():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise error_class(f"option 'device_modules': {error}: is its folder in PYTHONPATH?") from None
