"""The figures of "Revisiting Residual Connections" (Oh et al., NeurIPS 2025), from `paper.json` beside this file.

Each section of the file says which table it is, and which version of the paper it was taken from: the first version
(arXiv 2505.11881v1) has the appendices, the final one (NeurIPS 2025) other figures for ViTs on ImageNet-1k, the sweep
of learning rates, the throughput and the metrics of representations.
"""
import json
from functools import cache
from importlib.resources import files
from typing import Any, Mapping

__all__ = ["accuracy", "architecture", "figures"]


@cache
def figures() -> Mapping[str, Any]:
    """Everything in `paper.json`: a section for each table, the `recipes`, and the hours of training (`compute`)."""
    return json.loads(files(__package__).joinpath("paper.json").read_text(encoding="utf-8"))


def accuracy(model: str, dataset: str) -> dict[str, tuple[float, float]]:
    """Table 2: top-1 accuracy in percent by connection, mean and standard deviation.

    Args:
        model: The paper's key (`vit_s`, `resnetv2_34`) or this package's name of it, with or without the suffix of a
            connection (`vit_small`, `resnetv2_34_cifar_ortho`).
        dataset: `cifar10`, `cifar100`, `tiny_imagenet` or `imagenet1k`, also as timm names it (`torch/cifar10`).

    Returns:
        `linear` and `feature`, for ResNets also `global`; nothing where the paper has no such figure.
    """
    found = figures()["accuracy"].get(architecture(model), {}).get(dataset.rpartition("/")[2], {})
    return {connection: (mean, std) for connection, (mean, std) in found.items()}


def architecture(model: str) -> str | None:
    """The paper's key of an architecture of this package (`vit_small_ortho`: `vit_s`), None of any other."""
    for key, entry in figures()["architectures"].items():
        names = {entry["model"] + suffix for suffix in ("", "_linear", "_ortho", "_orthog")}
        if model == key or model in names:
            return key
    return None
