"""Plan a run, and write and lock its folder, which planning, running and reporting share.

A run trains one model with one connection, setting and seed. The trainer is the lab's own loop or timm's `train.py`.
:mod:`timm_ortho.run_folder` lists the files of the folder, and reads them. `run.json` is written by planning (the
plan), by `running.run` (its process, and the result), by the launcher (the failure of a killed process, or the job of
Slurm) and by `reporting.collect` (the comparison). A process writes the files of a folder only while it has the lock.

The lab's loop measures `probe.jsonl` on one validation batch, before training and after each epoch.
"""
import json
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence

from filelock import FileLock, Timeout
from timm.scheduler import create_scheduler_v2, scheduler_kwargs

from .._kinds import ANY, COUNT, NOT_NEGATIVE, NULL, NUMBER, SINGLE, TEXT, checked, optional
from .._text import UserError, file_name, whole_lines, without_nan
from .._yaml import YAMLError, dump_yaml, load_written_yaml
from ..run_folder import (
    LOG,
    OPTIONS,
    PROBE,
    RECORDS,
    RUN,
    RunFile,
    read_history,
    read_options,
    read_run,
)
from . import LabError, one_line, refuse_links, write_json, write_text, writing

STUDY = "study.yaml"  # of the output folder of a study
COMPARISON = "compare"  # name of the study that `timm-ortho compare` makes
OF_COMMAND = frozenset({"output", "experiment", "resume"})  # options that `timm_script.command` sets
OF_STAGE = ("folder", "begins_with", "stop_epoch")
_REQUIRED = ("model", "dataset", "sched", "batch_size", "seed", "epochs", "amp", "connection")  # options of a plan
STUDY_KIND = {  # of the key `study` in study.yaml and study.json; the report checks its layout
    **dict.fromkeys("name title paper scale dataset model command".split(), TEXT),
    "connections": [TEXT], "changed": [TEXT], "seeds": [COUNT], "axes": {...: [SINGLE]}, "baseline": {...: SINGLE},
    **optional("table validation", TEXT), **optional("weights", [TEXT]),
    **optional("data", {**optional("image_size first_image", [COUNT]), "validation_split": TEXT,
                        **dict.fromkeys("channels classes train validation".split(), COUNT), ...: SINGLE}),
    **optional("report options", {...: ANY}), **optional("versions", {...: TEXT}), ...: SINGLE}
RUN_KIND = {"cell": {...: SINGLE}, "connection": TEXT, "seed": COUNT}
SITE_KIND = {"layer": COUNT, "kind": TEXT, "name": TEXT, "cosine": (NUMBER, NULL),
             **dict.fromkeys("stream parallel orthogonal".split(), (NOT_NEGATIVE, NULL)),
             **optional("s s_added rho theta", NUMBER), ...: SINGLE}
RECORD_KIND = {"step": COUNT, **SITE_KIND}
_LINES = {PROBE: {"epochs_done": COUNT, "sites": [SITE_KIND]}, RECORDS: RECORD_KIND}
_KINDS, _SITES = 16, 512  # largest numbers in the records of a run; each kind has plots, and each site has panels
OF_PLAN = ("trainer", "record", "representation", "hold_out", "gpus", "nodes")


@dataclass(frozen=True)
class Stage:
    """A part of a run that trains with one connection."""

    folder: str  # folder of the options and checkpoints, relative to the run's folder
    options: Mapping[str, Any]  # all of timm's options
    # Empty for the first stage. With `weights`, the second stage begins with the first stage's weights, a new optimizer
    # and a new schedule (paper, Table 3). With `checkpoint`, it keeps weights, optimizer and schedule (Table 10).
    begins_with: str = ""
    stop_epoch: Optional[int] = None  # number of epochs after which the stage ends; None for the whole schedule

    @property
    def connection(self) -> str:
        """The connection of the stage."""
        return self.options["model_kwargs"]["connection"]

    @property
    def scheduled_epochs(self) -> int:
        """The number of epochs of timm's schedule, which may have several cycles, cooldown and additional warmup."""
        options = Namespace(**{**self.options, "sched_on_updates": False})
        if options.sched == "plateau":  # needs a real optimizer; `step` does not, and has as many epochs as `plateau`
            options.sched = "step"
        try:
            return create_scheduler_v2(Namespace(param_groups=[{"lr": 1.0}]), **scheduler_kwargs(options))[1]
        except (ValueError, TypeError, AttributeError) as error:
            raise LabError(f"timm cannot make a schedule '{options.sched}': {error}: correct the options") from None

    @property
    def last_epoch(self) -> int:
        """Number of finished epochs at the end of the stage. Epochs of the checkpoint that it begins with count too."""
        return self.stop_epoch or self.scheduled_epochs


