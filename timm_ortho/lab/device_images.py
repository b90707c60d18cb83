"""Keep the decoded images of a data set on a device, where `lab.augmentation` augments whole batches.

A loader that decodes and augments each image on the CPU feeds a GPU about 2,000 images a second. Here, the images are
decoded once.
"""
import math
from argparse import Namespace
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import torch

from . import LabError
from .augmentation import Augment, Images
from .train_options import DEVICE_OPTIONS

_SHARE = 4  # by default, images are stored on a GPU if they need less than a quarter of its memory


# -------------------------------------------------------------------------------------------- the decision
def decide(options: Namespace, size: Sequence[int], source: Any, given: Mapping[str, Any]) -> bool:
    """Return whether the images of a run are stored on its device.

    The default is yes on a GPU if all augmentations exist there, the first image is not larger than the model's input,
    and the images need less than a quarter of its memory.

    Args:
        options: timm's options of the run.
        size: Height and width of the model's images.
        source: The opened data set.
        given: The options from the command line, which the user expects to have an effect.

    Raises:
        LabError: The user requests images on the device, but they cannot be stored or augmented there.
    """
    device = torch.device(options.device)
    reason = "they are not requested" if options.device_images is False else _why_not(options, source)
    if reason is None:
        needed, there = bytes_of(source, size), gpu_memory(device)
        share = 1 if options.device_images else _SHARE
        if there is not None and needed * share > there:
            count = len(source.train) + len(source.validation)
            reason = (f"{count} images need {_megabytes(needed)}, but {device} has {_megabytes(there)} of memory"
                      + ("" if options.device_images else f", of which they may take {1 / _SHARE:.0%}"))
    if reason is not None and options.device_images:
        raise LabError(f"the images cannot be stored on the device: {reason}: use --no-device-images")
    small = reason is None and stored_size(source.first_size, size) == tuple(source.first_size)
    on = reason is None and (options.device_images or (device.type == "cuda" and small))
    unused = [key for key in DEVICE_OPTIONS if key in given and key != "device_images"]
    if unused and not on:
        raise LabError(f"option '{unused[0]}' needs images that are stored on the device: add --device-images")
    return on


def _why_not(options: Namespace, source: Any) -> Optional[str]:
    """Return the first reason why a run needs the loader, None if there is none."""
    if source.first_size is None:
        return "a streamed data set is never complete in memory"
    for key in ("grayscale_prob", "gaussian_blur_prob", "color_jitter_prob"):
        if getattr(options, key):
            return f"option '{key}' exists only in the loader"
    if options.aa and not options.rand_augment:
        return f"'aa' ({options.aa}) exists only in the loader; 'rand_augment: [N, M]' is torchvision's RandAugment"
    if options.train_crop_mode not in (None, "rrc") and not options.crop_padding:
        return f"'train_crop_mode' {options.train_crop_mode} exists only in the loader"
    return None


def bytes_of(source: Any, size: Sequence[int]) -> int:
    """Return the memory of the stored images of both splits."""
    training = len(source.train) * math.prod(stored_size(source.first_size, size))
    return source.in_chans * (training + len(source.validation) * math.prod(size))


def stored_size(first: Sequence[int], size: Sequence[int]) -> tuple[int, int]:
    """Return the size at which training images are stored: the first image's, or the model's if this is smaller."""
    height, width = first if all(own <= other for own, other in zip(first, size, strict=True)) else size
    return height, width


def gpu_memory(device: torch.device) -> Optional[int]:
    """Return the memory of a GPU in bytes, None for a CPU or if the GPU is on another machine.

    The free memory would depend on other processes, and an equal command would then plan other runs.
    """
    is_here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).total_memory if is_here else None


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.{0 if count >= 1e6 else 3}f} MB"


# --------------------------------------------------------------------------------------------- the loaders
class DeviceLoader:
    """Batches of images that are stored on a device.

    Args:
        stored: A function that returns all images (uint8, NCHW) and labels. It is called for the first batch.
        dataset: The data set.
        batch_size: Number of images in a batch.
        prepare: A function from a batch of stored images to a batch of the model.
        training: Shuffle the images in each epoch, and leave out the last, incomplete batch.
    """

    def __init__(
            self, stored: Callable[[], Images], dataset: Any, batch_size: int, prepare: Callable[..., Images],
            training: bool,
    ) -> None:
        self.stored, self.dataset, self.batch_size = stored, dataset, batch_size
        self.prepare, self.training = prepare, training
        self.mixup_enabled = True  # the training loop sets it

    def __len__(self) -> int:
        return (len(self.dataset) if self.training else len(self.dataset) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[Images]:
        images, labels = self.stored()
        order = torch.randperm(len(images)) if self.training else torch.arange(len(images))
        for index in order.to(images.device).split(self.batch_size)[:len(self)]:
            yield self.prepare(images[index], labels[index], self.mixup_enabled)


def loaders(
        options: Namespace, source: Any, data_config: Mapping[str, Any], device: torch.device,
        decoded: Callable[[str, Sequence[int]], Images], mixing: Optional[Mapping[str, Any]],
) -> tuple[DeviceLoader, DeviceLoader]:
    """Return the loaders of training and validation images that are stored on the device.

    `decoded` returns all images of a split, `train` or `validation`, of a size. `mixing` has the arguments of timm's
    `Mixup`, or is None.
    """
    size = data_config["input_size"][1:]
    mean, std = (torch.tensor([255 * value for value in data_config[key]], device=device).view(1, -1, 1, 1)
                 for key in ("mean", "std"))

    def normalise(images: torch.Tensor) -> torch.Tensor:
        """Normalise images with values from 0 to 255, in the operations of timm's loader."""
        return images.sub_(mean).div_(std)

    validation = DeviceLoader(
        partial(decoded, "validation", size), source.validation, options.validation_batch_size or options.batch_size,
        lambda images, labels, _: (normalise(images.float()), labels), training=False)
    train = DeviceLoader(
        partial(decoded, "train", stored_size(source.first_size, size)), source.train, options.batch_size,
        Augment(options, size, normalise, mixing), training=True)
    return train, validation
