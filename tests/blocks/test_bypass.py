"""Calls of a block that compute their result without its connections are found when the block is registered."""
import textwrap

import pytest
import torch
from helpers.own_block import MyBlock
from helpers.small_models import host

import timm_ortho
from timm_ortho import RoutingError
from timm_ortho.blocks import lookup, routed, specs

pytestmark = pytest.mark.usefixtures("restored")

SOURCE = """
class Block(MyBlock):
    keep, drop = 0.5, 0.1

    def helper(self, x):
        return x + self.f(x)

    def ends(self, x):
        return x + self.f(x)

    def alone(self, x):
        return x + self.f(x)

    def outer(self, x):
        return self.ends(x)

    def forward(self, x, shortcut=None, keep=None):
"""


def block_of(body, folder):
    """Return a block whose `forward` consists of these statements. Routing reads its source from a file."""
    text = SOURCE + textwrap.indent(textwrap.dedent(body), 8 * " ")
    (folder / "block.py").write_text(text)
    names = {"__name__": __name__, "MyBlock": MyBlock, "torch": torch, "added": torch.Tensor.add}
    exec(compile(text, folder / "block.py", "exec"), names)
    return names["Block"]


TRAINING = "forward bypasses an addition if self.training"
BYPASSING = [  # condition of the error, arguments of register_block, statements of `forward`
    ("forward bypasses an addition if self.training and self.drop > 0.1", {}, """\
        if self.training and self.drop > 0.1:  # as DINOv2's blocks, with stochastic depth
            x = torch.index_add(x, 0, torch.arange(len(x)), self.f(x))
        elif self.training:
            x = x + self.f(x)
        else:
            x = x + self.f(x)
        return x"""),
    (TRAINING, {}, """\
        if self.training:
            return torch.index_add(x, 0, torch.arange(len(x)), self.f(x))
        return x + self.f(x)"""),
    (TRAINING, {}, """\
        if not self.training:
            x = self.norm(x)
        else:
            return self.f(x)
        return x + self.f(x)"""),
    ("forward bypasses an addition if not self.training", {}, """\
        f = self.f(x)
        if not self.training:
            return added(x, f)
        x = x + f
        return x"""),
    ("forward bypasses an addition if not self.training", {}, """\
        if self.training:
            return x + self.f(x)
        return added(x, self.f(x))"""),
    ("forward bypasses an addition if not keep is None", {}, """\
        f = self.f(x)
        return x + f if keep is None else torch.where(keep, added(x, f), x)"""),
    ("forward bypasses an addition if torch.rand(()) < self.keep", {}, """\
        if torch.rand(()) < self.keep:
            x = self.helper(x)
        else:
            x = x + self.f(x)
        return x"""),
    (TRAINING, dict(kinds=("attention", "mlp")), """\
        x = x + self.f(x)
        if self.training:
            return added(x, self.g(x))
        return x + self.g(x)"""),
    ("forward does not call alone, which contains the additions", dict(method="alone"), "return self.helper(x)"),
    (TRAINING, {}, """\
        with torch.autocast("cpu"):
            if self.training:
                return self.g(x)
        return x + self.f(x)"""),
    (TRAINING, {}, """\
        if self.training:
            with torch.autocast("cpu"):
                return self.g(x)
        return x + self.f(x)"""),
    (TRAINING, {}, """\
        try:
            if self.training:
                return self.g(x)
        finally:
            pass
        return x + self.f(x)"""),
    (TRAINING, {}, """\
        if x.ndim == 3:
            if self.training:
                return self.g(x)
            x = self.norm(x)
        return x + self.f(x)"""),
    (TRAINING, {}, """\
        for branch in (self.f, self.g):
            if self.training:
                x = branch(x)
                continue
            x = x + branch(x)
        return x"""),
    (TRAINING, {}, """\
        while self.training:
            return self.g(x)
        return x + self.f(x)"""),
    ("forward bypasses an addition if not raises(RuntimeError)", {}, """\
        try:
            return self.g(x)
        except RuntimeError:
            return x + self.f(x)"""),
    ("forward bypasses an addition if raises(RuntimeError)", {}, """\
        try:
            x = x + self.f(x)
        except RuntimeError:
            x = self.g(x)
        except ValueError:
            x = x + self.g(x)
        return x"""),
    (TRAINING, dict(method="ends"), "return self.helper(x) if self.training else self.ends(x)"),
]


@pytest.mark.parametrize(("when", "arguments", "body"), BYPASSING)
def test_calls_must_not_bypass_the_additions(tmp_path, when, arguments, body):
    block, arguments = block_of(body, tmp_path), {"stream": "x", "kinds": ("mlp",), **arguments}
    with pytest.raises(RoutingError) as error:
        timm_ortho.register_block(block, **arguments)
    assert f": {when}: " in str(error.value), error.value
    assert str(error.value).endswith("or pass bypass=True if these calls are meant to ignore the connections")
    assert lookup.spec_of_class(block) is None
    timm_ortho.register_block(block, bypass=True, **arguments)


HARMLESS = [
    (dict(stream="shortcut"), """\
        if self.training and torch.rand(()) < self.drop:  # skips the whole block
            return x
        if x.ndim != 3:
            raise ValueError("not tokens")
        shortcut = x
        if self.keep:
            x = shortcut + self.f(x)
        return x"""),
    (dict(stream=[("shortcut", "x")]), """\
        f = self.f(x)
        if shortcut is not None:
            f = f + shortcut
        else:
            f = f + x
        return f"""),
    (dict(stream="x", method="ends"), """\
        if self.drop:
            return self.outer(self.norm(x))
        return self.outer(x)"""),
    (dict(stream="x"), """\
        if self.drop is None:  # known for each instance
            return self.g(x)
        return x + self.f(x)"""),
    (dict(stream="x"), """\
        if self.training:
            with torch.autocast("cpu"):
                return x + self.f(x)
        else:
            if torch.rand(()) < self.keep:
                try:
                    return x + self.g(x)
                except RuntimeError:
                    raise
            f = self.f(x)
        return x + self.g(f)"""),
    (dict(stream="x", kinds=("attention", "mlp")), """\
        if self.training:
            if self.drop:
                return x
            y = self.norm(x)
        else:
            y = x
        try:
            f = self.f(y)
        except RuntimeError:
            f = self.g(y)
        x = x + f
        for branch in (self.f, self.g):
            if torch.rand(()) > self.keep:
                continue
            x = x + branch(x)
            if x.isnan().any():
                return x
        return x"""),
]


@pytest.mark.parametrize(("arguments", "body"), HARMLESS)
def test_these_calls_bypass_no_addition(tmp_path, arguments, body):
    timm_ortho.register_block(block_of(body, tmp_path), **{"kinds": ("mlp",), **arguments})


def test_no_block_of_timm_bypasses_its_additions():
    hosts = {spec: host(spec) for spec in specs("timm")}
    assert {spec.name: bypass for spec, block in hosts.items()
            if block and (bypass := routed.route(block, spec).bypass)} == {}
