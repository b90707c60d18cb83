"""Derive routed subclasses: block classes whose residual additions are calls of connection modules.

A routed subclass has the same ``forward`` as the block class (the host), except that its additions are calls::

    x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
    x = self.connection_attention(x, self.drop_path1(self.ls1(self.attn(self.norm1(x)))))

    x = x + self.attn(self.norm1(x), attn_mask)     # the connection finds padding in the mask
    x = self.connection_attention(x, self.attn(self.norm1(x), attn_mask), attn_mask=attn_mask)

    x += shortcut                                   # adds in place; the connection returns a new tensor
    x = self.connection_conv(shortcut, x)

    x = x + self.attn(self.norm1(x))                # a norm reads the sum next: one call returns the sum and its norm
    x = x + self.mlp(self.norm2(x))
    x, connection_attention_normed = self.connection_attention.with_norm(x, self.attn(self.norm1(x)), self.norm2)
    x = self.connection_mlp(x, self.mlp(connection_attention_normed))

A method with an argument ``is_causal`` begins with a check: if it is True, ``global`` raises an error.
TorchScript cannot pass a module: in the last example, the subclass also has the two plain calls, after
``if torch.jit.is_scripting():``.

A subclass is built once per host, from the source of the installed release. The host itself does not change. The
generated source is registered with ``linecache``, where tracebacks, debuggers and TorchScript look it up.

Additions are numbered in call order. The two sides of an ``if`` share numbers, because a call reaches only one side. A
side may have no addition. Some blocks never reach an addition: for example, a block without a skip does not reach the
addition inside ``if self.has_skip:``. :meth:`Route.reached` evaluates such conditions.
"""
import __future__

import ast
import inspect
import linecache
import re
import sys
from dataclasses import replace
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, cast

import torch

from ._bytecode import ADDING

if TYPE_CHECKING:
    from .blocks.spec import BlockSpec


class RoutingError(RuntimeError):
    """A block's method does not contain the expected additions, or cannot be rebuilt."""


_LIBRARIES = ("timm", "torchvision", "transformers")  # libraries with a table of blocks
_Path = Tuple[CodeType, ...]  # the conditions on ``self`` under which a call reaches an addition

