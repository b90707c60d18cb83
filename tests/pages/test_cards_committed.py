"""scripts/make_cards.py: the cards in model_cards/ say what the results beside them say, and nothing else."""
import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import make_cards
import pytest
import timm
from huggingface_hub import ModelCard
from PIL import Image
from recorded import RecordedStudy

from timm_ortho.hub import PublishError
from timm_ortho.lab.planning import design
from timm_ortho.models.names import is_variant

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    int(huggingface_hub.__version__.split(".")[0]) < 2, reason="cards are written by huggingface_hub 2")
CARDS = ROOT / "model_cards"
WEIGHTS = [name for name in timm.list_pretrained() if is_variant(name)]
STUDY = {
    "study": {
        "name": "probability", "title": "Does it rise?", "paper": "Figure 4", "scale": "small", "dataset": "digits",
        "model": "vit_small", "seeds": [0, 1], "changed": ["epochs: 15 here, 300 in the paper"],
        "versions": {"timm": "1.0.31", "commit": "abcdef"}, "command": "timm-ortho study run probability",
    },
    "unfinished": [], "lead": "Of 1 difference, 0 are told apart.", "runs": [],
    "summary": [
        {"row": ["0.5"], "column": ["top-1 %"], "mean": 97.125, "std": 0.25, "seeds": [0, 1],
         "difference": {"mean": -0.5, "half_width": 0.75}},
        {"row": ["1"], "column": ["top-1 %"], "mean": None, "std": None, "seeds": [0], "difference": None},
    ],
}


def card(name):
    return ModelCard((CARDS / f"{name}.md").read_text(encoding="utf-8"))


def results(name):
    return json.loads((CARDS / "results" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def copied(tmp_path):
    """model_cards without the studies' figures, to change something in."""
    return shutil.copytree(CARDS, tmp_path / "model_cards", ignore=shutil.ignore_patterns("figures", "*.csv"))


def test_every_card_is_what_its_results_say(capsys):
    assert make_cards.main(check=True) == 0, capsys.readouterr().err


def test_there_is_one_for_all_weights_and_all_results():
    comparisons = {f"compare_{path.stem}" for path in (CARDS / "results").glob("*.json")}
    studies = {f"study_{path.parent.name}" for path in (CARDS / "results" / "studies").glob("*/results.json")}
    there = {path.stem for path in CARDS.glob("*.md") if path.name not in make_cards.BY_HAND}
    assert there == {*WEIGHTS, *comparisons, *studies}
    assert {"vit_base_ortho.authors_in1k", "vit_test_ortho.digits", "compare_digits"} <= there


def test_another_figure_is_another_card(copied, capsys):
    path = copied / "results" / "digits.json"
    values = json.loads(path.read_text())
    values["summary"][0]["mean"] += 1
    path.write_text(json.dumps(values))
    (copied / "stranger.md").write_text("# 99.9 %")
    (copied / "vit_test_linear.digits.png").unlink()
    assert make_cards.main(check=True, folder=copied) == 1
    assert capsys.readouterr().err.splitlines() == [
        "model_cards/compare_digits.md is not what its results say: run scripts/make_cards.py",
        "model_cards/vit_test_linear.digits.png is not what its results say: run scripts/make_cards.py",
        "model_cards/stranger.md is of nothing that this repository has",
    ]


def test_it_writes_what_it_checks(copied):
    for path in [*copied.glob("*.png"), *copied.glob("*.md")]:
        if path.name not in make_cards.BY_HAND:
            path.unlink()
    (copied / "results" / "studies" / "one").mkdir(parents=True)
    (copied / "results" / "studies" / "one" / "results.json").write_text(json.dumps(STUDY))
    assert make_cards.main(check=False, folder=copied) == 0
    assert make_cards.main(check=True, folder=copied) == 0
    assert (copied / "study_one.md").is_file()
    assert (copied / "vit_test_ortho.digits.png").read_bytes()[:4] == b"\x89PNG"


# ------------------------------------------------------------------------------------------------ the cards
@pytest.mark.parametrize(("kind", "figures", "paper"), [
    ("ortho", "74.62 % top-1 and 92.26 % top-5 on ImageNet-1k, after step 90,000, about epoch 270 of 300",
     "77.05 ± 0.21"),
    ("linear", "71.23 % top-1 and 90.29 % top-5 on ImageNet-1k, after a step that is not known here", "73.27 ± 0.58"),
])
def test_the_authors_cards_claim_what_theirs_do(kind, figures, paper):
    found = card(f"vit_base_{kind}.authors_in1k")
    assert f"**Their card's figures, not measured here:** {figures}. " in found.text
    assert f"The paper has {paper} % top-1 at the end of training" in found.text
    assert "The weights belong to Giyeong Oh and the other authors" in found.text
    assert "**Licence:** cc-by-sa-4.0, share-alike: " in found.text
    assert "Not measured" in found.text
    assert found.data.license == "cc-by-sa-4.0"
    assert found.data.eval_results is None


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name.endswith(".digits")])
def test_figures_of_shipped_weights(name):
    found, connection = card(name), make_cards.connection_of(name.partition(".")[0])
    runs = [run for run in results("vit_test_digits")["runs"] if run["connection"] == connection]
    seeds = {run["seed"]: run["top1"] for run in runs}
    values = {result.metric_name: result for result in found.data.eval_results}
    assert values["top-1 of these weights, %"].metric_value == pytest.approx(seeds[0], abs=1e-4)
    mean = values["top-1 after the last epoch, mean over seeds, %"]
    assert mean.metric_value == pytest.approx(sum(seeds.values()) / len(seeds), abs=1e-4)
    assert mean.metric_args["seeds"] == sorted(seeds) == [0, 1, 2]
    assert found.data.license == "apache-2.0"
    assert results("vit_test_digits")["commit"] in found.text
    assert f"![loss and accuracy by epoch]({name}.png)" in found.text


