"""Write model cards from `template.md` with huggingface_hub's card classes.

Every metric on a card is read from a :class:`Run`, whose values come from files.
"""
import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from timm.data import ImageNetInfo

from .._checks import known_name
from .._text import finite
from .._yaml import dump_yaml
from ..connections import CONNECTIONS, declared
from ..models.names import IMPORT_TAG
from ..run_folder import Run
from ..skips import SKIPS

CURVE = "training.png"
TEMPLATE = Path(__file__).with_name("template.md")
_TIMM = "https://github.com/huggingface/pytorch-image-models"

# timm's name of a data set -> its title and its id on the Hub
DATASETS = {
    "digits": ("scikit-learn's digits", None),
    "torch/cifar10": ("CIFAR-10", "uoft-cs/cifar10"),
    "torch/cifar100": ("CIFAR-100", "uoft-cs/cifar100"),
    "torch/mnist": ("MNIST", "ylecun/mnist"),
    "torch/fashion_mnist": ("Fashion-MNIST", "zalando-datasets/fashion_mnist"),
    "torch/imagenet": ("ImageNet-1k", "ILSVRC/imagenet-1k"),
    "imagenet1k": ("ImageNet-1k", "ILSVRC/imagenet-1k"),
    "tiny_imagenet": ("Tiny ImageNet", "zh-plus/tiny-imagenet"),
}

# BibTeX key -> entry of citations.bib
CITATIONS = {re.search(r"{(.*?),", entry)[1]: entry for entry in
             Path(__file__).with_name("citations.bib").read_text(encoding="utf-8").strip().split("\n\n")}

# argument of the model -> its effect on the update
_EFFECTS = {
    "connection_prob": "In training, this form has the probability pi = `connection_prob`. In evaluation, "
                       "y = x + f - pi s x.",
    "connection_groups": "The channels are divided into equal groups, each with its own s.",
    "connection_layers": "Blocks outside `connection_layers` are linear: y = x + f.",
    "connection_kinds": "Branches outside `connection_kinds` are linear: y = x + f.",
    "skip": "P x replaces x, where P is the transform of the stream.",
}

# timm's options that the recipe table lists, in this order.
_RECIPE = """epochs batch_size grad_accum_steps opt lr weight_decay sched warmup_epochs clip_grad smoothing mixup cutmix
    aa reprob color_jitter hflip scale ratio drop drop_path model_ema amp img_size input_size pretrained pretrained_path
    initial_checkpoint seed""".split()

_OF_WEIGHTS = {"eval_top1": "top-1 of these weights, %", "eval_top5": "top-5 of these weights, %"}

# Options that are local paths. Cards show only the last part of each.
_PATHS = frozenset(
    "data data_dir class_map initial_checkpoint output pretrained_path resume file checkpoint_path".split())


@dataclass(frozen=True)
class Subject:
    """The weights that a card describes. The metrics are in :class:`Run`.

    Attributes:
        title: The heading.
        config: Content of `config.json` (architecture, model_args, pretrained_cfg, num_classes).
        parameters: Number of parameters.
        load: Name for `timm.create_model`, such as `hf-hub:me/repo` or `vit_test_ortho.digits`.
        repo_id: Repository of the weights on the Hub; None for weights that are not on the Hub.
        revision: Revision in that repository; None for main.
        license: License identifier of the Hub (`apache-2.0`); None if the owner did not choose one.
        base_model: Repository of the weights that training started with.
        about: Markdown below the summary, for example on the origin of the weights.
        limits: Sentences for the section "Limits", before the sentences of `model_card`.
        dataset: A key of `DATASETS`, if there is no run.
        tags: Additional tags.
        imports: Lines of code after `import timm_ortho` that register the author's classes.
    """

    title: str
    config: Mapping[str, Any]
    parameters: int
    load: str
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
        return (self.config.get("model_args") or {}).get("connection")


