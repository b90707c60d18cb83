"""Every study of the paper that trains: where a run stands in the paper's table, what is there, and which figures.

`SPECS` is the table of contents; a study that is not in it, one of the user's own, gets `own(study)`. Studies that
train nothing are in `cost_specs`.
"""
import re
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Callable, Mapping, Optional, Sequence

from matplotlib.figure import Figure

from . import paper, study_figures as figures
from .grid import base_name
from .page import Table
from .plots import finite
from .study_tables import NOT_IN_PAPER, Measure, Paper, Place, connection_name, entries, group_runs
from .transition import transition_points

__all__ = ["SPECS", "Drawing", "Extra", "Spec", "model_name", "own", "run_name"]

Run = Mapping[str, Any]
Study = Mapping[str, Any]


@dataclass(frozen=True)
class Drawing:
    """A figure: name of its file, caption, what is to be seen in words, and what draws it."""

    name: str
    caption: str
    alt: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Extra:
    """A table of what was measured that has no counterpart in the paper's tables."""

    title: str
    note: str
    table: Table


@dataclass(frozen=True)
class Spec:
    """How the table and the figures of a study are made from its runs.

    Attributes:
        names: Titles of a row's names.
        place: From study, run, name of the measure and the measure to where the run stands.
        measures: By name; which of a run's numbers are shown.
        paper: The paper's figures by place.
        figures: From study and runs to what is drawn; nothing of what the runs have no record of.
        extras: Further tables.
        order: Sorts the rows; without it the paper's order.
        protocol: How the measured numbers are taken, where it is not simply the last epoch.
        unstated: What stands where the paper has no figure.
    """

    names: Sequence[str]
    place: Callable[[Study, Run, str, Measure], Place]
    measures: Mapping[str, Measure]
    paper: Callable[[], Paper] = dict
    figures: Callable[[Study, Sequence[Run]], list[Drawing]] = lambda study, runs: []
    extras: Callable[[Study, Sequence[Run]], list[Extra]] = lambda study, runs: []
    order: Optional[Callable[[tuple[str, ...]], Any]] = None
    protocol: str = "Figures are those of the last epoch."
    unstated: str = NOT_IN_PAPER


# ---------------------------------------------------------------------------------------------- measures
def _best(run: Run) -> Optional[float]:
    """The mean of a run's five best validation epochs, which is the paper's protocol for Table 2."""
    values = sorted(row["eval_top1"] for row in run["history"] if finite(row["eval_top1"]))
    return fmean(values[-5:]) if values else float("nan")


def _represented(key: str) -> Callable[[Run], Optional[float]]:
    def read(run: Run) -> Optional[float]:
        return (run["representation"] or {}).get(key)
    return read


def _number(key: str) -> Callable[[Run], float]:
    """A number that every run has: null is one that JSON does not have."""
    def read(run: Run) -> float:
        return float("nan") if run[key] is None else run[key]
    return read


_TOP1 = Measure("top-1 %", _number("top1"))
_TOP5 = Measure("top-5 %", _number("top5"))
_BEST = Measure("best top-1 %", _number("best_top1"))
_LOSS = Measure("validation loss", _number("loss"), 4)
_TOP = {"top1": _TOP1, "top5": _TOP5}
_FAMILY_MEASURES = {"top1": _TOP1, "loss": _LOSS}
_FEATURES = {
    "effective_rank": Measure("effective rank", _represented("effective_rank"), 1),
    "spectral_entropy": Measure("spectral entropy", _represented("spectral_entropy"), 3),
    "linear_cka": Measure("linear CKA between the two", _represented("linear_cka"), 3),
    "feature_std": Measure("feature standard deviation", _represented("feature_std"), 3),
}


# ------------------------------------------------------------------------------------------------- names
def dataset_name(dataset: str) -> str:
    key = dataset.rpartition("/")[2]
    known = paper.figures()["datasets"].get(key)
    return known["name"] if known else key or "own images"


def model_name(model: str) -> str:
    key = paper.architecture(model)
    return paper.figures()["architectures"][key]["name"] if key else model


