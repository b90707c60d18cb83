"""Function modes and tensor subclasses, and the run-time check of Triton kernels."""
import contextlib
import functools
import os
import threading
import warnings

import pytest
import torch
from helpers.kernel_cases import kernels, needs_triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from timm_ortho import FeatureConnection, residual_update
from timm_ortho.functional import BACKENDS, choose_backend, plain_update, use_backend
from timm_ortho.update import backend as backends


def tensors(shape=(3, 5, 20), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def run(backend, x, f, g, **kwargs):
    x, f = x.detach().requires_grad_(), f.detach().requires_grad_()
    y = residual_update(x, f, backend=backend, **kwargs)
    return [y.detach(), *torch.autograd.grad(y, (x, f), g)]


# ------------------------------------------------------------------------------ function modes and subclasses
@pytest.fixture(params=["default device", "a mode", "a subclass"])
def situation(request):
    """Activate a default device or a TorchFunctionMode, if requested. Return a function to apply to the inputs.

    The function converts a tensor to a subclass, if requested. Otherwise it returns the tensor unchanged.
    """
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    contexts = {"default device": torch.device("cpu"), "a mode": Mode()}
    with contexts.get(request.param, contextlib.nullcontext()):
        yield (lambda t: t.as_subclass(Subclass)) if request.param == "a subclass" else (lambda t: t)


@pytest.mark.parametrize(("x", "f", "words"), [
    (torch.ones(2, 3), torch.ones(2, 4), "same shape"),
    (torch.ones(2, 3), torch.ones(2, 3).long(), "floating-point"),
    (torch.ones(2, 3), torch.ones(2, 3, device="meta"), "same device"),
])
@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_and_subclasses_do_not_affect_the_checks(situation, x, f, words, backend):
    with pytest.raises(ValueError, match=words):
        residual_update(situation(x), situation(f), backend=backend)
    with use_backend(backend), pytest.raises(ValueError, match=words):
        FeatureConnection()(situation(x), situation(f))


@needs_triton
def test_modes_and_subclasses_do_not_affect_the_backend(situation, monkeypatch):
    launched, update = [], kernels.Plan.update
    monkeypatch.setattr(kernels.Plan, "update", lambda *args: launched.append(1) or update(*args))
    x, f, _ = tensors()
    y = residual_update(situation(x), situation(f), backend="triton")
    assert launched == [1]
    torch.testing.assert_close(torch.Tensor(y), residual_update(x, f))


def test_modes_and_subclasses_do_not_affect_errors_of_backends(situation):
    x, f, _ = tensors()
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        residual_update(situation(x), situation(f), backend="cuda")


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("needed", [False, True])
def test_export_records_the_plain_formula_for_any_backend(backend, needed):
    x, f, _ = tensors()
    with use_backend(backend):
        program = torch.export.export(FeatureConnection(), (x.requires_grad_(needed), f))
    assert "timm_ortho" not in str(program.graph)
    torch.testing.assert_close(program.module()(x, f), residual_update(x, f))


@needs_triton
def test_triton_refuses_dtypes_that_its_interpreter_stores_wrongly():
    x, f, _ = tensors()
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: .*float64.* bfloat16"):
        residual_update(x.double(), f.bfloat16(), backend="triton")


@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.3, 0.7)], ids=str)
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_batched_gradients(backend, weights):
    x, f, _ = (t.double().requires_grad_() for t in tensors())
    y = residual_update(x, f, parallel=weights[0], orthogonal=weights[1], backend=backend)
    g = torch.randn(4, *y.shape, dtype=y.dtype)
    batched = torch.autograd.grad(y, (x, f), g, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, (x, f), one, retain_graph=True) for one in g]
    torch.testing.assert_close(batched, tuple(torch.stack(grads) for grads in zip(*single, strict=True)))
    jacobian = functools.partial(torch.autograd.functional.jacobian, functools.partial(
        residual_update, backend=backend), (x[:1, :1], f[:1, :1]))
    torch.testing.assert_close(jacobian(vectorize=True), jacobian())


def test_auto_uses_no_kernels_for_tensors_without_data():
    with FakeTensorMode():
        x = torch.empty(2, 3, device="cuda")
        assert choose_backend(x, x) == "torch"
    assert choose_backend(x, x) == "torch"
    x, norm = torch.empty(2, 3, device="meta"), torch.nn.LayerNorm(3, device="meta")
    assert FeatureConnection().with_norm(x, x, norm)[1].device == x.device


