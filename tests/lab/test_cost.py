"""costs/measure.py: FLOPs and gamma (width / blocks) compared with the paper's tables, and measured overhead."""
import pytest
import timm
import torch

import timm_ortho
from timm_ortho import bench
from timm_ortho.bench import BenchError
from timm_ortho.lab import paper
from timm_ortho.lab.costs import measure as cost
from timm_ortho.run_folder import device_name


# ---------------------------------------------------------------------- FLOPs of modules (the paper's Table 1a)
@pytest.mark.parametrize(("model", "arguments", "s", "d"), [
    ("vit_small", {}, 197, 384),
    ("vit_small", {"img_size": 32, "patch_size": 4}, 65, 384),
    ("vit_base", {"depth": 1}, 197, 768),
])
def test_flops_are_those_of_table_1a(model, arguments, s, d):
    rows = {(row["module"], row["connection"]): row for row in cost.flop_table(model, **arguments)}
    assert set(rows) == {(module, connection) for module in ("attention", "mlp")
                         for connection in ("linear", "paper", "feature")}
    assert {(row["tokens"], row["width"]) for row in rows.values()} == {(s, d)}
    for module, branch in (("attention", 8 * s * d**2 + 4 * s**2 * d), ("mlp", 16 * s * d**2)):
        for connection, update in (("linear", s * d), ("paper", 7 * s * d + 2 * s), ("feature", 6 * s * d + 3 * s)):
            row = rows[module, connection]
            assert (row["branch"], row["update"], row["extra"]) == (branch, update, update - s * d)


def test_convolutions_have_the_same_extra_for_each_shape():
    rows = [row for row in cost.flop_table("resnetv2_18_cifar") if row["connection"] == "paper"]
    shapes = [(32 * 32, 64), (16 * 16, 128), (8 * 8, 256), (4 * 4, 512)]
    assert list(dict.fromkeys((row["tokens"], row["width"]) for row in rows)) == shapes
    assert all(row["extra"] == 6 * row["tokens"] * row["width"] + 2 * row["tokens"] for row in rows)
    assert rows[0]["branch"] == 2 * (2 * 9 * 64 * 64 * 32 * 32)  # two 3 x 3 convolutions


def test_flops_on_the_meta_device_equal_those_of_a_real_run():
    arguments = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)
    model = timm.create_model("vit_small_ortho", **arguments)
    calls = []
    model.head.register_forward_hook(lambda module, inputs, output: calls.append(output.device.type))
    model.train()
    real = cost.site_flops(model)
    assert calls == ["cpu"]
    assert model.training
    assert real == cost.site_flops(timm.create_model("vit_small_ortho", **arguments).to("meta"))
    assert [site[:3] for site in real] == [site[:3] for site in timm_ortho.sites(model)]
    assert {site.update for site in real} == {6 * 17 * 48 + 3 * 17}
    assert not any(site.connection._forward_hooks for site in timm_ortho.sites(model))
    assert not model.blocks[0]._forward_pre_hooks


def test_the_papers_algorithm_computes_the_same_update():
    x, f = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    paper = cost.PaperConnection()(x, f)
    assert torch.allclose(paper, timm_ortho.FeatureConnection()(x, f), atol=1e-6)


def test_an_unknown_operation_is_an_error():
    class Odd(timm_ortho.LinearConnection):
        def forward(self, x, f, attn_mask=None):
            return (x + f).tanh()

    model = timm.create_model("vit_small_linear", img_size=32, depth=1)
    model.blocks[0].connection_mlp = Odd()
    with pytest.raises(NotImplementedError, match=r"a connection calls aten\.tanh, which has no FLOP count"):
        cost.site_flops(model)


def test_parameters_and_flops_of_whole_models():
    rows = {row["connection"]: row for row in cost.parameter_table(["vit_small"])}
    s, d, sites = 197, 384, 12
    assert rows["linear"]["parameters"] == sum(p.numel() for p in timm.create_model("vit_small_linear").parameters())
    assert rows["hybrid"]["extra_parameters"] == 2 * sites
    assert {name: row["extra_parameters"] for name, row in rows.items()} == {
        name: sites * len([*timm_ortho.create_connection(name).parameters()]) for name in timm_ortho.CONNECTIONS}
    assert rows["linear"]["branches"] == 6 * (24 * s * d**2 + 4 * s**2 * d)
    assert rows["feature"]["extra_flops"] == sites * (5 * s * d + 3 * s)
    assert rows["global"]["extra_flops"] == sites * (5 * s * d + 3)
    assert rows["feature"]["extra_percent"] == pytest.approx(
        100 * sites * (5 * s * d + 3 * s) / (6 * (24 * s * d**2 + 4 * s**2 * d) + sites * s * d))


