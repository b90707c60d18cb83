"""lab/device_images.py: images that are decoded once, and augmented in batches."""
import shutil
from argparse import Namespace

import numpy as np
import pytest
import torch
from helpers.tiny_study import (
    BATCHES,
    STAND_IN,
    assert_same_run,
    compared,
    one_run,
    request,
    result_of,
    stopped,
    training,
    written,
)
from PIL import Image
from torch.overrides import TorchFunctionMode

from timm_ortho import cli
from timm_ortho.lab import LabError, augmentation, commands, data, device_images
from timm_ortho.lab.folder import Variant
from timm_ortho.lab.planning import plan
from timm_ortho.lab.running import run
from timm_ortho.lab.train_options import DEVICE_OPTIONS
from timm_ortho.run_folder import read_options

CPU = torch.device("cpu")
EVERYTHING = dict(
    device_images=True, crop_padding=2, hflip=0.5, vflip=0.2, rand_augment=[3, 5], in_chans=3,
    color_jitter=[0.4, 0.4, 0.4, 0.1], reprob=0.3, mixup=0.4, cutmix=1.0)


def batches(one, epoch=0):
    """Return all training batches of an epoch."""
    one.data.reseed(data.epoch_seed(one.options.seed, epoch, 1))
    images, targets = zip(*one.data.iterate(one.train_loader), strict=True)
    return torch.stack(images), torch.stack(targets)


# ------------------------------------------------------------------------------------------ pairs and continued runs
def test_runs_of_one_seed_see_the_same_images():
    """Batches depend only on the seed and the epoch, even if a connection draws random numbers."""
    one, other = (training(connection=name, model_kwargs=kwargs, **EVERYTHING)
                  for name, kwargs in (("linear", {}), ("feature", {"connection_prob": 0.5})))
    torch.manual_seed(5)
    images, targets = batches(one)
    torch.rand(7), np.random.rand(3)  # noqa: NPY002 the global generators must have no effect
    other_images, other_targets = batches(other)
    assert images.shape == (BATCHES, 16, 3, 16, 16)
    assert torch.equal(images, other_images)
    assert torch.equal(targets, other_targets)
    assert not torch.equal(images, batches(one, epoch=1)[0])
    assert not torch.equal(images, batches(training(seed=1, **EVERYTHING))[0])


@pytest.mark.parametrize("step", [2, 2 * BATCHES, 3 * BATCHES + 1])
def test_continued_run_ends_with_the_same_weights(tmp_path, monkeypatch, step):
    options = dict(EVERYTHING, epochs=4, drop_path=0.2, model_kwargs={"connection_prob": 0.7})
    whole, parts = (one_run(tmp_path / name, **options) for name in ("whole", "parts"))
    run.run(whole)
    stopped(parts, monkeypatch, step)
    run.run(parts)
    assert_same_run(parts, whole)


