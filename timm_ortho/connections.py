"""Connections: modules that add a branch output f to the stream x, ``forward(x, f) -> y``.

The projection of f onto x splits f into f_par, parallel to x, and f_orth, orthogonal to x. A connection determines the
weights a and b in y = P x + a f_par + b f_orth, which :mod:`timm_ortho.functional` computes. P is a transform of the
stream (:mod:`timm_ortho.skips`), by default the identity; with a transform, f is projected onto P x.

Blocks pass their attention mask on: ``forward(x, f, attn_mask=mask)``. ``global`` excludes padding, see
:func:`real_tokens`. The projections of ``feature`` and ``hybrid`` cover one token each and need no mask.
"""
import inspect
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union, cast

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ._bytecode import uses
from ._checks import (
    IMPORT_HINT,
    check_count,
    check_eps,
    check_new_name,
    check_prob,
    check_tensors,
    check_weight,
    known_name,
)
from ._compat import has_hooks, observe
from .functional import KEEPS, checked_update, update_with_norm
from .update.backend import requested_kernels
from .update.formula import Weight, plain_update

STARTS = {"orthogonal": (1.0, 0.0), "linear": (math.sqrt(2.0), math.pi / 4)}  # hybrid's rho and theta


@dataclass(frozen=True)
class SiteSpec:
    """Description of the site of a connection in a model. :func:`timm_ortho.connect` makes it."""

    name: str = ""  # of the connection, see :attr:`Connection.name`
    arguments: Dict[str, Any] = field(default_factory=dict)  # of the call of ``connect``, shared by all its sites
    routed: bool = False  # False if the block's own code contains the connection
    tokens_apart: bool = False  # whether ``global`` has one projection per token, see BlockSpec
    in_place: bool = False  # whether the block changes the sum in place; ``keep`` is then ``"branch"``
    count: int = 1  # sites of the call of ``connect``; skips may depend on it


NO_SITE = SiteSpec()


class Connection(nn.Module):
    """Base class of connections.

    Attributes:
        dim: Channel axis of the stream.
        eps: Added to |x|^2.
        dims: Axes over which one projection sums; None for all axes but the first, the batch axis.
        groups: Number of equal parts of the channel axis. Each part has its own projection.
        keep: Tensor that autograd saves, ``output`` or ``branch``, see :func:`timm_ortho.functional.residual_update`.
        skip: Transform P of the stream, a module with ``forward(x) -> P x``; None for the identity. If the ``forward``
            of the connection does not call :meth:`join`, it must begin with ``x = self.carried(x)``.
        branch_first: Whether ``linear`` computes f + x. The left summand determines the memory layout of the sum, and
            the layout affects the rounding of later operations.
        site: Description of the site, from :func:`timm_ortho.connect`; ``NO_SITE`` for a connection on its own.
            ``forward`` must not read it, because TorchScript has no such type.
        card_text: The update of a residual block, for model cards.
        report_name: Name in reports, if it differs from the registered name.

    Cards and reports ignore inherited values of the last two attributes.

    Example:
        >>> class Half(Connection):
        ...     "Half of the parallel part: y = x + f_par / 2 + f_orth."
        ...     def forward(self, x, f, attn_mask=None):
        ...         return self.join(x, f, 0.5, 1.0, attn_mask)
        >>> Half()(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]))
        tensor([3.8200, 3.7600])
    """

    dims: Optional[List[int]]
    site = NO_SITE
    __jit_unused_properties__ = ("name",)

    def __init__(self, dim: int = -1, eps: float = 1e-6, keep: str = "output") -> None:
        super().__init__()
        check_eps(eps)
        self.dim = check_count("dim", dim, None)
        self.eps = float(eps)
        self.keep = known_name("keep", keep, KEEPS)
        self.dims = [self.dim]
        self.groups = 1
        self.skip = None  # type: Optional[nn.Module]  # TorchScript warns of an annotation in a constructor
        self.branch_first = False

    @property
    def name(self) -> str:
        """Name in :data:`CONNECTIONS`, or of the class or function, see :func:`name_of`."""
        return self.site.name or name_of(type(self))

    def carried(self, x: Tensor) -> Tensor:
        """Return ``P x``, the stream to which the branch output is added."""
        return x if self.skip is None else self.skip(x)

    def join(
            self, x: Tensor, f: Tensor, parallel: Weight, orthogonal: Weight, attn_mask: Optional[Tensor]) -> Tensor:
        """Return ``P x + parallel f_par + orthogonal f_orth``. The weights are floats or 0-d tensors."""
        if not torch.jit.is_scripting():
            if type(attn_mask).__name__ == "CausalBias":  # of torch.nn.attention.bias, which few models need
                self.refuse_causal()
            if isinstance(parallel, Tensor):  # proxies of FX have no shape
                check_weight("parallel", parallel)
            if isinstance(orthogonal, Tensor):
                check_weight("orthogonal", orthogonal)
        if self.skip is not None:
            x = self.carried(x)
        dims = self.dims
        mask: Optional[Tensor] = None
        first = 0  # axis of the groups; the next axis has the channels
        if self.groups > 1:
            if isinstance(x, Tensor) and x.shape[self.dim] % self.groups != 0:  # a proxy of FX has no sizes
                raise ValueError(f"groups={self.groups} does not divide the {x.shape[self.dim]} channels of the stream")
            x, f = x.unflatten(self.dim, [self.groups, -1]), f.unflatten(self.dim, [self.groups, -1])
            first = self.dim if self.dim >= 0 else self.dim - 1
            dims = [first + 1]
        elif attn_mask is not None and dims is None:
            mask = real_tokens(attn_mask, x)
        if torch.jit.is_scripting():
            y = plain_update(x, f, parallel, orthogonal, dims, self.eps, mask)
        else:
            y = checked_update(x, f, parallel, orthogonal, dims, self.eps, mask, self.keep == "branch")
        return y.flatten(first, first + 1) if self.groups > 1 else y

    def refuse_causal(self) -> None:
        """Raise ValueError if one projection covers all tokens. Blocks call this if their attention is causal."""
        if self.dims is None:
            raise ValueError(
                "a connection has one projection for all tokens of a sample, but the attention is causal: each token "
                "would depend on later tokens. Use the connection 'feature' or 'hybrid'")

    def with_norm(
            self, x: Tensor, f: Tensor, norm: Callable[[Tensor], Tensor], attn_mask: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Tensor]:
        """Return y = self(x, f) and norm(y). On CUDA, ``feature`` computes both in one kernel."""
        y = self(x, f, attn_mask=attn_mask)
        return y, norm(y)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps:g}" + (f", groups={self.groups}" if self.groups > 1 else "")


