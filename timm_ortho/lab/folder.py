"""Read and write the folder of a run, which planning, running and reporting share.

| file | written by | contents |
| --- | --- | --- |
| `run.yaml` | the plan | the trainer, the stages with all their options, and the recorded steps |
| `args.yaml` | the plan, timm's `train.py` | the options, as input of `train.py -c` |
| `probe.jsonl` | the lab's loop | norms and cosine of each site on one validation batch, before training and by epoch |
| `records.jsonl` | both trainers | the rows of :func:`timm_ortho.record` |
| `summary.csv`, `last.pth.tar` | both trainers | as timm's `train.py` writes them |
| `sessions.json` | `run` | for each process that trained the run: machine, versions, command, begin, end, error |
| `result.json` | `run`, at the end | the run's metrics; a run without it is unfinished |
| `log.txt` | the launcher | the output of the run's process |

A run that changes its connection during training has a second stage, whose files are in `switched/`.
"""
import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence

import yaml
from filelock import FileLock, Timeout

from .._text import without_nan
from ..runs.folders import json_lines, read_history
from . import LabError, one_line, write_text

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # much faster for plans of many runs
LOG = "log.txt"
PLAN, RESULT, SESSIONS = "run.yaml", "result.json", "sessions.json"


@dataclass(frozen=True)
class Stage:
    """A part of a run that trains with one connection."""

    folder: str  # folder of the options and checkpoints, relative to the run's folder
    options: Mapping[str, Any]  # all of timm's options
    # `weights`: begin with the previous stage's weights, and a new optimizer and schedule (paper, Table 3).
    # `checkpoint`: begin with its whole checkpoint, optimizer and schedule included (Table 10). Empty for stage one.
    begins_with: str = ""
    stop_epoch: Optional[int] = None  # epoch after which the stage ends before its schedule

    @property
    def connection(self) -> str:
        """The connection of the stage."""
        return self.options["model_kwargs"]["connection"]

    @property
    def scheduled_epochs(self) -> int:
        """The epochs of the whole schedule, as timm counts them."""
        options = self.options
        return options["epochs"] + options["cooldown_epochs"] + options["warmup_prefix"] * options["warmup_epochs"]

    @property
    def last_epoch(self) -> int:
        """The number of epochs at the end of the stage, including epochs of its initial checkpoint."""
        return self.stop_epoch or self.scheduled_epochs


