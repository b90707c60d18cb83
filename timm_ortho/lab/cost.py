"""What orthogonal connections cost, and how wide for its depth a network is: the paper's Tables 1 and 11, measured.

FLOPs are counted from a run, of one image, with these weights, which are the paper's: a product of matrices or a
convolution 2 for each multiplication with its addition, an operation on elements 1 for each element of its result (2
where it multiplies and adds), a sum 1 for each element that goes into it, copies and conversions none. Of the branches
only products of matrices and convolutions are counted, as in Table 1a; of the connections everything, and an operation
that is not known here is an error.

With s tokens of d channels the paper's form of the update takes 7sd + 2s (x.x and x.f 2sd each, eps and division s
each, s x, f - s x and x + f_orth sd each): 6sd + 2s more than the sd of an addition. This package computes the same
as f + (1 - s) x: one operation less on whole tensors and three more on single numbers, 6sd + 5s.
"""
from contextlib import ExitStack
from statistics import fmean
from typing import Any, Mapping, NamedTuple, Optional, Sequence

import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from .._compat import TorchDispatchMode
from ..bench import measure as bench, report as bench_report
from ..connections import CONNECTIONS, Connection, Site, sites
from ..convert import connect
from ..diagnostics.dynamics import evaluation
from ..functional import decompose
from ..models._build import on_meta
from ..runs.provenance import device_name
from . import LabError

__all__ = [
    "PAPER_MODELS", "SiteFlops", "flop_table", "gamma", "gamma_table", "overhead", "parameter_table", "site_flops",
]

PAPER_MODELS = ("resnetv2_34", "resnetv2_50", "vit_small", "vit_base")  # of Table 1b

# Table 1a: FLOPs of a branch, for s tokens of width d
BRANCHES = {"attention": lambda s, d: 8 * s * d**2 + 4 * s**2 * d, "mlp": lambda s, d: 16 * s * d**2}
UPDATES = {"linear": lambda s, d: s * d, "paper": lambda s, d: s * d + 6 * s * d + 2 * s}

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
    """FLOPs at one site, for one image.

    Attributes:
        layer: Of the site, as ``kind`` and ``name``.
        tokens: Tokens or pixels, s.
        width: Channels, d.
        branch: Of the matrix products and convolutions since the block began, or since the site before.
        update: Of the connection, its addition included.
    """

    layer: int
    kind: str
    name: str
    tokens: int
    width: int
    branch: int
    update: int


# ------------------------------------------------------------------------------------------------- FLOPs
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

    def begin_block(self, *_: Any) -> None:
        self.products = 0

    def begin_connection(self, *_: Any) -> None:
        self.in_connection, self.others = True, 0

    def end_connection(self, site: Site, x: Tensor) -> SiteFlops:
        width = x.shape[site.connection.dim]
        found = SiteFlops(*site[:3], x.numel() // width, width, self.products, self.others)
        self.in_connection, self.products = False, 0
        return found


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

    Args:
        model: A timm model with connections, on the CPU, or on the meta device, where the same operations are called
            and nothing is computed.
    """
    found: list[SiteFlops] = []
    with _Counter() as counter, ExitStack() as hooks:
        def watch(site: Site) -> None:
            def end(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                found.append(counter.end_connection(site, inputs[0]))

            block = model.get_submodule(site.name.rpartition(".")[0])
            for handle in (block.register_forward_pre_hook(counter.begin_block),
                           site.connection.register_forward_pre_hook(counter.begin_connection),
                           site.connection.register_forward_hook(end)):
                hooks.callback(handle.remove)

        for site in sites(model):
            watch(site)
        _run(model)
    return found


def _run(model: nn.Module) -> None:
    """One image of the model's size; attention as plain products of matrices, which are counted."""
    parameter = next(model.parameters())
    with evaluation(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, *_image_size(model), dtype=parameter.dtype, device=parameter.device))


def _image_size(model: nn.Module) -> tuple[int, int, int]:
    channels, *size = model.pretrained_cfg["input_size"]
    patches = getattr(model, "patch_embed", None)
    return getattr(model, "in_chans", channels), *(getattr(patches, "img_size", None) or size)


