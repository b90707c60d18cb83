"""`timm-ortho study` stopped, killed, short of disk, and run again."""
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from timm.scheduler import PlateauLRScheduler
from tiny_study import STUDY, assert_same_run, results, run, state, written
from torch.optim.lr_scheduler import ReduceLROnPlateau

import timm_ortho
from timm_ortho.lab import LabError, design, study, training, workers

WORKER = workers._Worker

pytestmark = pytest.mark.usefixtures("undrawn")


# ------------------------------------------------------------------------------------------ killed, continued
KILLED = """
import os, signal, sys
from timm_ortho import cli
from timm_ortho.lab import training

original, left = training.Run._backward, [int(sys.argv[1])]

def backward(self, loss, update):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, loss, update)

training.Run._backward = backward
cli.main(sys.argv[2:])
"""


def switching(optimizer, **options):
    """One run: a connection that draws random numbers, then another, with every state that a checkpoint can hold."""
    values = yaml.safe_load(STUDY)
    values["scales"]["smoke"]["options"].update(epochs=4, mixup=0.4, reprob=0.3, **options)
    return dict(
        grid={"switch": {"GF": {"connection": "global", "switch": {"to": "feature", "optimizer": optimizer},
                                "connection_prob": 0.7}}},
        baseline={"switch": "GF"}, scales=values["scales"])


def with_plateau(test):
    """timm 1.0.16 has a plateau schedule that newer versions of torch do not run."""
    unusable = ("verbose=" in inspect.getsource(PlateauLRScheduler)
                and "verbose" not in inspect.signature(ReduceLROnPlateau).parameters)
    test = pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated:FutureWarning")(test)
    return pytest.mark.skipif(unusable, reason="this timm's plateau schedule does not run on this torch")(test)


PLATEAU = dict(sched="plateau", sched_on_updates=False, patience_epochs=0, eval_metric="top5")


@with_plateau
@pytest.mark.parametrize(("optimizer", "options"), [
    ("kept", dict(model_ema=True, model_ema_warmup=True, grad_accum_steps=2)),
    ("reinitialised", PLATEAU),
])
def test_killed_at_a_random_step_it_continues_bit_for_bit(optimizer, options, tmp_path):
    path = written(tmp_path, **switching(optimizer, **options))
    assert run(path, tmp_path / "whole") == 0
    batches = 4 * 4 * (2 if optimizer == "reinitialised" else 1)
    # in the second half, where every part of the state counts
    step = random.randrange(batches // 2 + 4, batches)
    command = ["study", "run", path, "--scale", "smoke", "--device", "cpu", "--output", str(tmp_path / "parts")]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, str(step), *command], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = tmp_path / "parts" / "switch=GF-feature-seed0"
    print(f"killed after {step} of {batches} steps")
    assert state(folder)["epoch"] == step // 4 - 1
    assert not (folder / "result.json").exists()
    assert run(path, tmp_path / "parts") == 0
    assert_same_run(folder, tmp_path / "whole" / folder.name)
    assert json.loads((folder / "result.json").read_text())["connection"] == "feature"


@pytest.mark.parametrize("epoch", range(1, 8))
def test_continues_after_each_epoch_of_two_phases(epoch, tmp_path, whole_switch, monkeypatch):
    """The switch comes after the fourth epoch: before it, at it and after it the checkpoint means something else."""
    path, whole = whole_switch
    interrupted(path, tmp_path / "parts", epoch, monkeypatch)
    assert run(path, tmp_path / "parts") == 0
    assert_same_run(tmp_path / "parts" / whole.name, whole)


@with_plateau
def test_plateau_of_the_second_phase_knows_its_own_epochs_only(tmp_path, monkeypatch):
    """Top-5 of 10 classes is made to never improve; counted from the first phase on, the rate would fall too early."""
    monkeypatch.setattr(training, "accuracy", lambda *_, **__: (torch.zeros(()), torch.zeros(())))
    path = written(tmp_path, **switching("reinitialised", **{**PLATEAU, "patience_epochs": 2}))
    assert run(path, tmp_path / "whole") == 0
    interrupted(path, tmp_path / "parts", 5, monkeypatch)
    assert run(path, tmp_path / "parts") == 0
    name = "switch=GF-feature-seed0"
    assert_same_run(tmp_path / "parts" / name, tmp_path / "whole" / name)


