"""The backends `torch` and `triton`: comparison with the float64 oracle, and memory.

Without a CUDA device, tests/conftest.py makes the kernels run in Triton's interpreter.
"""
import itertools
import math

import pytest
import timm
import torch
from helpers.allocations import Allocations
from helpers.kernel_cases import (
    BRAIN,
    DEVICE,
    DOUBLE,
    EPS,
    HALF,
    INTERPRETED,
    LAYOUTS,
    SINGLE,
    WEIGHTS,
    both,
    each_path,
    kernels,
    layouts,
    needs_triton,
    run,
    tensors,
    weight,
)
from helpers.oracle import rounded, truth
from torch import Tensor

from timm_ortho import connect
from timm_ortho.functional import residual_update
from timm_ortho.update import backend as backends, formula

pytestmark = pytest.mark.usefixtures("no_default_backend", "auto_is_triton")


# --------------------------------------------------------------------------------------- parity with the oracle
def last_place(magnitude, dtype):
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(magnitude)) if magnitude else 0.0


def error(result, truth):
    return (result.double() - truth).abs().max().item() if truth.numel() else 0.0


def check_against_truth(backend, inputs, g, dim, keep="output", needed=None, of=lambda x, f, a, b: (x, f, a, b)):
    """Check y and gradients.

    An error must be at most twice the error of ``oracle.rounded``, plus 0.5 (half precision) to 16 (float64) units in
    the last place.
    """
    def ours(**inputs):
        x, f, a, b = of(**inputs)
        return residual_update(x, f, parallel=a, orthogonal=b, dim=dim, eps=EPS, keep=keep, backend=backend)

    def formula(update, inputs):
        dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
        return update(*of(**inputs), dims, EPS)

    needed = needed or [name for name, t in inputs.items() if isinstance(t, Tensor)]
    exact = {name: t.double() if isinstance(t, Tensor) else t for name, t in inputs.items()}
    oracle = run(lambda **inputs: formula(truth, inputs), exact, needed, g.double())
    reference = run(lambda **inputs: formula(rounded, inputs), inputs, needed, g)
    measured = run(ours, inputs, needed, g)
    for name, expected in oracle.items():
        got, magnitude = measured[name], expected.abs().max().item() if expected.numel() else 0.0
        if name in ("a", "b"):  # their gradients are sums of large rounded terms that cancel
            alone = {"a": (1.0, 0.0), "b": (0.0, 1.0)}[name]
            part = formula(truth, {**exact, **dict(zip("ab", alone, strict=True))}) - of(**exact)[0]
            magnitude = (part * g).abs().sum().item()
        units = {DOUBLE: 16.0, SINGLE: 2.0}.get(got.dtype, 0.5)  # half-precision results are rounded once
        if got.dtype == BRAIN and INTERPRETED and backend != "torch":  # the interpreter truncates and does not round
            units = 1.0
        assert (got.dtype, got.shape) == (reference[name].dtype, expected.shape), name
        allowed = 2 * error(reference[name], expected) + units * last_place(magnitude, got.dtype)
        assert error(got, expected) <= allowed, name
    return measured


def check_case(backend, shape, dim, dtypes=(SINGLE, SINGLE), weights=(0.0, 1.0), keep="output", needed=None):
    x, f, g = tensors(shape, dtypes)
    a, b = (weight(w, DOUBLE if g.dtype == DOUBLE else SINGLE) for w in weights)
    measured = check_against_truth(backend, dict(x=x, f=f, a=a, b=b), g, dim, keep, needed)
    assert measured["y"].dtype == (x + f).dtype


@each_path
@layouts
@pytest.mark.parametrize(("weights", "keep"), [((0.0, 1.0), "branch"), *((w, "output") for w in WEIGHTS)], ids=str)
def test_as_exact_as_the_plain_formula(backend, layout, weights, keep):
    check_case(backend, *LAYOUTS[layout], weights=weights, keep=keep)


@each_path
@layouts
@pytest.mark.parametrize("dtypes", [
    (DOUBLE, DOUBLE), (HALF, HALF), (BRAIN, BRAIN), (SINGLE, BRAIN), (HALF, BRAIN), (BRAIN, SINGLE), (DOUBLE, HALF),
], ids=str)
def test_as_exact_as_the_plain_formula_in_other_dtypes(backend, layout, dtypes):
    check_case(backend, *LAYOUTS[layout], dtypes)
    check_case(backend, *LAYOUTS[layout], dtypes, ("a", "b"))


