"""The kernel for the maps of the stream against float64, when it runs, and what becomes of it in compilers.

Without a CUDA device it runs in Triton's interpreter, see conftest.py.
"""
import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from timm_ortho import functional, skips
from timm_ortho.skips import create_skip

pytest.importorskip("triton")
from timm_ortho import skip_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64

pytestmark = pytest.mark.skipif(
    (functional._why_not_triton(*(torch.ones(1, device=DEVICE) for _ in range(2)))
     or skip_kernels.why_not([], 2, 1, SINGLE)) is not None, reason="the kernel cannot run here")

MAPS = {  # skip, channels, arguments
    "one matrix": ("orthogonal_random", 64, {}),
    "one small matrix": ("orthogonal_tp", 6, {}),
    "two matrices": ("orthogonal_random", 256, {}),
    "two padded matrices": ("orthogonal_random", 42 * 15, {}),
    "the largest two": ("orthogonal_random", 4096, {}),
    "three matrices": ("orthogonal_random", 2 * 7 * 11 * 13, {}),
    "means": ("idempotent_mr", 96, {"branches": 4}),
    "what means leave": ("idempotent_cmr", 42, {}),
    "mean of one branch": ("idempotent_mr", 42, {"branches": 1}),
    "multiple": ("scaled", 42, {"count": 7}),
}
LAYOUTS = {  # shape of a stream of c channels with its channel axis, and how it lies in memory
    "tokens": lambda c: ((2, 5, c), -1, lambda x: x),
    "NCHW": lambda c: ((2, c, 3, 3), 1, lambda x: x),
    "channels-last": lambda c: ((2, c, 3, 3), 1, lambda x: x.to(memory_format=torch.channels_last)),
    "weights": lambda c: ((c, 5, 1, 1), 0, lambda x: x),
    "sliced": lambda c: ((2, 5, c), -1, lambda x: torch.cat([x, x], -1)[..., ::2]),
    "expanded": lambda c: ((3, 5, c), -1, lambda x: x[:1].expand(3, -1, -1)),
    "one pixel": lambda c: ((1, c, 1, 1), 1, lambda x: x),
    "empty": lambda c: ((0, 5, c), -1, lambda x: x),
}
FEW = ("two padded matrices", "means")


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.delenv("TIMM_ORTHO_BACKEND", raising=False)
    torch.manual_seed(0)


@pytest.fixture
def launches(monkeypatch):
    """Asks for the kernel, and collects the numbers of rows of the matrices that it was launched for."""
    found = []
    launched = skip_kernels.transform

    def transform(x, f, own, mean, branches, matrices, *rest):
        found.append([len(matrix) for matrix in matrices])
        return launched(x, f, own, mean, branches, matrices, *rest)

    monkeypatch.setenv("TIMM_ORTHO_BACKEND", "triton")
    monkeypatch.setattr(skip_kernels, "transform", transform)
    return found


@pytest.fixture
def auto(monkeypatch):
    """A call of it leaves the choice to "auto", whose tables take the kernel on this device too."""
    def choose():
        monkeypatch.setenv("TIMM_ORTHO_BACKEND", "auto")
        table = {(DEVICE, situation): "triton" for situation in ("eager", "inference", "compiled")}
        monkeypatch.setattr(functional, "AUTO", table)
        monkeypatch.setattr(skips, "_AUTO_FOR_PRODUCTS", table)
    return choose


def stream(layout, width, dtype=SINGLE):
    shape, dim, arranged = LAYOUTS[layout](width)
    return arranged(torch.randn(shape, dtype=DOUBLE).to(DEVICE, dtype)), dim


def truth(skip, x, f=None, transposed=False):
    p = skip.matrix().to(x.device)
    y = torch.einsum("ij,j...->i...", p.T if transposed else p, x.double().movedim(skip.dim, 0)).movedim(0, skip.dim)
    return y if f is None else y + f.double()


def check(skip, x, f, launches):
    """Result and gradients are those of the matrix; dtype and memory format are those of PyTorch's operations."""
    x, f = (None if t is None else t.detach().requires_grad_() for t in (x, f))
    y = skip.join(x, f)
    assert launches == [[len(matrix) for matrix in skip.matrices]]
    expected = skips.plain_skip(x, f, skip.own, skip.mean, skip.branches, skip.matrices, skip.dim)
    assert (y.dtype, y.shape, y.stride()) == (expected.dtype, expected.shape, torch.empty_like(x).stride())
    # the interpreter cuts bfloat16 off instead of rounding it
    tolerance = dict(rtol=torch.finfo(y.dtype).eps * (1 if y.dtype == BRAIN else 0.51), atol=5e-6)
    torch.testing.assert_close(y.double(), truth(skip, x, f), **tolerance)
    g = torch.randn_like(y)
    inputs = [t for t in (x, f) if t is not None]
    gradients = torch.autograd.grad(y, inputs, g)
    assert [gradient.dtype for gradient in gradients] == [t.dtype for t in inputs]
    torch.testing.assert_close(gradients[0].double(), truth(skip, g, transposed=True), **tolerance | dict(
        rtol=2 * torch.finfo(x.dtype).eps))
    if f is not None:
        torch.testing.assert_close(gradients[1], g.to(f.dtype))
    assert len(launches) == 2


