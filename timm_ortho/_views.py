"""View a tensor of any shape and memory format as ``[outer, width, inner]``, with a projection over ``width``.

In common layouts the axes of one projection are adjacent in memory. Tokens, NHWC and channels-last have ``inner = 1``
and one row per projection. Contiguous NCHW has ``inner`` pixels. The global scope has one long row per sample. Tensors
in any other layout (expanded, sliced, or with separate axes of a projection) are copied first.
"""
import functools
import itertools
from typing import Any, Callable, List, NamedTuple, Tuple

import torch
from torch import Tensor


class View(NamedTuple):
    """A view ``[outer, width, inner]``: the order of the tensor's axes, outermost in memory first, and three sizes."""

    order: Tuple[int, ...]
    outer: int
    width: int
    inner: int

    @property
    def inverse(self) -> List[int]:
        return [self.order.index(axis) for axis in range(len(self.order))]


@functools.lru_cache(maxsize=1024)
def view_of(shape: Tuple[int, ...], strides: Tuple[int, ...], dims: Tuple[int, ...]) -> View:
    """Return the view of a tensor of this shape and these strides for a projection over ``dims``.

    The view has the order of the axes in memory if the tensor is dense and the axes ``dims`` are adjacent in memory.
    Otherwise :func:`arranged` copies the tensor into the order of the view.
    """
    reduced = {d % len(shape) for d in dims}
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    sizes = [(axis in reduced, shape[axis]) for axis in order if shape[axis] != 1]
    changes = sum(left[0] != right[0] for left, right in itertools.pairwise(sizes))
    if changes > 2 or (changes == 2 and sizes[0][0]):  # the axes of a projection are not adjacent
        order = [axis for axis in range(len(shape)) if axis not in reduced] + sorted(reduced)
        sizes = [(axis in reduced, shape[axis]) for axis in order if shape[axis] != 1]
    outer, width, inner = 1, 1, 1
    for is_reduced, size in sizes:
        if is_reduced:
            width *= size
        elif width == 1 and any(flag for flag, _ in sizes):
            outer *= size
        else:
            inner *= size
    return View(tuple(order), outer, width, inner)


def arranged(tensor: Tensor, view: View) -> Tensor:
    """Permute a tensor to the order of the view; copy it if it is then not contiguous."""
    return tensor.permute(view.order).contiguous()


def put_back(result: Tensor, target: Tensor, view: View) -> None:
    """Copy the result to the target, unless :func:`arranged` made no copy and both share their memory."""
    if result.data_ptr() != target.data_ptr():
        target.copy_(result.permute(view.inverse))


def folded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backend function so that it receives three-axis views, which limits the layouts that are compiled.

    Args:
        function: Compiled ``update`` or ``gradients`` of a :class:`timm_ortho.backends.Backend`. Empty tensors go to
            its uncompiled ``__wrapped__``.

    Returns:
        A function for tensors of any shape, whose results have the memory format of the stream.
    """
    @functools.wraps(function)
    def call(x: Tensor, *args: Any) -> Any:
        if not x.numel():
            return function.__wrapped__(x, *args)
        dims = next(arg for arg in args if isinstance(arg, list))
        view = view_of(tuple(x.shape), x.stride(), tuple(dims))

        def fold(arg: Any) -> Any:
            if not isinstance(arg, Tensor):
                return [1] if isinstance(arg, list) else arg
            width = view.width if arg.shape == x.shape else 1
            return arranged(arg, view).view(view.outer, width, view.inner) if arg.dim() else arg

        def unfold(result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            reduced = {d % x.dim() for d in dims} if result.shape[1] < view.width else ()
            result = result.view([1 if axis in reduced else x.shape[axis] for axis in view.order]).permute(view.inverse)
            if reduced or result.stride() == x.stride():
                return result
            return torch.empty_like(x, dtype=result.dtype).copy_(result)  # x was copied into another order

        return tuple(map(unfold, function(*map(fold, (x, *args)))))

    return call
