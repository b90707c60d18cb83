"""Check values of JSON and YAML files, which another person may have written.

A kind describes the values that are allowed. It is a :class:`Plain`, or it contains other kinds:

| kind | allowed values |
| --- | --- |
| `[kind]` | a list of values of this kind |
| `{key: kind, ...: kind}` | a mapping with these kinds of values. The key `...` has the kind of all other texts |
| `{ANY: kind}` | a mapping with values of this kind. The keys need not be texts |
| `(kind, kind)` | a value of one of these kinds. If `MISSING` is one of them, a key may be missing |
"""
from collections import abc
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Union, get_args, get_origin

from ._text import UserError, plain_lines


@dataclass(frozen=True)
class Plain:
    """A kind of values that contain no other kinds."""

    must: str  # what a value must be, for the message
    fits: Callable[[Any], bool]


def _range(name: str, low: float, high: float, *types: type) -> Plain:
    return Plain(name, lambda value: type(value) in types and low <= value <= high and (
        type(value) is float or abs(value) <= 2**53))  # NumPy makes objects of larger whole numbers


_LARGEST = 1e100  # float64 can represent squares of such numbers, and their sums; NaN is not allowed either
NUMBER = _range("a number from -1e100 to 1e100", -_LARGEST, _LARGEST, int, float)
NOT_NEGATIVE = _range("a number from 0 to 1e100", 0, _LARGEST, int, float)
PERCENT = _range("a number from 0 to 100", 0, 100, int, float)
COUNT = _range("a whole number of at least 0, and at most 2**53", 0, 2**53, int)
SIZE = _range("a whole number of at least 1, and at most 2**53", 1, 2**53, int)
ANY = Plain("anything", lambda value: True)
NULL = Plain("null", lambda value: value is None)
MISSING = Plain("missing", lambda value: False)
SINGLE = Plain(f"text, {NUMBER.must}, true, false or null",
               lambda value: value is None or isinstance(value, (str, bool)) or NUMBER.fits(value))
TEXT = Plain("text", lambda value: isinstance(value, str))
FLAG = Plain("true or false", lambda value: isinstance(value, bool))

_OF_HINTS = {Any: ANY, type(None): NULL, str: TEXT, bool: FLAG, int: SIZE}


def one_of(*names: str) -> Plain:
    """Return the kind of a text that is one of these names."""
    return Plain(f"one of {', '.join(map(repr, names))}", lambda value: isinstance(value, str) and value in names)


def optional(keys: str, kind: Any) -> dict[str, Any]:
    """Return the kinds of keys that may be missing or null. ``keys`` are separated by spaces."""
    return dict.fromkeys(keys.split(), (kind, NULL, MISSING))


def kind_of(hint: Any) -> Any:
    """Return the kind of a type hint, such as `Mapping[str, Optional[bool]]`. An `int` must be at least 1."""
    inner = [kind_of(each) for each in get_args(hint)]
    if get_origin(hint) is Union:
        return tuple(inner)
    if get_origin(hint) is abc.Mapping:
        return {... if inner[0] is TEXT else ANY: inner[1]}
    return inner if get_origin(hint) is abc.Sequence else _OF_HINTS[hint]


def checked(value: Any, kind: Any, name: str) -> Any:
    """Return a value if it is of a kind. Otherwise raise a UserError with the name and what the value must be."""
    for each in _alternatives(kind):
        if isinstance(each, Plain) and each.fits(value):
            return value
        if isinstance(each, list) and isinstance(value, list):
            for index, item in enumerate(value):
                checked(item, each[0], f"{name}[{index}]")
            return value
        if isinstance(each, dict) and isinstance(value, dict):
            _check_items(value, each, name)
            return value
    musts = " or ".join(_must(each) for each in _alternatives(kind) if each not in (NULL, MISSING))
    raise _error(name, f"is {value!r:.60}, but must be {musts}")


def _must(kind: Any) -> str:
    if isinstance(kind, Plain):
        return kind.must
    return "a list" if isinstance(kind, list) else "a mapping"


def _alternatives(kind: Any) -> tuple:
    return kind if isinstance(kind, tuple) else (kind,)


def _check_items(values: Mapping[Any, Any], kinds: Mapping[Any, Any], name: str) -> None:
    other = kinds.get(..., kinds.get(ANY))
    for key in values if ANY not in kinds else ():
        if not isinstance(key, str):  # YAML reads `on:` as true, and `1:` as a number
            raise _error(name, f"has the key {key!r:.60}, but a key must be text: write it in quotes")
    wrong = [key for key in values if key not in kinds and other is None]
    wrong += [key for key in kinds if key not in (*values, ..., ANY) and MISSING not in _alternatives(kinds[key])]
    if wrong:
        raise _error(name, f"has an unknown key, or lacks one: {wrong[0]!r:.60}")
    for key, item in values.items():
        checked(item, kinds.get(key, other), f"{name}.{key}")


def _error(name: str, problem: str) -> UserError:
    return UserError(f"{plain_lines(name):.200} {problem}")  # keys of the file are in the name