@pytest.mark.parametrize("layout", ["tokens", "NCHW", "channels-last"])
@pytest.mark.parametrize("name", MAPS)
def test_matches_the_matrix(name, layout, launches):
    skip, width, arguments = MAPS[name]
    x, dim = stream(layout, width)
    check(create_skip(skip, width, dim=dim, **arguments), x, torch.randn_like(x), launches)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FEW)
def test_any_layout_without_a_branch(name, layout, launches):
    skip, width, arguments = MAPS[name]
    x, dim = stream(layout, width)
    check(create_skip(skip, width, dim=dim, **arguments), x, None, launches)


@pytest.mark.parametrize(("of_x", "of_f"), [
    (HALF, HALF), (BRAIN, BRAIN), (SINGLE, BRAIN), (BRAIN, SINGLE), (HALF, BRAIN)], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_rounds_once(name, of_x, of_f, launches):
    skip, width, arguments = MAPS[name]
    x, _ = stream("tokens", width, of_x)
    check(create_skip(skip, width, **arguments), x, torch.randn_like(x).to(of_f), launches)


def test_more_than_one_program(launches):
    """Blocks of pixels that end in the middle, and samples of NCHW that do."""
    for shape, dim in (((333, 12), -1), ((3, 12, 19, 19), 1)):
        launches.clear()
        check(create_skip("orthogonal_random", 12, dim=dim), torch.randn(shape, device=DEVICE), None, launches)


def test_a_branch_in_another_memory_format(launches):
    x, dim = stream("channels-last", 24)
    check(create_skip("orthogonal_tp", 24, dim=dim), x, torch.randn(x.shape, device=DEVICE), launches)


def test_second_derivatives(launches):
    skip, x = create_skip("orthogonal_random", 24), torch.randn(3, 24, device=DEVICE, requires_grad=True)
    first, = torch.autograd.grad(skip(x).pow(3).sum(), x, create_graph=True)
    second, = torch.autograd.grad(first.pow(2).sum(), x)
    p = skip.matrix(SINGLE).to(DEVICE)
    z = x @ p.T
    expected, = torch.autograd.grad(((3 * z * z) @ p).pow(2).sum(), x)
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-3)
    assert len(launches) > 2


@pytest.mark.parametrize("inner", [1, 49, 3136])
@pytest.mark.parametrize("name", MAPS)
def test_launches(name, inner):
    """Every pixel has a program that can hold it; pixels of NCHW are read side by side."""
    skip, width, arguments = MAPS[name]
    made = create_skip(skip, width, **arguments)
    rows = [len(matrix) for matrix in made.matrices[-2:]]
    shape = skip_kernels.shape_of(rows, width, made.branches)
    channels, held = shape.upper * shape.lower, shape.padded_upper * shape.padded_lower
    programs, where = skip_kernels.launch_of(100, channels, inner, shape, bool(rows))
    pixels = where["BLOCK_P"]
    assert programs * pixels >= 100 * inner
    assert channels <= held <= pixels * held <= 8192
    assert where["num_warps"] in (1, 2, 4, 8, 16)
    if inner > 1:
        assert pixels >= 16 or pixels * held >= 4096  # 32 bytes in half precision, or all that fit


@pytest.mark.parametrize(("skip", "width", "dtype", "reason"), [
    ("orthogonal_tp", 2 * 67, SINGLE, "64 rows at most"), ("orthogonal_tp", 12, DOUBLE, "are in float32"),
    ("idempotent_mr", 10000, SINGLE, "8192 channels at most"),
])
def test_other_maps_are_left_to_pytorch_or_refused(skip, width, dtype, reason, launches, auto):
    made, x = create_skip(skip, width), torch.randn(2, width, device=DEVICE, dtype=dtype)
    with pytest.raises(RuntimeError, match=f"'triton' cannot run for skip '{skip}': .*{reason}.*choose 'torch' or"):
        made(x)
    auto()
    torch.testing.assert_close(made(x).double(), truth(made, x), rtol=1e-5, atol=1e-5)
    assert launches == []


def test_older_triton_is_left_alone(launches, auto, monkeypatch):
    monkeypatch.setattr(skip_kernels, "RELEASE", (3, 2))
    skip, x = create_skip("orthogonal_tp", 12), torch.randn(2, 12, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"it takes Triton 3\.3 or newer"):
        skip(x)
    auto()
    torch.testing.assert_close(skip(x).double(), truth(skip, x))
    assert launches == []
    monkeypatch.setattr(skip_kernels, "RELEASE", (3, 3))
    skip(x)
    assert launches == [[12]]


def test_means_in_float64_stay_exact(launches):
    skip, x = create_skip("idempotent_cmr", 40, branches=5), torch.randn(3, 40, device=DEVICE, dtype=DOUBLE)
    torch.testing.assert_close(skip(x), truth(skip, x), rtol=0, atol=1e-15)
    assert len(launches) == 1