@each_path
@pytest.mark.parametrize(("shape", "dim"), [
    ((1, 1, 3), -1), ((37, 11, 1), -1), ((3, 2, 64), -1), ((2, 3, 8192), -1), ((2, 3, 9000), -1), ((2, 40000), -1),
    ((5, 33, 9, 11), None), ((5, 33, 9, 11), (2, 3)), ((5, 33, 9, 11), (1, -1)), ((5, 33, 9, 11), (-1, 1, 2)),
    ((50, 6), 0), ((4, 6, 5), (0, 1, 2)), ((300,), 0), ((2, 1024, 5), 1), ((1, 2048, 5), 1),
    ((1, 2049, 5), 1), ((1, 8, 1, 300), 1),
    ((0, 5, 3), -1), ((0, 5, 3), None), ((3, 0), -1),
], ids=str)
@pytest.mark.parametrize("weights", [(0.0, 1.0), ("a", "b")], ids=str)
def test_as_exact_as_the_plain_formula_in_any_shape(backend, shape, dim, weights):
    check_case(backend, shape, dim, weights=weights)


@each_path
@layouts
@pytest.mark.parametrize("needed", ["x", "f", "a", "b", "xa", "fb"])
def test_gradients_of_some_inputs(backend, layout, needed):
    weights = tuple(name if name in needed else value for name, value in (("a", 0.0), ("b", 1.0)))
    check_case(backend, *LAYOUTS[layout], weights=weights, needed=needed)


@both
def test_linear_weights_are_plain_addition_bit_for_bit(backend):
    x, f, _ = tensors((3, 5, 20))
    assert torch.equal(residual_update(x, f, parallel=1.0, orthogonal=1.0, backend=backend), x + f)


@both
def test_a_zero_stream_adds_the_whole_branch(backend):
    _, f, _ = tensors((3, 5, 20))
    assert torch.equal(residual_update(torch.zeros_like(f), f, backend=backend), f)


@needs_triton
@pytest.mark.parametrize("width", [8193, 16384, 16385, 2**20 + 1, 2**24, 2**24 + 1, 2**27 - 1, 2**31 - 1])
def test_pieces_cover_a_row(width):
    tiles = kernels.tiles_of(3, width, 1)
    assert tiles.programs == 3 * tiles.pieces
    assert (tiles.pieces - 1) * tiles.piece_width < width <= tiles.pieces * tiles.piece_width
    assert tiles.pieces <= tiles.BLOCK_PIECES <= kernels.MOST_PIECES


# ------------------------------------------------------------------------------------------- launches
class MockKernel:
    """A kernel that records how it is launched: compiled again ("jit"), or directly ("again")."""

    def __init__(self):
        self.pre_run_hooks, self.launches = [], []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches.append(("jit", grid, args, options))
            return self
        return launch if len(grid) == 1 else lambda *args: self.launches.append(("again", grid, args))


@needs_triton
def test_a_compiled_kernel_is_launched_again_directly(monkeypatch):
    monkeypatch.setattr(kernels, "TAKES_ALL_ARGUMENTS", True)  # depends on the release of Triton
    kernel, aligned = MockKernel(), torch.zeros(9)
    launch = kernels.Launch(kernel, 7, (0.5, 3), 4, torch.device("cpu"))
    for pointers in ((aligned, None), (aligned, None), (aligned[1:], None), (aligned, None)):
        launch(*pointers)
    assert [how for how, *_ in kernel.launches] == ["jit", "again", "jit", "again"]  # an address of 4 bytes more: jit
    assert {grid for _, grid, *_ in kernel.launches} == {(7,), (7, 1, 1)}
    assert all(args[1:] == (None, 0.5, 3) for _, _, args, *_ in kernel.launches)
    kernel.pre_run_hooks.append(print)
    launch(aligned, None)
    assert kernel.launches[-1][0] == "jit"


