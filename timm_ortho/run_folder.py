"""Read the folder of a training run of timm's `train.py`, `timm-ortho compare` or `study`, and record provenance.

| file | contents |
| --- | --- |
| `run.json` | of `compare` and `study` only: plan, training processes, result, and comparison with other runs |
| `args.yaml` | timm's options, in the form of `train.py -c` |
| `summary.csv` | the metrics of each epoch, as timm writes them |
| `last.pth.tar`, `model_best.pth.tar` | checkpoints, as timm writes them |
| `log.txt` | the output of the run's process |
| `records.jsonl` | the rows of :func:`timm_ortho.record` |
| `probe.jsonl` | norms and cosine of stream and branch output at each residual addition, before and after each epoch |
| `features.npy` | the features of the trained model for the validation images |

The last three are optional. A run that changes its connection during training has a second stage, whose `args.yaml`,
`summary.csv` and checkpoints are in `switched/`.

With `--model-ema` all these commands evaluate the EMA weights, so the metrics do not apply to the plain weights. With
`--model-ema-force-cpu` they evaluate the plain weights.

Another person may have written the files. Each one is checked once, where it is read here.
"""
import csv
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any, Optional, Union

import timm
import torch
from torch import nn

from ._images import data_config
from ._kinds import ANY, COUNT, FLAG, NULL, NUMBER, PERCENT, SIZE, TEXT, Plain, checked, one_of, optional
from ._text import CONSTRUCTOR_ERRORS, UserError, csv_rows, error_text, finite, whole_lines, without_nan
from ._yaml import DEEPEST, YAMLError, load_written_yaml
from .convert import is_variant_argument
from .update import backend
from .weights import WeightsError
from .weights.files import load_checkpoint, tensors_by_name

RUN, OPTIONS, SUMMARY, LAST, LOG = "run.json", "args.yaml", "summary.csv", "last.pth.tar", "log.txt"
RECORDS, PROBE, FEATURES = "records.jsonl", "probe.jsonl", "features.npy"
SWITCHED = "switched"  # folder of the second stage
LARGEST = 2**22  # bytes of run.json and args.yaml; the largest part is a list of class names, 30 kB for ImageNet-1k
PRIVATE = frozenset({"host", "pid", "job"})  # keys of a run's `made_with` that cards and published numbers omit
_MOST = 100_000  # values of the options in a checkpoint; train.py has about 200, and names of classes
BY_HAND = "build the model, load the weights and pass the model to timm_ortho.hub.push"


class RunError(UserError, ValueError):
    """A training run cannot be read. The message is one line that names the problem and what to do."""


class NoRunError(RunError):
    """A file is not the checkpoint of a training run."""


# --------------------------------------------------------------------------------------------- run.json
SESSION_KIND = {
    **optional("timm-ortho timm torch commit host cpu gpu driver command begin end job error", TEXT),
    **optional("pid", COUNT)}
RESULT_KIND = {
    **optional("model connection device", TEXT), **optional("trainer", one_of("lab", "train.py")),
    **optional("seed parameters blocks width batch_size epochs best_epoch switch_epoch hold_out peak_memory", COUNT),
    **optional("top1 top5 best_top1", PERCENT), **optional("lr loss images_per_second seconds", NUMBER),
    **optional("representation", {...: (NUMBER, NULL)}), **optional("labels", [TEXT])}
EPOCH_KIND: dict[Any, Any] = {  # a row of a history
    "epoch": COUNT, **optional("eval_top1 eval_top5", PERCENT), ...: (NUMBER, NULL)}
_ROW = {
    "connection": TEXT, "baseline": TEXT, "seeds": [COUNT], "top1_mean": PERCENT, **optional("top1_std", NUMBER),
    **optional("difference", {"mean": NUMBER, **optional("half_width", NUMBER), "pairs": COUNT})}
_STAGE = {"folder": one_of(".", SWITCHED), "begins_with": one_of("", "weights", "checkpoint"),
          **optional("stop_epoch", COUNT)}
_RUN = {
    "plan": {"trainer": TEXT, **optional("record", COUNT), "representation": FLAG, "hold_out": COUNT, "gpus": COUNT,
             "nodes": COUNT, "stages": [_STAGE]},
    **optional("job", TEXT),
    "sessions": [SESSION_KIND],
    **optional("result", RESULT_KIND),
    **optional("comparison", {
        **optional("split", TEXT), "top1": [{"seed": COUNT, "top1": PERCENT}], "rows": [_ROW]}),
}