_DOCUMENTING = {"auto_docstring"}  # decorators that only work in a class body; the rebuilt method omits them
_CHANGING = {"training", "grad_checkpointing"}  # attributes that may change between calls
_ADDING = {*ADDING, "addcmul", "iadd", "sub", "subtract"}  # functions and methods, without underscores
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
_CONDITIONAL = (  # expressions that may evaluate their parts never, or several times
    ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def syntax_tree(function: FunctionType) -> ast.Module:
    """Return the syntax tree of a function's source.

    Raises:
        OSError: The source cannot be found, or ``exec`` defined the function. The message is the advice.
    """
    # Code from exec has the file name <string>, as has the program of ``python -c``. In Python 3.13, ``inspect`` would
    # return the text of this program.
    filename = function.__code__.co_filename
    try:
        source = "" if filename == "<string>" else inspect.getsource(function)
    except OSError:
        source = ""
    if not source:
        package = function.__module__.partition(".")[0]
        raise OSError("define the class in a file" if filename.startswith("<") else
                      f"the source files (.py) of {package} are not installed. An application that PyInstaller makes "
                      f"contains them with module_collection_mode={{{package!r}: 'pyz+py'}}")
    if not source[0].isspace():
        return ast.parse(source)
    tree = ast.parse(f"if True:\n{source}")  # dedent fails if a comment or text has less indentation than the method
    return ast.Module(cast(ast.If, tree.body[0]).body, type_ignores=[])


class Route:
    """The additions of one method of a block class, and the conditions under which a call reaches them.

    Args:
        block: The host. The source of its method must be available.
        spec: Description of the host.
        kinds: Kinds of the additions that connections replace.
        method: Name of the method.

    Attributes:
        source: The source of the method with calls of connections.
        branch_first: By kind, whether the stream is the right summand of the addition.
        bypass: Source of a condition under which a call computes its result without an addition, or "". Conditions on
            the configuration of a block do not count, and neither do calls that return the stream unchanged.
        next_norms: By kind, the attribute of the norm that reads the sum next, in one of the sides of an ``if``.

    Raises:
        RoutingError: The method does not contain exactly the expected additions, or cannot be rebuilt.

    Example:
        >>> import timm
        >>> from timm_ortho.blocks import BlockSpec
        >>> route = Route(timm.models.resnet.BasicBlock, BlockSpec("", "shortcut", kinds=("conv",)), ("conv",))
        >>> print(route.source.splitlines()[-3].strip())
        x = self.connection_conv(shortcut, x)
    """

    def __init__(self, block: type, spec: "BlockSpec", kinds: Tuple[str, ...], method: str = "forward") -> None:
        self.block, self.spec, self.kinds, self.name = block, spec, kinds, method
        self.method: FunctionType = inspect.unwrap(getattr(block, method))
        where = f"{block.__module__}.{block.__qualname__}" + (f" of {library_of(block)}" if not is_own(block) else "")
        if isinstance(inspect.getattr_static(block, method), (staticmethod, classmethod)):
            raise RoutingError(f"{where}: {method} is a static or class method, without access to the connections")
        self.owner = next(cls for cls in block.__mro__ if method in vars(cls))
        enclosed = self.method.__code__.co_freevars
        if enclosed:
            with_class = f"super() (write super({self.owner.__name__}, self))"
            names = ", ".join(with_class if name == "__class__" else f"{name} (write self.{name})" for name in enclosed)
            raise RoutingError(f"{where}: {method} cannot be rebuilt: it uses names of an enclosing scope: {names}")
        if "_transformer_encoder_layer_fwd" in self.method.__code__.co_names:
            raise RoutingError(f"{where}: in evaluation mode {method} calls a fused operation that includes the "
                               "additions; write the block without that fast path and register it")
        try:
            tree: Any = syntax_tree(self.method)
        except (OSError, TypeError, SyntaxError) as error:
            raise RoutingError(
                f"{where}: the source of {method} cannot be read: {getattr(error, 'msg', error)}") from None
        wrapper = getattr(block, method)
        # transformers wraps methods when a class is defined, and therefore also the method of the subclass
        if (wrapper is not self.method and not getattr(tree.body[0], "decorator_list", ())
                and not getattr(wrapper, "__globals__", {}).get("__name__", "").startswith("transformers.")):
            raise RoutingError(f"{where}: {method} was replaced by a wrapper that its source does not contain: write "
                               "the wrapper as a decorator in the class")
        for node in ast.walk(tree):  # mangle private names as Python does in the body of a class
            if isinstance(node, ast.Attribute) and node.attr.startswith("__") and not node.attr.endswith("__"):
                node.attr = f"_{self.owner.__name__.lstrip('_')}{node.attr}"
        router = Router(spec, kinds, self.method, keeps_order=is_own(block))
        tree = ast.fix_missing_locations(router.visit(tree))
        count = len(spec.kinds)
        if router.length != count or router.problem:
            streams = " or ".join(map(repr, dict.fromkeys(each for streams in router.expected for each in streams)))
            others = f"additions to other expressions: {'; '.join(router.others)}" if router.others else "none"
            matched = "; ".join(router.matched) or others
            found = len(router.matched)
            reached = f", at most {router.length} of them in one call" if router.length != found else ""
            raise RoutingError(f"{where}: expected {count} addition{'s' * (count != 1)} to {streams} in {method}, "
                               f"found {found} ({matched}){reached}{router.problem}")
        if router.calls and "is_causal" in inspect.signature(self.method).parameters:
            connections = dict.fromkeys(ast.unparse(call.func) for call in router.calls)
            check = ["if is_causal is True:", *(f"    {each}.refuse_causal()" for each in connections)]  # FX: a proxy
            tree.body[0].body[:0] = ast.parse("\n".join(check)).body
        self.branch_first = {kind: first for kind, first in zip(spec.kinds, router.branch_first, strict=True) if kind}
        self._paths, self.bypass = router.paths, router.bypass
        self.next_norms: Dict[str, str] = {}
        if self.method.__globals__.get("torch") is torch and "torch" not in router.local:  # for torch.jit.is_scripting
            norms = _Norms(self.method, router.calls)
            norms.rewrite(tree)
            self.next_norms = {kind: norms.found[site] for kind, site in spec.sites.items() if site in norms.found}
        self.source = ast.unparse(tree)

    def reached(self, block: Any) -> Tuple[str, ...]:
        """Return the kinds of additions that a call of ``block`` can reach with the block's present attributes."""
        if self.spec.unless(block):
            return ()
        namespace, own = self.method.__globals__, {self.method.__code__.co_varnames[0]: block}
        return tuple(kind for kind, paths in zip(self.spec.kinds, self._paths, strict=True) if kind and any(
            all(_may_hold(code, namespace, own) for code in path) for path in paths))


def bypass_of_helper(block: type, spec: "BlockSpec") -> str:
    """Return when ``forward`` does not call the method with the additions, in the form of :attr:`Route.bypass`."""
    forward: Any = inspect.unwrap(cast(Any, block).forward)
    helper = f"{forward.__code__.co_varnames[0]}.{spec.method}"
    router = Router(replace(spec, stream=""), (), forward, keeps_order=False, helper=helper)
    router.visit(syntax_tree(forward))
    return router.bypass


def is_own(cls: type) -> bool:
    """Return whether a class is a user's, and not from a library with a table of blocks."""
    return cls.__module__.partition(".")[0] not in _LIBRARIES


def library_of(cls: type) -> str:
    """Return the library of a class with its version, for error messages."""
    library = cls.__module__.partition(".")[0]
    return f"{library} {getattr(sys.modules.get(library), '__version__', '')}".strip()


def subclass_of(block: type, method: str, source: str, *, name: str, module: str) -> type:
    """Return a subclass of a block class with another method, for example with :attr:`Route.source`.

    ``name`` and ``module`` are attributes of the new class. A method that cannot be rebuilt raises a RoutingError.
    """
    filename = f"<{module}.{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    host: FunctionType = inspect.unwrap(getattr(block, method))
    # the method's default arguments may use names of the class body
    local = dict(vars(next(cls for cls in block.__mro__ if method in vars(cls))))
    # the only feature of __future__ that current versions of Python do not always enable
    flags = host.__code__.co_flags & __future__.annotations.compiler_flag
    try:
        exec(compile(source, filename, "exec", flags, dont_inherit=True), host.__globals__, local)
        new = local[host.__name__]
        routed = type(block)(name, (block,), {
            "__module__": module,
            "__qualname__": name,
            "__doc__": f"{block.__name__} of {block.__module__} with connections.",
            method: new,
        })
    except Exception as error:  # for example a lambda, or a base class that refuses subclasses
        raise RoutingError(f"{block.__module__}.{block.__qualname__}: {method} cannot be rebuilt in a subclass: "
                           f"{error!r}") from error
    plain = inspect.unwrap(new)  # its default arguments were evaluated when the class was defined
    plain.__defaults__, plain.__kwdefaults__ = host.__defaults__, host.__kwdefaults__
    new.__qualname__ = f"{name}.{new.__name__}"
    new.__doc__ = host.__doc__
    routed.__name__ = block.__name__  # FSDP's policies use __name__
    return routed


class Router(ast.NodeTransformer):
    """Replace the expected additions by calls of ``self.<connection>``, and store under which conditions they run.

    Args:
        spec: Description of the block.
        kinds: Kinds of the additions to replace.
        function: The method of the block.
        keeps_order: Whether a branch on the left is computed before a stream that contains a call, because both may
            draw random numbers or work in place. The connection then gets keyword arguments, which hooks do not expect.
        helper: Source of another method that contains the additions. Its calls count as additions.
    """

    def __init__(
            self, spec: "BlockSpec", kinds: Sequence[str], function: FunctionType, keeps_order: bool, helper: str = "",
    ) -> None:
        self.helper = helper
        self.sites = [spec.sites[kind] if kind in kinds and kind else None for kind in spec.kinds]
        self.expected = [tuple(ast.unparse(ast.parse(stream)) for stream in streams) for streams in spec.streams]
        self.sides_differ, self.keeps_order, mask = spec.sides_differ, keeps_order, spec.mask
        self.streams = {stream for streams in self.expected for stream in streams}
        self.keywords: List[ast.keyword] = []  # the mask
        for name in variables_of(mask) & inspect.signature(function).parameters.keys():
            mask = mask if mask == name else f"None if {name} is None else {mask}"
            self.keywords = [ast.keyword("attn_mask", ast.parse(mask, mode="eval").body)]
        self.instance = function.__code__.co_varnames[0]  # usually ``self``
        self.argument = "".join(function.__code__.co_varnames[1:2])  # the input of the block
        self.local = locals_of(function.__code__) - {self.instance}
        self.copies: Dict[str, str] = {}  # name -> name from which it was assigned, as in ``shortcut = x``
        self.arguments = set(function.__code__.co_varnames[1:function.__code__.co_argcount])  # not yet assigned
        self.count = 0  # number of additions on the present path
        self.exits: List[Tuple[int, bool, ast.expr]] = []  # additions, whether the stream changed, and the condition
        self.bypass = ""  # see Route
        self.position = 0  # number of the next addition on the present path (one side of each ``if``)
        self.length = 0  # number of additions on the longest path
        self.depth = 0  # number of additions whose branch contains the present node
        self.conditions: List[ast.expr] = []  # conditions of the present path
        self.paths: List[List[_Path]] = [[] for _ in spec.kinds]
        self.branch_first = [False for _ in spec.kinds]
        self.calls: List[ast.Call] = []  # the calls of connections
        self.matched: List[str] = []  # source code of the additions to the stream
        self.others: List[str] = []  # source code of all other additions
        self.problem = ""

    # ------------------------------------------------------------------------------------- additions
    def visit_Assign(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for inner in ast.walk(target):
                self.copies.pop(getattr(inner, "id", ""), None)
                self.arguments.discard(getattr(inner, "id", ""))
            pairs: Any = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=False)
            self.copies.update((name.id, value.id) for name, value in pairs
                               if isinstance(name, ast.Name) and isinstance(value, ast.Name))
        return node

    visit_AnnAssign = visit_Assign

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        call = self._call(node, node.left, node.right) if isinstance(node.op, ast.Add) else None
        if isinstance(node.op, ast.Sub):
            subtracted = node.right
            if isinstance(subtracted, ast.Call) and isinstance(subtracted.func, ast.Attribute) and (
                    subtracted.func.attr == "mean"):
                subtracted = subtracted.func.value
            if not self._is_stream(subtracted):  # x + f - x takes the sum's branch, x - x.mean() centres the stream
                self._refuse(node, node.left)
        return self.generic_visit(node) if call is None else call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        inputs = [owner, *node.args, *(keyword.value for keyword in node.keywords)]
        name = getattr(node.func, "attr", getattr(node.func, "id", "")).strip("_")
        if name in _ADDING and ast.unparse(owner) != self.instance:  # self.add may be a connection of the block
            self._refuse(node, *inputs)
        elif name == "sum":  # x.sum(-1) is no addition to x, but torch.stack([x, f]).sum(0) is
            lists = [inner for each in inputs for inner in ast.walk(each) if isinstance(inner, (ast.List, ast.Tuple))]
            self._refuse(node, *(summand for each in lists for summand in each.elts))
        elif ast.unparse(node.func) == self.helper:
            self.count += 1
            self.calls.append(node)
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        call = None
        if isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
            call = self._call(node, ast.Name(node.target.id, ast.Load()), node.value)
            self.copies.pop(node.target.id, None)
        elif isinstance(node.op, (ast.Add, ast.Sub)):
            self._refuse(node, getattr(node.target, "value", node.target))  # x of x[:, 1:] += f
        return self.generic_visit(node) if call is None else ast.copy_location(ast.Assign([node.target], call), node)

    def _call(self, node: ast.AST, left: ast.expr, right: ast.expr) -> Optional[ast.Call]:
        """Return the call of a connection that replaces an addition; None if the addition stays unchanged."""
        sources = [ast.unparse(left), ast.unparse(right)]
        if self.streams.isdisjoint(sources):
            self.others.append(ast.unparse(node))
            self._refuse(node, left, right)
            return None
        self.matched.append(ast.unparse(node))
        number = self.position
        self.position += 1
        self.count += 1
        self.length = max(self.length, self.position)
        if number >= len(self.sites):
            return None
        site, expected = self.sites[number], self.expected[number]
        branch_first = self.branch_first[number] = sources[0] not in expected
        if branch_first and sources[1] not in expected:
            streams = " or ".join(map(repr, expected))
            self.problem += f"; {self.matched[-1]!r} is where an addition to {streams} is expected"
        added, other = reversed(sources) if branch_first else sources
        origin = self.copies.get(other)
        if origin in (added, self.argument) and self.copies.get(added) != origin:
            self.problem += f"; in {self.matched[-1]!r}, {other!r} is a copy of {origin!r}: pass stream={other!r}"
        self.paths[number].append(tuple(self._known_conditions()))
        if site is None:
            return None
        module = ast.Attribute(value=ast.Name(self.instance, ast.Load()), attr=site, ctx=ast.Load())
        self.depth += 1
        stream, branch = (right, self.visit(left)) if branch_first else (left, self.visit(right))
        self.depth -= 1
        arguments, keywords = [stream, branch], self.keywords
        if self.keeps_order and branch_first and all(map(_has_call, arguments)):
            arguments, keywords = [], [ast.keyword("f", branch), ast.keyword("x", stream), *keywords]
        call = ast.copy_location(ast.Call(func=module, args=arguments, keywords=keywords), node)
        self.calls.append(call)
        return call

    def _refuse(self, node: ast.AST, *summands: ast.expr) -> None:
        """Report a sum that stays linear, if a summand is the stream. Sums inside a branch are its input."""
        if self.depth == 0 and any(map(self._is_stream, summands)):
            self.problem += (
                f"; {ast.unparse(node)!r} is not replaced: write it as x + f or x + (f + g), and name it in kinds "
                "(None leaves it unchanged); if the class is from a library, override the method in a subclass")

    def _is_stream(self, node: ast.expr) -> bool:
        """Return whether an expression is the stream, a copy of the stream, or its sum with another tensor."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._is_stream(node.left) or self._is_stream(node.right)
        source = ast.unparse(node)
        return not self.streams.isdisjoint((source, self.copies.get(source, "")))

    # ----------------------------------------------------------------------------------------- paths
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [each for each in node.decorator_list if ast.unparse(each) not in _DOCUMENTING]
        node.body = self._visit_statements(node.body)
        most = max([self.count, *(count for count, _, _ in self.exits)])
        exits = [(count, changes, condition) for count, changes, condition in self.exits if changes and count < most]
        exits += [(self.count, True, negated(condition)) for count, _, condition in self.exits
                  if self.count < count and self._changes(node.body[-1:])]
        for count, _, condition in exits:
            self._note_bypass(condition, count)
        return node

    def visit_If(self, node: Any) -> ast.AST:
        node.test = self.visit(node.test)
        node.body, node.orelse = self._visit_sides((node.test, negated(node.test)), (node.body, node.orelse))
        if leaves(node.body):  # the following statements run only if the test is false
            self.conditions.append(negated(node.test))
        elif leaves(node.orelse):
            self.conditions.append(node.test)
        return node

    def visit_For(self, node: ast.AST) -> ast.AST:
        """Visit a loop, whose body may run zero times: its conditions end with it."""
        outer = len(self.conditions)
        self.visit_If(node) if isinstance(node, ast.While) else self.generic_visit(node)
        del self.conditions[outer:]
        return node

    visit_While = visit_For

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Visit the body and the handlers, as the sides of an ``if`` whose condition is unknown."""
        tests: List[ast.expr] = [
            ast.Call(ast.Name("raises"), [handler.type] if handler.type else [], []) for handler in node.handlers]
        tests.append(negated(tests[0]) if tests else ast.Constant(True))
        *handled, body = self._visit_sides(
            tests, [*(handler.body for handler in node.handlers), [*node.body, *node.orelse]])
        for handler, statements in zip(node.handlers, handled, strict=True):
            handler.body = statements
        node.body, node.orelse = body[:len(node.body)], body[len(node.body):]
        node.finalbody = self._visit_statements(node.finalbody)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self.visit(node.test)
        (node.body,), (node.orelse,) = self._visit_sides(
            (node.test, negated(node.test)), ([node.body], [node.orelse]))
        return node

    def _visit_sides(self, tests: Sequence[ast.expr], sides: Sequence[List[Any]]) -> List[List[Any]]:
        """Visit the sides of a statement, each with the condition under which it runs."""
        start, first, ends, visited, counts = self.position, self.count, [], [], []
        for condition, side in zip(tests, sides, strict=True):
            self.position = self.position if self.sides_differ else start
            self.count = first
            self.conditions.append(condition)
            visited.append(self._visit_statements(side))
            self.conditions.pop()
            ends.append(start if leaves(side) else self.position)
            counts.append(self.count)
        self.count = max([count for count, side in zip(counts, visited, strict=True) if not leaves(side)] or counts)
        for condition, side, count in zip(tests, visited, counts, strict=True):
            if is_fixed(condition, self.local):
                continue
            if leaves(side):
                self.exits.append((count, self._changes(side), condition))
            elif count < self.count and self._changes(side):
                self._note_bypass(condition, count)
        if start not in ends and len({*ends}) > 1 and not self.sides_differ:
            found = " and ".join(str(end - start) for end in ends)
            self.problem += (
                f"; the sides of 'if {ast.unparse(tests[0])}' have {found} additions: pass sides_differ=True, and name "
                "each addition of both sides in kinds")
        self.position = max(ends)
        return visited

    def _note_bypass(self, condition: ast.expr, count: int) -> None:
        if not (self.sides_differ and count):
            self.bypass = self.bypass or ast.unparse(condition)

    def _changes(self, side: Sequence[ast.AST]) -> bool:
        """Return whether one side of a statement changes the stream other than by connections, and does not raise."""
        return not any(isinstance(node, ast.Raise) for node in side) and not all(map(self._keeps, side))

    def _keeps(self, node: ast.AST) -> bool:
        """Return whether a statement assigns or returns the stream or the sum, or an expression is one of them."""
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return)) else node
        return value is None or isinstance(value, (ast.Pass, ast.Continue, ast.Break)) or value in self.calls or (
            ast.unparse(value) in self.streams | self.arguments)

    def _visit_statements(self, statements: List[Any]) -> List[Any]:
        outer = len(self.conditions)
        visited = [self.visit(statement) for statement in statements]
        del self.conditions[outer:]
        return visited

    def _known_conditions(self) -> List[CodeType]:
        """Return the conditions of the present path that depend only on the configuration of the block."""
        known = []
        for condition in self.conditions:
            if not is_fixed(condition, self.local):
                continue
            expression = ast.fix_missing_locations(ast.Expression(condition))
            known.append(compile(expression, f"<condition {ast.unparse(condition)}>", "eval"))
        return known


