"""Render the blocks of a report as one HTML file, as Markdown with separate plots, and as text.

The templates are `page.html.jinja` and `page.md.jinja`. On a narrow screen, tables and plots scroll. In print, nothing
scrolls, and page breaks cut neither plots nor rows.
"""
import base64
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Callable, NamedTuple, Sequence, Union

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import rc_context
from matplotlib.figure import Figure

from ..._text import aligned, escaped, file_name, svg_text


class Table(NamedTuple):
    """Cells of text below a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]  # each as long as the header
    names: int = 1  # number of leading columns that name a row
    label: str = ""  # for screen readers
    wrap: bool = False  # whether lines may break in the cells


class Heading(NamedTuple):
    text: str


class Code(NamedTuple):
    text: str


class Link(NamedTuple):
    text: str
    path: str  # relative to the report's folder


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
        with rc_context({"text.parse_math": False}):  # a label may contain $
            return svg_text(self.draw(), file_name(self.name))


Block = Union[str, list[str], Heading, Code, Link, Table, Picture]  # a text is a paragraph, a list has bullets


def page(title: str, blocks: Sequence[Block]) -> str:
    """Return the document as one HTML file."""
    return _rendered("page.html.jinja", title, blocks)


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """Return the document as Markdown, with relative paths to the plots."""
    return _rendered("page.md.jinja", title, blocks)


def _rendered(template: str, title: str, blocks: Sequence[Block]) -> str:
    environment = Environment(
        loader=PackageLoader(__package__, "."), autoescape=".html" in template, undefined=StrictUndefined,
        keep_trailing_newline=True)
    # SVGs are embedded as images, so that their ids cannot clash
    environment.filters["base64"] = lambda svg: base64.b64encode(svg.encode("utf-8")).decode("ascii")
    environment.filters["width"] = lambda svg: float(*re.findall(r'width="([\d.]+)pt"', svg)[:1])
    environment.filters["escaped"] = escaped
    named = [(type(block).__name__, block) for block in blocks]
    return environment.get_template(template).render(title=title, blocks=named)


def text_table(table: Table) -> str:
    """Return a table as text with aligned columns.

    >>> print(text_table(Table(["connection", "top-1 %"], [["linear", "91.00"]])))
    connection  top-1 %
    -------------------
    linear      91.00
    """
    header, *rows = aligned([table.header, *table.rows])
    return "\n".join([header, "-" * len(header), *rows])
