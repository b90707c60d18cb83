"""`timm-ortho bench --what launch`: a tiny tensor and a small model, timed with one thread and warm caches."""
from argparse import Namespace

import pytest
import torch
from helpers.bench_runs import run, tiny_vit

from timm_ortho import bench
from timm_ortho.bench import launch, models


@pytest.mark.usefixtures("undrawn")
def test_launches(tmp_path):
    rows = run(tmp_path, "--what", "launch", "--repeats", "1")
    small = "vit_small(img_size=32, patch_size=8, embed_dim=64, num_heads=4)"
    assert [(row["model"], row["shape"], row["step"], row["candidate"]) for row in rows] == [
        (model, shape, step, name) for model, shape in (("", "1x1x32"), (small, "1x3x32x32"), (small, "32x3x32x32"))
        for step in ("training", "inference") for name in ("linear", "appendix", "shortest", "ortho")]
    for row in rows:
        assert (row["threads"], row["repeats"], row["mode"], row["note"]) == ("1", "5", "eager", "")
        assert float(row["ratio_p50"]) > 0
        assert float(row["appendix_ratio_p50"]) > 0
        assert float(row["shortest_ratio_p50"]) > 0


@pytest.mark.parametrize(("what", "device", "expected"), [
    ("launch", "cpu", [1, 0, 10, 2000]), ("launch", "cuda", [1, 0, 10, 2000]), ("models", "cpu", [3, 1, 2, 50]),
    ("models", "cuda", [3, 1, 2, 50]), ("operator", "cpu", [3, 1, 2, 50]), ("operator", "cuda", [3, 20, 2, 5])])
def test_how_each_part_is_measured(monkeypatch, what, device, expected):
    seen = []

    def measured(candidates, repeats, clock, most_calls):
        seen.extend([torch.get_num_threads(), clock, repeats, most_calls])
        return []

    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setattr(bench, "Clock", lambda device, flushes: flushes)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        bench._rows(bench.Group({"what": what}, 0, list), Namespace(device=torch.device(device), repeats=2))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == expected


@pytest.mark.parametrize("step", ["training", "inference"])
def test_tiny_tensors(step, monkeypatch):
    monkeypatch.setattr(launch, "choose_backend", lambda x, f: "chosen")
    candidates = launch._tiny_candidates(torch.device("cpu"), step)
    linear, appendix, shortest, ortho = (one.run(one.prepare()) for one in candidates)
    assert isinstance(ortho, tuple) == (step == "training")  # a training step returns gradients
    assert [one.backend() for one in candidates] == ["torch", "torch", "torch", "chosen"]
    torch.testing.assert_close(ortho, appendix)
    torch.testing.assert_close(ortho, shortest)
    assert not torch.allclose(linear[0], ortho[0])


def test_a_model_with_pasted_formulas():
    by_name = models._models(tiny_vit()._replace(pasted=True))
    assert list(by_name) == ["linear", "appendix", "shortest", "ortho"]
    images = torch.randn(2, 3, 32, 32)
    linear, appendix, shortest, ortho = (model.forward_features(images) for model in by_name.values())
    torch.testing.assert_close(appendix, ortho)
    torch.testing.assert_close(shortest, ortho)
    assert not torch.allclose(linear, ortho)
