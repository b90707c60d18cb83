"""Find calls of a block that compute their result without its connections, for :func:`timm_ortho.register_block`."""
import ast
from types import FunctionType
from typing import Any, List, Sequence, Set

from ..routing import LEAVING, RETURNING, Route, Router, is_fixed, leaves, locals_of, negated, syntax_tree


def bypass_of_route(route: Route) -> str:
    """Return the condition under which a call computes its result without one of the connections, as source code.

    The result is empty if there is no such condition. Conditions that depend only on the configuration of a block do
    not count, and neither do calls that return the stream unchanged.
    """
    tree, router = route.replaced(syntax_tree(route.method))
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):  # a lambda
        return ""
    bypass = _Bypass(route.method, router)
    bypass.count(function.body)
    return bypass.found


class _Bypass:
    """Find a condition under which a call leaves out a connection, such as ``self.training``.

    The sides of a statement are compared, such as the two sides of an ``if``, see :func:`_sides`. If a side may return,
    the statements that follow belong to both sides.

    Args:
        function: The method.
        router: The router that has replaced its additions.
    """

    def __init__(self, function: FunctionType, router: Router) -> None:
        code = function.__code__
        self.is_call, self.streams = set(router.calls).__contains__, router.streams
        self.sides_differ = router.sides_differ  # if each side of an ``if`` has a call
        self.local = locals_of(code) - {code.co_varnames[0]}
        self.arguments = set(code.co_varnames[1:code.co_argcount])
        self.assigned: Set[str] = set()
        self.found = ""

    def count(self, nodes: Sequence[ast.AST]) -> int:
        """Return the number of connections that a call reaches in these nodes, on the path with the most calls."""
        count = 0
        for index, node in enumerate(nodes):
            inner = list(ast.iter_child_nodes(node))
            if isinstance(node, LEAVING):
                return count + self.count(inner)
            tests, *sides = _sides(node)
            may_leave = any(map(leaves, sides)) or any(
                isinstance(each, RETURNING) for side in sides for top in side for each in ast.walk(top))
            rest = nodes[index + 1:] if may_leave else []
            if len(sides) > 1:
                count += self.count(tests) + self._larger(tests[0], sides, rest)
            elif sides:
                count += self.count([*tests, *sides[0], *rest])
            else:
                count += self.is_call(node) + self.count(inner)
            if may_leave:
                return count
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.assigned.add(node.id)
        return count

    def _larger(self, test: Any, sides: Sequence[Sequence[ast.AST]], rest: Sequence[ast.AST]) -> int:
        """Compare two sides of a statement. ``rest`` follows a side that does not return."""
        only = rest if any(map(leaves, sides)) else ()  # otherwise, both sides continue with the rest
        changes = [self._changes([*side, *only]) for side in sides]
        counts = [self.count([*side, *rest]) for side in sides]
        fewer = counts.index(min(counts))
        may_differ = self.sides_differ and min(counts) > 0
        if counts[0] != counts[1] and changes[fewer] and not may_differ and not is_fixed(test, self.local):
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
    """Return the expressions that select one side of a statement, and the sides; only ``[[]]`` for other nodes.

    A loop, ``with`` or ``try`` has one side: its body counts as executed once, without an exception.
    """
    if isinstance(node, ast.If):
        return [[node.test], node.body, node.orelse]
    if isinstance(node, ast.IfExp):
        return [[node.test], [node.body], [node.orelse]]
    is_compound = isinstance(node, (ast.For, ast.While, ast.With, ast.Try))
    return [[], [*ast.iter_child_nodes(node)]] if is_compound else [[]]
