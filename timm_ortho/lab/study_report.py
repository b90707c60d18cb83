"""A study's report: `report.html` in one file, `report.md` with `figures/`, and `results.json`.

All of it is made from what the caller hands over, whose form `study` states, and nothing else: `results.json` holds the
same again, so that `rewrite` makes the report anew elsewhere. Which table and which figures a study has is said in
`study_specs` and `cost_specs`.
"""
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from . import LabError, page, paper, study_tables as tables, write_text
from .cost_specs import ROW_SPECS, RowSpec
from .page import Block, Code, Grid, Heading, Items, Picture, Table, Text
from .plots import finite
from .study_specs import SPECS, Drawing, Extra, Spec, own, run_name
from .study_tables import connection_name

__all__ = ["rewrite", "write"]

_STEPS = 100  # of the dynamics, in results.json and in the figures; the runs' own folders have all
_COLUMNS = ("step", "layer", "kind", "name")  # of a row of the dynamics that are exact


@dataclass(frozen=True)
class _Content:
    """What differs between studies with and without training."""

    lead: str
    table: Table
    note: str
    more: Sequence[Block]
    drawings: Sequence[Drawing]
    summary: Sequence[Mapping[str, Any]]
    short: Table


def write(study: dict, runs: list[dict], unfinished: list[str], folder: Path) -> str:
    """Writes `report.html`, `report.md`, `figures/*.svg` and `results.json`.

    Args:
        study: What was run; its keys are in the docstring of `study`.
        runs: The finished runs, or the rows of a study without training.
        unfinished: Names of the runs that are not finished.
        folder: Where the files go; it is made if it is not there.

    Returns:
        The measured figures with the paper's as a table of text, and where the page is.
    """
    study = {"baseline": {"connection": "linear"}, **study}
    runs = [_thinned(run) for run in runs]
    content = _content(study, runs)
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    pictures = [_picture(study, drawing) for drawing in content.drawings]
    for picture in pictures:
        write_text(folder / picture.path, picture.svg)
    blocks = _document(study, runs, unfinished, content, pictures)
    write_text(folder / "results.json", _json(
        {"study": study, "unfinished": unfinished, "lead": content.lead, "summary": content.summary, "runs": runs}))
    write_text(folder / "report.md", page.markdown(_title(study), blocks))
    write_text(folder / "report.html", page.page(_title(study), [page.rendered(block) for block in blocks]))
    return _text(study, content, unfinished, folder)


def rewrite(results: Path, folder: Path) -> str:
    """Makes the report of a `results.json` anew in another folder, for example below `model_cards/results`.

    Raises:
        LabError: The file is not a study's.
    """
    try:
        values = json.loads(results.read_text(encoding="utf-8"))
        study, runs, unfinished = (values[key] for key in ("study", "runs", "unfinished"))
    except (OSError, ValueError, KeyError, TypeError):
        raise LabError(f"{results} is not a study's results.json: give the one that timm-ortho study wrote") from None
    return write(study, runs, unfinished, folder)


# ------------------------------------------------------------------------------------------- the content
def _content(study: Mapping[str, Any], runs: Sequence[dict]) -> _Content:
    if _is_training(study):
        return _of_runs(study, runs, SPECS.get(study["name"]) or own(study))
    return _of_rows(runs, ROW_SPECS[study["kind"]])


def _of_runs(study: Mapping[str, Any], runs: Sequence[dict], spec: Spec) -> _Content:
    stated = spec.paper() if study["paper"] else None
    found = tables.entries(study, runs, spec.measures, spec.place, stated or {})
    differences = tables.difference_table(found, spec.names, stated, spec.unstated)
    more: list[Block] = [Heading("Differences, seed by seed")]
    if differences.rows:
        more += [Grid(differences, "differences to the baseline"), Text(_PAIRS)]
    else:
        more.append(Text("There is no pair of runs to compare yet."))
    more += _extras(spec.extras(study, runs))
    return _Content(
        lead=_lead(found),
        table=_table(study, found, spec, stated),
        note=spec.protocol,
        more=more,
        drawings=spec.figures(study, runs) if runs else [],
        summary=[tables.plain(entry) for entry in found],
        short=_short(found, spec, stated),
    )


def _table(
        study: Mapping[str, Any], found: Sequence[tables.Entry], spec: Spec, stated: Optional[tables.Paper]) -> Table:
    if stated is None:
        return tables.with_differences(found, spec.names, title=_here(study))
    return tables.side_by_side(
        spec.names, {entry.place: str(entry) for entry in found}, _texts(spec, stated), title=_here(study),
        unstated=spec.unstated, order=spec.order)


def _texts(spec: Spec, stated: tables.Paper) -> dict[tables.Place, str]:
    digits = {measure.title: measure.digits for measure in spec.measures.values()}
    return {place: _stated(figure, next((digits[name] for name in (*place[1], *place[0]) if name in digits), 2))
            for place, figure in stated.items()}


def _extras(extras: Sequence[Extra]) -> list[Block]:
    return [block for extra in extras
            for block in (Heading(extra.title), Grid(extra.table, extra.title), Text(extra.note))]


