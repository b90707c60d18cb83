"""Image folders: which folders are the splits, and which layouts give wrong results.

timm takes each image's class from its folder. Where a split has no folder of its own, timm reads the whole data set.
"""
import filecmp
import os
from argparse import Namespace
from typing import Any, Sequence

from .._compat import search_split
from . import LabError

_TORCHVISION = ("torch/image_folder", "torch/folder")  # the two names that timm has for torchvision's ImageFolder
READERS = ("hfds", "hfids", "tfds", "wds")  # that find their data sets without a folder
LAYOUT = "the images must be in train/CLASS/ and in val/CLASS/ (or validation/CLASS/, or test/CLASS/)"
_COMPARED = 100  # pairs of files that are read to recognise a copy


def is_image_folder(options: Namespace) -> bool:
    dataset = options.dataset.lower()
    return dataset in _TORCHVISION or dataset.partition("/")[0] not in ("digits", "torch", *READERS)


def is_here(options: Namespace) -> bool:
    """Whether the data set is an image folder that this machine has."""
    return is_image_folder(options) and os.path.isdir(options.data_dir or "")


def find_splits(options: Namespace, hold_out: int = 0) -> str:
    """Return the name of the split to validate on: `val_split`, or `test` if its default has no folder.

    Raises:
        LabError: A split has no folder. With `hold_out` a folder without any split is allowed, all of it for training.
    """
    root = options.data_dir
    if not os.path.exists(root):
        raise LabError(f"there is no folder {root}: {LAYOUT} of --data-dir")
    if os.path.isfile(root):  # a tar file
        return options.val_split

    def has(split: str) -> bool:
        return os.path.realpath(search_split(root, split)) != os.path.realpath(root)

    names = [options.val_split, *(["test"] if options.val_split == "validation" else [])]
    validation = next(filter(has, names), None)
    for what, key, missing in (
            ("training", "train_split", not has(options.train_split) and not (hold_out and validation is None)),
            ("validation", "val_split", validation is None and not hold_out)):
        if missing:
            raise LabError(f"{root} has no folder for the {what} images ({key} '{getattr(options, key)}'): "
                           f"{LAYOUT}; --option {key}=NAME names another folder")
    return options.val_split if hold_out else validation


def refuse_shared_images(train: Any, validation: Any) -> None:
    """Raise a LabError if two opened splits have images in common, through links, nested folders or copies."""
    for key in ("train", "split"):  # of torchvision's data sets, and of timm's readers
        mine, other = (getattr(getattr(part, "reader", part), key, None) for part in (train, validation))
        if mine is not None and mine == other:
            raise LabError(f"training and validation images would both be of {key}={mine!r}: give another --option "
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
    if _are_copies(*paths, *roots):
        raise LabError(f"the validation images are copies of the training images ({roots[1]} and {roots[0]}): "
                       f"{LAYOUT}, with no image in both")


def _paths(dataset: Any) -> list[str]:
    """Return the images' files; [] for a data set that is no folder of files."""
    samples = getattr(getattr(dataset, "reader", dataset), "samples", ())
    return [sample[0] for sample in samples if isinstance(sample[0], str)]


def _identity(path: str) -> Any:
    """Identify a file whatever the links that lead to it."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise LabError(f"image {path} cannot be read: {error.strerror}") from None
    # some file systems have no inode numbers
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path)


def _are_copies(train: Sequence[str], validation: Sequence[str], train_root: str, validation_root: str) -> bool:
    """Whether most validation images have a training image of the same name, with the same bytes."""
    names = {os.path.relpath(path, train_root) for path in train}
    both = [name for name in (os.path.relpath(path, validation_root) for path in validation) if name in names]
    if 2 * len(both) < len(validation):
        return False
    return all(filecmp.cmp(os.path.join(train_root, name), os.path.join(validation_root, name), shallow=False)
               for name in both[::max(1, len(both) // _COMPARED)])

