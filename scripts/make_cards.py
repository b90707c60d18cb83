"""Make the model cards in model_cards/: one for each set of weights and of results that this repository has.

    python scripts/make_cards.py             writes them
    python scripts/make_cards.py --check     says which are not what this would write, exit status 1 if there are any

| card | of | figures from |
| --- | --- | --- |
| `NAME.TAG.md` | weights, see `timm-ortho list --weights` | `results/vit_test_digits.json`, for those that ship |
| `compare_NAME.md` | a comparison of connections | `results/NAME.json`, which scripts/readme_results.py wrote |
| `study_NAME.md` | a study | `results/studies/NAME/results.json`, which scripts/study_results.py wrote |

`timm_ortho.hub.card` writes all of them, from `template.md` there. Figures of other people's weights are their
cards' and their paper's, `AUTHORS` and `timm_ortho/lab/paper.json`, and said to be so.
"""
import sys
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Optional

import timm
from huggingface_hub import ModelCard
from recorded import RecordedRun, RecordedStudy, read_comparison
from timm.models import get_pretrained_cfg

import timm_ortho  # noqa: F401  registers the models
from timm_ortho.hub.card import (
    CITATIONS,
    DATASETS,
    PAIRS,
    Subject,
    difference,
    draw_curve,
    filled,
    limits,
    made_with,
    metadata,
    model_card,
)
from timm_ortho.hub.trained_run import Run
from timm_ortho.lab.paper import experiments
from timm_ortho.models.meta import on_meta
from timm_ortho.models.names import SUFFIXES, base_name, is_variant, suffix_of

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "model_cards"
BY_HAND = ("README.md",)
VALIDATE = "https://github.com/huggingface/pytorch-image-models/blob/main/validate.py"
SEED = 0  # of the weights that ship: scripts/make_test_weights.py


class Card(NamedTuple):
    """A card that is to be, by the stem of its file's name."""

    name: str
    card: ModelCard
    run: Optional[Run] = None  # whose training curve it shows, as NAME.png


def main(check: bool, folder: Path = CARDS) -> int:
    cards = list(all_cards(folder))
    wanted = {f"{card.name}.md": str(card.card).rstrip() + "\n" for card in cards}
    curves = {f"{card.name}.png": card.run for card in cards if card.run}
    stale = [name for name, text in wanted.items() if not is_written(folder / name, text)]
    stale += [name for name in curves if not (folder / name).is_file()]
    strangers = sorted({path.name for path in folder.glob("*.md")} - wanted.keys() - set(BY_HAND))
    if check:
        for name in stale:
            print(f"{folder.name}/{name} is not what its results say: run scripts/make_cards.py", file=sys.stderr)
        for name in strangers:
            print(f"{folder.name}/{name} is of nothing that this repository has", file=sys.stderr)
        return 1 if stale or strangers else 0
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, run in curves.items():
        draw_curve(run, folder / name)
    print(f"{len(cards)} cards in {folder}; of nothing that is there: {', '.join(strangers) or 'none'}")
    return 0


def is_written(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def all_cards(folder: Path) -> Iterator[Card]:
    for name in timm.list_pretrained():
        if is_variant(name):
            if name in AUTHORS:
                yield of_authors(name)
            elif get_pretrained_cfg(name).file:
                yield of_shipped(name, folder)
            else:
                raise SystemExit(f"nothing says what is on the card of {name}: see AUTHORS in scripts/make_cards.py")
    for path in sorted((folder / "results").glob("*.json")):
        yield of_comparison(path)
    for path in sorted((folder / "results" / "studies").glob("*/results.json")):
        card = study_card(RecordedStudy(path), (path.parent / "report.md").relative_to(folder).as_posix())
        yield Card(f"study_{path.parent.name}", card)


# ------------------------------------------------------------------------------------------------ weights
def of_shipped(name: str, folder: Path) -> Card:
    """The card of weights that are part of the package."""
    architecture, _, data = name.partition(".")
    run = RecordedRun(folder / "results" / f"vit_test_{data}.json", SUFFIXES[suffix_of(architecture)], SEED)
    about = (
        "These weights are part of timm-ortho, in float32, and load without any network. They are small on purpose: "
        "for tests, for a first look, for trying out tools.\n\n"
        f"`timm-ortho compare --recipe vit_test_{data}` trains them, with seed {SEED} of the seeds below, and "
        "`scripts/make_test_weights.py` puts them into the package with the tensors that the tests check them by.")
    return Card(name, model_card(subject(name, about=about, license="apache-2.0"), run, curve=f"{name}.png"), run)


# What the cards of the authors' repositories say: top-1 and top-5 on ImageNet-1k in %, and of which point of training.
# Weights of others need a function beside `of_authors`, with what is to be said of them.
AUTHORS = {
    "vit_base_ortho.authors_in1k": (74.62, 92.26, "after step 90,000, about epoch 270 of 300"),
    "vit_base_linear.authors_in1k": (71.23, 90.29, "after a step that is not known here"),
}


def of_authors(name: str) -> Card:
    """The card of the authors' weights, which are on the Hub; nothing of them has been measured here."""
    cfg = get_pretrained_cfg(name)
    top1, top5, when = AUTHORS[name]
    twin, = AUTHORS.keys() - {name}
    experiment = experiments()["vit_b_imagenet1k"]
    mean, std = experiment.top1()["Linear" if "linear" in name else "Orthogonal-F"]
    about = (
        f"The weights belong to Giyeong Oh and the other authors of [the paper]({paper_url(cfg)}). They stand in their "
        f"repository [{cfg.hf_hub_id}](https://huggingface.co/{cfg.hf_hub_id}), in transformers' layout; "
        f"`pretrained=True` downloads `{cfg.hf_hub_filename}` from there, maps it onto this architecture and folds the "
        "class token's position embedding into the class token. There is no copy in this repository or package.\n\n"
        f"**Their card's figures, not measured here:** {top1:.2f} % top-1 and {top5:.2f} % top-5 on ImageNet-1k, "
        f"{when}. The paper has {mean:.2f} ± {std:.2f} % top-1 at the end of training ({experiment.table}; mean and "
        f"standard deviation of three runs). The twin, [{twin}]({twin}.md), has {AUTHORS[twin][0]:.2f} % and "
        f"{AUTHORS[twin][1]:.2f} %. With the images of ImageNet-1k in `IMAGENET/validation`, a folder for each class, "
        f"timm's [validate.py]({VALIDATE}) evaluates the two:\n\n"
        "    python -m timm_ortho run validate.py --data-dir IMAGENET --model 'vit_base_*.authors_in1k' --pretrained"
        "\n\n"
        f"**Licence:** {cfg.license}, share-alike: what is made of these weights and published, a fine-tuned copy for "
        "one, is under the same licence, with the authors named.")
    known = [
        "Not loaded here: the mapping is tested on random weights in the same layout, against a plain implementation "
        "of it, to 1e-4 in the logits.",
        "The resolution, crop, mean and std are those of this package's recipe `vit_b_imagenet1k`.",
    ]
    return Card(name, model_card(subject(name, about=about, license=cfg.license, dataset="imagenet1k", limits=known)))


def subject(name: str, **more) -> Subject:
    architecture = name.partition(".")[0]
    with on_meta():
        model = timm.create_model(name)
    config = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "model_args": {"connection": SUFFIXES[suffix_of(architecture)]},
        "pretrained_cfg": model.pretrained_cfg,
    }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Subject(title=name, config=config, parameters=parameters, load=name, **more)


