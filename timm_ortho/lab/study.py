"""`timm-ortho study`: the paper's experiments, each one YAML file, run as grids of the lab's runs and reported.

A study is a grid of cells x connections x seeds. Runs with one seed are a pair: same start, same batches. The grid goes
seed by seed, so that an interrupted study holds whole pairs; runs that several cells share are trained once.

The output folder:

    study.yaml      the settings; a folder that has others, or those of another version, is refused
    <run>/          one folder for each run, see `training`; `<axis>=<value>-<connection>-seed<k>`
    rows.json       instead of runs, the rows of a study that trains nothing
    results.json, report.html, report.md

What the report is given, `study_report.write(study, runs, unfinished, folder) -> str`:

    study = {
        "name": "layer_pattern", "title": "Which blocks carry ...", "paper": "Table 4",
        "table": "layer_pattern",           # key of lab/paper.json; like "paper" "" where no paper has the study
        "kind": "training",                 # or "overhead", "parameters", "gamma": nothing is trained, runs are rows
        "scale": "small", "dataset": "digits", "model": "vit_small",     # or "7 architectures"
        "axes": {"layers": ["none", "0,1", ...]},    # each axis of the grid and its values, in order; {} for none
        "connections": ["linear", "feature"],        # all that occur, in order
        "seeds": [0, 1, 2],
        "baseline": {"layers": "none"},     # what differences are to: the run whose cell and connection are changed to
                                            # these values, all else and the seed the same; {"connection": "linear"}
        "changed": ["epochs: 15 here, 300 in the paper", ...],    # what this scale and data set changed
        "versions": {"timm-ortho": ..., "torch": ..., "timm": ...},
        "command": "timm-ortho study run layer_pattern",
    }
    runs = [{
        "cell": {"layers": "0,1"},          # axis -> value, numbers or text; in a switch study {"switch": "LO"}
        "connection": "feature",            # what the run ends with; for LO that is feature
        "seed": 0,
        "top1", "top5", "loss", "best_top1", "best_epoch", "images_per_second", "peak_memory", "seconds", "epochs",
        "parameters", "model", "device",    # result.json; numbers that JSON does not have are None
        "history": [{"epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr", "images_per_second",
                     "seconds", "peak_memory"}, ...],
        "probe": [{"epochs_done", "sites": [{"layer", "kind", "name", "stream", "parallel", "orthogonal",
                   "cosine"}, ...]}, ...],  # one validation batch, before training and after each epoch
        "dynamics": [{"step", "layer", "kind", "name", "stream", "parallel", "orthogonal", "parallel_share",
                      "orthogonal_share", "cosine", "rho", "theta"}, ...],    # [] where the study does not record
        "representation": {"effective_rank", "spectral_entropy", "feature_std",
                           "linear_cka"} or None,    # linear_cka: with the baseline's run; None for the baseline itself
    }, ...]
    unfinished = ["layers=0,1-feature-seed2", ...]

For the other kinds `runs` are the rows of plain columns that `cost` makes: `overhead`'s, `gamma_table`'s, and for
`parameters` those of `flop_table` for each transformer, which have a column `module`, then those of `parameter_table`,
which have none. `unfinished` is empty, `dataset` and `model` are None.
"""
import hashlib
import json
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import timm
import torch
import yaml

from ..bench import BenchError
from . import DiskError, LabError, cost, study_report, write_json
from .changes import changes
from .checkpoints import disk_errors, read_json, read_result
from .data import Source, open_source
from .design import SCALES, Design, Variant, load, shipped
from .features import add_cka
from .grid import (
    Job,
    base_name,
    check_folders,
    check_model,
    check_run,
    check_threads,
    claimed,
    device_of,
    limited_threads,
    run_job,
    seeds_of,
    writing_report,
)
from .workers import train_all

__all__ = ["Study", "listing", "report", "run"]


@dataclass(frozen=True)
class Study:
    """A study at one scale on one data set.

    Attributes:
        design: What is run.
        given: timm's options of the command line, the data set included.
        folder: Where everything is written.
    """

    design: Design
    given: Mapping[str, Any]
    folder: Path

    @property
    def settings(self) -> dict:
        """What decides the results, but for the seeds, of which there may be more from call to call."""
        design = asdict(self.design)
        del design["seeds"]
        return _as_yaml({"given": dict(self.given), "design": design})

    @cached_property
    def variants(self) -> list[Variant]:
        return list(self.design.variants(self.given))

    def places(self, seeds: Sequence[int]) -> Iterator[tuple[Variant, int, str]]:
        """The grid seed by seed, each place with the name of its run; places with the same options share a run."""
        names: dict[str, str] = {}
        for seed in seeds:
            for variant in self.variants:
                same = json.dumps([vars(variant.options), asdict(variant.extras), seed], sort_keys=True)
                yield variant, seed, names.setdefault(same, variant.name(seed))

    def jobs(self, seeds: Sequence[int]) -> list[Job]:
        """The runs, each once, in the order in which they are trained."""
        jobs: dict[str, Job] = {}
        for variant, seed, name in self.places(seeds):
            options = Namespace(**{**vars(variant.options), "seed": seed})
            jobs.setdefault(name, Job(name, name, options, self.folder / name, variant.extras))
        return list(jobs.values())


