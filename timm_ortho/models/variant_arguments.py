"""Translate the arguments ``connection*`` and ``skip*`` of variants like ``vit_base_ortho`` to those of ``connect``."""
from inspect import signature
from typing import Any, Dict

from .._checks import known_name
from ..connections import known_connection
from ..convert import connect


def variant_argument(name: str) -> str:
    """Return the name that variants use for an argument of :func:`timm_ortho.connect`.

    >>> variant_argument("prob"), variant_argument("skip_rank")
    ('connection_prob', 'skip_rank')
    """
    return name if name.startswith(("connection", "skip")) else f"connection_{name}"


VARIANT_ARGUMENTS = {variant_argument(name): name for name in list(signature(connect).parameters)[1:]}


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
    arguments = {"connection": connection}
    for name in [name for name in kwargs if is_variant_argument(name)]:
        arguments[VARIANT_ARGUMENTS[known_name("argument", name, VARIANT_ARGUMENTS)]] = kwargs.pop(name)
    known_connection(arguments["connection"])
    return arguments
