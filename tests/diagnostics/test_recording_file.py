"""Test the file that an unmodified training script writes if TIMM_ORTHO_RECORD is set."""
import json
import os
import re

import pytest
import timm
import torch

import timm_ortho

# A common training loop with EMA, evaluation and a checkpoint.
SCRIPT = """
import timm, timm_ortho, torch
from timm.utils import ModelEmaV3
torch.manual_seed(0)
model = timm.create_model("{model}", num_classes=3, **{arguments})
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
average = ModelEmaV3(model)
for step in range(5):
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(3, (4,))
    loss = torch.nn.functional.cross_entropy(model.train()(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
    with torch.no_grad():
        model.eval()(images)
        average.module.eval()(images)
torch.save(model.state_dict(), "weights.pt")
"""
INVALID_EVERY = "TIMM_ORTHO_RECORD_EVERY must be a positive integer, got"
VIT = dict(img_size=16, patch_size=8, embed_dim=32, num_heads=2, depth=2)


def small_vit(**arguments):
    return timm.create_model("vit_small_ortho", num_classes=3, **{**VIT, **arguments}).train()


def images():
    return torch.zeros(2, 3, 16, 16)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path):
    return sorted({row["step"] for row in read(path)})


@pytest.fixture
def recording_path(monkeypatch, tmp_path):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setenv("TIMM_ORTHO_RECORD", str(path))
    monkeypatch.setenv("TIMM_ORTHO_RECORD_EVERY", "2")
    return path


@pytest.mark.parametrize(("model", "arguments"), [
    ("vit_small_linear", dict(VIT, drop_path_rate=0.3)),
    ("resnetv2_18_orthog", dict(channels=(8, 8, 8, 8), stem_chs=8)),
])
def test_recording_does_not_change_training(tmp_path, monkeypatch, model, arguments):
    weights = []
    for name, variables in (("plain", {}), ("recorded", {"": "rows.jsonl", "_EVERY": "2"})):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / name)
            for variable, value in variables.items():
                patch.setenv(f"TIMM_ORTHO_RECORD{variable}", value)
            exec(SCRIPT.format(model=model, arguments=arguments), {})
        weights.append(torch.load(tmp_path / name / "weights.pt"))
    assert os.listdir(tmp_path / "plain") == ["weights.pt"]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    rows = read(tmp_path / "recorded" / "rows.jsonl")
    sites = timm_ortho.sites(timm.create_model(model, **arguments))
    assert [(row["step"], row["name"]) for row in rows] == [(step, site.name) for step in (0, 2, 4) for site in sites]
    assert all(row["stream"] > 0 and -1 <= row["cosine"] <= 1 for row in rows)


def test_default_is_every_50_and_no_recording_without_the_variable(monkeypatch, recording_path):
    monkeypatch.delenv("TIMM_ORTHO_RECORD_EVERY")
    model = small_vit()
    for _ in range(51):
        model(images())
    assert steps(recording_path) == [0, 50]
    monkeypatch.delenv("TIMM_ORTHO_RECORD")
    assert not small_vit()._forward_pre_hooks


def test_an_existing_file_is_appended_to(recording_path):
    for _ in range(2):
        model = small_vit()
        for _ in range(4):
            model(images())
        recording_path.write_bytes(recording_path.read_bytes() + b'{"step": 2, "la')  # a killed process
    small_vit()(images())
    assert [row["step"] for row in read(recording_path)] == [0] * 4 + [2] * 4 + [4] * 4 + [6] * 4 + [8] * 4


def test_nan_becomes_null(recording_path):
    model = small_vit()
    model(torch.full((2, 3, 16, 16), float("nan")))
    assert read(recording_path)[0]["stream"] is None


def test_the_script_may_change_its_working_directory(monkeypatch, recording_path, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIMM_ORTHO_RECORD", "here.jsonl")
    model = small_vit()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model(images())
    assert steps(tmp_path / "here.jsonl") == [0]


@pytest.mark.parametrize("initialized", [False, True])
def test_only_the_first_process_writes(monkeypatch, recording_path, initialized):
    monkeypatch.setenv("RANK", "0" if initialized else "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    small_vit()(images())
    assert not recording_path.exists()


def test_a_failed_write_does_not_stop_training(monkeypatch, recording_path, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.setenv("TIMM_ORTHO_RECORD", str(folder / "rows.jsonl"))
    model = small_vit()
    folder.rmdir()
    with pytest.warns(UserWarning, match=r"rows.jsonl: No such file or directory; nothing more is recorded$"):
        model(images())
    for _ in range(3):
        model(images())  # a second warning would be an error


@pytest.mark.parametrize(("name", "value", "message"), [
    ("TIMM_ORTHO_RECORD_EVERY", "0", f"{INVALID_EVERY} '0'"),
    ("TIMM_ORTHO_RECORD_EVERY", "ten", f"{INVALID_EVERY} 'ten'"),
    ("TIMM_ORTHO_RECORD", "/nowhere/a.jsonl", "TIMM_ORTHO_RECORD=/nowhere/a.jsonl: the folder /nowhere does not exist"),
    ("TIMM_ORTHO_RECORD", "/tmp", "TIMM_ORTHO_RECORD=/tmp cannot be read: Is a directory"),
    ("TIMM_ORTHO_RECORD", __file__, f"TIMM_ORTHO_RECORD={__file__} exists and is not a file of recorded rows; "
                                    "choose another file"),
])
def test_invalid_variables(monkeypatch, recording_path, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        small_vit()