def listing() -> str:
    """A line for each shipped study: its name, the paper's table, the runs of each scale, and its title."""
    rows = [("name", "paper", "runs: " + ", ".join(SCALES), "question")]
    for name in shipped():
        designs = [load(name, scale) for scale in SCALES]
        counts = [_run_count(design) for design in designs]
        rows.append((name, designs[0].paper or "-", ", ".join(counts), designs[0].title))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
                     for row in rows)


def _run_count(design: Design) -> str:
    if design.kind != "training":
        return "-"
    study = Study(design, {}, Path())
    return str(len({name for _, _, name in study.places(range(design.seeds))}))


# ----------------------------------------------------------------------------------------------- commands
def run(
        name: str,
        given: Mapping[str, Any],
        *,
        scale: str = "small",
        seeds: Sequence[int] | int | None = None,
        workers: int = 1,
        threads: Optional[int] = None,
        output: Optional[str] = None,
        command: str = "",
) -> int:
    """Trains what is not finished yet, then writes and prints the report.

    Args:
        name: A shipped study, or a file.
        given: timm's options that override the study's; `dataset` and `data_dir` among them.
        scale: `smoke`, `small` or `paper`.
        seeds: The seeds, or their number; None for as many as the scale has.
        workers: Runs at a time, each in a process of its own when there is more than one.
        threads: CPU threads. By default a run has one, so that results depend neither on `workers` nor on the machine's
            load, and what trains nothing has PyTorch's own choice, as in `timm-ortho bench`.
        output: The output folder; None for one below `output/study` that is named after the settings.
        command: The command line, for the report.

    Returns:
        The exit status: 0, or 130 if Ctrl-C stopped it.

    Raises:
        LabError: Something that was given cannot be run, or a run could not be finished.
    """
    check_threads(threads)
    study = _study(name, given, scale, output)
    if study.design.kind != "training":
        return _compute(study, threads or torch.get_num_threads(), command)
    threads = threads or 1
    seeds = seeds_of(study.design.seeds if seeds is None else seeds, study.variants[0].options.seed)
    if not seeds or workers < 1:
        raise LabError("there is nothing to run: give at least one seed and one worker")
    source = _checked_source(study, seeds[0])
    jobs = study.jobs(seeds)
    try:
        with claimed(study.folder, "study", study.settings, {"seeds": seeds}), limited_threads(threads):
            check_folders(jobs)
            with writing_report(study.folder, lambda: report(study.folder, command)):
                _train(jobs, source, workers, threads)
    except KeyboardInterrupt:
        print("interrupted; the same command again continues where this one stopped", file=sys.stderr)
        return 130
    return 0


def find(name: str, given: Mapping[str, Any], scale: str, output: Optional[str]) -> Path:
    """The folder with the results of the same words given to `run`.

    Raises:
        LabError: There is none, or it holds nothing of a study.
    """
    folder = _study(name, given, scale, output).folder
    if not (folder / "study.yaml").is_file():
        raise LabError(f"{folder} has no results of study '{name}': timm-ortho study run {name} makes them")
    return folder


def report(folder: Path, command: str) -> str:
    """Writes the report on what is finished in a study's folder and returns its table; trains nothing."""
    try:
        recorded = yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8"))
        settings = recorded["options"]
        study = Study(Design(**settings["design"]), settings["given"], folder)
    except (yaml.YAMLError, KeyError, TypeError):
        raise LabError(f"{folder / 'study.yaml'} cannot be read: remove {folder}, or choose another --output") from None
    seeds = recorded["seeds"]
    if study.design.kind == "training":
        runs, unfinished = _collect(study, seeds)
    else:
        runs, unfinished = read_json(folder / "rows.json"), []
    return study_report.write(_described(study, seeds, recorded["timm_ortho"], command), runs, unfinished, folder)


def _study(name: str, given: Mapping[str, Any], scale: str, output: Optional[str]) -> Study:
    design = load(name, scale)
    given = {"dataset": "digits", **given, "device": str(device_of(given.get("device")))}
    study = Study(design, given, Path())
    return replace(study, folder=Path(output) if output else _default_folder(study))


def _default_folder(study: Study) -> Path:
    """Named after the settings: the same command finds its folder again, another one never meets it."""
    digest = hashlib.sha256(yaml.safe_dump(study.settings, sort_keys=False).encode()).hexdigest()[:8]
    parts = [study.design.name, _dataset(study).replace("/", "_"), study.design.scale, digest]
    return Path("output", "study", "-".join(parts))


def _dataset(study: Study) -> str:
    return study.given["dataset"] or Path(study.given.get("data_dir") or "images").name