class _Norms:
    """Replace calls of connections by calls of ``with_norm`` if a norm of the block reads the sum next.

    The sum must be assigned to a variable. The next statement that uses the variable, in the same list of statements,
    must call exactly one norm with it, unconditionally, and before any other operation on the variable: another order
    of operations can change the rounding of gradients. A plain copy ``y = x`` does not count as a use. The attribute's
    name determines whether it is a norm. Nothing depends on the instance, as activation checkpointing requires.
    """

    def __init__(self, function: FunctionType, calls: Sequence[ast.Call]) -> None:
        self.calls = calls
        self.found: Dict[str, str] = {}
        self.norm_call = re.compile(rf"{function.__code__.co_varnames[0]}\.(\w*norm\w*|ln\w*)\((\w+)\)", re.IGNORECASE)

    def rewrite(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            for field in ("body", "orelse"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):  # the body of a lambda is an expression
                    for index, statement in enumerate(statements):
                        statements[index] = self._with_norm(statement, statements[index + 1:])

    def _with_norm(self, statement: ast.stmt, following: Sequence[ast.stmt]) -> ast.stmt:
        if not (isinstance(statement, ast.Assign) and statement.value in self.calls
                and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)):
            return statement
        call, variable = cast(ast.Call, statement.value), statement.targets[0].id
        norm = self._norm_of(variable, following)
        if norm is None:
            return statement
        site = cast(ast.Attribute, call.func).attr
        normed = f"{site}_normed"
        for reader in following:
            _Replacement(norm, ast.Name(normed, ast.Load())).visit(reader)
        self.found[site] = cast(ast.Attribute, norm.func).attr
        reads = norm.func if call.args else ast.keyword("norm", norm.func)
        arguments = ", ".join(map(ast.unparse, (*call.args, reads, *call.keywords)))
        return ast.parse(
            f"if torch.jit.is_scripting():\n"
            f"    {ast.unparse(statement)}\n"
            f"    {normed} = {ast.unparse(norm.func)}({variable})\n"  # a copy of the variable may follow
            f"else:\n"
            f"    {variable}, {normed} = {ast.unparse(call.func)}.with_norm({arguments})").body[0]

    def _norm_of(self, variable: str, following: Sequence[ast.stmt]) -> Optional[ast.Call]:
        """Return the call of a norm that is the next use of a variable and can move before these statements."""
        copies, attributes = {variable}, []
        for statement in following:
            nodes = list(ast.walk(statement))
            attributes += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
            if not isinstance(statement, _SIMPLE):
                return None
            if copies.isdisjoint(node.id for node in nodes if isinstance(node, ast.Name)):
                continue
            copy = re.fullmatch(r"(\w+) = (\w+)", ast.unparse(statement))
            if copy and copy[2] in copies:
                copies.add(copy[1])
                continue
            norms = [(node, call[1]) for node in nodes if isinstance(node, ast.Call)
                     if (call := self.norm_call.fullmatch(ast.unparse(node))) and call[2] in copies]
            if len(norms) != 1:
                return None
            (node, name), = norms
            return node if attributes.count(name) == 1 and _comes_first(node, statement, copies) else None
        return None


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _comes_first(call: ast.Call, statement: ast.stmt, names: Set[str]) -> bool:
    """Return whether a statement always makes a call, and before any other operation on the variables in ``names``."""
    order = list(_in_order(statement))
    around = [node for node in order if call in ast.walk(node)]
    operands = {child for node in around for child in ast.iter_child_nodes(node)}  # the call comes before the operation
    before = [node for node in order[:order.index(call)] if isinstance(node, ast.Name) and node.id in names]
    return operands.issuperset(before) and not any(isinstance(node, _CONDITIONAL) for node in around)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _has_call(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def variables_of(expression: str) -> Set[str]:
    """Return the names of the variables in an expression; an empty expression has none."""
    return {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}


def locals_of(code: CodeType) -> Set[str]:
    """Return the local names of a function and of the functions inside it."""
    inner = [locals_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_varnames, *code.co_cellvars}.union(*inner)


def is_fixed(condition: ast.expr, local: Set[str]) -> bool:
    """Return whether a condition depends only on the configuration of the block."""
    return not any((isinstance(node, ast.Call) and ast.unparse(node.func) != "hasattr")  # a call may be random
                   or getattr(node, "id", None) in local or getattr(node, "attr", None) in _CHANGING
                   for node in ast.walk(condition))


def _may_hold(condition: CodeType, namespace: Dict[str, Any], own: Dict[str, Any]) -> bool:
    try:
        return bool(eval(condition, namespace, own))
    except Exception:  # noqa: BLE001 the condition cannot be evaluated, for example on a meta tensor
        return True


def leaves(statements: Sequence[ast.AST]) -> bool:
    """Return whether these statements end with a return or raise, or leave an iteration of a loop."""
    last = statements[-1] if statements else None
    if isinstance(last, (ast.With, ast.Try)):
        return leaves(last.body) and all(leaves(handler.body) for handler in getattr(last, "handlers", ()))
    return isinstance(last, (ast.Return, ast.Continue, ast.Break, ast.Raise)) or (
        isinstance(last, ast.If) and leaves(last.body) and leaves(last.orelse))


def negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)
