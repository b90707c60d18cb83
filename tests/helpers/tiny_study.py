"""A study whose runs take seconds, and functions that train these runs in the process of the test."""
import json
from argparse import Namespace
from pathlib import Path

import torch
import yaml

from timm_ortho.lab import commands as study, data
from timm_ortho.lab.folder import Variant, history, read_lines
from timm_ortho.lab.planning import plan
from timm_ortho.lab.running import launcher, run
from timm_ortho.lab.running.loop import Training
from timm_ortho.run_folder import read_history, read_run

STUDY = """
title: Does it work?
paper: Table 0
table: nothing
model: vit_small
connections: [linear, feature]
grid:
  lr: [1.0e-3, 1.0e-2]
record: 2
representation: true
scales:
  smoke:
    seeds: 1
    options:
      workers: 0
      epochs: 2
      batch_size: 16
      warmup_epochs: 0
      train_num_samples: 64
      val_num_samples: 32
      img_size: 16
      drop_path: 0.1
      model_kwargs: {embed_dim: 16, num_heads: 2, patch_size: 8, depth: 2}
"""
SMALL = yaml.safe_load(STUDY)["scales"]["smoke"]["options"]
BATCHES = 4  # per epoch
STAND_IN = Path(__file__).with_name("stand_in_train.py")
TIMED = ("seconds", "images_per_second", "peak_memory")


def written(folder, text=STUDY, **changes):
    """Write a study's file, in which ``changes`` replace keys of ``text``, and return the path."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(text), **changes}, sort_keys=False))
    return str(path)


def request(name, output=None, *, seeds=None, only=(), train_py=None, gpus=0, scale="smoke", **given):
    """Return the request for a study; ``name`` is a file or a shipped study."""
    return study.Request(
        study.load(name, scale), {"device": "cpu", **given}, seeds=seeds, only=only, train_py=train_py, gpus=gpus,
        output=None if output is None else str(output), command="timm-ortho study run")


def compared(output=None, connections=("linear", "feature"), seeds=1, recipe=None, **given):
    """Return the request of `timm-ortho compare` on a few digits."""
    options = {key: value for key, value in SMALL.items() if key != "model_kwargs"}
    kwargs = {"model_kwargs": {**SMALL["model_kwargs"], **given.pop("model_kwargs", {})}, **given}
    return study.Request(
        study.comparison(connections, recipe), {"device": "cpu", **options, **kwargs}, seeds=seeds,
        output=None if output is None else str(output), command="timm-ortho compare")


def planned(request):
    """Plan a request, write its folders and return the plan."""
    found = plan.plan(request)
    found.write()
    return found


def trained(request):
    """Train the runs of a request in this process, one at a time, and return the output folder."""
    found = planned(request)
    for name in found.runs:
        run.run(found.folder / name)
    return found.folder


def in_this_process(monkeypatch):
    """Make commands train in this process, one run at a time."""
    def local(root, runs, *_):
        for name in launcher.waiting(root, runs):
            run.run(root / name)
        return {}

    monkeypatch.setattr(launcher, "local", local)


def only_run(request):
    """Plan a request with a single run and return the run's folder."""
    found = planned(request)
    (name,) = found.runs
    return found.folder / name


def one_run(output, connection="feature", **options):
    """Plan one run of `timm-ortho compare` and return its folder."""
    return only_run(compared(output, [connection], **options))


def training(folder=None, connection="linear", seed=0, **changes):
    """Return the `Training` of a planned run, of digits or of a folder of images."""
    changes |= {} if folder is None else dict(
        data_dir=str(folder), dataset="", train_num_samples=None, val_num_samples=None)
    (planned_run,) = plan.plan(compared("unused", [connection], [seed], **changes)).runs.values()
    options = Namespace(**planned_run.stages[0].options)
    return Training(planned_run, planned_run.stages[0], Path("unused"), data.open_source(options), options)


class Stop(Exception):
    """Raised by `stopped` to end a run."""


def stopped(folder, monkeypatch, step, error=Stop):
    """Train a run and raise an exception in it after ``step`` backward passes."""
    original, left = Training._backward, [step]

    def backward(self, loss, update):
        left[0] -= 1
        if left[0] < 0:
            raise error
        original(self, loss, update)

    with monkeypatch.context() as context:
        context.setattr(Training, "_backward", backward)
        try:
            run.run(folder)
        except error:
            return
    raise AssertionError(f"the run finished before step {step}")


def switching(optimizer, **options):
    """Return changes for `written` that define one run, which switches from `global` to `feature`.

    Its connections are random (`connection_prob`), and its images are mixed (`mixup`) and partly erased (`reprob`).
    """
    values = yaml.safe_load(STUDY)
    values["scales"]["smoke"]["options"].update(epochs=4, mixup=0.4, reprob=0.3, **options)
    return dict(
        grid={"switch": {"GF": {"connection": "global", "switch": {"to": "feature", "optimizer": optimizer},
                                "connection_prob": 0.7}}},
        baseline={"switch": "GF"}, representation=False, scales=values["scales"])


def state(folder):
    return torch.load(folder / "last.pth.tar", weights_only=False)


def read(path):
    return json.loads(Path(path).read_text())


def result_of(folder):
    return read_run(folder).result


def change_run(folder, **changes):
    """Replace top-level keys of a `run.json`."""
    values = read(folder / "run.json")
    (folder / "run.json").write_text(json.dumps({**values, **changes}))


def unfinish(folder):
    """Remove the result of a finished run."""
    change_run(folder, result=None)


def rates(folder):
    return [row["lr"] for row in history(folder, Variant.read(folder))]


def assert_same_run(one, other):
    """Check that two runs have bit-identical checkpoints, records and results, apart from times and memory."""
    files = [{path.relative_to(folder) for path in folder.rglob("*.pth.tar")} for folder in (one, other)]
    assert files[0] == files[1]
    for stage in (file.parent for file in files[0]):
        for key in ("state_dict", "state_dict_ema"):
            mine, theirs = (state(folder / stage).get(key, {}) for folder in (one, other))
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        mine, theirs = (state(folder / stage)["optimizer"] for folder in (one, other))
        assert mine["param_groups"] == theirs["param_groups"]
        torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)
        untimed = [[{key: value for key, value in row.items() if key.removeprefix("train_") not in TIMED}
                    for row in read_history(folder / stage)] for folder in (one, other)]
        assert untimed[0] == untimed[1] != []
    for name in ("probe.jsonl", "records.jsonl"):
        assert read_lines(one / name) == read_lines(other / name)
    results = [{key: value for key, value in result_of(folder).items() if key not in TIMED} for folder in (one, other)]
    assert results[0] == results[1]
