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
instead of eight passes over the stream. On a CPU the stream goes through them in pieces that its cache holds, and where
f is added at once, P x never reaches the memory; on a GPU :mod:`timm_ortho.skip_kernels` takes two products and the sum
in one pass, where the update's kernels would run. The backward pass is P^T in the same way, and keeps nothing. Where
the stream is what a convolution puts out, a block's projected shortcut, P goes into the convolution's weights: (P W) *
x is P (W * x), one product for each input channel in place of one for each pixel of the batch. Autograd keeps P W.

Half-precision inputs are transformed in float32 (float64 stays float64) and the result is cast once. There are no
parameters, buffers or entries of a state dict: the maps follow from their arguments, the random ones from a seed.
"""
import copy
import os
import random
from contextlib import nullcontext
from itertools import repeat
from types import ModuleType
from typing import Any, Callable, ContextManager, Dict, List, Optional
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ._checks import known_name
from ._compat import is_recorded
from .backends import BACKEND_VARIABLE, choose_backend
from .functional import in_dtype
from .kronecker import Matrix, fused, hartley, primes, rotation

__all__ = ["SKIPS", "Skip", "TransformingConv2d", "create_skip", "move_into", "move_out_of", "plain_skip"]

_PIECE = 2 ** 18  # elements; with what is made of them they fit the last cache of a CPU core

# -------------------------------------------------------------------------------------------- the map, plainly
def _accumulate_in(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.jit.script_if_tracing  # a trace would have the sizes of one stream in it
def plain_skip(
        x: Tensor,
        f: Optional[Tensor],
        own: float,
        mean: float,
        branches: int,
        matrices: List[List[List[float]]],
        dim: int,
        transposed: bool = False,
) -> Tensor:
    """``P x``, or ``P x + f``, in operations that TorchScript, FX and ``torch.export`` know.

    Args:
        x: Stream.
        f: Branch output of the same shape, or None.
        own: Weight of x in P, unless there are ``matrices``.
        mean: Weight of the mean over the branches in P, likewise.
        branches: B.
        matrices: Factors of the Kronecker product; none for P = ``own`` I + ``mean`` P_MR.
        dim: Channel axis.
        transposed: P^T in place of P.
    """
    dtype = _accumulate_in(x)
    factors: List[Tensor] = []
    for matrix in matrices:
        factors.append(torch.tensor(matrix, dtype=dtype, device=x.device))
    y = _product(_as_rows(x, x, dim).to(dtype), own, mean, branches, factors, transposed)
    result = x.dtype
    if f is not None:
        y = y + _as_rows(f, x, dim)
        result = torch.promote_types(x.dtype, f.dtype)
    return _as_stream(in_dtype(y, result), x, dim)


def _product(
        x: Tensor, own: float, mean: float, branches: int, factors: List[Tensor], transposed: bool) -> Tensor:
    """``P x`` for x of shape [outer, channels, inner]."""
    outer, channels, inner = x.shape
    if len(factors) == 0:
        if mean == 0.0:
            return own * x
        parts = x.reshape(outer, branches, channels // branches, inner)
        means = parts.mean(1, keepdim=True)
        y = means.expand_as(parts) if own == 0.0 else torch.add(own * parts, means, alpha=mean)
        return y.reshape(outer, channels, inner)
    below = channels  # the channels from one row of a factor to the next
    for factor in factors:
        size = factor.shape[0]
        below = below // size
        matrix = factor.t() if transposed else factor
        if below * inner == 1:
            x = x.reshape(-1, size) @ matrix.t()
        else:
            parts = x.reshape(-1, size, below * inner)
            x = torch.bmm(matrix.expand(parts.shape[0], size, size), parts)  # matmul would go by way of a transpose
    return x.reshape(outer, channels, inner)


def _as_rows(tensor: Tensor, like: Tensor, dim: int) -> Tensor:
    """[outer, channels, inner], a view where the tensor lies in memory as ``like`` does.

    Channels that lie side by side (tokens, channels-last) become the last axis, with ``inner`` = 1.
    """
    if like.stride(dim) == 1:
        return tensor.movedim(dim, -1).reshape(-1, like.shape[dim], 1)
    dim = dim % like.dim()
    outer = 1
    for size in like.shape[:dim]:
        outer = outer * size
    return tensor.reshape(outer, like.shape[dim], -1)


def _as_stream(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    """Back from [outer, channels, inner] to the shape, and the memory format, of ``like``."""
    if like.stride(dim) == 1:
        return rows.reshape(like.movedim(dim, -1).shape).movedim(-1, dim)
    return rows.reshape(like.shape)


# ------------------------------------------------------------------------------------ the map, in eager mode
class _Transformed(torch.autograd.Function):
    """``P x + f`` (f may be None), with ``dL/dx = P^T g`` and ``dL/df = g``; nothing is kept but the map."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, f, skip, transposed):
        return skip.compute(x, f, transposed)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, f, ctx.skip, ctx.transposed = inputs
        ctx.dtypes = x.dtype, None if f is None else f.dtype

    @staticmethod
    def backward(ctx, g):
        grad_x = grad_f = None
        if ctx.needs_input_grad[0]:
            grad_x = _Transformed.apply(g, None, ctx.skip, not ctx.transposed).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            grad_f = g.to(ctx.dtypes[1])
        return grad_x, grad_f, None, None

    @staticmethod
    def jvp(ctx, x_tangent, f_tangent, *_):
        if x_tangent is None:
            return f_tangent
        return _Transformed.apply(x_tangent, f_tangent, ctx.skip, ctx.transposed)


