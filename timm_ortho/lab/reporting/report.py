"""Report finished runs: `report.html` in one file, `report.md` with the plots in `figures/`, and `results.json`.

A report depends only on its parts, see `Part.of`. `results.json` contains them, with fewer recorded steps and a summary
of all recorded steps, so the report can be rewritten. Statistics are in `statistics`, tables in `tables`, plots in
`plots`, and their rendering in `page`. A study's `layout` lists its tables and plots. If a run is finished, the page
begins with the answer and ends with method and terms.

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
                 "size_from": "the model's default", "first_image": [32, 32], "channels": 3, "classes": 10,
                 "train": 50000, "validation": 10000, "validation_split": "test"},
    }
    runs = [{
        "cell": {"layers": "0,1"}, "seed": 0,   # axis -> value, number or text; in a switch study {"switch": "LO"}
        "connection": "feature",                # connection at the end of training; LO: linear, later feature
        # all keys below are optional; NaN and infinities are None
        "top1", "top5", "loss",                 # after the last epoch, on the images of "validation"; top-k in percent
        "best_top1", "best_epoch",              # of the epoch with the highest top-1, counted from 0
        "images_per_second",                    # in training without evaluation; median over the epochs
        "seconds",                              # of training and evaluation, summed over the epochs
        "peak_memory",                          # in bytes: memory of the GPU or, on a CPU, of the process
        "batch_size",                           # images per update of the weights
        "parameters", "blocks", "width", "epochs", "lr", "model", "device", "dataset",
        "switch_epoch",                         # epochs before the connection changes; None if it does not
        "ema",                                  # True if the EMA weights were evaluated
        "hold_out",                             # training images that measure the accuracy; 0: the validation split
        "labels",                               # names of the classes, or None
        "trainer": "lab",                       # or "train.py"
        "made_with": {"timm-ortho", "timm", "torch", "commit", "host", "cpu", "gpu", "driver", "command", "begin",
                      "end", "continued": [...]},
        # "epoch" counts from 0. train_loss is the mean of an epoch, with augmentation and label smoothing; eval_loss
        # has neither. Only the trainer "lab" writes the last three keys, with the meanings above
        "history": [{"epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr", "train_seconds",
                     "train_images_per_second", "train_peak_memory"}, ...],
        "probe": [{"epochs_done", "sites": [...]}, ...],    # on one batch, before training and after each epoch
        "dynamics": [...],                      # rows of `timm_ortho.record`
        "representation": {"effective_rank", "spectral_entropy", "feature_std",
                           "linear_cka"} or None,    # linear_cka: with the baseline's run; None for the baseline
    }, ...]
    unfinished = ["layers=0,1-feature-seed2", ...]
"""
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import starmap
from pathlib import Path
from statistics import median
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

from ..._text import file_name, finite
from .. import LabError, check_names, paper, refuse_links, value_text, write_json, write_text
from . import page, tables
from .layout import MEASURES, Layout, Run, grouped
from .page import Block, Code, Grid, Heading, Items, Picture, Table, Text
from .plots import DRAWINGS, HISTORY, Scene, branch, drawings, forest, last_branch
from .statistics import reach
from .transition import transition_points

_STEPS = 100  # maximum number of recorded steps in results.json and plots; the folders of the runs have all steps
_MEASURES = ("stream", "cosine", "parallel", "orthogonal")  # columns for which transition points are computed

_NOTHING = "No run is finished yet."
_OPTIONS = {"blocks": "blocks", "width of the last block": "width", "epochs": "epochs", "learning rate": "lr",
            "batch size": "batch_size"}  # title of a row -> key of a run
_NAMED = 3  # maximum number of differences that a sentence of the answer names


