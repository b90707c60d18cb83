"""The update: exact properties, gradients, precision, compilers and errors."""
import functools

import numpy as np
import pytest
import torch
from helpers.allocations import Allocations
from helpers.kernel_cases import both, nhwc
from helpers.oracle import truth
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from timm_ortho import functional
from timm_ortho.bench.clock import saved_bytes
from timm_ortho.functional import BACKENDS, decompose, plain_update, residual_update
from timm_ortho.update import formula

DIMS = [-1, 1, (1, 2), (2, 1, 3), None]


def plain_formula(x, f, dim):
    return plain_update(x, f, 0.0, 1.0, [dim], 1e-6)


def pair(shape, dtype=torch.float64, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    x, f = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    return x.to(dtype).requires_grad_(**kwargs) if kwargs else x.to(dtype), f.to(dtype)


def axes(dim, ndim):
    return tuple(range(1, ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim


def inner(x, y, dim):
    return (x * y).sum(axes(dim, x.ndim), keepdim=True)


# ------------------------------------------------------------------------------------------ exact properties
@pytest.mark.parametrize("dim", DIMS, ids=str)
@pytest.mark.parametrize(("shape", "eps"), [((2, 7, 5, 3), 1e-6), ((1, 1, 3, 1), 1e-2), ((3, 5, 1, 2), 1.0)], ids=str)
def test_the_remaining_parallel_component_is_due_to_eps(shape, eps, dim):
    x, f = pair(shape)
    parallel, orthogonal = decompose(x, f, dim, eps)
    expected = inner(x, f, dim) * eps / (inner(x, x, dim) + eps)
    torch.testing.assert_close(inner(x, orthogonal, dim), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parallel + orthogonal, f)
    added = residual_update(x, f, dim=dim, eps=eps) - x
    torch.testing.assert_close(inner(x, added, dim), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dim", DIMS, ids=str)
@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 1.0), (0.3, 0.7), (1.0, 0.0), (-1.5, 2.0)], ids=str)
def test_weights_scale_the_two_parts(weights, dim):
    x, f = pair((2, 7, 5, 3))
    parallel, orthogonal = decompose(x, f, dim, 1e-3)
    y = residual_update(x, f, parallel=np.float32(weights[0]), orthogonal=weights[1], dim=dim, eps=1e-3)
    torch.testing.assert_close(y, x + np.float32(weights[0]) * parallel + weights[1] * orthogonal)


# ------------------------------------------------------------------------------------------------- gradients
WEIGHTS = [(0.0, 1.0), (0.3, 0.7), (1.0, 0.5), ("a", 1.0), (0.0, "b"), ("a", "b")]


@pytest.mark.parametrize(("dim", "eps"), [(-1, 1e-6), (1, 1.0), ((1, 2), 1e-6), (None, 1.0)], ids=str)
@pytest.mark.parametrize(("weights", "keep"), [((0.0, 1.0), "branch"), *((w, "output") for w in WEIGHTS)], ids=str)
def test_gradients_of_first_and_second_order(weights, dim, eps, keep):
    x, f = (t.requires_grad_() for t in pair((2, 3, 2)))
    learned = [torch.tensor(0.6, dtype=torch.float64, requires_grad=True) for w in weights if isinstance(w, str)]

    def update(x, f, *learned):
        learned = list(learned)
        a, b = (learned.pop(0) if isinstance(w, str) else w for w in weights)
        return residual_update(x, f, parallel=a, orthogonal=b, dim=dim, eps=eps, keep=keep)

    assert update(x, f, *learned).grad_fn.name() == "TorchUpdateBackward"  # the closed form, not autograd
    assert gradcheck(update, (x, f, *learned))
    assert gradgradcheck(update, (x, f, *learned))


@both
def test_weights_of_low_precision_do_not_round_the_gradients(backend):
    x, f, g = torch.randn(3, 4, 16)
    a, b = (torch.tensor(weight, dtype=torch.bfloat16) for weight in (1.0, -0.3))

    def gradients(*weights, dtype=torch.float32):
        inputs = x.to(dtype).requires_grad_(), f.to(dtype).requires_grad_()
        y = residual_update(*inputs, parallel=weights[0], orthogonal=weights[1], backend=backend)
        return torch.autograd.grad(y, inputs, g.to(dtype))

    expected = gradients(a.item(), b.item(), dtype=torch.float64)
    for result, exact in zip(gradients(a, b), expected, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)


def saved_tensors(call):
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call()
    return y, kept


def test_the_branch_output_is_not_kept():
    x, f = (t.requires_grad_() for t in pair((5, 7, 64), torch.float32))
    y, kept = saved_tensors(lambda: residual_update(x, f))
    storages = {t.untyped_storage().data_ptr(): t.numel() for t in kept}
    assert f.untyped_storage().data_ptr() not in storages
    assert storages.pop(x.untyped_storage().data_ptr()) == storages.pop(y.untyped_storage().data_ptr()) == x.numel()
    assert list(storages.values()) == [5 * 7, 5 * 7]  # two numbers per token


class Converted(torch.Tensor):
    """A subclass like MONAI's MetaTensor: the results of operations are converted to it."""


@pytest.mark.parametrize("inputs", [
    (torch.Tensor, torch.Tensor), (Converted, Converted), (Converted, torch.Tensor), (torch.Tensor, Converted)])
def test_in_place_changes_of_the_sum_need_the_branch(inputs):
    x, f = (t.requires_grad_() for t in pair((2, 5)))
    expected = torch.autograd.grad(residual_update(x, f).relu().sum(), (x, f))
    for keep in ("output", "branch"):
        y = residual_update(*(t.as_subclass(cls) for t, cls in zip((x, f), inputs, strict=True)), keep=keep).relu_()
        assert type(y) is (Converted if Converted in inputs else torch.Tensor)
        if keep == "output" and Converted not in inputs:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            found = torch.autograd.grad(y.sum().as_subclass(torch.Tensor), (x, f))
            torch.testing.assert_close(found, expected)


# ------------------------------------------------------------------------------------------------- precision
def run(update, x, f, g, **kwargs):
    x, f = x.clone().requires_grad_(), f.clone().requires_grad_()
    y = update(x, f, **kwargs)
    return [y.detach(), *torch.autograd.grad(y, (x, f), g.to(y.dtype))]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dim", [-1, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", ["norm", "entries"])
