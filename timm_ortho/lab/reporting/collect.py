"""Collect the runs of a study for its report, and write the comparison into the `run.json` of each run.

`timm-ortho push` makes cards from this comparison.
"""
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import numpy as np
import torch

from ..._text import aligned, finite, plain_lines
from ...convert import SUFFIXES, base_name, suffix_of
from ...run_folder import FEATURES, OPTIONS, PROBE, RECORDS, read_history, read_options, read_run
from .. import LabError, one_line, representation
from ..folder import COMPARISON, Variant, history, metrics_of, read_lines, read_study, record, save, state, work_on
from ..image_folder import STREAMED
from ..train_options import options_with
from . import published, tables
from .layout import grouped
from .report import Part

# Options in which a user's run may differ from the run of a study; `data` is another name of `data_dir`
_NOT_COMPARED = options_with("about", "machine") | options_with("lab", "unused") | {
    "seed", "batch_size", "grad_accum_steps", "num_classes", "in_chans", "device_modules", "data", "resume"}
_WIDEST = 2**14  # largest width of features; CKA needs matrices of width x width numbers


def collect(folders: Sequence[Path]) -> Part:
    """Return a study and its runs.

    Args:
        folders: A published study, or the output of `timm-ortho study` or `compare`. In the second case, folders of
            runs may follow that the user trained with `train.py`, with the settings of a run of the study.

    Raises:
        LabError: A folder is not of this kind, or the study plans no run with the settings of a user's run, or two
            runs have the same cell, connection and seed.
    """
    folder, *by_hand = folders
    if (folder / published.STUDY).is_file() and not by_hand:
        study, runs, recorded = published.read(folder)
        return Part.of(study, runs, [], recorded)
    values = read_study(folder)
    study, runs, unfinished = _of_study(folder, values)
    for path in by_hand:
        run = _by_hand(path, folder, values)
        if any(all(other[key] == run[key] for key in ("cell", "connection", "seed")) for other in runs):
            raise LabError(f"{path} is a second run of '{run['connection']}' with seed {run['seed']}: leave one of the "
                           "two out, or train it with another --seed")
        runs.append(run)
        study["seeds"] = sorted({*study["seeds"], run["seed"]})
    return Part.of(study, runs, unfinished)


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
    return {"representation": None, **found.result, "made_with": found.made_with, **_weights(plan.stages[-1].options),
            "history": history(folder, plan), "probe": read_lines(folder / PROBE)[-1:],
            "dynamics": read_lines(folder / RECORDS)}


def _weights(options: Mapping[str, Any]) -> dict[str, bool]:
    """Return {"ema": True} if the trainer evaluates the EMA weights, which replace the plain weights in summary.csv."""
    return {"ema": True} if options.get("model_ema") and not options.get("model_ema_force_cpu") else {}


def add_cka(runs: Sequence[dict], folders: Sequence[Path], baseline: Mapping[str, Any]) -> None:
    """Add `linear_cka` to the `representation` of each run: CKA between the run and the baseline run with its seed.

    The value is None if the baseline run is missing or is the run itself.
    """
    groups = [tables.group_of(run) for run in runs]
    by_seed = {(group, run["seed"]): folder for group, run, folder in zip(groups, runs, folders, strict=True)}
    for group, run, folder in zip(groups, runs, folders, strict=True):
        partner = by_seed.get((tables.baseline_of(dict.fromkeys(groups), group, baseline), run["seed"]), folder)
        cka = None
        if partner != folder:
            theirs, own = features_in(partner), features_in(folder)
            if len(theirs) != len(own):
                raise LabError(f"{folder / FEATURES} has features of {len(own)} images, but {partner / FEATURES} of "
                               f"{len(theirs)}: remove the folder of the wrong one to train the run again")
            cka = representation.linear_cka(theirs, own)
        run["representation"] = {**(run["representation"] or {}), "linear_cka": cka}


def features_in(folder: Path) -> torch.Tensor:
    """Return the features that a run has stored, of shape `[images, width]`."""
    path = folder / FEATURES
    try:
        if not path.is_file():  # to open a pipe would wait for its writer
            raise LabError("there is no such file")
        found = np.lib.format.open_memmap(path, mode="r")  # reads the header, and compares it with the size of the file
        if found.dtype.kind != "f" or found.ndim != 2 or len(found) < 2 or found.shape[1] > _WIDEST:
            raise LabError(f"it has the shape {list(found.shape)} and dtype {found.dtype}, but must have floats of "
                           f"the shape [images, width] with at least 2 images and a width of at most {_WIDEST:,}")
        return torch.from_numpy(found.astype(np.float32))
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise LabError(f"{path} cannot be read ({one_line(error)}): remove {folder} to train the run again") from None


