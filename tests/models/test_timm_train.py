"""timm's unmodified train.py and validate.py run the variants.

The environment variable TIMM_DIR must be a folder with timm's train.py and validate.py, which timm's wheel lacks. The
tests run copies of the scripts, which import the installed timm. Images are synthetic, unless TIMM_DATA is a folder
that contains FashionMNIST/raw/. In that case, the images come from Fashion-MNIST's test set.
"""
import csv
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from helpers.authors_vit import SMALL, SMALL_ARGUMENTS, authors_vit, put_into_cache
from PIL import Image
from safetensors.torch import save_file

import timm_ortho
from timm_ortho.lab.planning.recipe import shipped, text

TIMM_DIR = os.environ.get("TIMM_DIR")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TIMM_DIR, reason="TIMM_DIR, the folder of timm's train.py, is not set"),
]

MODELS = {
    "vit_small_ortho": ["--model-kwargs", "img_size=28", "patch_size=7", "embed_dim=48", "depth=2", "num_heads=3"],
    "resnetv2_18_orthog": [],
}

# timm passes a device id to DDP. PyTorch refuses it for modules on the CPU, so this script removes it.
LAUNCH = """
import runpy
import sys

from torch.nn import parallel


class CpuDistributedDataParallel(parallel.DistributedDataParallel):
    def __init__(self, module, device_ids=None, **kwargs):
        super().__init__(module, **kwargs)


parallel.DistributedDataParallel = CpuDistributedDataParallel
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timm_scripts")
    for name in ("train.py", "validate.py"):
        source = Path(TIMM_DIR) / name
        assert source.is_file(), f"TIMM_DIR={TIMM_DIR} has no {name}"
        shutil.copy(source, folder)
    (folder / "launch.py").write_text(LAUNCH)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a folder with train/ and validation/ images of ten classes."""
    folder = tmp_path_factory.mktemp("images")
    if os.environ.get("TIMM_DATA"):
        from torchvision.datasets import FashionMNIST

        data = FashionMNIST(os.environ["TIMM_DATA"], train=False)
        examples = [(image, label) for image, label in zip(data.data.numpy(), data.targets.tolist(), strict=True)]
    else:  # the class of an image is the position of a bright row
        generator = np.random.default_rng(0)
        pixels = generator.integers(0, 120, size=(600, 28, 28)).astype(np.uint8)
        examples = [(image, index % 10) for index, image in enumerate(pixels)]
        for image, label in examples:
            image[2 * label + 3] = 255
    for index, (image, label) in enumerate(examples[:600]):
        target = folder / ("train" if index < 400 else "validation") / str(label)
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(target / f"{index}.png")
    return folder