@dataclass(frozen=True)
class Part:
    """One study on one data set."""

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
        return cls(study, [_thinned(run) for run in runs], unfinished, recorded)

    @property
    def title(self) -> str:
        return title_of(self.study)

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.study)

    @cached_property
    def entries(self) -> list[tables.Entry]:
        return tables.entries_of(self.runs, self.layout)

    @property
    def name(self) -> str:
        return file_name("-".join(filter(None, [self.study["name"], self.study.get("dataset")])))

    @property
    def about(self) -> str:
        study = self.study
        name = f"Study “{study['name']}”" + (f" at scale “{study['scale']}”" if study["scale"] else "")
        models = ", ".join(map(str, study["axes"].get("model", [study["model"]])))
        shapes = {(run["blocks"], run["width"]) for run in self.runs if run.get("blocks") and run.get("width")}
        models += " ({} blocks, width {})".format(*shapes.pop()) if len(shapes) == 1 else ""
        data, seeds = study["dataset"] or "own images", _count(study["seeds"], "seed")
        return " ".join([f"{name} trains {models} on {data} with {seeds}.", *of_data(self.layout)])

    @property
    def json(self) -> dict[str, Any]:
        return {"study": self.study, "unfinished": self.unfinished, "lead": _lead([self]),
                "summary": [tables.plain(entry) for entry in self.entries], "recorded": self.recorded,
                "runs": self.runs}


def layout_of(study: Mapping[str, Any]) -> Layout:
    """Return the checked layout of a study's report. By default, the report has a row for each cell and connection."""
    dimensions = {*study["axes"], "model", "dataset", "connection", "measure"}
    keys = study.get("report") or {}
    if not isinstance(keys, Mapping):
        raise LabError(f"report must be a mapping, not {keys!r}")
    check_names(keys, set(Layout.__dataclass_fields__) - {"study", "generic"}, "report")
    generic = not study["paper"] and not keys.keys() & {"rows", "columns"}
    layout = Layout(study, **{"rows": [*study["axes"], "connection"], "generic": generic, **keys})
    for key, known in (("rows", dimensions), ("columns", dimensions), ("paper", dimensions), ("titles", dimensions),
                       ("labels", dimensions), ("measures", MEASURES), ("tables", tables.EXTRAS)):
        check_names(getattr(layout, key), known, f"report: {key}", "entry")
    if not layout.rows or not layout.measures:
        raise LabError("report: rows and measures need at least one entry each")
    check_names([layout.order] if layout.order else [], layout.rows, "report: order", "entry")
    for name, options in layout.plot_options():
        check_names([name], DRAWINGS, "report: plots", "entry")
        owner, accepted = f"report: plot '{name}'", [*signature(DRAWINGS[name]).parameters][1:]
        check_names(options, accepted, owner, "option")
        if "x" in accepted and "x" not in options:
            raise LabError(f"{owner} needs the option 'x', the dimension of the x axis")
        named = [options[key] for key in ("x", "by") if key in options]
        check_names([*named, *options.get("lines", ())], dimensions, owner, "dimension")
        check_names(options.get("measures", ()), MEASURES, owner, "measure")
        check_names([options["column"]] if "column" in options else [], HISTORY, owner, "column")
    layout = replace(layout, measures=list(filter(layout.varies, layout.measures)) or layout.measures)
    unnamed = len(layout.measures) > 1 and "measure" not in (*layout.rows, *layout.columns)
    return replace(layout, columns=[*layout.columns, "measure"]) if unnamed else layout


def title_of(study: Mapping[str, Any]) -> str:
    """Return the title of a report, with the paper's table if the study repeats one."""
    return f"{study['title']} ({study['paper']})" if study["paper"] else study["title"]


# ---------------------------------------------------------------------------------------------- writing
def write(parts: Sequence[Part], folder: Path) -> str:
    """Write `report.html`, `report.md`, `figures/*.svg` and `results.json`, and return table and answer as text.

    A report of several studies or data sets has a section for each, and a plot of all differences in top-1.

    """
    single = len(parts) == 1
    title = parts[0].title if single else f"{len(parts)} studies"
    results = parts[0].json if single else {"lead": _lead(parts), "parts": [part.json for part in parts]}
    write_files(title, list(document(parts)), results, Path(folder))
    return _text(parts, Path(folder))


def write_files(title: str, blocks: Sequence[Block], results: Mapping[str, Any], folder: Path) -> None:
    """Write the blocks of a report as HTML and Markdown, its plots, and its results as JSON."""
    refuse_links(folder / "figures")
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for block in blocks:
        if isinstance(block, Picture):
            write_text(folder / block.path, block.svg)
    write_json(folder / "results.json", results)
    write_text(folder / "report.md", page.markdown(title, blocks))
    write_text(folder / "report.html", page.page(title, blocks))


