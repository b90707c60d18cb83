"""Selection of the backend, equal losses with all backends, and errors."""
import functools
import importlib.util
import re

import numpy as np
import pytest
import timm
import torch
from helpers.kernel_cases import DEVICE, DOUBLE, EPS, both, inputs_with_gradients, needs_triton, tensors, weight
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from timm_ortho.functional import choose_backend, residual_update, use_backend
from timm_ortho.update import backend as backends

pytestmark = pytest.mark.usefixtures("no_default_backend")


# ------------------------------------------------------------------------------------ selection of the backend
AUTO_RUNS = "triton" if DEVICE == "cuda" else "torch"


@needs_triton
@pytest.mark.parametrize(("argument", "for_all", "runs"), [
    ("triton", "auto", "triton"), ("torch", "auto", "torch"), ("auto", "auto", AUTO_RUNS), (None, "auto", AUTO_RUNS),
    (None, "triton", "triton"), (None, "torch", "torch"),
    ("torch", "triton", "torch"), ("triton", "torch", "triton"), ("auto", "triton", AUTO_RUNS),
])
@pytest.mark.parametrize("learned", [False, True], ids=["", "learned"])
def test_the_requested_backend_runs(argument, for_all, runs, learned, calls):
    x, f = inputs_with_gradients()
    a = weight("a").requires_grad_() if learned else 0.0
    with use_backend(for_all):
        assert choose_backend(x, f, argument) == runs
        residual_update(x, f, parallel=a, backend=argument).sum().backward()
        by_kernels = runs == "triton" and not learned
        assert calls == ({"update": 1, "gradients": 1} if by_kernels else {})
        with torch.no_grad():
            residual_update(x, f, parallel=a, backend=argument)
        assert calls == ({"update": 2, "gradients": 1} if by_kernels else {})


@pytest.mark.parametrize(("variable", "answer"), [
    ("torch", "torch"), ("", "torch"), (None, "torch"),
    ("Triton", "unknown TIMM_ORTHO_BACKEND 'Triton', known are 'auto', 'torch', 'triton'; did you mean 'triton'?"),
])
def test_the_environment_is_read_when_the_package_is_imported(variable, answer, monkeypatch):
    monkeypatch.delenv("TIMM_ORTHO_BACKEND", raising=False)
    if variable is not None:
        monkeypatch.setenv("TIMM_ORTHO_BACKEND", variable)
    spec = importlib.util.find_spec("timm_ortho.update.backend")
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)  # import the file a second time, as in a new process
    monkeypatch.setenv("TIMM_ORTHO_BACKEND", "nonsense")  # no effect after the import
    try:
        assert again.choose_backend(torch.ones(1), torch.ones(1)) == answer
    except ValueError as error:
        assert str(error) == answer  # noqa: PT017 only one of the cases raises


@needs_triton
@pytest.mark.parametrize("dim", [np.int64(1), (np.int64(0), 1), [1]])
def test_axes_are_those_of_the_update(dim):
    x, f = torch.randn(2, 2, 3)
    assert choose_backend(x, f, "triton", dim) == "triton"
    residual_update(x, f, dim=dim)


@pytest.mark.parametrize("device", ["cuda", "cpu", "meta"])
def test_auto_on_every_device(device, monkeypatch):
    with FakeTensorMode():  # fake tensors need no CUDA device
        x, f = (torch.empty(2, 3, device=device, requires_grad=True) for _ in range(2))
    assert choose_backend(x, f) == "torch"
    monkeypatch.setattr(backends, "is_eager", lambda *tensors: True)
    assert choose_backend(x, f) == ("triton" if device == "cuda" and backends.TRITON_IS_INSTALLED else "torch")
    monkeypatch.setattr(backends, "TRITON_IS_INSTALLED", False)
    assert choose_backend(x, f) == "torch"


@needs_triton
@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.3, 0.7)], ids=str)
def test_second_derivatives_of_the_kernels(weights, calls):
    inputs = [t.requires_grad_() for t in tensors((2, 3, 4))[:2]]

    def second(backend):
        y = residual_update(*inputs, parallel=weights[0], orthogonal=weights[1], eps=EPS, backend=backend)
        first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(t.pow(3).sum() for t in first), inputs)

    torch.testing.assert_close(second("triton"), second("torch"), rtol=1e-4, atol=1e-4)
    assert calls["update"] == 1


