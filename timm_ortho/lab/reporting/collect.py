"""Collect the runs in output folders for a report."""
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from ..._text import aligned
from ...convert import SUFFIXES, base_name, suffix_of
from ...run_folder import OPTIONS, PROBE, RECORDS, read_history, read_options
from .. import LabError
from ..folder import Variant, history, metrics_of, read_lines, record, state
from ..planning.plan import STUDY, read
from ..running.features import add_cka
from ..train_options import options_with
from . import published
from .layout import grouped
from .report import Part

# Options in which a user's run may differ from the run of a study; `data` is another name of `data_dir`
_NOT_COMPARED = options_with("about", "machine") | options_with("lab", "unused") | {
    "seed", "batch_size", "grad_accum_steps", "num_classes", "in_chans", "device_modules", "data", "resume"}


def collect(folders: Sequence[Path]) -> dict[Path, Part]:
    """Return the studies and their runs, by the folder of the study.

    Args:
        folders: Published studies, outputs of `timm-ortho study` and `compare`, and folders of runs that the user
            trained with `train.py`. A user's run is added to the first study in `folders` that plans a run
            with the same settings.

    Raises:
        LabError: A folder is not one of these kinds or lacks metrics, no study plans a run with the settings of a
            user's run, or two runs have the same cell, connection and seed.
    """
    parts, rest = {}, []
    for folder in folders:
        if (folder / published.STUDY).is_file():
            study, runs, recorded = published.read(folder)
            parts[folder] = Part.of(study, runs, [], recorded)
        else:
            rest.append(folder)
    return {**parts, **_of_outputs(rest)} if rest else parts


def _of_outputs(folders: Sequence[Path]) -> dict[Path, Part]:
    studies = [folder for folder in folders if (folder / STUDY).is_file()]
    by_hand = [folder for folder in folders if folder not in studies]
    plans = [(folder, read(folder)) for folder in studies or folders[:1]]  # without a study, `read` raises a LabError
    parts = [_of_study(folder, values) for folder, values in plans]
    for folder in by_hand:
        number, run = _by_hand(folder, plans)
        study, runs, _ = parts[number]
        if any(all(other[key] == run[key] for key in ("cell", "connection", "seed")) for other in runs):
            raise LabError(f"{folder} is a second run of '{run['connection']}' with seed {run['seed']} in study "
                           f"'{study['name']}': leave one of the two out, or train it with another --seed")
        runs.append(run)
        study["seeds"] = sorted({*study["seeds"], run["seed"]})
    return {folder: Part.of(*part) for (folder, _), part in zip(plans, parts, strict=True)}


def _of_study(folder: Path, values: Mapping[str, Any]) -> tuple[dict, list[dict], list[str]]:
    study = dict(values["study"])
    runs, folders, unfinished = [], [], []
    groups = grouped(values["places"], lambda point: (tuple(point["cell"].items()), point["connection"]))
    for point in chain(*groups.values()):  # in this order, a baseline whose first seed is unfinished remains first
        run = _run(folder / point["run"])
        if run is None:
            word, reason = state(folder / point["run"])
            unfinished.append(f"{point['run']} (failed: {reason})" if word == "failed" else point["run"])
            continue
        runs.append({**run, "cell": point["cell"], "connection": point["connection"], "seed": point["seed"],
                     "dataset": study["dataset"]})
        folders.append(folder / point["run"])
    if any(run.get("representation") for run in runs):
        add_cka(runs, folders, study["baseline"])
    return study, runs, list(dict.fromkeys([*unfinished, *values["left_out"]]))


def _run(folder: Path) -> Optional[dict]:
    """Return the metrics and records of a finished run, or None for an unfinished run."""
    found = record(folder) if folder.is_dir() else None
    if found is None or found.result is None:
        return None
    plan = Variant.read(folder)
    return {
        "representation": None,
        **found.result,
        "made_with": found.made_with,
        **_weights(plan.stages[-1].options),
        "history": history(folder, plan),
        "probe": read_lines(folder / PROBE),
        "dynamics": read_lines(folder / RECORDS),
    }


