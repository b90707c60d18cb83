"""Read the files of studies, and list the studies of this package. No torch is needed, so `study list` is quick."""
import re
from pathlib import Path
from typing import Any, Mapping, Sequence

from ..._text import aligned, did_you_mean
from .. import LabError, read_user_yaml, shipped_files

SCALES = ("smoke", "small", "paper")


def shipped() -> dict[str, Path]:
    """Return the files of the studies in this package, by name."""
    return shipped_files("studies")


def read(name: str, extending: Sequence[Path] = ()) -> Any:
    """Return the contents of a study's file, merged with the contents of the studies that it extends.

    Args:
        name: Name of a study of this package, or a YAML file.
        extending: Files of the studies that extend this study, to detect a study that extends itself.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else shipped().get(name)
    if path is None or not path.is_file():
        if name.endswith((".yaml", ".yml")) or "/" in name:
            raise LabError(f"there is no file {name}: a study of your own is a YAML file, and timm-ortho study list "
                           "has the names of the others")
        raise LabError(f"there is no study '{name}'{did_you_mean(name, shipped())} (see timm-ortho study list)")
    values = read_user_yaml(path, f"study '{path.stem}'")
    if isinstance(values, dict) and "extends" in values:
        base = str(values.pop("extends"))
        if path.resolve() in extending:
            raise LabError(f"study '{path.stem}' extends itself")
        below = str(path.parent / base) if base.endswith((".yaml", ".yml")) else base
        below = read(below, [*extending, path.resolve()])
        if not isinstance(below, dict):
            raise LabError(f"study '{base}', extended by study '{path.stem}', must be a mapping, not {below!r}")
        values = merged(below, values)
    return values


def listing() -> str:
    """Return a line for each study: its name, the paper's table, the number of runs at each scale, and its question.

    The comment at the top of a file has the numbers of runs.
    """
    rows = [("name", "paper", "runs: " + ", ".join(SCALES), "question")]
    for name, file in shipped().items():
        values = read(name)
        header = " ".join(file.read_text(encoding="utf-8").replace("#", " ").split())
        runs = dict(re.findall(r"Scale (\w+): (\d+) runs?", header))
        counts = ", ".join(runs.get(scale, "?") if scale in values["scales"] else "-" for scale in SCALES)
        rows.append((name, values.get("paper") or "-", counts, values["title"]))
    return "\n".join(aligned(rows))


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings merged recursively, with the values of `above` where both have a key."""
    values = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(values.get(key), dict)
        values[key] = merged(values[key], value) if both else value
    return values