# ----------------------------------------------------------------------------------------------- the document
def document(parts: Sequence[Part]) -> Iterator[Block]:
    """Yield the blocks of a report: the answer, the parts (with headings if there are several), and the method."""
    finished = any(part.runs for part in parts)
    if finished:
        yield Text(_lead(parts))
    if len(parts) == 1:
        yield from (Text(parts[0].about), *_section(parts[0]))
    else:
        yield from _sections(parts)
    if finished:
        yield from (Heading("Method and terms"), Items(list(_terms(parts))))


def _sections(parts: Sequence[Part]) -> Iterator[Block]:
    names = [part.name for part in parts]
    names = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names, 1)]
    last = [(f"{name}: {_label(entry)}", entry) for name, part in zip(names, parts, strict=True)
            for entry in part.entries if entry.measure == "top1"]
    yield from forest(last, "all_differences")
    for name, part in zip(names, parts, strict=True):
        data = part.study.get("dataset")
        yield from (Heading(f"{part.title}, {data}" if data else part.title), Text(part.about))
        for block in _section(part):
            if isinstance(block, Heading):
                block = block._replace(level=3)
            elif isinstance(block, Picture):
                block = replace(block, name=f"{name}_{block.name}")
            yield block


def _compared(parts: Sequence[Part]) -> list[tables.Entry]:
    return [entry for part in parts for entry in part.entries if entry.is_compared]


def _section(part: Part) -> Iterator[Block]:
    study = part.study
    if part.unfinished:
        yield Text(f"Not finished: {'; '.join(part.unfinished)}.")
    if not part.runs:
        yield Text(_NOTHING)
    yield Heading("The paper's table and this one" if part.layout.has_paper else "Results")
    yield from _results(part)
    yield from deviations(study)
    if part.runs:
        yield from (Heading("Every run"), Grid(tables.every_run(part.runs, part.layout), "every run"))
        diverged = [_seeded(run) for run in part.runs if "loss" in run and not finite(run["loss"])]
        yield from [Text(f"Diverged, with a loss that is not finite: {'; '.join(diverged)}. Their accuracy is included "
                         "as measured.")] if diverged else []
    yield from origin(study, _made(part))


