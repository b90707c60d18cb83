"""Reports of studies, from runs whose numbers the tests make up and know."""
import copy
import json
import math
import random
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest
import scipy.stats
from helpers.made_up_runs import GRIDS, OVERHEAD, ROWS, accuracy, recorded, run_of, runs_of, study_of, train_py_run
from matplotlib.figure import Figure

from timm_ortho.lab import LabError, paper
from timm_ortho.lab.commands import comparison
from timm_ortho.lab.planning import design
from timm_ortho.lab.reporting import layout, page, plots as figures, report, tables
from timm_ortho.lab.reporting.page import Table
from timm_ortho.lab.reporting.transition import transition_points

EVERY = [*GRIDS, *ROWS]
SAVEFIG = Figure.savefig


@pytest.fixture(scope="module", autouse=True)
def undrawn():
    """Figures are made, but not laid out and written, which takes far longer, for all tests but those of `drawn`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, file, **_: file.write("<svg/>"))
        yield


@pytest.fixture
def drawn(monkeypatch):
    monkeypatch.setattr(Figure, "savefig", SAVEFIG)


def results(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def again(file, folder):
    """The report anew, from nothing but its results.json."""
    values = json.loads(file.read_text(encoding="utf-8"))
    return report.write(values["study"], values["runs"], values["unfinished"], folder, values["recorded"])


def texts(folder):
    """The page as it reads, and the Markdown without its escapes."""
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    return "".join(parsed(folder).itertext()), re.sub(r"\\(.)", r"\1", markdown)


def parsed(folder):
    return ElementTree.fromstring((folder / "report.html").read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>"))


def tables_of(folder):
    """The page's tables as lists of rows of texts; cells that span columns are repeated."""
    return [[[text for cell in row for text in ["".join(cell.itertext())] * int(cell.get("colspan", 1))]
             for row in table.iter("tr")] for table in parsed(folder).iter("table")]


def side_by_side(folder):
    """{(row's names, column): (paper, here)} of the first table, read from the page."""
    groups, _, *rows = tables_of(folder)[0]
    names = next(index for index, group in enumerate(groups) if groups.count(group) == 2)
    return {(tuple(row[:names]), groups[at]): (row[at], row[at + 1])
            for row in rows for at in range(names, len(row), 2)}


def differences(folder):
    """{(names, figure): the other columns by title} of the table of differences."""
    table = next(table for table in tables_of(folder) if "p (Holm)" in table[0])
    names = table[0].index("against")
    return {tuple(row[:names]): dict(zip(table[0][names:], row[names:], strict=True)) for row in table[1:]}


# ----------------------------------------------------------------------------------------- every study
@pytest.fixture(scope="module", params=EVERY)
def written(request, tmp_path_factory):
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    return name, folder, report.write(study_of(name), runs_of(name), ["a-seed9"], folder)


def test_every_shipped_study_is_tested():
    general = ("confirm_", "cifar_", "tiny_imagenet_")  # studies of hypotheses have the general layout
    laid_out = {name for name in design.shipped() if not name.startswith(general)}
    assert {*GRIDS, *ROWS} == {*laid_out, "compare"}
    assert set(layout.FIGURES) == set(figures.DRAWINGS)
    assert set(layout.TABLES) == set(tables.EXTRAS)


def test_page_is_well_formed_and_alone(written):
    name, folder, _ = written
    root = parsed(folder)
    assert root.find("body/main/h1").text.startswith(f"What of {name}?")
    images = list(root.iter("img"))
    assert bool(images) == (name not in ROWS)
    boxes = [child for box in root.iter("div") if box.get("class", "").startswith("scroll") for child in box]
    assert all(table in boxes for table in root.iter("table"))  # which scroll by themselves where the screen is narrow
    for image in images:
        assert image.get("src").startswith("data:image/svg+xml;base64,")
        assert len(image.get("alt")) > 20
    narrow = [source.get("srcset") for source in root.iter("source")]
    assert len(narrow) == len(images)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in narrow)
    for element in root.iter():
        assert element.tag not in ("script", "link", "iframe", "object")
        assert not set(element.keys()) & {"href", "action"}
    assert not re.search(r"url\(|@import", root.find("head/style").text)
    for table in root.iter("table"):
        lengths = {len(list(row)) for row in table.find("tbody")}
        assert lengths == {sum(int(cell.get("colspan", 1)) for cell in table.find("thead/tr"))}
        assert {header.get("scope") for header in table.iter("th")} <= {"col", "row", "colgroup"}


def test_markdown_has_whole_tables_and_its_figures(written):
    _, folder, _ = written
    text = (folder / "report.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\((figures/[\w-]+\.svg)\)", text)
    assert {path.name for path in (folder / "figures").iterdir()} == {Path(name).name for name in named}
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert blocks
    for lines in blocks:
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_everything_is_told(written):
    name, folder, text = written
    for told in texts(folder):
        assert f"timm-ortho study run {name}" in told
        assert ("epochs: 3 here, 300 in the paper" in told) == (name not in ("families", "compare"))
        assert "Not finished: a-seed9." in told
        assert ("Method and terms" in told) == (name not in ROWS)
        assert "validation" not in told.partition("The paper:")[0]  # a test set is called one
    assert "not finished: a-seed9" in text
    assert text.endswith(f"report: {folder / 'report.html'}")


