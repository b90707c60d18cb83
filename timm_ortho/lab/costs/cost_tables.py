"""Put measured costs beside the paper's Tables 1 and 11."""
from typing import Mapping, NamedTuple, Sequence

from ..._text import finite
from .. import paper
from ..reporting.layout import Position
from ..reporting.page import Table
from ..reporting.tables import Extra, side_by_side
from .measure import Row


class Content(NamedTuple):
    """The tables of a report on costs."""

    names: Sequence[str]  # titles of the columns that name a row
    here: Mapping[Position, str]  # the measured numbers as text, by row and column
    paper: Mapping[Position, str]  # the paper's numbers as text, by row and column
    note: str  # sentences that explain the columns
    extras: Sequence[Extra] = ()  # further tables, with titles

    def table(self) -> Table:
        """Return a table with the paper's and the measured numbers side by side."""
        return side_by_side(self.names, self.paper, self.here)

    def printed(self) -> Table:
        """Return a table for a terminal, with one measured number and the paper's number in each line."""
        rows = [[*row, ", ".join(column), self.paper.get((row, column), "not in the paper"), text]
                for (row, column), text in self.here.items()]
        return Table([*self.names, "metric", "paper", "here"], rows, len(self.names))


def content(name: str, rows: Sequence[Row]) -> Content:
    """Return the tables of the report `name` (`overhead`, `parameters` or `gamma`) from the rows of `measure.rows`."""
    return {"overhead": _overhead, "parameters": _parameters, "gamma": _gamma}[name](rows)


def _model(label: str) -> str:
    """Return the paper's name of a model, with the model's arguments in brackets. `img_size` is left out.

    >>> _model("vit_small(img_size=64, depth=2)")
    'ViT-S (depth=2)'
    """
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
    # A model has a row for each layout, dtype and mode. The paper has one measurement per model, shown in all its rows.
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
        "Speeds are training images per second, as medians over the repetitions. The overhead is computed from these "
        "medians with the paper's formula, 100 (1 - feature / linear). Each repetition times both models, so it has an "
        "overhead of its own. The overhead by repetition is the median of these overheads, with their 20 % and 80 % "
        "quantiles in brackets.",
        [Extra("Settings of the measurements",
               "Both models are timed in turns. The time covers forward pass, cross entropy and backward pass.",
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
# The paper's formulas for the FLOPs of a branch and of its connection, for s tokens of width d.
_BRANCHES = {"attention": lambda s, d: 8 * s * d**2 + 4 * s**2 * d, "mlp": lambda s, d: 16 * s * d**2}
_UPDATES = {"linear": lambda s, d: s * d, "paper": lambda s, d: s * d + 6 * s * d + 2 * s}
_WHOLE = ("sites", "parameters", "extra_parameters", "branches", "updates", "extra_flops")


def _parameters(rows: Sequence[Row]) -> Content:
    blocks, whole = ([row for row in rows if ("module" in row) is of_block] for of_block in (True, False))
    extras = [Extra(
        "FLOPs that an orthogonal connection adds to one residual addition",
        "The counted number is the FLOPs of the update minus the FLOPs of the addition. The paper "
        "gives 6sd + 2s for s tokens of width d.",
        Table(["model", "branch", "connection", "s", "d", "counted", "6sd + 2s"], [
            [_model(row["model"]), *_flop_position(row)[0], *(f"{row[key]:,}" for key in ("tokens", "width", "extra")),
             f"{6 * row['tokens'] * row['width'] + 2 * row['tokens']:,}"]
            for row in blocks if row["connection"] != "linear"], names=3)), Extra(
        "Whole models",
        "The FLOPs are counted over all blocks for one image. In the branches, only matrix products and convolutions "
        "count. The last column has the added FLOPs in percent of the FLOPs of the model with linear connections.",
        Table(["model", "connection", "sites", "parameters", "added parameters", "FLOPs of branches",
               "FLOPs of connections", "added FLOPs", "added FLOPs, %"], [
            [_model(row["model"]), paper.name("connection", row["connection"]), *(f"{row[key]:,}" for key in _WHOLE),
             f"{row['extra_percent']:.3f}"] for row in whole], names=2))]
    return Content(
        ["module", "connection"], {_flop_position(row): f"{row['branch'] + row['update']:,}" for row in blocks},
        {_flop_position(row): _formula(row) for row in blocks
         if row["module"] in _BRANCHES and row["connection"] in _UPDATES},
        "The FLOPs here are counted during a forward pass of one image. The paper's numbers are computed from its "
        "formulas for s tokens of width d.",
        extras)


def _flop_position(row: Row) -> Position:
    return ((_MODULES.get(row["module"], row["module"]), _FORMS[row["connection"]]),
            (f"FLOPs of module and connection in {_model(row['model'])}, s = {row['tokens']}, d = {row['width']}",))


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
        "γ is the mean width of the stream divided by the number of blocks. The numbers here are counted in models "
        "that this package registers, in transformers' GPT-2 XL, LLaMA-7B and T5-XL (encoder; the decoder has another "
        "24 blocks), and in the ResNet-1001 of He et al. (2016). That network has 3 x 111 bottleneck blocks of 64, 128 "
        "and 256 channels. The paper's 37.33 is the mean of 16, 32 and 64. DiT-XL/2 is only quoted from the paper: no "
        "library that this package converts has it.")
