"""Runs of a mock of timm's train.py: planning, launching, continuing, switching connections, collecting results."""
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers.tiny_study import SMALL, STAND_IN, TIMED, only_run, planned, request, state, unfinish, written

from timm_ortho import cli
from timm_ortho.lab import LabError, commands as study, folder as folders
from timm_ortho.lab.folder import Variant
from timm_ortho.lab.planning import plan
from timm_ortho.lab.reporting import collect
from timm_ortho.lab.running import launcher, run, timm_script as train_py
from timm_ortho.run_folder import read_options, read_run

pytestmark = pytest.mark.usefixtures("undrawn")
DATA = dict(dataset="", data_dir="/nowhere", num_classes=10)  # the mock does not read data


def tiny(folder, output, *, train_py=STAND_IN, gpus=0, seeds=1, only=(), changes=None, **options):
    path = written(folder, **{"grid": {}, "representation": False, **(changes or {})})
    return request(path, output, seeds=seeds, train_py=train_py, gpus=gpus, only=only, **{**DATA, **options})


def switched(folder, output, optimizer, **options):
    """Return a request for one run with two stages, linear and then feature connections."""
    changes = dict(
        grid={"switch": {"LO": {"connection": "linear", "switch": {"to": "feature", "optimizer": optimizer}}}},
        baseline={"switch": "LO"})
    return tiny(folder, output, changes=changes, **options)


def by_its_script(folder):
    """Train a run with the script that its plan names."""
    return run.run(folder, train_py=Variant.read(folder).trainer)


# ---------------------------------------------------------------------------------------- trained and collected
@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory):
    """Train two connections with two seeds. The run `feature-seed0` is killed in its second epoch."""
    folder = tmp_path_factory.mktemp("train_py")
    experiment = planned(tiny(folder, folder / "out", seeds=2))
    killed = experiment.folder / "feature-seed0" / "killed"
    for name in experiment.runs:
        if name != "feature-seed0":
            (experiment.folder / name / "killed").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_KILL", "1")
        failed = launcher.local(experiment.folder, experiment.runs, parallel=2)
    assert killed.exists()
    assert failed == {}  # a killed script is started again
    assert "ended with exit status -9 after 1 of 2 epochs" in killed.with_name("log.txt").read_text()
    return experiment.folder


@pytest.mark.slow
def test_two_connections_and_two_seeds(two_by_two):
    part = collect.collect([two_by_two])
    assert part.unfinished == []
    assert [(item["connection"], item["seed"], item["top1"]) for item in part.runs] == [
        ("linear", 0, 20), ("linear", 1, 21), ("feature", 0, 20), ("feature", 1, 21)]
    for item in part.runs:
        assert (item["trainer"], item["epochs"], item["model"]) == ("train.py", 2, "vit_small_ortho")
        assert not item.keys() & {*TIMED}  # train.py does not measure them, and reports leave their columns out
        assert [(row["epoch"], row["eval_top1"]) for row in item["history"]] == [
            (0, 10 + item["seed"]), (1, 20 + item["seed"])]
        args = state(two_by_two / f"{item['connection']}-seed{item['seed']}")["args"]
        assert args.model_kwargs == {**SMALL["model_kwargs"], "img_size": 16, "connection": item["connection"]}
        assert (args.seed, args.device_modules, args.epochs) == (item["seed"], ["timm_ortho"], 2)
    assert part.study["seeds"] == [0, 1]


@pytest.mark.slow
def test_a_killed_script_is_continued(two_by_two):
    """After a kill, the script resumes from its last checkpoint and writes a second header into summary.csv."""
    folder = two_by_two / "feature-seed0"
    assert state(folder)["optimizer"] == {"epochs": 2}
    assert (folder / "summary.csv").read_text().count("epoch,") == 2
    assert state(folder)["args"].resume == str(folder / "last.pth.tar")
    assert len(read_run(folder).sessions) == 2


@pytest.fixture(scope="module")
def one_finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_finished")
    experiment = planned(tiny(folder, folder / "out"))
    by_its_script(experiment.folder / "linear-seed0")
    return experiment.folder


@pytest.fixture
def unfinished(one_finished, tmp_path):
    """Return the folder of a study with one finished run, linear with seed 0."""
    return shutil.copytree(one_finished, tmp_path / "out")