def flop_table(model: str = "vit_small", **arguments: Any) -> list[Row]:
    """The paper's Table 1a for one architecture: its first block of each shape, linear and orthogonal.

    Args:
        model: Name without suffix.
        arguments: Of the model.

    Returns:
        Rows with ``model``, ``module`` (the kind of site), ``connection`` (``linear``, ``paper``: the orthogonal update
        as the paper writes it, and ``feature``: as it runs here), ``tokens``, ``width``, ``branch`` and ``update`` as
        counted, ``branch_formula`` and ``update_formula`` after Table 1a (None where it has none), and ``extra`` with
        ``extra_formula``, what the update takes beyond the linear one: 6sd + 2s.
    """
    counts = {connection: site_flops(_on_meta(model, connection, **arguments))
              for connection in ("linear", "paper", "feature")}
    rows, seen = [], set()
    for linear, *others in zip(*counts.values(), strict=True):
        shape = (linear.kind, linear.tokens, linear.width, linear.branch)
        if shape not in seen:
            rows += [_flop_row(model, name, site, linear)
                     for name, site in zip(counts, (linear, *others), strict=True)]
        seen.add(shape)
    return rows


def _flop_row(model: str, connection: str, site: SiteFlops, linear: SiteFlops) -> Row:
    size = site.tokens, site.width
    branch = BRANCHES[site.kind](*size) if site.kind in BRANCHES else None
    update = UPDATES[connection](*size) if connection in UPDATES else None
    return {
        "model": model, "module": site.kind, "connection": connection, "tokens": site.tokens, "width": site.width,
        "branch": site.branch, "branch_formula": branch, "update": site.update, "update_formula": update,
        "extra": site.update - linear.update,
        "extra_formula": None if update is None else update - UPDATES["linear"](*size),
    }


def parameter_table(models: Sequence[str] = PAPER_MODELS, **arguments: Any) -> list[Row]:
    """Parameters and FLOPs of whole models with each connection.

    Args:
        models: Names without suffix.
        arguments: Of the models.

    Returns:
        Rows with ``model``, ``connection``, ``sites``, ``parameters``, ``branches`` and ``updates``, the FLOPs of all
        sites for one image, and ``extra_parameters``, ``extra_flops`` and ``extra_percent``, compared with the linear
        model.
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


# ------------------------------------------------------------------------------------------ width and depth
def gamma(model: nn.Module) -> float:
    """The mean width of the stream over the number of blocks (paper, Appendix E).

    For a transformer that is its width over its blocks, for a ResNet sum_k(B_k C_k) / (sum_k B_k)^2 with B_k blocks of
    C_k channels in stage k.

    Args:
        model: A timm model with connections; on the meta device nothing is computed.
    """
    return _gamma_row("", model)["gamma"]


def gamma_table(models: Sequence[str]) -> list[Row]:
    """The paper's Table 11: rows with ``model``, ``width`` (the mean), ``blocks`` and ``gamma``.

    Args:
        models: Names without suffix.
    """
    return [_gamma_row(name, _on_meta(name, "linear")) for name in models]


def _gamma_row(name: str, model: nn.Module) -> Row:
    widths = {site.layer: site.width for site in site_flops(model)}
    width = fmean(widths.values())
    return {"model": name, "width": width, "blocks": len(widths), "gamma": width / len(widths)}


# ------------------------------------------------------------------------------------------------ overhead
def overhead(models: Sequence[str] = PAPER_MODELS, **options: Any) -> list[Row]:
    """The paper's Table 1b: training images a second with linear connections and with Orthogonal-F.

    Measured by `timm-ortho bench`: the two in turns, forward, cross entropy and backward.

    Args:
        models: Names without suffix.
        options: Of :func:`timm_ortho.bench.bench`: ``device``, ``batch_size``, ``img_size``, ``model_kwargs``,
            ``dtypes``, ``repeats``, and ``compile``, which is False unless it is asked for.

    Returns:
        Rows with ``model``, ``shape``, ``layout``, ``dtype``, ``mode``, ``linear`` and ``feature`` in images a second
        (medians), ``overhead`` in percent of the linear throughput with ``overhead_p20`` and ``overhead_p80`` over the
        repetitions, ``repeats``, ``note``, why something could not be measured, or "", and ``device``, where.

    Raises:
        LabError: Something that was given cannot be measured.
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
        "overhead_p20": lost["p20"], "overhead_p80": lost["p80"], "repeats": linear["repeats"], "note": note,
    }
