"""Classes whose source cannot be read: of the prompt, of ``exec``, or of a library without its ``.py`` files."""
import inspect

import pytest
from helpers.derived import route_of
from timm.models import model_entrypoint
from timm.models.vision_transformer import Block
from torch import nn

from timm_ortho import RoutingError, UnsupportedModelError, connect, sites
from timm_ortho.models import variants

CODE = """
class Adding(nn.Module):
    def forward(self, x):
        return x + x.exp()

class Calling(nn.Module):
    def forward(self, x):
        return [each.add(x.exp()) for each in (x,)][0]

class Inheriting(Block):
    def forward(self, x):
        return super(Inheriting, self).forward(x)

class Head(nn.Module):
    def forward(self, x):
        return self.f(x)
"""
OF_EXEC = {"nn": nn, "Block": Block, "__name__": __name__}
exec(CODE, OF_EXEC)


@pytest.mark.parametrize("others", [(), (Block,)])
@pytest.mark.parametrize("name", ["Adding", "Calling", "Inheriting"])
def test_a_residual_class_without_source(name, others):
    arguments = (8, 2) if name == "Inheriting" else ()
    model = nn.Sequential(OF_EXEC[name](*arguments), *(cls(8, 2) for cls in others))
    with pytest.raises(UnsupportedModelError, match=rf"not supported: {__name__}.{name}"):
        connect(model)


def test_a_class_without_source_that_adds_nothing():
    assert len(sites(connect(nn.Sequential(Block(8, 2), OF_EXEC["Head"]())))) == 2


@pytest.mark.parametrize("use", [
    lambda: route_of(Block, [("x", "attention"), ("x", "mlp")]),
    lambda: variants._fixed.__wrapped__(model_entrypoint("vit_small_patch16_224"))], ids=["connect", "create_model"])
def test_timm_without_source_files(monkeypatch, use):
    def getsource(function):
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", getsource)
    with pytest.raises((RoutingError, OSError), match=r"the source files \(\.py\) of timm are not installed\."):
        use()
