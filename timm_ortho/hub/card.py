"""Write model cards from `template.md` with huggingface_hub's card classes.

`_results` yields the rows of the results, and `_facts` the rows of the model. The template has all sentences.
"""
import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Sequence

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .._text import escaped, finite, plain_lines
from .._yaml import dump_yaml
from ..connections import CONNECTIONS, declared
from ..convert import IMPORT_TAG
from ..run_folder import CardValues, CheckpointRun
from ..skips import SKIPS

CURVE = "training.png"
TEMPLATE = Path(__file__).with_name("template.md")

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

# timm's options that the recipe table lists, in this order.
_RECIPE = """epochs batch_size grad_accum_steps opt lr weight_decay sched warmup_epochs clip_grad smoothing mixup cutmix
    aa reprob color_jitter hflip scale ratio drop drop_path model_ema amp img_size input_size pretrained pretrained_path
    initial_checkpoint seed""".split()

# Options that are local paths. Cards show only the last part of each.
_PATHS = frozenset(
    "data data_dir class_map initial_checkpoint output pretrained_path resume file checkpoint_path".split())


@dataclass(frozen=True)
class Subject:
    """The weights that a card describes. The metrics are in :class:`CheckpointRun`."""

    title: str  # heading; without `repo_id` also the name of the weights, such as `vit_test_ortho.digits`
    config: Mapping[str, Any]  # content of `config.json`: architecture, model_args, pretrained_cfg, num_classes
    parameters: int
    repo_id: Optional[str] = None  # repository of the weights on the Hub, if any
    revision: Optional[str] = None  # None for main
    license: Optional[str] = None  # identifier of the Hub (`apache-2.0`), if the owner chose one
    base_model: Optional[str] = None  # repository of the weights that training started with
    about: str = ""  # Markdown below the summary, for example on the origin of the weights
    limits: Sequence[str] = ()  # first sentences of the section "Limits"
    dataset: Optional[str] = None  # key of `DATASETS`, if there is no run
    imports: Sequence[str] = ()  # code after `import timm_ortho` that registers the author's classes

    @property
    def load(self) -> str:
        """The name for `timm.create_model`."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf-hub:{self.repo_id}{revision}" if self.repo_id else self.title

    @property
    def connection(self) -> Optional[str]:
        return (self.config.get("model_args") or {}).get("connection")


def model_card(subject: Subject, run: Optional[CheckpointRun] = None, curve: Optional[str] = None) -> ModelCard:
    """Return the model card of the weights that ``subject`` describes.

    >>> config = {"architecture": "vit_test_ortho", "num_classes": 10, "pretrained_cfg": {"input_size": [1, 8, 8]}}
    >>> card = model_card(Subject("my-model", config, 12345, "me/my-model", license="apache-2.0"))
    >>> card.data.license
    'apache-2.0'

    Without a `run`, the source of the metrics, the card states that nothing was measured. `curve` is the path of the
    training curve relative to the card.
    """
    registered = subject.config["architecture"] if subject.connection else None
    values = run.card if run else CardValues()
    options = _yaml(run.options) if run else ""
    card = ModelCard.from_template(
        _metadata(subject, run),
        template_path=str(TEMPLATE),
        subject=subject,
        arguments=subject.config.get("model_args") or {},
        run=run,
        values=values,
        registered=f"{registered}.{IMPORT_TAG}" if registered and subject.repo_id else registered,
        mode=" in grey" if subject.config["pretrained_cfg"]["input_size"][0] == 1 else "",
        facts=list(_facts(subject)),
        update=declared(subject.connection, "card_text"),
        data=escaped(_dataset(subject, run)[0]),
        train_data=escaped(_images(subject, run, "train_num_samples")),
        dataset=escaped(_images(subject, run, "val_num_samples")),
        split=escaped(run.split) if run else "",
        results=list(_results(run)) if run else [],
        baseline=escaped(values.comparison[0]["baseline"]) if values.comparison else "",
        comparison=[_compared(row) for row in values.comparison],
        curve=curve,
        recipe=list(_recipe(without_folders(run.options))) if run else [],
        options=options,
        fence=max(["```", *(f"{ticks}`" for ticks in re.findall("`+", options))], key=len),  # options cannot close it
        # the command contains local paths
        made_with=", ".join(f"{key} {escaped(value)}" for key, value in values.made_with.items() if key != "command"),
        citations=CITATIONS,
    )
    card.text = re.sub(r"\n{3,}", "\n\n", card.text)  # omitted sections leave blank lines
    return card


def draw_curve(run: CheckpointRun, path: Path) -> None:
    """Draw loss and top-1 of a run by epoch into a PNG file. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    epochs = [row["epoch"] + 1 for row in run.history]
    panels = {"loss": ("train_loss", "eval_loss"), "top-1, %": ("eval_top1",)}
    for axes, (title, keys) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for key in keys:
            values = [row.get(key) for row in run.history]  # matplotlib draws no point for None
            axes.plot(epochs, values, label=key, marker="." if len(epochs) < 3 else None)
        axes.set(title=title, xlabel="epochs done")
        axes.legend()
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


# ---------------------------------------------------------------------------------------------- results
class Row(NamedTuple):
    """A row of the table of results. With a value, it is also in the metadata for the Hub."""

    name: str
    text: str
    value: Optional[float] = None
    args: Optional[Mapping[str, Any]] = None