@dataclass(frozen=True)
class RunPlan:
    """The stages, trainer and machines of a run."""

    trainer: str  # `lab` for the lab's own loop, or the path of timm's `train.py`
    stages: Sequence[Stage]
    record: Optional[int] = None  # steps between two records of the connections (:func:`timm_ortho.record`)
    representation: bool = False  # whether to measure the features of the validation images
    hold_out: int = 0  # number of training images to validate on, 0 for the validation split
    gpus: int = 0  # GPUs of `train.py` on each node, one process each; 0 for one process on the CPU
    nodes: int = 1

    @property
    def trainer_name(self) -> str:
        """`lab` or `train.py`."""
        return "lab" if self.trainer == "lab" else "train.py"

    @property
    def epochs(self) -> int:
        """The epochs of all stages together."""
        last = self.stages[-1]
        return last.last_epoch + self.offset(last)

    @property
    def switch_epoch(self) -> Optional[int]:
        """The number of epochs before the second stage, None without a second stage."""
        return self.stages[0].last_epoch if len(self.stages) > 1 else None

    @property
    def processes(self) -> int:
        """The number of processes of `train.py` on all nodes."""
        return max(1, self.gpus) * self.nodes

    def whole_batch(self, stage: Stage) -> int:
        """Return the number of images per update of the weights, over all processes."""
        return stage.options["batch_size"] * max(1, stage.options["grad_accum_steps"]) * self.processes

    def with_divided_batch(self) -> "RunPlan":
        """Return the run with each stage's batch divided among processes and accumulated steps."""
        processes, stages = self.processes, []
        for stage in self.stages:
            whole, steps = stage.options["batch_size"], max(1, stage.options["grad_accum_steps"])
            if whole % (processes * steps):
                raise LabError(f"batch_size {whole} is not divisible by {processes * steps} ({processes} processes x "
                               f"grad_accum_steps {steps}): change one of them")
            stages.append(replace(stage, options={**stage.options, "batch_size": whole // (processes * steps)}))
        return replace(self, stages=stages)

    def offset(self, stage: Stage) -> int:
        """Return the number to add to an epoch of the stage to get the epoch of the run."""
        return self.stages[0].last_epoch if stage.begins_with == "weights" else 0

    def write(self, folder: Path) -> None:
        """Create the folder with `run.yaml` and the options of each stage."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLAN, yaml.safe_dump(_plain(asdict(self)), sort_keys=False))
        self.write_options(folder)

    def write_options(self, folder: Path) -> None:
        """Write the `args.yaml` of each stage."""
        for stage in self.stages:
            (folder / stage.folder).mkdir(exist_ok=True)
            write_text(folder / stage.folder / "args.yaml", yaml.safe_dump(_plain(dict(stage.options))))

    @classmethod
    def read(cls, folder: Path) -> "RunPlan":
        """Read the `run.yaml` of a folder."""
        values = read_yaml(folder / PLAN)
        try:
            return cls(**{**values, "stages": [Stage(**stage) for stage in values["stages"]]})
        except (TypeError, KeyError) as error:
            raise LabError(f"{folder / PLAN} is of another version ({one_line(error)}): remove {folder}, or choose "
                           "another --output") from None


def _plain(value: Any) -> Any:
    """Return a value with lists in place of tuples, which YAML does not have."""
    return json.loads(json.dumps(value))


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(without_nan(row), allow_nan=False) + "\n" for row in rows))


def _read(path: Path, parse: Callable[[str], Any], advice: str = " to train the run again") -> Any:
    """Parse a file. A missing or damaged file raises a LabError."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise LabError(f"{path} cannot be read ({one_line(error)}): remove {path.parent}{advice}") from None


def read_lines(path: Path) -> list[dict]:
    """Return the rows of a file of JSON lines without an incomplete last line, [] if the file does not exist."""
    return _read(path, json_lines) if path.is_file() else []


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file, None if it does not exist."""
    return _read(path, json.loads) if path.is_file() else None


def read_yaml(path: Path) -> Any:
    """Return the contents of a YAML file."""
    return _read(path, partial(yaml.load, Loader=_Loader), ", or plan it again")


def history(folder: Path, plan: RunPlan) -> list[dict]:
    """Return a row for each finished epoch of all stages."""
    rows = [{**row, "epoch": row["epoch"] + plan.offset(stage)}
            for stage in plan.stages for row in read_history(folder / stage.folder)]
    return list({row["epoch"]: row for row in rows}.values())


def epochs_done(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of finished epochs. With timm's `val_interval`, some epochs have no row."""
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
    """Lock a run while its process trains it. If another process trains the run, raise a LabError."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=5)  # `state` of another process holds the lock for a moment
    except Timeout:
        last = last_session(folder)
        raise LabError(f"another process trains {folder} ({last.get('pid', '?')} on {last.get('host', '?')}): "
                       "wait for it, or stop it") from None
    except NotImplementedError:  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()


def _is_at_work(folder: Path) -> bool:
    """Return whether a process trains the run, according to the file system's locks."""
    if not (folder / ".lock").exists():
        return False
    try:
        with FileLock(folder / ".lock", timeout=0):
            return False
    except (Timeout, NotImplementedError):
        return True
    except OSError:  # a read-only folder: use the last session
        session = last_session(folder)
        return bool(session) and "end" not in session


def state(folder: Path) -> tuple[str, str]:
    """Return the state of a run and its epochs, error or top-1, from its files alone.

    States are `waiting`, `running`, `stopped`, `failed` and `finished`.
    """
    at_work = _is_at_work(folder)  # check before reading the result: a run that ends in between is `finished`
    result = read_json(folder / RESULT)
    if result is not None:
        return "finished", top1_text(result.get("top1"))
    if not (folder / PLAN).is_file():  # an unfinished run of a study whose finished runs alone were copied
        return "waiting", ""
    plan, session = RunPlan.read(folder), last_session(folder)
    rows = history(folder, plan)
    done = f"epoch {epochs_done(rows)} of {plan.epochs}"
    done += f", {top1_text(rows[-1].get('eval_top1'))}" if rows else ""
    if at_work:
        return "running", done
    if session.get("error"):
        return "failed", with_last_words(folder, session["error"])
    return ("stopped", done) if session else ("waiting", "")


def last_session(folder: Path) -> dict:
    """Return the last session, {} before the first. An interrupted session has no `error`."""
    return (read_json(folder / SESSIONS) or [{}])[-1]


def with_last_words(folder: Path, reason: str) -> str:
    """Return why a run failed, with the last line in its log that was not written by the lab."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    words = next((line.strip()[:300] for line in reversed(lines)
                  if line.strip() and not line.startswith("epoch ") and "timm-ortho: " not in line), "")
    return reason if words in reason else f"{reason}; {words}"


def top1_text(value: Optional[float]) -> str:
    """Return accuracy as text.

    >>> top1_text(93.456)
    'top-1 93.46 %'
    """
    return "top-1 unknown" if value is None else f"top-1 {value:.2f} %"
