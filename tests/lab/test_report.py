"""reporting/report.py and page.py: HTML, Markdown, plot and result files of reports on made-up runs."""
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.made_up_runs import DATA, accuracy, run_of, runs_of, study_of, train_py_run
from helpers.reports import lines_of, parsed, results, tables_of, texts, write

from timm_ortho.lab.commands import comparison

pytestmark = pytest.mark.usefixtures("undrawn_module")
BOTH = {"linear": [90.0, 91.0, 92.5], "feature": [90.5, 93.0, 93.5]}
COMPARED = dict(name="compare", paper="", table="", changed=[], report={"measures": ["top1"]})


# layouts that differ: a grid with the paper's numbers, connections in columns, recorded steps, no grid
@pytest.fixture(scope="module", params=["switch_kept", "representation", "head_norm", "compare"])
def written(request, tmp_path_factory):
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    return name, folder, write(study_of(name), runs_of(name), ["a-seed9"], folder)


def test_page_is_well_formed_and_self_contained(written):
    name, folder, _ = written
    root = parsed(folder)
    assert root.find("body/main/h1").text.startswith((f"What about {name}?", "vit_small on digits, 3 epochs: Ortho"))
    boxes = [child for box in root.iter("div") if box.get("class", "").startswith("scroll") for child in box]
    assert all(table in boxes for table in root.iter("table"))  # on narrow screens, a table scrolls inside its box
    images = list(root.iter("img"))
    assert images
    for image in images:
        assert image.get("src").startswith("data:image/svg+xml;base64,")
        assert len(image.get("alt")) > 20
    for element in root.iter():
        assert element.tag not in ("script", "link", "iframe", "object", "source")
        assert element.get("href", "history.csv") == "history.csv"
        assert element.get("action") is None
    assert not re.search(r"url\(|@import", root.find("head/style").text)
    for table in root.iter("table"):
        assert {len(list(row)) for row in table.find("tbody")} == {len(list(table.find("thead/tr")))}
        assert {header.get("scope") for header in table.iter("th")} <= {"col", "row"}


def test_markdown_has_whole_tables_and_its_plots(written):
    _, folder, _ = written
    text = (folder / "report.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\((figures/[\w-]+\.svg)\)", text)
    assert {path.name for path in (folder / "figures").iterdir()} == {Path(name).name for name in named}
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert blocks
    for lines in blocks:
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_command_changes_and_unfinished_runs_are_named(written):
    name, folder, text = written
    for told in texts(folder):
        assert study_of(name)["command"] in told
        assert ("epochs: 3 here; 300 in the paper" in told) == bool(study_of(name)["table"])
        assert "Not finished: a-seed9." in told
        assert "Method and terms" in told
    assert "not finished: a-seed9" in text
    assert text.endswith(f"report: {folder / 'report.html'}")


@pytest.mark.usefixtures("drawn")
def test_equal_runs_give_equal_bytes(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        write(study_of("dynamics"), runs_of("dynamics"), [], folder)
    files = [path.relative_to(one) for path in one.rglob("*.*")]
    assert all((other / path).read_bytes() == (one / path).read_bytes() for path in files)
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in one.glob("figures/*"))


def test_runs_of_train_py(tmp_path):
    """Runs of train.py have data about their machines, but no probes, records, times or peak memory."""
    runs = [train_py_run(connection, seed, top1=90.0 + seed)
            for seed in range(2) for connection in ("linear", "feature")]
    runs += [run_of("linear", 2), run_of("feature", 2)]
    text = write(study_of("dynamics", dataset="cifar10"), runs, [], tmp_path)
    assert "90.33 ± 0.58" in text
    _, markdown = texts(tmp_path)
    for said in ("timm-ortho 9.9, torch 2.15.0, timm 1.0.31", "node0, node1", "H200", "580.1", "abc123",
                 "2026-11-20T10:00 to 2026-11-21T11:00", "train.py", "Linear, seed 1; Orthogonal-F, seed 1"):
        assert f"| {said} |" in markdown
    rows = next(table for table in tables_of(tmp_path) if table[0][:2] == ["run", "seed"])
    assert dict(zip(rows[0], rows[1], strict=True))["peak memory"] == "–"
    assert (tmp_path / "figures" / "training.svg").is_file()


def test_metrics_of_ema_weights_are_named(tmp_path):
    for changes in ({}, {"ema": True}):
        write(study_of("dynamics"), [run_of("linear", 0), run_of("feature", 0, **changes)], [], tmp_path)
        assert ("Runs with model_ema are evaluated with the EMA weights" in texts(tmp_path)[0]) is bool(changes)


def test_the_reporting_machine_is_not_named(tmp_path):
    """If runs have no recorded versions, the report does not show the versions of the machine that writes it."""
    import torch
    write(*accuracy(BOTH), [], tmp_path)
    assert "| versions |" not in texts(tmp_path)[1]
    assert torch.__version__ not in "".join(texts(tmp_path))


