"""Check arguments, and raise a ValueError that contains the invalid value and the allowed values."""
import operator
from numbers import Integral, Real
from typing import Any, Collection, List, Optional

import torch
from torch import Tensor

from ._text import did_you_mean

IMPORT_HINT = " (import the module that registers it; with train.py, pass --device-modules timm_ortho my_module)"


def check_eps(eps: float) -> None:
    """Raise ValueError unless ``eps`` is from 2**-126, the smallest normal float32, to 2**127."""
    if not (isinstance(eps, Real) and 2.0**-126 <= eps <= 2.0**127):
        raise ValueError(f"eps must be in [2**-126, 2**127], got {eps!r}")


def check_prob(prob: float) -> None:
    """Raise ValueError unless ``prob`` is a probability."""
    if not (isinstance(prob, Real) and 0.0 <= prob <= 1.0):
        raise ValueError(f"prob must be in [0, 1], got {prob!r}")


def check_count(name: str, value: Any, least: Optional[int] = 1) -> int:
    """Return ``value``, which messages call ``name``, as an int; raise ValueError unless it is at least ``least``."""
    try:
        number = operator.index(value)  # accepts NumPy integers
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be a whole number{at_least}, got {value!r}")
    return number


def check_weight(name: str, weight: Any) -> None:
    """Raise ValueError unless ``weight``, which the message calls ``name``, is a number or a non-boolean 0-d tensor."""
    if isinstance(weight, Tensor) and (weight.dim() > 0 or weight.dtype == torch.bool):
        raise ValueError(f"{name} must be a float or a 0-d tensor that is not boolean, got {weight.dtype} of shape "
                         f"{tuple(weight.shape)}")
    if isinstance(weight, bool) or not isinstance(weight, (Tensor, Real)):
        raise ValueError(f"{name} must be a float or a 0-d tensor, got {weight!r}")


def listed_axes(dim: Any) -> Optional[List[int]]:
    """Return an argument ``dim`` as a list of ints, or None for None; raise ValueError for other values."""
    axes = dim if dim is None or isinstance(dim, (tuple, list)) else [dim]
    if axes is not None and not all(isinstance(axis, (int, Integral)) for axis in axes):
        raise ValueError(f"dim must be a whole number, a tuple of whole numbers or None, got {dim!r}")
    return None if axes is None else [int(axis) for axis in axes]


def check_tensors(x: Tensor, f: Tensor, dims: Optional[List[int]]) -> List[int]:
    """Check stream ``x``, branch output ``f`` and axes of the projection, and return the axes.

    ``dims=None`` means all axes except the first.
    """
    ndim = x.dim()
    axes = list(range(1, ndim)) if dims is None else dims
    if x.shape != f.shape:
        problem = "stream and branch output must have the same shape"
    elif x.device != f.device:
        problem = f"stream and branch output must be on the same device, got x on {x.device} and f on {f.device}"
    elif not (x.is_floating_point() and f.is_floating_point()):
        problem = f"stream and branch output must be floating-point, got {x.dtype} and {f.dtype}"
    elif not (len(axes) == 1 and -ndim <= axes[0] < ndim) and (  # the first condition is fast
            not axes or not all(-ndim <= d < ndim for d in axes) or len({d % ndim for d in axes}) < len(axes)):
        dim = dims if dims is None else dims[0] if len(dims) == 1 else tuple(dims)
        problem = f"dim must be one or more different axes in [{-ndim}, {ndim - 1}], got {dim}"
    else:
        return axes
    raise ValueError(f"{problem}; x of shape {tuple(x.shape)} and f of shape {tuple(f.shape)}")


def check_mask(mask: Tensor, x: Tensor) -> None:
    """Raise ValueError unless ``mask`` is boolean and broadcasts to the shape of ``x``."""
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dtype != torch.bool or mask.dim() > x.dim() or any(size not in (1, of_x) for size, of_x in sizes):
        raise ValueError(
            f"mask must be boolean and broadcast to the shape of x, got {mask.dtype} of shape {tuple(mask.shape)}; "
            f"x of shape {tuple(x.shape)}")


def check_new_name(kind: str, name: Any, make: Any, known: Any) -> None:
    """Raise ValueError unless the class or function ``make`` can be registered under a new identifier.

    ``known`` has this name so far, or None. It may be ``make`` itself or, because running a notebook cell again
    redefines a class, an object with the same module and qualified name. Messages call the object a ``kind``.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"the name of a {kind} must be an identifier, got {name!r}")
    names = [(made.__module__, getattr(made, "__qualname__", made)) for made in (make, known or make)]
    if names[0] != names[1] or (known not in (None, make) and "<lambda>" in str(names[0][1])):
        raise ValueError(f"{kind} {name!r} already exists: choose another name")


def known_name(kind: str, name: str, known: Collection[str], hint: str = "") -> str:
    """Return ``name`` if it is one of ``known``. Otherwise raise ValueError with the known names, and then ``hint``."""
    if isinstance(name, str) and name in known:
        return name
    shown = " ".join(repr(name).split())  # the repr of a module has several lines
    raise ValueError(f"unknown {kind} {shown:.60}, known are {', '.join(map(repr, known))}"
                     f"{did_you_mean(name, known)}{hint}")
