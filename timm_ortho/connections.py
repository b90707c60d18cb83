"""Connections: modules that add a branch output f to the stream x, ``forward(x, f) -> y``.

Blocks that receive an attention mask pass the mask to the connection: ``forward(x, f, attn_mask=mask)``. The projection
of f onto x splits f into f_par, parallel to x, and f_orth, orthogonal to x.

| name | y | parameters |
| --- | --- | --- |
| ``linear`` | x + f | none |
| ``feature`` | x + f_orth, one projection for each token or pixel (Oh et al. 2025, Algorithm 1) | none |
| ``global`` | x + f_orth, one projection for each sample (Algorithm 2) | none |
| ``hybrid`` | x + rho sin(theta) f_par + rho cos(theta) f_orth, per token or pixel | rho, theta |

:mod:`timm_ortho.functional` computes y. Arguments are checked when a connection is made. To add your own connection,
subclass :class:`Connection` and pass the class to :func:`timm_ortho.connect`, or register a name for the class with
:func:`register_connection`.

Groups: ``feature`` and ``hybrid`` can split the channel axis into ``groups`` equal parts, each with its own projection.

Padding: in a batch of token sequences of several lengths (NaFlex), a token is padding if the mask lets no token attend
to it (:func:`real_tokens`). ``global`` excludes padding, so that padding does not change the result of a sample.
The projections of ``feature`` and ``hybrid`` cover one token each and need no mask.

Skip transforms: the attribute ``skip`` can contain a transform P of the stream (:mod:`timm_ortho.skips`). The
connection then uses P x in place of x: y = P x + a f_par + b f_orth, where f_par is parallel and f_orth orthogonal to
P x. The class of the connection determines the weights a and b.
"""
import inspect
import math
import warnings
from functools import cache
from itertools import takewhile
from types import CodeType, MethodType
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple, Union, cast

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ._checks import check_count, check_eps, check_prob, check_weight, known_name
from .functional import KEEPS, Weight, checked_update, plain_update

STARTS = {"orthogonal": (1.0, 0.0), "linear": (math.sqrt(2.0), math.pi / 4)}  # hybrid's rho and theta
MASK_LAYOUTS = ("", "scores", "keys")  # layouts of masks with two or three axes, see real_tokens


def real_tokens(attn_mask: Optional[Tensor], x: Tensor, layout: str = "") -> Optional[Tensor]:
    """Return which tokens are real and not padding.

    A token is real if the mask lets any token attend to it, including itself. Under a causal mask every token is real,
    because each may attend to itself.

    | mask | reading |
    | --- | --- |
    | ``[B or 1, heads or 1, N or 1, N]`` | as ``scaled_dot_product_attention`` broadcasts it |
    | ``[N, N]``, ``[heads, N, N]`` | the same, with the leading axes omitted |
    | ``[B, N]`` | one value for each key of each sample |
    | last axis not N | mask over the keys of another stream: ignored |
    | boolean | True allows attention; ``nn.MultiheadAttention`` has the opposite meaning |
    | floating-point | added to the scores; values of -1000 or less forbid attention, all others allow it |
    | integer, or ``[B, N]`` of 0 and 1 | 0 forbids attention; a mask without positive values is added to the scores |
    | ``BlockMask`` | evaluated for every pair of tokens |

    Args:
        attn_mask: Mask of self-attention.
        x: Stream, ``[B, N, C]``.
        layout: Selects the reading of an ambiguous shape. ``"scores"``: ``[N, N]``, ``[1, N]`` and
            ``[heads, N, N]``, as ``scaled_dot_product_attention`` reads them. ``"keys"``: ``[B, N]``, as flash
            attention reads it.

    Returns:
        Boolean tensor ``[B or 1, N, 1]``, True for real tokens. None if there is no mask, or if the mask covers the
        keys of another stream.

    Raises:
        ValueError: The shape is unsupported, or ambiguous without a ``layout``.

    Example:
        >>> real_tokens(torch.tensor([[[[True, True, False]]]]), torch.zeros(1, 3, 8)).flatten()
        tensor([ True,  True, False])
    """
    if attn_mask is None:
        return None
    if not torch.jit.is_scripting():
        if has_torch_function_variadic(attn_mask, x):
            if type(attn_mask).__name__ == "CausalBias":  # every token attends to itself: no padding
                return None
            return handle_torch_function(real_tokens, (attn_mask, x), attn_mask, x, layout)  # FX records this call
        if not isinstance(attn_mask, Tensor):
            attn_mask = _evaluated(attn_mask, x)
    if x.dim() == 3 and attn_mask.dim() > 1 and attn_mask.shape[-1] != x.shape[1]:
        return None
    problem = _mask_problem(attn_mask, x, layout)
    if problem != "":
        raise ValueError(
            f"attention mask {problem}; got shape {list(attn_mask.shape)}, dtype {attn_mask.dtype}, and x of shape "
            f"{list(x.shape)}. If the mask does not mark padding, register the block with mask=''")
    batch, tokens, leading = x.shape[0], x.shape[1], attn_mask.shape[0]
    is_scores = leading == tokens or (leading == 1 and layout == "scores")
    of_keys = attn_mask.dim() == 2 and leading == batch and (layout == "keys" or not is_scores)
    allowed = _allowed(attn_mask, of_keys)
    if of_keys:
        return allowed.unsqueeze(-1)
    while allowed.dim() < 4:
        allowed = allowed.unsqueeze(0)
    return allowed.any(2).any(1).unsqueeze(-1)