@pytest.mark.parametrize("call", [
    lambda x: residual_update(x, x, backend="inductor"), lambda x: choose_backend(x, x, "inductor"),
    lambda x: use_backend("inductor").__enter__(),
])
def test_the_removed_backend(call):
    with pytest.raises(ValueError, match=r"^backend 'inductor' was removed: compile the whole model with torch"):
        call(torch.ones(2, 3))


def test_overlapping_contexts_in_threads():
    """Each thread has its own default backend, so contexts that end in another order leave no trace."""
    entered, left = threading.Event(), threading.Event()

    def other():
        with use_backend("torch"):
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with use_backend("auto"):
        thread.start()
        entered.wait(10)
        assert backends.default() == "auto"
    left.set()
    thread.join()
    assert backends.default() == os.environ.get("TIMM_ORTHO_BACKEND", "auto")


@needs_triton
def test_a_context_of_the_main_thread_applies_to_the_threads_of_the_backward_pass():
    """With CUDA, autograd calls backward in a thread of its own, and there computes checkpointed blocks again."""
    x, f = (t.requires_grad_() for t in tensors()[:2])
    with use_backend("triton"):
        y = checkpoint(residual_update, x, f, use_reentrant=False)
        thread = threading.Thread(target=y.sum().backward)
        thread.start()
        thread.join()
    assert f.grad is not None


def test_a_context_of_another_thread_does_not_apply_to_the_main_thread():
    entered, left = threading.Event(), threading.Event()

    def other():
        with use_backend("torch", fuse_norm=False):
            entered.set()
            left.wait(10)

    before = backends.default(), backends.fuses_norm()
    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(10)
    during = backends.default(), backends.fuses_norm()
    left.set()
    thread.join()
    assert during == before


# ---------------------------------------------------------------------------------- "auto" with Triton kernels
@pytest.fixture
def auto(auto_is_triton):
    """Return ``run`` with the backend ``auto``, which here selects Triton kernels that have not been checked yet."""
    return functools.partial(run, "auto")


def sabotaged(monkeypatch, name, spoil):
    calls, original = [], getattr(kernels.Plan, name)

    def kernel(plan, x, *args):
        calls.append(tuple(x.shape))
        return spoil(original(plan, x, *args))

    monkeypatch.setattr(kernels.Plan, name, kernel)
    return calls


def in_first(spoil):
    return lambda results: (spoil(results[0]), *results[1:])


def last_is_wrong(y):
    y = y.clone()
    y[-1] += 0.1
    return y