def run_name(run: Run) -> str:
    cell = [f"{axis} {_shown(value)}" for axis, value in run["cell"].items()]
    return ", ".join([*cell, connection_name(run["connection"])])


def _shown(value: Any) -> str:
    """0.1 as `0.1`, 1e-06 as `1e-6`, which is how the paper writes them."""
    if not isinstance(value, float):
        return str(value)
    digits, _, power = f"{value:e}".partition("e")
    if value and not -2 <= int(power) <= 3:
        return f"{float(digits):g}e{int(power)}"
    return f"{value:g}"


def _power(value: Any) -> str:
    """Learning rates and eps, always as `5e-4`."""
    digits, _, power = f"{float(value):e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def _axis(run: Run) -> Any:
    """The value of the study's own axis."""
    return next(value for axis, value in run["cell"].items() if axis not in ("model", "dataset"))


def _switch(run: Run) -> str:
    words = {"L": "Linear", "O": "Orthogonal"}
    return " → ".join(words.get(letter, letter) for letter in _axis(run))


def _norm(run: Run) -> str:
    value = _axis(run)
    known = {True: "with", False: "without", "true": "with", "false": "without"}
    return str(known.get(value, value))


def _start(run: Run) -> str:
    learned = run["connection"] == "hybrid" and run["cell"]
    return f"{_axis(run)} start" if learned else connection_name(run["connection"])


def _connection(run: Run) -> str:
    return run["connection"]


# ------------------------------------------------------------------------------------------------ places
def _accuracy_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    model = model_name(str(run["cell"].get("model", study["model"])))
    dataset = dataset_name(str(run["cell"].get("dataset", study["dataset"])))
    return (model, connection_name(run["connection"])), (dataset,)


def _accuracy_paper() -> Paper:
    table = paper.figures()["accuracy"]
    columns = {**{key: entry["name"] for key, entry in _datasets().items()},
               "imagenet1k_first_version": "ImageNet-1k (first version)"}
    return {
        ((model_name(model), connection_name(connection)), (columns[dataset],)): figure
        for dataset in columns
        for model, by_dataset in table.items() if isinstance(by_dataset, dict)
        for connection, figure in by_dataset.get(dataset, {}).items()
    }


def _datasets() -> dict[str, Mapping[str, Any]]:
    return {key: entry for key, entry in paper.figures()["datasets"].items() if isinstance(entry, dict)}


def _switch_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    return (_switch(run),), (dataset_name(study["dataset"]), measure.title)


def _switch_paper(table: str) -> Paper:
    return {
        ((_switch({"cell": {"switch": pair}}),), (entry["name"], title)): figure[at:at + 2]
        for key, entry in _datasets().items()
        for pair, figure in paper.figures()[table].get(key, {}).items()
        for at, title in ((0, _TOP1.title), (2, _TOP5.title))
    }


def _axis_place(study: Study, run: Run, name: str, measure: Measure, *, shown: Callable = _shown) -> Place:
    return (shown(_axis(run)),), (measure.title,)


def _layer_paper() -> Paper:
    return {
        ((pattern,), (title,)): figure[at:at + 2]
        for pattern, figure in paper.figures()["layer_pattern"].items() if isinstance(figure, list)
        for at, title in ((0, _TOP1.title), (2, _TOP5.title))
    }


def _rate_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    return (_power(_axis(run)),), (dataset_name(study["dataset"]), connection_name(run["connection"]))


def _rate_paper() -> Paper:
    return {
        ((_power(rate),), (entry["name"], connection_name(connection))): figure
        for key, entry in _datasets().items()
        for connection, by_rate in paper.figures()["learning_rate_sweep"].get(key, {}).items()
        for rate, figure in by_rate.items()
    }


def _initialisation_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    return (str(_axis(run)), connection_name(run["connection"])), (measure.title,)


def _initialisation_paper() -> Paper:
    return {
        ((start, connection_name(connection)), (title,)): figure[at:at + 2]
        for start, by_connection in paper.figures()["initialisation"].items() if isinstance(by_connection, dict)
        for connection, figure in by_connection.items()
        for at, title in ((0, _TOP1.title), (2, _TOP5.title))
    }


def _norm_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    return (_norm(run), connection_name(run["connection"])), (measure.title,)


