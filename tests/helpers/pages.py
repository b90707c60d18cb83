"""Code in the pages of docs/."""
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def text_of(page):
    return (DOCS / page).read_text(encoding="utf-8")


def section(page, title):
    """Return the text of a page below a title of the second level."""
    return text_of(page).partition(f"\n## {title}")[2].partition("\n## ")[0]


def blocks(text, language="python"):
    """Return the code blocks of a text."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
