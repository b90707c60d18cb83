"""scripts/train.sh and scripts/train.sbatch: the command that they start, and what they refuse, with nothing started.

torchrun, srun and scontrol are stand-ins that write down how they were called. So is Python, but for two questions
only: which timm is installed, and how many GPUs there are.
"""
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from timm_ortho.lab import recipe

SCRIPTS = Path(__file__).parent.parent / "scripts"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    *importlib.metadata*) [[ -n $FAKE_TIMM ]] && echo "$FAKE_TIMM" ;;
    *device_count*) echo "$FAKE_GPUS" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
RECORD = f"""#!{sys.executable}
import json, os, sys
names = "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([sys.argv[1:], {{name: os.environ.get(name) for name in names}}]) + "\\n")
"""
SRUN = """#!/usr/bin/env bash
[[ $1 == --kill-on-bad-exit=1 ]] && shift
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames node[7-8]" ]] && printf 'node7\\nnode8\\n'
"""


@pytest.fixture
def bench(tmp_path):
    """A folder with the stand-ins, a checkout of timm 1.0.31, a recipe, and how to start the scripts there."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, content in {"python": PYTHON, "torchrun": RECORD, "srun": SRUN, "scontrol": SCONTROL}.items():
        (binaries / name).write_text(content)
        (binaries / name).chmod(0o755)
    checkout(tmp_path, "1.0.31")
    (tmp_path / "recipe.yaml").write_text("batch_size: 1024\n")
    (tmp_path / "work").mkdir()
    return tmp_path


def checkout(folder, version):
    (folder / "timm" / "timm").mkdir(parents=True, exist_ok=True)
    (folder / "timm" / "train.py").write_text("group.add_argument('--device-modules', default=None)\n")
    (folder / "timm" / "timm" / "version.py").write_text(f"__version__ = '{version}'\n")


def start(bench, *arguments, script="train.sh", cwd="work", gpus=4, installed="1.0.31", **environment):
    """Runs a script; returns its process and what torchrun was called with."""
    kept = ("HOME", "PYTHONPATH", "LANG", "TMPDIR")
    env = {key: os.environ[key] for key in kept if key in os.environ}
    env.update(PATH=f"{bench / 'bin'}:{os.environ['PATH']}", RECORD=str(bench / "record"), FAKE_GPUS=str(gpus),
               FAKE_TIMM=installed, TIMM_DIR=str(bench / "timm"), OMP_NUM_THREADS="1")
    env.update(environment)
    process = subprocess.run(["bash", str(SCRIPTS / script), *map(str, arguments)], cwd=bench / cwd, text=True,
                             env={key: value for key, value in env.items() if value is not None}, capture_output=True)
    record = bench / "record"
    return process, [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def started(bench, *arguments, **options):
    """The one command line that torchrun got."""
    process, calls = start(bench, bench / "recipe.yaml", "vit_small_linear", *arguments, **options)
    assert process.returncode == 0, process.stderr
    [(command, _)] = calls
    return command


def refused(bench, *arguments, **options):
    """What is said where nothing is started."""
    process, calls = start(bench, *arguments, **options)
    assert (process.returncode, process.stdout, calls) == (2, "", [])
    return process.stderr


def train_py(bench, data="DATA"):
    return [str(bench / "timm" / "train.py"), "-c", str(bench / "recipe.yaml"), "--model", "vit_small_linear",
            "--data-dir", data]


# ------------------------------------------------------------------------------------------ what is started
@pytest.mark.parametrize(("gpus", "processes", "given", "added"), [
    (4, "4", ["--epochs", "3", "--experiment", "a b"], ["--batch-size", "256"]),
    (1, "1", [], []),
    (0, "1", [], ["--device", "cpu"]),
    (0, "1", ["--device=cpu"], []),
])
def test_a_machine_shares_the_batch_among_its_gpus_or_has_the_cpu(bench, gpus, processes, given, added):
    assert started(bench, "my data", *given, gpus=gpus) == [
        "--standalone", "--nproc-per-node", processes, *train_py(bench, "my data"), *added, *given]


def test_several_machines(bench):
    command = started(bench, "DATA", "--sync-bn", NNODES="2", NODE_RANK="1", MASTER_ADDR="node7")
    assert command == [
        "--nnodes", "2", "--nproc-per-node", "4", "--node-rank", "1", "--master-addr", "node7",
        "--master-port", "29500", *train_py(bench), "--batch-size", "128", "--sync-bn"]


def test_port_and_processes_are_taken_from_the_environment(bench):
    command = started(bench, "DATA", NNODES="4", NODE_RANK="0", MASTER_ADDR="n", MASTER_PORT="1234", NPROC_PER_NODE="2")
    assert command[:10] == ["--nnodes", "4", "--nproc-per-node", "2", "--node-rank", "0", "--master-addr", "n",
                            "--master-port", "1234"]
    assert command[-2:] == ["--batch-size", "128"]


@pytest.mark.parametrize(("given", "added"), [
    (["-b", "64"], []), (["-b64"], []), (["--batch-size=64"], []), (["--batch-size", "64"], []),
    (["--grad-accum-steps", "8"], ["--batch-size", "32"]), (["--grad-accum-steps=2"], ["--batch-size", "128"]),
    (["-vb", "500"], ["--batch-size", "256"]),
])
def test_batch_is_divided_unless_it_is_given(bench, given, added):
    assert started(bench, "DATA", *given) == ["--standalone", "--nproc-per-node", "4", *train_py(bench), *added, *given]


def test_recipe_without_a_batch_has_timms(bench):
    (bench / "recipe.yaml").write_text("lr: 0.1\n")
    assert started(bench, "DATA")[-2:] == ["--batch-size", "32"]  # of train.py's 128


def test_train_py_of_the_current_folder(bench):
    command = started(bench, "DATA", TIMM_DIR=None, cwd="timm")
    assert command[3] == "./train.py"


@pytest.mark.parametrize(("given", "folder", "added"), [
    (["--experiment", "mine"], "output/train/mine", True),
    (["--output", "there", "--experiment=mine"], "there/mine", True),
    (["--experiment", "mine"], "output/train/other", False),
    ([], "output/train/mine", False),
    (["--experiment", "mine", "--resume", "x"], "output/train/mine", False),
])
def test_a_run_with_a_checkpoint_is_resumed(bench, given, folder, added):
    checkpoint = bench / "work" / folder / "last.pth.tar"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    command = started(bench, "DATA", *given, gpus=1)
    resume = ["--resume", f"{folder}/last.pth.tar"] if added else []
    assert command == ["--standalone", "--nproc-per-node", "1", *train_py(bench), *resume, *given]


def test_shipped_recipe(bench):
    process, [(command, _)] = start(bench, "vit_s_cifar10", "vit_small_ortho", "DATA")
    assert process.returncode == 0
    assert Path(command[5]) == recipe.shipped()["vit_s_cifar10"]
    assert command[-2:] == ["--batch-size", "256"]


def test_what_is_started_is_shown(bench):
    process, _ = start(bench, bench / "recipe.yaml", "vit_small_ortho", "my data", gpus=1)
    assert f"train.sh: torchrun --standalone --nproc-per-node 1 {bench / 'timm' / 'train.py'} -c" in process.stderr
    assert r"--data-dir my\ data" in process.stderr


# --------------------------------------------------------------------------------------- what is refused
CLONE = ("that of timm 1.0.31:\n"
         "git clone --depth 1 --branch v1.0.31 https://github.com/huggingface/pytorch-image-models "
         "&& export TIMM_DIR=$PWD/pytorch-image-models\n")


def test_no_train_py(bench):
    said = refused(bench, bench / "recipe.yaml", "m", "DATA", TIMM_DIR=None)
    assert said == f"train.sh: there is no train.py in this folder, and TIMM_DIR is not set; {CLONE}"
    said = refused(bench, bench / "recipe.yaml", "m", "DATA", TIMM_DIR=None, installed="1.0.32.dev0")
    assert "that of timm 1.0.32.dev0:\ngit clone --depth 1 --branch main https" in said
    said = refused(bench, bench / "recipe.yaml", "m", "DATA", TIMM_DIR="/nowhere")
    assert said == f"train.sh: there is no train.py in /nowhere; {CLONE}"


def test_train_py_of_something_else(bench):
    (bench / "work" / "train.py").write_text("import torch\n")
    said = refused(bench, bench / "recipe.yaml", "m", "DATA", TIMM_DIR=None)
    assert said == f"train.sh: ./train.py is not timm's, or older than its option --device-modules; {CLONE}"


@pytest.mark.parametrize(("there", "installed", "fits"), [
    ("1.0.31", "1.0.31", True),
    ("1.0.31.dev0", "1.0.31", True),  # shortly before the release
    ("1.0.32.dev0", "1.0.31", True),  # after it
    ("1.0.31", "1.0.32.dev0", True),  # installed from the repository
    ("1.0.10.dev0", "1.0.9", True),
    ("1.0.30", "1.0.31", False),
    ("1.0.32", "1.0.31", False),
    ("1.0.30.dev0", "1.0.31", False),
    ("1.0.33.dev0", "1.0.31", False),
    ("1.1.32.dev0", "1.0.31", False),
    ("2.0.31", "1.0.31", False),
])
def test_version_of_the_checkout(bench, there, installed, fits):
    checkout(bench, there)
    process, calls = start(bench, bench / "recipe.yaml", "m", "DATA", installed=installed)
    assert (process.returncode, len(calls)) == ((0, 1) if fits else (2, 0))
    if not fits:
        assert process.stderr == (
            f"train.sh: {bench / 'timm' / 'train.py'} is of timm {there}, but timm {installed} is installed; {CLONE}")


def test_scripts_alone_have_no_version(bench):
    shutil.rmtree(bench / "timm" / "timm")
    process, calls = start(bench, bench / "recipe.yaml", "m", "DATA")
    assert len(calls) == 1
    assert "has no timm/ beside it: its version is not checked, timm 1.0.31 is used" in process.stderr


def test_unknown_recipe(bench):
    said = refused(bench, "vit_s_cifr10", "vit_small_ortho", "DATA")
    assert said.startswith("timm-ortho: error: there is no recipe 'vit_s_cifr10': the nearest is 'vit_s_cifar10'")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("arguments", "environment", "message"), [
    (["recipe"], {}, "usage: scripts/train.sh RECIPE MODEL DATA [options of train.py ...]"),
    ([], {"installed": ""}, "python has no timm: activate the environment that has it, or name its python in PYTHON"),
    ([], {"NNODES": "2"}, "NNODES is 2: set NODE_RANK (0 to 1, one on each) and MASTER_ADDR (that of 0)"),
    ([], {"NNODES": "3", "NODE_RANK": "0"},
     "NNODES is 3: set NODE_RANK (0 to 2, one on each) and MASTER_ADDR (that of 0)"),
    ([], {"NNODES": "two"}, "NNODES is 'two', but must be a number"),
    ([], {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE is '0', but must be a number"),
    ([], {"gpus": 0, "NPROC_PER_NODE": "2"},
     "PyTorch sees no GPU here, and timm's train.py trains in several processes on GPUs only"),
    ([], {"NPROC_PER_NODE": "3"}, "the recipe's batch of 1024 does not divide into 3 equal parts (processes 3, "
                                  "--grad-accum-steps 1): choose others, or give --batch-size"),
    (["--grad-accum-steps", "x"], {}, "--grad-accum-steps is 'x', but must be a number"),
])
def test_errors(bench, arguments, environment, message):
    words = arguments if arguments == ["recipe"] else [bench / "recipe.yaml", "m", "DATA", *arguments]
    assert refused(bench, *words, **environment) == f"train.sh: {message}\n"


# ------------------------------------------------------------------------------------------------- Slurm
def test_slurm(bench):
    root = SCRIPTS.parent
    process, calls = start(
        bench, bench / "recipe.yaml", "vit_small_linear", "my data", "--sync-bn", script="train.sbatch",
        SLURM_SUBMIT_DIR=str(root), SLURM_JOB_NODELIST="node[7-8]", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="4000123")
    assert process.returncode == 0, process.stderr
    for rank, (command, environment) in enumerate(calls):
        assert environment == {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "node7", "MASTER_PORT": "20123"}
        assert command == ["--nnodes", "2", "--nproc-per-node", "4", "--node-rank", str(rank), "--master-addr", "node7",
                           "--master-port", "20123", *train_py(bench, "my data"), "--batch-size", "128", "--sync-bn",
                           "--experiment", "job-4000123"]
    assert len(calls) == 2


def test_slurm_elsewhere(bench):
    said = refused(bench, "r", "m", "d", script="train.sbatch", SLURM_SUBMIT_DIR=str(bench))
    assert said == (f"train.sbatch: there is no {bench}/scripts/train.sh: call sbatch in the root of the repository\n")


@pytest.mark.parametrize("name", ["train.sh", "train.sbatch"])
def test_scripts_are_sound(name):
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SCRIPTS / name)], check=True)
    assert name == "train.sbatch" or (SCRIPTS / name).stat().st_mode & stat.S_IXUSR
