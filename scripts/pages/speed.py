"""Write README's table of costs and the tables of docs/speed.md from the rows of `timm-ortho bench`.

The rows come from `model_cards/results/bench_*.csv`. Each file is a renamed `bench.csv` and may contain several runs of
one commit. The tables of docs/speed.md contain all measured cases. If such a table has no rows from a CPU or none from
a GPU, it lists default cases of `timm-ortho bench` for this kind of device as "not measured". README's table has only
the launch of a small tensor and the models in `SHOWN`.
"""
import csv
import textwrap
from itertools import product
from pathlib import Path
from typing import Iterable, Mapping, Sequence

from timm_ortho.bench.launch import TINY
from timm_ortho.bench.options import DEFAULTS, MODEL_STEPS, MODES

from .marked import replaced

NOT_MEASURED = "not measured"

SITUATIONS = tuple(product(MODEL_STEPS, MODES))
FORMULAS = ("plain", "appendix", "compiled", "torch", "torch-compiled", "inductor", "triton")
LAUNCHED, LAUNCHES = ("linear", "appendix", "shortest", "ortho"), ("x".join(map(str, TINY)), "ViT 64 wide")
MODELS_HEADER = ("on", "model", "layout, precision", *(f"{step}, {mode}" for step, mode in SITUATIONS),
                 "kept for backward, eager", "kept, compiled", "peak memory")
OPERATOR_HEADER = ("on", "tensor", "precision, scope", *FORMULAS, "appendix over ours")
SHOWN = {"ViT-S": ("vit_small", "vit_small_patch16_224"), "ResNetV2-50": ("resnetv2_50",)}  # models in README's table
COSTS = (
    ("training step, eager", "training", "eager", "ratio"),
    ("training step, torch.compile", "training", "compiled", "ratio"),
    ("inference, eager", "inference", "eager", "ratio"),
    ("memory kept for backward (eager)", "training", "eager", "saved_ratio"),
    ("peak memory, training (eager)", "training", "eager", "peak_ratio"),
)
HOW = {"eager": "in eager mode", "inductor": "with `inductor`", "compiled": "under `torch.compile`"}
LAUNCH_HEADER = (
    "on", "tensor or model", "step", *(f"{name}, us" for name in LAUNCHED), "over linear", "over appendix",
    "over shortest")

BenchRow = Mapping[str, str]


def texts(root: Path) -> dict[Path, str]:
    rows = rows_of(root / "model_cards" / "results")
    readme, page = root / "README.md", root / "docs" / "speed.md"
    return {readme: replaced(readme, {"speed": costs(rows)}),
            page: replaced(page, {"opening": opening(rows), "speed": section(rows)})}


def rows_of(results: Path) -> list[BenchRow]:
    return [row for path in sorted(results.glob("bench_*.csv")) for row in read(path)]


def costs(rows: Sequence[BenchRow]) -> str:
    """Return README's table: a row for each cost, and a column for each measured device.

    If no CPU or no GPU was measured, the table has a column "CPU" or "GPU" of "not measured".
    """
    on_cpu = [row["device"] == "cpu" for row in rows]
    devices = [*(["CPU"] if True not in on_cpu else []), *dict.fromkeys(map(device, rows)),
               *(["GPU"] if False not in on_cpu else [])]
    by_device = {name: [row for row in rows if device(row) == name] for name in devices}
    lines = [[f"launch, {LAUNCHES[0]}, {step} (times, not a ratio)",
              *(launch(mine, step) for mine in by_device.values())] for step in MODEL_STEPS]
    lines += [[f"{name}: {label}", *(ratio(mine, models, *how) for mine in by_device.values())]
              for name, models in SHOWN.items() for label, *how in COSTS]
    return markdown(["ratio of orthogonal to linear", *by_device], lines)


