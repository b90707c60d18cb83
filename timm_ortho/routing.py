"""A block class in, its routed subclass out.

timm's residual blocks differ in everything but one thing: somewhere in ``forward`` stands ``x + something``. A routed
subclass has the host's own ``forward`` in which exactly those additions are calls of connection modules::

    x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
    x = self.connection_attention(x, self.drop_path1(self.ls1(self.attn(self.norm1(x)))))

    x = x + self.attn(self.norm1(x), attn_mask)     # the mask says what is padding
    x = self.connection_attention(x, self.attn(self.norm1(x), attn_mask), attn_mask=attn_mask)

    x += shortcut                                   # in place: the sum is a new tensor here
    x = self.connection_conv(shortcut, x)

It is made once for each class, from the syntax tree of the installed release, so no code of the host is copied and the
host's class is not changed. The new source is registered with ``linecache``: tracebacks, debuggers and TorchScript
show what really runs.

Additions are numbered along the way that a call takes: those on the two sides of an ``if`` are the same addition, of
which one is reached, and a side may do without. What a block's own configuration rules out (``if self.has_skip:``)
:meth:`Route.reached` says for each instance.
"""
import __future__

import ast
import inspect
import linecache
import textwrap
from types import CodeType, FunctionType
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union


class RoutingError(RuntimeError):
    """A block's method does not hold the additions that it is said to hold, or cannot be rebuilt."""


class Sum(NamedTuple):
    """An addition in a block's method.

    Attributes:
        stream: The expression to which something is added: ``x``, ``self.shortcut(x)``; several where the sides of an
            ``if`` write it differently.
        connection: Attribute of the module that takes the addition's place; None for one that stays what it is.
    """

    stream: Union[str, Tuple[str, ...]]
    connection: Optional[str]

    @property
    def written(self) -> Tuple[str, ...]:
        """The expressions as ``ast.unparse`` writes them."""
        streams = (self.stream,) if isinstance(self.stream, str) else self.stream
        return tuple(ast.unparse(ast.parse(stream)) for stream in streams)


# A way to an addition: the conditions on ``self`` that a call meets there.
_Way = Tuple[CodeType, ...]

_DOCUMENTING = {"auto_docstring"}  # decorators that need the class around a method, and that its copy does without
_CHANGING = {"training", "grad_checkpointing"}  # attributes that say nothing about the next call


def syntax_tree(function: FunctionType) -> ast.Module:
    """Return the syntax tree of a function's source.

    Raises:
        OSError: The source cannot be found, or the function is from ``exec``. Python 3.13 registers the text of
            ``python -c`` as the file ``<string>``, to which all code from ``exec`` seems to belong.
    """
    if function.__code__.co_filename == "<string>":
        raise OSError("could not get source code")
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


