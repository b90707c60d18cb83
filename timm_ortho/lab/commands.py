"""The lab's commands: plan, launch, report. `timm-ortho study` and `timm-ortho compare` call these."""
import shlex
import sys
import webbrowser
from argparse import Namespace
from pathlib import Path
from typing import Optional, Sequence

import torch

from .._text import aligned
from . import LabError, write_json
from .costs import measure as cost
from .folder import RunPlan
from .planning.design import SCALES, Design, has_scale, load, shipped
from .planning.plan import Request, StudyPlan, places_of, plan
from .reporting import report
from .reporting.collect import collect, status
from .running import launch
from .running.launch import Slurm
from .running.loop import build_model
from .running.timm_script import command as train_command

_SMALL = 1_000_000  # parameters

__all__ = [
    "Request", "Slurm", "comparison", "listing", "load", "make_plan", "report_on", "run", "status",
]


def comparison(connections: Sequence[str], recipe: Optional[str]) -> Design:
    """The study that `timm-ortho compare` is: one cell, no paper."""
    if not connections:
        raise LabError("there is nothing to compare: give at least one connection")
    baseline = "linear" if "linear" in connections else connections[0]
    return Design(
        name="compare", scale="small", title="How do these connections compare?", model="", recipe=recipe,
        connections=list(dict.fromkeys(connections)), baseline={"connection": baseline},
        report={"measures": ["top1"]})


def listing() -> str:
    """A line for each shipped study: its name, the paper's table, the runs of each scale, and its title."""
    rows = [("name", "paper", "runs: " + ", ".join(SCALES), "question")]
    for name in shipped():
        designs = {scale: load(name, scale) for scale in SCALES if has_scale(name, scale)}
        counts = ", ".join(run_count(designs[scale]) if scale in designs else "-" for scale in SCALES)
        first = next(iter(designs.values()))
        rows.append((name, first.paper or "-", counts, first.title))
    return "\n".join(aligned(rows))


def run_count(design: Design) -> str:
    if design.kind != "training":
        return "-"
    given = {"dataset": design.paper_data[0]} if design.scale == "paper" and design.paper_data else {}
    variants = design.variants(given, "train.py" if design.scale == "paper" else "lab")
    return str(len(places_of(Request(design, given), variants, range(design.seeds))[1]))


def make_plan(request: Request, slurm: Optional[Slurm] = None) -> StudyPlan:
    """Plans a study, writes its folders, and prints what would run."""
    planned = plan(request)
    planned.write()
    for name, run_plan in planned.runs.items():
        print(f"{name}: {_said(planned.folder / name, run_plan)}")
    print("\n".join([*(f"left out: {line}" for line in planned.left_out), f"planned: {planned.folder}"]))
    if slurm is not None and planned.runs:
        print(f"for sbatch: {slurm.script(planned.folder, planned.runs)}")
    return planned


def _said(folder: Path, run_plan: RunPlan) -> str:
    """A run's commands; with GPUs what becomes of its batch."""
    if run_plan.trainer == "lab":
        return f"python -m timm_ortho.lab.running.run {shlex.quote(str(folder))}"
    commands = " && ".join(shlex.join(train_command(run_plan, stage, folder)) for stage in run_plan.stages)
    stage = run_plan.stages[0]
    return (f"{run_plan.whole_batch(stage)} images an update = {run_plan.processes} processes x "
            f"{max(1, stage.options['grad_accum_steps'])} accumulated x {stage.options['batch_size']}\n    {commands}")


