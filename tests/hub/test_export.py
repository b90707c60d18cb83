"""Test the files of exported folders. A loaded folder has the logits of the exported model, bit for bit."""
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import timm
import torch
from helpers.exported import VIT, config, loaded, logits, tiny
from helpers.trained_runs import TINY, timm_run
from safetensors.torch import load_file, save_file

import timm_ortho
from timm_ortho import cli, connections, hub
from timm_ortho.hub import PublishError
from timm_ortho.weights import checks

SECRET = "hf_" + "0123456789abcdef" * 2


def test_files_of_a_folder(tmp_path):
    model = tiny()
    card = hub.export(model, tmp_path / "out", "me/model")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert (tmp_path / "out" / "README.md").read_text(encoding="utf-8") == str(card)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out"]


def created(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **kwargs).eval()


def entry_point(name):
    torch.manual_seed(0)
    return timm.model_entrypoint(name)(**VIT).eval()


def learned():
    model = tiny(connection="hybrid")
    with torch.no_grad():
        for site in timm_ortho.sites(model):
            site.connection.rho.fill_(0.5)
            site.connection.theta.fill_(0.3)
    return model


FEATURE, GLOBAL = (dict(connection=name, connection_eps=1e-6) for name in ("feature", "global"))
HYBRID, LINEAR = dict(connection="hybrid", connection_eps=1e-6), dict(connection="linear")


@pytest.mark.parametrize(("name", "make", "arguments"), [  # architecture, model, arguments in config.json
    ("vit_small_ortho", tiny, FEATURE),
    ("vit_small_ortho", partial(entry_point, "vit_small_ortho"), FEATURE),
    ("vit_small_orthog", partial(
        tiny, "vit_small_orthog", connection_prob=0.25, connection_eps=1e-4, connection_layers=[1]),
     dict(connection="global", connection_eps=1e-4, connection_prob=0.25, connection_layers=[1])),
    ("vit_small_ortho", partial(tiny, connection_keep="branch", connection_groups=4),
     dict(FEATURE, connection_keep="branch", connection_groups=4)),
    ("vit_small_linear", partial(tiny, "vit_small_linear"), LINEAR),
    ("vit_small_ortho", partial(tiny, connection="hybrid", connection_start="linear"),
     dict(HYBRID, connection_start="linear")),
    ("vit_small_ortho", learned, HYBRID),
    # values of types that JSON does not have
    ("vit_small_ortho", partial(
        tiny, connection_layers=np.array([1]), connection_kinds="mlp", connection_prob=np.float32(0.5)),
     dict(FEATURE, connection_layers=[1], connection_kinds=["mlp"], connection_prob=0.5)),
    # transforms of the stream
    ("vit_small_linear", partial(tiny, "vit_small_linear", skip="orthogonal_random", skip_seed=3),
     dict(LINEAR, skip="orthogonal_random", skip_seed=3)),
    ("vit_small_ortho", partial(tiny, skip="idempotent_mr", skip_rank=8),
     dict(FEATURE, skip="idempotent_mr", skip_rank=8)),
    # connect and disconnect after create_model
    ("vit_small_ortho", lambda: timm_ortho.connect(tiny(), "global", eps=1e-3, layers=[0]),
     dict(connection="global", connection_eps=1e-3, connection_layers=[0])),
    ("test_vit_ortho", lambda: timm_ortho.disconnect(created("test_vit_ortho")), LINEAR),
    # other shapes and families
    ("resnetv2_18_cifar_ortho", partial(
        created, "resnetv2_18_cifar_ortho", head_norm=True, in_chans=1, num_classes=5), FEATURE),
    # crossvit's checkpoint filter takes one argument instead of two, and csatv2's configuration has no first_conv
    ("crossvit_9_240_ortho", partial(created, "crossvit_9_240_ortho", num_classes=3), FEATURE),
    ("csatv2_orthog", partial(created, "csatv2_orthog", num_classes=3), GLOBAL),
])
def test_models_are_restored(tmp_path, name, make, arguments):
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    model = make()
    card = str(hub.export(model, tmp_path / "out", "me/model"))
    written, again = config(tmp_path / "out"), loaded(tmp_path / "out")
    assert written["architecture"] == f"{name}.import_timm_ortho"
    assert {k: v for k, v in written["model_args"].items() if k.startswith(("connection", "skip"))} == arguments
    if "skip" in arguments:
        assert f"{arguments['skip']}: " in card
        assert "arXiv:1707.05974" in card
    cfg = written["pretrained_cfg"]
    chans, size, _ = cfg["input_size"]
    assert len(cfg["mean"]) == len(cfg["std"]) == chans
    assert "tag" not in cfg
    if timm_ortho.sites(model):  # not after disconnect
        assert [repr(site) for site in timm_ortho.sites(again)] == [repr(site) for site in timm_ortho.sites(model)]
        keeps = [[site.connection.keep for site in timm_ortho.sites(one)] for one in (again, model)]
        assert keeps[0] == keeps[1]
    assert torch.equal(logits(again, chans, size), logits(model, chans, size))


