"""`timm_ortho.hub.export` and `timm-ortho push --dry-run`: what is written, that it comes back to the bit, and what is
refused. No server is needed.
"""
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.trained_runs import TINY, lab_grid, timm_run
from PIL import Image
from safetensors.torch import load_file, save_file

import timm_ortho
from timm_ortho import arguments, cli, connections, hub
from timm_ortho.hub import PublishError, trained_run
from timm_ortho.weights import checks

VIT = dict(TINY, num_classes=7)
SECRET = "hf_" + "0123456789abcdef" * 2


def tiny(name="vit_small_ortho", seed=0, **kwargs):
    torch.manual_seed(seed)
    return timm.create_model(name, **{**VIT, **kwargs}).eval()


def loaded(folder):
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def config(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def logits(model, chans=3, size=16):
    images = torch.randn(2, chans, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(images)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return lab_grid(tmp_path_factory.mktemp("grid") / "compared", seeds=2)


# ------------------------------------------------------------------------------------------ what is written
def test_the_folder(tmp_path):
    model = tiny()
    card = hub.export(model, tmp_path / "out", "me/model")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert (tmp_path / "out" / "README.md").read_text(encoding="utf-8") == str(card)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize(("name", "kwargs", "arguments"), [
    ("vit_small_ortho", {}, dict(connection="feature", connection_eps=1e-6)),
    ("vit_small_orthog", dict(connection_prob=0.25, connection_eps=1e-4, connection_layers=[1]),
     dict(connection="global", connection_eps=1e-4, connection_prob=0.25, connection_layers=[1])),
    ("vit_small_ortho", dict(connection_kinds="mlp", connection_layers=[1]),
     dict(connection="feature", connection_eps=1e-6, connection_layers=[1], connection_kinds=["mlp"])),
    ("vit_small_ortho", dict(connection_keep="branch"),
     dict(connection="feature", connection_eps=1e-6, connection_keep="branch")),
    ("vit_small_ortho", dict(connection_keep="output"),
     dict(connection="feature", connection_eps=1e-6)),
    ("vit_small_linear", {}, dict(connection="linear")),
    ("vit_small_ortho", dict(connection="linear"), dict(connection="linear")),
    ("vit_small_ortho", dict(connection="hybrid", connection_start="linear"),
     dict(connection="hybrid", connection_eps=1e-6, connection_start="linear")),
])
def test_connections_are_restored(tmp_path, name, kwargs, arguments):
    model = tiny(name, **kwargs)
    hub.export(model, tmp_path / "out", "me/model")
    written = config(tmp_path / "out")
    assert written["architecture"] == f"{name}.import_timm_ortho"
    assert {k: v for k, v in written["model_args"].items() if k.startswith("connection")} == arguments
    again = loaded(tmp_path / "out")
    assert [repr(site) for site in timm_ortho.sites(again)] == [repr(site) for site in timm_ortho.sites(model)]
    keeps = [[site.connection.keep for site in timm_ortho.sites(one)] for one in (again, model)]
    assert keeps[0] == keeps[1]
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(("name", "kwargs"), [
    ("vit_small_ortho", dict(skip="orthogonal_random", skip_seed=3)),
    ("vit_small_linear", dict(skip="scaled")),
    ("vit_small_orthog", dict(skip="idempotent_cmr", skip_branches=4)),
    ("vit_small_ortho", dict(skip="idempotent_mr", skip_rank=8)),
])
def test_transforms_of_the_stream_are_restored(tmp_path, name, kwargs):
    model = tiny(name, **kwargs)
    card = str(hub.export(model, tmp_path / "out", "me/model"))
    assert {k: v for k, v in config(tmp_path / "out")["model_args"].items() if k.startswith("skip")} == kwargs
    assert f"{kwargs['skip']}: " in card
    assert "arXiv:1707.05974" in card
    again = loaded(tmp_path / "out")
    assert [repr(site) for site in timm_ortho.sites(again)] == [repr(site) for site in timm_ortho.sites(model)]
    assert torch.equal(logits(again), logits(model))


def test_learned_connections_are_weights(tmp_path):
    model = tiny(connection="hybrid")
    with torch.no_grad():
        for site in timm_ortho.sites(model):
            site.connection.rho.fill_(0.5)
            site.connection.theta.fill_(0.3)
    hub.export(model, tmp_path / "out", "me/model")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


def test_connections_as_they_are_and_not_as_they_were_made(tmp_path):
    model = timm_ortho.connect(tiny(), "global", eps=1e-3, layers=[0])
    hub.export(model, tmp_path / "out", "me/model")
    assert config(tmp_path / "out")["model_args"]["connection"] == "global"
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


def test_a_connected_model_of_timms_is_a_variant(tmp_path):
    torch.manual_seed(0)
    model = timm_ortho.connect(timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3), "global").eval()
    hub.export(model, tmp_path / "out", "me/model")
    assert config(tmp_path / "out")["architecture"] == "vit_tiny_patch16_224_ortho.import_timm_ortho"
    assert "tag" not in config(tmp_path / "out")["pretrained_cfg"]
    assert torch.equal(logits(loaded(tmp_path / "out"), size=32), logits(model, size=32))


KEEPS_ARGUMENTS = hasattr(timm.models._hub, "get_model_args")  # timm 1.0.31


@pytest.mark.skipif(not KEEPS_ARGUMENTS, reason="timm keeps no arguments")
@pytest.mark.parametrize("change", [
    lambda model: model.reset_classifier(3), lambda model: model.reset_classifier(0),
    lambda model: model.reset_classifier(5, "avg"), lambda model: model.set_input_size(32)])
def test_a_model_that_timm_has_changed_since_it_was_made(tmp_path, change):
    """As a fine-tuner does it."""
    model = tiny(global_pool="token", connection="global", connection_eps=1e-3)
    change(model)
    hub.export(model, tmp_path / "out", "me/model")
    size = model.patch_embed.img_size[0]
    assert torch.equal(logits(loaded(tmp_path / "out"), size=size), logits(model, size=size))
    assert config(tmp_path / "out")["model_args"]["connection_eps"] == 1e-3


@pytest.mark.parametrize("arguments", [
    dict(connection_layers=range(1)), dict(connection_layers=np.array([1]), connection_prob=np.float32(0.5))])
def test_arguments_that_json_does_not_have(tmp_path, arguments):
    model = tiny(**arguments)
    hub.export(model, tmp_path / "out", "me/model")
    assert config(tmp_path / "out")["model_args"]["connection_layers"] == list(arguments["connection_layers"])
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("name", ["vit_small_ortho", "test_vit_ortho"])
def test_a_variant_after_disconnect_is_linear(tmp_path, name):
    kwargs = VIT if name.startswith("vit_small") else {}
    model = timm_ortho.disconnect(timm.create_model(name, **kwargs).eval())
    hub.export(model, tmp_path / "out", "me/model")
    assert config(tmp_path / "out")["model_args"]["connection"] == "linear"
    size = model.patch_embed.img_size[0]
    assert torch.equal(logits(loaded(tmp_path / "out"), size=size), logits(model, size=size))


@pytest.mark.skipif(not KEEPS_ARGUMENTS, reason="timm keeps no arguments")
def test_timms_own_way_keeps_what_create_model_was_given(tmp_path):
    """And not what was connected afterwards: docs/hub.md says so."""
    model = tiny(connection="hybrid", connection_start="linear")
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    assert repr(timm_ortho.sites(loaded(tmp_path))) == repr(timm_ortho.sites(model))
    timm.models.save_for_hf(timm_ortho.connect(model, "global"), tmp_path, safe_serialization=True)
    assert config(tmp_path)["model_args"]["connection"] == "hybrid"


def test_an_entry_point_that_was_called_directly(tmp_path):
    torch.manual_seed(0)
    model = timm.model_entrypoint("vit_small_ortho")(**VIT).eval()
    hub.export(model, tmp_path / "out", "me/model")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


@pytest.mark.parametrize(("name", "kwargs"), [
    ("resnetv2_18_cifar_ortho", dict(head_norm=True, in_chans=1, num_classes=5)),
    ("resnetv2_18_orthog", dict(in_chans=1, num_classes=5)),
    ("vit_small_ortho", dict(VIT, in_chans=1, global_pool="avg")),
])
def test_other_shapes_come_back(tmp_path, name, kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs).eval()
    hub.export(model, tmp_path / "out", "me/model")
    again = loaded(tmp_path / "out")
    size = 16 if "vit" in name else 32
    assert torch.equal(logits(again, 1, size), logits(model, 1, size))
    cfg = config(tmp_path / "out")["pretrained_cfg"]
    assert (cfg["input_size"][0], len(cfg["mean"]), len(cfg["std"])) == (1, 1, 1)


@pytest.mark.parametrize("name", [
    "crossvit_9_240_ortho",  # timm's checkpoint filter for it takes one argument
    "csatv2_orthog",  # its configuration names no first convolution
    "regnetx_002_orthog",
])
def test_other_families_come_back(tmp_path, name):
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3).eval()
    hub.export(model, tmp_path / "out", "me/model")  # which compares the logits
    again = loaded(tmp_path / "out")
    assert [repr(site) for site in timm_ortho.sites(again)] == [repr(site) for site in timm_ortho.sites(model)]


