"""planning/: plan the runs of studies and of `timm-ortho compare`, and write the runs' folders."""
from pathlib import Path

import pytest
import timm
import yaml
from helpers.tiny_study import SMALL, STAND_IN, STUDY, change_run, compared, one_run, planned, request, written

from timm_ortho import cli
from timm_ortho._images import data_config
from timm_ortho._text import UserError
from timm_ortho.lab import LabError, commands as study
from timm_ortho.lab.folder import Stage, Variant, read_study
from timm_ortho.lab.planning import design, identity, plan
from timm_ortho.lab.planning.request import Request
from timm_ortho.lab.running import launcher
from timm_ortho.lab.train_options import defaults
from timm_ortho.run_folder import read_options


# ------------------------------------------------------------------------------------------ cells and runs
def test_grid_is_cells_times_connections_seed_by_seed(tmp_path):
    found = planned(request(written(tmp_path), tmp_path / "out", seeds=[7, 2]))
    cells = [({"lr": lr}, connection) for lr in (1e-3, 1e-2) for connection in ("linear", "feature")]
    wanted = [(*cell, seed) for seed in (2, 7) for cell in cells]
    places = read_study(tmp_path / "out")["places"]
    assert [(place["cell"], place["connection"], place["seed"]) for place in places] == wanted
    assert list(found.runs) == [f"lr={cell['lr']}-{name}-seed{seed}" for seed in (7, 2) for cell, name in cells]
    run = Variant.read(tmp_path / "out" / "lr=0.01-feature-seed7")
    assert (run.trainer, run.record, run.representation, run.epochs, run.switch_epoch) == ("lab", 2, True, 2, None)
    options = run.stages[0].options
    assert (options["lr"], options["seed"], options["num_classes"], options["in_chans"]) == (1e-2, 7, 10, 1)
    assert options["model_kwargs"] == {
        "embed_dim": 16, "num_heads": 2, "patch_size": 8, "depth": 2, "img_size": 16, "connection": "feature"}
    assert options == read_options(tmp_path / "out" / "lr=0.01-feature-seed7")


def test_equal_runs_are_shared(tmp_path):
    """Linear connections ignore eps, so all cells that differ only in eps share one run. A name may be repeated."""
    path = written(tmp_path, connections=["linear", "feature", "feature"], grid={"connection_eps": [1e-8, 1e-6, 1e-4]})
    found = plan.plan(request(path, tmp_path / "out", seeds=2))
    assert len(found.points) == 2 * 2 * 3
    assert len(found.runs) == 2 * (1 + 3)
    assert {place["run"] for place in found.points if place["connection"] == "linear"} == {
        "connection_eps=1e-08-linear-seed0", "connection_eps=1e-08-linear-seed1"}


@pytest.mark.parametrize("grid", [
    {"rank": {"1/2": {"lr": 0.1}, "1:2": {"lr": 0.2}}},
    {"rank": {"half": {"connections": ["linear", "global"], "switch": {"to": "feature", "optimizer": "kept"}}}},
])
def test_different_runs_have_different_names(tmp_path, grid):
    with pytest.raises(LabError, match=r"two different runs have the name 'rank=.*-seed0': change the label"):
        plan.plan(request(written(tmp_path, grid=grid, baseline={}), tmp_path / "out"))


def test_switches(tmp_path):
    """A switch replaces the connections during a run, here after half of its epochs.

    If the optimizer is kept, both halves share one schedule. If it is reinitialised, each half has its own
    schedule of all epochs, so the run has twice as many epochs.
    """
    def stages(optimizer, epochs):
        grid = {"switch": {first + second: {"connection": first, "switch": {"to": second, "optimizer": optimizer}}
                           for first in ("linear", "feature") for second in ("linear", "feature")}}
        path = written(tmp_path, grid=grid, baseline={"switch": "linearlinear"})
        found = plan.plan(request(path, tmp_path / "out", epochs=epochs))
        return {place["cell"]["switch"]: found.runs[place["run"]] for place in found.points}, found.points

    runs, places = stages("kept", 5)
    # The report shows a switched run under the connection after the switch.
    assert [place["connection"] for place in places] == ["linear", "feature", "linear", "feature"]
    assert {cell: [stage.connection for stage in run.stages] for cell, run in runs.items()} == {
        "linearlinear": ["linear"], "linearfeature": ["linear", "feature"], "featurelinear": ["feature", "linear"],
        "featurefeature": ["feature"]}
    run = runs["linearfeature"]
    assert [(stage.folder, stage.begins_with, stage.stop_epoch) for stage in run.stages] == [
        (".", "", 2), ("switched", "checkpoint", None)]
    assert (run.epochs, run.switch_epoch, run.offset(run.stages[1])) == (5, 2, 0)
    runs, _ = stages("reinitialised", 5)
    assert [len(run.stages) for run in runs.values()] == [2] * 4
    run = runs["linearfeature"]
    assert [(stage.begins_with, stage.stop_epoch) for stage in run.stages] == [("", None), ("weights", None)]
    assert (run.epochs, run.switch_epoch, run.offset(run.stages[1])) == (10, 5, 5)
    with pytest.raises(LabError, match="a connection cannot be switched within one epoch"):
        stages("kept", 1)


