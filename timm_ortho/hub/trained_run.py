"""What a training run left behind: options, figures and weights, read from its files and from nothing else.

| run of | options | figures |
| --- | --- | --- |
| timm's `train.py` | `args.yaml`, or the `args` inside the checkpoint | `summary.csv` |
| `timm-ortho compare`, `study` | `args.yaml` | `summary.csv`, `result.json`, the same of the other seeds' runs |

Both kinds of run evaluate the EMA weights where there are any, so the figures of such a run are not those of its plain
weights. Checkpoints are read with torch's restricted unpickler: nothing in them is executed.
"""
import csv
import importlib
import json
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Optional, Sequence

import torch
import yaml
from timm.models import clean_state_dict

from .._checks import short, without_nan

_STUDY, _RUN = "study.yaml", "run.yaml"  # beside the folders of a study's runs, and in each of them
_BY_HAND = "build the model, load the weights and give it to timm_ortho.hub.push"
_SEED = re.compile(r"(?P<kind>.+)-seed(?P<seed>\d+)")


class PublishError(ValueError):
    """What was given cannot be published; one line that says what is wrong and what to do."""


class NoRunError(PublishError):
    """A file that is no checkpoint of a training run."""


def class_names(dataset: Any) -> Optional[list[str]]:
    """The names of a data set's classes in the order of their labels, where a torchvision or timm data set has them."""
    dataset = getattr(dataset, "dataset", dataset)
    index = getattr(getattr(dataset, "reader", None), "class_to_idx", None)
    names = getattr(dataset, "classes", None) or (sorted(index, key=index.get) if index else None)
    return [str(name) for name in names] if names else None


def import_modules(modules: Optional[Sequence[str]], kind: type[ValueError]) -> None:
    """What train.py's option `device_modules` names; a module that is not there is an error of this kind."""
    for module in modules or ():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise kind(f"option 'device_modules': {error}: is its folder in PYTHONPATH?") from None


class Run:
    """A run's options and figures. Every figure is from the files that the constructors of the subclasses read.

    Attributes:
        options: timm's options.
        history: A row for each epoch: `epoch` (from 0), `train_loss`, `eval_loss`, `eval_top1`, `eval_top5`; of a run
            with two connections those of the stage that the checkpoint is of.
        result: What the lab says at the end of a run; {} for a run of timm's `train.py`.
        peers: Last epoch's top-1 in percent by seed, of the finished runs that differ in nothing but the seed.
        comparison: The rows of `timm-ortho compare`'s table, [] where the run is not part of one.
        epoch: After which the weights were saved; None where no weights are meant.
        in_mid_epoch: Whether they were saved before its end, by train.py's `--recovery-interval`.
        ema: Whether they are the EMA weights.
    """

    options: Mapping[str, Any]
    history: list[dict]
    result: Mapping[str, Any]
    peers: Mapping[int, float]
    comparison: list[dict]
    epoch: Optional[int]
    in_mid_epoch: bool = False
    ema: bool

    @property
    def evaluates_ema(self) -> bool:
        return bool(self.options.get("model_ema")) and not self.options.get("model_ema_force_cpu")

    @property
    def evaluated(self) -> Optional[dict]:
        """The row of the history that was measured on these very weights; None where there is none."""
        if self.ema != self.evaluates_ema or self.in_mid_epoch:
            return None
        return next((row for row in self.history if row["epoch"] == self.epoch), None)

    @property
    def chosen_on_validation(self) -> bool:
        """Whether the epoch is not the last, which is to say, somebody chose it by its validation figures."""
        if not self.history or self.epoch is None or self.in_mid_epoch:
            return False
        return self.epoch != self.history[-1]["epoch"]

    @property
    def connection(self) -> Optional[str]:
        """The connection that the weights were last trained with, None where only the architecture says it."""
        switched = self.result.get("switch_epoch")
        if switched is not None and self.epoch is not None and self.epoch < switched:
            return self.options["model_kwargs"]["connection"]
        return self.result.get("connection") or (self.options.get("model_kwargs") or {}).get("connection")

    @property
    def top1_mean(self) -> Optional[float]:
        return fmean(self.peers.values()) if self.peers else None

    @property
    def top1_std(self) -> Optional[float]:
        """The sample's standard deviation over seeds, None for fewer than two."""
        return stdev(self.peers.values()) if len(self.peers) > 1 else None


class CheckpointRun(Run):
    """A run with its weights.

    Args:
        path: A checkpoint, or the folder of one run, of which the last checkpoint is taken.
        ema: Take the EMA weights.

    Attributes:
        path: The checkpoint.
        state_dict: The weights.

    Raises:
        PublishError: There is no such thing, it is not of one finished run, or it has no EMA weights.
    """

    def __init__(self, path: Path, ema: bool = False) -> None:
        self.path = checkpoint_file(path)
        folder, checkpoint = self.path.parent, _read_checkpoint(self.path)
        self.options = _options(folder, checkpoint, self.path)
        self.state_dict = _weights(checkpoint, ema, self.path)
        self.epoch, self.ema, self.in_mid_epoch = checkpoint.get("epoch"), ema, "metric" not in checkpoint
        self.history = read_history(folder)
        self.result, self.peers, self.comparison = {}, {}, []
        if folder.name == "switched" and (folder.parent / _RUN).is_file():  # of a run with two connections
            folder = folder.parent
        if (folder / _RUN).is_file():
            self.result = _finished(folder)
            self.peers = _peers(folder, self.options)
            self.comparison = _comparison(folder.parent, self.result["connection"])


