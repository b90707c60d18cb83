"""The backends `torch` and `triton`: exact results, launches and memory. test_parity.py compares them with float64.

Without a CUDA device, tests/conftest.py makes the kernels run in Triton's interpreter.
"""
import itertools
from contextlib import nullcontext

import pytest
import timm
import torch
from helpers.allocations import Allocations
from helpers.kernel_cases import (
    DEVICE,
    EPS,
    HALF,
    LAYOUTS,
    SINGLE,
    both,
    kernels,
    layouts,
    needs_triton,
    tensors,
    weight,
)
from helpers.parity import results

from timm_ortho import connect
from timm_ortho.functional import residual_update
from timm_ortho.update import backend as backends, formula

pytestmark = pytest.mark.usefixtures("no_default_backend", "auto_is_triton")


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
        launch(kernels.addresses_of(*pointers), *pointers)
    assert [how for how, *_ in kernel.launches] == ["jit", "again", "jit", "again"]  # an address of 4 bytes more: jit
    assert {grid for _, grid, *_ in kernel.launches} == {(7,), (7, 1, 1)}
    assert all(args[1:] == (None, 0.5, 3) for _, _, args, *_ in kernel.launches)
    kernel.pre_run_hooks.append(print)
    launch(0, aligned, None)
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
        launch(0, torch.zeros(4))
    assert [how for how, *_ in kernel.launches] == ["jit", "jit"]


# ---------------------------------------------------------------------------------------------- memory layout
def nhwc(t):
    return t.contiguous(memory_format=torch.channels_last)


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


@needs_triton
@pytest.mark.parametrize("keep", ["output", "branch"])
@pytest.mark.parametrize("shape", [(2, 6, 5, 4), (1, 6, 5, 4), (2, 1, 5, 4)], ids=str)
def test_hooks_of_saved_tensors_may_change_their_layout(shape, keep):
    """`torch.autograd.graph.save_on_cpu(pin_memory=True)` returns channels-last tensors as contiguous tensors."""
    x, f = (nhwc(t).requires_grad_() for t in tensors(shape)[:2])
    g = nhwc(torch.randn(shape, device=DEVICE))
    found = []
    for hooks in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t)):
        with hooks:
            y = residual_update(x, f, dim=1, keep=keep, backend="triton")
        found.append(torch.autograd.grad(y, (x, f), g))
    assert all(map(torch.equal, *found))


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

    first, second = (results(update, dict(x=x, f=f, a=a, b=b), "xfab", g) for _ in range(2))
    # The deterministic mode fills new memory with NaN, which would show in results.
    assert all(torch.isfinite(result).all() for result in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------------- plans
CHANGES = {  # of a call with a stream of shape [2, 3, 20] and the defaults
    "shape": lambda x, f: ((x[:1], f[:1]), {}),
    "strides": lambda x, f: ((x.mT.contiguous().mT, f.mT.contiguous().mT), {}),
    "strides of x": lambda x, f: ((x.mT.contiguous().mT, f), {}),
    "strides of f": lambda x, f: ((x, f.mT.contiguous().mT), {}),
    "dtypes": lambda x, f: ((x.double(), f.double()), {}),
    "dim": lambda x, f: ((x, f), dict(dim=1)),
    "eps": lambda x, f: ((x, f), dict(eps=9.0)),
    "parallel": lambda x, f: ((x, f), dict(parallel=0.5)),
    "orthogonal": lambda x, f: ((x, f), dict(orthogonal=0.5)),
    "learned parallel": lambda x, f: ((x, f), dict(parallel=weight("a"))),
    "learned orthogonal": lambda x, f: ((x, f), dict(orthogonal=weight("b"))),
}


@needs_triton
@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_used_again_only_for_its_own_case(change):
    case = tensors((2, 3, 20))[:2], {}
    for (x, f), arguments in (case, CHANGES[change](*case[0]), case):
        measured, expected = (
            results(lambda x, f: residual_update(x, f, backend=backend, **arguments), dict(x=x, f=f), "xf",  # noqa: B023
                    torch.ones_like(x)) for backend in ("triton", "torch"))
        torch.testing.assert_close(measured, expected)


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
