"""Write and read reports."""
import json
import re
from xml.etree import ElementTree

from timm_ortho.lab.reporting import report


def write(study, runs, unfinished, folder):
    """Write the report of a study."""
    return report.write(report.Part.of(study, runs, unfinished), folder)


def results(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def texts(folder):
    """Return the text of report.html, and the content of report.md without backslash escapes."""
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    return "".join(parsed(folder).itertext()), re.sub(r"\\(.)", r"\1", markdown)


def parsed(folder):
    return ElementTree.fromstring((folder / "report.html").read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>"))


def tables_of(folder):
    """Return the page's tables; a row is a list of texts."""
    return [[["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
            for table in parsed(folder).iter("table")]


def lines_of(folder):
    """Return ``{row names: {column title: cell}}`` of the table of results. The mean is in the column ``mean``."""
    header, *rows = tables_of(folder)[0]
    names = header.index("difference [95 % CI]") - 1
    return {tuple(row[:names]): dict(zip(["mean", *header[names + 1:]], row[names:], strict=True)) for row in rows}
