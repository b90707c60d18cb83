"""Model cards, made from `template.md` with huggingface_hub's card classes.

Every figure on a card comes from a `runs.Run`, and those are read from files; no function here takes a figure.
"""
import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .._text import finite
from ..connections import CONNECTIONS
from ..skips import SKIPS
from .trained_run import Run

CURVE = "training.png"
TEMPLATE = Path(__file__).with_name("template.md")
_TIMM = "https://github.com/huggingface/pytorch-image-models"

# timm's name of a data set: its title, and its id on the Hub
DATASETS = {
    "digits": ("scikit-learn's digits", None),
    "torch/cifar10": ("CIFAR-10", "uoft-cs/cifar10"),
    "torch/cifar100": ("CIFAR-100", "uoft-cs/cifar100"),
    "torch/mnist": ("MNIST", "ylecun/mnist"),
    "torch/fashion_mnist": ("Fashion-MNIST", "zalando-datasets/fashion_mnist"),
    "imagenet1k": ("ImageNet-1k", "ILSVRC/imagenet-1k"),
}

# an entry of citations.bib by its key
CITATIONS = {re.search(r"{(.*?),", entry)[1]: entry for entry in
             Path(__file__).with_name("citations.bib").read_text(encoding="utf-8").strip().split("\n\n")}

# What of timm's options a reader wants to see first, in this order.
_RECIPE = """epochs batch_size grad_accum_steps opt lr weight_decay sched warmup_epochs clip_grad smoothing mixup cutmix
    aa reprob color_jitter hflip scale ratio drop drop_path model_ema amp img_size input_size pretrained seed""".split()

_OF_WEIGHTS = {"eval_top1": "top-1 of these weights, %", "eval_top5": "top-5 of these weights, %"}

# Options whose value is a place on somebody's machine: the last part of the path says enough.
_PLACES = frozenset("data data_dir class_map initial_checkpoint output pretrained_path resume".split())

_PRIVATE = frozenset("host pid".split())  # of `made_with`


@dataclass(frozen=True)
class Subject:
    """What a card is about, but for its figures.

    Attributes:
        title: The heading.
        config: What `config.json` holds (architecture, model_args, pretrained_cfg, num_classes), None where the card is
            of results and there are no weights.
        parameters: Of the model, None where there are no weights.
        load: What `timm.create_model` takes: `hf-hub:me/repo`, `vit_test_ortho.digits`.
        repo_id: The repository on the Hub, where the weights are in one.
        revision: Of that repository, None for main.
        license: As the Hub names licences (`apache-2.0`), None where the owner has not said.
        base_model: The Hub's id of the weights that training began with.
        about: Markdown that stands below the summary: whose weights they are, where they are from.
        limits: Sentences that stand before those that follow from the run.
        dataset: timm's name of the data set, where there is no run that says it.
        tags: Beside those that every card has.
        imports: Lines of code that follow `import timm_ortho`, for what the author registered.
    """

    title: str
    config: Optional[Mapping[str, Any]] = None
    parameters: Optional[int] = None
    load: Optional[str] = None
    repo_id: Optional[str] = None
    revision: Optional[str] = None
    license: Optional[str] = None
    base_model: Optional[str] = None
    about: str = ""
    limits: Sequence[str] = ()
    dataset: Optional[str] = None
    tags: Sequence[str] = ()
    imports: Sequence[str] = ()

    @property
    def connection(self) -> Optional[str]:
        return ((self.config or {}).get("model_args") or {}).get("connection")