def call(command, cwd, **variables):
    """Run a command and return its output. If the command fails, show the output."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env.update(variables)
    process = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=env, text=True, timeout=900,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.returncode == 0, f"{' '.join(map(str, command))}\n{process.stdout[-4000:]}"
    return process.stdout


def common(model, images):
    return ["--data-dir", images, "--model", model, *MODELS[model], "--num-classes", "10",
            "--input-size", "3", "28", "28", "--crop-pct", "1.0",
            "--batch-size", "40", "--workers", "0", "--no-prefetcher", "--device", "cpu"]


def train(scripts, images, output, model, *options, processes=1, epochs=1, resume=None):
    """Run train.py and return the rows of its summary.csv."""
    command = [scripts / "train.py", *common(model, images), "--device-modules", "timm_ortho",
               "--epochs", str(epochs), "--warmup-epochs", "0", "--opt", "adamw", "--lr", "1e-3", "--no-aug",
               "--output", output, "--experiment", "run", *options]
    if resume:
        command += ["--resume", resume]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["-m", "torch.distributed.run", "--nproc-per-node", processes, "--master-addr", "127.0.0.1",
                   "--master-port", port, scripts / "launch.py", *command]
    log = call(command, scripts)
    assert processes == 1 or f"Process 0, total {processes}" in log
    with open(output / "run" / "summary.csv", newline="") as file:
        return list(csv.DictReader(file))


def validate(scripts, images, model, checkpoint, output):
    """Run validate.py with `python -m timm_ortho run` and return the top-1 accuracy."""
    call(["-m", "timm_ortho", "run", scripts / "validate.py", *common(model, images), "--checkpoint", checkpoint,
          "--results-file", output, "--results-format", "json"], scripts)
    results = json.loads(output.read_text())
    return (results[0] if isinstance(results, list) else results)["top1"]


def test_the_cards_command_evaluates_the_authors_weights(scripts, images, tmp_path):
    """Run the command from the model cards. The Hub cache has small models with the authors' parameter names."""
    cards = Path(__file__).parents[2] / "model_cards" / "weights"
    card = (cards / "vit_base_ortho.authors_in1k.md").read_text(encoding="utf-8")
    command = shlex.split(re.search(r"^    python (-m timm_ortho run validate.py .*)$", card, re.MULTILINE)[1])
    command = [str({"validate.py": scripts / "validate.py", "IMAGENET": images}.get(word, word)) for word in command]
    torch.manual_seed(0)
    for kind, add in (("ortho", None), ("linear", torch.add)):
        save_file(authors_vit(**SMALL, add=add).state_dict(), tmp_path / "model.safetensors")
        put_into_cache(tmp_path, tmp_path / "model.safetensors", kind)
    kwargs = [f"{key}={value}" for key, value in SMALL_ARGUMENTS.items()]
    call([*command, "--model-kwargs", *kwargs, "--img-size", "64", "--device", "cpu", "--workers", "0",
          "--no-prefetcher", "--results-file", tmp_path / "results.json", "--results-format", "json"],
         scripts, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["model"] for row in results} == {"vit_base_ortho.authors_in1k", "vit_base_linear.authors_in1k"}
    assert all(row["crop_pct"] == 1.0 and row["img_size"] == 64 for row in results)


@pytest.mark.parametrize("model", MODELS)
def test_trains_resumes_and_validates(scripts, images, tmp_path, model):
    first = train(scripts, images, tmp_path / "first", model, epochs=1)
    checkpoint = tmp_path / "first" / "run" / "last.pth.tar"
    assert [row["epoch"] for row in first] == ["0"]
    top1 = validate(scripts, images, model, checkpoint, tmp_path / "first.json")
    assert top1 == pytest.approx(float(first[0]["eval_top1"]), abs=0.01)

    more = train(scripts, images, tmp_path / "more", model, epochs=3, resume=checkpoint)
    assert [row["epoch"] for row in more] == ["1", "2"]
    assert float(more[-1]["train_loss"]) < float(first[0]["train_loss"])
    top1 = validate(scripts, images, model, tmp_path / "more" / "run" / "last.pth.tar", tmp_path / "more.json")
    assert top1 == pytest.approx(float(more[-1]["eval_top1"]), abs=0.01)


