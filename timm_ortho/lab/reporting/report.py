"""Report finished runs: `report.html` in one file, `report.md` with the plots in `figures/`, and their numbers.

A report depends only on its `Part`. `results.json` contains it, with fewer recorded steps, and `history.csv` has a row
for each run, epoch and metric. Statistics are in `statistics`, tables in `tables`, plots in `plots`, and their
rendering in `page`. A study's `layout` lists its tables and plots. The title and the first sentences are the answer.

    study = {
        "name": "layer_pattern", "title": "Which blocks carry ...", "scale": "small", "dataset": "digits",
        "paper": "Table 4", "table": "layer_pattern",   # table: key of paper.json; without a paper, both are ""
        "model": "vit_small",               # or "7 architectures"
        "axes": {"layers": ["none", "0,1", ...]},    # each axis of the grid and its values, in order; {} for none
        "connections": ["linear", "feature"], "seeds": [0, 1, 2],    # in order
        "baseline": {"layers": "none"},     # values in which the baseline differs from the compared run. All other
                                            # values and the seed are equal.
                                            # `tables.baseline_of` returns the baseline of a run's group
        "changed": ["epochs: 15 here; 300 in the paper", ...], "command": "timm-ortho study run layer_pattern",
        # optional
        "versions": {"timm-ortho": ..., "torch": ..., "timm": ...},    # for runs without "made_with"
        "report": {"rows": [...], ...},     # see `layout`
        "validation": "test",               # images of the accuracy: "test" or "hold-out"
        "data": {"image_size": [32, 32],    # None if the models differ
                 "first_image": [32, 32], "channels": 3, "classes": 10,
                 "train": 50000, "validation": 10000, "validation_split": "test"},
    }
    runs = [{
        "cell": {"layers": "0,1"}, "seed": 0,   # axis -> value, number or text; in a switch study {"switch": "LO"}
        "connection": "feature",                # connection at the end of training; LO: linear, later feature
        # all keys below are optional; NaN and infinities are None
        "top1", "top5", "loss", "parameters", ...    # the result in `run.json`, see `run_folder`; top-k in percent
        "dataset", "ema",                       # ema: True if the EMA weights were evaluated
        "made_with": {...},                     # `RunFile.made_with`
        "history": [{"epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr", ...}, ...],    # epochs from 0
        "probe": [{"epochs_done", "sites": [...]}],    # on one batch, after training
        "dynamics": [...],                      # rows of `timm_ortho.record`
        "representation": {..., "linear_cka"} or None,    # linear_cka: with the baseline's run; None for the baseline
    }, ...]
    unfinished = ["layers=0,1-feature-seed2", ...]
"""
from dataclasses import dataclass, fields, replace
from functools import cached_property
from inspect import signature
from itertools import starmap
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

from ..._kinds import ANY, checked, kind_of
from ..._text import UserError, csv_text, finite, plain_lines
from .. import LabError, check_names, paper, refuse_links, value_text, write_json, write_text
from . import page, tables
from .layout import MEASURES, Layout, Run
from .page import Block, Code, Heading, Link, Picture, Table
from .plots import DRAWINGS, HISTORY, Scene, branch, drawings, forest, last_branch
from .statistics import detected
from .transition import transition_points

_STEPS = 100  # maximum number of recorded steps in results.json and plots; the folders of the runs have all steps
_MEASURES = ("stream", "cosine", "parallel", "orthogonal")  # columns for which transition points are computed
_OPTIONS = {"blocks": "blocks", "width of the last block": "width", "epochs": "epochs", "learning rate": "lr",
            "batch size": "batch_size"}  # title of a row -> key of a run
_NAMED = 3  # maximum number of differences in the title and in a sentence of the answer


