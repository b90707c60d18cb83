"""Measure the features of a trained model, and store them to compare them with the features of other runs.

Linear CKA compares the features of two models for the same images. Features are stored because the two runs end at
different times. `features.npy` contains them as float16 numbers, divided by their largest magnitude. CKA does not
depend on this scale. For the 50,000 validation images of ImageNet-1k, the file of a ViT-B takes 77 MB.
"""
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from ...diagnostics import representation
from ...run_folder import FEATURES
from .. import LabError, whole_file


def measure_features(model: nn.Module, batches: Iterable[torch.Tensor], folder: Path) -> dict[str, float]:
    """Store the features of a model for some batches of images in the folder of its run.

    Returns:
        The metrics `effective_rank`, `spectral_entropy` and `feature_std` of the features.
    """
    features = representation.features(model, batches).float()
    largest = features.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    with whole_file(folder / FEATURES) as file:
        np.save(file, (features / largest).half().numpy())
    return representation.summary(features)


def add_cka(runs: Sequence[dict], folders: Sequence[Path], baseline: Mapping[str, Any]) -> None:
    """Add `linear_cka` to each run's `representation`: CKA between the run and its baseline run.

    The value is None if the baseline run is missing or is the run itself.

    Args:
        runs: The runs with their metrics. Each `representation` is replaced by a copy that also has `linear_cka`.
        folders: The folders of the runs, in the same order.
        baseline: The key `baseline` of the study: a connection, or values of axes. A run's baseline run has this
            connection or these values. Everything else, including the seed, is the same as in the run.
    """
    by_setting = {_setting(run, {}): folder for run, folder in zip(runs, folders, strict=True)}
    for run, folder in zip(runs, folders, strict=True):
        partner = by_setting.get(_setting(run, baseline))
        other = partner is not None and partner != folder
        cka = representation.linear_cka(_stored(partner), _stored(folder)) if other else None
        run["representation"] = {**run["representation"], "linear_cka": cka}


def _setting(run: Mapping[str, Any], changed: Mapping[str, Any]) -> tuple:
    setting = {**run["cell"], "connection": run["connection"], **changed}
    return (*sorted(setting.items()), run["seed"])


def _stored(folder: Path) -> torch.Tensor:
    try:
        return torch.from_numpy(np.load(folder / FEATURES, allow_pickle=False)).float()
    except (OSError, ValueError) as error:
        raise LabError(f"{folder / FEATURES} cannot be read ({error}): remove {folder} to train the run again"
                       ) from None
