"""Measure the accuracy of a linear classifier on the raw pixels of a run's images.

    python -m scripts.checks.linear_floor RUN ...

RUN is the folder of a run. The accuracies are written to model_cards/results/floors/ridge.json. The classifier is
scikit-learn's RidgeClassifier on pixels between 0 and 1. `top1` is its validation accuracy with the regularization
strength alpha = 1. `best` is its highest validation accuracy over the values of alpha in `ALPHAS`. A network with a
lower accuracy has learned less than a linear map, so differences between such networks mean little.
"""
import argparse
import json
from argparse import Namespace
from pathlib import Path
from typing import Any, Iterable

import numpy as np
from sklearn.linear_model import RidgeClassifier

from timm_ortho.lab.data import open_source
from timm_ortho.lab.folder import RunPlan
from timm_ortho.lab.planning.plan import read
from timm_ortho.lab.reporting.published import folder_name

ALPHAS = (1, 10, 100, 1000, 10000)
FILE = Path(__file__).parents[2] / "model_cards" / "results" / "floors" / "ridge.json"


def floor(run: Path) -> dict[str, Any]:
    """Return accuracies in percent, the best alpha, images per split, and whether training images are held out."""
    plan = RunPlan.read(run)
    source = open_source(Namespace(**plan.stages[0].options), plan.hold_out)
    (x, y), (of_validation, labels) = arrays(source.train), arrays(source.validation)
    predicted = {alpha: RidgeClassifier(alpha=alpha).fit(x, y).predict(of_validation) for alpha in ALPHAS}
    top1 = {alpha: round(100 * float(np.mean(of == labels)), 2) for alpha, of in predicted.items()}
    alpha = max(ALPHAS, key=top1.__getitem__)
    return {"top1": top1[1], "best": top1[alpha], "alpha": alpha,
            "train": len(y), "validation": len(labels), "held_out": bool(plan.hold_out)}


def arrays(images: Iterable) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = zip(*((np.asarray(image, dtype=np.float32).ravel() / 255, label) for image, label in images),
                         strict=True)
    return np.stack(pixels), np.array(labels)


def main(runs: Iterable[Path], file: Path = FILE) -> None:
    floors = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for run in runs:
        study = read(run.parent)["study"]
        name = folder_name(study)
        floors[name] = floor(run)
        print(name, floors[name])
    file.write_text(json.dumps(dict(sorted(floors.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m scripts.checks.linear_floor", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    main(parser.parse_args().runs)
