"""Finished runs as a report: `report.html` in one file, `report.md` with `figures/`, and `results.json`.

All of it is made from what the caller hands over and nothing else; `results.json` holds the same again, so that the
report can be made anew from it. Statistics are in `statistics`, tables in `tables`, figures in `figures`, their look in
`page`; which of them a study has is said by its `layout`.

    study = {
        "name": "layer_pattern", "title": "Which blocks carry ...", "scale": "small", "dataset": "digits",
        "paper": "Table 4", "table": "layer_pattern",   # a key of lab/paper.json; both are "" where no paper has it
        "kind": "training",                 # or "overhead", "parameters", "gamma": nothing is trained, runs are rows
        "model": "vit_small",               # or "7 architectures"
        "axes": {"layers": ["none", "0,1", ...]},    # each axis of the grid and its values, in order; {} for none
        "connections": ["linear", "feature"], "seeds": [0, 1, 2],    # all that occur, in order
        "baseline": {"layers": "none"},     # what differences are to: the run whose cell and connection are changed to
                                            # these values, all else and the seed the same; {"connection": "linear"}
        "changed": ["epochs: 15 here, 300 in the paper", ...], "command": "timm-ortho study run layer_pattern",
        # optional
        "versions": {"timm-ortho": ..., "torch": ..., "timm": ...},    # where runs have no "made_with"
        "report": {"rows": [...], ...},     # see `layout`; without it that of the shipped study of this name
        "validation": "test",               # or "hold-out": the images that accuracy is of
    }
    runs = [{
        "cell": {"layers": "0,1"}, "seed": 0,   # axis -> value, numbers or text; in a switch study {"switch": "LO"}
        "connection": "feature",                # what the run ends with; for LO that is feature
        # from here on everything may be missing; numbers that JSON does not have are None
        "top1", "top5", "loss", "best_top1", "best_epoch", "images_per_second", "peak_memory", "seconds", "epochs",
        "parameters", "model", "device", "dataset", "switch_epoch",
        "trainer": "lab",                       # or "train.py"
        "made_with": {"timm-ortho", "timm", "torch", "commit", "host", "cpu", "gpu", "driver", "command", "begin",
                      "end", "continued": [...]},
        "history": [{"epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr"}, ...],
        "probe": [{"epochs_done", "sites": [...]}, ...],    # one batch, before training and after each epoch
        "dynamics": [...],                      # rows of `timm_ortho.record`
        "representation": {"effective_rank", "spectral_entropy", "feature_std",
                           "linear_cka"} or None,    # linear_cka: with the baseline's run; None for the baseline itself
    }, ...]
    unfinished = ["layers=0,1-feature-seed2", ...]

For the other kinds `runs` are the rows of plain columns that `cost` makes: `overhead`'s, `gamma_table`'s, and for
`parameters` those of `flop_table` for each transformer, which have a column `module`, then those of `parameter_table`,
which have none. `unfinished` is empty, `dataset` and `model` are None.
"""
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

from .._checks import finite
from . import cost_report, page, paper, tables, write_text
from .figures import Drawing, Scene, branch, drawings, forest, last_branch
from .layout import Layout, Run
from .page import Block, Code, Grid, Heading, Items, Picture, Table, Text
from .statistics import reading
from .transition import transition_points

_STEPS = 100  # of the dynamics, in results.json and in the figures; the runs' own folders have all
_MEASURES = ("stream", "cosine", "parallel", "orthogonal")  # that have a transition point

_NOTHING = "No run is finished yet."
_PAIRS = (
    "Runs with one seed start from the same weights and see the same batches, so differences are taken seed by seed; "
    "in brackets is Student's 95 % interval of their mean. Where it holds zero, the runs do not tell the two apart. "
    "Pooled variance is an additive model of settings and seeds in each cell, with one error variance for all cells. "
    "p is that of the paired differences, adjusted by Holm for all comparisons of the study. The last column has the "
    "half-width of the paired interval and which of the paper's effects, in its own data sets' points, lie outside it.")
_FIGURES = "Lines are means over the seeds and shades their range."


