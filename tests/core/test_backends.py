"""The backend `inductor`, function modes and tensor subclasses, and the run-time check of Triton kernels."""
import contextlib
import functools
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from timm_ortho import FeatureConnection, backends, functional, residual_update
from timm_ortho.functional import choose_backend, plain_update, use_backend

TRITON = backends._why_not("triton", torch.ones(1), torch.ones(1))
needs_triton = pytest.mark.skipif(TRITON is not None, reason=str(TRITON))
needs_compiler = pytest.mark.skipif(not backends._cpp_compiler_is_installed(), reason="there is no C++ compiler")


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
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_modes_and_subclasses_do_not_affect_the_checks(situation, x, f, words, backend):
    with pytest.raises(ValueError, match=words):
        residual_update(situation(x), situation(f), backend=backend)
    with use_backend(backend), pytest.raises(ValueError, match=words):
        FeatureConnection()(situation(x), situation(f))


@needs_triton
def test_modes_and_subclasses_do_not_affect_the_backend(situation, monkeypatch):
    launched, kernels = [], functional._kernels()
    update = kernels.update
    monkeypatch.setattr(kernels, "update", lambda *args: launched.append(1) or update(*args))
    x, f, _ = tensors()
    y = residual_update(situation(x), situation(f), backend="triton")
    assert launched == [1]
    torch.testing.assert_close(torch.Tensor(y), residual_update(x, f))


def test_modes_and_subclasses_do_not_affect_errors_of_backends(situation):
    x, f, _ = tensors()
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        residual_update(situation(x), situation(f), backend="cuda")


@pytest.mark.parametrize("backend", ["inductor", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("needed", [False, True])
def test_export_records_the_plain_formula_for_any_backend(backend, needed):
    if torch.__version__.startswith("2.6.") and needed:
        pytest.skip("torch 2.6 cannot distinguish compiling from exporting")
    x, f, _ = tensors()
    with use_backend(backend):
        program = torch.export.export(FeatureConnection(), (x.requires_grad_(needed), f))
    assert "timm_ortho" not in str(program.graph)
    torch.testing.assert_close(program.module()(x, f), residual_update(x, f))


# -------------------------------------------------------------------------------------------------- "inductor"
@needs_compiler
@pytest.mark.parametrize(("shape", "dim"), [((3, 5, 20), -1), pytest.param((2, 6, 4, 3), 1, marks=pytest.mark.slow)])
def test_inductor_computes_the_update_and_its_gradients(shape, dim, monkeypatch):
    calls = []
    for name in ("update", "gradients"):
        function = getattr(functional.INDUCTOR, name)
        counted = functools.partial(lambda name, function, *args: calls.append(name) or function(*args), name, function)
        monkeypatch.setattr(functional, "INDUCTOR", functional.INDUCTOR._replace(**{name: counted}))
    x, f, g = tensors(shape)
    torch.testing.assert_close(run("inductor", x, f, g, dim=dim), run("torch", x, f, g, dim=dim))
    assert calls == ["update", "gradients"]


@needs_compiler
def test_inductor_with_the_parallel_part_only():
    x, f, g = tensors((2, 4, 6))
    weights = dict(parallel=0.3, orthogonal=0.0)
    torch.testing.assert_close(run("inductor", x, f, g, **weights), run("torch", x, f, g, **weights))


@needs_compiler
def test_another_batch_size_needs_no_compilation():
    sizes = []
    for batch in (3, 4, 9):
        x, f, g = tensors((batch, 5, 20))
        torch.testing.assert_close(run("inductor", x, f, g), run("torch", x, f, g))
        sizes.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert sizes[1:] == sizes[:1] * 2


@needs_compiler
def test_number_of_compilations_for_many_layouts():
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for shape in [(4, 3, 8), (1, 3, 8), (5, 1, 9), (7, 6, 8), (2, 9, 5), (1, 7, 30), (6, 1, 20), (8, 3, 12), (3, 1, 7)]:
        x, f, g = tensors(shape)
        for change in (torch.Tensor.clone, lambda t: t.transpose(0, 1), lambda t: t.expand(3, *t.shape),
                       lambda t: torch.stack([t, t], -1)[..., 0]):
            arguments = change(x), change(f), change(g)
            mine, expected = run("inductor", *arguments), run("torch", *arguments)
            torch.testing.assert_close(mine, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4  # 9 shapes, 4 layouts each


@needs_compiler
def test_inductor_keeps_the_memory_format_of_separate_axes():
    x, f, g = tensors((5, 3, 2, 4))
    for mine, expected in zip(run("inductor", x, f, g, dim=(1, 3)), run("torch", x, f, g, dim=(1, 3)), strict=True):
        torch.testing.assert_close(mine, expected)
        assert mine.stride() == expected.stride() == x.stride()


@needs_compiler
@pytest.mark.parametrize(("shape", "dim"), [((2, 0, 3), None), ((2, 3, 0), -1), ((0, 3, 4), -1), ((2, 0, 3), 1)])
def test_inductor_with_empty_tensors(shape, dim):
    x, f, g = tensors(shape)
    torch.testing.assert_close(run("inductor", x, f, g, dim=dim), run("torch", x, f, g, dim=dim))


@needs_triton
def test_triton_refuses_dtypes_that_its_interpreter_stores_wrongly():
    x, f, _ = tensors()
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: .*float64.* bfloat16"):
        residual_update(x.double(), f.bfloat16(), backend="triton")


@needs_compiler
def test_at_the_limit_of_recompilations_inductor_falls_back_with_one_warning(monkeypatch):
    monkeypatch.setattr(functional, "INDUCTOR", functional.INDUCTOR._replace(
        update=functional.folded(backends.compiled(functional._update))))
    x, f, _ = tensors()
    config = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.7
    with config.patch({limit: 1}), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for enabled in (True, False, True, False):  # torch.compile recompiles when this setting changes
            with torch.set_grad_enabled(enabled):
                torch.testing.assert_close(residual_update(x, f, backend="inductor"), residual_update(x, f))
    told = [str(warning.message) for warning in told if "timm_ortho" in str(warning.message)]
    assert len(told) == 1
    assert "recompile_limit" in told[0]
    assert "use the backend 'torch'" in told[0]


@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.3, 0.7)], ids=str)
@pytest.mark.parametrize("backend", ["torch", pytest.param("inductor", marks=needs_compiler),
                                     pytest.param("triton", marks=needs_triton)])
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