def _evaluated(mask: Any, x: Tensor) -> Tensor:
    """Return flex attention's ``BlockMask`` as a tensor."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask  # slow to import

    if not isinstance(mask, BlockMask):
        raise ValueError(f"attention mask must be a tensor or a BlockMask, got {type(mask).__name__}")
    batch, heads, queries, keys = mask.shape
    return create_mask(mask.mask_mod, batch, heads, queries, keys, device=x.device)


def _mask_problem(mask: Tensor, x: Tensor, layout: str) -> str:
    """Return why the shape of a mask is unsupported or ambiguous, or an empty string."""
    axes = mask.dim()
    if x.dim() != 3 or axes < 2 or axes > 4:
        return "must have two to four axes and belong to a stream [B, N, C]"
    batch, tokens, leading, queries = x.shape[0], x.shape[1], mask.shape[0], mask.shape[-2]
    if layout == "" and batch > 1 and axes == 2 and leading == batch and leading == tokens:
        return "can be [B, N] or [N, N]: pass it as [B, 1, 1, N] or as [1, 1, N, N]"
    if layout == "" and batch > 1 and axes == 3 and leading > 1 and leading % batch == 0:
        return "can have samples or heads as its first axis: pass it as [B, 1, N, N] or as [1, heads, N, N]"
    if (queries in (1, tokens) and (axes < 4 or leading in (1, batch))) or (axes == 2 and leading == batch):
        return ""
    return "must be [B, N], [N, N], [heads, N, N] or [B or 1, heads or 1, N or 1, N]"


def _allowed(mask: Tensor, of_keys: bool) -> Tensor:
    """Return a mask as booleans, True where attention is allowed, without data-dependent control flow."""
    if mask.dtype == torch.bool:
        return mask
    allowed = mask > -1000.0  # exp(-1000) is 0 in every dtype
    if mask.is_floating_point() and not of_keys:
        return allowed
    positive = mask > 0
    keeps = positive.any()
    if mask.is_floating_point():
        keeps = keeps & (mask == positive).all()
    return torch.where(keeps, positive, allowed)


class Connection(nn.Module):
    """Base class of connections.

    Attributes:
        dim: Channel axis of the stream.
        eps: Added to |x|^2, see :mod:`timm_ortho.functional`.
        dims: Axes over which one projection sums; None for all axes but the first, the batch axis.
        groups: Number of equal parts of the channel axis. Each part has its own projection.
        keep: Tensor that autograd saves, ``output`` or ``branch``, see :func:`timm_ortho.functional.residual_update`.
        skip: Transform P of the stream, a module with ``forward(x) -> P x``; None for the identity. If the ``forward``
            of the connection does not call :meth:`join`, it must begin with ``x = self.carried(x)``.
        branch_first: Whether ``linear`` computes f + x. The left summand determines the memory layout of the sum, and
            the layout affects the rounding of later operations.
        mask_layout: Layout of the attention masks, see :func:`real_tokens`.
        connect_arguments: Arguments of the call of :func:`timm_ortho.connect` that made the connection, see
            :func:`timm_ortho.connection_arguments`.
        name: Name in :data:`CONNECTIONS`. Connections that are not registered have the name of their class or
            function, or ``module.Name`` if a registered connection has this name.
        routed: Whether :func:`timm_ortho.connect` added the connection to its block; False if the block's own code
            contains it.
        tokens_apart, in_place: See :func:`create_connection`.
        depth: Number of levels from the block up to its layer, see :class:`timm_ortho.blocks.BlockSpec`.

    Example:
        >>> class Half(Connection):
        ...     "Half of the parallel part: y = x + f_par / 2 + f_orth."
        ...     def forward(self, x, f, attn_mask=None):
        ...         return self.join(x, f, 0.5, 1.0, attn_mask)
        >>> Half()(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]))
        tensor([3.8200, 3.7600])
    """

    dims: Optional[List[int]]
    routed = False
    depth = 0
    tokens_apart = False
    in_place = False

    def __init__(self, dim: int = -1, eps: float = 1e-6, keep: str = "output") -> None:
        super().__init__()
        check_eps(eps)
        self.dim = dim
        self.eps = float(eps)
        self.keep = known_name("keep", keep, KEEPS)
        self.dims = [dim]
        self.groups = 1
        self.skip = None  # type: Optional[nn.Module]  # TorchScript warns of an annotation in a constructor
        self.branch_first = False
        self.mask_layout = ""
        self.connect_arguments = {}  # type: Dict[str, Any]
        self.name = type(self).__name__

    def carried(self, x: Tensor) -> Tensor:
        """Return ``P x``, the stream to which the branch output is added."""
        return x if self.skip is None else self.skip(x)

    def join(
            self, x: Tensor, f: Tensor, parallel: Weight, orthogonal: Weight, attn_mask: Optional[Tensor]) -> Tensor:
        """Return ``P x + parallel f_par + orthogonal f_orth``, in eager mode or in TorchScript.

        The weights are floats or 0-d tensors.
        """
        if not torch.jit.is_scripting():
            if isinstance(parallel, Tensor):  # proxies of FX have no shape
                check_weight("parallel", parallel)
            if isinstance(orthogonal, Tensor):
                check_weight("orthogonal", orthogonal)
        x = self.carried(x)
        if self.groups > 1:
            return self._join_groups(x, f, parallel, orthogonal)
        mask: Optional[Tensor] = None
        if attn_mask is not None and self.dims is None:
            mask = real_tokens(attn_mask, x, self.mask_layout)
        if torch.jit.is_scripting():
            return plain_update(x, f, parallel, orthogonal, self.dims, self.eps, mask)
        else:
            return checked_update(x, f, parallel, orthogonal, self.dims, self.eps, mask, self.keep == "branch")

    def _join_groups(self, x: Tensor, f: Tensor, parallel: Weight, orthogonal: Weight) -> Tensor:
        """Return the result of :meth:`join` with one projection per group of channels. ``x`` is already P x."""
        if isinstance(x, Tensor) and x.shape[self.dim] % self.groups != 0:  # a proxy of FX has no sizes
            raise ValueError(f"groups={self.groups} does not divide the {x.shape[self.dim]} channels of the stream")
        x, f = x.unflatten(self.dim, [self.groups, -1]), f.unflatten(self.dim, [self.groups, -1])
        first = self.dim if self.dim >= 0 else self.dim - 1  # axis of the groups; the next axis has the channels
        if torch.jit.is_scripting():
            y = plain_update(x, f, parallel, orthogonal, [first + 1], self.eps)
        else:
            y = checked_update(x, f, parallel, orthogonal, [first + 1], self.eps, None, self.keep == "branch")
        return y.flatten(first, first + 1)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps:g}" + (f", groups={self.groups}" if self.groups > 1 else "")


class LinearConnection(Connection):
    """The plain residual connection: y = x + f.

    The arguments of the constructor have no effect on y, but diagnostics read ``dim`` and ``eps``.
    """

    def forward(self, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        x = self.carried(x)
        return f + x if self.branch_first else x + f

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class FeatureConnection(Connection):
    """Orthogonal-F: y = x + f_orth, one projection along the channel axis for each token or pixel.

    Args:
        dim: Channel axis.
        eps: Added to |x|^2.
        prob: Probability pi of the orthogonal form. In training, each call draws the orthogonal or the linear form. In
            evaluation, the parallel part has its mean weight, 1 - pi.
        keep: See :func:`timm_ortho.functional.residual_update`.
        groups: Number of equal parts of the channel axis. Each part has its own projection.

    Example:
        >>> x, f = torch.tensor([3.0, 4.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
        >>> FeatureConnection(groups=2)(x, f)
        tensor([3.6400, 3.5200, 1.0000, 1.0000])
    """

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
            if isinstance(x, Tensor):
                probability = torch.full([], 1.0 - self.prob, dtype=torch.float32, device=x.device)
            else:  # FX: torch 2.6 does not accept a proxy as a device
                probability = x.new_full([], 1.0 - self.prob, dtype=torch.float32)
            drawn = torch.bernoulli(probability)
            return self.join(x, f, drawn, 1.0, attn_mask)
        return self.join(x, f, 1.0 - self.prob, 1.0, attn_mask)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", prob={self.prob:g}" if self.prob < 1.0 else "")


class GlobalConnection(FeatureConnection):
    """Orthogonal-G: y = x + f_orth, one projection over all axes but the batch.

    Padding is excluded from the projection, and the output at padding is zero.

    Args:
        dim, eps, prob, keep: See :class:`FeatureConnection`.

    Example:
        >>> x, f = torch.ones(1, 2, 2), torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
        >>> GlobalConnection()(x, f)
        tensor([[[1.7500, 0.7500],
                 [0.7500, 0.7500]]])
    """

    def __init__(self, dim: int = -1, eps: float = 1e-6, prob: float = 1.0, keep: str = "output") -> None:
        super().__init__(dim, eps, prob, keep)
        self.dims = None


class HybridConnection(Connection):
    """Learned weights for both parts: y = x + rho sin(theta) f_par + rho cos(theta) f_orth, per token or pixel.

    rho is at least 0, and theta is in [-pi/2, pi/2]. The forward pass clamps values outside these ranges. The backward
    pass ignores the clamp, so that an optimizer can move such values back.

    Args:
        dim: Channel axis.
        eps: Added to |x|^2.
        start: ``"orthogonal"`` (rho 1, theta 0) or ``"linear"`` (rho sqrt(2), theta pi/4).
        device, dtype: Device and dtype of rho and theta.
        groups: Number of equal parts of the channel axis. Each part has its own projection. All parts share rho and
            theta.

    Example:
        >>> hybrid = HybridConnection(start="linear")
        >>> hybrid(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])).detach()
        tensor([4., 4.])
    """

    def __init__(
            self, dim: int = -1, eps: float = 1e-6, start: str = "orthogonal", device: Any = None, dtype: Any = None,
            groups: int = 1,
    ) -> None:
        super().__init__(dim, eps)
        self.groups = check_count("groups", groups)
        self.start = known_name("start", start, STARTS)
        # the parameters have shape [1], because FSDP2 does not support 0-d parameters
        self.rho = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.theta = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter, value in zip((self.rho, self.theta), STARTS[self.start], strict=True):
            nn.init.constant_(parameter, value)

    def in_use(self) -> List[Tensor]:
        """Return the clamped ``[rho, theta]`` as 0-d tensors."""
        rho, theta = self.rho[0], self.theta[0]
        rho = rho + (rho.clamp(min=0.0) - rho).detach()
        quarter_turn = math.pi / 2
        theta = theta + (theta.clamp(min=-quarter_turn, max=quarter_turn) - theta).detach()
        return [rho, theta]

    def weights(self) -> List[Tensor]:
        """Return the weights ``[a, b]`` of the update as 0-d tensors."""
        rho, theta = self.in_use()
        return [rho * theta.sin(), rho * theta.cos()]

    def forward(self, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        weights = self.weights()
        return self.join(x, f, weights[0], weights[1], attn_mask)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, start={self.start!r}"


# --------------------------------------------------------------------------------------------------- by name
CONNECTIONS: Dict[str, Callable[..., Connection]] = {
    "linear": LinearConnection,
    "feature": FeatureConnection,
    "global": GlobalConnection,
    "hybrid": HybridConnection,
}
_PASSED = ("dim", "eps", "prob", "start", "keep", "groups", "device", "dtype")  # arguments of constructors


def register_connection(name: str, connection: Callable[..., Connection]) -> None:
    """Register a connection by name, for :func:`timm_ortho.connect` and the argument ``connection`` of models.

    Args:
        name: A Python identifier, so that command lines and config.json can contain it.
        connection: A subclass of :class:`Connection`, or a function that returns an instance. It must accept ``dim``
            and ``eps``, and may accept ``prob``, ``start``, ``keep``, ``groups``, ``device`` and ``dtype``.

    Raises:
        ValueError: The name is taken or not an identifier, or the connection does not have the required signature.

    Example:
        >>> class Half(Connection):
        ...     def forward(self, x, f, attn_mask=None):
        ...         return self.join(x, f, 0.5, 1.0, attn_mask)
        >>> register_connection("half_of_parallel", Half)
        >>> create_connection("half_of_parallel", eps=1e-4)
        Half(dim=-1, eps=0.0001)
        >>> del CONNECTIONS["half_of_parallel"]
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"the name of a connection must be an identifier, got {name!r}")
    _parameters(connection)
    known = CONNECTIONS.get(name, connection)
    names = [(cls.__module__, getattr(cls, "__qualname__", cls)) for cls in (known, connection)]
    if names[0] != names[1]:  # running a notebook cell again redefines the same class
        raise ValueError(f"connection {name!r} already exists ({_name_of(known)}): choose another name")
    create_connection(connection)
    CONNECTIONS[name] = connection


