"""Skip transforms: fixed linear maps P of the stream, y = P x + f.

They come from "Orthogonal and Idempotent Transformations for Learning Deep Neural Networks" (Wang et al., 2017), Eq. 1
and 24 to 26, except ``scaled``, which is from Wikipedia's article "Residual neural network". The stream x has C
channels in B branches. P acts along the channel axis of each token or pixel:

| name | P | rank |
| --- | --- | --- |
| ``identity`` | I | C |
| ``idempotent_mr`` | P_MR = 1/B (1 1^T) ⊗ I, a B x B block matrix of identities: the mean of the branches | C/B |
| ``idempotent_cmr`` | I - P_MR: each branch minus the mean of the branches; 0 for B = 1 | C - C/B |
| ``orthogonal_tp`` | M ⊗ ... ⊗ M; M = [[1, -1], [1, 1]] / sqrt(2) if C is a power of 2 | C |
| ``orthogonal_random`` | R_1 ⊗ ... ⊗ R_n with random rotations R_i, different at each residual addition | C |
| ``scaled`` | I / L for L residual additions, so that y = x / L + f | C |

The Kronecker products have one factor per prime factor of C, the largest first. For a prime p, M is Hartley's matrix
with its rows in reverse order: p x p with entries cas(2 pi (p - 1 - j) k / p) / sqrt(p), where cas = cos + sin. M is
orthogonal, has no zero entry, and equals Eq. 26 for p = 2. A random rotation is uniform over SO(p).

P is not stored as a C x C matrix. The idempotent maps compute one mean over the branches. A Kronecker product needs one
pass over the stream per factor. Memory bandwidth limits each pass, so adjacent factors are multiplied into matrices of
at most 64 rows: 256 channels need two passes with 16 x 16 matrices.

Half-precision inputs are transformed in float32 (float64 stays float64), and the result is cast once. The maps have no
parameters or buffers. They depend only on their arguments, including a seed.
"""
import inspect
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from .._checks import IMPORT_HINT, check_count, check_new_name, known_name
from .._compat import is_plain, is_recorded, is_transformed
from ..update.formula import accumulate_in, in_dtype
from .kronecker import factors


