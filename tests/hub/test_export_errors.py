"""Test the one-line errors with which `hub.export` refuses models, runs and folders."""
import importlib
import re
import resource

import pytest
import torch
from helpers.exported import tiny
from helpers.tiny_study import one_run
from helpers.trained_runs import TINY, timm_run

import timm_ortho
from timm_ortho import connections, hub
from timm_ortho._text import UserError
from timm_ortho.hub import PublishError
from timm_ortho.lab.rewrites import absorb


def message(model, folder, repo_id="me/model", **kwargs):
    with pytest.raises(UserError) as error:
        hub.export(model, folder, repo_id, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def with_other_activation(model):
    model.blocks[0].mlp.act = torch.nn.ReLU()


def with_more(model):
    model.more = torch.nn.Linear(2, 2)


def without_a_skip(model):
    timm_ortho.connect(model, "feature", skip="orthogonal_tp")
    timm_ortho.sites(model)[1].connection.skip = None


def named(architecture):
    def change(model):
        model.pretrained_cfg = {**model.pretrained_cfg, "architecture": architecture}
    return change


@pytest.mark.parametrize(("change", "words"), [
    (with_other_activation, "has different logits: config.json does not store changes that were made"),
    (without_a_skip, "has different logits"), (with_more, "the saved files do not reproduce this model: "),
    (lambda model: [timm_ortho.connect(model.blocks[0], "global")], "the sites have different connections: connect"),
    (lambda model: absorb(timm_ortho.connect(model, "feature", skip="orthogonal_tp")), "the model cannot be saved: "),
    (named("vit_unheard_of"), "'vit_unheard_of' has no variant"),
    (named("vgg11"), "'vgg11' has no variant, so config.json cannot store its connections"),
    (lambda model: torch.nn.Linear(2, 2), "is not a classifier of timm.create_model"),
    (lambda model: tiny(act_layer=torch.nn.ReLU), "the model cannot be saved: "),
    (lambda model: model.head.weight.data.__setitem__((0, 0), torch.nan), "not finite: head.weight (1 of 112 values)"),
])
@pytest.mark.filterwarnings("ignore:timm's save_for_hf")
def test_models_that_config_json_cannot_reproduce(tmp_path, change, words):
    model = tiny()
    changed = change(model)
    assert words in message(changed if isinstance(changed, torch.nn.Module) else model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_model(tmp_path):
    folder = timm_run(tmp_path / "run")
    args = (folder / "args.yaml").read_text()
    (folder / "args.yaml").write_text(args.replace("depth: 2", "depth: 3"))
    path = folder / "last.pth.tar"
    refused = "the model '{}' cannot be built with the arguments and weights of {}: {}".format
    missing = "Error(s) in loading state_dict for PaperVisionTransformer"
    assert refused("vit_small_ortho", path, missing) in message(folder, tmp_path / "out")
    (folder / "args.yaml").write_text(args.replace("model: vit_small_ortho", "model: vit_smalll"))
    assert refused("vit_smalll", path, "Unknown model (vit_smalll)") in message(folder, tmp_path / "out")
    (folder / "args.yaml").write_text(args.replace("depth: 2", "checkpoint_path: X"))
    unusable = "timm.models._factory.create_model() got multiple values for keyword argument 'checkpoint_path'"
    assert refused("vit_small_ortho", path, unusable) in message(folder, tmp_path / "out")
    (folder / "args.yaml").write_text(args.replace("num_heads: 2", "num_heads: 0"))
    assert refused("vit_small_ortho", path, "integer modulo by zero") in message(folder, tmp_path / "out")


def test_other_wrong_arguments(tmp_path):
    assert "there are 2 labels for 7 classes" in message(tiny(), tmp_path / "out", labels=["a", "b"])
    assert "'model' is not the name of a repository" in message(tiny(), tmp_path / "out", "model")
    for name in ("me/model/x", "me/-model", "me/mo del"):
        with pytest.raises(PublishError, match=f"'{name}'"):
            hub.push(tiny(), name)
    assert "ema=True needs the path of a checkpoint" in message(tiny(), tmp_path / "out", ema=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert "contains other files (thesis.tex): choose another folder" in message(tiny(), tmp_path / "full")
    assert (tmp_path / "full" / "thesis.tex").exists()
    for name in ("README.md", "config.json", "training.png"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("Notes on timm-ortho")
        assert f"contains other files ({name}): choose another folder" in message(tiny(), tmp_path / name)
        assert (tmp_path / name / name).read_text().endswith("Notes on timm-ortho")
    hub.export(tiny(), tmp_path / "other", "me/model")
    (tmp_path / "other" / "README.md").write_text("My own notes on timm-ortho")
    assert "contains other files (README.md): choose" in message(tiny(), tmp_path / "other")
    torch.save({"head.weight": torch.zeros(1)}, tmp_path / "averaged.pth")
    averaged = message(tmp_path / "averaged.pth", tmp_path / "out")
    assert "has no 'state_dict'; build the model, load the weights and pass the model to timm_ortho.hub" in averaged
    begun = one_run(tmp_path / "study")
    assert f"the run in {begun} is not finished: repeat the command that started it" == message(begun, tmp_path / "out")
    thesis = tmp_path / "full" / "thesis.tex"
    with pytest.raises(NotADirectoryError):
        hub.export(tiny(), thesis, "me/model")


@pytest.mark.parametrize(("publish", "limit"), [
    (hub.export, 100), (lambda model, folder, repo_id: hub.push(model, repo_id, token="hf_x"), 20_000)])
def test_a_full_disk(tmp_path, monkeypatch, publish, limit):
    """Files larger than a limit cannot be written, as on a full disk."""
    monkeypatch.setattr("timm_ortho.hub.pushing._existing", lambda *_: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = tiny()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(PublishError) as error:
            publish(model, tmp_path / "out", "me/model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.fullmatch("the model cannot be saved: .*File too large.*", str(error.value))
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_a_module_that_registers_its_connection(tmp_path, monkeypatch):
    (tmp_path / "published.py").write_text(
        "import timm_ortho\n\nclass Mine(timm_ortho.FeatureConnection):\n    pass\n\n"
        "timm_ortho.register_connection('mine', Mine)\n", encoding="utf-8")
    monkeypatch.setitem(connections.CONNECTIONS, "mine", connections.FeatureConnection)  # removed after the test
    folder = timm_run(
        tmp_path / "run", device_modules=["timm_ortho", "published"], model_kwargs={**TINY, "connection": "mine"})
    del connections.CONNECTIONS["mine"]
    assert "names the module 'published', whose code would run: if you trust it, name it too" in message(
        folder, tmp_path / "out")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("published")
    for modules in (["timm_ortho", "published"], "published"):  # train.py stores a list
        folder = timm_run(tmp_path / str(modules), device_modules=modules, model_kwargs={**TINY, "connection": "mine"})
        card = str(hub.export(folder, tmp_path / "out", "me/model"))
        assert card.count("\nimport timm_ortho  # registers the architecture\nimport published  # ") == 2