@dataclass(frozen=True)
class Part:
    """One study on one data set."""

    study: Mapping[str, Any]
    runs: Sequence[Run]  # their records thinned
    unfinished: Sequence[str]
    recorded: Mapping[str, Any]  # what was found in the whole records

    @classmethod
    def of(cls, study: Mapping, runs: Sequence[Run], unfinished: Sequence[str], recorded: Optional[Mapping] = None):
        study = {"baseline": {"connection": "linear"}, "axes": {}, "paper": "", "scale": "", "changed": [], **study}
        recorded = _recorded(runs) if recorded is None else recorded
        return cls(study, [_thinned(run) for run in runs], unfinished, recorded)

    @property
    def trains(self) -> bool:
        return self.study.get("kind", "training") == "training"

    @property
    def title(self) -> str:
        return f"{self.study['title']} ({self.study['paper']})" if self.study["paper"] else self.study["title"]

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.study)

    @cached_property
    def entries(self) -> list[tables.Entry]:
        return tables.entries(self.runs, self.layout) if self.trains else []

    @property
    def name(self) -> str:
        return "-".join(filter(None, [self.study["name"], (self.study.get("dataset") or "").replace("/", "_")]))

    @property
    def about(self) -> str:
        study, seeds = self.study, len(self.study["seeds"])
        what = f"Study “{study['name']}”" + (f" at scale “{study['scale']}”" if study["scale"] else "")
        if not self.trains:
            return f"{what}; nothing is trained."
        return f"{what}: {study['model']} on {study['dataset'] or 'own images'}, {seeds} seed{'s' * (seeds != 1)}."

    @property
    def json(self) -> dict[str, Any]:
        return {"study": self.study, "unfinished": self.unfinished, "lead": _lead(self.entries) if self.trains else "",
                "summary": [tables.plain(entry) for entry in self.entries], "recorded": self.recorded,
                "runs": self.runs}


# ---------------------------------------------------------------------------------------------- what is called
def write(study: dict, runs: list[dict], unfinished: list[str], folder: Path, recorded: Optional[dict] = None) -> str:
    """Writes `report.html`, `report.md`, `figures/*.svg` and `results.json`, and returns the table as text.

    Of what is given see above; `recorded` is what an earlier report found in the whole records of these runs, if they
    have fewer by now.
    """
    return write_many([(study, runs, unfinished, recorded)], folder)


def write_many(given: Sequence[tuple], folder: Path) -> str:
    """One report of several studies or data sets: a section for each, and a plot of all differences.

    Each of what is given has the arguments of `write` but for the folder.
    """
    parts, folder = [Part.of(*part) for part in given], Path(folder)
    single = len(parts) == 1
    title = parts[0].title if single else f"{len(parts)} studies"
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    blocks = list(_document(parts))
    for block in blocks:
        if isinstance(block, Picture):
            write_text(folder / block.path, block.svg)
    results = parts[0].json if single else {"lead": _lead(_all_entries(parts)), "parts": [part.json for part in parts]}
    write_text(folder / "results.json", as_json(results))
    write_text(folder / "report.md", page.markdown(title, blocks))
    write_text(folder / "report.html", page.page(title, blocks))
    return _text(parts, folder)


# ----------------------------------------------------------------------------------------------- the document
def _document(parts: Sequence[Part]) -> Iterator[Block]:
    """The blocks of one part, or those of several below a heading each."""
    compared = _all_entries(parts)
    head = [Text(_lead(compared))] if any(part.runs and part.trains for part in parts) else []
    head += [Text(_PAIRS)] if any(entry.is_compared for entry in compared) else []
    if len(parts) == 1:
        yield from (Text(parts[0].about), *head, *_section(parts[0]))
        return
    names = [part.name for part in parts]
    names = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names, 1)]
    yield from head
    last = [(f"{name}: {_label(entry)}", entry) for name, part in zip(names, parts, strict=True)
            for entry in part.entries if entry.measure == "top1"]
    yield from map(_picture, forest(last, "all_differences"))
    for name, part in zip(names, parts, strict=True):
        data = part.study.get("dataset")
        yield from (Heading(f"{part.title}, {data}" if data else part.title), Text(part.about))
        for block in _section(part):
            if isinstance(block, Heading):
                block = block._replace(level=3)
            elif isinstance(block, Picture):
                block = block._replace(path=block.path.replace("/", f"/{name}_"))
            yield block


def _all_entries(parts: Sequence[Part]) -> list[tables.Entry]:
    return [entry for part in parts for entry in part.entries]


