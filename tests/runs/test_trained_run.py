"""Test reading training runs from their folders."""
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers.pickles import never_unpickled
from helpers.trained_runs import lab_grid, timm_run

from timm_ortho.runs.folders import class_names, read_history
from timm_ortho.runs.trained_run import CheckpointRun, RunError
from timm_ortho.weights.files import load_checkpoint


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return lab_grid(tmp_path_factory.mktemp("grid") / "compared", seeds=2)


@pytest.fixture
def copied(grid, tmp_path):
    return shutil.copytree(grid, tmp_path / "compared")


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


def test_the_last_row_of_an_epoch_is_used(tmp_path):
    folder = timm_run(tmp_path / "run")
    rows = (folder / "summary.csv").read_text().splitlines()
    (folder / "summary.csv").write_text("\n".join([*rows, rows[-1].replace("30.25", "31.5")]) + "\n")
    run = CheckpointRun(folder)
    assert [row["epoch"] for row in run.history] == [0, 1, 2]
    assert run.evaluated["eval_top1"] == 31.5


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
    assert message(grid) == f"{grid} contains 4 runs: pass one of them, such as {grid / 'feature-seed0'}"
    assert "contains no checkpoint (last.pth.tar, model_best.pth.tar)" in message(tmp_path)
    assert "has no EMA weights: use its plain weights" in message(grid / "feature-seed0", True)
    (copied / "feature-seed1" / "result.json").unlink()
    assert "is not finished: repeat the command that started it" in message(copied / "feature-seed1")
    (copied / "feature-seed0" / "last.pth.tar").write_bytes(b"half")
    assert "cannot be read as a checkpoint" in message(copied / "feature-seed0")
    bare = timm_run(tmp_path / "run")
    (bare / "args.yaml").write_text(":")
    assert "args.yaml cannot be read" in message(bare)


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


def test_a_second_training_in_the_same_folder(tmp_path):
    folder = timm_run(tmp_path / "run", epochs=4)
    with open(folder / "summary.csv", "a", encoding="utf-8") as file:
        file.write("epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n0,1,1,5,9,0.1\n1,1,1,6,9,0.1\n")
    rows = read_history(folder)
    assert [(row["epoch"], row["eval_top1"]) for row in rows] == [(0, 5.0), (1, 6.0)]


@pytest.mark.parametrize("name", ["run.yaml", "result.json"])
def test_a_damaged_run_is_not_a_peer(grid, tmp_path, name):
    copy = shutil.copytree(grid, tmp_path / "grid")
    assert CheckpointRun(copy / "feature-seed0").peers.keys() == {0, 1}
    damaged = copy / "feature-seed1" / name
    damaged.write_text("{}") if name == "result.json" else damaged.unlink()
    assert CheckpointRun(copy / "feature-seed0").peers.keys() == {0}


@pytest.mark.parametrize("kind", ["switched", "train.py"])
def test_runs_that_differ_in_the_seed_are_peers(copied, kind):
    """A run whose connection was switched has two args.yaml: its own, and that of the folder `switched`.

    timm's train.py writes the name of the run into args.yaml (`experiment`), so there peers differ in the name, too.
    """
    for run in copied.glob("feature-seed*"):
        options = yaml.safe_load((run / "args.yaml").read_text(encoding="utf-8"))
        changed = {"experiment": run.name}
        if kind == "switched":
            changed = {"model_kwargs": {**options["model_kwargs"], "connection": "linear"}}
            (run / "switched").mkdir()
            for name in ("last.pth.tar", "summary.csv"):
                shutil.copy(run / name, run / "switched")
        folder = run / "switched" if kind == "switched" else run
        (folder / "args.yaml").write_text(yaml.safe_dump({**options, **changed}), encoding="utf-8")
    run = CheckpointRun(copied / "feature-seed0")
    assert run.peers.keys() == {0, 1}
    assert run.connection == ("linear" if kind == "switched" else "feature")
