"""Skip transforms: fixed linear maps P of the stream itself, y = P x + f.

From "Orthogonal and Idempotent Transformations for Learning Deep Neural Networks" (Wang et al., 2017), Eq. 1 and 24 to
26, for a stream x of C channels in B branches. P acts along the channel axis, alike on each token or pixel:

| name | P | rank |
| --- | --- | --- |
| ``identity`` | I | C |
| ``idempotent_mr`` | P_MR = 1/B (1 1^T) ⊗ I, a B x B block matrix of identities: the mean of the branches | C/B |
| ``idempotent_cmr`` | I - P_MR, what each branch has beyond that mean; B = 1 is P = 0, no skip connection | C - C/B |
| ``orthogonal_tp`` | M ⊗ ... ⊗ M with M = [[1, -1], [1, 1]] / sqrt(2) | C |
| ``orthogonal_random`` | R_1 ⊗ ... ⊗ R_n of random rotations, others at each site | C |
| ``scaled`` | I / L for L sites, that is residual additions, so that y = x / L + f | C |

Widths that are no power of two have a Kronecker factor for each prime factor of C, the largest first. For a prime p,
M is p x p with entries cas(2 pi (p - 1 - j) k / p) / sqrt(p), cas = cos + sin: Hartley's matrix with its rows in
reverse order, which is Eq. 26 for p = 2 and, like it, orthogonal without a zero. A random rotation is uniform over
SO(p).

P is never formed. The idempotent maps are one mean over the branches; the Kronecker forms are a butterfly, a step for
each prime factor, log2(C) of them for a power of two. Steps are fused, several at a time, into products with a small
matrix of at most 64 rows, because a step alone is bound by memory: 256 channels take two products with 16 x 16 matrices
instead of eight passes over the stream. The backward pass is P^T and keeps nothing.

Half-precision inputs are transformed in float32 (float64 stays float64) and the result is cast once. There are no
parameters, buffers or entries of a state dict: the maps follow from their arguments, the random ones from a seed.
"""
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function

from .._checks import known_name
from .._compat import is_batched, is_plain, is_recorded, is_transformed
from ..backends import accumulate_in, choose_backend, compiled, default
from ..functional import in_dtype
from .kronecker import factors


# ---------------------------------------------------------------------------------------------- the map, plainly
@torch.jit.script_if_tracing  # a trace would have the sizes of one stream in it
def plain_skip(
        x: Tensor, own: float, mean: float, branches: int, matrices: List[List[List[float]]], dim: int,
        transposed: bool = False) -> Tensor:
    """``P x``, in operations that TorchScript, FX and ``torch.export`` know.

    Args:
        x: Stream.
        own: Weight of x in P, unless there are ``matrices``.
        mean: Weight of the mean over the branches in P, likewise.
        branches: B.
        matrices: Factors of the Kronecker product; none for P = ``own`` I + ``mean`` P_MR.
        dim: Channel axis.
        transposed: P^T in place of P.
    """
    dtype = accumulate_in(x.dtype)
    tensors = [torch.tensor(matrix, dtype=dtype, device=x.device) for matrix in matrices]
    return _transformed(x, own, mean, branches, tensors, dim, transposed)


