"""What the entry points of ``variants`` and ``paper`` share: arguments, configurations, weights, registration."""
import sys
from copy import copy
from functools import partial
from inspect import signature
from typing import Any, Callable, ContextManager, Dict, Union

import timm
import torch
from timm.models import (
    PretrainedCfg,
    build_model_with_cfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    register_model,
    resolve_pretrained_cfg,
)
from torch import nn
from torch.overrides import TorchFunctionMode

from .._checks import known_name
from .._compat import adapt_model_from_file
from ..connections import known_connection
from ..convert import connect
from ..diagnostics import record_if_requested
from ..weights.checks import checked, located, naming_the_source, restore_source
from ..weights.pretrained import pretrained_cfgs

SUFFIXES = {"_ortho": "feature", "_orthog": "global", "_linear": "linear"}  # of a variant's name: its connection


def variant_argument(name: str) -> str:
    """Return the name under which a variant takes an argument of :func:`timm_ortho.connect`."""
    return name if name.startswith(("connection", "skip")) else f"connection_{name}"


_ARGUMENTS = {variant_argument(name): name for name in list(signature(connect).parameters)[1:]}


def create(
        name: str, default: str, entry: Callable[..., nn.Module], /, pretrained: bool = False,
        pretrained_cfg: Union[str, Dict, PretrainedCfg, None] = None, **kwargs) -> nn.Module:
    """A variant: built as timm builds it, connected before its weights are loaded, with weights that fit.

    Args:
        name: The variant.
        default: Its connection, unless ``kwargs`` say otherwise.
        entry: Called with a ``build_model_with_cfg`` to build with, and with the arguments of an entry point.
        pretrained: Load weights.
        pretrained_cfg: Another configuration than its own, or the tag of one.
        kwargs: What else ``timm.create_model`` was given.

    Raises:
        ValueError: An argument that begins with ``connection`` or ``skip_`` and is none, or has a value that is none.
        WeightsError: The weights cannot be had, or do not fit; config.json on the Hub does not.
    """
    with naming_the_source(pretrained_cfg):
        arguments = pop_connection_arguments(kwargs, default)
        given = _own_pretrained_cfg(name, pretrained_cfg)
        cfg = resolve_pretrained_cfg(name, given, kwargs.get("pretrained_cfg_overlay"))
        if pretrained:
            overlay = {**(kwargs.get("pretrained_cfg_overlay") or {}), **located(cfg, kwargs.get("cache_dir"))}
            kwargs["pretrained_cfg_overlay"] = overlay

        is_connected = False

        def build(
                model_cls: Callable[..., nn.Module], variant: str, *args, pretrained_filter_fn=None, pruned=False,
                **kwargs) -> nn.Module:
            nonlocal is_connected
            is_connected = True

            # It connects before weights are loaded and before features_only takes a model apart: a checkpoint with
            # learned connections loads as a whole, and block indices count all blocks.
            def construct(*args, **kwargs) -> nn.Module:
                model = model_cls(*args, **kwargs)
                return connect(adapt_model_from_file(model, variant) if pruned else model, **arguments)

            filter_fn = checked(pretrained_filter_fn, cfg, kwargs)
            return build_model_with_cfg(construct, variant, *args, pretrained_filter_fn=filter_fn, **kwargs)

        model = entry(build, pretrained=pretrained, pretrained_cfg=given, **kwargs)
        # an entry point may take another way to its model (use_naflex=True): it is connected now, or refused
        model = model if is_connected else connect(model, **arguments)
    restore_source(model, cfg)
    if pretrained and cfg.hf_hub_id and not cfg.file:
        model.began_with = {"hf_hub_id": cfg.hf_hub_id, "license": cfg.license}  # cards name it
    # timm keeps them from 1.0.31 on, and only in create_model
    model.creation_arguments = {key: value for key, value in kwargs.items() if key not in _PASSING}
    return record_if_requested(model)


