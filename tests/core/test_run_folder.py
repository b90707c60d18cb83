"""Test reading training runs from their folders."""
import math
import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.pickles import never_unpickled
from helpers.tiny_study import change_run, compared, planned, request, result_of, switching, trained, unfinish, written
from helpers.trained_runs import timm_run

from timm_ortho import sites
from timm_ortho._text import UserError
from timm_ortho._yaml import dump_yaml
from timm_ortho.hub import export
from timm_ortho.lab import commands as study
from timm_ortho.lab.image_folder import class_names
from timm_ortho.run_folder import CheckpointRun, RunError, read_history, read_options, run_model
from timm_ortho.weights.files import load_checkpoint


@pytest.mark.parametrize("allowed", [[], [Namespace]])
@pytest.mark.parametrize("read", [CheckpointRun, lambda folder: load_checkpoint(folder / "last.pth.tar")])
def test_reading_a_checkpoint_does_not_change_torch(tmp_path, read, allowed):
    """torch's list of classes that checkpoints may contain (safe globals) stays the same."""
    folder, before = timm_run(tmp_path / "run", epochs=1), torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals(allowed)
        assert read(folder) is not None
        assert torch.serialization.get_safe_globals() == allowed
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_a_new_argument_of_the_connection_keeps_the_others(tmp_path):
    folder = timm_run(tmp_path / "run", epochs=1)
    run = CheckpointRun(folder)
    run.options["model_kwargs"] = {**(run.options.get("model_kwargs") or {}), "connection_eps": 0.5}
    for overrides, prob in (({}, 1.0), ({"connection_prob": 0.5}, 0.5)):
        connection = sites(run_model(run, **overrides))[0].connection
        assert (connection.eps, connection.prob) == (0.5, prob)


@pytest.mark.parametrize("name", ["summary.csv", "args.yaml"])
def test_a_file_that_is_cut_is_an_error(tmp_path, name):
    folder = timm_run(tmp_path / "run")
    text = (folder / name).read_text()
    (folder / name).write_text(text[:text.rindex("30.25") + 1] if name == "summary.csv" else text.rstrip())
    with pytest.raises(UserError, match=rf"{name} .*is incomplete, because its last line has no newline"):
        CheckpointRun(folder)
    assert [row["epoch"] for row in read_history(folder)] == ([0, 1] if name == "summary.csv" else [0, 1, 2])


def test_a_run_whose_model_timm_would_download(tmp_path):
    folder = timm_run(tmp_path / "run", epochs=1)
    run = CheckpointRun(folder)
    run.options["model"] = "hf-hub:me/my-model"
    with pytest.raises(RunError, match=r"the model 'hf-hub:me/my-model' of .* is not an architecture; build the model"):
        run_model(run)


@pytest.mark.parametrize("content", [
    "epoch,eval_top1\n0,abc\n", "top1\n1.0\n", "epoch\n0\n\xff", "epoch\n" + "9" * 400 + "\n",
    "epoch,eval_top1\n0,101\n", "epoch,train_loss\n0,1e200\n", "epoch" + 99 * ",a" + 3 * "\n0" + "\n"])
