"""`timm-ortho compare` from its options to its report, on a few dozen images and a model that is hardly one."""
import csv
import errno
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from timm.scheduler import PlateauLRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from timm_ortho.lab import LabError, data, grid as grid_module, recipe, report, training, write_json
from timm_ortho.lab.checkpoints import disk_errors
from timm_ortho.lab.compare import compare, plan

# timm's ImageDataset leaves the closing of its files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file.*png:ResourceWarning"), pytest.mark.usefixtures("undrawn")]

TINY = {
    "model": "vit_small",
    "dataset": "",
    "model_kwargs": {"embed_dim": 16, "num_heads": 2, "depth": 2, "patch_size": 8},
    "img_size": 16,
    "epochs": 2,
    "batch_size": 8,
    "workers": 0,
    "seed": 0,
    "device": "cpu",
}
RUN_FILES = {"args.yaml", "summary.csv", "last.pth.tar", "model_best.pth.tar", "history.json", "dynamics.json",
             "result.json"}


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """48 images of two classes, bright and dark, in the layout that timm reads."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 8)):
        for label, low in (("bright", 16), ("dark", 0)):
            folder = root / split / label
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(low, low + 240, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return root


def tiny(images, **changes):
    return {**TINY, "data_dir": str(images), **changes}


def run(images, output, connections=("linear", "feature"), seeds=1, **changes):
    return compare(tiny(images, **changes), recipe_name="small_images", connections=connections, seeds=seeds,
                   output=str(output), threads=1)


def weights(folder):
    return torch.load(folder / "last.pth.tar", weights_only=False)["state_dict"]


def assert_same_weights(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


class Stop(KeyboardInterrupt):
    """Ctrl-C at a moment that the test chooses."""


def stop_after(monkeypatch, epochs):
    """Ctrl-C in the middle of the epoch after `epochs` others, counted over the whole grid."""
    original, calls = training.Run._backward, []

    def backward(self, loss, update):
        calls.append(1)
        if len(calls) > 4 * epochs + 2:  # 32 images in batches of 8
            raise Stop
        original(self, loss, update)

    monkeypatch.setattr(training.Run, "_backward", backward)


# ------------------------------------------------------------------------------------------- a whole grid
@pytest.fixture(scope="session")
def grid(images, tmp_path_factory):
    output = tmp_path_factory.mktemp("grid") / "out"
    assert run(images, output, ("linear", "feature", "global"), seeds=2) == 0
    return output


def test_writes_everything(grid):
    runs = {f"{name}-seed{seed}" for name in ("linear", "feature", "global") for seed in (0, 1)}
    assert {path.name for path in grid.iterdir() if path.is_dir()} == runs
    for name in runs:
        assert {path.name for path in (grid / name).iterdir()} >= RUN_FILES
        assert not list((grid / name).glob(".*partial"))
        rows = list(csv.DictReader((grid / name / "summary.csv").read_text().splitlines()))
        assert list(rows[0]) == ["epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr"]
        assert [row["epoch"] for row in rows] == ["0", "1"]
        result = json.loads((grid / name / "result.json").read_text())
        assert result["top1"] == pytest.approx(float(rows[-1]["eval_top1"]))
        assert result["images_per_second"] > 0


def test_args_are_timms(grid):
    args = yaml.safe_load((grid / "global-seed1" / "args.yaml").read_text())
    assert set(args) <= set(recipe.known_options())
    assert (args["seed"], args["model"], args["device_modules"]) == (1, "vit_small_ortho", ["timm_ortho"])
    assert args["model_kwargs"] == {**TINY["model_kwargs"], "img_size": 16, "connection": "global"}


def test_connections_train_to_different_weights(grid):
    states = [weights(grid / f"{name}-seed0") for name in ("linear", "feature", "global")]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not all(torch.equal(states[one][key], states[other][key]) for key in states[one])


def test_checkpoints_are_timms(grid):
    checkpoint = torch.load(grid / "feature-seed0" / "last.pth.tar", weights_only=False)
    assert checkpoint["epoch"] == 1
    assert checkpoint["arch"] == "vit_small_ortho"
    assert checkpoint["version"] == 2


def test_results_and_table(grid, capsys):
    text = report.write(grid)
    results = json.loads((grid / "results.json").read_text())
    assert len(results["runs"]) == 6
    assert results["unfinished"] == []
    assert [row["connection"] for row in results["summary"]] == ["linear", "feature", "global"]
    by_run = {(item["connection"], item["seed"]): item["top1"] for item in results["runs"]}
    for row in results["summary"]:
        assert row["top1_mean"] == pytest.approx((by_run[row["connection"], 0] + by_run[row["connection"], 1]) / 2)
        if row["connection"] != "linear":
            pairs = [by_run[row["connection"], seed] - by_run["linear", seed] for seed in (0, 1)]
            assert row["difference"]["mean"] == pytest.approx(sum(pairs) / 2)
        assert row["connection"] in text
    assert "vit_small on " in text
    assert "2 epochs, 2 seeds" in text


def test_report_stands_alone(grid):
    page = (grid / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 4
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script" not in page


def test_dynamics_cover_every_epoch_and_site(grid):
    dynamics = json.loads((grid / "linear-seed0" / "dynamics.json").read_text())
    assert [record["epochs_done"] for record in dynamics] == [0, 1, 2]
    assert [(site["layer"], site["kind"]) for site in dynamics[0]["sites"]] == [
        (0, "attention"), (0, "mlp"), (1, "attention"), (1, "mlp")]


def test_finished_runs_are_not_repeated(grid, images, monkeypatch):
    monkeypatch.setattr(training.Run, "train", lambda *_: pytest.fail("trained again"))
    before = {path: path.read_bytes() for path in grid.rglob("result.json")}
    assert run(images, grid, ("linear", "feature", "global"), seeds=2) == 0
    assert before == {path: path.read_bytes() for path in grid.rglob("result.json")}


# ------------------------------------------------------------------------------------------------ pairing
def batches(images, connection, seed, **changes):
    """What a run is given to train on, and what it starts from."""
    comparison = plan(tiny(images, **changes), "small_images", [connection], [seed], "unused")
    job = comparison.job(connection, seed)
    one = training.Run(job.options, comparison.source, job.folder, torch.device("cpu"))
    seen = []
    forward = one.model.forward
    one.model.forward = lambda x: (seen.append(x.clone()), forward(x))[1]
    start = {key: value.clone() for key, value in one.model.state_dict().items()}
    for epoch in range(2):
        training.random_seed(data.epoch_seed(seed, epoch, 0))
        one.data_stream.reseed(data.epoch_seed(seed, epoch, 1))
        one._train_epoch(epoch, lambda *_: None)
    return start, torch.stack(seen)


@pytest.mark.parametrize("no_prefetcher", [False, True])
def test_runs_of_one_seed_are_paired(images, no_prefetcher):
    """Weights, order, augmentation, erasing and mixing agree although one connection draws random numbers and one
    does not; they differ between seeds and epochs."""
    changes = dict(mixup=0.4, cutmix=1.0, reprob=0.5, no_prefetcher=no_prefetcher, drop_path=0.2)
    start, seen = batches(images, "linear", 0, **changes)
    changes["model_kwargs"] = {**TINY["model_kwargs"], "connection_prob": 0.5}
    other_start, other_seen = batches(images, "feature", 0, **changes)
    assert all(torch.equal(start[key], other_start[key]) for key in start)
    assert torch.equal(seen, other_seen)
    third_start, third_seen = batches(images, "linear", 1, **{**changes, "model_kwargs": TINY["model_kwargs"]})
    assert not all(torch.equal(start[key], third_start[key]) for key in start)
    assert not torch.equal(seen, third_seen)
    assert not torch.equal(seen[:4], seen[4:])


# --------------------------------------------------------------------------------------------- continuing
@pytest.mark.parametrize("changes", [
    dict(mixup=0.4, reprob=0.3, drop_path=0.2, model_ema=True, model_ema_decay=0.9),
    pytest.param(
        # top-5 of two classes never improves, so that each epoch lowers the rate
        dict(sched="plateau", sched_on_updates=False, patience_epochs=0, warmup_epochs=0, grad_accum_steps=2,
             eval_metric="top5"),
        marks=[pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated:FutureWarning"),
               pytest.mark.skipif("verbose=" in inspect.getsource(PlateauLRScheduler)
                                  and "verbose" not in inspect.signature(ReduceLROnPlateau).parameters,
                                  reason="this timm's plateau schedule does not run on this torch")]),
    dict(sched_on_updates=True, opt="sgd", smoothing=0.0),
], ids=["mixup-ema", "plateau-accumulation", "per-update"])
def test_continued_run_ends_with_the_same_weights(images, tmp_path, monkeypatch, changes):
    changes = {"epochs": 4, **changes, "model_kwargs": {**TINY["model_kwargs"], "connection_prob": 0.7}}
    assert run(images, tmp_path / "whole", ["feature"], **changes) == 0
    with monkeypatch.context() as context:
        stop_after(context, 2)
        assert run(images, tmp_path / "parts", ["feature"], **changes) == 130
    folder = tmp_path / "parts" / "feature-seed0"
    assert not (folder / "result.json").exists()
    assert torch.load(folder / "last.pth.tar", weights_only=False)["epoch"] == 1
    assert run(images, tmp_path / "parts", ["feature"], **changes) == 0
    whole = tmp_path / "whole" / "feature-seed0"
    assert_same_weights(folder, whole)
    for name in ("summary.csv", "dynamics.json"):
        assert (folder / name).read_text() == (whole / name).read_text()
    both = [json.loads((path / "result.json").read_text()) for path in (folder, whole)]
    keys = ("top1", "loss", "best_top1", "best_epoch")
    assert [both[0][key] for key in keys] == [both[1][key] for key in keys]
    best = [torch.load(path / "model_best.pth.tar", weights_only=False) for path in (folder, whole)]
    assert best[0]["epoch"] == best[1]["epoch"]
    if "model_ema" in changes:
        emas = [torch.load(path / "last.pth.tar", weights_only=False)["state_dict_ema"] for path in (folder, whole)]
        assert all(torch.equal(emas[0][key], emas[1][key]) for key in emas[0])


def test_interrupted_grid_reports_what_is_finished(images, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    with monkeypatch.context() as context:
        stop_after(context, 3)  # the second epoch of the second run
        assert run(images, output) == 130
    results = json.loads((output / "results.json").read_text())
    assert [item["connection"] for item in results["runs"]] == ["linear"]
    assert results["unfinished"] == ["feature-seed0"]
    assert "Not finished: feature-seed0" in (output / "report.html").read_text()
    captured = capsys.readouterr()
    assert "not finished: feature-seed0" in captured.out
    assert "the same command again continues" in captured.err


def test_interrupted_before_the_first_epoch(images, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as context:
        stop_after(context, 0)
        assert run(images, tmp_path / "out") == 130
    assert "no run is finished yet" in capsys.readouterr().out
    assert run(images, tmp_path / "out") == 0


def test_killed_while_copying_the_best(images, tmp_path, monkeypatch):
    """A kill after `last.pth.tar` was replaced leaves the copies of it missing or half written."""
    output = tmp_path / "out"
    with monkeypatch.context() as context:
        stop_after(context, 1)
        run(images, output, ["linear"], eval_metric="top5")  # 100 % of two classes: the first epoch stays the best
    folder = output / "linear-seed0"
    (folder / "model_best.pth.tar").write_bytes(b"half")
    (folder / "checkpoint-0.pth.tar").unlink()
    (folder / "tmp.pth.tar").write_bytes(b"half")
    assert run(images, output, ["linear"], eval_metric="top5") == 0
    for name in ("model_best", "checkpoint-0"):
        assert torch.load(folder / f"{name}.pth.tar", weights_only=False)["epoch"] == 0


def test_damaged_checkpoint_is_named(images, tmp_path, monkeypatch):
    output = tmp_path / "out"
    with monkeypatch.context() as context:
        stop_after(context, 1)
        run(images, output, ["linear"])
    last = output / "linear-seed0" / "last.pth.tar"
    for path in last.parent.glob("*.pth.tar"):
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(LabError, match=r"last.pth.tar cannot be continued .*; remove .*linear-seed0 to train it anew"):
        run(images, output, ["linear"])
    assert last.stat().st_size == 1000


@pytest.mark.parametrize("kept", [1, 2])
def test_damaged_checkpoint_gives_way_to_an_older_one(images, tmp_path, monkeypatch, capsys, kept):
    """The epochs in between are trained again, and come out as they were."""
    # 100 % of two classes: the first epochs stay the best
    changes = dict(epochs=4, eval_metric="top5", checkpoint_hist=kept)
    assert run(images, tmp_path / "whole", ["feature"], **changes) == 0
    output = tmp_path / "out"
    with monkeypatch.context() as context:
        stop_after(context, 3)
        run(images, output, ["feature"], **changes)
    last = output / "feature-seed0" / "last.pth.tar"
    last.write_bytes(last.read_bytes()[:-5000])
    assert run(images, output, ["feature"], **changes) == 0
    assert "last.pth.tar cannot be read" in (said := capsys.readouterr().err)
    assert f"going back to epoch {kept}\n" in said
    assert_same_weights(output / "feature-seed0", tmp_path / "whole" / "feature-seed0")
    assert (last.parent / "summary.csv").read_text() == (
        tmp_path / "whole" / "feature-seed0" / "summary.csv").read_text()


@pytest.mark.parametrize(("error", "advice"), [
    (OSError(errno.ENOSPC, "No space left on device"), "make room and give"),
    (RuntimeError("unexpected pos 64 vs 0"), "make room and give"),  # torch's writer
    (PermissionError(errno.EACCES, "Permission denied"), "see to the folder and give"),
])
def test_advice_follows_what_the_system_says(tmp_path, error, advice):
    with pytest.raises(LabError, match=advice), disk_errors(tmp_path):
        raise error


@pytest.mark.parametrize(
    "where", ["checkpoint", *(pytest.param(where, marks=pytest.mark.slow) for where in ("history", "result"))])
def test_full_disk_is_one_line_and_loses_nothing(images, tmp_path, monkeypatch, where):
    output = tmp_path / "out"
    with monkeypatch.context() as context:
        stop_after(context, 3)  # the linear run is finished, the other has one epoch
        run(images, output)
    finished = {path: path.read_bytes() for path in (output / "linear-seed0").rglob("*") if path.is_file()}
    with monkeypatch.context() as context:
        fill_disk(context, where)
        with pytest.raises(LabError, match=r"cannot write in .*feature-seed0 \(No space left on device\): make room"):
            run(images, output)
    assert not list((output / "feature-seed0").glob("*partial"))
    assert not (output / "feature-seed0" / "tmp.pth.tar").exists()
    assert all(path.read_bytes() == content for path, content in finished.items())
    assert run(images, output) == 0
    assert run(images, tmp_path / "whole", ["feature"]) == 0
    assert_same_weights(output / "feature-seed0", tmp_path / "whole" / "feature-seed0")


def fill_disk(context, where):
    """No room for a file's last bytes: for checkpoints in torch's writer, for the others when they are synchronised."""
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "checkpoint":
        def save(_, path):
            Path(path).write_bytes(b"half")
            full()

        context.setattr("timm.utils.checkpoint_saver.torch.save", save)
        return
    original = os.fsync

    def fsync(descriptor):
        if f".{where}.json" in os.readlink(f"/proc/self/fd/{descriptor}"):
            full()
        original(descriptor)

    context.setattr("os.fsync", fsync)


@pytest.mark.slow
def test_checkpoint_that_torch_cannot_write_whole(images, tmp_path):
    """A real limit of the file size, at which torch's own writer fails: it says so in its own words."""
    code = """
import resource, sys
from timm_ortho import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
sys.exit(cli.main(sys.argv[1:]))
"""
    arguments = ["compare", "--data-dir", images, "--recipe", "small_images", "--connections", "linear", "--seeds", "1",
                 "--epochs", "1", "-b", "8", "-j", "0", "--img-size", "16", "--device", "cpu", "--output",
                 tmp_path / "out",
                 "--model-kwargs", "embed_dim=16", "num_heads=2", "depth=2", "patch_size=8"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "timm-ortho: error: cannot write in" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out" / "linear-seed0" / "result.json").exists()


# ---------------------------------------------------------------------------------------------- the folder
def test_other_settings_are_refused(grid, images):
    before = {path: path.read_bytes() for path in grid.rglob("*") if path.is_file()}
    with pytest.raises(LabError, match=r"belongs to other settings \(lr is 0.001 there and 0.5 here\): choose another"):
        run(images, grid, lr=0.5)
    assert before == {path: path.read_bytes() for path in grid.rglob("*") if path.is_file()}


def test_results_of_another_version_are_refused(images, tmp_path, monkeypatch):
    output = tmp_path / "out"
    assert run(images, output, ["linear"], epochs=1) == 0
    monkeypatch.setattr("timm_ortho.__version__", "9.9")
    with pytest.raises(LabError, match=r"other settings \(timm_ortho is '0.*' there and '9.9' here\): choose another"):
        run(images, output, ["linear"], epochs=1)


def test_a_run_of_other_options_is_refused(images, tmp_path):
    """The folder's settings are these, and one run in it was copied from elsewhere."""
    for name, lr in (("one", 0.5), ("other", 0.1)):
        assert run(images, tmp_path / name, ["linear"], epochs=1, lr=lr) == 0
    (tmp_path / "one" / "linear-seed0").rename(tmp_path / "other" / "linear-seed1")
    with pytest.raises(LabError, match=r"linear-seed1 is a run of other options \(lr is 0.5 there and 0.1 here; seed"):
        run(images, tmp_path / "other", ["linear"], seeds=2, epochs=1, lr=0.1)


def test_foreign_folder_is_refused(images, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(LabError, match=r"holds 'thesis.tex' and no compare.yaml, so it is not compare's"):
        run(images, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_folder_in_use_is_refused(images, tmp_path):
    comparison = plan(tiny(images), "small_images", ["linear"], 1, str(tmp_path / "out"))
    claimed = grid_module.claimed(comparison.folder, "compare", vars(comparison.options), {})
    with claimed, pytest.raises(LabError, match="another timm-ortho compare is at work"):
        run(images, tmp_path / "out", ["linear"])


def test_grid_may_grow(images, tmp_path):
    output = tmp_path / "out"
    assert run(images, output, ["linear"], epochs=1) == 0
    assert run(images, output, ["feature"], seeds=[0, 5], epochs=1) == 0
    results = json.loads((output / "results.json").read_text())
    assert {(item["connection"], item["seed"]) for item in results["runs"]} == {
        ("linear", 0), ("feature", 0), ("feature", 5)}
    assert results["unfinished"] == ["linear-seed5"]
    feature = next(row for row in results["summary"] if row["connection"] == "feature")
    assert feature["difference"]["pairs"] == 1  # seed 5 has no partner


def test_default_folder_follows_the_settings(images):
    def folder(**changes):
        return plan(tiny(images, **changes), "small_images", ["linear"], 1, None).folder

    assert folder() == folder()
    assert folder() != folder(lr=0.5)


# ------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(("changes", "message"), [
    (dict(model="vit_smal"), r"no orthogonal variant of 'vit_smal'; the nearest are vit_small,"),
    (dict(model_kwargs={"depht": 2}), r"vit_small_ortho with connection 'linear': .*depht"),
    (dict(model_kwargs={"connection_eps": 0}), r"eps must be positive"),
    (dict(model_kwargs={"connection": "feature"}), r"use --connections"),
    (dict(batch_size=64), r"batch_size 64 is larger than the training set of 32 images"),
    (dict(batch_size=7, mixup=0.2), r"mixup and cutmix need an even batch_size, not 7"),
    (dict(epochs=0), r"epochs must be at least 1, got 0"),
    (dict(num_classes=1), r"num_classes=1 is too few for data set '', which has 2 classes"),
    (dict(device="cuda:99"), r"PyTorch sees no device 'cuda:99' here: use --device cpu"),
    (dict(opt="adamm"), r"timm cannot make a run of these options: .*adamm"),
    (dict(sched="plateau"), r"timm cannot make a run of these options: Plateau LR only supports step per epoch"),
    (dict(device="abacus"), r"there is no device 'abacus'"),
    (dict(amp=True, amp_dtype="int8"), r"amp_dtype is 'int8'"),
])
def test_bad_options(images, tmp_path, changes, message):
    with pytest.raises(LabError, match=message):
        run(images, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()  # or the corrected command would find a folder of other settings


def test_unknown_connection(images, tmp_path):
    with pytest.raises(LabError, match=r"unknown connection 'featur', known are 'linear', .* did you mean 'feature'"):
        run(images, tmp_path / "out", ["linear", "featur"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("dataset", "message"), [
    ("torch/fashion_mnist", r"'torch/fashion_mnist' \(train\) is not there: timm looks for its files in .*Fashion"),
    ("torch/fashion_mist", r"'torch/fashion_mist' \(train\) is not there: .* it knows torch/cifar10"),
    ("", r"timm looks for class folders in .*train and .*val"),
])
def test_missing_data(tmp_path, dataset, message):
    with pytest.raises(LabError, match=message) as caught:
        run(tmp_path, tmp_path / "out", dataset=dataset)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_data_without_a_folder(tmp_path):
    with pytest.raises(LabError, match=r"data set 'torch/cifar10' needs --data-dir"):
        run("", tmp_path / "out", dataset="torch/cifar10")


def test_validation_on_training_images_is_refused(images, tmp_path):
    with pytest.raises(LabError, match="training and validation images would both come from"):
        run(images / "train", tmp_path / "out")


# ------------------------------------------------------------------------------------------------- the rest
def test_digits_are_split_by_class_and_without_overlap():
    train, validation = data.Digits(True), data.Digits(False)
    assert (len(train), len(validation)) == (1437, 360)
    assert min(np.bincount(validation.targets)) >= 34
    assert not {image.tobytes() for image in train.images} & {image.tobytes() for image in validation.images}
    assert train[0][0].mode == "L"
    assert train[0][0].size == (8, 8)


@pytest.mark.parametrize(("given", "channels"), [
    ({}, 1), ({"in_chans": 3}, 3), ({"input_img_mode": "RGB"}, 3), ({"in_chans": 1}, 1)])
def test_grey_images_reach_the_model_in_its_channels(given, channels):
    source = plan({"device": "cpu", **given}, "digits", ["linear"], 1, "unused").source
    assert (source.in_chans, source.num_classes, source.train[0][0].shape) == (channels, 10, (channels, 16, 16))


@pytest.mark.parametrize("given", [{"dataset": "digits"}, {}], ids=["digits", "folder"])
def test_fewer_images_are_taken_evenly(images, given):
    """In a folder the classes follow one another: the first images would all be of one."""
    wanted = dict(train_num_samples=8, val_num_samples=1000)
    whole = data.open_source(plan({**tiny(images), **given}, "small_images", ["linear"], 1, "unused").options)
    part = data.open_source(plan({**tiny(images), **given, **wanted}, "small_images", ["linear"], 1, "unused").options)
    assert (len(part.train), len(part.validation)) == (8, len(whole.validation))
    assert part.num_classes == whole.num_classes
    step = len(whole.train) / 8
    for index in range(8):
        assert part.train[index] == whole.train[int(index * step)]


def test_recipe_of_another_model_keeps_its_own_arguments():
    options = plan({"model": "resnetv2_18_cifar_orthog", "device": "cpu"}, "digits", ["linear"], 1, "unused").options
    assert options.model == "resnetv2_18_cifar_ortho"
    assert options.model_kwargs == {}
    assert options.img_size is None


def test_amp_on_the_cpu(images, tmp_path):
    assert run(images, tmp_path / "out", ["feature"], epochs=1, amp=True) == 0
    args = yaml.safe_load((tmp_path / "out" / "feature-seed0" / "args.yaml").read_text())
    assert args["amp_dtype"] == "bfloat16"


@pytest.mark.slow
def test_compiled_model_trains_to_what_the_model_trains_to(images, tmp_path):
    for name, backend in (("eager", None), ("compiled", "aot_eager")):
        assert run(images, tmp_path / name, ["feature"], epochs=1, torchcompile=backend) == 0
    one, other = (weights(tmp_path / name / "feature-seed0") for name in ("eager", "compiled"))
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-3, atol=1e-4)


def test_no_threads(tmp_path):
    with pytest.raises(LabError, match="--threads must be at least 1, got 0"):
        compare({}, output=str(tmp_path / "out"), threads=0)
    assert not (tmp_path / "out").exists()


def test_threads_are_put_back(images, tmp_path):
    before = torch.get_num_threads()
    run(images, tmp_path / "out", ["linear"], epochs=1)
    assert torch.get_num_threads() == before


def test_interval_is_students():
    # differences 1, 2, 3: mean 2, s 1, t(0.975, 2) = 4.302653
    difference = report.paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert difference.mean == pytest.approx(2.0)
    assert difference.half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert str(report.paired_difference([2.0], [1.0])) == "+1.00 (one pair, no interval)"


def test_files_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": float("nan"), "b": [1.0]})
    assert json.loads(path.read_text()) == {"a": None, "b": [1.0]}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": None, "b": [1.0]}


def test_death_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})

    def die(*_):
        raise Stop

    monkeypatch.setattr("os.fsync", die)
    with pytest.raises(Stop):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