def ratio(rows: Iterable[BenchRow], models: Sequence[str], step: str, mode: str, name: str) -> str:
    """Return the ratio `name` of a model in each measured precision, as text. `models` lists the model's names."""
    matched = [row for row in rows if row["what"] == "models" and row["model"] in models and row["candidate"] == "ortho"
             and row["layout"] in ("tokens", "nchw") and (row["step"], row["mode"]) == (step, mode)]
    sentences = {row["dtype"]: interval(row) if name == "ratio" else number(row, name, "{:.3f}") for row in matched}
    if len(sentences) < 2:
        return next(iter(sentences.values()), NOT_MEASURED)
    return "; ".join(f"{text} ({dtype})" for dtype, text in sentences.items())


def launch(rows: Iterable[BenchRow], step: str) -> str:
    ours, linear = (pick(rows, what="launch", shape=LAUNCHES[0], step=step, candidate=name)
                    for name in ("ortho", "linear"))
    if not (ours and linear):
        return NOT_MEASURED
    return " against ".join(f"{float(row['ms_p50']) * 1e3:,.1f} us" for row in (ours, linear))


def opening(rows: Sequence[BenchRow]) -> str:
    """Return the opening paragraph of speed.md, with the range of the ratios on each kind of device."""
    sentences = []
    for kind, on_cpu in (("CPU", True), ("GPU", False)):
        mine = [row for row in rows if (row["device"] == "cpu") == on_cpu]
        steps = [f"For {name} ({_measured(mine, models)}), the change is {_listed(ranges)}."
                 for name, models in SHOWN.items() if (ranges := [
                     f"{percent(of)} {how}" for mode, how in HOW.items()
                     if (of := ratios(mine, "models", models, mode))])]
        small = [row for row in mine if row["what"] == "launch" and row["model"] and row["candidate"] == "ortho"]
        if steps:
            names = sorted({row["cpu" if on_cpu else "device"].partition(",")[0] for row in mine})
            sentences.append(f"On a {kind} ({', '.join(names)}), the time of a training step changes as follows if "
                             f"orthogonal connections replace linear connections. {' '.join(steps)}")
            if any(HOW["inductor"] in step for step in steps):
                sentences.append("The backend `inductor` compiles only the update, and `torch.compile` compiles the "
                                 "whole model.")
        if small:
            appendix, linear = (times([float(row[column]) for row in small])
                                for column in ("appendix_ratio_p50", "ratio_p50"))
            sentences.append(f"A training step or a forward pass of a ViT of width 64 takes {linear} as long with "
                             f"orthogonal connections as with plain addition. It takes {appendix} as long as with the "
                             "code of the paper's Appendix F.")
        if not steps and not small:
            sentences.append(f"On a {kind}: not measured.")
    return textwrap.fill(" ".join(sentences), 120, break_on_hyphens=False)


def ratios(rows: Iterable[BenchRow], what: str, models: Sequence[str], mode: str) -> list[float]:
    """Return the times of a training step relative to linear connections, in every layout and precision."""
    return [float(row["ratio_p50"]) for row in rows if row["what"] == what and row["model"] in models
            and row["candidate"] == "ortho" and (row["step"], row["mode"]) == ("training", mode) and row["ratio_p50"]]


