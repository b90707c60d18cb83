"""Test the commands that scripts/train.sh and scripts/train.sbatch start, and the scripts' errors."""
import json
import os
import shutil
import stat
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml

from timm_ortho.lab import LabError
from timm_ortho.lab.planning import recipe

SCRIPTS = Path(__file__).parents[2] / "scripts"
STAND_IN = Path(__file__).parents[1] / "helpers" / "stand_in_train.py"
TORCHRUN = ["-m", "torch.distributed.run"]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a function that builds train.sh's command, without the interpreter. By default there are four GPUs.

    Each GPU has 80 GB.
    """
    monkeypatch.syspath_prepend(str(SCRIPTS))
    (tmp_path / "train.py").write_text(STAND_IN.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text("batch_size: 1024\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("TIMM_DIR", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)

    def make(*options, data="DATA", name="recipe.yaml", model="vit_small_linear", gpus=4, **environment):
        from by_hand import command

        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Namespace(total_memory=80e9))
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        return command(name, model, data, *options)

    return make


def train_py(data="DATA", file="recipe.yaml"):
    return ["train.py", "-c", file, "--model", "vit_small_linear", "--data-dir", data]


# ------------------------------------------------------------------------------------------ commands
@pytest.mark.parametrize(("gpus", "options", "launched", "added"), [
    (4, ["--epochs", "3", "--experiment", "a b"], [*TORCHRUN, "--standalone", "--nproc-per-node", "4"],
     ["--batch-size", "256"]),
    (1, [], [*TORCHRUN, "--standalone", "--nproc-per-node", "1"], []),
    (0, [], [], ["--device", "cpu"]),
    (0, ["--device=cpu"], [], []),
    (4, ["--device", "cpu"], [], []),
])
def test_the_batch_is_divided_among_gpus(command, gpus, options, launched, added):
    assert command(*options, data="my data", gpus=gpus) == [*launched, *train_py("my data"), *added, *options]


def test_several_machines(command):
    started = command("--sync-bn", NNODES="2", NODE_RANK="1", MASTER_ADDR="node7")
    assert started == [
        *TORCHRUN, "--nnodes", "2", "--node-rank", "1", "--master-addr", "node7", "--master-port", "29500",
        "--nproc-per-node", "4", *train_py(), "--batch-size", "128", "--sync-bn"]


@pytest.mark.parametrize(("options", "environment", "added"), [
    (["--batch-size=64"], {}, []),
    (["--batch-size", "64"], {}, []),
    (["--grad-accum-steps", "8"], {}, ["--batch-size", "32"]),
    (["--validation-batch-size", "500"], {"NPROC_PER_NODE": "2"}, ["--batch-size", "512"]),
])
def test_batch_is_divided_unless_it_is_set(command, options, environment, added):
    assert command(*options, **environment)[6:] == [*train_py()[1:], *added, *options]


AMP = ["--amp", "--amp-dtype", "bfloat16"]


@pytest.mark.parametrize(("name", "model", "gigabytes", "options", "added"), [
    ("vit_b_imagenet1k", "vit_base_linear", "24", [], ["--grad-accum-steps", "4", *AMP, "--batch-size", "256"]),
    ("vit_b_imagenet1k", "vit_base_linear", "24", ["--amp"], ["--grad-accum-steps", "4", "--batch-size", "256"]),
    ("vit_b_imagenet1k", "vit_base_linear", "80", [], [*AMP, "--batch-size", "1024"]),
    ("vit_b_imagenet1k", "vit_base_linear", "80", ["--grad-accum-steps", "8"], ["--batch-size", "128"]),
    ("vit_b_imagenet1k", "vit_base_linear", "24", ["--batch-size", "7"], []),
    ("resnetv2_50_imagenet1k", "resnetv2_50_orthog", "24", [], ["--batch-size", "384"]),
])
def test_a_step_fits_into_the_memory_of_a_gpu(command, name, model, gigabytes, options, added):
    """The product of processes, accumulated steps and images per step is the recipe's batch of 4096 or 1536."""
    started = command("--gpu-memory", gigabytes, *options, name=name, model=model, gpus=4)
    assert started[started.index("DATA") + 1:] == [*added, *options]


