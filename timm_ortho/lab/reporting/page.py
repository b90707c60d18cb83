"""Render the blocks of a report as one HTML file, as Markdown with separate plots, and as text.

The HTML template is `page.html.jinja`. On a narrow screen, tables and plots scroll. In print, nothing
scrolls, and page breaks cut neither plots nor rows.
"""
import base64
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Callable, NamedTuple, Sequence, Union

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from ..._text import aligned, file_name, svg_text


class Table(NamedTuple):
    """Cells of text below a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]  # each as long as the header
    names: int = 1  # number of leading columns that name a row


class Heading(NamedTuple):
    text: str
    level: int = 2


class Text(NamedTuple):
    text: str


class Items(NamedTuple):
    items: Sequence[str]


class Code(NamedTuple):
    text: str


class Link(NamedTuple):
    text: str
    path: str  # relative to the report's folder


class Grid(NamedTuple):
    """A table, its label for screen readers, and whether lines may break in its cells."""

    table: Table
    label: str
    wrap: bool = False


@dataclass(frozen=True)
class Picture:
    """A plot, drawn when its SVG is first read.

    Attributes:
        name: Name of the plot's file in the report's folder `figures`, without suffix.
        caption: The text below the plot.
        alt: Description for readers who cannot see the plot.
        draw: Returns the figure.
    """

    name: str
    caption: str
    alt: str
    draw: Callable[..., Figure]

    @property
    def path(self) -> str:
        return f"figures/{file_name(self.name)}.svg"

    @cached_property
    def svg(self) -> str:
        return svg_text(self.draw(), file_name(self.name))


Block = Union[Heading, Text, Items, Code, Link, Grid, Picture]


def page(title: str, blocks: Sequence[Block]) -> str:
    """Return the document as one HTML file."""
    environment = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    # SVGs are embedded as images, so that their ids cannot clash
    environment.filters["base64"] = lambda svg: base64.b64encode(svg.encode("utf-8")).decode("ascii")
    environment.filters["width"] = _width
    template = environment.get_template("page.html.jinja")
    return template.render(title=title, blocks=[(type(block).__name__, block) for block in blocks])


def _width(svg: str) -> float:
    """Return the width of an SVG in points."""
    match = re.search(r'width="([\d.]+)pt"', svg)
    return float(match[1]) if match else 0.0


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """Return the document as Markdown, with relative paths to the plots."""
    return "\n\n".join([f"# {_escaped(title)}", *map(_markdown, blocks)]) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_escaped(block.text)}"
    if isinstance(block, Text):
        return _escaped(block.text)
    if isinstance(block, Items):
        return "\n".join(f"* {_escaped(item)}" for item in block.items)
    if isinstance(block, Code):
        return "\n".join(f"    {line}" for line in block.text.splitlines())
    if isinstance(block, Link):
        return f"[{_escaped(block.text)}]({block.path})"
    if isinstance(block, Grid):
        lines = [[_escaped(cell) for cell in line] for line in (block.table.header, *block.table.rows)]
        lines.insert(1, ["---"] * len(block.table.header))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"![{_escaped(block.alt)}]({block.path})\n\n*{_escaped(block.caption)}*"


def _escaped(text: str) -> str:
    """Escape the characters that have a meaning within a line of Markdown."""
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", text)


def text_table(table: Table) -> str:
    """Return a table as text with aligned columns.

    >>> print(text_table(Table(["connection", "top-1 %"], [["linear", "91.00"]])))
    connection  top-1 %
    -------------------
    linear      91.00
    """
    header, *rows = aligned([table.header, *table.rows])
    return "\n".join([header, "-" * len(header), *rows])
