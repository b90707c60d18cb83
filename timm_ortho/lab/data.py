"""Open data sets and create loaders with timm's factories. scikit-learn's `digits` is also supported.

`DataStream` separates the random numbers of the loaders (order, augmentation, mixup) from the model's random numbers.
Runs with the same seed therefore see the same batches, even if their models draw random numbers.
"""
import json
import math
import os
import random
import re
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

import numpy as np
import torch
from PIL import Image
from timm.data import FastCollateMixup, create_dataset, create_loader
from timm.utils import random_seed
from torch.utils.data import Dataset, IterableDataset

from .._images import opened
from .._text import error_text
from . import LabError, device_images, one_line
from .image_folder import (
    LAYOUT,
    READERS,
    TORCH_FOLDERS,
    check_classes,
    check_files,
    class_names,
    find_splits,
    fingerprint,
    is_here,
    is_image_folder,
    is_torchvision_folder,
    refuse_shared_images,
)

_CACHE_BYTES = 2**30  # a split is kept in memory if its images, all of the first one's size, would need at most this


class Digits(Dataset):
    """The digits of scikit-learn: grey 8 x 8 images of 10 classes, 1,437 for training and 360 for validation.

    The split is always the same, with a fifth of each class for validation.

    >>> len(Digits(training=True)), len(Digits(training=False))
    (1437, 360)
    """

    classes = tuple(str(digit) for digit in range(10))

    def __init__(self, training: bool) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        data = load_digits()
        split = train_test_split(np.arange(len(data.target)), test_size=0.2, random_state=0, stratify=data.target)
        index = np.sort(split[0 if training else 1])
        # scikit-learn's pixels have 17 grey levels, 0 to 16
        self.images = [Image.fromarray(image) for image in np.round(data.images[index] * 255 / 16).astype(np.uint8)]
        self.targets = [int(target) for target in data.target[index]]
        self.transform: Optional[Callable] = None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int):
        image = self.images[index]
        return self.transform(image) if self.transform else image, self.targets[index]