def manual_run(study_folder, folder, **changes):
    """Write the folder of a run as if a user had started train.py with a planned run's options and some changes."""
    folder.mkdir()
    args = {**read_options(study_folder / "feature-seed0"), "seed": 7, **changes}
    (folder / "args.yaml").write_text(yaml.safe_dump(args))
    rows = "".join(f"{epoch},1.0,1.0,{40 + epoch},99.0,0.001\n" for epoch in range(args["epochs"]))
    (folder / "summary.csv").write_text(f"epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n{rows}")
    return folder


def test_a_manual_run_joins_a_study(unfinished, tmp_path, monkeypatch, capsys):
    """A manual run may differ from the planned run in options that do not change the result.

    The batch size is not compared, because args.yaml lacks the number of processes.
    """
    hand = manual_run(unfinished, tmp_path / "hand", batch_size=8, pin_mem=True, log_interval=7, aa="", wandb_tags=None,
                      amp_dtype="float16", resume="last.pth.tar", num_classes=None, in_chans=None)
    part = collect.collect([unfinished, hand])
    assert (part.study["seeds"], part.unfinished) == ([0, 7], ["feature-seed0"])
    assert [(item["connection"], item["seed"], item["top1"], item["trainer"]) for item in part.runs] == [
        ("linear", 0, 20, "train.py"), ("feature", 7, 41, "train.py")]
    monkeypatch.setattr(study.report, "write", lambda part, to: f"{len(part.runs)} runs in {to.name}")
    assert cli.main(["study", "report", str(unfinished), str(hand), "--output", str(tmp_path / "report")]) == 0
    assert capsys.readouterr().out.endswith("2 runs in report\n")


@pytest.mark.parametrize("options", [
    {"model_ema": True}, pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"model_ema": True, "model_ema_force_cpu": True}, marks=pytest.mark.slow)])
def test_metrics_of_ema_weights_are_marked(tmp_path, options):
    """With model_ema, train.py writes the metrics of the EMA weights, unless these are on the CPU."""
    folder = planned(tiny(tmp_path, tmp_path / "out", **options)).folder
    by_its_script(folder / "linear-seed0")
    part = collect.collect([folder, manual_run(folder, tmp_path / "hand")])
    assert [run.get("ema") for run in part.runs] == 2 * [True if options == {"model_ema": True} else None]


def test_a_second_run_of_a_seed_is_refused(unfinished, tmp_path):
    """Two runs that a user starts without --seed have the same seed, timm's default."""
    manual = [manual_run(unfinished, tmp_path / name) for name in ("one", "two")]
    with pytest.raises(LabError, match="two is a second run of 'feature' with seed 7: leave one"):
        collect.collect([unfinished, *manual])


def test_epochs_without_validation(unfinished, tmp_path):
    """If train.py's option val_interval is set, some epochs have no metrics. Planned and manual runs may set it."""
    folder = unfinished / "linear-seed0"
    hand = manual_run(unfinished, tmp_path / "hand")
    for path in (folder / "summary.csv", hand / "summary.csv"):
        header, _, *rows = path.read_text().splitlines(keepends=True)
        path.write_text("".join([header, *rows]))
    unfinish(folder)
    assert "stopped  epoch 2 of 2, top-1 20.00 %" in collect.status(unfinished)
    assert [by_its_script(folder)[key] for key in ("epochs", "top1", "best_epoch")] == [2, 20, 1]
    part = collect.collect([unfinished, hand])
    assert [(item["epochs"], len(item["history"])) for item in part.runs] == [(2, 1), (2, 1)]


def test_a_manual_run_with_top1_alone(unfinished, tmp_path):
    """A user's train.py may measure neither top-5 nor the loss."""
    hand = manual_run(unfinished, tmp_path / "hand")
    for name in ("eval_top5", "eval_loss"):
        path = hand / "summary.csv"
        path.write_text(path.read_text().replace(name, f"other_{name}"))
    made = collect.collect([unfinished, hand]).runs[-1]
    assert {"top1", "top5", "loss"} & made.keys() == {"top1"}


