"""Launching runs: parallel, killed, failing and interrupted runs, collected results, and tasks of Slurm."""
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from helpers.made_up_runs import run_of
from helpers.tiny_study import (
    BATCHES,
    STUDY,
    Stop,
    assert_same_run,
    change_run,
    compared,
    one_run,
    planned,
    read,
    request,
    result_of,
    state,
    stopped,
    trained,
    unfinish,
    written,
)

from timm_ortho import cli, lab
from timm_ortho.lab import LabError, commands as study, folder as folders, representation
from timm_ortho.lab.folder import LOG, Stage, Variant
from timm_ortho.lab.reporting import collect
from timm_ortho.lab.running import launcher, run, slurm
from timm_ortho.run_folder import LAST, read_history, read_run

pytestmark = pytest.mark.usefixtures("undrawn")
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="requires Linux: /proc does not exist")


# --------------------------------------------------------------------------------------- from plan to report
@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Train the runs of a study in this process. Return the study's file and its output folder."""
    folder = tmp_path_factory.mktemp("study")
    path = written(folder)
    return path, trained(request(path, folder / "out"))


def finished(output):
    part = collect.collect([output])
    return [(item["cell"], item["connection"], item["seed"]) for item in part.runs], part.unfinished


@pytest.mark.slow
def test_parallel_runs_have_the_same_numbers(tiny, tmp_path, capsys):
    path, output = tiny
    arguments = ["study", "run", path, "--scale", "smoke", "--device", "cpu", "--output", str(tmp_path / "out")]
    assert cli.main([*arguments, "--parallel", "2"]) == 0
    names = sorted(item.name for item in output.iterdir() if item.is_dir() and (item / "run.json").is_file())
    assert len(names) == 4
    for name in names:
        assert_same_run(output / name, tmp_path / "out" / name)
        assert "epoch 2/2: top-1" in (tmp_path / "out" / name / LOG).read_text()
    printed = capsys.readouterr()
    assert "[4/4] lr=" in printed.err
    assert "Does it work?" in printed.out
    assert finished(tmp_path / "out") == finished(output)


def test_reports_need_no_data_and_can_be_opened(tiny, monkeypatch, tmp_path, capsys):
    pages = []
    monkeypatch.setattr("webbrowser.open", pages.append)
    monkeypatch.setattr(run, "open_source", lambda *_: pytest.fail("a report opened the data set"))
    assert cli.main(["study", "report", str(tiny[1]), "--output", str(tmp_path)]) == 0
    assert pages == []
    assert "Does it work?" in capsys.readouterr().out
    assert len(read(tmp_path / "results.json")["runs"]) == 4
    assert cli.main(["study", "report", str(tiny[1]), "--output", str(tmp_path), "--open"]) == 0
    assert study.run(request(*tiny), opened=True) == 0
    assert pages == [(folder / "report.html").as_uri() for folder in (tmp_path, tiny[1])]


def test_finished_runs_are_not_started_again(tiny, monkeypatch, capsys):
    path, output = tiny
    monkeypatch.setattr(launcher, "_work", lambda *_: pytest.fail("a finished run was started again"))
    before = {item: item.read_bytes() for item in output.glob("*/*")}
    assert study.run(request(path, output), parallel=2) == 0
    assert {item: item.read_bytes() for item in output.glob("*/*")} == before | {
        item: item.read_bytes() for item in output.glob("figures/*")}
    assert "4 of 4 runs are already finished" in capsys.readouterr().err


def test_collected_results(tiny):
    _, output = tiny
    part = collect.collect([output])
    assert (part.unfinished, part.study["axes"], part.study["seeds"]) == ([], {"lr": [0.001, 0.01]}, [0])
    assert [(item["cell"]["lr"], item["connection"]) for item in part.runs] == [
        (0.001, "linear"), (0.001, "feature"), (0.01, "linear"), (0.01, "feature")]
    for item in part.runs:
        assert [len(item[key]) for key in ("history", "probe", "dynamics")] == [2, 1, 4 * 4]
        assert item["dataset"] == "digits"
    ckas = [item["representation"]["linear_cka"] for item in part.runs]
    assert (ckas[0], ckas[2]) == (None, None)  # baselines have no CKA
    assert 0.0 < ckas[1] < 1.0
    assert ckas[1] == pytest.approx(representation.linear_cka(*(
        collect.features_in(output / f"lr=0.001-{connection}-seed0") for connection in ("linear", "feature"))))


