"""Read `card.json`: the values on the model card of a run of `timm-ortho compare` or `study` that timm's files lack.

The lab writes this file beside each `args.yaml`: unfinished with the plan of the run, again at the end of the run, and
again with the report of its study. Another person may have written the file, so all its values are checked.
"""
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from .._text import UserError, error_text, file_name

CARD = "card.json"
LARGEST = 2**20  # bytes; the largest file has the names of ImageNet's classes, 30 kB


class RunError(UserError, ValueError):
    """A training run cannot be read. The message is one line that names the problem and what to do."""


@dataclass(frozen=True)
class CardValues:
    """Values of a run that a model card shows. The defaults are those of a run of timm's `train.py`.

    Attributes:
        finished: Whether the run is finished.
        stage: Folder of the last checkpoint, relative to this file. A run that changes its connection has two stages,
            and its second stage is in a subfolder.
        trainer: `lab` for the lab's own loop, or `train.py`.
        split: Name of the split or folder of the validation images. None: the option `val_split`.
        labels: Names of the classes; empty if they are unknown.
        made_with: Versions, machine, command, commit and device.
        top1: Top-1 in percent after the last epoch, by seed, for all finished runs that differ only in the seed.
        comparison: Rows of the table of `timm-ortho compare`; empty if the run is not part of a comparison.
    """

    finished: bool = True
    stage: str = "."
    trainer: str = "train.py"
    split: Optional[str] = None
    labels: Sequence[str] = ()
    made_with: Mapping[str, str] = field(default_factory=dict)
    top1: Mapping[int, float] = field(default_factory=dict)
    comparison: Sequence[Mapping[str, Any]] = ()


def read_card_values(folder: Path) -> CardValues:
    """Return the values in the `card.json` of a folder, the defaults if there is no such file.

    Raises:
        RunError: The file is damaged, larger than `LARGEST`, or has values of other types.
    """
    path = folder / CARD
    if not path.is_file():
        return CardValues()
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        return _checked(json.loads(content))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({error_text(error, named=True)}): timm-ortho study report writes it "
                       "again; remove it if timm-ortho did not write it") from None


def _checked(values: Mapping[str, Any]) -> CardValues:
    if values["stage"] != "." and file_name(values["stage"]) != values["stage"]:
        raise ValueError(f"the stage '{values['stage']}' is not a folder in it")
    if not shlex.split(values["made_with"].get("command", "timm-ortho")):
        raise ValueError("the command is empty")
    return CardValues(
        finished=bool(values["finished"]),
        stage=values["stage"],
        trainer=str(values["trainer"]),
        split=_optional(str, values["split"]),
        labels=[str(name) for name in values["labels"]],
        made_with={str(key): str(value) for key, value in values["made_with"].items()},
        top1={int(seed): _number(value) for seed, value in values["top1"].items()},
        comparison=[
            {"connection": str(row["connection"]), "baseline": str(row["baseline"]),
             "seeds": [int(seed) for seed in row["seeds"]], "top1_mean": _number(row["top1_mean"]),
             "top1_std": _optional(_number, row["top1_std"]), "difference": _optional(_difference, row["difference"])}
            for row in values["comparison"]],
    )


def _difference(value: Mapping[str, Any]) -> dict[str, Any]:
    return {"mean": _number(value["mean"]), "half_width": _optional(_number, value["half_width"]),
            "pairs": int(value["pairs"])}


def _optional(kind: Any, value: Any) -> Any:
    return None if value is None else kind(value)


def _number(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)