# -------------------------------------------------------------------------------------------- the files
def checkpoint_file(path: Path) -> Path:
    """The checkpoint that is meant by a path: itself, or the last one in a run's folder.

    Raises:
        PublishError: There is none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise PublishError(f"there is no checkpoint or run folder '{path}'")
    for name in ("switched/last.pth.tar", "last.pth.tar", "model_best.pth.tar"):
        if (path / name).is_file():
            return path / name
    if (path / _RUN).is_file():
        raise _unfinished(path)
    runs = sorted(item.name for item in path.iterdir() if (item / "args.yaml").is_file())
    if runs:
        raise PublishError(f"{path} holds {len(runs)} runs: give one of them, as {path / runs[0]}")
    raise PublishError(f"{path} holds no checkpoint (last.pth.tar, model_best.pth.tar): give a folder that timm's "
                       "train.py or timm-ortho compare wrote, or a checkpoint")


def load_checkpoint(path: Path) -> Any:
    """What a file of torch holds, by its restricted unpickler; a Namespace, timm's `args`, is let through."""
    unknown = {Namespace}.difference(torch.serialization.get_safe_globals())  # what others allowed stays allowed
    with torch.serialization.safe_globals([*unknown]):
        return torch.load(path, map_location="cpu", weights_only=True)


def _read_checkpoint(path: Path) -> dict:
    try:
        checkpoint = load_checkpoint(path)
    except Exception as error:  # noqa: BLE001 whatever a damaged file makes torch, pickle or zipfile raise
        raise NoRunError(f"{path} cannot be read as a checkpoint ({type(error).__name__}: {short(error)})") from None
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise NoRunError(f"{path} is not a checkpoint of timm's train.py or of timm-ortho: it has no 'state_dict'; "
                           f"{_BY_HAND}")
    return checkpoint


def _options(folder: Path, checkpoint: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the run was given; of the two places the checkpoint's knows what train.py completed (num_classes)."""
    inside = checkpoint.get("args")
    options = dict(vars(inside)) if isinstance(inside, Namespace) else {}
    if (folder / "args.yaml").is_file():
        try:
            given = yaml.safe_load((folder / "args.yaml").read_text(encoding="utf-8"))
            options.update({key: value for key, value in given.items() if value is not None or key not in options})
        except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
            raise PublishError(f"{folder / 'args.yaml'} cannot be read ({short(error)})") from None
    if not options.get("model"):
        raise NoRunError(f"{path} has neither an args.yaml beside it nor its arguments inside, so nothing says which "
                           f"model it is: {_BY_HAND}")
    return options


def _weights(checkpoint: Mapping[str, Any], ema: bool, path: Path) -> dict[str, torch.Tensor]:
    if ema and not checkpoint.get("state_dict_ema"):
        raise PublishError(f"{path} has no EMA weights: leave --ema away, or train with --model-ema")
    return clean_state_dict(checkpoint["state_dict_ema" if ema else "state_dict"])


def read_history(folder: Path) -> list[dict]:
    """A row for each epoch, of the table that timm's train.py and the lab write; null for NaN and infinities.

    A run of train.py that was resumed has that table's header again, and some epochs twice: the later one counts, and
    what comes after it. So does a second training in the folder of the first.
    """
    if not (folder / "summary.csv").is_file():
        return []
    with open(folder / "summary.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["epoch"] or "").isdecimal()]
    history: list[dict] = []
    for row in rows:
        epoch = int(row["epoch"])
        history = [earlier for earlier in history if earlier["epoch"] < epoch]
        figures = {key: float(value) for key, value in row.items() if key and value}
        history.append({**without_nan(figures), "epoch": epoch})
    return history


def json_lines(text: str) -> list[dict]:
    """The rows of JSON lines, without a last one that was cut short."""
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def _finished(folder: Path) -> dict:
    if not (folder / "result.json").is_file():
        raise _unfinished(folder)
    return read_json(folder / "result.json")


def _unfinished(folder: Path) -> PublishError:
    return PublishError(f"the run in {folder} is not finished: the command that began it continues it")


def _peers(folder: Path, options: Mapping[str, Any]) -> dict[int, float]:
    match = _SEED.fullmatch(folder.name)
    if match is None or not (folder.parent / _STUDY).is_file():
        return {}
    found = {}
    for other in folder.parent.iterdir():
        also = _SEED.fullmatch(other.name)
        if also is None or also["kind"] != match["kind"] or not (
                (other / "result.json").is_file() and (other / "args.yaml").is_file()):
            continue
        theirs, result = yaml.safe_load((other / "args.yaml").read_text("utf-8")), read_json(other / "result.json")
        if {**theirs, "seed": None} == {**options, "seed": None} and "top1" in result:
            found[int(also["seed"])] = result["top1"]
    return {seed: found[seed] for seed in sorted(found)}


def _comparison(grid: Path, connection: str) -> list[dict]:
    if not (grid / _STUDY).is_file() or not (grid / "results.json").is_file():
        return []
    rows = comparison_rows(read_json(grid / "results.json"))
    return rows if connection in [row["connection"] for row in rows] else []


def comparison_rows(results: Mapping[str, Any]) -> list[dict]:
    """The table of `timm-ortho compare`, out of what its `results.json` holds; [] out of another study's."""
    study = results.get("study") or {}
    if study.get("name") != "compare":
        return []
    return [
        {"connection": row["cell"]["connection"], "baseline": study["baseline"]["connection"], "seeds": row["seeds"],
         "top1_mean": row["mean"], "top1_std": row["std"], "difference": row["difference"]}
        for row in results["summary"] if row["measure"] == "top1"]


def read_json(path: Path) -> Any:
    """What a JSON file holds; a PublishError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PublishError(f"{path} cannot be read ({type(error).__name__})") from None