KEEPS_ARGUMENTS = hasattr(timm.models._hub, "get_model_args")  # true in timm 1.0.31


@pytest.mark.skipif(not KEEPS_ARGUMENTS, reason="this release of timm does not store the arguments of a model")
@pytest.mark.parametrize("change", [
    lambda model: model.reset_classifier(3), lambda model: model.reset_classifier(0),
    lambda model: model.reset_classifier(5, "avg"), lambda model: model.set_input_size(32)])
def test_a_model_that_timms_methods_have_changed(tmp_path, change):
    model = tiny(global_pool="token", connection="global", connection_eps=1e-3)
    change(model)
    hub.export(model, tmp_path / "out", "me/model")
    size = model.patch_embed.img_size[0]
    assert torch.equal(logits(loaded(tmp_path / "out"), size=size), logits(model, size=size))
    assert config(tmp_path / "out")["model_args"]["connection_eps"] == 1e-3


SAVED = [
    {"connection": "global", "prob": 0.25}, {"connection": "linear"}, {"connection": "hybrid", "start": "linear"},
    {"connection": "feature", "eps": 0.1, "layers": [1], "skip": "orthogonal_random"},
]


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_vit_orthog"])
def test_models_that_timm_saves(tmp_path, name):
    """The loaded model is saved, too. In the second round, timm's model is one that was loaded as a variant."""
    if name == "test_vit_orthog" and not KEEPS_ARGUMENTS:
        pytest.skip("this release of timm does not store the arguments of a model")
    model = created(name)
    for arguments in SAVED if KEEPS_ARGUMENTS else SAVED[:2]:
        timm_ortho.connect(model, **arguments)
        timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
        timm.models.save_for_hf(loaded(tmp_path), tmp_path, safe_serialization=True)
        again = loaded(tmp_path)
        assert torch.equal(logits(again, size=64), logits(model, size=64))
        assert repr(timm_ortho.sites(again)) == repr(timm_ortho.sites(model))
        assert again.pretrained_cfg["architecture"].endswith(("_ortho", "_orthog"))
    assert config(tmp_path)["architecture"].startswith(f"{name.removesuffix('_orthog')}_ortho")
    timm.models.save_for_hf(timm_ortho.disconnect(model), tmp_path, safe_serialization=True)
    assert config(tmp_path)["architecture"] == name
    assert torch.equal(logits(loaded(tmp_path), size=64), logits(model, size=64))
    assert bool(timm_ortho.sites(loaded(tmp_path))) == (name == "test_vit_orthog")


def test_wrappers_and_memory_formats_change_nothing(tmp_path):
    model = created("resnetv2_18_cifar_ortho", num_classes=5)
    hub.export(model, tmp_path / "a", "me/model")
    model.to(memory_format=torch.channels_last).train()
    hub.export(torch.compile(model), tmp_path / "b", "me/model")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert config(tmp_path / "a") == config(tmp_path / "b")
    assert model.training  # `export` does not change the mode of the model


def test_the_default_device_changes_nothing(tmp_path):
    model, folder = created("vit_test_ortho"), timm_run(tmp_path / "run", epochs=1)
    with torch.device("meta"):  # as after torch.set_default_device("cuda")
        for index, source in enumerate((model, folder)):
            hub.export(source, tmp_path / str(index), "me/model")


def test_a_run_adds_data_labels_and_curve(grid, tmp_path):
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
    count = sum(tensor.numel() for tensor in checkpoint["state_dict"].values())
    assert f"| parameters | {count:,} |" in (tmp_path / "out" / "README.md").read_text()


