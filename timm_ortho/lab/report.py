"""Finished runs as a table, as `results.json`, and as `report.html`, which needs no other file and no network."""
import html
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Callable, Optional, Sequence

import timm
import torch
import yaml
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import t as student_t

from . import own_version, write_json, write_text
from .page import Table, figure_box, html_table, page, svg, text_table
from .plots import band, label, style

__all__ = ["Difference", "paired_difference", "profile_figure", "training_figure", "write"]

_MEASURES = {
    "stream": ("stream norm |x|", lambda site: math.sqrt(site["stream"])),
    "cosine": ("cosine of x and f", lambda site: site["cosine"]),
}


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences with its two-sided 95 % interval; `half_width` is None for a single pair."""

    mean: float
    half_width: Optional[float]
    pairs: int

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.mean:+.2f} (one pair, no interval)"
        return f"{self.mean:+.2f} [{self.mean - self.half_width:+.2f}, {self.mean + self.half_width:+.2f}]"


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Student's interval for the mean of `values[i] - baseline[i]`: mean +- t(0.975, n - 1) s / sqrt(n)."""
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    count = len(differences)
    if count < 2:
        return Difference(fmean(differences), None, count)
    half_width = float(student_t.ppf(0.975, count - 1)) * stdev(differences) / math.sqrt(count)
    return Difference(fmean(differences), half_width, count)


def write(folder: Path) -> str:
    """Writes `results.json` and `report.html` from what is finished in the folder.

    Returns:
        The table as text, and where the page is.
    """
    settings = yaml.safe_load((folder / "compare.yaml").read_text(encoding="utf-8"))
    runs, unfinished = _collect(folder, settings)
    rows = _summarise(runs, settings["connections"])
    versions = {"torch": torch.__version__, "timm": timm.__version__, "timm-ortho": own_version()}
    summary = [{**row, "difference": _plain(row["difference"])} for row in rows]
    write_json(folder / "results.json", {
        "settings": settings, "versions": versions, "summary": summary, "unfinished": unfinished, "runs": runs})
    write_text(folder / "report.html", _page(settings, versions, runs, rows, unfinished))
    missing = f"\nnot finished: {', '.join(unfinished)}" if unfinished else ""
    return f"{_title(settings)}\n\n{_text_table(rows)}{missing}\n\nreport: {folder / 'report.html'}"


def _collect(folder: Path, settings: dict) -> tuple[list[dict], list[str]]:
    runs, unfinished = [], []
    for connection in settings["connections"]:
        for seed in settings["seeds"]:
            name = f"{connection}-seed{seed}"
            if (folder / name / "result.json").is_file():
                parts = {part: json.loads((folder / name / f"{part}.json").read_text(encoding="utf-8"))
                         for part in ("result", "history", "dynamics")}
                runs.append({**parts.pop("result"), **parts})
            else:
                unfinished.append(name)
    return runs, unfinished


def _summarise(runs: Sequence[dict], connections: Sequence[str]) -> list[dict]:
    """One row for each connection with a finished run, the baseline first."""
    baseline = "linear" if "linear" in connections else connections[0]
    by_seed = {name: {run["seed"]: run["top1"] for run in runs if run["connection"] == name} for name in connections}
    rows = []
    for name in sorted(connections, key=lambda name: name != baseline):
        mine = [run for run in runs if run["connection"] == name]
        if not mine:
            continue
        pairs = sorted(by_seed[name].keys() & by_seed[baseline].keys())
        difference = None
        if name != baseline and pairs:
            difference = paired_difference(*([by_seed[who][seed] for seed in pairs] for who in (name, baseline)))
        rows.append({
            "connection": name,
            "baseline": baseline,
            "seeds": sorted(by_seed[name]),
            "top1": [by_seed[name][seed] for seed in sorted(by_seed[name])],
            "top1_mean": fmean(by_seed[name].values()),
            "top1_std": stdev(by_seed[name].values()) if len(mine) > 1 else None,
            "best_top1_mean": fmean(run["best_top1"] for run in mine),
            "difference": difference,
            "images_per_second": fmean(run["images_per_second"] for run in mine),
            "peak_memory": max((run["peak_memory"] for run in mine if run["peak_memory"]), default=None),
        })
    return rows


def _plain(difference: Optional[Difference]) -> Optional[dict]:
    return None if difference is None else vars(difference)


# ------------------------------------------------------------------------------------------- the table
def _title(settings: dict) -> str:
    options = settings["options"]
    data = options["dataset"] or options["data_dir"]
    counts = [f"{count} {noun}{'' if count == 1 else 's'}"
              for count, noun in ((options["epochs"], "epoch"), (len(settings["seeds"]), "seed"))]
    return f"{options['model'].removesuffix('_ortho')} on {data}, {', '.join(counts)}, on {options['device']}"