def model_card(subject: Subject, run: Optional[Run] = None, curve: Optional[str] = None) -> ModelCard:
    """The card of a set of weights, or of results.

    Args:
        subject: What it is about.
        run: Where the figures come from; without one the card says that nothing was measured.
        curve: The figure of the training curve, relative to the card; see `draw_curve`.
    """
    return filled(
        metadata(subject, run),
        title=subject.title,
        summary=_summary(subject, run),
        about=subject.about,
        load=subject.load,
        imports=subject.imports,
        registered=subject.config["architecture"] if subject.connection else None,
        mode=" in grey" if subject.config and _channels(subject.config) == 1 else "",
        repo_id=subject.repo_id,
        revision_argument=f', revision="{subject.revision}"' if subject.revision else "",
        facts=list(_facts(subject)),
        dataset=_images(subject, run, "val_num_samples"),
        split=run.options.get("val_split") or "validation" if run else "",
        figures=list(_figures(run)) if run else [],
        result_notes=_result_notes(run),
        comparison=[_compared(row) for row in run.comparison] if run else [],
        comparison_head=["connection", "top-1 %, mean ± std", f"difference to {_baseline(run)}", "seeds"],
        comparison_note=f"Runs with different connections, paired by seed: the same start, the same batches. {PAIRS}",
        curve=curve,
        recipe=list(_recipe(run.options)) if run else [],
        options=_yaml(run.options) if run else "",
        made_with=made_with(run.result) if run else "",
        limits=[*subject.limits, *limits(subject, run)],
        citation="\n\n".join(_citations(subject, run)),
    )


def filled(data: ModelCardData, **sections: Any) -> ModelCard:
    """The template with its sections filled in; one that is empty, or not given, is left out."""
    card = ModelCard.from_template(data, template_path=str(TEMPLATE), **sections)
    card.text = re.sub(r"\n{3,}", "\n\n", card.text)
    return card


