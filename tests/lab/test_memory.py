"""planning/memory.py: the memory of a training step, and the precision and accumulated steps that fit."""
import csv
import re
from argparse import Namespace
from pathlib import Path

import pytest
import timm
import torch

from timm_ortho.bench.clock import saved_bytes
from timm_ortho.lab import LabError
from timm_ortho.lab.planning import memory, recipe
from timm_ortho.lab.planning.memory import GB, StepBytes
from timm_ortho.lab.train_options import defaults

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "helpers" / "stand_in_train.py"


def options(model="vit_test_ortho", **changed):
    return Namespace(**{**defaults(), "model": model, **changed})


# -------------------------------------------------------------------------------------------- measurements
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize(("model", "kwargs", "size"), [
    ("vit_test_orthog", {}, 8), ("resnetv2_18_cifar_ortho", {"channels": [8, 8, 16, 16], "stem_chs": 8}, 32),
    ("convnext_atto_ortho", {"depths": [1, 1, 1, 1]}, 64),
])
def test_bytes_equal_those_of_a_real_forward_pass(model, kwargs, size, amp):
    built = timm.create_model(model, **kwargs).train()

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return built(image)

    by_images = {}
    for images in (2, 6):
        image = torch.zeros(images, 3, size, size)
        by_images[images] = saved_bytes(forward, [*built.parameters(), *built.buffers()])
    step = memory.step_bytes(options(model, model_kwargs=kwargs, img_size=size, num_classes=None), amp)
    batch = 2 * 4 * 3 * size * size  # the next batch, and a copy
    assert step.image - batch == pytest.approx((by_images[6] - by_images[2]) / 4, rel=0.01)
    parameters = 4 * sum(parameter.numel() for parameter in built.parameters())
    assert step.fixed == pytest.approx(5 * parameters + by_images[2] - 2 * (step.image - batch), rel=0.01)
    with_ema = memory.step_bytes(
        options(model, model_kwargs=kwargs, img_size=size, num_classes=None, model_ema=True), amp)
    assert with_ema.fixed - step.fixed == parameters


def test_the_estimate_agrees_with_measurements_on_a_gpu():
    """An H200 needed the saved bytes, the weights and their gradients, and at most 4 % more.

    These numbers are of one process without an optimizer, so two copies of the parameters are left.
    """
    with open(ROOT / "model_cards" / "results" / "before_bench_models_gpu_h200.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["step"], row["candidate"]) == (
            "vit_small_patch16_224", "training", "ortho")]
    assert {row["dtype"] for row in rows} == {"float32", "amp bfloat16"}
    for row in rows:
        amp, images = row["dtype"] != "float32", int(row["shape"].split("x")[0])
        step = memory.step_bytes(options("vit_small_patch16_224_ortho"), amp)
        unused = 3 * 22_050_664 * 4 + images * 2 * 3 * 224 * 224 * 4  # optimizer and DDP; the next batch and a copy
        assert float(row["peak_memory"]) / (GB * step.gigabytes(images) - unused) == pytest.approx(1, abs=0.04)


def test_initial_weights_and_the_hub_are_not_read():
    step = memory.step_bytes(options(pretrained=True, initial_checkpoint="/nowhere"), False)
    assert step == memory.step_bytes(options(), False)


@pytest.mark.parametrize(("changed", "message"), [
    (dict(model_kwargs={"depht": 1}), "vit_test_ortho: .*depht"),
    (dict(img_size=16), r"vit_test_ortho: .*"),
])
def test_a_model_that_does_not_fit_its_options(changed, message):
    with pytest.raises(LabError, match=message):
        memory.step_bytes(options(**changed), False)


# ------------------------------------------------------------------------------------------------ settings
@pytest.mark.parametrize(("gigabytes", "asked", "expected"), [
    (100, {}, (1, False, 64)),  # 1 + 64 GB
    (50, {}, (1, True, 64)),  # 2 + 32 GB
    (38, {}, (1, True, 64)),
    (37, {}, (2, False, 32)),  # only 33.3 GB are used
    (20, {}, (2, True, 32)),
    (4, {}, (32, False, 2)),  # 3 GB, as with amp
    (50, {"amp": False}, (2, False, 32)),
    (100, {"amp": True}, (1, True, 64)),
    (100, {"steps": 4}, (4, False, 16)),
    (12, {"steps": 4}, (4, True, 16)),
])
def test_fewest_steps_then_float32(monkeypatch, gigabytes, asked, expected):
    measured = {False: StepBytes(GB, GB), True: StepBytes(2 * GB, GB // 2)}
    monkeypatch.setattr(memory, "step_bytes", lambda options, amp: measured[amp])
    fit = memory.fit(options(batch_size=256), 4, gigabytes, **asked)
    assert (fit.steps, fit.amp, fit.images) == expected
    assert fit.gigabytes == measured[fit.amp].gigabytes(fit.images) <= 0.9 * gigabytes


def test_nothing_fits(monkeypatch):
    monkeypatch.setattr(memory, "step_bytes", lambda options, amp: StepBytes(2 * GB, GB))
    with pytest.raises(LabError) as raised:
        memory.fit(options(batch_size=256), 4, 2)
    assert str(raised.value) == (
        "vit_test_ortho: a step with 1 image needs 3.0 GB with amp, but a plan uses only 1.8 GB of a GPU with 2 GB: "
        "use larger GPUs, or a smaller model, image size or batch")
    with pytest.raises(LabError, match=r"a step with 32 images needs 34\.0 GB, but"):
        memory.fit(options(batch_size=256), 4, 24, amp=False, steps=2)


def test_the_smallest_gpu_decides(monkeypatch):
    assert memory.gpu_memory(24) == memory.gpu_memory("24") == 24
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert memory.gpu_memory(None) == 40
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Namespace(total_memory=[48e9, 25e9][index]))
    assert memory.gpu_memory(None) == 25


# ------------------------------------------------------------------------------------------------ planning


# ------------------------------------------------------------------------------------------------- recipes
@pytest.mark.parametrize("name", [name for name in recipe.shipped() if name.endswith("_imagenet1k")])
def test_memory_in_headers_of_recipes(name):
    """The header states the measured memory, and its commands need at most 36 GB, which fit into a GPU of 40 GB."""
    text, given = recipe.shipped()[name].read_text(encoding="utf-8"), recipe.resolve(recipe.load(name))
    header = text.split("\ndevice_modules")[0].replace(" \\\n#      ", "")
    step = {"float32": memory.step_bytes(given, False), "amp": memory.step_bytes(given, True)}
    [(images, first, at_first, second, at_second)] = re.findall(
        r"# Memory: (\d+) images at once need about (\d+) GB (?:in|with) (\w+), (\d+) GB (?:in|with) (\w+)\.", header)
    assert {at_first: int(first), at_second: int(second)} == {
        kind: round(bytes_.gigabytes(int(images))) for kind, bytes_ in step.items()}
    for command in re.findall(r"^#   (?:python|torchrun) .* -b (\d+)(?! --train-img-sizes)", header, re.MULTILINE):
        assert step["amp" if given.amp else "float32"].gigabytes(int(command)) <= 36
