"""connection_arguments() returns the arguments of connect(). The configs of transformers' models store them."""
import copy
import json
import pickle
from functools import partial

import numpy as np
import pytest
import timm
import torch
from helpers.own_block import Written
from torch import nn

import timm_ortho
from timm_ortho import (
    CONNECTIONS,
    Connection,
    FeatureConnection,
    LinearConnection,
    connect,
    connection_arguments,
    create_connection,
    disconnect,
    sites,
)
from timm_ortho.connections import NO_SITE

VIT = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8)
ARGUMENTS = {
    "feature": dict(connection="feature"),
    "linear": dict(connection="linear"),
    "part": dict(connection="global", layers=[1], kinds="mlp", prob=0.5, eps=1e-4),
    "skip": dict(connection="feature", skip="orthogonal_random", skip_seed=3),
}


class Damped(Connection):
    """Its ``**kwargs`` are the arguments of the base class."""

    def __init__(self, tau=0.5, **kwargs):
        super().__init__(**kwargs)
        self.tau = tau

    def forward(self, x, f, attn_mask=None):
        return self.join(x, f, self.tau, 1.0, attn_mask)


class Free(Damped):
    """Its ``**kwargs`` contain its own argument."""

    def __init__(self, dim=-1, eps=1e-6, **kwargs):
        super().__init__(kwargs.pop("tau", 0.5), dim=dim, eps=eps, **kwargs)


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers", minversion="5")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def vit(transformers, config=None):
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config or transformers.ViTConfig(**VIT)).eval()


