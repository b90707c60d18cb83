"""Read the arguments of ``connect`` from a connected model, and store them in the configs of transformers."""
import copy
import sys
import warnings
from typing import Any, Dict, Sequence

from torch import nn

from .connections import CONNECTIONS, Connection, LinearConnection, Site, sites

# Argument of ``connect`` -> attribute of the connection. None is the default.
OF_CONNECTIONS = {"eps": "eps", "prob": "prob", "start": "start", "keep": "asked_keep", "groups": "asked_groups"}


def connection_arguments(model: nn.Module) -> Dict[str, Any]:
    """Return the arguments of :func:`timm_ortho.connect` that reproduce a model's connections.

    All values are valid JSON and can be saved beside a state dict:
    ``connect(model, **connection_arguments(trained))``.

    Args:
        model: Any module.

    Returns:
        Arguments of ``connect`` by name, empty for a model without connections.

    Raises:
        ValueError: The sites have different connections or skips, or the connection has no name.
    """
    found = sites(model)
    if not found:
        return {}
    transform = _skip_arguments(found)
    carrying = [site for site in found if not isinstance(site.connection, LinearConnection)]
    if not carrying:
        return {"connection": "linear", **transform}
    arguments, *others = [_arguments_of(site.connection) for site in carrying]
    layers, kinds = sorted({site.layer for site in carrying}), list(dict.fromkeys(site.kind for site in carrying))
    are_others_linear = len(carrying) == sum(site.layer in layers and site.kind in kinds for site in found)
    if not are_others_linear or any(other != arguments for other in others):
        raise ValueError("the sites have different connections; use one non-linear connection")
    if arguments["connection"] not in CONNECTIONS:
        raise ValueError(f"the model's connection, {arguments['connection']}, has no name that config.json can hold: "
                         "give it one with timm_ortho.register_connection, and connect the model by that name")
    if layers != sorted({site.layer for site in found}):
        arguments["layers"] = layers
    if len(kinds) < len({site.kind for site in found}):
        arguments["kinds"] = kinds
    return {**arguments, **transform}


def _arguments_of(connection: Connection) -> Dict[str, Any]:
    own = {name: getattr(connection, attribute, None) for name, attribute in OF_CONNECTIONS.items()}
    return {"connection": connection.name, **{name: value for name, value in own.items() if value is not None}}


def _skip_arguments(found: Sequence[Site]) -> Dict[str, Any]:
    """Return the skip arguments of ``connect`` for these sites; empty for the identity."""
    skips = [site.connection.skip for site in found]
    asked = [{} if skip is None else getattr(skip, "asked", None) for skip in skips]
    if asked[0] is None or any(one != asked[0] for one in asked):
        raise ValueError("the sites have different skips; use one skip")
    return asked[0]


def keep_in_config(model: nn.Module) -> None:
    """Store the connection arguments of transformers' models in ``config.timm_ortho``, or remove them from there.

    ``save_pretrained`` writes the config. ``from_pretrained`` has no hook that could connect the model, so its caller
    must: ``timm_ortho.connect(model, **model.config.timm_ortho)``. The config is copied first, because another model
    may share the object.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    copies: Dict[int, Any] = {}  # by id of a config; submodules of composite models hold parts of its config
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
