"""Convert models: :func:`connect` replaces residual additions by connections, :func:`disconnect` undoes this.

Both make a plan, check all of it, apply it, and record the result where timm and transformers save models. A plan lists
blocks with their new class and their connections by attribute. Variants such as ``vit_base_ortho`` are connected models
of timm: their names end with one of ``SUFFIXES``, and their arguments of ``connect`` begin with ``connection`` or
``skip``.
"""
import copy
import json
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import repeat
from typing import Any, NamedTuple, Optional, TypeVar, Union

import torch
from timm.models import is_model, list_models, model_entrypoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._checks import known_name
from ._compat import is_sharded, takes_source_arguments
from .blocks import (
    host_class,
    is_own,
    is_residual,
    library_of,
    route,
    routed_class,
    written_class,
)
from .connections import (
    CONNECTIONS,
    Connection,
    SiteSpec,
    arguments_of,
    check_arguments,
    create_connection,
    known_connection,
    name_of,
    takes_any,
)
from .model_sites import FoundModule, connection_arguments, find_modules, layers_of, sites
from .routing import RoutingError
from .skips import IDEMPOTENT, create_skip, known_skip

ModelT = TypeVar("ModelT", bound=nn.Module)


class UnsupportedModelError(ValueError):
    """A model cannot be connected or disconnected.

    Attributes:
        unsupported: Names of the unsupported classes of residual blocks.
    """

    def __init__(self, message: str, unsupported: Sequence[str] = ()) -> None:
        super().__init__(f"{message}. The model is unchanged.")
        self.unsupported = tuple(unsupported)


class Addition(NamedTuple):
    """A residual addition of a block, for which :func:`connect` makes a connection."""

    kind: str
    dim: int  # channel axis of the stream
    branch_first: bool  # whether the branch output is the left summand
    site: SiteSpec  # without the arguments of the call


