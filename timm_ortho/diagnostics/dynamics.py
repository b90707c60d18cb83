"""Norms and angles in the stream, read from the connections by forward hooks.

For each site, averaged over the batch and over tokens or pixels, with x the stream that the site receives (transformed,
if the connection has a skip transform) and f the branch output (paper, Section 3.5, Figures 3 and 10 to 12):

    stream = |x|^2    parallel = |f_par|^2    orthogonal = |f_orth|^2    cosine = <x, f> / (|x| |f|)

All are taken over the channel axis, whatever the connection's own scope, so that the numbers of different connections
can be compared. A row of :func:`record` has besides ``parallel_share = parallel / stream`` and ``orthogonal_share``,
of the averages: a single token may be zero (the paper's class token is, at the start), the average is not. Padding, as
the attention mask tells it, is in no average. A connection that a forward pass calls several times (``coat`` shares its
position encodings) is one site, with the averages over its calls.
"""
import math
import warnings
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._compat import compiled_model, is_compiled_in_place
from ..connections import Connection, HybridConnection, Site, real_tokens, sites as sites_of
from ..functional import decompose, without_padding

Row = Dict[str, Any]


class SiteDynamics(NamedTuple):
    """One site's averages over one batch, as defined at the top of this file."""

    layer: int
    kind: str
    name: str
    stream: float
    parallel: float
    orthogonal: float
    cosine: float


