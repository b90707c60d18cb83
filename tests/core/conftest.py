"""Fixtures for the tests of backends and kernels."""
import functools
from collections import Counter

import pytest
from helpers.kernel_cases import planning

from timm_ortho import connections, functional
from timm_ortho.functional import use_backend
from timm_ortho.update import backend as backends


@pytest.fixture
def no_default_backend():
    """Ignore the environment variable TIMM_ORTHO_BACKEND."""
    with use_backend("auto"):
        yield


@pytest.fixture
def auto_is_triton(monkeypatch):
    """Let ``auto`` select the kernels on the CPU too. They are tested at first use, as on CUDA."""
    def requested_kernels(x, backend=None):
        name = backend or backends.default()
        return None if name == "torch" else name

    for module in (functional, connections):
        monkeypatch.setattr(module, "requested_kernels", requested_kernels)
    monkeypatch.setattr(backends, "_passed", {})


@pytest.fixture(autouse=True)
def plans():
    """Forget the plans of earlier tests, because plans hold the functions that they call."""
    backends.plans.clear()
    yield
    backends.plans.clear()


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the forward and the backward kernel."""
    counts = Counter()

    def counted(name, call):
        @functools.wraps(call)
        def wrapper(*args, **kwargs):
            counts[name] += 1
            return call(*args, **kwargs)
        return wrapper

    if planning is not None:
        for name in ("update", "gradients"):
            monkeypatch.setattr(planning.Plan, name, counted(name, getattr(planning.Plan, name)))
    return counts
