"""Run the commands and snippets of the pages by task, each page in one process, with small models and images.

`python SCRIPT` and `timm-ortho run SCRIPT` are run if the variable TIMM_DIR is a folder with timm's scripts.
Commands of other programs are not run. test_pages.py tests that their options exist.
"""
import importlib.util
import os
import re

import numpy as np
import pytest
import timm
import yaml
from PIL import Image
from safetensors.torch import save_model
from test_pages import ROOT, snippets, text_of

from timm_ortho import cli

TIMM_DIR = os.environ.get("TIMM_DIR", "")
REPLACED = {
    "vit_tiny_patch16_224": "vit_test", "vit_small_patch16_224": "vit_test", "--num-classes 10": "--num-classes 2"}
ADDED = {  # command -> options that make it short
    "timm-ortho compare": "--epochs 1 --seeds 1 -b 4 -j 0 --device cpu --img-size 8 --option warmup_epochs=0",
    "timm-ortho study plan": "--option num_classes=2 --seeds 1",
    "timm-ortho run": "-b 4 -j 0 --device cpu",
    "python train.py": "--epochs 1 -b 4 -j 0 --device cpu --warmup-epochs 0 --no-prefetcher",
    "python train.py -c": "--epochs 1 -b 2 -j 0 --model vit_small_ortho --num-classes 2 --no-prefetcher",
}
if not TIMM_DIR:  # publish a run of compare, because there is no run of train.py
    REPLACED["runs/birds"] = "birds/feature-seed0"
NOT_RUN = ("hf ", "git ", "cd ", "export ", "torchrun ", "timm-ortho study run", "timm-ortho study report study",
           "timm-ortho show RUN", "timm-ortho show hf-hub", "timm-ortho show vit_small")

DRIVER = """
import contextlib, shlex
os.environ.update(OMP_NUM_THREADS="1", TIMM_DIR=TIMM_DIR)

def call(command):
    command, _, target = command.partition(" > ")
    program, *arguments = shlex.split(command)
    with contextlib.redirect_stdout(open(target, "w")) if target else contextlib.nullcontext():
        if program == "python":
            sys.argv = [os.path.join(TIMM_DIR, arguments[0]), *arguments[1:]]
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            if arguments[0] == "run":
                arguments[1] = os.path.join(TIMM_DIR, arguments[1])
            status = cli.main(arguments)
            assert not status, f"{command}: exit status {status}"

for command in COMMANDS:
    print("$", command, flush=True)
    call(command)
"""


def commands(name):
    """Yield the commands of a page, changed so that they are short."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text_of(ROOT / "docs" / name), re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).replace("\\\n   ", "").splitlines():
        command = re.sub(r"\s+#.*", "", line)
        needs_timm = command.startswith(("python", "timm-ortho run", "timm-ortho study"))
        needs_pandas = "inference.py" in command and not importlib.util.find_spec("pandas")
        if command.startswith(NOT_RUN) or (needs_timm and not TIMM_DIR) or needs_pandas:
            continue
        added = max((start for start in ADDED if command.startswith(start)), key=len, default=None)
        for old, new in REPLACED.items():
            command = command.replace(old, new)
        yield f"{command} {ADDED.get(added, '')}".rstrip()


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a data set in DIR, and a file of weights."""
    rng = np.random.default_rng(0)
    for index in range(24):
        path = tmp_path / "DIR" / ("val" if index % 3 == 0 else "train") / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(path)
    (tmp_path / "weights").mkdir()
    save_model(timm.create_model("vit_test_linear"), str(tmp_path / "weights" / "model.safetensors"))
    return tmp_path


def run(name, folder, client, before="", after=""):
    """Run the commands of a page and then its snippets, and return their output."""
    text = [part.replace("pretrained=True, ", "") for part in snippets(ROOT / "docs" / name)]
    code = [f"import os; os.chdir({str(folder)!r}); TIMM_DIR = {TIMM_DIR!r}; COMMANDS = {[*commands(name)]!r}",
            DRIVER, before, *text, after]
    result = client.run("\n".join(code))
    assert result.error is None, result.output
    return result.output


@pytest.mark.slow
def test_train(folder, server, client):
    output = run("train.md", folder, client, "from PIL import Image; image = Image.new('RGB', (20, 20))",
                 "print(tuple(logits.shape))")
    assert (folder / "birds" / "report.html").is_file()
    assert "(1, 2)" in output


@pytest.mark.slow
def test_fine_tune(folder, server, client):
    run("fine_tune.md", folder, client)
    assert "hybrid" in (folder / "tuned" / "report.md").read_text(encoding="utf-8")
    assert "model.safetensors" in server.files("me/tuned")


@pytest.mark.slow
@pytest.mark.skipif(not TIMM_DIR, reason="TIMM_DIR, the folder of timm's train.py, is not set")
def test_distributed(folder, server, client):
    run("distributed.md", folder, client)
    assert (folder / "runs" / "rehearsal" / "args.yaml").is_file()


def test_measure_the_stream(tmp_path, monkeypatch, capsys):
    """test_pages.py runs the snippets of this page."""
    monkeypatch.chdir(tmp_path)
    command, = commands("diagnostics.md")
    assert cli.main(command.split()[1:]) == 0
    assert "attention" in capsys.readouterr().out
    assert (tmp_path / "sites.svg").is_file()


def test_batch_of_the_torchrun_lines(capsys):
    """Processes x batch x accumulated steps is the batch of the recipe that the line uses."""
    for name in ("README.md", "docs/distributed.md"):
        text = text_of(ROOT / name).replace("\\\n   ", "")
        recipe, = re.findall(r"timm-ortho recipe (\w+) > recipe.yaml", text)
        assert cli.main(["recipe", recipe]) == 0
        batch = yaml.safe_load(capsys.readouterr().out)["batch_size"]
        lines = re.findall(r"^torchrun --nproc.per.node.(\d+) train\.py .* -b (\d+) --grad-accum-steps (\d+)", text,
                           re.MULTILINE)
        assert {int(np.prod([*map(int, line)])) for line in lines} == {batch}
