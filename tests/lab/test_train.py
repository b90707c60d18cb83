"""The lab's training loop: its data, its files, and continued runs. Tiny models train in this process."""
import errno
import json
import os
import resource
from argparse import Namespace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import timm
import torch
from helpers.tiny_study import (
    BATCHES,
    SMALL,
    assert_same_run,
    compared,
    one_run,
    only_run,
    planned,
    rates,
    request,
    result_of,
    state,
    stopped,
    switching,
    trained,
    training,
    written,
)

from timm_ortho.lab import LabError, commands, data, whole_file, write_json
from timm_ortho.lab.folder import Variant, read_lines
from timm_ortho.lab.planning import plan
from timm_ortho.lab.running import loop as train, run
from timm_ortho.lab.train_options import DEVICE_OPTIONS, known_options
from timm_ortho.run_folder import CheckpointRun, read_history, read_options, read_run

KWARGS = SMALL["model_kwargs"]
WHOLE = dict(train_num_samples=None, val_num_samples=None)


def planned_options(**options):
    """Return the options of a planned run without writing the run's folder."""
    experiment = plan.plan(compared("unused", ["linear"], **options))
    return Namespace(**experiment.runs["linear-seed0"].stages[0].options)


# ---------------------------------------------------------------------------------------------- a run's files
@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return trained(request(written(folder, grid={}), folder / "out"))


def test_files(study):
    for name in ("linear-seed0", "feature-seed0"):
        folder = study / name
        assert {path.name for path in folder.iterdir()} - {".lock"} == {
            "run.json", "args.yaml", "probe.jsonl", "records.jsonl", "summary.csv", "last.pth.tar", "features.npy"}
        header, *rows = (folder / "summary.csv").read_text().splitlines()
        assert header.split(",") == [
            "epoch", "train_loss", *(f"train_{key}" for key in ("images_per_second", "seconds", "peak_memory")),
            "eval_loss", "eval_top1", "eval_top5", "lr"]
        assert [row.split(",")[0] for row in rows] == ["0", "1"]
        history, result = read_history(folder), result_of(folder)
        assert [row["epoch"] for row in history] == [0, 1]
        assert result["top1"] == history[-1]["eval_top1"] == float(rows[-1].split(",")[6])
        assert result["images_per_second"] == fmean(row["train_images_per_second"] for row in history)  # 2 epochs
        assert (result["trainer"], result["connection"], result["seed"]) == ("lab", name.split("-")[0], 0)
        assert 1.0 <= result["representation"]["effective_rank"] <= 16.0
        # Two epochs have eight steps. Every second step is recorded, at the attention and the MLP of two blocks.
        records = read_lines(folder / "records.jsonl")
        assert [row["step"] for row in records] == [step for step in (0, 2, 4, 6) for _ in range(4)]
        probes = read_lines(folder / "probe.jsonl")
        assert [row["epochs_done"] for row in probes] == [0, 1, 2]
        assert [(site["layer"], site["kind"]) for site in probes[0]["sites"]] == [
            (0, "attention"), (0, "mlp"), (1, "attention"), (1, "mlp")]
        (session,) = read_run(folder).sessions
        assert session["begin"] <= session["end"]


def test_args_are_timms_options(study):
    args = read_options(study / "feature-seed0")
    assert set(args) == set(known_options()) - {*DEVICE_OPTIONS, "weights"}
    assert (args["seed"], args["model"], args["device_modules"]) == (0, "vit_small_ortho", ["timm_ortho"])
    assert args["model_kwargs"] == {**KWARGS, "img_size": 16, "connection": "feature"}


def test_timm_loads_checkpoints(study):
    folder = study / "feature-seed0"
    checkpoint = state(folder)
    assert (checkpoint["epoch"], checkpoint["arch"], checkpoint["version"]) == (1, "vit_small_ortho", 2)
    model = timm.create_model(
        checkpoint["arch"], num_classes=10, in_chans=1, checkpoint_path=str(folder / "last.pth.tar"),
        **read_options(folder)["model_kwargs"])
    assert all(torch.equal(value, checkpoint["state_dict"][key]) for key, value in model.state_dict().items())


