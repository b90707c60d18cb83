"""A study that takes seconds: its file, its runs and what they leave."""
import json

import torch
import yaml

from timm_ortho.lab import study

# Everything that a run can do, in seconds.
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


def written(folder, text=STUDY, **changes):
    """A study's file, with some of its keys changed."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(text), **changes}, sort_keys=False))
    return str(path)


def run(name, output, scale="smoke", workers=1, seeds=None, **given):
    return study.run(name, {"device": "cpu", **given}, scale=scale, workers=workers, seeds=seeds, output=str(output))


def results(output):
    return json.loads((output / "results.json").read_text())


def state(folder):
    return torch.load(folder / "last.pth.tar", weights_only=False)


def assert_same_run(one, other):
    """Weights, optimizer, EMA and every record are bit for bit the same."""
    for key in ("state_dict", "state_dict_ema"):
        mine, theirs = (state(folder).get(key, {}) for folder in (one, other))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    mine, theirs = (state(folder)["optimizer"] for folder in (one, other))
    assert mine["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)
    for name in ("dynamics.json", "records.json", "summary.csv"):
        assert (one / name).exists() == (other / name).exists()
        if (one / name).exists():
            assert (one / name).read_text() == (other / name).read_text()
    timed = ("seconds", "images_per_second", "peak_memory")
    histories = [json.loads((folder / "history.json").read_text()) for folder in (one, other)]
    for row in histories[0] + histories[1]:
        for key in timed:
            del row[key]
    assert histories[0] == histories[1]