def test_a_stream_of_300_stays_finite(dtype, dim, autocast, size):
    x, f = (t.to(dtype) for t in pair((2, 3, 768), torch.float32))
    x = 300 * (torch.nn.functional.normalize(x.float(), dim=-1) if size == "norm" else x.float().sign())
    with torch.autocast("cpu", dtype, enabled=autocast):
        results = run(residual_update, x.to(dtype), f, torch.ones_like(f), dim=dim)
    assert all(torch.isfinite(t).all() for t in results)
    y, x = results[0].double(), x.to(dtype).double()
    expected = truth(x, f.double(), 0.0, 1.0, None if dim is None else [dim], 1e-6)
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)


def channels_first_seen_as_last(x):
    return x.movedim(-1, 1).contiguous().movedim(1, -1)


@pytest.mark.parametrize("how", ["eager", "compiled", "plain", "scripted"])
@pytest.mark.parametrize(("stream", "branch", "dim"), [
    (torch.Tensor.contiguous, nhwc, 1),  # NextViT: the branch output is a transposed tensor of tokens
    (nhwc, torch.Tensor.contiguous, 1),
    (channels_first_seen_as_last, torch.Tensor.contiguous, -1),  # MaxViT: the branch output comes from windows
], ids=["NCHW", "channels-last", "NCHW seen as NHWC"])
def test_the_result_has_the_memory_format_of_the_stream(stream, branch, dim, how):
    x, f = pair((2, 5, 4, 3), torch.float32)
    x, f = stream(x), branch(f)
    update = {
        "eager": functools.partial(residual_update, dim=dim),
        "compiled": torch.compile(functools.partial(residual_update, dim=dim), fullgraph=True, backend="aot_eager"),
        "plain": lambda x, f: plain_update(x, f, 0.0, 1.0, [dim], 1e-6),
        "scripted": lambda x, f: torch.jit.script(plain_update)(x, f, 0.0, 1.0, [dim], 1e-6),
    }[how]
    y = update(x.requires_grad_(), f)
    assert y.stride() == (x + f).stride() == x.stride() != f.stride()
    tolerance = {} if how == "scripted" else dict(rtol=0, atol=0)
    torch.testing.assert_close(y, residual_update(x, f, dim=dim), **tolerance)


