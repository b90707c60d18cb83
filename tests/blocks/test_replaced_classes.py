"""Warnings and errors if another library, for example for token merging, has replaced the classes of blocks."""
import warnings

import pytest
import timm
from timm.models.vision_transformer import Block

from timm_ortho import UnsupportedModelError, connect, disconnect, hub, register_block, sites
from timm_ortho.diagnostics import show


class Merging(Block):
    """A block whose forward does not call the connections, like the blocks of the libraries tomesd and ToMe."""

    def forward(self, x, attn_mask=None, is_causal=False):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def replaced(make=lambda cls: Merging, **arguments):
    model = timm.create_model("vit_test_ortho", **arguments).eval()
    for block in model.blocks:
        block.__class__ = make(type(block))
    return model


MESSAGE = r"of 4 blocks are linear \(the first block is .*\): .* the new code does not call connections: Merging\. "


def test_sites_warns():
    model = replaced()
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        assert len(sites(model)) == 8
    assert caught[0].filename == __file__
    assert "\n" not in str(caught[0].message)


def test_show_and_cards_warn(tmp_path):
    model = replaced()
    with pytest.warns(UserWarning, match=MESSAGE):
        text = show.as_text(show.measured_sites(model, show.batch(model)))
    assert text.count("nan") == 4 * 8
    with pytest.warns(UserWarning, match=MESSAGE), pytest.raises(hub.PublishError):
        hub.export(model, tmp_path / "out", "me/merged")


def subclass_with_super(cls):
    class Timed(cls):
        def forward(self, *args, **kwargs):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(*args, **kwargs)
    return Timed


def subclass_with_a_method(cls):
    return type("Named", (cls,), {"describe": lambda self: "a block"})


def subclass_with_a_forward(cls):
    return type("Merging", (cls,), {"forward": Merging.forward})


@pytest.mark.parametrize(("make", "warns"), [
    (subclass_with_super, False), (subclass_with_a_method, False), (subclass_with_a_forward, True)])
def test_only_a_subclass_that_bypasses_the_connections_warns(make, warns):
    model = replaced(make)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sites(model)
    assert bool(caught) is warns


def test_connecting_again_requires_registration_of_the_new_class(restored):
    model = replaced()
    with pytest.raises(UnsupportedModelError, match=r"not supported: .*\.Merging"):
        connect(model, "global")
    register_block(Merging, stream="x", kinds=["attention", "mlp"])
    connect(model, "global")
    assert {site.connection.name for site in sites(model)} == {"global"}
    assert isinstance(model.blocks[0], Merging)


def test_disconnect_removes_the_connections():
    model = disconnect(replaced())
    assert sites(model) == []
    assert type(model.blocks[0]) is Merging
    assert not hasattr(model.blocks[0], "connection_mlp")