def _by_hand(path: Path, root: Path, values: Mapping[str, Any]) -> dict:
    """Return a run that the user trained with `train.py`, with the cell that it matches."""
    rows = read_history(path, finished=True)
    options = read_options(path) if (path / OPTIONS).is_file() else {}
    if not (rows and options.get("model") and isinstance(options.get("seed"), int)):
        raise LabError(f"{path} is no run of train.py, which has args.yaml (with model and seed) and summary.csv")
    if not all("eval_top1" in row for row in rows):
        raise LabError(f"{path} has epochs without eval_top1 in summary.csv, so there is no accuracy to report")
    own_connection = SUFFIXES.get(suffix_of(options["model"]), "linear")
    connection = (options.get("model_kwargs") or {}).get("connection") or own_connection
    nearest: Optional[list[str]] = None
    for point in values["places"]:
        plan = Variant.read(root / point["run"])
        if point["connection"] != connection or len(plan.stages) > 1:
            continue
        differing = _differing(options, rows, plan)
        if not differing:
            return {"model": options["model"], "cell": point["cell"], "connection": connection,
                    "seed": options["seed"], "dataset": values["study"]["dataset"], "trainer": "train.py",
                    **metrics_of(rows), **_weights(options), "history": rows,
                    "made_with": {"command": f"by hand, in {path}"}}
        nearest = min(nearest or differing, differing, key=len)
    advice = f"; the most similar run differs in {', '.join(nearest)}" if nearest else ""
    raise LabError(f"{path} ({options['model']}, {connection}, {metrics_of(rows)['epochs']} epochs) matches no cell of "
                   f"this study{advice}")


def _differing(options: Mapping[str, Any], rows: Sequence[dict], plan: Variant) -> list[str]:
    """Return the settings in which a user's run differs from a plan, and the plan's settings that train.py lacks.

    Options in `_NOT_COMPARED`, and options that only one of the two has, are not compared. `batch_size` and
    `grad_accum_steps` are among them, because `args.yaml` lacks the number of processes.
    """
    def settings(values: Mapping[str, Any], epochs: int) -> dict[str, Any]:
        kept = {key: None if value in ("", [], {}) else value
                for key, value in values.items() if key not in _NOT_COMPARED}
        kwargs = {key: value for key, value in (values.get("model_kwargs") or {}).items() if key != "connection"}
        return {**kept, "model": base_name(values["model"]), "epochs": epochs, "model_kwargs": kwargs,
                "amp_dtype": values.get("amp_dtype") if values.get("amp") else None}

    planned = plan.stages[0].options
    of_lab = {"hold_out": plan.hold_out, **{key: planned.get(key) for key in ("crop_padding", "rand_augment")}}
    if plan.script is None and planned["dataset"].partition("/")[0] not in STREAMED:
        of_lab |= {key: planned[key] is not None for key in ("train_num_samples", "val_num_samples")}
    here = settings(options, metrics_of(rows)["epochs"])
    there = settings(planned, plan.stages[0].last_epoch)
    differing = [key for key in here if key in there and here[key] != there[key]]
    return [*differing, *(key for key, value in of_lab.items() if value)]


def status(folder: Path) -> str:
    """Return a line for each run of a study, with its state according to its files. The last line counts the states."""
    names = list(dict.fromkeys(point["run"] for point in read_study(folder)["places"]))
    rows = [(name, *plain_lines(state(folder / name))) for name in names]
    counts = Counter(word for _, word, _ in rows)
    return "\n".join([*aligned(rows), ", ".join(f"{count} {word}" for word, count in counts.items()) or "no runs"])


# ---------------------------------------------------------------------------------------------- the comparison
def write_comparison(folder: Path, part: Part) -> None:
    """Write the comparison of each finished run in the output folder of a study."""
    rows = comparison(part)
    split = (part.study.get("data") or {}).get("validation_split")
    for name, cell in {cell["run"]: cell for cell in read_study(folder)["places"]}.items():
        top1 = [{"seed": run["seed"], "top1": run["top1"]} for run in sorted(part.runs, key=lambda run: run["seed"])
                if (run["cell"], run["connection"]) == (cell["cell"], cell["connection"]) and finite(run.get("top1"))]
        found = read_run(folder / name)
        compared = {"split": split, "top1": top1, "rows": rows}
        if found is not None and found.result is not None and found.comparison != compared:
            with work_on(folder / name):
                save(folder / name, replace(found, comparison=compared))


def comparison(part: Part) -> list[dict[str, Any]]:
    """Return the rows of the comparison on a model card; empty if the study is not `timm-ortho compare`."""
    if part.study["name"] != COMPARISON:
        return []
    rows = [tables.plain(entry) for entry in part.entries if entry.measure == "top1" and entry.values]
    return [{"connection": row["cell"]["connection"], "baseline": part.study["baseline"]["connection"],
             "seeds": row["seeds"], "top1_mean": row["mean"], "top1_std": row["std"],
             "difference": row["difference"] and {key: row["difference"][key] for key in
                                                  ("mean", "half_width", "pairs")}}
            for row in rows]
