"""Features of a trained model's validation images: measured when its run ends, and stored to be compared with others'.

Linear CKA needs both models' features of the same images, and runs end one by one. What is stored, `features.npy`, is
float16 after division by the largest magnitude, which no CKA can see: 2 bytes a number, 77 MB for a ViT-B on
ImageNet-1k's 50,000 images.
"""
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from ...diagnostics import representation
from .. import LabError, whole_file

_FILE = "features.npy"


def measure_features(model: nn.Module, batches: Iterable[torch.Tensor], folder: Path) -> dict[str, float]:
    """`effective_rank`, `spectral_entropy` and `feature_std` of a model's features, which it stores in the folder."""
    features = representation.features(model, batches).float()
    largest = features.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    with whole_file(folder / _FILE) as partial, open(partial, "wb") as file:
        np.save(file, (features / largest).half().numpy())
    return representation.summary(features)


def add_cka(runs: Sequence[dict], folders: Sequence[Path], baseline: Mapping[str, Any]) -> None:
    """Adds `linear_cka` to each run's `representation`: with the baseline's run of the same seed, None without one.

    `baseline` has the values of axes, or the connection, that the baseline has in place of a run's own.
    """
    by_place = {_place(run, {}): folder for run, folder in zip(runs, folders, strict=True)}
    for run, folder in zip(runs, folders, strict=True):
        partner = by_place.get(_place(run, baseline))
        other = partner is not None and partner != folder
        cka = representation.linear_cka(_stored(partner), _stored(folder)) if other else None
        run["representation"] = {**run["representation"], "linear_cka": cka}


def _place(run: Mapping[str, Any], changed: Mapping[str, Any]) -> tuple:
    place = {**run["cell"], "connection": run["connection"], **changed}
    return (*sorted(place.items()), run["seed"])


def _stored(folder: Path) -> torch.Tensor:
    try:
        return torch.from_numpy(np.load(folder / _FILE)).float()
    except (OSError, ValueError) as error:
        raise LabError(f"{folder / _FILE} cannot be read ({error}): remove {folder} to train it anew") from None