@needs_triton
@pytest.mark.parametrize("reason", ["the interpreter", "an unknown release"])
def test_kernels_that_cannot_be_launched_directly(reason, monkeypatch):
    kernel = MockKernel()
    if reason == "an unknown release":
        monkeypatch.setattr(kernels, "TAKES_ALL_ARGUMENTS", False)
    else:
        kernel = type("Interpreted", (MockKernel,), {"__getitem__": lambda self, grid: lambda *args, **options: (
            self.launches.append(("jit", grid, args, options)))})()
    launch = kernels.Launch(kernel, 7, (), 4, torch.device("cpu"))
    for _ in range(2):
        launch(torch.zeros(4))
    assert [how for how, *_ in kernel.launches] == ["jit", "jit"]


# ---------------------------------------------------------------------------------------------- memory layout
def nhwc(t):
    return t.contiguous(memory_format=torch.channels_last)


def swapped(t):
    return t.transpose(1, 3).contiguous().transpose(1, 3)


def constant(t):
    return t[:1, :1, :1, :1].expand_as(t)  # all strides are 0, as in the gradient of y.sum()


def unaligned(t):
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)  # aligned to 4 bytes, not to 16


STRIDES = {
    "sliced": lambda x, f, g: (x[:, ::2], f[:, 1::2], g[:, 3:]),
    "narrowed": lambda x, f, g: (x[..., 1:], f[..., :3], g[..., :3]),
    "transposed": lambda x, f, g: (x.transpose(1, 3), f.transpose(1, 3), g.transpose(1, 3)),
    "dense in another order": lambda x, f, g: (swapped(x), f, nhwc(g)),
    "channels-last": lambda x, f, g: (nhwc(x), nhwc(f), nhwc(g)),
    "channels-last stream": lambda x, f, g: (nhwc(x), f, g),
    "channels-last branch": lambda x, f, g: (x, nhwc(f), g),
    "channels-last gradient": lambda x, f, g: (x, f, nhwc(g)),
    "expanded stream": lambda x, f, g: (x[:1].expand_as(x), f, g),
    "expanded stream and branch": lambda x, f, g: (x[:, :1].expand_as(x), f[:, :, :1].expand_as(f), g),
    "expanded gradient": lambda x, f, g: (x, f, constant(g)),
    "channels-last with an expanded gradient": lambda x, f, g: (nhwc(x), nhwc(f), constant(g)),
    "unaligned": lambda x, f, g: (unaligned(x), unaligned(f), unaligned(g)),
}