def _norm_paper() -> Paper:
    return {
        ((_norm({"cell": {"norm": key}}), connection_name(connection)), (_TOP1.title,)): figure
        for key in ("without", "with")
        for connection, figure in paper.figures()["final_layer_norm"][key].items()
    }


def _start_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    return (_start(run),), (measure.title,)


def _connection_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    return (connection_name(run["connection"]),), (measure.title,)


def _feature_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    return (measure.title,), (connection_name(run["connection"]),)


def _feature_paper() -> Paper:
    table = paper.figures()["representation"]
    names = {"linear": connection_name("linear"), "orthogonal": connection_name("feature")}
    found = {((measure.title,), (names[connection],)): [value]
             for key, measure in _FEATURES.items() if key in table for connection, value in table[key].items()}
    cka = (_FEATURES["linear_cka"].title,), (names["orthogonal"],)
    return {**found, cka: [table["linear_cka_between_the_two"]]}


def _skip(run: Run) -> str:
    """The transform of the stream, as its paper calls it."""
    return paper.skip_figures()["skips"].get(str(run["cell"]["skip"]), str(run["cell"]["skip"]))


def _skip_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    key = study["dataset"].rpartition("/")[2]
    return (str(run["cell"]["depth"]), _skip(run)), (paper.skip_figures()["datasets"].get(key, key or "own images"),)


def _skip_paper(table: str) -> Paper:
    found = paper.skip_figures()
    return {
        ((depth, found["skips"][skip]), (found["datasets"][dataset],)): figure
        for depth, by_skip in found[table].items() if isinstance(by_skip, dict)
        for skip, by_dataset in by_skip.items()
        for dataset, figure in by_dataset.items()
    }


def _family_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    return (str(_axis(run)), measure.title), (connection_name(run["connection"]),)


def _own_place(study: Study, run: Run, name: str, measure: Measure) -> Place:
    return (*(_shown(value) for value in run["cell"].values()), connection_name(run["connection"])), (measure.title,)


# ----------------------------------------------------------------------------------------------- figures
def _lines(runs: Sequence[Run], series: Callable[[Run], str]) -> str:
    return ", ".join(dict.fromkeys(connection_name(series(run)) for run in runs))


def _training(
        study: Study,
        runs: Sequence[Run],
        series: Callable[[Run], str] = _connection,
        what: str = "",
) -> list[Drawing]:
    of = f"{what}: t" if what else "T"
    return [Drawing(
        "_".join(["training", *re.findall(r"\w+", what.lower())]),
        f"{of}raining loss and validation accuracy by epoch, and accuracy by time (as in Figure 2 of Oh et al.).",
        f"{of}raining loss and top-1 by epoch, and top-1 by minutes, as line charts for {_lines(runs, series)}.",
        partial(figures.training, runs, series))]


def _accuracy_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    models = dict.fromkeys(str(run["cell"].get("model", study["model"])) for run in runs)
    return [drawing for model in models for drawing in _training(
        study, [run for run in runs if run["cell"].get("model", study["model"]) == model], what=model_name(model))]


def _switch_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    return [Drawing(
        "switch", "Validation accuracy by epoch for each pair of connections (the paper's Figure 9); the dotted "
        "vertical line is where the second takes over.",
        f"Line chart of top-1 by epoch for {_lines(runs, _switch)}.",
        partial(figures.curves, runs, "eval_top1", "validation top-1, %", _switch, lambda run: dataset_name(
            study["dataset"])))]


def _points(
        runs: Sequence[Run],
        name: str,
        caption: str,
        x: Callable[[Run], Any],
        measures: Sequence[Measure],
        below: str,
        series: Callable[[Run], str] = _connection,
        **options: Any,
) -> list[Drawing]:
    titles = " and ".join(measure.title for measure in measures)
    return [Drawing(
        name, f"{caption} Bars are one standard deviation about the mean, dots are runs.",
        f"{titles} over {below}, for {_lines(runs, series)}.",
        partial(figures.points, runs, x, measures, series, below, **options))]


def _layer_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    return _points(runs, "layers", "Accuracy by the blocks that carry the orthogonal connection (Table 4).",
                   lambda run: str(_axis(run)), list(_TOP.values()), "blocks with the connection")


