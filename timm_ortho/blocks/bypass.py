"""Find calls of a block that compute their result without its connections, for :func:`timm_ortho.register_block`."""
import ast
import inspect
from itertools import pairwise
from types import FunctionType
from typing import Any, Callable, List, Sequence, Set, cast

from ..routing import LEAVING, RETURNING, Route, is_fixed, leaves, locals_of, negated, syntax_tree


def bypass_of_route(route: Route) -> str:
    """Return the condition under which a call computes its result without one of the connections, as source code.

    The result is empty if there is no such condition. Conditions that depend only on the configuration of a block do
    not count, and neither do calls that return the stream unchanged.

    Example:
        >>> from timm_ortho.blocks import BlockSpec
        >>> spec = BlockSpec("", "shortcut", kinds=("conv",))
        >>> bypass_of_route(Route(timm.models.resnet.BasicBlock, spec, spec.kinds))
        ''
    """
    tree, router = route.replaced(syntax_tree(route.method))
    return _Bypass(route.method, set(router.calls).__contains__, router.streams, router.sides_differ).of(tree)


def bypass_of(block: type, method: str) -> str:
    """Return when ``forward`` does not use another method of the block, in the form of :func:`bypass_of_route`."""
    forward = inspect.unwrap(cast(Any, block).forward)
    bypass = _Bypass(forward, lambda node: isinstance(node, ast.Attribute) and node.attr == method, set(), False)
    return bypass.of(syntax_tree(forward))


class _Bypass:
    """Find a condition under which a call leaves out a connection, such as ``self.training``.

    The sides of a statement are compared, such as the two sides of an ``if``, see :func:`_sides`. If a side may return,
    the statements that follow belong to both sides.

    Args:
        function: The method.
        is_call: Whether a node is the call of a connection.
        streams: Source expressions of the stream.
        sides_differ: Whether both sides of an ``if`` may have different numbers of calls, if each side has a call.
    """

    def __init__(
            self, function: FunctionType, is_call: Callable[[ast.AST], bool], streams: Set[str], sides_differ: bool,
    ) -> None:
        code = function.__code__
        self.is_call, self.streams, self.sides_differ = is_call, streams, sides_differ
        self.local = locals_of(code) - {code.co_varnames[0]}
        self.arguments = set(code.co_varnames[1:code.co_argcount])
        self.assigned: Set[str] = set()
        self.found = ""

    def of(self, tree: ast.Module) -> str:
        function = tree.body[0]
        if isinstance(function, ast.FunctionDef):  # not a lambda
            self._count(function.body)
        return self.found

    def _count(self, nodes: Sequence[ast.AST]) -> int:
        """Return the number of connections that a call reaches in these nodes, on the path with the most calls."""
        count = 0
        for index, node in enumerate(nodes):
            inner = list(ast.iter_child_nodes(node))
            if isinstance(node, LEAVING):
                return count + self._count(inner)
            tests, *sides = _sides(node)
            may_leave = any(map(leaves, sides)) or any(
                isinstance(each, RETURNING) for side in sides for top in side for each in ast.walk(top))
            rest = nodes[index + 1:] if may_leave else []
            if len(sides) > 1:
                count += self._count(tests) + max(
                    self._larger(node, tests[0], pair, rest) for pair in pairwise(sides))
            elif sides:
                count += self._count([*tests, *sides[0], *rest])
            else:
                count += self.is_call(node) + self._count(inner)
            if may_leave:
                return count
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.assigned.add(node.id)
        return count

    def _larger(self, node: ast.AST, test: Any, sides: Sequence[Sequence[ast.AST]], rest: Sequence[ast.AST]) -> int:
        """Compare two sides of a statement. ``rest`` follows a side that does not return."""
        only = rest if any(map(leaves, sides)) else ()  # otherwise, both sides continue with the rest
        changes = [self._changes([*side, *only]) for side in sides]
        counts = [self._count([*side, *rest]) for side in sides]
        fewer = counts.index(min(counts))
        may_differ = self.sides_differ and min(counts) > 0
        fixed = isinstance(node, (ast.If, ast.IfExp)) and is_fixed(test, self.local)
        if counts[0] != counts[1] and changes[fewer] and not may_differ and not fixed:
            self.found = self.found or ast.unparse(negated(test) if fewer else test)
        return max(counts)

    def _changes(self, side: Sequence[ast.AST]) -> bool:
        """Return whether one side of a statement changes the stream other than by connections, and does not raise."""
        end = next((index for index, node in enumerate(side) if isinstance(node, LEAVING)), len(side))
        if end < len(side) and isinstance(side[end], ast.Raise):
            return False
        return not all(map(self._keeps, side[:end + 1]))

    def _keeps(self, node: ast.AST) -> bool:
        """Return whether a statement assigns or returns the stream or the sum, or an expression is one of them."""
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return)) else node
        return value is None or isinstance(value, (ast.Pass, ast.Continue, ast.Break)) or self.is_call(value) or (
            ast.unparse(value) in self.streams | (self.arguments - self.assigned))


def _sides(node: ast.AST) -> List[Sequence[ast.AST]]:
    """Return the expressions that select one side of a statement, and the sides; only ``[[]]`` for other nodes."""
    if isinstance(node, ast.If):
        return [[node.test], node.body, node.orelse]
    if isinstance(node, ast.IfExp):
        return [[node.test], [node.body], [node.orelse]]
    if isinstance(node, (ast.For, ast.While)):
        expressions = [node.test] if isinstance(node, ast.While) else [node.iter, node.target]
        return [expressions, [*node.body, *node.orelse], node.orelse]
    if isinstance(node, ast.With):
        return [node.items, node.body]
    if isinstance(node, ast.Try):
        types = [handler.type or ast.Name("BaseException", ast.Load()) for handler in node.handlers]
        body = [*node.body, *node.orelse, *node.finalbody]
        return [types, *([*handler.body, *node.finalbody] for handler in node.handlers), body]
    return [[]]
