"""Read and write the folder of a run, which planning, running and reporting share.

A run trains one model with one connection, setting and seed. The trainer is the lab's own loop or timm's `train.py`.
The run's folder has these files:

| file | written by | contents |
| --- | --- | --- |
| `run.yaml` | planning | a `RunPlan`: the trainer, and the stages of the training with all their options |
| `args.yaml` | planning, timm's `train.py` | the options, as input of `train.py -c` |
| `probe.jsonl` | the lab's loop | squared norms and cosine of stream and branch output at each residual addition |
| `records.jsonl` | both trainers | the rows of :func:`timm_ortho.record` |
| `summary.csv`, `last.pth.tar` | both trainers | each epoch's metrics and the last checkpoint, as in `train.py` |
| `sessions.json` | `running.run` | machine, versions, command, begin, end and error of each training process |
| `result.json` | `running.run` | the run's metrics, written when the run is finished |
| `card.json` | planning, `running.run`, `reporting.card_file` | values of the model card, see `runs.card_values` |
| `log.txt` | the launcher | the output of the run's process |

The lab's loop measures `probe.jsonl` on one validation batch, before training and after each epoch.

A run that changes its connection during training has a second stage. The second stage's `args.yaml`, `summary.csv`,
`last.pth.tar` and `card.json` are in `switched/`.
"""
import json
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence

from filelock import FileLock, Timeout
from timm.scheduler import create_scheduler_v2, scheduler_kwargs

from .._text import finite, without_nan
from .._yaml import YAMLError, dump_yaml, load_written_yaml
from ..runs.card_values import CARD, CardValues
from ..runs.folders import json_lines, read_history
from ..runs.provenance import PRIVATE
from . import LabError, one_line, refuse_links, write_json, write_text, writing

LOG = "log.txt"
PLAN, RESULT, SESSIONS = "run.yaml", "result.json", "sessions.json"
SWITCHED = "switched"  # folder of the second stage


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
        except ValueError as error:
            raise LabError(f"timm cannot make a schedule '{options.sched}': {error}: correct the options") from None

    @property
    def last_epoch(self) -> int:
        """Number of finished epochs at the end of the stage. Epochs of the checkpoint that it begins with count too."""
        return self.stop_epoch or self.scheduled_epochs


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run: its stages, its trainer, and its numbers of GPUs and nodes."""

    trainer: str  # `lab` for the lab's own loop, or the path of timm's `train.py`
    stages: Sequence[Stage]
    record: Optional[int] = None  # steps between two records (:func:`timm_ortho.record`); None for no records
    representation: bool = False  # whether to measure the features of the validation images after training
    hold_out: int = 0  # number of training images to validate on; 0 to use the validation split
    gpus: int = 0  # GPUs per node, each with a process of `train.py`; 0: one process per node, on the option `device`
    nodes: int = 1

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

    def whole_batch(self, stage: Stage) -> int:
        """Return the number of images in one update of the weights, over all processes and accumulated steps.

        The plan must come from `with_divided_batch`.
        """
        return stage.options["batch_size"] * max(1, stage.options["grad_accum_steps"]) * self.processes

    def with_divided_batch(self) -> "RunPlan":
        """Return a plan in which `batch_size` is divided among the processes and accumulated steps.

        Before the division, `batch_size` is the number of images in one update of the weights. After it, `batch_size`
        is the number of images of one process in one accumulated step, as both trainers expect.

        Raises:
            LabError: `batch_size` is not divisible.
        """
        processes, stages = self.processes, []
        for stage in self.stages:
            whole, steps = stage.options["batch_size"], max(1, stage.options["grad_accum_steps"])
            if whole % (processes * steps):
                raise LabError(f"batch_size {whole} is not divisible by {processes * steps} ({processes} processes x "
                               f"grad_accum_steps {steps}): change one of them")
            stages.append(replace(stage, options={**stage.options, "batch_size": whole // (processes * steps)}))
        return replace(self, stages=stages)

    def offset(self, stage: Stage) -> int:
        """Return the number that is added to an epoch of the stage to get the epoch of the run."""
        return self.stages[0].last_epoch if stage.begins_with == "weights" else 0

    def write(self, folder: Path) -> None:
        """Create the folder, with `run.yaml`, and with the `args.yaml` and `card.json` of each stage."""
        refuse_links(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLAN, dump_yaml(asdict(self), sort_keys=False))
        self.write_options(folder)
        if not (folder / CARD).is_file():
            self.write_card(folder)

    def write_options(self, folder: Path) -> None:
        """Write the `args.yaml` of each stage."""
        for stage in self.stages:
            (folder / stage.folder).mkdir(exist_ok=True)
            write_text(folder / stage.folder / "args.yaml", dump_yaml(stage.options))

    def write_card(self, folder: Path, result: Optional[Mapping[str, Any]] = None, **of_study: Any) -> None:
        """Write the `card.json` of each stage, which refers to the last stage.

        Args:
            folder: The folder of the run.
            result, of_study: See `card_values`. None for an unfinished run.
        """
        refuse_links(folder)
        card = CardValues(finished=False) if result is None else card_values(result, **of_study)
        for stage in self.stages:
            last = "." if stage is self.stages[-1] else self.stages[-1].folder
            write_json(folder / stage.folder / CARD, asdict(replace(card, stage=last)))

    @classmethod
    def read(cls, folder: Path) -> "RunPlan":
        """Read the plan in the `run.yaml` of a folder."""
        values = read_yaml(folder / PLAN)
        try:
            plan = cls(**{**values, "stages": [Stage(**stage) for stage in values["stages"]]})
        except (TypeError, KeyError) as error:
            raise LabError(f"{folder / PLAN} is from another version of timm-ortho ({one_line(error)}): "
                           f"remove {folder}, or choose another --output") from None
        outside = [stage.folder for stage in plan.stages if stage.folder not in (".", SWITCHED)]
        if outside:
            raise LabError(f"{folder / PLAN} has a stage in another folder, '{outside[0]}': remove {folder}")
        return plan


def card_values(result: Mapping[str, Any], **of_study: Any) -> CardValues:
    """Return the values of a run's model card.

    Args:
        result: The contents of the run's `result.json`.
        of_study: The values that need all runs of the study: `top1`, `split` and `comparison`.
    """
    top1 = {result["seed"]: result["top1"]} if finite(result.get("top1")) else {}
    made = {key: value for key, value in (result.get("made_with") or {}).items() if key not in PRIVATE}
    commit, sessions = made.pop("commit", None), made.pop("continued", None)
    if sessions:  # only the count: each session has its own host, process and command
        made["continued"] = f"{len(sessions)} time{'s' * (len(sessions) > 1)}"
    made.update(commit=commit, device=result.get("device"))
    return CardValues(**{
        "trainer": result.get("trainer", "train.py"), "labels": result.get("labels") or (), "top1": top1,
        "made_with": {key: value for key, value in made.items() if value}, **of_study})


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file in JSON Lines format."""
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(without_nan(row), allow_nan=False) + "\n" for row in rows))


