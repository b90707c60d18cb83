"""`timm-ortho compare` on a few photographs at 224 x 224, for one epoch.

The environment variable IMAGENETTE must name a folder with train/CLASS/ and val/CLASS/ for ten classes.
"""
import os

import pytest
import yaml
from helpers.tiny_study import read

from timm_ortho import cli

IMAGENETTE = os.environ.get("IMAGENETTE")
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