def _section(part: Part) -> Iterator[Block]:
    study = part.study
    if part.unfinished:
        yield Text(f"Not finished: {', '.join(part.unfinished)}.")
    if not part.runs:
        yield Text(_NOTHING)
    yield Heading("The paper's table and this one" if study["paper"] else "The table")
    yield from _results(part) if part.trains else _costs(part)
    if study["changed"] or study["paper"]:
        yield Heading("What differs from the paper")
        yield Items(study["changed"]) if study["changed"] else Text("Nothing that is known.")
    if part.runs and part.trains:
        yield from (Heading("Every run"), Grid(tables.every_run(part.runs), "every run"))
        diverged = [_seeded(run) for run in part.runs if "loss" in run and not finite(run["loss"])]
        yield from [Text(f"Diverged, with a loss that is not finite: {'; '.join(diverged)}. Their accuracy counts as "
                         "it was measured.")] if diverged else []
    made = Table(["what", "value"], _made(part))
    yield from (Heading("How it was made"), Code(study["command"]))
    yield from [Grid(made, "how it was made", wrap=True)] if made.rows else []


def _results(part: Part) -> Iterator[Block]:
    layout, found = part.layout, part.entries
    own = layout.generic and not part.study["paper"]
    yield Grid(tables.overview(part.runs, found, layout) if own else tables.main_table(found, layout), "the table")
    medians = ", medians of speed and memory" if own else ""
    yield Text(_note(part.study, f"Means ± standard deviation over the seeds{medians}, on the {layout.images} images.",
                     layout.protocol.format(images=layout.images)))
    yield Heading("Differences, seed by seed")
    if any(entry.is_compared for entry in found):
        yield Grid(tables.differences(found, layout), "differences to the baseline")
        yield from map(_picture, forest([(_label(entry), entry) for entry in found]))
    else:
        yield Text("There is no pair of runs to compare yet.")
    yield from _extras(tables.EXTRAS[name](part.runs, layout, part.recorded) for name in layout.tables)
    drawn = drawings(Scene(part.runs, layout, part.recorded))
    yield from [Heading("Figures"), Text(_FIGURES), *map(_picture, drawn)] if drawn else []


def _costs(part: Part) -> Iterator[Block]:
    content = cost_report.content(part.study["kind"], part.runs)
    yield from (Grid(content.table(), "the table"), Text(_note(part.study, content.note)))
    yield from _extras(content.extras)


def _extras(extras: Iterable[tables.Extra]) -> Iterator[Block]:
    for extra in extras:
        if extra.table.rows:
            yield from (Heading(extra.title), Grid(extra.table, extra.title), Text(extra.note))


def _picture(drawing: Drawing) -> Picture:
    path = f"figures/{drawing.name}.svg"
    return Picture(path, page.svg(drawing.draw, drawing.name), drawing.alt, drawing.caption)


def _label(entry: tables.Entry) -> str:
    """An entry's names but for the measure's, which is the title of its panel."""
    return ", ".join(name for name in (*entry.place[0], *entry.place[1]) if name != entry.title)


def _note(study: Mapping[str, Any], *measured: str) -> str:
    section = paper.section(study.get("table"))
    protocol = section.get("protocol") or section.get("definition")
    said = [*measured, f"The paper: {protocol}." if protocol else "",
            f"Source: {section['source']}." if "source" in section else ""]
    return " ".join(filter(None, said))


def _lead(found: Sequence[tables.Entry]) -> str:
    """What the intervals say, in one sentence."""
    readings = [reading(entry.difference) for entry in found if entry.is_compared]
    apart = sum(said in ("higher", "lower") for said in readings)
    same = readings.count("not told apart")
    if not apart + same:
        return "No difference has an interval yet: that takes two seeds or more of both sides."
    rest, adjusted = len(readings) - apart - same, sum(entry.holm is not None and entry.holm <= 0.05 for entry in found)
    without = f" {rest} {'has' if rest == 1 else 'have'} no interval." if rest else ""
    apart, not_apart, adjusted = (f"{count} {'is' if count == 1 else 'are'}" for count in (apart, same, adjusted))
    return (f"Of {len(readings) - rest} difference{'s' * (len(readings) - rest != 1)} to the baseline with a 95 % "
            f"interval, {apart} told apart from zero and {not_apart} not; after Holm's adjustment {adjusted}.{without}")


# ------------------------------------------------------------------------------------------- how it was made
def _made(part: Part) -> list[list[str]]:
    """What the study says, and what its runs do of where they were made."""
    study, runs = part.study, part.runs
    rows = {"device": _distinct(run.get("device") for run in runs)}
    if part.trains:
        rows = {
            "seeds": ", ".join(map(str, study["seeds"])),
            "connections": ", ".join(paper.name("connection", name) for name in study["connections"]),
            "baseline": ", ".join(f"{axis} {value}" for axis, value in study["baseline"].items()),
            **{axis: ", ".join(map(str, values)) for axis, values in study["axes"].items()},
            "parameters": _distinct(f"{run['parameters']:,}" for run in runs if run.get("parameters")),
            "trainer": _distinct(run.get("trainer") for run in runs), **rows, "wall time": _wall_time(runs),
            "unfinished": ", ".join(part.unfinished) or "none"}
    return [[key, value] for key, value in {**rows, **_made_with(study, runs)}.items() if value]