def paper_url(cfg) -> str:
    return f"https://arxiv.org/abs/{cfg.paper_ids.removeprefix('arXiv:')}"


# ------------------------------------------------------------------------------------------------ results
def of_comparison(path: Path) -> Card:
    """The card of a comparison of connections: results without weights."""
    run = RecordedRun(path)
    base = base_name(run.options["model"])
    settings = read_comparison(path)["settings"]
    figure = f"compare_{path.stem}.svg"
    connections, seeds = (", ".join(map(str, settings[key])) for key in ("connections", "seeds"))
    about = (
        f"`{base}` with {connections} connections, seeds {seeds}. "
        f"Every run's figures are in [`results/{path.name}`](results/{path.name}).\n\n"
        f"![norm of the stream and cosine between stream and branch output, by depth]({figure})")
    data = run.options["dataset"].rpartition("/")[2]
    what = Subject(title=f"{base} on {data}: connections compared", about=about)
    return Card(f"compare_{path.stem}", model_card(what, run))


def study_card(study: RecordedStudy, report: str) -> ModelCard:
    """The card of a study's results; `report` is its whole report, relative to the card."""
    about = study.about
    paper = f" ({about['paper']})" if about["paper"] else ""
    subject = Subject(title=about["title"] + paper, dataset=about["dataset"])
    beside = "The paper's figures beside these, with figures" if paper else "Figures"
    with_paper = f"{beside} and all settings: [{report}]({report})."
    scale = [f"Scaled down from the paper: {'; '.join(about['changed'])}."] if about["changed"] else []
    of_training = limits(subject) if about["dataset"] else [
        "Nothing was trained for it: it says nothing about accuracy."]
    cited = ("oh2025revisiting", *(["wang2017orthogonal"] if "Wang et al." in about["paper"] else []), "rw2019timm")
    return filled(
        metadata(subject),
        title=subject.title,
        summary=f"Results of the study `{about['name']}` at scale `{about['scale']}`{study_of(about)}.",
        result_notes=[note for note in (study.lead, with_paper) if note],
        comparison=[studied(row) for row in study.rows],
        comparison_head=["setting", "figure", "mean ± std", "difference to the baseline", "seeds"],
        comparison_note=f"Settings are paired by seed: the same start, the same batches. {PAIRS}",
        made_with=made_with({"made_with": {**about["versions"], "command": about["command"]}}),
        limits=[*scale, *of_training],
        citation="\n\n".join(CITATIONS[key] for key in cited),
    )


def study_of(about: Mapping[str, Any]) -> str:
    if not about["dataset"]:
        return ", which needs no training"
    title = DATASETS.get(about["dataset"], (about["dataset"],))[0]
    return f": {about['model']} on {title}, {len(about['seeds'])} seeds"


def studied(row: Mapping[str, Any]) -> list[str]:
    spread = f" ± {row['std']:.2g}" if row["std"] is not None else ""
    mean = "not finite" if row["mean"] is None else f"{row['mean']:.4g}{spread}"
    return [", ".join(row["row"]), ", ".join(row["column"]), mean, difference(row["difference"], ".3g"),
            ", ".join(map(str, row["seeds"]))]


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        raise SystemExit(__doc__)
    raise SystemExit(main(check=sys.argv[1:] == ["--check"]))
