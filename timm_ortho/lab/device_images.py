"""Keep the decoded images of a data set on a device, and augment whole batches there.

A loader that decodes and augments each image on the CPU feeds a GPU about 2,000 images a second. Here, the images are
decoded once. The augmentation of a batch, in this order:

    crop            pad by `crop_padding` pixels and crop, or resize a random crop (`scale`, `ratio`)
    flips           `hflip`, `vflip`
    RandAugment     torchvision's, `rand_augment: [N, M]`; `rand_augment_group` images share a sequence of operations
    colour jitter   `color_jitter`, as in torchvision, with its own order of the four changes for each image
    normalisation   `mean`, `std`
    erasing         timm's `RandomErasing` (`reprob`, `remode`, `recount`)
    mixing          timm's `Mixup` (`mixup`, `cutmix`, ...)

All steps except RandAugment and mixing are drawn for each image. Random numbers come from the global generators, whose
states `DataStream` sets. A training step reads no value from the device.
"""
import math
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch.nn import functional as F
from torchvision.transforms import v2

from . import LabError
from .train_options import DEVICE_OPTIONS

Images = tuple[torch.Tensor, torch.Tensor]  # images and labels

_SHARE = 4  # by default, images are stored on a GPU if they need less than a quarter of its free memory
_GREY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue


# -------------------------------------------------------------------------------------------- the decision
def decide(options: Namespace, size: Sequence[int], source: Any, given: Mapping[str, Any]) -> bool:
    """Return whether the images of a run are stored on its device.

    The default is yes on a GPU if all augmentations exist there and the images need less than a quarter of its free
    memory.

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
        needed, free = bytes_of(source, size), free_memory(device)
        share = 1 if options.device_images else _SHARE
        if free is not None and needed * share > free:
            count = len(source.train) + len(source.validation)
            reason = (f"{count} images need {_megabytes(needed)}, but {device} has {_megabytes(free)} of free memory"
                      + ("" if options.device_images else f", of which they may take {1 / _SHARE:.0%}"))
    if reason is not None and options.device_images:
        raise LabError(f"the images cannot be stored on the device: {reason}: use --no-device-images")
    on = reason is None and (options.device_images or device.type == "cuda")
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


def free_memory(device: torch.device) -> Optional[int]:
    """Return the free memory of a device in bytes, None if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return None


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
        self.stream: Any = None

    def __len__(self) -> int:
        return (len(self.dataset) if self.training else len(self.dataset) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[Images]:
        images, labels = self.stored()
        order = torch.randperm(len(images)) if self.training else torch.arange(len(images))
        order = order.to(images.device)
        if images.device.type == "cuda":
            # torchvision copies parameters of RandAugment to the GPU, and each copy waits for its stream. On a second
            # stream, a copy does not wait for the training of the previous batch.
            self.stream = self.stream or torch.cuda.Stream(images.device)
            self.stream.wait_stream(torch.cuda.current_stream(images.device))
        for index in order.split(self.batch_size)[:len(self)]:
            with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                batch = self.prepare(images[index], labels[index], self.mixup_enabled)
            if self.stream:
                consumer = torch.cuda.current_stream(images.device)
                consumer.wait_stream(self.stream)
                for tensor in batch:
                    tensor.record_stream(consumer)
            yield batch


def loaders(
        options: Namespace, source: Any, data_config: Mapping[str, Any], device: torch.device,
        decoded: Callable[[str, Sequence[int]], Images], mixing: Optional[Mapping[str, Any]],
) -> tuple[DeviceLoader, DeviceLoader]:
    """Return the loaders of training and validation images that are stored on the device.

    `decoded` returns all images of a split, `train` or `validation`, of a size. `mixing` has the arguments of timm's
    `Mixup`, or is None.
    """
    size = data_config["input_size"][1:]
    normalise = _Normalise(data_config["mean"], data_config["std"], device)
    validation = DeviceLoader(
        partial(decoded, "validation", size), source.validation, options.validation_batch_size or options.batch_size,
        lambda images, labels, _: (normalise(images.float()), labels), training=False)
    augment = Augment(options, size, normalise, mixing, device)
    train = DeviceLoader(
        partial(decoded, "train", stored_size(source.first_size, size)), source.train, options.batch_size, augment,
        training=True)
    return train, validation


class _Normalise:
    """Normalise images with values from 0 to 255, in the operations of timm's loader."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self.mean, self.std = (
            torch.tensor([255 * value for value in values], device=device).view(1, -1, 1, 1) for values in (mean, std))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images.sub_(self.mean).div_(self.std)


# ---------------------------------------------------------------------------------------- the augmentation
class Augment:
    """Augment a batch of stored images to a size, in the order of the module's docstring."""

    def __init__(
            self, options: Namespace, size: Sequence[int], normalise: Callable, mixing: Optional[Mapping[str, Any]],
            device: torch.device,
    ) -> None:
        self.size, self.normalise, self.plain = tuple(size), normalise, options.no_aug
        self.padding, self.scale, self.ratio = options.crop_padding, options.scale, options.ratio
        self.mode = "bicubic" if options.train_interpolation == "bicubic" else "bilinear"
        self.flips = ((-1, options.hflip), (-2, options.vflip))
        self.rand_augment = v2.RandAugment(*options.rand_augment) if options.rand_augment else None
        self.group = options.rand_augment_group
        jitter = options.color_jitter or 0.0
        jitter = list(jitter) if isinstance(jitter, (list, tuple)) else [jitter] * 3
        if options.aa and "3a" not in options.aa:  # timm's rule: RandAugment replaces the jitter, except in 3-Augment
            jitter = []
        self.jitter = [*jitter, 0.0, 0.0, 0.0, 0.0][:4]
        self.erase = None
        if options.reprob and not options.no_aug:
            self.erase = RandomErasing(
                options.reprob, mode=options.remode, max_count=options.recount, device=str(device))
        self.mixup = Mixup(**mixing) if mixing else None

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, mixed: bool = True) -> Images:
        images = self._resized(images) if self.plain else self._augmented(images)
        images = self.normalise(images.float())
        if self.erase is not None:
            images = self.erase(images)
        if self.mixup is not None:
            self.mixup.mixup_enabled = mixed
            return self.mixup(images, labels)
        return images, labels

    def _resized(self, images: torch.Tensor) -> torch.Tensor:
        """Enlarge images that are stored at a smaller size than the model's."""
        if images.shape[-2:] == self.size:
            return images
        return _as_bytes(F.interpolate(images.float(), self.size, mode=self.mode, align_corners=False))

    def _augmented(self, images: torch.Tensor) -> torch.Tensor:
        if self.padding:
            images = self._resized(padded_crop(images, self.padding))
        else:
            images = resized_crop(images, self.size, self.scale, self.ratio, self.mode)
        for axis, probability in self.flips:
            if probability:
                chosen = torch.rand(len(images), 1, 1, 1, device=images.device) < probability
                images = torch.where(chosen, images.flip(axis), images)
        if self.rand_augment is not None:
            images = torch.cat([self.rand_augment(group) for group in images.split(self.group)])
        return color_jitter(images.float() / 255, *self.jitter) * 255 if any(self.jitter) else images


def _as_bytes(images: torch.Tensor) -> torch.Tensor:
    return images.round().clamp(0, 255).to(torch.uint8)


def padded_crop(images: torch.Tensor, padding: int) -> torch.Tensor:
    """Pad each image with black pixels on all sides, and crop its original size at a random position."""
    image, channel, row, column = torch.meshgrid(
        *(torch.arange(length, device=images.device) for length in images.shape), indexing="ij")
    top, left = torch.randint(2 * padding + 1, (2, len(images), 1, 1, 1), device=images.device)
    return F.pad(images, [padding] * 4)[image, channel, top + row, left + column]


