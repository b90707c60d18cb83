"""Function modes and tensor subclasses, the test of Triton kernels at first use, and cases without kernels."""
import contextlib
import functools
import threading

import numpy as np
import pytest
import torch
from helpers.kernel_cases import needs_triton, planning
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from timm_ortho import FeatureConnection, functional, residual_update
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
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        residual_update(situation(x), situation(x), backend="cuda")


@needs_triton
def test_modes_do_not_affect_the_backend_and_subclasses_use_torch(situation, calls):
    x, f, _ = tensors()
    y = residual_update(situation(x), situation(f), backend="triton")
    is_plain = type(situation(x)) is torch.Tensor
    assert calls == ({"update": 1} if is_plain else {})
    torch.testing.assert_close(torch.Tensor(y), residual_update(x, f))


@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.3, 0.7)], ids=str)
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_batched_gradients(backend, weights):
    x, f, _ = (t.requires_grad_() for t in tensors())
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


def test_contexts_may_end_in_any_order():
    before, (first, second) = backends.default(), (use_backend("triton"), use_backend("torch"))
    with contextlib.ExitStack() as stack:
        first.__enter__()
        stack.enter_context(second)
        first.__exit__(None, None, None)
        assert backends.default() == "torch"
    assert backends.default() == before


def test_a_context_of_another_thread_does_not_apply_to_the_main_thread():
    """Each thread has its own default backend, so contexts that end in another order leave no trace."""
    entered, left, inside = threading.Event(), threading.Event(), []

    def other():
        with use_backend("torch"):
            entered.set()
            left.wait(10)
            inside.append(backends.default())

    before, thread = backends.default(), threading.Thread(target=other)
    thread.start()
    entered.wait(10)
    during = backends.default()
    with use_backend("triton"):
        left.set()
        thread.join()
        assert backends.default() == "triton"
    assert (inside, during, backends.default()) == (["torch"], before, before)


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


# ---------------------------------------------------------------------------------- "auto" with Triton kernels
@pytest.fixture
def auto(auto_is_triton):
    """Return ``run`` with the backend ``auto``, which here selects Triton kernels that have not been tested yet."""
    return functools.partial(run, "auto")


def sabotaged(monkeypatch, spoil, plan=None):
    """Let ``spoil`` change the results of the forward kernel. Return the shapes of its calls."""
    calls, original = [], (plan or planning.Plan).update

    def update(plan, x, *args, **kwargs):
        calls.append(tuple(x.shape))
        (y, *rest), saved = original(plan, x, *args, **kwargs)
        return (spoil(y), *rest), saved

    monkeypatch.setattr(plan or planning.Plan, "update", update)
    return calls


def last_is_wrong(y):
    y = y.clone()
    y[-1] += 0.1
    return y


KINDS = {"rows": ((3, 5, 20), -1), "columns": ((2, 6, 4, 3), 1), "long": ((2, 9000), None)}


@needs_triton
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_correct_kernels_are_tested_once(auto, calls, kind, dtypes):
    shape, dim = KINDS[kind]
    x, f, g = tensors(shape)
    for _ in range(2):  # pytest raises on a warning
        auto(x.to(dtypes[0]), f.to(dtypes[1]), g, dim=dim)
    assert set(backends._passed.values()) == {True}
    assert calls == {"update": 3, "gradients": 3}
    auto(*(t[:1] for t in tensors(shape)), dim=dim)
    assert len(backends._passed) == (1 if dtypes[1] == torch.float32 else 2)


@needs_triton
@pytest.mark.usefixtures("auto_is_triton")
def test_kernels_are_tested_at_first_use_in_inference_mode():
    x, f, _ = tensors()
    with torch.inference_mode():
        residual_update(x, f)
        FeatureConnection().with_norm(x, f, torch.nn.LayerNorm(20))
    assert list(backends._passed.values()) == [True, True]


@needs_triton
def test_kernels_whose_correct_gradient_is_zero_pass_the_test(auto):
    x, f, g = tensors(KINDS["rows"][0])
    auto(x.half(), f.half(), g.half(), parallel=0.0, orthogonal=0.0)  # pytest raises on a warning
    assert set(backends._passed.values()) == {True}


@needs_triton
@pytest.mark.parametrize("spoil", [lambda y: 1.01 * y, last_is_wrong, lambda y: y * float("nan")],
                         ids=["off by a percent", "wrong in the last sample", "not a number"])
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_kernels_are_replaced_with_a_warning(auto, monkeypatch, kind, spoil):
    shape, dim = KINDS[kind]
    x, f, g = tensors(shape)
    expected = run("torch", x, f, g, dim=dim)
    calls = sabotaged(monkeypatch, spoil)
    monkeypatch.setattr(backends, "requested_kernels", functional.requested_kernels)
    assert choose_backend(x, f, dim=dim) == "triton"
    with pytest.warns(RuntimeWarning, match=rf"Triton kernels \(cpu torch.float32 torch.float32 {kind}\) are inaccurate"
                                            ".*torch backend is used from now on"):
        results = auto(x, f, g, dim=dim)
    assert choose_backend(x, f, dim=dim) == "torch"
    assert all(map(torch.equal, results, expected))
    assert all(map(torch.equal, auto(x, f, g, dim=dim), expected))  # pytest raises on a second warning
    assert len(calls) == 1


