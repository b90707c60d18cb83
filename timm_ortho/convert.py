"""The one door through which a model gets its connections."""
import operator
from functools import partial
from itertools import repeat
from typing import Any, Callable, Collection, Iterable, Iterator, NamedTuple, Optional, Sequence, TypeVar, Union

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._checks import known_name
from ._compat import is_sharded, named_children
from .arguments import keep_in_config
from .blocks import (
    BlockSpec,
    branch_first,
    host_class,
    is_residual,
    library_of,
    reached,
    routed_class,
    spec_of,
    written_class,
)
from .connections import Connection, create_connection, is_unused, layer_name, layers_of, sites
from .skips import create_skip

ModelT = TypeVar("ModelT", bound=nn.Module)


class _Block(NamedTuple):
    """A module with residual additions: those of its class, or connections that its author wrote into it."""

    name: str
    module: nn.Module
    spec: Optional[BlockSpec]
    kinds: tuple[str, ...]  # attributes of the connections where there is no spec

    @property
    def layer(self) -> str:
        """Name of the module that counts as one layer with this block."""
        return layer_name(self.name, self.spec.depth if self.spec else 0)

    def widths(self) -> dict[str, int]:
        """Channels of the stream, by kind."""
        if self.spec is None:
            raise ValueError(f"{type(self.module).__name__} was written with connections and does not say how wide its "
                             "stream is, which a skip has to know")
        return self.spec.widths(self.module)

    def details(self) -> dict[str, dict[str, Any]]:
        """What a connection has to know of its block, by kind."""
        if self.spec is None:
            own = {kind: getattr(self.module, kind) for kind in self.kinds}
            return {kind: dict(dim=made.dim, in_place=made.keep_branch, mask_layout=made.mask_layout)
                    for kind, made in own.items()}
        dims, first = self.spec.dims(self.module), branch_first(host_class(self.module), self.spec)
        shared = dict(in_place=self.spec.keep == "branch", tokens_apart=self.spec.tokens_apart,
                      mask_layout=self.spec.mask_layout)
        return {kind: dict(dim=dims[kind], branch_first=first[kind], **shared) for kind in self.kinds}