class ImageError(LabError):
    """An image cannot be read.

    If a worker process of a loader raises this error, torch raises it again with the whole traceback as text. This
    class keeps only the last line, which has the original message.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.strip().splitlines()[-1].removeprefix(f"{__name__}.{type(self).__name__}: "))


class _View(Dataset):
    """The images of a data set at the positions `index`, by default all.

    If `mode` is set, the images are converted to this Pillow mode.

    An unreadable image raises an ImageError. timm's `ImageDataset` would return a different image in its place.
    """

    def __init__(self, dataset: Any, index: Optional[np.ndarray] = None, mode: Optional[str] = None) -> None:
        self.dataset = dataset
        self.index = np.arange(len(dataset)) if index is None else index
        self.mode = mode
        self.transform: Optional[Callable] = None
        self.cache: Optional[dict[int, tuple]] = None  # decoded images and targets by position; None turns caching off

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int):
        sample = None if self.cache is None else self.cache.get(index)
        if sample is None:
            image, target = self._read(int(self.index[index]))
            sample = image.convert(self.mode) if self.mode else image, target
            if self.cache is not None:
                self.cache[index] = sample
        image, target = sample
        return self.transform(image) if self.transform else image, target

    def _read(self, index: int):
        dataset = self.dataset
        if not hasattr(dataset, "reader"):  # not one of timm's data sets
            return dataset[index]
        with _naming(dataset.filename(index, absolute=True)):
            file, target = dataset.reader[index]
            with file:
                return opened(file, dataset.input_img_mode), target


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Turn any error into an ImageError with the file's name. Pillow raises many kinds of errors for damaged files."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        raise ImageError(f"image {file} cannot be used ({one_line(error)}): remove or replace it") from None


def _load(file: str) -> Image.Image:
    """Load an image as torchvision's loader does, but raise an ImageError with the file's name if this fails."""
    with _naming(file):
        return opened(file, "RGB")


@dataclass
class Source:
    """An opened data set: the training and validation images, and their properties."""

    train: Any
    validation: Any
    num_classes: int
    in_chans: int
    val_split: str  # the option `val_split`, or `test` if an image folder has no folder `validation`, see `find_splits`
    validation_name: str  # name of the validation images' folder or split for reports, or `hold-out`
    first_size: Optional[tuple[int, int]]  # height and width of the first training image; None if images are streamed
    labels: Optional[list[str]] = None  # class names, if the data set has them
    fingerprint: Optional[str] = None  # digest of the files of an image folder
    # decoded images and labels on a device, by split, size and device
    decoded: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def open_source(options: Namespace, hold_out: int = 0) -> Source:
    """Open the training and validation images of `options.dataset`.

    Args:
        options: timm's options.
        hold_out: Number of training images to validate on, evenly spaced; 0 to use the validation split. If the
            validation split is the test set, use held-out images to choose settings such as the learning rate.

    Raises:
        LabError: The data set cannot be opened, or its images cannot be used for training and validation.
    """
    kind = options.dataset.partition("/")[0]
    if not options.data_dir and (kind == "wds" or kind not in ("digits", *READERS)):
        name = f"data set '{options.dataset}'" if options.dataset else "an image folder"
        raise LabError(f"{name} needs --data-dir: {_where(options)}")
    check_shards(options)
    for key in ("train_num_samples", "val_num_samples"):
        if (count := getattr(options, key)) is not None and count < 1:
            raise LabError(f"{key} must be at least 1, got {count}")
    val_split = find_splits(options, hold_out) if is_image_folder(options) else options.val_split
    train = _open(options, options.train_split, True)
    check_classes(options, options.train_split, train)
    if hold_out:
        digest = fingerprint(train)
        train, validation = _split(train, hold_out)
    else:
        validation = _open(options, val_split, False)
        check_classes(options, val_split, validation, train)
        refuse_shared_images(train, validation)
        digest = fingerprint(train, validation)
    first, classes = _first_image(train), class_names(train)
    mode, size = getattr(first, "mode", None), getattr(first, "size", None)
    in_chans = _in_chans(options, mode)
    new_mode = options.input_img_mode or {1: "L", 3: "RGB"}.get(in_chans)
    new_mode = None if mode in (None, new_mode) else new_mode
    num_classes = _num_classes(options, classes)
    parts = [_view(train, options.train_num_samples, new_mode), _view(validation, options.val_num_samples, new_mode)]
    name = "hold-out" if hold_out else _validation_name(options, val_split, validation)
    return Source(*parts, num_classes, in_chans, val_split, name, size and size[::-1], classes,
                  digest)


# Paths in which webdataset expands nothing, and which it does not take for a URL or a shell command.
_PLAIN_PATH = re.compile(r"[\w/. ,=+-]+")


def check_shards(options: Namespace) -> None:
    """Raise a LabError unless the shards of a data set `wds/NAME` are files on this machine.

    timm reads the names of the shards from the splits or from a file in the folder. webdataset runs some as commands.
    """
    if not options.dataset.lower().startswith("wds/"):
        return
    folder = options.data_dir
    shards = [split.partition("|")[0] for split in (options.train_split, options.val_split)
              if "tar" in split or ".." in split]  # timm takes all other splits for names of splits in these files:
    paths = [folder, *(os.path.join(folder, name) for name in shards)]
    for file in filter(Path.is_file, map(Path(folder).joinpath, ("_info.json", "info.json"))):
        try:
            splits = json.loads(file.read_text(encoding="utf-8"))["splits"].values()
            paths += [os.path.join(folder, name) for split in splits for name in split["filenames"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LabError(f"{file} is not timm's description of shards ({one_line(error)})") from None
    for path in paths:
        if not _PLAIN_PATH.fullmatch(path) or not os.path.exists(path):
            raise LabError(f"'{path}' is not a file: data sets wds/ are read from files in --data-dir, one for each "
                           "split or those that _info.json lists, whose paths contain no special characters")


def _validation_name(options: Namespace, val_split: str, validation: Any) -> str:
    """Return the name of the validation images for reports. Data sets without a validation split use their test set."""
    if is_image_folder(options):
        return Path(getattr(validation, "reader", validation).root).name
    kind, _, name = options.dataset.partition("/")
    return "test" if kind == "digits" or name in TORCH_FOLDERS else val_split


def _view(dataset: Any, num_samples: Optional[int], mode: Optional[str]) -> Any:
    # timm applies num_samples to streamed data sets only, so apply it to all other data sets here
    part = num_samples is not None and not isinstance(dataset, IterableDataset) and num_samples < len(dataset)
    index = _evenly_spaced(num_samples, len(dataset)) if part else None
    strict = hasattr(dataset, "reader") and not isinstance(dataset, IterableDataset)
    return _View(dataset, index, mode) if part or mode or strict else dataset


def _evenly_spaced(count: int, size: int) -> np.ndarray:
    """Return `count` evenly spaced positions below `size`. If images are sorted by class, each class keeps its share.

    >>> _evenly_spaced(3, 9).tolist()
    [0, 3, 6]
    """
    return np.arange(count) * size // count


def _split(dataset: Any, hold_out: int) -> tuple[_View, _View]:
    """Hold `hold_out` images out of the training images. Return the remaining images and the held-out images."""
    if isinstance(dataset, IterableDataset):
        raise LabError("images cannot be held out of a streamed data set: set val_split instead")
    if not 0 < hold_out < len(dataset):
        raise LabError(f"hold_out is {hold_out}, but must be from 1 to {len(dataset) - 1}: there are {len(dataset)} "
                       "training images")
    index = _evenly_spaced(hold_out, len(dataset))
    return _View(dataset, np.setdiff1d(np.arange(len(dataset)), index)), _View(dataset, index)


def _open(options: Namespace, split: str, training: bool) -> Any:
    if options.dataset == "digits":
        return Digits(training)
    if is_here(options):
        check_files(options, split)
    try:
        dataset = create_dataset(
            options.dataset, root=options.data_dir, split=split, is_training=training,
            download=options.dataset_download, repeats=options.epoch_repeats,
            num_samples=options.train_num_samples if training else options.val_num_samples,
            input_img_mode=options.input_img_mode or ("L" if options.in_chans == 1 else "RGB"),
            trust_remote_code=options.dataset_trust_remote_code,
            **_named(options, "class_map batch_size seed input_key target_key"),
        )
    except (RuntimeError, OSError, AssertionError, ImportError, ValueError) as error:
        name = f"data set '{options.dataset}'" if options.dataset else "the image folder"
        raise LabError(f"{name} (split '{split}') cannot be read: {_where(options)} ({error_text(error)})") from None
    if is_torchvision_folder(options):
        dataset.loader = _load
    return dataset


def _named(options: Namespace, names: str) -> dict[str, Any]:
    """Return some options as keyword arguments. `names` lists them, separated by spaces."""
    return {name: getattr(options, name) for name in names.split()}


def _where(options: Namespace) -> str:
    kind, _, name = options.dataset.partition("/")
    root = options.data_dir or "DATA_DIR"
    if is_image_folder(options):
        return f"{LAYOUT} of {root}"
    if kind == "torch" and name in TORCH_FOLDERS:
        return (f"timm expects its files in {Path(root) / TORCH_FOLDERS[name]}: put them there, change --data-dir, or "
                "download them with --option dataset_download=true")
    if kind == "torch":
        known = ", ".join(f"torch/{name}" for name in TORCH_FOLDERS)
        return (f"timm expects torchvision's files in {root}; with --option dataset_download=true, timm can download "
                f"{known}")
    return f"timm opens it through its '{kind}' reader, see timm.data.create_dataset"


def _first_image(dataset: Any) -> Any:
    """Return the first image of the training set, None for a streamed data set."""
    if isinstance(dataset, IterableDataset):
        return None
    if len(dataset) == 0:
        raise LabError("the training set has no images")
    return _View(dataset)[0][0]


def _in_chans(options: Namespace, mode: Optional[str]) -> int:
    key, channels = "in_chans", options.in_chans
    if options.input_size is not None:
        key, channels = "input_size", options.input_size[0]
    if channels is None:
        return 1 if (options.input_img_mode or mode) == "L" else 3
    if channels not in (1, 3):
        raise LabError(f"option {key} sets {channels} channels, but images have 1 (grey) or 3 (RGB)")
    return channels


def _num_classes(options: Namespace, classes: Optional[list[str]]) -> int:
    if options.num_classes is not None:
        if classes and options.num_classes != len(classes):
            name, count = options.dataset or options.data_dir, len(classes)
            raise LabError(f"num_classes is {options.num_classes}, but data set '{name}' has {count} classes: use "
                           f"--option num_classes={count}, or other data")
        return options.num_classes
    if classes:
        return len(classes)
    raise LabError(f"the number of classes of data set '{options.dataset}' is unknown: add --option num_classes=N")


# ---------------------------------------------------------------------------------------------- loaders
def loaders(options: Namespace, source: Source, data_config: dict, device: torch.device):
    """Return a training loader and a validation loader: timm's loaders, or the loaders of `device_images`.

    Their batches are on the device and normalised. Training batches are also mixed, if the options use mixup or cutmix.
    Workers are restarted for each epoch, because a checkpoint does not contain the random states of running workers.
    """
    if options.batch_size > len(source.train):
        raise LabError(f"batch_size {options.batch_size} is larger than the training set of {len(source.train)} "
                       "images: choose a smaller one with --option batch_size=N")
    mixing = _mixup_arguments(options, source)
    on_device = vars(options).get("device_images")
    for split in (source.train, source.validation):
        # Do not cache in workers: their memory is lost after each epoch. Pillow uses 4 bytes per RGB pixel.
        if (isinstance(split, _View) and split.cache is None and not options.workers and not on_device
                and len(split) * math.prod(source.first_size) * 4 <= _CACHE_BYTES):
            split.cache = {}
    common = dict(
        **{key: data_config[key] for key in ("input_size", "mean", "std")}, num_workers=options.workers,
        pin_memory=options.pin_mem, device=device, persistent_workers=False)
    interpolation = "" if options.no_aug else options.train_interpolation
    train = create_loader(
        source.train,
        is_training=True,
        re_prob=options.reprob,
        re_mode=options.remode,
        re_count=options.recount,
        grayscale_prob=options.grayscale_prob or 0.0,
        gaussian_blur_prob=options.gaussian_blur_prob or 0.0,
        auto_augment=options.aa,
        interpolation=interpolation or data_config["interpolation"],
        collate_fn=FastCollateMixup(**mixing) if mixing else None,
        **_named(options, "batch_size no_aug train_crop_mode scale ratio hflip vflip color_jitter color_jitter_prob "
                          "worker_seeding"),
        **common,
    )
    validation = create_loader(
        source.validation,
        batch_size=options.validation_batch_size or options.batch_size,
        is_training=False,
        **{key: data_config[key] for key in ("interpolation", "crop_pct")},
        **common,
    )
    if on_device:  # timm has checked the options of its loaders, which read no image
        decode = partial(_decoded, options, source, data_config, device)
        return device_images.loaders(options, source, data_config, device, decode, mixing)
    return train, validation


class _OtherSizeError(Exception):
    """An image has another size than the first."""


def _of_size(size: tuple[int, int], transform: Callable, image: Image.Image) -> Any:
    """Apply a transform to an image of this height and width. Any other size raises an `_OtherSizeError`."""
    if image.size[::-1] != size:
        raise _OtherSizeError
    return transform(image)


def _decoded(
        options: Namespace, source: Source, data_config: dict, device: torch.device, split: str, size: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images of a split (uint8, NCHW) and their labels on a device. They are decoded once in a process.

    Images get timm's transform for evaluation to `size`, which is the input size of the model or, for training images,
    that of the first one. If not all images have this size, they get the input size of the model.
    """
    key, model_size = (split, tuple(size), str(device)), tuple(data_config["input_size"][1:])
    if key in source.decoded:
        return source.decoded[key]
    dataset = getattr(source, split)
    loader = create_loader(
        dataset, (source.in_chans, *size), batch_size=256, is_training=False, use_prefetcher=True,
        interpolation=data_config["interpolation"], crop_pct=1.0 if split == "train" else data_config["crop_pct"],
        num_workers=options.workers, device=device, persistent_workers=False).loader
    if key[1] != model_size:
        dataset.transform = partial(_of_size, source.first_size, dataset.transform)
    images = torch.empty(len(dataset), source.in_chans, *size, dtype=torch.uint8, device=device)
    labels = torch.empty(len(dataset), dtype=torch.long, device=device)
    own = DataStream(device)  # a loader draws a seed, which must not change the order of the first epoch in a process
    own.reseed(0)
    first = 0
    try:
        for batch, targets in own.iterate(loader):
            images[first:first + len(batch)], labels[first:first + len(batch)] = batch, targets
            first += len(batch)
        source.decoded[key] = images, labels
    except _OtherSizeError:
        del images, labels  # frees their memory
        source.decoded[key] = _decoded(options, source, data_config, device, split, model_size)
    return source.decoded[key]


