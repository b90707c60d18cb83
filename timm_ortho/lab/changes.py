"""In words, what a scale and a data set changed: its options, data, grid and seeds against the paper's."""
from typing import Any, Iterator, Mapping, Sequence

from ..models import skip_networks
from ..models.paper import ARCHITECTURES
from . import LabError
from .design import Design, Variant, load
from .grid import base_name
from .recipe import known_options

__all__ = ["changes"]

# What gets a line of its own; the other options that differ are named together.
_MAIN = ("epochs", "train_num_samples", "val_num_samples", "img_size", "batch_size", "opt", "lr", "weight_decay",
         "sched", "decay_milestones", "mixup", "cutmix", "smoothing", "aa")

# What says where images come from and how they are stored, nothing of how a model is trained.
_NOT_COMPARED = frozenset("""
    checkpoint_hist class_map data_dir dataset dataset_download dataset_trust_remote_code device device_modules in_chans
    input_img_mode input_key input_size interpolation mean model model_kwargs no_prefetcher num_classes pin_mem seed std
    target_key train_split val_split validation_batch_size workers worker_seeding
""".split())


def changes(design: Design, given: Mapping[str, Any], seeds: Sequence[int]) -> list[str]:
    """Lines such as "epochs: 15 here, 300 in the paper"; none without a paper or at a scale of its size.

    Args:
        design: The study at its scale.
        given: timm's options of the command line.
        seeds: The seeds of the runs.
    """
    if not design.paper:
        return []
    try:
        paper = load(design.name, "paper")
        if design.kind != "training":
            return _other_arguments(design.arguments, paper.arguments)
        there = list(paper.variants({"dataset": design.paper_data[0], "device": "cpu"} if design.paper_data else {}))
    except LabError:  # the user's own file, which is of no paper
        return []
    lines = []
    if design.paper_data and given["dataset"].rpartition("/")[2] not in design.paper_data:
        lines.append(_line("data set", given["dataset"] or "a folder of images", " or ".join(design.paper_data)))
    lines += [_line(axis, _listed(values), _listed(paper.axes[axis]))
              for axis, values in design.axes.items() if axis in paper.axes and values != paper.axes[axis]]
    if len(seeds) != paper.seeds:
        lines.append(_line("seeds", len(seeds), paper.seeds))
    for prefix, here, partner in _pairs(list(design.variants(given)), there):
        lines += [prefix + line for line in _differences(_options(here), _options(partner))]
    return lines


def _other_arguments(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Of what is computed without training. The paper says less than `there`, so that is named by its scale."""
    def said(values: Mapping[str, Any], key: str) -> str:
        return _listed(values[key]) if isinstance(values.get(key), list) else str(values.get(key, "the default"))

    return [f"{key}: {said(here, key)} here, {said(there, key)} at scale paper"
            for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key)]


def _pairs(here: Sequence[Variant], there: Sequence[Variant]) -> Iterator[tuple[str, Variant, Variant]]:
    """For each architecture the first variant here, with the paper's of the same architecture."""
    models = list(dict.fromkeys(variant.options.model for variant in here))
    for model in models:
        first = next(variant for variant in here if variant.options.model == model)
        same = [variant for variant in there if variant.options.model == model]
        partner = next((variant for variant in same if variant.cell == first.cell), (same or there)[0])
        yield f"{base_name(model)}: " if len(models) > 1 else "", first, partner


def _options(variant: Variant) -> dict[str, Any]:
    """What is compared: the architecture, its arguments, and timm's options."""
    model = base_name(variant.options.model)
    own = ARCHITECTURES[model][2] if model in ARCHITECTURES else skip_networks.ARCHITECTURES.get(model, {})
    kwargs = {key: value for key, value in variant.options.model_kwargs.items()
              if not key.startswith("connection") and key != "img_size"}  # which is an option already
    options = {key: value for key, value in vars(variant.options).items() if key not in _NOT_COMPARED}
    return {"architecture": model, **own, **kwargs, **options}


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    differing = [key for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key)]
    of_model = [key for key in differing if key not in known_options()]
    lines = [_line(key, here.get(key), there.get(key))
             for key in [*of_model, *(key for key in _MAIN if key in differing)]]
    others = [key for key in differing if key not in (*of_model, *_MAIN)]
    return [*lines, f"other than in the paper as well: {', '.join(others)}"] if others else lines


def _line(what: str, here: Any, there: Any) -> str:
    def said(value: Any) -> str:
        return "none" if value is None else str(list(value) if isinstance(value, tuple) else value)

    return f"{what}: {said(here)} here, {said(there)} in the paper"


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
