"""What orthogonal connections cost, and how wide for its depth a network is: the paper's Tables 1 and 11, measured.

FLOPs are counted from a run, of one image, with these weights, which are the paper's: a product of matrices or a
convolution 2 for each multiplication with its addition, an operation on elements 1 for each element of its result (2
where it multiplies and adds), a sum 1 for each element that goes into it, copies and conversions none. Of the branches
only products of matrices and convolutions are counted, as in Table 1a; of the connections everything, and an operation
that is not known here is an error.

With s tokens of d channels the paper's form of the update takes 7sd + 2s (x.x and x.f 2sd each, eps and division s
each, s x, f - s x and x + f_orth sd each): 6sd + 2s more than the sd of an addition. This package computes the same
as f + (1 - s) x: one operation less on whole tensors and one more on single numbers, 6sd + 3s.
"""
import inspect
from contextlib import ExitStack
from statistics import fmean
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Sequence

import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from ... import bench
from ..._compat import TorchDispatchMode
from ...bench import report as bench_report
from ...connections import CONNECTIONS, Connection, Site, sites
from ...convert import connect
from ...diagnostics.dynamics import evaluation
from ...functional import decompose
from ...models.meta import on_meta
from ...runs.provenance import device_name
from .. import LabError

Row = dict[str, Any]
aten = torch.ops.aten
_PER_ELEMENT = {
    **dict.fromkeys((aten.mul, aten.add, aten.add_, aten.sub, aten.div, aten.div_, aten.sin, aten.cos, aten.clamp), 1),
    aten.addcmul: 2,
}
_FREE = {aten._to_copy, aten.detach, aten.alias, aten.empty_like, aten.select, aten.view}