def test_a_manual_run_that_fits_no_cell_is_refused(tmp_path, error_of):
    folder = planned(tiny(tmp_path, tmp_path / "out")).folder
    for number, changes in enumerate([
            dict(epochs=3), dict(lr=0.5), dict(workers=3), dict(aa="rand-m9"), dict(hflip=0.0), dict(amp=True),
            dict(model="vit_base_ortho"), dict(model_kwargs={"connection": "feature"}),
            dict(model_kwargs={**SMALL["model_kwargs"], "img_size": 16, "connection": "global"})]):
        hand = manual_run(folder, tmp_path / str(number), **changes)
        assert f"error: {hand} (" in (error := error_of("study", "report", folder, hand))
        assert "matches no cell of this study" in error
        assert ("global" in error) or f"; the most similar run differs in {next(iter(changes))}" in error
    assert ("has no study.yaml: use the --output of timm-ortho study or compare (study report adds runs of train.py to "
            "it)") in error_of("study", "report", hand)
    for file, text, message in (
            ("args.yaml", "model: vit_small\n", "is no run of train.py, which has args.yaml (with model and seed)"),
            ("args.yaml", "model: vit_small\nseed: 1\n", "matches no cell"),
            ("summary.csv", "epoch,train_loss,lr\n0,1.0,0.001\n", "has epochs without eval_top1 in summary.csv")):
        (hand / file).write_text(text)
        assert message in error_of("study", "report", folder, hand)


@pytest.mark.parametrize(("changes", "options", "setting"), [
    ({"hold_out": 8}, {}, "hold_out"), ({}, {"crop_padding": 2}, "crop_padding"),
    ({}, {"rand_augment": [2, 9]}, "rand_augment"), ({}, {}, "train_num_samples")])
def test_a_manual_run_lacks_the_settings_of_the_labs_own_loop(tmp_path, changes, options, setting):
    """train.py ignores these settings, also if its args.yaml contains them."""
    whole = {} if setting == "train_num_samples" else dict(train_num_samples=None, val_num_samples=None, batch_size=64)
    on_device = {"device_images": True} if options else {}
    path = written(tmp_path, grid={}, representation=False, **changes)
    folder = planned(request(path, tmp_path / "out", dataset="digits", **whole, **on_device, **options)).folder
    with pytest.raises(LabError, match=f"matches no cell of this study; the most similar run differs in {setting}"):
        collect.collect([folder, manual_run(folder, tmp_path / "hand")])


# ------------------------------------------------------------------------------------------------- switches
def epochs_seen(folder):
    """Return the epochs that the mock has counted in `head.bias`, the optimizer and the checkpoint."""
    saved = state(folder)
    return round(saved["state_dict"]["head.bias"].mean().item()), saved["optimizer"]["epochs"], saved["epoch"] + 1


@pytest.mark.slow
def test_switch_kept(tmp_path, monkeypatch):
    """The lab stops the script after the first stage. The second stage resumes from its checkpoint."""
    monkeypatch.setenv("STAND_IN_SECONDS", "4")
    folder = only_run(switched(tmp_path, tmp_path / "out", "kept", epochs=2))
    result = by_its_script(folder)
    assert epochs_seen(folder) == (1, 1, 1)
    assert epochs_seen(folder / "switched") == (2, 2, 2)
    assert [state(folder / stage)["args"].model_kwargs["connection"] for stage in (".", "switched")] == [
        "linear", "feature"]
    assert (result["epochs"], result["switch_epoch"], result["connection"]) == (2, 1, "feature")
    assert [row["epoch"] for row in folders.history(folder, Variant.read(folder))] == [0, 1]


@pytest.mark.slow
def test_switch_reinitialised(tmp_path):
    """The second stage starts with the first stage's weights, but with a new optimizer."""
    folder = only_run(switched(tmp_path, tmp_path / "out", "reinitialised", epochs=1))
    result = by_its_script(folder)
    assert epochs_seen(folder) == (1, 1, 1)
    assert epochs_seen(folder / "switched") == (2, 1, 1)
    assert (result["epochs"], result["switch_epoch"], result["connection"]) == (2, 1, "feature")
    assert [row["epoch"] for row in folders.history(folder, Variant.read(folder))] == [0, 1]


def test_a_stage_with_too_many_epochs_is_refused(tmp_path, monkeypatch):
    """The first stage's checkpoint has three epochs, but the connection should have been switched after two."""
    folder = only_run(switched(tmp_path, tmp_path / "out", "kept", epochs=4))
    (folder / "last.pth.tar").touch()
    monkeypatch.setattr(train_py, "_epochs", lambda _: 3)
    with pytest.raises(LabError, match=r"last.pth.tar has 3 epochs, but its stage ends after 2: remove "):
        by_its_script(folder)


