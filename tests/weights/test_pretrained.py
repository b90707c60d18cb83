"""Test weights in the layout of the paper's authors, weights in the package, and `timm-ortho list --weights`."""
import copy
import fnmatch
import json
from pathlib import Path

import pytest
import timm
import torch
from helpers.authors_vit import REPOSITORY, SMALL, SMALL_ARGUMENTS, authors_vit, put_into_cache
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models import _registry, get_pretrained_cfg

import timm_ortho
from scripts.pages import cards
from timm_ortho import WeightsError
from timm_ortho.convert import is_variant
from timm_ortho.lab.data import Digits
from timm_ortho.lab.planning import recipe
from timm_ortho.models.build import register
from timm_ortho.weights import checks, pretrained

ROOT = Path(__file__).parents[2]
DIGITS = ["vit_test_linear.digits", "vit_test_ortho.digits", "vit_test_orthog.digits"]
SHIPPED = [name for name, fields in pretrained.ENTRIES.items() if "hf_hub_id" not in fields]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a narrow model in the authors' layout and the path of its weights file."""
    model = authors_vit(**SMALL)
    path = tmp_path_factory.mktemp("small") / "model.safetensors"
    save_file(model.state_dict(), path)
    return model, path


@pytest.fixture
def offline(server, client):
    """Return a client with an empty cache, whose Hub must get no request."""
    yield client
    assert server.requests == []


def from_file(path, name="vit_base_ortho", **arguments):
    """Create a model with `pretrained=True` and the weights of a local file."""
    return timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=dict(file=str(path)), **{**SMALL_ARGUMENTS, **arguments}).eval()


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@torch.no_grad()
def test_vit_base_has_the_logits_of_the_authors_layout(tmp_path):
    theirs = authors_vit()
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert len(shapes) == 2 + 2 + 12 * 12 + 2 + 2
    assert shapes["vit.embeddings.position_embeddings"] == (1, 197, 768)
    assert shapes["vit.encoder.layer.11.attention.attention.key.weight"] == (768, 768)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    x = images(1, 3, 224, 224)
    expected = theirs(x)
    overlay = dict(file=str(tmp_path / "model.safetensors"))
    ours = timm.create_model(
        "vit_base_ortho", pretrained=True, pretrained_cfg_overlay=overlay, weight_init="skip").eval()
    assert expected.std() > 0.3
    torch.testing.assert_close(ours(x), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_transformers_vit_has_the_same_logits(small, tmp_path):
    """transformers' ViT loads the authors' weights and, after `connect`, has the logits of `vit_base_ortho`."""
    transformers = pytest.importorskip("transformers", minversion="5")
    tensors = load_file(small[1])
    classes = tensors["classifier.bias"].shape[0]
    config = transformers.ViTConfig(
        image_size=64, patch_size=16, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=192,
        hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6, num_labels=classes)
    config.save_pretrained(tmp_path)
    norms = {f"vit.encoder.layer.{layer}.layernorm_{which}.{kind}": value * torch.ones(48)
             for layer in range(2) for which in ("before", "after") for kind, value in (("weight", 1.0), ("bias", 0.0))}
    save_file({**tensors, **norms}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
    x = images(2, 3, 64, 64)
    linear = model(x).logits
    torch.testing.assert_close(linear, from_file(small[1], connection="linear")(x), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        timm_ortho.connect(model, "feature")(x).logits, from_file(small[1])(x), atol=1e-4, rtol=0)
    assert (model(x).logits - linear).abs().max() > 1e-2


@torch.no_grad()
def test_the_position_embedding_is_complete(small):
    theirs, path = small
    model, tensors = from_file(path), load_file(path)
    position = tensors["vit.embeddings.position_embeddings"]
    assert torch.equal(model.cls_token, tensors["vit.embeddings.cls_token"] + position[:, :1])
    assert torch.equal(model.pos_embed, position[:, 1:])
    x = images(2, 3, 64, 64)
    torch.testing.assert_close(model(x), theirs(x), atol=1e-4, rtol=0)
    unfolded = from_file(path, no_embed_class=False)  # pos_embed has a row for the class token
    assert torch.equal(unfolded.pos_embed, position)
    torch.testing.assert_close(unfolded(x), theirs(x), atol=1e-4, rtol=0)
    linear = authors_vit(**SMALL, add=torch.add)  # equal weights
    torch.testing.assert_close(from_file(path, "vit_base_linear")(x), linear(x), atol=1e-4, rtol=0)


@torch.no_grad()
def test_channels_and_classes_adapt_as_in_timm(small):
    theirs, path = small
    x = images(2, 1, 64, 64)
    expected = theirs(x.expand(-1, 3, -1, -1))
    torch.testing.assert_close(from_file(path, in_chans=1)(x), expected, atol=1e-4, rtol=0)
    model = from_file(path, num_classes=7)
    assert model(x.expand(-1, 3, -1, -1)).shape == (2, 7)
    assert torch.equal(model.norm.weight, theirs.vit.layernorm.weight)
    headless = from_file(path, num_classes=0)(x.expand(-1, 3, -1, -1))
    torch.testing.assert_close(theirs.classifier(headless), expected, atol=1e-4, rtol=0)
    features = from_file(path, features_only=True, out_indices=[1])(x.expand(-1, 3, -1, -1))
    assert [tuple(f.shape) for f in features] == [(2, 48, 4, 4)]


@pytest.mark.parametrize("connection", timm_ortho.CONNECTIONS)
@pytest.mark.parametrize(("name", "arguments"), [
    ("vit_small_ortho", dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2)),
    ("resnetv2_18_cifar_ortho", dict(channels=[8, 8, 8, 8]))])
def test_replacing_a_classifier_that_fits_warns(tmp_path, name, arguments, connection):
    """timm drops even a fitting classifier if num_classes of model and pretrained configuration differ."""
    trained = timm.create_model(name, num_classes=7, **arguments)
    classifier = f"{trained.pretrained_cfg['classifier']}.weight"
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    overlay = dict(file=str(tmp_path / "trained.pth"))

    def loaded(overlay=overlay, **changes):
        return timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay=overlay, **{**arguments, "connection": connection, **changes})

    for classes in (-1, None):  # train.py's --pretrained-path sets -1
        changed = overlay if classes is None else {**overlay, "num_classes": classes}
        with pytest.warns(UserWarning, match=rf"trained.pth: the classifier \({classifier}.*fits.* num_classes=7"):
            model = loaded(changed, num_classes=7)
        assert not torch.equal(model.state_dict()[classifier], trained.state_dict()[classifier])
    model = loaded({**overlay, "num_classes": 7}, num_classes=7)
    assert torch.equal(model.state_dict()[classifier], trained.state_dict()[classifier])
    for changes in (dict(num_classes=5), dict(num_classes=0), dict(features_only=True, out_indices=[0])):
        loaded(**changes)  # pytest would turn a warning into an error