def run(
        request: Request,
        *,
        slurm: Optional[Slurm] = None,
        parallel: int = 1,
        threads: Optional[int] = None,
        opened: bool = False,
) -> int:
    """Trains what is not finished yet, then writes and prints the report.

    Args:
        request: What to run.
        slurm: Where the runs train; this machine without it.
        parallel: Runs at a time on this machine.
        threads: CPU threads of each run. By default one, so that results depend neither on `parallel` nor on the
            machine's load; what trains nothing has PyTorch's own choice, as in `timm-ortho bench`.
        opened: Show the report in the browser at the end.

    Returns:
        The exit status: 0, or 130 and 143 if Ctrl-C or SIGTERM stopped it; a run that could not be finished is a
        LabError.
    """
    if (threads is not None and threads < 1) or parallel < 1:
        raise LabError(f"--threads and --parallel must be at least 1, got {threads} and {parallel}")
    planned = plan(request)
    planned.write()
    for line in planned.left_out:
        print(f"timm-ortho: left out: {line}", file=sys.stderr)
    if request.design.kind != "training":
        _compute(request, planned.folder, threads or torch.get_num_threads())
        print(report_on([planned.folder], opened=opened))
        return 0
    if threads is None and request.design.name == "compare":
        threads = _threads_for(next(iter(planned.runs.values())))
    print("\n".join(_opening(planned)), file=sys.stderr)
    try:
        with launch.sigterm_as_ctrl_c():
            if slurm is not None:
                failed = slurm.train(planned.folder, planned.runs)
            else:
                failed = launch.local(planned.folder, planned.runs, parallel, threads or 1)
    except KeyboardInterrupt as stop:
        print(report_on([planned.folder], opened=opened))
        print("interrupted; the same command again continues where this one stopped", file=sys.stderr)
        return 143 if isinstance(stop, launch.Terminated) else 130
    print(report_on([planned.folder], opened=opened))
    if failed:
        name, reason = next(iter(failed.items()))
        raise LabError(f"{len(failed)} of {len(planned.runs)} runs failed, first {name}: {reason}; the same command "
                       "again tries them anew")
    return 0


def _opening(planned: StudyPlan) -> list[str]:
    """Return the lines that name the runs and their images, before the first run."""
    study, epochs = planned.study, sorted({run_plan.epochs for run_plan in planned.runs.values()})
    lines = [f"runs: {len(planned.runs)} in {planned.folder}; model: {study['model']}; connections: "
             f"{', '.join(study['connections'])}; seeds: {', '.join(map(str, study['seeds']))}; epochs: "
             f"{' or '.join(map(str, epochs))}"]
    data = study.get("data")
    if data:
        size, first = (data[key] and " x ".join(map(str, data[key])) for key in ("image_size", "first_image"))
        resized = f"images of {first} (first image) resized to" if first and first != size else "images of"
        lines.append(
            f"{study['dataset']}: {data['train']} training and {data['validation']} validation images "
            f"({data['validation_split']}), {data['classes']} classes; {resized} {size or 'several sizes'} "
            f"({data['size_from']}), channels: {data['channels']}")
    return lines


def _threads_for(run_plan: RunPlan) -> int:
    """One for a small model, PyTorch's own choice for others.

    A small model gains next to nothing from a second thread, and where other processes want the core, threads that wait
    for each other lose a factor of eight (measured: vit_small of width 64, two threads on two cores, both also in use).
    """
    options = Namespace(**run_plan.stages[0].options)
    model = build_model(options, options.num_classes or 1000, options.in_chans or 3)
    return 1 if sum(parameter.numel() for parameter in model.parameters()) < _SMALL else torch.get_num_threads()


def report_on(folders: Sequence[Path], output: Optional[Path] = None, opened: bool = False) -> str:
    """Writes the report on what is finished, by default to the first folder, and returns its table."""
    output = output or folders[0]
    text = report.write_many(collect(folders), output)
    if opened:
        webbrowser.open((output / "report.html").absolute().as_uri())
    return text


def _compute(request: Request, folder: Path, threads: int) -> None:
    """A study that trains nothing: its rows, computed unless they are there."""
    if (folder / "rows.json").is_file():
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = cost.compute(request.design.kind, request.design.arguments, request.given.get("device"))
        write_json(folder / "rows.json", rows)
    finally:
        torch.set_num_threads(before)