def _without_autocast(device: torch.device) -> ContextManager:
    """Autocast would round a float32 stream, which ``x + f`` leaves as it is, for a product with a matrix."""
    if _knows_autocast(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@torch.compiler.assume_constant_result  # the compiler of torch 2.6 cannot look into it
def _knows_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


# A map's matrices on the devices and in the dtypes that they were asked for: no state, never copied, saved or rounded.
_TENSORS: "WeakKeyDictionary[Skip, Dict[Any, List[Tensor]]]" = WeakKeyDictionary()


@torch.compiler.assume_constant_result
def _factors(skip: "Skip", device: torch.device, dtype: torch.dtype) -> List[Tensor]:
    made = _TENSORS.setdefault(skip, {})
    key = (device, dtype)
    if key not in made:
        with torch.inference_mode(False):
            made[key] = [torch.tensor(matrix, dtype=dtype, device=device) for matrix in skip.matrices]
    return made[key]


def _result(x: Tensor, f: Optional[Tensor]) -> torch.dtype:
    return x.dtype if f is None else torch.promote_types(x.dtype, f.dtype)


class Skip(nn.Module):
    """A fixed linear map of the stream, ``forward(x) -> P x``; :func:`create_skip` makes one by name.

    Attributes:
        name: One of :data:`SKIPS`.
        width: Channels of the stream, C.
        dim: Channel axis.
        branches: B of the idempotent maps, 1 for the others.
        rank: Of P.
        asked: The arguments of :func:`timm_ortho.connect` that it was made with, by name; those left as they are not.
    """

    matrices: List[List[List[float]]]

    def __init__(
            self,
            name: str,
            width: int,
            dim: int,
            *,
            own: float = 1.0,
            mean: float = 0.0,
            branches: int = 1,
            factors: Optional[List[Matrix]] = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.width = width
        self.dim = dim
        self.own = own
        self.mean = mean
        self.branches = branches
        self.matrices = fused(factors or [])
        self.asked: Dict[str, Any] = {"skip": name}

    @property
    def rank(self) -> int:
        if self.mean == 0.0:
            return self.width if self.own else 0
        average = self.width // self.branches
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
        return self.join(x, None)

    def add(self, x: Tensor, f: Tensor) -> Tensor:
        """``P x + f``, in the dtype of ``x + f``."""
        return self.join(x, f)

    def transpose(self, x: Tensor) -> Tensor:
        """``P^T x``; for an orthogonal map what undoes it."""
        self.check(x)
        return _Transformed.apply(x, None, self, True)

    def join(self, x: Tensor, f: Optional[Tensor]) -> Tensor:
        """``P x``, or ``P x + f``, in the form that eager mode, TorchScript, FX or a compiler wants."""
        if torch.jit.is_scripting():
            return plain_skip(x, f, self.own, self.mean, self.branches, self.matrices, self.dim)
        else:
            return self.joined(x, f)

    def joined(self, x: Tensor, f: Optional[Tensor]) -> Tensor:
        arguments = self.own, self.mean, self.branches, self.matrices, self.dim
        if has_torch_function_variadic(x, f):  # FX proxies and tensor subclasses: one call of the plain form
            return handle_torch_function(plain_skip, (x, f), x, f, *arguments)
        if is_recorded() or torch.compiler.is_compiling():
            kernels = None if is_recorded() else self._kernels(x, f)
            if kernels is not None:
                self.check(x)
                matrices = _factors(self, x.device, _accumulate_in(x))
                return kernels.operator(x, f, self.own, self.mean, self.branches, matrices, self.dim, False)
            with _without_autocast(x.device):
                return plain_skip(x, f, *arguments)
        self.check(x)
        return _Transformed.apply(x, f, self, False)

    def check(self, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[self.dim] != self.width:
            raise ValueError(f"skip {self.name!r} is for {self.width} channels on axis {self.dim}, "
                             f"got a stream of shape {tuple(x.shape)}")

    def compute(self, x: Tensor, f: Optional[Tensor], transposed: bool) -> Tensor:
        """``P x`` or ``P x + f`` without gradients.

        No view of anything, so that autograd can add the branch's gradient to it in place.
        """
        kernels = self._kernels(x, f)
        if kernels is not None:
            matrices = _factors(self, x.device, _accumulate_in(x))
            return kernels.transform(x, f, self.own, self.mean, self.branches, matrices, self.dim, transposed)
        return _as_stream(self._rows(x, f, transposed), x, self.dim).detach()

    def _rows(self, x: Tensor, f: Optional[Tensor], transposed: bool) -> Tensor:
        """The result of :meth:`compute` as :func:`_as_rows` has it, piece by piece on a CPU."""
        dtype, result = _accumulate_in(x), _result(x, f)
        rows = _as_rows(x, x, self.dim)
        branch = None if f is None else _as_rows(f, x, self.dim)
        factors = _factors(self, x.device, dtype)

        def product(stream: Tensor) -> Tensor:
            return _product(stream.to(dtype), self.own, self.mean, self.branches, factors, transposed)

        with _without_autocast(x.device):
            # results cannot be written into memory that is there already under torch.func's transforms
            if x.device.type != "cpu" or x.numel() <= _PIECE or torch._C._are_functorch_transforms_active():
                y = product(rows)
                return (y if branch is None else y + branch).to(result)
            y = torch.empty(rows.shape, dtype=result, device=x.device)
            count = max(1, _PIECE * rows.shape[0] // rows.numel())
            added = repeat(None) if branch is None else branch.split(count)
            for out, stream, piece in zip(y.split(count), rows.split(count), added, strict=False):
                if piece is None:
                    out.copy_(product(stream))
                else:
                    torch.add(product(stream), piece, out=out)
        return y

    def _kernels(self, x: Tensor, f: Optional[Tensor]) -> Optional[ModuleType]:
        """:mod:`timm_ortho.skip_kernels` where it is to run and can, imported on first use."""
        if choose_backend(x, x if f is None else f) != "triton":
            return None
        from . import skip_kernels

        rows = [len(matrix) for matrix in self.matrices]
        reason = skip_kernels.why_not(rows, self.width, self.branches, _result(x, f))
        if reason is not None and os.environ.get(BACKEND_VARIABLE) == "triton":
            raise RuntimeError(f"{BACKEND_VARIABLE} 'triton' cannot run for skip {self.name!r}: {reason}; "
                               f"choose 'torch' or 'auto'")
        return skip_kernels if reason is None else None

    def matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """P as a dense matrix, [width, width], on the CPU: for checks and for small widths."""
        if self.matrices:
            dense = torch.ones(1, 1, dtype=torch.float64, device="cpu")
            for matrix in self.matrices:
                dense = torch.kron(dense, torch.tensor(matrix, dtype=torch.float64, device="cpu"))
            return dense.to(dtype)
        each = self.width // self.branches
        average = torch.eye(each, dtype=torch.float64, device="cpu").repeat(self.branches, self.branches)
        unit = torch.eye(self.width, dtype=torch.float64, device="cpu")
        return (self.own * unit + self.mean * average / self.branches).to(dtype)

    def extra_repr(self) -> str:
        branches = f", branches={self.branches}" if self.mean else ""
        return f"{self.name!r}, width={self.width}, dim={self.dim}{branches}, rank={self.rank}"


# ------------------------------------------------------------------------------- the map, in a convolution before it
class TransformingConv2d(nn.Conv2d):
    """``P (W * x)`` as ``(P W) * x``, with P in ``skip``. The weights that are trained, stored and loaded are W."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.skip(self.weight), self.bias)


def move_into(conv: Optional[nn.Module], skip: Optional[Skip]) -> bool:
    """Make a convolution apply a transform to what it puts out, in place, if that can be done by its weights.

    Returns:
        Whether it does so now. Not without either of them, nor for convolutions of other classes (that standardise
        their weights, say), in groups or with a bias.
    """
    if skip is None or type(conv) is not nn.Conv2d or conv.groups > 1 or conv.bias is not None:
        return False
    conv.__class__ = TransformingConv2d
    conv.skip = copy.deepcopy(skip)
    conv.skip.dim = 0  # of the weights
    return True


def move_out_of(conv: Optional[nn.Module]) -> None:
    """What undoes :func:`move_into`; does nothing to other modules."""
    if type(conv) is TransformingConv2d:
        del conv.skip
        conv.__class__ = nn.Conv2d


# ---------------------------------------------------------------------------------------- the table of maps
def _identity(width: int, dim: int, **_: Any) -> Skip:
    return Skip("identity", width, dim)


def _idempotent_mr(width: int, dim: int, branches: Optional[int], rank: Optional[int], **_: Any) -> Skip:
    if rank is not None:
        branches = _branches_of("idempotent_mr", width, rank, rank)
    return Skip("idempotent_mr", width, dim, own=0.0, mean=1.0, branches=branches or width)


def _idempotent_cmr(width: int, dim: int, branches: Optional[int], rank: Optional[int], **_: Any) -> Skip:
    if rank is not None:
        branches = _branches_of("idempotent_cmr", width, rank, width - rank)
    return Skip("idempotent_cmr", width, dim, own=1.0, mean=-1.0, branches=branches or width)


def _branches_of(name: str, width: int, rank: int, average: int) -> int:
    """B of the rank; ``average`` is the width of the mean over the branches, C / B."""
    if 0 < average <= width and width % average == 0:
        return width // average
    widths = [each for each in range(1, width + 1) if width % each == 0]
    ranks = widths if name == "idempotent_mr" else sorted(width - each for each in widths)
    raise ValueError(f"{name} of {width} channels has no rank {rank}, its ranks are {', '.join(map(str, ranks))}")


def _orthogonal_tp(width: int, dim: int, **_: Any) -> Skip:
    return Skip("orthogonal_tp", width, dim, factors=[hartley(p) for p in primes(width)])


def _orthogonal_random(width: int, dim: int, seed: int, site: int, **_: Any) -> Skip:
    # Python's own generator: its random() gives the same numbers on every machine and in every release
    draw = random.Random(f"timm_ortho.skips {seed} {site}")
    return Skip("orthogonal_random", width, dim, factors=[rotation(p, draw) for p in primes(width)])


def _scaled(width: int, dim: int, count: int, **_: Any) -> Skip:
    return Skip("scaled", width, dim, own=1.0 / count)


SKIPS: Dict[str, Callable[..., Skip]] = {
    "identity": _identity,
    "idempotent_mr": _idempotent_mr,
    "idempotent_cmr": _idempotent_cmr,
    "orthogonal_tp": _orthogonal_tp,
    "orthogonal_random": _orthogonal_random,
    "scaled": _scaled,
}


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
        if branches is not None and width % branches:
            raise ValueError(
                f"branches must divide the width of the stream, got {branches} branches of {width} channels")
    elif rank not in (None, width):
        raise ValueError(f"{skip} has full rank, {width} for this stream, got rank={rank}")
    made = SKIPS[skip](width, dim, branches=branches, rank=rank, count=count, seed=seed, site=site)
    given = dict(skip_branches=branches, skip_rank=rank, skip_seed=seed or None)
    made.asked.update({name: value for name, value in given.items() if value is not None})
    return made
