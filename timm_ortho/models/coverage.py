"""List the architectures of timm that have variants.

``python -m scripts.checks.survey`` builds every architecture (too slow at import time) and writes
``coverage.json``. If the file lists any ``covered`` architecture for a module of timm, all architectures of this module
have variants, except the names under ``left_out``. This includes architectures that a newer timm adds.
"""
import json
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Tuple

from timm.models import list_models, list_modules, model_entrypoint

from .._text import did_you_mean
from ..blocks import specs
from ..convert import base_name, is_variant

FILE = Path(__file__).with_name("coverage.json")
UNKNOWN = "not known to this release of timm_ortho"


class ModuleCoverage(NamedTuple):
    """Coverage of one module of timm."""

    module: str
    covered: Dict[str, int]  # architecture with variants -> number of sites
    left_out: Dict[str, str]  # architecture without variants -> reason; UNKNOWN if coverage.json does not list it
    before_norm: Dict[str, int]  # architecture -> number of sites whose sum a norm of the block reads next, if any


@cache
def load() -> dict:
    """Return ``coverage.json``: the release of ``timm``; ``covered``, ``left_out`` and ``before_norm`` by module."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def architectures(module: str) -> List[str]:
    """Return the architectures that timm itself defines in a module. Variants of this package are omitted."""
    return [name for name in list_models(module=module) if model_entrypoint(name).__module__.startswith("timm.models.")]


def bases() -> List[str]:
    """Return the architectures of the installed timm that have variants.

    >>> "vit_base_patch16_224" in bases()
    True
    """
    return [
        name for module, known in load()["modules"].items() if known["covered"]
        for name in list_models(module=module) if name not in known["left_out"]
    ]


def timm_modules() -> List[ModuleCoverage]:
    """Return the coverage of every module of the installed timm, in alphabetical order."""
    modules = []
    for module in filter(architectures, list_modules()):
        known = load()["modules"].get(module, {"covered": {}, "left_out": {}, "before_norm": {}})
        names = architectures(module)
        covered = {name: sites for name, sites in known["covered"].items() if name in names}
        left_out = {name: known["left_out"].get(name, UNKNOWN) for name in names if name not in covered}
        before_norm = {name: sites for name, sites in known["before_norm"].items() if name in covered}
        modules.append(ModuleCoverage(module, covered, left_out, before_norm))
    return modules


def why_left_out(name: str) -> str:
    """Return text to append to a message: why an architecture of timm has no variants; empty for any other name.

    >>> why_left_out("vgg11")
    '; vgg11 has no variants: no residual additions'
    """
    reasons = (row.left_out.get(name) for row in timm_modules())
    return next((f"; {name} has no variants: {reason}" for reason in reasons if reason and reason != UNKNOWN), "")


def similar_variants(pattern: str) -> str:
    """Return text to append to a message about an unknown variant: a reason, similar names, or how to list all."""
    variants = [name for name in list_models() if is_variant(name)]
    return why_left_out(base_name(pattern)) or did_you_mean(pattern.strip("*"), variants, 3) or (
        "; timm-ortho list '*' lists all variants")


def libraries() -> Dict[str, Dict[str, List[str]]]:
    """Return the supported block classes of torchvision and transformers: library and version -> module -> names."""
    known: Dict[str, Dict[str, List[str]]] = {}
    for library in ("torchvision", "transformers"):
        if find_spec(library) is None:
            continue
        modules = known[f"{library} {version(library)}"] = {}
        for spec in specs(library):
            module, _, block = spec.name.removeprefix(f"{library}.models.").rpartition(".")
            modules.setdefault(module.partition(".modeling_")[0], []).append(block)
    return known


COLUMNS = ("module of timm", "architectures", "sites", "with norm", "left out")


def cells(row: ModuleCoverage) -> Tuple[str, ...]:
    """Return the cells of a table row, see ``COLUMNS``."""
    total = len(row.covered) + len(row.left_out)
    architectures = f"{len(row.covered)} of {total}" if row.left_out else f"{total}"
    sites = _range(row.covered.values())
    before_norm = _range(row.before_norm.get(name, 0) for name in row.covered) if row.before_norm else ""
    by_reason: Dict[str, List[str]] = {}
    for name, reason in row.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    left_out = [f"{_listed(names)}: {reason}" if row.covered else reason for reason, names in by_reason.items()]
    return row.module, architectures, sites, before_norm, "; ".join(left_out)


def _range(counts: Iterable[int]) -> str:
    distinct = sorted(set(counts))
    return " - ".join(map(str, distinct[:1] + distinct[1:][-1:]))


def _listed(names: List[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} architectures"
