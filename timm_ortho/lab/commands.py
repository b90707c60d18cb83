"""The functions behind `timm-ortho study` and `timm-ortho compare`."""
import shlex
import webbrowser
from pathlib import Path
from typing import Optional, Sequence

import torch

from .._text import print_line, print_text
from . import LabError, refuse_links
from .folder import COMPARISON, STUDY, Variant, only_command, read_study
from .planning.design import Design, load
from .planning.plan import StudyPlan, plan
from .planning.request import Request
from .reporting import collect, report
from .reporting.collect import status
from .running import launcher
from .running.slurm import Slurm

# `compare` trains a model with fewer parameters with one thread. A second thread hardly speeds up a small model. If all
# cores are busy, the threads wait for each other: on two busy cores, the training of a vit_small of width 64 took eight
# times as long with two threads as with one.
_SMALL = 1_000_000

# The environment of a run on several nodes, in a job of Slurm. The first node is the master.
_OF_NODE = 'NODE_RANK=$SLURM_NODEID MASTER_ADDR="$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)"'

__all__ = [
    "Request", "Slurm", "comparison", "load", "make_plan", "report_on", "run", "status",
]


def comparison(connections: Sequence[str], recipe: Optional[str]) -> Design:
    """Return the study that `timm-ortho compare` runs: one setting, trained with each connection.

    The baseline is `linear`, or the first connection if `linear` is missing.

    >>> comparison(["linear", "feature"], "digits").baseline
    {'connection': 'linear'}
    """
    if not connections:
        raise LabError("there is nothing to compare: choose at least one connection")
    baseline = "linear" if "linear" in connections else connections[0]
    return Design(
        name=COMPARISON, scale="small", title="How do these connections compare?", model="", recipe=recipe,
        connections=list(dict.fromkeys(connections)), baseline={"connection": baseline},
        report={"measures": ["top1"]})


def make_plan(request: Request, threads: Optional[int] = None) -> StudyPlan:
    """Plan a study, write its folders, and print the commands of its runs, which have `threads` CPU threads each."""
    planned = _planned(request, threads=threads)
    planned.write()
    for name, run_plan in planned.runs.items():
        print_text(f"{name}: {_command_of(planned.folder / name, run_plan, threads)}")
    print_text("\n".join([*(f"left out: {line}" for line in planned.left_out), f"planned: {planned.folder}"]))
    return planned


def _planned(request: Request, **counts: Optional[int]) -> StudyPlan:
    """Plan a study without writing files. `counts` are options of the command line that must be at least 1."""
    for option, value in counts.items():
        if value is not None and value < 1:
            raise LabError(f"--{option} must be at least 1, got {value}")
    planned = plan(request)
    report.layout_of(planned.study)  # checks the layout of the report before the first run
    for path in planned.folder.glob("*"):
        if path.is_dir() or path.name == ".lock":  # other files are replaced in one step
            refuse_links(path, inside=path.name != ".slurm")  # submitit makes links there
    return planned


def _command_of(folder: Path, planned: Variant, threads: Optional[int]) -> str:
    """Return the command that trains a run. For timm's script, a first line shows how the batch is divided."""
    words = [str(folder), *(["--threads", str(threads)] if threads else []), *launcher.words_of([planned])]
    command = f"python -m timm_ortho.lab.running.run {shlex.join(words)}"
    if planned.script is None:
        return command
    if planned.nodes > 1:
        command = (f"in a job of sbatch --nodes {planned.nodes} --ntasks-per-node 1 --gpus-per-node {planned.gpus}, by "
                   f"srun:\n    {_OF_NODE} {command}")
    options = planned.options
    return (f"{planned.whole_batch} images per update = {planned.processes} processes x "
            f"{max(1, options.grad_accum_steps)} accumulated x {options.batch_size}\n    {command}")