Block = tuple[FoundModule, dict[str, Addition]]  # a block and its additions, by the attribute of the connection
Plan = list[tuple[FoundModule, type, dict[str, Connection]]]  # a block, its new class, and its connections by attribute


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
    all parameters of the model have the same dtype, float16, bfloat16 or float64. Each call makes new parameters: add
    them to an existing optimizer. ``model.no_weight_decay()`` includes their names. Connect with ``hybrid`` before you
    wrap the model in DistributedDataParallel or call ``fully_shard``, which fix the parameters.

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
            P x and f instead of x and f. A name in :data:`timm_ortho.SKIPS`, see :mod:`timm_ortho.skips`. In a block
            that changes the shape of the stream, x is the output of the shortcut's projection.
        skip_branches: Number of equal parts of the channel axis. An idempotent P uses the mean of these parts. None for
            the model's attribute ``skip_branches``. If the model has no such attribute, or if the attribute is None,
            each part has one channel.
        skip_rank: Rank of an idempotent P, instead of ``skip_branches``. Every width of the model must allow this rank.
        skip_seed: Seed of ``orthogonal_random``, which draws a new rotation for each site.
        arguments: Arguments of the connection's constructor, as JSON values: see :class:`timm_ortho.FeatureConnection`
            and :class:`timm_ortho.HybridConnection`. ``functools.partial`` can bind other values. Use
            ``keep="branch"`` if a forward hook or the code of the model changes the output of a block in place.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A value is invalid; the connection projects over all tokens (``global``), and a block is causal or
            part of a language model; or a block already has an attribute with the name of a connection.
        UnsupportedModelError: The model has no supported blocks, it has unsupported residual blocks or scripted
            modules, or the class or parameters of a block cannot change, as in a sharded model.
        timm_ortho.RoutingError: The source code of a block does not match the registered description of its class.

    After an error, the model is unchanged.

    Example:
        >>> import timm
        >>> model = connect(timm.create_model("vit_test_linear"), "feature", groups=2, kinds="attention")
        >>> model.blocks[0].connection_attention, model.blocks[0].connection_mlp
        (FeatureConnection(dim=-1, eps=1e-06, groups=2), LinearConnection(dim=-1))
    """
    _check_model(model)
    if known_skip(skip) in IDEMPOTENT and skip_branches is None and skip_rank is None:
        skip_branches = getattr(model, "skip_branches", None)
    blocks = _blocks(model)
    numbers = list(layers_of(block.layer for block, _ in blocks))
    chosen = _chosen_layers(layers, numbers[-1] + 1)
    chosen_kinds = _chosen_kinds(kinds, blocks)
    check_arguments(connection, arguments)
    arguments = {name: _json_value(name, value) for name, value in arguments.items()}
    checked = create_connection(connection, **arguments)  # also if `layers` is empty
    call: dict[str, Any] = {"connection": name_of(connection)}
    if call["connection"] != "linear":
        call |= {**_differing(connection, **arguments), "eps": checked.eps}
        call |= _differing(connection, layers=layers if layers is None else sorted(chosen),
                           kinds=kinds if kinds is None else sorted(chosen_kinds))
    if skip != "identity":
        call |= _differing(connection, skip=skip, skip_branches=skip_branches, skip_rank=skip_rank, skip_seed=skip_seed)
    count = sum(len(additions) for _, additions in blocks)
    skips = _make_skips(blocks, skip, branches=skip_branches, rank=skip_rank, seed=skip_seed, count=count)
    of_linear = {name: value for name, value in arguments.items() if name in arguments_of("linear")}
    dtype = _dtype_of_parameters(model)
    plan: Plan = []
    for layer, (block, additions) in zip(numbers, blocks, strict=True):
        made = {}
        for name, addition in additions.items():
            carries = layer in chosen and addition.kind in chosen_kinds
            make, own = (connection, arguments) if carries else ("linear", of_linear)
            made[name] = _made(block.module, addition, make, own, call, count, dtype, next(skips))
        added = tuple(addition.kind for addition in additions.values() if addition.site.routed)
        cls = routed_class(host_class(block.module), block.spec, added) if block.spec and added else (
            written_class(block.module))
        plan.append((block, cls, made))
    _check_plan(model, plan)
    _apply(model, plan)
    return model


def disconnect(model: ModelT) -> ModelT:
    """Undo :func:`connect` in place: restore the class of every block and remove the connections. Return the model.

    Connections that a block's own code contains are replaced by ``linear``.

    Raises:
        TypeError: ``model`` is not a module.
        UnsupportedModelError: Modules are scripted, or the class or parameters of a block cannot change.

    Example:
        >>> import timm
        >>> model = disconnect(connect(timm.create_model("vit_test_linear"), "feature"))
        >>> type(model.blocks[0]).__module__, sites(model)
        ('timm.models.vision_transformer', [])
    """
    _check_model(model)
    plan: Plan = []
    for block in find_modules(model):
        if block.connections or block.is_derived:
            own = _own_additions(block).items()
            made = {name: _made(block.module, addition, "linear", {}, {}) for name, addition in own}
            plan.append((block, host_class(block.module), made))
    _check_plan(model, plan)
    _apply(model, plan)
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        created = f": pass timm.create_model({model!r})" if isinstance(model, str) else ""
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}{created}")
    name = next((name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)), None)
    if name is not None:
        raise UnsupportedModelError(
            f"cannot connect or disconnect {type(model).__name__}: {name or 'the model'} is a scripted or traced "
            "module, whose code is fixed: call connect before torch.jit.script or torch.jit.trace, or pass a part of "
            "the model without scripted modules")


# ------------------------------------------------------------------------------------------------------- the plan
_DEFAULTS = {name: parameter.default for name, parameter in signature(connect).parameters.items()
             if name not in ("model", "arguments")}


def _json_value(name: str, value: Any) -> Any:
    """Return an argument of :func:`connect` as a JSON value: config.json and transformers' configs store it."""
    try:
        return json.loads(json.dumps(value, default=lambda other: other.tolist()))  # of NumPy or torch
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"argument {name} must be a JSON value, such as a number or text, got {value!r}: bind other "
                         "values with functools.partial") from None


def _differing(connection: Union[str, Callable[..., Connection]], /, **arguments: Any) -> dict[str, Any]:
    """Return those arguments of :func:`connect` that differ from their defaults."""
    defaults = {**_DEFAULTS, **arguments_of(connection)}
    return {name: _json_value(name, value) for name, value in arguments.items()
            if name not in defaults or value != defaults[name]}