@dataclass(frozen=True)
class Part:
    """A study and its runs."""

    study: Mapping[str, Any]
    runs: Sequence[Run]  # with thinned records
    unfinished: Sequence[str]
    recorded: Mapping[str, Any]  # summary of the complete records

    @classmethod
    def of(cls, study: Mapping, runs: Sequence[Run], unfinished: Sequence[str], recorded: Optional[Mapping] = None):
        """Keep at most `_STEPS` recorded steps of each run.

        Args:
            study, runs, unfinished: See the docstring of the module.
            recorded: The summary of all recorded steps, if the runs are already thinned. By default, it is computed.
        """
        recorded = _recorded(runs) if recorded is None else recorded
        return cls(study, list(map(_thinned, runs)), unfinished, recorded)

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.study)

    @cached_property
    def entries(self) -> list[tables.Entry]:
        return tables.entries_of(self.runs, self.layout)

    @property
    def compared(self) -> list[tables.Entry]:
        return [entry for entry in self.entries if entry.is_compared]

    @property
    def data(self) -> str:
        return self.study["dataset"] or "own images"

    @property
    def question(self) -> str:
        """The study's title, with the paper's table if the study repeats one."""
        return f"{self.study['title']} ({self.study['paper']})" if self.study["paper"] else self.study["title"]

    @property
    def title(self) -> str:
        """The answer, such as `vit_small on digits, 2 epochs: Orthogonal-F +1.11 [-2.73, +4.95]`.

        A study with a grid or with many comparisons has its question as title.
        """
        main = [entry for entry in self.compared if entry.measure == self.layout.measures[0]]
        if self.study["axes"] or not 0 < len(main) <= _NAMED:
            return self.question
        epochs = _distinct((run.get("epochs") for run in self.runs), " or ")
        trained = f", {epochs} epoch{'s' * (epochs != '1')}" if epochs else ""
        differences = ", ".join(f"{entry.label} {entry.compared()}" for entry in main)
        return f"{self.study['model']} on {self.data}{trained}: {differences}"

    @property
    def about(self) -> str:
        study = self.study
        name = f"Study “{study['name']}”" + (f" at scale “{study['scale']}”" if study["scale"] else "")
        models = ", ".join(map(str, study["axes"].get("model", [study["model"]])))
        shapes = {(run["blocks"], run["width"]) for run in self.runs if run.get("blocks") and run.get("width")}
        models += " ({} blocks, width {})".format(*shapes.pop()) if len(shapes) == 1 else ""
        seeds = _count(study["seeds"], "seed")
        question = self.question if self.question.endswith(("?", ".", ")")) else f"{self.question}."
        return " ".join([f"{name}: {question} It trains {models} on {self.data} with {seeds}.",
                         *of_data(self.layout)])

    @property
    def json(self) -> dict[str, Any]:
        return {"study": self.study, "unfinished": self.unfinished, "lead": " ".join(_lead(self)),
                "summary": [tables.plain(entry) for entry in self.entries], "recorded": self.recorded,
                "runs": self.runs}


def layout_of(study: Mapping[str, Any]) -> Layout:
    """Return the checked layout of a study's report. By default, the report has a row for each cell and connection."""
    try:
        return _checked_layout(study)
    except UserError as error:
        raise LabError(str(error)) from None


def _checked_layout(study: Mapping[str, Any]) -> Layout:
    if "measure" in study["axes"]:
        raise LabError("an axis cannot have the name 'measure', which is a dimension of each report: rename it")
    named = {*study["axes"], "model", "dataset", "connection"}
    dimensions = {*named, "measure"}
    numeric = [axis for axis, values in study["axes"].items()
               if all(isinstance(value, (int, float)) for value in values)]
    known = {**dict.fromkeys(("rows", "columns", "paper", "titles", "labels"), dimensions),
             **dict.fromkeys(("order", "x", "by", "lines"), named),
             "measures": MEASURES, "tables": tables.EXTRAS, "column": HISTORY}

    def check_values(values: Mapping[str, Any], types: Mapping[str, Any], owner: str) -> None:
        for key, value in values.items():
            checked(value, kind_of(types[key]), f"{owner}{key}")
            if key in known and value != "":
                check_names([value] if isinstance(value, str) else value, known[key], f"{owner}{key}", "entry")

    given, types = study.get("report") or {}, {key.name: key.type for key in fields(Layout) if key.name != "study"}
    checked(given, {...: ANY}, "report")
    check_names(given, types, "report")
    keys = {key: value for key, value in given.items() if value is not None}
    check_values(keys, types, "report: ")
    layout = Layout(study, **{"rows": [*study["axes"], "connection"], **keys})
    if not layout.rows or not layout.measures:
        raise LabError("report: rows and measures need at least one entry each")
    if layout.order and layout.order not in numeric:
        raise LabError(f"report: order needs an axis whose values are numbers, not '{layout.order}'")
    for name, options in layout.plot_options():
        check_names([name], DRAWINGS, "report: plots", "entry")
        _, *accepted = signature(DRAWINGS[name]).parameters.values()
        types, owner = {option.name: option.annotation for option in accepted}, f"report: plot '{name}'"
        check_names(options, types, owner, "option")
        check_values(options, types, f"{owner}: ")
        if "x" in types and not options.get("x"):
            raise LabError(f"{owner} needs the option 'x', the dimension of the x axis")
        if options.get("pearson") and options["x"] not in numeric:
            raise LabError(f"{owner}: pearson needs an axis whose values are numbers, not '{options['x']}'")
    layout = replace(layout, measures=list(filter(layout.varies, layout.measures)) or layout.measures)
    unnamed = len(layout.measures) > 1 and "measure" not in (*layout.rows, *layout.columns)
    return replace(layout, columns=[*layout.columns, "measure"]) if unnamed else layout