def stored(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("make", [Damped, Free, partial(Damped, tau=0.75), lambda **kwargs: Damped(**kwargs)])
def test_the_arguments_of_a_connection_are_those_of_its_constructor(monkeypatch, make):
    monkeypatch.setitem(CONNECTIONS, "damped", make)
    model = timm.create_model("vit_test_ortho", connection="damped", connection_tau=0.25, connection_keep="branch")
    assert {(site.connection.tau, site.connection.keep) for site in sites(model)} == {(0.25, "branch")}
    arguments = connection_arguments(connect(model, "damped", tau=np.float32(0.125), layers=1))
    assert arguments == {"connection": "damped", "eps": 1e-6, "tau": 0.125, "layers": [1]}
    again = connect(timm.create_model("vit_test_linear"), **arguments)
    assert [getattr(site.connection, "tau", None) for site in sites(again)] == 2 * [None] + 2 * [0.125] + 4 * [None]
    before = [site.connection for site in sites(model)]
    for wrong in (dict(tua=1.0), dict(dim=1), dict(device="cpu"), dict(tau=object())):
        with pytest.raises(ValueError, match=r"^[^\n]*(known a\S+|must be a JSON value)[^\n]*$"):
            connect(model, "damped", **wrong)
    assert [site.connection for site in sites(model)] == before


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(connection_foo=1), "unknown argument 'connection_foo', known are 'connection', 'connection_layers', "
     "'connection_kinds', 'skip', 'skip_branches', 'skip_rank', 'skip_seed', 'connection_eps', 'connection_prob', "
     "'connection_keep', 'connection_groups'"),
    (dict(connection="hybrid", connection_prob=0.5), "unknown argument 'connection_prob', known are"),
    (dict(connection_dim=1), "unknown argument 'connection_dim', known are"),
])
def test_a_variant_lists_the_arguments_of_its_connection(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        timm.create_model("vit_test_ortho", **arguments)
    assert "\n" not in str(caught.value)


def test_arguments_are_plain_values():
    model = timm.create_model("vit_test_linear")
    connect(model, eps=np.float32(0.5), layers=iter(np.arange(1, 3)), kinds=("mlp",), groups=np.int64(2),
            skip="idempotent_mr", skip_rank=np.int64(8))
    assert json.loads(json.dumps(connection_arguments(model))) == dict(
        connection="feature", eps=0.5, layers=[1, 2], kinds=["mlp"], groups=2, skip="idempotent_mr", skip_rank=8)
    assert connection_arguments(connect(model, "linear", eps=0.1)) == {"connection": "linear"}


def test_a_model_without_connections_has_no_arguments():
    assert connection_arguments(nn.Linear(2, 2)) == {}
    assert connection_arguments(disconnect(timm.create_model("vit_test_ortho"))) == {}
    assert connection_arguments(nn.Sequential(*(Written(LinearConnection()) for _ in range(2)))) == {}


def test_a_class_or_function_is_stored_by_its_registered_name(monkeypatch):
    class Own(LinearConnection):
        pass

    def hybrid(dim, eps=1e-6):
        return Own(dim, eps)

    monkeypatch.setitem(CONNECTIONS, "own", Own)
    cases = ((LinearConnection, "linear"), (FeatureConnection, "feature"), (Own, "own"), ("own", "own"))
    for connection, name in cases:
        assert connection_arguments(connect(timm.create_model("vit_test_linear"), connection))["connection"] == name
    model = connect(timm.create_model("vit_test_linear"), hybrid)
    with pytest.raises(ValueError, match=r"connection test_arguments\.hybrid is not registered"):
        connection_arguments(model)
    assert {site.connection.name for site in sites(model)} == {"test_arguments.hybrid"}


def test_models_without_common_arguments():
    mixed, by_hand, own = timm.create_model("vit_test_ortho"), timm.create_model("vit_test_ortho"), nn.Module()
    connect(mixed.blocks[0], "global")
    by_hand.blocks[0].connection_attention = create_connection("feature")
    own.first, own.second = create_connection("feature", eps=0.5), create_connection("feature", eps=0.5)
    different = "sites have different connections: connect the whole model with one call"
    for model, message in ((mixed, different), (by_hand, different), (nn.Sequential(Written()), "connect the whole"),
                           (own, "the code of the model made its connections, and their arguments are not")):
        with pytest.raises(ValueError, match=message):
            connection_arguments(model)
    assert connection_arguments(connect(own, "feature")) == {"connection": "feature", "eps": 1e-6}


def test_a_connection_on_its_own_has_no_site_and_copies_of_models_share_one_dict():
    assert create_connection("feature").site is NO_SITE is LinearConnection().site
    model = timm.create_model("vit_test_linear", connection="feature", connection_layers=[1])
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        specs = [site.connection.site for site in sites(copied)]
        assert [spec.name for spec in specs] == ["linear"] * 2 + ["feature"] * 2 + ["linear"] * 4
        assert len({id(spec.arguments) for spec in specs}) == 1
        assert connection_arguments(copied) == {"connection": "feature", "eps": 1e-6, "layers": [1]}
    connection_arguments(model)["layers"].append(2)
    assert connection_arguments(model)["layers"] == [1]


def test_parts_and_models_with_a_disconnected_part_have_no_arguments():
    model = connect(timm.create_model("vit_test_ortho"), "feature", layers=[1, 2])
    twice = nn.ModuleList([model, copy.deepcopy(model)])
    disconnect(model.blocks[0])
    for part, count in ((model, 6), (model.blocks[2:], 4), (twice, 14)):
        with pytest.raises(ValueError, match=f"the {count} sites are not the 8 sites of one call of connect: connect"):
            connection_arguments(part)


@torch.no_grad()
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_saved_config_connects_the_loaded_model(transformers, tmp_path, name):
    model = connect(vit(transformers), **ARGUMENTS[name])
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert sites(loaded) == []  # transformers does not restore connections
    connect(loaded, **loaded.config.timm_ortho)
    assert connection_arguments(loaded) == loaded.config.timm_ortho
    assert torch.equal(loaded(images()).logits, model(images()).logits)
    assert [(site.layer, site.kind, str(site.connection)) for site in sites(loaded)] == [
        (site.layer, site.kind, str(site.connection)) for site in sites(model)]


def test_the_config_follows_connect_and_disconnect(transformers, tmp_path):
    config = transformers.ViTConfig(**VIT)
    model, other = connect(vit(transformers, config), "global"), vit(transformers, config)
    assert model.config.timm_ortho["connection"] == "global"
    assert connect(model, "feature").config.timm_ortho["connection"] == "feature"
    assert model.vit.config is model.config
    other.save_pretrained(tmp_path)  # this model shares the config object, but is not connected
    assert "timm_ortho" not in stored(tmp_path)
    disconnect(model).save_pretrained(tmp_path)
    assert "timm_ortho" not in stored(tmp_path)


@torch.no_grad()
def test_learned_connections_load_into_a_class_that_connects_itself(transformers, tmp_path):
    """docs/hub.md shows this class."""
    class Connected(transformers.ViTForImageClassification):
        def __init__(self, config):
            super().__init__(config)
            connect(self, **config.timm_ortho)

    model = connect(vit(transformers), "hybrid")
    for site in sites(model):
        site.connection.rho += 0.3
    model.save_pretrained(tmp_path)
    assert torch.equal(Connected.from_pretrained(tmp_path).eval()(images()).logits, model(images()).logits)


def test_a_connection_without_a_name_is_refused(transformers, tmp_path):
    class Own(timm_ortho.FeatureConnection):
        pass

    model = connect(vit(transformers), "feature")
    with pytest.warns(UserWarning, match=r"save_pretrained will not save .*Own.*register_connection") as caught:
        connect(model, Own)
    assert caught[0].filename == __file__
    model.save_pretrained(tmp_path)
    assert "timm_ortho" not in stored(tmp_path)
