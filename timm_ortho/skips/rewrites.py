"""A network with a transform of the stream, written as another one with the same outputs (Wang et al., 2017).

Both of the paper's equivalences are a change of the basis in which the stream is kept. With orthogonal T_i put
z_i = T_i x_i, so that a block y = P x + F(x) becomes

    z_{i+1} = (T_{i+1} P_i T_i^T) z_i + T_{i+1} F_i(T_i^T z_i)

:func:`absorb` (Theorem 1, Eq. 12 and 13) takes T_i = T_{i+1} P_i and T = I behind the last block of a width: every skip
is the identity. With one Q for all blocks that is z_1 = Q^L x_1 and F_i = Q^(L-i) F(Q^(i-L-1) .).
:func:`diagonalise` (Eq. 19 to 23) takes T = U with P = U^T Lambda U: every skip is a choice of coordinates, Lambda of
zeros and ones, and U^T stands behind the last block.

Both keep every inner product, hence the connection as it is: what is parallel or orthogonal to P x stays so. Where a
block changes the width, the projection of its input gets the new basis: the theorem holds for each width by itself.

The added maps are 1x1 convolutions (linear layers for tokens) before the first norm of a branch and behind its last
layer, :class:`ChangeOfBasis` in the model, whose weights are fixed and are stored with it.
"""
import copy
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple, TypeVar

import torch
from torch import Tensor, nn

from ..blocks import spec_of
from ..connections import Site, sites
from .transforms import Skip

ModelT = TypeVar("ModelT", bound=nn.Module)

# Of a block class and a kind of site: the layer that begins the branch and the one that ends it. Only blocks in
# which nothing acts on the stream itself but the skip.
_BRANCHES: Dict[Tuple[str, str], Tuple[str, str]] = {
    ("timm.models.vision_transformer.Block", "attention"): ("norm1", "drop_path1"),
    ("timm.models.vision_transformer.Block", "mlp"): ("norm2", "drop_path2"),
    ("timm.models.resnetv2.PreActBasic", "conv"): ("norm1", "drop_path"),
    ("timm.models.resnetv2.PreActBottleneck", "conv"): ("norm1", "drop_path"),
}


class SkipRewriteError(ValueError):
    """A network that cannot be rewritten as asked; the message says where and why."""


