"""`timm-ortho compare` and timm's train.py on a few photographs at 224 x 224, for one epoch.

The environment variable IMAGENETTE must name a folder with train/CLASS/ and val/CLASS/ for ten classes. The test of
train.py also requires the environment variable TIMM_DIR, which names the folder of train.py.
"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.tiny_study import read

from timm_ortho import cli
from timm_ortho.runs.folders import read_history

IMAGENETTE, TIMM_DIR = os.environ.get("IMAGENETTE"), os.environ.get("TIMM_DIR")
pytestmark = [
    pytest.mark.slow, pytest.mark.usefixtures("undrawn"),
    pytest.mark.skipif(not IMAGENETTE, reason="the variable IMAGENETTE does not name a folder of photographs")]


def test_compare_on_photographs(tmp_path, capsys):
    assert cli.main([
        "compare", "--data-dir", IMAGENETTE, "--model", "vit_tiny_patch16_224", "--connections", "linear", "feature",
        "--epochs", "1", "--seeds", "1", "--device", "cpu", "-j", "0", "-b", "16", "-o", "train_num_samples=64",
        "-o", "val_num_samples=32", "--output", str(tmp_path / "out")]) == 0
    assert "64 training images and 32 validation images (split “val”)" in capsys.readouterr().err
    data = yaml.safe_load((tmp_path / "out" / "study.yaml").read_text())["study"]["data"]
    assert (data["image_size"], data["size_from"], data["channels"]) == ([224, 224], "the model's default", 3)
    runs = read(tmp_path / "out" / "results.json")["runs"]
    assert [(run["connection"], len(run["history"])) for run in runs] == [("linear", 1), ("feature", 1)]
    assert all(0.0 <= run["history"][0]["eval_top1"] <= 100.0 for run in runs)


@pytest.mark.skipif(not TIMM_DIR, reason="the variable TIMM_DIR does not name the folder of timm's train.py")
def test_train_py(tmp_path):
    """train.py uses all images of a folder, so the test makes a folder with links to a few images of each class."""
    shutil.copy(Path(TIMM_DIR, "train.py"), tmp_path)  # the copy imports the installed timm
    for split, count in (("train", 4), ("val", 2)):
        for label in sorted(path for path in Path(IMAGENETTE, split).iterdir() if path.is_dir()):
            folder = tmp_path / "data" / split / label.name
            folder.mkdir(parents=True)
            for image in sorted(label.iterdir())[:count]:
                (folder / image.name).symlink_to(image.resolve())
    subprocess.run([
        sys.executable, "train.py", "--device-modules", "timm_ortho", "--model", "vit_tiny_patch16_224_ortho",
        "--data-dir", "data", "--num-classes", "10", "--epochs", "1", "--warmup-epochs", "0", "-b", "8", "-j", "0",
        "--device", "cpu", "--opt", "adamw", "--lr", "1e-4", "--output", "out", "--experiment", "run"],
        cwd=tmp_path, check=True)
    (row,) = read_history(tmp_path / "out" / "run")
    assert 0.0 < row["train_loss"] < 10.0
    assert 0.0 <= row["eval_top1"] <= 100.0