def draw_curve(run: Run, path: Path) -> None:
    """Loss and top-1 of a run by epoch, as a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    epochs = [row["epoch"] + 1 for row in run.history]
    for axes, title, lines in zip(figure.subplots(1, 2), ("loss", "top-1, %"), _CURVES, strict=True):
        for key, label, look in lines:
            values = [math.nan if row.get(key) is None else row[key] for row in run.history]
            axes.plot(epochs, values, label=label, marker="." if len(epochs) < 3 else None, **look)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("epochs done", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


_BLUE = dict(color="#0072b2")
_CURVES = (  # of the left and of the right panel: column, label, look
    (("train_loss", "training", dict(color="#d55e00", linestyle="--")), ("eval_loss", "validation", _BLUE)),
    (("eval_top1", "validation", _BLUE),),
)


# ---------------------------------------------------------------------------------------------- metadata
def metadata(subject: Subject, run: Optional[Run] = None) -> ModelCardData:
    """What a card says to the Hub."""
    dataset = _dataset(subject, run)
    title = _images(subject, run, "val_num_samples")
    results = list(_eval_results(run, title, dataset[1] or dataset[0])) if run else []
    return ModelCardData(
        library_name="timm",
        license=subject.license,
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "timm-ortho", "orthogonal-residual", *subject.tags],
        datasets=[dataset[1]] if dataset[1] else None,
        base_model=subject.base_model,
        metrics=["accuracy"] if results else None,
        model_name=subject.title if results else None,
        eval_results=results or None,
    )


def _eval_results(run: Run, title: str, dataset: str) -> Iterator[EvalResult]:
    def result(name: str, value: float, args: Optional[dict] = None) -> EvalResult:
        return EvalResult(
            task_type="image-classification",
            dataset_type=dataset,
            dataset_name=title,
            dataset_split=run.options.get("val_split") or "validation",
            metric_type="accuracy",
            metric_name=name,
            metric_value=round(value, 4),
            metric_args=args,
        )

    for key, name in _OF_WEIGHTS.items():
        if run.evaluated is not None and finite(run.evaluated.get(key)):
            yield result(name, run.evaluated[key])
    if run.top1_std is not None:
        yield result("top-1 after the last epoch, mean over seeds, %", run.top1_mean, _spread(run.top1_std, run.peers))
    for row in run.comparison if run.connection is None else ():
        args = _spread(row["top1_std"], row["seeds"]) if row["top1_std"] is not None else None
        yield result(f"top-1 after the last epoch, {row['connection']}, mean over seeds, %", row["top1_mean"], args)


def _spread(std: float, seeds: Iterable[int]) -> dict[str, Any]:
    return {"std": round(std, 4), "seeds": list(seeds)}


def _dataset(subject: Subject, run: Optional[Run]) -> tuple[str, Optional[str]]:
    """Title and id on the Hub."""
    name = run.options.get("dataset") if run else subject.dataset
    if not name:
        folder = Path(str((run.options.get("data_dir") or run.options.get("data")) if run else "")).name
        return f"image folder '{folder}'" if folder else "an image folder", None
    return DATASETS.get(name, (name.rpartition("/")[2] or name, None))


def _images(subject: Subject, run: Optional[Run], key: str) -> str:
    """Return the title of the data set, and the number of its images if the option `key` limits it."""
    title = _dataset(subject, run)[0]
    applies = run and (run.result.get("trainer", "train.py") != "train.py")  # timm's script ignores the option
    return f"{run.options[key]:,} images of {title}" if applies and run.options.get(key) else title


# -------------------------------------------------------------------------------------------- the tables
def _summary(subject: Subject, run: Optional[Run]) -> str:
    connection = subject.connection or (run.connection if run else None)
    what = f"`{subject.config['architecture']}`" if subject.config else "Results of `timm-ortho compare`"
    kind = f" with {connection} residual connections" if connection else ""
    trained = f", trained on {_images(subject, run, 'train_num_samples')}" if run or subject.dataset else ""
    made = "Made" if run else "Loads"
    return f"{what}{kind}{trained}. {made} with [timm]({_TIMM}) and timm-ortho."


def _facts(subject: Subject) -> Iterator[tuple[str, str]]:
    if subject.config is None:
        return
    config = subject.config
    cfg, arguments = config["pretrained_cfg"], dict(config.get("model_args") or {})
    yield "architecture", f"`{config['architecture']}`"
    connection = arguments.pop("connection", None)
    if connection:
        said = getattr(CONNECTIONS.get(connection), "__doc__", None) or "Registered by its author."
        yield "connection", f"{connection}. {said.strip().splitlines()[0]}"
    if "skip" in arguments:
        skip = arguments.pop("skip")
        yield "transform of the stream", f"{skip}: {SKIPS[skip][0]}"
    for key, value in arguments.items():
        yield f"`{key}`", f"`{value}`"
    if subject.parameters is not None:
        yield "parameters", f"{subject.parameters:,}"
    yield "input", " x ".join(map(str, cfg["input_size"]))
    for key in ("mean", "std", "interpolation", "crop_pct"):
        if cfg.get(key) is not None:
            yield key, _listed(cfg[key])
    yield "classes", str(config["num_classes"])


def _figures(run: Run) -> Iterator[tuple[str, str]]:
    row = run.evaluated or {}
    for key, name in _OF_WEIGHTS.items():
        if finite(row.get(key)):
            yield name, f"{row[key]:.2f}"
    if finite(row.get("eval_loss")):
        yield "loss of these weights", f"{row['eval_loss']:.4f}"
    if run.peers:
        spread = f" ± {run.top1_std:.2f}" if run.top1_std is not None else ""
        yield "top-1 after the last epoch, % (mean ± standard deviation over seeds)", f"{run.top1_mean:.2f}{spread}"
        yield "by seed", ", ".join(f"{seed}: {top1:.2f}" for seed, top1 in run.peers.items())


def _result_notes(run: Optional[Run]) -> list[str]:
    if run is None:
        return ["Not measured: these weights came without the files of a training run."]
    notes = []
    if run.epoch is not None and run.evaluated is None:
        why = "they were saved in the middle of an epoch" if run.in_mid_epoch else (
            "the run's files have no row for their epoch")
        if run.ema != run.evaluates_ema:
            measured, these = ("plain", "EMA") if run.ema else ("EMA", "plain")
            why = f"the run evaluated its {measured} weights, and these are the {these} ones"
        notes.append(f"Not measured on these weights: {why}.")
    if run.chosen_on_validation:
        last = run.history[-1]["epoch"]
        notes.append(f"These are the weights after epoch {run.epoch + 1} of {last + 1}. Where an epoch is chosen by "
                     "its figures on the validation set, as timm's `model_best` is, they flatter it.")
    return notes


PAIRS = ("Differences are of such pairs; in brackets is Student's 95 % interval of their mean, and one that holds "
          "zero tells nothing apart.")


def _baseline(run: Optional[Run]) -> str:
    return run.comparison[0]["baseline"] if run and run.comparison else ""


def _compared(row: Mapping[str, Any]) -> list[str]:
    spread = f" ± {row['top1_std']:.2f}" if row["top1_std"] is not None else ""
    return [row["connection"], f"{row['top1_mean']:.2f}{spread}", difference(row["difference"]),
            ", ".join(map(str, row["seeds"]))]


def difference(paired: Optional[Mapping[str, Any]], form: str = ".2f") -> str:
    """A difference of pairs, with its interval; `-` where there is none."""
    if paired is None:
        return "-"
    mean, half = paired["mean"], paired["half_width"]
    if half is None:
        why = "one pair" if paired["pairs"] < 2 else f"{paired['pairs']} equal differences"
        return f"{mean:+{form}} ({why}, no interval)"
    return f"{mean:+{form}} [{mean - half:+{form}}, {mean + half:+{form}}]"


def _recipe(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in _RECIPE:
        value = options.get(key)
        if value or (key == "seed" and value is not None):
            yield key, _listed(value)


def _yaml(options: Mapping[str, Any]) -> str:
    shown = {key: Path(value).name if key in _PLACES and isinstance(value, str) else value
             for key, value in options.items()}
    plain = json.loads(json.dumps(shown, default=str))  # what YAML does not have by its text
    return yaml.safe_dump(plain, default_flow_style=None, width=100).strip()


def made_with(result: Mapping[str, Any]) -> str:
    """Versions, machine, command, commit and device of a run's `result.json`, without what identifies the host."""
    made = {key: value for key, value in (result.get("made_with") or {}).items() if key not in _PRIVATE}
    commit, sessions = made.pop("commit", None), made.pop("continued", None)
    if made.get("command"):
        made["command"] = f"`{_without_folders(made['command'])}`"
    if sessions:  # each has a host, a process and a command of its own
        made["continued"] = f"{len(sessions)} time{'s' * (len(sessions) > 1)}"
    said = {**made, "commit": commit, "device": result.get("device")}
    return ", ".join(f"{key} {value}" for key, value in said.items() if value)


