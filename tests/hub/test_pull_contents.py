"""Test that pickles, wrong configurations and weights that do not fit are refused."""
import json
import pickle
import re
from itertools import product

import pytest
import timm
import torch
from helpers.hub_models import BY_NAME, BY_PULL, BY_TIMM, check_refused, commit_changed, write
from helpers.pickles import Evil
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

import timm_ortho
from timm_ortho.hub_client.errors import WeightsError


@pytest.mark.parametrize("way", [BY_NAME, BY_PULL, BY_TIMM, "timm.create_model('local-dir:{}', pretrained=True)",
                                 "timm_ortho.pull('local-dir:{}')"])
def test_a_pickle_is_never_read(hub, client, saved, tmp_path, way):
    mark, folder = tmp_path / "executed", tmp_path / "folder"
    files = {"config.json": saved["me/vit"][0]["config.json"], "pytorch_model.bin": pickle.dumps(Evil(mark))}
    write(folder, files)
    hub.create_repo("me/vit")
    hub.commit("me/vit", files)
    text = (r"is not in the repository \(404\); see .*/tree/\w+; pickles, such as pytorch_model.bin, are never read$"
            if "{}" not in way else "there is no model.safetensors among config.json, pytorch_model.bin; pickles are n")
    check_refused(client.run(way.format(folder)), text)
    assert not mark.exists()
    assert not any("/blobs/" in request.path for request in hub.requests)
    pickle.loads(files["pytorch_model.bin"]).close()
    assert mark.exists()  # unpickling creates the file, so `not mark.exists()` above is a real check


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_a_configuration_that_names_a_pickle_is_refused(hub, client, name):
    code = f"timm.create_model('vit_small_ortho', pretrained=True, pretrained_cfg_overlay=dict(hf_hub_id='me/vit', " \
           f"hf_hub_filename={name!r}))"
    check_refused(client.run(code), f"hf-hub:me/vit: {name} is not a safetensors file, and pickles are never read")
    assert hub.requests == []


@pytest.mark.parametrize("architecture", ["vit_small_ortho", "test_vit"])
def test_a_repository_that_names_a_pickle_is_refused(hub, client, saved, tmp_path, architecture):
    mark = tmp_path / "executed"

    def change(config):
        config.update(architecture=architecture, model_args={})
        config["pretrained_cfg"]["hf_hub_filename"] = "evil.bin"

    hub.commit("me/vit", {**with_config(saved["me/vit"][0], change), "evil.bin": pickle.dumps(Evil(mark))})
    check_refused(client.run(BY_PULL), "hf-hub:me/vit: evil.bin is not a safetensors file, and pickles are never read")
    assert not mark.exists()


@pytest.mark.parametrize("architecture", ["vit_small_ortho", "test_vit"])
@pytest.mark.parametrize("name", ["{}/evil.safetensors", "../../../../evil.safetensors", "C:\\evil.safetensors"])
def test_a_repository_that_names_a_file_outside_of_it_is_refused(hub, client, saved, tmp_path, architecture, name):
    mark, path = tmp_path / "executed", tmp_path / "evil.safetensors"
    torch.save(Evil(mark), path)

    def change(config):
        config.update(architecture=architecture, model_args={})
        config["pretrained_cfg"]["hf_hub_filename"] = name.format(tmp_path)

    hub.commit("me/vit", with_config(saved["me/vit"][0], change))
    check_refused(client.run(BY_PULL), "hf-hub:me/vit: its file '.*evil.safetensors' is outside the repository")
    assert not mark.exists()


@pytest.mark.parametrize("filename", [None, "other.safetensors"])
def test_another_architecture_is_loaded_from_the_file_that_was_checked(hub, client, tmp_path, filename):
    model = timm.create_model("test_vit", num_classes=3)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if filename:
        files[filename] = files.pop("model.safetensors")
        files = with_config(files, lambda config: config["pretrained_cfg"].update(hf_hub_filename=filename))
    hub.commit("me/vit", files)
    code = "model = timm_ortho.pull('hf-hub:me/vit', num_classes={})\nanswer([model.head.weight.shape[0], " \
           "model.blocks[0].attn.qkv.weight.sum().item(), {{**model.pretrained_cfg}}.get('source'), " \
           "model.pretrained_cfg['hf_hub_id'], 'file' in model.pretrained_cfg])"
    for classes in (3, 2):
        result = client.run(code.format(classes))
        assert result.answer == [classes, model.blocks[0].attn.qkv.weight.sum().item(), "hf-hub", "me/vit", False]
    mark = tmp_path / "executed"
    torch.save(Evil(mark), tmp_path / "evil")
    hub.commit("me/vit", {filename or "model.safetensors": (tmp_path / "evil").read_bytes()})
    client.forget()
    check_refused(client.run(BY_PULL), "safetensors cannot be read")
    assert not mark.exists()


