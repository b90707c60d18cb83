"""Measure the costs of orthogonal connections, and the width of networks relative to their depth (Tables 1 and 11).

FLOPs are counted during a forward pass of one image, as the paper counts them. A multiplication with its addition in a
matrix product or convolution counts 2. An elementwise operation counts 1 per element of its result, 2 if it multiplies
and adds. A sum counts 1 per summed element. Copies and conversions count 0. In branches only matrix products and
convolutions count, as in Table 1a; in connections everything counts, and an unknown operation is an error.

For s tokens of d channels, the paper's form of the update takes 7sd + 2s FLOPs, which is 6sd + 2s more than the sd of
the plain addition. x.x and x.f take 2sd each, and adding eps and dividing take s each. With c = x.f / (x.x + eps),
c x, f - c x and x + f_orth take sd each. This package computes f + (1 - c) x, and its update takes 6sd + 3s.
"""
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
    """The orthogonal update in the steps of the paper's Algorithm 1, which Table 1a counts."""

    def forward(self, x: Tensor, f: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return x + decompose(x, f, self.dim, self.eps)[1]


class SiteFlops(NamedTuple):
    """FLOPs at one site for one image."""

    layer: int
    kind: str
    name: str
    tokens: int  # number of tokens or pixels, s
    width: int  # channels, d
    branch: int  # matrix products and convolutions since the start of the block, or since its previous site
    update: int  # FLOPs of the connection, with its addition


def rows(name: str, arguments: Mapping[str, Any], device: str | None = None) -> list[Row]:
    """Return the rows of a table of costs.

    Args:
        name: `overhead`, `parameters` or `gamma`.
        arguments: Arguments of the functions below. `models` are names without suffix.
        device: The device of `overhead`.
    """
    if name == "gamma":
        return gamma_table(**arguments)
    if name == "parameters":
        transformers = [model for model in arguments["models"] if model.startswith("vit")]
        return [*(row for model in transformers for row in flop_table(model)), *parameter_table(**arguments)]
    return overhead(device=device, **arguments)


class _Counter(TorchDispatchMode):
    """Count matrix products and convolutions, and inside connections all operations, while a model runs."""

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

    def watch(self, model: nn.Module, site: Site, counts: list[SiteFlops]) -> Iterator[Any]:
        """Register hooks that append the counts of a site, and yield their handles."""
        def begin_block(*_: Any) -> None:
            self.products = 0

        def begin_connection(*_: Any) -> None:
            self.in_connection, self.others = True, 0

        def end_connection(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            width = inputs[0].shape[site.connection.dim]
            counts.append(SiteFlops(*site[:3], inputs[0].numel() // width, width, self.products, self.others))
            self.in_connection, self.products = False, 0

        yield model.get_submodule(site.name.rpartition(".")[0]).register_forward_pre_hook(begin_block)
        yield site.connection.register_forward_pre_hook(begin_connection)
        yield site.connection.register_forward_hook(end_connection)


def _flops(operation: Any, args: Sequence[Any], result: Tensor) -> int:
    if operation in _FREE or not isinstance(result, Tensor):  # promote_types returns a dtype, not a tensor
        return 0
    if operation is aten.sum:
        return args[0].numel()
    if operation in _PER_ELEMENT:
        return _PER_ELEMENT[operation] * result.numel()
    raise NotImplementedError(f"a connection calls {operation}, which has no FLOP count in {__name__}")


def site_flops(model: nn.Module) -> list[SiteFlops]:
    """Count the FLOPs of each site's branch and connection during a forward pass of one image.

    A model on the meta device has the same counts, and computes nothing.
    """
    counts: list[SiteFlops] = []
    channels, *size = model.pretrained_cfg["input_size"]
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    image = next(model.parameters()).new_zeros(1, getattr(model, "in_chans", channels), *size)
    with _Counter() as counter, ExitStack() as hooks:
        for site in sites(model):
            for handle in counter.watch(model, site, counts):
                hooks.callback(handle.remove)
        with evaluation(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # MATH: attention as matrix products
            model(image)
    return counts


def flop_table(model: str, **arguments: Any) -> list[Row]:
    """Return the paper's Table 1a for one architecture, for its first block of each shape.

    Returns:
        Rows for each connection (``linear``; ``paper``, the paper's Algorithm 1; ``feature``, this package's) with the
        FLOPs ``branch``, ``update`` and ``extra``, the difference to the linear update.

    >>> [row["extra"] for row in flop_table("vit_small")[:2]]  # 6sd + 2s more than an addition
    [0, 454282]
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
    """Count parameters and FLOPs of whole models with each connection.

    Returns:
        Rows with ``branches`` and ``updates``, the FLOPs of all sites for one image. Columns that begin with
        ``extra_`` are differences to the linear model.
    """
    table = []
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
            table.append({
                **row, "extra_parameters": row["parameters"] - baseline["parameters"], "extra_flops": extra,
                "extra_percent": 100 * extra / (baseline["branches"] + baseline["updates"])})
    return table


def _on_meta(name: str, connection: str, **arguments: Any) -> nn.Module:
    """Create a model on the meta device. The connection ``paper`` is :class:`PaperConnection`."""
    with on_meta():
        model = timm.create_model(f"{name}_ortho", **arguments)
        connect(model, "feature" if connection == "paper" else connection)
    for site in sites(model) if connection == "paper" else ():
        block, _, attribute = site.name.rpartition(".")
        setattr(model.get_submodule(block), attribute, PaperConnection(site.connection.dim, site.connection.eps))
    return model


def gamma_table(models: Sequence[str]) -> list[Row]:
    """Return the paper's Table 11: gamma is the mean width of the stream divided by the number of blocks (Appendix E).

    For a transformer gamma is width / blocks, for a ResNet sum_k(B_k C_k) / (sum_k B_k)^2, where stage k has B_k blocks
    of C_k channels.

    >>> gamma_table(["vit_small"])
    [{'model': 'vit_small', 'width': 384.0, 'blocks': 6, 'gamma': 64.0}]
    """
    table = []
    for name in models:
        widths = {site.layer: site.width for site in site_flops(_on_meta(name, "linear"))}
        width = fmean(widths.values())
        table.append({"model": name, "width": width, "blocks": len(widths), "gamma": width / len(widths)})
    return table


def overhead(models: Sequence[str], **options: Any) -> list[Row]:
    """Measure the paper's Table 1b: training images per second with linear connections and with Orthogonal-F.

    Both models are timed in turns: forward, cross entropy and backward.

    Args:
        models: Architectures without suffix.
        options: Options of `timm-ortho bench`.

    Returns:
        Rows with the medians ``linear`` and ``feature`` in images per second; ``overhead`` in percent of the linear
        throughput, as the median over the repetitions, with the quantiles ``overhead_p20`` and ``overhead_p80``; and a
        ``note`` if something could not be measured.
    """
    requested = {"compile": False, **options, "what": ("models",), "models": [f"{name}_ortho" for name in models]}
    try:
        resolved = bench.resolve(requested)
    except bench.BenchError as error:
        raise LabError(str(error)) from None
    groups = [group for group in bench.model_groups(resolved) if group.labels["step"] == "training"]
    with bench.as_in_training(resolved.device):
        clock = bench.Clock(resolved.device)
        table = [_overhead_row(group, bench.measure(group.build(), resolved.repeats, clock)) for group in groups]
    return [{**row, "device": device_name(resolved.device)} for row in table]


def _overhead_row(group: bench.Group, results: Sequence[bench_report.Result]) -> Row:
    linear, feature = bench_report.rows(group.labels, group.images, results)
    labels = {name: linear[name] for name in ("model", "shape", "layout", "dtype", "mode")}
    note = linear["note"] or feature["note"]
    # the lost share of the throughput is 1 - 1 / ratio of the times
    lost = {q: None if note else 100 * (1 - 1 / feature[f"ratio_{q}"]) for q in bench_report.QUANTILES}
    return {
        **labels, "linear": linear["images_per_s"], "feature": feature["images_per_s"], "overhead": lost["p50"],
        "overhead_p20": lost["p20"], "overhead_p80": lost["p80"], "repeats": linear["repeats"], "note": note}
