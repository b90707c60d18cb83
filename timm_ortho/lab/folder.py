"""The folder of a run: the one thing that planning, launching, training and reporting share.

| file | written by | holds |
| --- | --- | --- |
| `run.yaml` | the plan | who trains it, its stages with all their options, and what is recorded |
| `args.yaml` | the plan, timm's `train.py` | the options, as `train.py -c` takes them |
| `probe.jsonl` | the lab's loop | each site's norms and cosine on one validation batch, at first and after each epoch |
| `records.jsonl` | either | the rows of :func:`timm_ortho.record` |
| `summary.csv`, `last.pth.tar` | either | as timm's `train.py` writes them |
| `sessions.json` | `run` | each time somebody worked on it: machine, versions, command, begin, end, error |
| `result.json` | `run`, at the end | the run's figures; a run without it is not finished |
| `log.txt` | the launcher | what the run's process printed |

A run that changes its connection in mid-training has a second stage, whose files are in `switched/`.
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

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a plan of many runs has many options
LOG = "log.txt"
PLAN, RESULT, SESSIONS = "run.yaml", "result.json", "sessions.json"


@dataclass(frozen=True)
class Stage:
    """One training with one connection."""

    folder: str  # of its options and checkpoints, below the run's
    options: Mapping[str, Any]  # timm's, all of them
    # `weights` of the stage before, under a new optimizer and schedule (paper, Table 3), or its `checkpoint` with
    # everything (Table 10); empty for a stage that begins anew
    begins_with: str = ""
    stop_epoch: Optional[int] = None  # after so many epochs it ends before its schedule does

    @property
    def connection(self) -> str:
        return self.options["model_kwargs"]["connection"]

    @property
    def scheduled_epochs(self) -> int:
        """The epochs of the whole schedule, counted as timm counts them."""
        options = self.options
        return options["epochs"] + options["cooldown_epochs"] + options["warmup_prefix"] * options["warmup_epochs"]

    @property
    def last_epoch(self) -> int:
        """After so many epochs the stage is finished, those of a checkpoint that it begins with counted."""
        return self.stop_epoch or self.scheduled_epochs


@dataclass(frozen=True)
class RunPlan:
    """How a run is trained."""

    trainer: str  # `lab` for the lab's own loop, else the path of timm's `train.py`
    stages: Sequence[Stage]
    record: Optional[int] = None  # steps between two looks at the connections (:func:`timm_ortho.record`)
    representation: bool = False  # whether the features of the validation images are measured at the end
    hold_out: int = 0  # images of the training split to validate on, 0 for the validation split
    gpus: int = 0  # processes of `train.py` on each node, 0 for one on the CPU
    nodes: int = 1

    @property
    def epochs(self) -> int:  # of all stages together
        last = self.stages[-1]
        return last.last_epoch + self.offset(last)

    @property
    def switch_epoch(self) -> Optional[int]:
        """The epoch before which the second stage begins."""
        return self.stages[0].last_epoch if len(self.stages) > 1 else None

    @property
    def processes(self) -> int:
        return max(1, self.gpus) * self.nodes

    def whole_batch(self, stage: Stage) -> int:
        """Images between two updates, of all processes together."""
        return stage.options["batch_size"] * max(1, stage.options["grad_accum_steps"]) * self.processes

    def with_divided_batch(self) -> "RunPlan":
        """The same run with each stage's batch divided among processes and accumulated steps, or a LabError."""
        processes, stages = self.processes, []
        for stage in self.stages:
            whole, steps = stage.options["batch_size"], max(1, stage.options["grad_accum_steps"])
            if whole % (processes * steps):
                raise LabError(f"a batch of {whole} does not divide into {processes * steps} parts ({processes} "
                               f"processes, grad_accum_steps {steps}): choose others")
            stages.append(replace(stage, options={**stage.options, "batch_size": whole // (processes * steps)}))
        return replace(self, stages=stages)

    def offset(self, stage: Stage) -> int:
        """What the epochs of a stage are counted from."""
        return self.stages[0].last_epoch if stage.begins_with == "weights" else 0

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLAN, yaml.safe_dump(_plain(asdict(self)), sort_keys=False))
        self.write_options(folder)

    def write_options(self, folder: Path) -> None:
        """The `args.yaml` of each stage."""
        for stage in self.stages:
            (folder / stage.folder).mkdir(exist_ok=True)
            write_text(folder / stage.folder / "args.yaml", yaml.safe_dump(_plain(dict(stage.options))))

    @classmethod
    def read(cls, folder: Path) -> "RunPlan":
        values = read_yaml(folder / PLAN)
        try:
            return cls(**{**values, "stages": [Stage(**stage) for stage in values["stages"]]})
        except (TypeError, KeyError) as error:
            raise LabError(f"{folder / PLAN} is of another version ({one_line(error)}): remove {folder}, or choose "
                           "another --output") from None


def _plain(value: Any) -> Any:  # with lists for tuples, which YAML does not have
    return json.loads(json.dumps(value))


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows at the end of a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(without_nan(row), allow_nan=False) + "\n" for row in rows))


