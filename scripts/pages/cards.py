"""Write a card for each set of weights, model_cards/weights/NAME.md.

Weights that were trained here also get the plot of the training curve, NAME.png. NAME is MODEL.TAG. BASE is MODEL
without `_ortho`, `_orthog` or `_linear`: for `vit_test_ortho.digits`, BASE_TAG is `vit_test_digits`.

| card | source of the numbers |
| --- | --- |
| weights that were trained here, such as `vit_test_*` | `model_cards/results/comparisons/BASE_TAG` |
| the authors' weights, `vit_base_*` | their cards (`AUTHORS`) and their paper (`timm_ortho/lab/paper/paper.json`) |

`timm_ortho.hub.card` fills the template of the cards.
"""
from functools import cache
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import timm
import torch
from huggingface_hub import ModelCard
from timm.models import get_pretrained_cfg

import timm_ortho  # noqa: F401  registers the models
from timm_ortho.convert import SUFFIXES, base_name, is_variant, suffix_of
from timm_ortho.hub.card import Subject, draw_curve, model_card
from timm_ortho.lab.paper import experiments
from timm_ortho.lab.reporting.collect import comparison
from timm_ortho.lab.reporting.published import STUDY, read
from timm_ortho.lab.reporting.report import Part
from timm_ortho.run_folder import CheckpointRun, card_values

RESULTS = Path(__file__).parents[2] / "model_cards" / "results"
VALIDATE = "https://github.com/huggingface/pytorch-image-models/blob/main/validate.py"


class Card(NamedTuple):
    """A card, and the run whose training curve the card shows."""

    name: str
    card: ModelCard
    run: Optional[CheckpointRun] = None


class PublishedRun(CheckpointRun):
    """A run of a published comparison, without its weights.

    Args:
        folder: The comparison in `model_cards/results/comparisons`.
        connection: Name of the run's residual connection. The run's seed is the first seed of the comparison.

    Attributes:
        seed: The seed of the run.
        command: The command that trained all runs of the comparison.
    """

    def __init__(self, folder: Path, connection: str) -> None:
        study, runs, recorded = read(folder)
        part = Part.of(study, runs, [], recorded)
        self.seed = seed = part.study["seeds"][0]  # not the best seed, whose accuracy would be biased
        self.command = part.study["command"]
        runs = [run for run in part.runs if run["connection"] == connection]
        run = next(run for run in runs if run["seed"] == seed)
        options = part.study["options"]
        self.options = {**options, "seed": seed, "model_kwargs": {**options["model_kwargs"], "connection": connection}}
        self.history = run["history"]
        self.epoch = self.history[-1]["epoch"]
        self.ema, self.in_mid_epoch = self.evaluates_ema, False
        compared = {"split": (part.study.get("data") or {}).get("validation_split"),
                    "top1": runs, "rows": comparison(part)}
        self.card = card_values(run, {**part.study["versions"], **(run.get("made_with") or {})}, compared)


def texts(root: Path) -> dict[Path, str]:
    return {root / "model_cards" / "weights" / f"{card.name}.md": f"{str(card.card).rstrip()}\n" for card in cards()}


def drawings(root: Path) -> dict[Path, Callable[[Path], Any]]:
    return {root / "model_cards" / "weights" / f"{card.name}.png": lambda path, run=card.run: draw_curve(run, path)
            for card in cards() if card.run}


@cache
def cards() -> tuple[Card, ...]:
    names = filter(is_variant, timm.list_pretrained())
    return tuple(TRAINED_ELSEWHERE.get(name, of_comparison)(name) for name in names)


def comparison_of(name: str) -> Path:
    """Return the folder of the published comparison that trained the weights MODEL.TAG.

    Raises:
        SystemExit: There is no such comparison.
    """
    model, _, tag = name.partition(".")
    folder = RESULTS / "comparisons" / f"{base_name(model)}_{tag}"
    if not (folder / STUDY).is_file():
        raise SystemExit(
            f"no card of the weights {name}: if timm-ortho compare trained them, publish its output folder: "
            f"python -m scripts.publish --name {folder.name} FOLDER. For weights that others trained, write a function "
            f"like of_authors, and add it to TRAINED_ELSEWHERE in {__file__}")
    return folder


