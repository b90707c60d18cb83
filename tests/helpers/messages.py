"""Error messages that list connections."""
import inspect

from timm_ortho import CONNECTIONS


def not_taken(connection: str, argument: str) -> str:
    """Return the error for an argument that a connection does not take."""
    known = [name for name, make in CONNECTIONS.items() if argument in inspect.signature(make).parameters]
    return (f"{connection} does not take the argument {argument}: omit {argument}, or choose {' or '.join(known)}; "
            "your own connection needs this argument in its constructor")
