"""List timm's architectures that have variants, from `coverage.json`, which `scripts/checks/coverage.py` writes.

Building takes far too long for an import, so the registry is compared with the file: an architecture of a module that
is there has variants unless the file leaves it out, so that what a newer timm adds to a module is there too, and raises
when it is built if it cannot be connected. A module that the file does not know has none; :func:`rows` reports it.
"""
import json
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

from timm.models import list_models, list_modules, model_entrypoint

from ..blocks import specs

FILE = Path(__file__).with_name("coverage.json")
UNKNOWN = "not known to this release of timm_ortho"


class Row(NamedTuple):
    """One module of timm.

    Attributes:
        module: Its name.
        covered: Architectures with variants, and how many sites each has.
        left_out: Architectures without, and why.
    """

    module: str
    covered: Dict[str, int]
    left_out: Dict[str, str]


@cache
def load() -> dict:
    """The file: ``timm``, the release that it was made with, and ``modules``: ``covered`` and ``left_out`` of each."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"timm": None, "modules": {}}


def architectures(module: str) -> List[str]:
    """timm's own architectures of a module: names of variants are no bases."""
    return [name for name in list_models(module=module) if model_entrypoint(name).__module__.startswith("timm.models.")]


def bases() -> List[str]:
    """The architectures of the installed timm that have variants."""
    return [
        name for module, found in load()["modules"].items() if found["covered"]
        for name in list_models(module=module) if name not in found["left_out"]
    ]


def rows() -> List[Row]:
    """Every module of the installed timm, in alphabetical order, with what is there of the file."""
    found = []
    for module in filter(architectures, list_modules()):
        known = load()["modules"].get(module)
        names = architectures(module)
        if known is None:
            found.append(Row(module, {}, dict.fromkeys(names, UNKNOWN)))
            continue
        covered = {name: sites for name, sites in known["covered"].items() if name in names}
        found.append(Row(module, covered, {name: known["left_out"].get(name, UNKNOWN) for name in names
                                           if name not in covered}))
    return found


def libraries() -> Dict[str, Dict[str, List[str]]]:
    """The block classes that :func:`timm_ortho.connect` knows of the other libraries installed here, by module."""
    found: Dict[str, Dict[str, List[str]]] = {}
    for library in ("torchvision", "transformers"):
        if find_spec(library) is None:
            continue
        modules = found[f"{library} {version(library)}"] = {}
        for spec in specs(library):
            module, _, block = spec.name.removeprefix(f"{library}.models.").rpartition(".")
            modules.setdefault(module.partition(".modeling_")[0], []).append(block)
    return found


def cells(row: Row) -> Tuple[str, str, str, str]:
    """A row as it is shown: module, architectures, the fewest and the most sites, what is left out and why."""
    total, counts = len(row.covered) + len(row.left_out), sorted(row.covered.values())
    architectures = f"{len(row.covered)} of {total}" if row.left_out else f"{total}"
    sites = f"{counts[0]} - {counts[-1]}" if len(set(counts)) > 1 else "".join(map(str, counts[:1]))
    by_reason: Dict[str, List[str]] = {}
    for name, why in row.left_out.items():
        by_reason.setdefault(why, []).append(name)
    left_out = [f"{_short(names)}: {why}" if row.covered else why for why, names in by_reason.items()]
    return row.module, architectures, sites, "; ".join(left_out)


def table() -> str:
    """The coverage of the installed timm as a Markdown table."""
    lines = ["| module of timm | architectures | sites | left out |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in rows())])


def _short(names: List[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} architectures"