@pytest.mark.parametrize("write", [
    lambda path: path.write_bytes(b"PK"), lambda path: path.write_bytes(b""), os.mkfifo,
    lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)), lambda path: np.save(path, np.zeros((4, 2), "c8")),
    lambda path: np.save(path, np.zeros((4, 2), "M8[s]")), lambda path: np.save(path, np.float32(3)),
    lambda path: np.save(path, np.zeros(4)), lambda path: np.save(path, np.zeros((0, 4))),
    lambda path: np.save(path, np.zeros((2, 2**14 + 1), "f2")),
    *(lambda path, shape=shape: path.write_bytes(npy_header(shape)) for shape in ("1000, 1000", "True, 2", "3.5, 2"))])
def test_damaged_features(tmp_path, write):
    write(tmp_path / "features.npy")
    with pytest.raises(LabError, match=r"features.npy cannot be read \(.*: remove .* to train the run again"):
        collect.features_in(tmp_path)


def npy_header(shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def test_features_of_other_images(tmp_path):
    folders = [tmp_path / "linear", tmp_path / "feature"]
    for images, folder in enumerate(folders, 3):
        folder.mkdir()
        np.save(folder / "features.npy", np.eye(images, dtype="f2"))
    runs = [run_of(folder.name, 0) for folder in folders]
    with pytest.raises(LabError, match=r"feature/features.npy has features of 4 images, but .*/features.npy of 3"):
        collect.add_cka(runs, folders, {"connection": "linear"})


# -------------------------------------------------------------------------------------------------- status
def test_status(tmp_path, monkeypatch, capsys):
    """`study status` reads the state of each run from the run's files. The five runs have different states."""
    values = yaml.safe_load(STUDY)
    path = written(tmp_path, grid={"lr": [1e-3, 1e-2, 1e-1, 1.0, 2.0]}, connections=["linear"], representation=False,
                   scales=values["scales"])
    experiment = planned(request(path, tmp_path / "out"))
    done, half, failed, at_work, _ = (experiment.folder / name for name in experiment.runs)
    run.run(done)
    stopped(half, monkeypatch, BATCHES + 1, KeyboardInterrupt)
    stopped(failed, monkeypatch, 1)
    (failed / LOG).write_text("a warning of another package\n")
    capsys.readouterr()
    with folders.work_on(at_work):
        assert cli.main(["study", "status", str(experiment.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    top1 = f"top-1 {result_of(done)['top1']:.2f} %"
    half_top1 = f"top-1 {read_history(half)[0]['eval_top1']:.2f} %"
    assert [line.split(maxsplit=2) for line in lines[:-1]] == [
        ["lr=0.001-linear-seed0", "finished", top1],
        ["lr=0.01-linear-seed0", "stopped", f"epoch 1 of 2, {half_top1}"],
        ["lr=0.1-linear-seed0", "failed", "Stop"],
        ["lr=1.0-linear-seed0", "running", "epoch 0 of 2"],
        ["lr=2.0-linear-seed0", "waiting"]]
    assert lines[-1] == "1 finished, 1 stopped, 1 failed, 1 running, 1 waiting"


@pytest.mark.parametrize(("session", "state"), [
    ({"begin": "a"}, ("running", "epoch 0 of 2")), ({"begin": "a", "end": "b"}, ("stopped", "epoch 0 of 2"))])
@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), NotImplementedError("FileSystem")])
def test_the_state_of_a_run_whose_lock_cannot_be_tried(tmp_path, monkeypatch, error, session, state):
    class Refused(folders.FileLock):
        def acquire(self, *_, **__):
            raise error

    folder = one_run(tmp_path / "out")
    (folder / ".lock").touch()
    change_run(folder, sessions=[session])
    monkeypatch.setattr(folders, "FileLock", Refused)
    assert folders.state(folder) == state
    refused = nullcontext() if isinstance(error, NotImplementedError) else pytest.raises(PermissionError)
    with refused, folders.work_on(folder):
        pass


# ------------------------------------------------------------------------------------------------ progress
def test_the_first_lines_describe_runs_and_images(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "local", lambda *_: {})
    requested = compared(tmp_path / "out", seeds=[3, 5], train_num_samples=100)
    assert study.run(requested) == 0
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"runs: 4 in {tmp_path / 'out'}; model: vit_small; data: digits; connections: linear, feature; seeds: 3, 5; "
        "epochs: 2",
        "The images have 16 x 16 pixels (the first image of the data set: 8 x 8), 1 channel and 10 classes. There are "
        "100 training images and 32 test images (split “test”)."]
    assert study.run(compared(tmp_path / "out", ["feature"], seeds=[3], train_num_samples=100)) == 0
    assert "runs: 1 in " in (again := capsys.readouterr().err)
    assert "connections: feature; seeds: 3; epochs" in again


