"""What every grid of runs needs, whoever asks for it: options, checks before the first step, the folder, one run.

`compare` and `study` make `Job`s and hand them here.
"""
import difflib
import importlib
import inspect
import sys
import traceback
from argparse import Namespace
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import timm
import torch
import yaml
from timm.data import resolve_data_config
from tqdm import tqdm

from . import LabError, RunError, own_version, recipe, write_text
from .checkpoints import disk_errors, one_line, read_result
from .data import Source
from .training import Extras, Progress, Run, build_model

__all__ = [
    "LOG", "Job", "base_name", "check_folders", "check_model", "check_run", "check_threads", "claimed", "device_of",
    "limited_threads", "resolve_options", "run_job", "seeds_of", "threads_for", "train_job", "writing_report",
]

LOG = "log.txt"  # in a run's folder: what its process wrote, and the traceback of an error that nobody foresaw
_SUFFIXES = ("_ortho", "_orthog", "_linear")
_SMALL = 1_000_000  # parameters
_BY_MODEL = ("model_kwargs", "img_size", "input_size")  # what a recipe says for its own model only


@dataclass(frozen=True)
class Job:
    """One run of a grid.

    Attributes:
        name: The name of its folder below the grid's.
        label: What the progress calls it.
        options: timm's options, complete; `seed` and the connection in `model_kwargs` included.
        folder: Where its files go.
        extras: What timm's options cannot say.
    """

    name: str
    label: str
    options: Namespace
    folder: Path
    extras: Extras = field(default_factory=Extras)


# ----------------------------------------------------------------------------------------- the options
def resolve_options(given: Mapping[str, Any], recipe_name: Optional[str]) -> tuple[Namespace, list[str]]:
    """timm's options for what was given, with a recipe and timm's own defaults below.

    Args:
        given: timm's options by name; they override the recipe's.
        recipe_name: File or name of a shipped recipe; None chooses by data set.

    Returns:
        The options, and the names of those given that the lab has no use for.
    """
    name = recipe_name or ("digits" if given.get("dataset", "digits") == "digits" else "small_images")
    values = recipe.load(name)
    own = base_name(str(values.get("model", "vit_small")))
    base = base_name(str(given.get("model", own)))
    if base != own:
        values = {key: value for key, value in values.items() if key not in _BY_MODEL}
    kwargs = {**(values.get("model_kwargs") or {}), **given.get("model_kwargs", {})}
    values = {**values, **given, "model": base, "model_kwargs": kwargs}
    options, inert = recipe.resolve(values)
    options.model = _variant(base)
    # timm_ortho so that train.py --config args.yaml finds the variant, others for what they register
    options.device_modules = ["timm_ortho", *(name for name in options.device_modules or () if name != "timm_ortho")]
    _import(options.device_modules)
    options.device = str(device_of(options.device))
    if "amp_dtype" not in values and options.device == "cpu":
        options.amp_dtype = "bfloat16"  # timm's float16 needs a loss scaler, which the CPU does not have
    if "connection" in options.model_kwargs:
        raise LabError("the connection is not a model argument here: use --connections")
    return options, inert


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise LabError(f"option 'device_modules': {error}: is its folder in PYTHONPATH?") from None


def base_name(model: str) -> str:
    """`vit_small` for `vit_small`, `vit_small_ortho`, `vit_small_orthog` and `vit_small_linear`."""
    for suffix in _SUFFIXES:
        if model.endswith(suffix):
            return model[: -len(suffix)]
    return model


def _variant(base: str) -> str:
    name = f"{base}_ortho"
    if timm.is_model(name):
        return name
    known = [model[: -len("_ortho")] for model in timm.list_models("*_ortho")]
    near = difflib.get_close_matches(base, known, n=3, cutoff=0.0)
    raise LabError(f"there is no orthogonal variant of '{base}'; the nearest are {', '.join(near)} (timm-ortho list)")


def device_of(name: Optional[str]) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LabError(f"there is no device '{name}': give cpu, or cuda where PyTorch sees a GPU") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LabError(f"PyTorch sees no device '{name}' here: use --device cpu")
    return device


def seeds_of(wanted: Sequence[int] | int, first: int) -> list[int]:
    """The seeds, or as many as wanted from `first` on."""
    return list(range(first, first + wanted)) if isinstance(wanted, int) else list(dict.fromkeys(wanted))