def real_tokens(attn_mask: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """Return which tokens are real and not padding. A token is real if the mask lets at least one token attend to it.

    Args:
        attn_mask: Mask of self-attention as in ``scaled_dot_product_attention``, ``[N or 1, N]``,
            ``[heads or 1, N or 1, N]``, ``[B or 1, heads or 1, N or 1, N]`` or a ``BlockMask`` of flex attention. In a
            boolean mask, True allows attention; in a floating-point mask, values of -1000 or less forbid it.
        x: Stream, ``[B, N, C]``.

    Returns:
        Boolean tensor ``[B or 1, N, 1]``, True for real tokens. None if there is no mask, or if the last axis of the
        mask has the keys of another stream.

    Raises:
        ValueError: The shape or dtype is unsupported.

    Example:
        >>> real_tokens(torch.tensor([[[[True, True, False]]]]), torch.zeros(1, 3, 8)).flatten()
        tensor([ True,  True, False])
    """
    if attn_mask is None:
        return None
    if not torch.jit.is_scripting():
        if type(attn_mask).__name__ == "CausalBias":
            return None  # it has no padding
        if has_torch_function_variadic(attn_mask, x):
            return handle_torch_function(real_tokens, (attn_mask, x), attn_mask, x)  # FX records it
        if not isinstance(attn_mask, Tensor):
            attn_mask = _evaluated(attn_mask, x)
    if x.dim() == 3 and attn_mask.dim() > 1 and attn_mask.shape[-1] != x.shape[1]:
        return None
    allowed = attn_mask
    while allowed.dim() < 4:
        allowed = allowed.unsqueeze(0)
    if (x.dim() != 3 or attn_mask.dim() not in (2, 3, 4) or allowed.shape[0] not in (1, x.shape[0])
            or allowed.shape[2] not in (1, x.shape[1])
            or not (attn_mask.is_floating_point() or attn_mask.dtype == torch.bool)):
        raise ValueError(
            "attention mask must be boolean or floating-point, [N or 1, N], [heads or 1, N or 1, N] or [B or 1, heads "
            f"or 1, N or 1, N], and belong to a stream [B, N, C]; got shape {list(attn_mask.shape)}, dtype "
            f"{attn_mask.dtype}, and x of shape {list(x.shape)}. If the mask does not mark padding, register the block "
            "with mask=''")
    if attn_mask.is_floating_point():
        allowed = allowed > -1000.0  # exp(-1000) is 0 in every dtype
    return allowed.any(2).any(1).unsqueeze(-1)


def _evaluated(mask: Any, x: Tensor) -> Tensor:
    """Return flex attention's ``BlockMask`` as a tensor."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask  # slow to import

    if not isinstance(mask, BlockMask):
        raise ValueError(f"attention mask must be a tensor or a BlockMask, got {type(mask).__name__}")
    batch, heads, queries, keys = mask.shape
    return create_mask(mask.mask_mod, batch, heads, queries, keys, device=x.device)


# --------------------------------------------------------------------------------------------------- by name
CONNECTIONS: Dict[str, Callable[..., Connection]] = {}
_SET_BY_CONNECT = ("dim", "device", "dtype")


def register_connection(name: str, connection: Optional[Callable[..., Connection]] = None) -> Any:
    """Register a connection by name, for :func:`timm_ortho.connect` and the argument ``connection`` of models.

    Args:
        name: A Python identifier, so that command lines and config.json can contain it.
        connection: A subclass of :class:`Connection`, or a function that returns an instance, see
            :func:`create_connection`. It is returned. Without it, return a decorator.

    Raises:
        ValueError: The name is taken or not an identifier, or the connection does not have the required signature.

    Example:
        >>> @register_connection("half_of_parallel")
        ... class Half(Connection):
        ...     def forward(self, x, f, attn_mask=None):
        ...         return self.join(x, f, 0.5, 1.0, attn_mask)
        >>> create_connection("half_of_parallel", eps=1e-4)
        Half(dim=-1, eps=0.0001)
        >>> del CONNECTIONS["half_of_parallel"]
    """
    if connection is None:
        return partial(register_connection, name)
    create_connection(connection)  # raises for a wrong signature
    check_new_name("connection", name, connection, CONNECTIONS.get(name))
    CONNECTIONS[name] = connection
    return connection


def declared(name: str, attribute: str) -> Any:
    """Return an attribute that the class of a registered connection sets itself, None if a base class sets it."""
    make: Any = CONNECTIONS.get(name)
    return None if make is None else vars(getattr(make, "func", make)).get(attribute)


def known_connection(name: str) -> str:
    """Return the name of a registered connection; raise ValueError for any other name."""
    return known_name("connection", name, CONNECTIONS, IMPORT_HINT)


def create_connection(
        connection: Union[str, Callable[..., Connection]],
        *,
        dim: int = -1,
        skip: Optional[nn.Module] = None,
        device: Any = None,
        dtype: Any = None,
        **arguments: Any,
) -> Connection:
    """Make a connection.

    Args:
        connection: Name, class, or a function that returns an instance.
        dim: Channel axis.
        skip: Module that maps the stream x to P x, for example from :func:`timm_ortho.skips.create_skip`.
        device, dtype: Device and dtype of the parameters, for a constructor that names these arguments.
        arguments: Other arguments of the constructor.

    Returns:
        The connection, in training mode.

    Raises:
        ValueError: A name is unknown, a value is outside its range, or the connection does not have the required
            signature.

    Example:
        >>> create_connection("feature", dim=1, groups=4)
        FeatureConnection(dim=1, eps=1e-06, groups=4)
    """
    check_arguments(connection, arguments)
    make = _registered(connection)
    placed = {key: value for key, value in (("device", device), ("dtype", dtype)) if key in _parameters(make)}
    try:
        made = make(dim=dim, **placed, **arguments)
    except TypeError as error:
        raise ValueError(f"connection {name_of(connection)!r}: {error}; known arguments are "
                         f"{', '.join(map(repr, arguments_of(connection)))}") from error
    if not isinstance(made, Connection) or "eps" not in vars(made):
        raise ValueError(f"{name_of(make)} must return a timm_ortho.Connection whose constructor calls "
                         f"super().__init__(dim, eps), got {type(made).__name__}")
    cls = cast(type, type(made))
    if skip is not None and not any(uses(cls, name, Connection) for name in ("carried", "join", "skip")):
        raise ValueError(f"{cls.__name__}.forward ignores skip: omit skip, or begin with x = self.carried(x)")
    made.skip = skip
    return made


def name_of(connection: Union[str, Callable[..., Connection]]) -> str:
    """Return the registered name of a connection, or else a name of its class or function that is not registered."""
    if isinstance(connection, str):
        return known_connection(connection)
    for name, registered in CONNECTIONS.items():
        if registered is connection:
            return name
    name = getattr(connection, "__name__", type(connection).__name__)
    return f"{connection.__module__}.{name}" if name in CONNECTIONS else name


def arguments_of(connection: Union[str, Callable[..., Connection]]) -> Dict[str, Any]:
    """Return the arguments of a connection's constructor and their defaults, except the ones set by ``connect``.

    >>> arguments_of("global")
    {'eps': 1e-06, 'prob': 1.0, 'keep': 'output'}
    """
    make = _registered(connection)
    if isinstance(make, nn.Module) or not callable(make):
        raise ValueError("connection must be a name, a class or a function that returns a connection, got an instance "
                         f"of {type(make).__name__}")
    parameters = _parameters(make)
    if not ({"dim", "eps"} <= parameters.keys() or takes_any(make)):
        raise ValueError(f"{name_of(make)} must accept dim and eps as timm_ortho.Connection does, got "
                         f"({', '.join(parameters)})")
    return {name: parameter.default for name, parameter in parameters.items() if name not in _SET_BY_CONNECT}


def check_arguments(connection: Union[str, Callable[..., Connection]], names: Iterable[str]) -> None:
    """Raise ValueError unless the constructor accepts arguments of these names, and the user may set them."""
    known, is_open = arguments_of(connection), takes_any(_registered(connection))
    for name in names:
        if name in _SET_BY_CONNECT or not is_open:
            known_name(f"argument of connection {name_of(connection)!r}:", name, known)


def _registered(connection: Union[str, Callable[..., Connection]]) -> Callable[..., Connection]:
    """Return the class or function with a registered name, or the class or function itself."""
    return CONNECTIONS[known_connection(connection)] if isinstance(connection, str) else connection


def takes_any(make: Callable[..., Connection]) -> bool:
    """Return whether a constructor has ``**kwargs``, so that its signature does not list all its arguments."""
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(make).parameters.values())


def _parameters(make: Any) -> Dict[str, inspect.Parameter]:
    """Return the named arguments of a constructor, and of its base classes as far as ``**kwargs`` reaches."""
    found: Dict[str, inspect.Parameter] = {}
    for each in (make, *getattr(getattr(make, "func", make), "__mro__", ())[1:]):
        found = {**inspect.signature(each).parameters, **found}
        if not takes_any(each):
            break
    return {name: parameter for name, parameter in found.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)}


# --------------------------------------------------------------------------------------------- the connections
_ADDS = "A residual block adds its branch output f to the stream x"
_S = "s = <x, f> / (|x|² + eps)"


@register_connection("linear")
class LinearConnection(Connection):
    """The plain residual connection: y = x + f.

    The arguments of the constructor have no effect on y, but diagnostics read ``dim`` and ``eps``.
    """

    card_text = f"{_ADDS}: y = x + f."
    report_name = "Linear"

    def __init__(self, dim: int = -1, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)

    def forward(self, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        if self.skip is not None:
            x = self.carried(x)
            if not torch.jit.is_scripting() and isinstance(x, Tensor) and x.shape != f.shape:  # FX's proxies have none
                check_tensors(x, f, None)
        return f + x if self.branch_first else x + f

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


@register_connection("feature")
class FeatureConnection(Connection):
    """Orthogonal-F: y = x + f_orth, one projection along the channel axis for each token or pixel.

    Args:
        dim: Channel axis.
        eps: Added to |x|^2.
        prob: Probability pi of the orthogonal form, instead of the linear form, in each call in training. In
            evaluation, the parallel part has its mean weight, 1 - pi.
        keep: See :func:`timm_ortho.functional.residual_update`.
        groups: Number of equal parts of the channel axis. Each part has its own projection.

    Example:
        >>> x, f = torch.tensor([3.0, 4.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
        >>> FeatureConnection(groups=2)(x, f)
        tensor([3.6400, 3.5200, 1.0000, 1.0000])
    """

    card_text = (f"{_ADDS}. An orthogonal connection adds only the part of f that is\n"
                 f"orthogonal to x: y = x + f - s x with {_S}.")
    report_name = "Orthogonal-F"

    def __init__(
            self, dim: int = -1, eps: float = 1e-6, prob: float = 1.0, keep: str = "output", groups: int = 1) -> None:
        super().__init__(dim, eps, keep)
        check_prob(prob)
        self.prob = float(prob)
        self.groups = check_count("groups", groups)

    def forward(self, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        if self.training and 0.0 < self.prob < 1.0:
            # float32, because bfloat16 would round the probability
            # torch.full, because x.new_full is batched under vmap, and bernoulli with randomness="same" rejects that
            drawn = torch.bernoulli(torch.full([], 1.0 - self.prob, dtype=torch.float32, device=x.device))
            return self.join(x, f, drawn, 1.0, attn_mask)
        return self.join(x, f, 1.0 - self.prob, 1.0, attn_mask)

    def with_norm(
            self, x: Tensor, f: Tensor, norm: Callable[[Tensor], Tensor], attn_mask: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Tensor]:
        eager = isinstance(x, Tensor) and not torch.compiler.is_compiling()  # FX passes proxies
        name = requested_kernels(x) if eager else None
        if name is not None and can_fuse_norm(self):
            both = update_with_norm(x, f, norm, self.eps, name)
            if both is not None:
                observe(self, (x, f), {"attn_mask": attn_mask}, both[0])
                return both
        return super().with_norm(x, f, norm, attn_mask)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", prob={self.prob:g}" if self.prob < 1.0 else "")


def can_fuse_norm(connection: nn.Module) -> bool:
    """Return whether a connection computes the orthogonal update along the last axis and nothing else."""
    return (type(connection) is FeatureConnection and connection.dims == [-1] and connection.prob == 1.0
            and connection.groups == 1 and connection.skip is None and connection.keep == "output"
            and not has_hooks(connection))


@register_connection("global")
class GlobalConnection(FeatureConnection):
    """Orthogonal-G: y = x + f_orth, one projection over all axes but the batch.

    Padding is excluded from the projection, and the output at padding is zero.

    Args:
        dim: Channel axis, which only measurements read.
        eps, prob, keep: See :class:`FeatureConnection`.

    Example:
        >>> x, f = torch.ones(1, 2, 2), torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
        >>> GlobalConnection()(x, f)
        tensor([[[1.7500, 0.7500],
                 [0.7500, 0.7500]]])
    """

    card_text = FeatureConnection.card_text
    report_name = "Orthogonal-G"

    def __init__(self, dim: int = -1, eps: float = 1e-6, prob: float = 1.0, keep: str = "output") -> None:
        super().__init__(dim, eps, prob, keep)
        self.dims = None


@register_connection("hybrid")
class HybridConnection(Connection):
    """Learned weights for both parts: y = x + rho sin(theta) f_par + rho cos(theta) f_orth, per token or pixel.

    rho is at least 0, and theta is in [-pi/2, pi/2]. The forward pass clamps values outside these ranges. The backward
    pass ignores the clamp, so that an optimizer can move such values back.

    Args:
        dim, eps, keep: See :class:`FeatureConnection`.
        start: ``"orthogonal"`` (rho 1, theta 0) or ``"linear"`` (rho sqrt(2), theta pi/4).
        device, dtype: Device and dtype of rho and theta.
        groups: See :class:`FeatureConnection`. All groups share rho and theta.

    Example:
        >>> hybrid = HybridConnection(start="linear")
        >>> hybrid(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])).detach()
        tensor([4., 4.])
    """

    card_text = (f"{_ADDS}. A hybrid connection learns the weights of the parts of f\nparallel and orthogonal to x: "
                 f"y = x + rho sin(theta) s x + rho cos(theta) (f - s x) with {_S}.")

    def __init__(
            self, dim: int = -1, eps: float = 1e-6, start: str = "orthogonal", device: Any = None, dtype: Any = None,
            groups: int = 1, keep: str = "output",
    ) -> None:
        super().__init__(dim, eps, keep)
        self.groups = check_count("groups", groups)
        self.start = known_name("start", start, STARTS)
        # the parameters have shape [1], because FSDP2 does not support 0-d parameters
        self.rho = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.theta = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values, also after `to_empty` moved the module from the meta device."""
        for parameter, value in zip((self.rho, self.theta), STARTS[self.start], strict=True):
            nn.init.constant_(parameter, value)

    def clamped(self) -> List[Tensor]:
        """Return the clamped ``[rho, theta]`` as 0-d tensors."""
        rho, theta = self.rho[0], self.theta[0]
        rho = rho + (rho.clamp(min=0.0) - rho).detach()
        quarter_turn = math.pi / 2
        theta = theta + (theta.clamp(min=-quarter_turn, max=quarter_turn) - theta).detach()
        return [rho, theta]

    def weights(self) -> List[Tensor]:
        """Return the weights ``[a, b]`` of the update as 0-d tensors."""
        rho, theta = self.clamped()
        return [rho * theta.sin(), rho * theta.cos()]

    def forward(self, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        weights = self.weights()
        return self.join(x, f, weights[0], weights[1], attn_mask)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, start={self.start!r}"
