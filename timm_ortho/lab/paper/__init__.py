"""The figures of "Revisiting Residual Connections" (Oh et al., NeurIPS 2025), from `paper.json` beside this file.

Those of "Orthogonal and Idempotent Transformations" (Wang et al., 2017) are in `skips.json`.

Each section of the file says which table it is, and which version of the paper it was taken from: the first version
(arXiv 2505.11881v1) has the appendices, the final one (NeurIPS 2025) other figures for ViTs on ImageNet-1k, the sweep
of learning rates, the throughput and the metrics of representations.
"""
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Mapping

_NAMED = {"model": "architectures", "dataset": "datasets", "connection": "connections", "skip": "skips"}


@cache
def figures() -> Mapping[str, Any]:
    """Everything in both files: names, a section for each table, `recipes`, and the hours of training (`compute`)."""
    skips, paper = (json.loads(files(__package__).joinpath(file).read_text(encoding="utf-8"))
                    for file in ("skips.json", "paper.json"))
    return {**skips, **paper}


def skip_recipe(name: str) -> tuple[str, str, dict[str, list[float]]] | None:
    """Data set, table, and top-1 by skip of a recipe for the networks of Wang et al.; None of any other recipe."""
    found, (network, _, data) = figures(), name.partition("_")
    if network != "skipnet" or data not in found["skip_recipe"]:
        return None
    top1 = {found["skips"][skip]: by_data[data] for skip, by_data in found["skips_branch4"]["20"].items()}
    return found["datasets"][data]["name"], found["skips_branch4"]["table"], top1


def section(table: str | None) -> Mapping[str, Any]:
    """A table or figure by the key that a study gives it, of either paper; nothing of any other."""
    return figures().get(table) or {}


def name(dimension: str, key: str) -> str:
    """What the papers call a model, data set, connection or skip transform; the key itself where they have none."""
    entry = figures()[_NAMED[dimension]].get(key, key) if dimension in _NAMED else key
    return entry if isinstance(entry, str) else entry["name"]


def deviations(recipe: str) -> Mapping[str, str]:
    """Where a recipe of this package differs from its paper by necessity, by the option of timm that is concerned."""
    if recipe in experiments():
        return experiments()[recipe].recipe.get("deviations", {})
    network, _, data = recipe.partition("_")
    return figures()["skip_recipe"].get(data, {}).get("deviations", {}) if network == "skipnet" else {}


def architecture(model: str) -> str | None:
    """The paper's key of an architecture of this package (`vit_small_ortho`: `vit_s`), None of any other."""
    for key, entry in figures()["architectures"].items():
        names = {entry["model"] + suffix for suffix in ("", "_linear", "_ortho", "_orthog")}
        if model == key or model in names:
            return key
    return None


@dataclass(frozen=True)
class Experiment:
    """A cell of one of the paper's tables of accuracies: what a recipe of this package reproduces."""

    architecture: str  # the paper's key: `vit_s`, `resnetv2_34`, ...
    dataset: str  # `cifar10`, `cifar100`, `tiny_imagenet` or `imagenet1k`
    section: str = "accuracy"  # of `figures()`: this (Table 2) or `initialisation` (Table 7)

    @property
    def name(self) -> str:  # of the recipe
        return "_".join((self.architecture, self.dataset, *([] if self.section == "accuracy" else [self.section])))

    @property
    def table(self) -> str:
        return figures()[self.section]["table"]

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The hyperparameters that the paper gives for it, those of the data set among the others."""
        recipes = figures()["recipes"]
        recipe = recipes[self.section if self.section in recipes else self.architecture.partition("_")[0]]
        shared = {key: value for key, value in recipe.items() if key not in figures()["datasets"]}
        deviations = {**recipe.get("deviations", {}), **recipe[self.dataset].get("deviations", {})}
        return {**shared, **recipe[self.dataset], "deviations": deviations}

    def top1(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of top-1 accuracy in percent, by label: of the connection, after the start."""
        labels = figures()["connections"]
        if self.section == "accuracy":
            found = figures()["accuracy"][self.architecture][self.dataset]
            return {labels[connection]: (mean, std) for connection, (mean, std) in found.items()}
        return {f"{start}, {labels[connection]}": (value[0], value[1]) for start in ("kaiming", "xavier", "orthogonal")
                for connection, value in figures()[self.section][start].items()}


@cache
def experiments() -> Mapping[str, Experiment]:
    """Those that the package has a recipe for, by the recipe's name."""
    found = [Experiment(architecture, dataset) for architecture in figures()["architectures"]
             for dataset in figures()["datasets"] if dataset in figures()["accuracy"].get(architecture, ())]
    found.append(Experiment("resnetv2_50", "cifar100", "initialisation"))
    return {experiment.name: experiment for experiment in found}