class Route:
    """What is found in one method of a block class: where its additions are, and under which conditions.

    Args:
        block: The host's class, with the method in readable source.
        sums: The additions that the method is expected to hold, in the order of the source.
        method: Its name.
        mask: The argument, if the method takes it, that connections are handed as ``attn_mask``.
        library: Where the block is from, for errors: ``"timm 1.0.31"``.
        sides_differ: Whether the two sides of an ``if`` have additions of their own, counted one after the other.

    Raises:
        RoutingError: The method holds other additions to these streams, or cannot be rebuilt.
    """

    def __init__(
            self, block: type, sums: Sequence[Sum], *, method: str = "forward", mask: str = "", library: str = "",
            sides_differ: bool = False,
    ) -> None:
        self.block, self.name = block, method
        self.method: FunctionType = inspect.unwrap(getattr(block, method))  # as it is written, whatever wraps it
        self.where = where = f"{block.__module__}.{block.__qualname__}" + (f" of {library}" if library else "")
        if isinstance(inspect.getattr_static(block, method), (staticmethod, classmethod)):
            raise RoutingError(f"{where}: {method} is called without the block, which has the connections")
        enclosed = self.method.__code__.co_freevars
        if enclosed:
            names = ", ".join(enclosed).replace("__class__", "super() without arguments, and so __class__")
            raise RoutingError(f"{where}: {method} uses {names} of an enclosing scope")
        if "_transformer_encoder_layer_fwd" in self.method.__code__.co_names:
            raise RoutingError(f"{where}: in evaluation {method} hands all its work to one fused operation, additions "
                               "included; write the block without that fast path and register it")
        try:
            tree = syntax_tree(self.method)
        except (OSError, TypeError, SyntaxError) as error:
            hint = "; put a class that was typed at Python's prompt in a file" if isinstance(error, OSError) else ""
            raise RoutingError(f"{where}: the source of {method} cannot be read: {error}{hint}") from None
        self.owner = next(cls for cls in block.__mro__ if method in vars(cls))
        for node in ast.walk(tree):  # private names, as Python has them in the body of a class
            if isinstance(node, ast.Attribute) and node.attr.startswith("__") and not node.attr.endswith("__"):
                node.attr = f"_{self.owner.__name__.lstrip('_')}{node.attr}"
        router = _Router(sums, self.method, mask, sides_differ)
        self.tree = ast.fix_missing_locations(router.visit(tree))
        if router.length != len(sums) or router.problem:
            streams = " or ".join(dict.fromkeys(repr(stream) for expected in sums for stream in expected.written))
            others = f"none, but to others: {'; '.join(router.others)}" if router.others else "none"
            found = "; ".join(router.found) or others
            raise RoutingError(
                f"{where}: expected {len(sums)} addition{'s' * (len(sums) != 1)} to {streams} in {method}, found "
                f"{router.length} ({found}){router.problem}")
        self.branch_first = router.branch_first  # of each addition: whether the stream is its right summand
        self._ways = router.ways

    def reached(self, block: Any) -> List[bool]:
        """For each addition whether a call of this instance can reach it, by what its attributes are now."""
        namespace, own = self.method.__globals__, {self.method.__code__.co_varnames[0]: block}
        return [any(all(_may_hold(code, namespace, own) for code in way) for way in ways) for ways in self._ways]

    def subclass(self, *, name: str, module: str) -> type:
        """The subclass of the block class whose additions are calls of connections.

        Args:
            name: Name of the new class.
            module: Name of the module through which it can be imported (by pickle, for one).
        """
        source = ast.unparse(self.tree)
        filename = f"<{module}.{name}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        made = dict(vars(self.owner))  # defaults are found as in the body of the class
        flags = self.method.__code__.co_flags & __future__.annotations.compiler_flag  # the others are on by now
        code = compile(source, filename, "exec", flags, dont_inherit=True)
        try:
            exec(code, self.method.__globals__, made)  # names resolve as in the host
            method = made[self.method.__name__]
            method.__qualname__ = f"{name}.{method.__name__}"
            method.__doc__ = self.method.__doc__
            routed = type(self.block)(name, (self.block,), {
                "__module__": module,
                "__qualname__": name,
                "__doc__": f"{self.block.__name__} of {self.block.__module__} with connections.",
                self.name: method,
            })
        except Exception as error:  # a lambda, names of an enclosing scope, a base that refuses subclasses
            raise RoutingError(f"{self.where}: {self.name} cannot be rebuilt in a subclass: {error!r}") from error
        routed.__name__ = self.block.__name__  # by which FSDP's policies know a layer; pickle goes by __qualname__
        return routed