@torch.no_grad()
def test_any_connection_starts_from_the_weights(small):
    theirs, path = small
    x = images(2, 3, 64, 64)
    hybrid = from_file(path, connection="hybrid")  # its initial update equals that of `feature`
    assert any(".connection_" in name for name in hybrid.state_dict())
    torch.testing.assert_close(hybrid(x), theirs(x), atol=1e-4, rtol=0)
    linear = from_file(path, connection="linear")(x)
    assert (linear - theirs(x)).abs().max() > 1e-2


@pytest.mark.parametrize("num_classes", [1000, 7])
def test_incomplete_checkpoints_are_refused_for_any_head(small, tmp_path, num_classes):
    tensors = load_file(small[1])
    gone = "vit.encoder.layer.1.attention.attention.key.bias"
    lacking, surplus = tmp_path / "lacking.safetensors", tmp_path / "surplus.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, lacking)
    save_file({**tensors, "vit.encoder.layer.0.layernorm_before.weight": torch.ones(48)}, surplus)
    with pytest.raises(WeightsError, match=r"missing: blocks.1.attn.qkv.bias; surplus: blocks.1.attn.query.bias"):
        from_file(lacking, num_classes=num_classes)
    with pytest.raises(WeightsError, match=r"surplus: blocks.0.layernorm_before.weight$"):
        from_file(surplus, num_classes=num_classes)
    with pytest.raises(WeightsError, match=r"missing: blocks.2.* and 5 more"):
        from_file(small[1], depth=3, num_classes=num_classes)
    for name, own in (("vit.layernorm.bias", "norm.bias"), ("vit.embeddings.position_embeddings", "pos_embed")):
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, lacking)
        with pytest.raises(WeightsError, match=f"missing: {own}"):
            from_file(lacking, num_classes=num_classes)
    save_file({**tensors, "vit.layernorm.weight": torch.ones(3)}, lacking)
    with pytest.raises(WeightsError, match=r"wrong shape: norm\.weight \(\(3,\), not \(48,\)\)"):
        from_file(lacking, num_classes=num_classes)


