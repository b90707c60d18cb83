"""Augment whole batches of images on their device. The steps, in this order:

    crop            pad by `crop_padding` pixels and crop, or resize a random crop (`scale`, `ratio`)
    flips           `hflip`, `vflip`
    RandAugment     torchvision's, `rand_augment: [N, M]`
    colour jitter   `color_jitter`, as in torchvision, with its own order of the four changes for each image
    normalisation   `mean`, `std`
    erasing         timm's `RandomErasing` (`reprob`, `remode`, `recount`)
    mixing          timm's `Mixup` (`mixup`, `cutmix`, ...)

All steps except mixing are drawn for each image. Random numbers come from the global generators, whose states
`DataStream` sets. No step waits for the device, except mixing with `mixup_mode` elem or pair.
"""
import math
from argparse import Namespace
from functools import cache, partial
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as tv

Images = tuple[torch.Tensor, torch.Tensor]  # images and labels

_GREY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue


class Augment:
    """Augment a batch of stored images to a size, in the order of the module's docstring."""

    def __init__(
            self, options: Namespace, size: Sequence[int], normalise: Callable, mixing: Optional[Mapping[str, Any]],
    ) -> None:
        self.size, self.normalise, self.plain = tuple(size), normalise, options.no_aug
        self.padding, self.scale, self.ratio = options.crop_padding, options.scale, options.ratio
        self.mode = "bicubic" if options.train_interpolation == "bicubic" else "bilinear"
        self.flips = ((-1, options.hflip), (-2, options.vflip))
        self.rand_augment = RandAugment(*options.rand_augment) if options.rand_augment else None
        jitter = options.color_jitter or 0.0
        jitter = list(jitter) if isinstance(jitter, (list, tuple)) else [jitter] * 3
        if options.aa and "3a" not in options.aa:  # timm's rule: RandAugment replaces the jitter, except in 3-Augment
            jitter = []
        self.jitter = [*jitter, 0.0, 0.0, 0.0, 0.0][:4]
        self.erase = None
        if options.reprob and not options.no_aug:
            self.erase = RandomErasing(
                options.reprob, mode=options.remode, max_count=options.recount, device=options.device)
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
            images = self.rand_augment(images)
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
    """Return top, left, height and width of a box for each of `count` images.

    As in torchvision, this is the first of ten draws that fits into the image. If none fits, it is the largest centred
    box whose ratio is allowed.
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
    return (y * (height - heights + 1)).floor(), (x * (width - widths + 1)).floor(), heights, widths


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


# --------------------------------------------------------------------------------------------- RandAugment
class RandAugment:
    """torchvision's `v2.RandAugment` (31 bins, nearest pixels, black outside), with its own operations for each image.

    Images are sorted by operation. The operations of a line are computed together:

        ShearX, ShearY, TranslateX, TranslateY, Rotate    by a table of the pixel that each pixel is copied from
        Brightness, Posterize, Solarize                   by a table of the new value of each value
        Color, Contrast, Sharpness                        by `_blended`
        AutoContrast, Equalize, Identity                  by torchvision's functions, on three slices

    Operation k of this list has the kinds 2 k and 2 k + 1, one for each sign; they are equal if it has no sign. The CPU
    draws a kind for each image, so it knows the size of each slice.
    """

    def __init__(self, num_ops: int, magnitude: int) -> None:
        if not 0 <= magnitude <= 30:
            raise ValueError(f"the magnitude of RandAugment must be from 0 to 30, got {magnitude}")
        self.num_ops, self.magnitude = num_ops, magnitude

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        count, channels, *size = images.shape
        kinds, order = torch.randint(28, (self.num_ops, count)).sort()
        firsts = torch.tensor([10, *range(16, 23), 24, 26]).repeat(self.num_ops, 1)  # first kinds of the slices
        starts = torch.searchsorted(kinds, firsts).tolist()
        draws = torch.stack([kinds % 10, order, order.argsort()], 1)
        draws = draws.pin_memory() if images.is_cuda else draws  # copies from other memory may wait for the device
        draws = draws.to(images.device, non_blocking=True)
        sources, values, level = _tables(self.magnitude, *size, images.device)
        for (rows, order, back), (a, b, *signs, c, d, e) in zip(draws, starts, strict=True):
            moved, mapped, blended, stretched, equal, same = images.index_select(0, order).tensor_split([a, b, c, d, e])
            source = sources.index_select(0, rows[:a]).unsqueeze(1).expand(-1, channels, -1)
            images = torch.cat([
                F.pad(moved.flatten(2), [1, 0]).gather(2, source).unflatten(2, size),
                values.index_select(0, rows[a:b]).gather(1, mapped.flatten(1).long()).view_as(mapped),
                _blended(blended, [sign - b for sign in signs], level),
                tv.autocontrast(stretched), tv.equalize(equal), same,
            ]).index_select(0, back)
        return images


@cache
def _tables(magnitude: int, height: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the two tables of `RandAugment`, and the magnitude of Color, Contrast and Sharpness.

    torchvision makes the first from an image of the numbers 1, 2, ... (0 is outside), the second from all bytes.
    """
    def level(most: float, least: float = 0.0) -> float:
        return float(torch.linspace(least, most, 31)[magnitude])

    image = torch.arange(1.0, height * width + 1).view(1, height, width)
    byte = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    affine = partial(tv.affine, image, angle=0.0, scale=1.0)
    operations = (
        (0.3, lambda x: affine(translate=[0, 0], shear=[math.degrees(math.atan(x)), 0.0], center=[0, 0])),
        (0.3, lambda y: affine(translate=[0, 0], shear=[0.0, math.degrees(math.atan(y))], center=[0, 0])),
        (150.0 / 331.0 * width, lambda x: affine(translate=[int(x), 0], shear=[0.0, 0.0])),
        (150.0 / 331.0 * height, lambda y: affine(translate=[0, int(y)], shear=[0.0, 0.0])),
        (30.0, lambda angle: tv.rotate(image, angle)),
        (0.9, lambda change: tv.adjust_brightness(byte, 1 + change)),
        (0.0, lambda _: tv.posterize(byte, round(8 - magnitude / 7.5))),
        (0.0, lambda _: tv.solarize(byte, 255 * level(0.0, least=1.0))),
    )
    rows = [operation(sign * level(most)).flatten() for most, operation in operations for sign in (1, -1)]
    return torch.stack(rows[:10]).long().to(device), torch.stack(rows[10:]).to(device), level(0.9)