def test_the_papers_figures_stand_whole_beside(written):
    """Each is in the table, at its place; what was not run says so."""
    name, folder, _ = written
    if name == "compare":
        return
    found, study = side_by_side(folder), study_of(name)
    stated = {} if name in ROWS else layout.Layout.of(study).stated
    for (row, column), figure in stated.items():
        shown = found[row, ", ".join(column)][0].split(" ± ")[0].replace(",", "")
        assert float(shown) == pytest.approx(figure[0], abs=0.5001 * 10 ** -len(shown.partition(".")[2]))
    assert {here for _, here in found.values()} - {"not run", "–"}
    if study["paper"]:
        assert all((there == "–") == (here == "–") for there, here in found.values())


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("name", [
    name if name in ("accuracy", "dynamics", "overhead", "compare") else pytest.param(name, marks=pytest.mark.slow)
    for name in EVERY])
def test_the_same_again_has_the_same_bytes(name, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    report.write(study_of(name), runs_of(name), [], one)
    again(one / "results.json", other)
    files = [path.relative_to(one) for path in one.rglob("*.*")]
    assert len(files) >= 3
    assert all((other / path).read_bytes() == (one / path).read_bytes() for path in files)
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in one.glob("figures/*"))


def test_paper_numbers_of_each_table():
    """How many figures each layout finds, and a few of them, typed from the papers."""
    stated = {name: layout.Layout.of(study_of(name)).stated for name in GRIDS}
    assert {name: len(found) for name, found in stated.items() if found} == {
        "accuracy": 56, "switch_reinitialised": 24, "switch_kept": 24, "layer_pattern": 16, "learning_rate": 32,
        "initialisation": 12, "head_norm": 6, "representation": 7, "skips_single": 24, "skips_branch4": 35,
        "skips_depthwise": 24}
    assert stated["learning_rate"][("5e-4",), ("CIFAR-10", "Linear")] == [90.41, 0.15]
    assert stated["switch_kept"][("Orthogonal → Linear",), ("CIFAR-10", "top-5 %")] == [99.72, 0.03]
    assert stated["representation"][("linear CKA between the two",), ("Orthogonal-F",)] == [0.546]
    assert stated["skips_depthwise"][("56", "Orthogonal-Random"), ("SVHN",)] == [97.058, 0.055]


# ----------------------------------------------------------------------------------------------- numbers
BOTH = {"linear": [90.0, 91.0, 92.5], "feature": [90.5, 93.0, 93.5]}


def test_numbers_are_those_of_the_runs(tmp_path):
    text = report.write(*accuracy(BOTH), [], tmp_path)
    last = "digits, top-1 %"
    for connection, name in (("linear", "Linear"), ("feature", "Orthogonal-F")):
        mean, std = statistics.fmean(BOTH[connection]), statistics.stdev(BOTH[connection])
        assert side_by_side(tmp_path)[("ViT-S", name), last] == ("not in the paper", f"{mean:.2f} ± {std:.2f}")
    truth = scipy.stats.ttest_rel(BOTH["feature"], BOTH["linear"])
    low, high = truth.confidence_interval(0.95)
    expected = f"{(low + high) / 2:+.2f} [{low:+.2f}, {high:+.2f}]"
    assert expected in text
    row = differences(tmp_path)["ViT-S", "Orthogonal-F", "digits, top-1 %, five best test epochs"]
    assert row == {
        "against": "Linear", "difference [95 % CI]": expected, "pooled variance [95 % CI]": expected,
        "p (Holm)": f"{min(1, 2 * truth.pvalue):.2g}", "reading": "not detected",
        "half-width; the paper's differences": f"± {(high - low) / 2:.2f}; contains zero and the paper's "
        "+0.79 (CIFAR-10), +1.94 (CIFAR-100), +1.27 (Tiny ImageNet), +1.77 (ImageNet-1k), "
        "+2.75 (ImageNet-1k (first version))"}
    found = results(tmp_path)["summary"][-1]
    assert (found["measure"], found["values"]) == ("top1", BOTH["feature"])
    assert found["difference"]["half_width"] == pytest.approx((high - low) / 2)
    assert found["difference"]["p_holm"] == pytest.approx(min(1, 2 * truth.pvalue))
    assert (found["difference"]["pairs"], found["difference"]["reading"]) == (3, "not detected")


@pytest.mark.parametrize(("feature", "reading"), [
    ([91.0, 92.0, 93.1], "higher"), ([89.0, 90.0, 90.9], "lower"), ([91.0, 90.0, 92.1], "not detected")])