def test_progress_has_epoch_loss_accuracy_and_time_left(tmp_path, monkeypatch, capsys):
    """One run is continued, and one run's loss is nan."""
    experiment = planned(compared(tmp_path / "out", epochs=4))
    seconds = [0]
    monkeypatch.setattr(launcher.time, "monotonic", lambda: seconds[0])

    def after(time):
        seconds[0] = time
        lines.update(experiment.runs)

    def epoch(name, number, loss, top1):
        path = experiment.folder / name / "summary.csv"
        head = "" if path.exists() else "epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n"
        with path.open("a") as file:
            file.write(f"{head}{number},{loss},1.0,{top1},99.0,0.001\n")

    epoch("linear-seed0", 0, 2.5, 10.0)
    lines = launcher._Progress(experiment.folder, experiment.runs)
    after(0)
    assert capsys.readouterr().err == ""  # there is no new epoch
    epoch("linear-seed0", 1, 1.23456, 67.891)
    after(5)  # one of the seven remaining epochs is finished
    after(10)
    epoch("feature-seed0", 0, "nan", 10.0)
    after(15)  # prints nothing: less than 20 seconds after the last line
    epoch("feature-seed0", 1, "nan", 10.0)
    after(30)
    assert capsys.readouterr().err.splitlines() == [
        "linear-seed0: epoch 2/4, loss 1.235, top-1 67.89 %; 2/8 epochs, 0:00:30 left",
        "feature-seed0: epoch 2/4, loss nan, top-1 10.00 %; 4/8 epochs, 0:00:40 left"]


# ----------------------------------------------------------------------------------------------- processes
def test_a_killed_process_is_started_three_times_at_most(tmp_path, monkeypatch, capsys):
    """One run is killed once, one run is killed every time, and one run is not killed."""
    experiment = planned(compared(tmp_path / "out", ["linear", "feature", "global"]))
    whole = one_run(tmp_path / "whole", "linear")
    run.run(whole)
    started = []

    class Process:
        """A mock process that trains in this process and then appears to have ended."""

        def __init__(self, target, args):
            self.folder, self.exitcode, self.pid = args[0], 0, os.getpid()

        def start(self):
            started.append(self.folder.name)
            times = started.count(self.folder.name)
            if self.folder.name.startswith(("linear", "feature")) and times == 1:
                stopped(self.folder, monkeypatch, BATCHES + 2, KeyboardInterrupt)  # records no error, as after a kill
                self.exitcode = -signal.SIGKILL
            elif self.folder.name.startswith("feature"):
                (self.folder / LOG).write_text("step 1\nout of memory\n\nepoch 1/2: top-1 9.38 %\ntimm-ortho: ours\n")
                self.exitcode = -signal.SIGKILL
            else:
                run.run(self.folder)

        def is_alive(self):
            return False

    class Context:
        Process = staticmethod(lambda **arguments: Process(**arguments))
        set_forkserver_preload = staticmethod(lambda *_: None)

    monkeypatch.setattr(launcher, "get_context", lambda *_: Context)
    failed = launcher.local(experiment.folder, experiment.runs)
    assert {name: started.count(name) for name in experiment.runs} == {
        "linear-seed0": 2, "feature-seed0": launcher.ATTEMPTS, "global-seed0": 1}
    reason = "its process was killed (SIGKILL); out of memory"
    assert failed == {"feature-seed0": f"{reason}, see {experiment.folder / 'feature-seed0' / LOG}"}
    assert f"feature-seed0  failed    {reason}\n" in collect.status(experiment.folder)
    errors = capsys.readouterr().err
    assert errors.count("timm-ortho: feature-seed0 was killed (SIGKILL); it is started again") == launcher.ATTEMPTS - 1
    assert "timm-ortho: feature-seed0 failed: its process was killed" in errors
    assert_same_run(experiment.folder / "linear-seed0", whole)