def _of_rows(rows: Sequence[dict], spec: RowSpec) -> _Content:
    here, stated = spec.cells(rows), spec.paper(rows)
    names = [*spec.names, "figure", "paper", "here"]
    short = [[*row, ", ".join(column), stated.get((row, column), tables.NOT_IN_PAPER), text]
             for (row, column), text in here.items()]
    return _Content(
        lead="", table=tables.side_by_side(spec.names, here, stated), note=spec.note,
        more=_extras(spec.extras(rows)), drawings=spec.figures(rows), summary=[],
        short=Table(names, short, len(spec.names)))


def _stated(figure: Sequence[Optional[float]], digits: int) -> str:
    return tables.spread(figure[0], figure[1] if len(figure) > 1 else None, digits)


def _lead(found: Sequence[tables.Entry]) -> str:
    """What the intervals say, in one sentence."""
    readings = [tables.reading(entry.difference) for entry in found if entry.baseline is not None]
    apart = sum(reading in ("higher", "lower") for reading in readings)
    same = readings.count("not told apart")
    if not apart + same:
        return "No difference has an interval yet: that takes two seeds or more of both sides."
    rest = len(readings) - apart - same
    without = f" {rest} {'has' if rest == 1 else 'have'} no interval." if rest else ""
    return (f"Of {apart + same} difference{'s' * (apart + same != 1)} to the baseline with a 95 % interval, {apart} "
            f"{_be(apart)} told apart from zero and {same} {_be(same)} not.{without}")


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def _short(found: Sequence[tables.Entry], spec: Spec, stated: Optional[tables.Paper]) -> Table:
    texts = None if stated is None else _texts(spec, stated)
    rows = [[
        *entry.place[0], ", ".join(entry.place[1]),
        *([] if texts is None else [texts.get(entry.place, spec.unstated)]),
        str(entry), tables.compared(entry), "" if entry.baseline is None else tables.reading(entry.difference),
    ] for entry in found]
    paper_column = [] if texts is None else ["paper"]
    header = [*spec.names, "figure", *paper_column, "here", "difference [95 %]", "reading"]
    return Table(header, rows, len(spec.names) + 1)


# ------------------------------------------------------------------------------------------ the document
_PAIRS = (
    "Runs with one seed start from the same weights and see the same batches, so differences are taken seed by seed; "
    "in brackets is Student's 95 % interval of their mean. Where it holds zero, the runs do not tell the two apart. "
    "Each interval stands for itself: of twenty differences that are truly zero, about one is told apart by chance.")


def _title(study: Mapping[str, Any]) -> str:
    return f"{study['title']} ({study['paper']})" if study.get("paper") else study["title"]


def _here(study: Mapping[str, Any]) -> str:
    return "here" if study["scale"] == "paper" else f"here ({study['scale']})"


def _document(
        study: Mapping[str, Any],
        runs: Sequence[dict],
        unfinished: Sequence[str],
        content: _Content,
        pictures: Sequence[Picture],
) -> list[Block]:
    return [
        Text(_what(study)),
        *([Text(content.lead)] if content.lead and runs else []),
        *([Text(f"Not finished: {', '.join(unfinished)}.")] if unfinished else []),
        *([] if runs else [Text(_NOTHING)]),
        Heading("The paper's table and this one" if study["paper"] else "The table"),
        Grid(content.table, "the paper's table and the measured one" if study["paper"] else "the table"),
        Text(_table_note(study, content.note)),
        *content.more,
        *([Heading("Figures"), *([Text(_FIGURES)] if _is_training(study) else []), *pictures] if pictures else []),
        *_changed(study),
        *_all_runs(study, runs),
        Heading("How it was made"),
        Code(study["command"]),
        Grid(Table(["what", "value"], _made(study, runs, unfinished)), "how it was made", wrap=True),
    ]


def _changed(study: Mapping[str, Any]) -> list[Block]:
    if not (study["changed"] or study["paper"]):
        return []
    what = Items(study["changed"]) if study["changed"] else Text("Nothing that the study sets.")
    return [Heading("What differs from the paper"), what]


_NOTHING = "No run is finished yet."
_FIGURES = "Lines are means over the seeds and shades their range."


def _what(study: Mapping[str, Any]) -> str:
    if _is_training(study):
        seeds, data = len(study["seeds"]), study["dataset"] or "own images"
        return (f"Study “{study['name']}” at scale “{study['scale']}”: {study['model']} on {data}, {seeds} "
                f"{'seed' if seeds == 1 else 'seeds'}.")
    return f"Study “{study['name']}” at scale “{study['scale']}”; nothing is trained."


def _is_training(study: Mapping[str, Any]) -> bool:
    return study.get("kind", "training") == "training"


def _table_note(study: Mapping[str, Any], note: str) -> str:
    section = paper.section(study.get("table"))
    protocol = section.get("protocol") or section.get("definition")
    texts = [
        "Means ± standard deviation over the seeds." if _is_training(study) else "",
        note,
        f"The paper: {protocol}." if protocol else "",
        f"Source: {section['source']}." if "source" in section else "",
    ]
    return " ".join(text for text in texts if text)


