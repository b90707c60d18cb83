"""Connections: how a branch output joins the stream. Each is an ``nn.Module`` with ``forward(x, f) -> y``, which blocks
that take an attention mask call with that mask as well, ``forward(x, f, attn_mask=mask)``.

| name | y | parameters |
| --- | --- | --- |
| ``linear`` | x + f | none |
| ``feature`` | x + f_orth, one projection for each token or pixel (Oh et al. 2025, Algorithm 1) | none |
| ``global`` | x + f_orth, one projection for each sample (Algorithm 2) | none |
| ``hybrid`` | x + rho sin(theta) f_par + rho cos(theta) f_orth, per token or pixel | rho, theta |

The formula itself is in :mod:`timm_ortho.functional`. Arguments are checked here, when a connection is made.

Padding (NaFlex: token sequences of several lengths in one batch) is what the mask lets no token attend to. The global
scope leaves it out, so that a sample gives the same result padded or not; in the others each token is on its own, and
there is nothing to leave out.

A connection may have a transform of the stream, ``skip`` (:mod:`timm_ortho.skips`). Then x stands for P x everywhere
above: y = P x + a f_par + b f_orth, and f is taken apart along and across P x, the stream that the block hands on.
"""
import math
from typing import Dict, List, Optional, Type

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ._checks import check_eps, check_prob, known_name
from .functional import Weight, checked_update, plain_update

__all__ = [
    "CONNECTIONS", "Connection", "FeatureConnection", "GlobalConnection", "HybridConnection", "LinearConnection",
    "create_connection", "real_tokens",
]

STARTS = {"orthogonal": (1.0, 0.0), "linear": (math.sqrt(2.0), math.pi / 4)}  # hybrid's rho and theta


def real_tokens(attn_mask: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """Which tokens are real, and no padding: those that an attention mask lets any token attend to.

    Under a causal mask that is every token, which may attend to itself at least. A real token that only reads, like a
    class token of its own column of False, has to be let attend to itself as well, or it is taken for padding.

    Args:
        attn_mask: Of self-attention, as ``scaled_dot_product_attention`` takes it, ``[B or 1, heads or 1, N or 1, N]``
            or without the leading axes: boolean, or added to the scores. timm adds the lowest number of the dtype,
            others -inf or -10,000; positional biases are far above.
        x: Stream, ``[B, N, C]``.

    Returns:
        Boolean, ``[B or 1, N, 1]``. None, where all are real, without a mask or with one of another shape.
    """
    if attn_mask is None:
        return None
    if has_torch_function_variadic(attn_mask, x):  # FX: to be settled when the graph is run
        return handle_torch_function(real_tokens, (attn_mask, x), attn_mask, x)
    mask, tokens = attn_mask, x.shape[1]
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if x.dim() != 3 or mask.shape[3] != tokens or mask.shape[2] not in (1, tokens):
        return None
    if mask.dtype != torch.bool:
        mask = mask > -1000.0  # of exp(-1000) nothing is left in any dtype
    return mask.any(2).any(1).unsqueeze(-1)


class Connection(nn.Module):
    """What all connections share.

    Attributes:
        dim: Channel axis of the stream.
        eps: Added to |x|^2, see :mod:`timm_ortho.functional`.
        dims: Axes of one projection, None for every axis but the batch.
        keep: What autograd keeps for the backward pass, see :func:`timm_ortho.functional.residual_update`.
        skip: Transform of the stream, a :class:`timm_ortho.skips.Skip`, or None for the stream as it is.
        arrives_transformed: Whether what puts out the stream, a block's projected shortcut, has applied ``skip`` to it.
    """

    dims: Optional[List[int]]

    def __init__(self, dim: int = -1, eps: float = 1e-6, keep: str = "output") -> None:
        super().__init__()
        check_eps(eps)
        self.dim = dim
        self.eps = float(eps)
        self.keep = known_name("keep", keep, ("output", "branch"))
        self.keep_branch = keep == "branch"
        self.dims = [dim]
        self.skip = None
        self.arrives_transformed = False

    def carried(self, x: Tensor) -> Tensor:
        """``P x``, the stream that the branch output is compared with and added to."""
        if self.skip is None or self.arrives_transformed:
            return x
        return self.skip(x)

    def join(
            self, x: Tensor, f: Tensor, parallel: Weight, orthogonal: Weight, attn_mask: Optional[Tensor]) -> Tensor:
        """The update with weights a and b, in the form that eager mode or TorchScript wants."""
        if self.skip is not None:
            x = self.carried(x)
        mask: Optional[Tensor] = None
        if attn_mask is not None and self.dims is None:
            mask = real_tokens(attn_mask, x)
        if torch.jit.is_scripting():
            return plain_update(x, f, parallel, orthogonal, self.dims, self.eps, mask)
        else:
            return checked_update(x, f, parallel, orthogonal, self.dims, self.eps, mask, self.keep_branch)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps:g}"