class UnsupportedModelError(ValueError):
    """A model has residual blocks of unknown classes, or none of known ones, or it is sharded already.

    Attributes:
        unsupported: Names of the classes that are not.
    """

    def __init__(self, message: str, unsupported: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.unsupported = tuple(unsupported)


def connect(
        model: ModelT,
        connection: Union[str, Callable[..., Connection]] = "feature",
        *,
        eps: float = 1e-6,
        prob: float = 1.0,
        layers: Union[int, Iterable[int], None] = None,
        kinds: Union[str, Iterable[str], None] = None,
        start: str = "orthogonal",
        keep: str = "output",
        skip: str = "identity",
        skip_branches: Optional[int] = None,
        skip_rank: Optional[int] = None,
        skip_seed: int = 0,
) -> ModelT:
    """Give every residual addition of a model a connection, in place, or replace those it has.

    May be called at any time, in the middle of training too: parameters, buffers, hooks and the state dict's keys stay
    as they are. ``hybrid`` adds two parameters a site, which start afresh at each call and which an existing optimizer
    must be told of; any other connection takes them away. They are in the model's ``no_weight_decay()``, which timm's
    optimizers ask. After ``fully_shard`` a model stays sharded, and what it has can be replaced by connections without
    parameters. Connect with ``hybrid`` before DistributedDataParallel, which does not synchronise what comes later.

    Args:
        model: Any module that contains known blocks, with adapters in them or without: models of timm, their
            ``features_only`` forms, of torchvision, of transformers, your own (see :func:`timm_ortho.register_block`);
            also one whose blocks hold a :class:`Connection` as an attribute, which is replaced.
        connection: ``linear``, ``feature``, ``global``, ``hybrid`` or another registered name; or the class of a
            connection, or a function that makes one, called with those of its arguments that it takes: ``dim``,
            ``eps``, ``prob``, ``start``, ``keep``, ``device``, ``dtype``.
        eps: Added to |x|^2.
        prob: Probability pi of the orthogonal form, drawn for each site and step in training (not for ``hybrid``).
        layers: Indices of the blocks that carry the connection, ``1`` or ``[1]``. All other blocks are linear. None for
            all. A block within a block, such as the layer that ends another one's MLP in transformers, belongs to the
            layer of that one.
        kinds: Kinds of branches that carry the connection, as :func:`timm_ortho.sites` names them, the others being
            linear: ``"mlp"`` or ``["mlp"]`` leaves a ViT's attention as it was. None for all.
        start: Where ``hybrid`` starts: ``orthogonal`` or ``linear``.
        keep: ``"branch"`` where something changes a block's output in place: a forward hook, or the next line of the
            model. Autograd then keeps the branch output in place of the sum. Without it the backward pass raises "one
            of the variables needed for gradient computation has been modified by an inplace operation".
        skip: Transform P of the stream at every addition, whatever ``layers`` says, so that y = P x + a f_par +
            b f_orth with f taken apart along and across P x: ``identity``, ``idempotent_mr``, ``idempotent_cmr``,
            ``orthogonal_tp``, ``orthogonal_random`` or ``scaled`` (P = I / L for the model's L sites), see
            :mod:`timm_ortho.skips`. Where a block changes shape, x is its projected shortcut.
        skip_branches: B of the idempotent ones; None for as many as there are channels.
        skip_rank: Their rank, in place of ``skip_branches``; a rank that all widths of the model must allow.
        skip_seed: Of ``orthogonal_random``, which draws another rotation for each site.

    Returns:
        The same model.

    Raises:
        ValueError: An unknown name, a value outside its range, or a connection with another signature. The model is
            then as it was.
        UnsupportedModelError: No known block, residual blocks of unknown classes, or sharded blocks that would need
            another class or new parameters. The model is then as it was.
        timm_ortho.RoutingError: The installed release's block is not the one that the table describes.
    """
    blocks = _blocks(model)
    numbers = list(layers_of(block.layer for block in blocks))
    chosen = _chosen_layers(layers, numbers[-1] + 1)
    chosen_kinds = _chosen_kinds(kinds, blocks)
    arguments: dict[str, Any] = dict(eps=eps, prob=prob, start=start, keep=keep)
    create_connection(connection, **arguments)  # raises before anything is changed, even if no layer is chosen
    skips = _make_skips(blocks, skip, branches=skip_branches, rank=skip_rank, seed=skip_seed)
    converted = []
    for layer, block in zip(numbers, blocks, strict=True):
        carrying = chosen_kinds if layer in chosen else ()
        connections = _make_connections(block, dict(arguments, connection=connection), skips, carrying)
        module = block.module
        for name in connections:
            if not isinstance(getattr(module, name, None), (Connection, type(None))):
                raise ValueError(f"{block.name} has an attribute {name} already: register its class with another kind")
        cls = type(module) if block.spec is None else routed_class(host_class(module), block.spec, block.kinds)
        _check_fixed(model, module, cls, connections.values())
        _check_causal(model, block, connections.values())
        converted.append((module, cls, connections))
    for module, cls, connections in converted:
        if not isinstance(module, cls):
            module.__class__ = cls
        for name, made in connections.items():
            setattr(module, name, made)
    _remove_unused(model)
    _spare_from_weight_decay(model)
    keep_in_config(model)
    return model


def disconnect(model: ModelT) -> ModelT:
    """Give every block its own class back, in place, and take the connections out: what :func:`connect` undoes.

    Connections that an author wrote into a block are part of it: they become ``linear``.

    Args:
        model: Any module, with connections or without.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: Its blocks are sharded or parametrized, which fixes their classes. It is then as it was.
    """
    routed = [module for module in model.modules() if host_class(module) is not written_class(module)]
    for module in routed:
        _check_fixed(model, module, host_class(module), ())
    for module in routed:
        for name, child in list(module.named_children()):
            if isinstance(child, Connection):
                delattr(module, name)
        module.__class__ = host_class(module)
    _remove_unused(model)
    written = [_Block(name, module, None, kinds) for name, module, kinds in _written(model)]
    for block in written:
        for name, made in _make_connections(block, dict(eps=1e-6), repeat(None), carrying=()).items():
            setattr(block.module, name, made)
    _spare_from_weight_decay(model)
    keep_in_config(model)
    return model


def _spare_from_weight_decay(model: nn.Module) -> None:
    """Adds learned connections to ``model.no_weight_decay()``, which timm's optimizers ask: 0 is no neutral value."""
    if isinstance(vars(model).get("no_weight_decay"), partial):  # ours
        del model.no_weight_decay
    names = {f"{site.name}.{name}" for site in sites(model) for name, _ in site.connection.named_parameters()}
    if names:
        names.update(getattr(model, "no_weight_decay", tuple)())
        vars(model)["no_weight_decay"] = partial(set, names)  # does not hold the model: no cycle


def _blocks(model: nn.Module) -> list[_Block]:
    """Every block that adds something to a stream as it is configured.

    A module from elsewhere within a known block (LoRA, an adapter) is part of its branch, whatever it adds.
    """
    blocks, unsupported, within = [], {}, set()
    written = {name: kinds for name, _, kinds in _written(model)}
    for name, module in model.named_modules():
        spec = spec_of(module)
        if spec is not None or name in written:
            kinds = written[name] if spec is None else reached(module, spec)
            block = _Block(name, module, spec, kinds)
            blocks += [block] if kinds else []
            within.update(model.get_submodule(block.layer).modules())
        elif is_residual(module):
            cls = written_class(module)
            of_a_library = cls.__module__.partition(".")[0] in ("timm", "torchvision", "transformers")  # not an adapter
            if of_a_library or module not in within:
                unsupported[f"{cls.__module__}.{cls.__qualname__}"] = cls
    if blocks and not unsupported:
        return blocks
    found = dict.fromkeys(block.spec.name if block.spec else type(block.module).__qualname__ for block in blocks)
    seen = "no residual block found (only forward is searched: register_block has a method to name)"
    if found or unsupported:
        seen = (f"supported residual blocks found: {', '.join(found) or 'none'}; residual blocks found that are not "
                f"supported: {', '.join(unsupported) or 'none'}")
    raise UnsupportedModelError(
        f"cannot connect {type(model).__name__} ({library_of(written_class(model))}): {seen}. timm-ortho list shows "
        "what is supported, timm_ortho.register_block adds a class, timm_ortho.not_residual says that one has no "
        "stream; what wraps other layers, of the head say, can be put on after the model is connected. The model is "
        "unchanged.", tuple(unsupported))


def _written(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """The modules that hold connections as their authors wrote them, and the names of these."""
    for name, module in model.named_modules():
        if host_class(module) is written_class(module):
            kinds = tuple(kind for kind, child in named_children(module)
                          if isinstance(child, Connection) and not is_unused(module, kind, child))
            if kinds:
                yield name, module, kinds


def _remove_unused(model: nn.Module) -> None:
    """Remove connections that no code calls, because the class of their block was replaced."""
    for module in model.modules():
        for name, child in list(module.named_children()):
            if is_unused(module, name, child):
                delattr(module, name)


def _check_causal(model: nn.Module, block: _Block, connections: Iterable[Connection]) -> None:
    """Raise ValueError for a connection with the global scope in a causal block."""
    if block.spec is None or all(connection.dims is not None for connection in connections):
        return
    names = [block.name[:end] for end in range(len(block.name), -1, -1) if block.name[end:end + 1] in ("", ".")]
    if block.spec.is_causal(model.get_submodule(name) for name in names):
        made = next(connection for connection in connections if connection.dims is None)
        raise ValueError(
            f"connection {made.name!r} has one projection for all tokens of a sample, and {block.name} is a causal "
            f"{type(block.module).__name__}: each token would depend on later ones. Use 'feature' or 'hybrid', or "
            "restrict layers to an encoder. The model is unchanged.")


def _check_fixed(model: nn.Module, block: nn.Module, cls: type, connections: Iterable[Connection]) -> None:
    """Refuses what a block cannot become: of one that is sharded or parametrized class and parameters are fixed."""
    if "forward" in vars(block) and written_class(block) is not cls:
        raise UnsupportedModelError(
            f"cannot connect or disconnect {type(model).__name__}: a {type(block).__name__} has a forward set on the "
            "instance, which hides that of its class: undo what put it there first. The model is unchanged.")
    wrapped = type(block) is not written_class(block)
    grows = any(True for connection in connections for _ in connection.parameters())
    if (wrapped and written_class(block) is not cls) or (grows and (wrapped or is_sharded(block) or any(
            isinstance(module, DistributedDataParallel) for module in model.modules()))):
        raise UnsupportedModelError(
            f"cannot connect {type(model).__name__} like this any more, since its {type(block).__name__} is sharded or "
            "parametrized, which fixes its class and its parameters, or in DistributedDataParallel, which fixes those: "
            "connect first, then wrap or shard it. The model is unchanged.")


def _chosen_layers(layers: Union[int, Iterable[int], None], count: int) -> Collection[int]:
    if layers is None:
        return range(count)
    try:
        each = layers if isinstance(layers, Iterable) else [layers]
        given = [operator.index(layer) for layer in each]  # NumPy's integers and iterators too
    except TypeError:
        raise ValueError(f"layers must be block indices in [0, {count - 1}], got {layers!r}") from None
    wrong = [layer for layer in given if not 0 <= layer < count]
    if wrong:
        raise ValueError(f"layers must be block indices in [0, {count - 1}], got {wrong[0]} in {given}")
    return set(given)


def _chosen_kinds(kinds: Union[str, Iterable[str], None], blocks: Sequence[_Block]) -> Collection[str]:
    known = dict.fromkeys(kind.removeprefix("connection_") for block in blocks for kind in block.kinds)
    if kinds is None:
        return known
    given = list(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, str) else [kinds]
    return {known_name("kind of branch", kind, known) for kind in given}


def _make_connections(
        block: _Block, arguments: dict[str, Any], skips: Iterator[Optional[nn.Module]], carrying: Collection[str],
) -> dict[str, Connection]:
    """By attribute of the block; ``linear`` for branches of a kind that is not among those ``carrying``."""
    parameter = next((one for one in block.module.parameters() if one.is_floating_point()), None)  # others: quantized
    where: dict[str, Any] = {} if parameter is None else dict(device=parameter.device, dtype=parameter.dtype)
    linear = dict(eps=arguments["eps"], connection="linear")
    return {
        block.spec.sites[kind] if block.spec else kind: create_connection(
            skip=next(skips), **detail, **where,
            **(arguments if kind.removeprefix("connection_") in carrying else linear)).train(block.module.training)
        for kind, detail in block.details().items()
    }


def _make_skips(blocks: Sequence[_Block], skip: str, **arguments: Any) -> Iterator[Optional[nn.Module]]:
    """The transform of each site in order, None for the stream as it is.

    Raises:
        ValueError: Unknown, or not for a width of the model.
    """
    if skip == "identity" and arguments["branches"] is None and arguments["rank"] is None:
        create_skip(skip, 1, **arguments)  # what else is given is checked; no block is asked how wide its stream is
        return repeat(None)
    places = [(block.widths()[kind], detail["dim"]) for block in blocks for kind, detail in block.details().items()]
    skips = [
        create_skip(skip, width, dim=dim, count=len(places), site=site, **arguments)
        for site, (width, dim) in enumerate(places)
    ]
    return iter([None] * len(skips) if skip == "identity" else skips)
