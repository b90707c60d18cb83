"""Make the README's tables of speed and memory from what `timm-ortho bench` measured.

    python scripts/readme_bench.py            writes them between the README's markers
    python scripts/readme_bench.py --check    writes nothing; exit status 1 if they are not what the rows say

The rows are those of ``model_cards/results/bench_*.csv``, each file a ``bench.csv`` under another name, several runs in
one file if they were of one commit. Every case that was measured is in a table, whatever the figure says, and what
`timm-ortho bench` measures by default and no file holds is there as "not measured".
"""
import csv
import sys
from itertools import product
from pathlib import Path
from typing import Iterable, Mapping, Sequence

from timm_ortho.bench.measure import DEFAULTS, MODEL_STEPS, MODES, TINY

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- speed: made by scripts/readme_bench.py -->", "<!-- end of speed -->"
NOT_MEASURED = "not measured"

SITUATIONS = tuple(product(MODEL_STEPS, MODES))
FORMULAS = ("plain", "appendix", "compiled", "torch", "torch-compiled", "inductor", "triton", "triton-compiled")
LAUNCHED, LAUNCHES = ("linear", "appendix", "ortho"), ("x".join(map(str, TINY)), "ViT 64 wide")
MODELS_HEADER = ("on", "model", "layout, precision", *(f"{step}, {mode}" for step, mode in SITUATIONS),
                 "kept for backward, eager", "kept, compiled", "peak memory")
OPERATOR_HEADER = ("on", "tensor", "precision, scope", *FORMULAS, "appendix over ours")
LAUNCH_HEADER = ("on", "tensor or model", "step", *(f"{name}, us" for name in LAUNCHED), "over linear", "over appendix")

Row = Mapping[str, str]


def main(
        arguments: Sequence[str],
        readme: Path = ROOT / "README.md",
        results: Path = ROOT / "model_cards" / "results",
) -> int:
    if arguments not in ([], ["--check"]):
        raise SystemExit(__doc__)
    before = readme.read_text(encoding="utf-8")
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{readme} has no '{BEGIN}' with '{END}' behind it")
    after = f"{head}{BEGIN}\n\n{section(results)}\n\n{END}{tail}"
    if not arguments:
        readme.write_text(after, encoding="utf-8")
    elif before != after:
        print(f"{readme} is not what {results}/bench_*.csv say: run python scripts/readme_bench.py", file=sys.stderr)
        return 1
    return 0


def section(results: Path) -> str:
    """What stands between the markers: the tables of models, operator and launches, and where the rows come from."""
    rows = [row for path in sorted(results.glob("bench_*.csv")) for row in read(path)]
    tables = [markdown(header, [*lines(rows), *unmeasured(rows, what, len(header))])
              for what, (header, lines) in TABLES.items()]
    return "\n\n".join(filter(None, [*tables, sources(rows)]))


def read(path: Path) -> list[Row]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sources(rows: Iterable[Row]) -> str:
    """An item for each run: command, machine, versions, commit, day."""
    return "\n".join(dict.fromkeys(
        f"* {place(row)}: `{row['command']}`; {row['cpu']}; {'driver ' + row['driver'] + ', ' if row['driver'] else ''}"
        f"torch {row['torch']}, triton {row['triton']}, timm {row['timm']}; commit {commit(row)}, {row['date'][:10]}"
        for row in rows))


def commit(row: Row) -> str:
    number, _, dirty = row["commit"].partition("-")
    return f"{number[:12] or 'unknown'}{' with changes' if dirty else ''}"


def place(row: Row) -> str:
    return "CPU" if row["device"] == "cpu" else row["device"]


def unmeasured(rows: Sequence[Row], what: str, width: int) -> list[list[str]]:
    """A line for each default model, shape or launch of a kind of device that there are no rows of."""
    lines = []
    for kind, name in (("cpu", "CPU"), ("cuda", "GPU")):
        if not any(row["what"] == what and (row["device"] == "cpu") == (kind == "cpu") for row in rows):
            subjects = {"models": DEFAULTS[kind]["models"], "operator": DEFAULTS[kind]["shapes"], "launch": LAUNCHES}
            lines += [[name, subject, *[NOT_MEASURED] * (width - 2)] for subject in subjects[what]]
    return lines


def cases(rows: Iterable[Row], what: str, *labels: str) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["what"] == what:
            found.setdefault((place(row), *(row[label] for label in labels)), []).append(row)
    return found


def pick(rows: Iterable[Row], **wanted: str) -> Row:
    """The row with these values, empty if there is none."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if len(found) > 1:
        raise SystemExit(f"{len(found)} rows of {found[0]['model'] or found[0]['shape']} are the same measurement, "
                         f"{wanted}, by: {', '.join(sorted({row['command'] for row in found}))}")
    return found[0] if found else {}


def number(row: Row, column: str, form: str, unit: float = 1) -> str:
    return form.format(float(row[column]) / unit) if row.get(column) else NOT_MEASURED


def model_lines(rows: Iterable[Row]) -> list[list[str]]:
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


def interval(row: Row, name: str = "ratio") -> str:
    if not row.get(f"{name}_p50"):
        return NOT_MEASURED
    return "{:.3f} [{:.3f}, {:.3f}]".format(*(float(row[f"{name}_{q}"]) for q in ("p50", "p20", "p80")))


def operator_lines(rows: Iterable[Row]) -> list[list[str]]:
    lines = []
    for (on, shape, layout, *how), mine in cases(rows, "operator", "shape", "layout", "dtype", "scope").items():
        lines.append([on, f"{shape}, {layout}", ", ".join(how), *(formula(mine, name) for name in FORMULAS),
                      speedup(mine)])
    return lines


def formula(rows: Sequence[Row], name: str) -> str:
    """Forward and backward over linear, and forward's and backward's shares of a copy's bandwidth."""
    ratio = number(pick(rows, step="both", candidate=name), "ratio_p50", "{:.2f}")
    if ratio == NOT_MEASURED:
        return ratio
    shares = (number(pick(rows, step=step, candidate=name), "share_of_copy", "{:.0%}")
              for step in ("forward", "backward"))
    return f"{ratio} ({', '.join(shares)})"


def speedup(rows: Sequence[Row]) -> str:
    """How many times as fast as the appendix's formula the kernels are, or without them the eager update."""
    for name in ("triton", "torch"):
        ratio = pick(rows, step="both", candidate=name).get("appendix_ratio_p50")
        if ratio:
            return f"{1 / float(ratio):.1f} ({name})"
    return NOT_MEASURED


def launch_lines(rows: Iterable[Row]) -> list[list[str]]:
    lines = []
    for (on, model, shape, step), mine in cases(rows, "launch", "model", "shape", "step").items():
        times = (number(pick(mine, candidate=name), "ms_p50", "{:,.1f}", 1e-3) for name in LAUNCHED)
        ours = pick(mine, candidate="ortho")
        lines.append([on, f"{model} {shape}".strip(), step, *times, interval(ours), interval(ours, "appendix_ratio")])
    return lines


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))


TABLES = {"models": (MODELS_HEADER, model_lines), "operator": (OPERATOR_HEADER, operator_lines),
          "launch": (LAUNCH_HEADER, launch_lines)}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
