"""Replace generated parts of Markdown pages: the text between `<!-- NAME: ... -->` and `<!-- end of NAME -->`."""
from pathlib import Path
from typing import Iterable, Sequence


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))


def span(values: Iterable[float], form: str) -> str:
    """Return the lowest and the highest value as `1.05 to 1.34`, or one number if both have the same text."""
    values = list(values)
    return " to ".join(dict.fromkeys(form.format(end) for end in (min(values), max(values))))


def listed(words: Iterable[str]) -> str:
    """Return words as `one, two and three`."""
    *most, final = words
    return f"{', '.join(most)} and {final}" if most else final


def begin(name: str, script: str = "scripts.pages") -> str:
    return f"<!-- {name}: written by python -m {script} -->"


def end(name: str) -> str:
    return f"<!-- end of {name} -->"


def replaced(page: Path, parts: dict[str, str], script: str = "scripts.pages") -> str:
    """Return the text of a page with new text in its generated parts.

    Raises:
        SystemExit: The page lacks one of the two comments of a part.
    """
    text = page.read_text(encoding="utf-8")
    for name, made in parts.items():
        start = begin(name, script)
        head, opened, rest = text.partition(start)
        _, closed, tail = rest.partition(end(name))
        if not (opened and closed):
            raise SystemExit(f"{page} has no '{start}' followed by '{end(name)}'")
        text = f"{head}{start}\n\n{made}\n\n{end(name)}{tail}"
    return text