def test_what_a_card_says_to_do_works():
    text = card("vit_test_ortho.digits").text
    code, = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    values = {"image": Image.new("RGB", (8, 8))}
    exec(code, values)
    assert values["logits"].shape == (1, 10)


# ----------------------------------------------------------------------------------------------- of a study
def test_a_study(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(STUDY))
    text = make_cards.study_card(RecordedStudy(path), "results/studies/one/report.md").text
    assert "# Does it rise? (Figure 4)" in text
    assert "`probability` at scale `small`: vit_small on scikit-learn's digits, 2 seeds." in text
    assert "Of 1 difference, 0 are told apart." in text
    assert "| 0.5 | top-1 % | 97.12 ± 0.25 | -0.5 [-1.25, +0.25] | 0, 1 |" in text
    assert "| 1 | top-1 % | not finite | - | 0 |" in text
    assert "[results/studies/one/report.md](results/studies/one/report.md)" in text
    assert "command `timm-ortho study run probability`, commit abcdef" in text
    assert "Scaled down from the paper: epochs: 15 here, 300 in the paper." in text
    assert not re.search(r"\{[{%]|None|Use\n", text)


def test_a_study_of_no_paper_says_so_by_silence(tmp_path):
    path = tmp_path / "results.json"
    values = {**STUDY, "study": {**STUDY["study"], "paper": "", "changed": [], "command": "timm-ortho study run mine"}}
    path.write_text(json.dumps(values))
    text = make_cards.study_card(RecordedStudy(path), "mine/report.md").text
    assert "# Does it rise?\n" in text
    assert "Figures and all settings: [mine/report.md](mine/report.md)." in text
    assert "paper" not in text.partition("## Citation")[0].lower()


@pytest.mark.parametrize(("name", "cited"), [("probability", 0), ("skips_branch4", 1), ("skip_rank", 1)])
def test_a_study_cites_the_paper_that_it_is_of(tmp_path, name, cited):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**STUDY, "study": {**STUDY["study"], "paper": design.load(name, "small").paper}}))
    text = make_cards.study_card(RecordedStudy(path), "report.md").text
    assert text.count("wang2017orthogonal") == cited
    assert "oh2025revisiting" in text


def test_a_study_without_training(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**STUDY, "study": {**STUDY["study"], "dataset": None, "changed": []}, "summary": []}))
    text = make_cards.study_card(RecordedStudy(path), "report.md").text
    assert "at scale `small`, which needs no training." in text
    assert "Nothing was trained for it: it says nothing about accuracy." in text
    assert "| --- |" not in text


@pytest.mark.parametrize(("values", "message"), [
    ({**STUDY, "unfinished": ["linear-seed0"]}, "is of an unfinished study"),
    ({"runs": [], "settings": {}}, "is not a study's results.json"),
])
def test_what_is_no_finished_study(tmp_path, values, message):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(values))
    with pytest.raises(PublishError, match=message):
        RecordedStudy(path)