def _probability_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    def probability(run: Run) -> float:
        return float(_axis(run))

    measures = list(_TOP.values())
    pearson = "; ".join(f"{measure.title}: {figures.correlation(runs, probability, measure)}" for measure in measures)
    return _points(runs, "probability",
                   f"Accuracy by the probability of the orthogonal form, with Pearson's r (Figure 4). {pearson}.",
                   probability, measures, "probability π", series=lambda run: "feature", pearson=True)


def _epsilon_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    return _points(runs, "epsilon", "Best validation accuracy, and loss, by ε (Figure 5).",
                   lambda run: float(_axis(run)), [_BEST, _LOSS], "ε", log=True)


def _rate_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    return _points(runs, "learning_rate", "Accuracy by learning rate.",
                   lambda run: float(_axis(run)), [_TOP1], "learning rate", log=True)


def _initialisation_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    return [Drawing(
        "initialisation", "Top-5 by epoch for each initialisation (the paper's Figure 6).",
        f"Line charts of validation top-5 by epoch, a panel for each initialisation, for {_lines(runs, _connection)}.",
        partial(figures.curves, runs, "eval_top5", "validation top-5, %", _connection, lambda run: str(_axis(run))))]


def _norm_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    drawings = []
    for norm in dict.fromkeys(_norm(run) for run in runs):
        group = [run for run in runs if _norm(run) == norm]
        drawings += _training(study, group, what=f"{norm} final LayerNorm")
        if not any(run["dynamics"] for run in group):
            continue
        number = 7 if norm == "without" else 8
        drawings.append(Drawing(
            f"norms_{norm}",
            f"Squared norms of the last branch's output and of its parts, {norm} a final LayerNorm (the paper's Figure "
            f"{number}).",
            f"|f⊥|², |f∥|² and |f|² of the last branch on logarithmic axes over the training steps, {norm} a final "
            f"LayerNorm, as line charts for {_lines(group, _connection)}.",
            partial(figures.component_norms, group)))
    return drawings


def _hybrid_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    learned = [run for run in runs if run["connection"] == "hybrid" and run["dynamics"]]
    return [*_training(study, runs, _start), *(
        Drawing(f"weights_{kind}",
                f"ρ and θ of the {kind} branches while they are learned, from each start. The parallel part is added "
                "ρ sin θ times and the orthogonal one ρ cos θ times: linear is ρ = √2, θ = π/4, and orthogonal is "
                "ρ = 1, θ = 0.",
                f"Line charts of ρ and θ over the training steps, a line for each block, {kind} branches, for "
                f"{_lines(learned, _start)}.",
                partial(figures.learned_weights, learned, kind, _start))
        for kind in figures.site_names(learned))]


_DYNAMICS = {"stream": "Figure 3", "cosine": "Figures 3 and 12", "parallel": "Figures 3 and 10",
             "orthogonal": "Figures 10 and 12"}


def _dynamics_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    recorded = [run for run in runs if run["dynamics"]]
    parting = {measure: transitions(recorded, measure) for measure in _DYNAMICS}
    return _training(study, runs) + [
        Drawing(
            f"{measure}_{kind}",
            f"{figures.TITLES[measure]} in the {kind} branches, block by block (the paper's {source}). A dotted "
            "vertical line is where the linear and the orthogonal traces part.",
            f"Line charts of {figures.TITLES[measure]} over the training steps, a panel for each block, for "
            f"{_lines(recorded, _connection)}.",
            partial(figures.traces, recorded, kind, measure, parting[measure]))
        for kind in figures.site_names(recorded) for measure, source in _DYNAMICS.items()]


def _skip_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    return [drawing for depth in dict.fromkeys(run["cell"]["depth"] for run in runs) for drawing in _training(
        study, [run for run in runs if run["cell"]["depth"] == depth], _skip, f"Depth {depth}")]


def _rank_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    return _points(runs, "rank", "Accuracy by the rank of the skip connection, as a share of the width (Figure 2).",
                   lambda run: float(_axis(run)), [_TOP1], "rank / width")