@needs_compiler
def test_second_derivatives_with_inductor():
    x, f, _ = (t.double().requires_grad_() for t in tensors((2, 3)))
    assert torch.autograd.gradgradcheck(functools.partial(residual_update, backend="inductor"), (x, f))


def test_the_error_without_a_compiler(monkeypatch):
    monkeypatch.setattr(backends, "_cpp_compiler_is_installed", lambda: False)
    x, f, _ = tensors()
    with pytest.raises(RuntimeError, match=r"^backend 'inductor' cannot run: there is no C\+\+ compiler: install one "
                                           r"\(apt install g\+\+\).* choose 'torch' or 'auto'$"):
        residual_update(x, f, backend="inductor")
    with use_backend("inductor"), pytest.raises(RuntimeError, match=r"^backend 'inductor' \(set by"):
        FeatureConnection()(x, f)


def test_search_for_the_compiler(monkeypatch):
    for variable, installed in (("/nowhere/c++", False), ("sh", True)):
        monkeypatch.setenv("CXX", variable)
        assert backends._cpp_compiler_is_installed.__wrapped__() is installed


def test_errors_of_the_compiler_are_one_line():
    def dynamic(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(RuntimeError, match=r"^backend 'inductor' cannot compile: .+; choose 'torch' or 'auto'$"):
        backends.compiled(dynamic)(torch.ones(2))


def test_auto_never_uses_inductor(monkeypatch):
    x, f, _ = tensors()
    assert choose_backend(x, f, "auto") == "torch"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose_backend(x, f, "inductor") == "torch"


# ---------------------------------------------------------------------------------- "auto" with Triton kernels
@pytest.fixture
def auto(monkeypatch):
    """Return ``run`` with the backend ``auto``, which here selects Triton kernels that have not been checked yet."""
    monkeypatch.setattr(functional, "choose_backend", lambda x, f, backend: "triton" if backend == "auto" else backend)
    monkeypatch.setattr(backends, "_agrees", {})
    return functools.partial(run, "auto")


def sabotaged(monkeypatch, name, spoil):
    kernels = functional._kernels()
    calls, original = [], getattr(kernels, name)

    def kernel(x, *args):
        calls.append(tuple(x.shape))
        return spoil(original(x, *args))

    monkeypatch.setattr(kernels, name, kernel)
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
@pytest.mark.parametrize(("shape", "dim"), [((3, 5, 20), -1), ((3, 5, 20), None), ((2, 6, 4, 3), 1)])
def test_correct_kernels_are_checked_once(auto, monkeypatch, shape, dim, dtype):
    x, f, g = tensors(shape, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto(x, f, g, dim=dim)
        assert sorted(case[0] for case in backends._agrees) == ["backward", "forward"]
        assert set(backends._agrees.values()) == {True}
        monkeypatch.setattr(backends, "_difference", None)  # a second check would call None
        auto(*tensors((7, *shape[1:]), dtype), dim=dim)


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
    for shape, dim, dtype in (((3, 5, 20), -1, torch.float32), ((3, 5, 20), None, torch.float32),
                              ((3, 5, 20), -1, torch.float16), ((3, 5, 20), 1, torch.float32)):
        with pytest.warns(RuntimeWarning, match="Triton kernel"):
            auto(*tensors(shape, dtype), dim=dim)
    assert len(calls) == 4


@needs_triton
def test_kernels_that_cannot_be_launched_are_replaced(auto, monkeypatch):
    def broken(*args):
        raise OSError("Failed to find C compiler")

    monkeypatch.setattr(functional._kernels(), "update", broken)
    x, f, g = tensors()
    with pytest.warns(RuntimeWarning, match=r"could not be launched \(OSError: Failed to find C compiler\)"):
        results = auto(x, f, g)
    torch.testing.assert_close(results, run("torch", x, f, g))


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # raised in Triton's interpreter
def test_non_finite_results_are_not_compared(auto):
    x, f, g = tensors()
    auto(x, f, g * float("inf"))
    assert [case[0] for case in backends._agrees] == ["forward"]


@needs_triton
def test_no_check_during_graph_capture(monkeypatch):
    class Captured(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(backends, "_agrees", {})
    kernel = backends.checked("forward", lambda *args: "kernel", None)
    assert kernel(torch.ones(2, 3).as_subclass(Captured), torch.ones(2, 3), 0.0, 1.0, [-1], 1e-6) == "kernel"
    assert backends._agrees == {}


@needs_triton
def test_requested_kernels_are_not_checked(monkeypatch):
    monkeypatch.setattr(backends, "_agrees", {})
    calls = sabotaged(monkeypatch, "update", in_first(lambda y: 1.01 * y))
    x, f, _ = tensors()
    expected = 1.01 * plain_update(x, f, 0.0, 1.0, [-1], 1e-6)
    with use_backend("triton"):
        torch.testing.assert_close(FeatureConnection()(x, f), expected)
    torch.testing.assert_close(residual_update(x, f, backend="triton"), expected)
    assert (len(calls), backends._agrees) == (2, {})