# ---------------------------------------------------------------------------------------- the same images as a loader
def test_validation_images_are_those_of_the_loader(class_folders):
    """Validation images are resized and normalised by timm's operations, so they are equal bit by bit."""
    options = dict(img_size=16, crop_pct=0.9, validation_batch_size=5)
    here, there = (training(class_folders, device_images=on, **options) for on in (True, False))
    for (images, labels), (others, other_labels) in zip(here.eval_loader, there.eval_loader, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_without_augmentation_training_images_are_those_of_the_loader(class_folders):
    here, there = (training(class_folders, device_images=on, no_aug=True, img_size=12, model_kwargs={"patch_size": 4})
                   for on in (True, False))
    seen = [torch.cat([torch.cat([images.flatten(1), labels[:, None]], 1) for images, labels in one.train_loader])
            for one in (here, there)]
    rows = [sorted(map(tuple, images.tolist())) for images in seen]
    assert rows[0] == rows[1]
    assert not torch.equal(*seen)


@pytest.mark.parametrize("options", [
    dict(scale=[0.3, 1.0], ratio=[0.75, 1.33], hflip=0.5, vflip=0.5),
    dict(color_jitter=[0.5, 0.5, 0.5, 0.2]),
    dict(reprob=0.9, remode="const", mean=[0.0]),
    dict(reprob=0.9, remode="pixel", recount=2),
    dict(mixup=0.4, cutmix=1.0),
], ids=["crop-flip", "jitter", "erasing", "erasing-pixel", "mixing"])
def test_augmented_images_have_the_moments_of_the_loader(class_folders, options):
    """Means and variances agree within the variation between two samples of the loader."""
    options = dict(scale=[1.0, 1.0], ratio=[1.0, 1.0], train_interpolation="bilinear", color_jitter=0.0) | options
    measured = []
    for on, seed in ((True, 0), (False, 1), (False, 2)):
        one = training(class_folders, device_images=on, seed=seed, img_size=16, in_chans=3, batch_size=64, **options)
        images = torch.cat([batches(one, epoch)[0].flatten(0, 1) for epoch in range(8)])
        columns = images.mean((0, 2)), images.mean((0, 3))  # the distributions of the crop over rows and columns
        measured.append(torch.cat([images.mean((0, 2, 3)), images.var((0, 2, 3)), *map(torch.flatten, columns),
                                   images.flatten(1).var(1).mean()[None], images.mean((2, 3)).var(0)]))
    here, there, again = measured
    noise = (there - again).abs().mean() + 0.01
    assert (here - (there + again) / 2).abs().mean() < 2 * noise
    assert (here - (there + again) / 2).abs().max() < 0.15


@pytest.mark.slow
def test_training_is_as_with_the_loader(tmp_path):
    """After a few epochs on digits, accuracies agree within the variation between seeds."""
    options = dict(train_num_samples=None, val_num_samples=None, epochs=6, batch_size=64, scale=[0.8, 1.0], hflip=0.0,
                   lr=3e-3, drop_path=0.0, train_interpolation="bilinear")
    top1 = {}
    for on in (True, False):
        runs = [one_run(tmp_path / f"{on}{seed}", seed=seed, device_images=on, **options) for seed in (0, 1)]
        top1[on] = [run.run(folder)["top1"] for folder in runs]
    assert min(top1[True]) > 50
    assert abs(np.mean(top1[True]) - np.mean(top1[False])) < 12


# ------------------------------------------------------------------------------------------------ the augmentations
def test_rand_augment_keeps_or_replaces_the_jitter_as_in_timm():
    options = training(**EVERYTHING).options
    for aa, jitter in ((None, [0.4, 0.4, 0.4, 0.1]), ("rand-m2-tincreasing3a", [0.4, 0.4, 0.4, 0.1]),
                       ("rand-m2", [0.0] * 4)):
        changed = Namespace(**{**vars(options), "aa": aa})
        assert augmentation.Augment(changed, (16, 16), None, None).jitter == jitter


def test_mixing_stops_at_mixup_off_epoch():
    one = training(**{**EVERYTHING, "smoothing": 0.0})
    one.train_loader.mixup_enabled = False
    assert set(batches(one)[1].unique().tolist()) == {0.0, 1.0}
    one.train_loader.mixup_enabled = True
    assert len(batches(one)[1].unique()) > 2


def test_a_step_reads_no_value_from_the_device(monkeypatch):
    """On a GPU, reading a value waits for all earlier work. RandAugment reads only draws on the CPU."""
    one = training(**{**EVERYTHING, "rand_augment": None})
    next(iter(one.train_loader))  # decode
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"a step calls {name}"))
    one.data.reseed(0)
    for images, target in one.data.iterate(one.train_loader):
        one.loss(one.forward(images), target).backward()


class NoBlockingCopies(TorchFunctionMode):
    """Fail if a function copies values from the CPU to another device and waits for it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.device != CPU and not kwargs.get("non_blocking"):
            assert func not in (torch.tensor, torch.as_tensor)
            assert all(value.device != CPU for value in args if isinstance(value, torch.Tensor) and value.dim()), func
        return result


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("changes", [{}, {"crop_padding": 0, "remode": "const", "recount": 2}])
def test_the_augmentation_does_not_wait_for_its_device(device, changes):
    """Tensors on the device `meta` have no values, so reading one raises an error."""
    options = Namespace(**{**vars(training(**EVERYTHING).options), **changes})
    images = torch.zeros(16, 3, 8, 8, dtype=torch.uint8, device=device)
    normalise, mixing = (lambda x: x.sub_(0.5).div_(0.5)), dict(mixup_alpha=0.4, cutmix_alpha=1.0)
    augment = augmentation.Augment(options, (16, 16), normalise, dict(mixing, num_classes=10))
    labels = torch.zeros(16, dtype=torch.long, device=device)
    augment(images, labels)  # makes the tables of RandAugment
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with NoBlockingCopies():
            batch, _ = augment(images, labels)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert batch.shape == (16, 3, 16, 16)


# ---------------------------------------------------------------------------------------------- sizes and bad images
def test_smaller_images_are_stored_at_their_own_size(class_folders):
    one = training(class_folders, device_images=True, img_size=16)
    assert one.train_loader.stored()[0].shape == (64, 3, 12, 12)
    assert one.eval_loader.stored()[0].shape == (16, 3, 16, 16)
    assert batches(one)[0].shape[2:] == (3, 16, 16)
    smaller = training(class_folders, device_images=True, img_size=8)
    assert smaller.train_loader.stored()[0].shape == (64, 3, 8, 8)


@pytest.fixture
def several(class_folders, tmp_path):
    """Copy the images, and enlarge one of them."""
    root = shutil.copytree(class_folders, tmp_path / "several")
    Image.open(root / "train/dark/7.png").resize((20, 14)).save(root / "train/dark/7.png")
    return root


def command(folder, *words):
    return ["compare", "--data-dir", str(folder), "--connections", "linear", "--seeds", "1", "--epochs", "1",
            "-b", "16", "--device", "cpu", "-j", "0", "--device-images", *words]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [16, 8])
def test_images_of_several_sizes_are_stored_at_the_models_size(several, workers, size):
    """The first image is smaller or larger than the model's input."""
    one = training(several, device_images=True, img_size=size, workers=workers)
    assert one.train_loader.stored()[0].shape == (64, 3, size, size)