def with_config(files, change):
    config = json.loads(files["config.json"])
    change(config)
    return {**files, "config.json": json.dumps(config).encode()}


CONFIGS = {
    "unknown argument": (
        lambda config: config["model_args"].update(width=3), [BY_PULL, BY_TIMM],
        r"config.json and of the call cannot build a model: .*__init__\(\) got an unexpected keyword argument 'width'"),
    "unknown argument of the connection": (
        lambda config: config["model_args"].update(connection_epsilon=1), [BY_PULL, BY_TIMM],
        "cannot build a model: unknown argument 'connection_epsilon'.*did you mean 'connection_eps'"),
    "unknown connection": (
        lambda config: config["model_args"].update(connection="futile"), [BY_PULL, BY_TIMM],
        "cannot build a model: unknown connection 'futile', known are 'linear', 'feature'"),
    "unknown architecture": (
        lambda config: config.update(architecture="vit_smal_ortho"), [BY_PULL],
        r"its config.json names the architecture 'vit_smal_ortho', which is not registered with timm \S+: import the "
        "package that registers it, or update timm; did you mean 'vit_small_ortho'"),
    "no architecture": (lambda config: config.pop("architecture"), [BY_PULL],
                        "its config.json is not timm's: KeyError: 'architecture'"),
}


@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind, (_, ways, _) in CONFIGS.items() for way in ways])
@pytest.mark.parametrize("source", ["hf-hub:me/vit", "local-dir:{}"])
def test_a_wrong_config(hub, client, saved, tmp_path, kind, way, source):
    change, _, text = CONFIGS[kind]
    files = with_config(saved["me/vit"][0], change)
    hub.commit("me/vit", files)
    write(tmp_path, files)
    result = client.run(way.replace("hf-hub:me/vit", source).format(tmp_path))
    check_refused(result, rf"{re.escape(source.format(tmp_path))}(@\w+)?: .*{text}")


def test_a_config_that_is_not_json(hub, client):
    hub.commit("me/vit", {"config.json": b"<html>"})
    check_refused(client.run(BY_PULL), "hf-hub:me/vit: its config.json is not timm's: JSONDecodeError: Expecting value")


def test_a_folder_without_a_config(client, tmp_path):
    folder = f"local-dir:{tmp_path}"
    check_refused(client.run(f"timm_ortho.pull('{folder}')"), f"{folder}: the folder contains no config.json")


@pytest.mark.parametrize("name", ["", "a/b/c", "/some/folder"])
def test_an_invalid_name(client, name):
    check_refused(client.run(f"timm_ortho.pull({name!r})"), f"'{name}' is not the name of a repository: pass "
            f"owner/name of letters, digits, '-', '_' and '.'; pass a folder as 'local-dir:{name or 'DIR'}'")


def with_nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[:2] = float("nan")
    return tensor


WEIGHTS = {
    "missing": (lambda t: t.pop("blocks.1.mlp.fc1.weight"), "missing: blocks.1.mlp.fc1.weight$"),
    "many missing": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("blocks.1")],
        r"missing: blocks.1.attn.qkv.weight, blocks.1.attn.qkv.bias, blocks.1.attn.proj.weight and 5 more$"),
    "surplus": (lambda t: t.update(extra=torch.zeros(2)), "surplus: extra$"),
    "misshapen": (
        lambda t: t.update({"blocks.0.mlp.fc1.bias": torch.zeros(9)}),
        r"wrong shape: blocks.0.mlp.fc1.bias \(\(9,\), not \(128,\)\)$"),
    "other input channels": (
        lambda t: t.update({"patch_embed.proj.weight": torch.zeros(32, 2, 4, 4)}),
        r"wrong shape: patch_embed.proj.weight \(\(32, 2, 4, 4\), not \(32, 3, 4, 4\)\)$"),
    "NaN": (
        lambda t: t.update({"norm.weight": with_nan(t["norm.weight"])}),
        r"not finite: norm.weight \(2 of 32 values\)$"),
    "infinite": (
        lambda t: t.update(cls_token=t["cls_token"] + float("inf")), r"not finite: cls_token \(32 of 32 values\)$"),
    "several": (
        lambda t: t.update(extra=with_nan(t.pop("norm.bias"))),
        r"missing: norm.bias; surplus: extra$"),
}


