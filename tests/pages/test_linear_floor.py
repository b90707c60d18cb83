"""Test scripts/checks/linear_floor.py, which measures a linear classifier on the images of a run."""
import json

import numpy as np
from helpers.tiny_study import STUDY
from sklearn.linear_model import RidgeClassifier

from scripts.checks import linear_floor
from timm_ortho import cli
from timm_ortho.lab.data import Digits


def test_ridge_regression_on_the_images_of_a_run(tmp_path):
    study, output = tmp_path / "tiny.yaml", tmp_path / "out"
    study.write_text(STUDY.replace("record: 2", "hold_out: 300"))
    assert cli.main(["study", "plan", str(study), "--scale", "smoke", "--output", str(output)]) == 0
    linear_floor.main([output / "lr=0.001-linear-seed0"], tmp_path / "floors.json")
    found = json.loads((tmp_path / "floors.json").read_text())["tiny-digits-smoke"]
    assert {key: found[key] for key in ("train", "validation", "held_out")} == {
        "train": 64, "validation": 32, "held_out": True}

    digits = Digits(True)  # both the held-out images and the training images are evenly spaced
    held = np.arange(300) * len(digits) // 300
    train = np.setdiff1d(np.arange(len(digits)), held)
    train, held = train[np.arange(64) * len(train) // 64], held[np.arange(32) * 300 // 32]
    x = np.stack([np.asarray(digits[i][0], dtype=np.float32).ravel() / 255 for i in range(len(digits))])
    y = np.array([digits[i][1] for i in range(len(digits))])
    expected = 100 * np.mean(RidgeClassifier().fit(x[train], y[train]).predict(x[held]) == y[held])
    assert found["top1"] == round(expected, 2)
    best = {alpha: 100 * np.mean(RidgeClassifier(alpha=alpha).fit(x[train], y[train]).predict(x[held]) == y[held])
            for alpha in linear_floor.ALPHAS}
    assert found["best"] == round(best[found["alpha"]], 2) == round(max(best.values()), 2)
