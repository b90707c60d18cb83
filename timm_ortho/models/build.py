"""Build and register variants: replace the residual additions of timm's model, then check and load its weights."""
import sys
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple, Union

from timm.models import (
    PretrainedCfg,
    build_model_with_cfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    is_model_pretrained,
    register_model,
    resolve_pretrained_cfg,
)
from torch import nn

from .._compat import adapt_model_from_file, takes_source_arguments
from ..convert import IMPORT_TAG, SUFFIXES, base_name, connect, pop_connect_arguments
from ..diagnostics import record_if_requested
from ..weights import WeightsError
from ..weights.checks import (
    check_arguments,
    check_finite,
    checked,
    checked_fields,
    located,
    naming_the_source,
    restore_source,
)
from ..weights.pretrained import pretrained_cfgs


def create(
        name: str, default: Optional[str], entry: Callable[..., nn.Module], /, pretrained: bool = False,
        pretrained_cfg: Union[str, Dict, PretrainedCfg, None] = None, **kwargs) -> nn.Module:
    """Build a variant, or a model without connections, and load its weights.

    Args:
        name: Name of the model.
        default: Connection if ``kwargs`` contains no ``connection``. None: the model gets no connections.
        entry: Builds the model. Called with a replacement of ``build_model_with_cfg`` and the arguments of timm's entry
            points.
        pretrained, pretrained_cfg, kwargs: Arguments of ``timm.create_model``.
    """
    stored = {key: value for key, value in kwargs.items() if key not in _NOT_STORED}
    of_file = kwargs.pop("pretrained_model_args", None)
    with naming_the_source(pretrained_cfg):
        if pretrained and of_file is not None:
            check_arguments(resolve_pretrained_cfg(name, pretrained_cfg), of_file)
        arguments = pop_connect_arguments(kwargs, default) if default else None
        own_cfg = _own_pretrained_cfg(name, pretrained_cfg)
        cfg = resolve_pretrained_cfg(name, own_cfg, kwargs.get("pretrained_cfg_overlay"))
        if pretrained:
            if arguments:
                _refuse_weights_of_timm(name, arguments["connection"], cfg)
            overlay = {**(kwargs.get("pretrained_cfg_overlay") or {}), **located(cfg, kwargs.get("cache_dir"))}
            kwargs["pretrained_cfg_overlay"] = overlay

        is_checked = False

        def build(
                model_cls: Callable[..., nn.Module], variant: str, *args, pretrained_filter_fn=None, pruned=False,
                **kwargs) -> nn.Module:
            nonlocal is_checked
            is_checked = True

            # Connect before weights are loaded, so that the parameters of connections are loaded too. Connect before
            # features_only drops blocks, so that block indices count all blocks.
            def construct(*args, **kwargs) -> nn.Module:
                model = model_cls(*args, **kwargs)
                model = adapt_model_from_file(model, variant) if pruned else model
                return connect(model, **arguments) if arguments else model

            filter_fn = checked(pretrained_filter_fn, cfg, kwargs)
            return build_model_with_cfg(construct, variant, *args, pretrained_filter_fn=filter_fn, **kwargs)

        if takes_source_arguments:
            kwargs["pretrained_model_args"] = of_file
        model = entry(build, pretrained=pretrained, pretrained_cfg=own_cfg, **kwargs)
        # Some entry points bypass build_model_with_cfg (use_naflex=True): connect their models here.
        model = model if is_checked or not arguments else connect(model, **arguments)
    if pretrained:
        check_finite(model, cfg, is_checked)
    restore_source(model, cfg)
    if pretrained and cfg.hf_hub_id and not cfg.file:
        model.began_with = {"hf_hub_id": cfg.hf_hub_id, "license": cfg.license}  # for model cards
    model._model_args = stored  # timm stores these arguments only from 1.0.31 on, and only in create_model
    return record_if_requested(model) if arguments else model


def _refuse_weights_of_timm(name: str, connection: str, cfg: PretrainedCfg) -> None:
    """Raise WeightsError if only timm's model has weights. They were trained with plain addition."""
    base = base_name(name)
    if not (cfg.has_weights or cfg.state_dict) and is_model_pretrained(base):
        raise WeightsError(
            f"{name} has no weights of its own, and timm's weights of {base} were trained with plain addition: use "
            f"timm_ortho.connect(timm.create_model({base!r}, pretrained=True), {connection!r}), timm-ortho compare "
            "--weights FILE, or pretrained=False")


# The fields of a PretrainedCfg that describe weights, with their default values.
_WITHOUT_WEIGHTS = {name: getattr(PretrainedCfg(), name) for name in (
    "url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "tag", "custom_load",
    "label_offset", "label_names", "label_descriptions", "license", "description", "origin_url", "paper_name",
    "paper_ids", "notes")}


def unpretrained(cfg: PretrainedCfg, architecture: str) -> PretrainedCfg:
    """Return a copy of a configuration for another architecture, without the fields that describe weights."""
    return replace(cfg, **_WITHOUT_WEIGHTS, architecture=architecture)


def _own_pretrained_cfg(name: str, requested: Union[str, Dict, PretrainedCfg, None]) -> Union[Dict, PretrainedCfg]:
    """Return the requested configuration. A tag or None selects a configuration of the variant, not of timm's model."""
    if requested and not isinstance(requested, str):  # of a config.json, or of timm's model
        if isinstance(requested, dict):
            return {**checked_fields(requested, name), "architecture": name}
        return replace(requested, architecture=name)
    if requested == IMPORT_TAG:  # transformers passes the architecture's tag here
        requested = None
    return get_pretrained_cfg(f"{name}.{requested}" if requested else name, allow_unregistered=False)


# Arguments of timm.create_model that are not stored in config.json.
_NOT_STORED = frozenset((
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "pretrained_model_args", "cache_dir",
    "scriptable", "device", "dtype", "drop_rate", "drop_path_rate", "drop_block_rate",
))


def register(module: str, name: str, entry: Callable[..., nn.Module], cfg: PretrainedCfg, doc: str) -> None:
    """Register an entry point with timm, with the configurations of its weights, and add it to its module."""
    entry.__name__ = entry.__qualname__ = name
    entry.__module__ = module
    entry.__doc__ = doc
    home = sys.modules[module]
    home.default_cfgs.update(generate_default_cfgs(pretrained_cfgs(name, cfg)))
    setattr(home, name, register_model(entry))


Architecture = Tuple[Callable[..., nn.Module], PretrainedCfg, Dict[str, Any]]  # class, configuration, arguments


def register_own(module: str, architectures: Dict[str, Architecture], options: Dict[Any, Dict[str, Any]]) -> None:
    """Register architectures that timm does not have, with every suffix.

    ``options`` has the arguments of timm's ``build_model_with_cfg`` for each class.
    """
    for base, (model_cls, cfg, arguments) in architectures.items():
        for suffix, connection in SUFFIXES.items():
            name = base + suffix
            entry = partial(_build_own, model_cls, name, arguments, options[model_cls])
            doc = f"{base} with {connection} connections. Takes timm's arguments, ``connection*`` and ``skip*``."
            register(module, name, partial(create, name, connection, entry), cfg, doc)


def _build_own(
        model_cls: Callable[..., nn.Module], name: str, arguments: Dict[str, Any], options: Dict[str, Any],
        build: Callable[..., nn.Module], pretrained: bool = False, **kwargs) -> nn.Module:
    # timm changes its arguments
    return build(model_cls, name, pretrained, **deepcopy(options), **{**arguments, **kwargs})