def test_a_run_of_timms_script(tmp_path):
    folder = timm_run(tmp_path / "run", ema=True, model_kwargs=dict(TINY, connection="global", connection_eps=1e-3))
    for ema, key in ((False, "state_dict"), (True, "state_dict_ema")):
        hub.export(folder / "last.pth.tar", tmp_path / "out", "me/model", ema=ema)
        written, stored = config(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
        checkpoint = torch.load(folder / "last.pth.tar", weights_only=False)
        assert all(torch.equal(tensor, checkpoint[key][name]) for name, tensor in stored.items())
        assert written["model_args"]["connection_eps"] == 1e-3
        assert (written["num_classes"], written["pretrained_cfg"]["interpolation"]) == (7, "bilinear")
        assert "label_names" not in written
    assert not torch.equal(checkpoint["state_dict"]["head.weight"], checkpoint["state_dict_ema"]["head.weight"])
    hub.export(folder, tmp_path / "out", "me/model", labels=list("abcdefg"))
    assert config(tmp_path / "out")["label_names"] == list("abcdefg")


def test_a_share_alike_license_of_the_initial_weights_is_named(tmp_path, monkeypatch):
    """The card of a run or model that starts from the authors' weights names their share-alike license."""
    base = "BootsofLagrangian/ortho-vit-b-imagenet1k-hf"
    source = timm.create_model("vit_base_ortho", **TINY)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    requests = []
    file = tmp_path / "weights.safetensors"
    monkeypatch.setattr(checks, "fetch", lambda *arguments: requests.append(arguments) or file)
    started = timm.create_model("vit_base_ortho", pretrained=True, **TINY)
    assert requests[0][0] == base
    fresh = timm.create_model("vit_base_ortho", **TINY)
    overlay = dict(file=str(file))
    other = timm.create_model("vit_base_ortho", pretrained=True, pretrained_cfg_overlay=overlay, **TINY)
    revised = timm.create_model("vit_base_ortho", **TINY)
    revised.began_with = {**started.began_with, "hf_hub_id": f"{base}@v1"}  # `pull` sets this value for a revision
    runs = [timm_run(tmp_path / f"run{number}", model="vit_base_ortho", **options) for number, options in enumerate([
        dict(pretrained=True), dict(pretrained_path="unused"), dict(pretrained=True, pretrained_path="mine.pth"),
        dict(pretrained=True, initial_checkpoint="mine.pth.tar")])]
    for model, is_derived in ((started, True), (revised, True), (runs[0], True), (fresh, False), (other, False),
                             *((run, False) for run in runs[1:])):
        card = hub.export(model, tmp_path / "out", "me/model")
        assert (f"the weights of {base}, whose license cc-by-sa-4.0 is share-alike" in card.text) is is_derived
        assert card.data.base_model == (base if is_derived else None)
        assert card.data.license == config(tmp_path / "out")["pretrained_cfg"].get("license") == (
            "cc-by-sa-4.0" if is_derived else None)
    assert hub.export(started, tmp_path / "out", "me/model", license="cc-by-sa-3.0").data.license == "cc-by-sa-3.0"


def test_files_contain_no_token(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "my-own-token")
    folder = timm_run(tmp_path / "run", wandb_project=SECRET, experiment="my-own-token", other="third-token",
                      url="https://user:password@host/data")
    card = str(hub.export(folder, tmp_path / "out", "me/model", token="third-token"))
    for secret in (SECRET, "my-own-token", "third-token", "password"):
        assert secret not in card
    assert "https://***@host/data" in card
    with pytest.raises(PublishError, match="would contain a token"):
        hub.export(tiny(), tmp_path / "out", "me/model", labels=[SECRET, *"bcdefg"])


OWN = "import {}  # the author's own module".format


@pytest.mark.parametrize(("module", "modules", "lines"), [  # of the connection; of the run; imports on the card
    ("mine", None, [OWN("mine")]), ("__main__", None, ["# run here the author's own code"]),
    (None, None, ["# run here the author's own code"]),  # a partial has no module
    ("author.connections", ["author", "other"], [OWN("author"), OWN("other")]),
    ("", ["author", "other"], []),  # the model does not need the modules
])
def test_the_module_of_a_registered_connection_is_on_the_card(tmp_path, monkeypatch, module, modules, lines):
    mine = type("Mine", (timm_ortho.FeatureConnection,), {"__module__": module or "mine"})
    monkeypatch.setitem(connections.CONNECTIONS, "mine", partial(mine) if module is None else mine)
    arguments = {"connection": "linear" if module == "" else "mine"}
    for name in modules or ():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    weights = tiny(**arguments) if modules is None else timm_run(
        tmp_path / "run", epochs=1, model_kwargs={**TINY, **arguments}, device_modules=["timm_ortho", *modules])
    card = str(hub.export(weights, tmp_path / "out", "me/model"))
    expected = "".join(f"\n{line}" for line in ["import timm_ortho  # registers the architecture", *lines])
    assert card.count(f"{expected}\n") == 2
    assert card.count("own module\n") == 2 * sum("own module" in line for line in lines)


class Lazy(timm_ortho.Connection):
    """A connection with a gate per token. The first input determines the shape of the gate's weights."""

    def __init__(self, dim=-1, eps=1e-6, device=None, dtype=None):
        super().__init__(dim, eps)
        self.scale = torch.nn.LazyLinear(1, device=device, dtype=dtype)

    def forward(self, x, f, attn_mask=None):
        x = self.carried(x)
        return x + f * self.scale(x)


def test_a_connection_with_lazy_parameters_is_restored(tmp_path, monkeypatch):
    monkeypatch.setitem(connections.CONNECTIONS, "lazy", Lazy)
    model = tiny(connection="lazy")
    expected = logits(model)
    hub.export(model, tmp_path / "out", "me/model")
    assert torch.equal(logits(loaded(tmp_path / "out")), expected)
    # The digits checkpoint can be loaded although it lacks the parameters of `lazy`.
    started = timm.create_model("vit_test_linear.digits", pretrained=True, connection="lazy")
    timm.create_model("vit_test_linear", connection="lazy").load_state_dict(started.state_dict())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("target", ["victim", "victim/file"])
def test_links_in_an_earlier_export_are_replaced(tmp_path, name, target):
    """Another person may have made the folder. The links of its files do not decide where files are written."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("precious")
    hub.export(tiny(), tmp_path / "out", "me/model")
    (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / name).symlink_to(tmp_path / target)
    hub.export(tiny(), tmp_path / "out", "me/model")
    assert not (tmp_path / "out" / name).is_symlink()
    assert [(file.name, file.read_text()) for file in (tmp_path / "victim").iterdir()] == [("file", "precious")]


def test_command_line(grid, tmp_path, capsys, error_of, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["push", str(grid / "feature-seed0"), "me/digits", "--dry-run"]) == 0
    printed = capsys.readouterr()
    folder = Path("output/push/me--digits")
    assert printed.out.strip() == (folder / "README.md").read_text(encoding="utf-8").strip()
    assert printed.err.endswith(f"nothing was uploaded; the files are in {folder}\n")
    Path("labels").write_text("\ufeff" + "\n".join("abcdefghij") + "\n\n", encoding="utf-8")  # with a byte order mark
    assert cli.main(["push", str(grid / "feature-seed0"), "me/digits", "--dry-run", "--output", "out", "--labels",
                     "labels", "--license", "mit", "--revision", "v2"]) == 0
    assert "hf-hub:me/digits@v2" in capsys.readouterr().out
    assert config(Path("out"))["label_names"] == list("abcdefghij")
    with open("both", "a") as out, open("both", "a", buffering=1) as err, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)  # Python writes files in blocks
        patch.setattr(sys, "stderr", err)
        assert cli.main(["push", str(grid / "feature-seed0"), "me/digits", "--dry-run"]) == 0
    assert Path("both").read_text(encoding="utf-8").endswith(f"the files are in {folder}\n")
    assert error_of("push", grid, "me/digits", "--dry-run") == (
        f"timm-ortho: error: {grid} contains 6 runs: pass one of them, such as {grid / 'feature-seed0'}\n")
    assert error_of("push", grid / "feature-seed0", "me/digits", "--dry-run", "--labels", "a.txt") == (
        "timm-ortho: error: a.txt cannot be read: No such file or directory\n")


@pytest.mark.skipif(not KEEPS_ARGUMENTS, reason="this release of timm does not store the arguments of a model")
def test_connections_that_timm_cannot_save(tmp_path):
    model = timm_ortho.connect(created("test_vit"), Unregistered)
    with pytest.raises(ValueError, match="Model argument 'connection' is not serializable"):
        timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    model.pretrained_cfg["architecture"] = "vgg11"
    with pytest.warns(UserWarning, match="'vgg11' has no variant, so config.json cannot store its connections"):
        timm_ortho.connect(model, "feature")


class Unregistered(timm_ortho.FeatureConnection):
    pass


def test_weights_from_the_middle_of_an_epoch_have_no_metrics(tmp_path):
    folder = timm_run(tmp_path / "run")
    checkpoint = torch.load(folder / "last.pth.tar", weights_only=False)
    del checkpoint["metric"]  # train.py's recovery checkpoints have no metric
    torch.save(checkpoint, folder / "recovery-2-5.pth.tar")
    card = str(hub.export(folder / "recovery-2-5.pth.tar", tmp_path / "out", "me/model"))
    assert "Not measured on these weights: they were saved in the middle of an epoch." in card
    assert "top-1 of these weights" not in card


def test_a_configuration_that_a_caller_changes_is_no_file(tmp_path):
    """timm's and callers' values of ``mean`` are tuples. A config.json has lists."""
    hub.export(timm.create_model("vit_test_ortho", num_classes=3), tmp_path / "m", "me/m")
    model = timm.create_model(
        f"local-dir:{tmp_path / 'm'}", pretrained=True, pretrained_cfg_overlay=dict(mean=(0.5, 0.5, 0.5)))
    assert timm.create_model("vit_test_ortho", pretrained_cfg=model.pretrained_cfg).num_classes == 3