def test_the_memory_of_this_machines_gpus_is_the_default(command):
    small = command(name="vit_b_imagenet1k", model="vit_base_linear")
    assert small == command("--gpu-memory", "80", name="vit_b_imagenet1k", model="vit_base_linear")
    assert small != command("--gpu-memory", "24", name="vit_b_imagenet1k", model="vit_base_linear")


@pytest.mark.parametrize("name", ["vit_base_patch16_224_imagenet1k", "resnetv2_50_imagenet1k"])
@pytest.mark.parametrize("model", [
    "resnetv2_50_orthog", "swin_tiny_patch4_window7_224_ortho", "vit_tiny_patch16_384_ortho", "vit_small_linear",
    "convnext_pico", "efficientnet_b0_ortho"])
def test_the_recipes_of_imagenet_fit_every_architecture(command, name, model):
    assert command(name=name, model=model, gpus=0)[-2:] == ["--device", "cpu"]


def test_a_recipe_without_a_batch_size_uses_timms(command):
    Path("recipe.yaml").write_text("lr: 0.1\n", encoding="utf-8")
    assert command()[-2:] == ["--batch-size", "32"]  # train.py's default of 128, divided by four GPUs


def test_options_of_the_recipe_are_used(command):
    Path("recipe.yaml").write_text(
        "batch_size: 1024\ngrad_accum_steps: 8\nexperiment: mine\noutput: there\n", encoding="utf-8")
    Path("there/mine").mkdir(parents=True)
    Path("there/mine/last.pth.tar").touch()
    assert command()[6:] == [*train_py()[1:], "--batch-size", "32", "--resume", "there/mine/last.pth.tar"]
    assert command("--grad-accum-steps", "2", "--experiment", "other")[-6:-4] == ["--batch-size", "128"]
    Path("recipe.yaml").write_text("device: cuda:1\n", encoding="utf-8")
    assert command(gpus=0) == train_py()


@pytest.mark.parametrize(("options", "folder", "resumed"), [
    (["--experiment", "mine"], "output/train/mine", True),
    (["--output", "there", "--experiment=mine"], "there/mine", True),
    (["--experiment", "mine"], "output/train/other", False),
    ([], "output/train/mine", False),
    (["--experiment", "mine", "--resume", "x"], "output/train/mine", False),
])
def test_a_run_with_a_checkpoint_is_resumed(command, options, folder, resumed):
    checkpoint = Path(folder, "last.pth.tar")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    added = ["--resume", str(checkpoint)] if resumed else []
    assert command(*options, gpus=0) == [*train_py(), *added, "--device", "cpu", *options]


def test_shipped_recipe_and_a_checkout_elsewhere(command, tmp_path):
    started = command(name="vit_s_cifar10", gpus=0, TIMM_DIR=str(tmp_path))
    assert started[:3] == [str(tmp_path / "train.py"), "-c", str(recipe.shipped()["vit_s_cifar10"])]


# --------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(("options", "given", "words"), [
    ([], {"NNODES": "3", "NODE_RANK": "0"}, "NNODES is 3: set NODE_RANK (0 to 2, different on each"),
    ([], {"NNODES": "two"}, "NNODES is 'two', but must be a positive number"),
    ([], {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE is '0', but must be a positive number"),
    ([], {"gpus": 0, "NPROC_PER_NODE": "2"}, "several processes need GPUs, but the device is the CPU"),
    ([], {"NPROC_PER_NODE": "3"}, "batch_size 1024 is not divisible by 3 (3 processes x grad_accum_steps 1)"),
    ([], {"name": "vit_s_imagenet1k", "model": "resnetv2_50_orthog"},
     "recipe 'vit_s_imagenet1k' does not fit resnetv2_50_orthog: ResNetV2.__init__() got an unexpected keyword "
     "argument 'img_size'; vit_base_patch16_224_imagenet1k and resnetv2_50_imagenet1k fit every architecture"),
    (["--img-size", "96"], {"gpus": 0, "model": "vit_tiny_patch16_224_ortho"},
     "recipe 'recipe.yaml' does not fit vit_tiny_patch16_224_ortho: Input height (96) doesn't match"),
    (["--gpu-memory", "1"], {"name": "vit_b_imagenet1k", "model": "vit_base_ortho"},
     "vit_base_ortho: a step with 1 image needs 2.0 GB with amp, but a plan uses only 0.9 GB of"),
    (["--gpu-memory", "x"], {}, "--gpu-memory is x, but must be a positive number of gigabytes"),
    ([], {"model": "vit_smal_ortho"}, "there is no model 'vit_smal_ortho'; did you mean 'vit_small_ortho'"),
    ([], {"TIMM_DIR": "/nowhere"}, "there is no /nowhere/train.py: use timm's train.py"),
    ([], {"name": "vit_s_cifr10"}, "there is no recipe 'vit_s_cifr10'; did you mean 'vit_s_cifar10'"),
])
def test_errors_of_the_train_script(command, options, given, words):
    with pytest.raises(LabError) as raised:
        command(*options, **given)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


