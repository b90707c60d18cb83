"""A page in one file that needs no network, and tables as HTML, as Markdown and as text: the look of all reports.

The page is XML as well as HTML, so that a parser can check it. On a narrow screen tables and figures scroll in boxes
of their own; in print nothing scrolls, and neither a figure nor a row is cut.
"""
import base64
import html
import io
import re
from dataclasses import dataclass
from typing import Callable, Sequence, Union

from matplotlib import rc_context
from matplotlib.figure import Figure

__all__ = [
    "Block", "Code", "Grid", "Heading", "Items", "Picture", "Table", "Text", "figure_box", "html_table",
    "markdown", "markdown_table", "page", "rendered", "svg", "text_table",
]

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 64rem; margin: 2rem auto;
       padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
thead th { border-bottom: 1px solid #888; vertical-align: bottom; } tbody th { font-weight: 500; }
.cells td, .cells th { white-space: nowrap; } .cells td.long { white-space: normal; min-width: 20rem; }
figure { margin: 1rem 0; } figcaption, .note { color: #555; font-size: .9rem; }
img { max-width: 100%; height: auto; display: block; } .wide img { min-width: 44rem; }
code, pre { font-size: .85rem; } pre { white-space: pre-wrap; }
@media (max-width: 40rem) { table { font-size: .85rem; } th, td { padding-right: .6rem; } }
@media print {
  @page { margin: 14mm; }
  body { font-size: 10pt; max-width: none; margin: 0; padding: 0; }
  .scroll { overflow: visible; } .wide img { min-width: 0; } figure img { max-height: 235mm; }
  table { font-size: 8pt; } th, td { padding-right: .5rem; } .cells td, .cells th { white-space: normal; }
  .cells td.long { min-width: 0; }
  figure, tr { break-inside: avoid; } h1, h2, h2 + p { break-after: avoid; } thead { display: table-header-group; }
}
"""


@dataclass(frozen=True)
class Table:
    """Cells of text below a header, optionally with a second header above it.

    Attributes:
        header: Titles of the columns.
        rows: Each as long as the header.
        names: How many leading columns name a row.
        groups: Titles above the columns after the names, and over how many columns each stands; empty for none.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    groups: Sequence[tuple[str, int]] = ()

    def flat_header(self) -> list[str]:
        """The header in one line, `group: title`."""
        titles = [title for title, span in self.groups for _ in range(span)] or [""] * (len(self.header) - self.names)
        below = [f"{title}: {name}" if title else name
                 for title, name in zip(titles, self.header[self.names:], strict=True)]
        return [*self.header[:self.names], *below]


def page(title: str, parts: Sequence[str]) -> str:
    """The page. `parts` are HTML, the title is text."""
    title = html.escape(title)
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8" />',
        '<meta name="viewport" content="width=device-width, initial-scale=1" />',
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>",
        *parts,
        "</main>\n</body>\n</html>\n",
    ])


# -------------------------------------------------------------------------- one document, HTML and Markdown
@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Items:
    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Grid:
    """A table with what it is called, and whether lines may break in its cells."""

    table: Table
    label: str
    wrap: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure: the file below the report's folder, the SVG, and what it shows, in words and as caption."""

    path: str
    svg: str
    alt: str
    caption: str


Block = Union[Heading, Text, Items, Code, Grid, Picture]


def rendered(block: Block) -> str:
    """The block as HTML."""
    if isinstance(block, Grid):
        return html_table(block.table, block.label, wrap=block.wrap)
    if isinstance(block, Picture):
        return figure_box(block.svg, block.alt, block.caption)
    if isinstance(block, Items):
        return "\n".join(["<ul>", *(f"<li>{html.escape(item)}</li>" for item in block.items), "</ul>"])
    tag = {Heading: "h2", Text: "p", Code: "pre"}[type(block)]
    return f"<{tag}>{html.escape(block.text)}</{tag}>"


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """The document as Markdown; figures are files, by their relative paths."""
    return "\n\n".join([f"# {_escaped(title)}", *(_markdown(block) for block in blocks)]) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"## {_escaped(block.text)}"
    if isinstance(block, Text):
        return _escaped(block.text)
    if isinstance(block, Items):
        return "\n".join(f"* {_escaped(item)}" for item in block.items)
    if isinstance(block, Code):
        return "\n".join(f"    {line}" for line in block.text.splitlines())
    if isinstance(block, Grid):
        return markdown_table(block.table)
    return f"![{_escaped(block.alt)}]({block.path})\n\n*{_escaped(block.caption)}*"


def _escaped(text: str) -> str:
    """Plain text, in which Markdown would find emphasis, tags, links or columns."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return text


# -------------------------------------------------------------------------------------------- the tables
def html_table(table: Table, label: str, *, wrap: bool = False) -> str:
    """The table in a box that scrolls by itself.

    Args:
        table: The table.
        label: What a screen reader calls it.
        wrap: Whether lines may break inside cells, for columns of sentences.
    """
    body = "\n".join(_html_row(row, table.names) for row in table.rows)
    return (f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(label)}">\n'
            f'<table class="{"sentences" if wrap else "cells"}">\n<thead>\n{_html_header(table)}\n</thead>\n'
            f"<tbody>\n{body}\n</tbody>\n</table>\n</div>")


def _html_header(table: Table) -> str:
    if not table.groups:
        return "<tr>" + "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in table.header) + "</tr>"
    names = "".join(f'<th scope="col" rowspan="2">{html.escape(cell)}</th>' for cell in table.header[:table.names])
    above = "".join(f'<th scope="colgroup" colspan="{span}">{html.escape(title)}</th>' for title, span in table.groups)
    below = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in table.header[table.names:])
    return f"<tr>{names}{above}</tr>\n<tr>{below}</tr>"


_LONG = ' class="long"'


def _html_row(row: Sequence[str], names: int) -> str:
    heads = "".join(f'<th scope="row">{html.escape(cell)}</th>' for cell in row[:names])
    cells = "".join(f'<td{_LONG * (len(cell) > 40)}>{html.escape(cell)}</td>' for cell in row[names:])
    return f"<tr>{heads}{cells}</tr>"


def markdown_table(table: Table) -> str:
    lines = [[_escaped(cell) for cell in line] for line in (table.flat_header(), *table.rows)]
    rule = ["---"] * len(table.header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def text_table(table: Table) -> str:
    lines = [table.flat_header(), *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([padded[0], "-" * len(padded[0]), *padded[1:]])


# ------------------------------------------------------------------------------------------- the figures
def svg(draw: Callable[[], Figure], salt: str) -> str:
    """The figure as SVG. The same figure with the same salt has the same bytes."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": salt}):
        draw().savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def figure_box(svg_text: str, alt: str, caption: str = "") -> str:
    """The SVG as an image inside the page; as an image, so that the names inside two SVGs cannot meet."""
    data = base64.b64encode(svg_text.encode("utf-8")).decode("ascii")
    picture = f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}" />'
    below = f"\n<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    found = re.search(r'width="([\d.]+)pt"', svg_text)
    several = " wide" if found and float(found[1]) > 600 else ""  # panels beside each other, illegible if squeezed
    return (f'<figure>\n<div class="scroll{several}" role="region" tabindex="0" '
            f'aria-label="{html.escape(caption or alt)}">{picture}</div>{below}\n</figure>')
