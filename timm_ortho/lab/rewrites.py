"""Rewrite a network that has skip transforms as an equivalent network (Wang et al., 2017).

Both equivalences of the paper change the basis of the stream. With an orthogonal T_i and z_i = T_i x_i, a block
y = P x + F(x) becomes

    z_{i+1} = (T_{i+1} P_i T_i^T) z_i + T_{i+1} F_i(T_i^T z_i)

If a block changes the stream's shape, it projects its shortcut and begins a new *chain* of blocks. Each chain has its
own matrices T_i, and the projected shortcut also applies the new basis.

:func:`absorb` (Theorem 1, Eq. 12 and 13) chooses T_i = T_{i+1} P_i, and T = I after the last block of each chain. Every
skip becomes the identity. If all L blocks of a chain have P = Q, then T_i = Q^(L+1-i) and T_i^T = Q^(i-L-1). In this
case z_1 = Q^L x_1, and block i adds Q^(L-i) F_i(Q^(i-L-1) z_i) to the stream.

:func:`diagonalise` (Eq. 19 to 23) chooses T_i = U for all i, where P = U^T Lambda U. Every skip becomes Lambda, a
diagonal matrix of zeros and ones, and U^T follows the last block.

Both rewrites preserve inner products over all channels. Components parallel and orthogonal to P x stay parallel and
orthogonal, so the connections do not change. A connection with groups of channels, or of a class that is not in this
package, may depend on the basis. Both rewrites raise an error for such connections.

The added maps (:class:`ChangeOfBasis`) are 1x1 convolutions, or linear layers for tokens. They are before the first
norm of a branch and after its last layer, after projected shortcuts and the stem, and before the model's last norm.
Their weights are fixed and part of the state dict.
"""
import copy
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple, TypeVar

import torch
from torch import Tensor, nn

from ..blocks import spec_of
from ..connections import Connection
from ..model_sites import Site, sites
from ..skips import IDEMPOTENT, Skip

ModelT = TypeVar("ModelT", bound=nn.Module)

# (block class, kind of site) -> first and last layer of the branch. These blocks do not normalise the stream itself.
_BRANCHES: Dict[Tuple[str, str], Tuple[str, str]] = {
    ("timm.models.vision_transformer.Block", "attention"): ("norm1", "drop_path1"),
    ("timm.models.vision_transformer.Block", "mlp"): ("norm2", "drop_path2"),
    ("timm.models.resnetv2.PreActBasic", "conv"): ("norm1", "drop_path"),
    ("timm.models.resnetv2.PreActBottleneck", "conv"): ("norm1", "drop_path"),
}


_SKIPS = {"orthogonal": ("identity", "orthogonal_tp", "orthogonal_random"), "idempotent": ("identity", *IDEMPOTENT)}


class SkipRewriteError(ValueError):
    """A network cannot be rewritten; the message contains the site and the reason."""