def test_other_runs_continue_after_an_error(tmp_path, monkeypatch, capsys):
    """One run cannot read its checkpoint, and another run has an unexpected error. Neither run is started again."""
    requested = compared(tmp_path / "out", ["linear", "feature", "global"])
    experiment = planned(requested)
    for name in ("linear", "feature"):
        stopped(experiment.folder / f"{name}-seed0", monkeypatch, BATCHES + 1, KeyboardInterrupt)
    (experiment.folder / "linear-seed0" / "last.pth.tar").write_bytes(b"half")
    (experiment.folder / "linear-seed0" / LOG).write_text("a warning of another package\n")
    checkpoint = experiment.folder / "feature-seed0" / "last.pth.tar"
    torch.save({**torch.load(checkpoint, weights_only=False), "epoch": "one"}, checkpoint)
    with pytest.raises(LabError) as error:
        study.run(requested, parallel=2)
    assert str(error.value).startswith("2 of 3 runs failed, first ")
    assert str(error.value).endswith("; the same command tries them again")
    errors = capsys.readouterr().err
    assert "timm-ortho: feature-seed0 failed: TypeError: can only concatenate str (not \"int\") to str" in errors
    assert "timm-ortho: linear-seed0 failed: " in errors
    assert "last.pth.tar cannot be read (" in errors
    assert "warning" not in errors
    assert "Traceback (most recent call last)" in (experiment.folder / "feature-seed0" / LOG).read_text()
    assert "Traceback" not in (experiment.folder / "linear-seed0" / LOG).read_text()
    done, unfinished = finished(experiment.folder)
    assert done == [({}, "global", 0)]
    assert [text.partition(" (failed: ")[0] for text in unfinished] == ["linear-seed0", "feature-seed0"]
    assert [len(read_run(experiment.folder / f"{name}-seed0").sessions) for name in ("linear", "feature")] == [2, 2]


def test_a_second_launcher_gives_the_reason_and_leaves_the_run_of_the_first(tmp_path, capsys):
    """The run's lock is held by the process that the first launcher started, the last session in run.json.

    The process that the second launcher starts cannot lock the run, so it ends with an error.
    """
    experiment = planned(compared(tmp_path / "out", ["linear"]))
    folder = experiment.folder / "linear-seed0"
    sessions = [{"pid": 17, "host": "elsewhere", "begin": "a"}]
    change_run(folder, sessions=sessions)
    with folders.work_on(folder):
        failed = launcher.local(experiment.folder, experiment.runs)
    reason = f"another process trains {folder} (process 17 on host elsewhere): wait for it, or stop it"
    assert failed == {"linear-seed0": f"{reason}, see {folder / LOG}"}
    assert "it is started again" not in capsys.readouterr().err
    assert read_run(folder).sessions == sessions


