"""Only one file uses private names of other packages."""
import ast
from pathlib import Path

import timm_ortho

NAMED_TUPLE = {"_make", "_asdict", "_replace"}
OPERATIONS = {"_to_copy"}  # an ATen operator
PROTECTED = {"_conv_forward"}  # a method of nn.Conv2d for subclasses


def test_private_names_are_in_compat_only():
    """Only _compat.py imports private names of other packages, or uses private attributes that another file defines."""
    for path in Path(timm_ortho.__file__).parent.rglob("*.py"):
        if path.name == "_compat.py":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        modules = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
        assert not [name for name in modules if "._" in name], path.name
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        private = {node.attr for node in attributes if node.attr.startswith("_") and not node.attr.endswith("__")}
        assert private <= own | NAMED_TUPLE | OPERATIONS | PROTECTED, path.name