class _Router(ast.NodeTransformer):
    """Replaces the expected additions by calls of ``self.<connection>`` and keeps the ways that lead to them."""

    def __init__(self, sums: Sequence[Sum], function: FunctionType, mask: str, sides_differ: bool) -> None:
        self.sums = sums
        self.sides_differ = sides_differ
        self.streams = {stream for expected in sums for stream in expected.written}
        self.further = {"attn_mask": mask} if mask in inspect.signature(function).parameters else {}
        self.instance = function.__code__.co_varnames[0]  # ``self``, whatever its author calls it
        self.local = _locals(function.__code__) - {self.instance}
        self.position = 0  # of the next addition, on the way that is being followed
        self.length = 0  # additions on the longest way
        self.conditions: List[ast.expr] = []  # met on the way
        self.ways: List[List[_Way]] = [[] for _ in sums]
        self.branch_first = [False for _ in sums]
        self.found: List[str] = []
        self.others: List[str] = []  # additions to other streams
        self.problem = ""

    # ------------------------------------------------------------------------------------- additions
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        found = self._match(node, node.left, node.right) if isinstance(node.op, ast.Add) else None
        if found is None:
            if isinstance(node.op, ast.Add) and any(map(self._is_sum, (node.left, node.right))):
                self.problem = f"; {ast.unparse(node)!r} would stay linear in its last summand: write x + (f + g)"
            return self.generic_visit(node)
        connection, stream, branch = found
        if connection is None:
            return self.generic_visit(node)
        return ast.copy_location(self._call(connection, stream, branch), node)

    def _is_sum(self, node: ast.expr) -> bool:
        return (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
                and any(ast.unparse(summand) in self.streams for summand in (node.left, node.right)))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        found = None
        if isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
            found = self._match(node, ast.Name(node.target.id, ast.Load()), node.value)
        if found is None:
            return self.generic_visit(node)
        connection, stream, branch = found
        if connection is None:
            return self.generic_visit(node)
        return ast.copy_location(ast.Assign([node.target], self._call(connection, stream, branch)), node)

    def _match(self, node: ast.AST, *summands: ast.expr) -> Optional[Tuple[Optional[str], ast.expr, ast.expr]]:
        """Connection, stream and branch of an addition; None if it is about something else."""
        written = [ast.unparse(summand) for summand in summands]
        if not any(one in self.streams for one in written):
            self.others.append(ast.unparse(node))
            return None
        self.found.append(ast.unparse(node))
        at = self.position
        self.position += 1
        self.length = max(self.length, self.position)
        if at >= len(self.sums):
            return None, summands[0], summands[1]
        expected = self.sums[at]
        self.branch_first[at] = written[0] not in expected.written
        if self.branch_first[at]:
            summands = summands[::-1]
            if written[1] not in expected.written:
                self.problem = f", of which {self.found[-1]!r} stands where one to {expected.stream!r} should"
        self.ways[at].append(tuple(self._known_conditions()))
        return expected.connection, summands[0], summands[1]

    def _call(self, connection: str, stream: ast.expr, branch: ast.expr) -> ast.Call:
        module = ast.Attribute(value=ast.Name(self.instance, ast.Load()), attr=connection, ctx=ast.Load())
        keywords = [ast.keyword(arg=key, value=ast.Name(name, ast.Load())) for key, name in self.further.items()]
        return ast.Call(func=module, args=[stream, self.visit(branch)], keywords=keywords)

    # ------------------------------------------------------------------------------------------ ways
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [one for one in node.decorator_list if ast.unparse(one) not in _DOCUMENTING]
        node.body = self._visit_statements(node.body)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        node.body, node.orelse = self._visit_sides(node.test, node.body, node.orelse)
        if _leaves(node.body):  # what follows is the other side
            self.conditions.append(_negated(node.test))
        elif _leaves(node.orelse):
            self.conditions.append(node.test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        (node.body,), (node.orelse,) = self._visit_sides(node.test, [node.body], [node.orelse])
        return node

    def _visit_sides(
            self, test: ast.expr, then: List[Any], otherwise: List[Any]) -> Tuple[List[Any], List[Any]]:
        start, ends, visited = self.position, [], []
        for condition, side in ((test, then), (_negated(test), otherwise)):
            self.position = self.position if self.sides_differ else start
            self.conditions.append(condition)
            visited.append(self._visit_statements(side))
            self.conditions.pop()
            ends.append(start if _leaves(side) else self.position)
        if start not in ends and ends[0] != ends[1] and not self.sides_differ:
            self.problem = f", {ends[0] - start} and {ends[1] - start} of them on the sides of 'if {ast.unparse(test)}'"
        self.position = max(ends)
        return visited[0], visited[1]

    def _visit_statements(self, statements: List[Any]) -> List[Any]:
        met = len(self.conditions)
        visited = [self.visit(statement) for statement in statements]
        del self.conditions[met:]
        return visited

    def _known_conditions(self) -> List[CodeType]:
        known = []
        for condition in self.conditions:
            if not any((isinstance(node, ast.Call) and ast.unparse(node.func) != "hasattr")  # may draw a number
                       or getattr(node, "id", None) in self.local or getattr(node, "attr", None) in _CHANGING
                       for node in ast.walk(condition)):
                expression = ast.fix_missing_locations(ast.Expression(condition))
                known.append(compile(expression, f"<condition {ast.unparse(condition)}>", "eval"))
        return known


def _locals(code: CodeType) -> Set[str]:
    """Names that are local to a function or to one within it."""
    inner = [_locals(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_varnames, *code.co_cellvars}.union(*inner)


def _may_hold(condition: CodeType, namespace: Dict[str, Any], own: Dict[str, Any]) -> bool:
    try:
        return bool(eval(condition, namespace, own))
    except Exception:  # noqa: BLE001 behind a call that guards it, or of a tensor on meta: not known
        return True


def _leaves(statements: Sequence[ast.AST]) -> bool:
    """Whether the function ends at the end of these statements."""
    return bool(statements) and isinstance(statements[-1], (ast.Return, ast.Raise))


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)