# ---------------------------------------------------------------------------------------------- writing
def write(part: Part, folder: Path) -> str:
    """Write the report and its files, and return table and answer as text."""
    refuse_links(folder / "figures")
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", part.json)
    write_text(folder / "history.csv", csv_text(list(tables.tidy(part.runs))))
    # other people may have written the texts
    part = Part(*map(plain_lines, (part.study, part.runs, part.unfinished, part.recorded)))
    blocks = list(document(part))
    for block in blocks:
        if isinstance(block, Picture):
            write_text(folder / block.path, block.svg)
    write_text(folder / "report.md", page.markdown(part.title, blocks))
    write_text(folder / "report.html", page.page(part.title, blocks))
    table = page.text_table(tables.results(part.entries, part.layout)) if part.runs else ""
    unfinished = f"not finished: {'; '.join(part.unfinished)}" if part.unfinished else ""
    return "\n\n".join(filter(None, [part.title, part.about, table, unfinished, " ".join(_lead(part)),
                                     f"report: {folder / 'report.html'}"]))


# ----------------------------------------------------------------------------------------------- the document
def document(part: Part) -> Iterator[Block]:
    """Yield the blocks of a report: the answer, the results, the plots, the runs, and the terms."""
    yield from (" ".join(_lead(part)), part.about)
    if part.unfinished:
        yield f"Not finished: {'; '.join(part.unfinished)}."
    if part.runs:
        yield from _results(part)
    yield from part.study["changed"]
    if part.runs:
        yield from (Heading("Every run"), tables.every_run(part.runs, part.layout),
                    Link("All epochs as CSV", "history.csv"))
        diverged = _seeded(part, [run for run in part.runs if "loss" in run and not finite(run["loss"])])
        if diverged:
            yield f"Diverged, with a loss that is not finite: {diverged}. Their accuracy is included as measured."
    yield from (Heading("How it was made"), Code(part.study["command"]))
    rows = [[key, value] for key, value in _made(part).items() if value]
    yield Table(["property", "value"], rows, label="how it was made", wrap=True)
    if part.compared:
        yield from (Heading("Method and terms"), _terms(part))


def _results(part: Part) -> Iterator[Block]:
    layout, section = part.layout, paper.section(part.study.get("table"))
    yield from (Heading("Results"), tables.results(part.entries, layout))
    protocol = section.get("protocol") or section.get("definition")
    baseline = ", ".join(layout.named(axis, value_text(value)) for axis, value in part.study["baseline"].items())
    yield " ".join(filter(None, [
        f"Means ± standard deviations over the seeds, on the {layout.images} images, and differences to {baseline} "
        "with the same seed.",
        "Runs with model_ema are evaluated with the EMA weights, the moving average of the trained weights."
        if any(run.get("ema") for run in part.runs) else "",
        layout.protocol.replace("{images}", layout.images), f"{protocol}." if protocol else "",
        f"Source: {section['source']}." if "source" in section else ""]))
    yield from forest(part.entries)
    for table, note in (tables.EXTRAS[name](part.runs, layout, part.recorded) for name in layout.tables):
        if table.rows:
            yield from (Heading(table.label), table, note)
    drawn = drawings(Scene(part.runs, layout, part.recorded))
    yield from [Heading("Plots"), *drawn] if drawn else []


