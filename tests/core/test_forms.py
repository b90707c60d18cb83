"""Connections, skips and models have equal results in eager mode, TorchScript, FX, torch.export and torch.compile."""
import io
from itertools import cycle

import pytest
import timm
import torch
from helpers.half_connection import HalfConnection
from helpers.messages import taking
from torch.fx.experimental.optimization import optimize_for_inference

from timm_ortho import CONNECTIONS, SKIPS, create_connection, create_skip, sites
from timm_ortho.functional import plain_update
from timm_ortho.skips.transforms import plain_skip


def loaded_script(module, inputs):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def traced_twice(module, inputs=()):
    """Trace the FX graph of a module again, as torch's fusion and quantization passes do."""
    graph = torch.fx.symbolic_trace(module)
    again = torch.fx.symbolic_trace(graph)
    recorded = [[node.target for node in traced.graph.nodes if node.target in (plain_update, plain_skip)]
                for traced in (graph, again)]
    assert recorded[0] == recorded[1]
    return again


FORMS = {
    "TorchScript": loaded_script,
    "trace": torch.jit.trace,
    "FX": traced_twice,
    "export": lambda module, inputs: torch.export.export(module, inputs).module(),
    "strict": lambda module, inputs: torch.export.export(module, inputs, strict=True).module(),
    "compile": lambda module, inputs: torch.compile(module, fullgraph=True, backend="aot_eager"),
    "inductor": lambda module, inputs: torch.compile(module, fullgraph=True),
}
WIDTH = 12


def transform(skip):
    return create_skip(skip, WIDTH, dim=1, branches=4, count=3)


def connection(name, skip=None, **arguments):
    return create_connection(name, dim=1, skip=skip and transform(skip), **arguments).double()


def model(name, **arguments):
    sizes = {
        "vit_small_ortho": dict(img_size=32, patch_size=16, embed_dim=48, depth=2, num_heads=2),
        "resnetv2_18_cifar_orthog": dict(layers=(2, 1), channels=(16, 32), stem_chs=16),
    }
    return timm.create_model(name, num_classes=5, **sizes[name], **arguments).double().eval()


def row(make, *arguments, inputs=2, forms="TorchScript FX export", slow="", **options):
    """Return a test case for each form in ``forms`` and ``slow``.

    ``inputs`` is the number of input tensors with WIDTH channels. 0 means one batch of images instead.
    """
    label = "-".join(str(getattr(value, "__name__", value)) for value in (*arguments, *options.values()))
    return [
        pytest.param(lambda: make(*arguments, **options), inputs, form, marks=marks, id=f"{label}-{form}")
        for names, marks in ((forms, ()), (slow, pytest.mark.slow)) for form in names.split()
    ]


MODELS = ["vit_small_ortho", "resnetv2_18_cifar_orthog"]
TABLE = [
    *(row(connection, name, forms="TorchScript FX export compile") for name in CONNECTIONS),
    row(connection, "hybrid", start="linear", forms="trace strict"),
    *(row(connection, name, prob=0.5, forms="TorchScript FX", slow="compile") for name in taking("prob")),
    row(connection, HalfConnection),
    *(row(connection, name, groups=3, forms="TorchScript FX", slow="export compile") for name in taking("groups")),
    row(connection, "feature", groups=3, prob=0.5, skip="orthogonal_tp", forms="TorchScript FX export compile"),
    # each connection with some skips, and each skip with one connection
    *(row(connection, name, skip=skip, forms="TorchScript FX") for name, skip in zip(cycle(CONNECTIONS), SKIPS)),
    *(row(transform, skip, inputs=1, forms="TorchScript FX", slow="trace export") for skip in SKIPS),
    *(row(model, name, inputs=0, forms="TorchScript FX compile", slow="export inductor") for name in MODELS),
    row(model, MODELS[0], connection="hybrid", inputs=0, slow="compile"),
    row(model, MODELS[1], connection_prob=0.5, inputs=0, slow="compile"),
    row(model, MODELS[0], connection_groups=2, inputs=0, forms="", slow="TorchScript FX export compile"),
    row(model, MODELS[1], connection="feature", connection_groups=4, inputs=0, forms="FX", slow="compile inductor"),
    row(model, MODELS[1], skip="orthogonal_tp", inputs=0, forms="", slow="compile"),
    row(model, MODELS[1], skip="idempotent_cmr", inputs=0, forms="", slow="compile"),
]


