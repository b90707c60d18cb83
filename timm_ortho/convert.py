"""Convert models: :func:`connect` replaces residual additions by connections, :func:`disconnect` undoes this."""
import json
import operator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import repeat
from typing import Any, Callable, Collection, Iterable, Iterator, NamedTuple, Optional, Sequence, TypeVar, Union

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._checks import known_name
from ._compat import is_sharded, named_children
from .arguments import keep_in_config
from .blocks import (
    LIBRARIES,
    BlockSpec,
    branch_first,
    has_source,
    host_class,
    is_residual,
    library_of,
    reached,
    routed_class,
    spec_of,
    written_class,
)
from .connections import Connection, SiteSpec, arguments_of, check_arguments, create_connection, name_of
from .model_sites import connection_in, is_unused, layer_name, layers_of, named_outside, sites
from .saving import keep_for_timm
from .skips import IDEMPOTENT, create_skip, known_skip

ModelT = TypeVar("ModelT", bound=nn.Module)


class _Block(NamedTuple):
    """A residual block: a module of a supported class, or a module whose own code contains connections.

    A module that is both is represented by two blocks.

    Attributes:
        name: Name in ``named_modules()``.
        module: The module.
        spec: Description of the block's class; None if the block's own code contains the connections.
        sites: Kind of each site (residual addition), by the attribute that holds its connection.
    """

    name: str
    module: nn.Module
    spec: Optional[BlockSpec]
    sites: dict[str, str]

    @property
    def layer(self) -> str:
        """Name of the module that ``connect(layers=...)`` counts as this block's layer: the block or a parent of it."""
        return layer_name(self.name, self.spec.depth if self.spec else 0)

    @property
    def label(self) -> str:
        """Name for error messages."""
        return self.name or "the model"

    def widths(self) -> dict[str, int]:
        """Return the number of channels of the stream, for each attribute."""
        if self.spec is None:
            raise ValueError(f"{self.label} is a {type(self.module).__name__}, whose own code contains its "
                             "connections: a skip needs the width of the stream, which is unknown; omit skip and "
                             "skip_rank")
        widths = self.spec.widths(self.module)
        return {attribute: widths[kind] for attribute, kind in self.sites.items()}

    def details(self) -> dict[str, dict[str, Any]]:
        """Return the arguments of :func:`create_connection` that depend on the block, for each attribute."""
        if self.spec is None:
            return {attribute: _details(connection) for attribute in self.sites
                    if (connection := connection_in(attribute, getattr(self.module, attribute)))}
        dims, first = self.spec.dims(self.module), branch_first(host_class(self.module), self.spec)
        site = SiteSpec(routed=True, depth=self.spec.depth, tokens_apart=self.spec.tokens_apart,
                        in_place=self.spec.keep == "branch")
        return {attribute: dict(dim=dims[kind], branch_first=first[kind], site=site)
                for attribute, kind in self.sites.items()}


def _details(connection: Connection) -> dict[str, Any]:
    """Return the arguments that the block's author gave this connection and that ``connect`` must not change."""
    by_author = connection.keep == "branch" and not connection.site.arguments
    site = SiteSpec(tokens_apart=connection.site.tokens_apart, in_place=connection.site.in_place or by_author)
    return dict(dim=connection.dim, branch_first=connection.branch_first, site=site)