@dataclass(frozen=True)
class RunFile:
    """The checked contents of a `run.json`."""

    plan: Mapping[str, Any]  # trainer (`lab` or the path of a `train.py`), stages, and settings that are not timm's
    job: Optional[str] = None  # the Slurm job that was submitted last
    sessions: Sequence[Mapping[str, Any]] = ()  # versions, machine, command, begin, end, error of each process
    result: Optional[Mapping[str, Any]] = None  # metrics of the finished run
    comparison: Optional[Mapping[str, Any]] = None  # numbers of all seeds, rows of the table of `timm-ortho compare`

    @property
    def last_session(self) -> Mapping[str, Any]:
        """The process that trained the run last, {} if there was none. Only a failed one has an `error`."""
        return self.sessions[-1] if self.sessions else {}

    @property
    def made_with(self) -> dict[str, Any]:
        """Versions, machine and command of the first process, the end of the last one, and the processes between."""
        if not self.sessions:
            return {}
        first, *later = ({key: value for key, value in session.items() if key != "error"} for session in self.sessions)
        return {**first, "end": self.last_session.get("end"), "continued": later}


def read_run(folder: Path) -> Optional[RunFile]:
    """Return the content of a folder's `run.json`, None if there is no such file.

    Raises:
        RunError: The file is damaged or too large, or a value has another type or is out of range.
    """
    path = folder / RUN
    if not path.is_file():
        return None
    try:
        values = checked(json.loads(_text_of(path)), _RUN, "it")
        if not values["plan"]["stages"]:
            raise ValueError("the plan has no stage")
        return RunFile(**values)
    except (OSError, ValueError, RecursionError, UserError) as error:
        raise RunError(f"{path} cannot be read ({error_text(error)}): copy it again, or remove {folder} to train the "
                       "run again") from None


def _text_of(path: Path) -> str:
    if path.exists() and not path.is_file():  # to open a pipe would wait for its writer
        raise ValueError("it is not a file")
    with open(path, "rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    return content.decode("utf-8")


@dataclass(frozen=True)
class CardValues:
    """Values of a run that a model card shows. The defaults are those of a run of timm's `train.py`."""

    trainer: str = "train.py"  # or `lab`, the lab's own loop
    split: Optional[str] = None  # split or folder of the validation images; None: the option `val_split`
    labels: Sequence[str] = ()  # names of the classes, if they are known
    made_with: Mapping[str, str] = field(default_factory=dict)  # versions, machine, command, commit and device
    top1: Mapping[int, float] = field(default_factory=dict)  # in percent after the last epoch, by seed
    comparison: Sequence[Mapping[str, Any]] = ()  # rows of the table of `timm-ortho compare`


def card_values(
        result: Mapping[str, Any], made_with: Mapping[str, Any], comparison: Optional[Mapping] = None) -> CardValues:
    """Return the values of a run's model card. The arguments are attributes of `RunFile`."""
    made = {key: value for key, value in made_with.items() if key not in PRIVATE}
    commit, sessions = made.pop("commit", None), made.pop("continued", None)
    if sessions:  # only the count: each session has its own host, process and command
        made["continued"] = f"{len(sessions)} time{'s' * (len(sessions) > 1)}"
    made.update(commit=commit, device=result.get("device"))
    compared = comparison or {}
    own = [result] if finite(result.get("top1")) and result.get("seed") is not None else []
    of_seeds = compared.get("top1") or own
    return CardValues(
        result.get("trainer") or "train.py", compared.get("split"), result.get("labels") or (),
        {key: str(value) for key, value in made.items() if value}, {row["seed"]: row["top1"] for row in of_seeds},
        compared.get("rows") or ())


# ------------------------------------------------------------------------------------------ timm's files
def _is_list_of(value: Any, kind: Plain) -> bool:
    return isinstance(value, (list, tuple)) and all(map(kind.fits, value))


_MODULE = Plain("a module", lambda value: isinstance(value, str) and value.replace(".", "_").isidentifier())
_NUMBERS = Plain("a list of numbers", lambda value: _is_list_of(value, NUMBER) and len(value) > 0)
# The kinds of the options that this package uses. timm checks the remaining options.
_OPTIONS = {
    **dict.fromkeys("model dataset data data_dir val_split interpolation sched".split(), TEXT),
    **dict.fromkeys("img_size in_chans train_num_samples val_num_samples batch_size epochs".split(), SIZE),
    "seed": Plain("a whole number", lambda value: type(value) is int),
    "crop_pct": NUMBER,
    "amp": FLAG,
    "input_size": Plain(
        "three whole numbers of at least 1", lambda value: _is_list_of(value, SIZE) and len(value) == 3),
    "mean": _NUMBERS,
    "std": _NUMBERS,
    "model_kwargs": {...: ANY},
    "device_modules": Plain(
        "a list of modules", lambda value: _MODULE.fits(value) or _is_list_of(value, _MODULE)),
}


def _check_options(options: Mapping[str, Any], path: Path) -> None:
    """Raise a RunError for an option of another kind. `path` is the file that contains the options."""
    try:
        for key, kind in _OPTIONS.items():
            if options.get(key) is not None:
                checked(options[key], kind, f"option '{key}'")
    except UserError as error:
        raise RunError(f"{path} cannot be read ({error})") from None


def read_options(folder: Path) -> dict[str, Any]:
    """Return the options in the `args.yaml` of a folder. A missing or damaged file raises a RunError."""
    path = folder / OPTIONS
    try:
        values = load_written_yaml(_text_of(path))
    except (OSError, ValueError, YAMLError) as error:
        raise RunError(f"{path} cannot be read ({error_text(error)})") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} cannot be read (it contains no mapping)")
    _check_options(values, path)
    return values


