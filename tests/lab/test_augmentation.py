"""lab/augmentation.py: the augmentation of whole batches."""
import pytest
import torch
from torchvision.transforms import InterpolationMode, RandomResizedCrop, v2
from torchvision.transforms.v2 import functional as F

from timm_ortho.lab import augmentation
from timm_ortho.lab.augmentation import RandAugment

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------ crops and colours
def test_padded_crop_shifts_by_up_to_the_padding():
    image = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5)
    crops = augmentation.padded_crop(image.repeat(500, 1, 1, 1), 2)
    padded = F.pad(image, [2])
    shifts = {(top, left): padded[..., top:top + 5, left:left + 5][0] for top in range(5) for left in range(5)}
    found = {shift for crop in crops for shift, shifted in shifts.items() if torch.equal(crop, shifted)}
    assert found == set(shifts)
    assert all(any(torch.equal(crop, shifted) for shifted in shifts.values()) for crop in crops)


def test_boxes_are_those_of_torchvision():
    """Boxes fit into the image, and have the moments of RandomResizedCrop."""
    torch.manual_seed(0)
    scale, ratio = (0.1, 1.2), (0.5, 3.0)
    boxes = torch.stack(augmentation._boxes(4000, 20, 30, scale, ratio, CPU), 1)
    tops, lefts, heights, widths = boxes.unbind(1)
    assert torch.stack([tops, lefts, 20 - tops - heights, 30 - lefts - widths]).min() == 0
    image = torch.zeros(1, 20, 30)
    other = torch.tensor([RandomResizedCrop.get_params(image, scale, ratio) for _ in range(4000)]).float()
    torch.testing.assert_close(boxes.mean(0), other.mean(0), rtol=0, atol=0.3)
    torch.testing.assert_close(boxes.std(0), other.std(0), rtol=0, atol=0.3)


def test_a_crop_that_never_fits_is_the_largest_in_the_centre():
    boxes = augmentation._boxes(2, 10, 40, (1.0, 1.0), (0.5, 2.0), CPU)
    assert [values.tolist() for values in boxes] == [[0.0] * 2, [10.0] * 2, [10.0] * 2, [20.0] * 2]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resized_crop_is_torchvisions(monkeypatch, mode):
    """Inside the crop, pixels equal torchvision's resized_crop up to rounding."""
    torch.manual_seed(0)
    images = torch.randint(256, (2, 3, 12, 14), dtype=torch.uint8)
    box = (2, 3, 6, 5)
    monkeypatch.setattr(augmentation, "_boxes", lambda *_: [torch.full((2,), float(value)) for value in box])
    mine = augmentation.resized_crop(images, (18, 15), (1, 1), (1, 1), mode)
    theirs = F.resized_crop(images.float(), *box, [18, 15], interpolation=InterpolationMode(mode), antialias=False)
    inner = (mine.float() - theirs.clamp(0, 255))[..., 6:-6, 6:-6].abs()
    assert inner.max() <= 0.51


@pytest.mark.parametrize(("change", "adjust", "factor"), [
    (0, F.adjust_brightness, 1.4), (0, F.adjust_brightness, 0.6), (1, F.adjust_contrast, 1.4),
    (1, F.adjust_contrast, 0.6), (2, F.adjust_saturation, 1.4), (2, F.adjust_saturation, 0.0), (3, F.adjust_hue, 0.1),
    (3, F.adjust_hue, -0.4)])
@pytest.mark.parametrize("channels", [3, 1])
def test_colour_changes_are_torchvisions(change, adjust, factor, channels):
    if channels == 1 and change > 1:
        pytest.skip("grey images have no saturation and no hue")
    torch.manual_seed(0)
    images = torch.rand(4, channels, 6, 7)
    images[0, :, 0] = images[0, :1, 0]  # grey pixels have no hue
    factors = torch.full((4, 1, 1, 1), factor)
    torch.testing.assert_close(augmentation._CHANGES[change](images, factors), adjust(images, factor))


def test_each_image_has_its_own_colours():
    torch.manual_seed(0)
    same = torch.rand(1, 3, 4, 4).repeat(8, 1, 1, 1)
    for position in range(4):
        amounts = [0.4 if position == change else 0.0 for change in range(4)]
        changed = augmentation.color_jitter(same, *amounts)
        assert len({tuple(image.flatten().tolist()) for image in changed}) == 8
    assert torch.equal(augmentation.color_jitter(same), same)
    assert augmentation.color_jitter(same[:, :1], 0.1, 0.1, 0.1, 0.1).shape == (8, 1, 4, 4)


