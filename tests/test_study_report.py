"""Reports of studies, from runs whose numbers the tests make up and know."""
import copy
import itertools
import json
import math
import random
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import scipy.stats
from matplotlib.figure import Figure

from timm_ortho.lab import LabError, cost_specs, page, paper, study_figures, study_report, study_specs, study_tables
from timm_ortho.lab.page import Table
from timm_ortho.lab.plots import STYLES, band, style

SITES = [(layer, kind) for layer in range(2) for kind in ("attention", "mlp")]
GRIDS = {  # study: table of the paper, axes, the baseline, and which connections a cell is run with
    "accuracy": ("accuracy", {"model": ["vit_s", "resnetv2_18"]}, {"connection": "linear"}),
    "switch_reinitialised": ("connection_switch_reinitialised", {"switch": ["LL", "LO", "OL", "OO"]}, {"switch": "LL"}),
    "switch_kept": ("connection_switch_continuous", {"switch": ["LL", "LO", "OL", "OO"]}, {"switch": "LL"}),
    "layer_pattern": ("layer_pattern", {"layers": ["none", "0,1", "all"]}, {"layers": "none"}),
    "probability": ("probability", {"probability": [0.0, 0.5, 1.0]}, {"probability": 0.0}),
    "epsilon": ("epsilon", {"connection_eps": [1e-8, 1e-6]}, {"connection_eps": 1e-6}),
    "learning_rate": ("learning_rate_sweep", {"lr": [1e-3, 5e-4]}, {"connection": "linear"}),
    "initialisation": ("initialisation", {"initialisation": ["xavier"]}, {"connection": "linear"}),
    "head_norm": ("final_layer_norm", {"norm": ["without", "with"]}, {"connection": "linear"}),
    "hybrid": ("hybrid", {"start": ["fixed", "orthogonal", "linear"]}, {"start": "fixed", "connection": "linear"}),
    "dynamics": ("dynamics", {}, {"connection": "linear"}),
    "representation": ("representation", {}, {"connection": "linear"}),
    **{name: (name, {"depth": [20], "skip": ["identity", "orthogonal_tp"]}, {"skip": "identity"})
       for name in ("skips_single", "skips_branch4", "skips_depthwise")},
    "skip_rank": ("skip_rank", {"rank": [0.0, 1.0]}, {"rank": 1.0}),
    "families": ("", {"family": ["swin", "resnet"]}, {"connection": "linear"}),  # of no paper
}
RECORDED = ("head_norm", "hybrid", "dynamics")
OVERHEAD = {
    "model": "vit_small_ortho", "shape": "8x3x64x64", "layout": "tokens", "dtype": "float32", "mode": "eager",
    "linear": 1000.0, "feature": 980.0, "overhead": 2.0, "overhead_p20": 1.0, "overhead_p80": 3.5, "repeats": 11,
    "note": "", "device": "AMD EPYC, 2 cores, 2 threads"}
BLOCK = {"model": "vit_small", "module": "attention", "tokens": 10, "width": 4, "branch": 2880, "branch_formula": 2880}
WHOLE = {"model": "vit_small", "sites": 12, "branches": 10**6, "parameters": 1234, "extra_parameters": 0}
ROWS = {  # as `cost` makes them
    "overhead": [OVERHEAD, {**OVERHEAD, "model": "resnetv2_34_cifar_ortho", "linear": None, "feature": None,
                            "overhead": None, "overhead_p20": None, "overhead_p80": None, "note": "out of memory"}],
    "parameters": [
        {**BLOCK, "connection": "linear", "update": 40, "update_formula": 40, "extra": 0, "extra_formula": 0},
        {**BLOCK, "connection": "paper", "update": 300, "update_formula": 300, "extra": 260, "extra_formula": 260},
        {**BLOCK, "connection": "feature", "update": 330, "update_formula": None, "extra": 290, "extra_formula": None},
        {**WHOLE, "connection": "linear", "updates": 480, "extra_flops": 0, "extra_percent": 0.0},
        {**WHOLE, "connection": "feature", "updates": 3960, "extra_flops": 3480, "extra_percent": 0.348}],
    "gamma": [{"model": "vit_small", "width": 384.0, "blocks": 6, "gamma": 64.0},
              {"model": "resnetv2_18_cifar", "width": 240.0, "blocks": 8, "gamma": 30.0},
              {"model": "deit_tiny_patch16_224", "width": 192.0, "blocks": 12, "gamma": 16.0}],
}