def test_commands_of_the_stages(tmp_path):
    """The command of a stage depends on the checkpoints in the run's folder."""
    def words(stage):
        python, script, *rest = train_py.command(one, one.stages[stage], folder)
        assert (python, script) == (sys.executable, str(STAND_IN))
        options = dict(zip(rest[::2], rest[1::2], strict=True))
        path = Path(folder.name, one.stages[stage].folder)
        assert (options.pop("-c"), options.pop("--output"), options.pop("--experiment")) == (
            str(folder.parent / path / "args.yaml"), str(folder.parent), str(path))
        return options

    folder = only_run(switched(tmp_path, tmp_path / "kept", "kept", epochs=4))
    one, first, second = Variant.read(folder), str(folder / "last.pth.tar"), str(folder / "switched" / "last.pth.tar")
    assert words(0) == {}
    assert words(1) == {"--resume": first}
    Path(first).touch()
    assert words(0) == {"--resume": first}
    Path(second).touch()
    assert words(1) == {"--resume": second}
    folder = only_run(switched(tmp_path, tmp_path / "again", "reinitialised", epochs=4))
    one, first, second = Variant.read(folder), str(folder / "last.pth.tar"), str(folder / "switched" / "last.pth.tar")
    assert (words(0), words(1)) == ({}, {"--initial-checkpoint": first})
    Path(second).touch()
    assert words(1) == {"--initial-checkpoint": first, "--resume": second}


