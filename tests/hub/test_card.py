"""Test model cards, whose metrics come from the files of a run."""
import csv
import re
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import yaml
from helpers.tiny_study import read, result_of, unfinish
from helpers.trained_runs import timm_run
from huggingface_hub import ModelCard

from timm_ortho.connections import CONNECTIONS
from timm_ortho.hub.card import Subject, draw_curve, model_card
from timm_ortho.lab import commands
from timm_ortho.run_folder import CardValues, CheckpointRun, card_values, read_run

CONFIG = {
    "architecture": "vit_small_ortho", "num_classes": 10, "model_args": {"connection": "feature", "patch_size": 8},
    "pretrained_cfg": {"input_size": [1, 16, 16], "mean": [0.3], "std": [0.38], "interpolation": "bicubic"},
}
SUBJECT = Subject("digits", CONFIG, 12345, "me/digits", license="apache-2.0")


def connected(**arguments):
    return replace(SUBJECT, config={**CONFIG, "model_args": arguments})


def rows(folder):
    with open(folder / "summary.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def figures(card):
    """Return ``{name: (value, arguments)}`` for the metrics in a card's metadata."""
    results = ModelCard(str(card)).data.eval_results or []
    return {result.metric_name: (result.metric_value, result.metric_args) for result in results}


def section(card, title):
    return str(card).split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


# ------------------------------------------------------------------------------------------ metrics of files
def test_metadata_is_the_run_with_its_spread(grid):
    run = CheckpointRun(grid / "feature-seed1")
    top1 = {seed: result_of(grid / f"feature-seed{seed}")["top1"] for seed in range(3)}
    last = rows(grid / "feature-seed1")[-1]
    assert figures(model_card(SUBJECT, run)) == {
        "top-1 of these weights, %": (pytest.approx(float(last["eval_top1"]), abs=1e-4), None),
        "top-5 of these weights, %": (pytest.approx(float(last["eval_top5"]), abs=1e-4), None),
        "top-1 after the last epoch, mean over seeds, %": (
            pytest.approx(fmean(top1.values()), abs=1e-4),
            {"std": pytest.approx(stdev(top1.values()), abs=1e-4), "seeds": [0, 1, 2]}),
    }
    assert run.card.top1 == top1


def test_every_metric_comes_from_the_files(grid):
    run = CheckpointRun(grid / "feature-seed0")
    text = section(model_card(SUBJECT, run), "Results")
    rows = [row for row in read(grid / "results.json")["summary"] if row["measure"] == "top1"]
    top1 = run.card.top1.values()
    known = {f"{value:.2f}" for value in [*top1, fmean(top1), stdev(top1)]}
    known |= {f"{row[key]:.2f}" for row in rows for key in ("mean", "std")}
    difference = rows[1]["difference"]
    low, high = (difference["mean"] + sign * difference["half_width"] for sign in (-1, 1))
    known |= {f"{value:+.2f}".lstrip("+-") for value in (difference["mean"], low, high)}
    known |= {f"{run.evaluated[key]:.2f}" for key in ("eval_top1", "eval_top5")} | {f"{run.evaluated['eval_loss']:.4f}"}
    found = set(re.findall(r"\d+\.\d+", text))
    assert found
    assert found <= known
    assert f"{difference['mean']:+.2f} [{low:+.2f}, {high:+.2f}]" in text


def test_unfinished_runs_have_no_numbers_on_the_card(copied):
    for seed in (1, 2):
        unfinish(copied / f"feature-seed{seed}")
    commands.report_on([copied])
    run = CheckpointRun(copied / "feature-seed0")
    assert list(run.card.top1) == [0]
    assert "One seed: the variance over seeds is unknown" in section(model_card(SUBJECT, run), "Limits")
    assert list(figures(model_card(SUBJECT, run))) == ["top-1 of these weights, %", "top-5 of these weights, %"]


def test_without_a_run_or_its_history_there_are_no_metrics(tmp_path):
    folder = timm_run(tmp_path / "run")
    (folder / "summary.csv").unlink()
    cards = model_card(SUBJECT), model_card(SUBJECT, CheckpointRun(folder))
    for card, words in zip(cards, ("Not measured", "have no metrics for the epoch of these weights"), strict=True):
        assert words in section(card, "Results")
        assert figures(card) == {}
        assert not re.search(r"\d+\.\d+ ?%|±", section(card, "Results"))


def test_metrics_of_a_selected_epoch_are_marked_as_optimistic(tmp_path):
    folder = timm_run(tmp_path / "run")
    best = CheckpointRun(folder / "model_best.pth.tar")
    assert (best.epoch, best.evaluated["eval_top1"]) == (1, 20.25)
    assert "One seed" in str(model_card(SUBJECT, best))
    results = section(model_card(SUBJECT, best), "Results")
    assert "the weights after epoch 2 of 3" in results
    assert "too optimistic" in results
    assert "too optimistic" not in str(model_card(SUBJECT, CheckpointRun(folder)))


@pytest.mark.parametrize(("options", "ema", "measured"), [  # the weights with metrics, if these are others
    (dict(ema=True), True, None), (dict(ema=True), False, "EMA"),
    (dict(ema=True, model_ema_force_cpu=True), False, None), (dict(ema=True, model_ema_force_cpu=True), True, "plain"),
])
def test_only_evaluated_weights_have_metrics(tmp_path, options, ema, measured):
    folder = timm_run(tmp_path / "run", **options)
    run = CheckpointRun(folder, ema)
    card = model_card(SUBJECT, run)
    assert bool(figures(card)) is (measured is None)
    kind = "EMA" if ema else "plain"
    note = f"Not measured on these weights: the run evaluated its {measured} weights, and these are its {kind} weights."
    assert (note in str(card)) is (measured is not None)
    best = str(model_card(SUBJECT, CheckpointRun(folder / "model_best.pth.tar", ema)))
    assert ("too optimistic" in best) is (measured is None)  # without metrics of these weights, there is no such note
    run.card = CardValues(top1={0: 50.0, 1: 60.0})
    card = model_card(SUBJECT, run)
    name = f"top-1 of the {measured} weights after the last epoch" if measured else "top-1 after the last epoch"
    assert figures(card)[f"{name}, mean over seeds, %"][0] == 55
    marked = f"All validation metrics on this card are of the {measured} weights."
    assert (marked in section(card, "Results")) is (measured is not None)


def test_the_card_of_a_run_of_timms_script(tmp_path):
    run = CheckpointRun(timm_run(tmp_path / "run"))
    assert (run.epoch, run.options["num_classes"], run.card) == (2, 7, CardValues())
    assert figures(model_card(SUBJECT, run)) == {
        "top-1 of these weights, %": (30.25, None), "top-5 of these weights, %": (80.25, None)}
    data = ModelCard(str(model_card(SUBJECT, run))).data
    assert (data.datasets, data.eval_results[0].dataset_name) == (["uoft-cs/cifar10"], "CIFAR-10")


@pytest.mark.parametrize(("options", "dataset", "title"), [
    ({"dataset": "", "data_dir": "/data/other"}, None, "the image folder 'other'"),
    ({"dataset": "torch/cifar100"}, "uoft-cs/cifar100", "CIFAR-100"),
    ({"dataset": "torch/imagenet"}, "ILSVRC/imagenet-1k", "ImageNet-1k"),
    ({"dataset": "hfds/ILSVRC/imagenet-1k"}, "ILSVRC/imagenet-1k", "imagenet-1k"),
    ({"dataset": "hfids/beans"}, "beans", "beans"),
    ({"dataset": "wds/beans"}, None, "beans"),
])
def test_the_data_set_has_its_id_on_the_hub(tmp_path, options, dataset, title):
    data = ModelCard(str(model_card(SUBJECT, CheckpointRun(timm_run(tmp_path / "run", **options))))).data
    assert data.datasets == ([dataset] if dataset else None)
    assert {(result.dataset_type, result.dataset_name) for result in data.eval_results} == {(dataset or title, title)}


# --------------------------------------------------------------------------------------- other sections
def test_sections_of_a_card(grid):
    run = CheckpointRun(grid / "feature-seed0")
    text = str(model_card(SUBJECT, run, "training.png"))
    for part in (
            "library_name: timm", "license: apache-2.0", "import timm_ortho", 'create_model("hf-hub:me/digits"',
            'from_pretrained("me/digits")', "Orthogonal-F", "12,345", "![loss and accuracy by epoch](training.png)",
            "oh2025revisiting", "rw2019timm", "a PIL image in grey"):
        assert part in text, part
    snippets = re.findall(r"```python\n(.*)", text)
    assert len(snippets) == 2
    assert all(first.startswith("import timm_ortho  # ") for first in snippets)
    made = read_run(grid / "feature-seed0").made_with
    assert f"timm-ortho {made['timm-ortho']}, timm {made['timm']}, torch {made['torch']}" in text
    assert made.get("commit", "") in text
    assert "{{" not in text
    assert "\n\n\n" not in text


def test_all_arguments_can_be_read_from_the_card(grid):
    run = CheckpointRun(grid / "feature-seed0")
    block = re.search(r"```yaml\n(.*?)```", str(model_card(SUBJECT, run)), re.DOTALL)[1]
    assert yaml.safe_load(block) == run.options
    assert "| batch_size | 32 |" in section(model_card(SUBJECT, run), "Training")


def test_cards_contain_no_local_paths(tmp_path):
    run = CheckpointRun(timm_run(tmp_path / "run", dataset="", initial_checkpoint="/home/somebody/secret/w.pth"))
    text = str(model_card(SUBJECT, run))
    assert "/home" not in text
    assert "data_dir: cifar" in text
    assert "trained on the image folder 'cifar'" in text
    kwargs = {"pretrained_cfg_overlay": {"file": "secret/project/last.pth"}, "connection_eps": "/home/me/secret/x.pth"}
    run.options |= {"model_kwargs": kwargs, "log": ["see {a: /home/me/secret/b.log}", "file:///home/me/secret/c"],
                    "scale": ["/home/me/secret/scale"], "val_split": "/home/me/secret/val"}
    text = str(model_card(SUBJECT, run))
    assert "secret" not in text
    assert "/home" not in text
    assert all(name in text for name in ("file: last.pth", "x.pth", "{a: b.log}", "split val"))
    run = CheckpointRun(timm_run(tmp_path / "unknown", dataset="", data_dir=None))
    assert "trained on an image folder." in str(model_card(SUBJECT, run))


def test_text_of_other_people_is_escaped(tmp_path):
    evil = "x` |\n\n# Evil\n\n\x1b\u202e<img src=x>"
    run = CheckpointRun(timm_run(
        tmp_path / "run", epochs=1, opt=evil, dataset=evil, experiment="a\n\n````\n# Evil\n"))
    row = dict(connection=evil, baseline=evil, seeds=[0], top1_mean=1.0, top1_std=None, difference=None)
    run.card = card_values({}, {"cpu": evil}, dict(split=evil, top1=[], rows=[row]))
    metadata, card = str(model_card(connected(connection="feature", connection_start=evil), run)).split("\n---\n", 1)
    assert "\x1b" not in metadata
    assert "\u202e" not in metadata
    card = re.sub(r"^(`{3,})\w*\n.*?^\1\n", "", card, flags=re.MULTILINE | re.DOTALL)
    assert "\n# Evil" not in card
    assert len(re.findall(r"(?<!\\)<img", card)) == card.count(r"`x' \| # Evil \x1b\u202e<img src=x>`") == 1  # as code
    assert "".join(card.split("\n")).isprintable()


def test_made_with_has_no_empty_values_no_host_and_no_command(tmp_path):
    """A continued run records the host and the command of each session."""
    session = {
        "torch": "2", "host": "node7", "pid": 4711, "cpu": "EPYC", "gpu": "", "driver": "", "job": None,
        "command": "/home/me/bin/timm-ortho compare", "continued": []}
    run = CheckpointRun(timm_run(tmp_path / "run"))
    run.card = card_values({"device": "cpu"}, session)
    assert "\nMade with torch 2, cpu EPYC, device cpu.\n" in str(model_card(SUBJECT, run))
    run.card = card_values({}, {**session, "job": "12", "continued": [session, session]})
    assert "\nMade with torch 2, cpu EPYC, continued 2 times.\n" in str(model_card(SUBJECT, run))


@pytest.mark.parametrize("name", CONNECTIONS)
def test_a_connection_is_described_by_its_docstring(name):
    text = str(model_card(connected(connection=name)))
    first = CONNECTIONS[name].__doc__.splitlines()[0]
    assert first.endswith(".")
    assert f"| connection | {name}. {first} |\n" in text
    assert "its author" not in section(text, "Model")


ADDS = "A residual block adds its branch output f to the stream x"
ORTHOGONAL = (f"{ADDS}. An orthogonal connection adds only the part of f that is orthogonal to x: y = x + f - s x with "
              "s = <x, f> / (|x|² + eps).")


@pytest.mark.parametrize(("arguments", "text"), [
    ({}, ""),
    ({"connection": "linear"}, f"{ADDS}: y = x + f."),
    ({"connection": "linear", "skip": "scaled"},
     f"{ADDS}: y = x + f. P x replaces x, where P is the transform of the stream."),
    ({"connection": "feature"}, ORTHOGONAL),
    ({"connection": "global", "connection_layers": [0]},
     f"{ORTHOGONAL} Blocks outside `connection_layers` are linear: y = x + f."),
    ({"connection": "feature", "connection_prob": 0.5, "connection_groups": 6, "connection_kinds": ["attention"]},
     f"{ORTHOGONAL} In training, this form has the probability pi = `connection_prob`. In evaluation, y = x + f - pi s "
     "x. The channels are divided into equal groups, each with its own s. Branches outside `connection_kinds` are "
     "linear: y = x + f."),
    ({"connection": "hybrid"},
     f"{ADDS}. A hybrid connection learns the weights of the parts of f parallel and orthogonal to x: y = x + rho "
     "sin(theta) s x + rho cos(theta) (f - s x) with s = <x, f> / (|x|² + eps)."),
])
def test_a_card_states_what_its_model_computes(arguments, text):
    card = model_card(connected(**arguments))
    after_the_table = section(card, "Model").rpartition("|\n")[2]
    assert " ".join(after_the_table.split()) == text
    described = "| transform of the stream | scaled: " in str(card)
    assert described is ("skip" in arguments)
    assert ("orthogonal-residual" in card.data.tags) is (arguments.get("connection") in ("feature", "global", "hybrid"))


def test_first_lines_warn_about_the_hubs_snippet():
    """For `library_name: timm`, the Hub shows a fixed snippet, which does not import timm_ortho."""
    first = str(model_card(SUBJECT)).partition("# digits\n\n")[2].partition("\n\n")[0]
    assert first.startswith("> [!IMPORTANT]\n> **Import `timm_ortho` before you load this model.**")
    assert '"Use this model" lacks this import' in first
    assert "`Unknown model (vit_small_ortho.import_timm_ortho)`" in first
    assert "is not supported in your version of timm" in first
    plain = replace(SUBJECT, config={**CONFIG, "architecture": "resnet18", "model_args": {}})
    assert "Unknown model" not in str(model_card(plain))  # timm's own models need no import
    text = str(model_card(replace(SUBJECT, repo_id="me/m", revision="v2")))
    assert 'create_model("hf-hub:me/m@v2"' in text
    assert 'from_pretrained("me/m", revision="v2")' in text


def test_a_diverged_run(copied):
    folder = copied / "feature-seed0"
    *before, last = rows(folder)
    with open(folder / "summary.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, last)
        table.writeheader()
        table.writerows([*before, {**last, "eval_loss": "nan", "train_loss": "nan"}])
    run = CheckpointRun(folder)
    draw_curve(run, copied / "curve.png")
    assert (copied / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "loss of these weights" not in str(model_card(SUBJECT, run))


def test_base_model_and_about():
    subject = Subject("m.authors", CONFIG, 1, about="The authors' weights.", base_model="them/base",
                      limits=["Not ours."], dataset="imagenet1k")
    card = model_card(subject)
    assert "The authors' weights." in str(card)
    assert ModelCard(str(card)).data.base_model == "them/base"
    assert ModelCard(str(card)).data.datasets == ["ILSVRC/imagenet-1k"]
    assert section(card, "Limits").strip().startswith("* Not ours.")
    assert "transformers" not in section(card, "Use")