def run(
        request: Request,
        *,
        slurm: Optional[Slurm] = None,
        parallel: int = 1,
        threads: Optional[int] = None,
        opened: bool = False,
) -> int:
    """Train the unfinished runs of a study, then write and print the report.

    Args:
        request: The study and its options.
        slurm: Submit the runs to this Slurm cluster, and return. By default, they are trained on this machine.
        parallel: Number of simultaneous runs on this machine.
        threads: Number of CPU threads of each run on this machine. The default is one, so that results depend neither
            on `parallel` nor on the machine's load. `timm-ortho compare` uses PyTorch's default for large models.
        opened: Open the report in the browser at the end.

    Returns:
        The exit status: 0 if all runs are finished, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        LabError: The study cannot be run, or a run failed.
    """
    planned = _planned(request, threads=threads, parallel=parallel)
    with only_command(planned.folder):
        planned.write()
        for line in (*(f"timm-ortho: left out: {reason}" for reason in planned.left_out), *_opening(planned)):
            print_line(line)
        if slurm is not None:
            print_text(f"{slurm.submit(planned.folder, planned.runs)}: timm-ortho study status {planned.folder} shows "
                       f"their state, timm-ortho study report {planned.folder} reports them")
            return 0
        if threads is None and request.design.is_comparison and planned.parameters >= _SMALL:
            threads = torch.get_num_threads()
        return _trained(planned, parallel, threads or 1, opened)


def _trained(planned: StudyPlan, parallel: int, threads: int, opened: bool) -> int:
    """Train the runs on this machine, print the report, and return the exit status. See `run`."""
    try:
        with launcher.sigterm_as_ctrl_c():
            failed = launcher.local(planned.folder, planned.runs, parallel, threads)
    except KeyboardInterrupt as stop:
        print_text(report_on([planned.folder], opened=opened))
        print_line("interrupted: the same command continues from here")
        return 143 if isinstance(stop, launcher.Terminated) else 130
    print_text(report_on([planned.folder], opened=opened))
    if failed:
        name, reason = next(iter(failed.items()))
        raise LabError(f"{len(failed)} of {len(planned.runs)} runs failed, first {name}: {reason}; the same command "
                       "tries them again")
    return 0


def _opening(planned: StudyPlan) -> list[str]:
    """Return the lines that describe the runs and their images. They are printed before the first run."""
    study, epochs = planned.study, sorted({run_plan.epochs for run_plan in planned.runs.values()})
    seeds = ", ".join(map(str, study["seeds"]))
    if len(study["seeds"]) > 20:
        seeds = f"{len(study['seeds'])}, from {min(study['seeds'])} to {max(study['seeds'])}"
    runs = (f"runs: {len(planned.runs)} in {planned.folder}; model: {study['model']}; data: {study['dataset']}; "
            f"connections: {', '.join(study['connections'])}; seeds: {seeds}; epochs: "
            f"{' or '.join(map(str, epochs))}")
    return [runs, *filter(None, [" ".join(report.of_data(report.layout_of(study)))])]


def report_on(folders: Sequence[Path], output: Optional[Path] = None, opened: bool = False) -> str:
    """Write the report of all finished runs of a study, and return its main table as text.

    A report in the output folder of a study also writes the comparison into the `run.json` of the runs in this folder.

    Args:
        folders: The output folder of a study or a published study, and folders of further runs, see
            `reporting.collect`.
        output: Folder of the report. The default is the first of `folders`.
        opened: Open the report in the browser.
    """
    folder, output = folders[0], output or folders[0]
    own = (folder / STUDY).is_file() and folder.resolve() == output.resolve()  # other folders may be read-only
    if own:
        refuse_links(*(folder / point["run"] for point in read_study(folder)["places"]))
    part = collect.collect(folders)
    text = report.write(part, output)
    if own:
        collect.write_comparison(folder, part)
    if opened:
        webbrowser.open((output / "report.html").absolute().as_uri())
    return text
