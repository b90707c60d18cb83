"""Translate the arguments ``connection*`` and ``skip*`` of variants like ``vit_base_ortho`` to those of ``connect``."""
from inspect import signature
from typing import Any, Dict

from .._checks import known_name
from ..connections import CONNECTIONS, arguments_of, known_connection, takes_any
from ..convert import connect


def variant_argument(name: str) -> str:
    """Return the name that variants use for an argument of :func:`timm_ortho.connect`.

    >>> variant_argument("prob"), variant_argument("skip_rank")
    ('connection_prob', 'skip_rank')
    """
    return name if name == "connection" or name in _SKIPS else f"connection_{name}"


_SKIPS = ("skip", "skip_branches", "skip_rank", "skip_seed")
_OF_CONNECT = {variant_argument(name): parameter.default for name, parameter in signature(connect).parameters.items()
               if name not in ("model", "arguments")}


def variant_arguments(connection: str) -> Dict[str, Any]:
    """Return the arguments of variants with a connection, and their defaults.

    >>> variant_arguments("linear")["connection_eps"]
    1e-06
    """
    return {**_OF_CONNECT, **{variant_argument(name): value for name, value in arguments_of(connection).items()}}


def accepts(connection: str, name: str) -> bool:
    """Return whether a variant with a connection accepts an argument. ``**kwargs`` accept what no connection names.

    >>> accepts("hybrid", "connection_start"), accepts("linear", "connection_start")
    (True, False)
    """
    return name in variant_arguments(connection) or (
        takes_any(CONNECTIONS[connection]) and not any(name in variant_arguments(known) for known in CONNECTIONS))


def is_variant_argument(name: str) -> bool:
    """Return whether a variant passes an argument to :func:`timm_ortho.connect` instead of timm's model."""
    return name == "skip" or name.startswith(("connection", "skip_"))


def pop_connect_arguments(kwargs: Dict[str, Any], connection: str) -> Dict[str, Any]:
    """Remove the arguments of connections from ``kwargs`` and return them as arguments of ``connect``.

    >>> kwargs = dict(num_classes=5, connection_prob=0.5)
    >>> pop_connect_arguments(kwargs, "feature"), kwargs
    ({'connection': 'feature', 'prob': 0.5}, {'num_classes': 5})

    Args:
        kwargs: Arguments of a variant; changed in place.
        connection: The default connection.

    Raises:
        ValueError: The connection is unknown, or an argument that begins with ``connection`` or ``skip_`` is unknown.
    """
    connection = known_connection(kwargs.pop("connection", connection))
    known = variant_arguments(connection)
    arguments = {"connection": connection}
    for name in [name for name in kwargs if is_variant_argument(name)]:
        if name.startswith("skip") or not takes_any(CONNECTIONS[connection]):
            known_name("argument", name, known)
        arguments[name.removeprefix("connection_")] = kwargs.pop(name)
    return arguments