def of_data(layout: Layout) -> Iterator[str]:
    """Yield sentences about the initial weights and the images of a study. Older studies have no `data`."""
    if layout.study.get("weights"):
        yield f"The runs start from the weights of {', '.join(layout.study['weights'])}."
    data = layout.study.get("data")
    if data:
        size, first = (data.get(key) and " x ".join(map(str, data[key])) for key in ("image_size", "first_image"))
        resized = f" (the first image of the data set: {first})" if first and first != size else ""
        size = f"{size} pixels" if size else "several sizes"
        yield (f"The images have {size}{resized}, {_count(data['channels'], 'channel')} and "
               f"{_count(data['classes'], 'class', 'classes')}. There are {data['train']:,} training images and "
               f"{data['validation']:,} {layout.images} images (split “{data['validation_split']}”).")
        if data.get("on_device"):
            yield "The decoded images are stored on the device, where whole batches are augmented."


def _count(items: Any, one: str, many: str = "") -> str:
    """Return `1 seed` or `3 seeds`, for a number or a collection."""
    count = items if isinstance(items, int) else len(items)
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# ------------------------------------------------------------------------------------------------ the answer
def _lead(part: Part) -> Iterator[str]:
    """Yield sentences with the detected differences, or with the reason why there are none."""
    limit = _limit(part)
    accuracies = [entry for entry in part.entries if entry.measure == "top1"]
    untrained = [entry for entry in accuracies if entry.values and entry.moments[0] <= limit]
    if not part.runs:
        yield "No run is finished yet."
    elif not part.compared:
        yield "There is no pair of runs to compare yet."
    elif limit >= 100:
        yield ("There are too few images to tell from chance: even 100 % would be within three standard deviations of "
               "guessing.")
    elif untrained and len(untrained) == len(accuracies):
        yield ("No network is more accurate than chance, so the differences do not compare the connections. Train "
               "longer, or change the learning rate.")
    else:
        if untrained:
            yield (f"Not more accurate than chance: {'; '.join(dict.fromkeys(entry.label for entry in untrained))}. "
                   "Differences to or of these networks do not compare the connections.")
        yield from _verdict(part.compared)


def _limit(part: Part) -> float:
    """Return the accuracy of guessing plus three standard deviations in percent, 0 if it is unknown."""
    chance, images = part.layout.chance, (part.study.get("data") or {}).get("validation")
    return chance + 3 * (chance * (100 - chance) / images) ** 0.5 if chance and images else 0.0


def _verdict(compared: Sequence[tables.Entry]) -> Iterator[str]:
    tested = [entry for entry in compared if entry.holm is not None]
    found = sorted((entry for entry in tested if detected(entry.holm)), key=lambda entry: entry.difference.p)
    count = _count(compared, "difference")
    if found:
        named = "; ".join(f"{entry.label} {entry.compared()} in {entry.title}" for entry in found[:_NAMED])
        yield f"{len(found)} of {count} detected: {'among them ' * (len(found) > _NAMED)}{named}."
    elif tested:
        yield f"None of {count} was detected." if len(compared) > 1 else "The difference was not detected."
    if tested:
        main = [entry for entry in tested if entry.measure == tested[0].measure]
        halves = sorted(entry.difference.half_width for entry in main)
        spread = dict.fromkeys(f"{half:.2g}" for half in (halves[0], halves[-1]))
        yield f"The 95 % intervals in {main[0].title} are ± {' to ± '.join(spread)}."
    untested = [entry for entry in compared if entry.holm is None]
    if untested:
        reasons = dict.fromkeys(entry.difference.why_no_interval if entry.difference else entry.compared()
                                for entry in untested)
        yield f"{_count(untested, 'difference')} could not be tested: {'; '.join(reasons)}."
    differences = [entry.difference for entry in compared]
    if all(difference and difference.mean == 0 and difference.pairs > 1 for difference in differences):
        yield "If the model has LayerScale, its branches may be too small: see docs/settings.md."