def known_connection(name: str) -> str:
    """Return the name of a registered connection; raise ValueError for any other name."""
    return known_name("connection", name, CONNECTIONS, " (import the module that registers it; "
                      "with train.py, pass --device-modules timm_ortho my_module)")


def create_connection(
        connection: Union[str, Callable[..., Connection]],
        *,
        dim: int = -1,
        eps: float = 1e-6,
        prob: float = 1.0,
        start: str = "orthogonal",
        keep: str = "output",
        groups: int = 1,
        branch_first: bool = False,
        tokens_apart: bool = False,
        in_place: bool = False,
        mask_layout: str = "",
        skip: Optional[nn.Module] = None,
        device: Any = None,
        dtype: Any = None,
) -> Connection:
    """Make a connection.

    The values are checked. The class or function then receives only the arguments that it accepts.

    Args:
        connection: Name, class, or a function that returns an instance.
        dim, eps, prob, start, keep: See :class:`FeatureConnection` and :class:`HybridConnection`.
        groups: See :class:`FeatureConnection`. If a connection has no argument ``prob`` or ``groups``, any value except
            the default is an error. ``linear`` ignores both. ``start`` is ignored by connections without this argument,
            so that one set of arguments fits a comparison of several connections.
        branch_first: See :class:`Connection`.
        tokens_apart: Whether ``global`` has one projection per token instead of one per sample, see
            :class:`timm_ortho.blocks.BlockSpec`.
        in_place: Whether the block changes the sum in place. If so, ``keep`` is ``"branch"``.
        mask_layout: Layout of the block's attention masks, see :func:`real_tokens`.
        skip: Module that maps the stream x to P x, for example from :func:`timm_ortho.skips.create_skip`.
        device, dtype: Device and dtype of the parameters.

    Returns:
        The connection, in training mode.

    Raises:
        ValueError: A name is unknown, a value is outside its range, or the connection does not have the required
            signature.

    Example:
        >>> create_connection("feature", dim=1, groups=4)
        FeatureConnection(dim=1, eps=1e-06, groups=4)
    """
    make = CONNECTIONS[known_connection(connection)] if isinstance(connection, str) else connection
    check_eps(eps)
    check_prob(prob)
    known_name("start", start, STARTS)
    known_name("keep", keep, KEEPS)
    known_name("mask layout", mask_layout, MASK_LAYOUTS)
    check_count("groups", groups)
    kept = "branch" if in_place else keep
    arguments = dict(zip(_PASSED, (dim, eps, prob, start, kept, groups, device, dtype), strict=True))
    accepted = _parameters(make).keys() - getattr(make, "keywords", {}).keys()  # functools.partial has bound these
    defaults = cast(Dict[str, Any], create_connection.__kwdefaults__)
    for name in sorted(arguments.keys() - accepted - {"dim", "keep", "start", "device", "dtype"}):
        if arguments[name] != defaults[name] and make is not LinearConnection:
            others = " or ".join(known for known, cls in CONNECTIONS.items() if name in _parameters(cls))
            raise ValueError(f"{connection if isinstance(connection, str) else _name_of(make)} does not take the "
                             f"argument {name}: omit {name}, or choose {others}; your own connection needs this "
                             "argument in its constructor")
    made = make(**{name: value for name, value in arguments.items() if name in accepted})
    if not isinstance(made, Connection):
        raise ValueError(f"{_name_of(make)} must return a timm_ortho.Connection, got {type(made).__name__}")
    if "_modules" not in vars(made):
        raise ValueError(f"{type(made).__name__}.__init__ must begin with super().__init__(dim, eps)")
    signature = inspect.signature(made.forward)
    try:
        signature.bind(None, None, attn_mask=None)
    except TypeError as error:
        raise ValueError(f"{type(made).__name__}.forward must accept (x, f, attn_mask=None), got {signature}: "
                         f"{error}") from None
    made.name = connection if isinstance(connection, str) else _unique_name(make)
    made.skip, made.branch_first, made.mask_layout = skip, branch_first, mask_layout
    made.tokens_apart, made.in_place = tokens_apart, in_place
    if skip is not None and not any(_uses(cast(type, type(made)), name) for name in ("carried", "join", "skip")):
        raise ValueError(f"{type(made).__name__}.forward ignores skip: omit skip, or begin with x = self.carried(x)")
    if kept == "branch":  # a subclass may have no argument keep
        made.keep = kept
    if tokens_apart and made.dims is None:
        made.dims = [dim]
    return made