def results(module, inputs):
    """Return a dict of the output ``y`` and of the gradients of inputs (by position) and parameters (by name)."""
    torch.manual_seed(2)  # connections with prob < 1 draw random numbers
    y = module(*inputs)
    parameters = {name.removeprefix("_orig_mod."): p for name, p in module.named_parameters()}
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    gradients = torch.autograd.grad(y, [*inputs, *parameters.values()], upstream)
    return {"y": y, **dict(zip([*map(str, range(len(inputs))), *parameters], gradients, strict=True))}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("make", "count", "form"), [case for cases in TABLE for case in cases])
def test_same_results(make, count, form):
    torch.manual_seed(0)
    module = make()
    shape = (2, WIDTH, 3, 4) if count else (2, 3, 32, 32)
    inputs = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(count or 1))
    torch._dynamo.reset()
    torch.testing.assert_close(results(FORMS[form](module, inputs), inputs), results(module, inputs))
    torch._dynamo.reset()


ARITHMETIC = {f"aten.{name}" for name in ("mul.Tensor", "add.Tensor", "sub.Tensor", "div.Tensor", "sum.dim_IntList")}
OTHERS = {  # by the number of groups; the second set is for the weights of hybrid
    1: set(), 3: {"aten.unflatten.int", "aten.flatten.using_ints", "aten.view.default"},
    "hybrid": {f"aten.{name}" for name in (
        "select.int", "clamp.default", "detach.default", "alias.default", "sin.default", "cos.default")}}


@pytest.mark.parametrize(("name", "arguments"), [
    *((name, {}) for name in CONNECTIONS), ("global", dict(prob=0.5)), ("hybrid", dict(groups=3)),
])
def test_exported_programs_contain_only_arithmetic(name, arguments):
    """Core ML's converter supports neither ``addcmul`` nor the argument ``alpha`` of an addition."""
    program = torch.export.export(create_connection(name, **arguments).eval(), (torch.ones(2, 3, WIDTH),) * 2)
    allowed = ARITHMETIC | OTHERS[arguments.get("groups", 1)] | (OTHERS["hybrid"] if name == "hybrid" else set())
    for graph in (program.graph, program.run_decompositions().graph):
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        assert {str(node.target) for node in nodes} <= allowed
        assert not any(node.kwargs for node in nodes)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONNECTIONS)
def test_exported_programs_are_finite_after_a_conversion_to_half_precision(name, dtype):
    """The program of a float32 model contains no casts. |x|^2 of a sample is 70,000 here, above float16's range."""
    connection = create_connection(name)
    x, f = torch.ones(2, 70, 1000), torch.randn(2, 70, 1000, generator=torch.Generator().manual_seed(0)) + 1
    traced = torch.jit.trace(connection, (x, f))
    y = traced.to(dtype)(x.to(dtype), f.to(dtype))
    torch.testing.assert_close(y.float(), connection(x, f), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("arguments", [{}, dict(connection="hybrid", skip="orthogonal_tp")])
def test_torch_optimizes_a_variant_for_inference(arguments):
    """torch fuses convolutions and BatchNorm in a graph, and traces the result."""
    variant, images = model("resnetv2_18_cifar_orthog", **arguments), torch.randn(2, 3, 32, 32)
    variant = variant.float()
    optimized = optimize_for_inference(variant)
    names = [getattr(node.target, "__name__", "") for node in optimized.graph.nodes]
    assert names.count("plain_update") == len(sites(variant))
    torch.testing.assert_close(optimized(images), variant(images), rtol=1e-4, atol=1e-4)
