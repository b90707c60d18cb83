"""Calls of a block that compute their result without its connections are found when the block is registered."""
import pytest
import torch
from helpers.own_block import MyBlock
from helpers.small_models import host

import timm_ortho
from timm_ortho import RoutingError
from timm_ortho.blocks import lookup, routed, specs

pytestmark = pytest.mark.usefixtures("restored")


def added(x, f):
    return x + f


class Bypassing(MyBlock):
    """A block with a path that each subclass defines."""

    keep, drop = 0.5, 0.1

    def helper(self, x):
        return x + self.f(x)

    def ends(self, x):
        return x + self.f(x)


class Indexed(Bypassing):
    """Like DINOv2's blocks, linear in training with stochastic depth."""

    def forward(self, x):
        if self.training and self.drop > 0.1:
            x = torch.index_add(x, 0, torch.arange(len(x)), self.f(x))
        elif self.training:
            x = x + self.f(x)
        else:
            x = x + self.f(x)
        return x


class Returned(Bypassing):
    def forward(self, x):
        if self.training:
            return torch.index_add(x, 0, torch.arange(len(x)), self.f(x))
        return x + self.f(x)


class ReturnedElse(Bypassing):
    def forward(self, x):
        if not self.training:
            x = self.norm(x)
        else:
            return self.f(x)
        return x + self.f(x)


class Evaluated(Bypassing):
    def forward(self, x):
        f = self.f(x)
        if not self.training:
            return added(x, f)
        x = x + f
        return x


class ReturnedFirst(Bypassing):
    def forward(self, x):
        if self.training:
            return x + self.f(x)
        return added(x, self.f(x))


class Where(Bypassing):
    def forward(self, x, keep=None):
        f = self.f(x)
        return x + f if keep is None else torch.where(keep, added(x, f), x)


class Helped(Bypassing):
    def forward(self, x):
        if torch.rand(()) < self.keep:
            x = self.helper(x)
        else:
            x = x + self.f(x)
        return x


class SecondOnly(Bypassing):
    def forward(self, x):
        x = x + self.f(x)
        if self.training:
            return added(x, self.g(x))
        return x + self.g(x)


class Elsewhere(Bypassing):
    def forward(self, x):
        return self.helper(x)


class InContext(Bypassing):
    def forward(self, x):
        with torch.autocast("cpu"):
            if self.training:
                return self.g(x)
        return x + self.f(x)


class Tried(Bypassing):
    def forward(self, x):
        try:
            if self.training:
                return self.g(x)
        finally:
            pass
        return x + self.f(x)


class ReturnedInside(Bypassing):
    def forward(self, x):
        if x.ndim == 3:
            if self.training:
                return self.g(x)
            x = self.norm(x)
        return x + self.f(x)


class Continued(Bypassing):
    def forward(self, x):
        for branch in (self.f, self.g):
            if self.training:
                x = branch(x)
                continue
            x = x + branch(x)
        return x


class ReturnedInContext(Bypassing):
    def forward(self, x):
        if self.training:
            with torch.autocast("cpu"):
                return self.g(x)
        return x + self.f(x)


@pytest.mark.parametrize(("block", "when", "arguments"), [
    (Indexed, "forward bypasses an addition if self.training and self.drop > 0.1", {}),
    (Returned, "forward bypasses an addition if self.training", {}),
    (ReturnedElse, "forward bypasses an addition if self.training", {}),
    (Evaluated, "forward bypasses an addition if not self.training", {}),
    (ReturnedFirst, "forward bypasses an addition if not self.training", {}),
    (Where, "forward bypasses an addition if not keep is None", {}),
    (InContext, "forward bypasses an addition if self.training", {}),
    (ReturnedInContext, "forward bypasses an addition if self.training", {}),
    (Tried, "forward bypasses an addition if self.training", {}),
    (ReturnedInside, "forward bypasses an addition if self.training", {}),
    (Continued, "forward bypasses an addition if self.training", {}),
    (Helped, "forward bypasses an addition if torch.rand(()) < self.keep", {}),
    (SecondOnly, "forward bypasses an addition if self.training", dict(kinds=("attention", "mlp"))),
    (Elsewhere, "forward does not call ends, which contains the additions", dict(method="ends")),
])
def test_calls_must_not_bypass_the_additions(block, when, arguments):
    arguments = {"stream": "x", "kinds": ("mlp",), **arguments}
    with pytest.raises(RoutingError) as error:
        timm_ortho.register_block(block, **arguments)
    assert f": {when}: " in str(error.value), error.value
    assert str(error.value).endswith("or pass bypass=True if these calls are meant to ignore the connections")
    assert lookup.spec_of_class(block) is None
    timm_ortho.register_block(block, bypass=True, **arguments)


class Dropped(Bypassing):
    """A block that training may skip."""

    def forward(self, x, /):
        if self.training and torch.rand(()) < self.drop:
            return x
        if x.ndim != 3:
            raise ValueError("not tokens")
        shortcut = x
        if self.keep:
            x = shortcut + self.f(x)
        return x


class Optional(Bypassing):
    def forward(self, x, shortcut=None):
        f = self.f(x)
        if shortcut is not None:
            f = f + shortcut
        else:
            f = f + x
        return f


class Called(Bypassing):
    def outer(self, x):
        return self.ends(x)

    def forward(self, x):
        if self.drop:
            return self.outer(self.norm(x))
        return self.outer(x)


class Configured(Bypassing):
    def forward(self, x):
        if self.drop is None:
            return self.g(x)
        return x + self.f(x)


class Returning(Bypassing):
    """A block whose sides return their sum: one inside `with`, one inside `try` on a side of another `if`."""

    def forward(self, x):
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
        return x + self.g(f)


class Ordinary(Bypassing):
    """A block with all statements that may have sides, in which no call bypasses an addition."""

    def forward(self, x):
        if self.training:
            if self.drop:
                return x
            if x.ndim != 3:
                raise ValueError("not tokens")
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
        return x


@pytest.mark.parametrize(("block", "arguments"), [
    (Configured, dict(stream="x")), (Ordinary, dict(stream="x", kinds=("attention", "mlp"))),
    (Returning, dict(stream="x")), (Dropped, dict(stream="shortcut")), (Optional, dict(stream=[("shortcut", "x")])),
    (Called, dict(stream="x", method="ends"))])
def test_these_calls_bypass_no_addition(block, arguments):
    timm_ortho.register_block(block, **{"kinds": ("mlp",), **arguments})


def test_no_block_of_timm_bypasses_its_additions():
    hosts = {spec: host(spec) for spec in specs("timm")}
    assert {spec.name: bypass for spec, block in hosts.items()
            if block and (bypass := routed.route(block, spec).bypass)} == {}
