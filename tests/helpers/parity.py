"""Compare an implementation with float64: its error may be a few times the error of the plain formula, and rounding.

The bound of each result and gradient is ``FACTOR`` times the error of the plain formula in the same dtypes, plus
``UNITS`` units in the last place of the largest term. Large terms can cancel, but their rounding errors remain.
"""
import math

import torch
from torch import Tensor, nn

from .oracle import rounded, truth

FACTOR = 2
# Half-precision results are rounded once. Triton's interpreter truncates to bfloat16 and does not round.
UNITS = {torch.float64: 16, torch.float32: 2, torch.bfloat16: 1, torch.float16: 0.5}


def results(function, inputs, needed, upstream):
    """Return the outputs y and h of a function, and gradients, by name.

    Args:
        function: Called with the inputs as keywords. It returns y, or y and h.
        inputs: Values by name. Parameters are used themselves, other tensors are detached.
        needed: Names of the inputs whose gradients are computed.
        upstream: The gradient of y, or the gradients of y and h.
    """
    inputs = {name: t.detach().requires_grad_(name in needed) if isinstance(t, Tensor) and not isinstance(
        t, nn.Parameter) else t for name, t in inputs.items()}
    outputs = function(**inputs)
    values = dict(zip("yh", outputs if isinstance(outputs, tuple) else (outputs,), strict=False))
    if not needed:
        return values
    gradients = torch.autograd.grad(list(values.values()), [inputs[name] for name in needed], upstream)
    return {**{name: t.detach() for name, t in values.items()}, **dict(zip(needed, gradients, strict=True))}


def sizes_of_terms(x, f, a, b, g, dims, eps, mask=None):
    """Return the largest sum of absolute terms in y and in each gradient."""
    if not x.numel():
        return {}
    x, f, g = (t.abs() if mask is None else torch.where(mask, t, 0.0).abs() for t in (x, f, g))
    a, b = abs(float(a)), abs(float(b))
    dims, k = list(range(1, x.dim())) if dims is None else dims, a + b
    n = (x * x).sum(dims, keepdim=True) + eps
    s, t = ((x * other).sum(dims, keepdim=True) / n for other in (f, g))
    terms = {"y": b * f + (1 + k * s) * x, "x": (1 + k * s) * g + k * t * f + 2 * k * s * t * x, "f": b * g + k * t * x}
    return {**{name: term.max().item() for name, term in terms.items()},
            "a": (s * x * g).sum().item(), "b": ((f + s * x) * g).sum().item()}


def problem(measured, reference, exact, sizes):
    """Return which results have a wrong shape, a wrong dtype or a large error, as text, or an empty text.

    Args:
        measured, reference, exact: :func:`results` of the implementation, the plain formula, and float64.
        sizes: Sizes of terms by name. Without a size, it is the largest exact value.
    """
    return "; ".join(filter(None, (
        _difference(name, measured[name], reference[name], value, sizes.get(name, 0.0))
        for name, value in exact.items())))


def _difference(name, got, reference, exact, size):
    label = name if name in "yh" else f"dL/d{name}"
    if (got.shape, got.dtype) != (exact.shape, reference.dtype):
        return f"{label} has shape {list(got.shape)} and {got.dtype}, not {list(exact.shape)} and {reference.dtype}"
    if not exact.numel():
        return ""
    error, of_reference = ((t.double() - exact).abs().max().item() for t in (got, reference))
    size = max(size, exact.abs().max().item())
    allowed = FACTOR * of_reference + UNITS[got.dtype] * torch.finfo(got.dtype).eps * size
    if not math.isfinite(allowed) or error <= allowed:  # the plain formula overflows too
        return ""
    return f"{label} has error {error:.3g}, allowed {allowed:.3g}"


def doubled(inputs):
    return {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in inputs.items()}


def problem_of_update(
        update, inputs, g, dims, eps, mask=None, needed=None, of=lambda x, f, a, b: (x, f, a, b)):
    """Compare ``update(x, f, a, b)`` with the oracle, see :func:`problem`.

    Args:
        update: The implementation.
        inputs: The arguments ``of`` which x, f, a and b are made, by name.
        g: Upstream gradient.
        dims, eps, mask: See :func:`helpers.oracle.truth`.
        needed: Names of the inputs whose gradients are compared, by default all tensors.
        of: Returns x, f, a and b.
    """
    needed = [name for name, t in inputs.items() if isinstance(t, Tensor)] if needed is None else [*needed]

    def computed(update, inputs, g, *more):
        return results(lambda **inputs: update(*of(**inputs), *more), inputs, needed, g)

    exact = doubled(inputs)
    x, f, a, b = of(**exact)
    return problem(computed(update, inputs, g), computed(rounded, inputs, g, dims, eps, mask),
                   computed(truth, exact, g.double(), dims, eps, mask),
                   sizes_of_terms(x, f, a, b, g.double(), dims, eps, mask))
