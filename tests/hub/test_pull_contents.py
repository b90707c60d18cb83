"""Test that folders and repositories with wrong configurations, wrong weights or pickles are refused.

Folders and repositories have the same readers. Each kind of file has one table of bad contents. The tests of the tables
read folders, and the last tests read repositories.
"""
import json
import os
import pickle
import shutil

import pytest
import timm
import torch
from helpers.hub_models import BY_NAME, BY_PULL, BY_TIMM, check_refused
from helpers.pickles import Evil
from safetensors.torch import load_file, save, save_file
from timm.models import save_for_hf

import timm_ortho
from timm_ortho.weights import WeightsError


@pytest.fixture(scope="module", params=["test_vit", "vit_test_ortho"])
def original(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    save_for_hf(timm.create_model(request.param, num_classes=5), folder, safe_serialization=True)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """Return a folder with a model of five classes that timm has saved."""
    return shutil.copytree(original, tmp_path / "model")


def refused(folder, text, **arguments):
    with pytest.raises(WeightsError, match=text) as error:
        timm_ortho.pull(folder, **arguments)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------- config.json
def top(**changes):
    return lambda config: json.dumps({**config, **changes})


def argument(**changes):
    return top(model_args=changes)


def cfg(**changes):
    return lambda config: json.dumps({**config, "pretrained_cfg": {**config["pretrained_cfg"], **changes}})


def text(content):
    return lambda config: content


NOT_TIMMS = "its config.json is not timm's: "
UNUSABLE = "cannot build a model: .*"
CONFIGS = {
    "HTML": (text("<html>"), NOT_TIMMS + "JSONDecodeError"),
    "nested": (text("[" * 100_000), NOT_TIMMS + "RecursionError"),
    "long number": (text('{"num_classes": ' + "9" * 5000 + "}"), NOT_TIMMS + "ValueError"),
    "no architecture": (lambda config: json.dumps({"num_classes": 5}), NOT_TIMMS + "KeyError: 'architecture'"),
    "list as architecture": (top(architecture=["test_vit"]), NOT_TIMMS),
    "unknown architecture": (
        top(architecture="vit_smal_ortho"), r"names the architecture 'vit_smal_ortho', which is not registered with "
        r"timm \S+: import the package that registers it, or update timm; did you mean 'vit_small_ortho'"),
    "architecture elsewhere": (top(architecture="hf-hub:me/evil"), "which is not registered"),
    "huge images": (
        top(model_args={}, pretrained_cfg={"input_size": [3, 10**9, 10**9]}), NOT_TIMMS + "ValueError: its input_size"),
    "other classes": (argument(num_classes=7), "config.json has 5 classes and, with its model_args, 7$"),
    "negative classes": (top(num_classes=-1, model_args={}), "config.json has -1 classes"),
    "classes as text": (top(num_classes="five"), "config.json"),
    "list of arguments": (top(model_args=["x"]), "."),
    "unknown argument": (argument(width=3), UNUSABLE + r"__init__\(\) got an unexpected keyword argument 'width'"),
    "unknown argument of the connection": (argument(connection_epsilon=1), UNUSABLE + "connection_epsilon"),
    "no heads": (argument(num_heads=0), UNUSABLE + "ZeroDivisionError"),
    "unknown activation": (argument(act_layer="gelo"), UNUSABLE + "gelo"),
    "unknown connection": (argument(connection="futile"), UNUSABLE + "connection"),
    "pickle": (cfg(hf_hub_filename="evil.bin"), "evil.bin is not a safetensors file, and pickles are never read$"),
    "number as file": (cfg(hf_hub_filename=5), "5 is not a safetensors file"),
    **{f"file {name}": (cfg(hf_hub_filename=name), "its file '.*evil.safetensors' is outside the repository")
       for name in ("/tmp/evil.safetensors", "../../evil.safetensors", "C:\\evil.safetensors")},
    **{name: (argument(**{name: value}), UNUSABLE + name) for name, value in dict(
        checkpoint_path="evil.pth", pretrained=False, cache_dir="x", pretrained_cfg={"file": "evil.pth"},
        pretrained_cfg_overlay={"file": "evil.pth"}).items()},
    "surplus allowed": (argument(pretrained_strict=False), "model_args of config.json contain 'pretrained_strict'"),
    "number as labels": (top(label_names=5), UNUSABLE + "pretrained_cfg.label_names is 5, but must be a list or a map"),
    "text as mean": (cfg(mean=["a"]), UNUSABLE + r"pretrained_cfg.mean\[0\] is 'a', but must be a number"),
    "text as crop": (cfg(crop_pct="a"), UNUSABLE + "pretrained_cfg.crop_pct is 'a', but must be a number"),
}


@pytest.mark.parametrize("original", ["vit_test_ortho"], indirect=True)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_wrong_config(folder, kind):
    change, message = CONFIGS[kind]
    file = folder / "config.json"
    file.write_text(change(json.loads(file.read_text())))
    refused(folder, message)


def test_a_config_does_not_choose_the_weights(folder):
    changes = dict(
        file="/tmp/evil.pth", source="timm", url="http://127.0.0.1:9/", custom_load="hf", state_dict={"a": 1})
    file = folder / "config.json"
    file.write_text(cfg(**changes)(json.loads(file.read_text())))
    loaded, stored = timm_ortho.pull(folder).state_dict(), load_file(folder / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())


# ---------------------------------------------------------------------------------------- model.safetensors
def changed(**changes):
    return lambda tensors: {**tensors, **{name.replace("__", "."): value for name, value in changes.items()}}


def without(start):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(start)}


