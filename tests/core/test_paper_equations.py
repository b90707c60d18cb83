"""Eq. 6, 8, 9 and 12 of Oh et al. (2025), first version, checked on this package's update in float64.

The equations describe one projection of f(x) onto x, with s = <x, f> / b and b = |x|^2 + eps:

    Eq. 6:   dy/dx = I + d f_orth/dx
    Eq. 8:   d(s x)/dx = s I + x f^T / b + x (J^T x)^T / b - 2 <x, f> / b^2 x x^T, where J = df/dx
    Eq. 9:   <x, f_orth> = <x, f> eps / (|x|^2 + eps)
    Eq. 12:  d(s x)/dx f_par = <J x, x> / b s x, for eps near 0
"""
import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from timm_ortho import create_connection

SIZE = 6
X = torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W, V = torch.randn(2, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def branch(x):
    return torch.tanh(x @ W) @ V


def skew(x):
    """<x, f> = 0 for each x."""
    return x @ (W - W.T)


class Case:
    """The stream x, a branch f, its Jacobian J, and the update of a connection with its Jacobian."""

    def __init__(self, name: str, eps: float, x: Tensor, f=branch) -> None:
        connection = create_connection(name, eps=eps)
        shape = (SIZE,) if name == "feature" else (1, 2, SIZE // 2)  # `global` sums over all axes but the batch

        def update(x: Tensor) -> Tensor:
            return connection(x.reshape(shape), f(x).reshape(shape)).flatten()

        self.x, self.f, self.eps, self.b = x, f(x), eps, x @ x + eps
        self.s = (x @ self.f) / self.b
        self.orthogonal = update(x) - x
        self.jacobian = jacobian(f, x)
        self.of_update = jacobian(update, x)
        self.of_parallel = self.jacobian - (self.of_update - torch.eye(SIZE, dtype=torch.float64))  # d(s x)/dx


@pytest.fixture(params=["feature", "global"])
def case(request):
    return lambda eps, x=X, f=branch: Case(request.param, eps, x, f)


@pytest.mark.parametrize("eps", [1e-6, 0.5, 100.0])
def test_equation_9_the_remaining_inner_product(case, eps):
    found = case(eps)
    torch.testing.assert_close(found.x @ found.orthogonal, found.x @ found.f * eps / (found.x @ found.x + eps),
                               rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_equations_6_and_8_the_jacobian(case, eps):
    c = case(eps)
    expected = (c.s * torch.eye(SIZE, dtype=torch.float64) + torch.outer(c.x, c.f) / c.b
                + torch.outer(c.x, c.jacobian.T @ c.x) / c.b - 2 * c.s / c.b * torch.outer(c.x, c.x))
    torch.testing.assert_close(c.of_parallel, expected)


def test_equation_12_the_parallel_component_does_not_vanish(case):
    """Eq. 12 holds for eps near 0. For other eps, the exact result has the additional term 2 s^2 eps / b x."""
    for eps, exact in ((1e-12, False), (0.5, True)):
        c = case(eps)
        through_parallel = c.of_parallel @ (c.s * c.x)
        stated = (c.jacobian @ c.x) @ c.x / c.b * c.s * c.x
        remainder = 2 * c.s**2 * c.eps / c.b * c.x
        assert stated.norm() > 1e-2
        torch.testing.assert_close(through_parallel, stated + (remainder if exact else 0), rtol=1e-9, atol=1e-9)
        assert bool(remainder.norm() > 1e-3) is exact  # without the term, the comparison with eps = 0.5 would fail


@pytest.mark.parametrize(("x", "f"), [
    (X, skew),  # s = 0
    (X, lambda x: x.detach() * 0 + W[0]),  # J = 0, so J x is orthogonal to x
    (torch.zeros_like(X), branch),
])
def test_equation_12_is_zero_in_the_three_cases(case, x, f):
    c = case(1e-12, x, f)
    torch.testing.assert_close(c.of_parallel @ (c.s * c.x), torch.zeros_like(x), rtol=0, atol=1e-9)