class ChangeOfBasis(nn.Module):
    """Compute ``T x`` along an axis, for a fixed square matrix T.

    Args:
        matrix: T, ``[width, width]``.
        dim: Channel axis.
        like: Tensor with the device and dtype of the stored matrix.
    """

    matrix: Tensor

    def __init__(self, matrix: Tensor, dim: int, like: Tensor) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("matrix", matrix.to(like.device, like.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 1:
            return nn.functional.conv2d(x, self.matrix[:, :, None, None])
        return nn.functional.linear(x, self.matrix)

    def extra_repr(self) -> str:
        return f"width={self.matrix.shape[0]}, dim={self.dim}"


class Coordinates(ChangeOfBasis):
    """Compute ``Lambda x`` for a diagonal matrix of zeros and ones, stored as its diagonal."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.matrix[:, None, None] if self.dim == 1 else self.matrix)


class _SiteWithSkip(NamedTuple):
    """A site (residual addition), its block, the first and last layer of its branch, and P as a float64 matrix."""

    site: Site
    block: nn.Module
    layers: Tuple[str, str]
    p: Tensor

    @property
    def projects(self) -> bool:
        """Whether the block projects its shortcut to another shape."""
        return getattr(self.block, "downsample", None) is not None


def absorb(model: ModelT) -> ModelT:
    """Return an equivalent network with identity skips, for a network with orthogonal skips (Theorem 1).

    Args:
        model: A model of timm's ``vision_transformer.Block``, ``PreActBasic`` or ``PreActBottleneck``, with the
            connections ``linear``, ``feature``, ``global`` or ``hybrid``, without groups. The skip of each site is
            orthogonal or the identity. The model is not changed.

    Returns:
        A new model with the same outputs. Its intermediate features are in the new basis.

    Raises:
        SkipRewriteError: The model has no connections, is neither a VisionTransformer nor a ResNetV2 (as Wang et al.'s
            networks are), or has a skip that is not orthogonal; or a change of basis may change the result, because
            connections have groups or are not from this package, or because a block may normalise, gate or activate its
            stream.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_test_ortho", skip="orthogonal_tp").eval()
        >>> x = torch.ones(1, 3, 8, 8)
        >>> torch.allclose(absorb(model)(x), model(x), atol=1e-5)
        True
    """
    def bases(chain: List[_SiteWithSkip]) -> List[Tensor]:
        matrices = [torch.eye(len(chain[-1].p), dtype=torch.float64)]
        for entry in reversed(chain):
            matrices.insert(0, matrices[0] @ entry.p)
        return matrices

    return _rewritten(model, "absorb", "orthogonal", bases)


def diagonalise(model: ModelT) -> ModelT:
    """Return an equivalent network with diagonal skips, for a network with idempotent skips (Section 3.3).

    Args:
        model: A model that :func:`absorb` supports, but with skips that are idempotent or the identity. All sites of a
            chain must have the same skip.

    Returns:
        A new model with the same outputs, whose skips are diagonal matrices of zeros and ones.

    Raises:
        SkipRewriteError: The model has no connections, is unsupported, or has an unsupported connection or block; a
            skip is not idempotent; or sites of a chain have different skips.

    Example:
        >>> import timm
        >>> model = diagonalise(timm.create_model("vit_test_ortho", skip="idempotent_mr", skip_branches=2))
        >>> model.blocks[0].connection_mlp.skip
        Coordinates(width=32, dim=-1)
    """
    def bases(chain: List[_SiteWithSkip]) -> List[Tensor]:
        p = chain[0].p
        if any(not torch.equal(entry.p, p) for entry in chain):
            raise SkipRewriteError("diagonalise requires the same skip at all sites of a width, got different skips "
                                   f"after {chain[0].site.name}")
        _, vectors = torch.linalg.eigh(p)  # P is symmetric: Lambda = U P U^T with orthogonal U
        return [vectors.T] * (len(chain) + 1)

    return _rewritten(model, "diagonalise", "idempotent", bases)


def _rewritten(
        model: ModelT, verb: str, kind: str, bases: Callable[[List[_SiteWithSkip]], List[Tensor]]) -> ModelT:
    """Return a copy of a model whose stream is in new bases.

    Args:
        model: A model with connections.
        verb: Name of the rewrite, for errors.
        kind: Required kind of its skips, ``"orthogonal"`` or ``"idempotent"``.
        bases: Returns the matrices T before each site of a chain and after its last site. In these bases, every skip
            is a diagonal matrix of zeros and ones.
    """
    model = copy.deepcopy(model)
    all_sites = _sites_with_skips(model, verb, kind)
    like = next(model.parameters())
    incoming: Optional[Tensor] = None  # basis of the stream before a chain; None before the first block
    for chain in _chains(all_sites):
        matrices = bases(chain)
        first = chain[0]
        if first.projects:
            _insert(first.block, "downsample", matrices[0], first, like)
        else:  # transform the input of the first block; Eq. 12 multiplies the first layer's weights
            _insert(model, "norm_pre" if hasattr(model, "norm_pre") else "stem", matrices[0], first, like)
        for entry, before, after in zip(chain, matrices, matrices[1:], strict=False):
            of_branch = incoming if entry.projects else before  # a projected shortcut applies the new basis
            first_layer, last_layer = entry.layers
            if of_branch is not None:
                _insert(entry.block, first_layer, of_branch.T, entry, like, is_before=True)
            _insert(entry.block, last_layer, after, entry, like)
            kept = (after @ entry.p @ before.T).diagonal().round()
            connection = entry.site.connection
            connection.skip = None if kept.all() else Coordinates(kept, connection.dim, like)
        incoming = matrices[-1]
    _insert(model, "norm", matrices[-1].T, all_sites[-1], like, is_before=True)
    return model


def _sites_with_skips(model: nn.Module, verb: str, kind: str) -> List[_SiteWithSkip]:
    """Return the sites of a model with their transforms.

    Raises:
        SkipRewriteError: The model cannot be rewritten.
    """
    name = type(model).__name__
    connected = sites(model)
    if not connected:
        raise SkipRewriteError(f"cannot {verb} {name}: it has no connections; use timm_ortho.connect first")
    if not hasattr(model, "norm") or not (hasattr(model, "norm_pre") or hasattr(model, "stem")):
        raise SkipRewriteError(f"cannot {verb} {name}: only timm's VisionTransformer and ResNetV2 are supported")
    rewritable = []
    for site in connected:
        block = model.get_submodule(site.name.rpartition(".")[0])
        skip = site.connection.skip
        spec = spec_of(block)
        cls = spec.name if spec else type(block).__qualname__
        layers = _BRANCHES.get((cls, site.kind))
        if spec is None or layers is None:
            raise SkipRewriteError(
                f"cannot {verb} {name}: {site.name} is in a {cls}, which may normalise, gate or activate its stream; "
                f"supported blocks are {', '.join(dict.fromkeys(block for block, _ in _BRANCHES))}")
        if type(site.connection).__module__ != Connection.__module__ or site.connection.groups > 1:
            got = f"{type(site.connection).__name__} with groups={site.connection.groups}"
            raise SkipRewriteError(f"cannot {verb} {name}: a change of basis may change the result of {site.name}, a "
                                   f"{got}; use a connection of timm_ortho with groups=1")
        if skip is not None and not (isinstance(skip, Skip) and skip.name in _SKIPS[kind]):
            got = repr(skip.name) if isinstance(skip, Skip) else type(skip).__name__
            raise SkipRewriteError(f"{verb} requires {kind} skips, got {got} at {site.name} of {name}")
        p = torch.eye(spec.widths(block)[site.kind], dtype=torch.float64) if skip is None else skip.matrix()
        rewritable.append(_SiteWithSkip(site, block, layers, p))
    return rewritable


def _chains(all_sites: List[_SiteWithSkip]) -> List[List[_SiteWithSkip]]:
    """Split the sites of a model into chains; the first block, and blocks that project their shortcut, begin one."""
    chains: List[List[_SiteWithSkip]] = []
    for entry in all_sites:
        if entry.projects or not chains:
            chains.append([])
        chains[-1].append(entry)
    return chains


def _insert(
        module: nn.Module, name: str, matrix: Tensor, entry: _SiteWithSkip, like: Tensor, *, is_before: bool = False,
) -> None:
    """Insert a matrix after the layer ``name`` of a module, or before it; do nothing for the identity."""
    if not torch.equal(matrix, torch.eye(len(matrix), dtype=matrix.dtype)):
        layers = [getattr(module, name), ChangeOfBasis(matrix, entry.site.connection.dim, like)]
        setattr(module, name, nn.Sequential(*(reversed(layers) if is_before else layers)))
