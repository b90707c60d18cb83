"""Compare every implementation of the update with the float64 oracle, on inputs drawn by the library hypothesis.

``oracle.rounded`` computes the update in float32 or float64 and rounds it once to the dtype under test. The errors of
an implementation, in results and gradients, must be at most three times the errors of ``oracle.rounded``, plus a few
units in the last place.
"""
import contextlib
import math

import pytest
import torch
from helpers.oracle import rounded, truth
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from timm_ortho.functional import residual_update
from timm_ortho.update import backend as backends

TRITON = backends.why_not_triton(torch.ones(1), torch.ones(1))
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EPS = 1e-3


@st.composite
def cases(draw, elements=4000):
    """Draw all arguments of the update, and the inputs that require gradients.

    Tensors are drawn as a shape, memory layouts, dtypes, a scale of x and a seed.
    """
    ndim = draw(st.integers(1, 4))
    shape = []
    for _ in range(ndim):
        room = max(1, elements // max(1, math.prod(shape)))
        shape.append(draw(st.integers(0 if not shape else 1, min(70, room))))
    axes = st.lists(st.integers(0, ndim - 1), min_size=1, unique=True)
    dims = [draw(st.sampled_from([d, d - ndim])) for d in draw(axes)]
    order = draw(st.permutations(range(ndim)))
    same = draw(st.booleans())
    weight = st.sampled_from(["learned", 0.0, 1.0, 0.3])
    return dict(
        shape=shape, dims=dims, orders=(order, order if same else draw(st.permutations(range(ndim)))),
        slices=draw(st.sampled_from([(1, 1), (2, 1), (1, 2)])),
        dtypes=draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES))) if draw(st.booleans())
        else (torch.float32, torch.float32),
        weights=draw(st.one_of(st.just((0.0, 1.0)), st.tuples(weight, weight))),
        masked=draw(st.booleans()), keep=draw(st.sampled_from(["output", "branch"])),
        requires_grad=draw(st.sampled_from(["xf", "x", "f", ""])), scale=draw(st.sampled_from([1e-3, 1.0, 30.0])),
        seed=draw(st.integers(0, 2 ** 16)))


def laid_out(generator, shape, order, step, dtype):
    """Return a random tensor whose axes have this order in memory, sliced with ``step`` along the innermost axis."""
    inverse = [order.index(axis) for axis in range(len(shape))]
    sizes = [shape[axis] for axis in order]
    sizes[-1] *= step
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)[..., ::step].permute(inverse)


def tensors(case):
    generator = torch.Generator().manual_seed(case["seed"])
    x, f = (laid_out(generator, case["shape"], order, step, dtype)
            for order, step, dtype in zip(case["orders"], case["slices"], case["dtypes"], strict=True))
    g = laid_out(generator, case["shape"], case["orders"][1], 1, torch.promote_types(x.dtype, f.dtype))
    mask = None
    if case["masked"]:
        sizes = [1 if d in {e % x.dim() for e in case["dims"]} and len(case["shape"]) > 1 else size
                 for d, size in enumerate(case["shape"])]
        mask = torch.rand(sizes, generator=generator) < 0.7
    return x * case["scale"], f, g, mask


def results(update, case, x, f, g, mask):
    """Return y and the gradients by name."""
    x, f = (t.detach().requires_grad_(name in case["requires_grad"]) for name, t in (("x", x), ("f", f)))
    acc = torch.float64 if x.dtype == torch.float64 or f.dtype == torch.float64 else torch.float32
    a, b = (torch.tensor(0.625, dtype=acc, requires_grad=bool(case["requires_grad"])) if w == "learned" else w
            for w in case["weights"])
    y = update(x, f, a, b, case["dims"], EPS, mask)
    inputs = {name: t for name, t in zip("xfab", (x, f, a, b), strict=True)
              if isinstance(t, torch.Tensor) and t.requires_grad}
    if not y.requires_grad:
        return {"y": y}
    gradients = torch.autograd.grad(y, list(inputs.values()), g.to(y.dtype), allow_unused=True)
    return {"y": y.detach(), **dict(zip(inputs, gradients, strict=True))}