def _family_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    found = [entry for entry in entries(study, runs, _FAMILY_MEASURES, _family_place, {}) if entry.difference]
    if not found:
        return []
    names = ", ".join(dict.fromkeys(connection_name(entry.cell["connection"]) for entry in found))
    return [Drawing(
        "differences", "Top-1, and validation loss, less those of linear connections: the mean of the seeds' "
        "differences with its 95 % interval. An interval that holds zero, the vertical line, tells nothing apart.",
        f"Differences to linear connections in top-1 and in loss, a row for each family, for {names}.",
        partial(figures.differences, found))]


def _family_table(study: Study, runs: Sequence[Run]) -> list[Extra]:
    rows = {str(_axis(run)): [str(_axis(run)), base_name(run["model"]), f"{run['parameters']:,}"] for run in runs}
    if not rows:
        return []
    return [Extra("The architectures", "Connections add no parameters. What each was made narrow by is in the study's "
                  "file and, run by run, in the runs' args.yaml.",
                  Table(["family", "timm's architecture", "parameters"], list(rows.values())))]


def _feature_figures(study: Study, runs: Sequence[Run]) -> list[Drawing]:
    measured = [run for run in runs if run["representation"]]
    if not measured:
        return []
    shown = [_FEATURES[key] for key in ("effective_rank", "spectral_entropy", "feature_std")]
    return _points(measured, "representation", "Metrics of the features, run by run.", _connection, shown,
                   "connection")


# ------------------------------------------------------------------------------------------------ extras
def transitions(runs: Sequence[Run], measure: str) -> dict[tuple[int, str], Optional[int]]:
    """For each site, (layer, kind), the step at which the linear and the feature traces part; {} without a pair."""
    by_seed = [{run["seed"]: run["dynamics"] for run in runs if run["connection"] == name}
               for name in ("linear", "feature")]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if not seeds:
        return {}
    points = transition_points(*([side[seed] for seed in seeds] for side in by_seed), measure)
    return {(point["layer"], point["kind"]): point["step"] for point in points}


def _transition_table(study: Study, runs: Sequence[Run]) -> list[Extra]:
    recorded = [run for run in runs if run["dynamics"]]
    found = {measure: transitions(recorded, measure) for measure in _DYNAMICS}
    if not found["stream"]:
        return []
    rows = [[kind, str(layer), *(_step(found[measure][layer, kind]) for measure in _DYNAMICS)]
            for layer, kind in sorted(found["stream"], key=lambda site: site[::-1])]
    return [Extra(
        "Transition points",
        "The training step from which on the means of the linear and the feature traces are mostly apart, by more than "
        "a tenth of the figure's height and, where there are several seeds, with an interval of the paired differences "
        "that does not hold zero; “none” where there is no such step.",
        Table(["branch", "block", *(figures.TITLES[measure] for measure in _DYNAMICS)], rows, names=2))]


def _step(step: Optional[float]) -> str:
    return "none" if step is None else f"step {step:g}"


def _explosion_table(study: Study, runs: Sequence[Run]) -> list[Extra]:
    rows = []
    for group in group_runs(run for run in runs if run["dynamics"]).values():
        traces = [_finite_trace(run) for run in group]
        traces = [values for values in traces if values]
        if traces:
            first, highest, last = (fmean(pick(values) for values in traces)
                                    for pick in (lambda v: v[0], max, lambda v: v[-1]))
            growth = f"{last / first:.3g}" if first else "unknown"
            rows.append([_norm(group[0]), connection_name(group[0]["connection"]),
                         *(f"{value:.4g}" for value in (first, highest, last)), growth])
    if not rows:
        return []
    return [Extra(
        "The explosion of |f|",
        "|f|² of the last branch, over the channels of a pixel, means of the seeds: at the first record, the highest, "
        "and at the last, which is so many times the first.",
        Table(["final LayerNorm", "connection", "first", "highest", "last", "last / first"], rows, names=2))]


def _finite_trace(run: Run) -> list[float]:
    return [value for value in figures.trace(run, figures.final_site(run), "branch")[1] if finite(value)]