# ------------------------------------------------------------------------------------------------ the runs
def _checked_source(study: Study, seed: int) -> Source:
    """Opens the data set and checks every variant before the first step; completes the variants' options."""
    source = open_source(study.variants[0].options)
    for variant in study.variants:
        variant.options.num_classes, variant.options.in_chans = source.num_classes, source.in_chans
        check_model(variant.options, variant.connection)
        check_model(variant.options, variant.final_connection)
    for job in study.jobs([seed]):
        check_run(job, source)
    return source


def _train(jobs: Sequence[Job], source: Source, workers: int, threads: int) -> None:
    """Trains the jobs that are not finished; one that fails does not keep the others from their end.

    Raises:
        LabError: After all others, what failed; at once, that the disk is full.
    """
    failures: list[str] = []

    def failed(job: Job, error: LabError) -> None:
        if isinstance(error, DiskError):
            raise error
        print(f"timm-ortho: {job.label} failed: {error}", file=sys.stderr)
        failures.append(f"{job.label}: {error}")

    if workers == 1:
        for number, job in enumerate(jobs, 1):
            try:
                run_job(job, source, f"{number}/{len(jobs)}")
            except LabError as error:
                failed(job, error)
    else:
        _train_parallel(jobs, workers, threads, failed)
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise LabError(f"{len(failures)} of {len(jobs)} runs failed{more}: {failures[0]}; the same command again "
                       "tries them anew")


def _train_parallel(jobs: Sequence[Job], workers: int, threads: int, failed: Any) -> None:
    waiting = [job for job in jobs if read_result(job.folder) is None]
    done = len(jobs) - len(waiting)
    if done:
        print(f"{done} of {len(jobs)} runs finished before", file=sys.stderr)

    def tell(job: Job, ended: dict | LabError) -> None:
        nonlocal done
        if isinstance(ended, LabError):
            failed(job, ended)
            return
        done += 1
        print(f"[{done}/{len(jobs)}] {job.label}: top-1 {ended['top1']:.2f} % in {ended['seconds']:.0f} s",
              file=sys.stderr)

    train_all(waiting, workers, threads, tell)


def _compute(study: Study, threads: int, command: str) -> int:
    """A study that trains nothing: its rows, computed unless they are there."""
    rows = study.folder / "rows.json"
    with claimed(study.folder, "study", study.settings, {"seeds": []}), limited_threads(threads):
        if not rows.is_file():
            computed = _rows(study)
            with disk_errors(study.folder):
                write_json(rows, computed)
        with writing_report(study.folder, lambda: report(study.folder, command)):
            pass
    return 0


def _rows(study: Study) -> list[dict]:
    kind, arguments = study.design.kind, dict(study.design.arguments)
    if kind == "gamma":
        return cost.gamma_table(**arguments)
    if kind == "parameters":
        transformers = [name for name in arguments["models"] if name.startswith("vit")]
        return [*(row for name in transformers for row in cost.flop_table(name)), *cost.parameter_table(**arguments)]
    try:
        return cost.overhead(device=study.given["device"], **arguments)
    except BenchError as error:
        raise LabError(str(error)) from None


# --------------------------------------------------------------------------------------------- the results
def _collect(study: Study, seeds: Sequence[int]) -> tuple[list[dict], list[str]]:
    """The finished runs as the report wants them, and the names of the others."""
    runs, unfinished, folders = [], [], []
    for variant, seed, name in study.places(seeds):
        folder = study.folder / name
        result = read_result(folder)
        if result is None:
            unfinished.append(name)
            continue
        records = read_json(folder / "records.json")["rows"] if study.design.record else []
        runs.append({
            "representation": None,
            **result,
            "cell": dict(variant.cell),
            "connection": variant.final_connection,
            "seed": seed,
            "history": read_json(folder / "history.json"),
            "probe": read_json(folder / "dynamics.json"),
            "dynamics": records,
        })
        folders.append(folder)
    if study.design.representation:
        add_cka(runs, folders, study.design.baseline)
    return runs, list(dict.fromkeys(unfinished))


def _described(study: Study, seeds: Sequence[int], version: str, command: str) -> dict:
    design, training = study.design, study.design.kind == "training"
    return {
        "name": design.name,
        "title": design.title,
        "paper": design.paper,
        "table": design.table,
        "kind": design.kind,
        "scale": design.scale,
        "dataset": _dataset(study) if training else None,
        "model": _models(study) if training else None,
        "axes": design.axes,
        "connections": list(dict.fromkeys(v.final_connection for v in study.variants)) if training else [],
        "seeds": list(seeds),
        "baseline": dict(design.baseline),
        "changed": changes(study.design, study.given, seeds),
        "versions": {"timm-ortho": version, "torch": torch.__version__, "timm": timm.__version__},
        "command": command,
    }


def _models(study: Study) -> str:
    names = list(dict.fromkeys(base_name(variant.options.model) for variant in study.variants))
    return names[0] if len(names) == 1 else f"{len(names)} architectures"


def _as_yaml(value: Any) -> Any:
    """As YAML gives it back: lists for tuples."""
    return yaml.safe_load(yaml.safe_dump(value, sort_keys=False))
