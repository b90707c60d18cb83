"""Return the arguments of ``connect`` that made a model's connections, and store them in transformers' configs."""
import copy
import sys
import warnings
from typing import Any, Dict, List, Optional

from torch import nn

from .blocks import host_class, reached, spec_of, written_class
from .connections import CONNECTIONS, LinearConnection
from .model_sites import Site, sites


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
        their default. The dict is empty for a model without connections.

    Raises:
        ValueError: Parts of the model were connected with different arguments or not at all, or the connection is not
            registered.
    """
    connected = sites(model)
    calls = [getattr(site.connection, "connect_arguments", {}) for site in connected]
    arguments = calls[0] if calls else {}
    plain = _plain_block(model) if calls else None
    if plain is not None:
        raise ValueError(f"{plain} has no connections: connect the whole model with one call")
    if not _reproduces(arguments, connected) and "layers" in arguments:
        arguments = _of_part(arguments, connected)
    if any(call != calls[0] for call in calls) or not _reproduces(arguments, connected):
        raise ValueError("the sites have different connections: connect the whole model with one call")
    if arguments and arguments["connection"] not in CONNECTIONS:
        raise ValueError(f"the model's connection {arguments['connection']} is not registered, so config.json cannot "
                         "store it: register it with timm_ortho.register_connection, and connect the model by its name")
    return dict(arguments)


def _plain_block(model: nn.Module) -> Optional[str]:
    """Return the name of the first block without connections, None if all blocks have connections."""
    for name, module in model.named_modules():
        if host_class(module) is written_class(module):
            spec = spec_of(module)
            if spec is not None and reached(module, spec):
                return name or type(module).__name__
    return None


def _reproduces(arguments: Dict[str, Any], connected: List[Site]) -> bool:
    """Return whether ``connect`` with these arguments would make exactly those sites linear that are linear now.

    Also return False if ``layers`` contains a layer that has no site.
    """
    existing = {site.layer for site in connected}
    return existing.issuperset(arguments.get("layers", ())) and all(
        _is_linear(site) != (
            arguments.get("connection", "linear") != "linear"
            and site.layer in arguments.get("layers", [site.layer])
            and site.kind in arguments.get("kinds", [site.kind]))
        for site in connected)


def _is_linear(site: Site) -> bool:
    """Return whether a site's connection is ``linear``.

    A LinearConnection that a block's own code creates has the name of its class, so the class is checked too.
    """
    return site.connection.name == "linear" or type(site.connection) is LinearConnection


def _of_part(arguments: Dict[str, Any], connected: List[Site]) -> Dict[str, Any]:
    """Return the arguments for a part of a larger, connected model, with ``layers`` numbered within this part."""
    layers = sorted({site.layer for site in connected if not _is_linear(site)})
    if layers:
        return {**arguments, "layers": layers}
    return {**{name: value for name, value in arguments.items() if name != "layers"}, "connection": "linear"}


def keep_in_config(model: nn.Module) -> None:
    """Store the connection arguments of transformers' models in ``config.timm_ortho``, or remove outdated arguments.

    ``save_pretrained`` writes the config. ``from_pretrained`` does not connect the model. Call
    ``timm_ortho.connect(model, **model.config.timm_ortho)`` after it. The config is copied before it is changed,
    because another model may share the object.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
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