def _blocks(model: nn.Module) -> list[Block]:
    """Return the blocks that execute at least one residual addition in the model's configuration.

    A residual module of another package (LoRA, an adapter) inside a supported block is part of the block's branch.
    """
    found = find_modules(model)
    try:
        blocks = [(block, additions) for block in found if (additions := _additions(block))]
    except RoutingError as error:
        raise RoutingError(f"{error}: install a release of this library that timm_ortho supports, or register your own "
                           "class again. The model is unchanged.") from None
    inside = {module for block in found if block.spec or block.own()
              for module in model.get_submodule(block.layer).modules()}
    known = {block.module for block, _ in blocks}
    unsupported = {}
    for _, module, spec, _ in found:
        cls = written_class(module)
        is_adapter = module in inside and is_own(cls)
        if spec is None and module not in known and not is_adapter and is_residual(cls):
            unsupported[f"{cls.__module__}.{cls.__qualname__}"] = cls
    if unsupported or not blocks:
        raise _unsupported(model, blocks, unsupported)
    return blocks


def _unsupported(model: nn.Module, blocks: list[Block], unsupported: dict[str, type]) -> UnsupportedModelError:
    """Return the error of a model without supported blocks, or with unsupported residual blocks."""
    supported = dict.fromkeys(
        block.spec.name if block.spec else type(block.module).__qualname__ for block, _ in blocks)
    problem = ("no residual block found (only forward is searched; for additions in another method, pass its name to "
               "register_block: method=NAME)")
    if supported or unsupported:
        problem = (f"supported residual blocks found: {', '.join(supported) or 'none'}; residual blocks found that are "
                   f"not supported: {', '.join(unsupported) or 'none'}. If such a class belongs to another part of the "
                   "model, such as a decoder, a head or a loss, connect the part with the blocks: "
                   "timm_ortho.connect(model.encoder, ...)")
    return UnsupportedModelError(
        f"cannot connect {type(model).__name__} ({library_of(written_class(model))}): {problem}. timm-ortho list "
        "prints the supported classes, timm_ortho.register_block adds a class, and timm_ortho.not_residual excludes a "
        "class that has no stream", tuple(unsupported))


def _additions(block: FoundModule) -> dict[str, Addition]:
    """Return the additions of a block for which its class or its own code has connections, by attribute."""
    additions = _own_additions(block)
    module, spec = block.module, block.spec
    if spec:
        found, dims = route(host_class(module), spec), spec.dims(module)
        site = SiteSpec(routed=True, tokens_apart=spec.tokens_apart, in_place=spec.keep == "branch")
        additions.update({spec.sites[kind]: Addition(kind, dims[kind], found.branch_first[kind], site)
                          for kind in found.reached(module)})
    for name, addition in additions.items():
        present = getattr(module, name, None)
        if present is not None and present is not block.connections.get(name, present):
            raise ValueError(f"{block.name or 'the model'} ({type(module).__name__}) has a {type(present).__name__} "
                             f"around its connection {name}: remove the wrapper first, for example by merge_and_unload "
                             "of PEFT, then connect. The model is unchanged.")
        if addition.site.routed and (name in block.own() or not isinstance(present, (Connection, type(None)))):
            raise ValueError(f"{block.name or 'the model'} ({type(module).__name__}) already has an attribute {name}, "
                             "the name of its connection: rename the attribute, or register its class with another "
                             "kind. The model is unchanged.")
    return additions


def _own_additions(block: FoundModule) -> dict[str, Addition]:
    """Return the additions for which the block's own code contains connections, with the settings of their author."""
    additions = {}
    for name in block.own():
        present = block.connections[name]
        by_author = present.keep == "branch" and not present.site.arguments
        site = SiteSpec(tokens_apart=present.site.tokens_apart, in_place=present.site.in_place or by_author)
        additions[name] = Addition(name.removeprefix("connection_"), present.dim, present.branch_first, site)
    return additions


def _chosen_layers(layers: Union[int, Iterable[int], None], count: int) -> Collection[int]:
    if layers is None:
        return range(count)
    indices = list(layers) if isinstance(layers, Iterable) else [layers]
    if not all(index in range(count) for index in indices):  # accepts NumPy integers
        raise ValueError(f"layers must be block indices in [0, {count - 1}], got {layers!r}")
    return {int(index) for index in indices}


def _chosen_kinds(kinds: Union[str, Iterable[str], None], blocks: Sequence[Block]) -> Collection[str]:
    known = dict.fromkeys(addition.kind for _, additions in blocks for addition in additions.values())
    if kinds is None:
        return known
    requested = list(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, str) else [kinds]
    return {known_name("kind of branch", kind, known) for kind in requested}


