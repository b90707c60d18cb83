"""The commands for ImageNet-1k run on a folder with its layout: 1,000 class folders with a few tiny images each.

The environment variable TIMM_DIR must be a folder with timm's train.py and validate.py.
"""
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from timm.data import ImageNetInfo

from timm_ortho.lab.planning.recipe import text

ROOT = Path(__file__).parents[2]
TIMM_DIR = os.environ.get("TIMM_DIR")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TIMM_DIR, reason="TIMM_DIR, the folder of timm's train.py, is not set"),
]

CLASSES = ImageNetInfo().label_names()
# recipe, model and arguments of the model that make it small
RUNS = {
    "vit_base_patch16_224_imagenet1k": (
        "vit_base_patch16_224_ortho", ["img_size=32", "embed_dim=24", "depth=2", "num_heads=2"]),
    "resnetv2_50_imagenet1k": ("resnetv2_50_orthog", ["layers=(1,1,1,1)", "channels=(16,16,32,32)"]),
}


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Return a folder with two training images and one validation image per class."""
    folder = tmp_path_factory.mktemp("imagenet")
    for index, label in enumerate(CLASSES):
        content = io.BytesIO()
        Image.new("RGB", (36, 32), (index % 256, index // 4, 99)).save(content, "JPEG")
        for name in ("train/{}/1.JPEG", "train/{}/2.JPEG", "val/{}/1.JPEG"):
            path = folder / name.format(label)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.getvalue())
    return folder


def called(*words, cwd=None):
    """Run a command on the CPU, and return its output."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(word) for word in words], env=environment, cwd=cwd, text=True, timeout=600,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-9000:]
    return done.stdout


@pytest.mark.parametrize("recipe", RUNS)
def test_train_resume_validate_and_push(imagenet, tmp_path, recipe):
    model, kwargs = RUNS[recipe]
    file = tmp_path / "recipe.yaml"
    file.write_text(text(recipe), encoding="utf-8")
    sizes = ["--img-size", "32", "--model-kwargs", *kwargs]

    def train(epochs, *resumed):
        return called(
            sys.executable, Path(TIMM_DIR, "train.py"), "-c", file, "--model", model, "--data-dir", imagenet,
            *sizes, "--device", "cpu", *resumed, "--epochs", epochs,
            "--warmup-epochs", "0", "-b", "8", "--train-img-sizes", "32", "--train-batches-per-epoch", "3",
            "--validation-batch-size", "250", "--workers", "0", "--output", tmp_path, "--experiment", "run")

    assert "Train: 0 [   2/3 (100%)]" in train(1)
    run = tmp_path / "run"
    assert (run / "last.pth.tar").is_file()
    train(2, "--resume", run / "last.pth.tar")
    with open(run / "summary.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["epoch"] != "epoch"]
    assert [row["epoch"] for row in rows] == ["0", "1"]
    options = yaml.safe_load((run / "args.yaml").read_text())
    given = yaml.safe_load(text(recipe))
    changed = {"model", "batch_size", "epochs", "warmup_epochs"}
    assert {key: options[key] for key in given.keys() - changed} == {key: given[key] for key in given.keys() - changed}

    called(sys.executable, "-m", "timm_ortho", "run", Path(TIMM_DIR, "validate.py"), "--data-dir", imagenet, "--model",
           model, *sizes, "--crop-pct", given.get("crop_pct", 0.95), "--checkpoint", run / "last.pth.tar", "--device",
           "cpu", "--workers", "0", "--results-file", tmp_path / "results.json", "--results-format", "json")
    results = json.loads((tmp_path / "results.json").read_text())
    found = (results[0] if isinstance(results, list) else results)["top5"]
    assert found == pytest.approx(float(rows[-1]["eval_top5"]), abs=0.11)  # one image is 0.1 %; train.py has amp

    called(sys.executable, "-m", "timm_ortho", "push", run, "me/model", "--dry-run", "--output", tmp_path / "pushed")
    card = ModelCard.load(tmp_path / "pushed" / "README.md")
    assert card.data.datasets == ["ILSVRC/imagenet-1k"]
    assert {(result.dataset_type, result.dataset_name) for result in card.data.eval_results} == {
        ("ILSVRC/imagenet-1k", "ImageNet-1k")}
    config = json.loads((tmp_path / "pushed" / "config.json").read_text())
    assert config["label_names"] == CLASSES
    assert config["model_args"]["connection"] == ("feature" if model.endswith("_ortho") else "global")
