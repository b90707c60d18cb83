"""Train the planned run in FOLDER, or its remaining epochs: `python -m timm_ortho.lab.running.run FOLDER`.

The plan in the folder decides whether the lab's own loop or timm's `train.py` trains the run. A launcher starts this
module in a process for each run.
"""
import argparse
import os
import shlex
import signal
import sys
import traceback
from argparse import Namespace
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Mapping, Optional, Sequence

import numpy as np
import torch
from timm.models import clean_state_dict
from torch import nn

from ... import sites  # registers the variants, also in a process that `timm-ortho` has started
from ..._images import data_config
from ..._text import UserError, error_text, print_line
from ...convert import is_variant
from ...run_folder import (
    FEATURES,
    LAST,
    LOG,
    RunFile,
    check_modules,
    create_model,
    device_name,
    import_modules,
    made_on,
)
from ...weights import WeightsError
from ...weights.files import load_checkpoint
from .. import LabError, one_line, representation, whole_file
from ..data import Source, loaders, open_source
from ..folder import Stage, Variant, epochs_done, history, is_at_work, metrics_of, record, save, work_on
from ..image_folder import NETWORK, check_sources
from . import timm_script
from .loop import Training

REFUSED = 2  # exit status after a UserError other than Died: the launcher does not start the run again


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train the run in a folder, and return the exit status.

    It is 0 if the run is finished, `REFUSED` for a UserError other than `timm_script.Died`, and 1 for any other error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m timm_ortho.lab.running.run", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    parser.add_argument("--train-py", metavar="FILE", help="the script that trains the run, if the plan names a script")
    parser.add_argument("--device-modules", nargs="+", metavar="MODULE", help="modules to import, which the plan names")
    parser.add_argument("--dataset", metavar="NAME", help="data set that may be downloaded or cached")
    for name, effect in NETWORK.items():
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="?", const=True, help=f"allow what {effect}")
    parsed = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that timm_script stops train.py
    try:
        import_modules(parsed.device_modules)
        run(parsed.folder, parsed.threads, parsed.train_py, vars(parsed))
    except UserError as error:
        print_line(f"timm-ortho: {error}")
        return 1 if isinstance(error, timm_script.Died) else REFUSED
    except Exception:  # noqa: BLE001 shown in the log
        traceback.print_exc()
        return 1
    return 0


def run(
        folder: Path, threads: int = 1, train_py: Optional[str] = None,
        named: Mapping[str, Any] = MappingProxyType({})) -> dict:
    """Train a run unless it is finished, and return its result, see `run_folder`.

    If a run has several nodes, the result is empty on all nodes except the first, which writes the run's files.

    Args:
        folder: The folder of the run. Another person may have written its plan, which therefore cannot choose code.
        threads: Number of CPU threads.
        train_py: The script that the plan may run.
        named: timm's options on the command line, which allow the plan to use the network.

    Raises:
        UserError: The run cannot be trained, another process is training it, or its plan names a script, a module or a
            file of weights that could run code, or a download.
    """
    plan = Variant.read(folder)
    _check(plan, folder, train_py, named)
    if plan.nodes > 1 and int(os.environ.get("NODE_RANK", 0)):  # not the first node
        for stage in plan.stages:
            timm_script.train(plan, stage, folder)
        return {}
    with work_on(folder):
        found = record(folder)
        if found.result is not None:
            return dict(found.result)
        torch.set_num_threads(threads)
        plan.write_options(folder)  # train.py may have overwritten args.yaml
        here = _session()
        for key in ("torch", "timm", "timm-ortho"):
            if found.last_session.get(key, here[key]) != here[key]:
                print_line(f"timm-ortho: the run was last trained with {key} {found.last_session[key]} and continues "
                           f"with {here[key]}")
        found = replace(found, sessions=[*found.sessions, here])
        save(folder, found)
        try:
            result = _train(plan, folder)
        except BaseException as caught:
            interrupted = isinstance(caught, (KeyboardInterrupt, SystemExit, timm_script.Died))
            memory = isinstance(caught, torch.cuda.OutOfMemoryError)
            reason = "the device is out of memory: use a smaller batch size" if memory else one_line(caught)
            try:
                save(folder, _with_last(found, end=_now(), error=None if interrupted else reason))
            except LabError as error:  # for example on a full disk. Only print it, because the first error is raised
                print_line(f"timm-ortho: {error}")
            raise
        save(folder, replace(_with_last(found, end=_now()), result=result))
    return result