def percent(matched: Sequence[float]) -> str:
    """Return the range of ratios in percent, such as `+7 to +17 %`."""
    low, high = (f"{100 * (end - 1):+.0f}".replace("-0", "+0") for end in (min(matched), max(matched)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _measured(rows: Iterable[BenchRow], models: Sequence[str]) -> str:
    """Return the names of the models that were measured, as code."""
    names = {row["model"] for row in rows if row["what"] == "models"}
    return ", ".join(f"`{name}`" for name in models if name in names)


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def times(matched: Sequence[float]) -> str:
    """Return the range of ratios as text, such as `1.05 to 1.34 times`."""
    low, high = (f"{end:.2f}" for end in (min(matched), max(matched)))
    return f"{low} times" if low == high else f"{low} to {high} times"


def section(rows: Sequence[BenchRow]) -> str:
    """Return the tables of models, operator and launches for speed.md, and the sources of their rows."""
    tables = [markdown(header, [*lines(rows), *unmeasured(rows, what, len(header))])
              for what, (header, lines) in TABLES.items()]
    return "\n\n".join(filter(None, [*tables, sources(rows)]))


def read(path: Path) -> list[BenchRow]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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


def unmeasured(rows: Sequence[BenchRow], what: str, width: int) -> list[list[str]]:
    """Return lines for the default cases of the CPU, the GPU, or both, if the table `what` has no rows from them."""
    lines = []
    for kind, name in (("cpu", "CPU"), ("cuda", "GPU")):
        if not any(row["what"] == what and (row["device"] == "cpu") == (kind == "cpu") for row in rows):
            subjects = {"models": DEFAULTS[kind]["models"], "operator": DEFAULTS[kind]["shapes"], "launch": LAUNCHES}
            lines += [[name, subject, *[NOT_MEASURED] * (width - 2)] for subject in subjects[what]]
    return lines


def cases(rows: Iterable[BenchRow], what: str, *labels: str) -> dict[tuple[str, ...], list[BenchRow]]:
    matched: dict[tuple[str, ...], list[BenchRow]] = {}
    for row in rows:
        if row["what"] == what:
            matched.setdefault((device(row), *(row[label] for label in labels)), []).append(row)
    return matched


def pick(rows: Iterable[BenchRow], **wanted: str) -> BenchRow:
    """Return the row with these values, or an empty row if none matches."""
    matched = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if len(matched) > 1:
        subject = matched[0]["model"] or matched[0]["shape"]
        raise SystemExit(f"{len(matched)} rows of {subject} measure the same case ({wanted}). These commands wrote "
                         f"them: {', '.join(sorted({row['command'] for row in matched}))}")
    return matched[0] if matched else {}


def number(row: BenchRow, column: str, form: str, unit: float = 1) -> str:
    return form.format(float(row[column]) / unit) if row.get(column) else NOT_MEASURED


def model_lines(rows: Iterable[BenchRow]) -> list[list[str]]:
    lines = []
    for (on, model, candidate, *how), mine in cases(rows, "models", "model", "candidate", "layout", "dtype").items():
        if candidate != "linear":
            eager, compiled = (pick(mine, step="training", mode=mode) for mode in ("eager", "compiled"))
            name, bracket, arguments = model.partition("(")
            lines.append([on, f"{name}_{candidate}{bracket}{arguments}", ", ".join(how),
                          *(interval(pick(mine, step=step, mode=mode)) for step, mode in SITUATIONS),
                          number(eager, "saved_ratio", "{:.3f}"), number(compiled, "saved_ratio", "{:.3f}"),
                          number(eager, "peak_ratio", "{:.3f}")])
    return lines


def interval(row: BenchRow, name: str = "ratio") -> str:
    if not row.get(f"{name}_p50"):
        return NOT_MEASURED
    return "{:.3f} [{:.3f}, {:.3f}]".format(*(float(row[f"{name}_{q}"]) for q in ("p50", "p20", "p80")))


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


def launch_lines(rows: Iterable[BenchRow]) -> list[list[str]]:
    lines = []
    for (on, model, shape, step), mine in cases(rows, "launch", "model", "shape", "step").items():
        times = (number(pick(mine, candidate=name), "ms_p50", "{:,.1f}", 1e-3) for name in LAUNCHED)
        ours = pick(mine, candidate="ortho")
        lines.append([on, f"{model} {shape}".strip(), step, *times, interval(ours), interval(ours, "appendix_ratio"),
                      interval(ours, "shortest_ratio")])
    return lines


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))


TABLES = {"models": (MODELS_HEADER, model_lines), "operator": (OPERATOR_HEADER, operator_lines),
          "launch": (LAUNCH_HEADER, launch_lines)}
