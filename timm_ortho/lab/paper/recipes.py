"""Make the papers' recipes from `paper.json` and `skips.json`: files with options of timm's `train.py`.

The template is `recipe.yaml.jinja`. A recipe has the paper's value of each option. Where timm has no such value, it has
the nearest one, and a comment names the paper's. Options that only the lab has, the exact crop and RandAugment, are in
`device_options`.
"""
import json
from functools import cache
from textwrap import wrap
from typing import Any, Mapping

from jinja2 import Environment, PackageLoader

from . import experiments, name, numbers, skip_recipe

ANY_VIT = "vit_base_patch16_224_imagenet1k"  # the options of `vit_b_imagenet1k` for every architecture of timm


def names() -> list[str]:
    """Return the names of the papers' recipes."""
    return [*experiments(), ANY_VIT, *(f"skipnet_{data}" for data in ("cifar10", "cifar100", "svhn"))]


def stated(recipe: str) -> tuple[str, str, Mapping[str, Any]] | None:
    """Return data set, table and top-1 accuracies of a recipe in its paper, None for a recipe of no paper."""
    if recipe in experiments():
        experiment = experiments()[recipe]
        return name("dataset", experiment.dataset), experiment.table, experiment.top1()
    of_skips = skip_recipe(recipe)
    return of_skips and (of_skips[0], f"{of_skips[1]} of Wang et al. (2017)", of_skips[2])


def device_options(recipe: str) -> dict[str, Any]:
    """Return the paper's crop and RandAugment for images on the device, which replace timm's nearest options there.

    >>> device_options("vit_s_cifar10"), device_options("digits")
    ({'crop_padding': 4, 'rand_augment': [9, 5]}, {})
    """
    given = _given(recipe)
    augment = given.get("randaugment")
    return {**({"crop_padding": int(given["crop"].split()[1])} if str(given.get("crop")).startswith("pad") else {}),
            **({"rand_augment": [augment["operations"], augment["magnitude"]]} if augment else {})}


def _given(recipe: str) -> Mapping[str, Any]:
    """Return the hyperparameters that the paper states for a recipe, {} for a recipe of no paper."""
    if recipe == ANY_VIT:
        recipe = "vit_b_imagenet1k"
    if recipe in experiments():
        return experiments()[recipe].recipe
    section, data = numbers()["skip_recipe"], recipe.removeprefix("skipnet_")
    return {**section, **section[data]} if skip_recipe(recipe) else {}


@cache
def text(recipe: str) -> str:
    """Return a recipe as YAML, with its sources as comments."""
    environment = Environment(loader=PackageLoader(__package__, "."))
    environment.filters["json"] = json.dumps
    values = _of_skipnet(recipe) if skip_recipe(recipe) else _of_experiment(recipe)
    values = {**values, "given": _given(recipe), "is_vit": recipe.startswith("vit")}
    lines = environment.get_template("recipe.yaml.jinja").render(values).strip().splitlines()
    return "".join(f"{line}\n" for long in lines for line in _broken(long))


def _broken(line: str) -> list[str]:
    """Break a comment into lines of at most 100 characters. The comment of a long line is placed before the option."""
    option, _, comment = line.partition("# ")
    if option and len(line) <= 112:
        return [line]
    lines = wrap(comment, 100, initial_indent="# ", subsequent_indent="# ", break_long_words=False,
                 break_on_hyphens=False)
    return [*lines, option.rstrip()] if option else lines


def _accuracies(top1: Mapping[str, Any]) -> str:
    return ", ".join(f"{label} {mean:.2f} +- {std:.2f}" for label, (mean, std) in top1.items())


def _of_experiment(recipe: str) -> dict[str, Any]:
    experiment = experiments()["vit_b_imagenet1k" if recipe == ANY_VIT else recipe]
    architecture, data = experiment.architecture, experiment.dataset
    section, of_paper = numbers()[experiment.section], numbers()["architectures"][architecture]
    notes = [numbers()["recipe_notes"].get(key, "") for key in (architecture, experiment.name)]
    return {
        "kind": "any_vit" if recipe == ANY_VIT else experiment.section, "accuracies": _accuracies(experiment.top1()),
        "architecture": name("model", architecture), "data": name("dataset", data), "table": experiment.table,
        "model": of_paper["model"], "images": numbers()["datasets"][data], "notes": " ".join(notes),
        "hardware": numbers()["compute"][architecture][data],
        "runs": section["runs"], "first_runs": section.get(f"runs_{data}_first_version")}


def _of_skipnet(recipe: str) -> dict[str, Any]:
    data, table, top1 = skip_recipe(recipe)
    given = _given(recipe)
    return {"kind": "skipnet", "data": data, "table": table, "accuracies": _accuracies(top1),
            "images": numbers()["datasets"][recipe.removeprefix("skipnet_")],
            "decay_at": [round(share * given["epochs"]) for share in given["decay_at"]]}