def read_as(path: Path, parse: Callable[[str], Any], advice: str = "remove {folder} to train the run again") -> Any:
    """Parse a file. A missing or damaged file, or one without an expected key, raises a LabError with the advice."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"{path} cannot be read ({one_line(error)}): {advice.format(folder=path.parent)}") from None


def read_lines(path: Path) -> list[dict]:
    """Return the complete lines of a JSON Lines file as dicts, [] if the file does not exist."""
    return read_as(path, json_lines) if path.is_file() else []


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file, None if it does not exist."""
    return read_as(path, json.loads) if path.is_file() else None


def read_yaml(path: Path, advice: str = "remove {folder}, and plan the runs again") -> Any:
    """Return the contents of a YAML file that a program wrote. The error for a damaged file ends with the advice."""
    return read_as(path, load_written_yaml, advice)


def history(folder: Path, plan: RunPlan) -> list[dict]:
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
    best = max((row for row in rows if row["eval_top1"] is not None), key=lambda row: row["eval_top1"])
    return {
        "epochs": epochs_done(rows), "top1": last["eval_top1"], "top5": last["eval_top5"], "loss": last["eval_loss"],
        "best_top1": best["eval_top1"], "best_epoch": best["epoch"],
    }


@contextmanager
def work_on(folder: Path) -> Iterator[None]:
    """Lock the folder of a run while this process trains it. If another process trains the run, raise a LabError."""
    refuse_links(folder)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=5)  # a process that calls `state` holds the lock for a moment
    except Timeout:
        last = last_session(folder)
        raise LabError(f"another process trains {folder} (process {last.get('pid', '?')} on host "
                       f"{last.get('host', '?')}): wait for it, or stop it") from None
    except NotImplementedError:  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()


def is_at_work(folder: Path) -> bool:
    """Return whether a process is training the run, according to the lock in its folder.

    If the lock cannot be tried, return whether the last session in `sessions.json` has no end.
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
        session = last_session(folder)
        return bool(session) and "end" not in session


def state(folder: Path) -> tuple[str, str]:
    """Return the state of a run according to its files, and a text about it.

    The state is `waiting`, `running`, `stopped`, `failed` or `finished`. The text has the finished epochs and the
    top-1 accuracy of a running or stopped run, the error of a failed run, and the top-1 accuracy of a finished run.
    """
    at_work = is_at_work(folder)  # before reading the result, or a run that ends in between would look stopped
    result = read_json(folder / RESULT)
    if result is not None:
        return "finished", top1_text(result.get("top1"))
    if not (folder / PLAN).is_file():  # for example, the user copied only other runs to this machine
        return "waiting", ""
    plan, session = RunPlan.read(folder), last_session(folder)
    rows = history(folder, plan)
    done = f"epoch {epochs_done(rows)} of {plan.epochs}"
    done += f", {top1_text(rows[-1].get('eval_top1'))}" if rows else ""
    if at_work:
        return "running", done
    if session.get("error"):
        return "failed", session["error"]
    return ("stopped", done) if session else ("waiting", "")


def last_session(folder: Path, first: int = 0) -> dict:
    """Return the entry in `sessions.json` of the last process that trained the run, {} if there was none.

    Entries before the index `first` are ignored. The entry has an `error` only if the run failed, not if the user
    interrupted it.
    """
    return [{}, *(read_json(folder / SESSIONS) or [])[first:]][-1]


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
