"""timm's own train.py and validate.py, unmodified, on the variants.

Runs where TIMM_DIR points at a checkout of timm's repository, or at a folder with its train.py and validate.py: the
scripts are in no wheel. They are copied, so that they import the installed timm and not the checkout's. The images are
Fashion-MNIST's test set where TIMM_DATA points at a folder that torchvision reads it from (FashionMNIST/raw/ in it),
else a few that are made here.
"""
import csv
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

TIMM_DIR = os.environ.get("TIMM_DIR")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TIMM_DIR, reason="TIMM_DIR does not point at a checkout of timm, which has train.py"),
]

# Small enough for a CPU. The ResNet is the architecture as it is.
MODELS = {
    "vit_small_ortho": ["--model-kwargs", "img_size=28", "patch_size=7", "embed_dim=48", "depth=2", "num_heads=3"],
    "resnetv2_18_orthog": [],
}

# timm hands DDP a device id, which PyTorch refuses for modules on the CPU. This drops it and starts the script.
LAUNCH = """
import runpy
import sys

from torch.nn import parallel


class CpuDistributedDataParallel(parallel.DistributedDataParallel):
    def __init__(self, module, device_ids=None, **kwargs):
        super().__init__(module, **kwargs)


parallel.DistributedDataParallel = CpuDistributedDataParallel
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timm_scripts")
    for name in ("train.py", "validate.py"):
        source = Path(TIMM_DIR) / name
        assert source.is_file(), f"TIMM_DIR is {TIMM_DIR}, where there is no {name}"
        shutil.copy(source, folder)
    (folder / "launch.py").write_text(LAUNCH)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Folders of images, train/ and validation/, ten classes: of Fashion-MNIST, or made up."""
    folder = tmp_path_factory.mktemp("images")
    if os.environ.get("TIMM_DATA"):
        from torchvision.datasets import FashionMNIST

        data = FashionMNIST(os.environ["TIMM_DATA"], train=False)
        examples = [(image, label) for image, label in zip(data.data.numpy(), data.targets.tolist(), strict=True)]
    else:  # a bright row that stands elsewhere in each class
        generator = np.random.default_rng(0)
        pixels = generator.integers(0, 120, size=(600, 28, 28)).astype(np.uint8)
        examples = [(image, index % 10) for index, image in enumerate(pixels)]
        for image, label in examples:
            image[2 * label + 3] = 255
    for index, (image, label) in enumerate(examples[:600]):
        target = folder / ("train" if index < 400 else "validation") / str(label)
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(target / f"{index}.png")
    return folder


def call(command, cwd):
    """Runs it in a clean environment, returns its output; its output is in the message if it fails."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env["OMP_NUM_THREADS"] = "1"
    process = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=env, text=True, timeout=900,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.returncode == 0, f"{' '.join(map(str, command))}\n{process.stdout[-4000:]}"
    return process.stdout


def common(model, images):
    return ["--data-dir", images, "--model", model, *MODELS[model], "--num-classes", "10",
            "--input-size", "3", "28", "28", "--crop-pct", "1.0",
            "--batch-size", "40", "--workers", "0", "--no-prefetcher", "--device", "cpu"]


def train(scripts, images, output, model, *, processes=1, epochs=1, resume=None):
    """Trains; returns the rows of its summary.csv."""
    command = [scripts / "train.py", *common(model, images), "--device-modules", "timm_ortho",
               "--epochs", str(epochs), "--warmup-epochs", "0", "--opt", "adamw", "--lr", "1e-3", "--no-aug",
               "--output", output, "--experiment", "run"]
    if resume:
        command += ["--resume", resume]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["-m", "torch.distributed.run", "--nproc-per-node", processes, "--master-addr", "127.0.0.1",
                   "--master-port", port, scripts / "launch.py", *command]
    log = call(command, scripts)
    assert processes == 1 or f"Process 0, total {processes}" in log
    with open(output / "run" / "summary.csv", newline="") as file:
        return list(csv.DictReader(file))


def validate(scripts, images, model, checkpoint, output):
    """The top-1 accuracy that validate.py, started through the runner, finds."""
    call(["-m", "timm_ortho", "run", scripts / "validate.py", *common(model, images), "--checkpoint", checkpoint,
          "--results-file", output, "--results-format", "json"], scripts)
    results = json.loads(output.read_text())
    return (results[0] if isinstance(results, list) else results)["top1"]


@pytest.mark.parametrize("model", MODELS)
def test_trains_resumes_and_validates(scripts, images, tmp_path, model):
    first = train(scripts, images, tmp_path / "first", model, epochs=1)
    checkpoint = tmp_path / "first" / "run" / "last.pth.tar"
    assert [row["epoch"] for row in first] == ["0"]
    found = validate(scripts, images, model, checkpoint, tmp_path / "first.json")
    assert found == pytest.approx(float(first[0]["eval_top1"]), abs=0.01)

    more = train(scripts, images, tmp_path / "more", model, epochs=3, resume=checkpoint)
    assert [row["epoch"] for row in more] == ["1", "2"]
    assert float(more[-1]["train_loss"]) < float(first[0]["train_loss"])
    found = validate(scripts, images, model, tmp_path / "more" / "run" / "last.pth.tar", tmp_path / "more.json")
    assert found == pytest.approx(float(more[-1]["eval_top1"]), abs=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_trains_with_two_processes(scripts, images, tmp_path, model):
    rows = train(scripts, images, tmp_path / "two", model, processes=2)
    assert np.isfinite(float(rows[0]["train_loss"]))
    found = validate(scripts, images, model, tmp_path / "two" / "run" / "last.pth.tar", tmp_path / "two.json")
    assert found == pytest.approx(float(rows[0]["eval_top1"]), abs=0.01)


@pytest.mark.parametrize("processes", [1, 2])
def test_records_what_the_environment_asks_for(scripts, images, tmp_path, monkeypatch, processes):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setenv("TIMM_ORTHO_RECORD", str(path))
    monkeypatch.setenv("TIMM_ORTHO_RECORD_EVERY", "4")

    def steps():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["kind"] for row in rows[:4]] == ["attention", "mlp"] * 2
        return [row["step"] for row in rows[::4]]  # each four times: two blocks, and the first process only

    train(scripts, images, tmp_path / "first", "vit_small_ortho", processes=processes)
    first = [0, 4, 8] if processes == 1 else [0, 4]  # of 10 and of 5 steps
    assert steps() == first
    train(scripts, images, tmp_path / "more", "vit_small_ortho", processes=processes, epochs=2,
          resume=tmp_path / "first" / "run" / "last.pth.tar")
    assert steps() == [*first, *(first[-1] + 4 + step for step in first)]


def test_a_variant_is_unknown_without_the_device_module(scripts, images, tmp_path):
    """What --device-modules timm_ortho does, and that the test above would notice if it did nothing."""
    command = [sys.executable, scripts / "train.py", *common("vit_small_ortho", images), "--output", tmp_path]
    process = subprocess.run(list(map(str, command)), cwd=scripts, text=True, capture_output=True, timeout=300)
    assert process.returncode != 0
    assert "Unknown model (vit_small_ortho)" in process.stderr