def of_comparison(name: str) -> Card:
    """Return the card of weights that were trained here, with the numbers of their comparison."""
    cfg = get_pretrained_cfg(name)
    run = PublishedRun(comparison_of(name), SUFFIXES[suffix_of(name.partition(".")[0])])
    trained = f"`{run.command}` trains them with seed {run.seed}."
    if cfg.hf_hub_id:
        about = (
            f"These weights are in the Hub repository [{cfg.hf_hub_id}](https://huggingface.co/{cfg.hf_hub_id}). "
            f"`pretrained=True` downloads `{cfg.hf_hub_filename}`.\n\n{trained}")
    else:
        about = (
            "These weights are part of timm-ortho, in float32, and load without a network connection.\n\n"
            f"{trained} `scripts/make_weights.py` copies them into the package, together with inputs and outputs for "
            "the tests.")
    return Card(name, model_card(subject(name, about=about, license=cfg.license), run, curve=f"{name}.png"), run)


# From the cards of the authors' repositories: top-1 and top-5 on ImageNet-1k in %, and the step of the checkpoint.
AUTHORS = {
    "vit_base_ortho.authors_in1k": (74.62, 92.26, "after step 90,000, about epoch 270 of 300"),
    "vit_base_linear.authors_in1k": (71.23, 90.29, "after an unknown step"),
}


def of_authors(name: str) -> Card:
    """Return the card of the authors' weights on the Hub, with the authors' numbers."""
    cfg = get_pretrained_cfg(name)
    top1, top5, when = AUTHORS[name]
    twin, = AUTHORS.keys() - {name}
    experiment = experiments()["vit_b_imagenet1k"]
    mean, std = experiment.top1()["Linear" if "linear" in name else "Orthogonal-F"]
    about = (
        "Giyeong Oh and the other authors of [the paper](https://arxiv.org/abs/"
        f"{cfg.paper_ids.removeprefix('arXiv:')}) trained and published these weights. They "
        f"are in their repository [{cfg.hf_hub_id}](https://huggingface.co/{cfg.hf_hub_id}), in transformers' layout. "
        f"`pretrained=True` downloads `{cfg.hf_hub_filename}`, renames its tensors for this architecture, and adds the "
        "class token's position embedding to the class token. This repository and package have no copy.\n\n"
        f"**Accuracy according to the authors' card, not measured here:** {top1:.2f} % top-1 and {top5:.2f} % top-5 on "
        f"ImageNet-1k, {when}. The paper reports {mean:.2f} ± {std:.2f} % top-1 ({experiment.table} of the final "
        "version; mean and standard deviation of an unknown number of runs). The counterpart "
        f"[{twin}]({twin}.md) has {AUTHORS[twin][0]:.2f} % and {AUTHORS[twin][1]:.2f} %. timm's "
        f"[validate.py]({VALIDATE}) evaluates both with "
        "the images of ImageNet-1k in class folders below `IMAGENET/validation`:\n\n"
        "    python -m timm_ortho run validate.py --data-dir IMAGENET --model 'vit_base_*.authors_in1k' --pretrained"
        "\n\n"
        f"**Licence:** {cfg.license}, share-alike. Works based on these weights, such as a fine-tuned copy, must be "
        "published under the same licence and must name the authors.")
    known = [
        "These weights were not loaded here. The renaming is tested on random weights in the same layout: the logits "
        "equal those of a plain implementation to 1e-4.",
        "The resolution, crop, mean and std are from this package's recipe `vit_b_imagenet1k`.",
    ]
    return Card(name, model_card(subject(name, about=about, license=cfg.license, dataset="imagenet1k", limits=known)))


# MODEL.TAG -> the function that returns the card. `of_comparison` returns the cards of all other weights.
TRAINED_ELSEWHERE: dict[str, Callable[[str], Card]] = dict.fromkeys(AUTHORS, of_authors)


def subject(name: str, **more) -> Subject:
    architecture = name.partition(".")[0]
    with torch.device("meta"):
        model = timm.create_model(name)
    config = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "model_args": {"connection": SUFFIXES[suffix_of(architecture)]},
        "pretrained_cfg": model.pretrained_cfg,
    }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Subject(title=name, config=config, parameters=parameters, **more)