# ---------------------------------------------------------------------------------------- one measurement
def measure(connection: Connection, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
    """``[stream, parallel, orthogonal, cosine]`` of what a connection receives, a tensor on the device of ``x``."""
    # at least float32: the square of a float16 norm overflows at 256
    x = connection.carried(x)
    x, f = (t if t.dtype == torch.float64 else t.float() for t in (x, f))
    real = real_tokens(attn_mask, x, connection.mask_layout)
    if real is not None:
        x, f = without_padding(x, real), without_padding(f, real)
    dim = connection.dim
    parallel, orthogonal = decompose(x, f, dim, connection.eps)
    squares = [part.square().sum(dim).mean() for part in (x, parallel, orthogonal)]
    means = torch.stack([*squares, nn.functional.cosine_similarity(x, f, dim=dim).mean()])
    return means if real is None else means / real.to(means).mean()  # padding gave zeros to the means


@contextmanager
def _watching(connections: Sequence[nn.Module], found: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside it each connection is measured before it is called; ``found`` gets its index and the measurement."""
    def hook_of(index: int) -> Callable:
        def hook(connection: Any, inputs: Tuple[Tensor, ...], further: Dict[str, Any]) -> None:
            with torch.no_grad():
                found(index, measure(connection, *inputs, **further))

        return hook

    handles = [
        connection.register_forward_pre_hook(hook_of(index), with_kwargs=True)
        for index, connection in enumerate(connections)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_dynamics(model: nn.Module, images: Tensor, sites: Iterable[Site]) -> List[SiteDynamics]:
    """Run ``model`` once in evaluation mode and measure every site.

    The hooks exist only during the call, and no random number is drawn, so training goes on as if nothing had happened.

    Args:
        model: Any model with connections.
        images: One batch, on the model's device.
        sites: The model's sites, from :func:`timm_ortho.connections.sites`.

    Returns:
        One entry for each site, in the order of ``sites``.
    """
    sites = list(sites)
    calls: List[List[Tensor]] = [[] for _ in sites]

    def add(index: int, figures: Tensor) -> None:
        calls[index].append(figures)

    with _watching([site.connection for site in sites], add), evaluation(model), torch.no_grad():
        model(images)
    return [
        SiteDynamics(site.layer, site.kind, site.name,
                     *(torch.stack(figures).mean(0).tolist() if figures else [math.nan] * 4))
        for site, figures in zip(sites, calls, strict=True)
    ]


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


# ------------------------------------------------------------------------------------- through a training
class Recorder:
    """Watches the stream of a model while it trains, from now on until :meth:`close`; a context manager.

    A step is one forward pass in training mode, so that with gradient accumulation an update has several; passes in
    evaluation mode do not count and are not recorded. There is one row for each recorded step and site:

    | key | is |
    | --- | --- |
    | ``step`` | training passes before this one |
    | ``layer``, ``kind``, ``name`` | of the site, as :func:`timm_ortho.sites` has them |
    | ``stream``, ``parallel``, ``orthogonal``, ``cosine`` | as defined at the top of this file |
    | ``parallel_share``, ``orthogonal_share`` | ``parallel`` and ``orthogonal`` over ``stream`` |
    | ``rho``, ``theta`` | as the connection uses them where they are learned, else None |

    Training is not disturbed: no random number is drawn and no bit of a result or gradient changes. The sites have
    hooks only during a pass that is recorded, hence not while activation checkpointing runs parts of it again; copies
    and pickles of the model (EMA, checkpoints) hold no recorder. The figures stay on the device until they are read,
    in one transfer for each recorded step. Of several processes each records its own share of the batch.

    A compiled model cannot be watched inside: a pass to be recorded is first run once more as it is written, without
    gradients, with random numbers and buffers put back. Record the model before it first runs compiled. With
    ``fullgraph=True`` give the compiled model, not the one in it, which would have to be left at its first line.
    TorchScript takes the model after :meth:`close`.

    Args:
        model: Any model with connections, on any device, wrapped in DistributedDataParallel or ``torch.compile`` or
            not; a linear model of timm's once it went through ``connect(model, "linear")``.
        every: Forward passes from one that is recorded to the next; the first is recorded.
        sink: Called with the rows of each recorded pass, which are then not kept.

    Attributes:
        every: As given.
        step: Training passes so far.

    Raises:
        ValueError: The model has no connections, or ``every`` is not a positive whole number.
    """

    def __init__(
            self, model: nn.Module, every: int = 50, sink: Optional[Callable[[List[Row]], None]] = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, got {every!r}")
        if not sites_of(_unwrapped(model)):
            raise ValueError(
                f"{type(_unwrapped(model)).__name__} has no connections to record; "
                f"timm_ortho.connect(model, 'linear') gives it linear ones, which change nothing")
        self.every = every
        self.step = 0
        self._sink = sink
        self._rows: List[Row] = []
        self._unread: List[_Pass] = []
        self._pass: Optional[_Pass] = None  # that is under way
        self._hooks = ExitStack()  # on the sites, during that pass
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            model.register_forward_hook(_Hook(self._after), always_call=True),
        ]

    @property
    def rows(self) -> List[Row]:
        """The rows so far, step by step and site by site."""
        unread, self._unread = self._unread, []
        for one in unread:
            self._rows += one.rows()
        return self._rows

    def drain(self) -> List[Row]:
        """The rows so far, which are then forgotten."""
        rows, self._rows = self.rows, []
        return rows

    def state_dict(self) -> Dict[str, Any]:
        """``step`` and ``rows`` in plain values, for a checkpoint."""
        return {"step": self.step, "rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`: later rows are those of a training that was never interrupted."""
        self.step, self._rows, self._unread = state["step"], [dict(row) for row in state["rows"]], []

    def close(self) -> None:
        """Stop recording; the rows stay. May be called more than once."""
        self._hooks.close()
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # --------------------------------------------------------------------------------- what the hooks call
    def _before(self, model: nn.Module, args: Tuple, kwargs: Dict[str, Any]) -> None:
        if model.training:
            self._begin(model, args, kwargs, torch.compiler.is_compiling())

    def _after(self, model: nn.Module, args: Tuple, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._end(succeeded=output is not None)  # it is called whether the pass succeeded or not

    @torch.compiler.disable  # a compiled model calls it as Python, before its graph begins
    def _begin(self, model: nn.Module, args: Tuple, kwargs: Dict[str, Any], traced: bool) -> None:
        if self._pass is not None:  # Ctrl-C in a notebook: that pass never ended
            self._end(succeeded=False)
        step, self.step = self.step, self.step + 1
        if step % self.every:
            return
        self._pass = _Pass(step, sites_of(_unwrapped(model)))
        self._hooks.enter_context(_watching([site.connection for site in self._pass.sites], self._pass.add))
        if traced or _is_compiled(model):
            with _undisturbed(model):
                _unwrapped(model).forward(*args, **kwargs)
            self._end(succeeded=True)

    def _end(self, succeeded: bool) -> None:
        self._hooks.close()
        done, self._pass = self._pass, None
        if done is None or not succeeded:
            return
        if not done.figures:
            warnings.warn(
                "timm_ortho.record saw none of the model's connections at work: are its blocks compiled one by one, "
                "or before they were recorded?", stacklevel=2)
        self._unread.append(done)
        if self._sink is not None:
            self._sink(self.drain())


record = Recorder  # as it is called: timm_ortho.record(model, every=50)


class _Hook:
    """A hook of a recorded model. Called by a copy of the model it would count the copy's passes: a copy does nothing.
    """

    def __init__(self, call: Callable[..., None] = lambda *_: None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __reduce__(self) -> Tuple:
        return _Hook, ()


class _Pass:
    """One forward pass that is recorded, its figures on the device."""

    def __init__(self, step: int, sites: List[Site]) -> None:
        self.step = step
        self.sites = sites
        self.figures: Dict[int, List[Tensor]] = {}  # of each call, by site

    def add(self, index: int, figures: Tensor) -> None:
        connection = self.sites[index].connection
        if isinstance(connection, HybridConnection):
            learned = torch.stack(connection.in_use())
            figures = torch.cat([figures, learned.to(figures)])
        self.figures.setdefault(index, []).append(figures)

    def rows(self) -> List[Row]:
        means = {index: torch.stack(figures).mean(0) for index, figures in self.figures.items()}
        values = iter(torch.cat(list(means.values())).tolist() if means else ())
        return [self._row(self.sites[index], [next(values) for _ in figures]) for index, figures in means.items()]

    def _row(self, site: Site, values: List[float]) -> Row:
        stream, parallel, orthogonal, cosine, *learned = values
        rho, theta = learned or (None, None)
        return {
            "step": self.step, "layer": site.layer, "kind": site.kind, "name": site.name,
            "stream": stream, "parallel": parallel, "orthogonal": orthogonal,
            "parallel_share": _ratio(parallel, stream), "orthogonal_share": _ratio(orthogonal, stream),
            "cosine": cosine, "rho": rho, "theta": theta,
        }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


# ------------------------------------------------------------------------------------------ wrapped models
def _unwrapped(model: nn.Module) -> nn.Module:
    """The model that DistributedDataParallel or ``torch.compile`` wrapped."""
    return _wrappers(model)[-1]


def _is_compiled(model: nn.Module) -> bool:
    *wrappers, inner = _wrappers(model)
    return is_compiled_in_place(inner) or any(compiled_model(wrapper) is not None for wrapper in wrappers)


def _wrappers(model: nn.Module) -> List[nn.Module]:
    """The model as given, what it wraps, and so on."""
    chain = [model]
    while True:
        inner = chain[-1].module if isinstance(chain[-1], DistributedDataParallel) else compiled_model(chain[-1])
        if inner is None:
            return chain
        chain.append(inner)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside it the model may run: without gradients, and afterwards random numbers and buffers are as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")  # without any, only the CPU's numbers are put back
    with torch.random.fork_rng([device.index for device in devices], device_type=kind), torch.no_grad():
        try:
            yield
        finally:
            for buffer, kept in buffers:
                buffer.data.copy_(kept)  # of its data: autograd must not take it for a change