# --------------------------------------------------------------------------------------- memory and compilers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layouts", ["contiguous_format", "channels_last", "channels_last contiguous_format"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_large_tensors_reuse_memory_and_change_no_bit(training, layouts, dtype, monkeypatch):
    # Memory is not reused inside a dispatch mode. Ignore the mode Allocations, which measures the reuse.
    monkeypatch.setattr(formula, "is_eager", lambda *_: True)
    monkeypatch.setattr("timm_ortho.update.gradient.is_eager", lambda *_: True)
    monkeypatch.setattr(functional, "is_eager", lambda *_: True)
    formats = [getattr(torch, name) for name in layouts.split()]
    x, f = (tensor.to(memory_format=layout) for tensor, layout in
            zip(pair((2, 64, 48, 48), dtype), (formats[0], formats[-1]), strict=True))
    kept = x.clone(), f.clone()
    for weights in ((0.0, 1.0), (0.3, 0.7)):
        stream = x.detach().requires_grad_(training)
        with Allocations() as taken:
            y = residual_update(stream, f, parallel=weights[0], orthogonal=weights[1], dim=1)
        if layouts == "contiguous_format" and dtype == torch.float32 and weights == (0.0, 1.0):
            assert sum(size == x.nbytes for size in taken.bytes) == 1
        expected = plain_update(x, f, *weights, [1], 1e-6)
        assert torch.equal(y, expected)
        assert y.stride() == expected.stride()
    assert torch.equal(x, kept[0])
    assert torch.equal(f, kept[1])


class Mutations(TorchDispatchMode):
    """Record the names of operations that change an argument."""

    def __init__(self):
        super().__init__()
        self.names, self.count = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        self.names += [func.name()] * func._schema.is_mutable
        return func(*args, **(kwargs or {}))


LARGE = (2, 64, 48, 48)  # so large that memory is reused, unless a mode is active


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 3, 3), LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("weights", "keep"), [((0.0, 1.0), "output"), ((0.0, 1.0), "branch"), ((0.3, 0.7), "output"),
                                               ("learned", "output")], ids=str)
def test_recording_modes_see_no_in_place_operation(weights, keep, shape, dtype):
    x, f = pair(shape, dtype)
    a, b = (torch.tensor(w, requires_grad=True) for w in (0.3, 0.7)) if weights == "learned" else weights
    arguments = dict(parallel=a, orthogonal=b, dim=1, keep=keep)
    with Mutations() as recorded:
        residual_update(x, f, **arguments)  # without gradients
        x, f = x.requires_grad_(), f.requires_grad_()
        y = residual_update(x, f, **arguments)
        gradient, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert recorded.count > 20
    assert set(recorded.names) <= {"aten::detach_"}  # called by autograd
    observed = y.detach(), gradient.detach()
    y = residual_update(x, f, **arguments)  # computed without the recording mode
    assert torch.equal(y, observed[0])
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], observed[1])


class Update(torch.nn.Module):
    def forward(self, x, f):
        return residual_update(x, f) + residual_update(x, f, parallel=0.25, dim=(1, 2))


def test_fx_records_the_plain_formula():
    x, f = pair((2, 3, 4))
    with torch.device("cpu"):  # a function mode
        traced = torch.fx.symbolic_trace(Update())
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets.count(plain_update) == 2
    torch.testing.assert_close(traced(x, f), Update()(x, f))