class UnsupportedModelError(ValueError):
    """A model cannot be connected or disconnected.

    Attributes:
        unsupported: Names of the unsupported classes of residual blocks.
    """

    def __init__(self, message: str, unsupported: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.unsupported = tuple(unsupported)


def connect(
        model: ModelT,
        connection: Union[str, Callable[..., Connection]] = "feature",
        *,
        layers: Union[int, Iterable[int], None] = None,
        kinds: Union[str, Iterable[str], None] = None,
        skip: str = "identity",
        skip_branches: Optional[int] = None,
        skip_rank: Optional[int] = None,
        skip_seed: int = 0,
        **arguments: Any,
) -> ModelT:
    """Replace every residual addition of a model by a connection, in place. Existing connections are replaced too.

    The model can be connected at any time, also during training. Its own parameters, buffers, hooks and state-dict keys
    do not change. Of the built-in connections, only ``hybrid`` has parameters, two per site. They are float32 unless
    all parameters of the model have the same dtype, float16, bfloat16 or float64. Each call makes new parameters, which
    must be added to an existing optimizer. ``model.no_weight_decay()``, which timm's optimizers call,
    includes the names of these parameters. Connect with ``hybrid`` before you wrap the model in
    DistributedDataParallel, which fixes the parameters. After ``fully_shard``,
    connections can only be replaced by connections without parameters.

    Args:
        model: Any module that contains supported blocks, with or without adapters such as LoRA. A block is supported if
            it comes from timm (including ``features_only``), torchvision or transformers, if its class was passed to
            :func:`timm_ortho.register_block`, or if its own code contains a :class:`Connection`.
        connection: ``linear``, ``feature``, ``global``, ``hybrid`` or another registered name, a connection class, or
            a function that returns a connection. It is called with ``dim`` and ``arguments``, and with ``device`` and
            ``dtype`` if its signature contains them.
        layers: Index or indices of the blocks with the connection, counted from 0; all other blocks are linear. None
            for all blocks. A block inside another block has the index of the outer block.
        kinds: Kind or kinds of branches with the connection, as :func:`timm_ortho.sites` lists them; all other branches
            are linear. For example, ``"mlp"`` leaves the attention of a ViT linear. None for all kinds.
        skip: Transform P of the stream at every site, independent of ``layers`` and ``kinds``: the connection combines
            P x and f instead of x and f. One of ``identity``, ``idempotent_mr``,
            ``idempotent_cmr``, ``orthogonal_tp``, ``orthogonal_random`` and ``scaled`` (P = I / L for the L sites of
            the model), see :mod:`timm_ortho.skips`, or a name registered with :func:`timm_ortho.register_skip`. In a
            block that changes the shape of the stream, x is the output of the shortcut's projection.
        skip_branches: Number of equal parts of the channel axis. An idempotent P uses the mean of these parts. None for
            the model's attribute ``skip_branches``. If the model has no such attribute, or if the attribute is None,
            each part has one channel.
        skip_rank: Rank of an idempotent P, instead of ``skip_branches``. Every width of the model must allow this rank.
        skip_seed: Seed of ``orthogonal_random``, which draws a new rotation for each site.
        arguments: Arguments of the connection's constructor, as JSON values: see :class:`timm_ortho.FeatureConnection`
            and :class:`timm_ortho.HybridConnection`. ``functools.partial`` can bind other values. Use
            ``keep="branch"`` if a forward hook or the code of the model changes the output of a block in place. With
            ``"output"``, the backward pass of such a model raises "one of the variables needed for gradient
            computation has been modified by an inplace operation".

    Returns:
        The same model.

    Raises:
        ValueError: A name is unknown, a value is outside its range, the connection does not accept an argument or does
            not have the required signature, or it projects over all tokens (``global``) and a block is causal or part
            of a language model, or a block already has an attribute with the name of a connection. The model is
            unchanged.
        UnsupportedModelError: The model has no supported blocks, or it has unsupported residual blocks, or the call
            would change the class of a block that is sharded or parametrized or has an instance attribute ``forward``,
            add parameters to a sharded or parametrized block, or change the trainable parameters of a model in
            DistributedDataParallel. The model is unchanged.
        timm_ortho.RoutingError: The source code of a block does not match the registered description of its class.

    Example:
        >>> import timm
        >>> model = connect(timm.create_model("vit_test_linear"), "feature", groups=2, kinds="attention")
        >>> model.blocks[0].connection_attention, model.blocks[0].connection_mlp
        (FeatureConnection(dim=-1, eps=1e-06, groups=2), LinearConnection(dim=-1))
    """
    if known_skip(skip) in IDEMPOTENT and skip_branches is None and skip_rank is None:
        skip_branches = getattr(model, "skip_branches", None)
    blocks = _blocks(model)
    numbers = list(layers_of(block.layer for block in blocks))
    chosen = _chosen_layers(layers, numbers[-1] + 1)
    chosen_kinds = _chosen_kinds(kinds, blocks)
    check_arguments(connection, arguments)
    arguments = {name: _json_value(name, value) for name, value in arguments.items()}
    checked = create_connection(connection, **arguments)  # also if `layers` is empty
    call: dict[str, Any] = {"connection": name_of(connection)}
    if call["connection"] != "linear":
        defaults = arguments_of(connection).items()
        call.update({name: value for name, value in arguments.items() if (name, value) not in defaults})
        call["eps"] = checked.eps
        call.update({} if layers is None else {"layers": sorted(chosen)})
        call.update({} if kinds is None else {"kinds": sorted(chosen_kinds)})
    if skip != "identity":
        given = dict(skip=skip, skip_branches=skip_branches, skip_rank=skip_rank, skip_seed=skip_seed)
        call.update({name: _json_value(name, value) for name, value in given.items() if value != _DEFAULTS[name]})
    skips = _make_skips(blocks, skip, branches=skip_branches, rank=skip_rank, seed=skip_seed)
    # models in one dtype, such as bfloat16, have all parameters in it; otherwise rho and theta need float32
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    is_uniform = len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16, torch.float64}
    dtype = dtypes.pop() if is_uniform else torch.float32
    converted = []
    for layer, block in zip(numbers, blocks, strict=True):
        carrying = chosen_kinds if layer in chosen else ()
        connections = _make_connections(block, connection, arguments, dtype, call, skips, carrying)
        _check_attributes(block, connections)
        module, kinds_here = block.module, tuple(block.sites.values())
        cls = routed_class(host_class(module), block.spec, kinds_here) if block.spec else type(module)
        _check_fixed(model, module, cls, connections.values())
        _check_causal(block, connections.values())
        converted.append((module, cls, connections))
    everywhere = [made for _, _, connections in converted for made in connections.values()]
    for index, made in enumerate(everywhere):
        made.site = replace(made.site, index=index, count=len(everywhere))
    with _restored_after_an_error(model):
        for module, cls, connections in converted:
            if not isinstance(module, cls):
                module.__class__ = cls
            for name, made in connections.items():
                setattr(module, name, made)
        _remove_unused(module for module, _, _ in converted)
        _spare_from_weight_decay(model)
        keep_in_config(model)
        keep_for_timm(model)
    return model