# --------------------------------------------------------------------------------------------- configurations
@pytest.mark.parametrize("kind", ["ortho", "linear"])
def test_the_authors_configuration(kind):
    cfg = get_pretrained_cfg(f"vit_base_{kind}")
    assert cfg == get_pretrained_cfg(f"vit_base_{kind}.authors_in1k")
    assert (cfg.hf_hub_id, cfg.hf_hub_filename) == (REPOSITORY.format(kind), "model.safetensors")
    assert cfg.license == "cc-by-sa-4.0"  # license of the weights; the code's license is apache-2.0
    values = recipe.load("vit_b_imagenet1k")
    assert cfg.input_size == (3, values["img_size"], values["img_size"])
    assert (list(cfg.mean), list(cfg.std), cfg.crop_pct) == (values["mean"], values["std"], values["crop_pct"])
    assert cfg.num_classes == values["num_classes"]


def test_a_table_entry_gives_a_variant_weights(monkeypatch):
    """An entry in `ENTRIES` gives weights to a variant. Fields that the entry lacks are the variant's."""
    for name in ("_module_to_models", *(name for name in vars(_registry) if name.startswith("_model_"))):
        monkeypatch.setattr(_registry, name, copy.deepcopy(getattr(_registry, name)))
    monkeypatch.setitem(pretrained.ENTRIES, "resnet18_made_up_ortho.mine", dict(hf_hub_id="me/mine"))
    monkeypatch.setitem(pretrained.ENTRIES, "resnet18_made_up_ortho.small", dict(num_classes=3))
    cfg = get_pretrained_cfg("resnet18_ortho")
    register("timm_ortho.models.variants", "resnet18_made_up_ortho", lambda **_: None, cfg, "A made-up variant.")
    assert timm.list_pretrained("resnet18_made_up*") == ["resnet18_made_up_ortho.mine", "resnet18_made_up_ortho.small"]
    hub = ("resnet18_made_up_ortho.mine", "hf-hub:me/mine", None)
    assert pretrained.weights("resnet18_made_up_ortho") == pretrained.weights("resnet18_made_up_ortho.mine") == hub
    file = Path(pretrained.__file__).with_name("resnet18_made_up_ortho.small.safetensors")
    assert pretrained.weights("resnet18_made_up_ortho.small") == (
        "resnet18_made_up_ortho.small", "this package", file)
    own, base = get_pretrained_cfg("resnet18_made_up_ortho.small"), cfg
    assert (own.num_classes, own.mean) == (3, base.mean)


def test_models_with_weights():
    assert [name for name in timm.list_pretrained() if is_variant(name)] == sorted(pretrained.ENTRIES)


@pytest.mark.parametrize("name", pretrained.ENTRIES)
def test_an_entry_states_classes_and_license(name):
    """An entry inherits num_classes, which is that of timm's weights, and no license. It must therefore state both."""
    assert is_variant(name), f"there is no model {name.partition('.')[0]}: correct the entry in {pretrained.__file__}"
    missing = {"num_classes", "license"} - pretrained.ENTRIES[name].keys()
    assert not missing, f"add {' and '.join(sorted(missing))} to the entry {name} in {pretrained.__file__}"


def test_variants_have_no_facts_about_timms_weights():
    """The configurations of variants lack the license, description and paper of timm's weights.

    Otherwise, an entry in `ENTRIES` would inherit them. It does inherit the preparation of images.
    """
    base, own = get_pretrained_cfg("convnextv2_base"), get_pretrained_cfg("convnextv2_base_ortho")
    assert (base.license, own.license) == ("cc-by-nc-4.0", None)
    assert (own.input_size, own.crop_pct, own.mean) == (base.input_size, base.crop_pct, base.mean)
    for name in filter(is_variant, timm.list_models(["*_ortho", "*_linear"])):
        cfg = get_pretrained_cfg(name)
        if not cfg.has_weights:
            facts = (cfg.license, cfg.description, cfg.paper_name, cfg.paper_ids, cfg.origin_url, cfg.notes)
            assert set(facts) == {None}, name


def test_a_saved_configuration_has_no_local_path(tmp_path):
    model = timm.create_model("vit_test_ortho", pretrained=True)
    assert model.pretrained_cfg["tag"] == "digits"
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    text = (tmp_path / "config.json").read_text()
    assert str(ROOT) not in text
    assert "safetensors" not in text
    assert json.loads(text)["architecture"] == "vit_test_ortho"


# ------------------------------------------------------------------------------------- weights in the package
@torch.no_grad()
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_weights_have_the_stored_logits(name):
    file = pretrained.weights_file(name)
    stored = load_file(file.with_suffix(".tensors.safetensors"))
    model = timm.create_model(name, pretrained=True).eval()
    assert stored["input"].shape == (len(stored["target"]), *model.pretrained_cfg["input_size"])
    close = dict(atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.forward_features(stored["input"]), stored["features"], **close)
    torch.testing.assert_close(model.forward_head(stored["features"], pre_logits=True), stored["pre_logits"], **close)
    torch.testing.assert_close(model(stored["input"]), stored["output"], **close)
    assert file.stat().st_size < 1_000_000