def _weights(options: Mapping[str, Any]) -> dict[str, bool]:
    """Return {"ema": True} if the trainer evaluates the EMA weights, which replace the plain weights in summary.csv."""
    return {"ema": True} if options.get("model_ema") and not options.get("model_ema_force_cpu") else {}


def _by_hand(folder: Path, studies: Sequence[tuple[Path, Mapping[str, Any]]]) -> tuple[int, dict]:
    """Return a run that the user trained with `train.py`, and the index of the study that it matches."""
    rows = read_history(folder, finished=True)
    if not (folder / OPTIONS).is_file() or not rows:
        raise LabError(f"{folder} is neither a study's output nor a run of train.py (args.yaml, summary.csv)")
    if not all("eval_top1" in row for row in rows):
        raise LabError(f"{folder} has epochs without eval_top1 in summary.csv, so there is no accuracy to report")
    options = read_options(folder)
    lacking = [key for key in ("model", "seed") if options.get(key) in (None, "")]
    if lacking:
        raise LabError(f"{folder / OPTIONS} names no {lacking[0]}, so train.py did not write it")
    own_connection = SUFFIXES.get(suffix_of(options["model"]), "linear")
    connection = (options.get("model_kwargs") or {}).get("connection") or own_connection
    nearest: Optional[list[str]] = None
    for number, (root, values) in enumerate(studies):
        for point in values["places"]:
            if point["connection"] != connection:
                continue
            plan = Variant.read(root / point["run"])
            if len(plan.stages) > 1:
                continue
            differing = _differing(options, rows, plan)
            if not differing:
                return number, {
                    "model": options["model"], "cell": point["cell"], "connection": connection, "seed": options["seed"],
                    "dataset": values["study"]["dataset"], "trainer": "train.py", **metrics_of(rows),
                    **_weights(options), "history": rows,
                    "made_with": {"command": f"by hand, in {folder}"}}
            nearest = min(nearest or differing, differing, key=len)
    advice = f"; the most similar run differs in {', '.join(nearest)}" if nearest else ""
    raise LabError(f"{folder} ({options['model']}, {connection}, {metrics_of(rows)['epochs']} epochs) matches no cell "
                   f"of these studies{advice}: leave this folder out, or add the folder of its study")


def _differing(options: Mapping[str, Any], rows: Sequence[dict], plan: Variant) -> list[str]:
    """Return the settings in which a user's run differs from a plan.

    Options in `_NOT_COMPARED`, and options that only one of the two has, are not compared. `batch_size` and
    `grad_accum_steps` are among them, because `args.yaml` lacks the number of processes.
    """
    def settings(values: Mapping[str, Any], epochs: int) -> dict[str, Any]:
        kept = {key: None if value in ("", [], {}) else value
                for key, value in values.items() if key not in _NOT_COMPARED}
        kwargs = {key: value for key, value in (values.get("model_kwargs") or {}).items() if key != "connection"}
        return {**kept, "model": base_name(values["model"]), "epochs": epochs, "model_kwargs": kwargs,
                "amp_dtype": values.get("amp_dtype") if values.get("amp") else None}

    here = settings(options, metrics_of(rows)["epochs"])
    there = settings(plan.stages[0].options, plan.stages[0].last_epoch)
    return [key for key in here if key in there and here[key] != there[key]]


def status(folder: Path) -> str:
    """Return a line for each run of a study, with its state according to its files. The last line counts the states."""
    names = list(dict.fromkeys(point["run"] for point in read(folder)["places"]))
    rows = [(name, *state(folder / name)) for name in names]
    counts = Counter(word for _, word, _ in rows)
    return "\n".join([*aligned(rows), ", ".join(f"{count} {word}" for word, count in counts.items()) or "no runs"])