# --------------------------------------------------------------------------------------- what is made up
def study_of(name, **changes):
    table, axes, baseline = GRIDS.get(name, (name, {}, {"connection": "linear"}))
    return {
        "name": name, "title": f"What of {name}?", "paper": "Table 0" if table else "", "table": table,
        "kind": "training",
        "scale": "small", "dataset": "digits", "model": "vit_small", "axes": axes, "connections": ["linear", "feature"],
        "seeds": [0, 1, 2], "baseline": baseline, "changed": ["epochs: 3 here, 300 in the paper", "a < b & c|d"],
        "versions": {"timm-ortho": "9.9", "torch": "2.x"}, "command": f"timm-ortho study run {name}", **changes}


def run_of(connection, seed, cell=None, *, top1=90.0, dynamics=False, represented=None, epochs=3):
    history = [{
        "epoch": epoch, "train_loss": 2.0 / (epoch + 1), "eval_loss": 1.0 / (epoch + 1), "lr": 1e-3,
        "eval_top1": top1 - 10.0 * (epochs - 1 - epoch), "eval_top5": 99.0, "images_per_second": 100.0, "seconds": 2.0,
        "peak_memory": 2**30} for epoch in range(epochs)]
    return {
        "cell": cell or {}, "connection": connection, "seed": seed, "top1": top1, "top5": 99.0, "loss": 0.5,
        "best_top1": top1, "best_epoch": epochs - 1, "images_per_second": 100.0, "peak_memory": 2**30, "seconds": 6.0,
        "epochs": epochs, "parameters": 1234, "model": "vit_small_ortho", "device": "cpu", "history": history,
        "probe": [], "dynamics": recorded(connection, seed) if dynamics else [], "representation": represented}


def recorded(connection, seed, steps=6):
    """Traces that lie together until step 20 and part then."""
    rows = []
    for index in range(steps):
        apart = max(0, index - 2) * (1.0 if connection == "linear" else -1.0)
        for layer, kind in SITES:
            noise = random.Random(f"{connection} {seed} {index} {layer} {kind}").gauss(0, 0.01)
            rows.append({
                "step": 10 * index, "layer": layer, "kind": kind, "name": f"blocks.{layer}.{kind}",
                "stream": 50.0 + 5 * apart + noise, "parallel": 1.0 + index, "orthogonal": 3.0, "parallel_share": 0.02,
                "orthogonal_share": 0.06, "cosine": -0.1 * apart + noise,
                "rho": 1.0 + 0.1 * index if connection == "hybrid" else None,
                "theta": 0.2 * layer if connection == "hybrid" else None})
    return rows


def connections_in(name, cell):
    """Those that the shipped study runs this cell with."""
    if "switch" in cell:
        return ["feature" if cell["switch"][1] == "O" else "linear"]
    if cell.get("layers") == "none" or cell.get("probability") == 0.0:
        return ["linear"]
    if name in ("layer_pattern", "probability", "epsilon"):
        return ["feature"]
    if name.startswith("skip"):
        return ["linear"]
    if cell.get("start") in ("orthogonal", "linear"):
        return ["hybrid"]
    return ["linear", "global" if name == "initialisation" else "feature"]


def runs_of(name, seeds=(0, 1, 2), **changes):
    _, axes, _ = GRIDS[name]
    cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [
        run_of(connection, seed, cell, top1=80.0 + seed + index, dynamics=name in RECORDED, **changes,
               represented=represented(connection, seed) if name == "representation" else None)
        for seed in seeds for index, cell in enumerate(cells) for connection in connections_in(name, cell)]


def represented(connection, seed):
    cka = None if connection == "linear" else 0.6
    return {"effective_rank": 10.0 + seed, "spectral_entropy": 2.0, "feature_std": 0.5, "linear_cka": cka}


def accuracy(top1, seeds=None, **changes):
    """The accuracy study with {connection: top-1 by seed}, in ViT-S on digits."""
    runs = [run_of(connection, seed, top1=value, epochs=1)
            for connection, values in top1.items() for seed, value in enumerate(values)]
    seeds = seeds or list(range(max(map(len, top1.values()))))
    return study_of("accuracy", axes={}, seeds=seeds, connections=list(top1), **changes), runs


def results(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


# -------------------------------------------------------------------------------------- what is read back
class Tables(HTMLParser):
    """The page's tables as lists of rows of texts; cells that span columns are repeated."""

    def __init__(self, text):
        super().__init__()
        self.tables, self._cell, self._span = [], None, 1
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell, self._span = "", int(dict(attributes).get("colspan", 1))

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][-1] += [self._cell] * self._span
            self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data


def tables_of(folder):
    return Tables((folder / "report.html").read_text(encoding="utf-8")).tables


def side_by_side(folder):
    """{(row's names, column): (paper, here)} of the first table, read from the page."""
    groups, _, *rows = tables_of(folder)[0]
    names = next(index for index, group in enumerate(groups) if groups.count(group) == 2)
    return {(tuple(row[:names]), groups[at]): (row[at], row[at + 1])
            for row in rows for at in range(names, len(row), 2)}


