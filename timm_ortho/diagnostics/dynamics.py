"""Norms and angles in the stream, read from the connections by forward hooks.

For each site, averaged over the batch and over tokens or pixels:

    stream = |x|^2    parallel = |f_par|^2    orthogonal = |f_orth|^2    cosine = <x, f> / (|x| |f|)

with x the stream that the site receives and f the branch output. All are taken over the channel axis, whatever the
connection's own scope, so that the numbers of different connections can be compared.
"""
from contextlib import contextmanager
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..functional import decompose

__all__ = ["SiteDynamics", "record_dynamics"]


class SiteLike(Protocol):
    """What is read of a site: :class:`timm_ortho.convert.Site` has it."""

    layer: int
    kind: str
    name: str
    connection: nn.Module


class SiteDynamics(NamedTuple):
    """One site's averages over one batch, as defined at the top of this file."""

    layer: int
    kind: str
    name: str
    stream: float
    parallel: float
    orthogonal: float
    cosine: float


def record_dynamics(model: nn.Module, images: Tensor, sites: Iterable[SiteLike]) -> List[SiteDynamics]:
    """Run ``model`` once in evaluation mode and measure every site.

    The hooks exist only during the call, and no random number is drawn, so training goes on as if nothing had happened.

    Args:
        model: Any model with connections.
        images: One batch, on the model's device.
        sites: The model's sites, from :func:`timm_ortho.convert.sites`.

    Returns:
        One entry for each site, in the order of ``sites``.
    """
    sites = list(sites)
    seen: Dict[int, SiteDynamics] = {}

    def watch(index: int, site: SiteLike):
        def hook(connection: nn.Module, inputs: Any, output: Any) -> None:
            seen[index] = _measure(site, *inputs[:2])

        return site.connection.register_forward_hook(hook)

    handles = [watch(index, site) for index, site in enumerate(sites)]
    try:
        with _evaluation(model), torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return [seen[index] for index in range(len(sites))]


def _measure(site: SiteLike, x: Tensor, f: Tensor) -> SiteDynamics:
    # at least float32: the square of a float16 norm overflows at 256
    dim, (x, f) = site.connection.dim, (t if t.dtype == torch.float64 else t.float() for t in (x, f))
    parallel, orthogonal = decompose(x, f, dim, site.connection.eps)
    squares = [part.square().sum(dim).mean().item() for part in (x, parallel, orthogonal)]
    cosine = nn.functional.cosine_similarity(x, f, dim=dim).mean().item()
    return SiteDynamics(site.layer, site.kind, site.name, *squares, cosine)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