# ------------------------------------------------------------------------------------------------- the batch
@pytest.mark.parametrize(("gpus", "nodes", "steps", "each"), [(0, 1, 1, 64), (4, 1, 1, 16), (4, 2, 2, 4)])
def test_the_batch_is_divided_among_processes(tmp_path, capsys, gpus, nodes, steps, each):
    arguments = [
        "study", "plan", written(tmp_path, grid={}, representation=False), "--scale", "smoke", "--dataset", "",
        "--data-dir", "/nowhere", "--train-py", str(STAND_IN), "--gpus", str(gpus), "--nodes", str(nodes),
        "-o", "batch_size=64", "-o", f"grad_accum_steps={steps}", "-o", "num_classes=10",
        "--output", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    processes = max(1, gpus) * nodes
    assert f"linear-seed0: 64 images per update = {processes} processes x {steps} accumulated x {each}\n" in printed
    folder = tmp_path / "out" / "linear-seed0"
    assert f"python -m timm_ortho.lab.running.run {folder} --train-py {STAND_IN}\n" in printed
    on_nodes = ("in a job of sbatch --nodes 2 --ntasks-per-node 1 --gpus-per-node 4, by srun:\n"
                "    NODE_RANK=$SLURM_NODEID MASTER_ADDR=")
    assert (on_nodes in printed) == (nodes == 2)
    words = " ".join(train_py.command(Variant.read(folder), Variant.read(folder).stages[0], folder))
    started = {(0, 1): "", (4, 1): "-m torch.distributed.run --standalone --nproc-per-node 4 ",
               (4, 2): "-m torch.distributed.run --nnodes 2 --node-rank 0 --master-addr localhost --master-port 29500 "
                       "--nproc-per-node 4 "}[gpus, nodes]
    assert words.startswith(f"{sys.executable} {started}{STAND_IN} -c {folder / 'args.yaml'} ")
    args = read_options(tmp_path / "out" / "linear-seed0")
    assert (args["batch_size"], args["device"]) == (each, "cuda" if gpus else args["device"])
    assert (args["amp"], args["amp_dtype"]) == ((True, "bfloat16") if args["device"] == "cuda" else (False, "bfloat16"))
    assert Variant.read(tmp_path / "out" / "linear-seed0").whole_batch == 64


@pytest.mark.parametrize(("script", "data"), [(None, {}), (STAND_IN, DATA)], ids=["lab", "train.py"])
def test_the_batch_of_a_study_does_not_depend_on_the_trainer(tmp_path, script, data):
    """A study's batch_size is the number of images per update. The options of a run have the images per step."""
    folder = only_run(request(written(tmp_path, grid={}), tmp_path / "out", train_py=script,
                              only=[("connection", "feature")], batch_size=16, grad_accum_steps=2, **data))
    one = Variant.read(folder)
    assert (one.stages[0].options["batch_size"], one.whole_batch) == (8, 16)


def test_the_division_of_the_batch_does_not_change_the_run(tmp_path):
    """A run that was planned for two GPUs can be planned again for four."""
    for gpus in (2, 4):
        folder = only_run(tiny(
            tmp_path, tmp_path / "out", gpus=gpus, only=[("connection", "feature")], batch_size=64, device="cuda"))
        assert read_options(folder)["batch_size"] == 64 // gpus
    with pytest.raises(LabError, match=r"batch_size 64 is not divisible by 3 \(3 processes x grad_accum_steps 1"):
        plan.plan(tiny(tmp_path, None, gpus=3, batch_size=64, device="cuda"))


# ----------------------------------------------------------------------------------------------------- errors
def test_errors_of_timms_script(tmp_path):
    """A refused plan writes nothing."""
    def refused(message, changes=None, **options):
        with pytest.raises(LabError, match=message):
            planned(tiny(tmp_path, tmp_path / "out", changes=changes, **options))
        assert not (tmp_path / "out").exists()

    script = tmp_path / "script.py"
    refused(r"there is no .*nowhere.py: use timm's train.py with --train-py, or set TIMM_DIR to its folder: git clone",
            train_py=Path("nowhere.py"))
    script.write_text("print('hello')")
    refused(r"script.py is not timm's train.py \(AttributeError: .*parser", train_py=script)
    script.write_text("import argparse\nparser = argparse.ArgumentParser()\n")
    refused("script.py has no option .*: the script is of another timm release", train_py=script)
    refused("timm's train.py accepts no option 'mixpu'; did you mean 'mixup'", mixpu=1)
    refused("train.py has no option stop_epoch: the script is of another timm release", stop_epoch=1)
    with pytest.raises(LabError, match="--nodes needs --gpus: add the number of GPUs per node"):
        plan.plan(replace(tiny(tmp_path, tmp_path / "out"), nodes=2))
    refused("train.py cannot hold images out: remove --train-py, or set", changes={"hold_out": 8})
    refused("train.py has no data set digits: choose another --dataset, or remove", dataset="digits", data_dir=None)
    refused("vit_small_ortho with connection 'linear': .*depht", model_kwargs={"depht": 3})


def test_warning_that_train_py_takes_all_images(tmp_path, capsys):
    """train.py ignores train_num_samples unless the data set is streamed, such as `wds/...`."""
    warning = "train.py uses train_num_samples for streamed data sets only, and takes all images of"
    for dataset, warns in (("torch/fashion_mnist", True), ("wds/somewhere", False)):
        planned(tiny(tmp_path, tmp_path / dataset, dataset=dataset, train_num_samples=256, val_num_samples=None))
        assert (f"{warning} '{dataset}'\n" in capsys.readouterr().err) == warns


def test_options_that_only_train_py_supports(tmp_path):
    experiment = plan.plan(tiny(tmp_path, None, sched="plateau", kd_model_name="resnet18"))
    assert experiment.runs["linear-seed0"].stages[0].options["sched"] == "plateau"


def test_a_run_cannot_change_its_trainer(tmp_path):
    path = written(tmp_path, grid={}, representation=False)
    options = dict(dataset="torch/fashion_mnist", data_dir="/nowhere", num_classes=10)
    experiment = planned(request(path, tmp_path / "out", train_py=STAND_IN, **options))
    there = experiment.runs["linear-seed0"]
    experiment.runs = {"linear-seed0": folders.replace(there, trainer="lab")}
    with pytest.raises(LabError, match=r"is a run with other options \(trainer was 'train.py' and is now 'lab'"):
        experiment.write()
    experiment.runs = {"linear-seed0": folders.replace(there, trainer="/elsewhere/train.py")}
    experiment.write()


def test_errors_of_a_script_are_reported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STAND_IN.read_text().replace("    import timm\n", "    raise SystemExit('no driver')\n"))
    experiment = planned(tiny(tmp_path, tmp_path / "out", train_py=script, only=[("connection", "linear")]))
    failed = launcher.local(experiment.folder, experiment.runs)
    assert failed == {"linear-seed0": f"{script} ended with exit status 1 after 0 of 2 epochs; no driver, see "
                                      f"{experiment.folder / 'linear-seed0' / 'log.txt'}"}


def test_missing_gpus_are_an_error(tmp_path):
    requested = tiny(tmp_path, tmp_path / "out", gpus=2, batch_size=64)
    with pytest.raises(LabError, match="needs 2 GPUs per node and 1 node, but this machine is one node with 0 GPUs: c"):
        study.run(requested)