# If model and checkpoint differ in num_classes, timm alone might silently load wrong weights or leave a layer random.
@pytest.mark.parametrize(("kind", "way"), [
    *product(WEIGHTS, [BY_NAME, BY_TIMM]),
    *product(["missing", "surplus", "misshapen", "NaN"], ["small(num_classes=3)"]),
])
def test_weights_that_do_not_fit(hub, client, saved, kind, way):
    change, text = WEIGHTS[kind]
    commit_changed(hub, saved, change)
    check_refused(client.run(way), f"^WeightsError: hf-hub:me/vit: the weights do not fit vit_small_ortho: {text}")


def only_extra(tensors):
    return {"extra": torch.zeros(2)}


# timm alone loads each of these folders, with random or infinite weights.
@pytest.mark.parametrize("architecture", ["test_vit", "test_resnet", "dla34", "vit_test_ortho"])
@pytest.mark.parametrize(("change", "changed", "arguments", "text"), [
    (lambda tensors: {name: with_nan(tensor) if tensor.ndim == 1 else tensor for name, tensor in tensors.items()},
     {}, {}, "not finite: "),
    (lambda tensors: {name: tensor.double() + 1e300 * (tensor.ndim == 1) for name, tensor in tensors.items()},
     {}, {}, "not finite: "),
    (only_extra, {}, {"num_classes": 2}, "missing: .* more"),
    (only_extra, {"model_args": {"features_only": True}}, {}, "missing: .* more"),
    (only_extra, {"num_classes": -1, "model_args": {}}, {}, "config.json has -1 classes"),
    (dict, {"model_args": {"num_classes": 7}}, {}, "config.json has 5 classes and, with its model_args, 7$"),
])
def test_weights_of_every_architecture_are_checked(tmp_path, architecture, change, changed, arguments, text):
    save_for_hf(timm.create_model(architecture, num_classes=5), tmp_path, safe_serialization=True)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(WeightsError, match=f"the weights do not fit {architecture}: {text}"):
        timm_ortho.pull(tmp_path, **arguments)


@pytest.mark.parametrize("architecture", ["test_vit", "vit_test_ortho"])
@pytest.mark.parametrize(("name", "value", "text"), [
    ("pretrained_strict", False, "missing: .* more"), ("pretrained", False, "got multiple values for keyword argument"),
    ("cache_dir", "x", "got multiple values"), ("pretrained_cfg_overlay", {"num_classes": 3}, "got multiple values"),
])
def test_a_config_cannot_choose_how_its_weights_are_loaded(tmp_path, architecture, name, value, text):
    save_for_hf(timm.create_model(architecture), tmp_path, safe_serialization=True, model_args={name: value})
    save_file({"extra": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=text):
        timm_ortho.pull(tmp_path)


def test_a_pulled_architecture_of_timm_is_saved_with_its_arguments(tmp_path):
    model = timm.create_model("test_vit", num_classes=5, embed_dim=32)
    save_for_hf(model, tmp_path, safe_serialization=True, model_args={"embed_dim": 32})
    pulled = timm_ortho.pull(tmp_path)
    assert type(pulled) is type(model)
    assert torch.equal(pulled.head.weight, model.head.weight)
    timm_ortho.hub.export(pulled, tmp_path / "again", "me/vit")
    assert torch.equal(timm_ortho.pull(tmp_path / "again").head.weight, model.head.weight)


def test_a_file_that_is_not_safetensors(hub, client):
    hub.commit("me/vit", {"model.safetensors": b"<html>no such thing</html>"})
    check_refused(client.run(BY_NAME), r"model.safetensors cannot be read \(.*\); delete \S+ and try again")
