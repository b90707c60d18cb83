"""`timm-ortho study` from its files to its report, on part of scikit-learn's digits and models that are hardly ones."""
import json
import time
from argparse import Namespace
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
import yaml
from tiny_study import STUDY, assert_same_run, results, run, written

import timm_ortho
from timm_ortho import cli
from timm_ortho.lab import LabError, cost, design, features, grid, study, training, workers
from timm_ortho.lab.changes import changes

pytestmark = pytest.mark.usefixtures("undrawn")

NAMES = sorted(design.shipped())
TRAINED = [name for name in NAMES if design.load(name, "smoke").kind == "training"]


# ------------------------------------------------------------------------------------ the shipped studies
@pytest.mark.parametrize("name", NAMES)
def test_shipped_study_is_complete(name):
    for scale in design.SCALES:
        found = design.load(name, scale)
        assert found.title.endswith("?")
        assert found.kind == "training" or not found.grid
    header = design.shipped()[name].read_text().split("title:")[0]
    assert f"timm-ortho study run {name}" in header
    assert "The paper" in header


def test_every_experiment_of_the_paper_is_there():
    experiments = """accuracy switch_reinitialised switch_kept layer_pattern probability epsilon learning_rate
        initialisation head_norm hybrid dynamics representation overhead parameters gamma
        skips_single skips_branch4 skips_depthwise skip_rank families"""
    assert set(NAMES) == set(experiments.split())


@pytest.mark.parametrize(
    "scale", [scale if scale == "smoke" else pytest.param(scale, marks=pytest.mark.slow) for scale in design.SCALES])
@pytest.mark.parametrize("name", TRAINED)
def test_shipped_study_expands_to_runs_that_can_be_built(name, scale, monkeypatch):
    """Each architecture with each of its connections is built, without memory for its weights."""
    found = design.load(name, scale)
    variants = list(found.variants({"dataset": "digits", "device": "cpu"}))
    assert len({variant.name(0) for variant in variants}) == len(variants)
    built = set()
    for variant in variants:
        kwargs = json.dumps(variant.options.model_kwargs)
        if (variant.options.model, kwargs) in built:
            continue
        built.add((variant.options.model, kwargs))
        with timm_ortho.models._build.on_meta():
            model = build(variant.options).to("meta")  # buffers too, which timm 1.0.16 keeps on the CPU
        assert len(timm_ortho.sites(model)) > 0
        with torch.device("meta"), torch.no_grad():
            size = variant.options.img_size
            assert model.eval()(torch.zeros(2, 1, size, size)).shape == (2, 10)


def build(options):
    size = {"img_size": options.img_size} if takes_img_size(options.model) else {}
    given = {"seed": 0, "num_classes": 10, "in_chans": 1, "model_kwargs": {**size, **options.model_kwargs}}
    return training.build_model(Namespace(**{**vars(options), **given}), 10, 1)


@cache
def takes_img_size(name):
    return grid._takes_img_size(timm.create_model(name))


def test_header_counts_its_runs():
    """`smoke: 4 runs`, `12 runs`, `20 runs`: what the headers say is what there is."""
    for name in TRAINED:
        header = " ".join(design.shipped()[name].read_text().split("title:")[0].replace("#", " ").split())
        for scale in design.SCALES:
            runs = study._run_count(design.load(name, scale))
            said = header.rsplit(f" {scale}: ", 1)[1].split(" runs")[0].rpartition(" ")[2]
            assert said == runs, (name, scale)


# --------------------------------------------------------------------------------------- from file to grid
def test_grid_is_cells_times_connections(tmp_path):
    found = design.load(written(tmp_path), "smoke")
    variants = list(found.variants({"device": "cpu"}))
    assert [(variant.cell, variant.connection) for variant in variants] == [
        ({"lr": lr}, connection) for lr in (1e-3, 1e-2) for connection in ("linear", "feature")]
    assert [variant.options.lr for variant in variants] == [1e-3, 1e-3, 1e-2, 1e-2]
    assert variants[3].name(7) == "lr=0.01-feature-seed7"
    assert variants[0].options.model_kwargs == {
        "embed_dim": 16, "num_heads": 2, "patch_size": 8, "depth": 2, "connection": "linear"}
    assert variants[0].extras == training.Extras(record_every=2, representation=True)