def _terms(part: Part) -> list[str]:
    """Return the definitions of the terms of a report."""
    comparisons = sum(entry.difference is not None for entry in part.entries)
    return [
        "Difference: a run minus the baseline's run with the same seed, averaged over the seeds. Runs that differ only "
        "in the connection or its arguments start from the same weights and see the same batches.",
        "95 % CI: Student's confidence interval of the mean difference. It covers the variation between seeds, not the "
        "sampling of the evaluated images, and is not adjusted for the number of comparisons. A difference has no "
        "interval if there is one pair, or if all pairs differ by the same amount: their variance is then unknown, not "
        "zero.",
        f"p (Holm): two-sided p of the paired differences, adjusted for the comparisons of the study ({comparisons}). "
        "A difference without interval counts as p = 1. A difference is detected if its adjusted p is at most 0.05. "
        "“Not detected” is no evidence that two settings are equal."]


# ------------------------------------------------------------------------------------------- how it was made
def _made(part: Part) -> dict[str, str]:
    """Return a study's settings, machines and versions as text; an empty text for a value that is unknown.

    A run without `made_with` has the study's `versions`.
    """
    study, runs = part.study, part.runs
    made = [{**(study.get("versions") or {}), **(run.get("made_with") or {})} for run in runs]
    versions = [", ".join(f"{name} {of_run[name]}" for name in ("timm-ortho", "torch", "timm") if of_run.get(name))
                for of_run in made]
    times = [of_run[key] for of_run in made for key in ("begin", "end") if of_run.get(key)]
    return {
        "seeds": ", ".join(map(str, study["seeds"])),
        "connections": ", ".join(f"{paper.name('connection', name)} ({name})" for name in study["connections"]),
        "baseline": ", ".join(starmap(tables.setting, study["baseline"].items())),
        **{axis: ", ".join(map(str, values)) for axis, values in study["axes"].items()},
        "parameters": _distinct(f"{run['parameters']:,}" for run in runs if run.get("parameters")),
        **{title: _distinct(value_text(run[key]) for run in runs if run.get(key)) for title, key in _OPTIONS.items()
           if key not in study["axes"]},
        **{key: _distinct(run.get(key) for run in runs) for key in ("trainer", "device")},
        "unfinished": _count(part.unfinished, "run") if part.unfinished else "none",
        "versions": _distinct(versions, "; "),
        **{key: _distinct(of_run.get(key) for of_run in made) for key in ("commit", "host", "cpu", "gpu", "driver")},
        "begun and ended": f"{min(times)} to {max(times)}" if times else "",
        "continued": _seeded(part, [run for run, of_run in zip(runs, made, strict=True) if of_run.get("continued")]),
    }


def _seeded(part: Part, runs: Sequence[Run]) -> str:
    return "; ".join(f"{part.layout.run_name(run)}, seed {run['seed']}" for run in runs)


def _distinct(values: Iterable[Any], between: str = ", ") -> str:
    return between.join(dict.fromkeys(str(value) for value in values if value))


# -------------------------------------------------------------------------------------------- records
def _recorded(runs: Sequence[Run]) -> dict[str, Any]:
    """Return a summary of the complete records.

    `transitions` has the transition points of linear and feature connections in studies without a grid. `last_branch`
    has |f|² of each run's last branch at the first and the last record, and the maximum over all records.
    """
    if not any(run.get("dynamics") for run in runs):
        return {}
    by_seed = [{run["seed"]: run["dynamics"] for run in runs
                if run["connection"] == name and not run["cell"] and run.get("dynamics")}
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
    """Return a run with at most `_STEPS` recorded steps, including first and last."""
    rows = run.get("dynamics") or []
    steps = sorted({row["step"] for row in rows})
    last = len(steps) - 1
    if last < _STEPS:
        return run
    kept = {steps[round(last * index / (_STEPS - 1))] for index in range(_STEPS)}
    return {**run, "dynamics": [row for row in rows if row["step"] in kept]}