def pop_connection_arguments(kwargs: Dict[str, Any], connection: str) -> Dict[str, Any]:
    """Take the connection arguments out of a variant's ``kwargs``, as arguments of :func:`timm_ortho.connect`.

    Raises:
        ValueError: An argument that begins with ``connection`` or ``skip_`` and is none.
    """
    taken = {"connection": connection}
    for name in [name for name in kwargs if is_of_connections(name)]:
        taken[_ARGUMENTS[known_name("argument", name, _ARGUMENTS)]] = kwargs.pop(name)
    known_connection(taken["connection"])
    return taken


def is_of_connections(name: str) -> bool:
    """Whether an argument of a variant is one for :func:`timm_ortho.connect`, and not for timm's model."""
    return name == "skip" or name.startswith(("connection", "skip_"))


# What in a PretrainedCfg belongs to one set of weights and not to the architecture, as one without weights has it.
_WITHOUT_WEIGHTS = {name: getattr(PretrainedCfg(), name) for name in (
    "url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "tag", "custom_load",
    "label_offset", "label_names", "label_descriptions", "origin_url", "notes")}


def unpretrained(cfg: PretrainedCfg, architecture: str) -> PretrainedCfg:
    """A configuration with the input, mean, std, classifier and first conv of ``cfg`` and none of its weights."""
    own = copy(cfg)  # dataclasses.replace takes several times as long, and there are thousands
    vars(own).update(_WITHOUT_WEIGHTS, architecture=architecture)
    return own


def _own_pretrained_cfg(name: str, given: Union[str, Dict, PretrainedCfg, None]) -> Union[Dict, PretrainedCfg]:
    """The configuration that a variant is built with: the one given, or its own by tag, never its base's."""
    if given and not isinstance(given, str):
        return given
    cfg = get_pretrained_cfg(f"{name}.{given}" if given else name, allow_unregistered=False)
    if cfg is None:
        raise RuntimeError(f"Invalid pretrained tag ({given}) for {name}.")
    return cfg


# Arguments of timm.create_model that are not stored in config.json.
_PASSING = frozenset((
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "pretrained_model_args", "cache_dir",
    "scriptable", "device", "dtype", "drop_rate", "drop_path_rate", "drop_block_rate",
))


def creation_arguments(model: nn.Module) -> Dict[str, Any]:
    """The arguments that a variant was made with, but for connections; {} for models of timm's own."""
    return dict(getattr(model, "creation_arguments", {}))


def register(module: str, name: str, entry: Callable[..., nn.Module], cfg: PretrainedCfg, doc: str) -> None:
    """Register an entry point with timm, as an attribute ``name`` of the module of that name.

    ``cfg`` is that of the architecture; what it has of weights, :mod:`timm_ortho.weights.pretrained` knows.
    """
    entry.__name__ = entry.__qualname__ = name
    entry.__module__ = module
    entry.__doc__ = doc
    home = sys.modules[module]
    home.default_cfgs.update(generate_default_cfgs(pretrained_cfgs(name, cfg)))
    setattr(home, name, register_model(entry))


def register_own(module: str, cfgs: Dict[str, PretrainedCfg], make: Callable[..., nn.Module]) -> None:
    """Register architectures that timm does not have, with every suffix; ``make`` takes name, base and connection."""
    for base, cfg in cfgs.items():
        for suffix, connection in SUFFIXES.items():
            doc = f"{base}, {connection} connection; arguments as timm's, ``connection*`` and ``skip*``."
            register(module, base + suffix, partial(make, base + suffix, base, connection), cfg, doc)


def on_meta() -> ContextManager:
    """Inside it models are built on the meta device: with all shapes, without memory or time for their parameters."""
    release = tuple(int(part) for part in timm.__version__.split(".")[:3])
    return torch.device("meta") if release >= (1, 0, 21) else _ParametersOnMeta()


class _ParametersOnMeta(TorchFunctionMode):
    """What takes ``torch.device("meta")``'s place before timm 1.0.21.

    There timm reads its drop path rates from tensors, which must therefore stay real; only what parameters are made of
    goes to the meta device.
    """

    _CREATORS = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full})

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in self._CREATORS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)
