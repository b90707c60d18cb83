"""Whether a class that no table has looks like a residual block, by the source of its ``forward``."""
import ast
import inspect
import re
from functools import cache
from typing import Set

from ..routing import syntax_tree


@cache
def looks_residual(cls: type) -> bool:
    """Whether a class looks like a residual block.

    That is: two things that both follow from the input are added, by ``+``, ``torch.add`` or the tensor's own methods.
    It errs towards yes, except for position embeddings, so that no model is converted by half: what looks residual and
    is not is named by :func:`timm_ortho.not_residual`. Not seen are sums in other methods, of arguments or by other
    means (``sum``), and those of a class without readable source.
    """
    try:
        function = syntax_tree(inspect.unwrap(cls.forward)).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError):  # built in, generated, or without a forward
        return False
    if not isinstance(function, ast.FunctionDef):
        return False
    given = function.args
    sources = [*given.posonlyargs, *given.args][1:] or [given.vararg] * bool(given.vararg) or given.kwonlyargs
    if not sources:
        return False
    derived = _derived(function, sources[0].arg)
    return any(_adds(node, derived) for node in ast.walk(function))


_ADDING = ("add", "add_", "add_relu")
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.comprehension)


def _derived(function: ast.FunctionDef, source: str) -> Set[str]:
    """Variables that are computed from one argument, shapes and sizes of it left out."""
    names: Set[str] = set()
    grown = {source}
    while grown - names:
        names |= grown
        for node in ast.walk(function):
            value = getattr(node, "value", getattr(node, "iter", None)) if isinstance(node, _ASSIGNMENTS) else None
            if value is not None and _mentions(value, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                grown |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def _adds(node: ast.AST, derived: Set[str]) -> bool:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        summands = [node.target, node.value]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        summands = [node.left, node.right]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
        others = [keyword.value for keyword in node.keywords]
        summands = [node.func.value, *node.args[:2], *others]  # of torch.add the first mentions nothing
    else:
        return False
    return sum(_mentions(one, derived) for one in summands) >= 2 and not any(map(_is_no_branch, summands))


def _is_no_branch(summand: ast.AST) -> bool:
    """Whether it says so itself: outputs put together, ``(y,)`` or ``outputs[1:]``, or a position embedding's name."""
    while isinstance(summand, (ast.Call, ast.Subscript)):
        if isinstance(summand, ast.Subscript) and isinstance(summand.slice, ast.Slice):
            return True
        summand = summand.func if isinstance(summand, ast.Call) else summand.value
    name = getattr(summand, "attr", getattr(summand, "id", ""))
    return isinstance(summand, ast.Tuple) or re.search("pos(ition)?_e[mn]", name) is not None


def _mentions(node: ast.AST, names: Set[str]) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "size", "ndim", "device", "dtype"):
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    return any(_mentions(child, names) for child in ast.iter_child_nodes(node))
