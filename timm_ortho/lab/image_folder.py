"""Find the folders of the training and validation images, and refuse layouts that give wrong results or are unsafe.

timm's reader takes the class of an image from the innermost folder in its path. If a split (training or validation) has
no folder, timm reads the images of the whole data set for this split.
"""
import hashlib
import os
from argparse import Namespace
from collections import Counter
from typing import Any, Collection, Mapping, Optional

import numpy as np
from PIL import Image
from timm.data.readers.class_map import load_class_map
from timm.data.readers.img_extensions import get_img_extensions

from .._compat import search_split
from .._text import UserError
from . import LabError, one_line

_TORCHVISION = ("torch/image_folder", "torch/folder")  # timm's two names for torchvision's ImageFolder
STREAMED = ("hfids", "tfds", "wds")  # prefixes of data sets to which train.py applies train_num_samples
READERS = ("hfds", *STREAMED)  # prefixes of timm's data sets that are neither folders nor torchvision's
LAYOUT = "the images must be in train/CLASS/ and in val/CLASS/ (or validation/CLASS/, or test/CLASS/)"


def is_torchvision_folder(options: Namespace) -> bool:
    """Return whether the data set is an image folder that is read by torchvision, not by timm's own reader."""
    return options.dataset.lower() in _TORCHVISION


def is_image_folder(options: Namespace) -> bool:
    """Return whether the data set is an image folder."""
    dataset = options.dataset.lower()
    return is_torchvision_folder(options) or dataset.partition("/")[0] not in ("digits", "torch", *READERS)


def is_here(options: Namespace) -> bool:
    """Return whether the data set is an image folder that exists on this machine."""
    return is_image_folder(options) and os.path.isdir(options.data_dir or "")


def find_splits(options: Namespace, hold_out: int = 0) -> str:
    """Check that both splits have a folder, and return the name of the validation split.

    The name is the option `val_split`, with one exception. If this option has its default `validation`, and there
    is no validation folder, the folder `test` is used.

    Args:
        options: timm's options.
        hold_out: Number of training images to validate on. If it is not 0, no validation folder is needed. If the
            training images have no folder either, all images of `data_dir` are training images.

    Raises:
        LabError: A split has no folder.
    """
    root = options.data_dir
    if not os.path.exists(root):
        raise LabError(f"there is no folder {root}: {LAYOUT} of --data-dir")
    if os.path.isfile(root):
        if not root.endswith(".tar"):
            raise LabError(f"{root} is a file: unpack it, and pass the folder; {LAYOUT} of --data-dir")
        return options.val_split

    def has(split: str) -> bool:
        return os.path.realpath(search_split(root, split)) != os.path.realpath(root)

    names = [options.val_split, *(["test"] if options.val_split == "validation" else [])]
    validation = next(filter(has, names), None)
    for noun, key, missing in (
            ("training", "train_split", not has(options.train_split) and not (hold_out and validation is None)),
            ("validation", "val_split", validation is None and not hold_out)):
        if missing:
            raise LabError(f"{root} has no folder for the {noun} images ({key} '{getattr(options, key)}'): "
                           f"{LAYOUT}; --option {key}=NAME names another folder")
    return options.val_split if hold_out else validation


def check_files(options: Namespace, split: str) -> None:
    """Raise a LabError if a split's folder contains a folder twice, or images whose format timm's reader skips.

    Two links to a parent folder give a folder billions of paths. If there is a class map, check only images in
    folders that are named after its classes, because timm reads no other folders. A class map for torchvision's folder,
    which ignores it, is also an error.
    """
    root = search_split(options.data_dir, split)
    if options.class_map and is_torchvision_folder(options):
        raise LabError(f"class_map has no effect on data set {options.dataset}: remove --dataset or class_map")
    classes = _numbers_of_classes(options.class_map, root) if options.class_map else {}
    folders: dict[str, tuple[str, list[str]]] = {}
    for folder, below, files in os.walk(root, followlinks=True):
        if classes and not below and os.path.basename(folder) not in classes:
            continue
        first, _ = folders.setdefault(os.path.realpath(folder), (folder, files))
        if first != folder:
            raise LabError(f"{first} and {folder} are the same folder: remove the link")
    if options.input_key or is_torchvision_folder(options):  # input_key sets the reader's file types
        return
    unread = {suffix for suffix, kind in Image.registered_extensions().items()
              if Image.MIME.get(kind, "").startswith("image/")}  # Pillow also lists .pdf, .mpg and .h5
    unread -= get_img_extensions(as_set=True)
    skipped = [os.path.join(folder, file) for folder, files in folders.values()
               if not classes or os.path.basename(folder) in classes
               for file in files if _suffix(file) in unread]
    if skipped:
        counts = ", ".join(f"{suffix}: {count}" for suffix, count in Counter(map(_suffix, skipped)).most_common())
        which = f"image of '{root}' has a format" if len(skipped) == 1 else f"images of '{root}' have formats"
        raise LabError(f"{len(skipped)} {which} that timm's reader skips ({counts}), first {min(skipped)}: convert "
                       f"{'it' if len(skipped) == 1 else 'them'} to PNG or JPEG")