class ChangeOfBasis(nn.Module):
    """``T x`` along an axis, for a fixed square matrix T."""

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
    """``Lambda x`` for a diagonal of zeros and ones, all that is stored: some channels go on, the others do not."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.matrix[:, None, None] if self.dim == 1 else self.matrix)


class _Place(NamedTuple):
    """A site, its block and the transform that it has."""

    site: Site
    block: nn.Module
    p: Tensor  # float64

    @property
    def projects(self) -> bool:
        """Whether the stream arrives through a projection, in the basis in which that puts it out."""
        return getattr(self.block, "downsample", None) is not None


def absorb(model: ModelT) -> ModelT:
    """Theorem 1: a network with orthogonal skips as one with identity skips and the same outputs.

    Args:
        model: A model with connections (any of them) and a skip at every site that is orthogonal or the identity:
            timm's ViTs of plain blocks, its pre-activation ResNets, the paper's networks. It stays as it is.

    Returns:
        A new model. Features inside it are those of ``model`` in another basis; what follows the blocks sees the same.

    Raises:
        SkipRewriteError: No connections, a skip that is not orthogonal, or blocks whose stream is normalised, gated or
            activated on its way, through which no basis can be carried.
    """
    def bases(places: List[_Place]) -> List[Tensor]:
        found = [torch.eye(len(places[-1].p), dtype=torch.float64)]
        for place in reversed(places):
            found.insert(0, found[0] @ place.p)
        return found

    return _rewritten(model, "absorb", "orthogonal", bases, lambda *_: None)


def diagonalise(model: ModelT) -> ModelT:
    """Section 3.3: a network with idempotent skips as one with diagonal skips of zeros and ones and the same outputs.

    Arguments, result and errors as those of :func:`absorb`, for skips that are idempotent or the identity. Of one width
    all sites must have the same skip, as :func:`timm_ortho.connect` gives them.
    """
    def bases(places: List[_Place]) -> List[Tensor]:
        p = places[0].p
        if any(not torch.equal(place.p, p) for place in places):
            raise SkipRewriteError("diagonalise needs one skip for all sites of a width, got others behind "
                                   f"{places[0].site.name}")
        _, vectors = torch.linalg.eigh(p)  # P is symmetric: Lambda = U P U^T with orthogonal U
        return [vectors.T] * (len(places) + 1)

    def coordinates(place: _Place, u: Tensor, like: Tensor) -> nn.Module:
        return Coordinates((u @ place.p @ u.T).diagonal().round(), place.site.connection.dim, like)

    return _rewritten(model, "diagonalise", "idempotent", bases, coordinates)


def _rewritten(
        model: ModelT,
        verb: str,
        kind: str,
        bases: Callable[[List[_Place]], List[Tensor]],
        skip: Callable[[_Place, Tensor, Tensor], Optional[nn.Module]],
) -> ModelT:
    model = copy.deepcopy(model)
    places = _places(model, verb, kind)
    like = next(model.parameters())
    # the basis in which the stream comes to a block: before the first, the model's own
    arrives: Optional[Tensor] = None
    for chain in _chains(places):
        found = bases(chain)
        first = chain[0]
        if first.projects:
            _insert(first.block, "downsample", found[0], first, like)
        elif arrives is None:  # behind what comes before the first block: W_0 = Q^L W_0^q (Eq. 12)
            _insert(model, "norm_pre" if hasattr(model, "norm_pre") else "stem", found[0], first, like)
        for index, place in enumerate(chain):
            before = arrives if index == 0 and place.projects else found[index]
            begins, ends = _BRANCHES[_key(place)]
            if before is not None:
                _insert(place.block, begins, before.T, place, like, is_before=True)
            _insert(place.block, ends, found[index + 1], place, like)
            place.site.connection.skip = skip(place, found[index], like)
        arrives = found[-1]
    _insert(model, "norm", found[-1].T, places[-1], like, is_before=True)
    return model


def _places(model: nn.Module, verb: str, kind: str) -> List[_Place]:
    """Every site of a model that can be rewritten.

    Raises:
        SkipRewriteError: It cannot.
    """
    name = type(model).__name__
    found = sites(model)
    if not found:
        raise SkipRewriteError(f"{name} has no connections and no skips to {verb}: timm_ortho.connect gives it some")
    if not hasattr(model, "norm") or not (hasattr(model, "norm_pre") or hasattr(model, "stem")):
        raise SkipRewriteError(f"cannot {verb} {name}: where its stream begins and ends is known for timm's "
                               "VisionTransformer and ResNetV2 only")
    places = []
    for site in found:
        block = model.get_submodule(site.name.rpartition(".")[0])
        skip = site.connection.skip
        place = _Place(site, block, torch.empty(0))
        spec = spec_of(block)
        if spec is None or _key(place) not in _BRANCHES:
            raise SkipRewriteError(
                f"cannot {verb} {name}: {site.name} is in a {_key(place)[0]}, where the stream may be normalised, "
                f"gated or activated, which no change of basis passes; it can be done in "
                f"{', '.join(dict.fromkeys(block for block, _ in _BRANCHES))}")
        if skip is not None and not (isinstance(skip, Skip) and getattr(skip, f"is_{kind}")):
            got = repr(skip.name) if isinstance(skip, Skip) else type(skip).__name__
            raise SkipRewriteError(f"{verb} is for {kind} skips, got {got} at {site.name} of {name}")
        p = torch.eye(spec.widths(block)[site.kind], dtype=torch.float64) if skip is None else skip.matrix()
        places.append(place._replace(p=p))
    return places


def _key(place: _Place) -> Tuple[str, str]:
    spec = spec_of(place.block)
    return spec.name if spec else type(place.block).__qualname__, place.site.kind


def _chains(places: List[_Place]) -> List[List[_Place]]:
    """Sites between which the stream goes from one to the next without a projection."""
    chains: List[List[_Place]] = []
    for place in places:
        if place.projects or not chains:
            chains.append([])
        chains[-1].append(place)
    return chains


def _insert(
        module: nn.Module, name: str, matrix: Tensor, place: _Place, like: Tensor, *, is_before: bool = False) -> None:
    """Puts the matrix behind a layer of a module, or before it, unless it is the identity."""
    if not torch.equal(matrix, torch.eye(len(matrix), dtype=matrix.dtype)):
        layers = [getattr(module, name), ChangeOfBasis(matrix, place.site.connection.dim, like)]
        setattr(module, name, nn.Sequential(*(reversed(layers) if is_before else layers)))
