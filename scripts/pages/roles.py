"""Extension of griffe, which reads docstrings for the documentation site: Sphinx roles become links.

``:func:`timm_ortho.connect``` becomes a link to the description of this function. A name without its module is searched
in the scopes around the docstring, as Python would. The names of modules become code.
"""
import re
from typing import Any

import griffe

ROLE = re.compile(r":(attr|class|data|exc|func|meth|mod):`\.?([\w.]+)`")


class Roles(griffe.Extension):
    """Rewrite the docstrings of modules, classes, functions and attributes for mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(lambda role: _link(obj, *role.groups()), obj.docstring.value)
            text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
            obj.docstring.value = text.replace("``", "`")


def _link(obj: griffe.Object, role: str, name: str) -> str:
    if role == "mod" or name.startswith("timm."):
        return f"`{name}`"
    first, *rest = name.split(".")
    if first != "timm_ortho":
        scope = obj if first in obj.members else obj.parent
        first = scope.resolve(first)
    return f"[`{name}`][{'.'.join([first, *rest])}]"