def disconnect(model: ModelT) -> ModelT:
    """Undo :func:`connect` in place: restore the class of every block and remove the connections.

    Connections that a block's own code contains are replaced by ``linear``.

    Args:
        model: Any module, with or without connections.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: Blocks with connections are sharded or parametrized, which fixes their classes, or they
            have an instance attribute ``forward``, or the call would remove trainable parameters of a model in
            DistributedDataParallel. The model is unchanged.

    Example:
        >>> import timm
        >>> model = disconnect(connect(timm.create_model("vit_test_linear"), "feature"))
        >>> type(model.blocks[0]).__module__, sites(model)
        ('timm.models.vision_transformer', [])
    """
    routed = [module for module in model.modules() if host_class(module) is not written_class(module)]
    for module in model.modules():
        _check_fixed(model, module, host_class(module), ())
    with _restored_after_an_error(model):
        for module in routed:
            for name in _added(module):
                delattr(module, name)
            module.__class__ = host_class(module)
        _remove_unused(model.modules())
        written = [_Block(name, module, None, own) for name, module in named_outside(model) if (own := _own(module))]
        call = {"connection": "linear"}
        for block in written:
            for name, made in _make_connections(block, "linear", {}, None, call, repeat(None), carrying=()).items():
                setattr(block.module, name, made)
        _spare_from_weight_decay(model)
        keep_in_config(model)
        keep_for_timm(model)
    return model