def test_a_branch_in_float64_is_added_in_float64(launches, auto):
    auto()
    for name, times in (("idempotent_cmr", 1), ("orthogonal_tp", 0)):
        launches.clear()
        skip, x, f = create_skip(name, 40), torch.zeros(3, 40, device=DEVICE), torch.randn(3, 40, dtype=DOUBLE)
        assert torch.equal(skip.add(x, f.to(DEVICE)).cpu(), f)
        assert len(launches) == times


# ----------------------------------------------------------------------------------------------- when it runs
@pytest.mark.parametrize(("name", "expected"), [
    ("orthogonal_tp", {"eager": True, "inference": True, "compiled": True}),
    ("idempotent_mr", {"eager": True, "inference": True, "compiled": False}),
])
def test_auto_on_a_gpu(name, expected, monkeypatch):
    with FakeTensorMode():  # on a GPU in name only
        x = torch.empty(2, 24, device="cuda", requires_grad=True)
    skip = create_skip(name, 24)
    runs = {"eager": skip._kernels(x, None) is skip_kernels}
    with torch.no_grad():
        runs["inference"] = skip._kernels(x, None) is skip_kernels
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    runs["compiled"] = skip._kernels(x, None) is skip_kernels
    assert runs == expected
    monkeypatch.setenv("TIMM_ORTHO_BACKEND", "torch")
    assert skip._kernels(x, None) is None


@pytest.mark.parametrize("name", ["orthogonal_tp", "idempotent_cmr"])
def test_compiled_code_runs_the_registered_operator(name, launches):
    skip = create_skip(name, 24)
    x, f, g = (torch.randn(2, 3, 24, device=DEVICE, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(skip.add(x, f), (x, f), g)
    eager = len(launches)
    torch._dynamo.reset()
    compiled = torch.compile(skip.add, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, f), skip.add(x, f))
    torch.testing.assert_close(torch.autograd.grad(compiled(x, f), (x, f), g), expected)
    assert len(launches) == eager + 1 + 1 + 2  # by eager mode, and compiled forward, forward and backward
    with pytest.raises(Exception, match="is for 24 channels on axis -1"):
        compiled(*torch.randn(2, 2, 3, 12, device=DEVICE))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own
@pytest.mark.parametrize("layout", ["tokens", "NCHW", "channels-last"])
@pytest.mark.parametrize("name", FEW)
def test_the_registered_operator_is_what_it_claims(name, layout):
    skip, width, arguments = MAPS[name]
    x, dim = stream(layout, width)
    made = create_skip(skip, width, dim=dim, **arguments)
    matrices = skips._factors(made, x.device, SINGLE)
    x = x.bfloat16().requires_grad_()
    for f in (None, torch.randn(x.shape, device=DEVICE, requires_grad=True)):
        torch.library.opcheck(torch.ops.timm_ortho.skip.default, (
            x, f, made.own, made.mean, made.branches, matrices, dim, False))


def test_what_is_recorded_knows_nothing_of_it(launches):
    """Files run where there is no Triton."""
    skip, x = create_skip("orthogonal_tp", 24), torch.randn(3, 24, device=DEVICE)
    for recorded in (
            torch.export.export(skip, (x,)).module(), torch.export.export(skip, (x,), strict=True).module(),
            torch.jit.trace(skip, x, check_trace=False)):
        torch.testing.assert_close(recorded(x).double(), truth(skip, x), rtol=1e-5, atol=1e-5)
        assert "timm_ortho.skip.default" not in str(recorded.graph)
    assert launches == []


@pytest.mark.parametrize("skip", ["orthogonal_random", "idempotent_cmr"])
def test_a_step_of_training_agrees_on_both_backends(skip, launches, monkeypatch):
    def gradients(backend):
        monkeypatch.setenv("TIMM_ORTHO_BACKEND", backend)
        torch.manual_seed(0)
        model = timm.create_model("resnetv2_18_cifar_ortho", width_factor=0.25, num_classes=10, skip=skip).to(DEVICE)
        images = torch.randn(2, 3, 16, 16).to(DEVICE, memory_format=torch.channels_last)
        model.to(memory_format=torch.channels_last)(images).square().mean().backward()
        return [p.grad for p in model.parameters()]

    found = gradients("triton")
    assert len(launches) >= 16  # of eight blocks, forward and backward
    launches.clear()
    torch.testing.assert_close(found, gradients("torch"), rtol=1e-3, atol=1e-4)
    assert launches == []


# ---------------------------------------------------------------------------------------------- on a GPU only
@pytest.mark.gpu
def test_a_cuda_graph_captures_forward_and_backward():
    skip = create_skip("orthogonal_random", 256)
    x, f, g = (torch.randn(64, 256, device="cuda", requires_grad=True) for _ in range(3))

    def step():
        return torch.autograd.grad(skip.add(x, f), x, g)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        g.copy_(torch.randn_like(g))
    graph.replay()
    torch.testing.assert_close(found.double(), truth(skip, g, transposed=True), rtol=1e-5, atol=1e-5)