# ---------------------------------------------------------------------------------- gamma (the paper's Table 11)
def test_gamma_is_that_of_table_11():
    table = paper.numbers()["gamma"]["models"]
    pytest.importorskip("transformers")
    given = {model: (row["width"], row["blocks"], row["gamma"]) for model, row in table.items()
             if model not in ("resnet1001", "dit_xl_2")}
    assert (table["dit_xl_2"]["width"] / table["dit_xl_2"]["blocks"]) == pytest.approx(41.14, abs=0.006)
    given.update(vit_base_patch16_224=given["vit_base"], resnetv2_50=given["resnetv2_50_cifar"])
    found = {row["model"]: (row["width"], row["blocks"], row["gamma"]) for row in cost.gamma_table(list(given))}
    assert found == {model: pytest.approx(figures, abs=0.006) for model, figures in given.items()}


def test_the_papers_resnet1001_is_not_that_of_he_et_al():
    """He et al. (2016) have 9n + 2 = 1001 layers, so n = 111 bottleneck blocks in each of the three stages."""
    row, = cost.gamma_table(["resnet1001"])
    assert (row["blocks"], row["width"]) == (333, pytest.approx((64 + 128 + 256) / 3))
    assert row["gamma"] == pytest.approx(0.448, abs=0.001)
    stated = paper.numbers()["gamma"]["models"]["resnet1001"]
    assert (stated["blocks"], stated["width"]) == (168, pytest.approx((16 + 32 + 64) / 3, abs=0.004))


def test_text_models_need_transformers(monkeypatch):
    monkeypatch.setattr(cost, "find_spec", lambda name: None)
    assert [row["model"] for row in cost.gamma_table(["gpt2_xl", "vit_small", "t5_xl"])] == ["vit_small"]


# ------------------------------------------------------------------------------- overhead (the paper's Table 1b)
class GivenTimes:
    """A mock clock. Linear models take 8 ms. After the warm-up, orthogonal models take 10 ms and 10.4 ms in turn."""

    def __init__(self, device):
        self.device = device
        self.times = {"linear": [8.0] * 9, "ortho": [8.0, 8.0] + [10.0, 10.4] * 9}

    def __call__(self, candidate, calls):
        candidate.run(candidate.prepare())
        return self.times[candidate.name].pop(0)


SMALL = dict(img_size=32, batch_size=4, model_kwargs={"depth": 1, "embed_dim": 48, "num_heads": 3}, device="cpu")


def test_overhead_is_the_throughput_that_is_lost(monkeypatch):
    monkeypatch.setattr(bench, "Clock", GivenTimes)
    row, = cost.overhead(["vit_small"], repeats=3, **SMALL)
    assert row["model"] == "vit_small(img_size=32, depth=1, embed_dim=48, num_heads=3)"
    assert (row["shape"], row["dtype"], row["mode"], row["repeats"], row["note"]) == (
        "4x3x32x32", "float32", "eager", 3, "")
    assert row["device"] == device_name(torch.device("cpu"))
    assert row["linear"] == pytest.approx(4 / 8e-3)
    assert row["feature"] == pytest.approx(4 / 10e-3)
    assert row["overhead"] == pytest.approx(20)  # in %, by the paper's definition: 100 (1 - feature / linear)
    assert row["overhead_p20"] == pytest.approx(20)
    assert row["overhead_p80"] > 20


def test_measured_overhead():
    row, = cost.overhead(["vit_small"], repeats=2, **SMALL)
    assert row["linear"] > 0
    assert row["feature"] > 0
    assert row["overhead_p20"] <= row["overhead"] <= row["overhead_p80"] < 100


def test_a_failed_measurement_has_a_note(monkeypatch):
    class NoMemory(GivenTimes):
        def __call__(self, candidate, calls):
            if candidate.name == "ortho":
                raise torch.cuda.OutOfMemoryError("no memory")
            return super().__call__(candidate, calls)

    monkeypatch.setattr(bench, "Clock", NoMemory)
    row, = cost.overhead(["vit_small"], repeats=2, **SMALL)
    assert row["overhead"] is None
    assert row["note"] == "OutOfMemoryError: no memory"


def test_a_model_without_variant():
    with pytest.raises(BenchError, match="no orthogonal variant 'vit_smal_ortho'; did you mean 'vit_small'"):
        cost.overhead(["vit_smal"])