@contextmanager
def _restored_after_an_error(model: nn.Module) -> Iterator[None]:
    """Restore the classes and attributes of a model if an error occurs while it is changed."""
    before = [(module, type(module), dict(vars(module)), dict(named_children(module))) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes, children in before:
            module.__class__ = cls
            for present, earlier in ((vars(module), attributes), (attributes["_modules"], children)):
                present.clear()
                present.update(earlier)
        raise


_DEFAULTS = {name: parameter.default for name, parameter in signature(connect).parameters.items()}


def _json_value(name: str, value: Any) -> Any:
    """Return an argument of :func:`connect` as a JSON value: config.json and transformers' configs store it."""
    try:
        return json.loads(json.dumps(value, default=lambda other: other.tolist()))  # of NumPy or torch
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"argument {name} must be a JSON value, such as a number or text, got {value!r}: bind other "
                         "values with functools.partial") from None


def _spare_from_weight_decay(model: nn.Module) -> None:
    """Add the parameters of connections to ``model.no_weight_decay()``, because decay towards 0 would harm them."""
    earlier = vars(model).get("no_weight_decay")
    if isinstance(earlier, partial) and earlier.func is _listed:  # set by an earlier call of connect
        del model.no_weight_decay
        if earlier.args[0] is not None:
            model.no_weight_decay = earlier.args[0]
    names = {f"{site.name}.{name}" for site in sites(model) for name, _ in site.connection.named_parameters()}
    if names:
        own = getattr(model, "no_weight_decay", ())
        names.update(own() if callable(own) else own)
        replaced = vars(model).get("no_weight_decay")
        vars(model)["no_weight_decay"] = partial(_listed, replaced, names)  # holds no reference to the model


def _listed(replaced: Any, names: set[str]) -> set[str]:
    """Return a copy of ``names``. ``replaced`` is the attribute ``no_weight_decay`` that the user set, or None."""
    return set(names)


def _blocks(model: nn.Module) -> list[_Block]:
    """Return the blocks that execute at least one residual addition in the model's configuration.

    A residual module of another package (LoRA, an adapter) inside a supported block is part of the block's branch, and
    therefore does not count as unsupported.

    Raises:
        UnsupportedModelError: There are no supported blocks, or there are unsupported residual blocks.
    """
    blocks, unsupported = [], {}
    inside: set[nn.Module] = set()
    for name, module in named_outside(model):
        spec, own = spec_of(module), _own(module)
        of_class = {spec.sites[kind]: kind for kind in reached(module, spec)} if spec else {}
        here = [_Block(name, module, None, own), _Block(name, module, spec, of_class)]
        blocks += [block for block in here if block.sites]
        if spec or own:
            inside.update(model.get_submodule(here[1].layer).modules())
    known = {block.module for block in blocks}
    for module in model.modules():
        if module not in known and spec_of(module) is None and is_residual(module):
            cls = written_class(module)
            is_adapter = cls.__module__.partition(".")[0] not in LIBRARIES
            if not is_adapter or module not in inside:
                unsupported[f"{cls.__module__}.{cls.__qualname__}"] = cls
    if blocks and not unsupported:
        return blocks
    supported = dict.fromkeys(block.spec.name if block.spec else type(block.module).__qualname__ for block in blocks)
    problem = ("no residual block found (only forward is searched; for additions in another method, pass its name to "
               "register_block: method=NAME)")
    if supported or unsupported:
        problem = (f"supported residual blocks found: {', '.join(supported) or 'none'}; residual blocks found that are "
                   f"not supported: {', '.join(unsupported) or 'none'}")
        unread = [name for name, cls in unsupported.items() if not has_source(cls)]
        if unread:
            problem += f". The source of {', '.join(unread)} cannot be read: define the class in a file"
    if supported and unsupported:
        problem += (". If the class that is not supported belongs to another part of the model, such as a decoder, a "
                    "head or a loss, connect the part with the blocks: timm_ortho.connect(model.encoder, ...)")
    raise UnsupportedModelError(
        f"cannot connect {type(model).__name__} ({library_of(written_class(model))}): {problem}. timm-ortho list "
        "prints the supported classes, timm_ortho.register_block adds a class, and timm_ortho.not_residual excludes a "
        "class that has no stream. The model is unchanged.", tuple(unsupported))