def _made_with(study: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, str]:
    """Versions, commits and machines, as the runs say; older runs leave that to their study."""
    said = [{**study.get("versions", {}), **(run.get("made_with") or {})} for run in runs]
    versions = [", ".join(f"{name} {made[name]}" for name in ("timm-ortho", "torch", "timm") if made.get(name))
                for made in said]
    times = [made[key] for made in said for key in ("begin", "end") if made.get(key)]
    return {
        "versions": _distinct(versions, "; "),
        **{key: _distinct(made.get(key) for made in said) for key in ("commit", "host", "cpu", "gpu", "driver")},
        "begun and ended": f"{min(times)} to {max(times)}" if times else "",
        "continued": "; ".join(_seeded(run) for run, made in zip(runs, said, strict=True) if made.get("continued")),
    }


def _seeded(run: Run) -> str:
    return f"{tables.run_name(run)}, seed {run['seed']}"


def _distinct(values: Any, between: str = ", ") -> str:
    return between.join(dict.fromkeys(str(value) for value in values if value))


def _wall_time(runs: Sequence[Run]) -> str:
    seconds = [run["seconds"] for run in runs if finite(run.get("seconds"))]
    whole = sum(seconds)
    said = f"{whole:.0f} s" if whole < 120 else f"{whole / 60:.0f} min" if whole < 7200 else f"{whole / 3600:.1f} h"
    return f"{said} of training in {len(seconds)} run{'s' * (len(seconds) != 1)}" if seconds else ""


def _text(parts: Sequence[Part], folder: Path) -> str:
    said, between = [], "\n\n" if len(parts) == 1 else "\n"
    for part in parts:
        said += [f"{part.title}{between}{part.about}", _short(part)]
        said += [f"not finished: {', '.join(part.unfinished)}"] if part.unfinished else []
    if any(part.runs and part.trains for part in parts):
        said.append(_lead(_all_entries(parts)))
    return "\n\n".join([*said, f"report: {folder / 'report.html'}"])


def _short(part: Part) -> str:
    if not part.runs:
        return _NOTHING
    if not part.trains:
        return page.text_table(cost_report.content(part.study["kind"], part.runs).printed())
    if part.layout.generic and not part.study["paper"]:
        return page.text_table(tables.overview(part.runs, part.entries, part.layout))
    return page.text_table(tables.printed(part.entries, part.layout))


# -------------------------------------------------------------------------------------------- what is recorded
def _recorded(runs: Sequence[Run]) -> dict[str, Any]:
    """What needs all recorded steps, and is kept in results.json, where there are fewer: `transitions`, of linear and
    feature connections without a grid, and `last_branch`, for each run |f|² of the last branch at the first and last
    record and its maximum.
    """
    with_rows = [run for run in runs if run.get("dynamics")]
    if not with_rows:
        return {}
    by_seed = [{run["seed"]: run["dynamics"] for run in with_rows if run["connection"] == name and not run["cell"]}
               for name in ("linear", "feature")]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    transitions = [point for measure in _MEASURES for point in transition_points(
        *([side[seed] for seed in seeds] for side in by_seed), measure)] if seeds else []
    return {"transitions": transitions, "last_branch": [_ends(run.get("dynamics") or []) for run in runs]}


def _ends(rows: Sequence[Mapping[str, Any]]) -> Optional[dict[str, float]]:
    site = last_branch(rows)
    norms = [norm for norm in (branch(row) for row in rows if row["name"] == site) if norm is not None]
    return {"first": norms[0], "highest": max(norms), "last": norms[-1]} if norms else None


def _thinned(run: Run) -> Run:
    """The run with at most `_STEPS` of its recorded steps, the first and the last among them, to 6 digits."""
    rows = run.get("dynamics")
    if not rows:
        return run
    steps = sorted({row["step"] for row in rows})
    last = len(steps) - 1
    kept = set(steps) if last < _STEPS else {steps[round(last * index / (_STEPS - 1))] for index in range(_STEPS)}
    return {**run, "dynamics": [
        {key: float(f"{value:.6g}") if isinstance(value, float) and key != "step" else value
         for key, value in row.items()} for row in rows if row["step"] in kept]}


# ------------------------------------------------------------------------------------------------------- JSON
def as_json(value: Any) -> str:
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