def test_wrappers_and_layouts_make_no_difference(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("resnetv2_18_cifar_ortho", num_classes=5).eval()
    hub.export(model, tmp_path / "a", "me/model")
    model.to(memory_format=torch.channels_last).train()
    hub.export(torch.compile(model), tmp_path / "b", "me/model")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert config(tmp_path / "a") == config(tmp_path / "b")
    assert model.training  # the model itself stays as it was


def test_a_run_brings_data_labels_and_curve(grid, tmp_path):
    hub.export(grid / "feature-seed0", tmp_path / "out", "me/model", license="mit")
    written = config(tmp_path / "out")
    assert written["label_names"] == [str(digit) for digit in range(10)]
    assert written["model_args"]["connection"] == "feature"
    cfg = written["pretrained_cfg"]
    assert (cfg["input_size"], cfg["mean"], cfg["std"], cfg["license"]) == ([1, 16, 16], [0.3], [0.38], "mit")
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    checkpoint = torch.load(grid / "feature-seed0" / "last.pth.tar", weights_only=False)
    assert all(torch.equal(tensor, checkpoint["state_dict"][name])
               for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items())


def test_a_run_of_timms_script_brings_its_arguments(tmp_path):
    folder = timm_run(tmp_path / "run", ema=True, model_kwargs=dict(TINY, connection="global", connection_eps=1e-3))
    for ema, key in ((False, "state_dict"), (True, "state_dict_ema")):
        hub.export(folder / "last.pth.tar", tmp_path / "out", "me/model", ema=ema)
        written, stored = config(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
        checkpoint = torch.load(folder / "last.pth.tar", weights_only=False)
        assert all(torch.equal(tensor, checkpoint[key][name]) for name, tensor in stored.items())
        assert written["model_args"]["connection_eps"] == 1e-3
        assert (written["num_classes"], written["pretrained_cfg"]["interpolation"]) == (7, "bilinear")
    assert not torch.equal(checkpoint["state_dict"]["head.weight"], checkpoint["state_dict_ema"]["head.weight"])


def test_what_began_with_share_alike_weights_names_their_licence(tmp_path, monkeypatch):
    """The authors' weights, fine-tuned: by timm's script, and in hand. What began elsewhere says nothing of it."""
    base = "BootsofLagrangian/ortho-vit-b-imagenet1k-hf"
    source = timm.create_model("vit_base_ortho", **TINY)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    asked = []
    monkeypatch.setattr(checks, "fetch", lambda *arguments: asked.append(arguments) or tmp_path / "weights.safetensors")
    begun = timm.create_model("vit_base_ortho", pretrained=True, **TINY)
    assert asked[0][0] == base
    fresh = timm.create_model("vit_base_ortho", **TINY)
    file = dict(file=str(tmp_path / "weights.safetensors"))
    other = timm.create_model("vit_base_ortho", pretrained=True, pretrained_cfg_overlay=file, **TINY)
    revised = timm.create_model("vit_base_ortho", **TINY)
    revised.began_with = {**begun.began_with, "hf_hub_id": f"{base}@v1"}  # as pull leaves it
    runs = [timm_run(tmp_path / f"run{number}", model="vit_base_ortho", **options) for number, options in enumerate([
        dict(pretrained=True), dict(pretrained=False), dict(pretrained=True, pretrained_path="mine.safetensors"),
        dict(pretrained=True, initial_checkpoint="mine.pth.tar")])]
    for model, is_theirs in ((begun, True), (revised, True), (runs[0], True), (fresh, False), (other, False),
                             *((run, False) for run in runs[1:])):
        card = hub.export(model, tmp_path / "out", "me/model")
        assert (f"the weights of {base}, whose license cc-by-sa-4.0 is share-alike" in card.text) is is_theirs
        assert card.data.base_model == (base if is_theirs else None)
        assert card.data.license is None


def test_weights_of_a_switched_run_have_the_second_connection(grid, tmp_path):
    folder = shutil.copytree(grid / "linear-seed0", tmp_path / "switched")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "connection": "global", "switch_epoch": 1}))
    hub.export(folder, tmp_path / "out", "me/model")
    assert config(tmp_path / "out")["model_args"]["connection"] == "global"
    (folder / "result.json").write_text(json.dumps({**result, "connection": "global", "switch_epoch": 2}))
    hub.export(folder, tmp_path / "out", "me/model")
    assert config(tmp_path / "out")["model_args"]["connection"] == "linear"


