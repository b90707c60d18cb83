"""The studies that train nothing: what `cost` measured, in the layout of the paper's Tables 1 and 11, beside them."""
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping, Sequence

from . import paper, study_figures as figures
from .page import Table
from .plots import finite
from .study_specs import Drawing, Extra, model_name
from .study_tables import Place, connection_name

__all__ = ["ROW_SPECS", "RowSpec"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RowSpec:
    """How the table of a study without training is made from its rows.

    Attributes:
        names: Titles of a row's names.
        cells: From the rows that `cost` made to texts by place.
        paper: From the same to the paper's texts by place.
        extras: Further tables.
        figures: What is drawn.
        note: What the columns are.
    """

    names: Sequence[str]
    cells: Callable[[Sequence[Row]], dict[Place, str]]
    paper: Callable[[Sequence[Row]], dict[Place, str]]
    extras: Callable[[Sequence[Row]], list[Extra]] = lambda rows: []
    figures: Callable[[Sequence[Row]], list[Drawing]] = lambda rows: []
    note: str = ""


# --------------------------------------------------------------------------------- Table 1b, throughput
_SPEEDS = {"linear": "Linear, images/s", "feature": "Orthogonal-F, images/s"}
_OVERHEAD = "overhead, %"


def _overhead_names(rows: Sequence[Row]) -> list[str]:
    """The rows' models, with what else tells them apart."""
    models = [_overhead_model(row["model"]) for row in rows]
    details = [", ".join((row["layout"], row["dtype"], row["mode"])) for row in rows]
    return [model if models.count(model) == 1 else f"{model}, {detail}"
            for model, detail in zip(models, details, strict=True)]


def _overhead_model(label: str) -> str:
    """`vit_small(img_size=64)` is ViT-S, the images' size being told apart; narrower ones keep their arguments."""
    model, _, arguments = label.partition("(")
    others = [argument for argument in arguments.rstrip(")").split(", ") if argument.partition("=")[0] != "img_size"]
    return f"{model_name(model)} ({', '.join(others)})" if any(others) else model_name(model)


def _overhead_cells(rows: Sequence[Row]) -> dict[Place, str]:
    found = {}
    for name, row in zip(_overhead_names(rows), rows, strict=True):
        texts = {title: "not measured" if row[key] is None else f"{row[key]:,.1f}" for key, title in _SPEEDS.items()}
        texts[_OVERHEAD] = "not measured" if row["overhead"] is None else (
            f"{row['overhead']:.2f} [{row['overhead_p20']:.2f}, {row['overhead_p80']:.2f}]")
        found |= {((name,), (title,)): text for title, text in texts.items()}
    return found


def _overhead_paper(rows: Sequence[Row]) -> dict[Place, str]:
    return {
        ((name,), (title,)): f"{value:,.{digits}f}"
        for name, figure in _stated_overheads(rows).items()
        for title, value, digits in zip((*_SPEEDS.values(), _OVERHEAD), figure, (1, 1, 2), strict=True)
    }


def _stated_overheads(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Table 1b, images a second and overhead in percent, by name of the row, or of the model where it has none.

    A model with several rows has the paper's figures in each: which layout they were measured in is not said.
    """
    shown: dict[str, list[str]] = {}
    for name, row in zip(_overhead_names(rows), rows, strict=True):
        shown.setdefault(_overhead_model(row["model"]), []).append(name)
    stated = {model_name(model): figure
              for model, figure in paper.figures()["throughput"].items() if isinstance(figure, list)}
    return {name: figure for model, figure in stated.items() for name in shown.get(model, [model])}


def _overhead_extras(rows: Sequence[Row]) -> list[Extra]:
    table = [[name, row["shape"], row["layout"], row["dtype"], row["mode"], str(row["repeats"]), row["note"] or "–"]
             for name, row in zip(_overhead_names(rows), rows, strict=True)]
    return [Extra(
        "What was measured", "The two in turns: forward, cross entropy and backward, as timm-ortho bench does.",
        Table(["model", "images", "layout", "precision", "mode", "repetitions", "note"], table))]


def _overhead_figures(rows: Sequence[Row]) -> list[Drawing]:
    shown = {name: (row["overhead"], row["overhead_p20"], row["overhead_p80"])
             for name, row in zip(_overhead_names(rows), rows, strict=True) if finite(row["overhead"])}
    stated = {name: figure[2] for name, figure in _stated_overheads(rows).items()}
    if not shown:
        return []
    return [Drawing(
        "overhead", "Overhead of Orthogonal-F in training: the median and the middle 60 % of the repetitions, and the "
        "paper's on its hardware.",
        f"Overhead in percent, here and in the paper, for {', '.join(shown)}.",
        partial(figures.overheads, shown, stated))]


# ------------------------------------------------------------------------------------- Table 1a, FLOPs
_MODULES = {"attention": "Attention", "mlp": "MLP (FFN)"}
_FORMS = {"linear": "Linear", "paper": "Orthogonal, as the paper writes it", "feature": "Orthogonal-F, as it runs here"}


def _flop_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "module" in row]


def _flop_place(row: Row) -> Place:
    return ((_MODULES.get(row["module"], row["module"]), _FORMS[row["connection"]]),
            (f"FLOPs of a block of {model_name(row['model'])}, s = {row['tokens']}, d = {row['width']}",))


def _flop_cells(rows: Sequence[Row]) -> dict[Place, str]:
    return {_flop_place(row): f"{row['branch'] + row['update']:,}" for row in _flop_rows(rows)}


def _flop_paper(rows: Sequence[Row]) -> dict[Place, str]:
    table, found = paper.figures()["flops"], {}
    for row in _flop_rows(rows):
        if row["branch_formula"] is not None and row["update_formula"] is not None:
            terms = table[row["module"]]
            formula = terms["linear"] + (f" + {terms['orthogonal_extra']}" if row["connection"] != "linear" else "")
            total = row["branch_formula"] + row["update_formula"]
            found[_flop_place(row)] = f"{formula.replace('^2', '²')} = {total:,}"
    return found


_WHOLE = ("sites", "parameters", "extra_parameters", "branches", "updates", "extra_flops")


def _parameter_extras(rows: Sequence[Row]) -> list[Extra]:
    extras, blocks = [], [row for row in _flop_rows(rows) if row["connection"] != "linear"]
    if blocks:
        extras.append(Extra(
            "What an orthogonal connection adds to a block",
            "FLOPs of the update beyond those of the addition, counted from a run; the paper has 6sd + 2s.",
            Table(["model", "branch", "connection", "s", "d", "counted", "6sd + 2s"], [
                [model_name(row["model"]), *_flop_place(row)[0], f"{row['tokens']:,}", f"{row['width']:,}",
                 f"{row['extra']:,}", f"{6 * row['tokens'] * row['width'] + 2 * row['tokens']:,}"]
                for row in blocks], names=3)))
    whole = [row for row in rows if "module" not in row]
    if whole:
        extras.append(Extra(
            "Whole models",
            "FLOPs are those of all blocks for one image: of their matrix products and convolutions, and of their "
            "connections; what the connections add is in percent of both together.",
            Table(["model", "connection", "sites", "parameters", "added", "FLOPs of branches", "of connections",
                   "FLOPs added", "in %"], [
                [model_name(row["model"]), connection_name(row["connection"]), *(f"{row[key]:,}" for key in _WHOLE),
                 f"{row['extra_percent']:.3f}"] for row in whole], names=2)))
    return extras


# ------------------------------------------------------------------------------------- Table 11, gamma
_GAMMA_MODELS = {  # of Table 11: the paper's key, its name, and the model here
    "resnet18": ("ResNetV2-18", "resnetv2_18_cifar"), "resnet34": ("ResNetV2-34", "resnetv2_34_cifar"),
    "resnet50": ("ResNetV2-50", "resnetv2_50_cifar"), "resnet101": ("ResNetV2-101", "resnetv2_101_cifar"),
    "vit_s_6_blocks": ("ViT-S", "vit_small"), "vit_b": ("ViT-B", "vit_base"), "resnet1001": ("ResNet-1001", None),
    "vit_s_12_blocks": ("ViT-S, 12 blocks", "vit_small_patch16_224"), "vit_l": ("ViT-L", "vit_large_patch16_224"),
    "vit_h": ("ViT-H", "vit_huge_patch14_224"),
}


def _gamma_cells(rows: Sequence[Row]) -> dict[Place, str]:
    names = {model: name for name, model in _GAMMA_MODELS.values()}
    return {
        ((names.get(row["model"], row["model"]),), (title,)): text
        for row in rows
        for title, text in (
            ("γ", f"{row['gamma']:.2f}"), ("width", f"{row['width']:.2f}"), ("blocks", str(row["blocks"])))
    }


def _gamma_paper(rows: Sequence[Row]) -> dict[Place, str]:
    table, found = paper.figures()["gamma"], {}
    for key, (name, _) in _GAMMA_MODELS.items():
        width, blocks = table["width_and_blocks"][key]
        found |= {((name,), ("γ",)): f"{table[key]:.2f}", ((name,), ("width",)): f"{width:.2f}",
                  ((name,), ("blocks",)): str(blocks)}
    return found


ROW_SPECS: dict[str, RowSpec] = {
    "overhead": RowSpec(
        ("model",), _overhead_cells, _overhead_paper, _overhead_extras, _overhead_figures,
        note="Images a second in training, medians; the overhead with the middle 60 % of the repetitions."),
    "parameters": RowSpec(
        ("module", "connection"), _flop_cells, _flop_paper, _parameter_extras,
        note="Counted from a run of one image, for s tokens of width d; the paper's formula with the same s and d."),
    "gamma": RowSpec(("model",), _gamma_cells, _gamma_paper, note="Counted from the registered models."),
}
