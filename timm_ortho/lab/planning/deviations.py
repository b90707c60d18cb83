"""Describe how a study's runs differ from the paper's runs.

Differences come from the scale, the user's options, and recipes of the paper that cannot be reproduced exactly.
"""
from typing import Any, Iterator, Mapping, Sequence

from ..._text import UserError
from ...convert import base_name
from ...models import skip_networks
from ...models.paper import ARCHITECTURES
from ..paper import architecture, recipe_deviations
from ..train_options import known_options, options_with
from .design import Design, Variant, load

# Each of these options has a line of its own if it differs from the paper. So have arguments of the
# architecture. All other options share one line.
_MAIN = ("epochs", "train_num_samples", "val_num_samples", "img_size", "batch_size", "opt", "lr", "weight_decay",
         "sched", "decay_milestones", "mixup", "cutmix", "smoothing", "aa")


# Options whose deviations exist only in a loader, if the named option of images on the device is set. `reprob` has
# another deviation on the device.
_ON_DEVICE = {"train_crop_mode": "crop_padding", "aa": "rand_augment", "reprob": "reprob"}
_ERASING = ("random erasing: areas of 0.02 to 0.333 and ratios of 0.3 to 3.33 here; 0.02 to 0.33 and 0.3 to 3.3 in the "
            "paper")


def deviations(
        design: Design, requested: Mapping[str, Any], seeds: Sequence[int], on_device: bool = False) -> list[str]:
    """Return lines with the differences from the paper, such as "epochs: 15 here; 300 in the paper".

    Runs are compared with the study at scale `paper`, on the same data set. If the paper does not have this data set,
    they are compared with the runs on the first of the paper's data sets. Further lines describe the options in which
    the package's recipes necessarily differ from the paper.

    Args:
        design: The study at the scale of the runs.
        requested: timm's options from the command line, as for `Design.expand`.
        seeds: The seeds of the runs.
        on_device: Whether the images are stored on the device, see `lab.device_images`.

    Returns:
        The lines. The list is empty if the study has no table of the paper, or no scale `paper`.
    """
    if not design.paper:
        return []
    own_data = requested.get("dataset", "").rpartition("/")[2]
    data = own_data if own_data in design.paper_data else next(iter(design.paper_data), None)
    try:
        paper = load(design.source, "paper")
        there = paper.variants({"dataset": data, "device": "cpu"} if data else {})
    except UserError:  # a user's study may have no scale `paper`
        return []
    lines = []
    if data != own_data and design.paper_data:
        name = requested.get("dataset") or "a folder of images"
        lines.append(comparison("data set", name, " or ".join(design.paper_data)))
    lines += [comparison(axis, _listed(values), _listed(paper.axes[axis]))
              for axis, values in design.axes.items() if axis in paper.axes and values != paper.axes[axis]]
    if len(seeds) != paper.seeds_on(data):
        lines.append(comparison("seeds", len(seeds), paper.seeds_on(data)))
    pairs, by_necessity = list(_pairs(design.variants(requested), there)), {}
    for model, here, partner in pairs:
        lines += [_prefix([model], pairs) + line for line in _differences(_options(here), _options(partner))]
        erasing = [_ERASING] if on_device and here.options.reprob else []
        for text in [*_of_recipe(here, partner, data, on_device), *erasing]:
            by_necessity.setdefault(text, []).append(model)
    return [*lines, *(_prefix(models, pairs) + text for text, models in by_necessity.items())]


def comparison(subject: str, here: Any, there: Any) -> str:
    """Return a line that compares a value of this study with the paper's value.

    >>> comparison("epochs", 15, 300)
    'epochs: 15 here; 300 in the paper'
    """
    here, there = ("none" if value is None else list(value) if isinstance(value, tuple) else value
                   for value in (here, there))
    return f"{subject}: {here} here; {there} in the paper"


def _prefix(models: Sequence[str], pairs: Sequence) -> str:
    """Return the beginning of a line: the models that it describes, or an empty string if it describes all models."""
    return f"{', '.join(models)}: " if len(models) < len(pairs) else ""


def _pairs(here: Sequence[Variant], there: Sequence[Variant]) -> Iterator[tuple[str, Variant, Variant]]:
    """Yield each architecture in `here` with its first variant, and the variant in `there` to compare it with.

    The variant in `there` is the first with the same architecture and cell. If there is none, it is the first with the
    same architecture. If there is none, it is the first of all.
    """
    models = list(dict.fromkeys(variant.options.model for variant in here))
    for model in models:
        first = next(variant for variant in here if variant.options.model == model)
        same = [variant for variant in there if variant.options.model == model]
        partner = next((variant for variant in same if variant.cell == first.cell), (same or there)[0])
        yield base_name(model), first, partner


def _options(variant: Variant) -> dict[str, Any]:
    """Return the settings to compare: architecture, arguments of the model, and timm's options of the training."""
    model = base_name(variant.options.model)
    own = ARCHITECTURES[model][2] if model in ARCHITECTURES else skip_networks.ARCHITECTURES.get(model, {})
    kwargs = {key: value for key, value in variant.options.model_kwargs.items()
              if not key.startswith("connection") and key != "img_size"}  # img_size is also one of timm's options
    options = {key: value for key, value in vars(variant.options).items()
               if key not in options_with("about", "machine", "data")}
    return {"architecture": model, **own, **kwargs, **options}


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    differing = [key for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key)]
    named = [key for key in differing if key not in known_options()] + [key for key in _MAIN if key in differing]
    lines = [comparison(key, here.get(key), there.get(key)) for key in named]
    others = [key for key in differing if key not in named]
    return [*lines, f"also different from the paper: {', '.join(others)}"] if others else lines


def _of_recipe(here: Variant, partner: Variant, data: str | None, on_device: bool) -> list[str]:
    """Return a reason for each option in which the package's recipe for scale `paper` must differ from the paper.

    Options in which `here` differs from `partner` are left out, because `_differences` lists them. So are options that
    only a loader needs, if the images are on the device.
    """
    model = base_name(partner.options.model)
    network = "skipnet" if model.startswith("skipnet_") else architecture(model)
    own = "_initialisation" if "weight_init" in partner.options.model_kwargs else ""
    exact = {option for option, own_option in _ON_DEVICE.items() if on_device and getattr(here.options, own_option)}
    return [text for option, text in recipe_deviations(f"{network}_{data}{own}").items()
            if option not in exact and getattr(here.options, option) == getattr(partner.options, option)]


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