def _added(module: nn.Module) -> set[str]:
    """Return the names of the attributes with the connections that ``connect`` added to a block.

    ``connect`` replaced the class of such a block by a routed class, see :mod:`timm_ortho.blocks.routed`. For any other
    module the result is empty.
    """
    if host_class(module) is written_class(module):
        return set()
    spec = spec_of(module)
    of_class = spec.sites.values() if spec else ()
    return {name for name, child in named_children(module)
            if (connection := connection_in(name, child)) and (connection.site.routed or name in of_class)}


def _own(module: nn.Module) -> dict[str, str]:
    """Return the kinds of the connections that a module's own code contains, by attribute."""
    added = _added(module)
    return {name: name.removeprefix("connection_") for name, child in named_children(module)
            if (connection := connection_in(name, child)) and name not in added
            and not is_unused(module, name, connection)}


def _remove_unused(blocks: Iterable[nn.Module]) -> None:
    """Remove the connections that the present class of their block does not call, after the class was replaced."""
    for module in list(blocks):
        for name, child in list(module.named_children()):
            if is_unused(module, name, child):
                delattr(module, name)


def _check_attributes(block: _Block, names: Iterable[str]) -> None:
    """Raise ValueError if attributes of a block with the names of its connections contain anything else."""
    module = block.module
    own = _own(module) if block.spec else ()
    for name in names:
        present = getattr(module, name, None)
        if present is not None and not isinstance(present, Connection) and connection_in(name, present):
            raise ValueError(f"{block.label} ({type(module).__name__}) has a {type(present).__name__} around its "
                             f"connection {name}: remove the wrapper first, for example by merge_and_unload of PEFT, "
                             "then connect. The model is unchanged.")
        if name in own or not isinstance(present, (Connection, type(None))):
            raise ValueError(f"{block.label} ({type(module).__name__}) already has an attribute {name}, the name of "
                             "its connection: rename the attribute, or register its class with another kind. The "
                             "model is unchanged.")


def _check_causal(block: _Block, connections: Iterable[Connection]) -> None:
    """Raise ValueError if a connection projects over all tokens of a causal block or of a language model."""
    made = next((connection for connection in connections if connection.dims is None), None)
    if made and block.spec and (block.spec.causal or block.spec.text):
        kind = "causal" if block.spec.causal else "language model's"
        raise ValueError(
            f"connection {made.name!r} has one projection for all tokens of a sample, but {block.label} is a {kind} "
            f"{type(block.module).__name__}: use 'feature' or 'hybrid', or restrict layers to other blocks. The model "
            "is unchanged.")


def _check_fixed(model: nn.Module, block: nn.Module, cls: type, connections: Iterable[Connection]) -> None:
    """Raise UnsupportedModelError if a block cannot change its class to ``cls`` and receive ``connections``.

    In DistributedDataParallel, it must not lose connections with trainable parameters either.
    """
    if "forward" in vars(block) and written_class(block) is not cls:
        raise UnsupportedModelError(
            f"cannot connect or disconnect {type(model).__name__}: a {type(block).__name__} has an instance attribute "
            "forward, which hides the method of its class: remove it first. The model is unchanged.")
    wrapped = type(block) is not written_class(block)
    replaced = [connection for name, child in block.named_children() if (connection := connection_in(name, child))]
    grows, shrinks = (any(parameter.requires_grad for connection in these for parameter in connection.parameters())
                      for these in (connections, replaced))
    if (wrapped and written_class(block) is not cls) or (grows and (wrapped or is_sharded(block))) or (
            (grows or shrinks) and any(isinstance(module, DistributedDataParallel) for module in model.modules())):
        raise UnsupportedModelError(
            f"cannot connect or disconnect {type(model).__name__}: its {type(block).__name__} is sharded or "
            "parametrized, which fixes its class and parameters, or is inside DistributedDataParallel, which fixes its "
            "parameters. Connect first, then wrap or shard the model. The model is unchanged.")