class PaperConnection(Connection):
    """The orthogonal update as the paper writes it, Algorithm 1 step by step: what its Table 1a is about."""

    def forward(self, x: Tensor, f: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return x + decompose(x, f, self.dim, self.eps)[1]


class SiteFlops(NamedTuple):
    """FLOPs at one site, for one image."""

    layer: int
    kind: str
    name: str
    tokens: int  # or pixels, s
    width: int  # channels, d
    branch: int  # of matrix products and convolutions since the block began, or since the site before
    update: int  # of the connection, its addition included


def check(kind: str, arguments: Mapping[str, Any]) -> None:
    """A LabError if these are not the arguments of such a study."""
    function = {"gamma": gamma_table, "parameters": parameter_table, "overhead": overhead}[kind]
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise LabError(f"arguments: {error}") from None


def compute(kind: str, arguments: Mapping[str, Any], device: str | None = None) -> list[Row]:
    """The rows of a study without training: `overhead`, measured on a device, `parameters` or `gamma`.

    In the study's arguments `models` are named without suffix; what cannot be measured is a LabError.
    """
    if kind == "gamma":
        return gamma_table(**arguments)
    if kind == "parameters":
        transformers = [name for name in arguments["models"] if name.startswith("vit")]
        return [*(row for name in transformers for row in flop_table(name)), *parameter_table(**arguments)]
    return overhead(device=device, **arguments)


class _Counter(TorchDispatchMode):
    """Counts while a model runs: products everywhere, all else where ``in_connection``."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = 0
        self.in_connection = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Optional[Mapping] = None):
        result = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if operation in flop_registry:
            self.products += flop_registry[operation](*args, **(kwargs or {}), out_val=result)
        elif self.in_connection:
            self.others += _flops(operation, args, result)
        return result

    def watch(self, model: nn.Module, site: Site, found: list[SiteFlops]) -> Iterator[Any]:
        """Hooks that append the site's counts when the model has passed it."""
        def begin_block(*_: Any) -> None:
            self.products = 0

        def begin_connection(*_: Any) -> None:
            self.in_connection, self.others = True, 0

        def end_connection(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            width = inputs[0].shape[site.connection.dim]
            found.append(SiteFlops(*site[:3], inputs[0].numel() // width, width, self.products, self.others))
            self.in_connection, self.products = False, 0

        yield model.get_submodule(site.name.rpartition(".")[0]).register_forward_pre_hook(begin_block)
        yield site.connection.register_forward_pre_hook(begin_connection)
        yield site.connection.register_forward_hook(end_connection)


def _flops(operation: Any, args: Sequence[Any], result: Tensor) -> int:
    if operation in _FREE or not isinstance(result, Tensor):  # promote_types gives a dtype
        return 0
    if operation is aten.sum:
        return args[0].numel()
    if operation in _PER_ELEMENT:
        return _PER_ELEMENT[operation] * result.numel()
    raise NotImplementedError(f"a connection calls {operation}, whose FLOPs {__name__} does not know")


def site_flops(model: nn.Module) -> list[SiteFlops]:
    """FLOPs of each site's branch and connection, counted from a run with one image, site by site.

    On the meta device the same operations are called as on the CPU, and nothing is computed.
    """
    found: list[SiteFlops] = []
    channels, *size = model.pretrained_cfg["input_size"]
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    image = next(model.parameters()).new_zeros(1, getattr(model, "in_chans", channels), *size)
    with _Counter() as counter, ExitStack() as hooks:
        for site in sites(model):
            for handle in counter.watch(model, site, found):
                hooks.callback(handle.remove)
        with evaluation(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # attention as products of matrices
            model(image)
    return found


def flop_table(model: str, **arguments: Any) -> list[Row]:
    """The paper's Table 1a for one architecture: its first block of each shape.

    Returns:
        Rows for each connection (``linear``, ``paper``: the orthogonal update as the paper writes it, and ``feature``:
        as it runs here) with ``branch``, ``update`` and ``extra``, what the update takes beyond the linear one.
    """
    counts = {connection: site_flops(_on_meta(model, connection, **arguments))
              for connection in ("linear", "paper", "feature")}
    shapes: dict[tuple, tuple[SiteFlops, ...]] = {}
    for together in zip(*counts.values(), strict=True):
        first = together[0]
        shapes.setdefault((first.kind, first.tokens, first.width, first.branch), together)
    return [{
        "model": model, "module": site.kind, "connection": connection, "tokens": site.tokens, "width": site.width,
        "branch": site.branch, "update": site.update, "extra": site.update - together[0].update,
    } for together in shapes.values() for connection, site in zip(counts, together, strict=True)]


def parameter_table(models: Sequence[str], **arguments: Any) -> list[Row]:
    """Parameters and FLOPs of whole models with each connection.

    Returns:
        Rows with ``branches`` and ``updates``, the FLOPs of all sites for one image, and what is ``extra_`` in
        comparison with the linear model.
    """
    rows = []
    for name in models:
        baseline: Optional[Row] = None
        for connection in CONNECTIONS:
            model = _on_meta(name, connection, **arguments)
            flops = site_flops(model)
            row = {
                "model": name, "connection": connection, "sites": len(flops),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "branches": sum(site.branch for site in flops), "updates": sum(site.update for site in flops),
            }
            baseline = baseline or row
            extra = row["updates"] - baseline["updates"]
            rows.append({
                **row, "extra_parameters": row["parameters"] - baseline["parameters"], "extra_flops": extra,
                "extra_percent": 100 * extra / (baseline["branches"] + baseline["updates"])})
    return rows


def _on_meta(name: str, connection: str, **arguments: Any) -> nn.Module:
    """A model with shapes but without weights; the connection ``paper`` is :class:`PaperConnection`."""
    with on_meta():
        model = timm.create_model(f"{name}_ortho", **arguments)
        connect(model, "feature" if connection == "paper" else connection)
    for site in sites(model) if connection == "paper" else ():
        block, _, attribute = site.name.rpartition(".")
        setattr(model.get_submodule(block), attribute, PaperConnection(site.connection.dim, site.connection.eps))
    return model


def gamma_table(models: Sequence[str]) -> list[Row]:
    """The paper's Table 11: gamma is the mean width of the stream over the number of blocks (Appendix E).

    For a transformer that is its width over its blocks, for a ResNet sum_k(B_k C_k) / (sum_k B_k)^2 with B_k blocks of
    C_k channels in stage k.
    """
    rows = []
    for name in models:
        widths = {site.layer: site.width for site in site_flops(_on_meta(name, "linear"))}
        width = fmean(widths.values())
        rows.append({"model": name, "width": width, "blocks": len(widths), "gamma": width / len(widths)})
    return rows


def overhead(models: Sequence[str], **options: Any) -> list[Row]:
    """The paper's Table 1b: training images a second with linear connections and with Orthogonal-F.

    Measured by `timm-ortho bench`, whose ``options`` these are: the two in turns, forward, cross entropy and backward.

    Returns:
        Rows with ``linear`` and ``feature`` in images a second (medians), ``overhead`` in percent of the linear
        throughput as the median over the repetitions, with their 20 % and 80 % quantiles ``overhead_p20`` and
        ``overhead_p80``, and a ``note`` where something could not be measured.
    """
    given = {"compile": False, **options, "what": ("models",), "models": [f"{name}_ortho" for name in models]}
    try:
        resolved = bench.resolve(given)
    except bench.BenchError as error:
        raise LabError(str(error)) from None
    groups = [group for group in bench.model_groups(resolved) if group.labels["step"] == "training"]
    with bench.as_in_training(resolved.device):
        clock = bench.Clock(resolved.device)
        rows = [_overhead_row(group, bench.measure(group.build(), resolved.repeats, clock)) for group in groups]
    return [{**row, "device": device_name(resolved.device)} for row in rows]


def _overhead_row(group: bench.Group, results: Sequence[bench_report.Result]) -> Row:
    linear, feature = bench_report.rows(group.labels, group.images, results)
    labels = {name: linear[name] for name in ("model", "shape", "layout", "dtype", "mode")}
    note = linear["note"] or feature["note"]
    # the share of the images that are no longer done in a second: 1 - 1 / ratio of the times
    lost = {q: None if note else 100 * (1 - 1 / feature[f"ratio_{q}"]) for q in bench_report.QUANTILES}
    return {
        **labels, "linear": linear["images_per_s"], "feature": feature["images_per_s"], "overhead": lost["p50"],
        "overhead_p20": lost["p20"], "overhead_p80": lost["p80"], "repeats": linear["repeats"], "note": note}