def _name_of(make: Any) -> str:
    return getattr(make, "__name__", type(make).__name__)


def _unique_name(make: Any) -> str:
    """Return the registered name of a class or function. If it has none, return a name that is not registered."""
    for name, registered in CONNECTIONS.items():
        if registered is make:
            return name
    name = _name_of(make)
    return f"{make.__module__}.{name}" if name in CONNECTIONS else name


def _parameters(make: Any) -> Dict[str, inspect.Parameter]:
    """Return the constructor's parameters by name, after checking them."""
    if isinstance(make, nn.Module) or not callable(make):
        shown = f"an instance of {type(make).__name__}" if isinstance(make, nn.Module) else repr(make)
        raise ValueError(f"connection must be a name, a class or a function that returns a connection, got {shown}")
    parameters = dict(inspect.signature(make).parameters)
    missing = [name for name in ("dim", "eps") if name not in parameters]
    if missing:
        raise ValueError(f"{_name_of(make)} must accept dim and eps as timm_ortho.Connection does; missing: "
                         f"{', '.join(missing)}")
    required = [name for name, parameter in parameters.items() if name not in _PASSED
                and parameter.default is parameter.empty
                and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
    if required:
        raise ValueError(f"{_name_of(make)} must have defaults for its own arguments; without a default: "
                         f"{', '.join(required)}")
    return parameters


# ------------------------------------------------------------------------------------------------- in a model
class Site(NamedTuple):
    """One residual addition of a model with connections.

    Attributes:
        layer: Index of the block's layer in the model, from 0.
        kind: Kind of the branch, such as ``attention``, ``mlp`` or ``conv``, see :class:`timm_ortho.blocks.BlockSpec`.
            If the block's own code contains the connection, the kind is the name of the block's attribute that holds
            the connection, without the prefix ``connection_``.
        name: Name of the connection in ``named_modules()``, for example ``blocks.0.connection_attention``.
        connection: The connection, a module with ``forward(x, f)``.
    """

    layer: int
    kind: str
    name: str
    connection: Connection


def sites(model: nn.Module) -> List[Site]:
    """Return the sites of a model, block by block; an empty list for a model without connections.

    A connection inside another connection is no site.

    A warning reports blocks whose class or ``forward`` was replaced after :func:`timm_ortho.connect`, as token merging
    does. The new code does not call the connections, so the additions of these blocks are linear.

    Example:
        >>> import timm
        >>> for layer, kind, name, connection in sites(timm.create_model("vit_test_ortho"))[:2]:
        ...     print(layer, kind, name, connection)
        0 attention blocks.0.connection_attention FeatureConnection(dim=-1, eps=1e-06)
        0 mlp blocks.0.connection_mlp FeatureConnection(dim=-1, eps=1e-06)
    """
    connections = [
        (name, block, attribute, connection) for name, block in named_outside(model)
        for attribute, connection in block.named_children() if isinstance(connection, Connection)
    ]
    unused = {}
    for name, block, attribute, connection in connections:
        if is_unused(block, attribute, connection):
            unused[name] = type(block).__name__
        elif connection.routed and _hides_connection(block, attribute):
            unused[name] = vars(block)["forward"].__qualname__
    if unused:
        warnings.warn(
            f"the additions of {len(unused)} blocks are linear (the first block is {next(iter(unused))!r}): their "
            f"class or forward was replaced after connect, and the new code does not call connections: "
            f"{', '.join(dict.fromkeys(unused.values()))}. Replace a class before connect, and register the new "
            "class with timm_ortho.register_block. If an instance has its own forward, delete this attribute",
            stacklevel=2)
    layers = layers_of(layer_name(name, connection.depth) for name, _, _, connection in connections)
    return [
        Site(layer, attribute.removeprefix("connection_"), f"{name}.{attribute}" if name else attribute, connection)
        for layer, (name, _, attribute, connection) in zip(layers, connections, strict=True)
    ]


def named_outside(model: nn.Module) -> Iterator[Tuple[str, nn.Module]]:
    """Yield ``model.named_modules()`` without connections and the modules inside them."""
    inside = {inner for module in model.modules() if isinstance(module, Connection) for inner in module.modules()}
    return model.named_modules(inside)


def is_unused(block: nn.Module, attribute: str, connection: nn.Module) -> bool:
    """Return whether the class of the block was replaced and no longer calls the connection that was added."""
    return isinstance(connection, Connection) and connection.routed and not _uses(cast(type, type(block)), attribute)


def _hides_connection(block: nn.Module, attribute: str) -> bool:
    """Return whether an instance has its own ``forward``, which calls no connection, although that of the class does.

    A method that may call another ``forward`` does not count.
    """
    forward: Any = vars(block).get("forward")
    code, hidden = (getattr(inspect.unwrap(each), "__code__", None) for each in (forward, type(block).forward))
    names = _names(code)
    return (isinstance(forward, MethodType) and forward.__self__ is block and code is not None and not code.co_freevars
            and attribute in _names(hidden) - names and not any("forward" in name for name in names))


@cache
def _uses(cls: type, attribute: str) -> bool:
    """Return whether a class uses an attribute.

    Overridden methods count only if the override calls ``super`` or another ``forward``.
    """
    overridden: Set[str] = set()
    for base in takewhile(lambda base: base is not Connection, cls.__mro__):  # Connection's own methods do not count
        for name, value in vars(base).items():
            names = _names(getattr(inspect.unwrap(value), "__code__", None))
            if attribute in names and name not in overridden:
                return True
            if not names & {"super", "forward"}:
                overridden.add(name)
    return False


def _names(code: Optional[CodeType]) -> Set[str]:
    """Return the global names and attributes in the code of a function and of the functions inside it."""
    inner = [constant for constant in (code.co_consts if code else ()) if isinstance(constant, CodeType)]
    return {*(code.co_names if code else ()), *(name for constant in inner for name in _names(constant))}


def layer_name(block: str, depth: int) -> str:
    """Return the name of the module ``depth`` levels above a block."""
    parts = block.split(".")
    return ".".join(parts[:max(len(parts) - depth, 0)])


def layers_of(blocks: Iterable[str]) -> Iterator[int]:
    """Yield the layer index of each block, given the names of the blocks or of their layers in model order.

    A block inside another block, such as the position encoding of ``davit``'s blocks, belongs to the outer layer.

    Example:
        >>> list(layers_of(["blocks.0", "blocks.0.cpe", "blocks.1"]))
        [0, 0, 1]
    """
    outer: Optional[str] = None
    layer = -1
    for name in blocks:
        if outer is None or not (name == outer or outer == "" or name.startswith(f"{outer}.")):
            outer, layer = name, layer + 1
        yield layer
