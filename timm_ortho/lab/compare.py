"""`timm-ortho compare`: one architecture, several connections, several seeds, the same data.

Runs with one seed are a pair: they start from the same weights and see the same batches, augmentations and mixtures.
The grid goes seed by seed, so that an interrupted comparison holds whole pairs.

The output folder:

    compare.yaml            the settings; a folder that has others is refused
    <connection>-seed<k>/   one run, see `training`
    results.json            every number of the finished runs
    report.html             the table and the curves
"""
import difflib
import hashlib
import inspect
import json
import sys
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import timm
import torch
import yaml
from timm.data import resolve_data_config
from tqdm import tqdm

from . import LabError, recipe, report, write_text
from .data import Source, open_source
from .training import Run, build_model, read_result

__all__ = ["Comparison", "compare"]

_SUFFIXES = ("_ortho", "_orthog", "_linear")
_SMALL = 1_000_000  # parameters
_BY_MODEL = ("model_kwargs", "img_size", "input_size")  # what a recipe says for its own model only


@dataclass(frozen=True)
class Comparison:
    """What is to be compared, checked and complete.

    Attributes:
        options: timm's options, the same for every run but for `seed` and the connection in `model_kwargs`.
        source: The data set.
        connections: Names of the connections, the baseline first.
        seeds: Seeds of the runs.
        folder: Where everything is written.
    """

    options: Namespace
    source: Source
    connections: Sequence[str]
    seeds: Sequence[int]
    folder: Path

    def runs(self) -> list[tuple[str, int]]:
        return [(connection, seed) for seed in self.seeds for connection in self.connections]

    def run_folder(self, connection: str, seed: int) -> Path:
        return self.folder / f"{connection}-seed{seed}"

    def run_options(self, connection: str, seed: int) -> Namespace:
        options = Namespace(**vars(self.options))
        options.seed = seed
        options.model_kwargs = {**options.model_kwargs, "connection": connection}
        return options


def compare(
        given: Mapping[str, Any],
        *,
        recipe_name: Optional[str] = None,
        connections: Sequence[str] = ("linear", "feature", "global"),
        seeds: Sequence[int] | int = 3,
        output: Optional[str] = None,
        threads: Optional[int] = None,
) -> int:
    """Trains what is not finished yet, then writes and prints the report.

    Args:
        given: timm's options that were given beside the recipe and override it.
        recipe_name: File or name of a shipped recipe; None chooses by data set.
        connections: Connections to compare; differences are to the first, or to `linear` where it takes part.
        seeds: The seeds, or their number, counted from the option `seed`.
        output: The output folder; None for one below `output/compare` that is named after the settings.
        threads: CPU threads of each operation; None chooses by the size of the model.

    Returns:
        The exit status: 0, or 130 if Ctrl-C stopped it.

    Raises:
        LabError: Something that was given cannot be run.
    """
    comparison = plan(given, recipe_name, connections, seeds, output)
    with _claimed(comparison), _threads(comparison, threads):
        try:
            for number, (connection, seed) in enumerate(comparison.runs(), 1):
                _run(comparison, connection, seed, f"{number}/{len(comparison.runs())}")
            status = 0
        except KeyboardInterrupt:
            status = 130
        except torch.cuda.OutOfMemoryError:
            raise LabError("the device is out of memory: choose a smaller --batch-size; finished runs stay") from None
        finally:
            text = report.write(comparison.folder)
    print(text)
    if status:
        print("interrupted; the same command again continues where this one stopped", file=sys.stderr)
    return status


# -------------------------------------------------------------------------------------------- the plan
def plan(
        given: Mapping[str, Any],
        recipe_name: Optional[str],
        connections: Sequence[str],
        seeds: Sequence[int] | int,
        output: Optional[str],
) -> Comparison:
    """Checks everything that can be checked before the first step; nothing is written."""
    options = _options(given, recipe_name)
    source = open_source(options)
    options.num_classes, options.in_chans = source.num_classes, source.in_chans
    seeds = list(range(options.seed, options.seed + seeds)) if isinstance(seeds, int) else list(dict.fromkeys(seeds))
    connections = list(dict.fromkeys(connections))
    if not seeds or not connections:
        raise LabError("there is nothing to compare: give at least one connection and one seed")
    options.seed = None  # each run has its own
    for connection in connections:
        _check_model(options, connection)
    folder = Path(output) if output else _default_folder(options)
    comparison = Comparison(options, source, connections, seeds, folder)
    _check_run(comparison)
    return comparison


def _options(given: Mapping[str, Any], recipe_name: Optional[str]) -> Namespace:
    name = recipe_name or ("digits" if given.get("dataset", "digits") == "digits" else "small_images")
    values = recipe.load(name)
    own = _base_name(str(values.get("model", "vit_small")))
    base = _base_name(str(given.get("model", own)))
    if base != own:
        values = {key: value for key, value in values.items() if key not in _BY_MODEL}
    kwargs = {**(values.get("model_kwargs") or {}), **given.get("model_kwargs", {})}
    values = {**values, **given, "model": base, "model_kwargs": kwargs}
    options, inert = recipe.resolve(values)
    if inert:
        print(f"timm-ortho: compare has no use for {', '.join(inert)}", file=sys.stderr)
    options.model = _variant(base)
    options.device_modules = ["timm_ortho"]  # so that train.py --config args.yaml finds the variant
    options.device = str(_device(options.device))
    if "amp_dtype" not in values and options.device == "cpu":
        options.amp_dtype = "bfloat16"  # timm's float16 needs a loss scaler, which the CPU does not have
    if "connection" in options.model_kwargs:
        raise LabError("the connection is not a model argument here: use --connections")
    return options