def test_places_go_seed_by_seed_and_share_equal_runs():
    """An eps means nothing to linear connections: one run for all of them."""
    found = design.load("epsilon", "small")
    both = study.Study(replace(found, connections=["linear", "feature"]), {"device": "cpu"}, Path("x"))
    places = list(both.places([0, 1]))
    assert len(places) == 2 * 2 * 6
    assert [seed for _, seed, _ in places] == [0] * 12 + [1] * 12
    linear = {name for variant, _, name in places if variant.connection == "linear"}
    assert linear == {"connection_eps=1e-08-linear-seed0", "connection_eps=1e-08-linear-seed1"}
    assert len(both.jobs([0, 1])) == 2 * (6 + 1)


def test_default_arguments_make_no_difference():
    cells = {variant.cell["probability"]: variant for variant in
             design.load("probability", "small").variants({"device": "cpu"})}
    assert cells[0.0].options.model_kwargs["connection"] == "linear"
    assert cells[0.5].options.model_kwargs["connection_prob"] == 0.5
    assert "connection_prob" not in cells[1.0].options.model_kwargs


def test_switches():
    cells = {variant.cell["switch"]: variant for variant in design.load("switch_kept", "smoke").variants({})}
    assert {cell: (v.connection, v.final_connection, v.extras.switch_to) for cell, v in cells.items()} == {
        "LL": ("linear", "linear", None), "LO": ("linear", "feature", "feature"),
        "OL": ("feature", "linear", "linear"), "OO": ("feature", "feature", None)}
    cells = {v.cell["switch"]: v for v in design.load("switch_reinitialised", "smoke").variants({})}
    assert all(variant.extras.reinitialise for variant in cells.values())
    assert cells["LL"].extras.switch_to == "linear"


def test_paper_scale_takes_the_papers_recipe():
    found = design.load("accuracy", "paper")
    variants = list(found.variants({"dataset": "cifar100", "data_dir": "x", "device": "cpu"}))
    vit = next(variant for variant in variants if variant.cell == {"model": "vit_s"})
    resnet = next(variant for variant in variants if variant.cell == {"model": "resnetv2_34"})
    assert (vit.options.dataset, vit.options.batch_size, vit.options.epochs) == ("torch/cifar100", 1024, 300)
    assert (resnet.options.lr, resnet.options.decay_rate, resnet.options.opt) == (0.1, 0.2, "momentum")
    other = next(iter(found.variants({"dataset": "torch/fashion_mnist", "data_dir": "x", "device": "cpu"})))
    assert other.options.batch_size == 1024
    assert other.options.mean is None  # CIFAR's is CIFAR's


def test_options_of_the_command_line_win():
    found = design.load("dynamics", "smoke")
    variant = next(found.variants({"epochs": 7, "model_kwargs": {"embed_dim": 48}}))
    assert variant.options.epochs == 7
    assert variant.options.model_kwargs["embed_dim"] == 48
    assert variant.options.model_kwargs["num_heads"] == 2


def test_changes_are_named():
    lines = changes(design.load("hybrid", "small"), {"dataset": "digits", "device": "cpu"}, [0, 1, 2])
    for line in ("data set: digits here, tiny_imagenet in the paper", "seeds: 3 here, 5 in the paper",
                 "epochs: 15 here, 300 in the paper", "embed_dim: 64 here, 384 in the paper"):
        assert line in lines
    paper = {"dataset": "tiny_imagenet", "data_dir": "x", "device": "cpu"}
    assert changes(design.load("hybrid", "paper"), paper, range(5)) == []


def test_changes_of_what_trains_nothing_are_named():
    lines = changes(design.load("overhead", "small"), {"device": "cpu"}, [])
    for line in ("batch_size: 8 here, the default at scale paper", "dtypes: float32 here, bfloat16 at scale paper"):
        assert line in lines
    assert changes(design.load("overhead", "paper"), {"device": "cuda"}, []) == []
    assert changes(design.load("gamma", "small"), {"device": "cpu"}, []) == []


