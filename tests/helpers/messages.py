"""The connections that take an argument, and the error of all others."""
from timm_ortho import CONNECTIONS, Connection
from timm_ortho.connections import arguments_of


def taking(argument: str) -> list[str]:
    """Return the names of the connections that take an argument."""
    return [name for name, make in CONNECTIONS.items() if argument in arguments_of(make)]


def not_taken(connection: str, argument: str) -> str:
    """Return the error for an argument that a connection does not take."""
    known = arguments_of(connection if connection in CONNECTIONS else Connection)
    return f"unknown argument of connection {connection!r}: {argument!r}, known are {', '.join(map(repr, known))}"
