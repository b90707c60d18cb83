"""Detect unregistered residual blocks from the source of their ``forward``."""
import ast
import re
from functools import cache
from types import CodeType
from typing import Optional, Set, Union

from .._bytecode import ADDING, adds, names_in
from ..routing import syntax_tree
from .lookup import method_of


@cache
def looks_residual(cls: type) -> bool:
    """Return whether a class looks like a residual block.

    A residual block adds two tensors that are both computed from its inputs. The addition is ``+``, ``+=`` or a call of
    ``add``, ``add_`` or ``add_relu``. Every tensor argument counts as an input, because ``BertOutput`` gets branch and
    stream as two arguments. Masks, embeddings of positions and token types, and losses do not count if their names show
    this. Sums of lists or tuples do not count either.

    The rule prefers false positives, because a missed block would leave a model partly converted. If the source cannot
    be read, any addition counts.

    Example:
        >>> looks_residual(timm.models.vision_transformer.Block), looks_residual(timm.layers.Mlp)
        (True, False)
    """
    function = _forward_of(cls)
    if function is None:
        return adds(_code_of(cls))
    functions = [node for node in ast.walk(function) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    derived = _derived(function, set().union(*(_sources(each, has_self=each is function) for each in functions)))
    return any(_adds(node, derived) for node in ast.walk(function))


@cache
def calls_forward_of_base(cls: type) -> bool:
    """Return whether the ``forward`` of a class calls ``super().forward`` and so contains the base's additions."""
    return names_in(_code_of(cls)) >= {"super", "forward"}


def _code_of(cls: type) -> Optional[CodeType]:
    return getattr(method_of(cls, "forward"), "__code__", None)


def _forward_of(cls: type) -> Optional[ast.FunctionDef]:
    try:
        function = syntax_tree(method_of(cls, "forward")).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError):  # built-in code, generated code, or no forward
        return None
    return function if isinstance(function, ast.FunctionDef) else None


_NO_STREAM = "(^|_)(masks?|bias|pos|positions?|positional)(_|$)"  # arguments that are neither stream nor branch
_NO_BRANCH = "(pos(ition(al)?)?|type)_(e[mn]|bias)|(^|_)loss(es)?(_|$)|(^|_)masks?$"  # summands that are no branch
_NUMBER = r"(Optional\[)?(int|float|bool|str)\b"  # annotations of arguments that are not tensors
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.comprehension)


def _sources(function: Union[ast.FunctionDef, ast.Lambda], has_self: bool) -> Set[str]:
    """Return the arguments that may be a stream or a branch output.

    These are the first argument and all further tensors, except those whose name marks a mask, a bias or positions.
    """
    args = function.args
    arguments = [*[*args.posonlyargs, *args.args][has_self:], *[args.vararg] * bool(args.vararg), *args.kwonlyargs]
    tensors = [argument.arg for argument in arguments[1:] if not re.search(_NO_STREAM, argument.arg)
               and not (argument.annotation and re.match(_NUMBER, ast.unparse(argument.annotation)))]
    return {*tensors, *(argument.arg for argument in arguments[:1])}


def _derived(function: ast.FunctionDef, sources: Set[str]) -> Set[str]:
    """Return the names of the sources and of variables that depend on values of the sources, not only on shapes."""
    names: Set[str] = set()
    grown = set(sources)
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
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDING:
        by_name = [keyword.value for keyword in node.keywords]
        summands = [node.func.value, *node.args[:2], *by_name]  # for torch.add, func.value is the module torch
    else:
        return False
    return sum(_mentions(summand, derived) for summand in summands) >= 2 and not any(map(_is_no_branch, summands))


def _is_no_branch(summand: ast.AST) -> bool:
    """Return whether a summand cannot be a branch output, judged by its form or name.

    Examples are tuples of outputs, ``(y,)`` or ``outputs[1:]``, and position embeddings, ``self.pos_embed(x)``.
    """
    while isinstance(summand, (ast.Call, ast.Subscript, ast.Attribute)):
        if isinstance(summand, ast.Subscript) and isinstance(summand.slice, ast.Slice):
            return True
        if re.search(_NO_BRANCH, getattr(summand, "attr", "")):
            return True
        summand = summand.func if isinstance(summand, ast.Call) else summand.value
    return isinstance(summand, (ast.Tuple, ast.List)) or re.search(_NO_BRANCH, getattr(summand, "id", "")) is not None


def _mentions(node: ast.AST, names: Set[str]) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "size", "ndim", "device", "dtype"):
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    return any(_mentions(child, names) for child in ast.iter_child_nodes(node))
