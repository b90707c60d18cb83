"""Write README's table of costs and the tables of docs/speed.md from the rows of `timm-ortho bench`.

The rows come from `model_cards/results/bench_*.csv`. Each file is a renamed `bench.csv` and may contain several runs of
one commit. The tables of docs/speed.md contain all measured cases. README's table has only the default models on GPUs.
The numbers of earlier kernels (`before_h200.csv`) are fixed text of both pages. With the first rows from a GPU, delete
README's sentence about them.
"""
import csv
from itertools import product
from pathlib import Path
from typing import Iterable, Mapping, Sequence

from timm_ortho.bench.options import MODEL_STEPS, MODES
from timm_ortho.lab.reporting.layout import grouped

from .marked import listed, replaced, span, table

NOT_MEASURED = "not measured"

SITUATIONS = tuple(product(MODEL_STEPS, MODES))
FORMULAS = ("plain", "appendix", "compiled", "torch", "torch-compiled", "triton")
MODELS_HEADER = ("on", "model, batch", "layout, precision", *(f"{step}, {mode}" for step, mode in SITUATIONS),
                 "kept for backward, eager", "kept, compiled", "peak memory")
OPERATOR_HEADER = ("on", "tensor", "precision, scope", *FORMULAS, "appendix over ours")
SHOWN = {"ViT-S": ("vit_small", "vit_small_patch16_224"), "ViT-B": ("vit_base_patch16_224",),
         "ResNetV2-50": ("resnetv2_50",)}  # models of the opening paragraph and README's table
COSTS = {  # columns of README's table
    "training, eager": ("training", "eager", "ratio"), "training, compiled": ("training", "compiled", "ratio"),
    "inference, eager": ("inference", "eager", "ratio"),
    "memory kept for backward, eager": ("training", "eager", "saved_ratio"),
    "kept, compiled": ("training", "compiled", "saved_ratio"),
    "peak memory": ("training", "eager", "peak_ratio"),
}
HOW = {"eager": "in eager mode", "compiled": "under `torch.compile`"}

BenchRow = Mapping[str, str]


def texts(root: Path) -> dict[Path, str]:
    results = root / "model_cards" / "results"
    rows, readme, page = rows_of(results), root / "README.md", root / "docs" / "speed.md"
    return {readme: replaced(readme, {"speed": costs(rows)}),
            page: replaced(page, {"opening": opening(rows), "speed": section(rows)})}


def rows_of(results: Path) -> list[BenchRow]:
    return [row for path in sorted(results.glob("bench_*.csv"))
            for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())]


def costs(rows: Sequence[BenchRow]) -> str:
    """Return README's table: a line for each model, batch size and layout on a GPU, or on a CPU without such rows."""
    names = {name for models in SHOWN.values() for name in models}
    shown = [row for row in rows if row["what"] == "models" and row["model"] in names and row["candidate"] == "ortho"]
    on_gpus = [row for row in shown if row["device"] != "cpu" and row["dtype"] == "amp bfloat16"]
    lines = [[on, subject(model, shape, layout), *(
        cost(pick(group, step=step, mode=mode), metric) for step, mode, metric in COSTS.values())]
        for (on, model, shape, layout), group in cases(on_gpus or shown, "models", "model", "shape", "layout").items()]
    header = ["on", "model, batch", *COSTS]
    known = [index for index in range(len(header)) if any(line[index] != NOT_MEASURED for line in lines)]
    return table([header[index] for index in known], [[line[index] for index in known] for line in lines])


def subject(model: str, shape: str, layout: str) -> str:
    """Return model, batch size and, for a convolutional model, the layout."""
    return ", ".join([f"`{model}`", shape.partition("x")[0], *([layout] if layout != "tokens" else [])])


def cost(row: BenchRow, metric: str) -> str:
    return interval(row) if metric == "ratio" else number(row, metric, "{:.3f}")


def opening(rows: Sequence[BenchRow]) -> str:
    """Return the opening of speed.md: for each kind of device, a list with the range of the ratios of each model."""
    parts = []
    for kind, on_cpu in (("GPU", False), ("CPU", True)):
        mine = [row for row in rows if (row["device"] == "cpu") == on_cpu]
        lines = [f"* {name} ({_measured(mine, models)}): {listed(ranges)}"
                 for name, models in SHOWN.items() if (ranges := [
                     f"{percent(of)} {how}" for mode, how in HOW.items()
                     if (of := ratios(mine, models, mode))])]
        small = [row for row in mine if row["what"] == "launch" and row["model"] and row["candidate"] == "ortho"]
        if small:
            appendix, linear = (times([float(row[column]) for row in small])
                                for column in ("appendix_ratio_p50", "ratio_p50"))
            lines.append(f"* ViT of width 64, training and inference: {linear} plain addition, {appendix} the code of "
                         "the paper's Appendix F")
        if lines:
            names = sorted({row["cpu" if on_cpu else "device"].partition(",")[0] for row in mine})
            lines[:0] = [f"Time of a training step on a {kind} ({', '.join(names)}), relative to the same model with "
                         "plain addition:", ""]
        parts.append("\n".join(lines or [f"On a {kind}: not measured with the present code."]))
    return "\n\n".join(parts)


def ratios(rows: Iterable[BenchRow], models: Sequence[str], mode: str) -> list[float]:
    """Return the times of a training step relative to linear connections, in every layout and precision."""
    return [float(row["ratio_p50"]) for row in rows if row["what"] == "models" and row["model"] in models
            and row["candidate"] == "ortho" and (row["step"], row["mode"]) == ("training", mode) and row["ratio_p50"]]


def percent(matched: Sequence[float]) -> str:
    """Return the range of ratios in percent, such as `+7 to +17 %`."""
    return f"{span((round(100 * (ratio - 1)) for ratio in matched), '{:+d}')} %"