SABOTAGE = {
    "off by a percent": in_first(lambda y: 1.01 * y),
    "wrong in the last sample": in_first(last_is_wrong),
    "not a number": in_first(lambda y: y * float("nan")),
}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "batch", "dim"), [((3, 5, 20), 2, -1), ((3, 5, 20), 4, None), ((2, 6, 4, 3), 7, 1)])
def test_correct_kernels_are_checked_once(auto, monkeypatch, shape, batch, dim, dtype):
    x, f, g = tensors(shape, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto(x, f, g, dim=dim)
        assert sorted(case[0] for case in backends._agrees) == ["backward", "forward"]
        assert set(backends._agrees.values()) == {True}
        monkeypatch.setattr(backends, "_difference", None)  # a second check would call None
        auto(*tensors((batch, *shape[1:]), dtype), dim=dim)  # the same kernel, with tiles of the same size


@needs_triton
@pytest.mark.parametrize("dim", [-1, 0, 1, None, (0, 2), (0, 1, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.3, 0.7), "learned"], ids=str)
def test_samples_of_the_batch_are_compared(auto, monkeypatch, dim, weights):
    """Two of five samples, or all of them if a projection sums over the batch."""
    monkeypatch.setattr(backends, "_SAMPLE", 8)
    x, f, g = tensors((5, 6, 4))
    a, b = (torch.tensor(0.3, requires_grad=True), 0.7) if weights == "learned" else weights
    kwargs = dict(dim=dim, parallel=a, orthogonal=b)
    torch.testing.assert_close(auto(x, f, g, **kwargs), run("torch", x, f, g, **kwargs))
    assert set(backends._agrees.values()) == {True}


@needs_triton
@pytest.mark.parametrize("sample", [0, -1])
def test_the_first_and_the_last_sample_are_compared(auto, monkeypatch, sample):
    def spoiled(results):
        results[0][sample] += 0.1
        return results

    monkeypatch.setattr(backends, "_SAMPLE", 8)
    sabotaged(monkeypatch, "update", spoiled)
    with pytest.warns(RuntimeWarning, match="is inaccurate"):
        auto(*tensors((9, 6, 4)))


@needs_triton
@pytest.mark.parametrize(("name", "direction"), [("update", "forward"), ("gradients", "backward")])
@pytest.mark.parametrize("spoil", SABOTAGE.values(), ids=list(SABOTAGE))
@pytest.mark.parametrize("deterministic", [False, True])
def test_wrong_kernels_are_replaced_with_a_warning(auto, monkeypatch, name, direction, spoil, deterministic):
    x, f, g = tensors()
    expected = run("torch", x, f, g)
    calls = sabotaged(monkeypatch, name, spoil)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with pytest.warns(RuntimeWarning, match=rf"Triton kernel \({direction}, feature scope, .*\(3, 5, 20\).*float32"
                                                r".*is inaccurate.*torch backend is used from now on"):
            results = auto(x, f, g)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(auto(x, f, g), expected)  # pytest raises on a second warning
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == [(3, 5, 20)]


@needs_triton
def test_each_case_is_checked_separately(auto, monkeypatch):
    calls = sabotaged(monkeypatch, "update", in_first(lambda y: 1.01 * y))
    cases = [
        (torch.float32, dict(dim=-1)), (torch.float32, dict(dim=None)), (torch.float16, dict(dim=-1)),
        (torch.float32, dict(dim=1)), (torch.float32, dict(keep="branch")),
        (torch.float32, dict(orthogonal=torch.tensor(0.7))), (torch.float32, dict(parallel=torch.tensor(0.3)))]
    for dtype, arguments in cases:
        with pytest.warns(RuntimeWarning, match="Triton kernel"):
            auto(*tensors((3, 5, 20), dtype), **arguments)
    assert len(calls) == len(cases)
    tiles = {shape: kernels.Plan(*torch.zeros(2, *shape), (1,), 1e-6, 0.0, 1.0, False).case
             for shape in ((2, 64, 7, 7), (2, 64, 56, 56))}
    assert len(set(tiles.values())) == 2  # the kernels for them differ


@needs_triton
def test_kernels_that_cannot_be_launched_are_replaced(auto, monkeypatch):
    def broken(*args):
        raise OSError("Failed to find C compiler")

    monkeypatch.setattr(kernels.Plan, "update", broken)
    x, f, g = tensors()
    with pytest.warns(RuntimeWarning, match=r"could not be launched \(OSError: Failed to find C compiler\)"):
        results = auto(x, f, g)
    torch.testing.assert_close(results, run("torch", x, f, g))


@needs_triton
def test_an_out_of_memory_error_of_a_kernel_is_raised(auto, monkeypatch):
    def full(*args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels.Plan, "update", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        auto(*tensors())
    assert backends._agrees == {}


@needs_triton
def test_memory_that_is_too_small_for_the_comparison(auto, monkeypatch):
    def full(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    x, f, g = tensors()
    expected = run("triton", x, f, g)
    backends.plans.clear()
    monkeypatch.setattr(kernels.Plan, "torch_update", full)
    monkeypatch.setattr(kernels.Plan, "torch_gradients", full)
    for _ in range(2):
        assert all(map(torch.equal, auto(x, f, g), expected))


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # raised in Triton's interpreter
def test_non_finite_results_are_not_compared(auto):
    x, f, g = tensors()
    auto(x, f, g * float("inf"))
    assert [case[0] for case in backends._agrees] == ["forward"]


@needs_triton
@pytest.mark.usefixtures("auto_is_triton")
def test_no_check_during_graph_capture(monkeypatch):
    class Captured(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x = torch.ones(2, 3)
    plan = kernels.Plan(x, x, (-1,), 1e-6, 0.0, 1.0, False)
    update = backends.verified(plan, "forward", lambda *args: "kernel", None)
    assert update(x.as_subclass(Captured), x) == "kernel"
    assert backends._agrees == {}


@needs_triton
@pytest.mark.usefixtures("auto_is_triton")
def test_requested_kernels_are_not_checked(monkeypatch):
    calls = sabotaged(monkeypatch, "update", in_first(lambda y: 1.01 * y))
    x, f, _ = tensors()
    expected = 1.01 * plain_update(x, f, 0.0, 1.0, [-1], 1e-6)
    with use_backend("triton"):
        torch.testing.assert_close(FeatureConnection()(x, f), expected)
    torch.testing.assert_close(residual_update(x, f, backend="triton"), expected)
    assert (len(calls), backends._agrees) == (2, {})