def test_families_differ_from_run_to_run_in_nothing_but_the_connection():
    """At every scale; and the small models are small."""
    for scale in design.SCALES:
        variants = list(design.load("families", scale).variants({"dataset": "digits", "device": "cpu"}))
        families = {variant.cell["family"] for variant in variants}
        assert len(families) == (3 if scale == "smoke" else 7)
        for family in families:
            three = [vars(variant.options) for variant in variants if variant.cell["family"] == family]
            assert [options["model_kwargs"].pop("connection") for options in three] == ["linear", "feature", "global"]
            assert three[0] == three[1] == three[2]
    for variant in design.load("families", "small").variants({"dataset": "digits", "device": "cpu"}):
        with timm_ortho.models._build.on_meta():
            assert sum(parameter.numel() for parameter in build(variant.options).parameters()) < 300_000


@pytest.mark.parametrize(("changed", "message"), [
    (dict(grdi={}), "it has no key 'grdi'; the nearest is 'grid'"),
    (dict(title=...), "'title' is missing"),
    (dict(scales={"tiny": {}}), "scales has no key 'tiny'"),
    (dict(scales={"smoke": {"titel": 1}}), "scale 'smoke' has no key 'titel'"),
    (dict(scales={"small": {}}), "it has no scale 'smoke', only small"),
    (dict(options={"epoch": 3}), "options has no key 'epoch'; the nearest is 'epochs'"),
    (dict(grid={"lr": 3}), "axis 'lr' must be a list of values"),
    (dict(grid={"rate": [1, 2]}), "axis 'rate', value '1' has no key 'rate'"),
    (dict(grid={"x": {"a": {"conection": "linear"}}}), "value 'a' has no key 'conection'; the nearest is 'connection'"),
    (dict(grid={"x": {"a": {"switch": {"to": "linear"}}}}), "switch must say to which connection"),
    (dict(grid={"x": {"a": {"switch": {"to": "hybrid", "optimizer": "kept"}}}}), "knows nothing of the parameters"),
    (dict(baseline={"lr": 5}), "the baseline is 5 on axis 'lr', where there is no such value"),
    (dict(kind="dreaming"), "there is no kind 'dreaming'"),
    (dict(seeds=0), "seeds is 0"),
])
def test_bad_study(tmp_path, changed, message):
    values = {**yaml.safe_load(STUDY), **changed}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not ...}))
    if "seeds" in changed:
        path.write_text(path.read_text().replace("seeds: 1", ""))
    with pytest.raises(LabError) as caught:
        design.load(str(path), "smoke")
    assert message in str(caught.value)
    assert str(caught.value).startswith("study 'tiny': ")