_RUN_COLUMNS = (
    "run", "seed", "top-1 %", "top-5 %", "best top-1 %", "loss", "epochs", "images/s", "peak memory", "seconds")


def _all_runs(study: Mapping[str, Any], runs: Sequence[dict]) -> list[Block]:
    if not runs or not _is_training(study):
        return []
    rows = [[
        run_name(run), str(run["seed"]), _shown(run["top1"]), _shown(run["top5"]), _shown(run["best_top1"]),
        _shown(run["loss"], 4), str(run["epochs"]), _shown(run["images_per_second"], 0), _memory(run["peak_memory"]),
        _shown(run["seconds"], 1)] for run in runs]
    diverged = [f"{run_name(run)}, seed {run['seed']}" for run in runs if not finite(run["loss"])]
    note = [Text(f"Diverged, with a loss that is not finite: {'; '.join(diverged)}. Their accuracy counts as it was "
                 "measured.")] if diverged else []
    return [Heading("Every run"), Grid(Table(_RUN_COLUMNS, rows, names=2), "every run"), *note]


def _made(study: Mapping[str, Any], runs: Sequence[dict], unfinished: Sequence[str]) -> list[list[str]]:
    devices = list(dict.fromkeys(run["device"] for run in runs if run.get("device")))
    rows = {
        "seeds": ", ".join(map(str, study["seeds"])),
        "connections": ", ".join(connection_name(name) for name in study["connections"]),
        "baseline": ", ".join(f"{axis} {value}" for axis, value in study["baseline"].items()),
        **{axis: ", ".join(map(str, values)) for axis, values in study["axes"].items()},
        "parameters": _parameters(runs), "device": ", ".join(devices), "wall time": _wall_time(runs),
        "versions": ", ".join(f"{name} {version}" for name, version in study["versions"].items() if version),
        "unfinished": ", ".join(unfinished) or ("none" if _is_training(study) else ""),
    }
    if not _is_training(study):
        rows = {key: rows[key] for key in ("device", "versions")}
    return [[key, value] for key, value in rows.items() if value]


def _parameters(runs: Sequence[dict]) -> str:
    return ", ".join(f"{count:,}" for count in dict.fromkeys(run["parameters"] for run in runs if "parameters" in run))


def _wall_time(runs: Sequence[dict]) -> str:
    seconds = [run["seconds"] for run in runs if finite(run.get("seconds"))]
    if not seconds:
        return ""
    return f"{_duration(sum(seconds))} of training in {len(seconds)} {'run' if len(seconds) == 1 else 'runs'}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _shown(value: Optional[float], digits: int = 2) -> str:
    return f"{value:,.{digits}f}" if finite(value) else "not finite"


def _memory(value: Optional[float]) -> str:
    return f"{value / 2**20:,.0f} MiB" if value else "unknown"


def _picture(study: Mapping[str, Any], drawing: Drawing) -> Picture:
    svg = page.svg(drawing.draw, f"{study['name']} {drawing.name}")
    return Picture(f"figures/{drawing.name}.svg", svg, drawing.alt, drawing.caption)


def _text(study: Mapping[str, Any], content: _Content, unfinished: Sequence[str], folder: Path) -> str:
    done = bool(content.short.rows)
    parts = [_title(study), _what(study), page.text_table(content.short) if done else _NOTHING]
    parts += [content.lead] if content.lead and done else []
    parts += [f"not finished: {', '.join(unfinished)}"] if unfinished else []
    return "\n\n".join([*parts, f"report: {folder / 'report.html'}"])


# --------------------------------------------------------------------------------------------- the numbers
def _thinned(run: dict) -> dict:
    """The run with at most `_STEPS` of its recorded steps, the first and the last among them, to 6 digits."""
    rows = run.get("dynamics")
    if not rows:
        return run
    steps = sorted({row["step"] for row in rows})
    last = len(steps) - 1
    kept = set(steps) if last < _STEPS else {steps[round(last * index / (_STEPS - 1))] for index in range(_STEPS)}
    return {**run, "dynamics": [_rounded(row) for row in rows if row["step"] in kept]}


def _rounded(row: dict) -> dict:
    return {key: float(f"{value:.6g}") if isinstance(value, float) and key not in _COLUMNS else value
            for key, value in row.items()}


def _json(value: Any) -> str:
    """JSON with one line for each list or object that holds plain values only; NaN and infinities become null."""
    return _laid_out(json.loads(json.dumps(value), parse_constant=lambda _: None)) + "\n"


def _laid_out(value: Any, indent: str = "") -> str:
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or not any(isinstance(item, (dict, list)) for item in items):
        return json.dumps(value, ensure_ascii=False)
    inner, keys, (first, last) = indent + " ", [""] * len(value), "[]"
    if isinstance(value, dict):
        keys, (first, last) = [f"{json.dumps(key, ensure_ascii=False)}: " for key in value], "{}"
    lines = ",\n".join(f"{inner}{key}{_laid_out(item, inner)}" for key, item in zip(keys, items, strict=True))
    return f"{first}\n{lines}\n{indent}{last}"