def read_history(folder: Path, finished: bool = False) -> list[dict]:
    """Return the metrics of each epoch from `summary.csv`, with None for NaN and infinities.

    If `train.py` starts again, it appends a header and rows. A row for an epoch replaces all previous rows of this
    epoch and of later epochs. An incomplete last row is skipped, or an error if the run is `finished`. A damaged file
    raises a UserError. Without a file, the list is empty.
    """
    path = folder / SUMMARY
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        history = _epochs(whole_lines(text))
    except (OSError, ValueError, KeyError, TypeError, csv.Error, UserError) as error:
        text = error_text(error, named=not isinstance(error, UserError))
        raise UserError(f"{path} is not a table of epochs ({text}): remove it") from None
    if finished and text != whole_lines(text):
        raise UserError(f"{path} is incomplete, because its last line has no newline: copy it again or remove it")
    return history


def _epochs(text: str) -> list[dict]:
    history: list[dict] = []
    for row in csv_rows(text):
        if (row["epoch"] or "").isdecimal():
            metrics = {key: float(value) for key, value in row.items()
                       if value and key and key[0] not in "=+-@"}  # a spreadsheet would run them in history.csv
            values = checked({**without_nan(metrics), "epoch": int(row["epoch"])}, EPOCH_KIND, "row")
            while history and history[-1]["epoch"] >= values["epoch"]:
                history.pop()
            history.append(values)
    return history


# ------------------------------------------------------------------------------------------- modules
Modules = Union[str, Sequence[str], None]  # the option `device_modules` of timm's `train.py`


def import_modules(modules: Modules) -> None:
    """Import modules that the user names; raise a UserError if one does not exist."""
    for module in _listed(modules):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UserError(f"option 'device_modules': {error}: is its folder in PYTHONPATH?") from None


def _listed(modules: Modules) -> list[str]:
    return [modules] if isinstance(modules, str) else [str(module) for module in modules or ()]


def own_modules(modules: Modules) -> list[str]:
    """Return the modules that are not part of this package."""
    return [module for module in _listed(modules) if module.partition(".")[0] != "timm_ortho"]


def check_modules(options: Mapping[str, Any], source: str) -> None:
    """Raise a UserError if options of timm's `train.py` name modules that the user has not chosen.

    Their code would run, and another person may have written the options. Modules of this package are imported.
    `source` is the file or folder of the options.
    """
    modules = options.get("device_modules")
    for module in own_modules(modules):
        if module not in sys.modules:
            raise UserError(f"option 'device_modules' of {source} names the module '{module}', whose code would run: "
                            f"if you trust it, name it too (--device-modules {module}, or import it in Python)")
    import_modules(modules)  # the modules of this package