def model_card(subject: Subject, run: Optional[Run] = None, curve: Optional[str] = None) -> ModelCard:
    """Return the model card of the weights that ``subject`` describes.

    >>> config = {"architecture": "vit_test_ortho", "num_classes": 10, "pretrained_cfg": {"input_size": [1, 8, 8]}}
    >>> card = model_card(Subject("my-model", config, 12345, "hf-hub:me/my-model", license="apache-2.0"))
    >>> card.data.license
    'apache-2.0'

    Args:
        subject: What the card describes.
        run: Source of the metrics. Without a run the card states that nothing was measured.
        curve: Path of the training curve relative to the card, see `draw_curve`.
    """
    registered = subject.config["architecture"] if subject.connection else None
    card = ModelCard.from_template(
        _metadata(subject, run),
        template_path=str(TEMPLATE),
        title=subject.title,
        summary=_summary(subject, run),
        about=subject.about,
        load=subject.load,
        imports=subject.imports,
        registered=f"{registered}.{IMPORT_TAG}" if registered and subject.repo_id else registered,
        mode=" in grey" if subject.config["pretrained_cfg"]["input_size"][0] == 1 else "",
        repo_id=subject.repo_id,
        revision_argument=f', revision="{subject.revision}"' if subject.revision else "",
        facts=list(_facts(subject)),
        update=_update(subject),
        dataset=_images(subject, run, "val_num_samples"),
        split=run.split if run else "",
        metrics=list(_metrics(run)) if run else [],
        result_notes=_result_notes(run),
        comparison=[_compared(row) for row in run.card.comparison] if run else [],
        comparison_head=["connection", "top-1 %, mean ± std", f"difference to {_baseline(run)}", "seeds"],
        comparison_note=f"Runs of the same seed have the same initial weights and batches. {_PAIRS}",
        curve=curve,
        recipe=list(_recipe(without_folders(run.options))) if run else [],
        options=_yaml(run.options) if run else "",
        made_with=made_with(run.card.made_with) if run else "",
        limits=[*subject.limits, *_limits(subject, run)],
        citation="\n\n".join(_citations(subject)),
    )
    card.text = re.sub(r"\n{3,}", "\n\n", card.text)  # omitted sections leave blank lines
    return card


def draw_curve(run: Run, path: Path) -> None:
    """Draw loss and top-1 of a run by epoch into a PNG file. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    epochs = [row["epoch"] + 1 for row in run.history]
    for axes, title, lines in zip(figure.subplots(1, 2), ("loss", "top-1, %"), _CURVES, strict=True):
        for key, label, style in lines:
            values = [math.nan if row.get(key) is None else row[key] for row in run.history]
            axes.plot(epochs, values, label=label, marker="." if len(epochs) < 3 else None, **style)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("epochs done", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


_BLUE = dict(color="#0072b2")
_CURVES = (  # lines of the left and of the right panel; each line is (key in the history, label, style)
    (("train_loss", "training", dict(color="#d55e00", linestyle="--")), ("eval_loss", "validation", _BLUE)),
    (("eval_top1", "validation", _BLUE),),
)


# ---------------------------------------------------------------------------------------------- metadata
def _metadata(subject: Subject, run: Optional[Run] = None) -> ModelCardData:
    """Return the metadata of a card for the Hub."""
    dataset = _dataset(subject, run)
    title = _images(subject, run, "val_num_samples")
    results = list(_eval_results(run, title, dataset[1] or dataset[0])) if run else []
    method = ["orthogonal-residual"] if subject.connection != "linear" and _card_text(subject) else []
    return ModelCardData(
        library_name="timm",
        license=subject.license,
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "timm-ortho", *method, *subject.tags],
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
            dataset_split=run.split,
            metric_type="accuracy",
            metric_name=name,
            metric_value=round(value, 4),
            metric_args=args,
        )

    for key, name in _OF_WEIGHTS.items():
        if run.evaluated is not None and finite(run.evaluated.get(key)):
            yield result(name, run.evaluated[key])
    if run.top1_std is not None:
        yield result(f"{_final_top1(run)}, mean over seeds, %", run.top1_mean,
                     {"std": round(run.top1_std, 4), "seeds": list(run.card.top1)})


def _dataset(subject: Subject, run: Optional[Run]) -> tuple[str, Optional[str]]:
    """Return the title of the data set and its id on the Hub, or None if it has no known id."""
    if not run and subject.dataset:
        known_name("data set", subject.dataset, DATASETS)
    options = run.options if run else {"dataset": subject.dataset}
    name = options.get("dataset")
    if not name:
        folder = Path(options.get("data_dir") or options.get("data") or "").name
        known = _known_folder(folder, subject.config.get("label_names") or ())
        if known:
            return DATASETS[known]
        return f"the image folder '{folder}'" if folder else "an image folder", None
    prefix, _, on_hub = name.partition("/")
    return DATASETS.get(name, (name.rpartition("/")[2] or name, on_hub if prefix in ("hfds", "hfids") else None))


def _known_folder(name: str, labels: Sequence[str]) -> Optional[str]:
    """Return the key in `DATASETS` of an image folder with the classes of ImageNet-1k or of Tiny ImageNet's archive."""
    if set(labels) == set(ImageNetInfo().label_names()):
        return "imagenet1k"
    return "tiny_imagenet" if name == "tiny-imagenet-200" and len(set(labels)) == 200 else None


