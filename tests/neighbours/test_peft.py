"""PEFT's modules_to_save, which wraps connections, and the same with any other wrapper."""
import pytest
import timm
import torch
from helpers.own_block import Written
from torch import nn

from timm_ortho import connect, connection_arguments, create_connection, disconnect, record, sites

peft = pytest.importorskip("peft")
NAMES = [f"blocks.{layer}.connection_{kind}" for layer in range(4) for kind in ("attention", "mlp")]


def adapted(model, targets=("qkv",), saved=("connection_attention", "connection_mlp")):
    config = peft.LoraConfig(target_modules=[*targets], modules_to_save=[*saved], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_test_ortho", connection="hybrid"), torch.randn(2, 3, 8, 8)


def test_each_site_is_the_trained_copy():
    host, images = vit()
    model = adapted(host)
    found = sites(model)
    assert [site.kind for site in found] == ["attention", "mlp"] * 4
    assert [site.name for site in found] == [f"base_model.model.{name}.modules_to_save.default" for name in NAMES]
    assert all(model.get_submodule(site.name) is site.connection for site in found)
    model(images).square().sum().backward()
    assert all(site.connection.rho.grad.any() for site in found)
    with record(model, every=1) as recorder:
        model(images)
    assert [row["name"] for row in recorder.rows] == [site.name for site in found]
    model.add_adapter("other", peft.LoraConfig(target_modules=["qkv"], modules_to_save=["connection_mlp"]))
    found = sites(model)
    assert [site.name.rpartition(".")[-1] for site in found] == ["default"] * 8
    with pytest.raises(ValueError, match="has a ModulesToSaveWrapper around its connection connection_attention: "
                                         "remove the wrapper first, for example by merge_and_unload of PEFT"):
        connect(model, "feature")
    assert sites(model) == found


def test_merge_and_unload():
    host, images = vit()
    model = adapted(host)
    for site in sites(model):
        nn.init.constant_(site.connection.theta, 0.3)
    with torch.no_grad():
        expected = model.eval()(images)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(images), expected)
    assert [site.name for site in sites(merged)] == NAMES
    assert connection_arguments(merged) == {"connection": "hybrid", "eps": 1e-6}
    connect(merged, "feature")


def test_disconnect_removes_the_wrappers():
    host, images = vit()
    model = disconnect(adapted(host))
    assert sites(model) == []
    merged = model.merge_and_unload()
    assert type(merged.blocks[0]) is timm.models.vision_transformer.Block
    connect(merged, "linear")(images)


def test_a_block_whose_own_code_contains_the_connection():
    model = adapted(nn.Sequential(*(Written(create_connection("hybrid")) for _ in range(2))), ["f"], ["add"])
    assert [(site.layer, site.kind) for site in sites(model)] == [(0, "add"), (1, "add")]
    with pytest.raises(ValueError, match="a ModulesToSaveWrapper around its connection add"):
        connect(model, "feature")
    disconnect(model).merge_and_unload()
    assert [site.connection.name for site in sites(model)] == ["linear"] * 2