def _transformed(
        x: Tensor, own: float, mean: float, branches: int, tensors: List[Tensor], dim: int, transposed: bool) -> Tensor:
    """:func:`plain_skip` with tensors for the matrices, in the dtype that products are in."""
    width, inner = x.shape[dim], 1
    last = x.stride(dim) == 1  # channels that lie side by side, in tokens and in channels-last, become the last axis
    y = x.movedim(dim, -1) if last else x
    if not last:
        for size in x.shape[dim:][1:]:
            inner = inner * size
    shape = y.shape
    y = y.to(accumulate_in(x.dtype))
    if len(tensors) > 0:
        below = width * inner  # elements from one row of a matrix to the next
        for tensor in tensors:
            size = tensor.shape[0]
            below = below // size
            matrix = tensor.t() if transposed else tensor
            if below == 1:
                y = y.reshape(-1, size) @ matrix.t()
            else:
                parts = y.reshape(-1, size, below)
                y = torch.bmm(matrix.expand(parts.shape[0], size, size), parts)  # matmul would transpose and copy
    elif mean == 0.0:
        y = own * y
    else:
        parts = y.reshape(-1, branches, width // branches * inner)
        means = parts.mean(1, keepdim=True)
        y = means.expand_as(parts) if own == 0.0 else torch.add(own * parts, means, alpha=mean)
    y = in_dtype(y.reshape(shape), x.dtype)
    return y.movedim(-1, dim) if last else y


_compiled = compiled(_transformed)


# --------------------------------------------------------------------------------------------- the map as a module
def _overrides(x: Tensor) -> bool:
    """Whether ``x`` itself, not a mode that is active, has a say in what is called: FX proxies, some subclasses."""
    return not is_plain(x) and has_torch_function((x,))


def _without_autocast(device: str) -> ContextManager:
    """Autocast would round a float32 stream, which ``x + f`` leaves as it is, for a product with a matrix."""
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@torch.compiler.assume_constant_result  # compiled code has them as constants, guarded by these arguments
def _tensors(width: int, seed: str, device: torch.device, dtype: torch.dtype) -> List[Tensor]:
    return [torch.tensor(matrix, dtype=dtype, device=device) for matrix in factors(width, seed)]


_cached_tensors = lru_cache(maxsize=1024)(_tensors)  # in no module: never copied, saved or rounded


class _Mapped(torch.autograd.Function):
    """``P x`` or ``P^T x``. Autograd's own would keep matrices for each token, and round gradients under autocast."""

    @staticmethod
    def forward(ctx, x, skip, transposed):
        ctx.skip, ctx.transposed = skip, transposed
        return skip.compute(x, transposed).detach()  # no view: gradients are added to it in place

    @staticmethod
    def backward(ctx, g):
        return ctx.skip.apply_to(g, not ctx.transposed), None, None


class Skip(nn.Module):
    """A fixed linear map of the stream, ``forward(x) -> P x``; :func:`create_skip` makes one by name.

    Attributes:
        name: One of :data:`SKIPS`.
        width: Channels of the stream, C.
        dim: Channel axis.
        branches: B of the idempotent maps, 1 for the others.
        seed: What the rotations are drawn from, empty for other maps.
        rank: Of P.
    """

    matrices: List[List[List[float]]]

    def __init__(
            self, name: str, width: int, dim: int, *, own: float = 1.0, mean: float = 0.0, branches: int = 1,
            seed: str = "") -> None:
        super().__init__()
        self.name = name
        self.width = width
        self.dim = dim
        self.own = own
        self.mean = mean
        self.branches = branches
        self.seed = seed
        self.matrices = factors(width, seed) if name.startswith("orthogonal") else []

    @property
    def rank(self) -> int:
        average = self.width // self.branches  # the width of a mean over the branches
        if self.mean == 0.0:
            return self.width
        return average if self.own == 0.0 else self.width - average

    @property
    def is_orthogonal(self) -> bool:
        return self.name in ("identity", "orthogonal_tp", "orthogonal_random")

    @property
    def is_idempotent(self) -> bool:
        return self.name in ("identity", "idempotent_mr", "idempotent_cmr")

    def forward(self, x: Tensor) -> Tensor:
        """``P x``, of the shape, dtype and memory format of ``x``.

        Raises:
            ValueError: ``x`` has another number of channels.
        """
        if torch.jit.is_scripting():
            return plain_skip(x, self.own, self.mean, self.branches, self.matrices, self.dim)
        else:
            return self.apply_to(x, False)

    def transpose(self, x: Tensor) -> Tensor:
        """``P^T x``; for an orthogonal map what undoes it."""
        return self.apply_to(x, True)

    def apply_to(self, x: Tensor, transposed: bool) -> Tensor:
        """``P x`` or ``P^T x``, in the form that eager mode, a compiler, ``torch.export``, a trace or FX wants."""
        plain = x, self.own, self.mean, self.branches, self.matrices, self.dim, transposed
        if _overrides(x):
            return x.__torch_function__(plain_skip, (type(x),), plain, {})
        if not torch.jit.is_tracing() and (x.dim() == 0 or x.shape[self.dim] != self.width):
            raise ValueError(f"skip {self.name!r} is for {self.width} channels on axis {self.dim}, "
                             f"got a stream of shape {tuple(x.shape)}")
        with _without_autocast(x.device.type):
            if torch.compiler.is_compiling() and not is_recorded():
                return self.compute(x, transposed)
            # matrices made under a transform or by a tensor subclass must not be cached
            if is_recorded() or is_transformed() or is_batched(x) or not is_plain(x):
                return plain_skip(*plain)
            return _Mapped.apply(x, self, transposed)

    def compute(self, x: Tensor, transposed: bool) -> Tensor:
        """The map by itself, in compiled code and in eager mode, where :class:`_Mapped` has its gradient."""
        make = _tensors if torch.compiler.is_compiling() else _cached_tensors
        tensors = make(self.width, self.seed, x.device, accumulate_in(x.dtype)) if self.matrices else []
        compiles = default() == "inductor" and choose_backend(x, x) == "inductor"
        transformed = _compiled if compiles else _transformed
        return transformed(x, self.own, self.mean, self.branches, tensors, self.dim, transposed)

    def matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """P as a dense matrix, [width, width], on the CPU: for checks and for small widths."""
        unit = torch.eye(self.width, dtype=torch.float64, device="cpu")
        return plain_skip(unit, self.own, self.mean, self.branches, self.matrices, 0).to(dtype)

    def extra_repr(self) -> str:
        branches = f", branches={self.branches}" if self.mean else ""
        return f"{self.name!r}, width={self.width}, dim={self.dim}{branches}, rank={self.rank}"


# ---------------------------------------------------------------------------------------------- the table of maps
# name: what P does, and what it is made of, from the arguments of `create_skip`
SKIPS: Dict[str, Tuple[str, Callable[..., Dict[str, Any]]]] = {
    "identity": ("the stream as it is", lambda **_: {}),
    "idempotent_mr": (
        "the mean of the branches (Idempotent-MR)",
        lambda branches, **_: dict(own=0.0, mean=1.0, branches=branches)),
    "idempotent_cmr": (
        "what each branch has beyond their mean (Idempotent-CMR)",
        lambda branches, **_: dict(own=1.0, mean=-1.0, branches=branches)),
    "orthogonal_tp": ("a Kronecker power of one rotation (Orthogonal-TP)", lambda **_: {}),
    "orthogonal_random": (
        "a Kronecker product of random rotations",
        lambda seed, site, **_: dict(seed=f"timm_ortho.skips {seed} {site}")),
    "scaled": ("x / L for L residual additions", lambda count, **_: dict(own=1.0 / count)),
}


def _branches_of(name: str, width: int, rank: int) -> int:
    """B of an idempotent map of this rank."""
    average = rank if name == "idempotent_mr" else width - rank  # the width of the mean over the branches, C / B
    if 0 < average <= width and width % average == 0:
        return width // average
    widths = [each for each in range(1, width + 1) if width % each == 0]
    ranks = widths if name == "idempotent_mr" else sorted(width - each for each in widths)
    raise ValueError(f"{name} of {width} channels has no rank {rank}, its ranks are {', '.join(map(str, ranks))}")


def create_skip(
        skip: str,
        width: int,
        *,
        dim: int = -1,
        branches: Optional[int] = None,
        rank: Optional[int] = None,
        count: int = 1,
        seed: int = 0,
        site: int = 0,
) -> Skip:
    """Make a skip transform by name. Arguments that the named one has no use for are checked and otherwise ignored.

    Args:
        skip: One of :data:`SKIPS`.
        width: Channels of the stream, C.
        dim: Channel axis.
        branches: B of the idempotent maps; None for as many as there are channels, the paper's choice for single-branch
            and depthwise connections.
        rank: Rank of an idempotent map, in place of ``branches``.
        count: L of ``scaled``: residual additions in the network.
        seed: Of ``orthogonal_random``.
        site: Number of the residual addition; with ``seed`` it says which rotations are drawn.

    Raises:
        ValueError: An unknown name, or a value outside its range.
    """
    known_name("skip", skip, SKIPS)
    for name, value in (("width", width), ("branches", branches), ("count", count)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    for name, value in (("rank", rank), ("seed", seed)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    if branches is not None and rank is not None:
        raise ValueError(f"branches and rank say the same thing: give one, got branches={branches} and rank={rank}")
    if skip.startswith("idempotent"):
        branches = branches or width if rank is None else _branches_of(skip, width, rank)
        if width % branches:
            raise ValueError(
                f"branches must divide the width of the stream, got {branches} branches of {width} channels")
    elif rank not in (None, width):
        raise ValueError(f"{skip} has full rank, {width} for this stream, got rank={rank}")
    return Skip(skip, width, dim, **SKIPS[skip][1](branches=branches, count=count, seed=seed, site=site))
