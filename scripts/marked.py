"""The parts of Markdown pages that scripts write, each between two comments."""
from pathlib import Path


def replaced(page: Path, begin: str, end: str, made: str) -> tuple[str, str]:
    """The text of a page, and the same with ``made`` between its marks."""
    before = page.read_text(encoding="utf-8")
    head, found, rest = before.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page} has no '{begin}' with '{end}' behind it")
    return before, f"{head}{begin}\n\n{made}\n\n{end}{tail}"