def test_a_damaged_history_is_refused_in_one_line(tmp_path, content, monkeypatch):
    monkeypatch.setattr("timm_ortho._text.FIELDS", 200)
    folder = timm_run(tmp_path / "run", epochs=1)
    (folder / "summary.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"summary.csv is not a table of epochs \(.*\): remove it$"):
        CheckpointRun(folder)


def test_a_pipe_is_not_read(tmp_path):
    """To open a pipe waits for a writer."""
    os.mkfifo(tmp_path / "args.yaml")
    with pytest.raises(RunError, match=r"args.yaml cannot be read \(it is not a file\)"):
        read_options(tmp_path)


def test_class_names():
    torchvisions = SimpleNamespace(classes=["cat", "dog"])
    timms = SimpleNamespace(reader=SimpleNamespace(class_to_idx={"dog": 1, "cat": 0}))
    for dataset in (torchvisions, timms, SimpleNamespace(dataset=timms)):
        assert class_names(dataset) == ["cat", "dog"]
    assert class_names(object()) is None


def test_wrong_paths(grid, copied, tmp_path):
    def message(path, *args):
        with pytest.raises(RunError) as error:
            CheckpointRun(path, *args)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert message(tmp_path / "none") == f"there is no checkpoint or run folder '{tmp_path / 'none'}'"
    assert message(grid) == f"{grid} contains 6 runs: pass one of them, such as {grid / 'feature-seed0'}"
    assert "contains no checkpoint (last.pth.tar, model_best.pth.tar)" in message(tmp_path)
    assert "has no EMA weights: use its plain weights" in message(grid / "feature-seed0", True)
    unfinish(copied / "feature-seed1")
    assert "is not finished: repeat the command that started it" in message(copied / "feature-seed1")
    (copied / "feature-seed0" / "last.pth.tar").write_bytes(b"half")
    assert "cannot be read as a checkpoint" in message(copied / "feature-seed0")
    bare = timm_run(tmp_path / "run")
    (bare / "args.yaml").write_text(":")
    assert "args.yaml cannot be read (" in message(bare)
    (bare / "args.yaml").write_text("[1]\n")
    assert "args.yaml cannot be read (it contains no mapping)" in message(bare)


def test_a_pickle_is_not_executed(tmp_path):
    with never_unpickled(tmp_path / "evil.pth.tar") as path, pytest.raises(RunError, match="cannot be read as a"):
        CheckpointRun(Path(path))


def test_weights_without_arguments(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "bare.pth.tar")
    with pytest.raises(RunError, match=r"the model of .* is unknown: .*; build the model"):
        CheckpointRun(tmp_path / "bare.pth.tar")
    torch.save([1], tmp_path / "list.pth.tar")
    with pytest.raises(RunError, match="has no 'state_dict'"):
        CheckpointRun(tmp_path / "list.pth.tar")


@pytest.mark.parametrize(("key", "weights"), [
    ("state_dict", None), ("state_dict", [1]), ("state_dict", {1: torch.zeros(1)}), ("state_dict_ema", {"a": 1}),
    ("state_dict_ema", torch.ones(2)), ("state_dict", {"a": torch.ones(1) * 1j})])
def test_weights_that_are_no_state_dict(tmp_path, key, weights):
    torch.save({"state_dict": {}, "args": Namespace(model="vit_test"), key: weights}, tmp_path / "a.pth.tar")
    with pytest.raises(RunError, match=r"a.pth.tar cannot be read .* \(it has no dict of real tensors by name\)$"):
        CheckpointRun(tmp_path / "a.pth.tar", key == "state_dict_ema")


def test_weights_that_differ_only_in_a_prefix(tmp_path):
    weights = {"a": torch.zeros(1), "module.a": torch.ones(1)}
    torch.save({"state_dict": weights, "args": Namespace(model="vit_test")}, tmp_path / "a.pth.tar")
    with pytest.raises(RunError, match=r"a.pth.tar cannot be read .* \(some tensors differ only in a wrapper's prefix"):
        CheckpointRun(tmp_path / "a.pth.tar")


def nested(value, levels, width=1):
    for _ in range(levels):
        value = [value] * width
    return value


CYCLIC = {"list": [], "dict": {}, "namespace": Namespace()}
CYCLIC["list"].append(CYCLIC["list"])
CYCLIC["dict"]["a"] = CYCLIC["dict"]
CYCLIC["namespace"].a = CYCLIC["namespace"]


@pytest.mark.parametrize("value", [*CYCLIC.values(), nested("x", 100), nested("x", 26, 2), nested("x", 3, 1000)])
def test_options_of_any_size_in_a_checkpoint(tmp_path, value):
    """A small pickle can contain lists that have billions of values when they are printed or copied."""
    for options in (dict(model="vit_test", foo=value), dict(model=value)):
        torch.save({"state_dict": {}, "args": Namespace(**options)}, tmp_path / "a.pth.tar")
        with pytest.raises(RunError, match=r"a.pth.tar cannot be read \(its options have more than 20 levels or 100,0"):
            CheckpointRun(tmp_path / "a.pth.tar")


def test_tensors_among_the_options_of_a_checkpoint(tmp_path):
    folder = timm_run(tmp_path / "run", epochs=1)
    keys, checkpoint = ("model_ema", "pretrained", "opt", "lr", "foo"), load_checkpoint(folder / "last.pth.tar")
    vars(checkpoint["args"]).update(dict.fromkeys(keys, torch.ones(2)))
    torch.save(checkpoint, tmp_path / "a.pth.tar")
    run = CheckpointRun(tmp_path / "a.pth.tar")
    assert [run.options[key] for key in keys] == ["tensor([1., 1.])"] * len(keys)
    assert "| opt | tensor(\\[1., 1.\\])" in str(export(tmp_path / "a.pth.tar", tmp_path / "out", "me/x"))


@pytest.mark.parametrize(("key", "value", "must"), [
    ("model", 5, "text"), ("dataset", 5, "text"), ("data_dir", 5, "text"), ("val_split", 3, "text"),
    ("img_size", "x", "a whole number of at least 1"), ("crop_pct", 10**400, "a number"),
    ("input_size", [3, 8], "three whole numbers of at least 1"), ("input_size", [3, 0, 8], "three whole numbers of at"),
    ("mean", ["a"], "a list of numbers"), ("std", [], "a list of numbers"), ("model_kwargs", [1], "a mapping"),
    ("device_modules", 5, "a list of modules"), ("device_modules", [5], "a list of modules"),
    ("device_modules", ["timm_ortho; evil()"], "a list of modules"),
])
def test_options_of_another_type(tmp_path, key, value, must):
    folder = timm_run(tmp_path / "run", epochs=1)
    options = {**vars(load_checkpoint(folder / "last.pth.tar")["args"]), key: value}
    (folder / "args.yaml").write_text(dump_yaml(options))
    torch.save({"state_dict": {}, "args": Namespace(**options)}, tmp_path / "a.pth.tar")
    for path, file in ((folder, folder / "args.yaml"), (tmp_path / "a.pth.tar", tmp_path / "a.pth.tar")):
        with pytest.raises(RunError) as error:
            CheckpointRun(path)
        reason = f"option '{key}' is {value!r:.60}, but must be {must}"
        assert str(error.value).startswith(f"{file} cannot be read ({reason}")


def test_a_second_training_in_the_same_folder(tmp_path):
    folder = timm_run(tmp_path / "run", epochs=4)
    with open(folder / "summary.csv", "a", encoding="utf-8") as file:
        file.write("epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n0,1,1,5,9,0.1\n1,1,1,6,9,0.1\n")
        file.write("1,1,1,6.5,9,0.1\n")  # the last row of an epoch counts
    rows = read_history(folder)
    assert [(row["epoch"], row["eval_top1"]) for row in rows] == [(0, 5.0), (1, 6.5)]


def test_formulas_of_spreadsheets_are_no_metrics(tmp_path):
    (tmp_path / "summary.csv").write_text("epoch,eval_top1,=A1,@b,eval_top1 (EMA)\n0,1,2,3,4\n")
    assert read_history(tmp_path) == [{"epoch": 0, "eval_top1": 1.0, "eval_top1 (EMA)": 4.0}]


@pytest.mark.parametrize("optimizer", [pytest.param(None, marks=pytest.mark.slow), "kept"])
def test_runs_that_differ_in_the_seed_are_on_one_card(tmp_path, optimizer):
    """After the report, a run has the numbers of all seeds, also for the checkpoints of both of its stages."""
    if optimizer is None:
        asked = compared(tmp_path / "out", ["feature"], seeds=2)
    else:
        asked = request(written(tmp_path, **switching(optimizer)), tmp_path / "out", seeds=2)
    output = trained(asked)
    folders = [output / name for name in planned(asked).runs]  # planning again keeps the results
    top1 = {seed: result_of(folder)["top1"] for seed, folder in enumerate(folders)}
    stages = [".", "switched"] if optimizer else ["."]
    for seed, folder in enumerate(folders):
        assert [CheckpointRun(folder / stage).card.top1 for stage in stages] == [{seed: top1[seed]}] * len(stages)
    study.report_on([output])
    for folder in folders:
        for path in (folder, *(folder / stage / "last.pth.tar" for stage in stages)):
            run = CheckpointRun(path)
            assert run.card.top1 == top1
            assert (run.card.trainer, run.card.split, len(run.card.labels)) == ("lab", "test", 10)
        assert CheckpointRun(folder).path == folder / stages[-1] / "last.pth.tar"


def test_a_report_elsewhere_writes_no_comparison(copied, tmp_path):
    """The folders of a study may belong to another person."""
    before = (copied / "feature-seed0" / "run.json").read_bytes()
    unfinish(copied / "feature-seed1")
    study.report_on([copied], tmp_path / "report")
    assert (copied / "feature-seed0" / "run.json").read_bytes() == before
    study.report_on([copied])
    assert (copied / "feature-seed0" / "run.json").read_bytes() != before


ROW = dict(connection="a", baseline="b", seeds=[0], top1_mean=1.0, top1_std=None, difference=None)
STAGE = dict(folder=".", begins_with="", stop_epoch=None)
PLAN = dict(trainer="lab", record=None, representation=False, hold_out=0, gpus=0, nodes=1, stages=[STAGE])


def of(*rows, top1=1.0):
    return dict(comparison=dict(split=None, top1=[dict(seed=0, top1=top1)], rows=list(rows)))


@pytest.mark.parametrize(("changes", "reason"), [
    (dict(plan={**PLAN, "stages": [{**STAGE, "folder": "../feature-seed1"}]}), "stages[0].folder is '../feature-"),
    (dict(plan={**PLAN, "stages": [{**STAGE, "folder": "/etc"}]}), "it.plan.stages[0].folder is '/etc'"),
    (dict(plan={**PLAN, "stages": []}), "the plan has no stage"),
    (dict(plan={**PLAN, "hold_out": -1}), "it.plan.hold_out is -1"),
    (dict(plan={**PLAN, "gpus": True}), "it.plan.gpus is True"),
    (dict(plan=None), "it.plan is None, but must be a mapping"),
    (of(top1=math.nan), "it.comparison.top1[0].top1 is nan"),
    (of(top1=math.inf), "it.comparison.top1[0].top1 is inf"),
    (of(top1=10**20), "it.comparison.top1[0].top1 is 100000000000000000000, but must be a number"),
    (of(top1="high"), "it.comparison.top1[0].top1 is 'high'"),
    (dict(comparison=[1]), "it.comparison is [1]"),
    (dict(result=dict(labels=3)), "it.result.labels is 3"),
    (dict(result=dict(trainer="theirs")), "it.result.trainer is 'theirs'"),
    (of({**ROW, "top1_mean": -math.inf}), "it.comparison.rows[0].top1_mean is -inf"),
    (of({**ROW, "difference": dict(mean=1.0, half_width=math.nan, pairs=2)}), "rows[0].difference.half_width is nan"),
    (of({"connection": "a"}), "it.comparison.rows[0] has an unknown key, or lacks one: 'baseline'"),
    (dict(more=1), "it has an unknown key, or lacks one: 'more'"),
    (dict(job=2**22 * "a"), "it has more than 4,194,304 bytes"),
])
def test_values_of_another_person_are_checked(copied, error_of, changes, reason):
    folder = copied / "feature-seed0"
    change_run(folder, **changes)
    for command in (["show"], ["push", "--dry-run", "--output", str(copied / "out"), "me/x"]):
        line = error_of(command[0], folder, *command[1:])
        assert line.startswith(f"timm-ortho: error: {folder / 'run.json'} cannot be read (")
        assert reason in line


def test_a_result_without_a_seed(copied):
    change_run(copied / "feature-seed0", result=dict(top1=50.0), comparison=None)
    assert CheckpointRun(copied / "feature-seed0").card.top1 == {}


@pytest.mark.parametrize("content", ["", "[]", "{}", 100_000 * "[", '{"plan": 1e999}', b"\xff"])
def test_a_damaged_run_file(copied, content):
    path = copied / "feature-seed0" / "run.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunError, match=r"run.json cannot be read \(.*copy it again, or remove .* to train the run"):
        CheckpointRun(copied / "feature-seed0")