def _results(run: CheckpointRun) -> Iterator[Row]:
    """Yield the results of the card's weights, and of all seeds after the last epoch."""
    measured = run.evaluated or {}
    for key in ("top1", "top5"):
        value = measured.get(f"eval_{key}")
        if finite(value):
            yield Row(f"top-{key[3:]} of these weights, %", f"{value:.2f}", value)
    if finite(measured.get("eval_loss")):
        yield Row("loss of these weights", f"{measured['eval_loss']:.4f}")
    by_seed = run.card.top1
    weights = "" if run.ema == run.evaluates_ema else f" of the {'EMA' if run.evaluates_ema else 'plain'} weights"
    if by_seed:
        name, mean = f"top-1{weights} after the last epoch, mean over seeds, %", fmean(by_seed.values())
        yield Row(name, f"{mean:.2f}") if len(by_seed) < 2 else Row(
            name, f"{mean:.2f} ± {stdev(by_seed.values()):.2f} (standard deviation)", mean,
            {"std": round(stdev(by_seed.values()), 4), "seeds": list(by_seed)})
        yield Row(f"top-1{weights} after the last epoch, by seed, %",
                  ", ".join(f"{seed}: {top1:.2f}" for seed, top1 in by_seed.items()))


# ---------------------------------------------------------------------------------------------- metadata
def _metadata(subject: Subject, run: Optional[CheckpointRun]) -> ModelCardData:
    title, on_hub = plain_lines(_dataset(subject, run))
    results = [EvalResult(
        task_type="image-classification",
        dataset_type=on_hub or title,
        dataset_name=plain_lines(_images(subject, run, "val_num_samples")),
        dataset_split=plain_lines(run.split),
        metric_type="accuracy",
        metric_name=row.name,
        metric_value=round(row.value, 4),
        metric_args=row.args,
    ) for row in (_results(run) if run else ()) if row.value is not None]
    is_ours = subject.connection != "linear" and declared(subject.connection, "card_text")
    method = ["orthogonal-residual"] if is_ours else []
    return ModelCardData(
        library_name="timm",
        license=subject.license,
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "timm-ortho", *method],
        datasets=[on_hub] if on_hub else None,
        base_model=subject.base_model,
        metrics=["accuracy"] if results else None,
        model_name=subject.title if results else None,
        eval_results=results or None,
    )


def _dataset(subject: Subject, run: Optional[CheckpointRun]) -> tuple[str, Optional[str]]:
    """Return the title of the data set and its id on the Hub, or None if it has no known id."""
    options = run.options if run else {"dataset": subject.dataset}
    name = options.get("dataset")
    if not name:
        folder = Path(options.get("data_dir") or options.get("data") or "").name
        return f"the image folder '{folder}'" if folder else "an image folder", None
    prefix, _, on_hub = name.partition("/")
    return DATASETS.get(name, (name.rpartition("/")[2] or name, on_hub if prefix in ("hfds", "hfids") else None))


def _images(subject: Subject, run: Optional[CheckpointRun], key: str) -> str:
    """Return the title of the data set. If the option `key` limits how many images are used, the number precedes it."""
    title = _dataset(subject, run)[0]
    applies = run and run.card.trainer != "train.py"  # train.py may use all images
    return f"{run.options[key]:,} images of {title}" if applies and run.options.get(key) else title


# -------------------------------------------------------------------------------------------- the tables
def _facts(subject: Subject) -> Iterator[tuple[str, str]]:
    config = subject.config
    cfg, arguments = config["pretrained_cfg"], dict(config.get("model_args") or {})
    yield "architecture", f"`{config['architecture']}`"
    connection = arguments.pop("connection", None)
    if connection:
        make = CONNECTIONS.get(connection)
        # functools.partial has a docstring of its own
        description = getattr(getattr(make, "func", make), "__doc__", None) or "Registered by its author."
        yield "connection", f"{connection}. {description.strip().splitlines()[0]}".replace("|", "\\|")
    if "skip" in arguments:
        skip = arguments.pop("skip")
        yield "transform of the stream", f"{skip}: {SKIPS[skip][0]}"
    for key, value in arguments.items():
        text = plain_lines(str(value)).replace("`", "'").replace("|", "\\|")
        yield f"`{key}`", f"`{text}`"
    yield "parameters", f"{subject.parameters:,}"
    yield "input", " x ".join(map(str, cfg["input_size"]))
    for key in ("mean", "std", "interpolation", "crop_pct"):
        if cfg.get(key) is not None:
            yield key, _listed(cfg[key])
    yield "classes", str(config["num_classes"])


def _compared(row: Mapping[str, Any]) -> list[str]:
    spread = f" ± {row['top1_std']:.2f}" if row["top1_std"] is not None else ""
    return [escaped(row["connection"]), f"{row['top1_mean']:.2f}{spread}", _difference(row["difference"]),
            ", ".join(map(str, row["seeds"]))]


def _difference(paired: Optional[Mapping[str, Any]]) -> str:
    """Return a mean difference with its confidence interval as text, or `-` for None."""
    if paired is None:
        return "-"
    mean, half = paired["mean"], paired["half_width"]
    if half is None:  # of one pair, or of pairs with the same difference
        return f"{mean:+.2f} (no interval)"
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"


def _recipe(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in _RECIPE:
        value = options.get(key)
        if value or (key == "seed" and value is not None):
            yield key, _listed(value)


def _yaml(options: Mapping[str, Any]) -> str:
    # JSON's types only: a date becomes text
    plain = json.loads(json.dumps(without_folders(options), default=str, skipkeys=True))
    return dump_yaml(plain, default_flow_style=None, width=100).strip()


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


def _listed(value: Any) -> str:
    return escaped(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