@pytest.mark.parametrize(("arguments", "message"), [
    (["run", "acuracy"], "there is no study 'acuracy'; the nearest is 'accuracy' (timm-ortho study list)"),
    (["run", "accuracy", "--threads", "0"], "--threads must be at least 1, got 0"),
    (["run", "accuracy", "--scale", "huge"], "there is no scale 'huge': give smoke, small or paper"),
    (["run", "learning_rate", "-o", "lr=1"], "'lr' is what study 'learning_rate' varies along its axis 'lr'"),
    (["run", "dynamics", "-o", "epoch=1"], "timm's train.py has no option 'epoch'; the nearest is 'epochs'"),
    (["run", "dynamics", "--dataset", "cifar10"],
     "data set 'torch/cifar10' needs --data-dir: timm looks for its files in DATA_DIR/cifar-10-batches-py"),
    (["run", "dynamics", "--dataset", "tiny_imagenet"],
     "an image folder needs --data-dir: timm looks for class folders"),
    (["run", "dynamics", "--dataset", "torch/fashion_mnist", "--data-dir", "nowhere"],
     "let torchvision fetch them with --option dataset_download=true"),
    (["run", "dynamics", "--seeds", "0"], "give at least one seed"),
    (["run", "dynamics", "--workers", "0"], "one worker"),
    (["report", "dynamics"], "has no results of study 'dynamics': timm-ortho study run dynamics makes them"),
])
def test_bad_commands(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["study", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not list(tmp_path.iterdir())


def test_list(capsys):
    assert cli.main(["study", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == NAMES
    assert "Table 4" in next(line for line in lines if line.startswith("layer_pattern"))
    assert next(line for line in lines if line.startswith("families")).split()[1:5] == ["-", "9,", "63,", "105"]


# --------------------------------------------------------------------------------------------- whole studies
@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The file and the folder of a study that was run as a whole."""
    folder = tmp_path_factory.mktemp("study")
    path = written(folder)
    assert run(path, folder / "out") == 0
    return path, folder / "out"


def test_shipped_study_from_run_to_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    began = time.process_time()
    arguments = ["layer_pattern", "--scale", "smoke", "--device", "cpu"]
    assert cli.main(["study", "run", *arguments]) == 0
    (output,) = Path("output", "study").iterdir()
    written = results(output)
    (output / "results.json").unlink()
    capsys.readouterr()
    assert cli.main(["study", "report", *arguments]) == 0
    assert "0,1" in capsys.readouterr().out
    assert time.process_time() - began < 120
    assert results(output)["runs"] == written["runs"]
    assert [item["cell"]["layers"] for item in written["runs"]] == ["none", "0,1", "all"]
    assert [item["connection"] for item in written["runs"]] == ["linear", "feature", "feature"]
    assert written["study"]["command"] == f"timm-ortho study run {' '.join(arguments)}"
    kwargs = [yaml.safe_load((output / f"layers={cell}-seed0" / "args.yaml").read_text())["model_kwargs"]
              for cell in ("none-linear", "0,1-feature", "all-feature")]
    assert [values.get("connection_layers") for values in kwargs] == [None, [0, 1], None]


@pytest.mark.slow
def test_families_from_run_to_report(tmp_path, capsys):
    """Rows are families, columns connections with their differences, and there is no word of a paper."""
    output = tmp_path / "out"
    assert run("families", output) == 0
    assert "3 architectures on digits" in capsys.readouterr().out
    found = results(output)
    assert found["study"]["changed"] == []
    top1 = {(item["cell"]["family"], item["connection"]): item["top1"] for item in found["runs"]}
    assert list(top1) == [(family, connection) for family in ("swin", "mixer", "resnet")
                          for connection in ("linear", "feature", "global")]
    text = (output / "report.md").read_text()
    for family in ("swin", "mixer", "resnet"):
        linear, *others = (top1[family, connection] for connection in ("linear", "feature", "global"))
        cells = [f"{linear:.2f} (1 seed)", "baseline"]
        cells += [cell for value in others for cell in (f"{value:.2f} (1 seed)", f"{value - linear:+.2f}")]
        assert f"| {family} | top-1 % | {' | '.join(cells)} |" in text
    assert "differences.svg" in text
    assert "paper" not in text.lower()


def test_results(tiny):
    _, output = tiny
    assert {item.name for item in output.iterdir() if item.is_dir()} >= {
        f"lr={lr}-{connection}-seed0" for lr in ("0.001", "0.01") for connection in ("linear", "feature")}
    found = results(output)
    assert found["unfinished"] == []
    assert [(item["cell"]["lr"], item["connection"]) for item in found["runs"]] == [
        (0.001, "linear"), (0.001, "feature"), (0.01, "linear"), (0.01, "feature")]
    for item in found["runs"]:
        assert len(item["history"]) == 2
        # 64 images in batches of 16, twice, every second step, two sites in two blocks
        assert [row["step"] for row in item["dynamics"]] == [step for step in (0, 2, 4, 6) for _ in range(4)]
        assert 1.0 <= item["representation"]["effective_rank"] <= 16.0
    ckas = [item["representation"]["linear_cka"] for item in found["runs"]]
    assert (ckas[0], ckas[2]) == (None, None)  # the baselines
    assert 0.0 < ckas[1] < 1.0
    assert found["study"]["axes"] == {"lr": [0.001, 0.01]}
    assert (output / "report.html").is_file()


def test_cka_is_that_of_the_features(tiny):
    _, output = tiny
    found = results(output)["runs"]
    ours = features.representation.linear_cka(*(
        features._stored(output / f"lr=0.001-{connection}-seed0") for connection in ("linear", "feature")))
    assert found[1]["representation"]["linear_cka"] == pytest.approx(ours)


def test_finished_study_is_not_repeated(tiny, monkeypatch):
    path, output = tiny
    monkeypatch.setattr(training.Run, "train", lambda *_: pytest.fail("trained again"))
    assert run(path, output) == 0


def test_report_needs_neither_training_nor_data(tiny, capsys, monkeypatch):
    path, output = tiny
    monkeypatch.setattr(study, "open_source", lambda *_: pytest.fail("opened the data"))
    before = results(output)
    assert cli.main(["study", "report", path, "--scale", "smoke", "--output", str(output)]) == 0
    assert "Does it work?" in capsys.readouterr().out
    assert results(output)["runs"] == before["runs"]


@pytest.mark.slow
def test_two_workers_give_the_same_numbers(tiny, tmp_path):
    path, output = tiny
    assert run(path, tmp_path / "out", workers=2) == 0
    for item in results(output)["runs"]:
        name = f"lr={item['cell']['lr']}-{item['connection']}-seed0"
        assert_same_run(output / name, tmp_path / "out" / name)
        assert "epoch 2/2: top-1" in (tmp_path / "out" / name / workers.LOG).read_text()
    keys = ("top1", "loss", "best_top1", "representation", "dynamics", "probe")
    for one, other in zip(results(output)["runs"], results(tmp_path / "out")["runs"], strict=True):
        assert {key: one[key] for key in keys} == {key: other[key] for key in keys}


def test_grid_may_grow_by_seeds(tmp_path):
    path = written(tmp_path, grid={})
    assert run(path, tmp_path / "out", seeds=1) == 0
    assert run(path, tmp_path / "out", seeds=[4]) == 0
    found = results(tmp_path / "out")
    assert [(item["connection"], item["seed"]) for item in found["runs"]] == [
        ("linear", 0), ("feature", 0), ("linear", 4), ("feature", 4)]


def test_other_settings_and_versions_are_refused(tiny, monkeypatch):
    path, output = tiny
    before = {item: item.read_bytes() for item in output.rglob("*") if item.is_file()}
    with pytest.raises(LabError, match=r"belongs to other settings \(given.epochs is None there and 3 here\)"):
        run(path, output, epochs=3)
    monkeypatch.setattr("timm_ortho.__version__", "9.9")
    with pytest.raises(LabError, match=r"timm_ortho is '0.* there and '9.9' here\): choose another --output"):
        run(path, output)
    assert before == {item: item.read_bytes() for item in output.rglob("*") if item.is_file()}


def test_default_folder_names_study_data_and_scale(tmp_path, monkeypatch):
    def folder(**given):
        return study._study("dynamics", {"device": "cpu", **given}, "small", None).folder

    assert str(folder()).startswith("output/study/dynamics-digits-small-")
    assert folder() == folder()
    assert folder() != folder(epochs=3)


def test_threads_of_what_trains_nothing(monkeypatch, tmp_path):
    """A measure of throughput has the whole machine, unless it is told otherwise."""
    seen = []
    monkeypatch.setattr(cost, "overhead", lambda **given: seen.append(torch.get_num_threads()) or [])
    with grid.limited_threads(3):
        for threads in (None, 2):
            folder = str(tmp_path / str(threads))
            study.run("overhead", {"device": "cpu"}, scale="smoke", threads=threads, output=folder)
    assert seen == [3, 2]


@pytest.mark.parametrize("name", ["parameters", "gamma"])
def test_study_without_training(name, tmp_path, capsys):
    assert run(name, tmp_path / "out") == 0
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert rows[0]["model"].startswith(("vit", "resnetv2"))
    assert results(tmp_path / "out")["runs"] == rows