# ------------------------------------------------------------------------------------------- the scripts
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
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def bash(script, *arguments, **environment):
    return subprocess.run(["bash", str(SCRIPTS / script), *arguments], env={**os.environ, **environment},
                          capture_output=True, text=True)


@needs_bash
def test_an_error_is_one_line():
    process = bash("train.sh", "recipe", PYTHON=sys.executable)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "train.sh: usage: scripts/train.sh RECIPE MODEL DATA [options of train.py ...]\n"


@needs_bash
def test_the_printed_command_is_started(tmp_path):
    (tmp_path / "train.py").write_text(STAND_IN.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text("batch_size: 8\ndevice_modules: [timm_ortho]\n", encoding="utf-8")
    process = bash(
        "train.sh", str(tmp_path / "recipe.yaml"), "vit_test_ortho", "my data", "--epochs", "1", "--output",
        str(tmp_path), "--experiment", "run", PYTHON=sys.executable, TIMM_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert process.returncode == 0, process.stderr
    assert f"train.sh: {sys.executable} {tmp_path / 'train.py'} -c {tmp_path / 'recipe.yaml'}" in process.stderr
    options = yaml.safe_load((tmp_path / "run" / "args.yaml").read_text(encoding="utf-8"))
    assert [options[key] for key in ("model", "data_dir", "batch_size", "device")] == [
        "vit_test_ortho", "my data", 8, "cpu"]
    assert (tmp_path / "run" / "summary.csv").is_file()


@needs_bash
def test_slurm(tmp_path):
    for name, content in {"record": RECORD, "srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    process = bash(
        "train.sbatch", "recipe.yaml", "vit_small_linear", "my data", "--sync-bn", PYTHON="record",
        PATH=f"{tmp_path}:{os.environ['PATH']}", RECORD=str(tmp_path / "calls"), SLURM_SUBMIT_DIR=str(SCRIPTS.parent),
        SLURM_JOB_NODELIST="node[7-8]", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="4000123")
    assert process.returncode == 0, process.stderr
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text(encoding="utf-8").splitlines()]
    given = ["recipe.yaml", "vit_small_linear", "my data", "--sync-bn", "--experiment", "job-4000123"]
    assert calls == [
        [[str(SCRIPTS / "by_hand.py"), *given],
         {"NNODES": "2", "NODE_RANK": rank, "MASTER_ADDR": "node7", "MASTER_PORT": "20123"}] for rank in "01"]


@needs_bash
def test_slurm_elsewhere(tmp_path):
    process = bash("train.sbatch", "r", "m", "d", SLURM_SUBMIT_DIR=str(tmp_path))
    assert process.returncode == 2
    assert process.stderr == (
        f"train.sbatch: there is no {tmp_path}/scripts/train.sh: call sbatch in the root of the repository\n")


@needs_bash
@pytest.mark.parametrize("name", ["train.sh", "train.sbatch"])
def test_scripts_parse(name):
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SCRIPTS / name)], check=True)
    assert name == "train.sbatch" or (SCRIPTS / name).stat().st_mode & stat.S_IXUSR