@torch.no_grad()
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_weights_have_the_accuracy_in_their_header(name):
    with safe_open(pretrained.weights_file(name), "pt") as file:
        about = file.metadata()
    run = cards.of_comparison(name).run
    assert about["model"] == name.partition(".")[0]
    assert (str(run.seed), run.options["model_kwargs"]["connection"]) == (about["seed"], about["connection"])
    assert run.card.top1[run.seed] == float(about["top1"])
    if about["data"] != "digits":
        pytest.skip(f"the images of {about['data']} are not on every machine")
    model = timm.create_model(name, pretrained=True).eval()
    held_out = Digits(training=False)
    channels = model.pretrained_cfg["input_size"][0]
    held_out.images = [image.convert("RGB" if channels == 3 else "L") for image in held_out.images]
    held_out.transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    x = torch.stack([held_out[index][0] for index in range(len(held_out))])
    target = torch.tensor(held_out.targets)
    top1 = 100 * (model(x).argmax(1) == target).double().mean().item()
    assert top1 == pytest.approx(float(about["top1"]), abs=0.3)  # one of the 360 images is 0.28 %
    stored = load_file(pretrained.weights_file(name).with_suffix(".tensors.safetensors"))
    first = x[[held_out.targets.index(digit) for digit in range(10)]]
    torch.testing.assert_close(first, stored["input"])


def test_shipped_weights_load_offline(offline):
    result = offline.run("""
names = "vit_test_linear.digits", "vit_test_ortho", "vit_test_orthog"
models = [timm.create_model(name, pretrained=True) for name in names]
answer([[model.pretrained_cfg["architecture"], model.pos_embed.std().item() > 0.05] for model in models])
""")
    assert result.answer == [[name.removesuffix(".digits"), True] for name in DIGITS], result.output
    assert not list(offline.home.iterdir())


# ---------------------------------------------------------------------------------------------- list --weights
def listed(offline, *arguments):
    """Return the rows of `timm-ortho list --weights`."""
    result = offline.run(f"answer(cli.main({['list', '--weights', *arguments]}))")
    assert result.answer == 0, result.output
    return [line.split(maxsplit=1) for line in result.output.splitlines()]


def test_list_of_weights(offline, small):
    head, *rows = listed(offline)
    assert [head[0], *head[1].split()] == ["name", "size", "from", "on", "this", "machine"]
    authors = {f"vit_base_{kind}.authors_in1k": f"hf-hub:{REPOSITORY.format(kind)}" for kind in ("linear", "ortho")}
    assert [name for name, _ in rows] == sorted(pretrained.ENTRIES)
    texts = dict(rows)
    for name, source in authors.items():
        assert texts[name].split() == ["346", "MB", source, "no"]
    size = round(pretrained.weights_file("vit_test_ortho.digits").stat().st_size / 1000)
    assert texts["vit_test_ortho.digits"].split() == [f"{size}", "kB", "this", "package", "yes"]
    put_into_cache(offline.home, small[1])
    size = round(small[1].stat().st_size / 1000)
    texts = dict(listed(offline, "vit_base*ortho")[1:])
    assert [*texts] == sorted(fnmatch.filter(pretrained.ENTRIES, "vit_base*ortho.*"))
    assert texts["vit_base_ortho.authors_in1k"].split() == [
        f"{size}", "kB", f"hf-hub:{REPOSITORY.format('ortho')}", "yes"]


def test_the_authors_weights_load_from_the_cache_by_name(offline, small):
    put_into_cache(offline.home, small[1])
    result = offline.run(f"""
import safetensors.torch
model = timm.create_model("vit_base_ortho", pretrained=True, **{SMALL_ARGUMENTS!r})
weights = safetensors.torch.load_file({str(small[1])!r})
answer(torch.equal(model.norm.weight, weights["vit.layernorm.weight"]))
""")
    assert result.answer is True, result.output


def test_layers_that_the_registry_lacks_are_not_those_of_a_file():
    """A few architectures of timm have no classifier or first convolution in their configurations."""
    fields = checks.checked_fields(
        {"source": "local-dir", "classifier": "blocks", "first_conv": ["blocks.0"]}, "an_unknown_architecture")
    assert (fields["classifier"], fields["first_conv"]) == (None, None)