@pytest.mark.filterwarnings("ignore:.*get_attr Node with no underlying reference:UserWarning")  # raised in torch
@pytest.mark.parametrize("leaf", [torch.Tensor, torch.nn.Parameter])
def test_linearize_gives_the_derivative_at_every_call(leaf):
    x, v = pair((4, 2048, 16))
    weight = leaf(pair((16, 16), seed=1)[0])
    _, derivative = torch.func.linearize(lambda x: residual_update(x, x @ weight), x)
    expected = torch.func.jvp(lambda x: residual_update(x, x @ weight), (x,), (v,))[1]
    for _ in range(3):
        torch.testing.assert_close(derivative(v), expected)


@both
def test_selective_checkpointing_can_save_any_result(backend):
    def block(x):
        return residual_update(x.sin(), (x @ weight).tanh(), backend=backend).cos()

    def save_all(context, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE

    x, weight = pair((4, 2048, 16))[0].requires_grad_(), pair((16, 16), seed=1)[0].requires_grad_()
    y = checkpoint(block, x, use_reentrant=False,
                   context_fn=functools.partial(create_selective_checkpoint_contexts, save_all))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, weight)),
                               torch.autograd.grad(block(x).sum(), (x, weight)))


@both
def test_a_graph_of_make_fx_can_be_differentiated(backend):
    x, f = pair(LARGE, torch.float32)
    graph = make_fx(functools.partial(residual_update, dim=1, backend=backend))(x, f)
    x, f = x.requires_grad_(), f.requires_grad_()
    g = pair(LARGE, torch.float32, seed=2)[0]
    torch.testing.assert_close(torch.autograd.grad(graph(x, f), (x, f), g),
                               torch.autograd.grad(residual_update(x, f, dim=1), (x, f), g))


def test_export_with_an_in_place_activation_after_the_update():
    class Activated(torch.nn.Module):
        def forward(self, x, f):
            return residual_update(x, f).relu_()

    x, f = pair((2, 3, 4))
    program = torch.export.export(Activated(), (x, f)).run_decompositions()
    torch.testing.assert_close(program.module()(x, f), Activated()(x, f))


def test_compile_keeps_the_closed_form_without_a_graph_break():
    x, f = (t.requires_grad_() for t in pair((2, 3, 4)))
    recorder = EagerAndRecordGraphs()
    y = torch.compile(Update(), fullgraph=True, backend=recorder)(x, f)
    assert [str(node.target) for node in recorder.graphs[0].graph.nodes].count("autograd_function_apply") == 2
    backward = recorder.graphs[0].bwd_body_0.code
    assert "addcmul" in backward
    assert "contiguous" not in backward  # Dynamo copies all gradients if the backward pass reads a stride
    assert "of_x" not in backward  # the gradient of s is never needed in compiled code
    torch.testing.assert_close(y, Update()(x, f))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, f)), torch.autograd.grad(Update()(x, f).sum(), (x, f)))


@pytest.mark.parametrize(("amp", "memory_format"), [
    pytest.param(False, torch.contiguous_format, marks=pytest.mark.slow), (True, torch.channels_last)])
def test_compiled_code_keeps_a_few_numbers_per_projection(amp, memory_format):
    channels, images = 32, torch.randn(2, 32, 4, 4).contiguous(memory_format=memory_format)
    layers = torch.nn.Sequential(*(
        torch.nn.Sequential(torch.nn.BatchNorm2d(channels), torch.nn.Conv2d(channels, channels, 1)) for _ in range(3)))

    def kept(join):
        def forward(x):
            for layer in layers:
                x = join(x, layer(x))
            return x.square()

        torch._dynamo.reset()
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager_decomp_partition")
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return saved_bytes(lambda: compiled(images), list(layers.parameters()))

    projections, by_addition = len(layers) * images.numel() // channels, kept(torch.add)
    assert kept(functools.partial(residual_update, dim=1)) - by_addition <= 3 * 4 * projections
    assert kept(functools.partial(plain_formula, dim=1)) - by_addition > 8 * 4 * projections


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", [{}, dict(parallel=0.3), dict(parallel=0.3, orthogonal=0.7)])
def test_compiled_gradients_if_stream_and_branch_are_one_tensor(weights, backend):
    """torch 2.11 halved the gradient of a tensor that is passed twice to an autograd function."""
    x, _ = pair((2, 3, 4))
    x.requires_grad_()
    g = torch.randn_like(x)

    def update(x):
        return residual_update(x, x, **weights)

    expected = torch.autograd.grad(update(x), x, g)
    torch.testing.assert_close(  # y = (1 + a) x, apart from eps
        expected[0], (1.0 + weights.get("parallel", 0.0)) * g, rtol=0, atol=1e-4)
    compiled = torch.compile(update, fullgraph=True, backend=backend)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x, g), expected)


