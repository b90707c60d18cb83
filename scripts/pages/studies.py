"""Return the pages of studies and comparisons, and the list of studies in docs/evidence.md.

Each study has a page model_cards/studies/study_*.md, and each comparison has a page compare_*.md beside it. All numbers
are from model_cards/results, to which `python -m scripts.publish` adds studies.
"""
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Callable

from timm_ortho.lab.costs import cost_report
from timm_ortho.lab.planning.design import COST_STUDIES, load, shipped
from timm_ortho.lab.reporting.page import Block, Code, Heading, Picture, Text, markdown
from timm_ortho.lab.reporting.published import STUDY, read
from timm_ortho.lab.reporting.report import Part, document, title_of
from timm_ortho.lab.reporting.statistics import detected

from .marked import replaced, table

RESULTS = Path(__file__).parents[2] / "model_cards" / "results"
LEFT_OUT = ("Plots", "Every run", "Method and terms")  # sections of the report that the page omits
CHANCE = "By chance alone, about one interval in twenty excludes zero."


def folders(kind: str = "studies") -> list[Path]:
    """Return the folders of the published studies, or of the published comparisons."""
    return sorted(path.parent for path in (RESULTS / kind).glob(f"*/{STUDY}"))


@cache
def study_of(folder: Path) -> dict[str, Any]:
    return _read(folder)[0]


def _read(folder: Path) -> tuple[Any, Any, Any]:
    """Read a published folder. A study of this package gets its present title, which may be newer than the runs."""
    study, runs, recorded = read(folder)
    if study["name"] in shipped():
        study = {**study, "title": load(study["name"], "smoke").title}
    return study, runs, recorded


def trains(folder: Path) -> bool:
    """Return whether the folder has training runs. Otherwise it has a table of costs."""
    return study_of(folder)["name"] not in COST_STUDIES


@cache
def part(folder: Path) -> Part:
    study, runs, recorded = _read(folder)
    return Part.of(study, runs, [], recorded)


@cache
def summary(folder: Path) -> list[dict[str, Any]]:
    """Return the means of a study with their differences to the baseline. The list is empty for a table of costs."""
    return part(folder).json["summary"] if trains(folder) else []


# ---------------------------------------------------------------------------------------------- the pages
def pages(root: Path) -> dict[Path, Path]:
    """Map the page of each study and comparison to the folder that contains its numbers."""
    prefixes = (("studies", "study"), ("comparisons", "compare"))
    return {root / "model_cards" / "studies" / f"{prefix}_{folder.name}.md": folder
            for kind, prefix in prefixes for folder in folders(kind)}


def texts(root: Path) -> dict[Path, str]:
    evidence = root / "docs" / "evidence.md"
    return {**{page: text(page, folder) for page, folder in pages(root).items()},
            evidence: replaced(evidence, {"studies": listing()})}


def drawings(root: Path) -> dict[Path, Callable[[Path], Any]]:
    return {page.parent / block.path: lambda path, block=block: path.write_text(block.svg, encoding="utf-8")
            for page, folder in pages(root).items() for block in blocks(page, folder) if isinstance(block, Picture)}


def text(page: Path, folder: Path) -> str:
    return markdown(title_of(study_of(folder)), blocks(page, folder))


def blocks(page: Path, folder: Path) -> list[Block]:
    """Return a study's report without the sections in `LEFT_OUT`, and a section that names its folder of numbers."""
    where = f"results/{folder.parent.name}/{folder.name}"
    kept: list[Block] = []
    heading = ""
    study, rows, _ = _read(folder)
    whole = document([part(folder)]) if trains(folder) else cost_report.blocks(study, rows)
    for block in whole:
        if isinstance(block, Heading):
            heading = block.text
        if isinstance(block, Picture):
            block = replace(block, name=page.stem, folder="plots")  # the page's only plot shows the differences
        if heading not in LEFT_OUT:
            kept.append(block)
    text = (f"docs/evidence.md defines the terms. The folder model_cards/{where} contains the numbers. This command "
            "writes the whole report:")
    return [*kept, Heading("Data"), Text(text), Code(f"timm-ortho study report model_cards/{where} --output DIR")]


# ----------------------------------------------------------------------------------------------- the list
def listing() -> str:
    """Return a paragraph on all differences, and a table of the studies, both in Markdown."""
    order = sorted([*shipped(), *COST_STUDIES])
    listed = sorted(folders(), key=lambda folder: (order.index(study_of(folder)["name"]), folder.name))
    compared, apart, adjusted = map(sum, zip(*map(counts, listed), strict=True))
    sentences = (
        f"The studies have {compared} differences to a baseline with a 95 % confidence interval. {apart} of these "
        f"intervals exclude zero. {adjusted} differences are detected after Holm's adjustment within each study. "
        f"{CHANCE}")
    header = ["study", "repeats", "data set, scale, seeds", "differences", "interval excludes zero", "detected"]
    return f"{sentences}\n\n{table(header, map(_line, listed))}"


def counts(folder: Path) -> tuple[int, int, int]:
    """Count the differences with an interval, the intervals that exclude zero, and the detected differences."""
    differences = [entry["difference"] for entry in summary(folder) if entry["difference"]]
    differences = [difference for difference in differences if difference["half_width"] is not None]
    return (len(differences), sum(difference["reading"] in ("higher", "lower") for difference in differences),
            sum(detected(difference["p_holm"]) for difference in differences))


def _line(folder: Path) -> list[str]:
    study, numbers = study_of(folder), counts(folder)
    run_on = f"{study['dataset']}, {study['scale']}, {len(study['seeds'])} seeds" if study["dataset"] else "-"
    return [f"[{study['title']}](../model_cards/studies/study_{folder.name}.md)", study["paper"] or "-", run_on,
            *(map(str, numbers) if numbers[0] else "---")]