@pytest.mark.parametrize(("options", "epochs"), [
    ({}, 10), ({"lr_cycle_limit": 2}, 20), ({"lr_cycle_limit": 2, "lr_cycle_mul": 2.0, "sched_on_updates": True}, 30),
    ({"cooldown_epochs": 3}, 13), ({"cooldown_epochs": 3, "sched": "step"}, 10),
    ({"warmup_prefix": True, "warmup_epochs": 4}, 14), ({"sched": "plateau"}, 10), ({"sched": "none"}, 10),
])
def test_a_stage_has_as_many_epochs_as_timms_script_trains(options, epochs):
    """timm's script adds epochs for further cycles, a cooldown and a warmup prefix, if the schedule can have cycles.

    `step` cannot have cycles, so its cooldown adds no epochs.
    """
    assert Stage(".", {**defaults(), "epochs": 10, **options}).last_epoch == epochs
    with pytest.raises(LabError, match=r"timm cannot make a schedule 'cosin': .*cosin.*: correct the options"):
        Stage(".", {**defaults(), "sched": "cosin"}).last_epoch  # noqa: B018


def test_only_some_cells(tmp_path):
    path = written(tmp_path)

    def names(*only):
        return list(plan.plan(request(path, tmp_path / "out", only=only)).runs)

    assert names(("lr", "0.01")) == ["lr=0.01-linear-seed0", "lr=0.01-feature-seed0"]
    assert names(("lr", "0.01"), ("connection", "feature")) == ["lr=0.01-feature-seed0"]
    assert names(("lr", "1e-3"), ("lr", "0.01")) == names(("lr", "0.001,1e-2")) == names()
    with pytest.raises(LabError, match=r"--only lr=high: the values of lr are 1e-3; 0.01"):
        names(("lr", "high"))
    with pytest.raises(LabError, match="--only depth: the study has no such axis, only lr, connection"):
        names(("depth", "3"))
    long = request(written(tmp_path, grid={"epochs": [10000, 20000, 30]}), tmp_path / "out",
                   only=[("epochs", "10000,20000")])
    assert [variant.cell["epochs"] for variant in long.select(long.design.variants({}))] == [10000, 10000, 20000, 20000]


def test_a_value_that_contains_a_comma_can_be_selected():
    found = design.load("layer_pattern", "smoke")
    picked = Request(found, {}, only=[("layers", "0,1")]).select(found.variants({"dataset": "digits", "device": "cpu"}))
    assert {variant.cell["layers"] for variant in picked} == {"0,1"}