def test_a_corrupt_image_is_named(several, tmp_path, capsys):
    corrupt = several / "train" / "dark" / "7.png"
    corrupt.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert cli.main(command(several, "--output", str(tmp_path / "out"))) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"image {corrupt} cannot be used (" in last
    assert "remove or replace it" in last


@pytest.mark.parametrize(("changes", "message"), [
    (dict(rand_augment=[2, 31]), r"timm cannot build a run .* magnitude of RandAugment must be from 0 to 30, got 31"),
    (dict(rand_augment=None, aa="rand-m9"),
     r"the images cannot be stored on the device: 'aa' \(rand-m9\) exists only in the loader; "
     r"'rand_augment: \[N, M\]' is torchvision's RandAugment: use --no-device-images"),
    (dict(grayscale_prob=0.1), "'grayscale_prob' exists only in the loader"),
    (dict(color_jitter=[0.4, 0.4, 0.4, 0.9]), "hue values should be between"),
    (dict(crop_padding=0, train_crop_mode="rkrc"), "'train_crop_mode' rkrc exists only in the loader"),
    (dict(device_images=None), "option 'crop_padding' needs images that are stored on the device: add --device-images"),
])
def test_bad_options(changes, message):
    with pytest.raises(LabError, match=message):
        training(**{**EVERYTHING, **changes})


def test_images_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(device_images, "gpu_memory", lambda device: 20_000)
    with pytest.raises(LabError, match=r"the images cannot be stored on the device: 96 images need 0\.037 MB, but "
                                       r"cpu has 0\.020 MB of memory: use --no-device-images"):
        training(**EVERYTHING)
    monkeypatch.setattr(device_images, "gpu_memory", lambda device: 50_000)
    training(**EVERYTHING)  # 64 x 8 x 8 x 3 + 32 x 16 x 16 x 3 = 36,864 bytes


@pytest.mark.parametrize(("there", "requested", "device", "size", "on"), [
    (40_000, None, "cuda", 8, True), (32_000, None, "cuda", 8, False), (None, None, "cpu", 8, False),
    (None, True, "cpu", 8, True), (8_200, True, "cuda", 8, True), (None, False, "cuda", 8, False),
    (None, None, "cuda", 4, False), (None, True, "cuda", 4, True)])
def test_the_default_needs_a_gpu_with_four_times_the_memory_and_small_images(
        monkeypatch, there, requested, device, size, on):
    options = Namespace(**{**vars(training(device_images=True).options), "device": device, "device_images": requested})
    source = Namespace(first_size=(8, 8), in_chans=1, train=range(100), validation=range(28))  # 8,192 bytes
    monkeypatch.setattr(device_images, "gpu_memory", lambda device: there)
    assert device_images.decide(options, (size, size), source, {}) is on


def test_the_default_does_not_depend_on_other_processes_on_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Namespace(total_memory=40_000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 40_000))
    assert device_images.gpu_memory(torch.device("cuda")) == 40_000


# ------------------------------------------------------------------------------------------- the plan and the report
def test_plan_and_report_state_where_images_are(tmp_path, capsys):
    request = compared(tmp_path / "out", ["linear"], **EVERYTHING)
    assert commands.run(request) == 0
    printed = capsys.readouterr()
    sentence = "The decoded images are stored on the device, where whole batches are augmented."
    assert sentence in printed.err.splitlines()[1]
    assert sentence in (tmp_path / "out" / "report.md").read_text()
    args = read_options(tmp_path / "out" / "linear-seed0")
    assert {key: args[key] for key in DEVICE_OPTIONS} == {key: EVERYTHING[key] for key in DEVICE_OPTIONS}
    assert result_of(tmp_path / "out" / "linear-seed0")["images_per_second"] > 0
    with pytest.raises(LabError, match=r"has other settings \(crop_padding was 2 and is now 3"):
        commands.run(compared(tmp_path / "out", ["linear"], **{**EVERYTHING, "crop_padding": 3}))


@pytest.mark.parametrize("requested", [{}, {"device_images": False}])
def test_runs_with_a_loader_have_none_of_the_options(tmp_path, requested):
    """Folders of runs from before these options existed stay valid."""
    folder = one_run(tmp_path / "out", "linear", **requested)
    assert not set(DEVICE_OPTIONS) & set(Variant.read(folder).stages[0].options)


def test_train_py_loads_its_own_images(tmp_path):
    with pytest.raises(LabError, match=r"train.py loads its own images: remove --device-images or --train-py"):
        plan.plan(request(written(tmp_path), train_py=STAND_IN, device_images=True))