# ------------------------------------------------------------------------- checks before the first step
def check_model(options: Namespace, connection: str) -> None:
    """Builds the model and runs it on two blank images, so that wrong arguments are known at once.

    Gives a model that must know the size of its images that size, in `options.model_kwargs`.
    """
    trial = Namespace(**vars(options))
    trial.pretrained, trial.initial_checkpoint, trial.seed = False, "", 0
    trial.head_init_scale = trial.head_init_bias = None
    trial.model_kwargs = {**options.model_kwargs, "connection": connection}
    try:
        # not on the meta device: older timm (1.0.16) reads drop path rates from tensors
        model = build_model(trial, options.num_classes, options.in_chans)
        size = _input_size(options, model)
        if _takes_img_size(model) and size[1:] != _own_size(model):
            options.model_kwargs.setdefault("img_size", size[1] if size[1] == size[2] else list(size[1:]))
            trial.model_kwargs = {**options.model_kwargs, "connection": connection}
            model = build_model(trial, options.num_classes, options.in_chans)
        with torch.no_grad():
            model.eval()(torch.zeros(2, *size))
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise LabError(f"{options.model} with connection '{connection}': {reason}") from None


def check_run(job: Job, source: Source) -> None:
    """Makes a run ready and lets it go again: an optimizer, schedule or loader that cannot be is known now."""
    if job.options.epochs < 1:
        raise LabError(f"epochs must be at least 1, got {job.options.epochs}")
    try:
        Run(job.options, source, job.folder, torch.device(job.options.device), job.extras)
    except LabError:
        raise
    except (ValueError, TypeError, RuntimeError, AssertionError, KeyError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise LabError(f"timm cannot make a run of these options: {reason}") from None


def _input_size(options: Namespace, model: torch.nn.Module) -> tuple[int, ...]:
    if options.img_size is None and options.input_size is None and "img_size" in options.model_kwargs:
        options.img_size = options.model_kwargs["img_size"]
    size = resolve_data_config(vars(options), model=model)["input_size"]
    return (options.in_chans, *size[1:])


def _takes_img_size(model: torch.nn.Module) -> bool:
    """Whether the class has to know the size of its images, as one with position embeddings does."""
    made = [vars(cls)["__init__"] for cls in type(model).__mro__ if "__init__" in vars(cls) and cls is not object]
    return any("img_size" in inspect.signature(init).parameters for init in made)


def _own_size(model: torch.nn.Module) -> Optional[tuple[int, ...]]:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return tuple(size) if size is not None else None


# ------------------------------------------------------------------------------------------ the folder
@contextmanager
def claimed(folder: Path, command: str, fixed: Mapping[str, Any], growing: Mapping[str, list]) -> Iterator[None]:
    """Makes the folder this grid's, or refuses; nobody else may work in it meanwhile.

    Args:
        folder: The grid's.
        command: `compare` or `study`; the settings are in a file of that name.
        fixed: Settings that all calls for one folder share.
        growing: Lists that may grow from call to call; the report is always on all of them.

    Raises:
        LabError: It is of other settings or of another version, holds something else, or somebody is at work in it.
    """
    if folder.exists() and not folder.is_dir():
        raise LabError(f"{folder} is not a folder: choose another --output")
    recorded = _recorded(folder, command, {"timm_ortho": own_version(), **fixed})
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 closed below
    with lock:
        _lock(lock, folder, command)
        grown = {key: list(dict.fromkeys([*recorded.get(key, []), *values])) for key, values in growing.items()}
        settings = {"timm_ortho": own_version(), "options": dict(fixed), **grown}
        if settings != recorded:
            with disk_errors(folder):
                write_text(folder / f"{command}.yaml", yaml.safe_dump(settings, sort_keys=False))
        yield


def _recorded(folder: Path, command: str, here: Mapping[str, Any]) -> dict:
    """The settings that the folder already has, {} if it is new."""
    path = folder / f"{command}.yaml"
    advice = "choose another --output, or remove that folder"
    if not path.is_file():
        strangers = [item.name for item in folder.iterdir() if not item.name.startswith(".")] if folder.exists() else []
        if strangers:
            raise LabError(f"{folder} holds '{strangers[0]}' and no {path.name}, so it is not {command}'s: "
                           "choose another --output")
        return {}
    try:
        recorded = yaml.safe_load(path.read_text(encoding="utf-8"))
        there = {"timm_ortho": recorded.get("timm_ortho"), **recorded["options"]}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        raise LabError(f"{path} cannot be read: {advice}") from None
    _refuse_other(there, here, f"{folder} belongs to other settings", advice)
    return recorded


def _refuse_other(there: Mapping[str, Any], here: Mapping[str, Any], what: str, advice: str) -> None:
    there, here = _flat(there), _flat(here)
    differing = [key for key in dict.fromkeys([*here, *there]) if there.get(key) != here.get(key)]
    if differing:
        values = "; ".join(f"{key} is {_short(there.get(key))} there and {_short(here.get(key))} here"
                           for key in differing[:3])
        more = f", and {len(differing) - 3} others differ" if len(differing) > 3 else ""
        raise LabError(f"{what} ({values}{more}): {advice}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`model_kwargs.depth` for what is inside mappings."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lock(file: Any, folder: Path, command: str) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise LabError(f"another timm-ortho {command} is at work in {folder}: wait for it, or choose another "
                       "--output") from None


@contextmanager
def writing_report(folder: Path, write: Callable[[], str]) -> Iterator[None]:
    """Writes and prints the report of what is finished, however the runs inside end."""
    def report() -> None:
        with disk_errors(folder):
            text = write()
        print(text)

    try:
        yield
    except LabError:
        with suppress(LabError):  # the error that is on its way says more
            report()
        raise
    except KeyboardInterrupt:
        report()
        raise
    report()


# -------------------------------------------------------------------------------------------- the runs
def check_threads(threads: Optional[int]) -> None:
    """Raises LabError unless it is None or a number of threads."""
    if threads is not None and threads < 1:
        raise LabError(f"--threads must be at least 1, got {threads}")


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """PyTorch's CPU threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(options: Namespace) -> int:
    """One for a small model, PyTorch's own choice for others.

    A small model gains next to nothing from a second thread, and where other processes want the core, threads that wait
    for each other lose a factor of eight (measured: vit_small of width 64, two threads on two cores, both also in use).
    """
    model = build_model(options, options.num_classes, options.in_chans)
    small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL
    return 1 if small else torch.get_num_threads()


def check_folders(jobs: Sequence[Job]) -> None:
    """Refuses runs that were begun with other options, which no continuing could put right."""
    for job in jobs:
        _check_folder(job)


def _check_folder(job: Job) -> None:
    path = job.folder / "args.yaml"
    if not path.is_file():
        return
    try:
        there = yaml.safe_load(path.read_text(encoding="utf-8"))
        there = {key: there.get(key) for key in vars(job.options)}
    except (yaml.YAMLError, AttributeError):
        raise LabError(f"{path} cannot be read: remove {job.folder} to train it anew") from None
    here = yaml.safe_load(yaml.safe_dump(vars(job.options)))  # as YAML gives it back
    _refuse_other(there, here, f"{job.folder} is a run of other options", "choose another --output, or remove it")


def train_job(job: Job, source: Source, watch: Callable[[Run], Progress]) -> dict:
    """Trains a run, or what is left of it, and returns its result.

    Args:
        job: The run.
        source: The data set.
        watch: Is shown the run before its first step, and returns what is told of its progress.

    Raises:
        LabError: It cannot be trained or continued, or the device's memory or the disk is too small. A RunError for
            any other error, whose traceback is in the run's log.
    """
    _import(job.options.device_modules)  # again: this may be a process that has not seen them
    if job.options.torchcompile:
        torch.compiler.reset()  # models of one grid share their code, and its limit of recompilations
    try:
        run = Run(job.options, source, job.folder, torch.device(job.options.device), job.extras)
        return run.train(watch(run))
    except torch.cuda.OutOfMemoryError:
        raise LabError("the device is out of memory: choose a smaller batch size; finished runs stay") from None
    except LabError:
        raise
    except Exception as error:  # whatever it is, it must not keep other runs from their end
        with disk_errors(job.folder):
            job.folder.mkdir(parents=True, exist_ok=True)
            with open(job.folder / LOG, "a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)
        raise RunError(f"{one_line(error)}, see {job.folder / LOG}") from error


def run_job(job: Job, source: Source, number: str) -> None:
    """Trains a run unless it is finished, with a progress bar."""
    label = f"[{number}] {job.label}"
    if read_result(job.folder) is not None:
        tqdm.write(f"{label}: finished before", file=sys.stderr)
        return
    # disable=None: no bar where the output is not a terminal
    with tqdm(desc=label, unit="step", leave=False, disable=None) as bar:

        def watch(run: Run) -> Progress:
            bar.reset(total=run.epochs * run.updates_per_epoch)

            def progress(updates: int, row: Optional[dict]) -> None:
                bar.update(updates)
                if row is not None:
                    bar.set_postfix_str(f"epoch {row['epoch'] + 1}/{run.epochs}, top-1 {row['eval_top1']:.2f} %")

            return progress

        result = train_job(job, source, watch)
    tqdm.write(f"{label}: top-1 {result['top1']:.2f} % in {result['seconds']:.0f} s", file=sys.stderr)
