"""Measure norms and angles of stream and branch output at each site with forward hooks.

A site is one residual addition in a block. With the stream x (after the connection's skip transform, if any) and the
branch output f, the values of a site are (Oh et al. 2025, Section 3.5, Figures 3 and 10 to 12, and Appendix D):

    stream = |x|^2    parallel = |f_par|^2    orthogonal = |f_orth|^2    cosine = <x, f> / (|x| |f|)
    s = <x, f> / (|x|^2 + eps)    s_added = <x, y - x> / (|x|^2 + eps)

s is the signed coefficient of the parallel component, f_par = s x. s_added is the coefficient of what the connection
really adds to x: y is its output. For ``linear``, s_added is s. For ``feature``, s_added is 0, up to rounding and eps;
with the probability pi, it is s or 0 in training, and (1 - pi) s in evaluation. For ``hybrid``, it is rho sin(theta) s.
For ``global``, whose projection covers all tokens, only the mean of s_added weighted by |x|^2 is 0.

Norms and products run over the channel axis for every connection, including ``global``, so that connections can be
compared. Values are means over the batch, over tokens or pixels without padding, and over repeated calls of a
connection in one forward pass. A connection with groups of channels decomposes each group: |f_par|^2 and |f_orth|^2 are
sums over the groups, ``cosines`` lists the cosine of each group, and ``cosine``, ``s`` and ``s_added`` are their means.

The shares in the rows of :func:`record` are ratios of averages, because tokens of zeros have no ratio.
"""
import math
import warnings
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from .._checks import check_count
from .._compat import Observer, functorch_is_active, is_compiled_in_place
from ..connections import Connection, HybridConnection, real_tokens
from ..functional import decompose
from ..model_sites import Site, sites as sites_of
from ..update.formula import without_padding

RecordedRow = Dict[str, Any]  # one site at one recorded step


class SiteDynamics(NamedTuple):
    """Averages of one site over one batch; the module docstring defines them."""

    layer: int
    kind: str
    name: str
    stream: float
    parallel: float
    orthogonal: float
    cosine: float
    s: float
    s_added: float
    cosines: Tuple[float, ...] = ()  # one for each group; empty without groups, or if no call was measured
    rho: Optional[float] = None  # of a hybrid connection
    theta: Optional[float] = None


