"""Write and read reports."""
import json
import re
from xml.etree import ElementTree

from timm_ortho.lab.commands import report_on


def rewrite(values, folder):
    """Write the report of the content of a results.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(values), encoding="utf-8")
    return report_on([folder / "results.json"])


def write(study, runs, unfinished, folder):
    """Write the report of a study."""
    return rewrite({"study": study, "runs": runs, "unfinished": unfinished}, folder)


def again(file, folder):
    """Write a report again from its results.json."""
    return rewrite(json.loads(file.read_text(encoding="utf-8")), folder)


def results(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def texts(folder):
    """Return the text of report.html, and the content of report.md without backslash escapes."""
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    return "".join(parsed(folder).itertext()), re.sub(r"\\(.)", r"\1", markdown)


def parsed(folder):
    return ElementTree.fromstring((folder / "report.html").read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>"))


def tables_of(folder):
    """Return the page's tables; a row is a list of texts. A cell that spans columns is repeated for each column."""
    return [[[text for cell in row for text in ["".join(cell.itertext())] * int(cell.get("colspan", 1))]
             for row in table.iter("tr")] for table in parsed(folder).iter("table")]


def side_by_side(folder):
    """Return ``{(row labels, column title): (paper's value, measured value)}`` for the page's first table."""
    groups, _, *rows = tables_of(folder)[0]
    names = next(index for index, group in enumerate(groups) if groups.count(group) == 2)
    return {(tuple(row[:names]), groups[at]): (row[at], row[at + 1])
            for row in rows for at in range(names, len(row), 2)}


def differences(folder):
    """Return ``{row labels: {column title: cell}}`` for the table of differences."""
    table = next(table for table in tables_of(folder) if "p (Holm)" in table[0])
    names = table[0].index("against")
    return {tuple(row[:names]): dict(zip(table[0][names:], row[names:], strict=True)) for row in table[1:]}