@pytest.mark.parametrize("ema", [False, True])
def test_a_checkpoint_of_train_py_can_be_pushed(scripts, images, tmp_path, ema):
    """The pushed model has the checkpoint's weights and model arguments. The card contains its top-1 accuracy."""
    [row] = train(scripts, images, tmp_path, "vit_small_ortho", *(["--model-ema"] if ema else []))
    checkpoint, folder = tmp_path / "run" / "last.pth.tar", tmp_path / "pushed"
    card = call(["-m", "timm_ortho", "push", checkpoint, "me/model", "--dry-run", "--output", folder,
                 *(["--ema"] if ema else [])], tmp_path)
    assert f"| top-1 of these weights, % | {float(row['eval_top1']):.2f} |" in card
    saved = torch.load(checkpoint, weights_only=False)["state_dict_ema" if ema else "state_dict"]
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert [type(site.connection).__name__ for site in timm_ortho.sites(loaded)] == 4 * ["FeatureConnection"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    assert sorted(os.listdir(folder)) == ["README.md", "config.json", "model.safetensors", "training.png"]


@pytest.mark.parametrize("processes", [1, 2])
def test_timm_ortho_record_writes_rows(scripts, images, tmp_path, monkeypatch, processes):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setenv("TIMM_ORTHO_RECORD", str(path))
    monkeypatch.setenv("TIMM_ORTHO_RECORD_EVERY", "4")

    def steps():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["kind"] for row in rows[:4]] == ["attention", "mlp"] * 2
        return [row["step"] for row in rows[::4]]  # a step has four rows; only the first process writes

    [row] = train(scripts, images, tmp_path / "first", "vit_small_ortho", processes=processes)
    first = [0, 4, 8] if processes == 1 else [0, 4]  # an epoch has 10 steps in one process and 5 in two
    assert steps() == first
    checkpoint = tmp_path / "first" / "run" / "last.pth.tar"
    top1 = validate(scripts, images, "vit_small_ortho", checkpoint, tmp_path / "first.json")
    assert top1 == pytest.approx(float(row["eval_top1"]), abs=0.01)
    train(scripts, images, tmp_path / "more", "vit_small_ortho", processes=processes, epochs=2, resume=checkpoint)
    assert steps() == [*first, *(first[-1] + 4 + step for step in first)]


# ---------------------------------------------------------------------------------------- the paper's recipes
PARSE = """
import importlib.util, json, sys

spec = importlib.util.spec_from_file_location("train", sys.argv[1])
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
paths, sys.argv = sys.argv[2:], ["train.py"]
parsed = {"": vars(train._parse_args()[0])}
for path in paths:
    train.parser.set_defaults(**parsed[""])  # remove the previous recipe's defaults
    sys.argv = ["train.py", "-c", path]
    parsed[path] = vars(train._parse_args()[0])
print(json.dumps(parsed))
"""


def written(name, folder):
    path = folder / f"{name}.yaml"
    path.write_text(text(name), encoding="utf-8")
    return path


def test_every_recipe_is_parsed(scripts, tmp_path):
    """train.py's parser has each key of each recipe."""
    (tmp_path / "parse.py").write_text(PARSE)
    paths = {name: str(written(name, tmp_path)) for name in shipped()}
    parsed = json.loads(call([tmp_path / "parse.py", scripts / "train.py", *paths.values()], tmp_path).splitlines()[-1])
    plain = parsed.pop("")
    assert len(parsed) == len(paths) == 29
    for path in paths.values():
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        expected = {**plain, **values}
        assert {key: parsed[path][key] for key in expected} == expected
        assert values.keys() <= plain.keys()


SHRUNK = {
    "vit_s_cifar10": ["img_size=32", "patch_size=4", "embed_dim=48", "depth=2", "num_heads=3"],
    "resnetv2_50_cifar100_initialisation": ["weight_init=xavier", "layers=(1,1,1,1)", "channels=(32,64,128,256)"],
}


@pytest.mark.parametrize("name", SHRUNK)
def test_recipes_train_an_epoch(scripts, images, tmp_path, name):
    """Train with a recipe, but with other images, a smaller model and only one epoch."""
    recipe = written(name, tmp_path)
    model = yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]
    call([scripts / "train.py", "-c", recipe, "--model", model, "--data-dir", images, "--dataset", "",
          "--device", "cpu", "--epochs", "1", "-b", "40", "--workers", "0", "--model-kwargs", *SHRUNK[name],
          "--output", tmp_path, "--experiment", "run"], scripts)
    with open(tmp_path / "run" / "summary.csv", newline="") as file:
        [row] = csv.DictReader(file)
    assert np.isfinite([float(row["train_loss"]), float(row["eval_loss"])]).all()
    args = yaml.safe_load((tmp_path / "run" / "args.yaml").read_text())
    assert args["model"] == model
    assert args["color_jitter"] == ([0.4, 0.4, 0.4, 0.1] if name.startswith("vit") else 0.0)
