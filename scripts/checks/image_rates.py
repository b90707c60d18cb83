"""Measure images per second of the training data of vit_s_cifar10, through the loader and from the device.

    python -m scripts.checks.image_rates DATA [--device cuda] [--images 4096] [--repeats 5] [--workers 0] [--steps 1]

DATA has class folders of CIFAR-10. Each repetition measures the loader, then images on the device. The medians are
printed. With --steps N, each repetition also trains ViT-S for N batches.
"""
import argparse
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Optional, Sequence

import torch

from timm_ortho.lab.commands import Request, comparison
from timm_ortho.lab.data import epoch_seed, open_source
from timm_ortho.lab.planning.plan import plan
from timm_ortho.lab.running.loop import Training

WAYS = {"loader": {"device_images": False}, "device": {"device_images": True}}


def training(options: Namespace, way: dict) -> Training:
    """Return the model and the loaders of the paper's ViT-S."""
    given = {"dataset": "", "data_dir": options.data, "device": options.device, "workers": options.workers,
             "train_num_samples": options.images, "val_num_samples": 1024, "amp": options.amp, **way}
    (run,) = plan(Request(comparison(["feature"], "vit_s_cifar10"), given, seeds=1)).runs.values()
    stage = Namespace(**run.stages[0].options)
    made = Training(run, run.stages[0], Path(), open_source(stage), stage)
    made.data.reseed(epoch_seed(0, 0, 1))
    next(made.data.iterate(made.train_loader))  # decodes the images
    return made


def rate(made: Training, steps: Optional[int]) -> float:
    """Return the images per second of an epoch's batches, or of training for some steps."""
    began, images = time.perf_counter(), 0
    for number, (image, target) in enumerate(made.data.iterate(made.train_loader)):
        if steps is not None:
            if number == steps:
                break
            with made.amp():
                loss = made.loss(made.forward(image), target)
            made._backward(loss, True)
        images += len(image)
    if made.device.type == "cuda":
        torch.cuda.synchronize()
    return images / (time.perf_counter() - began)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (("images", 4096), ("repeats", 5), ("workers", 0), ("steps", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--amp", action="store_true")
    options = parser.parse_args(arguments)
    made = {name: training(options, way) for name, way in WAYS.items()}
    for what, steps in (("data", None), *([("training", options.steps)] if options.steps else [])):
        rates = {name: [] for name in WAYS}
        for _ in range(options.repeats):
            for name, one in made.items():
                rates[name].append(rate(one, steps))
        for name, values in rates.items():
            print(f"{what}, {name}: {median(values):.1f} images/s ({min(values):.1f} to {max(values):.1f})", flush=True)


if __name__ == "__main__":
    main()