def _read(path: Path, parse: Callable[[str], Any], advice: str = " to train it anew") -> Any:
    """What `parse` makes of a file; a LabError if that is missing or damaged."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise LabError(f"{path} cannot be read ({one_line(error)}); remove {path.parent}{advice}") from None


def read_lines(path: Path) -> list[dict]:
    """The rows of a file of JSON lines, without a last line that was cut short; none of a file that is not there."""
    return _read(path, json_lines) if path.is_file() else []


def read_json(path: Path) -> Any:
    """What a JSON file holds, None if it is not there."""
    return _read(path, json.loads) if path.is_file() else None


def read_yaml(path: Path) -> Any:
    return _read(path, partial(yaml.load, Loader=_Loader), ", or plan it anew")


def history(folder: Path, plan: RunPlan) -> list[dict]:
    """A row for each epoch that is finished, all stages counted."""
    rows = [{**row, "epoch": row["epoch"] + plan.offset(stage)}
            for stage in plan.stages for row in read_history(folder / stage.folder)]
    return list({row["epoch"]: row for row in rows}.values())


def epochs_done(rows: Sequence[Mapping[str, Any]]) -> int:
    """With timm's `val_interval` not every epoch has a row."""
    return rows[-1]["epoch"] + 1 if rows else 0


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run's epochs come to: accuracy and loss after the last one, which has a row, and the best accuracy."""
    last = rows[-1]
    best = max((row for row in rows if row["eval_top1"] is not None), key=lambda row: row["eval_top1"])
    return {
        "epochs": epochs_done(rows), "top1": last["eval_top1"], "top5": last["eval_top5"], "loss": last["eval_loss"],
        "best_top1": best["eval_top1"], "best_epoch": best["epoch"],
    }


@contextmanager
def work_on(folder: Path) -> Iterator[None]:
    """Inside it nobody else trains the run; a LabError if somebody does."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=5)  # whoever asks for the state of the run holds it for a moment
    except Timeout:
        last = last_session(folder)
        raise LabError(f"another process is at work in {folder} ({last.get('pid', '?')} on {last.get('host', '?')}): "
                       "wait for it, or stop it") from None
    except NotImplementedError:  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()


def _is_at_work(folder: Path) -> bool:
    """Whether a process is training the run, as far as this file system's locks tell."""
    if not (folder / ".lock").exists():
        return False
    try:
        with FileLock(folder / ".lock", timeout=0):
            return False
    except (Timeout, NotImplementedError):
        return True
    except OSError:  # a folder that may only be read: its last session says whether it has ended
        session = last_session(folder)
        return bool(session) and "end" not in session


def state(folder: Path) -> tuple[str, str]:
    """What became of a run so far, from its files alone: `waiting`, `running`, `stopped`, `failed` or `finished`, and
    its epochs, error or top-1.
    """
    at_work = _is_at_work(folder)  # before the result, which the process writes at its end
    result = read_json(folder / RESULT)
    if result is not None:
        return "finished", top1_text(result.get("top1"))
    if not (folder / PLAN).is_file():  # of a study whose finished runs alone were brought here
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
    """What `sessions.json` says of the last session, {} before the first; one that was interrupted has no `error`."""
    return (read_json(folder / SESSIONS) or [{}])[-1]


def with_last_words(folder: Path, reason: str) -> str:
    """Why a run failed, and the last line of its log that somebody else than the lab wrote, if there is one."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    words = next((line.strip()[:300] for line in reversed(lines)
                  if line.strip() and not line.startswith("epoch ") and "timm-ortho: " not in line), "")
    return reason if words in reason else f"{reason}; {words}"


def top1_text(value: Optional[float]) -> str:
    return "top-1 unknown" if value is None else f"top-1 {value:.2f} %"