def _cells(rows: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    baseline = rows[0]["baseline"] if rows else "linear"
    header = ["connection", "seeds", "top-1 % (last epoch)", "best epoch %", f"difference to {baseline} [95 %]",
              "images/s", "peak memory"]
    cells = []
    for row in rows:
        spread = f" ± {row['top1_std']:.2f}" if row["top1_std"] is not None else ""
        memory = f"{row['peak_memory'] / 2**20:,.0f} MiB" if row["peak_memory"] else "unknown"
        cells.append([row["connection"], str(len(row["seeds"])), f"{row['top1_mean']:.2f}{spread}",
                      f"{row['best_top1_mean']:.2f}", str(row["difference"] or "-"),
                      f"{row['images_per_second']:,.0f}", memory])
    return header, cells


def _text_table(rows: Sequence[dict]) -> str:
    return text_table(Table(*_cells(rows))) if rows else "no run is finished yet"


# ------------------------------------------------------------------------------------------ the figures
def training_figure(runs: Sequence[dict]) -> Figure:
    """Loss and accuracy over epochs: the mean of the seeds, and their range."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, key, title in ((left, "train_loss", "training loss"), (right, "eval_top1", "validation top-1, %")):
        for connection, group in _by_connection(runs):
            curves = [[_nan(row[key]) for row in run["history"]] for run in group]
            band(axes, range(1, len(curves[0]) + 1), curves, connection, **_line(connection))
        label(axes, title, "epoch")
    left.legend(frameon=False)
    return figure


def profile_figure(runs: Sequence[dict]) -> Figure:
    """Both measures along the depth of the network, after the last epoch."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (title, read) in zip(figure.subplots(1, 2), _MEASURES.values(), strict=True):
        for connection, group in _by_connection(runs):
            curves = [[_nan(read(site)) for site in run["dynamics"][-1]["sites"]] for run in group]
            band(axes, range(len(curves[0])), curves, connection, **style(connection), markersize=3)
        sites = runs[0]["dynamics"][-1]["sites"]
        step = max(1, len(sites) // 12)
        axes.set_xticks(range(0, len(sites), step), [_site_label(site) for site in sites[::step]], rotation=60)
        label(axes, f"{title}, after training", "site, from the first block to the last")
    figure.axes[0].legend(frameon=False)
    return figure


def _dynamics_figure(runs: Sequence[dict], measure: str) -> Figure:
    """One panel a connection, one line a block (the mean of its sites and of the seeds), over the epochs."""
    title, read = _MEASURES[measure]
    groups = _by_connection(runs)
    figure = Figure(figsize=(max(5.0, 3.4 * len(groups)), 3.4), layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    layers = sorted({site["layer"] for site in runs[0]["dynamics"][0]["sites"]})
    for axes, (connection, group) in zip(panels, groups, strict=True):
        for layer in layers:
            shade = colormaps["viridis"](0.9 * layer / max(1, layers[-1]))
            epochs = [record["epochs_done"] for record in group[0]["dynamics"]]
            curve = [fmean(_nan(read(site)) for run in group for site in run["dynamics"][index]["sites"]
                           if site["layer"] == layer) for index in range(len(epochs))]
            named = layer in (layers[0], layers[-1]) or len(layers) <= 8
            axes.plot(epochs, curve, color=shade, linewidth=1.3, label=f"block {layer}" if named else None)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        label(axes, f"{connection}: {title}", "epochs done")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure


def _line(connection: str) -> dict:
    return {key: value for key, value in style(connection).items() if key != "marker"}


def _by_connection(runs: Sequence[dict]) -> list[tuple[str, list[dict]]]:
    names = list(dict.fromkeys(run["connection"] for run in runs))
    return [(name, [run for run in runs if run["connection"] == name]) for name in names]


def _site_label(site: dict) -> str:
    return f"{site['layer']} {site['kind']}"


def _nan(value: Optional[float]) -> float:
    return math.nan if value is None else value


# --------------------------------------------------------------------------------------------- the page
def _page(settings: dict, versions: dict, runs: Sequence[dict], rows: Sequence[dict], unfinished: Sequence[str]) -> str:
    parts = [html_table(Table(*_cells(rows)), "comparison") if rows else "<p>No run is finished yet.</p>"]
    if unfinished:
        parts.append(f'<p class="note">Not finished: {html.escape(", ".join(unfinished))}.</p>')
    if runs:
        parts += [_NOTE, *_figures(runs), "<h2>Every run</h2>", _run_table(runs)]
    parts += ["<h2>Settings</h2>", _settings_table({**settings["options"], **versions})]
    return page(_title(settings), parts)


_NOTE = """<p class="note">Runs with one seed start from the same weights and see the same batches and augmentation, so
differences are taken seed by seed; in brackets is Student's 95 % interval of their mean. Top-1 is that of the last
epoch, with the standard deviation over seeds; the best epoch is chosen on the validation set itself. Images/s counts
training with its data loading. Peak memory is what was allocated on a GPU, on a CPU what the whole process held.</p>"""


def _figures(runs: Sequence[dict]) -> list[str]:
    return [
        "<h2>Training</h2>",
        _figure(lambda: training_figure(runs), "training loss and validation accuracy by epoch"),
        "<h2>The stream, block by block</h2>",
        '<p class="note">Measured on one validation batch, over the channel axis, averaged over tokens or pixels: x is '
        "the stream that a block receives, f what its branch adds. Lines are means over seeds, shades their range.</p>",
        _figure(lambda: profile_figure(runs), "stream norm and cosine by site after training"),
        _figure(lambda: _dynamics_figure(runs, "stream"), "stream norm of each block by epoch"),
        _figure(lambda: _dynamics_figure(runs, "cosine"), "cosine of each block by epoch"),
    ]


def _figure(draw: Callable[[], Figure], alt: str) -> str:
    return figure_box(svg(draw, alt), alt)


def _run_table(runs: Sequence[dict]) -> str:
    header = ["run", "top-1 %", "top-5 %", "best % (epoch)", "loss", "images/s", "seconds"]
    return html_table(Table(header, [[
        f"{run['connection']}-seed{run['seed']}", f"{run['top1']:.2f}", f"{run['top5']:.2f}",
        f"{run['best_top1']:.2f} ({run['best_epoch'] + 1})", f"{_nan(run['loss']):.4f}",
        f"{run['images_per_second']:,.0f}", f"{run['seconds']:.1f}"] for run in runs]), "every run")


def _settings_table(values: dict) -> str:
    rows = [[key, str(value)] for key, value in values.items() if value not in (None, "", False, {}, [])]
    return html_table(Table(["setting", "value"], rows), "settings", wrap=True)