# -------------------------------------------------------------------------------------- the map as a function
@torch.jit.script_if_tracing  # a trace would contain the sizes of one stream as constants
def plain_skip(
        x: Tensor, own: float, mean: float, branches: int, matrices: List[List[List[float]]], dim: int) -> Tensor:
    """Return ``P x`` in operations that TorchScript, FX and ``torch.export`` support.

    P is the Kronecker product of ``matrices`` or, if there are none, ``own`` I + ``mean`` P_MR with B ``branches``.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102 TorchScript compiles the rest of a longer condition
        if has_torch_function_unary(x):  # FX records one call of this function
            return handle_torch_function(plain_skip, (x,), x, own, mean, branches, matrices, dim)
    dtype = accumulate_in(x.dtype)
    tensors = [torch.tensor(matrix, dtype=dtype, device=x.device) for matrix in matrices]
    return _transformed(x, own, mean, branches, tensors, dim)


def _transformed(x: Tensor, own: float, mean: float, branches: int, tensors: List[Tensor], dim: int) -> Tensor:
    """Compute :func:`plain_skip` with the matrices as tensors in the accumulation dtype."""
    width, inner = x.shape[dim], 1
    last = x.stride(dim) == 1  # move channels that are adjacent in memory (tokens, channels-last) to the last axis
    y = x.movedim(dim, -1) if last else x
    if not last:
        for size in x.shape[dim:][1:]:
            inner = inner * size
    shape = y.shape
    y = y.to(accumulate_in(x.dtype))
    if len(tensors) > 0:
        below = width * inner  # divided by the size of each factor, this is the stride of the axis on which it acts
        for matrix in tensors:
            size = matrix.shape[0]
            below = below // size
            if below == 1:
                y = y.reshape(-1, size) @ matrix.t()
            else:
                parts = y.reshape(-1, size, below)
                y = torch.bmm(matrix.expand(parts.shape[0], size, size), parts)
    elif mean == 0.0:
        y = own * y
    else:
        parts = y.reshape(-1, branches, width // branches * inner)
        means = parts.mean(1, keepdim=True)
        y = means.expand_as(parts) if own == 0.0 else own * parts + mean * means
    y = in_dtype(y.reshape(shape), x.dtype)
    return y.movedim(-1, dim) if last else y


# ---------------------------------------------------------------------------------------- the map as a module
@torch.compiler.assume_constant_result  # compiled code contains the result as constants and guards the arguments
def _tensors(width: int, seed: str, device: torch.device, dtype: torch.dtype) -> List[Tensor]:
    return [torch.tensor(matrix, dtype=dtype, device=device) for matrix in factors(width, seed)]


@lru_cache(maxsize=1024)  # as buffers, they would be copied, saved and cast with the module
def _cached_tensors(*arguments: Any) -> List[Tensor]:
    with torch.inference_mode(False):  # training may use the tensors later
        return _tensors(*arguments)


class Skip(nn.Module):
    """A fixed linear map of the stream, ``forward(x) -> P x``. :func:`create_skip` makes one by name.

    Attributes:
        name: One of :data:`SKIPS`.
        width: Channels of the stream, C.
        dim: Channel axis.
        branches: Number of branches B of an idempotent map; 1 for all other maps.
        seed: Seed of the random rotations; empty for all other maps.
        rank: Rank of P.

    Example:
        >>> create_skip("idempotent_mr", 4, branches=2)(torch.tensor([1.0, 2.0, 5.0, 6.0]))
        tensor([3., 4., 3., 4.])
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
        average = self.width // self.branches  # channels of one branch
        if self.mean == 0.0:
            return self.width
        return average if self.own == 0.0 else self.width - average

    def forward(self, x: Tensor) -> Tensor:
        """Return ``P x``, of the shape, dtype and memory format of ``x``.

        Raises:
            ValueError: The number of channels of ``x`` is not ``width`` (not checked by scripted or traced modules).
        """
        if torch.jit.is_scripting():
            return plain_skip(x, self.own, self.mean, self.branches, self.matrices, self.dim)
        else:
            return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        """Return ``P x`` in a form that the active compiler or tracer supports."""
        if not isinstance(x, Tensor):  # FX's proxies have no sizes
            return plain_skip(x, self.own, self.mean, self.branches, self.matrices, self.dim)
        if not torch.jit.is_tracing() and (x.dim() == 0 or x.shape[self.dim] != self.width):
            raise ValueError(f"skip {self.name!r} is for {self.width} channels on axis {self.dim}, "
                             f"got a stream of shape {tuple(x.shape)}")
        is_compiled = torch.compiler.is_compiling() and not is_recorded()
        device = x.device.type
        is_cast = device != "meta" and torch.is_autocast_enabled(device)  # x + f stays in float32, so P x does too
        with torch.autocast(device, enabled=False) if is_cast else nullcontext():
            # matrices made under a functorch transform or by a tensor subclass must not be cached
            if not is_compiled and (is_recorded() or is_transformed() or not is_plain(x)):
                return plain_skip(x, self.own, self.mean, self.branches, self.matrices, self.dim)
            make = _tensors if is_compiled else _cached_tensors
            tensors = make(self.width, self.seed, x.device, accumulate_in(x.dtype)) if self.matrices else []
            return _transformed(x, self.own, self.mean, self.branches, tensors, self.dim)

    def matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return P as a dense matrix ``[width, width]`` on the CPU."""
        unit = torch.eye(self.width, dtype=torch.float64, device="cpu")
        return plain_skip(unit, self.own, self.mean, self.branches, self.matrices, 0).to(dtype)

    def extra_repr(self) -> str:
        branches = f", branches={self.branches}" if self.mean else ""
        return f"{self.name!r}, width={self.width}, dim={self.dim}{branches}, rank={self.rank}"


# ------------------------------------------------------------------------------------------- the table of maps
# name -> (description, function that makes the transform from those arguments of `create_skip` that it accepts)
SKIPS: Dict[str, Tuple[str, Callable[..., nn.Module]]] = {
    "identity": ("the unchanged stream", lambda width, dim: Skip("identity", width, dim)),
    "idempotent_mr": (
        "the mean of the branches (Idempotent-MR)",
        lambda width, dim, branches: Skip("idempotent_mr", width, dim, own=0.0, mean=1.0, branches=branches)),
    "idempotent_cmr": (
        "each branch minus the mean of the branches (Idempotent-CMR)",
        lambda width, dim, branches: Skip("idempotent_cmr", width, dim, own=1.0, mean=-1.0, branches=branches)),
    "orthogonal_tp": (
        "a Kronecker product of fixed orthogonal matrices (Orthogonal-TP)",
        lambda width, dim: Skip("orthogonal_tp", width, dim)),
    "orthogonal_random": (
        "a Kronecker product of random rotations",
        lambda width, dim, seed, site: Skip(
            "orthogonal_random", width, dim, seed=f"timm_ortho.skips {seed} {site}")),
    "scaled": (
        "x / L for L residual additions", lambda width, dim, count: Skip("scaled", width, dim, own=1.0 / count)),
}
IDEMPOTENT = ("idempotent_mr", "idempotent_cmr")  # these have a choice of branches and rank
_PASSED = ("width", "dim", "branches", "count", "seed", "site")  # arguments of functions that make transforms


def register_skip(name: str, make: Callable[..., nn.Module]) -> None:
    """Register a transform of the stream by name, for :func:`timm_ortho.connect` and the argument ``skip`` of models.

    Args:
        name: A Python identifier, so that command lines and config.json can contain it.
        make: A class or function that returns a module with ``forward(x) -> P x``. It must accept ``width``, the number
            of channels, and ``dim``, the channel axis, and may accept ``branches``, ``count``, ``seed`` and ``site``,
            see :func:`create_skip`. It is called once for each site. The first line of its docstring describes the
            transform on model cards.

    Raises:
        ValueError: The name is taken or not an identifier, or ``make`` does not have the required signature.

    Example:
        >>> class Reversed(nn.Module):
        ...     "the channels in reverse order"
        ...     def __init__(self, width, dim):
        ...         super().__init__()
        ...         self.dim = dim
        ...     def forward(self, x):
        ...         return x.flip(self.dim)
        >>> register_skip("reversed", Reversed)
        >>> create_skip("reversed", 3)(torch.tensor([1.0, 2.0, 3.0]))
        tensor([3., 2., 1.])
        >>> del SKIPS["reversed"]
    """
    parameters = inspect.signature(make).parameters
    required = {key for key, parameter in parameters.items()
                if parameter.default is parameter.empty and parameter.kind not in (
                    parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)}
    if not {"width", "dim"} <= parameters.keys() or not required <= set(_PASSED):
        raise ValueError(f"the function of skip {name!r} must accept width and dim, may accept "
                         f"{', '.join(_PASSED[2:])}, and needs defaults for other arguments; got "
                         f"({', '.join(parameters)})")
    check_new_name("skip", name, make, SKIPS.get(name, (None, None))[1])
    described = (getattr(getattr(make, "func", make), "__doc__", None) or "").strip() or "registered by its author"
    SKIPS[name] = (described.splitlines()[0], make)


def known_skip(name: str) -> str:
    """Return the name of a registered transform; raise ValueError for any other value."""
    return known_name("skip", name, SKIPS, IMPORT_HINT)


def _branches_of(name: str, width: int, rank: int) -> int:
    """Return the number of branches B of an idempotent map of this rank."""
    average = rank if name == "idempotent_mr" else width - rank  # channels of one branch, C / B
    if 0 < average <= width and width % average == 0:
        return width // average
    widths = [each for each in range(1, width + 1) if width % each == 0]
    ranks = widths if name == "idempotent_mr" else sorted(width - each for each in widths)
    raise ValueError(f"{name} of {width} channels cannot have rank {rank}; possible ranks are "
                     f"{', '.join(map(str, ranks))}")


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
) -> nn.Module:
    """Make a skip transform by name.

    Arguments that the transform does not need are ignored.

    Args:
        skip: One of :data:`SKIPS`.
        width: Channels of the stream, C.
        dim: Channel axis.
        branches: Number of branches B of an idempotent map. None means C branches, the paper's choice for
            single-branch and depthwise convolutions. Functions of :func:`register_skip` receive None as None.
        rank: Rank of an idempotent map, instead of ``branches``. All other maps accept only ``width``.
        count: Number of sites L of the network, for ``scaled``.
        seed: Seed of ``orthogonal_random``.
        site: Index of the site. ``seed`` and ``site`` determine the random rotations.

    Returns:
        The transform, a :class:`Skip` without parameters, or the module of a function of :func:`register_skip`.

    Raises:
        ValueError: A name is unknown, or a value is outside its range.

    Example:
        >>> create_skip("idempotent_cmr", 8, branches=2)
        Skip('idempotent_cmr', width=8, dim=-1, branches=2, rank=4)
    """
    make = SKIPS[known_skip(skip)][1]
    width, count = check_count("width", width), check_count("count", count)
    seed = check_count("seed", seed, least=None)
    branches = None if branches is None else check_count("branches", branches)
    rank = None if rank is None else check_count("rank", rank, least=None)
    if branches is not None and rank is not None:
        raise ValueError(f"branches determines rank: pass only one, got branches={branches} and rank={rank}")
    if skip in IDEMPOTENT:
        branches = branches or width if rank is None else _branches_of(skip, width, rank)
        if width % branches:
            raise ValueError(
                f"branches must divide the width of the stream, got branches={branches} for {width} channels")
    elif rank not in (None, width):
        raise ValueError(f"{skip} has no choice of ranks, {' and '.join(IDEMPOTENT)} have: omit rank, got rank={rank}")
    arguments = dict(zip(_PASSED, (width, dim, branches, count, seed, site), strict=True))
    return make(**{key: arguments[key] for key in inspect.signature(make).parameters if key in arguments})