def _learned_table(study: Study, runs: Sequence[Run]) -> list[Extra]:
    rows = []
    for start in dict.fromkeys(_start(run) for run in runs if run["connection"] == "hybrid" and run["dynamics"]):
        group = [run for run in runs if run["connection"] == "hybrid" and run["dynamics"] and _start(run) == start]
        for kind, sites in figures.site_names(group).items():
            ends = {measure: [value for run in group for _, site in sites
                              for value in figures.trace(run, site, measure)[1][-1:] if finite(value)]
                    for measure in ("rho", "theta")}
            rows.append([start, kind, *(_range(ends[measure]) for measure in ("rho", "theta"))])
    if not rows:
        return []
    return [Extra(
        "What was learned", "ρ and θ at the last record: mean over blocks and seeds, and in brackets the least and the "
        "greatest.", Table(["start", "branch", "ρ", "θ"], rows, names=2))]


def _range(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} [{min(values):.3f}, {max(values):.3f}]" if values else "not finite"


# ------------------------------------------------------------------------------------------------- specs
def _numeric(row: tuple[str, ...]) -> tuple:
    return (float(row[0].split(",")[0]), *row[1:])


SPECS: dict[str, Spec] = {
    "accuracy": Spec(
        ("model", "connection"), _accuracy_place, {"best5": Measure("top-1 %", _best)}, _accuracy_paper,
        _accuracy_figures,
        protocol="Figures are, as the paper's, of each run the mean of its 5 best validation epochs, which are chosen "
                 "on the validation set itself."),
    "switch_reinitialised": Spec(
        ("start → end",), _switch_place, _TOP, partial(_switch_paper, "connection_switch_reinitialised"),
        _switch_figures),
    "switch_kept": Spec(
        ("start → end",), _switch_place, _TOP, partial(_switch_paper, "connection_switch_continuous"), _switch_figures),
    "layer_pattern": Spec(("blocks",), partial(_axis_place, shown=str), _TOP, _layer_paper, _layer_figures),
    "probability": Spec(
        ("π",), _axis_place, _TOP, figures=_probability_figures, order=_numeric, unstated="only drawn"),
    "epsilon": Spec(
        ("ε",), partial(_axis_place, shown=_power), {"best_top1": _BEST, "loss": _LOSS}, figures=_epsilon_figures,
        order=_numeric, protocol="Top-1 is that of the best epoch, as in the paper, the loss that of the last.",
        unstated="only drawn"),
    "learning_rate": Spec(
        ("learning rate",), _rate_place, {"top1": _TOP1}, _rate_paper, _rate_figures, order=_numeric),
    "initialisation": Spec(
        ("initialisation", "connection"), _initialisation_place, _TOP, _initialisation_paper, _initialisation_figures),
    "head_norm": Spec(
        ("final LayerNorm", "connection"), _norm_place, {"top1": _TOP1}, _norm_paper, _norm_figures, _explosion_table),
    "hybrid": Spec(("connection",), _start_place, _TOP, figures=_hybrid_figures, extras=_learned_table),
    "dynamics": Spec(("connection",), _connection_place, _TOP, figures=_dynamics_figures, extras=_transition_table),
    **{name: Spec(("depth", "skip"), _skip_place, {"top1": _TOP1}, partial(_skip_paper, name), _skip_figures)
       for name in ("skips_single", "skips_branch4", "skips_depthwise")},
    "skip_rank": Spec(
        ("rank / width",), _axis_place, _TOP, figures=_rank_figures, order=_numeric, unstated="only drawn"),
    "families": Spec(
        ("family", "measure"), _family_place, _FAMILY_MEASURES, figures=_family_figures, extras=_family_table,
        protocol="Figures are those of the last epoch. The loss, of which less is better, tells more apart than top-1, "
                 "which counts whole images."),
    "representation": Spec(
        ("metric",), _feature_place, _FEATURES, _feature_paper, _feature_figures,
        protocol="Of the features before the classifier, after the last epoch."),
}


def own(study: Study) -> Spec:
    """For a study that is not the paper's: a row for each cell and connection."""
    return Spec(
        (*study["axes"], "connection"), _own_place, _TOP,
        figures=lambda study, runs: _training(study, runs, run_name))