@needs_triton
@pytest.mark.parametrize("failing", ["update_kernel", "gradients_kernel"])
@pytest.mark.parametrize("tested", [False, True])
def test_kernels_that_cannot_be_launched_are_replaced(auto, monkeypatch, failing, tested):
    """Either the test of the kernels fails, or a launch after it."""
    x, f, g = tensors()
    expected = run("torch", x, f, g)
    if tested:
        auto(x, f, g)
        backends.plans.clear()
    monkeypatch.setattr(planning, failing, Broken(OSError("Failed to find C compiler")))
    with pytest.warns(RuntimeWarning, match=r"could not be launched \(OSError: Failed to find C compiler\)"):
        torch.testing.assert_close(auto(x, f, g), expected)
    assert all(map(torch.equal, auto(x, f, g), expected))
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        run("triton", x, f, g)


class Broken:
    """A kernel whose launches raise an error."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, grid):
        def launch(*args, **options):
            raise self.error
        return launch


@needs_triton
def test_an_out_of_memory_error_of_a_kernel_is_raised(auto, monkeypatch):
    monkeypatch.setattr(planning, "update_kernel", Broken(torch.cuda.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        auto(*tensors())


@needs_triton
def test_kernels_accept_numbers_of_numpy():
    inputs = tensors()
    torch.testing.assert_close(run("triton", *inputs, eps=np.float32(0.5)), run("torch", *inputs, eps=0.5))


@needs_triton
@pytest.mark.usefixtures("auto_is_triton")
def test_requested_kernels_are_not_tested(monkeypatch):
    calls = sabotaged(monkeypatch, lambda y: 1.01 * y)
    x, f, _ = tensors()
    expected = 1.01 * plain_update(x, f, 0.0, 1.0, [-1], 1e-6)
    with use_backend("triton"):
        torch.testing.assert_close(FeatureConnection()(x, f), expected)
    torch.testing.assert_close(residual_update(x, f, backend="triton"), expected)
    assert (len(calls), backends._passed) == (2, {})


# --------------------------------------------------------------------------- cases that torch computes bit for bit
WITHOUT_KERNELS = {
    "float64": lambda x, f: ((x.double(), f.double()), {}),
    "a learned weight": lambda x, f: ((x, f), dict(parallel=torch.tensor(0.5))),
    "gaps in memory": lambda x, f: ((x[..., ::2], f[..., ::2]), {}),
    "strides that differ": lambda x, f: ((x, f.mT.contiguous().mT), {}),
    "an expanded stream": lambda x, f: ((x[:1].expand_as(x), f), {}),
    "axes that are not adjacent": lambda x, f: ((x, f), dict(dim=(0, 2))),
    "no elements": lambda x, f: ((x[:0], f[:0]), {}),
    "a subclass": lambda x, f: ((x.as_subclass(type("Subclass", (torch.Tensor,), {})), f), {}),
}


@needs_triton
@pytest.mark.parametrize("case", WITHOUT_KERNELS)
def test_cases_without_kernels_equal_torch_bit_for_bit(case, calls):
    (x, f), arguments = WITHOUT_KERNELS[case](*tensors()[:2])
    results = [run(backend, x, f, torch.ones_like(x), **arguments) for backend in ("triton", "torch")]
    assert all(map(torch.equal, *results))
    assert not calls
    if "parallel" not in arguments:
        assert choose_backend(x, f, "triton", arguments.get("dim", -1)) == "torch"


# -------------------------------------------------------------------------------- what happens around the kernels
@needs_triton
@pytest.mark.parametrize(("shape", "dim"), [((2, 6, 5, 4), 1), ((2, 5, 20), -1)])
@pytest.mark.parametrize("change", [torch.Tensor.half, torch.Tensor.contiguous, torch.Tensor.double], ids=str)
@pytest.mark.parametrize("keep", ["output", "branch"])
def test_hooks_may_change_saved_tensors(shape, dim, change, keep):
    """A hook may store float16, and `save_on_cpu(pin_memory=True)` returns channels-last tensors as contiguous ones."""
    x, f, g = (t.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else t for t in tensors(shape))
    found = []
    for hooks in (contextlib.nullcontext(), torch.autograd.graph.saved_tensors_hooks(change, lambda t: t)):
        with hooks:
            x, f = x.detach().requires_grad_(), f.detach().requires_grad_()
            y = residual_update(x, f, dim=dim, keep=keep, backend="triton")
        found.append(torch.autograd.grad(y, (x, f), g))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


@needs_triton
@pytest.mark.parametrize(("forward", "backward"), [("torch", "triton"), ("triton", "torch")])
@pytest.mark.parametrize("with_norm", [False, True])
def test_checkpointing_across_backends(forward, backward, with_norm):
    """The backward pass computes the block again, with the backend of that moment."""
    x, f, g = tensors()
    x, f = x.requires_grad_(), f.requires_grad_()
    norm = torch.nn.LayerNorm(20)

    def block(x, f):
        return sum(FeatureConnection().with_norm(x, f, norm)) if with_norm else residual_update(x, f)

    with use_backend("torch"):
        expected = torch.autograd.grad(block(x, f), (x, f), g)
    with use_backend(forward):
        y = checkpoint(block, x, f, use_reentrant=False)
    with use_backend(backward):
        torch.testing.assert_close(torch.autograd.grad(y, (x, f), g), expected)


@needs_triton
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # raised in Dynamo
@pytest.mark.parametrize("with_norm", [False, True])
def test_compiled_autograd_after_eager_kernels(with_norm):
    norm = torch.nn.LayerNorm(20)

    def results(backend):
        x, f, g = tensors()
        with use_backend(backend):
            x, f = x.requires_grad_(), f.requires_grad_()
            y, h = FeatureConnection().with_norm(x, f, norm)
        return x, f, y + h if with_norm else 1.0 * y, g

    x, f, y, g = results("torch")
    expected = torch.autograd.grad(y, (x, f), g)
    x, f, y, g = results("triton")
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda y, g: y.backward(g), backend="eager")(y, g)
    torch.testing.assert_close((x.grad, f.grad), expected)