def _images(subject: Subject, run: Optional[Run], key: str) -> str:
    """Return the title of the data set. If the option `key` limits how many images are used, the number precedes it."""
    title = _dataset(subject, run)[0]
    applies = run and run.card.trainer != "train.py"  # train.py may use all images
    return f"{run.options[key]:,} images of {title}" if applies and run.options.get(key) else title


# -------------------------------------------------------------------------------------------- the tables
def _summary(subject: Subject, run: Optional[Run]) -> str:
    kind = f" with {subject.connection} residual connections" if subject.connection else ""
    trained = f", trained on {_images(subject, run, 'train_num_samples')}" if run or subject.dataset else ""
    verb = "Made" if run else "Loads"
    return f"`{subject.config['architecture']}`{kind}{trained}. {verb} with [timm]({_TIMM}) and timm-ortho."


def _facts(subject: Subject) -> Iterator[tuple[str, str]]:
    config = subject.config
    cfg, arguments = config["pretrained_cfg"], dict(config.get("model_args") or {})
    yield "architecture", f"`{config['architecture']}`"
    connection = arguments.pop("connection", None)
    if connection:
        make = CONNECTIONS.get(connection)
        # functools.partial has a docstring of its own
        description = getattr(getattr(make, "func", make), "__doc__", None) or "Registered by its author."
        yield "connection", f"{connection}. {description.strip().splitlines()[0]}"
    if "skip" in arguments:
        skip = arguments.pop("skip")
        yield "transform of the stream", f"{skip}: {SKIPS[skip][0]}"
    for key, value in arguments.items():
        yield f"`{key}`", f"`{value}`"
    yield "parameters", f"{subject.parameters:,}"
    yield "input", " x ".join(map(str, cfg["input_size"]))
    for key in ("mean", "std", "interpolation", "crop_pct"):
        if cfg.get(key) is not None:
            yield key, _listed(cfg[key])
    yield "classes", str(config["num_classes"])


def _card_text(subject: Subject) -> Optional[str]:
    return declared(subject.connection, "card_text")


def _update(subject: Subject) -> str:
    """Return what a residual block of the published model computes; empty for a model without connections."""
    if not subject.connection:
        return ""
    if not _card_text(subject):
        return (f"The connection `{subject.connection}` combines the branch output f of a residual block with the "
                "stream x. Its code is in the author's module.")
    effects = [text for name, text in _EFFECTS.items() if name in subject.config["model_args"]]
    return "\n".join([_card_text(subject), *effects])


def _final_top1(run: Run) -> str:
    """Return the name of the top-1 after the last epoch, with the evaluated weights if the card describes others."""
    if run.ema == run.evaluates_ema:
        return "top-1 after the last epoch"
    return f"top-1 of the {'EMA' if run.evaluates_ema else 'plain'} weights after the last epoch"


def _metrics(run: Run) -> Iterator[tuple[str, str]]:
    row = run.evaluated or {}
    for key, name in _OF_WEIGHTS.items():
        if finite(row.get(key)):
            yield name, f"{row[key]:.2f}"
    if finite(row.get("eval_loss")):
        yield "loss of these weights", f"{row['eval_loss']:.4f}"
    if run.card.top1:
        spread = f" ± {run.top1_std:.2f}" if run.top1_std is not None else ""
        yield f"{_final_top1(run)}, % (mean ± standard deviation over seeds)", f"{run.top1_mean:.2f}{spread}"
        by_seed = ", ".join(f"{seed}: {top1:.2f}" for seed, top1 in run.card.top1.items())
        yield f"{_final_top1(run)}, % (by seed)", by_seed


def _result_notes(run: Optional[Run]) -> list[str]:
    if run is None:
        return ["Not measured: these weights were published without the files of a training run."]
    notes = []
    if run.epoch is not None and run.evaluated is None:
        reason = "they were saved in the middle of an epoch" if run.in_mid_epoch else (
            "the run's files have no metrics for the epoch of these weights")
        if run.ema != run.evaluates_ema:
            measured, published = ("plain", "EMA") if run.ema else ("EMA", "plain")
            reason = (f"the run evaluated its {measured} weights, and these are its {published} weights. All "
                      f"validation metrics on this card are of the {measured} weights")
        notes.append(f"Not measured on these weights: {reason}.")
    if run.chosen_on_validation and run.evaluated is not None:
        last = run.history[-1]["epoch"]
        notes.append(f"These are the weights after epoch {run.epoch + 1} of {last + 1}. If the epoch was selected by "
                     "its validation metrics, as timm's `model_best` is, these metrics are too optimistic.")
    return notes