def resized_crop(
        images: torch.Tensor, size: Sequence[int], scale: Sequence[float], ratio: Sequence[float],
        mode: str = "bilinear",
) -> torch.Tensor:
    """Resize a random crop of each image. The crops have the distribution of torchvision's `RandomResizedCrop`."""
    count, channels, height, width = images.shape
    tops, lefts, heights, widths = _boxes(count, height, width, scale, ratio, images.device)
    zero = torch.zeros_like(tops)
    theta = torch.stack([widths / width, zero, (2 * lefts + widths) / width - 1,
                         zero, heights / height, (2 * tops + heights) / height - 1], 1).view(count, 2, 3)
    grid = F.affine_grid(theta, [count, channels, *size], align_corners=False)
    return _as_bytes(F.grid_sample(images.float(), grid, mode, padding_mode="border", align_corners=False))


def _boxes(
        count: int, height: int, width: int, scale: Sequence[float], ratio: Sequence[float], device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Return top, left, height and width of a crop for each image.

    As in torchvision, this is the first of ten draws that fits into the image. If none fits, it is the largest centred
    crop whose ratio is allowed.
    """
    area = height * width * torch.empty(10, count, device=device).uniform_(*scale)
    aspect = torch.empty(10, count, device=device).uniform_(*map(math.log, ratio)).exp()
    widths, heights = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (widths <= width) & (heights <= height)
    first = fits.float().argmax(0, keepdim=True)
    widths, heights, fits = (values.gather(0, first)[0] for values in (widths, heights, fits))
    largest = min(max(width / height, ratio[0]), ratio[1])
    widths = torch.where(fits, widths, float(min(width, round(height * largest))))
    heights = torch.where(fits, heights, float(min(height, round(width / largest))))
    y, x = torch.where(fits, torch.rand(2, count, device=device), 0.5)
    tops, lefts = (y * (height - heights + 1)).floor(), (x * (width - widths + 1)).floor()
    return tops, lefts, heights, widths


def color_jitter(
        images: torch.Tensor, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0,
) -> torch.Tensor:
    """Change the colours of each image as torchvision's `ColorJitter` does, in an order of its own.

    torchvision's class draws one order and one set of factors for a batch. Values are from 0 to 1, and are not rounded.
    Grey images have no saturation and no hue.
    """
    grey = images.shape[1] == 1
    amounts = [brightness, contrast, 0.0 if grey else saturation, 0.0 if grey else hue]
    changes = [change for change, amount in enumerate(amounts) if amount]
    order = torch.rand(len(images), len(changes), device=images.device).argsort(1)
    factors = {change: _factors(images, amounts[change], centre=0.0 if change == 3 else 1.0) for change in changes}
    for position in range(len(changes)):
        before = images
        for number, change in enumerate(changes):
            chosen = (order[:, position] == number).view(-1, 1, 1, 1)
            images = torch.where(chosen, _CHANGES[change](before, factors[change]), images)
    return images


def _factors(images: torch.Tensor, amount: float, centre: float) -> torch.Tensor:
    low = max(0.0, centre - amount) if centre else -amount
    return torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(low, centre + amount)


def _grey(images: torch.Tensor) -> torch.Tensor:
    if images.shape[1] == 1:
        return images
    return sum(weight * channel for weight, channel in zip(_GREY, images.split(1, 1), strict=True))


def _blend(images: torch.Tensor, others: torch.Tensor | float, factors: torch.Tensor) -> torch.Tensor:
    return (factors * images + (1 - factors) * others).clamp(0, 1)


def _shifted_hue(images: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Shift the hue by a part of a turn. Value and chroma stay the same."""
    value, chroma = images.amax(1), images.amax(1) - images.amin(1)
    red, green, blue = images.unbind(1)
    divisor = torch.where(chroma > 0, chroma, 1)
    sixths = torch.where(value == red, (green - blue) / divisor, torch.where(
        value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor))
    # the channel with offset n has the value v - c max(0, min(k, 4 - k, 1)), with k = (n + hue in sixths) mod 6
    offsets = torch.arange(5, 0, -2, device=images.device).view(1, 3, 1, 1)
    k = (offsets + sixths[:, None] + 6 * turns) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


_CHANGES = (
    lambda images, factors: _blend(images, 0.0, factors),
    lambda images, factors: _blend(images, _grey(images).mean((1, 2, 3), keepdim=True), factors),
    lambda images, factors: _blend(images, _grey(images), factors),
    _shifted_hue,
)
