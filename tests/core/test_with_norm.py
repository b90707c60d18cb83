"""Derived blocks call a connection together with the norm that reads the sum next."""
import ast
import copy
import importlib.util
import inspect
import textwrap

import pytest
import torch
from helpers.derived import derived, route_of
from torch import nn

from timm_ortho import create_connection

HOST = """
from torch import nn
{imports}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.norm, self.norm_b, self.ln_2 = nn.Linear(4, 4), *(nn.LayerNorm(4, bias=False) for _ in range(3))

    def forward(self, x):
        y = z = self.norm_b(self.f(x))
{body}
        return z - y
"""


def written(folder, body, imports="import torch"):
    """Return a block class whose `forward` contains these statements."""
    file = folder / "host.py"
    file.write_text(HOST.format(imports=imports, body=textwrap.indent(body, 8 * " ")))
    spec = importlib.util.spec_from_file_location("host", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Block


def routed(block, *names, connection="linear", **options):
    """Return an instance of the derived class, with one connection for each name."""
    torch.manual_seed(0)
    made = block()
    made.__class__ = derived(block, [("x", name) for name in names], **options)
    for name in names:
        setattr(made, f"connection_{name}", create_connection(connection))
    return made


def results(block, x):
    """Return the output of a block, the gradient of its input, and those of its parameters in the order of names."""
    parameters = [parameter for _, parameter in sorted(block.named_parameters())]
    y = block(x)
    torch.manual_seed(1)
    return [y, *torch.autograd.grad((y * torch.randn_like(y)).sum(), [x, *parameters], allow_unused=True)]


def assert_equal(actual, expected):
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def recorded(block):
    """Return the list to which forward hooks append the attribute of each module that is called."""
    calls = []
    for name, module in block.named_children():
        module.register_forward_hook(lambda module, inputs, output, name=name: calls.append(name))
    return calls


FIRST = "x = x + self.f(x)"
NORMS = {
    f"{FIRST}\ny = self.norm(x)": "norm",
    f"{FIRST}\nz = x * self.f(self.norm(x))": "norm",
    f"{FIRST}\nreturn x * self.norm(x)": "norm",
    f"{FIRST}\nz: torch.Tensor = self.ln_2(x)": "ln_2",
    "x = self.f(x) + x\ny = self.norm(x)": "norm",
    "z = self.f(x)\nx = x * 2.0\nx += z\ny = self.norm(x)": "norm",
    f"{FIRST}\ny = self.f(y)\nz = self.norm(x)": "norm",
    f"{FIRST}\ny = x\nx = self.norm(y)": "norm",
    f"{FIRST}\ny = self.norm(x)\nif y.mean() > 0.0:\n    y = y * 2.0": "norm",
    f"if self.training:\n    {FIRST}\n    y = self.norm(x)": "norm",
    f"for _ in range(2):\n    {FIRST}\n    y = self.norm(x)": "norm",
    "x = x + self.norm(x)\ny = self.norm(x)": "norm",
    # the result is not assigned to one variable
    "y = self.norm(x + self.f(x))": None,
    "x = torch.relu(x + self.f(x))\ny = self.norm(x)": None,
    "x = y = x + self.f(x)\nz = self.norm(x)": None,
    "x = x + self.f(x) if self.training else x\ny = self.norm(x)": None,
    "y = [x + self.f(x)]\nz = y = self.norm(y[0])": None,
    # the next use is no call of a norm
    f"{FIRST}\ny = self.f(x)\nz = self.norm(x)": None,
    f"{FIRST}\nx = x * 2.0\ny = self.norm(x)": None,
    f"{FIRST}\ny = x\ny *= 2.0\nz = self.norm(x)": None,
    f"{FIRST}\ny = (x := x * 2.0) * self.norm(x)": None,
    f"{FIRST}\ny = self.norm(x * 2.0)": None,
    f"{FIRST}\ny = x * self.norm(y)": None,
    f"{FIRST}\ny = self.f(x) * self.norm(x)": None,
    f"{FIRST}\ny = (x if self.training else y) * self.norm(x)": None,
    f"{FIRST}\ny = self.norm(input=x)": None,
    f"{FIRST}\ny = nn.functional.layer_norm(x, (4,))": None,
    f"if self.training:\n    {FIRST}\ny = self.norm(x)": None,
    # more than one norm, or a norm that is used before
    f"{FIRST}\ny = self.norm(x) * self.norm(x)": None,
    f"{FIRST}\ny = self.norm(y)\nz = self.norm(x)": None,
    f"{FIRST}\nself.norm = self.ln_2\ny = self.norm(x)": None,
    # the norm is not always called, or more than once
    f"{FIRST}\ny = self.norm(x) if y.mean() > 0.0 else y": None,
    f"{FIRST}\ny = self.training and self.norm(x)": None,
    f"{FIRST}\nif self.training:\n    y = self.norm(x)": None,
    f"{FIRST}\nif y.mean() > 9.0:\n    return y\nz = self.norm(x)": None,
    f"{FIRST}\nfor _ in range(2):\n    y = self.norm(x)": None,
    f"{FIRST}\ny = (lambda: self.norm(x))()": None,
    f"{FIRST}\ny = y * (1e9 < y.mean() < self.norm(x).mean())": None,
    f"{FIRST}\ny = sum([self.norm(x) for _ in range(2)])": None,
    # torch.jit is not available under the name torch
    f"torch = self.f(x)\n{FIRST}\ny = self.norm(x) * torch": None,
}


@pytest.mark.parametrize("body", NORMS)
def test_which_norms_are_called_with_the_connection(tmp_path, body):
    """Outputs, gradients and calls of modules are those of the host; only calls that follow a sum move."""
    block, expected = written(tmp_path, body), NORMS[body]
    x = torch.randn(3, 4, requires_grad=True)
    assert route_of(block, [("x", "one")]).next_norms == ({"one": expected} if expected else {})
    torch.manual_seed(0)
    plain, made = block(), routed(block, "one")
    calls, calls_made = recorded(plain), recorded(made)
    assert_equal(results(made, x), results(plain, x))
    assert sorted(name for name in calls_made if name != "connection_one") == sorted(calls)


class PreNorm(nn.Module):
    """Three sums in a row. The norms of the first two read them next."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(4) for _ in range(3))
        self.attn, self.conv, self.mlp = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, scale: float = 1.0):
        normed = self.norm1(x)
        x = x + self.attn(normed)
        x = x + self.conv(self.norm2(x)) * scale
        x = x + self.mlp(self.norm3(x))
        return x * normed


SITES = ("attention", "conv", "mlp")


def test_the_source_of_sums_in_a_row():
    route = route_of(PreNorm, [("x", name) for name in SITES], mask="scale")
    assert route.next_norms == {"attention": "norm2", "conv": "norm3"}
    source = inspect.getsource(derived(PreNorm, [("x", name) for name in SITES], mask="scale").forward)
    expected = textwrap.dedent("""\
        def forward(self, x: torch.Tensor, scale: float=1.0):
            normed = self.norm1(x)
            if torch.jit.is_scripting():
                x = self.connection_attention(x, self.attn(normed), attn_mask=scale)
                connection_attention_normed = self.norm2(x)
            else:
                x, connection_attention_normed = self.connection_attention.with_norm(
                    x, self.attn(normed), self.norm2, attn_mask=scale)
            if torch.jit.is_scripting():
                x = self.connection_conv(x, self.conv(connection_attention_normed) * scale, attn_mask=scale)
                connection_conv_normed = self.norm3(x)
            else:
                x, connection_conv_normed = self.connection_conv.with_norm(
                    x, self.conv(connection_attention_normed) * scale, self.norm3, attn_mask=scale)
            x = self.connection_mlp(x, self.mlp(connection_conv_normed), attn_mask=scale)
            return x * normed
        """)
    assert ast.unparse(ast.parse(source)) == ast.unparse(ast.parse(expected))  # releases of Python place parentheses


FORMS = {
    "TorchScript": lambda block, x: torch.jit.script(block),
    "FX": lambda block, x: torch.fx.symbolic_trace(block),
    "export": lambda block, x: torch.export.export(block, (x,)).module(),
    "compile": lambda block, x: torch.compile(block, fullgraph=True, backend="aot_eager"),
    "deepcopy": lambda block, x: copy.deepcopy(block),
}


@pytest.mark.parametrize(("form", "connection"), [  # `feature` and `hybrid` have different definitions of `with_norm`
    *((form, "feature") for form in FORMS), ("TorchScript", "hybrid"), ("compile", "hybrid")])
def test_same_results_in_every_form(form, connection):
    block, x = routed(PreNorm, *SITES, connection=connection), torch.randn(2, 3, 4, requires_grad=True)
    converted = FORMS[form](block, x)
    torch.testing.assert_close(results(converted, x), results(block, x))