def _numbers_of_classes(class_map: str, root: str) -> dict[str, int]:
    """Return the contents of a class map. A LabError refuses contents that timm reads wrongly."""
    try:
        path = class_map if os.path.exists(class_map) else os.path.join(root, class_map)
        if os.path.exists(path) and not os.path.isfile(path):  # nothing ever arrives from some pipes
            raise LabError("it is not a file")
        classes = load_class_map(class_map, root)
    except (AssertionError, OSError, ValueError) as error:
        raise LabError(f"class_map {class_map} cannot be read: {one_line(error)}") from None
    if any(name.startswith("\ufeff") for name in classes):
        raise LabError(f"class_map {class_map} begins with a byte order mark, which timm reads as part of the first "
                       "class: save the file as UTF-8 without this mark")
    if classes and len(classes) <= max(classes.values()):  # a class has the number of its last line
        raise LabError(f"class_map {class_map} has several lines with the same class: remove all but one")
    return classes


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def check_classes(options: Namespace, split: str, dataset: Any, train: Any = None) -> None:
    """Raise a LabError if the images of a split would get wrong labels, or if all have the same class.

    Args:
        options: timm's options.
        split: Name of the split, for the message.
        dataset: The opened split.
        train: The opened training split, which must have the same classes.
    """
    where = f"split '{split}' of {options.data_dir or options.dataset}"
    advice = _advice(options) if is_image_folder(options) else "use another data set or split"
    if hasattr(dataset, "reader") and not options.class_map:
        fault = _fault_of_layout(dict.fromkeys(sorted(map(os.path.dirname, _names(dataset)))))
        if fault:
            raise LabError(f"{where}: {fault}, and timm takes an image's class from its folder: {advice}")
    names, labels = class_names(dataset), _labels(dataset)
    if (names and len(names) == 1) or (labels is not None and len(np.unique(labels)) == 1):
        name = names[0 if labels is None else labels[0]] if names else ""
        raise LabError(
            f"{where}: all images are of one class{name and f' {name!r}'}, but at least two classes are needed: "
            f"{advice}")
    others = class_names(train) if train is not None else None
    if names and others and names != others:
        more = "" if is_torchvision_folder(options) else (
            "; if a split lacks classes, list all of them in --option class_map=FILE.txt, one per line")
        only = [f"{len(these)} only in '{which}' ({', '.join(these[:3])}{', ...' if len(these) > 3 else ''})"
                for which, these in ((options.train_split, [name for name in others if name not in names]),
                                     (split, [name for name in names if name not in others])) if these]
        fault = f"has other classes than split '{options.train_split}', {' and '.join(only)}" if only else (
            f"has the classes of split '{options.train_split}' in another order")
        raise LabError(f"{where} {fault}, so labels would mean different classes: {advice}{more}")


def _fault_of_layout(folders: Collection[str]) -> Optional[str]:
    """Return the reason why some of the folders cannot be class folders, or None if all can.

    A class folder must not be inside another class folder, and no two class folders may have the same name.

    Args:
        folders: All folders that contain images, as paths relative to the folder of the split.
    """
    first: dict[str, str] = {}
    for folder in folders:
        above = folder
        while above:
            above = os.path.dirname(above)
            if above in folders:
                outer = f"'{above}'" if above else "the split's own folder"
                return f"'{folder}' is inside {outer}, and both contain images"
        other = first.setdefault(os.path.basename(folder), folder)
        if other != folder:
            return f"class '{os.path.basename(folder)}' is in several folders, first '{other}' and '{folder}'"
    return None


def _labels(dataset: Any) -> Optional[np.ndarray]:
    """Return the labels of all images, or None if the data set does not list them."""
    dataset = getattr(dataset, "reader", dataset)
    targets = getattr(dataset, "targets", None)
    if targets is None and hasattr(dataset, "samples"):
        targets = [sample[1] for sample in dataset.samples]
    return None if targets is None else np.asarray(targets)


def _advice(options: Namespace) -> str:
    """Return the expected layout as text. For Tiny ImageNet as downloaded, name the page with the commands."""
    if not os.path.isfile(os.path.join(options.data_dir, "val", "val_annotations.txt")):
        return LAYOUT
    return f"{LAYOUT}. This is Tiny ImageNet's own layout: docs/your_own_data.md has two commands that convert it"