_PAIRS = ("Differences are means over pairs of runs with the same seed, with Student's 95 % confidence interval in "
         "brackets. An interval that contains zero means no clear difference.")


def _baseline(run: Optional[Run]) -> str:
    return run.card.comparison[0]["baseline"] if run and run.card.comparison else ""


def _compared(row: Mapping[str, Any]) -> list[str]:
    spread = f" ± {row['top1_std']:.2f}" if row["top1_std"] is not None else ""
    return [row["connection"], f"{row['top1_mean']:.2f}{spread}", _difference(row["difference"]),
            ", ".join(map(str, row["seeds"]))]


def _difference(paired: Optional[Mapping[str, Any]]) -> str:
    """Return a mean difference with its confidence interval as text, or `-` for None."""
    if paired is None:
        return "-"
    mean, half = paired["mean"], paired["half_width"]
    if half is None:
        count = "both" if paired["pairs"] == 2 else f"all {paired['pairs']}"
        reason = "one pair" if paired["pairs"] < 2 else f"{count} pairs have the same difference"
        return f"{mean:+.2f} ({reason}, no interval)"
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"


def _recipe(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in _RECIPE:
        value = options.get(key)
        if value or (key == "seed" and value is not None):
            yield key, _listed(value)


def _yaml(options: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(without_folders(options), default=str))  # JSON's types only; a date becomes text
    return dump_yaml(plain, default_flow_style=None, width=100).strip()


def made_with(made: Mapping[str, str]) -> str:
    """Return versions, machine, command, commit and device as one line of text."""
    shown = {**made, "command": f"`{_shared_command(made['command'])}`"} if "command" in made else made
    return ", ".join(f"{key} {value}" for key, value in shown.items())


# The folders of an absolute path inside a text, as in "{file: /home/me/run.pth}". Paths of URLs do not match.
_FOLDERS = re.compile(
    r"""(?:file:/+|(?<![\w/:.~-]))(?:~\w*|[A-Za-z]:)?[/\\](?:[^\s/\\,;:'"{}()\[\]]+[/\\])*(?=[^\s/\\])""")


def without_folders(value: Any, key: str = "") -> Any:
    """Return a copy of nested options in which each local path is shortened to its last part.

    >>> without_folders({"data_dir": "../digits", "dataset": "torch/mnist", "model_kwargs": {"file": "/home/me/a.pth"}})
    {'data_dir': 'digits', 'dataset': 'torch/mnist', 'model_kwargs': {'file': 'a.pth'}}
    """
    if isinstance(value, Mapping):
        return {name: without_folders(inner, name) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(inner, key) for inner in value]
    if isinstance(value, Path) or (isinstance(value, str) and (key in _PATHS or Path(value).is_absolute())):
        return Path(value).name
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _shared_command(command: str) -> str:
    """Return a command without the folders of its paths. The program `__main__.py` becomes `timm-ortho`."""
    program, *words = shlex.split(command)
    split = [word.rpartition("=") for word in words]
    words = ["".join([*map(without_folders, before), without_folders(value)]) for *before, value in split]
    name = "timm-ortho" if Path(program).name == "__main__.py" else Path(program).name
    return shlex.join([name, *words])


# ---------------------------------------------------------------------------------------------- the texts
def _limits(subject: Subject, run: Optional[Run] = None) -> Iterable[str]:
    """Return the limits of the weights as sentences."""
    if run is not None or subject.dataset:
        yield (f"Trained and evaluated only on {_dataset(subject, run)[0]}: nothing is known about other images, "
               "cameras or classes.")
    if run is not None and len(run.card.top1) < 2:
        yield "One seed: the variance over seeds is unknown, so differences to other models cannot be assessed."
    if run is not None and 1 < len(run.card.top1) < 5:
        yield f"{len(run.card.top1)} seeds: the standard deviation is itself uncertain."
    if run is not None and any(row["difference"] for row in run.card.comparison):
        yield "The comparison applies only to this data set, model size and length of training."
    yield "Robustness, calibration and fairness were not measured."


def _citations(subject: Subject) -> Iterator[str]:
    yield CITATIONS["oh2025revisiting"]
    architecture = subject.config["architecture"]
    if architecture.startswith(("vit", "deit", "flexivit", "test_vit")):
        yield CITATIONS["dosovitskiy2021image"]
    if architecture.startswith(("resnetv2", "resnet")):
        yield CITATIONS["he2016identity"]
    if "skip" in (subject.config.get("model_args") or {}):
        yield CITATIONS["wang2017orthogonal"]
    yield CITATIONS["rw2019timm"]


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
