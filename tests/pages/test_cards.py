"""scripts/pages: generated pages and cards agree with their sources."""
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import timm
from huggingface_hub import ModelCard
from PIL import Image

from scripts.pages import __main__ as pages, studies
from timm_ortho import cli
from timm_ortho.lab.reporting import published
from timm_ortho.models.names import SUFFIXES, is_variant, suffix_of

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    int(huggingface_hub.__version__.split(".")[0]) < 2, reason="cards are written by huggingface_hub 2")
CARDS = ROOT / "model_cards"
COMPARED = published.read(CARDS / "results" / "comparisons" / "vit_test_digits")
WEIGHTS = [name for name in timm.list_pretrained() if is_variant(name)]


def card(name):
    return ModelCard((CARDS / f"{name}.md").read_text(encoding="utf-8"))


@pytest.fixture
def checkout(tmp_path):
    """Copy the generated pages, so that a test can change them."""
    for name in ("README.md", "docs", "model_cards"):
        source, target = ROOT / name, tmp_path / name
        if source.is_file():
            shutil.copy(source, target)
        else:
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("results"))
    shutil.copytree(ROOT / "timm_ortho" / "lab" / "recipes", tmp_path / "timm_ortho" / "lab" / "recipes")
    for path in ("questions.svg", "differences.svg", "by_epoch.svg", "bench_*.csv"):
        for file in (CARDS / "results").glob(path):
            (tmp_path / "model_cards" / "results").mkdir(exist_ok=True)
            shutil.copy(file, tmp_path / "model_cards" / "results")
    return tmp_path


def test_every_page_equals_its_sources(capsys):
    assert pages.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_differs_is_named(checkout, capsys):
    for name, old, new in (
            ("docs/evidence.md", "411 runs", "412 runs"), ("README.md", "expect little", "expect much"),
            ("model_cards/study_gamma-small.md", "64.00", "65.00"),
            ("timm_ortho/lab/recipes/vit_s_cifar10.yaml", "lr: 1.0e-3", "lr: 1.0e-2")):
        text = (checkout / name).read_text()
        assert old in text
        (checkout / name).write_text(text.replace(old, new))
    (checkout / "model_cards" / "stranger.md").write_text("# 99.9 %")
    (checkout / "model_cards" / "vit_test_linear.digits.png").unlink()
    assert pages.main(["--check"], checkout) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(set(lines)) == [
        "README.md", "docs/evidence.md", "model_cards/stranger.md", "model_cards/study_gamma-small.md",
        "model_cards/vit_test_linear.digits.png", "timm_ortho/lab/recipes/vit_s_cifar10.yaml"]


def test_written_pages_pass_the_check(checkout, capsys):
    for path in [*checkout.glob("model_cards/vit_*"), checkout / "model_cards" / "study_gamma-small.md"]:
        path.unlink()
    assert pages.main(["cards", "studies"], checkout) == 0
    assert pages.main(["--check", "cards", "studies"], checkout) == 0, capsys.readouterr().out
    assert (checkout / "model_cards" / "vit_test_ortho.digits.png").read_bytes()[:4] == b"\x89PNG"


def test_an_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        pages.main(["nothing"])
    assert "unknown: nothing; known: recipes, " in capsys.readouterr().err


def test_every_set_of_weights_and_every_study_has_a_page():
    names = {path.stem for path in CARDS.glob("*.md")} - {"README"}
    assert names == {*WEIGHTS, *(page.stem for page in studies.pages(ROOT))}
    assert {"vit_base_ortho.authors_in1k", "vit_test_ortho.digits", "compare_digits", "study_gamma-small"} <= names


# ------------------------------------------------------------------------------------------------ the cards
@pytest.mark.parametrize(("kind", "accuracy", "paper"), [
    ("ortho", "74.62 % top-1 and 92.26 % top-5 on ImageNet-1k, after step 90,000, about epoch 270 of 300",
     "77.05 ± 0.21"),
    ("linear", "71.23 % top-1 and 90.29 % top-5 on ImageNet-1k, after an unknown step", "73.27 ± 0.58"),
])
def test_cards_of_the_authors_weights(kind, accuracy, paper):
    found = card(f"vit_base_{kind}.authors_in1k")
    assert f"**Accuracy by the authors' card, not measured here:** {accuracy}. " in found.text
    assert f"The paper has {paper} % top-1 at the end of training" in found.text
    assert "Giyeong Oh and the other authors" in found.text
    assert "**Licence:** cc-by-sa-4.0, share-alike. " in found.text
    assert "Not measured" in found.text
    assert found.data.license == "cc-by-sa-4.0"
    assert found.data.eval_results is None


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name.endswith(".digits")])
def test_numbers_of_shipped_weights(name):
    found, connection = card(name), SUFFIXES[suffix_of(name.partition(".")[0])]
    runs = [run for run in COMPARED[1] if run["connection"] == connection]
    seeds = {run["seed"]: run["top1"] for run in runs}
    values = {result.metric_name: result for result in found.data.eval_results}
    assert values["top-1 of these weights, %"].metric_value == pytest.approx(seeds[0], abs=1e-4)
    mean = values["top-1 after the last epoch, mean over seeds, %"]
    assert mean.metric_value == pytest.approx(sum(seeds.values()) / len(seeds), abs=1e-4)
    assert mean.metric_args["seeds"] == sorted(seeds) == [0, 1, 2]
    assert found.data.license == "apache-2.0"
    assert COMPARED[0]["versions"]["commit"] in found.text
    assert f"![loss and accuracy by epoch]({name}.png)" in found.text


def test_the_code_of_a_card_runs():
    text = card("vit_test_ortho.digits").text
    code, = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    values = {"image": Image.new("RGB", (8, 8))}
    exec(code, values)
    assert values["logits"].shape == (1, 10)


# ------------------------------------------------------------------------------------------ pages of studies
def test_the_page_of_a_study():
    name = "study_confirm_accuracy-torch_fashion_mnist-small"
    text = (CARDS / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith("# Does Orthogonal-F make a ViT more accurate?\n\nNo difference between the connections")
    assert "| Linear | 16 | 89.63 ± 0.19 |" in text
    assert f"](plots/{name}.svg)" in text
    assert "timm-ortho study report model_cards/results/studies/confirm_accuracy-torch_fashion_mnist-small" in text
    assert "Every run" not in text


@pytest.mark.usefixtures("undrawn")
def test_the_whole_report_from_published_numbers(tmp_path, capsys):
    folder = CARDS / "results" / "studies" / "switch_kept-digits-small"
    assert cli.main(["study", "report", str(folder), "--output", str(tmp_path)]) == 0
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    page = (CARDS / f"study_{folder.name}.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    assert all(row in report for row in rows)
    assert "## Every run" in report