def _blended(images: torch.Tensor, bounds: Sequence[int], level: float) -> torch.Tensor:
    """Return torchvision's Color, Contrast and Sharpness of six slices, each with a positive and a negative sign.

    The signs share the image that they blend with. torchvision's Sharpness waits for the device, to copy a kernel.
    """
    output, signed = images.float(), (1 + level, 1 - level)
    grey = tv.rgb_to_grayscale(images)
    mean = grey.mean((1, 2, 3), keepdim=True, dtype=torch.float32)
    inner = output[bounds[3]:, :, 1:-1, 1:-1]
    edges = F.avg_pool2d(output[bounds[3]:], 3, 1, divisor_override=13).add_(inner, alpha=4 / 13).round_().sub_(inner)
    others = [*grey.tensor_split(bounds)[:2], *mean.tensor_split(bounds)[2:4],
              *F.pad(edges, [1] * 4).tensor_split([bounds[4] - bounds[3]])]
    factors = [*(signed if images.shape[1] > 1 else (1, 1)), *signed, *signed]  # grey images have no Color
    for number, (part, other, factor) in enumerate(zip(output.tensor_split(bounds), others, factors, strict=True)):
        (part.mul_(factor) if number < 4 else part).add_(other, alpha=1 - factor)
    return output.clamp_(0, 255).to(torch.uint8)