def interrupted(path, output, epoch, monkeypatch):
    """Ctrl-C in the middle of the epoch after so many others."""
    left = [4 * epoch + 2]
    original = training.Run._backward

    def backward(self, loss, update):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        original(self, loss, update)

    with monkeypatch.context() as context:
        context.setattr(training.Run, "_backward", backward)
        assert run(path, output) == 130


@pytest.fixture(scope="module")
def whole_switch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switch")
    path = written(folder, **switching("reinitialised", model_ema=True, model_ema_decay=0.9))
    assert run(path, folder / "whole") == 0
    return path, folder / "whole" / "switch=GF-feature-seed0"


def test_switch_kept_goes_on_and_reinitialised_begins_anew(tmp_path, whole_switch):
    """The schedule tells them apart: a cosine over all epochs, or one over each half."""
    rates = [row["lr"] for row in json.loads((whole_switch[1] / "history.json").read_text())]
    assert len(rates) == 8
    assert rates[:4] == rates[4:]
    assert rates[0] > rates[3]
    assert run(written(tmp_path, **switching("kept")), tmp_path / "out") == 0
    kept = [row["lr"] for row in json.loads(
        (tmp_path / "out" / "switch=GF-feature-seed0" / "history.json").read_text())]
    assert len(kept) == 4
    assert kept == sorted(kept, reverse=True)
    by_epoch = written(tmp_path, **switching("reinitialised", sched_on_updates=False))
    assert run(by_epoch, tmp_path / "by_epoch") == 0
    rates = [row["lr"] for row in json.loads(
        (tmp_path / "by_epoch" / "switch=GF-feature-seed0" / "history.json").read_text())]
    assert rates[:4] == rates[4:]
    steps = {group["step"].item() for group in state(whole_switch[1])["optimizer"]["state"].values()}
    assert steps == {4 * 4}  # of the second optimizer


def test_switch_replaces_the_connections_and_nothing_else(tmp_path):
    values = switching("kept", model_ema=True)
    found = design.load(written(tmp_path, **values), "smoke")
    variant = next(found.variants({"device": "cpu"}))
    variant.options.seed = 0
    source = study._checked_source(study.Study(found, {"device": "cpu"}, tmp_path), 0)
    variant.options.num_classes, variant.options.in_chans = source.num_classes, source.in_chans
    one = training.Run(variant.options, source, tmp_path, torch.device("cpu"), variant.extras)
    before = {key: value.clone() for key, value in one.model.state_dict().items()}
    optimizer = one.optimizer
    assert {type(site.connection).__name__ for site in one.sites} == {"GlobalConnection"}
    one._switch()
    assert {type(site.connection).__name__ for site in one.sites} == {"FeatureConnection"}
    assert {site.connection.prob for site in one.sites} == {0.7}
    assert {type(site.connection).__name__ for site in timm_ortho.sites(one.ema.module)} == {"FeatureConnection"}
    assert one.optimizer is optimizer
    assert all(torch.equal(value, before[key]) for key, value in one.model.state_dict().items())


# ----------------------------------------------------------------------------------------------- processes
def command(path, output, epochs=60, workers=2):
    return [sys.executable, "-m", "timm_ortho", "study", "run", path, "--scale", "smoke", "--device", "cpu",
            "--output", str(output), "--workers", str(workers), "-o", f"epochs={epochs}"]


@contextmanager
def started(command):
    """A process that hears Ctrl-C, though what started pytest may not (a shell's background job), and ends with us."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        try:
            yield process
        finally:
            process.kill()  # where a test fails: or its end would be waited for


def children(pid):
    """The processes below one, as Linux tells."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended
            continue
        if parent == pid:
            found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


def alive(pids):
    def runs(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if runs(pid)]


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def training_processes(process, output):
    """Of the processes those that train, once two runs have an epoch."""
    wait_for(lambda: len(list(output.glob("*/last.pth.tar"))) >= 2)
    return [pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_command(sent, tmp_path):
    output = tmp_path / "out"
    endless = command(written(tmp_path), output, epochs=100_000)  # however late this process looks, they are at it
    with started(endless) as process:
        pids = training_processes(process, output)
        everything = children(process.pid)
        assert len(pids) == 2
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)  # as the terminal does
        else:
            process.kill()
        _, said = process.communicate(timeout=60)
    wait_for(lambda: not alive(everything), 30)
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert said.splitlines()[-1] == "interrupted; the same command again continues where this one stopped"
        assert len(results(output)["unfinished"]) == 4
        assert "Traceback" not in said + "".join(path.read_text() for path in output.glob("*/log.txt"))


