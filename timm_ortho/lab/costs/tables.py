"""Put measured costs beside the paper's Tables 1 and 11."""
from typing import Mapping, NamedTuple, Sequence

from ..._text import finite
from .. import paper
from ..reporting.layout import Position
from ..reporting.page import Table
from ..reporting.tables import Extra, side_by_side
from .measure import Row


class Content(NamedTuple):
    """The tables of a report."""

    names: Sequence[str]  # titles of the columns that name a row
    here: Mapping[Position, str]
    paper: Mapping[Position, str]
    note: str  # explains the columns
    extras: Sequence[Extra] = ()

    def table(self) -> Table:
        """Return the paper's and the measured numbers side by side."""
        return side_by_side(self.names, self.paper, self.here)

    def printed(self) -> Table:
        """Return a table with a line for each number."""
        rows = [[*row, ", ".join(column), self.paper.get((row, column), "not in the paper"), text]
                for (row, column), text in self.here.items()]
        return Table([*self.names, "metric", "paper", "here"], rows, len(self.names))


def content(name: str, rows: Sequence[Row]) -> Content:
    """Return the tables for the rows of `measure.rows`."""
    return {"overhead": _overhead, "parameters": _parameters, "gamma": _gamma}[name](rows)


def _model(label: str) -> str:
    """Return the paper's name of a model without its `img_size`: `ViT-S` for `vit_small(img_size=64)`."""
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
    # The paper does not give the memory layout, so its numbers are beside all rows of a model.
    stated = {name: values for key, values in paper.numbers()["throughput"].items() if isinstance(values, list)
              for model in [paper.name("model", key)]
              for name in [name for name, other in zip(names, models, strict=True) if other == model] or [model]}
    by_name = dict(zip(names, rows, strict=True))
    here = {((name,), (title,)): text for name, row in by_name.items()
            for title, text in zip((*_SPEEDS, _BY_REPETITION), _measured(row), strict=True)}
    return Content(
        ["model"], here,
        {((name,), (title,)): f"{value:,.{digits}f}" for name, values in stated.items()
         for title, value, digits in zip(_SPEEDS, values, (1, 1, 2), strict=True)},
        "Speeds are training images per second, as medians over the repetitions. The overhead is the paper's formula "
        "for these medians, 100 (1 - feature / linear). Each repetition times both models: the overhead by repetition "
        "is the median of the same formula over the repetitions. The brackets have the 20 % and 80 % quantiles.",
        [Extra("What was measured", "Both models are timed in turns: forward, cross entropy and backward.",
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
_FORMS = {"linear": "Linear", "paper": "Orthogonal, the paper's algorithm", "feature": "Orthogonal-F, this package"}
# the paper's formulas of the FLOPs, for s tokens of width d
_BRANCHES = {"attention": lambda s, d: 8 * s * d**2 + 4 * s**2 * d, "mlp": lambda s, d: 16 * s * d**2}
_UPDATES = {"linear": lambda s, d: s * d, "paper": lambda s, d: s * d + 6 * s * d + 2 * s}
_WHOLE = ("sites", "parameters", "extra_parameters", "branches", "updates", "extra_flops")


def _parameters(rows: Sequence[Row]) -> Content:
    blocks, whole = ([row for row in rows if ("module" in row) is of_block] for of_block in (True, False))
    extras = [Extra(
        "FLOPs that an orthogonal connection adds to a block",
        "FLOPs of the update minus those of the addition are counted in a forward pass. The paper has 6sd + 2s.",
        Table(["model", "branch", "connection", "s", "d", "counted", "6sd + 2s"], [
            [_model(row["model"]), *_flop_position(row)[0], *(f"{row[key]:,}" for key in ("tokens", "width", "extra")),
             f"{6 * row['tokens'] * row['width'] + 2 * row['tokens']:,}"]
            for row in blocks if row["connection"] != "linear"], names=3)), Extra(
        "Whole models",
        "The table has the FLOPs of all blocks for one image: those of the branches' matrix products and convolutions, "
        "and those of the connections. The last column has the added FLOPs in percent of the linear model's FLOPs.",
        Table(["model", "connection", "sites", "parameters", "added", "FLOPs of branches", "of connections",
               "FLOPs added", "in %"], [
            [_model(row["model"]), paper.name("connection", row["connection"]), *(f"{row[key]:,}" for key in _WHOLE),
             f"{row['extra_percent']:.3f}"] for row in whole], names=2))]
    return Content(
        ["module", "connection"], {_flop_position(row): f"{row['branch'] + row['update']:,}" for row in blocks},
        {_flop_position(row): _formula(row) for row in blocks
         if row["module"] in _BRANCHES and row["connection"] in _UPDATES},
        "FLOPs are counted during a forward pass of one image, for s tokens of width d. The paper gives formulas.",
        [extra for extra in extras if extra.table.rows])


def _flop_position(row: Row) -> Position:
    return ((_MODULES.get(row["module"], row["module"]), _FORMS[row["connection"]]),
            (f"FLOPs of a block of {_model(row['model'])}, s = {row['tokens']}, d = {row['width']}",))


def _formula(row: Row) -> str:
    terms, size = paper.numbers()["flops"][row["module"]], (row["tokens"], row["width"])
    formula = terms["linear"] + (f" + {terms['orthogonal_extra']}" if row["connection"] != "linear" else "")
    value = _BRANCHES[row["module"]](*size) + _UPDATES[row["connection"]](*size)
    return f"{formula.replace('^2', '²')} = {value:,}"


def _gamma(rows: Sequence[Row]) -> Content:
    def texts(by_name: Mapping[str, Row]) -> dict[Position, str]:
        return {((name,), (title,)): f"{row[key]:{form}}" for name, row in by_name.items() for title, key, form in (
            ("γ", "gamma", ".2f"), ("width", "width", ".2f"), ("blocks", "blocks", ""))}

    models = paper.numbers()["gamma"]["models"]
    return Content(
        ["model"], texts({models.get(row["model"], {"name": row["model"]})["name"]: row for row in rows}),
        texts({stated["name"]: stated for stated in models.values()}),
        "The numbers are counted from the registered models.")