def _base_name(model: str) -> str:
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


def _device(name: Optional[str]) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LabError(f"there is no device '{name}': give cpu, or cuda where PyTorch sees a GPU") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LabError(f"PyTorch sees no device '{name}' here: use --device cpu")
    return device


def _check_model(options: Namespace, connection: str) -> None:
    """Builds the model and runs it on two blank images, so that wrong arguments are known at once."""
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


def _check_run(comparison: Comparison) -> None:
    """Makes the first run ready and lets it go again: an optimizer, schedule or loader that cannot be is known now."""
    connection, seed = comparison.runs()[0]
    options = comparison.run_options(connection, seed)
    try:
        Run(options, comparison.source, comparison.run_folder(connection, seed), torch.device(options.device))
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


def _default_folder(options: Namespace) -> Path:
    """Named after the settings: the same command finds its folder again, another one never meets it."""
    digest = hashlib.sha256(json.dumps(vars(options), sort_keys=True).encode()).hexdigest()[:8]
    dataset = options.dataset.replace("/", "_") or Path(options.data_dir).name
    return Path("output", "compare", f"{dataset}-{_base_name(options.model)}-{digest}")


# ------------------------------------------------------------------------------------------ the folder
@contextmanager
def _claimed(comparison: Comparison) -> Iterator[None]:
    """Makes the folder this comparison's, or refuses; nobody else may work in it meanwhile."""
    folder = comparison.folder
    if folder.exists() and not folder.is_dir():
        raise LabError(f"{folder} is not a folder: choose another --output")
    recorded = _recorded(comparison)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        _lock(lock, folder)
        settings = {
            "options": vars(comparison.options),
            # the grid may grow from call to call, and the report is always on all of it
            "connections": list(dict.fromkeys([*recorded.get("connections", []), *comparison.connections])),
            "seeds": sorted({*recorded.get("seeds", []), *comparison.seeds}),
        }
        if settings != recorded:
            write_text(folder / "compare.yaml", yaml.safe_dump(settings, sort_keys=False))
        yield


def _recorded(comparison: Comparison) -> dict:
    """The settings that the folder already has, {} if it is new.

    Raises:
        LabError: They are others, or the folder holds something else.
    """
    folder, path = comparison.folder, comparison.folder / "compare.yaml"
    advice = "choose another --output, or remove that folder"
    if not path.is_file():
        strangers = [item.name for item in folder.iterdir() if not item.name.startswith(".")] if folder.exists() else []
        if strangers:
            raise LabError(
                f"{folder} holds '{strangers[0]}' and no compare.yaml, so it is not compare's: choose another --output")
        return {}
    try:
        recorded = yaml.safe_load(path.read_text(encoding="utf-8"))
        there, here = recorded["options"], vars(comparison.options)
    except (yaml.YAMLError, KeyError, TypeError):
        raise LabError(f"{path} cannot be read: {advice}") from None
    differing = [key for key in here if there.get(key) != here[key]]
    if differing:
        values = "; ".join(f"{key} is {there.get(key)!r} there and {here[key]!r} here" for key in differing[:3])
        more = f", and {len(differing) - 3} others differ" if len(differing) > 3 else ""
        raise LabError(f"{folder} belongs to other settings ({values}{more}): {advice}")
    return recorded


def _lock(file: Any, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise LabError(f"another timm-ortho compare is at work in {folder}: wait for it, or choose another --output") \
            from None


# -------------------------------------------------------------------------------------------- the runs
@contextmanager
def _threads(comparison: Comparison, wanted: Optional[int]) -> Iterator[None]:
    """Sets PyTorch's threads for the time of the comparison.

    A small model gains next to nothing from a second thread, and where other processes want the core, threads that wait
    for each other lose a factor of eight (measured: vit_small of width 64, two threads on two cores, both also in use).
    """
    before = torch.get_num_threads()
    source = comparison.source
    model = build_model(comparison.run_options(comparison.connections[0], 0), source.num_classes, source.in_chans)
    small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL
    torch.set_num_threads(wanted or (1 if small else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(comparison: Comparison, connection: str, seed: int, number: str) -> None:
    folder = comparison.run_folder(connection, seed)
    label = f"[{number}] {connection}, seed {seed}"
    if read_result(folder) is not None:
        tqdm.write(f"{label}: finished before", file=sys.stderr)
        return
    options = comparison.run_options(connection, seed)
    if options.torchcompile:
        torch.compiler.reset()  # models of one grid share their code, and its limit of recompilations
    run = Run(options, comparison.source, folder, torch.device(options.device))
    # disable=None: no bar where the output is not a terminal
    with tqdm(total=run.epochs * run.updates_per_epoch, desc=label, unit="step", leave=False, disable=None) as bar:

        def progress(updates: int, row: Optional[dict]) -> None:
            bar.update(updates)
            if row is not None:
                bar.set_postfix_str(f"epoch {row['epoch'] + 1}/{run.epochs}, top-1 {row['eval_top1']:.2f} %")

        result = run.train(progress)
    tqdm.write(f"{label}: top-1 {result['top1']:.2f} % in {result['seconds']:.0f} s", file=sys.stderr)