# ------------------------------------------------------------------------------------------- the run
class CheckpointRun:
    """Options, metrics and weights of a run, read from its folder or checkpoint.

    Args:
        path: A checkpoint, or the folder of one run. In a folder, the last checkpoint is read, or else the best.
        ema: Whether to use the EMA weights.

    Attributes:
        path: The checkpoint.
        state_dict: Its weights.
        epoch: The epoch at whose end they were saved; if `in_mid_epoch`, before its end (`--recovery-interval`).
        options: timm's options.
        history: Of the checkpoint's stage: `epoch` (from 0), `train_loss`, `eval_loss`, `eval_top1`, ...

    Raises:
        RunError: There is no checkpoint, a run of `compare` or `study` is unfinished, or there are no EMA weights.
    """

    def __init__(self, path: Path, ema: bool = False) -> None:
        folder = path if path.is_dir() else path.parent
        folder = folder.parent if folder.name == SWITCHED else folder
        lab = read_run(folder)
        if lab is not None and lab.result is None:
            raise RunError(f"the run in {folder} is not finished: repeat the command that started it")
        self.card = card_values(lab.result, lab.made_with, lab.comparison) if lab and lab.result else CardValues()
        self.path = _checkpoint_file(path, "." if lab is None or path != folder else lab.plan["stages"][-1]["folder"])
        folder, checkpoint = self.path.parent, _read_checkpoint(self.path)
        self.options = _options(folder, checkpoint, self.path)
        if ema and not checkpoint.get("state_dict_ema"):
            raise RunError(f"{self.path} has no EMA weights: use its plain weights, or train with --model-ema")
        self.state_dict = checkpoint["state_dict_ema" if ema else "state_dict"]
        epoch = checkpoint.get("epoch")
        self.epoch = epoch if isinstance(epoch, int) else None
        self.ema, self.in_mid_epoch = ema, "metric" not in checkpoint
        self.history = read_history(folder, finished=True)

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


# -------------------------------------------------------------------------------------------- the model
def run_model(run: CheckpointRun, name: Optional[str] = None, **overrides: Any) -> nn.Module:
    """Build a run's model as timm's train.py does, and load the run's weights.

    `name` selects another model for these weights, such as a variant with another connection, and `overrides` replace
    the arguments of the run's model. A model that cannot be built, or does not fit the weights, raises a RunError, or
    a UserError if the options name modules, see :func:`check_modules`.
    """
    options = run.options
    kwargs = dict(options.get("model_kwargs") or {})
    name = name or options["model"]
    if ":" in name:  # hf-hub:me/my-model, which timm would download
        raise RunError(f"the model '{name}' of {run.path} is not an architecture; {BY_HAND}")
    if name != options["model"]:
        kwargs = {key: value for key, value in kwargs.items() if not is_variant_argument(key)}
    try:
        model = create_model({**options, "model": name, "pretrained": False}, **{**kwargs, **overrides})
        model.load_state_dict(run.state_dict)
    except CONSTRUCTOR_ERRORS as error:
        check_modules(options, str(run.path.parent))  # one of them may register the model or its connection
        raise RunError(f"the model '{name}' cannot be built with the arguments and weights of {run.path}: "
                       f"{error_text(error)}") from None
    return model.eval()


def create_model(options: Mapping[str, Any], **kwargs: Any) -> nn.Module:
    """Create the model that timm's options describe.

    Pass the option `model_kwargs` as `kwargs`. In them, arguments that an option sets are a TypeError.
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


_DATA_OPTIONS = ("input_size", "img_size", "mean", "std", "interpolation", "crop_pct")


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
    """Return a checkpoint, or the last or else the best one of a run's folder, in the folder of its last stage."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise RunError(f"there is no checkpoint or run folder '{path}'")
    for file in (path / stage / LAST, path / "model_best.pth.tar"):
        if file.is_file():
            return file
    runs = sorted(item.name for item in path.iterdir() if (item / OPTIONS).is_file())
    if runs:
        raise RunError(f"{path} contains {len(runs)} runs: pass one of them, such as {path / runs[0]}")
    raise RunError(f"{path} contains no checkpoint (last.pth.tar, model_best.pth.tar): pass a checkpoint, or a "
                       "folder that timm's train.py or timm-ortho compare wrote")