# ------------------------------------------------------------------------------------------------- bad input
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused_but_their_packed_tokens_are_not(layout):
    x, f = (torch.nested.nested_tensor([torch.randn(length, 8) for length in (3, 5)], layout=layout) for _ in range(2))
    for inputs in ((x, f), (torch.ones(2, 5, 8), f)):
        with pytest.raises(ValueError, match=r"nested tensors are not supported: pass their packed tokens, x\.values"):
            residual_update(*inputs)
    y = residual_update(x.values(), f.values())
    one, branch = (torch.cat(samples.unbind()).view_as(y) for samples in (x, f))
    torch.testing.assert_close(y, residual_update(one, branch))


X = torch.ones(2, 3, 4)


@pytest.mark.parametrize(("args", "kwargs", "words"), [
    ((X, torch.ones(2, 3, 5)), {}, ["same shape", "(2, 3, 4)", "(2, 3, 5)"]),
    ((X, torch.ones(3, 4)), {}, ["same shape", "(2, 3, 4)", "(3, 4)"]),  # shapes that could be broadcast
    ((X, X.long()), {}, ["floating-point", "torch.int64", "(2, 3, 4)"]),
    ((X, X.to("meta")), {}, ["same device", "x on cpu", "f on meta", "(2, 3, 4)"]),
    ((X, X), {"dim": 3}, ["dim", "[-3, 2]", "got 3", "(2, 3, 4)"]),
    ((X, X), {"dim": (1, -2)}, ["different axes", "(1, -2)"]),
    ((X, X), {"dim": ()}, ["one or more", "()"]),
    ((X, X), {"dim": "x"}, ["dim must be a whole number, a tuple of whole numbers or None, got 'x'"]),
    ((X, X), {"dim": (0, 1.0)}, ["dim must be a whole number", "got (0, 1.0)"]),
    ((X[0, 0], X[0, 0]), {"dim": None}, ["one or more", "None", "(4,)"]),  # the only axis is the batch
    ((X, X), {"eps": 0.0}, ["eps must be in [2**-126, 2**127]", "0.0"]),
    ((X, X), {"eps": float("nan")}, ["eps must be in", "nan"]),
    ((X, X), {"eps": float("inf")}, ["eps must be in", "inf"]),
    ((X, X), {"parallel": torch.ones(2)}, ["parallel", "0-d", "(2,)"]),
    ((X, X), {"parallel": torch.tensor(True)}, ["parallel", "not boolean", "torch.bool"]),
    ((X, X), {"orthogonal": "0.5"}, ["orthogonal", "0-d", "'0.5'"]),
    ((X, X), {"orthogonal": True}, ["orthogonal", "0-d", "True"]),
    ((X, X), {"keep": "both"}, ["keep", "'both'", "'branch'"]),
])
def test_bad_input_of_the_update(args, kwargs, words):
    for backend in (None, *BACKENDS):
        with pytest.raises(ValueError) as error:  # noqa: PT011 the message is checked below
            residual_update(*args, **kwargs, backend=backend)
        assert all(word in str(error.value) for word in words), error.value
    if not {"parallel", "orthogonal", "keep"} & set(kwargs):
        with pytest.raises(ValueError):  # noqa: PT011
            decompose(*args, **kwargs)
