"""Write the table of architectures in docs/coverage.md from the file that `scripts.checks.survey` writes."""
from pathlib import Path

from timm_ortho.models import coverage

from .marked import replaced


def texts(root: Path) -> dict[Path, str]:
    page = root / "docs" / "coverage.md"
    return {page: replaced(page, {"coverage": table()})}


def table() -> str:
    """Return Markdown: the number of covered architectures, and a table of timm's modules."""
    rows = coverage.timm_modules()
    covered, left_out = sum(len(row.covered) for row in rows), sum(len(row.left_out) for row in rows)
    total = (f"The package covers {covered:,} of the {covered + left_out:,} architectures of timm "
             f"{coverage.load()['timm']}:")
    return f"{total}\n\n{coverage.table()}"
