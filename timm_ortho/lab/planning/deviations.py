"""Name what differs between a study and the paper's protocol, in one line of the report."""
from typing import Any, Iterator, Mapping, Sequence

from ..._text import UserError
from ...convert import base_name
from ...models import paper, skip_networks
from ..paper import recipes
from ..train_options import options_with
from .design import Design, Variant, load


def deviations(design: Design, requested: Mapping[str, Any], seeds: Sequence[int]) -> list[str]:
    """Return a line such as `Not as in the paper (its value in brackets): epochs 15 (300)`.

    Runs are compared with the study at scale `paper`, on the same data set, or else on the first of the paper's. The
    list is empty if nothing differs, or if the study has no table of the paper or no scale `paper`.

    Args:
        design: The study at the scale of the runs.
        requested: timm's options from the command line, as for `Design.expand`.
        seeds: The seeds of the runs.
    """
    if not design.paper:
        return []
    own = requested.get("dataset", "").rpartition("/")[2]
    data = own if own in design.paper_data else next(iter(design.paper_data), None)
    try:
        paper = load(design.source, "paper")
        there = paper.variants({"dataset": data, "device": "cpu"} if data else {})
    except UserError:  # a user's study may have no scale `paper`
        return []
    here = design.variants(requested)
    changed = [_against("data set", own or "a folder of images", " or ".join(design.paper_data))] * (data != own)
    changed += [_against("seeds", len(seeds), paper.seeds_on(data))] * (len(seeds) != paper.seeds_on(data))
    changed += [f"values of {axis}" for axis, values in design.axes.items() if values != paper.axes.get(axis, values)]
    changed += _options_that_differ(here, there)
    lines = [f"Not as in the paper (its value in brackets): {', '.join(changed)}."] if changed else []
    own_recipes = dict.fromkeys(variant.recipe for variant in here if variant.recipe in recipes.names())
    return [*lines, "timm lacks some options of the paper. The recipes explain the nearest values: timm-ortho recipe "
                    f"{', '.join(own_recipes)}."] if own_recipes else lines


def _against(subject: str, here: Any, there: Any) -> str:
    return f"{subject} {here} ({there})"


def _options_that_differ(here: Sequence[Variant], there: Sequence[Variant]) -> Iterator[str]:
    """Yield the options of the first variant of each architecture that differ, with values if all have the same."""
    texts: dict[str, set[str]] = {}
    for model in dict.fromkeys(variant.options.model for variant in here):
        first = next(variant for variant in here if variant.options.model == model)
        same = [variant for variant in there if variant.options.model == model] or there
        one, other = map(_options, (first, next((each for each in same if each.cell == first.cell), same[0])))
        for name in dict.fromkeys([*one, *other]):
            if one.get(name) != other.get(name):
                texts.setdefault(name, set()).add(_against(name, one.get(name, "none"), other.get(name, "none")))
    for name, of_models in texts.items():
        text = of_models.pop() if len(of_models) == 1 else ""
        yield text if 0 < len(text) < 40 else name


def _options(variant: Variant) -> dict[str, Any]:
    """Return the settings to compare: architecture, arguments of the model, and timm's options of the training."""
    model = base_name(variant.options.model)
    _, _, own = {**paper.ARCHITECTURES, **skip_networks.ARCHITECTURES}.get(model, (None, None, {}))
    kwargs = {key: value for key, value in variant.options.model_kwargs.items()
              if not key.startswith("connection") and key != "img_size"}  # img_size is also one of timm's options
    options = {key: value for key, value in vars(variant.options).items()
               if key not in options_with("about", "machine", "data")}
    return {"architecture": model, **own, **kwargs, **options}
