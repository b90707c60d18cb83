"""bench/flops.py and lab/costs.py: FLOPs, gamma and overhead beside the paper's Tables 1a, 11 and 1b."""
import pytest
import timm
import torch

import timm_ortho
from timm_ortho import bench, cli
from timm_ortho.bench import flops
from timm_ortho.blocks import spec_of
from timm_ortho.lab import costs, paper


@pytest.mark.parametrize(("arguments", "s"), [({}, 197), ({"img_size": 32, "patch_size": 4}, 65)])
@pytest.mark.parametrize(("connection", "update"), [
    ("linear", lambda s, d: s * d), ("paper", lambda s, d: 7 * s * d + 2 * s),
    ("feature", lambda s, d: 6 * s * d + 3 * s), ("global", lambda s, d: 6 * s * d + 3)])
def test_flops_are_those_of_table_1a(monkeypatch, arguments, s, connection, update):
    monkeypatch.setattr(timm, "create_model", lambda name, create=timm.create_model: create(name, **arguments))
    model, d = costs.on_meta("vit_small", connection), 384
    counts = flops.count(model)
    assert flops.updates(model, counts) == [update(s, d)] * 12
    assert flops.products(counts, "blocks.0.attn") == 8 * s * d**2 + 4 * s**2 * d
    assert flops.products(counts, "blocks.0.mlp") == 16 * s * d**2
    assert sum(flops.products(counts, f"blocks.{block}") for block in range(6)) == flops.products(counts, "blocks")


def test_convolutions_have_the_same_update_for_each_shape():
    model = costs.on_meta("resnetv2_18_cifar", "paper")
    shapes = [(32 * 32, 64), (16 * 16, 128), (8 * 8, 256), (4 * 4, 512)]
    counts = flops.count(model)
    assert flops.updates(model, counts) == [7 * s * d + 2 * s for s, d in shapes for _ in range(2)]
    assert flops.products(counts, "stages.0.blocks.1") == 2 * (2 * 9 * 64 * 64 * 32 * 32)  # two 3 x 3 convolutions


def test_flops_on_the_meta_device_equal_those_of_a_real_run():
    arguments = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)
    model = timm.create_model("vit_small_ortho", **arguments).train()
    real = flops.count(model)
    assert model.training
    assert real == flops.count(timm.create_model("vit_small_ortho", **arguments).to("meta"))


def test_the_papers_algorithm_computes_the_same_update():
    x, f = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    torch.testing.assert_close(flops.PaperConnection()(x, f), timm_ortho.FeatureConnection()(x, f))


def test_the_table_of_parameters_has_the_papers_formulas_and_the_same_counts(monkeypatch, capsys):
    monkeypatch.setattr(costs, "_VITS", ("vit_small",))
    monkeypatch.setattr(costs, "_RESNETS", ())
    assert cli.main(["cost", "parameters"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line, = (line for line in lines if "attention" in line and "the paper's algorithm" in line)
    assert line.count("292,001,280") == line.count("529,930") == 2
    s, d = 197, 384
    linear, ours = (line.split() for line in lines if line.startswith(("vit_small  Linear", "vit_small  Orthogonal-F")))
    assert (linear[2], linear[4]) == ("11,394,280", f"{12 * s * d:,}")
    assert ours[4] == f"{12 * (6 * s * d + 3 * s):,}"


@pytest.mark.parametrize("name", ["vit_small", "vit_large_patch16_224", *costs._RESNETS[1:3]])
def test_gamma_is_that_of_the_models(name):
    """Gamma is the mean width of the stream over the blocks, divided by the number of blocks."""
    model, widths = costs.on_meta(name, "linear"), {}
    for site in timm_ortho.sites(model):
        block = model.get_submodule(site.name.rpartition(".")[0])
        widths[site.layer] = spec_of(block).widths(block)[site.kind]
    row, width = paper.numbers()["gamma"]["models"][name], sum(widths.values()) / len(widths)
    assert (row["width"], row["blocks"], row["gamma"]) == pytest.approx(
        (width, len(widths), width / len(widths)), abs=0.006)


def test_the_table_of_gamma(capsys):
    assert cli.main(["cost", "gamma"]) == 0
    assert "GPT-2 XL" in capsys.readouterr().out


class GivenTimes:
    """A mock clock: linear models take 8 ms, orthogonal models 10 ms."""

    def __init__(self, device):
        self.device = device

    def __call__(self, candidate, calls):
        if candidate.name == "ortho" and self.fails:
            raise torch.cuda.OutOfMemoryError("no memory")
        return 8.0 if candidate.name == "linear" else 10.0


@pytest.mark.parametrize(("fails", "cells"), [
    (False, ["1,000.0", "800.0", "20.00", "3,476.1", "3,466.3", "0.28"]),
    (True, ["not", "measured", "not", "measured", "not", "measured", "3,476.1", "3,466.3", "0.28"])])
def test_overhead_is_the_throughput_that_is_lost(monkeypatch, fails, cells):
    monkeypatch.setattr(GivenTimes, "fails", fails, raising=False)
    monkeypatch.setattr(bench, "Clock", GivenTimes)
    monkeypatch.setattr(costs, "_RESNETS", ())
    monkeypatch.setattr(bench.clock, "saved_bytes", lambda *_: 0)
    line = costs.overhead("cpu").splitlines()[-1].split()
    assert line[:2] == ["vit_small(img_size=64)", "tokens"]
    assert line[2:] == cells


def test_an_unknown_device_is_an_error_of_one_line(error_of):
    assert "--device bogus: " in error_of("cost", "overhead", "--device", "bogus")