@dataclass(frozen=True)
class Variant:
    """One cell of a study with one connection and one seed: the plan of a run.

    It has two stages if its connection changes during training. `expand` of a study makes variants of one seed.
    """

    stages: Sequence[Stage]
    trainer: str = "lab"  # `lab` for the lab's own loop, or the path of timm's `train.py`
    record: Optional[int] = None  # steps between two records (:func:`timm_ortho.record`); None for no records
    representation: bool = False  # whether to measure the features of the validation images after training
    hold_out: int = 0  # number of training images to validate on; 0 to use the validation split
    gpus: int = 0  # GPUs per node, each with a process of `train.py`; 0: one process per node, on the option `device`
    nodes: int = 1
    cell: Mapping[str, Any] = field(default_factory=dict)  # axis -> value; empty if the plan was read from a folder
    recipe: str = ""  # name or file of the recipe; empty if the plan was read from a folder

    @property
    def options(self) -> Namespace:
        """A copy of timm's options of the first stage."""
        return Namespace(**self.stages[0].options)

    @property
    def connection(self) -> str:
        """The connection at the end of training."""
        return self.stages[-1].connection

    @property
    def name(self) -> str:
        """The name of the run's folder: `lr=0.001-linear-seed0`."""
        cell = [f"{axis}={label}" for axis, label in self.cell.items()]
        return file_name("-".join([*cell, self.connection, f"seed{self.options.seed}"]))

    def with_options(self, model_kwargs: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> "Variant":
        """Return a variant with other options in all stages. `model_kwargs` are added to those of each stage."""
        stages = [replace(stage, options={**stage.options, **options, "model_kwargs": {
            **stage.options["model_kwargs"], **model_kwargs}}) for stage in self.stages]
        return replace(self, stages=stages)

    def without(self, names: Iterable[str]) -> "Variant":
        """Return a variant without some options."""
        return replace(self, stages=[replace(stage, options={
            key: value for key, value in stage.options.items() if key not in names}) for stage in self.stages])

    @property
    def script(self) -> Optional[str]:
        """The path of timm's `train.py`, None for the lab's own loop."""
        return None if self.trainer == "lab" else self.trainer

    @property
    def trainer_name(self) -> str:
        """The trainer without the path of the script: `lab` or `train.py`."""
        return "lab" if self.script is None else "train.py"

    @property
    def epochs(self) -> int:
        """The number of epochs of all stages together."""
        last = self.stages[-1]
        return last.last_epoch + self.offset(last)

    @property
    def switch_epoch(self) -> Optional[int]:
        """The number of epochs before the second stage, None if the run has one stage."""
        return self.stages[0].last_epoch if len(self.stages) > 1 else None

    @property
    def processes(self) -> int:
        """The number of processes of `train.py` on all nodes."""
        return max(1, self.gpus) * self.nodes

    @property
    def whole_batch(self) -> int:
        """The number of images in one update of the weights, for a variant that comes from `with_divided_batch`."""
        return self.options.batch_size * max(1, self.options.grad_accum_steps) * self.processes

    def with_divided_batch(self) -> "Variant":
        """Return a variant in which `batch_size` is divided among the processes and accumulated steps.

        Before the division, `batch_size` is the number of images in one update of the weights. After it, `batch_size`
        is the number of images of one process in one accumulated step, as both trainers expect.

        Raises:
            LabError: `batch_size` is not divisible.
        """
        processes, whole, steps = self.processes, self.options.batch_size, max(1, self.options.grad_accum_steps)
        if whole % (processes * steps):
            raise LabError(f"batch_size {whole} is not divisible by {processes * steps} ({processes} processes x "
                           f"grad_accum_steps {steps}): change one of them")
        return self.with_options(batch_size=whole // (processes * steps))

    def offset(self, stage: Stage) -> int:
        """Return the number that is added to an epoch of the stage to get the epoch of the run."""
        return self.stages[0].last_epoch if stage.begins_with == "weights" else 0

    def write(self, folder: Path) -> None:
        """Create the folder, with the plan in `run.json`, and with the `args.yaml` of each stage."""
        folder.mkdir(parents=True, exist_ok=True)
        stages = [{key: getattr(stage, key) for key in OF_STAGE} for stage in self.stages]
        plan = {**{key: getattr(self, key) for key in OF_PLAN}, "stages": stages}
        save(folder, replace(read_run(folder) or RunFile(plan), plan=plan))
        self.write_options(folder)

    def write_options(self, folder: Path) -> None:
        """Write the `args.yaml` of each stage."""
        for stage in self.stages:
            (folder / stage.folder).mkdir(exist_ok=True)
            write_text(folder / stage.folder / OPTIONS, dump_yaml(stage.options))

    @classmethod
    def read(cls, folder: Path) -> "Variant":
        """Read a plan from `run.json` and the `args.yaml` of each stage."""
        values = dict(record(folder).plan)
        stages = []
        for stage in values.pop("stages"):
            options = read_options(folder / stage["folder"])
            given = {**options, "connection": (options.get("model_kwargs") or {}).get("connection")}
            lacking = [key for key in _REQUIRED if given.get(key) is None]
            if lacking:
                raise LabError(f"{folder / stage['folder'] / OPTIONS} cannot be read (it lacks the option "
                               f"'{lacking[0]}'): remove {folder} to train the run again")
            if values["trainer"] != "lab":  # train.py has added its command line
                added = {*OF_COMMAND, *(["initial_checkpoint"] if stage["begins_with"] == "weights" else [])}
                options = {key: value for key, value in options.items() if key not in added}
            stages.append(Stage(options=options, **stage))
        return cls(stages=stages, **values)


def record(folder: Path) -> RunFile:
    """Return the contents of a `run.json`. If there is no such file, raise a LabError."""
    found = read_run(folder)
    if found is None:
        raise LabError(f"{folder} has no {RUN}, so this version of timm-ortho did not plan it: use another folder, or "
                       "remove it")
    return found


def save(folder: Path, record: RunFile) -> None:
    """Write `run.json`, which replaces an existing file in one step. The caller has the lock of the folder."""
    write_json(folder / RUN, asdict(record))


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file in JSON Lines format."""
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(without_nan(row), allow_nan=False) + "\n" for row in rows))


def read_as(path: Path, parse: Callable[[str], Any], advice: str = "remove {folder} to train the run again") -> Any:
    """Parse a file. A missing or damaged file, or one without an expected key, raises a LabError with the advice."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, UserError, YAMLError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LabError(f"{path} cannot be read ({one_line(error)}): {advice.format(folder=path.parent)}") from None


def read_lines(path: Path) -> list[dict]:
    """Return the complete lines of a run's JSON Lines file as dicts, [] if the file does not exist."""
    def rows(text: str) -> list[dict]:
        found = checked([json.loads(line) for line in whole_lines(text).splitlines()], [_LINES[path.name]], "row")
        return check_sites(found) if path.name == RECORDS else found

    return read_as(path, rows) if path.is_file() else []


def check_sites(rows: list[dict]) -> list[dict]:
    """Return the rows of records, or raise a LabError if they have too many sites or kinds for a report."""
    sites = {(row["layer"], row["kind"], row["name"]) for row in rows}
    kinds = {kind for _, kind, _ in sites}
    if len(sites) > _SITES or len(kinds) > _KINDS:
        raise LabError(f"it has {len(sites):,} sites of {len(kinds):,} kinds, but at most {_SITES} sites of {_KINDS} "
                       "kinds are allowed")
    return rows


def check_cells(study: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Raise a LabError if the cell of a run is not in the grid of the study."""
    for cell in (run["cell"] for run in runs):
        if cell.keys() != study["axes"].keys() or any(value not in study["axes"][axis] for axis, value in cell.items()):
            raise LabError(f"a run has the cell {cell!r:.60}, but must have one of the study's values for each axis")


def read_study(folder: Path) -> dict:
    """Return the contents of the `study.yaml` of an output folder.

    Raises:
        LabError: The folder has no `study.yaml`, or the file is damaged, or a run is outside the folder.
    """
    if not (folder / STUDY).is_file():
        raise LabError(f"{folder} has no {STUDY}: use the --output of timm-ortho study or compare (study report adds "
                       "runs of train.py to it)")
    kind = {"settings": {...: ANY}, "study": STUDY_KIND, "places": [{**RUN_KIND, "run": TEXT}], "left_out": [TEXT],
            ...: SINGLE}

    def parsed(text: str) -> dict:
        values = checked(load_written_yaml(text), kind, "it")
        check_cells(values["study"], values["places"])
        return values

    values = read_as(folder / STUDY, parsed, "remove {folder}, or choose another --output")
    outside = [point["run"] for point in values["places"] if file_name(point["run"]) != point["run"]]
    if outside:
        raise LabError(f"{folder / STUDY} has a run outside its folder, '{outside[0]}': correct the key 'places'")
    return values


def history(folder: Path, plan: Variant) -> list[dict]:
    """Return the rows of `summary.csv` of all stages, with the epoch counted from the beginning of the run.

    Of several rows for the same epoch, only the last is returned.
    """
    rows = [{**row, "epoch": row["epoch"] + plan.offset(stage)}
            for stage in plan.stages for row in read_history(folder / stage.folder)]
    return list({row["epoch"]: row for row in rows}.values())


def epochs_done(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of finished epochs: the last row's epoch + 1.

    The number of rows may be smaller, because epochs that timm's `val_interval` leaves out have no row.
    """
    return rows[-1]["epoch"] + 1 if rows else 0


def metrics_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a run's metrics from the rows of its epochs: final accuracy and loss, and the best accuracy."""
    last = rows[-1]
    measured = [row for row in rows if row["eval_top1"] is not None]  # None: NaN
    best = max(measured, key=lambda row: row["eval_top1"], default={"eval_top1": None, "epoch": None})
    return {
        "epochs": epochs_done(rows), **{key: last[f"eval_{key}"] for key in ("top1", "top5", "loss")
                                        if f"eval_{key}" in last},  # a user's train.py may measure only some of them
        "best_top1": best["eval_top1"], "best_epoch": best["epoch"],
    }


@contextmanager
def work_on(folder: Path, wait: float = 5) -> Iterator[None]:
    """Lock the folder of a run while this process trains it or writes its files.

    Args:
        folder: The folder of the run.
        wait: Seconds to wait, because a process that calls `state` holds the lock for a moment.

    Raises:
        LabError: Another process trains the run.
    """
    refuse_links(folder)
    with _lock(folder, wait) as free:
        if not free:
            last = record(folder).last_session
            raise LabError(f"another process trains {folder} (process {last.get('pid', '?')} on host "
                           f"{last.get('host', '?')}): wait for it, or stop it")
        yield


@contextmanager
def only_command(root: Path) -> Iterator[None]:
    """Lock the output folder of a study while a command trains its runs. It is created if needed.

    Raises:
        LabError: Another command trains the runs.
    """
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root, 0) as free:
        if not free:
            raise LabError(f"another command trains the runs in {root}: wait for it, or stop it; timm-ortho study "
                           f"status {root} shows how far it is")
        yield


@contextmanager
def _lock(folder: Path, wait: float) -> Iterator[bool]:
    """Lock a folder within the context. The value is False if another process has the lock."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        yield False
        return
    except NotImplementedError:  # a file system without locks
        pass
    try:
        yield True
    finally:
        lock.release()


def is_at_work(folder: Path) -> bool:
    """Return whether a process is training the run, according to the lock in its folder.

    If the lock cannot be tried, return whether the last session in `run.json` has no end.
    """
    lock = folder / ".lock"
    if lock.is_symlink() or not lock.exists():  # older releases of filelock truncate the file that a link names
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # a read-only folder, or a file system without locks
        found = read_run(folder)
        return found is not None and bool(found.sessions) and "end" not in found.last_session


def state(folder: Path) -> tuple[str, str]:
    """Return the state of a run according to its files, and a text about it.

    The state is `waiting`, `running`, `stopped`, `failed` or `finished`. The text has the finished epochs and the
    top-1 accuracy of a running or stopped run, the error of a failed run, and the top-1 accuracy of a finished run.
    """
    at_work = is_at_work(folder)  # before reading the result, or a run that ends in between would look stopped
    if not folder.is_dir():  # for example, the user copied only other runs to this machine
        return "waiting", ""
    found = record(folder)
    if found.result is not None:
        return "finished", top1_text(found.result.get("top1"))
    plan, session = Variant.read(folder), found.last_session
    rows = history(folder, plan)
    done = f"epoch {epochs_done(rows)} of {plan.epochs}"
    done += f", {top1_text(rows[-1].get('eval_top1'))}" if rows else ""
    if at_work:
        return "running", done
    if session.get("error"):
        return "failed", session["error"]
    return ("stopped", done) if session else ("waiting", "")


def with_last_words(folder: Path, reason: str) -> str:
    """Return the reason why a run failed, and the last line in its log that the lab did not write.

    The line is cut after 300 characters, and left out if the reason contains it.
    """
    words = last_line(folder, of_lab=False)[:300]
    return reason if words in reason else f"{reason}; {words}"


def last_line(folder: Path, of_lab: bool) -> str:
    """Return the last line of a run's log that the lab wrote or, if `of_lab` is False, that other code wrote.

    Lines that begin with "epoch" are skipped.
    """
    path = folder / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return next((line.strip().removeprefix("timm-ortho: ") for line in reversed(lines)
                 if line.strip() and not line.startswith("epoch ") and ("timm-ortho: " in line) == of_lab), "")


def top1_text(value: Optional[float]) -> str:
    """Return a top-1 accuracy in percent as text.

    >>> top1_text(93.456)
    'top-1 93.46 %'
    """
    return "top-1 unknown" if value is None else f"top-1 {value:.2f} %"