@each_path
@pytest.mark.parametrize("dim", [0, 1, -1, None, (0, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("strides", STRIDES)
def test_any_strides(backend, strides, dim):
    x, f, g = STRIDES[strides](*tensors((2, 6, 5, 4)))
    results = check_against_truth(backend, dict(x=x, f=f, a=0.0, b=1.0), g, dim)
    assert {t.stride() for t in results.values()} == {torch.empty_like(x).stride()}


@both
@pytest.mark.parametrize("shape", [(2, 6, 5, 4), (1, 6, 5, 4), (2, 1, 5, 4), (2, 6, 1, 1)], ids=str)
def test_saved_sums_have_the_shape_of_the_stream(backend, shape):
    x, f, _ = tensors(shape)
    formats = x, nhwc(x)
    for x, dim in itertools.product(formats, (1, -1, (1, 2, 3))):
        dims = [dim] if isinstance(dim, int) else list(dim)
        if backend == "triton":
            plan = kernels.Plan(x, f, tuple(dims), EPS, 0.0, 1.0, False)
            y, s, n = plan.unpacked(plan.update(x, f))
        else:
            y, s, n = formula.update(x, f, 0.0, 1.0, dims, EPS)
        torch.testing.assert_close(n, (x * x).sum(dims, keepdim=True) + EPS)
        torch.testing.assert_close(s, (x * f).sum(dims, keepdim=True) / n)
        assert y.stride() == torch.empty_like(x).stride()


SHARED = {
    "the same": lambda x: (x, x),
    "transposed": lambda x: (x, x.transpose(0, 1)),
    "overlapping": lambda x: (x[:-1], x[1:]),
    "halves": lambda x: x.chunk(2, 1),
}


@each_path
@pytest.mark.parametrize("share", SHARED)
def test_stream_and_branch_that_share_memory(backend, share):
    x, _, _ = tensors((8, 8, 5))
    g = tensors(SHARED[share](x)[0].shape, seed=1)[2]
    check_against_truth(backend, dict(x=x, a=0.5, b=1.0), g, -1, of=lambda x, a, b: (*SHARED[share](x), a, b))


# ------------------------------------------------------------------------------------------------ determinism
@pytest.fixture(params=[False, True], ids=["", "deterministic mode"])
def deterministic(request):
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


@both
@layouts
@pytest.mark.usefixtures("deterministic")
def test_results_are_reproducible(backend, layout):
    shape, dim = LAYOUTS[layout]
    x, f, g = tensors(shape)
    a, b = weight("a"), weight("b")

    def update(x, f, a, b):
        return residual_update(x, f, parallel=a, orthogonal=b, dim=dim, backend=backend)

    first, second = (run(update, dict(x=x, f=f, a=a, b=b), "xfab", g) for _ in range(2))
    # The deterministic mode fills new memory with NaN, which would show in results.
    assert all(torch.isfinite(result).all() for result in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------ memory in inference
@pytest.fixture
def allocations(monkeypatch):
    """Return a function that runs an update and returns the size of each allocation in bytes.

    Kernels do not run while a dispatch mode is active, so the function hides the mode that counts allocations.
    """
    def allocated(backend, x, f, **kwargs):
        monkeypatch.setattr(backends, "dispatch_mode_is_active", lambda: False)
        with torch.no_grad():
            residual_update(x, f, backend=backend, **kwargs)  # the first call makes a plan
            with Allocations() as counted:
                residual_update(x, f, backend=backend, **kwargs)
        return counted.bytes

    return allocated


@needs_triton
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("weights", [(0.0, 1.0), ("a", "b")], ids=str)
@pytest.mark.parametrize("layout", ["row", "column", "long column", "channels-last"])
def test_inference_with_kernels_allocates_only_the_result(layout, weights, dtype, allocations):
    shape, dim = LAYOUTS.get(layout, LAYOUTS["column"])
    x, f, _ = tensors(shape, (dtype, dtype))
    if layout == "channels-last":
        x, f = nhwc(x), nhwc(f)
    a, b = (weight(w) for w in weights)
    assert allocations("triton", x, f, dim=dim, parallel=a, orthogonal=b) == [x.numel() * x.element_size()]


@needs_triton
def test_inference_in_pieces_allocates_two_numbers_per_piece(allocations):
    shape, dim = LAYOUTS["cut row"]
    x, f, _ = tensors(shape)
    assert sorted(allocations("triton", x, f, dim=dim)) == [2 * 4 * 2 * 2, 4 * x.numel()]


# ---------------------------------------------------------------------------------------------- on a GPU only
@pytest.mark.gpu
@layouts
def test_a_cuda_graph_captures_forward_and_backward(layout):
    shape, dim = LAYOUTS[layout]
    inputs = [t.requires_grad_() for t in (*tensors(shape)[:2], weight("a"), weight("b"))]
    g = tensors(shape)[2]

    def step():
        x, f, a, b = inputs
        y = residual_update(x, f, parallel=a, orthogonal=b, dim=dim, backend="triton")
        return [y.detach(), *torch.autograd.grad(y, inputs, g)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile before the capture
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t, new in zip((*inputs[:2], g), tensors(shape, seed=1), strict=True):
            t.copy_(new)
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns that this mode is a prototype
@layouts
def test_no_synchronisation_with_the_device(layout):
    shape, dim = LAYOUTS[layout]
    x, f, g = tensors(shape)
    x, f, a, b = (t.requires_grad_() for t in (x, f, weight("a"), weight("b")))
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = residual_update(x, f, parallel=a, orthogonal=b, dim=dim, backend="triton")
        torch.autograd.grad(y, (x, f, a, b), g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_inference_needs_only_the_memory_of_the_result():
    x, f, _ = tensors((64, 256, 512))
    with torch.no_grad():
        residual_update(x, f, backend="triton")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        residual_update(x, f, backend="triton")
        assert torch.cuda.max_memory_allocated() - before == 4 * x.numel()


def peak_memory(model, size):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.randn(8, 3, size, size, device=DEVICE)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


@pytest.mark.gpu
def test_peak_memory_of_a_training_step_equals_linear():
    ours = peak_memory(timm.create_model("vit_small_ortho").to(DEVICE).train(), 224)
    linear = peak_memory(connect(timm.create_model("vit_small_ortho"), "linear").to(DEVICE).train(), 224)
    assert ours <= 1.01 * linear