def _read_checkpoint(path: Path) -> dict:
    try:
        checkpoint = load_checkpoint(path)
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise NoRunError(f"{path} is not a checkpoint of timm's train.py or of timm-ortho: it has no 'state_dict'; "
                             f"{BY_HAND}")
        ema = checkpoint.get("state_dict_ema")
        return {**checkpoint, "state_dict": tensors_by_name(checkpoint["state_dict"], path),
                "state_dict_ema": tensors_by_name({} if ema is None else ema, path)}
    except (OSError, WeightsError) as error:
        raise NoRunError(error_text(error)) from None


def _options(folder: Path, checkpoint: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the options in args.yaml. Options without a value there, such as num_classes, come from the checkpoint."""
    args = checkpoint.get("args")
    options = _options_in(args, path) if isinstance(args, Namespace) else {}
    _check_options(options, path)
    if (folder / OPTIONS).is_file():
        written = read_options(folder)
        options.update({key: value for key, value in written.items() if value is not None or key not in options})
    if not options.get("model"):
        raise NoRunError(f"the model of {path} is unknown: the file contains no arguments, and no args.yaml names a "
                         f"model; {BY_HAND}")
    return options


def _options_in(args: Namespace, path: Path) -> dict[str, Any]:
    """Return the options in a checkpoint, with text in place of values that args.yaml cannot contain, such as tensors.

    Lists that contain themselves, or have billions of values because they share them, raise a RunError.
    """
    level: list[Any] = [args]
    for _ in range(DEEPEST):
        level = list(islice(chain.from_iterable(map(_parts, level)), _MOST + 1))
        if len(level) > _MOST:
            break
    if level:
        raise RunError(f"{path} cannot be read (its options have more than {DEEPEST} levels or {_MOST:,} values)")
    return {str(key): value if value is None or isinstance(value, (str, int, float, list, tuple, dict)) else str(value)
            for key, value in vars(args).items()}


def _parts(value: Any) -> Iterable[Any]:
    value = vars(value) if isinstance(value, Namespace) else value
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()


# ------------------------------------------------------------------------------------------ provenance
def made_on() -> dict[str, str]:
    """Return versions, commit (only in a checkout), and the machine: host, CPU, GPUs and their driver."""
    from . import __version__

    commit = commit_of(Path(__file__).parents[1])
    return {
        "timm-ortho": __version__, "timm": timm.__version__, "torch": torch.__version__,
        **({"commit": commit} if commit else {}),
        "host": platform.node(), "cpu": _cpu_name(), "gpu": _gpu_names(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")}


def _gpu_names() -> str:
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def environment() -> dict[str, str]:
    """Return the information of `timm-ortho env`: versions, machine, device and backend."""
    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    packages = ["timm-ortho", "timm", "torch", "torchvision", "triton", "huggingface-hub", "safetensors"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        **{package: version(package) for package in packages},
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cpu": device_name(torch.device("cpu")),
        "gpu": _gpu_names() or "none",
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "device": device,
        "backend": _backend(device),
    }


def _backend(device: str) -> str:
    """Return the backend of a training step and what selected it."""
    x = torch.ones(1, 1, device=device, requires_grad=True)
    requested = backend.default()
    source = "auto" if requested == "auto" else f"{backend.BACKEND_VARIABLE}={requested}"
    try:
        return f"{backend.choose_backend(x, x)} ({source})"
    except (RuntimeError, ValueError) as error:
        return f"none ({error})"


def commit_of(root: Path) -> str:
    """Return the commit of the checkout in a folder, with `-dirty` if it has changes or new files, or ""."""
    if not (root / ".git").exists():  # git would search the parent folders
        return ""
    commit = _first_line("git", "-C", str(root), "rev-parse", "HEAD")
    return f"{commit}-dirty" if commit and _first_line("git", "-C", str(root), "status", "--porcelain") else commit


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the CPU with its cores and torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return f"{_cpu_name()}, {cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return (names or [platform.processor() or platform.machine()])[0]


def _first_line(*command: str) -> str:
    """Return the first line that a command prints; empty if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return (subprocess.run(command, capture_output=True, text=True).stdout.splitlines() or [""])[0].strip()