def test_labels_of_the_data_set_where_it_still_is(tmp_path):
    for split in ("train", "validation"):
        for number in range(7):
            (tmp_path / "images" / split / f"kind{number}").mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / "images" / split / f"kind{number}" / "0.png")
    folder = timm_run(tmp_path / "run", dataset="", data_dir=str(tmp_path / "images"))
    hub.export(folder, tmp_path / "out", "me/model")
    assert config(tmp_path / "out")["label_names"] == [f"kind{number}" for number in range(7)]
    hub.export(folder, tmp_path / "out", "me/model", labels=list("abcdefg"))
    assert config(tmp_path / "out")["label_names"] == list("abcdefg")


def test_no_token_reaches_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "my-own-token")
    folder = timm_run(tmp_path / "run", wandb_project=SECRET, experiment="my-own-token", other="third-token",
                      url="https://user:password@host/data")
    card = str(hub.export(folder, tmp_path / "out", "me/model", token="third-token"))
    for secret in (SECRET, "my-own-token", "third-token", "password"):
        assert secret not in card
    assert "https://***@host/data" in card
    with pytest.raises(PublishError, match="would contain a token"):
        hub.export(tiny(), tmp_path / "out", "me/model", labels=[SECRET, *"bcdefg"])


# ---------------------------------------------------------------------------------------- what is refused
def message(model, folder, repo_id="me/model", **kwargs):
    with pytest.raises(PublishError) as error:
        hub.export(model, folder, repo_id, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_config_json_cannot_say_is_refused(tmp_path):
    changed = tiny()
    changed.blocks[0].mlp.act = torch.nn.ReLU()
    assert "has other logits than this one: a later change by hand" in message(changed, tmp_path / "out")
    grown = tiny()
    grown.more = torch.nn.Linear(2, 2)
    assert "config.json does not reproduce this model" in message(grown, tmp_path / "out")
    mixed = tiny()
    timm_ortho.connect(mixed.blocks[0], "global")
    assert "the sites have different connections: connect the whole model" in message(mixed, tmp_path / "out")
    assert "is not a classifier of timm.create_model" in message(torch.nn.Linear(2, 2), tmp_path / "out")
    transformed = tiny(skip="orthogonal_tp")
    timm_ortho.sites(transformed)[1].connection.skip = None
    assert "has other logits than this one" in message(transformed, tmp_path / "out")
    rewritten = timm_ortho.absorb(tiny(skip="orthogonal_tp"))
    assert "rewritten by timm_ortho.absorb or diagonalise" in message(rewritten, tmp_path / "out")
    unknown = tiny()
    unknown.pretrained_cfg = {**unknown.pretrained_cfg, "architecture": "vit_unheard_of"}
    assert "'vit_unheard_of' is not registered with timm" in message(unknown, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_broken_weights_are_refused(tmp_path):
    model = tiny()
    model.head.weight.data[0, 0] = float("nan")
    assert "1 of 24 tensors contain NaN or infinities, for example head.weight" in message(model, tmp_path / "out")


def test_weights_of_another_model_are_refused(tmp_path):
    folder = timm_run(tmp_path / "run")
    args = (folder / "args.yaml").read_text()
    (folder / "args.yaml").write_text(args.replace("depth: 2", "depth: 3"))
    assert "does not fit the model of its arguments, 'vit_small_ortho'" in message(folder, tmp_path / "out")
    (folder / "args.yaml").write_text(args.replace("model: vit_small_ortho", "model: vit_smalll"))
    assert "'vit_smalll': Unknown model (vit_smalll)" in message(folder, tmp_path / "out")


def test_weights_from_the_middle_of_an_epoch_were_never_measured(tmp_path):
    folder = timm_run(tmp_path / "run")
    checkpoint = torch.load(folder / "last.pth.tar", weights_only=False)
    del checkpoint["metric"]  # as train.py's --recovery-interval leaves it
    torch.save(checkpoint, folder / "recovery-2-5.pth.tar")
    card = str(hub.export(folder / "recovery-2-5.pth.tar", tmp_path / "out", "me/model"))
    assert "Not measured on these weights: they were saved in the middle of an epoch." in card
    assert "top-1 of these weights" not in card


def test_a_second_training_in_a_folder_is_the_one_that_counts(tmp_path):
    folder = timm_run(tmp_path / "run", epochs=4)
    with open(folder / "summary.csv", "a", encoding="utf-8") as file:
        file.write("epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n0,1,1,5,9,0.1\n1,1,1,6,9,0.1\n")
    rows = trained_run.read_history(folder)
    assert [(row["epoch"], row["eval_top1"]) for row in rows] == [(0, 5.0), (1, 6.0)]


def test_a_run_with_a_connection_of_its_own_module(tmp_path, monkeypatch):
    (tmp_path / "published.py").write_text(
        "import timm_ortho\n\nclass Mine(timm_ortho.FeatureConnection):\n    pass\n\n"
        "timm_ortho.register_connection('mine', Mine)\n", encoding="utf-8")
    monkeypatch.setattr(connections, "CONNECTIONS", before := dict(connections.CONNECTIONS))
    monkeypatch.setattr(arguments, "CONNECTIONS", before)
    folder = timm_run(tmp_path / "run", device_modules=["timm_ortho", "published"])
    assert "option 'device_modules': No module named 'published': is its folder in PYTHONPATH?" in message(
        folder, tmp_path / "out")
    monkeypatch.syspath_prepend(str(tmp_path))
    card = str(hub.export(folder, tmp_path / "out", "me/model"))
    assert "mine" in before
    assert card.count("\nimport timm_ortho  # registers the architecture\nimport published  # ") == 2


@pytest.mark.parametrize(("module", "line"), [
    ("mine", "import mine  # the author's own module"),
    ("__main__", "# run the author's lines that register the connection 'clipped' here")])
def test_the_module_of_a_registered_connection_is_on_the_card(tmp_path, monkeypatch, module, line):
    clipped = type("Clipped", (timm_ortho.FeatureConnection,), {"__module__": module})
    monkeypatch.setitem(connections.CONNECTIONS, "clipped", clipped)
    card = str(hub.export(tiny(connection="clipped"), tmp_path / "out", "me/model"))
    assert card.count(f"\nimport timm_ortho  # registers the architecture\n{line}\n") == 2


@pytest.mark.parametrize("name", ["args.yaml", "result.json"])
def test_a_sibling_that_is_damaged_is_no_peer(grid, tmp_path, name):
    copy = shutil.copytree(grid, tmp_path / "grid")
    assert trained_run.CheckpointRun(copy / "feature-seed0").peers.keys() == {0, 1}
    damaged = copy / "feature-seed1" / name
    damaged.write_text("{}") if name == "result.json" else damaged.unlink()
    assert trained_run.CheckpointRun(copy / "feature-seed0").peers.keys() == {0}


def test_other_wrong_words(tmp_path):
    assert "there are 2 labels for 7 classes" in message(tiny(), tmp_path / "out", labels=["a", "b"])
    for name in ("model", "me/model/x", "me/-model", "me/mo del"):
        assert f"'{name}' is not the name of a repository: pass owner/name" in message(
            tiny(), tmp_path / "out", name)
    assert "a model has no EMA weights" in message(tiny(), tmp_path / "out", ema=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert "contains other files ('thesis.tex'): choose another --output" in message(tiny(), tmp_path / "full")
    assert (tmp_path / "full" / "thesis.tex").exists()
    torch.save({"head.weight": torch.zeros(1)}, tmp_path / "averaged.pth")
    assert "has no 'state_dict'; build the model, load the weights and pass it to timm_ortho.hub.push" in message(
        tmp_path / "averaged.pth", tmp_path / "out")
    (tmp_path / "begun" / "switched").mkdir(parents=True)
    for name in ("run.yaml", "switched/args.yaml"):
        (tmp_path / "begun" / name).touch()
    assert "begun is not finished: repeat the command that started it" in message(
        tmp_path / "begun", tmp_path / "out")
    thesis = tmp_path / "full" / "thesis.tex"
    assert f"{thesis} is a file: choose another --output" in message(tiny(), thesis)
    assert f"cannot write in {thesis}: " in message(tiny(), thesis / "out")


def test_a_link_to_an_earlier_export_is_followed(tmp_path, monkeypatch):
    hub.export(tiny(), tmp_path / "real", "me/model")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    hub.export(tiny(), tmp_path / "link", "me/other")
    assert "me/other" in (tmp_path / "real" / "README.md").read_text(encoding="utf-8")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    hub.export(tiny(), Path(), "me/model")
    assert (tmp_path / "here" / "config.json").is_file()


def test_command_line(grid, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["push", str(grid / "feature-seed0"), "me/digits", "--dry-run"]) == 0
    printed = capsys.readouterr()
    folder = Path("output/push/me--digits")
    assert printed.out.strip() == (folder / "README.md").read_text(encoding="utf-8").strip()
    assert printed.err.endswith(f"nothing was sent; the files are in {folder}\n")
    Path("labels").write_text("\ufeff" + "\n".join("abcdefghij") + "\n\n", encoding="utf-8")  # as some editors save it
    assert cli.main(["push", str(grid / "feature-seed0"), "me/digits", "--dry-run", "--output", "out", "--labels",
                     "labels", "--license", "mit", "--revision", "v2"]) == 0
    assert "hf-hub:me/digits@v2" in capsys.readouterr().out
    assert config(Path("out"))["label_names"] == list("abcdefghij")
    assert cli.main(["push", str(grid), "me/digits", "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        f"timm-ortho: error: {grid} contains 4 runs: pass one of them, such as {grid / 'feature-seed0'}\n")
    assert cli.main(["push", str(grid / "feature-seed0"), "me/digits", "--dry-run", "--labels", "none"]) == 2
    assert capsys.readouterr().err == "timm-ortho: error: none cannot be read: No such file or directory\n"
