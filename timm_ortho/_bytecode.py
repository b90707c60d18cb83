"""Find out which names the code of a function or of a class uses."""
import dis
import inspect
from functools import cache
from itertools import takewhile
from types import CodeType
from typing import Optional, Set


@cache
def uses(cls: type, attribute: str, base: type = object) -> bool:
    """Return whether a class uses an attribute. ``base`` and the classes after it in the resolution order do not count.

    A method that a subclass overrides counts only if the new method uses ``super`` or ``forward``, because it may then
    call the overridden method.
    """
    overridden: Set[str] = set()
    for each in takewhile(lambda each: each is not base, cls.__mro__):
        for name, value in vars(each).items():
            names = names_in(getattr(inspect.unwrap(value), "__code__", None))
            if attribute in names and name not in overridden:
                return True
            if not names & {"super", "forward"}:
                overridden.add(name)
    return False


ADDING = {"add", "add_", "add_relu"}  # functions and methods


def names_in(code: Optional[CodeType]) -> Set[str]:
    """Return the global names and attributes in the code of a function and of the functions inside it."""
    inner = [constant for constant in (code.co_consts if code else ()) if isinstance(constant, CodeType)]
    return {*(code.co_names if code else ()), *(name for constant in inner for name in names_in(constant))}


def adds(code: Optional[CodeType]) -> bool:
    """Return whether the code of a function, or of a function inside it, adds by ``+``, ``+=`` or one of ``ADDING``."""
    if code is None:
        return False
    signs = {each.argrepr for each in dis.get_instructions(code) if each.opname == "BINARY_OP"}
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return not (signs | names_in(code)).isdisjoint({"+", "+=", *ADDING}) or any(map(adds, inner))