def test_a_second_command_leaves_the_report_of_the_first(tmp_path):
    request = compared(tmp_path / "out", ["linear"])
    experiment = planned(request)
    (experiment.folder / "report.md").write_text("the report of the first")
    with folders.only_command(experiment.folder), pytest.raises(LabError, match="another command trains the runs in "):
        study.run(request)
    assert (experiment.folder / "report.md").read_text() == "the report of the first"


@contextmanager
def started(path, output, epochs):
    """Start `timm-ortho study run`. The process handles SIGINT even if pytest's parent process ignores it."""
    command = [sys.executable, "-m", "timm_ortho", "study", "run", path, "--scale", "smoke", "--device", "cpu",
               "--output", str(output), "--parallel", "2", "-o", f"epochs={epochs}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        try:
            yield process
        finally:
            process.kill()  # if the test has failed, do not wait for the process


def pids(output):
    """Return the process ids in the sessions of all runs."""
    return [pid for path in output.glob("*/run.json") if (pid := read_run(path.parent).last_session.get("pid"))]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition was not met within {seconds} s"
        time.sleep(0.1)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(sent, tmp_path):
    """Each signal to the command ends its runs. After SIGINT (Ctrl-C) and SIGTERM, the command writes a report."""
    output, path = tmp_path / "out", written(tmp_path)
    one = planned(request(path, output, epochs=100_000))  # the runs take longer than this test
    change_run(output / next(iter(one.runs)), result={})  # the command skips this run, as if it were finished
    with started(path, output, epochs=100_000) as process:
        wait_for(lambda: len(list(output.glob("*/last.pth.tar"))) >= 2)
        at_work = pids(output)
        assert len(at_work) == 2
        if sent != signal.SIGKILL:
            unfinish(output / next(iter(one.runs)))  # no report can be made from {}
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)  # for Ctrl-C, a terminal sends SIGINT to the whole process group
        else:
            process.send_signal(sent)
        _, errors = process.communicate(timeout=300)
    wait_for(lambda: not any(map(alive, at_work)), 120)
    if sent != signal.SIGKILL:
        assert process.returncode == 128 + sent
        assert errors.splitlines()[-1] == "interrupted: the same command continues from here"
        assert len(read(output / "results.json")["unfinished"]) == 4
        assert "Traceback" not in errors + "".join(path.read_text() for path in output.glob(f"*/{LOG}"))
        assert [word for word, _ in map(folders.state, map(output.joinpath, one.runs))] == [
            "waiting", "stopped", "stopped", "waiting"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_report_finished_runs(tmp_path, monkeypatch, capsys, sent):
    requested = compared(tmp_path / "out")
    run.run(planned(requested).folder / "linear-seed0")
    before = signal.getsignal(signal.SIGTERM)
    # If a shell started pytest in the background, this process ignores SIGINT.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(launcher, "local", lambda *_: signal.raise_signal(sent))
    try:
        assert study.run(requested) == 128 + sent
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert signal.getsignal(signal.SIGTERM) == before
    printed = capsys.readouterr()
    assert "not finished: feature-seed0" in printed.out
    assert printed.err.endswith("interrupted: the same command continues from here\n")
    results = read(tmp_path / "out" / "results.json")
    assert [item["connection"] for item in results["runs"]] == ["linear"]
    assert results["unfinished"] == ["feature-seed0"]


@linux
@pytest.mark.slow
def test_killed_runs_have_the_results_of_undisturbed_runs(tmp_path):
    """Both training processes are killed with SIGKILL while two runs of the study are waiting."""
    path, output = written(tmp_path, representation=False), tmp_path / "out"
    with started(path, output, epochs=25) as process:
        wait_for(lambda: len(list(output.glob("*/last.pth.tar"))) >= 2)
        for pid in pids(output):
            os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert errors.count(" was killed (SIGKILL); it is started again") == 2
    killed = [path.parent for path in output.glob("*/run.json") if len(read_run(path.parent).sessions) == 2]
    assert len(killed) == 2
    whole = planned(request(path, tmp_path / "whole", epochs=25)).folder
    run.run(whole / killed[0].name)
    assert_same_run(killed[0], whole / killed[0].name)


@pytest.mark.parametrize("write", [1, 2, 5])
def test_sigterm_ends_a_run_without_an_error(tmp_path, monkeypatch, write):
    """Slurm sends SIGTERM when a job reaches its time limit.

    If it arrives while torch.save writes, SystemExit can reach `run` as a RuntimeError.
    """
    folder, writes = one_run(tmp_path / "out"), []
    before = signal.getsignal(signal.SIGTERM)

    def train(*_):
        def counted(data):
            writes.append(data)
            if len(writes) == write:
                os.kill(os.getpid(), signal.SIGTERM)
            return file.write(data)

        with lab.whole_file(folder / LAST) as file:
            torch.save({"weights": torch.zeros(9)}, SimpleNamespace(write=counted, flush=file.flush))

    monkeypatch.setattr(run, "_train", train)
    try:
        with pytest.raises(SystemExit) as end:
            run.main([str(folder)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(writes) >= write
    assert end.value.code == 143
    assert not list(folder.glob("*.pth.tar*"))
    assert folders.state(folder) == ("stopped", "epoch 0 of 2")


def test_continuing_with_another_version_warns(tmp_path, monkeypatch, capsys):
    folder = one_run(tmp_path / "out")
    stopped(folder, monkeypatch, BATCHES + 1, Stop)
    sessions = read_run(folder).sessions
    change_run(folder, sessions=[{**sessions[0], "torch": "1.0"}])
    run.run(folder)
    assert f"was last trained with torch 1.0 and continues with {sessions[0]['torch']}" in capsys.readouterr().err
    assert state(folder)["epoch"] == 1


@pytest.mark.parametrize(("gpus", "parallel", "visible", "slots"), [
    (0, 3, None, ["0", "1", "0"]), (0, 2, "5,7", ["5", "7"]), (1, 4, None, ["0", "1"]), (1, 1, "5,7", ["5"]),
    (2, 4, "5,7", ["5,7"]),
])
def test_lab_runs_share_gpus_and_train_py_runs_do_not(
        monkeypatch, gpus, parallel, visible, slots):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    stage = Stage(".", {"device": "cuda"})
    runs = {"one": Variant([stage], "train.py" if gpus else "lab", gpus=gpus)}
    assert launcher._slots(runs, parallel) == [{"CUDA_VISIBLE_DEVICES": slot} for slot in slots]
    with pytest.raises(LabError, match="needs 3 GPUs per node and 1 node, but this machine is one node with 2 GPUs"):
        launcher._slots({"one": Variant([stage], "train.py", gpus=3)}, 1)
    named = {"one": Variant([Stage(".", {"device": "cuda:1"})])}
    assert launcher._slots(named, 2) == [{}, {}]


def test_progress_of_a_result_without_accuracy(tmp_path, capsys):
    experiment = planned(compared(tmp_path / "out", ["linear"]))
    progress = launcher._Progress(experiment.folder, experiment.runs)
    change_run(experiment.folder / "linear-seed0", result={"top1": None})
    progress.ended("linear-seed0")
    assert "[1/1] linear-seed0: top-1 unknown" in capsys.readouterr().err


@linux
@pytest.mark.parametrize(
    ("status", "waits"), [(143, True), (-15, True), (-12, True), (-9, False), (1, False), (0, False)])
def test_a_terminated_slurm_task_waits_to_be_requeued(tmp_path, monkeypatch, status, waits):
    """Slurm sends SIGTERM to all processes of a preempted job. If the task ended at once, Slurm would not requeue it.

    The exit status of a run that Slurm has signalled is 143 (128 + SIGTERM), -15 (SIGTERM) or -12 (SIGUSR2).
    """
    pytest.importorskip("submitit")
    variables = dict(SLURM_JOB_ID="13", SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="1", SLURM_JOB_NODELIST="node7",
                     SLURM_NODEID="0", SLURM_NTASKS="1", SLURM_JOB_NUM_NODES="1", SLURM_PROCID="0", SLURM_LOCALID="0",
                     _TEST_CLUSTER_="slurm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(slurm.subprocess, "check_output", lambda *_, **__: b"node7\n")
    monkeypatch.setattr(slurm.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=status))
    waited = []
    monkeypatch.setattr(slurm.time, "sleep", waited.append)
    assert slurm._Task([])(str(tmp_path)) == status
    assert bool(waited) == waits
    first = os.environ["MASTER_PORT"]
    assert (os.environ["MASTER_ADDR"], os.environ["NODE_RANK"]) == ("node7", "0")
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")  # tasks of an array that share a node have different ports
    slurm._Task([])(str(tmp_path))
    assert os.environ["MASTER_PORT"] != first


@pytest.fixture
def queue(monkeypatch):
    """Mock Slurm. Return the lists of jobs in the queue and of submitted folders."""
    queued, submitted = [], []

    def map_array(task, folders):
        submitted.append([Path(folder).name for folder in folders])
        return [SimpleNamespace(job_id=f"{len(submitted)}_{index}") for index in range(len(folders))]

    monkeypatch.setattr(slurm.Slurm, "executor", lambda *_: SimpleNamespace(map_array=map_array))
    monkeypatch.setattr(slurm.subprocess, "run", lambda *_, **__: SimpleNamespace(
        returncode=0, stdout="\n".join(queued)))
    return queued, submitted


def test_nothing_is_submitted_twice(tmp_path, queue, capsys):
    """One run is finished, one is in the queue, one has started before its id was stored, and one's job has failed."""
    pytest.importorskip("submitit")
    queued, submitted = queue
    requested = compared(tmp_path / "out", ["linear", "feature", "global", "hybrid"], epochs=1)
    folder = planned(requested).folder
    run.run(folder / "linear-seed0")
    change_run(folder / "global-seed0", sessions=[{"job": "7_1"}])
    queued.append("7_1")
    with folders.work_on(folder / "hybrid-seed0"):
        assert study.run(requested, slurm=study.Slurm(parallel=2)) == 0
    assert submitted == [["feature-seed0"]]
    assert "1 runs submitted, at most 2 at the same time; 2 were already in the queue, 1 are finished: timm-ortho " in (
        capsys.readouterr().out)
    assert read_run(folder / "feature-seed0").job == "1_0"
    queued.append("1_0")
    study.run(requested, slurm=study.Slurm())
    assert submitted[1:] == [["hybrid-seed0"]]
    queued.clear()
    study.run(requested, slurm=study.Slurm())
    assert submitted[2:] == [["feature-seed0", "global-seed0", "hybrid-seed0"]]


def test_errors_of_slurm_are_one_line(tmp_path, monkeypatch, queue):
    """Without an answer of squeue, it is unknown which runs are queued, so none is submitted."""
    submitit = pytest.importorskip("submitit")
    experiment = planned(compared(tmp_path / "out", ["linear"]))

    def refuse(*_):
        raise submitit.core.utils.FailedJobError("sbatch: error:\n invalid partition specified: nope")

    monkeypatch.setattr(slurm.Slurm, "executor", lambda *_: SimpleNamespace(map_array=refuse))
    with pytest.raises(LabError, match=r"^sbatch failed: sbatch: error: invalid partition specified: nope$"):
        slurm.Slurm().submit(experiment.folder, experiment.runs)
    monkeypatch.setattr(
        slurm.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="Socket timed\nout"))
    with pytest.raises(LabError, match=r"^squeue failed: Socket timed out$"):
        slurm.Slurm().submit(experiment.folder, experiment.runs)


def test_slurm_without_sbatch_is_refused(tmp_path, monkeypatch):
    def none(**_):
        raise RuntimeError("Could not detect srun")

    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(SlurmExecutor=none))
    with pytest.raises(LabError, match="--launcher slurm needs Slurm, but sbatch is missing"):
        slurm.Slurm().submit(tmp_path, {"a": Variant([Stage(".", {}, stop_epoch=1)])})