@both
@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.3, 0.7)], ids=str)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_forward_mode(backend, weights, with_gradient):
    """In forward mode, both backends compute the update with ordinary operations of torch.

    The autograd function KernelUpdate has no forward-mode derivative, and kernels drop the tangents.
    """
    x, f, dx = tensors((3, 5, 20), (DOUBLE, DOUBLE))
    df, _, _ = tensors((3, 5, 20), (DOUBLE, DOUBLE), seed=1)
    update = functools.partial(residual_update, parallel=weights[0], orthogonal=weights[1])
    expected = torch.autograd.functional.jvp(update, (x, f), (dx, df))
    torch.testing.assert_close(torch.func.jvp(update, (x, f), (dx, df)), expected)
    f.requires_grad_(with_gradient)
    with forward_ad.dual_level():
        y = update(forward_ad.make_dual(x, dx), forward_ad.make_dual(f, df), backend=backend)
        torch.testing.assert_close(tuple(forward_ad.unpack_dual(y)), expected)
    assert y.requires_grad is with_gradient


@needs_triton
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_transforms_of_torch_func_use_the_plain_formula(backend, calls):
    x, f, _ = tensors((3, 4, 5))
    expected = torch.autograd.grad(residual_update(x.requires_grad_(), f, backend="torch").pow(3).sum(), x)[0]
    gradient = torch.func.grad(lambda x, f: residual_update(x, f, backend=backend).pow(3).sum())
    torch.testing.assert_close(gradient(x.detach(), f), expected)
    torch.testing.assert_close(torch.func.vmap(gradient)(x.detach(), f), expected)
    assert not calls


# ---------------------------------------------------------------------------------------------------- training
def losses():
    torch.manual_seed(0)
    model = timm.create_model("vit_small_ortho", img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2,
                              num_classes=10).to(DEVICE).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    images, classes = torch.randn(2, 3, 32, 32).to(DEVICE), torch.arange(2).to(DEVICE)
    values = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return torch.tensor(values)


@needs_triton
def test_training_steps_agree_on_all_backends(calls):
    with use_backend("torch"):
        expected = losses()
    assert not calls
    assert expected[-1] < 0.8 * expected[0]
    with use_backend("triton"):
        measured = losses()
    assert calls["update"] == calls["gradients"] >= 15 * 4
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- bad input
X = torch.ones(2, 3)


def test_an_unknown_backend_is_refused(monkeypatch):
    known = "known are 'auto', 'torch', 'triton'; did you mean 'triton'?"
    for parallel in (0.0, 1.0, torch.tensor(0.5)):
        with pytest.raises(ValueError, match=re.escape(f"unknown backend 'tritn', {known}")):
            residual_update(X, X, parallel=parallel, backend="tritn")
    with pytest.raises(ValueError, match=re.escape(f"unknown backend 'tritn', {known}")), use_backend("tritn"):
        pass
    monkeypatch.setattr(backends._contexts, "active", [["Triton", False]])
    with pytest.raises(ValueError, match=re.escape(f"unknown TIMM_ORTHO_BACKEND 'Triton', {known}")):
        residual_update(X, X)


def test_triton_is_refused_if_it_cannot_run(monkeypatch):
    monkeypatch.setattr(backends, "TRITON_IS_INSTALLED", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = X.to("meta")
    with pytest.raises(RuntimeError, match="backend 'triton' cannot run: there are no kernels for tensors on 'meta'"):
        residual_update(x, x, backend="triton")
    for value in ("0", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(RuntimeError, match=r"backend 'triton' cannot run: .* on the CPU, .* TRITON_INTERPRET=1"):
            residual_update(X, X, backend="triton")
    monkeypatch.setattr(backends, "TRITON_IS_INSTALLED", False)
    with pytest.raises(RuntimeError, match=r"^backend 'triton' cannot run: Triton is not installed; choose 'torch'"):
        residual_update(X, X, backend="triton")
    with use_backend("triton"), pytest.raises(RuntimeError, match=r"an argument, use_backend or TIMM_ORTHO_BACKEND$"):
        residual_update(X, X)