def test_finished_runs_are_not_repeated(study, monkeypatch):
    monkeypatch.setattr(train.Training, "train", lambda *_: pytest.fail("a finished run was trained again"))
    assert run.run(study / "linear-seed0") == result_of(study / "linear-seed0")


# ------------------------------------------------------------------------------------------------ pairing
def batches(connection, seed, **changes):
    """Return the initial weights of a run, and the batches of its first two epochs."""
    one, seen = training(connection=connection, seed=seed, **changes), []
    forward = one.model.forward
    one.forward = one.model
    one.model.forward = lambda x: (seen.append(x.clone()), forward(x))[1]
    start = {key: value.clone() for key, value in one.model.state_dict().items()}
    for epoch in range(2):
        train.random_seed(data.epoch_seed(seed, epoch, 0))
        one.data.reseed(data.epoch_seed(seed, epoch, 1))
        one._train_epoch(epoch)
    return start, torch.stack(seen)


def test_runs_of_one_seed_are_paired():
    """Initial weights depend only on the seed, and batches only on seed and epoch, even if a connection is random."""
    options = dict(mixup=0.4, cutmix=1.0, reprob=0.5, drop_path=0.2)
    start, seen = batches("linear", 0, **options)
    other_start, other_seen = batches("feature", 0, model_kwargs={"connection_prob": 0.5}, **options)
    assert all(torch.equal(start[key], other_start[key]) for key in start)
    assert torch.equal(seen, other_seen)
    third_start, third_seen = batches("linear", 1, **options)
    assert not all(torch.equal(start[key], third_start[key]) for key in start)
    assert not torch.equal(seen, third_seen)
    assert not torch.equal(seen[:BATCHES], seen[BATCHES:])