def _dtype_of_parameters(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model in one dtype, such as bfloat16. All other models need float32 for rho and theta."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    is_uniform = len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16, torch.float64}
    return dtypes.pop() if is_uniform else torch.float32


def _make_skips(blocks: Sequence[Block], skip: str, **arguments: Any) -> Iterator[Optional[nn.Module]]:
    """Return an iterator over the skip transforms of all sites, with None for the identity."""
    if skip == "identity" and arguments["rank"] is None:
        return repeat(None)
    skips: list[nn.Module] = []
    for block, additions in blocks:
        for addition in additions.values():
            if not (block.spec and addition.site.routed):
                raise ValueError(f"{block.name or 'the model'} is a {type(block.module).__name__}, whose own code "
                                 "contains its connections: a skip needs the width of the stream, which is unknown; "
                                 "omit skip and skip_rank")
            width = block.spec.widths(block.module)[addition.kind]
            skips.append(create_skip(skip, width, dim=addition.dim, site=len(skips), **arguments))
    return iter([None] * len(skips) if skip == "identity" else skips)


def _made(
        block: nn.Module, addition: Addition, connection: Union[str, Callable[..., Connection]],
        arguments: dict[str, Any], call: dict[str, Any], count: int = 1, dtype: torch.dtype = torch.float32,
        skip: Optional[nn.Module] = None) -> Connection:
    """Return the connection of an addition, on the device of its block.

    ``arguments`` are passed to the connection. ``call`` has all arguments of :func:`connect`, with ``count`` sites.
    """
    parameters = (parameter for parameter in block.parameters() if parameter.is_floating_point())
    parameter = next(parameters, None)  # quantized parameters have integer dtypes, or float8 of one byte
    device = None if parameter is None else parameter.device
    if skip is not None and parameter is not None:  # buffers of a user's skip
        skip = skip.to(device, parameter.dtype if parameter.itemsize > 1 else torch.float32)
    made = create_connection(connection, dim=addition.dim, skip=skip, device=device, dtype=dtype, **arguments)
    made.branch_first = addition.branch_first
    made.site = replace(addition.site, name=name_of(connection), arguments=call, count=count)
    if made.site.in_place:
        made.keep = "branch"
    if made.site.tokens_apart and made.dims is None:
        made.dims = [made.dim]
    return made.train(block.training)


# ----------------------------------------------------------------------------------------------------- the checks
def _check_plan(model: nn.Module, plan: Plan) -> None:
    """Raise an error if a block cannot get its class or its connections."""
    is_distributed = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    for block, cls, connections in plan:
        module, spec, written = block.module, block.spec, written_class(block.module)
        if "forward" in vars(module) and written is not cls:
            raise UnsupportedModelError(
                f"cannot connect or disconnect {type(model).__name__}: a {type(module).__name__} has an instance "
                "attribute forward, which hides the method of its class: remove it first")
        wrapped = type(module) is not written
        grows, shrinks = (any(parameter.requires_grad for each in these.values() for parameter in each.parameters())
                          for these in (connections, block.connections))
        if (wrapped and written is not cls) or (grows and (wrapped or is_sharded(module))) or (
                (grows or shrinks) and is_distributed):
            raise UnsupportedModelError(
                f"cannot connect or disconnect {type(model).__name__}: its {type(module).__name__} is sharded or "
                "parametrized, which fixes its class and parameters, or is inside DistributedDataParallel, which fixes "
                "its parameters. Connect first, then wrap or shard the model")
        whole = next((each for each in connections.values() if each.dims is None), None)
        if whole and spec and (spec.causal or spec.text):
            raise ValueError(
                f"connection {whole.name!r} has one projection for all tokens of a sample, but "
                f"{block.name or 'the model'} is a {type(module).__name__}, a block of a causal or language model: use "
                "'feature' or 'hybrid', or restrict layers to other blocks. The model is unchanged.")


# ------------------------------------------------------------------------------------------------------ the change
def _apply(model: nn.Module, plan: Plan) -> None:
    """Give all blocks their classes and connections, and record them."""
    _spare_from_weight_decay(model, plan)  # first, because it calls the user's no_weight_decay, which may fail
    for block, cls, connections in plan:
        if written_class(block.module) is not cls:
            block.module.__class__ = cls
        for name in block.connections.keys() - connections:
            delattr(block.module, name)
        for name, made in connections.items():
            setattr(block.module, name, made)
    for problem in [*_record_for_timm(model, plan), *_record_for_transformers(model)]:
        warnings.warn(problem, stacklevel=3)


def _spare_from_weight_decay(model: nn.Module, plan: Plan) -> None:
    """Add the parameters of connections to ``model.no_weight_decay()``, because decay towards 0 would harm them."""
    earlier = vars(model).get("no_weight_decay")
    if isinstance(earlier, partial) and earlier.func is _listed:  # set by an earlier call of connect
        del model.no_weight_decay
        if earlier.args[0] is not None:
            model.no_weight_decay = earlier.args[0]
    names = {".".join(filter(None, (block.name, attribute, name))) for block, _, connections in plan
             for attribute, connection in connections.items() for name, _ in connection.named_parameters()}
    if names:
        own = getattr(model, "no_weight_decay", ())
        names.update(own() if callable(own) else own)
        replaced = vars(model).get("no_weight_decay")
        vars(model)["no_weight_decay"] = partial(_listed, replaced, names)  # holds no reference to the model


def _listed(replaced: Any, names: set[str]) -> set[str]:
    """Return a copy of ``names``. ``replaced`` is the attribute ``no_weight_decay`` that the user set, or None."""
    return set(names)


# ----------------------------------------------------------------------------------------------------- the records
def _record_for_timm(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Store the variant of each timm model in ``model`` where ``save_for_hf`` reads it; yield what cannot be stored.

    If no arguments describe the connections, ``_model_args`` gets a value that timm refuses to save.
    """
    whole: set[nn.Module] = set()
    for module in model.modules():
        if hasattr(module, "forward_features") or "pretrained_cfg" in vars(module):
            whole.update(module.modules())
        if not isinstance(vars(module).get("pretrained_cfg"), Mapping):
            continue
        try:
            arguments = connection_arguments(module)
        except ValueError:
            arguments = {"connection": type(sites(module)[0].connection)}
        problem = keep_arguments(module, arguments)
        architecture = vars(module)["pretrained_cfg"].get("architecture") or ""
        by_name = {"connection": SUFFIXES.get(suffix_of(architecture.partition(".")[0]), "linear"), "eps": 1e-6}
        if not takes_source_arguments and {"connection": "linear", "eps": 1e-6, **arguments} != by_name:
            problem = problem or ("timm before 1.0.31 saves no arguments, so save_for_hf does not save these "
                                  "connections: use timm_ortho.hub.export")
        if problem:
            yield problem
    is_timms = host_class(model).__module__.startswith(("timm.", "torch.nn.modules.container"))
    if is_timms and any(block.spec and block.module not in whole and block.spec.name.startswith("timm.")
                        for block, _, _ in plan):
        yield (f"timm's save_for_hf does not save this change of a {host_class(model).__name__}, which is only a part "
               "of a model: pass the whole model, and select blocks by layers")


def keep_arguments(model: nn.Module, arguments: dict[str, Any]) -> str:
    """Store the arguments of ``connect`` in a model of timm, and return the reason if this is impossible."""
    cfg = vars(model)["pretrained_cfg"]
    name, _, tag = (cfg.get("architecture") or "").partition(".")
    if is_variant(name) and tag != IMPORT_TAG:  # created as a variant
        arguments = arguments or {"connection": "linear"}
    else:
        base = base_name(name) if tag == IMPORT_TAG else name
        variant = base + ("_orthog" if arguments.get("connection") == "global" else "_ortho")
        if arguments and not is_model(variant):
            return (f"'{base}' has no variant, so config.json cannot store its connections: timm-ortho list prints the "
                    "variants")
        stored = f"{variant}.{IMPORT_TAG}" if arguments else base
        if stored != cfg.get("architecture"):
            cfg = {**cfg, "architecture": stored}
            vars(model).update(pretrained_cfg=cfg, default_cfg=cfg)
    kept = {name: value for name, value in vars(model).get("_model_args", {}).items() if not is_variant_argument(name)}
    vars(model)["_model_args"] = {
        **kept, **{variant_argument(name): value for name, value in arguments.items()}}
    return ""


def _record_for_transformers(model: nn.Module) -> Iterator[str]:
    """Store the arguments in ``config.timm_ortho`` of transformers' models; yield what cannot be stored.

    The user calls ``timm_ortho.connect(model, **model.config.timm_ortho)`` after ``from_pretrained``. The config is
    copied before it is changed, because another model may share it.
    """
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    copies: dict[int, Any] = {}  # memo of deepcopy: id of a config, or of a config inside it -> copy
    inside: set[nn.Module] = set()  # save_pretrained of a model saves the parts inside it, too
    for module in model.modules() if transformers else ():
        config: Any = vars(module).get("config")
        if isinstance(module, transformers.PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            copied = copy.deepcopy(config, copies)
            vars(copied).pop("timm_ortho", None)
            try:
                arguments = connection_arguments(module)
            except ValueError as error:
                arguments = {}
                yield f"save_pretrained will not save the connections of this {type(module).__name__}: {error}"
            if arguments:
                copied.timm_ortho = arguments
    for module in model.modules() if copies else ():
        config = vars(module).get("config")
        if id(config) in copies:
            module.config = copies[id(config)]


# -------------------------------------------------------------------------------- names and arguments of variants
SUFFIXES = {"_ortho": "feature", "_orthog": "global", "_linear": "linear"}  # suffix -> connection

# Tag of the architecture in an exported config.json. If timm_ortho is not imported, timm and transformers report an
# unknown architecture with this tag, which names the package to import.
IMPORT_TAG = "import_timm_ortho"


def suffix_of(name: str) -> str:
    """Return the suffix of a variant's name, or an empty string.

    >>> suffix_of("vit_small_orthog"), suffix_of("vit_small")
    ('_orthog', '')
    """
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def base_name(name: str) -> str:
    """Return a name without the suffix of a variant."""
    return name.removesuffix(suffix_of(name))


def is_variant(name: str) -> bool:
    """Return whether a name, with or without tag, is registered by this package.

    >>> is_variant("vit_test_ortho.digits"), is_variant("resnet50")
    (True, False)
    """
    return bool(name) and is_model(name) and model_entrypoint(name).__module__.startswith("timm_ortho.")


def bases_with_variants() -> list[str]:
    """Return the names ``X`` for which a model ``X_ortho`` is registered."""
    return [name.removesuffix("_ortho") for name in list_models("*_ortho")]


def variant_argument(name: str) -> str:
    """Return the name that variants use for an argument of :func:`timm_ortho.connect`.

    >>> variant_argument("prob"), variant_argument("skip_rank")
    ('connection_prob', 'skip_rank')
    """
    return name if name in _DEFAULTS and name.startswith(("connection", "skip")) else f"connection_{name}"


def is_variant_argument(name: str) -> bool:
    """Return whether a variant passes an argument to :func:`timm_ortho.connect` instead of timm's model."""
    return name == "skip" or name.startswith(("connection", "skip_"))


def variant_arguments(connection: str) -> dict[str, Any]:
    """Return the arguments of variants with a connection, and their defaults."""
    return {variant_argument(name): value for name, value in (*_DEFAULTS.items(), *arguments_of(connection).items())}


def accepts(connection: str, name: str) -> bool:
    """Return whether a variant with a connection accepts an argument.

    A constructor with ``**kwargs`` also accepts names that no registered connection has.

    >>> accepts("hybrid", "connection_start"), accepts("linear", "connection_start")
    (True, False)
    """
    return name in variant_arguments(connection) or (
        takes_any(CONNECTIONS[connection]) and not any(name in variant_arguments(known) for known in CONNECTIONS))


def pop_connect_arguments(kwargs: dict[str, Any], connection: str) -> dict[str, Any]:
    """Remove the arguments of connections from ``kwargs`` and return them as arguments of ``connect``.

    >>> kwargs = dict(num_classes=5, connection_prob=0.5)
    >>> pop_connect_arguments(kwargs, "feature"), kwargs
    ({'connection': 'feature', 'prob': 0.5}, {'num_classes': 5})

    An unknown connection, or an unknown argument that begins with ``connection`` or ``skip_``, raises a ValueError.
    """
    connection = known_connection(kwargs.pop("connection", connection))
    known = variant_arguments(connection)
    arguments = {"connection": connection}
    for name in [name for name in kwargs if is_variant_argument(name)]:
        if name.startswith("skip") or not takes_any(CONNECTIONS[connection]):
            known_name("argument", name, known)
        arguments[name.removeprefix("connection_")] = kwargs.pop(name)
    return arguments