def test_the_data_set_is_that_of_the_command_or_study_or_recipe(tmp_path, error_of):
    """The default data set does not replace the data set of the study or of its recipe."""
    own = written(tmp_path, options={"dataset": "torch/fashion_mnist", "data_dir": "nowhere"})
    with pytest.raises(LabError, match="'torch/fashion_mnist'"):
        plan.plan(request(own, tmp_path / "out"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{dataset: torch/cifar10, img_size: 8, in_chans: 1}", encoding="utf-8")
    with pytest.raises(LabError, match="'torch/cifar10'"):
        plan.plan(request(written(tmp_path, recipe=str(recipe)), tmp_path / "out"))
    both = written(tmp_path, recipe=str(recipe), options={"dataset": "digits"})
    for found in (request(both), request(own, dataset="digits"), request(written(tmp_path))):
        assert {run.stages[0].options["dataset"] for run in plan.plan(found).runs.values()} == {"digits"}
    assert "data set 'torch/cifar10' needs --data-dir" in error_of("study", "plan", "dynamics", "-o", "dataset=cifar10")


def test_paper_scale_uses_the_papers_recipe():
    found = design.load("accuracy", "paper")
    variants = found.variants({"dataset": "cifar100", "data_dir": "x", "device": "cpu"})
    vit = next(variant for variant in variants if variant.cell == {"model": "vit_s"})
    resnet = next(variant for variant in variants if variant.cell == {"model": "resnetv2_34"})
    assert (vit.options.dataset, vit.options.batch_size, vit.options.epochs) == ("torch/cifar100", 1024, 300)
    assert (resnet.options.lr, resnet.options.decay_rate, resnet.options.opt) == (0.1, 0.2, "momentum")


def test_cells_without_a_recipe_of_the_paper_are_left_out(tmp_path, monkeypatch, capsys):
    arguments = ["study", "plan", "accuracy", "--scale", "paper", "--dataset", "imagenet1k", "--data-dir", "nowhere",
                 "--train-py", str(STAND_IN), "--seeds", "1", "--device", "cpu", "--output", str(tmp_path / "out"),
                 "--only", "model=vit_s"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said if "images per update" in line] == [
        f"model=vit_s-{connection}-seed0" for connection in ("linear", "feature")]
    assert "left out: resnetv2_18_cifar: the paper has no recipe for imagenet1k" in said
    assert len(read_study(tmp_path / "out")["left_out"]) == sum(line.startswith("left out") for line in said) == 4
    monkeypatch.setattr(launcher, "local", lambda *_: {})
    assert cli.main(["study", "run", *arguments[2:]]) == 0
    assert "timm-ortho: left out: resnetv2_18_cifar: the paper has no recipe for imagenet1k" in capsys.readouterr().err
    nothing = request("accuracy", tmp_path / "out", scale="paper", dataset="torch/fashion_mnist", train_py=STAND_IN)
    with pytest.raises(LabError, match="nothing of study 'accuracy' can be run: vit_small: the paper has no recipe"):
        plan.plan(nothing)


def test_ignored_options_are_named_once(capsys):
    plan.plan(compared(log_interval=7, log_wandb=True))
    assert capsys.readouterr().err == "timm-ortho: the lab's own loop ignores log_interval, log_wandb\n"
    plan.plan(compared())
    assert capsys.readouterr().err == ""


def test_mean_and_std_of_a_recipe_are_averaged_for_grey_images():
    model = timm.create_model("vit_test_linear", in_chans=1)
    config = data_config(model, {"mean": [0.1, 0.2, 0.6], "std": [0.5]}, 1)
    assert (config["mean"], config["std"]) == (pytest.approx((0.3,)), (0.5,))


def test_model_kwargs_of_a_recipe_do_not_apply_to_another_model():
    found = plan.plan(study.Request(
        study.comparison(["linear"], "digits"), {"model": "resnetv2_18_cifar_orthog", "device": "cpu"}, seeds=1))
    options = found.runs["linear-seed0"].stages[0].options
    assert (options["model"], options["model_kwargs"]) == ("resnetv2_18_cifar_ortho", {"connection": "linear"})
    assert options["img_size"] is None


def test_a_wrong_layout_is_an_error_before_the_first_run(tmp_path):
    path = written(tmp_path, report={"rows": ["rate"]})
    with pytest.raises(LabError, match="rate"):
        study.make_plan(request(path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_seeds_are_a_number_or_a_list(tmp_path):
    def seeds(given, **options):
        found = plan.plan(compared(tmp_path / "out", ["linear"], given, **options))
        return [place["seed"] for place in found.points]

    assert seeds(2) == [0, 1]
    assert seeds(2, seed=5) == [5, 6]
    assert seeds([4, 0, 4]) == [4, 0]
    with pytest.raises(LabError, match="choose at least one seed"):
        seeds(0)


# ---------------------------------------------------------------------------------------------- the folder
def test_options_of_the_machine_do_not_change_the_folder(tmp_path):
    def folder(**given):
        return plan.plan(request("dynamics", **given)).folder

    first = folder()
    assert str(first).startswith("output/study/dynamics-digits-smoke-")
    assert folder(validation_batch_size=2, pin_mem=True) == first
    mixed = written(tmp_path, grid={"depth": {2: {}, "all": {"lr": 0.1}}})
    assert str(plan.plan(request(mixed)).folder).startswith("output/study/tiny-digits-smoke-")
    assert len({first, folder(epochs=3), folder(seed=1), folder(workers=2)}) == 4
    assert str(plan.plan(compared()).folder).startswith("output/compare/digits-vit_small-")
    assert plan.plan(compared()).folder != plan.plan(compared(lr=0.5)).folder
    out = tmp_path / "out"
    planned(compared(out))
    planned(compared(out, pin_mem=True))
    assert read_options(out / "linear-seed0")["pin_mem"] is True
    with pytest.raises(LabError, match="PyTorch sees no device 'cuda:99' on this machine: use --device cpu"):
        plan.plan(compared(out, device="cuda:99"))


def test_the_number_of_workers_is_a_setting(tmp_path):
    """Each worker draws its own random numbers for the augmentation, so both runs of a pair need the same number."""
    out, wanted = tmp_path / "out", r"has other settings \(workers was 0 and is now 2\): choose another --output"
    folder = one_run(out, "linear", workers=0)
    with pytest.raises(LabError, match=wanted):
        planned(compared(out, ["feature"], workers=2))  # the partner of the planned run
    with pytest.raises(LabError, match=wanted):
        planned(compared(out, ["linear"], workers=2))
    assert read_options(folder)["workers"] == Variant.read(folder).stages[0].options["workers"] == 0


def test_the_files_of_a_finished_run_are_kept(tmp_path):
    """They describe its training. A later command may have another machine, and the files of unfinished runs get it."""
    out = tmp_path / "out"
    finished = one_run(out, "linear")
    change_run(finished, result={})
    before = contents(finished)
    planned(compared(out, pin_mem=True))
    assert contents(finished) == before
    assert read_options(out / "feature-seed0")["pin_mem"] is True


def test_the_device_is_not_a_setting():
    found = study.comparison(["linear"], "digits")
    cpu, cuda = (identity.study_settings(found, given, found.variants(given)[0])
                 for given in ({"device": "cpu"}, {"device": "cuda"}))
    assert cpu == cuda


def test_a_folder_may_grow(tmp_path):
    out = tmp_path / "out"
    planned(compared(out, ["linear"]))
    found = planned(compared(out, ["feature"], seeds=[0, 5]))
    assert [(place["connection"], place["seed"]) for place in read_study(out)["places"]] == [
        ("linear", 0), ("feature", 0), ("feature", 5)]
    described = read_study(out)["study"]
    assert (described["seeds"], described["connections"]) == ([0, 5], ["linear", "feature"])
    assert (found.study["seeds"], found.study["connections"]) == ([0, 5], ["feature"])  # of this command
    assert list(found.runs) == ["feature-seed0", "feature-seed5"]


def test_the_description_of_a_folder_that_grows(tmp_path):
    """It covers the points of all commands."""
    def described(only, seeds, name=None, **options):
        planned(request(name or path, tmp_path / (name or "out"), only=[("net", only)] if only else (), seeds=seeds,
                        **options))
        return read_study(tmp_path / (name or "out"))["study"]

    path = written(tmp_path, paper="", grid={"net": {"small": {}, "base": {"model": "vit_base", "img_size": 24}}})
    first = described("small", [0])
    assert (first["model"], first["data"]["image_size"]) == ("vit_small", [16, 16])
    both = described("base", [1])
    assert (both["model"], both["seeds"], both["data"]["image_size"]) == ("2 architectures", [0, 1], None)
    assert any("seeds 4 (3)" in line for line in described("", [0, 1, 2, 3], "layer_pattern")["changed"])
    assert any("seeds 5 (3)" in line for line in described("", [4], "layer_pattern")["changed"])


def test_a_folder_may_grow_with_arguments_of_connections(tmp_path):
    """Each connection gets the arguments that it accepts."""
    out, kwargs = tmp_path / "out", {"connection_prob": 0.5}
    planned(compared(out, ["feature"], model_kwargs=kwargs))
    both = planned(compared(out, ["linear", "feature", "hybrid"], model_kwargs=kwargs))
    assert [run.stages[0].options["model_kwargs"].get("connection_prob") for run in both.runs.values()] == [
        None, 0.5, None]
    assert read_study(out)["settings"]["given"]["model_kwargs"] == {**SMALL["model_kwargs"], **kwargs}
    with pytest.raises(LabError, match=r"settings \(model_kwargs.connection_keep was None and is now 'branch'\)"):
        planned(compared(out, model_kwargs={**kwargs, "connection_keep": "branch"}))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_settings_are_refused(tmp_path):
    out = tmp_path / "out"
    planned(compared(out))
    path = written(tmp_path)
    planned(request(path, tmp_path / "study"))
    before = contents(tmp_path)
    with pytest.raises(LabError, match=r"out has other settings \(lr was 0.001 and is now 0.5\): choose"):
        planned(compared(out, lr=0.5))
    with pytest.raises(LabError, match=r"other settings \(epochs was None and is now 3\): choose another"):
        planned(request(path, tmp_path / "study", epochs=3))
    with pytest.raises(LabError, match=r"has other settings \(design.name was 'compare' and is now 'tiny'"):
        planned(request(path, out))
    assert contents(tmp_path) == before
    path = written(tmp_path, grid={"lr": [1.0e-3, 1.0e-2], "depth": {3: {"model_kwargs": {"depth": 3}}}})
    with pytest.raises(LabError, match=r"settings \(grid.depth.3.options.model_kwargs.depth was None and is now 3\)"):
        planned(request(path, tmp_path / "study"))


def test_a_run_of_other_options_is_refused(tmp_path):
    """The output folder already contains a run, `linear-seed1`, that was planned with another learning rate."""
    for name, lr in (("one", 0.5), ("other", 0.1)):
        planned(compared(tmp_path / name, ["linear"], lr=lr))
    (tmp_path / "one" / "linear-seed0").rename(tmp_path / "other" / "linear-seed1")
    with pytest.raises(LabError, match=r"seed1 is a run with other options \(lr was 0.5 and is now 0.1; seed was"):
        planned(compared(tmp_path / "other", ["linear"], seeds=2, lr=0.1))


def test_foreign_folders_are_refused(tmp_path):
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    with pytest.raises(LabError, match=r"contains 'thesis.tex' but no study.yaml, so no study wrote it: choose"):
        planned(compared(foreign))
    with pytest.raises(LabError, match=r"thesis\.tex is not a folder: choose another --output"):
        planned(compared(foreign / "thesis.tex"))
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "study.yaml").write_text("a: [1")
    with pytest.raises(LabError, match=r"study\.yaml cannot be read \(.*: remove .*damaged, or choose another --ou"):
        planned(compared(damaged))
    (damaged / "study.yaml").write_text("[1]\n")
    with pytest.raises(LabError, match=r"study\.yaml cannot be read \(it is \[1\], but must be a mapping\): remove .*"):
        read_study(damaged)


def test_a_run_without_a_whole_plan_is_refused_and_kept(tmp_path):
    """The plan is missing in a folder of an earlier version, or incomplete in a copy."""
    folder = one_run(tmp_path / "out", "linear")
    whole = (folder / "run.json").read_text()
    for text, reason in ((None, "has no run.json, so this version"), (whole[:100], r"cannot be read \(Unterminated"),
                         ("[1]", r"cannot be read \(it is \[1\], but must be a mapping\): copy it again, or remove ")):
        (folder / "run.json").unlink() if text is None else (folder / "run.json").write_text(text)
        (folder.parent / ".lock").touch()
        before = contents(folder.parent)
        for command in (lambda: planned(compared(tmp_path / "out", ["linear"])),
                        lambda: study.run(compared(tmp_path / "out", ["linear"])),
                        lambda: study.status(folder.parent), lambda: study.report_on([folder.parent])):
            with pytest.raises(UserError, match=reason) as caught:
                command()
            assert "\n" not in str(caught.value)
            assert contents(folder.parent) == before


def test_a_study_extends_another(tmp_path):
    (tmp_path / "base.yaml").write_text(STUDY)
    own = tmp_path / "own.yaml"
    own.write_text("extends: base.yaml\ntitle: And again?\noptions: {seed: 100}\nscales: {smoke: {seeds: 4}}\n")
    base, found = (design.load(str(path), "smoke") for path in (tmp_path / "base.yaml", own))
    assert (found.name, found.title, found.seeds) == ("own", "And again?", 4)
    assert found.options == {**base.options, "seed": 100}
    assert (found.grid, found.connections, found.record) == (base.grid, base.connections, base.record)
    own.write_text("extends: layer_pattern\nscales: {smoke: {grid: {layers: [none, all]}}}\n")
    assert design.load(str(own), "smoke").axes == {"layers": ["none", "all"]}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["compare", "accuracy"])
def test_a_users_study_may_have_a_name_of_this_package(tmp_path, name):
    """The file defines the study even if this package has a command or a study of the same name.

    The differences from the paper are those from the file's own scale `paper`.
    """
    values = yaml.safe_load(STUDY)
    scales = {**values["scales"], "paper": {"recipe": "digits", "options": {"epochs": 77}, "seeds": 4}}
    path = Path(written(tmp_path, scales=scales, representation=False)).rename(tmp_path / f"{name}.yaml")
    requested = request(str(path), tmp_path / "out", epochs=1, only=[("connection", "linear"), ("lr", "1e-3")])
    found = planned(requested)
    assert found.study["scale"] == "smoke"
    assert "seeds 1 (4)" in found.study["changed"][0]


def test_null_means_the_default(tmp_path):
    path = written(tmp_path, baseline=None, hold_out=None, representation=None)
    found = design.load(path, "smoke")
    assert (found.baseline, found.hold_out, found.representation) == ({"connection": "linear"}, 0, False)


def test_an_empty_file_is_not_a_study(tmp_path):
    (tmp_path / "tiny.yaml").write_text("")
    with pytest.raises(LabError, match="study 'tiny': 'title' is missing"):
        design.load(str(tmp_path / "tiny.yaml"), "smoke")


def test_printed_commands_are_quoted(tmp_path, capsys):
    output = tmp_path / "o ut"
    assert cli.main(["study", "plan", "dynamics", "--scale", "smoke", "--device", "cpu", "--output", str(output),
                     "--threads", "3"]) == 0
    assert f"python -m timm_ortho.lab.running.run '{output}/linear-seed0' --threads 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(("base", "message"), [
    ("layer_patern", "there is no study 'layer_patern'; did you mean 'layer_pattern'"),
    ("own.yaml", "study 'own' extends itself"),
    ("other.yaml", "study 'own' extends itself"),
    ("list.yaml", r"study 'list.yaml', extended by study 'own', must be a mapping, not \['own'\]"),
])
def test_bad_extends(tmp_path, base, message):
    (tmp_path / "other.yaml").write_text(f"extends: ../{tmp_path.name}/own.yaml\n")
    (tmp_path / "list.yaml").write_text("[own]\n")
    (tmp_path / "own.yaml").write_text(f"extends: {base}\n")
    with pytest.raises(LabError, match=message):
        design.load(str(tmp_path / "own.yaml"), "smoke")


