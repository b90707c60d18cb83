"""Write and read the published numbers of a study: `study.json` and compressed tables of its epochs and sites.

| file | content |
| --- | --- |
| `study.json` | the study, the summary of its complete records, and the results of each run |
| `history.csv.gz` | a row for each run and epoch |
| `probe.csv.gz` | a row for each run, probe and site |
| `records.csv.gz` | a row for each run, recorded step and site |

A site is a residual addition in a block. A probe measures all sites on one batch. The first column of a table, `run`,
is the run's position in `study.json`. An empty field means None. Equal studies give equal bytes.
`timm-ortho study report FOLDER` writes the report of such a folder.
"""
import csv
import gzip
import json
import zlib
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

from ..._kinds import ANY, COUNT, NULL, NUMBER, TEXT, checked, one_of, optional
from ..._text import UserError, csv_rows, csv_text, file_name
from ...run_folder import EPOCH_KIND, RESULT_KIND, SESSION_KIND
from .. import LabError, one_line, whole_file, write_json
from ..folder import RECORD_KIND, RUN_KIND, SITE_KIND, STUDY_KIND, check_cells, check_sites, read_as
from .layout import TRACES, grouped

STUDY = "study.json"
TABLES = {"history": "history", "probe": "probe", "records": "dynamics"}  # name of a table -> key in a run
DIGITS = {"history": 7, "probe": 5, "records": 5}  # significant digits of the numbers in a table
LARGEST = 2**25  # maximum size of an unpacked table in bytes; the largest table of this project has 800 kB
LEFT_OUT = {"parallel_share", "orthogonal_share"}  # columns that are ratios of other columns
_KINDS = {"history": EPOCH_KIND, "probe": {"epochs_done": COUNT, **SITE_KIND}, "records": RECORD_KIND}
_STUDY_KIND = {
    "study": STUDY_KIND,
    "runs": [{**RESULT_KIND, **optional("made_with", {**SESSION_KIND, ...: ANY}), **optional("dataset", TEXT),
              **RUN_KIND, ...: ANY}],
    "recorded": {
        **optional("transitions", [
            {"layer": COUNT, "kind": TEXT, "measure": one_of(*TRACES), "step": (COUNT, NULL)}]),
        **optional("last_branch", [({"first": NUMBER, "highest": NUMBER, "last": NUMBER}, NULL)])}}

Rows = list[dict[str, Any]]


def write(folder: Path, study: Mapping[str, Any], runs: Sequence[Mapping[str, Any]],
          recorded: Optional[Mapping[str, Any]] = None) -> None:
    """Write a finished study into a folder, which is created if needed.

    Args:
        folder: Output folder. Files of an earlier version of the study are replaced.
        study, runs, recorded: See `report.Part.of`. Floats in the tables are rounded, see `DIGITS`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = [{key: value for key, value in run.items() if key not in TABLES.values()} for run in runs]
    values = {"study": study, "recorded": recorded or {}, "runs": results}
    write_json(folder / STUDY, values)
    for table, key in TABLES.items():
        rows = [{"run": index, **row} for index, run in enumerate(runs) for row in _flat(run.get(key) or [])]
        file = folder / f"{table}.csv.gz"
        if rows:
            _write_table(file, rows, DIGITS[table])
        else:
            file.unlink(missing_ok=True)


def folder_name(study: Mapping[str, Any]) -> str:
    """Return the name of a published study's folder: NAME-DATASET-SCALE."""
    return file_name("-".join(filter(None, [study["name"], study["dataset"], study["scale"]])))


def read(folder: Path) -> tuple[dict[str, Any], Rows, dict[str, Any]]:
    """Return the study, its runs and the summary of its records, in the form that `write` expects."""
    def values_of(text: str) -> tuple:
        values = checked(json.loads(text), _STUDY_KIND, "it")
        check_cells(values["study"], values["runs"])
        return values["study"], values["runs"], values["recorded"]

    study, runs, recorded = read_as(folder / STUDY, values_of, "restore the file, or leave {folder} out")
    for table, key in TABLES.items():
        by_run = _read_table(folder / f"{table}.csv.gz", {"run": COUNT, **_KINDS[table]})
        for number, run in enumerate(runs):
            run[key] = by_run.get(number, [])
    return study, runs, recorded


# ----------------------------------------------------------------------------------------------------- tables
def _flat(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Return rows of plain values. A probe becomes a row for each of its sites."""
    for row in rows:
        rest = {key: value for key, value in row.items() if key != "sites"}
        yield from ({**rest, **site} for site in row["sites"]) if "sites" in row else [rest]


def _write_table(file: Path, rows: Rows, digits: int) -> None:
    rounded = [{key: _rounded(value, digits) for key, value in row.items() if key not in LEFT_OUT} for row in rows]
    # without name and time in the header, equal tables give equal files
    with whole_file(file) as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.write(csv_text(rounded).encode("utf-8"))


def _rounded(value: Any, digits: int) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _read_table(file: Path, kind: Mapping) -> dict[int, Rows]:
    """Return the rows of each run, {} if the file does not exist. The sites of a probe are collected in one list."""
    if not file.is_file():
        return {}
    try:
        with gzip.open(file) as packed:
            table = packed.read(LARGEST + 1)
        if len(table) > LARGEST:  # a small file may contain gigabytes of zeros
            raise ValueError(f"it unpacks to more than {LARGEST:,} bytes")
        lines = csv_rows(table.decode("utf-8"))
        rows = checked([{key: _parsed(text) for key, text in line.items()} for line in lines], [kind], "row")
        by_run = grouped(check_sites(rows) if "step" in kind else rows, lambda row: row.pop("run"))
        if "epochs_done" in kind:
            by_run = {run: [{"epochs_done": epochs, "sites": sites} for epochs, sites in grouped(
                rows, lambda row: row.pop("epochs_done")).items()] for run, rows in by_run.items()}
        return by_run
    except (OSError, EOFError, zlib.error, csv.Error, ValueError, UserError) as error:
        raise LabError(f"{file} cannot be read ({one_line(error)})") from None


def _parsed(text: Any) -> Any:
    for number in (int, float):
        try:
            return number(text)
        except (ValueError, TypeError):  # TypeError: short rows have None, and long rows a list
            pass
    return text or None