# ---------------------------------------------------------------------------------------- continued runs
@pytest.mark.parametrize("options", [
    dict(mixup=0.4, reprob=0.3, drop_path=0.2, model_ema=True, model_ema_decay=0.9),
    dict(grad_accum_steps=3, batch_size=48, sched="step", decay_epochs=1, sched_on_updates=False),
    dict(sched_on_updates=True, opt="sgd", smoothing=0.0, lr_noise=[0.5, 1.0], warmup_epochs=1),
], ids=["mixup-ema", "step-accumulation", "per-update"])
def test_continued_run_ends_with_the_same_weights(tmp_path, monkeypatch, options):
    options = dict(epochs=4, model_kwargs={"connection_prob": 0.7}, **options)
    whole, parts = (one_run(tmp_path / name, **options) for name in ("whole", "parts"))
    run.run(whole)
    stopped(parts, monkeypatch, 2 * BATCHES + 2)
    assert state(parts)["epoch"] == 1
    assert result_of(parts) is None
    run.run(parts)
    assert_same_run(parts, whole)
    made = read_run(parts).made_with
    assert len(made["continued"]) == 1
    assert made["begin"] <= made["continued"][0]["begin"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run that was not interrupted."""
    folder = one_run(tmp_path_factory.mktemp("whole") / "out")
    run.run(folder)
    return folder


@pytest.fixture(scope="module")
def switches(tmp_path_factory):
    """Train a run whose connection changes after half of its epochs, for each `optimizer` setting of such a switch.

    Return the study's file and the run's folder by setting. The runs are not interrupted.
    """
    runs = {}
    for optimizer, options in (("kept", dict(model_ema=True, model_ema_warmup=True, grad_accum_steps=2, batch_size=32)),
                               ("reinitialised", dict(model_ema=True, model_ema_decay=0.9))):
        folder = tmp_path_factory.mktemp(optimizer)
        path = written(folder, **switching(optimizer, **options))
        runs[optimizer] = path, only_run(request(path, folder / "whole"))
        run.run(runs[optimizer][1])
    return runs


@pytest.mark.parametrize(("optimizer", "epoch"), [
    *(("kept", epoch) for epoch in range(4)), *(("reinitialised", epoch) for epoch in range(8))])
def test_a_switch_continues_from_any_epoch(optimizer, epoch, tmp_path, switches, monkeypatch):
    """The connection changes after half of the epochs. Runs are stopped before, at and after the switch."""
    path, whole = switches[optimizer]
    parts = only_run(request(path, tmp_path / "parts"))
    stopped(parts, monkeypatch, BATCHES * epoch + 2)
    run.run(parts)
    assert_same_run(parts, whole)


def test_schedules_of_kept_and_reinitialised_switches(switches):
    """A kept optimizer has one cosine schedule over all epochs. A reinitialised optimizer has one in each stage."""
    again, kept = (rates(switches[optimizer][1]) for optimizer in ("reinitialised", "kept"))
    assert len(again) == 8
    assert again[:4] == again[4:]
    assert again[0] > again[3]
    assert len(kept) == 4
    assert kept == sorted(kept, reverse=True)
    assert kept == pytest.approx(again[:4], rel=0.2)
    for optimizer, updates in (("reinitialised", 4 * BATCHES), ("kept", 4 * BATCHES // 2)):
        groups = state(switches[optimizer][1] / "switched")["optimizer"]["state"].values()
        assert {group["step"].item() for group in groups} == {updates}  # updates since the optimizer was created


@pytest.mark.parametrize("optimizer", ["kept", "reinitialised"])
def test_a_published_switch_has_the_metrics_of_its_last_weights(optimizer, switches):
    """If the optimizer is reinitialised, both stages number epochs from 0. The second stage's metrics are published."""
    folder = switches[optimizer][1]
    published = CheckpointRun(folder, ema=True)
    assert published.evaluated["eval_top1"] == result_of(folder)["top1"]
    assert not published.chosen_on_validation


def test_a_switch_replaces_only_the_connections(switches):
    """The second stage starts with the first stage's last weights and different connections."""
    for optimizer in ("reinitialised", "kept"):
        folder = switches[optimizer][1]
        assert [state(folder / stage)["args"].model_kwargs["connection"] for stage in (".", "switched")] == [
            "global", "feature"]
        result = result_of(folder)
        assert (result["connection"], result["switch_epoch"]) == ("feature", 4 if optimizer == "reinitialised" else 2)
        planned_run = Variant.read(folder)
        stage = planned_run.stages[1]
        options = run._options(planned_run, stage, folder)
        one = train.Training(planned_run, stage, folder, data.open_source(options), options)
        assert {(site.connection.name, site.connection.prob) for site in one.sites} == {("feature", 0.7)}
        if optimizer == "reinitialised":
            before = state(folder)["state_dict_ema"]  # timm prefers a checkpoint's EMA weights
            assert all(torch.equal(value, before[key]) for key, value in one.model.state_dict().items())


# --------------------------------------------------------------------------------------------------- errors
def test_a_damaged_checkpoint_is_a_one_line_error(tmp_path, monkeypatch, capsys):
    folder = one_run(tmp_path / "out")
    stopped(folder, monkeypatch, BATCHES + 1)
    last = folder / "last.pth.tar"
    last.write_bytes(last.read_bytes()[:1000])
    assert run.main([str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"timm-ortho: {last} cannot be read (")
    assert line.endswith(f": remove {folder} to train the run again")
    assert last.stat().st_size == 1000
    assert read_run(folder).last_session["error"] == line.removeprefix("timm-ortho: ")

    save, times = run.save, []

    def full_at_the_end(*arguments):
        times.append(arguments)
        if len(times) > 1:
            raise LabError("the disk is full")
        save(*arguments)

    monkeypatch.setattr(run, "save", full_at_the_end)
    assert run.main([str(folder)]) == 2
    assert {*capsys.readouterr().err.splitlines()} == {"timm-ortho: the disk is full", line}


def test_a_training_that_ends_too_early_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(train.Training, "train", lambda _: None)
    with pytest.raises(LabError, match=r"linear-seed0 has 0 of 2 epochs after its training ended: see log\.txt"):
        run.run(one_run(tmp_path / "out", "linear"))


def test_incomplete_lines_are_rewritten(tmp_path, monkeypatch, whole):
    parts = one_run(tmp_path / "parts")
    stopped(parts, monkeypatch, BATCHES + 1)
    for name in ("summary.csv", "probe.jsonl"):
        with open(parts / name, "a") as file:
            file.write('{"epoch": 1, "tr')
    run.run(parts)
    assert_same_run(parts, whole)


@pytest.mark.parametrize("left", ["epoch,train_loss\n", None])
def test_a_file_with_lost_rows_is_refused(tmp_path, monkeypatch, capsys, left):
    folder = one_run(tmp_path / "out")
    stopped(folder, monkeypatch, BATCHES + 1)
    if left is None:
        (folder / "summary.csv").unlink()
    else:
        (folder / "summary.csv").write_text(left)
    assert run.main([str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"timm-ortho: {folder / 'summary.csv'} has lost rows: remove {folder} to train the run again\n")


@pytest.mark.parametrize("file", ["last.pth.tar", "summary.csv", "run.json"])
def test_a_full_disk_is_a_one_line_error_and_loses_nothing(tmp_path, monkeypatch, capsys, whole, file):
    folder = one_run(tmp_path / "out")
    stopped(folder, monkeypatch, BATCHES + 1)
    with monkeypatch.context() as context:
        fill_disk(context, file)
        assert run.main([str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    reason = "File too large" if file == "last.pth.tar" else "No space left on device"
    assert line == (f"timm-ortho: {folder / file} cannot be written ({reason}): free disk space or correct the "
                    "permissions, and repeat the command")
    assert not list(folder.glob(".*partial"))
    run.run(folder)
    assert_same_run(folder, whole)


def fill_disk(context, file):
    """Make writing ``file`` fail. torch.save fails at a limit of the size, whose error is not that of a full disk."""
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if file == "last.pth.tar":
        original, before = torch.save, resource.getrlimit(resource.RLIMIT_FSIZE)

        def save(*arguments):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
            try:
                original(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        context.setattr("timm_ortho.lab.running.loop.torch.save", save)
    elif file == "summary.csv":
        context.setattr("timm_ortho.lab.running.loop.update_summary", full)
    else:
        original = os.fsync
        context.setattr("os.fsync", lambda descriptor: full() if f".{file}" in os.readlink(
            f"/proc/self/fd/{descriptor}") else original(descriptor))


def test_two_processes_can_write_the_same_file(tmp_path):
    path = tmp_path / "study.yaml"
    with whole_file(path, ".1") as first, whole_file(path, ".2") as second:
        first.write(b"one")
        second.write(b"two")
    assert path.read_text() == "one"
    assert [item.name for item in tmp_path.iterdir()] == ["study.yaml"]


def test_json_files_are_written_atomically(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_json(path, {"a": float("nan"), "b": [1.0]})
    assert json.loads(path.read_text()) == {"a": None, "b": [1.0]}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", die)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": None, "b": [1.0]}


# --------------------------------------------------------------------------------------------------- the data
def test_digits_are_split_by_class_and_without_overlap():
    training, validation = data.Digits(True), data.Digits(False)
    assert (len(training), len(validation)) == (1437, 360)
    assert min(np.bincount(validation.targets)) >= 34
    assert not {image.tobytes() for image in training.images} & {image.tobytes() for image in validation.images}
    assert training[0][0].mode == "L"
    assert training[0][0].size == (8, 8)


@pytest.mark.parametrize(("changes", "channels"), [
    ({}, 1), ({"in_chans": 3}, 3), ({"input_img_mode": "RGB"}, 3), ({"in_chans": 1}, 1)])
def test_grey_images_have_the_channels_of_the_model(changes, channels):
    one = training(**changes)
    source = data.open_source(one.options)
    assert (one.options.in_chans, one.options.num_classes) == (source.in_chans, source.num_classes) == (channels, 10)
    assert next(iter(one.train_loader))[0].shape == (16, channels, 16, 16)


@pytest.mark.parametrize("model", ["vit_test", "resnetv2_18_cifar"])
def test_grey_images_have_the_size_of_the_model(model):
    """If the chosen model is not the model of the recipe, its default image size replaces the recipe's size."""
    changes = dict(model=model, img_size=None, in_chans=1, model_kwargs={})
    request = commands.Request(commands.comparison(["linear"], None), {"device": "cpu", **changes}, seeds=1)
    (planned_run,) = plan.plan(request).runs.values()
    options = planned_run.stages[0].options
    size = timm.get_pretrained_cfg(f"{model}_ortho").input_size[1:]
    assert tuple(options["input_size"]) == (1, *size)  # train.py reads this option
    source = data.open_source(Namespace(**options))
    one = train.Training(planned_run, planned_run.stages[0], Path("unused"), source, Namespace(**options))
    assert next(iter(one.train_loader))[0].shape[1:] == (1, *size)


@pytest.mark.parametrize("changes", [{}, {"dataset": ""}], ids=["digits", "folder"])
def test_fewer_images_are_evenly_spaced(class_folders, changes):
    """Subsets are evenly spaced, because the first images of a folder all have the same class."""
    changes = {"batch_size": 8, **changes, **({"data_dir": str(class_folders)} if changes else {})}
    whole = data.open_source(planned_options(**changes, **WHOLE))
    part = data.open_source(planned_options(**changes, train_num_samples=8, val_num_samples=1000))
    assert (len(part.train), len(part.validation)) == (8, len(whole.validation))
    assert part.num_classes == whole.num_classes
    step = len(whole.train) / 8
    for index in range(8):
        assert part.train[index] == whole.train[int(index * step)]


def test_held_out_images_are_excluded_from_training(class_folders):
    options = planned_options(dataset="", data_dir=str(class_folders), **WHOLE)
    whole = data.open_source(options)
    source = data.open_source(options, hold_out=4)
    train_on, held_out = ([part.index.tolist() for part in (source.train, source.validation)])
    assert len(held_out) == 4
    assert sorted(train_on + held_out) == list(range(len(whole.train)))
    assert source.validation[0] == whole.train[held_out[0]]
    assert {target for _, target in (source.validation[i] for i in range(4))} == set(range(source.num_classes))
    with pytest.raises(LabError, match=f"hold_out is 500, but must be from 1 to {len(whole.train) - 1}"):
        data.open_source(options, hold_out=500)


def test_hold_out_of_a_study(tmp_path, monkeypatch):
    """If a study holds out images of the training split, its runs are evaluated on these images."""
    path = written(tmp_path, grid={}, connections=["feature"], hold_out=40)
    experiment = planned(request(path, tmp_path / "out", val_num_samples=None))
    assert experiment.study["validation"] == "hold-out"
    sources = []
    monkeypatch.setattr(run, "open_source", lambda *args: sources.append(data.open_source(*args)) or sources[-1])
    result = run.run(experiment.folder / "feature-seed0")
    assert result["hold_out"] == 40
    (source,) = sources
    training = {image.tobytes() for image in data.Digits(True).images}
    assert len(source.validation) == 40
    assert all(source.validation.dataset.images[index].tobytes() in training for index in source.validation.index)


# ---------------------------------------------------------------------------------- memory format, precision
@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_last(channels_last):
    one = training(channels_last=channels_last, in_chans=3)
    for tensor in (one.model.patch_embed.proj.weight, one.model.patch_embed.proj(next(iter(one.train_loader))[0])):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_amp_on_the_cpu(tmp_path, monkeypatch):
    dtypes = []
    original = train.record_dynamics
    monkeypatch.setattr(train, "record_dynamics", lambda *arguments: dtypes.append(
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))) or original(*arguments))
    folder = one_run(tmp_path / "out", epochs=1, amp=True)
    run.run(folder)
    assert read_options(folder)["amp_dtype"] == "bfloat16"
    assert set(dtypes) == {(True, torch.bfloat16)}


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_weights(tmp_path):
    folders = [one_run(tmp_path / str(backend), epochs=1, torchcompile=backend) for backend in (None, "aot_eager")]
    for folder in folders:
        run.run(folder)
    one, other = (state(folder)["state_dict"] for folder in folders)
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-3, atol=1e-4)