def _measured(rows: Iterable[BenchRow], models: Sequence[str]) -> str:
    """Return the names of the models that were measured, as code."""
    names = {row["model"] for row in rows if row["what"] == "models"}
    return ", ".join(f"`{name}`" for name in models if name in names)


def times(matched: Sequence[float]) -> str:
    """Return the range of ratios as text, such as `1.05 to 1.34 times`."""
    return f"{span(matched, '{:.2f}')} times"


def section(rows: Sequence[BenchRow]) -> str:
    """Return the tables of models and operator for speed.md, and the sources of their rows."""
    tables = [table(header, sorted(lines(rows), key=lambda line: line[0].startswith("CPU")))
              for header, lines in TABLES.values()]
    return "\n\n".join(filter(None, [unmeasured(rows), *tables, sources(rows)]))


def sources(rows: Iterable[BenchRow]) -> str:
    """Return a list item for each run: command, machine, versions, commit, day."""
    return "\n".join(dict.fromkeys(
        f"* {device(row)}: `{row['command']}`; {row['cpu']}; "
        f"{'driver ' + row['driver'] + ', ' if row['driver'] else ''}"
        f"torch {row['torch']}, triton {row['triton']}, timm {row['timm']}; commit {commit(row)}, {row['date'][:10]}"
        for row in rows))


def commit(row: BenchRow) -> str:
    number, _, dirty = row["commit"].partition("-")
    return f"{number[:12] or 'unknown'}{' with changes' if dirty else ''}"


def device(row: BenchRow) -> str:
    """Return the name of the GPU, or "CPU, " and the name of the processor."""
    cpu = row["cpu"].partition(",")[0].replace("(R)", "").removesuffix(" Processor")
    return f"CPU, {cpu}" if row["device"] == "cpu" else row["device"]


def unmeasured(rows: Sequence[BenchRow]) -> str:
    """Return a sentence for each kind of device with the tables that have no rows from it."""
    measured = {(row["what"], "CPU" if row["device"] == "cpu" else "GPU") for row in rows}
    missing = {kind: [what for what in TABLES if (what, kind) not in measured] for kind in ("GPU", "CPU")}
    return " ".join(f"Not measured on a {kind}: {listed(parts)}." for kind, parts in missing.items() if parts)


def cases(rows: Iterable[BenchRow], what: str, *labels: str) -> dict[tuple[str, ...], list[BenchRow]]:
    return grouped((row for row in rows if row["what"] == what),
                   lambda row: (device(row), *(row[label] for label in labels)))


def pick(rows: Iterable[BenchRow], **wanted: str) -> BenchRow:
    """Return the row with these values, or an empty row if none matches."""
    matched = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if len(matched) > 1:
        subject = matched[0]["model"] or matched[0]["shape"]
        raise SystemExit(f"{len(matched)} rows of {subject} measure the same case ({wanted}). These commands wrote "
                         f"them: {', '.join(sorted({row['command'] for row in matched}))}")
    return matched[0] if matched else {}


def number(row: BenchRow, column: str, form: str) -> str:
    return form.format(float(row[column])) if row.get(column) else NOT_MEASURED


def model_lines(rows: Iterable[BenchRow]) -> list[list[str]]:
    lines = []
    labels = ("model", "shape", "candidate", "layout", "dtype")
    for (on, model, shape, candidate, *how), mine in cases(rows, "models", *labels).items():
        if candidate != "linear":
            eager, compiled = (pick(mine, step="training", mode=mode) for mode in ("eager", "compiled"))
            name, bracket, arguments = model.partition("(")
            lines.append([on, f"{name}_{candidate}{bracket}{arguments}, {shape.partition('x')[0]}", ", ".join(how),
                          *(interval(pick(mine, step=step, mode=mode)) for step, mode in SITUATIONS),
                          number(eager, "saved_ratio", "{:.3f}"), number(compiled, "saved_ratio", "{:.3f}"),
                          number(eager, "peak_ratio", "{:.3f}")])
    return lines


def interval(row: BenchRow) -> str:
    if not row.get("ratio_p50"):
        return NOT_MEASURED
    return "{:.3f} [{:.3f}, {:.3f}]".format(*(float(row[f"ratio_{q}"]) for q in ("p50", "p20", "p80")))


def operator_lines(rows: Iterable[BenchRow]) -> list[list[str]]:
    lines = []
    for (on, shape, layout, *how), mine in cases(rows, "operator", "shape", "layout", "dtype", "scope").items():
        lines.append([on, f"{shape}, {layout}", ", ".join(how), *(formula(mine, name) for name in FORMULAS),
                      speedup(mine)])
    return lines


def formula(rows: Sequence[BenchRow], name: str) -> str:
    """Return the time of forward plus backward relative to linear, and the bandwidth of each relative to a copy."""
    ratio = number(pick(rows, step="both", candidate=name), "ratio_p50", "{:.2f}")
    if ratio == NOT_MEASURED:
        return ratio
    shares = (number(pick(rows, step=step, candidate=name), "share_of_copy", "{:.0%}")
              for step in ("forward", "backward"))
    return f"{ratio} ({', '.join(shares)})"


def speedup(rows: Sequence[BenchRow]) -> str:
    """Return the speedup of `triton`, or of `torch` if `triton` was not measured, over the paper's appendix."""
    for name in ("triton", "torch"):
        ratio = pick(rows, step="both", candidate=name).get("appendix_ratio_p50")
        if ratio:
            return f"{1 / float(ratio):.1f} ({name})"
    return NOT_MEASURED


TABLES = {"models": (MODELS_HEADER, model_lines), "operator": (OPERATOR_HEADER, operator_lines)}
