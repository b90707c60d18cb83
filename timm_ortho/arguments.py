"""The arguments of ``connect`` that give a model the connections that it has, and where transformers keeps them."""
import copy
import sys
import warnings
from typing import Any, Dict, Sequence

from torch import nn

from .connections import CONNECTIONS, Connection, LinearConnection, Site, sites

# Arguments that a connection has as attributes, and the names of these; an attribute that is None is the default.
OF_CONNECTIONS = {"eps": "eps", "prob": "prob", "start": "start", "keep": "asked_keep"}


def connection_arguments(model: nn.Module) -> Dict[str, Any]:
    """Return the arguments with which :func:`timm_ortho.connect` gives a model its present connections.

    All values can be written as JSON, so that they can be saved beside a state dict:
    ``connect(model, **connection_arguments(trained))``.

    Args:
        model: Any module.

    Returns:
        Arguments of ``connect`` by name, empty for a model without connections.

    Raises:
        ValueError: The sites differ in more than ``layers`` and ``kinds`` can express, or the connection has no name.
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
        raise ValueError("the model's connections differ from site to site in more than being linear or not, which no "
                         "arguments can express: connect it with one connection")
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
    """Return the arguments that make the sites' transforms of the stream; empty for the identity."""
    skips = [site.connection.skip for site in found]
    asked = [{} if skip is None else getattr(skip, "asked", None) for skip in skips]
    if asked[0] is None or any(one != asked[0] for one in asked):
        raise ValueError("the model's transforms of the stream are not those of one timm_ortho.connect(skip=...), "
                         "which no arguments can express: give all its sites one skip")
    return asked[0]


def keep_in_config(model: nn.Module) -> None:
    """Store the connection arguments of transformers' models in ``config.timm_ortho``, or remove them from there.

    ``save_pretrained`` writes the config. ``from_pretrained`` has no hook that could connect the model again, so that
    its caller has to: ``timm_ortho.connect(model, **model.config.timm_ortho)``. The config is copied first, since
    another model may have been made from the same object.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    copies: Dict[int, Any] = {}  # by id of a config; composite models hold parts of theirs in their submodules
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