def sizes_of_terms(case, x, f, g):
    """Return the size of the terms of y and of each gradient. Large terms can cancel; their rounding errors remain."""
    if not x.numel():
        return dict.fromkeys(["y", "x", "f", "a", "b"], 0.0)
    s = (x * f).sum(case["dims"]).abs() / ((x * x).sum(case["dims"]) + EPS)
    x, f, g, gain = (t.abs().max().item() for t in (x, f, g, 1 + s))
    of_weights = g * (f + gain * x) * math.prod(case["shape"])
    return {"y": f + gain * x, "x": g * gain ** 2, "f": g, "a": of_weights, "b": of_weights}


def check(update, case):
    x, f, g, mask = tensors(case)
    expected = results(truth, case, x.double(), f.double(), g.double(), mask)
    reference = results(rounded, case, x, f, g, mask)
    magnitudes = sizes_of_terms(case, x.double(), f.double(), g.double())
    for name, got in results(update, case, x, f, g, mask).items():
        exact = expected[name]
        assert got.shape == exact.shape
        assert got.dtype == reference[name].dtype
        if not exact.numel():
            continue
        size = exact.abs().max().item() + magnitudes[name]
        allowed = 3 * (reference[name].double() - exact).abs().max().item() + 8 * torch.finfo(got.dtype).eps * size
        assert (got.double() - exact).abs().max().item() <= allowed, name


def eager(backend, keep="output"):
    def update(x, f, a, b, dims, eps, mask):
        return residual_update(
            x, f, parallel=a, orthogonal=b, dim=tuple(dims), eps=eps, mask=mask, keep=keep, backend=backend)
    return update


def examples(count):
    return settings(max_examples=count, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck))


def test_the_oracle_against_a_loop_over_numbers():
    x, f = torch.randn(2, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(-1)
    y = truth(x, f, 0.3, 0.7, [0, 2], 0.5)
    for j in range(3):
        positions = [(i, k) for i in range(2) for k in range(4)]
        s = sum(x[i, j, k] * f[i, j, k] for i, k in positions) / (sum(x[i, j, k] ** 2 for i, k in positions) + 0.5)
        for i, k in positions:
            parallel = s * x[i, j, k]
            torch.testing.assert_close(y[i, j, k], x[i, j, k] + 0.3 * parallel + 0.7 * (f[i, j, k] - parallel))


def test_the_gradients_of_the_oracle_against_finite_differences():
    x, f = torch.randn(2, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(-1)
    inputs = [t.requires_grad_() for t in (x, f, *torch.tensor([0.3, 0.7], dtype=torch.float64).unbind())]
    assert torch.autograd.gradcheck(lambda x, f, a, b: truth(x, f, a, b, [0, 2], 0.5), inputs)


@examples(200)
@given(cases())
def test_closed_form(case):
    check(eager("torch", case["keep"]), case)


@examples(60)
@given(cases())
def test_without_gradients(case):
    x, f, _, mask = tensors(case)
    a, b = (torch.tensor(0.625) if w == "learned" else w for w in case["weights"])
    exact = truth(x.double(), f.double(), a, b, case["dims"], EPS, mask)
    for context in (torch.no_grad(), torch.inference_mode(), torch.device("cpu"), contextlib.nullcontext()):
        with context:
            y = eager(None)(x, f, a, b, case["dims"], EPS, mask)
        if y.numel():
            allowed = 64 * torch.finfo(y.dtype).eps * max(exact.abs().max().item(), x.double().abs().max().item())
            assert (y.double() - exact).abs().max().item() <= allowed


@examples(12)
@given(cases(elements=3_000_000))
def test_large_tensors(case):
    check(eager("torch", case["keep"]), case)


@pytest.mark.skipif(TRITON is not None, reason=str(TRITON))
@examples(30)
@given(cases(elements=300))
def test_kernels(case):
    # Triton's interpreter returns NaN for a bfloat16 input and a float64 input.
    assume(set(case["dtypes"]) != {torch.bfloat16, torch.float64})
    check(eager("triton", case["keep"]), case)


def test_a_transposed_stream_projected_over_its_first_axis():
    """The axis of the sum is contiguous in memory, although it is the first axis."""
    x, f = (torch.randn(1024, 2048, generator=torch.Generator().manual_seed(seed)).t() for seed in (0, 1))
    assert x.stride(0) == 1
    for needed in (False, True):
        y = residual_update(x.requires_grad_(needed), f, dim=0)
        torch.testing.assert_close(y, truth(x.double(), f.double(), 0.0, 1.0, [0], 1e-6).float())
