"""Read the files of a training run of timm's `train.py`, `timm-ortho compare` or `timm-ortho study`."""
import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Union

from .._text import UserError, error_text, whole_lines, without_nan


def read_history(folder: Path, finished: bool = False) -> list[dict]:
    """Return the metrics of each epoch from `summary.csv`, with None for NaN and infinities.

    If `train.py` resumes or starts again, it appends a second header and its rows to an existing file. A second row for
    an epoch replaces all previous rows of this epoch and of later epochs. A last row without a newline is incomplete
    and is skipped.

    Args:
        folder: Folder of the run.
        finished: Whether an incomplete row is an error, because nothing will complete it.

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
        text = path.read_text(encoding="utf-8")
        if finished and text != whole_lines(text):
            raise UserError(f"{path} is incomplete, because its last line has no newline: copy it again or remove it")
        rows = [row for row in csv.DictReader(whole_lines(text).splitlines()) if (row["epoch"] or "").isdecimal()]
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
    return [json.loads(line) for line in whole_lines(text).splitlines()]


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


def check_modules(options: Mapping[str, Any], source: str) -> None:
    """Raise a UserError if options of timm's `train.py` name modules that the user has not chosen.

    Their code would run, and another person may have written the options, for example in a run's folder. Modules of
    this package are imported.

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


# For timm's data sets torch/NAME: NAME -> the folder of the data set's files, relative to --data-dir.
TORCH_FOLDERS = {
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "mnist": "MNIST/raw",
    "kmnist": "KMNIST/raw",
    "qmnist": "QMNIST/raw",
    "fashion_mnist": "FashionMNIST/raw",
}


def is_local(dataset: str) -> bool:
    """Return whether timm only reads the files of a data set. Other data sets are downloaded, cached or unpacked.

    >>> is_local("torch/mnist"), is_local("torch/imagenet"), is_local("hfds/mnist")
    (True, False, False)
    """
    kind, _, name = dataset.lower().partition("/")
    if kind == "torch":
        return name in (*TORCH_FOLDERS, "image_folder", "folder")
    return kind not in ("hfds", "hfids", "tfds")


def check_sources(options: Mapping[str, Any], source: str, named: Mapping[str, Any]) -> None:
    """Raise a UserError for data sets and weights that run code, or that the command line does not allow to download.

    Args:
        options: timm's options by name. Another person may have written them.
        source: The file or folder of the options, for the message.
        named: timm's options on the command line.
    """
    class_map, dataset = options.get("class_map"), str(options.get("dataset") or "")
    if class_map and not str(class_map).lower().endswith(".txt"):
        raise UserError(f"class_map {class_map} is not a text file: write one class name on each line of a .txt file")
    if options.get("dataset_trust_remote_code"):
        raise UserError("code of data sets is never run: remove the option dataset_trust_remote_code")
    if not is_local(dataset) and dataset != named.get("dataset"):
        raise UserError(f"data set '{dataset}' of {source} would write files: if you trust it, name it on the command "
                        f"line (--dataset {dataset})")
    if options.get("dataset_download") and not named.get("dataset_download"):
        raise UserError(f"option 'dataset_download' of {source} has no effect in a file: set it on the command line "
                        "(--option dataset_download=true)")
    chosen = {"cache_dir", "pretrained_cfg", "pretrained_cfg_overlay"}.intersection(options.get("model_kwargs") or {})
    if options.get("pretrained") and chosen:
        raise UserError(f"model_kwargs of {source} choose the source of weights ({min(chosen)}): use the option "
                        "pretrained_path, which is a file")
