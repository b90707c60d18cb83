"""Read the arguments of ``connect`` from a connected model, and store them in the configs of transformers' models."""
import copy
import sys
import warnings
from inspect import signature
from typing import Any, Dict, List, Optional

from torch import nn

from .blocks import host_class, reached, spec_of, written_class
from .connections import CONNECTIONS, SiteSpec
from .model_sites import sites
from .skips import SKIPS, known_skip


def connection_arguments(model: nn.Module) -> Dict[str, Any]:
    """Return the arguments of the call of :func:`timm_ortho.connect` that made a model's connections.

    All values are valid JSON, so they can be saved beside a state dict. To rebuild the connections, call
    ``connect(model, **arguments)``. Attributes of connections that were changed later, such as
    ``eps``, are not included.

    >>> import timm
    >>> connection_arguments(timm.create_model("vit_test_ortho", connection_layers=[1, 2]))
    {'connection': 'feature', 'eps': 1e-06, 'layers': [1, 2]}

    Args:
        model: Any module.

    Returns:
        Arguments of ``connect`` by name. Arguments other than ``connection`` and ``eps`` are omitted if they equal
        their default. The dict is empty for a model without connections, and for linear connections that the code of
        the model creates.

    Raises:
        ValueError: Parts of the model were connected with different arguments or not at all, the connection is not
            registered, or the model is a part of the connected model and its skip depends on the whole model, as
            ``orthogonal_random`` and ``scaled`` do.
    """
    connected = sites(model)
    if not connected:
        return {}
    plain = _plain_block(model)
    if plain is not None:
        raise ValueError(f"{plain} has no connections: connect the whole model with one call")
    calls = [site.connection.site.arguments for site in connected]
    chosen = [site for site in connected if site.connection.name != "linear"]
    arguments = dict(calls[0])
    if "layers" in arguments:  # in a part of the connected model, the layers have other numbers
        arguments["layers"] = sorted({site.layer for site in chosen})
    if arguments and not chosen:
        arguments = {"connection": "linear", **{name: arguments[name] for name in arguments if name.startswith("skip")}}
    expected = [site for site in connected if site.layer in arguments.get("layers", [site.layer])
                and site.kind in arguments.get("kinds", [site.kind])]
    if chosen and not any(calls):
        raise ValueError("the code of the model made its connections, and their arguments are not stored: connect the "
                         "whole model with one call")
    if any(call != calls[0] for call in calls) or (chosen and chosen != expected):
        raise ValueError("the sites have different connections: connect the whole model with one call")
    if arguments and arguments["connection"] not in CONNECTIONS:
        raise ValueError(f"the model's connection {arguments['connection']} is not registered, so config.json cannot "
                         "store it: register it with timm_ortho.register_connection, and connect the model by its name")
    if "skip" in arguments:
        _check_skips(arguments["skip"], [site.connection.site for site in connected])
    return arguments


def _check_skips(skip: str, connected: List[SiteSpec]) -> None:
    """Raise ValueError if one call of ``connect`` would make other transforms of the stream at these sites."""
    parameters = signature(SKIPS[known_skip(skip)][1]).parameters
    if ("site" in parameters and any(spec.index != index for index, spec in enumerate(connected))) or (
            "count" in parameters and any(spec.count != len(connected) for spec in connected)):
        raise ValueError(f"skip {skip!r} depends on the position or number of the sites, and these {len(connected)} "
                         f"sites are not the {connected[0].count} sites of one call of connect: use the arguments of "
                         "the whole model, or connect this model again with one call")


def _plain_block(model: nn.Module) -> Optional[str]:
    """Return the name of the first block without connections, None if all blocks have connections."""
    for name, module in model.named_modules():
        if host_class(module) is written_class(module):
            spec = spec_of(module)
            if spec is not None and reached(module, spec):
                return name or type(module).__name__
    return None


def keep_in_config(model: nn.Module) -> None:
    """Store the connection arguments of transformers' models in ``config.timm_ortho``, or remove outdated arguments.

    ``save_pretrained`` writes the config. ``from_pretrained`` does not connect the model. Call
    ``timm_ortho.connect(model, **model.config.timm_ortho)`` after it. The config is copied before it is changed,
    because another model may share the object.
    """
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    copies: Dict[int, Any] = {}  # memo of deepcopy: id of a config, or of a config inside it -> copy
    for module in model.modules() if transformers else ():
        config = vars(module).get("config")
        if isinstance(module, transformers.PreTrainedModel) and id(config) not in copies:
            copy.deepcopy(config, copies)
            _store(module, copies[id(config)])
    for module in model.modules() if copies else ():
        config = vars(module).get("config")
        if id(config) in copies:
            module.config = copies[id(config)]


def _store(model: nn.Module, config: Any) -> None:
    vars(config).pop("timm_ortho", None)
    try:
        arguments = connection_arguments(model)
    except ValueError as error:
        warnings.warn(f"save_pretrained will not save the connections of this {type(model).__name__}: {error}",
                      stacklevel=4)
        return
    if arguments:
        config.timm_ortho = arguments
