"""Read a training run of timm's `train.py`, `timm-ortho compare` or `study`: options, metrics, weights and model.

Options are in `args.yaml` and in the checkpoint, and metrics in `summary.csv`. A run of `compare` or `study` also has a
`card.json`, see :mod:`.card_values`.

With `--model-ema` all these commands evaluate the EMA weights, so the metrics do not apply to the plain weights. With
`--model-ema-force-cpu` they evaluate the plain weights.
Checkpoints are read by :mod:`timm_ortho.weights.files`, which runs no code from them.
"""
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Optional

import timm
import torch
from timm.models import clean_state_dict
from torch import nn

from .._images import data_config
from .._text import error_text
from .._yaml import YAMLError, load_written_yaml
from ..models.variant_arguments import is_variant_argument
from ..weights import WeightsError
from ..weights.files import load_checkpoint
from .card_values import CardValues, RunError, read_card_values
from .folders import check_modules, read_history

BY_HAND = "build the model, load the weights and pass the model to timm_ortho.hub.push"


class NoRunError(RunError):
    """A file is not the checkpoint of a training run."""


class Run:
    """Options and metrics of a run. Subclasses read these values from files.

    Attributes:
        options: timm's options.
        history: Metrics of each epoch: `epoch` (from 0), `train_loss`, `eval_loss`, `eval_top1`, `eval_top5`. A run
            that changes its connection has two stages; the list contains only the epochs of the checkpoint's stage.
        card: The values in `card.json`.
        epoch: Epoch at whose end the weights were saved, or the epoch in which `in_mid_epoch` weights were saved; None
            without weights.
        in_mid_epoch: Whether the weights were saved before the end of that epoch (`--recovery-interval` of `train.py`).
        ema: Whether the weights are the EMA weights.
    """

    options: Mapping[str, Any]
    history: list[dict]
    card: CardValues
    epoch: Optional[int]
    in_mid_epoch: bool = False
    ema: bool

    @property
    def evaluates_ema(self) -> bool:
        return bool(self.options.get("model_ema")) and not self.options.get("model_ema_force_cpu")

    @property
    def split(self) -> str:
        """Name of the split or folder of the validation images."""
        return Path(self.card.split or self.options.get("val_split") or "validation").name

    @property
    def evaluated(self) -> Optional[dict]:
        """The row of the history that was measured on these weights, or None."""
        if self.ema != self.evaluates_ema or self.in_mid_epoch:
            return None
        return next((row for row in self.history if row["epoch"] == self.epoch), None)

    @property
    def chosen_on_validation(self) -> bool:
        """Whether the weights are from an epoch before the last. Validation metrics probably selected that epoch."""
        if not self.history or self.epoch is None or self.in_mid_epoch:
            return False
        return self.epoch != self.history[-1]["epoch"]

    @property
    def top1_mean(self) -> Optional[float]:
        return fmean(self.card.top1.values()) if self.card.top1 else None

    @property
    def top1_std(self) -> Optional[float]:
        """Sample standard deviation over seeds; None for fewer than two seeds."""
        return stdev(self.card.top1.values()) if len(self.card.top1) > 1 else None


class CheckpointRun(Run):
    """A run with its weights.

    Args:
        path: A checkpoint, or the folder of one run. In a folder, the last checkpoint is read, or else the best.
        ema: Whether to use the EMA weights.

    Attributes:
        path: The checkpoint.
        state_dict: The weights.

    Raises:
        RunError: There is no checkpoint, a run of `compare` or `study` is unfinished, or there are no EMA weights.
    """

    def __init__(self, path: Path, ema: bool = False) -> None:
        folder = path if path.is_dir() else path.parent
        self.card = read_card_values(folder)
        if not self.card.finished:
            raise RunError(f"the run in {folder} is not finished: repeat the command that started it")
        self.path = _checkpoint_file(path, self.card.stage)
        folder, checkpoint = self.path.parent, _read_checkpoint(self.path)
        self.options = _options(folder, checkpoint, self.path)
        self.state_dict = _weights(checkpoint, ema, self.path)
        self.epoch, self.ema, self.in_mid_epoch = checkpoint.get("epoch"), ema, "metric" not in checkpoint
        self.history = read_history(folder, finished=True)