def test_interval_decides_what_is_said(tmp_path, feature, reading):
    study, runs = accuracy({"linear": [90.0, 91.0, 92.0], "feature": feature}, name="mine", paper="", table="",
                           report={"measures": ["top1"]})
    text = report.write(study, runs, [], tmp_path)
    assert differences(tmp_path)["Orthogonal-F", "top-1 %"]["reading"] == reading
    found = results(tmp_path)["summary"][-1]["difference"]
    told = "No difference between the connections was detected; with 3 seeds" if reading == "not detected" else (
        f"The difference between the connections was detected: Orthogonal-F {found['mean']:+.2f} "
        f"[{found['mean'] - found['half_width']:+.2f}, {found['mean'] + found['half_width']:+.2f}] in top-1 %. With 3")
    half = found["half_width"]
    below = f" seeds, differences in top-1 below about {half:.{'2g' if half < 10 else '0f'}} points cannot be seen."
    assert f"{told.removesuffix(' seeds')}{below}" in text


def test_pairs_are_of_one_seed(tmp_path):
    """A seed that only one side has counts for its mean but not for the difference."""
    study, runs = accuracy({"linear": [90.0, 80.0], "feature": [91.0, 82.0]}, seeds=[0, 1, 2])
    runs.append(run_of("feature", 2, top1=10.0, epochs=1))
    random.Random(0).shuffle(runs)
    report.write(study, runs, ["linear-seed2"], tmp_path)
    feature = next(entry for entry in results(tmp_path)["summary"] if entry["cell"]["connection"] == "feature")
    assert (feature["seeds"], feature["mean"]) == ([0, 1, 2], pytest.approx(61.0))
    assert (feature["difference"]["mean"], feature["difference"]["pairs"]) == (pytest.approx(1.5), 2)
    assert side_by_side(tmp_path)[("ViT-S", "Linear"), "digits, top-1 %"][1] == "85.00 ± 7.07 (2 of 3 seeds)"