# ------------------------------------------------------------------------------ the differences from the paper
def lines(name, scale, dataset, seeds=5, device="cpu"):
    options = {"dataset": dataset, "data_dir": "x", "device": device}
    return plan.not_as_in_the_paper(design.load(name, scale), options, range(seeds))


def test_a_small_scale_names_its_changes():
    line, = lines("hybrid", "small", "digits", 3)
    assert line.startswith("Not as in the paper (its value in brackets): data set digits (tiny_imagenet), seeds 3 (5)")
    for change in ("epochs 15 (300)", "embed_dim 64 (default)", " mixup 0.0 (0.8)", " aa"):
        assert change in line


@pytest.mark.parametrize(("name", "dataset", "seeds", "device"), [
    ("accuracy", "cifar10", 5, "cpu"), ("accuracy", "imagenet1k", 3, "cuda:1"), ("skips_branch4", "svhn", 5, "cpu")])
def test_the_papers_own_values_are_no_differences(name, dataset, seeds, device):
    line, = lines(name, "paper", dataset, seeds, device)
    assert line.startswith("timm lacks some options of the paper. The recipes explain")


def test_the_first_version_has_three_runs_on_imagenet():
    accuracy = design.load("accuracy", "paper")
    assert [accuracy.seeds_on(data) for data in ("cifar10", "imagenet1k", "tfds/imagenet1k")] == [5, 3, 3]
    assert design.load("accuracy", "smoke").seeds_on("imagenet1k") == 1


def test_a_study_without_a_paper_differs_from_none():
    assert lines("families", "small", "digits") == []