def _without_folders(command: str) -> str:
    """Return the command with the last part of each absolute path, also of one behind `=`."""
    program, *words = shlex.split(command)
    split = [word.rpartition("=") for word in words]
    words = ["".join([*before, Path(value).name if Path(value).is_absolute() else value]) for *before, value in split]
    name = "timm-ortho" if Path(program).name == "__main__.py" else Path(program).name
    return shlex.join([name, *words])


# ---------------------------------------------------------------------------------------------- the texts
def limits(subject: Subject, run: Optional[Run] = None) -> Iterable[str]:
    """What is not known about the weights or the results."""
    if run is not None or subject.dataset:
        yield (f"Trained and evaluated on {_dataset(subject, run)[0]} alone: nothing is known about other images, "
               "other cameras or other classes.")
    if run is not None and run.connection is not None and len(run.peers) < 2:
        yield "One seed: the figures have no spread, and a difference to another model cannot be judged by them."
    if run is not None and 1 < len(run.peers) < 5:
        yield f"{len(run.peers)} seeds: the standard deviation is itself uncertain."
    if run is not None and any("difference" in row and row["difference"] for row in run.comparison):
        yield "The comparison holds for this data set, this size and this length of training only."
    yield "Accuracy only: robustness, calibration and fairness have not been measured."


def _citations(subject: Subject, run: Optional[Run]) -> Iterator[str]:
    yield CITATIONS["oh2025revisiting"]
    architecture = subject.config["architecture"] if subject.config else str(run.options["model"] if run else "")
    if architecture.startswith(("vit", "deit", "flexivit", "test_vit")):
        yield CITATIONS["dosovitskiy2021image"]
    if architecture.startswith(("resnetv2", "resnet")):
        yield CITATIONS["he2016identity"]
    if subject.config and "skip" in (subject.config.get("model_args") or {}):
        yield CITATIONS["wang2017orthogonal"]
    yield CITATIONS["rw2019timm"]


def _channels(config: Mapping[str, Any]) -> int:
    return config["pretrained_cfg"]["input_size"][0]


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