# -------------------------------------------------------------------------------------------- the model
def run_model(run: CheckpointRun, name: Optional[str] = None, **overrides: Any) -> nn.Module:
    """Build a run's model as timm's train.py does, and load the run's weights.

    Args:
        run: A run of timm's `train.py`, `timm-ortho compare` or `timm-ortho study`.
        name: Another model for these weights, such as a variant with another connection.
        overrides: Arguments of the model that replace the run's arguments.

    Raises:
        RunError: The model cannot be built, or the weights do not fit it.
        UserError: The options name modules, see :func:`timm_ortho.runs.folders.check_modules`.
    """
    options = run.options
    check_modules(options, str(run.path.parent))
    kwargs = dict(options.get("model_kwargs") or {})
    name = name or options["model"]
    if ":" in name:  # hf-hub:me/my-model, which timm would download
        raise RunError(f"the model '{name}' of {run.path} is not an architecture; {BY_HAND}")
    if name != options["model"]:
        kwargs = {key: value for key, value in kwargs.items() if not is_variant_argument(key)}
    try:
        model = create_model({**options, "model": name, "pretrained": False}, **{**kwargs, **overrides})
        model.load_state_dict(run.state_dict)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise RunError(f"the model '{name}' cannot be built with the arguments and weights of {run.path}: "
                       f"{error_text(error)}") from None
    return model.eval()


def create_model(options: Mapping[str, Any], **kwargs: Any) -> nn.Module:
    """Create the model that timm's options describe. The option `model_kwargs` is not used: pass its values.

    Args:
        options: timm's options by name.
        kwargs: Further arguments of the model. Arguments that an option sets, such as `pretrained`, are a TypeError.
    """
    size = options.get("input_size")
    overlay: dict[str, Any] = {}
    if options.get("pretrained") and options.get("pretrained_path"):  # as in train.py; -1: always a new classifier
        overlay["pretrained_cfg_overlay"] = dict(file=options["pretrained_path"], num_classes=-1)
    return timm.create_model(
        options["model"],
        pretrained=bool(options.get("pretrained")),
        in_chans=options.get("in_chans") or (size[0] if size else 3),
        num_classes=options.get("num_classes"),
        global_pool=options.get("gp"),
        bn_momentum=options.get("bn_momentum"),
        bn_eps=options.get("bn_eps"),
        checkpoint_path=None,  # in kwargs it is a TypeError: a run must not name the file of its weights
        **overlay,
        **kwargs,
    )


_DATA_OPTIONS = ("input_size", "img_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


def image_config(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image preprocessing that a run's options set, completed from the model's configuration."""
    requested = {key: options[key] for key in _DATA_OPTIONS if options.get(key) is not None}
    config = data_config(model, requested, options.get("in_chans") or requested.get("input_size", (None,))[0])
    channels, *size = config["input_size"]
    cfg: Any = model.pretrained_cfg
    if cfg.get("fixed_input_size"):
        size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    return {**config, "input_size": (channels, *size)}


# -------------------------------------------------------------------------------------------- the files
def _checkpoint_file(path: Path, stage: str) -> Path:
    """Return the checkpoint at a path. For a run's folder, return its last checkpoint, or else its best.

    Args:
        path: A checkpoint, or the folder of a run.
        stage: Folder of the last stage, relative to the run's folder.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise RunError(f"there is no checkpoint or run folder '{path}'")
    for file in (path / stage / "last.pth.tar", path / "model_best.pth.tar"):
        if file.is_file():
            return file
    runs = sorted(item.name for item in path.iterdir() if (item / "args.yaml").is_file())
    if runs:
        raise RunError(f"{path} contains {len(runs)} runs: pass one of them, such as {path / runs[0]}")
    raise RunError(f"{path} contains no checkpoint (last.pth.tar, model_best.pth.tar): pass a checkpoint, or a "
                       "folder that timm's train.py or timm-ortho compare wrote")


def _read_checkpoint(path: Path) -> dict:
    try:
        checkpoint = load_checkpoint(path)
    except (OSError, WeightsError) as error:
        raise NoRunError(error_text(error)) from None
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise NoRunError(f"{path} is not a checkpoint of timm's train.py or of timm-ortho: it has no 'state_dict'; "
                         f"{BY_HAND}")
    return checkpoint


def _options(folder: Path, checkpoint: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the options in args.yaml. Options without a value there, such as num_classes, come from the checkpoint."""
    args = checkpoint.get("args")
    options = dict(vars(args)) if isinstance(args, Namespace) else {}
    if (folder / "args.yaml").is_file():
        written = _read_mapping(folder / "args.yaml")
        options.update({key: value for key, value in written.items() if value is not None or key not in options})
    if not options.get("model"):
        raise NoRunError(f"the model of {path} is unknown: the file contains no arguments, and no args.yaml names a "
                         f"model; {BY_HAND}")
    return options


def _weights(checkpoint: Mapping[str, Any], ema: bool, path: Path) -> dict[str, torch.Tensor]:
    if ema and not checkpoint.get("state_dict_ema"):
        raise RunError(f"{path} has no EMA weights: use its plain weights, or train with --model-ema")
    return clean_state_dict(checkpoint["state_dict_ema" if ema else "state_dict"])


def _read_mapping(file: Path) -> dict[str, Any]:
    try:
        values = load_written_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise RunError(f"{file} cannot be read ({error_text(error)})") from None
    if not isinstance(values, dict):
        raise RunError(f"{file} cannot be read (it contains no mapping)")
    return values