def test_each_image_has_its_own_order_of_changes(monkeypatch):
    torch.manual_seed(0)
    amounts = iter((1.5, 0.5, 1.8, 0.2))
    monkeypatch.setattr(augmentation, "_factors", lambda images, *_, **__: torch.full((64, 1, 1, 1), next(amounts)))
    changed = augmentation.color_jitter(torch.rand(1, 3, 4, 4).repeat(64, 1, 1, 1), 0.5, 0.5, 0.8, 0.2)
    assert 12 < len({tuple(image.flatten().tolist()) for image in changed}) <= 24


# ------------------------------------------------------------------------------------------------------ RandAugment
OPERATIONS = ("ShearX ShearY TranslateX TranslateY Rotate Brightness Posterize Solarize Color Contrast Sharpness "
              "AutoContrast Equalize Identity").split()


def by_torchvision(images, kind, magnitude):
    """Apply one of torchvision's operations, with its positive or negative sign."""
    name, theirs = OPERATIONS[kind // 2], v2.RandAugment(1, magnitude)
    levels, signed = theirs._AUGMENTATION_SPACE[name]
    level = levels(31, *images.shape[-2:])
    level = 0.0 if level is None else float(level[magnitude]) * (-1 if signed and kind % 2 else 1)
    return theirs._apply_image_or_video_transform(images, name, level, theirs.interpolation, theirs._fill)


def by_kinds(monkeypatch, images, magnitude, kinds):
    """Apply RandAugment with given kinds in place of draws."""
    with monkeypatch.context() as context:
        context.setattr(torch, "randint", lambda high, shape: kinds.reshape(shape))
        return RandAugment(len(kinds), magnitude)(images)


def noise(count, channels=3, height=20, width=16):
    """Return images of noise; every third is dark, and the second is of one colour."""
    images = torch.randint(256, (count, channels, height, width), dtype=torch.uint8)
    images[::3] //= 8
    images[1:2] = images[1:2, :, :1, :1]
    return images


@pytest.mark.parametrize("magnitude", [0, 5, 9, 20, 30])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 16, 16), (3, 9, 40), (1, 24, 16)])
def test_operations_return_torchvisions_bytes(monkeypatch, shape, magnitude):
    torch.manual_seed(0)
    images = noise(6, *shape)
    for kind in range(2 * len(OPERATIONS)):
        mine = by_kinds(monkeypatch, images, magnitude, torch.full((1, 6), kind))
        assert torch.equal(mine, by_torchvision(images, kind, magnitude)), OPERATIONS[kind // 2]
    assert set(OPERATIONS) == set(v2.RandAugment._AUGMENTATION_SPACE)


@pytest.mark.parametrize("count", [1, 2, 80])
def test_each_image_has_its_own_sequence(monkeypatch, count):
    """In small batches, most operations have no images."""
    torch.manual_seed(0)
    images, kinds = noise(count), torch.randint(28, (4, count))
    for image, mine, sequence in zip(images, by_kinds(monkeypatch, images, 9, kinds), kinds.T.tolist(), strict=True):
        for kind in sequence:
            image = by_torchvision(image, kind, 9)
        assert torch.equal(mine, image)


def test_operations_and_signs_are_equally_frequent():
    torch.manual_seed(0)
    image = torch.randint(40, 200, (3, 20, 16), dtype=torch.uint8)  # Equalize changes images of 255 pixels or more
    results = [by_torchvision(image, kind, 30) for kind in range(28)]
    counts = torch.zeros(28)
    for changed in RandAugment(1, 30)(image.repeat(5600, 1, 1, 1)):
        found = [kind for kind, result in enumerate(results) if torch.equal(changed, result)]
        assert found
        counts[found] += 1 / len(found)  # operations without a sign have two equal kinds
    assert (counts - 200).abs().max() < 4 * 200**0.5


def test_rand_augment_depends_only_on_the_seed():
    images, batches = noise(40), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        batches.append(RandAugment(3, 9)(images))
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert torch.equal(RandAugment(0, 9)(images), images)
