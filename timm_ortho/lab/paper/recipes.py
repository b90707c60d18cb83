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

from . import experiments, name, numbers

ANY_VIT = "vit_base_patch16_224_imagenet1k"  # the options of `vit_b_imagenet1k` for every architecture of timm


def names() -> list[str]:
    """Return the names of the papers' recipes."""
    return [*experiments(), ANY_VIT]


def stated(recipe: str) -> tuple[str, str, Mapping[str, Any]] | None:
    """Return data set, table and top-1 accuracies of a recipe in its paper, None for a recipe of no paper."""
    if recipe not in experiments():
        return None
    experiment = experiments()[recipe]
    table = f"{experiment.table} of Wang et al. (2017)" if experiment.architecture == "skipnet" else experiment.table
    return name("dataset", experiment.dataset), table, experiment.top1()


def device_options(recipe: str) -> dict[str, Any]:
    """Return the paper's crop and RandAugment for images on the device, which replace timm's nearest options there.

    >>> device_options("vit_s_cifar10"), device_options("digits")
    ({'crop_padding': 4, 'rand_augment': [9, 5]}, {})
    """
    experiment = experiments().get(_source(recipe))
    given = experiment.recipe if experiment else {}
    augment = given.get("randaugment")
    return {**({"crop_padding": int(given["crop"].split()[1])} if str(given.get("crop")).startswith("pad") else {}),
            **({"rand_augment": [augment["operations"], augment["magnitude"]]} if augment else {})}


def _source(recipe: str) -> str:
    """Return the name of the experiment whose hyperparameters a recipe has."""
    return "vit_b_imagenet1k" if recipe == ANY_VIT else recipe


@cache
def text(recipe: str) -> str:
    """Return a recipe as YAML, with its sources as comments."""
    environment = Environment(loader=PackageLoader(__package__, "."))
    environment.filters["json"] = json.dumps
    lines = environment.get_template("recipe.yaml.jinja").render(_values(recipe)).strip().splitlines()
    return "".join(f"{line}\n" for long in lines for line in _broken(long))


def _broken(line: str) -> list[str]:
    """Break a comment into lines of at most 100 characters. The comment of a long line is placed before the option."""
    option, _, comment = line.partition("# ")
    if option and len(line) <= 112:
        return [line]
    lines = wrap(comment, 100, initial_indent="# ", subsequent_indent="# ", break_long_words=False,
                 break_on_hyphens=False)
    return [*lines, option.rstrip()] if option else lines


def _values(recipe: str) -> dict[str, Any]:
    """Return the variables of the template."""
    experiment = experiments()[_source(recipe)]
    architecture, data, given = experiment.architecture, experiment.dataset, experiment.recipe
    section, kind = numbers()[experiment.section], "any_vit" if recipe == ANY_VIT else experiment.section
    top1 = [f"{label} {mean:.2f} +- {std:.2f}" for label, (mean, std) in experiment.top1().items()]
    notes = [numbers()["recipe_notes"].get(key, "") for key in (architecture, experiment.name)]
    values = {
        "kind": kind, "is_vit": recipe.startswith("vit"), "accuracies": ", ".join(top1), "given": given,
        "architecture": name("model", architecture), "data": name("dataset", data), "table": experiment.table,
        "images": numbers()["datasets"][data], "notes": " ".join(notes),
        "runs": section["runs"], "first_runs": section.get(f"runs_{data}_first_version")}
    if architecture == "skipnet":
        return {**values, "decay_at": [round(share * given["epochs"]) for share in given["decay_at"]]}
    return {**values, "model": numbers()["architectures"][architecture]["model"],
            "hardware": numbers()["compute"][architecture][data]}