def _check(plan: Variant, source: Path, train_py: Optional[str], named: Mapping[str, Any]) -> None:
    """Raise a UserError if a plan would run code or start downloads that the user has not chosen."""
    if plan.script not in (None, train_py):
        raise LabError(f"{source} trains with the script {plan.script}: if you trust it, name it too (--train-py "
                       f"{shlex.quote(plan.script)})")
    for options in (stage.options for stage in plan.stages):
        check_modules(options, str(source))
        check_sources(options, str(source), named)
        if not is_variant(options["model"]):  # timm would choose the file of weights, or read a repository on the Hub
            raise LabError(f"{source} trains '{options['model']}', which is no variant: see timm-ortho list")
        for key in ("initial_checkpoint", "pretrained_path", "resume"):  # timm's script would unpickle these files
            if plan.script is not None and options.get(key):
                try:
                    load_checkpoint(options[key])
                except (OSError, WeightsError) as error:
                    raise LabError(f"option '{key}' of {source}: {error_text(error)}") from None


def _session() -> dict[str, Any]:
    """Return the entry in `sessions` for this process. `job` is the id of its Slurm job as squeue lists it."""
    array = [os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK")]
    return {**made_on(), "command": shlex.join(sys.argv), "pid": os.getpid(), "begin": _now(),
            "job": "_".join(array) if all(array) else os.environ.get("SLURM_JOB_ID")}


def _with_last(found: RunFile, **changes: Any) -> RunFile:
    """Change the entry of the last process."""
    *earlier, last = found.sessions
    return replace(found, sessions=[*earlier, {**last, **changes}])


def note_failure(folder: Path, reason: str, pid: Optional[int] = None) -> None:
    """Store why a run failed in the last entry of its sessions.

    The entry is not changed if it already has an error, if `pid` is set and the entry belongs to another process, or if
    another process trains the run.
    """
    if is_at_work(folder):
        return
    with work_on(folder):
        found = record(folder)
        if found.sessions and not found.last_session.get("error") and pid in (None, found.last_session.get("pid")):
            save(folder, _with_last(found, error=reason))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _train(plan: Variant, folder: Path) -> dict:
    source: Optional[Source] = None
    for stage in plan.stages:
        options = _options(plan, stage, folder)
        if plan.script is None:
            source = source or open_source(options, plan.hold_out)
            Training(plan, stage, folder, source, options).train()
        else:
            timm_script.train(plan, stage, folder)
    result, model = _result(plan, folder)
    if plan.representation:
        source, device = source or open_source(options, plan.hold_out), torch.device(options.device)
        _, loader = loaders(options, source, data_config(model, vars(options), source.in_chans), device)
        result["representation"] = _measured_features(model.to(device), loader, folder)
    return {**result, "labels": source.labels if source is not None else None}


def _measured_features(model: nn.Module, loader: Any, folder: Path) -> dict[str, float]:
    """Store the features of the validation images, and return their metrics.

    The report compares them with the features of other runs. They are stored as float16 numbers, divided by their
    largest magnitude, on which CKA does not depend. For the 50,000 images of ImageNet-1k, the file of a ViT-B takes
    77 MB.
    """
    features = representation.features(model, loader).float()
    largest = features.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    with whole_file(folder / FEATURES) as file:
        np.save(file, (features / largest).half().numpy())
    return representation.summary(features)


def _options(plan: Variant, stage: Stage, folder: Path) -> Namespace:
    """Return the options of a stage. If it begins with weights of the first stage, add their path to the options."""
    options = Namespace(**stage.options)
    if stage.begins_with == "weights":
        options.initial_checkpoint = str((folder / plan.stages[0].folder / LAST).absolute())
    return options


def _result(plan: Variant, folder: Path) -> tuple[dict, nn.Module]:
    """Return the run's metrics, and its model with the weights of the last checkpoint."""
    rows = history(folder, plan)
    done = epochs_done(rows)
    if done < plan.epochs:
        raise LabError(f"{folder} has {done} of {plan.epochs} epochs after its training ended: see {LOG}")
    checkpoint = load_checkpoint(folder / plan.stages[-1].folder / LAST)
    options = checkpoint["args"]
    model = create_model({**vars(options), "pretrained": False}, **options.model_kwargs)
    model.load_state_dict(clean_state_dict(checkpoint.get("state_dict_ema") or checkpoint["state_dict"]))
    over_epochs = {"images_per_second": median, "peak_memory": lambda values: int(max(values)), "seconds": sum}
    measured = {key: of(values) for key, of in over_epochs.items()  # train.py does not write these columns
                if (values := [row[f"train_{key}"] for row in rows if row.get(f"train_{key}")])}
    return {
        "model": options.model, "connection": plan.stages[-1].connection, "seed": options.seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "blocks": len({site.layer for site in sites(model)}), "width": model.num_features,
        "lr": options.lr, "batch_size": plan.whole_batch,
        **metrics_of(rows),
        **measured,
        "device": device_name(torch.device(options.device)),
        "trainer": plan.trainer_name,
        "switch_epoch": plan.switch_epoch, "hold_out": plan.hold_out,
    }, model


if __name__ == "__main__":
    sys.exit(main())
