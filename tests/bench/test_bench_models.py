"""`timm-ortho bench --what models`: weights, steps, memory layouts, backends and saved bytes of the timed models."""
import pytest
import torch
from helpers.bench_runs import TINY_VIT, TRACED, read, run, tiny_vit
from torch import nn

from timm_ortho import cli, sites
from timm_ortho.bench import models
from timm_ortho.bench.options import architecture


@pytest.fixture(scope="module")
def model_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return folder, run(folder, "--what", "models", *TINY_VIT, "--no-compile", "--dtypes", "float32", "bfloat16",
                       "--batch-size", "3", "--repeats", "3")


def test_model_rows(model_run):
    _, rows = model_run
    assert [(row["dtype"], row["mode"], row["step"], row["candidate"]) for row in rows] == [
        (dtype, "eager", step, name) for dtype in ("float32", "amp bfloat16") for step in ("training", "inference")
        for name in ("linear", "ortho", "orthog")]
    for row in rows:
        assert row["model"] == "vit_small(img_size=32, depth=1, embed_dim=32, num_heads=2)"
        assert (row["shape"], row["layout"], row["backend"], row["baseline"]) == ("3x3x32x32", "tokens", "torch",
                                                                                 "linear")
        assert float(row["ratio_p20"]) <= float(row["ratio_p50"]) <= float(row["ratio_p80"])
        assert float(row["images_per_s"]) == pytest.approx(3e3 / float(row["ms_p50"]), rel=1e-4)
        assert row["peak_memory"] == row["gb_per_s"] == row["note"] == ""


def test_saved_bytes_of_models(model_run):
    by = {(row["dtype"], row["step"], row["candidate"]): row for row in model_run[1]}
    linear, ortho = (int(by["float32", "training", name]["saved_bytes"]) for name in ("linear", "ortho"))
    assert 0 < linear <= ortho
    assert float(by["float32", "training", "ortho"]["saved_ratio"]) == pytest.approx(ortho / linear, rel=1e-4)
    assert by["float32", "inference", "ortho"]["saved_bytes"] == ""
    assert int(by["amp bfloat16", "training", "linear"]["saved_bytes"]) != linear


def built(step, one=None, layout="tokens", dtype=torch.float32, mode="eager"):
    return models._model_candidates(one or tiny_vit(), torch.device("cpu"), layout, dtype, mode, step)


def test_models_of_a_group_differ_only_in_connections():
    by_name = models._models(tiny_vit("vit_small"))
    assert list(by_name) == ["linear", "ortho", "orthog"]
    kinds = [{type(site.connection).__name__ for site in sites(model)} for model in by_name.values()]
    assert kinds == [{"LinearConnection"}, {"FeatureConnection"}, {"GlobalConnection"}]
    first, *others = (model.state_dict() for model in by_name.values())
    for state in others:
        assert state.keys() == first.keys()
        assert all(torch.equal(value, first[key]) for key, value in state.items())


def test_a_training_step_is_forward_loss_and_backward():
    for one in built("training") * 2:  # before the second call, prepare() removes the gradients of the first call
        state = one.prepare()
        assert all(parameter.grad is None for parameter in one.parameters)
        one.run(state)
        assert any(parameter.grad.abs().sum() > 0 for parameter in one.parameters)
        assert one.held > sum(parameter.nbytes for parameter in one.parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_keeps_no_graph_and_autocasts(dtype):
    for one in built("inference", dtype=dtype):
        result = one.run(one.prepare())
        assert result.is_inference()
        assert result.dtype == dtype
        assert one.keep is None


def test_layouts_of_convolutional_models():
    one = architecture("resnetv2_18_cifar_orthog", 2, 16, dict(layers=(1,)))
    assert (one.base, [*one.variants], one.batch) == ("resnetv2_18_cifar", ["orthog"], (2, 3, 16, 16))
    assert one.layouts == ("nchw", "channels_last")
    assert architecture("vit_test", 2, None, dict(img_size=[8, 16])).batch == (2, 3, 8, 16)
    for layout in one.layouts:
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Conv2d, "forward", watched(nn.Conv2d.forward, seen))
            built("inference", one, layout)[1].run(None)
        assert all(x.is_contiguous(memory_format=torch.channels_last) == (layout == "channels_last") for x in seen)


def watched(forward, seen):
    def call(self, x):
        if min(x.shape[1:]) > 1:  # the layouts can be identical if an axis has length 1
            seen.append(x)
        return forward(self, x)

    return call


@pytest.mark.parametrize("step", ["training", "inference"])
@pytest.mark.parametrize(("mode", "expected"), [("eager", "default"), ("compiled", "torch")])
def test_each_mode_has_its_backend(monkeypatch, mode, expected, step):
    seen = []

    def choose(x, f):
        seen.append((f.requires_grad, torch.is_inference_mode_enabled()))
        return "default"

    monkeypatch.setattr(models, "choose_backend", choose)
    linear, ortho = built(step, mode=mode)
    assert (linear.backend, ortho.backend) == ("torch", expected)
    if mode != "compiled":
        assert seen == [(step == "training", step == "inference")]
        for arguments, backend in ((dict(connection_layers=[1]), "default"), (dict(connection_layers=[]), "torch")):
            mixed = architecture("vit_test_ortho", 2, None, arguments)
            assert built(step, mixed)[1].backend == backend


@pytest.mark.slow
def test_compiled_models(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "compiled", TRACED)
    rows = run(tmp_path, "--what", "models", *TINY_VIT[:1], "vit_small_ortho", *TINY_VIT[2:], "-b", "2",
               "--repeats", "2")
    assert [(row["mode"], row["step"], row["candidate"], row["note"]) for row in rows] == [
        (mode, step, name, "") for mode in ("eager", "compiled") for step in ("training", "inference")
        for name in ("linear", "ortho")]
    assert all(int(row["saved_bytes"]) > 0 for row in rows if row["step"] == "training")
    assert {row["backend"] for row in rows} == {"torch"}


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    assert cli.main(["bench", "--device", "cuda", "--shapes", "8x50x96", "2x16x9x9", *TINY_VIT, "-b", "2", "--repeats",
                     "2", "--no-compile", "--output", str(tmp_path)]) == 0
    rows = read(tmp_path)
    assert all(row["note"] == "" for row in rows)
    assert {row["backend"] for row in rows if row["candidate"] == "triton"} == {"triton"}
    assert all(int(row["peak_memory"]) > 0 and row["driver"] for row in rows)
    assert all(row["peak_ratio"] for row in rows if row["what"] == "models")
