"""Read the numbers, names and recipes of the two papers.

`paper.json` is from "Revisiting Residual Connections" (Oh et al., NeurIPS 2025), `skips.json` from "Orthogonal and
Idempotent Transformations" (Wang et al., 2017).

Each section of these files names the paper's table and the version of the paper that its numbers are from. The first
version of Oh et al. (arXiv 2505.11881v1) has the appendices. The final version (NeurIPS 2025) has different numbers for
ViTs on ImageNet-1k, and adds the sweep of learning rates, the throughput and the metrics of representations.
"""
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Mapping, Sequence

from ...connections import declared

_NAMED = {"model": "architectures", "dataset": "datasets", "skip": "skips"}


@cache
def numbers() -> Mapping[str, Any]:
    """Return the contents of both files: names, a section for each table, `recipes` and `compute` (training hours).

    >>> numbers()["throughput"]["table"]
    'Table 1b'
    """
    skips, paper = (json.loads(files(__package__).joinpath(file).read_text(encoding="utf-8"))
                    for file in ("skips.json", "paper.json"))
    return {**skips, **paper}


def section(table: str | None) -> Mapping[str, Any]:
    """Return the section that a study's `table` names, or an empty mapping if neither paper has this section."""
    return numbers().get(table) or {}


def name(dimension: str, key: str) -> str:
    """Return the papers' name of a model, data set, connection or skip transform, or the key if there is none.

    >>> name("connection", "feature"), name("model", "vit_s"), name("layers", "0,1")
    ('Orthogonal-F', 'ViT-S', '0,1')
    """
    if dimension == "connection":
        return declared(key, "report_name") or key
    entry = numbers()[_NAMED[dimension]].get(key, key) if dimension in _NAMED else key
    return entry if isinstance(entry, str) else entry["name"]


def architecture(model: str) -> str | None:
    """Return the key of a model in `paper.json`, or None if the paper does not have the model.

    >>> architecture("vit_small_ortho"), architecture("resnet50")
    ('vit_s', None)
    """
    for key, entry in numbers()["architectures"].items():
        names = {entry["model"] + suffix for suffix in ("", "_linear", "_ortho", "_orthog")}
        if model == key or model in names:
            return key
    return None


@dataclass(frozen=True)
class Experiment:
    """One of the papers' experiments for which the package has a recipe: an architecture on a data set."""

    architecture: str  # key in `paper.json`: `vit_s`, `resnetv2_34`, ...; `skipnet` for Wang et al.'s networks
    dataset: str  # key of the data set in `paper.json`
    section: str = "accuracy"  # key of `numbers()`: `accuracy` (Table 2), `initialisation` (Table 7) or `skips_branch4`

    @property
    def name(self) -> str:
        """The name of the recipe."""
        suffix = ["initialisation"] if self.section == "initialisation" else []
        return "_".join([self.architecture, self.dataset, *suffix])

    @property
    def table(self) -> str:
        return numbers()[self.section]["table"]

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The paper's hyperparameters for this architecture and data set."""
        recipes = {**numbers()["recipes"], "skipnet": numbers()["skip_recipe"]}
        recipe = recipes[self.section if self.section in recipes else self.architecture.partition("_")[0]]
        shared = {key: value for key, value in recipe.items() if key not in numbers()["datasets"]}
        comments = {**recipe.get("comments", {}), **recipe[self.dataset].get("comments", {})}
        return {**shared, **recipe[self.dataset], "comments": comments}

    def top1(self) -> dict[str, Sequence[float]]:
        """Return [mean, standard deviation] of top-1 accuracy in percent, by label.

        A label is a connection, in Table 7 an initialisation and a connection, and for Wang et al. a skip transform.
        """
        section = numbers()[self.section]
        if self.section == "accuracy":
            by_connection = section[self.architecture][self.dataset]
            return {name("connection", connection): value for connection, value in by_connection.items()}
        if self.architecture == "skipnet":
            return {name("skip", skip): by_data[self.dataset] for skip, by_data in section["20"].items()}
        return {f"{start}, {name('connection', connection)}": value[:2] for start in ("kaiming", "xavier", "orthogonal")
                for connection, value in section[start].items()}


@cache
def experiments() -> Mapping[str, Experiment]:
    """Return the experiments that have a recipe, by the name of the recipe."""
    cells = [Experiment(architecture, dataset) for architecture in numbers()["architectures"]
             for dataset in numbers()["datasets"] if dataset in numbers()["accuracy"].get(architecture, ())]
    cells.append(Experiment("resnetv2_50", "cifar100", "initialisation"))
    cells += [Experiment("skipnet", dataset, "skips_branch4") for dataset in ("cifar10", "cifar100", "svhn")]
    return {experiment.name: experiment for experiment in cells}