def deviations(study: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the section about differences from the paper. Studies without a paper and without changes have none."""
    if study["changed"] or study["paper"]:
        yield Heading("What differs from the paper")
        yield Items(study["changed"]) if study["changed"] else Text("No known difference.")


def origin(study: Mapping[str, Any], properties: Mapping[str, str]) -> Iterator[Block]:
    """Yield the section about how a report was made: its command, and a table of the properties that have a value."""
    yield from (Heading("How it was made"), Code(study["command"]))
    rows = [[key, value] for key, value in properties.items() if value]
    if rows:
        yield Grid(Table(["property", "value"], rows), "how it was made", wrap=True)


def _results(part: Part) -> Iterator[Block]:
    layout, entries = part.layout, part.entries
    table = tables.overview(part.runs, entries, layout) if layout.generic else tables.main_table(entries, layout)
    yield Grid(table, "the table")
    medians = ", and medians of speed and memory" if layout.generic else ""
    yield Text(note(part.study, f"The table has means ± standard deviations over the seeds{medians}. The metrics are "
                                f"measured on the {layout.images} images.",
                    "Runs with model_ema are evaluated with the EMA weights, the moving average of the trained weights."
                    if any(run.get("ema") for run in part.runs) else "",
                    layout.protocol.format(images=layout.images),
                    "images/s also depends on what else ran on the machine. To compare speeds, use timm-ortho bench."
                    if layout.generic else ""))
    yield Heading("Differences, paired by seed")
    if any(entry.is_compared for entry in entries):
        yield Grid(tables.differences(entries, layout), "differences to the baseline")
        yield from forest([(_label(entry), entry) for entry in entries])
    else:
        yield Text("There is no pair of runs to compare yet.")
    yield from extra_blocks(tables.EXTRAS[name](part.runs, layout, part.recorded) for name in layout.tables)
    drawn = drawings(Scene(part.runs, layout, part.recorded))
    yield from [Heading("Plots"), *drawn] if drawn else []


def extra_blocks(extras: Iterable[tables.Extra]) -> Iterator[Block]:
    """Yield heading, table and note of each additional table that has rows."""
    for extra in extras:
        if extra.table.rows:
            yield from (Heading(extra.title), Grid(extra.table, extra.title), Text(extra.note))


def _label(entry: tables.Entry) -> str:
    """Return the names of an entry's row and column without that of its measure, which reports show elsewhere."""
    return ", ".join(name for name in entry.names if name != entry.title)


def note(study: Mapping[str, Any], *measured: str) -> str:
    """Return the sentences `measured`, followed by the paper's protocol and source."""
    section = paper.section(study.get("table"))
    protocol = section.get("protocol") or section.get("definition")
    sentences = [*measured, f"{protocol}." if protocol else "",
                 f"Source: {section['source']}." if "source" in section else ""]
    return " ".join(filter(None, sentences))


def of_data(layout: Layout) -> Iterator[str]:
    """Yield sentences about the initial weights and the images of a study. Older studies have no `data`."""
    if layout.study.get("weights"):
        yield f"The runs start from the weights of {', '.join(layout.study['weights'])}."
    data = layout.study.get("data")
    if data:
        size, first = (data.get(key) and " x ".join(map(str, data[key])) for key in ("image_size", "first_image"))
        resized = f"; the first image of the data set has {first} pixels" if first and first != size else ""
        size = f"{size} pixels" if size else "several sizes"
        yield (f"The images have {size} (set by {data['size_from']}{resized}), "
               f"{_count(data['channels'], 'channel')} and {_count(data['classes'], 'class', 'classes')}. There are "
               f"{data['train']:,} training images and {data['validation']:,} {layout.images} images (split "
               f"“{data['validation_split']}”).")
        if data.get("on_device"):
            yield "The decoded images are stored on the device, where whole batches are augmented."


def _count(items: Any, one: str, many: str = "") -> str:
    """Return `1 seed` or `3 seeds`, for a number or a collection."""
    count = items if isinstance(items, int) else len(items)
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# ------------------------------------------------------------------------------------------------ the answer
def _lead(parts: Sequence[Part]) -> str:
    """Describe the detected differences, and the width of the confidence intervals."""
    compared = _compared(parts)
    if not compared:
        return "There is no pair of runs to compare yet."
    if min(map(_limit, parts)) >= 100:
        return ("There are too few images to tell from chance: even 100 % would be within three standard deviations of "
                "guessing.")
    untrained = [entry for part in parts for entry in _at_chance(part)]
    if untrained and len(untrained) == sum(entry.measure == "top1" for part in parts for entry in part.entries):
        return ("No network is more accurate than chance, so the differences say nothing about the connections. Train "
                "longer, or change the learning rate.")
    warning = (f"Not more accurate than chance: {'; '.join(dict.fromkeys(map(_label, untrained)))}. Differences to or "
               "of these networks say nothing about the connections. ") if untrained else ""
    return warning + _verdict(parts, compared)


def _limit(part: Part) -> float:
    """Return the accuracy of guessing plus three standard deviations in percent, 0 if it is unknown."""
    chance, images = part.layout.chance, (part.study.get("data") or {}).get("validation")
    return chance + 3 * (chance * (100 - chance) / images) ** 0.5 if chance and images else 0.0


def _at_chance(part: Part) -> list[tables.Entry]:
    """Return the entries whose mean accuracy is at most three standard deviations above that of guessing."""
    limit = _limit(part)
    return [entry for entry in part.entries if entry.measure == "top1" and entry.values and entry.moments[0] <= limit
            ] if limit else []


def _verdict(parts: Sequence[Part], compared: Sequence[tables.Entry]) -> str:
    tested = [entry for entry in compared if entry.holm is not None]
    untested = grouped([entry for entry in compared if entry.holm is None],
                       lambda entry: entry.reading.removeprefix("no interval: "))
    if not tested:
        differences = [entry.difference for entry in compared]
        equal = all(difference and difference.mean == 0 and difference.pairs > 1 for difference in differences)
        hint = " If the model has LayerScale, its branches may be too small: see docs/settings.md." if equal else ""
        return (f"No difference could be tested ({'; '.join(untested)}): a confidence interval needs at least two "
                f"seeds for which the run and its baseline are finished, and differences that vary.{hint}")
    baseline = [part.study["baseline"] for part in parts if part.entries]
    where = "between the connections" if all(list(changed) == ["connection"] for changed in baseline) else (
        "to the baseline")
    detected = sorted((entry for entry in tested if entry.is_detected), key=lambda entry: entry.p or 0.0)
    unadjusted = sum(entry.reading.startswith(("higher", "lower")) for entry in tested)
    if not detected:
        sentences = [f"No difference {where} was detected.", _sensitivity(tested)]
    else:
        named = "; ".join(f"{_label(entry)} {entry.compared()} in {entry.title}" for entry in detected[:_NAMED])
        among = "among them " if len(detected) > _NAMED else ""
        verb = "was" if len(detected) == 1 else "were"
        subject = f"The difference {where}" if len(compared) == 1 else (
            f"{len(detected)} of {len(compared)} differences {where}")
        sentences = [f"{subject} {verb} detected: {among}{named}.", _sensitivity(tested)]
    if unadjusted > len(detected):
        sentences.append(f"Without adjustment for {_adjustment(parts)}, {_count(unadjusted, 'difference')} would be "
                         "detected.")
    sentences += [f"{_count(entries, 'difference')} could not be tested: {why}." for why, entries in untested.items()]
    return " ".join(sentences)


def _adjustment(parts: Sequence[Part]) -> str:
    """Return the number of comparisons that Holm's method adjusts for. Each study is adjusted separately."""
    counts = [sum(entry.difference is not None for entry in part.entries) for part in parts if _compared([part])]
    if len(counts) == 1:
        return _count(counts[0], "comparison")
    return f"the comparisons of each study ({', '.join(map(str, counts))})"


def _sensitivity(tested: Sequence[tables.Entry]) -> str:
    """Return a sentence with the half-widths of the intervals in top-1 or, without top-1, the first tested measure."""
    first = next((entry for entry in tested if entry.measure == "top1"), tested[0])
    differences = [entry.difference for entry in tested if entry.measure == first.measure and entry.difference]
    pairs = sorted({difference.pairs for difference in differences})
    halves = sorted(difference.half_width for difference in differences if difference.half_width is not None)
    least, middle, most = (_two_digits(value) for value in (halves[0], median(halves), halves[-1]))
    spread = f" (median; {least} to {most})" if least != most else ""
    title, percent, protocol = MEASURES[first.measure].title.format(images="").partition(" %")
    unit = (" point" if middle == "1" else " points") if percent else ""
    count = " to ".join(map(str, (pairs[0], pairs[-1])[:len(pairs)]))
    return (f"With {count} pairs of runs, the half-width of the 95 % interval{'s' * (len(halves) > 1)} in "
            f"{title.strip()}{protocol} is {middle}{unit}{spread}.")


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _terms(parts: Sequence[Part]) -> Iterator[str]:
    """Yield the definitions of the terms that occur in this report."""
    compared = _compared(parts)
    yield "Mean ± standard deviation: both are over the seeds of one setting."
    if not compared:
        return
    yield ("Difference: value of a run minus value of the baseline's run with the same seed. Runs that differ only in "
           "the connection or its arguments start from the same weights and see the same batches. Tables have the mean "
           "over the seeds.")
    reaches = ", ".join(f"{reach(pairs):.1f} with {pairs}" for pairs in sorted(
        {entry.difference.pairs for entry in compared if entry.difference and entry.difference.pairs > 1}))
    yield ("95 % CI: Student's confidence interval of the mean difference. It covers the variation between seeds, not "
           "the sampling of the evaluated images, and is not adjusted for the number of comparisons. A difference has "
           "no interval if there is one pair, or if all pairs differ by the same amount: their variance is then "
           "unknown, not zero.")
    if reaches:
        yield f"Half-width of the interval, in standard deviations of the differences, by number of seeds: {reaches}."
    yield ("Pooled variance: in a group of settings that are compared with each other, a metric is modelled as a value "
           "of the setting plus a value of the seed plus an error. One error variance is estimated from all groups. "
           "Because the variance may differ between settings, p and the reading use only the paired differences.")
    yield (f"p (Holm): two-sided p of the paired differences, adjusted for {_adjustment(parts)}. A "
           "difference without interval counts as p = 1. A difference is detected if its adjusted p is at most 0.05. "
           "“Not detected” is no evidence that two settings are equal.")
    if any(entry.effects for entry in compared):
        yield ("The paper's differences are from the paper's data sets, in points. The last column has the "
               "half-width of the paired interval, and the paper's differences that it excludes and contains.")


# ------------------------------------------------------------------------------------------- how it was made
def _made(part: Part) -> dict[str, str]:
    """Return a study's settings, machines and versions as text; an empty text for a value that is unknown."""
    study, runs = part.study, part.runs
    return {
        "seeds": ", ".join(map(str, study["seeds"])),
        "connections": ", ".join(f"{paper.name('connection', name)} ({name})" for name in study["connections"]),
        "baseline": ", ".join(starmap(tables.setting, study["baseline"].items())),
        **{axis: ", ".join(map(str, values)) for axis, values in study["axes"].items()},
        "parameters": _distinct(f"{run['parameters']:,}" for run in runs if run.get("parameters")),
        **{title: _distinct(value_text(run[key]) for run in runs if run.get(key)) for title, key in _OPTIONS.items()
           if key not in study["axes"]},
        "trainer": _distinct(run.get("trainer") for run in runs),
        "device": _distinct(run.get("device") for run in runs),
        "wall time": _wall_time(runs),
        "unfinished": _count(part.unfinished, "run") if part.unfinished else "none",
        **made_with(study, runs),
    }


def made_with(study: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, str]:
    """Return versions, commits and machines of the runs. A run without `made_with` has the study's `versions`."""
    made = [{**study.get("versions", {}), **(run.get("made_with") or {})} for run in runs]
    versions = [", ".join(f"{name} {of_run[name]}" for name in ("timm-ortho", "torch", "timm") if of_run.get(name))
                for of_run in made]
    times = [of_run[key] for of_run in made for key in ("begin", "end") if of_run.get(key)]
    return {
        "versions": _distinct(versions, "; "),
        **{key: _distinct(of_run.get(key) for of_run in made) for key in ("commit", "host", "cpu", "gpu", "driver")},
        "begun and ended": f"{min(times)} to {max(times)}" if times else "",
        "continued": "; ".join(_seeded(run) for run, of_run in zip(runs, made, strict=True) if of_run.get("continued")),
    }


def _seeded(run: Run) -> str:
    return f"{tables.run_name(run)}, seed {run['seed']}"


def _distinct(values: Any, between: str = ", ") -> str:
    return between.join(dict.fromkeys(str(value) for value in values if value))


def _wall_time(runs: Sequence[Run]) -> str:
    seconds = [run["seconds"] for run in runs if finite(run.get("seconds"))]
    whole = sum(seconds)
    text = f"{whole:.0f} s" if whole < 120 else f"{whole / 60:.0f} min" if whole < 7200 else f"{whole / 3600:.1f} h"
    return f"{text} of training in {_count(seconds, 'run')}" if seconds else ""


def _text(parts: Sequence[Part], folder: Path) -> str:
    paragraphs, between = [], "\n\n" if len(parts) == 1 else "\n"
    for part in parts:
        paragraphs += [f"{part.title}{between}{part.about}", _short(part)]
        paragraphs += [f"not finished: {'; '.join(part.unfinished)}"] if part.unfinished else []
    if any(part.runs for part in parts):
        paragraphs.append(_lead(parts))
    return "\n\n".join([*paragraphs, f"report: {folder / 'report.html'}"])


def _short(part: Part) -> str:
    if not part.runs:
        return _NOTHING
    if part.layout.generic:
        return page.text_table(tables.overview(part.runs, part.entries, part.layout))
    return page.text_table(tables.printed(part.entries, part.layout))


# -------------------------------------------------------------------------------------------- records
def _recorded(runs: Sequence[Run]) -> dict[str, Any]:
    """Return a summary of the complete records. `results.json` contains it, because its own records are thinned.

    `transitions` has the transition points of linear and feature connections in studies without a grid. `last_branch`
    has |f|² of each run's last branch at the first and the last record, and the maximum over all records.
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
    """Return a run with at most `_STEPS` recorded steps, including first and last. Values have 6 significant digits."""
    rows = run.get("dynamics")
    if not rows:
        return run
    steps = sorted({row["step"] for row in rows})
    last = len(steps) - 1
    kept = set(steps) if last < _STEPS else {steps[round(last * index / (_STEPS - 1))] for index in range(_STEPS)}
    return {**run, "dynamics": [
        {key: float(f"{value:.6g}") if isinstance(value, float) and key != "step" else value
         for key, value in row.items()} for row in rows if row["step"] in kept]}