def markdown_tables(text):
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()] for block in blocks]


# ----------------------------------------------------------------------------------------- every study
EVERY = [*GRIDS, *ROWS]


@pytest.fixture(scope="module", params=EVERY)
def report(request, tmp_path_factory):
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    if name in ROWS:
        study = study_of(name, kind=name, dataset=None, model=None, connections=[], seeds=[])
        return name, folder, study_report.write(study, ROWS[name], ["a-seed9"], folder)
    return name, folder, study_report.write(study_of(name), runs_of(name), ["a-seed9"], folder)


def test_every_study_has_a_spec_and_a_test():
    assert (set(GRIDS), set(ROWS)) == (set(study_specs.SPECS), set(cost_specs.ROW_SPECS))


def test_page_is_well_formed_and_alone(report):
    name, folder, _ = report
    text = (folder / "report.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text.replace("<!DOCTYPE html>\n", ""))
    assert root.find("body/main/h1").text.startswith(f"What of {name}?")
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    images = list(root.iter("img"))
    assert bool(images) == (name not in ("parameters", "gamma"))
    for image in images:
        assert image.get("src").startswith("data:image/svg+xml;base64,")
        assert len(image.get("alt")) > 20
    for element in root.iter():
        assert element.tag not in ("script", "link", "iframe", "object")
        assert not set(element.keys()) & {"href", "srcset", "action"}
    assert not re.search(r"url\(|@import", root.find("head/style").text)


def test_headers_have_scopes_and_rows_their_length(report):
    _, folder, _ = report
    root = ElementTree.fromstring((folder / "report.html").read_text(encoding="utf-8").split("\n", 1)[1])
    assert {header.get("scope") for header in root.iter("th")} <= {"col", "row", "colgroup"}
    for table in root.iter("table"):
        body = [len(list(row)) for row in table.find("tbody")]
        assert len(set(body)) == 1
        header = table.find("thead/tr")
        assert sum(int(cell.get("colspan", 1)) for cell in header) == body[0]
        assert all(row[0].tag == "th" for row in table.find("tbody"))


def test_figures_are_files_too(report):
    _, folder, _ = report
    text = (folder / "report.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\((figures/[\w-]+\.svg)\)", text)
    assert {path.name for path in (folder / "figures").iterdir()} == {Path(name).name for name in named}
    for name in named:
        root = ElementTree.parse(folder / name).getroot()
        assert root.tag.endswith("svg")
        ids = [element.get("id") for element in root.iter() if element.get("id")]
        assert len(ids) == len(set(ids))


def test_markdown_tables_have_equal_columns(report):
    _, folder, _ = report
    found = markdown_tables((folder / "report.md").read_text(encoding="utf-8"))
    assert len(found) >= 2
    for table in found:
        assert {len(line) for line in table} == {len(table[0])}
        assert set(table[1]) == {" --- "}


def test_everything_is_told(report):
    name, folder, text = report
    page_text = (folder / "report.html").read_text(encoding="utf-8")
    for told in (page_text, (folder / "report.md").read_text(encoding="utf-8").replace("\\", "")):
        assert f"timm-ortho study run {name}" in told
        assert "epochs: 3 here, 300 in the paper" in told
        assert "Not finished: a-seed9." in told
        assert "timm-ortho 9.9, torch 2.x" in told
        assert ("here (small)" in told) == (name in GRIDS)
    assert "a &lt; b &amp; c|d" in page_text
    assert "not finished: a-seed9" in text
    assert str(folder / "report.html") in text


def test_paper_stands_whole_beside(report):
    """Each of the paper's figures is in the table, at its place; what was not run says so."""
    name, folder, _ = report
    found = side_by_side(folder)
    in_paper = cost_specs.ROW_SPECS[name].paper(ROWS[name]) if name in ROWS else study_specs.SPECS[name].paper()
    for (row, column), figure in in_paper.items():
        stated, here = found[row, ", ".join(column)]
        if name in ROWS:
            assert stated == figure
        else:
            shown = stated.split(" ± ")[0].replace(",", "")
            rounding = 0.5001 * 10 ** -len(shown.partition(".")[2])
            assert float(shown) == pytest.approx(figure[0], abs=rounding)
        assert here != "–"
    assert {here for _, here in found.values()} - {"not run", "–"}
    for stated, here in found.values():
        assert (stated == "–") == (here == "–")


@pytest.mark.parametrize("report", [
    name if name in ("accuracy", "overhead") else pytest.param(name, marks=pytest.mark.slow) for name in EVERY
], indirect=True, scope="module")
def test_results_make_the_same_report_again(report, tmp_path):
    _, folder, _ = report
    study_report.rewrite(folder / "results.json", tmp_path)
    for path in folder.rglob("*.*"):
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes()


# ----------------------------------------------------------------------------------------------- numbers
@pytest.mark.usefixtures("undrawn")
def test_numbers_are_those_of_the_runs(tmp_path):
    values = {"linear": [90.0, 91.0, 92.5], "feature": [90.5, 93.0, 93.5]}
    text = study_report.write(*accuracy(values), [], tmp_path)
    found = side_by_side(tmp_path)
    for connection, name in (("linear", "Linear"), ("feature", "Orthogonal-F")):
        mean, std = statistics.fmean(values[connection]), statistics.stdev(values[connection])
        assert found[("ViT-S", name), "digits"] == ("not in the paper", f"{mean:.2f} ± {std:.2f}")
    assert found[("ViT-S", "Linear"), "CIFAR-10"] == ("89.82 ± 0.34", "not run")
    pairs = [feature - linear for linear, feature in zip(*values.values(), strict=True)]
    mean = sum(pairs) / 3
    half = scipy.stats.t.ppf(0.975, 2) * statistics.stdev(pairs) / math.sqrt(3)
    expected = f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"
    assert expected in text
    assert tables_of(tmp_path)[1][1] == [
        "ViT-S", "Orthogonal-F", "digits", "Linear", expected, "not told apart",
        "CIFAR-10 +0.79; CIFAR-100 +1.94; Tiny ImageNet +1.27; ImageNet-1k +1.77; ImageNet-1k (first version) +2.75"]
    (linear, feature) = results(tmp_path)["summary"]
    assert (linear["mean"], linear["values"], linear["difference"]) == (
        pytest.approx(statistics.fmean(values["linear"])), values["linear"], None)
    assert feature["difference"] == {
        "mean": pytest.approx(mean), "half_width": pytest.approx(half), "pairs": 3, "reading": "not told apart"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("feature", "reading"), [
    ([91.0, 92.0, 93.1], "higher"), ([89.0, 90.0, 90.9], "lower"), ([90.0, 91.0, 92.0], "not told apart"),
    ([91.0, 90.0, 92.1], "not told apart")])
def test_interval_decides_what_is_said(tmp_path, feature, reading):
    text = study_report.write(*accuracy({"linear": [90.0, 91.0, 92.0], "feature": feature}), [], tmp_path)
    assert tables_of(tmp_path)[1][1][5] == reading
    one = int(reading != "not told apart")
    counts = "1 is told apart from zero and 0 are not" if one else "0 are told apart from zero and 1 is not"
    assert f"Of 1 difference to the baseline with a 95 % interval, {counts}." in text


@pytest.mark.usefixtures("undrawn")
def test_pairs_are_of_one_seed(tmp_path):
    """A seed that only one side has counts for its mean but not for the difference."""
    study, runs = accuracy({"linear": [90.0, 80.0], "feature": [91.0, 82.0]}, seeds=[0, 1, 2])
    runs.append(run_of("feature", 2, top1=10.0, epochs=1))
    random.Random(0).shuffle(runs)
    study_report.write(study, runs, ["linear-seed2"], tmp_path)
    feature = next(entry for entry in results(tmp_path)["summary"] if entry["cell"]["connection"] == "feature")
    assert (feature["seeds"], feature["mean"]) == ([0, 1, 2], pytest.approx(61.0))
    assert (feature["difference"]["mean"], feature["difference"]["pairs"]) == (pytest.approx(1.5), 2)
    assert side_by_side(tmp_path)[("ViT-S", "Linear"), "digits"][1] == "85.00 ± 7.07 (2 of 3 seeds)"


@pytest.mark.usefixtures("undrawn")
def test_table_2_is_the_mean_of_the_five_best_epochs(tmp_path):
    study, runs = accuracy({"linear": [0.0]})
    for epoch, value in enumerate([10.0, 60.0, 50.0, 70.0, 20.0, 40.0, 30.0]):
        runs[0]["history"] += [{**runs[0]["history"][0], "epoch": epoch + 1, "eval_top1": value}]
    study_report.write(study, runs, [], tmp_path)
    assert side_by_side(tmp_path)[("ViT-S", "Linear"), "digits"][1] == "50.00 (1 seed)"


def test_single_seed_has_no_interval(tmp_path):
    text = study_report.write(*accuracy({"linear": [90.0], "feature": [91.0]}), [], tmp_path)
    assert side_by_side(tmp_path)[("ViT-S", "Orthogonal-F"), "digits"][1] == "91.00 (1 seed)"
    assert tables_of(tmp_path)[1][1][4:6] == ["+1.00", "one pair: no interval"]
    assert "No difference has an interval yet: that takes two seeds or more of both sides." in text


@pytest.mark.parametrize("missing", [None, math.nan])
def test_diverged_runs_are_named_and_not_averaged(tmp_path, missing):
    study, runs = study_of("layer_pattern"), runs_of("layer_pattern")
    for run in runs:
        if run["cell"]["layers"] == "all" or (run["cell"]["layers"] == "0,1" and run["seed"] == 1):
            run.update(top1=missing, top5=missing, loss=missing, best_top1=missing)
            run["history"][-1].update(eval_top1=missing, train_loss=missing)
    study_report.write(study, runs, [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("all",), "top-1 %"] == ("52.98 ± 0.45", "not finite (3 runs)")
    assert found[("0,1",), "top-1 %"][1] == "82.00 ± 1.41 (1 of 3 not finite)"
    rows = {tuple(row[:2]): row for row in tables_of(tmp_path)[1][1:]}
    assert rows["0,1", "top-1 %"][2:5] == ["none", "+1.00 [+1.00, +1.00]", "higher"]
    assert rows["all", "top-1 %"][3:5] == ["–", "no pair of finite runs"]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Diverged, with a loss that is not finite: layers all, Orthogonal-F, seed 0; layers 0,1" in text
    assert all(word not in (tmp_path / "results.json").read_text() for word in ("NaN", "Infinity"))


def test_nothing_is_finished(tmp_path):
    text = study_report.write(study_of("accuracy"), [], ["linear-seed0"], tmp_path)
    assert "No run is finished yet." in text
    assert "No run is finished yet." in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert {here for _, here in side_by_side(tmp_path).values()} == {"not run", "–"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", GRIDS)
def test_baseline_is_missing(name, tmp_path):
    """An interrupted study with what is not the baseline: everything but differences."""
    runs = [run for run in runs_of(name, seeds=(0,), epochs=1) if run["connection"] != "linear"]
    study_report.write(study_of(name), runs, ["the others"], tmp_path)
    assert all(entry["difference"] is None for entry in results(tmp_path)["summary"]
               if name != "epsilon" and entry["cell"]["connection"] == "feature")


@pytest.mark.usefixtures("undrawn")
def test_probability_tells_pearson(tmp_path):
    runs = runs_of("probability")
    x, y = [run["cell"]["probability"] for run in runs], [run["top1"] for run in runs]
    expected = scipy.stats.pearsonr(x, y)
    measure = study_specs.SPECS["probability"].measures["top1"]
    text = study_figures.correlation(runs, lambda run: run["cell"]["probability"], measure)
    assert text == f"r = {expected.statistic:+.2f}, p = {expected.pvalue:.2g}, 9 runs"
    same = [{**run, "top1": 5.0} for run in runs]
    assert study_figures.correlation(same, lambda run: run["cell"]["probability"], measure) == "r undefined (9 runs)"
    study_report.write(study_of("probability"), runs, [], tmp_path)
    assert side_by_side(tmp_path)[("0.5",), "top-1 %"] == ("only drawn", "82.00 ± 1.00")
    assert f"top-1 %: {text}; top-5 %: r undefined (9 runs)." in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_learning_rates_are_in_order_and_compared_at_their_own(tmp_path):
    runs = [*runs_of("learning_rate"), run_of("linear", 0, {"lr": 1e-4}), run_of("linear", 0, {"lr": 7.5e-4})]
    study_report.write(study_of("learning_rate", dataset="torch/cifar10"), runs, [], tmp_path)
    rates = [row[0] for row in tables_of(tmp_path)[0][2:]]
    assert {"1e-4", "7.5e-4"} < set(rates)
    assert [float(rate) for rate in rates] == sorted(map(float, rates))
    difference = tables_of(tmp_path)[1][1]
    assert difference == ["1e-3", "CIFAR-10, Orthogonal-F", "Linear", "+0.00 [+0.00, +0.00]", "not told apart", "+0.41"]


@pytest.mark.usefixtures("undrawn")
def test_switches_are_compared_with_no_switch(tmp_path):
    study_report.write(study_of("switch_kept", dataset="torch/cifar10"), runs_of("switch_kept"), [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("Orthogonal → Linear",), "CIFAR-10, top-1 %"] == ("93.18 ± 0.15", "83.00 ± 1.00")
    assert found[("Orthogonal → Linear",), "CIFAR-10, top-5 %"] == ("99.72 ± 0.03", "99.00 ± 0.00")
    rows = {tuple(row[:2]): row[2:] for row in tables_of(tmp_path)[1][1:]}
    assert rows["Linear → Orthogonal", "CIFAR-10, top-1 %"] == [
        "Linear → Linear", "+1.00 [+1.00, +1.00]", "higher", "+1.18"]
    assert len(rows) == 6


@pytest.mark.usefixtures("undrawn")
def test_cka_has_no_baseline(tmp_path):
    study_report.write(study_of("representation"), runs_of("representation"), [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("linear CKA between the two",), "Orthogonal-F"] == ("0.546", "0.600 ± 0.000")
    assert found[("linear CKA between the two",), "Linear"] == ("–", "–")
    assert found[("effective rank",), "Linear"] == ("572.9", "11.0 ± 1.0")
    assert "linear CKA between the two" not in [row[0] for row in tables_of(tmp_path)[1]]


@pytest.mark.usefixtures("undrawn")
def test_two_groups_at_one_place_are_told_apart(tmp_path):
    runs = [run_of(connection, 0, {"layers": "all"}, top1=value)
            for connection, value in (("feature", 90.0), ("global", 80.0))]
    study_report.write(study_of("layer_pattern"), runs, [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("all, feature",), "top-1 %"][1].startswith("90.00")
    assert found[("all, global",), "top-1 %"][1].startswith("80.00")


@pytest.mark.usefixtures("undrawn")
def test_own_study_has_a_row_for_each_cell(tmp_path):
    runs = [run_of(connection, seed, {"depth": depth, "lr": 1e-4}, top1=depth + seed)
            for seed in range(2) for depth in (2, 4) for connection in ("linear", "feature")]
    study = study_of("mine", table=None, axes={"depth": [2, 4], "lr": [1e-4]}, seeds=[0, 1])
    study_report.write(study, runs, [], tmp_path)
    assert side_by_side(tmp_path)[("4", "1e-4", "Linear"), "top-1 %"] == ("not in the paper", "4.50 ± 0.71")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("name", "row", "column"), [
    ("families", ("resnet", "top-1 %"), "Orthogonal-F"), ("mine", ("resnet", "Orthogonal-F"), "top-1 %")])
def test_study_that_is_nobodys_has_differences_where_others_have_the_papers_figures(tmp_path, name, row, column):
    values = {"linear": [90.0, 91.0, 92.5], "feature": [90.5, 93.0, 93.5]}
    runs = [run_of(connection, seed, {"family": family}, top1=value) for family in ("swin", "resnet")
            for connection in values for seed, value in enumerate(values[connection])]
    study = study_of(name, paper="", table="", axes={"family": ["swin", "resnet"]}, changed=[])
    text = study_report.write(study, runs[:-1], ["family=resnet-feature-seed2"], tmp_path)
    found = side_by_side(tmp_path)
    of_two = "+1.25 [-8.28, +10.78]"  # 0.5 and 2.0: 12.706 * 1.0607 / sqrt(2) about their mean
    assert found[row, column] == ("91.75 ± 1.77 (2 of 3 seeds)", of_two)
    assert {there for place, there in found.items() if "Linear" in (*place[0], place[1])} >= {
        ("91.17 ± 1.26", "baseline")}
    header, *rows = tables_of(tmp_path)[1]
    assert header[-3:] == ["against", "difference [95 %]", "reading"]
    assert ["Linear", of_two, "not told apart"] in [line[-3:] for line in rows]
    assert of_two in text
    for told in (text, *(path.read_text(encoding="utf-8") for path in tmp_path.glob("report.*"))):
        assert "paper" not in told.replace(str(tmp_path), "").lower()


def test_differences_are_drawn_with_their_intervals():
    runs = [run_of(connection, seed, {"family": family}, top1=90.0 + seed + top1 + noise * seed)
            for family, noise in (("swin", 1.0), ("resnet", -0.5)) for seed in range(2)
            for connection, top1, noise in (("linear", 0.0, 0.0), ("feature", 1.0, noise), ("global", -1.0, noise))]
    (drawing,) = study_specs.SPECS["families"].figures(study_of("families"), runs)
    axes, loss = drawing.draw().axes
    assert (axes.get_title("left"), loss.get_title("left")) == ("top-1 %", "validation loss")
    assert [text.get_text() for text in axes.get_yticklabels()] == ["swin", "resnet"]
    assert [list(box.lines[0].get_xdata()) for box in axes.containers] == [[1.5, 0.75], [-0.5, -1.25]]
    bars = axes.containers[0].lines[2][0].get_segments()
    half = scipy.stats.t.ppf(0.975, 1) * 0.5  # of 1.0 and 2.0
    assert [end[0] for end in bars[0]] == pytest.approx([1.5 - half, 1.5 + half])
    assert study_specs.SPECS["families"].figures(study_of("families"), runs[:1]) == []


# -------------------------------------------------------------------------------------- without training
@pytest.mark.usefixtures("undrawn")
def test_overhead_beside_table_1b(tmp_path):
    twice = [*ROWS["overhead"], {**OVERHEAD, "dtype": "bfloat16"}]
    for rows, name in ((ROWS["overhead"], "ViT-S"), (twice, "ViT-S, tokens, float32, eager")):
        study_report.write(study_of("overhead", kind="overhead"), rows, [], tmp_path)
        found = side_by_side(tmp_path)
        assert found[(name,), "overhead, %"][1] == "2.00 [1.00, 3.50]"
        assert found[(name,), "Linear, images/s"][1] == "1,000.0"
        assert found[("ResNetV2-34",), "overhead, %"] == ("5.94", "not measured")
        assert found[(name,), "overhead, %"][0] == "0.28"
        assert found[("ViT-B",), "Orthogonal-F, images/s"] == ("1,246.2", "not run")
    for label, name in (("vit_small(img_size=64)", "ViT-S"), ("vit_small(img_size=64, depth=2)", "ViT-S (depth=2)")):
        study_report.write(study_of("overhead", kind="overhead"), [{**OVERHEAD, "model": label}], [], tmp_path)
        assert side_by_side(tmp_path)[(name,), "overhead, %"][1] == "2.00 [1.00, 3.50]"
    study_report.write(study_of("overhead", kind="overhead"), twice, [], tmp_path)
    assert side_by_side(tmp_path)[("ViT-S, tokens, bfloat16, eager",), "Linear, images/s"] == ("3,476.1", "1,000.0")
    assert (("ViT-S",), "overhead, %") not in side_by_side(tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "out of memory" in text
    assert "| device | AMD EPYC, 2 cores, 2 threads |" in text


@pytest.mark.usefixtures("undrawn")
def test_flops_beside_table_1a(tmp_path):
    text = study_report.write(study_of("parameters", kind="parameters"), ROWS["parameters"], [], tmp_path)
    found = side_by_side(tmp_path)
    column = "FLOPs of a block of ViT-S, s = 10, d = 4"
    assert found[("Attention", "Linear"), column] == ("8sd² + 4s²d + sd = 2,920", "2,920")
    assert found[("Attention", "Orthogonal, as the paper writes it"), column] == (
        "8sd² + 4s²d + sd + 6sd + 2s = 3,180", "3,180")
    assert found[("Attention", "Orthogonal-F, as it runs here"), column] == ("not in the paper", "3,210")
    extra, whole = tables_of(tmp_path)[1:3]
    assert [row[-2:] for row in extra[1:]] == [["260", "260"], ["290", "260"]]
    assert whole[2][:2] == ["ViT-S", "Orthogonal-F"]
    assert whole[2][-1] == "0.348"
    assert "3,180" in text


@pytest.mark.usefixtures("undrawn")
def test_gamma_beside_table_11(tmp_path):
    study_report.write(study_of("gamma", kind="gamma"), ROWS["gamma"], [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("ViT-S",), "γ"] == ("64.00", "64.00")
    assert found[("ResNetV2-18",), "γ"] == ("30.00", "30.00")
    assert found[("ResNet-1001",), "γ"] == ("0.22", "not run")
    assert found[("deit_tiny_patch16_224",), "γ"] == ("not in the paper", "16.00")
    assert found[("ViT-L",), "width"] == ("1024.00", "not run")
    assert found[("ResNetV2-18",), "blocks"] == ("8", "8")
    table = paper.figures()["gamma"]
    for key, (width, blocks) in table["width_and_blocks"].items():
        assert width / blocks == pytest.approx(table[key], abs=0.006)


# ---------------------------------------------------------------------------------------------- the traces
@pytest.mark.usefixtures("undrawn")
def test_explosion_is_read_from_the_last_branch(tmp_path):
    runs = runs_of("head_norm", seeds=(0, 1))
    for run in runs:
        for row in run["dynamics"]:
            if row["name"] == "blocks.1.mlp":
                row["parallel"] = (10.0 if run["cell"]["norm"] == "without" else 1.0) * (1 + row["step"]) + run["seed"]
    study_report.write(study_of("head_norm"), runs, [], tmp_path)
    rows = {tuple(row[:2]): row[2:] for row in tables_of(tmp_path)[2][1:]}
    # parallel + orthogonal, the mean of both seeds, at steps 0 and 50
    assert rows["without", "Linear"] == ["13.5", "513.5", "513.5", "38"]
    assert rows["with", "Orthogonal-F"] == ["4.5", "54.5", "54.5", "12.1"]


@pytest.mark.usefixtures("undrawn")
def test_learned_weights_are_those_of_the_last_record(tmp_path):
    study_report.write(study_of("hybrid"), runs_of("hybrid"), [], tmp_path)
    assert tables_of(tmp_path)[2][1:] == [
        [f"{start} start", kind, "1.500 [1.500, 1.500]", "0.100 [0.000, 0.200]"]
        for start in ("orthogonal", "linear") for kind in ("attention", "mlp")]


@pytest.mark.usefixtures("undrawn")
def test_transition_points_are_where_the_traces_part(tmp_path):
    study_report.write(study_of("dynamics"), runs_of("dynamics"), [], tmp_path)
    header, *rows = tables_of(tmp_path)[2]
    assert header == ["branch", "block", "|x|²", "cosine of x and f", "|f∥|²", "|f⊥|²"]
    assert [row[:2] for row in rows] == [["attention", "0"], ["attention", "1"], ["mlp", "0"], ["mlp", "1"]]
    for row in rows:
        assert row[2:] == ["step 30", "step 30", "none", "none"]


@pytest.mark.usefixtures("undrawn")
def test_long_records_are_thinned_from_end_to_end(tmp_path):
    runs = [run_of(connection, 0, epochs=1) for connection in ("linear", "feature")]
    for run in runs:
        run["dynamics"] = recorded(run["connection"], 0, steps=1001)
    before = copy.deepcopy(runs)
    study_report.write(study_of("dynamics"), runs, [], tmp_path)
    assert runs == before
    steps = sorted({row["step"] for row in results(tmp_path)["runs"][0]["dynamics"]})
    assert (len(steps), steps[0], steps[-1]) == (100, 0, 10_000)


# --------------------------------------------------------------------------------------------- bad results
@pytest.mark.parametrize("text", [None, "{", "[]", '{"study": {}}'])
def test_foreign_results_are_refused(tmp_path, text):
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LabError, match=r"results.json is not a study's results.json: give the one that timm-ortho"):
        study_report.rewrite(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------- parts
def test_tables_escape_what_markdown_and_html_would_read():
    table = Table(["a|b", "<c>"], [["*x*", "1 < 2"]])
    assert page.markdown_table(table).splitlines()[0] == r"| a\|b | \<c\> |"
    assert "<th scope=\"col\">&lt;c&gt;</th>" in page.html_table(table, "t")
    assert page.text_table(table).splitlines()[2] == "*x*  1 < 2"


def test_the_same_figure_has_the_same_bytes():
    runs = runs_of("switch_kept")

    def draw():
        return study_figures.training(runs, lambda run: run["cell"]["switch"])

    assert page.svg(draw, "x") == page.svg(draw, "x")


def test_baseline_follows_the_cell_where_it_names_no_connection():
    groups = study_tables.group_runs(runs_of("layer_pattern"))
    keys = {cell[0][1]: (cell, connection) for cell, connection in groups}
    assert study_tables._baseline(groups, keys["all"], {"layers": "none"}) == keys["none"]
    assert study_tables._baseline(groups, keys["all"], {"layers": "none", "connection": "feature"}) is None


def test_colours_and_markers_of_connections_differ():
    for key in ("color", "linestyle", "marker"):
        assert len({look[key] for look in STYLES.values()}) == len(STYLES)
    names = [f"series {index}" for index in range(28)]
    assert len({tuple(style(name, names)[key] for key in ("color", "linestyle")) for name in names}) == 28


def test_paper_names_every_data_set():
    assert study_specs.dataset_name("torch/cifar10") == "CIFAR-10"
    assert study_specs.dataset_name("torch/fashion_mnist") == "fashion_mnist"
    assert set(paper.figures()["accuracy"]["vit_s"]) == {
        *study_specs._datasets(), "imagenet1k_first_version"}


def test_lines_have_gaps_where_nothing_is_finite():
    axes = Figure().subplots()
    band(axes, [1, 2, 3, 4], [[1.0, None, math.nan, 4.0], [3.0, 5.0]], "linear")
    x, y = axes.lines[0].get_data()
    assert list(x) == [1, 2, 3, 4]
    assert [value for value in y if not math.isnan(value)] == [2.0, 5.0, 4.0]
    assert math.isnan(y[2])


def test_runs_that_diverged_from_the_start_are_drawn(tmp_path):
    runs = runs_of("accuracy", seeds=(0,))
    for run in runs:
        run.update(loss=None, top1=None)
        for row in run["history"]:
            row.update(train_loss=None, eval_top1=None)
    study_report.write(study_of("accuracy"), runs, [], tmp_path)
    assert side_by_side(tmp_path)[("ViT-S", "Linear"), "digits"][1] == "not finite (1 run)"
    assert (tmp_path / "figures" / "training_vit_s.svg").stat().st_size > 1000
