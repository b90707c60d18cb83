"""Read and write YAML. The package reads every YAML file here.

A file of another person may contain eight levels of aliases that expand to billions of values. The package's own files
contain no aliases, so files with aliases are refused.
"""
from typing import Any

import yaml
from yaml import YAMLError

DEEPEST = 20  # levels of lists and mappings; copies and JSON use several of Python's 1,000 stack frames for each
_Fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is much faster, but PyYAML may lack it


class _Loader(_Fast):
    """Reads values of JSON's types only: a date is text, and bytes and sets have no constructor."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)
for _kind in ("binary", "set", "omap", "pairs"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", yaml.SafeLoader.construct_undefined)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def load_yaml(text: str) -> Any:
    """Return the value of a YAML document: text, numbers, true, false, null, lists and mappings. Dates are text.

    >>> load_yaml("lr: 0.1")
    {'lr': 0.1}

    Raises:
        YAMLError: The text is not YAML, contains an alias, or has a value of another kind, or more than 20 levels.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise yaml.MarkedYAMLError(problem=f"more than {DEEPEST} levels of lists and mappings",
                                           problem_mark=event.start_mark)
            if isinstance(event, yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported, write the values instead",
                                           problem_mark=event.start_mark)
            # to read 1:1:1:... as a number takes quadratic time; the second flag is true for text in quotes
            if isinstance(event, yaml.ScalarEvent) and not event.implicit[1] and len(event.value) > 1000:
                raise yaml.MarkedYAMLError(problem="a value of more than 1,000 characters must be in quotes",
                                           problem_mark=event.start_mark)
        return yaml.load(text, Loader=_Loader)
    except (ValueError, LookupError) as error:  # `!!int x`, `!!bool x`
        raise YAMLError(f"a value cannot be read: {error}") from None


def load_written_yaml(text: str) -> Any:
    """Return the value of a YAML document that a program wrote. The last line of a complete one ends with a newline.

    Raises:
        YAMLError: See `load_yaml`; or the document is incomplete.
    """
    if not text.endswith("\n"):
        raise YAMLError("it is incomplete, because its last line has no newline")
    return load_yaml(text)


def dump_yaml(value: Any, **options: Any) -> str:
    """Return a value as YAML without aliases. ``options`` are passed to ``yaml.dump``."""
    return yaml.dump(value, Dumper=_Dumper, **options)