@linux
@pytest.mark.slow
def test_a_process_that_dies_takes_one_run_with_it(tmp_path, capsys):
    """And others take their places: both die here, with two runs still to come."""
    output, path = tmp_path / "out", written(tmp_path)
    with started(command(path, output, epochs=25)) as process:
        for pid in training_processes(process, output):
            os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 2
    error = said.splitlines()[-1]
    assert "2 of 4 runs failed (and 1 more): lr=" in error
    assert "its process died (SIGKILL), see " in error
    assert error.endswith("the same command again tries them anew")
    assert Path(error.split("see ")[1].split(";")[0]).is_file()
    assert (len(results(output)["runs"]), len(results(output)["unfinished"])) == (2, 2)
    assert run(path, output, epochs=25) == 0
    assert len(results(output)["runs"]) == 4


def test_a_run_that_cannot_be_continued_does_not_stop_the_others(tmp_path):
    path = written(tmp_path, grid={})
    assert run(path, tmp_path / "out") == 0
    folder = tmp_path / "out" / "linear-seed0"
    for file in (folder / "result.json", tmp_path / "out" / "feature-seed0" / "result.json"):
        file.unlink()
    for checkpoint in folder.glob("*.pth.tar"):
        checkpoint.write_bytes(b"half")
    failure = r"1 of 2 runs failed: linear-seed0: .*last.pth.tar cannot be continued .* remove "
    with pytest.raises(LabError, match=failure):
        run(path, tmp_path / "out")
    found = results(tmp_path / "out")
    assert [item["connection"] for item in found["runs"]] == ["feature"]
    assert found["unfinished"] == ["linear-seed0"]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_that_nobody_foresaw_does_not_stop_the_others(tmp_path, monkeypatch, capsys, count):
    """One or several at a time: the same report, the same words, the traceback in the run's log."""
    path, output, processes = written(tmp_path), tmp_path / "out", []
    monkeypatch.setattr(workers, "_Worker", lambda *given: processes.append(given) or WORKER(*given))
    assert run(path, output) == 0
    for file in output.glob("*/result.json"):
        file.unlink()
    folders = [output / f"lr=0.001-{connection}-seed0" for connection in ("linear", "feature")]
    for folder in folders:
        (folder / "records.json").write_text("{}")
    failures = [f"{folder.name}: KeyError: 'marks', see {folder / 'log.txt'}" for folder in folders]
    with pytest.raises(LabError) as error:
        run(path, output, workers=count)
    assert str(error.value) in [
        f"2 of 4 runs failed (and 1 more): {failure}; the same command again tries them anew" for failure in failures]
    assert results(output)["unfinished"] == [folder.name for folder in folders]
    assert len(results(output)["runs"]) == 2
    assert len(processes) > 2 or count == 1  # those that met the errors train nothing else
    said = capsys.readouterr().err
    for folder, failure in zip(folders, failures, strict=True):
        assert f"timm-ortho: {failure.replace(':', ' failed:', 1)}\n" in said
        assert "Traceback (most recent call last)" in (folder / "log.txt").read_text()
        assert (folder / "log.txt").read_text().endswith("KeyError: 'marks'\n")


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_full_disk_stops_a_study(tmp_path, monkeypatch, count):
    """Every other run would end likewise."""
    path = written(tmp_path)
    assert run(path, tmp_path / "out", seeds=1) == 0
    finished = {item: item.read_bytes() for item in (tmp_path / "out").glob("*seed0/*")}
    (tmp_path / "out" / "lr=0.001-linear-seed1").write_text("no folder can be made here")
    with pytest.raises(LabError, match=r"cannot write in .*lr=0.001-linear-seed1"):
        run(path, tmp_path / "out", seeds=2, workers=count)
    assert all(item.read_bytes() == content for item, content in finished.items())
    assert not (tmp_path / "out" / "lr=0.01-feature-seed1" / "result.json").exists()
