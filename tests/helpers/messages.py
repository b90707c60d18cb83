"""The connections that take an argument, and the error of all others."""
import inspect

from timm_ortho import CONNECTIONS


def taking(argument: str) -> list[str]:
    """Return the names of the connections that take an argument."""
    return [name for name, make in CONNECTIONS.items() if argument in inspect.signature(make).parameters]


def not_taken(connection: str, argument: str) -> str:
    """Return the error for an argument that a connection does not take."""
    return (f"{connection} does not take the argument {argument}: omit {argument}, or choose "
            f"{' or '.join(taking(argument))}; your own connection needs this argument in its constructor")
