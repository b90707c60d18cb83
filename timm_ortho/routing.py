"""A block class in, its routed subclass out.

timm's residual blocks differ in everything but one thing: somewhere in ``forward`` stands ``x + something``. A routed
subclass has the host's own ``forward`` in which exactly those additions are calls of connection modules::

    x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
    x = self.connection_attention(x, self.drop_path1(self.ls1(self.attn(self.norm1(x)))))

It is made once for each class, from the syntax tree of the installed release, so no code of the host is copied and the
host's class is not changed. The new source is registered with ``linecache``: tracebacks, debuggers and TorchScript
show what really runs.
"""
import ast
import inspect
import linecache
import textwrap
from typing import List, Sequence

__all__ = ["RoutingError", "route"]


class RoutingError(RuntimeError):
    """The installed release's block is not what the table of families says it is."""


class _Router(ast.NodeTransformer):
    """Replaces the additions to one variable by calls of ``self.<name>``, in the order of the source."""

    def __init__(self, stream: str, names: Sequence[str]) -> None:
        self.stream = stream
        self.names = names
        self.found: List[str] = []

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        branch = self._branch(node) if isinstance(node.op, ast.Add) else None
        if branch is None:
            return self.generic_visit(node)
        line = ast.unparse(node)
        name = self.names[min(len(self.found), len(self.names) - 1)]
        self.found.append(line)
        call = ast.Call(
            func=ast.Attribute(value=ast.Name("self", ast.Load()), attr=name, ctx=ast.Load()),
            args=[ast.Name(self.stream, ast.Load()), self.visit(branch)],
            keywords=[],
        )
        return ast.copy_location(call, node)

    def _branch(self, node: ast.BinOp):
        """What is added to the stream, or None where the addition is about something else."""
        for stream, branch in ((node.left, node.right), (node.right, node.left)):
            if isinstance(stream, ast.Name) and stream.id == self.stream:
                return branch
        return None


def route(block: type, stream: str, connections: Sequence[str], *, name: str, module: str, host: str = "") -> type:
    """Derive from a block class the subclass whose residual additions are connection modules.

    Args:
        block: The host's class, with ``forward`` in readable source.
        stream: Name of the variable in ``forward`` that carries the stream.
        connections: For each addition to the stream, in the order of the source, the attribute that takes its place.
            A name may stand more than once, for additions of which only one is reached in a call.
        name: Name of the new class.
        module: Name of the module through which it can be imported (by pickle, for one).
        host: What the host is called in errors, such as ``"timm 1.0.31"``.

    Raises:
        RoutingError: ``forward`` holds another number of additions to the stream, or cannot be rebuilt.
    """
    forward = block.forward
    where = f"{block.__module__}.{block.__qualname__} of {host or 'the host'}"
    if forward.__code__.co_freevars:
        raise RoutingError(f"{where}: forward uses {', '.join(forward.__code__.co_freevars)} of an enclosing scope")
    tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    router = _Router(stream, connections)
    tree = ast.fix_missing_locations(router.visit(tree))
    if len(router.found) != len(connections):
        found = "; ".join(router.found) or "none"
        raise RoutingError(
            f"{where}: expected {len(connections)} additions to {stream!r} in forward, found {len(router.found)} "
            f"({found}). This release of timm_ortho does not know this block; please report it.")

    source = ast.unparse(tree)
    filename = f"<{module}.{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict = {}
    exec(compile(source, filename, "exec"), forward.__globals__, namespace)  # globals: names resolve as in the host
    routed_forward = namespace["forward"]
    routed_forward.__qualname__ = f"{name}.forward"
    routed_forward.__doc__ = forward.__doc__
    return type(block)(name, (block,), {
        "__module__": module,
        "__qualname__": name,
        "__doc__": f"{block.__name__} of {block.__module__} with connections {', '.join(dict.fromkeys(connections))}.",
        "forward": routed_forward,
    })