# ---------------------------------------------------------------------------------------- one measurement
def measure(
        connection: Connection, y: Tensor, x: Tensor, f: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
    """Return a tensor ``[stream, parallel, orthogonal, cosine, s, s_added]``, on the device of ``x``.

    ``y`` is the output of the connection, and the remaining arguments are its inputs. With groups of channels, the
    cosine of each group is appended.

    >>> x, f, connection = torch.tensor([[3.0, 0.0]]), torch.tensor([[4.0, 3.0]]), timm_ortho.LinearConnection()
    >>> measure(connection, connection(x, f), x, f)
    tensor([ 9.0000, 16.0000,  9.0000,  0.8000,  1.3333,  1.3333])
    """
    if not isinstance(y, Tensor):
        raise TypeError(f"connection {connection.name!r} returns a {type(y).__name__}: only a tensor can be measured")
    x = connection.carried(x)
    # float32, because the square of a norm of 256 overflows float16
    x, f, y = (t if t.dtype == torch.float64 else t.float() for t in (x, f, y))
    added = y - x
    try:
        real = real_tokens(attn_mask, x)
    except ValueError:  # connections with one projection per token accept masks of all shapes
        if connection.dims is None:
            raise
        real = None
    if real is not None:
        x, f, added = (without_padding(t, real) for t in (x, f, added))
    dim = connection.dim % x.dim()  # after unflatten: the axis of the groups, followed by the axis of their channels
    x, f, added = (t.unflatten(dim, (connection.groups, -1)) for t in (x, f, added))
    parallel, orthogonal = decompose(x, f, dim + 1, connection.eps)
    squares = [part.square().sum((dim, dim + 1)).mean() for part in (x, parallel, orthogonal)]
    cosines = nn.functional.cosine_similarity(x, f, dim=dim + 1)
    n = x.square().sum(dim + 1) + connection.eps
    coefficients = [((x * part).sum(dim + 1) / n).mean() for part in (f, added)]
    means = torch.stack([*squares, cosines.mean(), *coefficients])
    if connection.groups > 1:
        means = torch.cat([means, cosines.movedim(dim, 0).flatten(1).mean(1)])
    return means if real is None else means / real.to(means).mean()  # the means count padding as zeros


@contextmanager
def _measuring(measured: "_Pass") -> Iterator[None]:
    """Measure each call of a connection at the sites of a pass."""
    def hook(index: int, connection: Any, inputs: Tuple[Tensor, ...], options: Dict[str, Any], output: Tensor) -> None:
        with torch.no_grad():
            means = measure(connection, output, *inputs, **options)
            if isinstance(connection, HybridConnection):
                means = torch.cat([means, torch.stack(connection.clamped()).to(means)])
            measured.means.setdefault(index, []).append(means)

    with ExitStack() as hooks:
        for index, site in enumerate(measured.sites):
            hooks.enter_context(site.connection.register_forward_hook(Observer(hook, index), with_kwargs=True))
        yield


def record_dynamics(model: nn.Module, images: Tensor, sites: Iterable[Site]) -> List[SiteDynamics]:
    """Run ``model`` once in evaluation mode and measure every site.

    The hooks are removed afterwards, training modes are restored, and no random number is drawn. Images are
    ``[B, C, H, W]`` on the model's device. Sites that the forward pass does not reach are NaN.

    >>> model = timm.create_model("vit_test_ortho")
    >>> measured = record_dynamics(model, torch.randn(2, 3, 8, 8), timm_ortho.sites(model))
    >>> measured[0].kind, measured[0].name, measured[0].stream > 0
    ('attention', 'blocks.0.connection_attention', True)
    """
    measured = _Pass(0, list(sites))
    with _measuring(measured), evaluation(model), torch.no_grad():
        model(images)
    found = measured.dynamics()
    return [found.get(index, _of_site(site, [math.nan] * 6)) for index, site in enumerate(measured.sites)]


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and restore each module's mode at the end.

    >>> model = nn.Dropout()
    >>> with evaluation(model):
    ...     model.training
    False
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


# ------------------------------------------------------------------------------------- during training
class Recorder:
    """Record norms and angles at a model's sites during training, until :meth:`close` or the end of a ``with`` block.

    A step is one forward pass in training mode: with gradient accumulation, one update has several steps. Passes in
    evaluation mode or inside transforms of ``torch.func`` are neither counted nor recorded. Each recorded
    step adds one row for each site:

    | key | value |
    | --- | --- |
    | ``step`` | number of training passes before this pass |
    | ``layer``, ``kind``, ``name`` | fields of the :class:`timm_ortho.Site` |
    | ``stream``, ``parallel``, ... | defined in the module docstring; ``_share`` is a part divided by ``stream`` |
    | ``rho``, ``theta`` | learned values of a hybrid connection after clamping; None for other connections |

    Training stays bit-identical: no random number is drawn, outputs and gradients do not change, and the same kernels
    run. Sites have hooks only during a recorded pass, so the recomputation of activation checkpointing is not recorded.
    Copies and pickles of the model (EMA, checkpoints) contain no recorder. Values stay on the device until they are
    read. In distributed training, each process records its share of the batch. A warning reports blocks whose
    connections were not called in the first recorded pass.

    Hooks do not run inside a compiled model. Before a recorded pass, the recorder therefore calls such a model once in
    eager mode, without gradients, and restores random state and buffers. Create the recorder before the model's first
    compiled pass. With ``fullgraph=True``, record the compiled model: a hook on the inner model would break
    the graph. Call :meth:`close` before you script the model.

    Args:
        model: A model with connections, optionally wrapped in DistributedDataParallel or ``torch.compile``. For a
            plain timm model, call ``connect(model, "linear")`` first.
        every: Record every ``every``-th training pass, starting with the first.
        sink: Called with the rows of each recorded pass. The recorder does not keep rows that a sink receives.

    Attributes:
        every: See the argument.
        step: Number of training passes so far. Set it to continue the count of an earlier recorder.

    Raises:
        ValueError: The model has no connections, or ``every`` is not a positive integer.

    >>> model = timm.create_model("vit_test_ortho")
    >>> with timm_ortho.record(model, every=2) as recorder:
    ...     for _ in range(3):
    ...         _ = model(torch.randn(2, 3, 8, 8))
    >>> sorted({row["step"] for row in recorder.rows})
    [0, 2]
    """

    def __init__(
            self,
            model: nn.Module,
            every: int = 50,
            sink: Optional[Callable[[List[RecordedRow]], None]] = None,
    ) -> None:
        if not sites_of(unwrap_model(model)):
            raise ValueError(
                f"{type(unwrap_model(model)).__name__} has no connections to record; call "
                f"timm_ortho.connect(model, 'linear') first, which does not change its outputs")
        self.every = check_count("every", every)
        self.step = 0
        self._sink = sink
        self._rows: List[RecordedRow] = []
        self._unread: List[_Pass] = []
        self._warned = False
        self._pass: Optional[_Pass] = None  # the current pass, if it is recorded
        self._hooks = ExitStack()  # hooks on the sites, during a recorded pass
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            model.register_forward_hook(_Hook(self._after), always_call=True),
        ]

    @property
    def rows(self) -> List[RecordedRow]:
        """All rows so far, in the order of steps. Within a step, sites are in the order of their first calls."""
        for finished in self._unread:
            self._rows += finished.rows()
        self._unread.clear()
        return self._rows

    def close(self) -> None:
        """Stop recording and keep the rows. Repeated calls have no effect."""
        self._hooks.close()
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ hooks
    def _before(self, model: nn.Module, args: Tuple, kwargs: Dict[str, Any]) -> None:
        if model.training and not functorch_is_active():  # measurements could not leave the transform
            self._begin(model, args, kwargs, torch.compiler.is_compiling())

    def _after(self, model: nn.Module, args: Tuple, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._end(succeeded=output is not None)  # after a failed pass there is no output

    @torch.compiler.disable  # runs in eager mode, before the compiled graph
    def _begin(self, model: nn.Module, args: Tuple, kwargs: Dict[str, Any], traced: bool) -> None:
        if self._pass is not None:  # Ctrl-C in a notebook skips the forward hook
            self._end(succeeded=False)
        step, self.step = self.step, self.step + 1
        if step % self.every:
            return
        self._pass = _Pass(step, sites_of(unwrap_model(model)))
        self._hooks.enter_context(_measuring(self._pass))
        if traced or _is_compiled(model):
            with _undisturbed(model):
                unwrap_model(model).forward(*args, **kwargs)
            self._end(succeeded=True)

    def _end(self, succeeded: bool) -> None:
        self._hooks.close()
        done, self._pass = self._pass, None
        if done is None or not succeeded:
            return
        if not done.means:
            reason = ("the forward pass called no connection, or hooks did not run because the blocks are compiled one "
                      "by one or the first compiled pass came before the recorder. If the model is compiled, create "
                      "the recorder first, and compile the whole model" if done.sites else
                      "the model has no connections any more: call timm_ortho.connect(model, 'linear')")
            warnings.warn(f"timm_ortho.record measured no connection: {reason}", stacklevel=2)
        elif done.unused and not self._warned:
            self._warned = True
            warnings.warn(
                f"the forward pass of step {done.step} called no connection of {len(done.unused)} blocks (the first is "
                f"{done.unused[0]!r}). If it ran these blocks, their additions were linear", stacklevel=2)
        if self._sink is None:
            self._unread.append(done)
        else:
            self._sink(done.rows())


record = Recorder


class _Hook:
    """Hook of a recorded model. A copied or unpickled hook does nothing, so that copies of the model record nothing."""

    def __init__(self, call: Callable[..., None] = lambda *_: None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __reduce__(self) -> Tuple:
        return _Hook, ()


class _Pass:
    """Measurements of one recorded forward pass, on the device."""

    def __init__(self, step: int, sites: List[Site]) -> None:
        self.step = step
        self.sites = sites
        self.means: Dict[int, List[Tensor]] = {}  # one tensor per call, by index of the site

    @property
    def unused(self) -> List[str]:
        """Names of the blocks without a measured connection."""
        blocks = [site.name.rpartition(".")[0] for site in self.sites]
        used = {blocks[index] for index in self.means}
        return [block for block in dict.fromkeys(blocks) if block not in used]

    def dynamics(self) -> Dict[int, SiteDynamics]:
        """Return the averages over the calls, by index of the site, from one transfer."""
        means = {index: torch.stack(calls).mean(0) for index, calls in self.means.items()}
        values = iter(torch.cat(list(means.values())).tolist() if means else ())
        return {index: _of_site(self.sites[index], [next(values) for _ in mean]) for index, mean in means.items()}

    def rows(self) -> List[RecordedRow]:
        return [self._row(site) for site in self.dynamics().values()]

    def _row(self, site: SiteDynamics) -> RecordedRow:
        row = {"step": self.step, **site._asdict(), "cosines": list(site.cosines)}
        if not site.cosines:
            del row["cosines"]
        for part in ("parallel", "orthogonal"):
            row[f"{part}_share"] = row[part] / site.stream if site.stream else math.nan
        return row


def _of_site(site: Site, values: Sequence[float]) -> SiteDynamics:
    end = 6 + site.connection.groups if site.connection.groups > 1 else 6
    learned = values[end:] or (None, None)
    return SiteDynamics._make([site.layer, site.kind, site.name, *values[:6], tuple(values[6:end]), *learned])


# ------------------------------------------------------------------------------------------ wrapped models
def _is_compiled(model: nn.Module) -> bool:
    inner = unwrap_model(model)
    path = next(name for name, module in model.named_modules() if module is inner)
    return is_compiled_in_place(inner) or "_orig_mod" in path.split(".")


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Disable gradients, and restore random state and buffers at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")  # if `devices` is empty, only the CPU's state is restored
    with torch.random.fork_rng([device.index for device in devices], device_type=kind), torch.no_grad():
        try:
            yield
        finally:
            for buffer, kept in buffers:
                buffer.data.copy_(kept)  # .data: autograd must not see a change