class LinearConnection(Connection):
    """The residual connection as it always was: y = x + f. ``eps`` plays no part; diagnostics read it.

    Args:
        dim: Channel axis.
        eps: Kept for diagnostics.
        keep: Plays no part.
        branch_first: Write f + x: the left summand decides the sum's memory layout, and that the rounding of what comes
            after it.
    """

    def __init__(self, dim: int = -1, eps: float = 1e-6, keep: str = "output", branch_first: bool = False) -> None:
        super().__init__(dim, eps, keep)
        self.branch_first = branch_first

    def forward(self, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        if self.skip is not None and not self.arrives_transformed:
            return self.skip.add(x, f)
        return f + x if self.branch_first else x + f

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class FeatureConnection(Connection):
    """Orthogonal-F: y = x + f_orth, one projection along the channel axis for each token or pixel.

    Args:
        dim: Channel axis.
        eps: Added to |x|^2.
        prob: Probability pi of the orthogonal form. In training each call draws between it and the linear form; in
            evaluation the parallel part gets its mean weight, 1 - pi.
        keep: See :func:`timm_ortho.functional.residual_update`.
    """

    def __init__(self, dim: int = -1, eps: float = 1e-6, prob: float = 1.0, keep: str = "output") -> None:
        super().__init__(dim, eps, keep)
        check_prob(prob)
        self.prob = float(prob)

    def forward(self, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        if self.training and 0.0 < self.prob < 1.0:
            # float32 whatever the stream is: bfloat16 would round the probability
            drawn = torch.bernoulli(x.new_full([], 1.0 - self.prob, dtype=torch.float32))
            return self.join(x, f, drawn, 1.0, attn_mask)
        return self.join(x, f, 1.0 - self.prob, 1.0, attn_mask)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", prob={self.prob:g}" if self.prob < 1.0 else "")


class GlobalConnection(FeatureConnection):
    """Orthogonal-G: y = x + f_orth, one projection over every axis but the batch. Arguments as Orthogonal-F's.

    Padding takes no part in it, and comes out as zero. With ``tokens_apart`` it is Orthogonal-F's projection after all,
    for blocks in which tokens have nothing to do with each other (see :mod:`timm_ortho.families`).
    """

    def __init__(
            self,
            dim: int = -1,
            eps: float = 1e-6,
            prob: float = 1.0,
            keep: str = "output",
            tokens_apart: bool = False,
    ) -> None:
        super().__init__(dim, eps, prob, keep)
        self.dims = [dim] if tokens_apart else None


class HybridConnection(Connection):
    """Learned weights for both parts: y = x + rho sin(theta) f_par + rho cos(theta) f_orth, per token or pixel.

    rho >= 0 and theta in [-pi/2, pi/2]; values outside are clamped where they are used, with the gradient passed on
    as if they had not been, so that an optimizer can bring them back.

    Args:
        dim: Channel axis.
        eps: Added to |x|^2.
        start: ``"orthogonal"`` (rho 1, theta 0) or ``"linear"`` (rho sqrt(2), theta pi/4).
    """

    def __init__(self, dim: int = -1, eps: float = 1e-6, start: str = "orthogonal", device=None, dtype=None) -> None:
        super().__init__(dim, eps)
        rho, theta = STARTS[known_name("start", start, STARTS)]
        self.start = start
        # of shape [1]: FSDP2 takes no 0-d parameters
        self.rho = nn.Parameter(torch.tensor([rho], device=device, dtype=dtype))
        self.theta = nn.Parameter(torch.tensor([theta], device=device, dtype=dtype))

    def in_use(self) -> List[Tensor]:
        """``[rho, theta]`` within their bounds, 0-d tensors."""
        rho, theta = self.rho[0], self.theta[0]
        rho = rho + (rho.clamp(min=0.0) - rho).detach()
        half_turn = math.pi / 2
        theta = theta + (theta.clamp(min=-half_turn, max=half_turn) - theta).detach()
        return [rho, theta]

    def weights(self) -> List[Tensor]:
        """``[a, b]`` of the update, 0-d tensors."""
        rho, theta = self.in_use()
        return [rho * theta.sin(), rho * theta.cos()]

    def forward(self, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        weights = self.weights()
        return self.join(x, f, weights[0], weights[1], attn_mask)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, start={self.start!r}"


CONNECTIONS: Dict[str, Type[Connection]] = {
    "linear": LinearConnection,
    "feature": FeatureConnection,
    "global": GlobalConnection,
    "hybrid": HybridConnection,
}


def create_connection(
        connection: str,
        *,
        dim: int = -1,
        eps: float = 1e-6,
        prob: float = 1.0,
        start: str = "orthogonal",
        keep: str = "output",
        branch_first: bool = False,
        tokens_apart: bool = False,
        skip: Optional[nn.Module] = None,
        device=None,
        dtype=None,
) -> Connection:
    """Make a connection by name. Arguments that the named one has no use for are checked and otherwise ignored.

    ``skip`` is a module that maps the stream x to P x and has ``add(x, f) -> P x + f``, as those of
    :func:`timm_ortho.skips.create_skip`.

    Raises:
        ValueError: An unknown name, or a value outside its range.
    """
    cls = CONNECTIONS[known_name("connection", connection, CONNECTIONS)]
    check_eps(eps)
    check_prob(prob)
    known_name("start", start, STARTS)
    if cls is GlobalConnection:
        made = cls(dim, eps, prob, keep, tokens_apart)
    elif cls is FeatureConnection:
        made = cls(dim, eps, prob, keep)
    elif cls is HybridConnection:
        if prob != 1.0:
            raise ValueError(f"hybrid learns its weights and takes no prob, got prob={prob} (allowed: 1.0)")
        made = cls(dim, eps, start, device=device, dtype=dtype)
    else:
        made = cls(dim, eps, branch_first=branch_first)
    made.skip = skip
    return made