def _chosen_layers(layers: Union[int, Iterable[int], None], count: int) -> Collection[int]:
    if layers is None:
        return range(count)
    try:
        requested = layers if isinstance(layers, Iterable) else [layers]
        indices = [operator.index(layer) for layer in requested]  # accepts NumPy integers
    except TypeError:
        raise ValueError(f"layers must be block indices in [0, {count - 1}], got {layers!r}") from None
    outside = [index for index in indices if not 0 <= index < count]
    if outside:
        raise ValueError(f"layers must be block indices in [0, {count - 1}], got {outside[0]} in {indices}")
    return set(indices)


def _chosen_kinds(kinds: Union[str, Iterable[str], None], blocks: Sequence[_Block]) -> Collection[str]:
    known = dict.fromkeys(kind for block in blocks for kind in block.sites.values())
    if kinds is None:
        return known
    requested = list(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, str) else [kinds]
    return {known_name("kind of branch", kind, known) for kind in requested}


def _make_connections(
        block: _Block, connection: Union[str, Callable[..., Connection]], arguments: dict[str, Any],
        dtype: Optional[torch.dtype], call: dict[str, Any], skips: Iterator[Optional[nn.Module]],
        carrying: Collection[str],
) -> dict[str, Connection]:
    """Return the connections of a block by attribute; kinds that are not in ``carrying`` are linear.

    ``arguments`` are passed to the connection. ``call`` contains all arguments of :func:`connect`.
    """
    parameters = (parameter for parameter in block.module.parameters() if parameter.is_floating_point())
    parameter = next(parameters, None)  # quantized parameters have integer dtypes, or float8 of one byte
    options: dict[str, Any] = {} if parameter is None else dict(
        device=parameter.device, dtype=parameter.dtype if parameter.itemsize > 1 else torch.float32)
    moved = (skip.to(**options) if skip is not None and options else skip for skip in skips)  # buffers of a user's skip
    of_linear = {name: value for name, value in arguments.items() if name in arguments_of("linear")}
    made = {}
    for attribute, detail in block.details().items():
        make, own = (connection, arguments) if block.sites[attribute] in carrying else ("linear", of_linear)
        made[attribute] = each = create_connection(
            make, dim=detail["dim"], skip=next(moved), device=options.get("device"), dtype=dtype, **own)
        each.branch_first = detail["branch_first"]
        each.site = replace(detail["site"], name=name_of(make), arguments=call)
        if each.site.in_place:
            each.keep = "branch"
        if each.site.tokens_apart and each.dims is None:
            each.dims = [each.dim]
        each.train(block.module.training)
    return made


def _make_skips(blocks: Sequence[_Block], skip: str, **arguments: Any) -> Iterator[Optional[nn.Module]]:
    """Return an iterator over the skip transforms of all sites, with None for the identity.

    Raises:
        ValueError: The name is unknown, or an argument does not fit a width of the model.
    """
    if skip == "identity" and arguments["rank"] is None:
        return repeat(None)
    streams = [(block.widths()[name], detail["dim"]) for block in blocks for name, detail in block.details().items()]
    skips = [
        create_skip(skip, width, dim=dim, count=len(streams), site=site, **arguments)
        for site, (width, dim) in enumerate(streams)
    ]
    return iter([None] * len(skips) if skip == "identity" else skips)
