"""The backends `torch` and `triton`: exact results, launches and memory. test_parity.py compares them with float64.

Without a CUDA device, tests/conftest.py makes the kernels run in Triton's interpreter.
"""

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
    layouts,
    needs_triton,
    nhwc,
    planning,
    tensors,
    weight,
)
from helpers.parity import results

from timm_ortho import connect
from timm_ortho.functional import residual_update

pytestmark = pytest.mark.usefixtures("no_default_backend", "auto_is_triton")


@both
def test_linear_weights_are_plain_addition_bit_for_bit(backend):
    x, f, _ = tensors((3, 5, 20))
    assert torch.equal(residual_update(x, f, parallel=1.0, orthogonal=1.0, backend=backend), x + f)
    assert torch.equal(residual_update(torch.zeros_like(f), f, backend=backend), f)


def plan_of(x, f, dims, **arguments):
    assert planning.view_of(x, f, dims) is not None
    return planning.Plan(x, f, dims, EPS, **arguments)


@needs_triton
@pytest.mark.parametrize("width", [8193, 16384, 16385, 2**20 + 1, 2**24, 2**24 + 1, 2**27 - 1, 2**31 - 1])
def test_pieces_cover_a_row(width):
    plan = plan_of(*(torch.empty(3, width, device="meta") for _ in range(2)), [1])
    _, pieces, piece_width, *_ = plan.sums_launch.constants
    assert plan.sums_launch.programs == 3 * pieces
    assert (pieces - 1) * piece_width < width <= pieces * piece_width
    assert pieces <= plan.constants[-1] <= planning.MOST_PIECES


@needs_triton
def test_offsets_in_a_sample_fit_32_bits():
    """The kernels add 32-bit offsets to the 64-bit offset of a program's first element."""
    for inner, expected in ((2**20 - 1, True), (2**20, False)):
        x = torch.empty(2, 2048, inner, device="meta")
        assert (planning.view_of(x, x, [1]) is not None) is expected


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
    "keep": lambda x, f: ((x, f), dict(keep="branch")),
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
@needs_triton
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, "channels-last"])
def test_inference_with_kernels_allocates_only_the_result(layout, dtype):
    """And two numbers for each piece of a long row."""
    shape, dim = LAYOUTS.get(layout, LAYOUTS["column"])
    x, f, _ = (nhwc(t) if layout == "channels-last" else t for t in tensors(shape, (dtype, dtype)))
    plan = plan_of(x, f, list(range(1, x.dim())) if dim is None else [dim])
    with Allocations() as counted:
        plan(x, f)
    parts = [2 * 4 * 2 * 2] if layout == "cut row" else []
    assert sorted(counted.bytes) == [*parts, x.numel() * x.element_size()]


# ---------------------------------------------------------------------------------------------- on a GPU only
@pytest.mark.gpu
@layouts
def test_a_cuda_graph_captures_forward_and_backward(layout):
    shape, dim = LAYOUTS[layout]
    inputs = [t.requires_grad_() for t in tensors(shape)[:2]]
    g = tensors(shape)[2]

    def step():
        y = residual_update(*inputs, dim=dim, backend="triton")
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
        for t, new in zip((*inputs, g), tensors(shape, seed=1), strict=True):
            t.copy_(new)
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns that this mode is a prototype
@layouts
def test_no_synchronisation_with_the_device(layout):
    shape, dim = LAYOUTS[layout]
    x, f, g = tensors(shape)
    x, f = x.requires_grad_(), f.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for backend in ("triton", "auto"):
            y = residual_update(x, f, dim=dim, backend=backend)
            torch.autograd.grad(y, (x, f), g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
