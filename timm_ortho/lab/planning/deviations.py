"""In words, how a study's runs differ from the paper's: by what its scale and the call changed, and by necessity."""
from typing import Any, Iterator, Mapping, Sequence

from ...models import skip_networks
from ...models.names import base_name
from ...models.paper import ARCHITECTURES
from .. import LabError
from ..paper import architecture, deviations
from .design import Design, Variant, load
from .recipe import known_options, options_with

# What gets a line of its own; the other options that differ are named together.
_MAIN = ("epochs", "train_num_samples", "val_num_samples", "img_size", "batch_size", "opt", "lr", "weight_decay",
         "sched", "decay_milestones", "mixup", "cutmix", "smoothing", "aa")


def changes(design: Design, given: Mapping[str, Any], seeds: Sequence[int], trainer: str = "lab") -> list[str]:
    """Lines such as "epochs: 15 here, 300 in the paper", and the deviations of the recipes that are run as they are.

    Runs are compared with the paper's recipe for their own data set, or for the first that the paper has. `given` and
    `trainer` are as `Design.expand` has them.
    """
    if not design.paper:
        return []
    here_data = given.get("dataset", "").rpartition("/")[2]
    data = here_data if here_data in design.paper_data else next(iter(design.paper_data), None)
    try:
        paper = load(design.name, "paper")
        if design.kind != "training":
            return _other_arguments(design.arguments, paper.arguments)
        there = paper.variants({"dataset": data, "device": "cpu"} if data else {}, "train.py")
    except LabError:  # the user's own file, which is of no paper
        return []
    lines = []
    if data != here_data and design.paper_data:
        lines.append(_line("data set", given.get("dataset") or "a folder of images", " or ".join(design.paper_data)))
    lines += [_line(axis, _listed(values), _listed(paper.axes[axis]))
              for axis, values in design.axes.items() if axis in paper.axes and values != paper.axes[axis]]
    if len(seeds) != paper.seeds:
        lines.append(_line("seeds", len(seeds), paper.seeds))
    pairs, by_necessity = list(_pairs(design.variants(given, trainer), there)), {}
    for model, here, partner in pairs:
        lines += [_of([model], pairs) + line for line in _differences(_options(here), _options(partner))]
        for text in _deviations(here, partner, data):
            by_necessity.setdefault(text, []).append(model)
    return [*lines, *(_of(models, pairs) + text for text, models in by_necessity.items())]


def _of(models: Sequence[str], pairs: Sequence) -> str:
    """Which models a line is of, where it is not of all."""
    return f"{', '.join(models)}: " if len(models) < len(pairs) else ""


def _other_arguments(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Of what is computed without training. The paper says less than `there`, so that is named by its scale."""
    def said(value: Any) -> str:
        return _listed(value) if isinstance(value, list) else str(value)

    return [f"{key}: {said(here.get(key, 'the default'))} here, {said(there.get(key, 'the default'))} at scale paper"
            for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key)]


def _pairs(here: Sequence[Variant], there: Sequence[Variant]) -> Iterator[tuple[str, Variant, Variant]]:
    """For each architecture the first variant here, with the paper's of the same architecture."""
    models = list(dict.fromkeys(variant.options.model for variant in here))
    for model in models:
        first = next(variant for variant in here if variant.options.model == model)
        same = [variant for variant in there if variant.options.model == model]
        partner = next((variant for variant in same if variant.cell == first.cell), (same or there)[0])
        yield base_name(model), first, partner


def _options(variant: Variant) -> dict[str, Any]:
    """What is compared: the architecture, its arguments, and timm's options."""
    model = base_name(variant.options.model)
    own = ARCHITECTURES[model][2] if model in ARCHITECTURES else skip_networks.ARCHITECTURES.get(model, {})
    kwargs = {key: value for key, value in variant.options.model_kwargs.items()
              if not key.startswith("connection") and key != "img_size"}  # which is an option already
    options = {key: value for key, value in vars(variant.options).items()
               if key not in options_with("about", "machine", "data")}
    return {"architecture": model, **own, **kwargs, **options}


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    differing = [key for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key)]
    named = [key for key in differing if key not in known_options()] + [key for key in _MAIN if key in differing]
    lines = [_line(key, here.get(key), there.get(key)) for key in named]
    others = [key for key in differing if key not in named]
    return [*lines, f"other than in the paper as well: {', '.join(others)}"] if others else lines


def _deviations(here: Variant, partner: Variant, data: str | None) -> list[str]:
    """Where the recipe, and so what is called the paper's value here, is not the paper's; of options that it sets."""
    model = base_name(partner.options.model)
    network = "skipnet" if model.startswith("skipnet_") else architecture(model)
    own = "_initialisation" if "weight_init" in partner.options.model_kwargs else ""
    return [text for option, text in deviations(f"{network}_{data}{own}").items()
            if getattr(here.options, option) == getattr(partner.options, option)]


def _line(what: str, here: Any, there: Any) -> str:
    here, there = ("none" if value is None else list(value) if isinstance(value, tuple) else value
                   for value in (here, there))
    return f"{what}: {here} here, {there} in the paper"


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