def mixes(options: Namespace) -> bool:
    """Return whether the options use mixup or cutmix."""
    return options.mixup > 0 or options.cutmix > 0 or options.cutmix_minmax is not None


def _mixup_arguments(options: Namespace, source: Source) -> Optional[dict]:
    if not mixes(options):
        return None
    if options.batch_size % 2:
        raise LabError(f"mixup and cutmix need an even batch_size, not {options.batch_size}")
    return dict(
        mixup_alpha=options.mixup, cutmix_alpha=options.cutmix, cutmix_minmax=options.cutmix_minmax,
        prob=options.mixup_prob, switch_prob=options.mixup_switch_prob, mode=options.mixup_mode,
        label_smoothing=options.smoothing, num_classes=source.num_classes)


# ---------------------------------------------------------------------------------------- random numbers
def epoch_seed(seed: int, epoch: int, stream: int) -> int:
    """Derive a seed from a run's seed, an epoch, and the stream of random numbers (data or model).

    Different arguments give independent seeds. The result does not depend on the numbers drawn in earlier epochs. A run
    that is interrupted and continued therefore draws the same numbers as an uninterrupted run.
    """
    return int(np.random.SeedSequence([seed, epoch, stream]).generate_state(1)[0])


class DataStream:
    """Keep a state of the random generators for the data, separate from the state for the model.

    timm and torchvision draw from the global generators of Python, NumPy and PyTorch. While a batch is fetched, these
    generators have the state for the data. Afterwards, the state for the model is restored.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.state: Any = None

    def reseed(self, seed: int) -> None:
        """Seed the random numbers of the data. The states of the global generators stay the same."""
        self.state = _get_state(self.device)
        with self.active():
            random_seed(seed)

    def iterate(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a loader. Each batch is fetched with the random numbers of the data."""
        with self.active():
            batches = iter(loader)
        while True:
            with self.active():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context, give the global generators the state for the data."""
        before = _get_state(self.device)
        try:
            _set_state(self.state, self.device)
            yield
            self.state = _get_state(self.device)
        finally:
            _set_state(before, self.device)


def _get_state(device: torch.device) -> tuple:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda  # noqa: NPY002 timm uses this one


def _set_state(state: tuple, device: torch.device) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3], device)