@pytest.mark.usefixtures("drawn")
def test_special_characters(tmp_path):
    odd = "a <b> & |c| *d* [e](f) `g` é"
    runs = [run_of(connection, seed, {odd: odd}) for connection in ("linear", "feature") for seed in range(2)]
    write(study_of("mine", title=odd, axes={odd: [odd]}, changed=[odd], command=odd), runs, [odd], tmp_path)
    page_text, markdown = texts(tmp_path)
    assert page_text.count(odd) > 10
    assert markdown.count(odd) > 10
    raw = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert r"\<b\> \& \|c\| \*d\* \[e\](f) \`g\`" in raw


def test_the_images_are_described(tmp_path):
    data = {"image_size": [32, 48], "first_image": [375, 500], "channels": 3, "classes": 10, "train": 9469,
            "validation": 3925, "validation_split": "val"}
    study, runs = accuracy(BOTH)
    text = write({**study, "data": data}, runs, [], tmp_path)
    for told in (*texts(tmp_path), text):
        assert ("The images have 32 x 48 pixels (the first image of the data set: 375 x 500), 3 channels and 10 "
                "classes. There are 9,469 training images and 3,925 validation images (split “val”).") in told
        assert not re.search(r"\btest (images|loss|top-1)", told.partition("The paper has")[0])
    write({**study, "validation": "hold-out", "data": {
        **data, "image_size": None, "channels": 1, "classes": 1, "first_image": None}}, runs, [], tmp_path)
    told = texts(tmp_path)[0]
    assert "The images have several sizes, 1 channel and 1 class. There are 9,469" in told
    assert "3,925 hold-out images (split “val”)." in told


def test_report_without_finished_runs(tmp_path):
    text = write(study_of("compare", title="Three epochs"), [], ["linear-seed0"], tmp_path)
    assert "Study “compare” at scale “small”: Three epochs. It trains vit_small" in text
    assert all("No run is finished yet." in told for told in (text, *texts(tmp_path)))
    assert not list((tmp_path / "figures").iterdir())


def test_compare(tmp_path):
    """`timm-ortho compare` shows only top-1. Top-5 is therefore not a second comparison."""
    study, runs = accuracy(BOTH, **{**COMPARED, "report": comparison(["linear", "feature"], None).report})
    runs = [{**run, "blocks": 6, "width": 64, "lr": 1e-3, "batch_size": 32} for run in runs]
    text = write(study, runs, [], tmp_path)
    header, rule, linear, feature = text.split("\n\n")[2].splitlines()
    assert re.split(" {2,}", header) == ["connection", "top-1 %", "difference [95 % CI]", "p (Holm)"]
    assert re.split(" {2,}", linear) == ["Linear", "91.17 ± 1.26", "baseline", "–"]
    assert re.split(" {2,}", feature)[2] == lines_of(tmp_path)["Orthogonal-F",]["difference [95 % CI]"]
    assert set(rule) == {"-"}
    difference = results(tmp_path)["summary"][-1]["difference"]
    assert difference["p_holm"] == difference["p"]
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "training.svg", "profile.svg", "differences.svg"}
    rows = dict(row for table in tables_of(tmp_path) if ["property", "value"] in table for row in table)
    titles = ("learning rate", "batch size", "epochs", "blocks", "width of the last block")
    assert [rows[title] for title in titles] == ["1e-3", "32", "1", "6", "64"]
    for told in texts(tmp_path):
        assert "trains vit_small (6 blocks, width 64) on digits" in told
        assert not re.search("paper|images/s|minutes", told.lower())


@pytest.mark.parametrize(("top1", "data", "lead"), [
    ({**BOTH, "feature": [12.0, 9.0, 10.5]}, {}, "Not more accurate than chance: Orthogonal-F. Differences to or of "
     "these networks do not compare the connections. 1 of 1 difference detected"),
    (BOTH, {}, "The difference was not detected"),
    ({"linear": [9.0, 14.5, 11.0], "feature": [12.0, 9.0, 10.5]}, {}, "No network is more accurate than chance, so the "
     "differences do not compare the connections. Train longer, or change the learning rate."),
    ({"linear": [100.0] * 3, "feature": [100.0] * 3}, {"classes": 2, "validation": 6},
     "There are too few images to tell from chance")])
def test_networks_at_chance_are_named(tmp_path, top1, data, lead):
    write(*accuracy(top1, **COMPARED, data={**DATA, **data}), [], tmp_path)
    assert results(tmp_path)["lead"].startswith(lead)


def test_a_paper_without_numbers_has_no_column(tmp_path):
    write(study_of("hybrid"), runs_of("hybrid"), [], tmp_path)
    assert not {"paper", "the paper's difference"} & {*tables_of(tmp_path)[0][0]}


def test_the_page_opens_with_the_answer_and_ends_with_the_method(tmp_path):
    text = write(*accuracy(BOTH), ["a-seed9"], tmp_path)
    lead = results(tmp_path)["lead"]
    assert lead.startswith("None of 2 differences was detected. The 95 % intervals in top-1 %, five best test epochs")
    assert lead in text
    for told in texts(tmp_path):
        order = [told.index(said) for said in (
            lead, "Study “accuracy”", "Results", "Plots", "Every run", "How it was made", "Method and terms",
            "Runs that differ only in the connection or its arguments start from the same weights",
            "Student's confidence interval", "not the sampling of the evaluated images", "of the study (2)")]
        assert order == sorted(order)