def with_nan(tensors):
    return {**tensors, "norm.weight": torch.tensor([float("nan")] * 2 + [1.0] * (len(tensors["norm.weight"]) - 2))}


def only_extra(tensors):
    return {"extra": torch.zeros(2)}


# change of the tensors -> arguments in config.json, arguments of the call, text of the error
MISSING = (without("blocks.1.mlp.fc1.weight"), {}, {}, "missing: blocks.1.mlp.fc1.weight$")
SURPLUS = (changed(extra=torch.zeros(2)), {}, {}, "surplus: extra$")
MISSHAPEN = (changed(blocks__0__mlp__fc1__bias=torch.zeros(9)), {}, {}, r"wrong shape: blocks.0.mlp.fc1.bias \(\(9")
NAN = (with_nan, {}, {}, r"not finite: norm.weight \(2 of \d+ values\)$")
OTHER_CLASSES = [(change, arguments, {"num_classes": 3}, text)
                 for change, arguments, _, text in (MISSING, SURPLUS, MISSHAPEN, NAN)]
WEIGHTS = [
    MISSING, SURPLUS, MISSHAPEN, NAN, *OTHER_CLASSES,
    (without("blocks.1"), {}, {}, r"missing: blocks.1.\w+.*, .* more$"),
    (lambda tensors: {**tensors, "cls_token": tensors["cls_token"] + float("inf")}, {}, {}, "not finite: cls_token"),
    (lambda tensors: {name: tensor.double() + 1e300 for name, tensor in tensors.items()}, {}, {}, "not finite: "),
    (lambda tensors: {"extra": torch.zeros(2), **without("norm.bias")(tensors)}, {}, {}, "missing: norm.bias; sur"),
    (only_extra, {}, {"num_classes": 2}, "missing: .* more"),
    (only_extra, {"features_only": True}, {}, "missing: .* more"),
]


