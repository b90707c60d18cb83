"""View a tensor of any shape and memory format with three axes: ``[outer, width, inner]``.

The update projects the branch output of a residual block onto the stream, the tensor that the block receives. ``width``
joins the axes over which one projection sums. With one projection per token or pixel, ``width`` is the number of
channels; ``inner`` is 1 if the channels are last in memory, and the number of pixels in contiguous NCHW. With one
projection per sample, ``outer`` is the batch size. In common layouts, the axes that are joined are adjacent in memory.
Tensors in other layouts are copied first, for example expanded or sliced tensors.
"""
import functools
import itertools
from typing import List, NamedTuple, Tuple

from torch import Tensor


class View(NamedTuple):
    """The sizes of a view, and ``order``: the axes of the tensor, from the outermost to the innermost in the view."""

    order: Tuple[int, ...]
    outer: int
    width: int
    inner: int

    @property
    def inverse(self) -> List[int]:
        return [self.order.index(axis) for axis in range(len(self.order))]


@functools.lru_cache(maxsize=1024)
def view_of(shape: Tuple[int, ...], strides: Tuple[int, ...], dims: Tuple[int, ...]) -> View:
    """Return the view of a tensor with this shape and these strides, for a projection over ``dims``.

    If the axes ``dims`` are adjacent in memory, the view keeps the order of all axes in memory. Otherwise ``dims``
    become the last axes, and :func:`arranged` copies the tensor.
    """
    reduced = {d % len(shape) for d in dims}
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    sizes = [(axis in reduced, shape[axis]) for axis in order if shape[axis] != 1]
    changes = sum(left[0] != right[0] for left, right in itertools.pairwise(sizes))
    if changes > 2 or (changes == 2 and sizes[0][0]):  # the axes `dims` are not adjacent
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
    """Return a tensor with its axes in the order of the view, copied unless it is contiguous in this order."""
    return tensor.permute(view.order).contiguous()


def put_back(result: Tensor, target: Tensor, view: View) -> None:
    """Copy ``result``, which was written into ``arranged(target, view)``, to ``target`` unless both share memory."""
    if result.data_ptr() != target.data_ptr():
        target.copy_(result.permute(view.inverse))

