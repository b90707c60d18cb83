"""Test subclasses of known block classes: they are known too if they inherit the methods with the additions."""

import pytest
import torch
from helpers.own_block import MyBlock, Single, tokens
from timm.models.vision_transformer import Block
from torch import nn

import timm_ortho
from timm_ortho import UnsupportedModelError, connect, disconnect, sites
from timm_ortho.blocks import host_class, lookup

pytestmark = pytest.mark.usefixtures("restored")


class Larger(Block):
    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.extra = nn.Linear(dim, dim)


class Other(Block):
    pass


class Nested(Larger):
    pass


class Named(Block):
    def forward(self, x, attn_mask=None):
        return super().forward(x, attn_mask)


class Split(Single):
    """A block whose additions are in another method than forward."""

    def forward(self, x):
        return self.mix(self.before(x))

    def before(self, x):
        return x

    def mix(self, x):
        return x + self.f(x)


class Scaled(Split):
    def before(self, x):
        return 2 * x


class Mixed(Split):
    def mix(self, x):
        return x + 2 * self.f(x)


class Forwarded(Split):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("connection", timm_ortho.CONNECTIONS)
def test_subclasses_compute_what_their_base_computes(connection):
    blocks = [cls(8, 2).eval() for cls in (Block, Larger, Other, Nested)]
    for block in blocks[1:]:
        block.load_state_dict(blocks[0].state_dict(), strict=False)
    keys = [[*block.state_dict()] for block in blocks]
    plain = blocks[0](tokens())
    connect(nn.Sequential(*blocks), connection)
    expected = blocks[0](tokens())
    assert all(torch.equal(block(tokens()), expected) for block in blocks[1:])
    assert len({*map(type, blocks)}) == 4
    assert [host_class(block) for block in blocks] == [Block, Larger, Other, Nested]
    assert len(sites(nn.Sequential(*blocks))) == 8
    disconnect(nn.Sequential(*blocks))
    assert [type(block) for block in blocks] == [Block, Larger, Other, Nested]
    assert [[*block.state_dict()] for block in blocks] == keys
    assert all(torch.equal(block(tokens()), plain) for block in blocks)


def test_methods_that_decide():
    timm_ortho.register_block(Split, stream="x", kinds=("mlp",), method="mix")
    assert len(sites(connect(nn.Sequential(Scaled()), "feature"))) == 1
    for cls in (Mixed, Forwarded):
        assert lookup.spec_of_class(cls) is None


def test_a_subclass_with_its_own_forward_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"not supported: test_subclasses\.Named"):
        connect(nn.Sequential(Other(8, 2), Named(8, 2)), "feature")


def test_a_registration_of_the_subclass_comes_first():
    connected = connect(nn.Sequential(Other(8, 2)))
    timm_ortho.register_block(Other, stream="x", kinds=("attention", None))
    assert len(sites(connect(nn.Sequential(Other(8, 2))))) == 1
    assert len(sites(connect(connected))) == 1
    again = type("Other", (Block,), {"__module__": __name__})  # a cell that runs again
    assert lookup.spec_of_class(again) is None


def test_not_residual_excludes_a_subclass():
    timm_ortho.not_residual(Other, "for a test")
    model = connect(nn.Sequential(Other(8, 2), Larger(8, 2)))
    assert {site.name.partition(".")[0] for site in sites(model)} == {"1"}


def test_a_subclass_of_a_class_that_is_defined_again():
    def define():
        return type("Again", (MyBlock,), {"forward": MyBlock.forward, "__module__": __name__})

    old, new = define(), define()
    timm_ortho.register_block(new, stream="x", kinds=("attention", "mlp"))
    assert [lookup.spec_of_class(type("Sub", (base,), {})) is not None for base in (old, new)] == [False, True]