@pytest.mark.parametrize(("change", "in_file", "of_call", "message"), WEIGHTS)
def test_weights_that_do_not_fit(folder, change, in_file, of_call, message):
    """timm alone loads some of these folders, with random or infinite weights."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["model_args"] = {**config.get("model_args", {}), **in_file}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, f"the weights do not fit {config['architecture']}: {message}", **of_call)


@pytest.mark.parametrize(("layers", "change", "in_file", "of_call", "message"), [
    ({"classifier": ["head", "blocks"]}, without("blocks"), {}, {"num_classes": 3}, "missing: blocks.0"),
    ({"classifier": ["head", "blocks.0.mlp.fc1"]}, dict, {}, {"num_classes": 3}, None),
    ({"classifier": ["head", "blocks"]}, without("blocks"), {"features_only": True}, {}, "missing: blocks.0"),
    ({"first_conv": "blocks.0.mlp.fc1"}, changed(blocks__0__mlp__fc1__weight=torch.zeros(96, 3)), {}, {"in_chans": 2},
     "wrong shape: blocks.0.mlp.fc1.weight"),
])
@pytest.mark.parametrize("original", ["vit_test_ortho"], indirect=True)
def test_a_config_does_not_choose_the_layers_that_timm_replaces(folder, layers, change, in_file, of_call, message):
    """timm makes these layers random if the number of classes or channels differs."""
    stored = change(load_file(folder / "model.safetensors"))
    save_file(stored, folder / "model.safetensors")
    config = json.loads(cfg(**layers)(json.loads((folder / "config.json").read_text())))
    (folder / "config.json").write_text(json.dumps({**config, "model_args": {**config["model_args"], **in_file}}))
    for load in (timm_ortho.pull, lambda path, **kwargs: timm.create_model(f"local-dir:{path}", True, **kwargs)):
        if message:
            with pytest.raises(WeightsError, match=message):
                load(folder, **of_call)
        else:
            assert torch.equal(load(folder, **of_call).blocks[0].mlp.fc1.weight, stored["blocks.0.mlp.fc1.weight"])


def test_weights_that_are_a_pipe(folder):
    """To open a pipe waits for a writer."""
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, r"model.safetensors cannot be read as a checkpoint \(it is not a file\)$")


@pytest.mark.parametrize("change", [
    lambda content: b"<html>no such thing</html>", lambda content: content[:-100],
    lambda content: (2**62).to_bytes(8, "little") + content[8:]])
def test_a_file_that_is_not_safetensors(folder, change):
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    refused(folder, r"model.safetensors cannot be read as a checkpoint \(it is damaged or not a checkpoint\)$")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_is_never_read(folder, tmp_path, name):
    mark = tmp_path / "executed"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Evil(mark)))
    refused(folder, "model.safetensors cannot be read")
    assert not mark.exists()
    pickle.loads((folder / name).read_bytes()).close()
    assert mark.exists()  # unpickling creates the file, so `not mark.exists()` above is a real check


# ---------------------------------------------------------------------------------------------- repositories
@pytest.mark.parametrize("way", [BY_NAME, BY_PULL, BY_TIMM])
def test_a_repository_with_a_pickle(hub, client, saved, tmp_path, way):
    mark = tmp_path / "executed"
    hub.create_repo("me/vit")
    hub.commit("me/vit", {
        "config.json": saved["me/vit"][0]["config.json"], "pytorch_model.bin": pickle.dumps(Evil(mark))})
    check_refused(client.run(way), r"model.safetensors cannot be downloaded from .*: \w+: 404 .* Entry Not Found")
    assert not mark.exists()
    assert not any("/blobs/" in request.path for request in hub.requests)


@pytest.mark.parametrize(("way", "changes", "message"), [
    (BY_PULL, cfg(hf_hub_filename="evil.bin"), r"hf-hub:me/vit@\w+: evil.bin is not a safetensors file"),
    (BY_PULL, cfg(hf_hub_filename="../evil.safetensors"), r"hf-hub:me/vit@\w+: its file '.*' is outside the repo"),
    (BY_PULL, argument(width=3), r"hf-hub:me/vit@\w+: the arguments of its config.json and of the call cannot build"),
    (BY_TIMM, argument(width=3), "hf-hub:me/vit: the arguments of its config.json and of the call cannot build"),
    (BY_PULL, text("<html>"), r"hf-hub:me/vit@\w+: its config.json is not timm's"),
])
def test_a_repository_with_a_wrong_config(hub, client, saved, way, changes, message):
    config = json.loads(saved["me/vit"][0]["config.json"])
    hub.commit("me/vit", {"config.json": changes(config).encode()})
    check_refused(client.run(way), message)


def test_weights_of_a_repository_are_checked(hub, client):
    hub.commit("me/vit", {"model.safetensors": save({"extra": torch.zeros(2)})})
    result = client.run("from timm_ortho import WeightsError\nerrors = []\n"
                        f"for way in [lambda: {BY_NAME}, lambda: {BY_PULL}, lambda: {BY_TIMM}]:\n"
                        "    try: way()\n"
                        "    except WeightsError as error: errors.append(str(error))\n"
                        "answer(errors)")
    assert len(result.answer) == 3, result.output
    for error in result.answer:
        assert "the weights do not fit vit_small_ortho: missing: " in error


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_a_configuration_that_names_a_pickle_is_refused(name):
    overlay = dict(hf_hub_id="me/vit", hf_hub_filename=name)
    with pytest.raises(WeightsError, match=f"hf-hub:me/vit: {name} is not a safetensors file, and pickles are never"):
        timm.create_model("vit_small_ortho", pretrained=True, pretrained_cfg_overlay=overlay)


@pytest.mark.parametrize("filename", [None, "other.safetensors"])
def test_an_architecture_of_timm_in_a_repository(hub, client, tmp_path, filename):
    model = timm.create_model("test_vit", num_classes=3)
    save_for_hf(model, tmp_path, safe_serialization=True)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if filename:
        files[filename] = files.pop("model.safetensors")
        files["config.json"] = cfg(hf_hub_filename=filename)(json.loads(files["config.json"])).encode()
    hub.commit("me/vit", files)
    for classes in (3, 2):
        result = client.run(f"model = timm_ortho.pull('hf-hub:me/vit', num_classes={classes})\n"
                            "answer([model.head.weight.shape[0], model.blocks[0].attn.qkv.weight.sum().item(), "
                            "{**model.pretrained_cfg}.get('source'), model.pretrained_cfg['hf_hub_id'], "
                            "'file' in model.pretrained_cfg])")
        assert result.answer == [classes, model.blocks[0].attn.qkv.weight.sum().item(), "hf-hub", "me/vit", False]


@pytest.mark.parametrize("name", ["", "a/b/c", "/some/folder"])
def test_an_invalid_name(name):
    with pytest.raises(WeightsError, match=f"hf-hub:{name}: config.json cannot be .*: HFValidationError: "):
        timm_ortho.pull(name)


def test_a_pulled_architecture_of_timm_is_saved_with_its_arguments(tmp_path):
    model = timm.create_model("test_vit", num_classes=5, embed_dim=32)
    save_for_hf(model, tmp_path, safe_serialization=True, model_args={"embed_dim": 32})
    pulled = timm_ortho.pull(tmp_path)
    assert type(pulled) is type(model)
    assert torch.equal(pulled.head.weight, model.head.weight)
    timm_ortho.hub.export(pulled, tmp_path / "again", "me/vit")
    assert torch.equal(timm_ortho.pull(tmp_path / "again").head.weight, model.head.weight)
