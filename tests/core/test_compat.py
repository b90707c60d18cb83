"""The private names that this package uses exist in the installed torch and timm, and behave as expected."""
import ast
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import timm_ortho
from timm_ortho import _compat

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


def test_is_compiler_error():
    def broken(graph, inputs):
        raise ValueError("cannot")

    with pytest.raises(Exception) as error:  # noqa: PT011 the test checks the class
        torch.compile(lambda x: x + 1, backend=broken)(torch.ones(1))
    assert _compat.is_compiler_error(error.value)
    assert not _compat.is_compiler_error(ValueError("cannot"))


def test_is_sharded():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert not _compat.is_sharded(model[0][0])
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        fully_shard(model)
    finally:
        distributed.destroy_process_group()
    assert _compat.is_sharded(model[0][0])  # submodules of a sharded module count as sharded
    assert not _compat.is_sharded(nn.Linear(2, 2))