def test_the_papers_protocol_and_the_last_epoch_stand_beside_each_other(tmp_path):
    study, runs = accuracy({"linear": [0.0]})
    for epoch, value in enumerate([10.0, 60.0, 50.0, 70.0, 20.0, 40.0, 30.0]):
        runs[0]["history"] += [{**runs[0]["history"][0], "epoch": epoch + 1, "eval_top1": value}]
    report.write(study, runs, [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("ViT-S", "Linear"), "digits, top-1 %, five best test epochs"][1] == "50.00 (1 seed)"
    assert found[("ViT-S", "Linear"), "digits, top-1 %"][1] == "0.00 (1 seed)"
    report.write({**study, "validation": "hold-out"}, runs, [], tmp_path)
    for told in texts(tmp_path):
        assert "digits, top-1 %, five best hold-out epochs" in told
        assert "on the hold-out images" in told
        assert "test" not in told


def test_single_seed_has_no_interval(tmp_path):
    text = report.write(*accuracy({"linear": [90.0], "feature": [91.0]}), [], tmp_path)
    row = differences(tmp_path)["ViT-S", "Orthogonal-F", "digits, top-1 %"]
    assert list(row.values())[1:] == ["+1.00", "–", "–", "no interval: one pair", "–"]
    assert "No difference could be tested (one pair): a confidence interval takes two seeds or more" in text


@pytest.mark.usefixtures("drawn")
def test_differences_without_variance_have_no_interval_and_no_verdict(tmp_path):
    """One image less for each seed: p was 0, and the difference significant after Holm's adjustment."""
    study, runs = accuracy({"linear": [90.0, 91.0], "feature": [89.0, 90.0], "global": [89.0, 92.0]},
                           name="mine", paper="", table="", report={"measures": ["top1"]})
    text = report.write(study, runs, [], tmp_path)
    found = {entry["cell"]["connection"]: entry["difference"] for entry in results(tmp_path)["summary"]}
    assert [found["feature"][key] for key in ("half_width", "p", "p_holm", "pairs")] == [None, None, None, 2]
    assert (found["feature"]["mean"], found["feature"]["reading"]) == (-1.0, "no interval: 2 equal differences")
    assert found["global"]["p_holm"] == pytest.approx(min(1, 2 * found["global"]["p"]))  # a family of both
    row = differences(tmp_path)["Orthogonal-F", "top-1 %"]
    assert (row["difference [95 % CI]"], row["p (Holm)"], row["half-width"]) == ("-1.00", "–", "–")
    assert row["reading"] == "no interval: 2 equal differences"
    assert "-1.00 (2 equal differences, no interval)" in text
    assert "Of 2 differences between the connections, 1 could be tested and was not detected; with 2 seeds" in text
    assert "Orthogonal-F (-1.00 in top-1 %) could not be tested: 2 equal differences." in text
    assert "adjusted for 2 comparisons. 1 of them has no p and counts as p = 1." in texts(tmp_path)[0]
    assert "p and the reading use the paired differences alone" in texts(tmp_path)[0]
    assert f"an interval then reaches {scipy.stats.t.ppf(0.975, 1) / math.sqrt(2):.1f} standard deviations" in text
    study, runs = accuracy({"linear": [90.0, 91.0], "feature": [89.0, 90.0]})
    text = report.write(study, runs, [], tmp_path)
    assert "No difference could be tested (2 equal differences)" in text


def test_detected_differences_are_counted_among_all(tmp_path):
    """The only tested difference is detected, and others have equal differences or no finite value."""
    study, runs = accuracy(
        {"linear": [90.0, 91.0, 92.0], "feature": [80.0, 81.01, 82.0], "global": [89.0, 90.0, 91.0],
         "hybrid": [math.nan] * 3}, name="mine", paper="", table="", report={"measures": ["top1"]})
    report.write(study, runs, [], tmp_path)
    lead = results(tmp_path)["lead"]
    assert lead.startswith("1 of 3 differences between the connections was detected: Orthogonal-F -10.00 [")
    assert "Orthogonal-G (-1.00 in top-1 %) could not be tested: 3 equal differences." in lead
    assert " (top-1 %) could not be tested: no pair of finite runs." in lead
    assert "adjusted for 2 comparisons. 1 of them has no p" in texts(tmp_path)[0]  # without the diverged runs


def test_many_untested_differences_are_counted(tmp_path):
    runs = [run_of(connection, seed, {"index": index}, epochs=1, top1=50.0 + (connection == "feature") * gain)
            for index in range(5) for connection in ("linear", "feature")
            for seed, gain in enumerate((1.0, 1.2, 0.7) if index == 0 else (1.0, 1.0, 1.0))]
    study = study_of("mine", paper="", table="", axes={"index": list(range(5))}, report={"measures": ["top1"]})
    report.write(study, runs, [], tmp_path)
    assert "4 differences could not be tested: 3 equal differences." in results(tmp_path)["lead"]


def test_each_study_is_adjusted_by_itself(tmp_path):
    report.write_many([(*accuracy(BOTH), []), (*accuracy(BOTH), [])], tmp_path)
    assert "adjusted for the comparisons of each study (2, 2)." in texts(tmp_path)[0]


def test_the_page_opens_with_the_answer_and_ends_with_the_method(tmp_path):
    text = report.write(*accuracy(BOTH), ["a-seed9"], tmp_path)
    lead = results(tmp_path)["lead"]
    half = results(tmp_path)["summary"][-1]["difference"]["half_width"]
    assert lead == ("No difference between the connections was detected; with 3 seeds, differences in top-1 below "
                    f"about {half:.2g} points cannot be seen.")
    assert lead in text
    for told in texts(tmp_path):
        order = [told.index(said) for said in (
            lead, "Study “accuracy”", "The paper's table", "Differences, paired by seed", "Plots", "How it was made",
            "Method and terms", "Student's confidence interval", "adjusted for 2 comparisons")]
        assert order == sorted(order)
        assert f"{scipy.stats.t.ppf(0.975, 2) / math.sqrt(3):.1f} with 3" in told


@pytest.mark.parametrize(("gains", "told"), [
    ((3.0, 0.0), "1 of 2 differences between the connections was detected: Orthogonal-F +3.00 ["),
    ((-3.0, 4.0), "2 of 2 differences between the connections were detected: Orthogonal-F -3.00 ["),
])
def test_the_answer_names_what_was_detected(tmp_path, gains, told):
    noise = [(0.0, 0.0, 0.0, 0.0), (0.01, -0.01, 0.02, -0.02), (0.03, -0.01, -0.03, 0.01)]
    top1 = {connection: [90.0 + seed + gain + noisy[seed] for seed in range(4)] for connection, gain, noisy in zip(
        ("linear", "feature", "global"), (0.0, *gains), noise, strict=True)}
    study, runs = accuracy(top1, name="mine", paper="", table="", report={"measures": ["top1"]})
    report.write(study, runs, [], tmp_path)
    lead = results(tmp_path)["lead"]
    assert lead.startswith(told)
    assert "With 4 seeds, differences in top-1 below about 0.0" in lead
    assert " to 0.0" in lead
    assert "by comparison)" in lead


def test_an_interval_without_zero_before_adjustment_alone(tmp_path):
    """One of 20 intervals excludes zero."""
    axis = {"index": list(range(20))}
    runs = [run_of(connection, seed, {"index": index}, epochs=1, top1=50.0 + (connection == "feature") * gain)
            for index in range(20) for connection in ("linear", "feature")
            for seed, gain in enumerate((1.0, 1.2, 0.7) if index == 0 else (1.0, -1.2, 0.1))]
    study = study_of("mine", paper="", table="", axes=axis, report={"measures": ["top1"]})
    text = report.write(study, runs, [], tmp_path)
    assert "No difference between the connections was detected" in text
    assert "1 confidence interval excludes zero, but not after adjustment for 20 comparisons." in text
    assert differences(tmp_path)["0", "Orthogonal-F", "top-1 %"]["reading"] == "higher, but not after Holm"
    assert results(tmp_path)["summary"][1]["difference"]["reading"] == "higher"


def test_the_images_are_told_of(tmp_path):
    data = {"image_size": [32, 48], "size_from": "recipe small_images", "first_image": [375, 500], "channels": 3,
            "classes": 10, "train": 9469, "validation": 3925, "validation_split": "val"}
    study, runs = accuracy(BOTH)
    text = report.write({**study, "data": data}, runs, [], tmp_path)
    for told in (*texts(tmp_path), text):
        assert ("Images of 32 x 48 pixels (from recipe small_images; the first image of the data set has 375 x 500 "
                "pixels), 3 channels, 10 classes: 9,469 training images and 3,925 validation images (val).") in told
        assert not re.search(r"\btest (images|loss|top-1)", told.partition("The paper:")[0])
    for split in ("test", "hold-out"):
        report.write({**study, "validation": split, "data": {**data, "validation_split": split}}, runs, [], tmp_path)
        assert f"3,925 {split} images ({split})." in texts(tmp_path)[0]
    report.write({**study, "data": data}, runs, [], tmp_path)
    assert results(tmp_path)["study"]["data"] == data
    report.write({**study, "data": {**data, "first_image": [32, 48], "channels": 1, "classes": 1}}, runs, [], tmp_path)
    assert "32 x 48 pixels (from recipe small_images), 1 channel, 1 class: 9,469" in texts(tmp_path)[0]
    several = {**data, "image_size": None, "size_from": "each model's default"}
    del several["first_image"]
    report.write({**study, "data": several}, runs, [], tmp_path)
    assert "Images of several sizes (from each model's default), 3 channels" in texts(tmp_path)[0]
    report.write(study, runs, [], tmp_path)  # of a study that was planned before there was such a key
    assert "Images of" not in texts(tmp_path)[0]


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("missing", [None, math.nan])
def test_diverged_runs_are_named_and_not_averaged(tmp_path, missing):
    study, runs = study_of("layer_pattern"), runs_of("layer_pattern")
    for run in runs:
        if run["cell"]["layers"] == "all" or (run["cell"]["layers"] == "0,1" and run["seed"] == 1):
            run.update(top1=missing, top5=missing, loss=missing, best_top1=missing)
            for row in run["history"]:
                row.update(eval_top1=missing, train_loss=missing)
    report.write(study, runs, [], tmp_path)
    found, rows = side_by_side(tmp_path), differences(tmp_path)
    assert found[("all",), "top-1 %"] == ("52.98 ± 0.45", "not finite (3 runs)")
    assert found[("0,1",), "top-1 %"][1] == "82.00 ± 1.41 (1 of 3 not finite)"
    assert list(rows["0,1", "top-1 %"].values())[:2] == ["none", "+1.00"]
    assert rows["all", "top-1 %"]["reading"] == "no pair of finite runs"
    told, _ = texts(tmp_path)
    assert "Diverged, with a loss that is not finite: layers all, Orthogonal-F, seed 0; layers 0,1" in told
    assert all(word not in (tmp_path / "results.json").read_text() for word in ("NaN", "Infinity"))


@pytest.mark.parametrize("name", ["accuracy", "compare"])
def test_nothing_is_finished(tmp_path, name):
    text = report.write(study_of(name), [], ["linear-seed0"], tmp_path)
    assert "No run is finished yet." in text
    assert all("No run is finished yet." in told for told in texts(tmp_path))
    assert not list((tmp_path / "figures").iterdir())


@pytest.mark.parametrize("name", GRIDS)
def test_baseline_is_missing(name, tmp_path):
    """An interrupted study with what is not the baseline: everything but differences."""
    runs = [run for run in runs_of(name, seeds=(0,), epochs=1) if run["connection"] != "linear"]
    report.write(study_of(name), runs, ["the others"], tmp_path)
    of_linear = study_of(name)["baseline"].get("connection") == "linear"
    summary = results(tmp_path)["summary"]
    assert bool(summary) == bool(runs)
    assert not of_linear or [entry for entry in summary if entry["difference"] is not None] == []


def test_probability_tells_pearson(tmp_path):
    runs = runs_of("probability")
    expected = scipy.stats.pearsonr([run["cell"]["probability"] for run in runs], [run["top1"] for run in runs])
    report.write(study_of("probability"), runs, [], tmp_path)
    assert side_by_side(tmp_path)[("0.5",), "top-1 %"] == ("only drawn", "82.00 ± 1.00")
    assert (f"top-1 %: r = {expected.statistic:+.2f}, p = {expected.pvalue:.2g}, 9 runs; top-5 %: r undefined (9 runs)."
            in texts(tmp_path)[1])


def test_learning_rates_are_in_order_and_compared_at_their_own(tmp_path):
    runs = [*runs_of("learning_rate"), run_of("linear", 0, {"lr": 1e-4}), run_of("linear", 0, {"lr": 7.5e-4})]
    next(run for run in runs if run["cell"] == {"lr": 1e-3} and run["connection"] == "feature")["top1"] += 0.3
    report.write(study_of("learning_rate", dataset="torch/cifar10"), runs, [], tmp_path)
    rates = [row[0] for row in tables_of(tmp_path)[0][2:]]
    assert {"1e-4", "7.5e-4"} < set(rates)
    assert [float(rate) for rate in rates] == sorted(map(float, rates))
    half = scipy.stats.t.ppf(0.975, 2) * statistics.stdev([0.0, 0.0, 0.3]) / math.sqrt(3)
    row = differences(tmp_path)["1e-3", "CIFAR-10, Orthogonal-F"]
    assert row["half-width; the paper's differences"] == f"± {half:.2f}; contains zero and the paper's +0.41"


def test_switches_are_compared_with_no_switch(tmp_path):
    report.write(study_of("switch_kept", dataset="torch/cifar10"), runs_of("switch_kept"), [], tmp_path)
    assert side_by_side(tmp_path)[("Orthogonal → Linear",), "CIFAR-10, top-1 %"] == ("93.18 ± 0.15", "83.00 ± 1.00")
    row = differences(tmp_path)["Linear → Orthogonal", "CIFAR-10, top-1 %"]
    assert (row["against"], row["difference [95 % CI]"]) == ("Linear → Linear", "+1.00")
    assert len(differences(tmp_path)) == 6


def test_cka_has_no_baseline(tmp_path):
    report.write(study_of("representation"), runs_of("representation"), [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("linear CKA between the two",), "Orthogonal-F"] == ("0.546", "0.600 ± 0.000")
    assert found[("linear CKA between the two",), "Linear"] == ("–", "–")
    assert found[("effective rank",), "Linear"] == ("572.9", "11.0 ± 1.0")
    assert "linear CKA between the two" not in [names[0] for names in differences(tmp_path)]


def test_two_groups_at_one_place_are_told_apart(tmp_path):
    runs = [run_of(connection, 0, {"layers": "all"}, top1=value)
            for connection, value in (("feature", 90.0), ("global", 80.0))]
    report.write(study_of("layer_pattern"), runs, [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("all, feature",), "top-1 %"][1].startswith("90.00")
    assert found[("all, global",), "top-1 %"][1].startswith("80.00")


# ---------------------------------------------------------------------------------------- of no paper
def test_compare(tmp_path):
    text = report.write(*accuracy(BOTH, name="compare", paper="", table="", changed=[]), [], tmp_path)
    header, rule, linear, feature = text.split("\n\n")[2].splitlines()
    assert re.split(" {2,}", header) == [
        "connection", "seeds", "top-1 % (last epoch)", "best epoch %", "difference to Linear [95 % CI]", "images/s",
        "peak memory"]
    assert re.split(" {2,}", linear) == ["Linear", "3", "91.17 ± 1.26", "91.17", "-", "100", "1,024 MiB"]
    assert re.split(" {2,}", feature)[4] == differences(tmp_path)["Orthogonal-F", "top-1 %"]["difference [95 % CI]"]
    assert set(rule) == {"-"}
    assert {"training.svg", "profile.svg", "stream_by_epoch.svg", "cosine_by_epoch.svg", "differences.svg"} == {
        path.name for path in (tmp_path / "figures").iterdir()}
    assert "paper" not in "".join(texts(tmp_path)).lower()


def test_a_comparison_counts_what_it_shows(tmp_path):
    """`timm-ortho compare` shows top-1 alone, so that top-5 is no second comparison."""
    made = comparison(["linear", "feature"], None)
    study, runs = accuracy(BOTH, name="compare", paper="", table="", changed=[], report=made.report)
    report.write(study, runs, [], tmp_path)
    assert list(differences(tmp_path)) == [("Orthogonal-F", "top-1 %")]
    found = results(tmp_path)["summary"][-1]["difference"]
    assert found["p_holm"] == found["p"]
    assert "adjusted for 1 comparison." in texts(tmp_path)[0]
    assert tables_of(tmp_path)[0][0][:3] == ["connection", "seeds", "top-1 % (last epoch)"]


def test_own_study_has_a_row_for_each_cell(tmp_path):
    runs = [run_of(connection, seed, {"depth": depth, "lr": 1e-4}, top1=depth + seed)
            for seed in range(2) for depth in (2, 4) for connection in ("linear", "feature")]
    study = study_of("mine", paper="", table=None, axes={"depth": [2, 4], "lr": [1e-4]}, seeds=[0, 1])
    report.write(study, runs, [], tmp_path)
    rows = [row[:5] for row in tables_of(tmp_path)[0][1:]]
    assert ["4", "1e-4", "Linear", "2", "4.50 ± 0.71"] in rows
    laid_out = {"rows": ["depth"], "columns": ["connection", "measure"], "measures": ["loss"],
                "titles": {"depth": "blocks"}, "labels": {"depth": {4: "four"}},
                "figures": [{"points": {"x": "depth"}}]}
    report.write({**study, "report": laid_out}, runs, [], tmp_path)
    assert side_by_side(tmp_path)[("four",), "Orthogonal-F, test loss"] == (
        "0.5000 ± 0.0000", "+0.0000")


def test_a_study_that_has_a_shipped_ones_name_and_other_axes(tmp_path):
    runs = [run_of(connection, 0, {"depth": 2}) for connection in ("linear", "feature")]
    report.write(study_of("switch_kept", axes={"depth": [2]}, paper="", table=""), runs, [], tmp_path)
    assert tables_of(tmp_path)[0][0][:2] == ["depth", "connection"]


@pytest.mark.parametrize(("given", "message"), [
    ({"row": ["connection"]}, "report has no key 'row'; the nearest is 'rows'"),
    ({"rows": ["depht"]}, "report: rows has no entry 'depht'; the nearest is 'depth'"),
    ({"measures": ["top-1"]}, "report: measures has no entry 'top-1'; the nearest is 'top1'"),
    ({"figures": ["trainings"]}, "report: figures has no entry 'trainings'; the nearest is 'training'"),
    ({"figures": [{"points": {"X": "depth"}}]}, "report: figure 'points' has no option 'X'"),
    ({"tables": ["transition"]}, "report: tables has no entry 'transition'; the nearest is 'transitions'"),
    ({"order": "depth", "rows": ["connection"]}, "report: order has no entry 'depth'; the nearest is 'connection'"),
    ({"figures": [{"points": {"x": "deep"}}]}, "report: figure 'points' has no dimension 'deep'"),
    ({"figures": [{"points": {"measures": ["top2"]}}]}, "report: figure 'points' has no measure 'top2'"),
    (["rows"], r"report must be a mapping, not \['rows'\]"),
])
def test_a_layout_that_cannot_be(given, message, tmp_path):
    with pytest.raises(LabError, match=message):
        report.write(study_of("mine", axes={"depth": [2]}, report=given), [], [], tmp_path)


# ---------------------------------------------------------------------------------------- where it was made
def test_runs_of_train_py(tmp_path):
    """Without probes, records, seconds and memory; and with what they say of where they were made."""
    runs = [train_py_run(connection, seed, top1=90.0 + seed)
            for seed in range(2) for connection in ("linear", "feature")]
    runs += [run_of("linear", 2), run_of("feature", 2)]
    text = report.write(study_of("dynamics", dataset="cifar10"), runs, [], tmp_path)
    assert "90.33 ± 0.58" in text
    page_text, markdown = texts(tmp_path)
    for said in ("timm-ortho 9.9, torch 2.15.0, timm 1.0.31", "node0, node1", "H200", "580.1", "abc123",
                 "2026-11-20T10:00 to 2026-11-21T11:00", "train.py"):
        assert f"| {said} |" in markdown
        assert said in page_text
    assert "| continued | Linear, seed 1; Orthogonal-F, seed 1 |" in markdown
    rows = next(table for table in tables_of(tmp_path) if table[0][:2] == ["run", "seed"])
    assert dict(zip(rows[0], rows[1], strict=True))["images/s"] == "–"
    assert (tmp_path / "figures" / "training.svg").is_file()


def test_the_reporting_machine_is_not_named(tmp_path):
    """Of a run that says nothing, nothing is said."""
    import torch
    report.write(*accuracy(BOTH), [], tmp_path)
    assert "| versions |" not in texts(tmp_path)[1]
    assert torch.__version__ not in "".join(texts(tmp_path))


@pytest.mark.usefixtures("drawn")
def test_special_characters(tmp_path):
    odd = "a <b> & |c| *d* [e](f) `g` é"
    runs = [run_of(connection, seed, {odd: odd}) for connection in ("linear", "feature") for seed in range(2)]
    study = study_of("mine", title=odd, paper="", table="", axes={odd: [odd]}, changed=[odd], command=odd)
    report.write(study, runs, [odd], tmp_path)
    page_text, markdown = texts(tmp_path)
    assert page_text.count(odd) > 10
    assert markdown.count(odd) > 10
    raw = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert r"\<b\> \& \|c\| \*d\* \[e\](f) \`g\`" in raw


# ------------------------------------------------------------------------------------------ several in one
def test_many_in_one_report(tmp_path):
    parts = [(study_of(name, dataset=data), runs_of(name), unfinished) for name, data, unfinished in (
        ("switch_kept", "digits", ["x-seed0"]), ("switch_kept", "torch/cifar10", []), ("gamma", None, []),
        ("gamma", None, []))]
    text = report.write_many(parts, tmp_path / "one")
    told, markdown = texts(tmp_path / "one")
    for said in (told, markdown, text):
        assert said.count("No difference could be tested (3 equal differences)") == 1
    headings = [element.text for element in parsed(tmp_path / "one").iter("h2")]
    assert headings == ["What of switch_kept? (Table 0), digits", "What of switch_kept? (Table 0), torch/cifar10",
                        *["What of gamma? (Table 0)"] * 2, "Method and terms"]
    names = {path.name for path in (tmp_path / "one" / "figures").iterdir()}
    assert {"all_differences.svg", "switch_kept-digits_switch.svg", "switch_kept-torch_cifar10_switch.svg"} <= names


# ------------------------------------------------------------------------------------------------ records
def test_transitions_and_maxima_are_of_all_steps(tmp_path):
    """500 steps, of which 100 are kept: the point and the maximum lie at steps that are not."""
    runs = [run_of(connection, seed, dynamics=recorded(connection, seed, 500))
            for connection in ("linear", "feature") for seed in range(3)]
    for run in runs:
        run["dynamics"][-1]["parallel"] = 2.0
        next(row for row in run["dynamics"] if row["step"] == 1230 and row["name"] == "blocks.1.mlp")["parallel"] = 1e6
    whole = copy.deepcopy(runs)
    report.write(study_of("dynamics"), runs, [], tmp_path / "one")
    assert runs == whole  # what was handed over is left as it was
    values = results(tmp_path / "one")
    steps = {row["step"] for row in values["runs"][0]["dynamics"]}
    assert len(steps) == 100
    assert {0, 4990} < steps
    truth = [transition_points(*([run["dynamics"] for run in whole if run["connection"] == name]
                                 for name in ("linear", "feature")), measure) for measure in ("stream", "cosine")]
    points = values["recorded"]["transitions"]
    assert [point for point in points if point["measure"] in ("stream", "cosine")] == [
        point for of_measure in truth for point in of_measure]
    assert points[0]["step"] not in steps
    assert 1230 not in steps
    assert values["recorded"]["last_branch"][0] == {"first": 4.0, "highest": 1e6 + 3.0, "last": 5.0}
    again(tmp_path / "one" / "results.json", tmp_path / "other")
    assert results(tmp_path / "other")["recorded"] == values["recorded"]
    assert f"step {points[0]['step']}" in texts(tmp_path / "other")[1]


def test_last_branch_and_learned_weights_are_those_of_the_records(tmp_path):
    report.write(study_of("head_norm"), runs_of("head_norm"), [], tmp_path)
    table = next(table for table in tables_of(tmp_path) if "last / first" in table[0])
    assert table[1] == ["without", "Linear", "4", "9", "9", "2.25"]
    report.write(study_of("hybrid"), runs_of("hybrid"), [], tmp_path)
    table = next(table for table in tables_of(tmp_path) if table[0][-2:] == ["ρ", "θ"])
    assert table[1] == ["orthogonal start", "attention", "1.500 [1.500, 1.500]", "0.100 [0.000, 0.200]"]


# -------------------------------------------------------------------------------------- without training
def test_overhead_beside_table_1b(tmp_path):
    twice = [*ROWS["overhead"], {**OVERHEAD, "dtype": "bfloat16"}]
    for rows, name in ((ROWS["overhead"], "ViT-S"), (twice, "ViT-S, tokens, float32, eager"),
                       ([{**OVERHEAD, "model": "vit_small(img_size=64)"}], "ViT-S"),
                       ([{**OVERHEAD, "model": "vit_small(img_size=64, depth=2)"}], "ViT-S (depth=2)")):
        report.write(study_of("overhead"), rows, [], tmp_path)
        found = side_by_side(tmp_path)
        assert found[(name,), "overhead, %"][1] == "2.50"  # 100 (1 - 975 / 1000), as the paper takes it
        assert found[(name,), "overhead by repetition, %"][1] == "2.00 [1.00, 3.50]"
        assert found[(name,), "Linear, images/s"][1] == "1,000.0"
    report.write(study_of("overhead"), twice, [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("ResNetV2-34",), "overhead, %"] == ("5.94", "not measured")
    assert found[("ViT-S, tokens, bfloat16, eager",), "overhead, %"][0] == "0.28"
    assert found[("ViT-B",), "Orthogonal-F, images/s"] == ("1,246.2", "not run")
    for said in ("out of memory", "| device | AMD EPYC, 2 cores, 2 threads |", "20 % and 80 % quantiles"):
        assert said in texts(tmp_path)[1]


def test_flops_and_gamma_beside_their_tables(tmp_path):
    text = report.write(study_of("parameters"), ROWS["parameters"], [], tmp_path)
    found, column = side_by_side(tmp_path), "FLOPs of a block of ViT-S, s = 10, d = 4"
    assert found[("Attention", "Orthogonal, as the paper writes it"), column] == (
        "8sd² + 4s²d + sd + 6sd + 2s = 3,180", "3,180")
    assert found[("Attention", "Orthogonal-F, as it runs here"), column] == ("not in the paper", "3,210")
    assert [row[-2:] for row in tables_of(tmp_path)[1][1:]] == [["260", "260"], ["290", "260"]]
    assert tables_of(tmp_path)[2][2][-1] == "0.348"
    assert "3,180" in text
    report.write(study_of("gamma"), ROWS["gamma"], [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("ViT-S",), "γ"] == ("64.00", "64.00")
    assert found[("ResNet-1001",), "width"] == ("37.33", "not run")
    assert found[("deit_tiny_patch16_224",), "blocks"] == ("not in the paper", "12")


# ------------------------------------------------------------------------------------------ pages and names
def test_text_table():
    table = Table(["a", "b", "c"], [["long name", "1", "2"]], names=1, groups=[("group", 2)])
    assert page.text_table(table).splitlines() == [
        "a          group: b  group: c", "-----------------------------", "long name  1         2"]


def test_the_page_is_made_for_narrow_screens_and_paper():
    style = "".join(page.page("t", []).split("<style>")[1].split("</style>")[0].split())
    assert ".scroll{overflow-x:auto;" in style
    assert "max-width:100%" in style
    assert "@mediaprint{" in style


def test_names_of_the_papers():
    assert paper.name("dataset", "svhn") == "SVHN"
    assert paper.name("dataset", "fashion_mnist") == "fashion_mnist"
    laid_out = layout.Layout.of(study_of("dynamics", dataset="torch/cifar10", model="vit_small_ortho"))
    assert (laid_out.key("dataset", {"cell": {}}), laid_out.key("model", {"cell": {}})) == ("cifar10", "vit_s")
    assert [layout.shown(value) for value in (1e-6, 5e-4, 0.1, 20, "0,1")] == ["1e-6", "5e-4", "0.1", "20", "0,1"]
