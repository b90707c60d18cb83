"""Fixtures for the tests of backends and kernels."""
import functools
from collections import Counter

import pytest
from helpers.kernel_cases import kernels

from timm_ortho import backends


@pytest.fixture
def no_default_backend(monkeypatch):
    """Ignore the environment variable TIMM_ORTHO_BACKEND."""
    monkeypatch.setattr(backends, "_default", "auto")


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

    for name in ("update", "gradients"):
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    return counts