def refuse_shared_images(train: Any, validation: Any) -> None:
    """Raise a LabError if the splits are equal or share an image file."""
    for key in ("train", "split"):  # attributes in which torchvision's data sets and timm's readers store their split
        mine, other = (getattr(getattr(part, "reader", part), key, None) for part in (train, validation))
        if mine is not None and mine == other:
            raise LabError(f"training and validation images would both come from {key}={mine!r}: change --option "
                           "train_split=NAME or val_split=NAME")
    roots = [getattr(getattr(part, "reader", part), "root", None) for part in (train, validation)]
    paths = [_paths(part) for part in (train, validation)]
    if not all(paths):
        if os.path.isfile(str(roots[0])) and os.path.realpath(roots[0]) == os.path.realpath(roots[1]):
            raise LabError(f"training and validation images would both come from {roots[0]}: {LAYOUT}")
        return
    held = {_identity(path) for path in paths[1]}
    shared = [path for path in paths[0] if _identity(path) in held]
    if shared:
        also = "is also a validation image" if len(shared) == 1 else "are also validation images"
        raise LabError(f"{len(shared)} of {len(paths[0])} training images {also}, first {shared[0]}: {LAYOUT}, "
                       "with no image in both")


def fingerprint(*datasets: Any) -> Optional[str]:
    """Return a digest of the names and sizes of all image files, None if the data sets have no files."""
    files = [(name, _status(path).st_size) for part in datasets
             for name, path in zip(_names(part), _paths(part), strict=True)]
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()[:16] if files else None


def _paths(dataset: Any) -> list[str]:
    """Return the paths of the image files of a split, [] if the data set has no files."""
    samples = getattr(getattr(dataset, "reader", dataset), "samples", ())
    return [sample[0] for sample in samples if isinstance(sample[0], str)]


def _names(dataset: Any) -> list[str]:
    """Return the paths of the image files, relative to the folder of their split."""
    root = str(getattr(getattr(dataset, "reader", dataset), "root", ""))
    return [path.removeprefix(root).lstrip(os.sep) for path in _paths(dataset)]


def _identity(path: str) -> Any:
    """Return a value that identifies a file: it is equal for all links to the file."""
    status = _status(path)
    # on a file system without inode numbers, st_ino is 0
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path)


def _status(path: str) -> os.stat_result:
    """Return the status of an image file. A missing or empty file, such as a pipe, raises a LabError."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise LabError(f"image {path} cannot be read ({error.strerror}): remove or replace it") from None
    if not status.st_size:
        raise LabError(f"image {path} is empty: remove or replace it")
    return status


# ------------------------------------------------------------------------------------- timm's data sets
def class_names(dataset: Any) -> Optional[list[str]]:
    """Return the class names of a data set of torchvision or timm in the order of the labels, or None if unknown."""
    dataset = getattr(dataset, "dataset", dataset)
    index = getattr(getattr(dataset, "reader", None), "class_to_idx", None)
    names = getattr(dataset, "classes", None) or (sorted(index, key=index.get) if index else None)
    return [str(name) for name in names] if names else None


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
    """Return whether timm only reads the files of a data set. Other data sets are downloaded, cached or unpacked."""
    kind, _, name = dataset.lower().partition("/")
    if kind == "torch":
        return name in (*TORCH_FOLDERS, "image_folder", "folder")
    return kind not in ("hfds", "hfids", "tfds")


# Options that connect to a network, which only the command line may set, and what they do.
NETWORK = {
    "dataset_download": "downloads images",
    "kd_model_name": "downloads the weights of a teacher",
    "pretrained": "may download weights",  # with pretrained_path, timm reads this file instead
    "log_wandb": "sends metrics to a service",
}


def check_sources(options: Mapping[str, Any], source: str, named: Mapping[str, Any]) -> None:
    """Raise a UserError for data sets and weights that run code, and for network access that the command line lacks.

    Another person may have written `options`, in the file or folder `source`. `named` has the command line's options.
    """
    class_map, dataset = options.get("class_map"), str(options.get("dataset") or "")
    if class_map and not str(class_map).lower().endswith(".txt"):
        raise UserError(f"class_map {class_map} is not a text file: write one class name on each line of a .txt file")
    if options.get("dataset_trust_remote_code"):
        raise UserError("code of data sets is never run: remove the option dataset_trust_remote_code")
    if not is_local(dataset) and dataset != named.get("dataset"):
        raise UserError(f"data set '{dataset}' of {source} would write files: if you trust it, name it on the command "
                        f"line (--dataset {dataset})")
    chosen = {"cache_dir", "pretrained_cfg", "pretrained_cfg_overlay"}.intersection(options.get("model_kwargs") or {})
    if options.get("pretrained") and chosen:
        raise UserError(f"model_kwargs of {source} choose the source of weights ({min(chosen)}): use the option "
                        "pretrained_path, which is a file")
    for key, effect in NETWORK.items():
        value = options.get(key)
        if value and value != named.get(key) and not (key == "pretrained" and options.get("pretrained_path")):
            raise UserError(f"option '{key}' of {source} {effect}: if you trust it, set it on the command line "
                            f"(--option {key}={'true' if value is True else value})")
