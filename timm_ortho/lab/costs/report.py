"""The studies that train nothing: what `cost` measured, in the layout of the paper's Tables 1 and 11, beside them."""
from typing import Any, Mapping, NamedTuple, Sequence

from ..._text import finite
from .. import paper
from ..reporting.layout import Place
from ..reporting.page import Table
from ..reporting.tables import Extra, side_by_side

Row = Mapping[str, Any]


class Content(NamedTuple):
    """What a report shows of such a study."""

    names: Sequence[str]  # titles of a row's names
    here: Mapping[Place, str]
    paper: Mapping[Place, str]
    note: str  # what the columns are
    extras: Sequence[Extra] = ()

    def table(self) -> Table:
        return side_by_side(self.names, self.paper, self.here)

    def printed(self) -> Table:
        rows = [[*row, ", ".join(column), self.paper.get((row, column), "not in the paper"), text]
                for (row, column), text in self.here.items()]
        return Table([*self.names, "figure", "paper", "here"], rows, len(self.names))


def content(kind: str, rows: Sequence[Row]) -> Content:
    """Of a study's kind, from the rows that `cost` made."""
    return {"overhead": _overhead, "parameters": _parameters, "gamma": _gamma}[kind](rows)


def _model(label: str) -> str:
    """`vit_small(img_size=64)` is ViT-S, the images' size being told apart; narrower ones keep their arguments."""
    model, _, arguments = label.partition("(")
    name = paper.name("model", paper.architecture(model) or model)
    others = [argument for argument in arguments.rstrip(")").split(", ") if argument.partition("=")[0] != "img_size"]
    return f"{name} ({', '.join(others)})" if any(others) else name


_SPEEDS = ("Linear, images/s", "Orthogonal-F, images/s", "overhead, %")
_BY_REPETITION = "overhead by repetition, %"


def _overhead(rows: Sequence[Row]) -> Content:
    models = [_model(row["model"]) for row in rows]
    names = [model if models.count(model) == 1 else f"{model}, {row['layout']}, {row['dtype']}, {row['mode']}"
             for model, row in zip(models, rows, strict=True)]
    # A model with several rows has the paper's figures in each: which layout they were measured in is not said.
    stated = {name: figure for key, figure in paper.figures()["throughput"].items() if isinstance(figure, list)
              for model in [paper.name("model", key)]
              for name in [name for name, other in zip(names, models, strict=True) if other == model] or [model]}
    by_name = dict(zip(names, rows, strict=True))
    here = {((name,), (title,)): text for name, row in by_name.items()
            for title, text in zip((*_SPEEDS, _BY_REPETITION), _measured(row), strict=True)}
    return Content(
        ["model"], here,
        {((name,), (title,)): f"{value:,.{digits}f}" for name, figure in stated.items()
         for title, value, digits in zip(_SPEEDS, figure, (1, 1, 2), strict=True)},
        "Images a second in training, medians over the repetitions. The overhead is by the paper's formula from these "
        "two, 100 (1 - feature / linear). Both ran in turn in each repetition: by repetition it is the median of the "
        "same formula over the repetitions, in brackets their 20 % and 80 % quantiles, not a confidence interval.",
        [Extra("What was measured", "The two in turns: forward, cross entropy and backward, as timm-ortho bench does.",
               Table(["model", "images", "layout", "precision", "mode", "repetitions", "note"], [
                   [name, row["shape"], row["layout"], row["dtype"], row["mode"], str(row["repeats"]),
                    row["note"] or "–"] for name, row in by_name.items()]))])


def _measured(row: Row) -> list[str]:
    if not finite(row["overhead"]):
        speeds = [f"{row[key]:,.1f}" if finite(row[key]) else "not measured" for key in ("linear", "feature")]
        return [*speeds, "not measured", "not measured"]
    lost = 100 * (1 - row["feature"] / row["linear"])
    return [f"{row['linear']:,.1f}", f"{row['feature']:,.1f}", f"{lost:.2f}",
            f"{row['overhead']:.2f} [{row['overhead_p20']:.2f}, {row['overhead_p80']:.2f}]"]


_MODULES = {"attention": "Attention", "mlp": "MLP (FFN)"}
_FORMS = {"linear": "Linear", "paper": "Orthogonal, as the paper writes it", "feature": "Orthogonal-F, as it runs here"}
# FLOPs for s tokens of width d, by the paper
_BRANCHES = {"attention": lambda s, d: 8 * s * d**2 + 4 * s**2 * d, "mlp": lambda s, d: 16 * s * d**2}
_UPDATES = {"linear": lambda s, d: s * d, "paper": lambda s, d: s * d + 6 * s * d + 2 * s}
_WHOLE = ("sites", "parameters", "extra_parameters", "branches", "updates", "extra_flops")


def _parameters(rows: Sequence[Row]) -> Content:
    blocks, whole = ([row for row in rows if ("module" in row) is of_block] for of_block in (True, False))
    extras = [Extra(
        "What an orthogonal connection adds to a block",
        "FLOPs of the update beyond those of the addition, counted from a run; the paper has 6sd + 2s.",
        Table(["model", "branch", "connection", "s", "d", "counted", "6sd + 2s"], [
            [_model(row["model"]), *_flop_place(row)[0], *(f"{row[key]:,}" for key in ("tokens", "width", "extra")),
             f"{6 * row['tokens'] * row['width'] + 2 * row['tokens']:,}"]
            for row in blocks if row["connection"] != "linear"], names=3)), Extra(
        "Whole models",
        "FLOPs are those of all blocks for one image: of their matrix products and convolutions, and of their "
        "connections; what the connections add is in percent of both together.",
        Table(["model", "connection", "sites", "parameters", "added", "FLOPs of branches", "of connections",
               "FLOPs added", "in %"], [
            [_model(row["model"]), paper.name("connection", row["connection"]), *(f"{row[key]:,}" for key in _WHOLE),
             f"{row['extra_percent']:.3f}"] for row in whole], names=2))]
    return Content(
        ["module", "connection"], {_flop_place(row): f"{row['branch'] + row['update']:,}" for row in blocks},
        {_flop_place(row): _formula(row) for row in blocks
         if row["module"] in _BRANCHES and row["connection"] in _UPDATES},
        "Counted from a run of one image, for s tokens of width d; the paper's formula with the same s and d.",
        [extra for extra in extras if extra.table.rows])


def _flop_place(row: Row) -> Place:
    return ((_MODULES.get(row["module"], row["module"]), _FORMS[row["connection"]]),
            (f"FLOPs of a block of {_model(row['model'])}, s = {row['tokens']}, d = {row['width']}",))


def _formula(row: Row) -> str:
    terms, size = paper.figures()["flops"][row["module"]], (row["tokens"], row["width"])
    formula = terms["linear"] + (f" + {terms['orthogonal_extra']}" if row["connection"] != "linear" else "")
    value = _BRANCHES[row["module"]](*size) + _UPDATES[row["connection"]](*size)
    return f"{formula.replace('^2', '²')} = {value:,}"


def _gamma(rows: Sequence[Row]) -> Content:
    def texts(found: Mapping[str, Row]) -> dict[Place, str]:
        return {((name,), (title,)): f"{row[key]:{form}}" for name, row in found.items() for title, key, form in (
            ("γ", "gamma", ".2f"), ("width", "width", ".2f"), ("blocks", "blocks", ""))}

    models = paper.figures()["gamma"]["models"]
    return Content(
        ["model"], texts({models.get(row["model"], {"name": row["model"]})["name"]: row for row in rows}),
        texts({stated["name"]: stated for stated in models.values()}), "Counted from the registered models.")
