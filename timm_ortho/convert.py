"""The one door through which a model gets its connections."""
import operator
from itertools import repeat
from typing import Any, Collection, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from torch import nn

from ._compat import is_sharded
from .connections import Connection, create_connection
from .families import TIMM, Family, family_of, is_residual, routed_class, written_class
from .skips import Skip, create_skip, move_into, move_out_of

__all__ = ["Site", "UnsupportedModelError", "connect", "sites"]

ModelT = TypeVar("ModelT", bound=nn.Module)


class UnsupportedModelError(ValueError):
    """A model has residual blocks that are not in the table of families, or none that are, or it is sharded already.

    Attributes:
        unsupported: Names of the classes that are not.
    """

    def __init__(self, message: str, unsupported: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.unsupported = tuple(unsupported)


class Site(NamedTuple):
    """One residual addition of a converted model.

    Attributes:
        layer: Index of its block, counted through the model from 0.
        kind: What the branch is, see :class:`timm_ortho.families.Family`: ``attention``, ``mlp``, ``conv``, ...
        name: Where the connection is in the model: ``blocks.0.connection_attention``.
        connection: The module with ``forward(x, f)``.
    """

    layer: int
    kind: str
    name: str
    connection: Connection


def connect(
        model: ModelT,
        connection: str = "feature",
        *,
        eps: float = 1e-6,
        prob: float = 1.0,
        layers: Optional[Iterable[int]] = None,
        start: str = "orthogonal",
        skip: str = "identity",
        skip_branches: Optional[int] = None,
        skip_rank: Optional[int] = None,
        skip_seed: int = 0,
) -> ModelT:
    """Give every residual addition of a model a connection, in place, or replace those it has.

    May be called at any time, in the middle of training too: parameters, buffers, hooks and the state dict's keys stay
    as they are. ``hybrid`` adds two parameters a site, which start afresh at each call and which an existing optimizer
    must be told of; any other connection takes them away. After ``fully_shard`` a model stays sharded, and what it has
    can be replaced by connections without parameters.

    Args:
        model: Any module that contains supported blocks: timm's models, their ``features_only`` forms, your own, with
            adapters in the blocks or without.
        connection: ``linear``, ``feature``, ``global`` or ``hybrid``.
        eps: Added to |x|^2.
        prob: Probability pi of the orthogonal form, drawn for each site and step in training (not for ``hybrid``).
        layers: Indices of the blocks that carry the connection, the others being linear; None for all.
        start: Where ``hybrid`` starts: ``orthogonal`` or ``linear``.
        skip: Transform P of the stream at every addition, whatever ``layers`` says, so that y = P x + a f_par +
            b f_orth with f taken apart along and across P x: ``identity``, ``idempotent_mr``, ``idempotent_cmr``,
            ``orthogonal_tp``, ``orthogonal_random`` or ``scaled`` (P = I / L for the model's L sites), see
            :mod:`timm_ortho.skips`. Where a block changes shape, x is its projected shortcut, whose convolution may
            apply P by its weights.
        skip_branches: B of the idempotent ones; None for as many as there are channels.
        skip_rank: Their rank, in place of ``skip_branches``; a rank that all widths of the model must allow.
        skip_seed: Of ``orthogonal_random``, which draws another rotation for each site.

    Returns:
        The same model.

    Raises:
        ValueError: An unknown name, or a value outside its range. The model is then as it was.
        UnsupportedModelError: No supported block, some residual blocks that are not, or sharded blocks that would need
            another class or new parameters. The model is then as it was.
        timm_ortho.routing.RoutingError: The installed timm's block is not the one that the table describes.
    """
    blocks = _supported_blocks(model)
    chosen = _chosen_layers(layers, len(blocks))
    arguments = dict(eps=eps, prob=prob, start=start)
    create_connection(connection, **arguments)  # raises before anything is changed, even if no layer is chosen
    skips = _make_skips(blocks, skip, branches=skip_branches, rank=skip_rank, seed=skip_seed)
    converted = []
    for layer, (block, family, kinds) in enumerate(blocks):
        here = dict(arguments, connection=connection) if layer in chosen else dict(eps=eps, connection="linear")
        made = _make_connections(block, family, kinds, here, skips)
        cls = routed_class(family, kinds)
        _check_fixed(model, block, cls, made.values())
        converted.append((block, cls, made, family.projection(block)))
    for block, cls, connections, projection in converted:
        if not isinstance(block, cls):
            block.__class__ = cls
        move_out_of(projection)
        for name, module in connections.items():
            setattr(block, name, module)
            module.arrives_transformed = move_into(projection, module.skip)
    return model


def sites(model: nn.Module) -> List[Site]:
    """The residual additions of a converted model, block by block; empty for a model without connections."""
    found = []
    layer = -1
    for prefix, block in model.named_modules():
        family = family_of(block)
        if family is None:
            continue
        here = [(kind, name) for kind, name in family.sites.items() if hasattr(block, name)]
        layer += bool(here)
        for kind, attribute in here:
            name = f"{prefix}.{attribute}" if prefix else attribute
            found.append(Site(layer, kind, name, getattr(block, attribute)))
    return found


def _supported_blocks(model: nn.Module) -> List[Tuple[nn.Module, Family, Tuple[str, ...]]]:
    """Every block that adds something to a stream as it is configured, its family and the kinds of its sites.

    A module from elsewhere within one of timm's blocks (LoRA, an adapter) is part of its branch, whatever it adds.
    """
    blocks, unsupported, within = [], [], set()
    for module in model.modules():
        family = family_of(module)
        if family is not None:
            kinds = family.reached(module)
            blocks += [(module, family, kinds)] if kinds else []
            within.update(module.modules())
            continue
        cls = written_class(module)
        if is_residual(cls) and (module not in within or cls.__module__.startswith("timm.")):
            unsupported.append(f"{cls.__module__}.{cls.__qualname__}")
    if blocks and not unsupported:
        return blocks
    found = [f"{family.module}.{family.block}" for _, family, _ in blocks]
    names = ", ".join(dict.fromkeys(found)) or "none"
    without = ", ".join(dict.fromkeys(unsupported)) or "none"
    raise UnsupportedModelError(
        f"cannot connect {type(model).__name__} ({TIMM}): supported residual blocks found: {names}; "
        f"residual blocks found that are not supported: {without}. timm-ortho list shows what is supported; what wraps "
        "other layers, of the head say, can be put on after the model is connected. The model is unchanged.",
        tuple(dict.fromkeys(unsupported)))


def _check_fixed(model: nn.Module, block: nn.Module, cls: type, connections: Iterable[Connection]) -> None:
    """Refuses what a block that is sharded or parametrized cannot become: its class and parameters are fixed."""
    wrapped = type(block) is not written_class(block)
    grows = any(True for connection in connections for _ in connection.parameters())
    if (wrapped and not isinstance(block, cls)) or (grows and (wrapped or is_sharded(block))):
        raise UnsupportedModelError(
            f"cannot connect {type(model).__name__} like this any more, since its {type(block).__name__} is sharded or "
            "parametrized, which fixes its class and its parameters: connect first, then fully_shard. The model is "
            "unchanged.")


def _chosen_layers(layers: Optional[Iterable[int]], count: int) -> Collection[int]:
    if layers is None:
        return range(count)
    try:
        given = [operator.index(layer) for layer in layers]  # NumPy's integers too, and whatever can be read only once
    except TypeError:
        raise ValueError(f"layers must be block indices in [0, {count - 1}], got {layers!r}") from None
    wrong = [layer for layer in given if not 0 <= layer < count]
    if wrong:
        raise ValueError(f"layers must be block indices in [0, {count - 1}], got {wrong[0]} in {given}")
    return set(given)


def _make_connections(
        block: nn.Module,
        family: Family,
        kinds: Sequence[str],
        arguments: Dict,
        skips: Iterator[Optional[Skip]],
) -> Dict[str, Connection]:
    parameter = next(block.parameters(), None)
    where = {} if parameter is None else dict(device=parameter.device, dtype=parameter.dtype)
    dims, branch_first = family.dims(block), family.branch_first
    made = {}
    for kind in kinds:
        of_site = dict(
            dim=dims[kind], keep=family.keep, branch_first=branch_first[kind], tokens_apart=family.tokens_apart,
            skip=next(skips))
        made[family.sites[kind]] = create_connection(**of_site, **where, **arguments).train(block.training)
    return made


def _make_skips(
        blocks: Sequence[Tuple[nn.Module, Family, Sequence[str]]], skip: str, **arguments: Any,
) -> Iterator[Optional[Skip]]:
    """The transform of each site in order, None for the stream as it is.

    Raises:
        ValueError: Unknown, or not for a width of the model.
    """
    if skip == "identity" and arguments["branches"] is None and arguments["rank"] is None:
        create_skip(skip, 1, **arguments)  # what else is given is checked; no block is asked how wide its stream is
        return repeat(None)
    places = []
    for block, family, kinds in blocks:
        widths, dims = family.widths(block), family.dims(block)
        places += [(widths[kind], dims[kind]) for kind in kinds]
    skips = [
        create_skip(skip, width, dim=dim, count=len(places), site=site, **arguments)
        for site, (width, dim) in enumerate(places)
    ]
    return iter([None] * len(skips) if skip == "identity" else skips)
