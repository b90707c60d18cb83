"""Measure the update outside a model, with several formulas and backends, relative to `x + f`."""
from argparse import Namespace
from functools import partial
from itertools import product
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .._text import error_text
from ..functional import choose_backend, plain_update, residual_update
from .clock import Candidate, Group, compiled
from .options import PAIRS, STEPS, shape_label

EPS = 1e-6


def appendix_update(x: Tensor, f: Tensor, dim: Optional[int], eps: float = EPS) -> Tensor:
    """Compute the update as Appendix F of the paper does: sums in the dtype of x, division in float32.

    If `dim` is None, each sample is flattened first, which copies channels-last tensors.

    >>> appendix_update(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]]), dim=-1)
    tensor([[2.0000, 1.0000]])
    """
    u, v = (x.flatten(1), f.flatten(1)) if dim is None else (x, f)
    axis = 1 if dim is None else dim
    square = (u * u).sum(axis, keepdim=True).float() + eps
    s = ((u * v).sum(axis, keepdim=True) / square).to(x.dtype)
    if dim is None:
        s = s.reshape(-1, *[1] * (x.dim() - 1))
    return x + (f - s * x)


def operator_groups(options: Namespace) -> list[Group]:
    """Return one group for each shape, layout, precision, scope and step of the operator.

    >>> from timm_ortho.bench import resolve
    >>> options = resolve(dict(device="cpu", what=["operator"], shapes=["2x5x16"], scopes=["feature"]))
    >>> [group.labels["step"] for group in operator_groups(options)]
    ['forward', 'backward', 'both']
    """
    groups = []
    for shape in options.shapes if "operator" in options.what else ():
        layouts = ("tokens",) if len(shape) == 3 else ("nchw", "channels_last")
        # autocast keeps only a ViT's stream in float32
        dtypes = [dtype for dtype in options.dtypes if dtype != "mixed" or layouts == ("tokens",)]
        for layout, dtype, scope, step in product(layouts, dtypes, options.scopes, STEPS):
            labels = dict(layout=layout, scope=scope, dtype=dtype, step=step)
            build = partial(_operator_candidates, options, shape, **labels)
            groups.append(Group({"what": "operator", "shape": shape_label(shape), **labels}, 0, build))
    return groups


def _operator_candidates(
        options: Namespace, shape: tuple[int, ...], layout: str, scope: str, dtype: str, step: str) -> list[Candidate]:
    x, f, g = tensors(options.device, shape, layout, dtype, step)
    dim = None if scope == "global" else -1 if layout == "tokens" else 1
    plain = partial(plain_update, parallel=0.0, orthogonal=1.0, dims=None if dim is None else [dim], eps=EPS)

    def candidate(name: str, formula: Callable[[Tensor, Tensor], Tensor], **details: Any) -> Candidate:
        moved = bytes_moved(x, f, g, step, is_linear=name == "linear")
        keep = partial(formula, x, f) if step == "both" else None
        held = x.nbytes + f.nbytes + g.nbytes
        return Candidate(name, *timed(formula, x, f, g, step), moved=moved, keep=keep, held=held, **details)

    by_torch, by_triton = (
        partial(residual_update, dim=dim, eps=EPS, backend=backend) for backend in ("torch", "triton"))
    return [
        candidate("linear", torch.add), candidate("plain", plain),
        candidate("appendix", partial(appendix_update, dim=dim)),
        *([candidate("compiled", compiled(plain))] if options.compile else []),
        candidate("torch", by_torch),
        *([candidate("torch-compiled", compiled(by_torch))] if options.compile else []),
        candidate("triton", by_triton, **_can_run_triton(x, f)), _copy(options)]


def bytes_moved(x: Tensor, f: Tensor, g: Tensor, step: str, is_linear: bool = False) -> int:
    """Return the bytes that a step must read and write. The result y has the dtype of its gradient g.

    `forward` moves x, f and y. `backward` moves x, the saved y, g, and the gradients of x and f. The backward pass of
    an addition moves nothing, because the gradients of x and f are g itself.

    >>> x = torch.ones(2)
    >>> [bytes_moved(x, x, x, step) // x.nbytes for step in STEPS]
    [3, 5, 8]
    """
    forward, backward = x.nbytes + f.nbytes + g.nbytes, 2 * x.nbytes + f.nbytes + 2 * g.nbytes
    return (step != "backward") * forward + (step != "forward" and not is_linear) * backward


def tensors(device: torch.device, shape: tuple[int, ...], layout: str, dtype: str, step: str) -> list[Tensor]:
    """Return x, f and the gradient of y. Unless the step is `forward`, x and f require gradients.

    They are drawn on the device, because drawing large tensors on a CPU takes longer than measuring them on a GPU.
    """
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x, f, g = (
        torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed)).to(
            dtype, memory_format=memory_format)
        for seed, dtype in enumerate((*PAIRS[dtype], torch.promote_types(*PAIRS[dtype]))))
    return [x.requires_grad_(step != "forward"), f.requires_grad_(step != "forward"), g]


def timed(formula: Callable, x: Tensor, f: Tensor, g: Tensor, step: str) -> tuple[Callable, Callable]:
    """Return `run` and `prepare` of a :class:`Candidate` for one step of a formula."""
    if step == "backward":
        return lambda y: torch.autograd.grad(y, (x, f), g), lambda: formula(x, f)
    if step == "forward":
        return lambda _: formula(x, f), lambda: None
    return lambda _: torch.autograd.grad(formula(x, f), (x, f), g), lambda: None


def _can_run_triton(x: Tensor, f: Tensor) -> dict[str, str]:
    """Return the `backend` of the candidate `triton`, or a `note` with the reason why it cannot run."""
    try:
        return {"backend": choose_backend(x, f, "triton")}
    except RuntimeError as error:
        return {"note": error_text(error)}


def _copy(options: Namespace) -> Candidate:
    source, target = (torch.zeros(options.copy_bytes // 4, device=options.device) for _ in range(2))
    return Candidate("copy", lambda _: target.copy_(source), moved=2 * source.nbytes, held=2 * source.nbytes)
