"""Measure what the paper's Tables 1 and 11 list: the costs of orthogonal connections, and the ratio of width to depth.

FLOPs are counted during a forward pass of one image, with the paper's rules. In matrix products and convolutions, a
multiplication and its addition count 2 together. An elementwise operation counts 1 per element of its result, or 2 if
it multiplies and adds. A sum counts 1 per summed element. Copies and conversions count 0. In branches, only matrix
products and convolutions count, as in Table 1a. In connections, all operations count, and an unknown operation is an
error.

Let the stream x and the branch output f have s tokens of d channels. The orthogonal update in the paper's form takes
7sd + 2s FLOPs, which is 6sd + 2s more than the plain addition x + f. The sums x.x and x.f take 2sd each, and adding eps
and dividing take s each. With c = x.f / (x.x + eps), the three steps c x, f - c x and x + (f - c x) take sd each. This
package computes f + (1 - c) x instead, in 6sd + 3s FLOPs.
"""
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from statistics import fmean
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Sequence

import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from ... import bench
from ..._compat import TorchDispatchMode
from ...bench import results as bench_results
from ...blocks import spec_of
from ...connections import CONNECTIONS, Connection
from ...convert import connect
from ...diagnostics.dynamics import evaluation
from ...functional import decompose
from ...model_sites import Site, sites
from ...models.skip_networks import SkipNetwork
from ...run_folder import device_name

Row = dict[str, Any]
aten = torch.ops.aten
_PER_ELEMENT = {
    **dict.fromkeys((aten.mul, aten.add, aten.add_, aten.sub, aten.div, aten.div_, aten.sin, aten.cos, aten.clamp), 1),
    aten.addcmul: 2,
}
_FREE = {aten._to_copy, aten.detach, aten.alias, aten.empty_like, aten.select, aten.view}


class PaperConnection(Connection):
    """The orthogonal update, computed in the steps of the paper's Algorithm 1. Table 1a counts these steps."""

    def forward(self, x: Tensor, f: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return x + decompose(x, f, self.dim, self.eps)[1]


class SiteFlops(NamedTuple):
    """FLOPs at one site (one residual addition in a block) for one image."""

    layer: int
    kind: str
    name: str
    tokens: int  # s, the number of tokens or pixels
    width: int  # d, the number of channels
    branch: int  # FLOPs of matrix products and convolutions between the previous site (or block start) and this site
    update: int  # FLOPs of the connection, including the addition to the stream


def rows(name: str, arguments: Mapping[str, Any], device: str | None = None) -> list[Row]:
    """Return the rows of one of the three tables of costs, each a dict from column to value.

    Args:
        name: `overhead`, `parameters` or `gamma`.
        arguments: Arguments of the function that measures the table. `models` lists architectures without the suffix
            `_ortho`.
        device: The device on which `overhead` times the models. `parameters` and `gamma` need no device.
    """
    if name == "gamma":
        return gamma_table(**arguments)
    if name == "parameters":
        transformers = [model for model in arguments["models"] if model.startswith("vit")]
        return [*(row for model in transformers for row in flop_table(model)), *parameter_table(**arguments)]
    return overhead(device=device, **arguments)


class _Counter(TorchDispatchMode):
    """Count FLOPs while a model runs.

    Inside connections, all operations count. Elsewhere, only matrix products and convolutions count.
    """

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
        """Register hooks that append the FLOPs of a site to `counts`, and yield the handles of these hooks."""
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
    if operation in _FREE or not isinstance(result, Tensor):  # for example, promote_types returns a dtype
        return 0
    if operation is aten.sum:
        return args[0].numel()
    if operation in _PER_ELEMENT:
        return _PER_ELEMENT[operation] * result.numel()
    raise NotImplementedError(f"a connection calls {operation}, which has no FLOP count in {__name__}")


def site_flops(model: nn.Module) -> list[SiteFlops]:
    """Count the FLOPs of each site's branch and connection during a forward pass of one image.

    A model on the meta device has the same counts, although it computes no numbers.
    """
    counts: list[SiteFlops] = []
    channels, *size = model.pretrained_cfg["input_size"]
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    image = next(model.parameters()).new_zeros(1, getattr(model, "in_chans", channels), *size)
    with _Counter() as counter, ExitStack() as hooks:
        for site in sites(model):
            for handle in counter.watch(model, site, counts):
                hooks.enter_context(handle)
        with evaluation(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # MATH: attention as matrix products
            model(image)
    return counts


def flop_table(model: str, **arguments: Any) -> list[Row]:
    """Return the paper's Table 1a for one architecture. Sites whose branches have the same kind and shape share rows.

    Returns:
        For each kind and shape, a row for each connection: ``linear``, ``paper`` (the paper's Algorithm 1) and
        ``feature`` (as this package computes it). ``branch`` and ``update`` are FLOPs. ``extra`` is ``update`` minus
        the ``update`` of ``linear``.

    >>> [row["extra"] for row in flop_table("vit_small")[:2]]  # linear: 0; the paper's algorithm: 6sd + 2s
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
        A row for each model with each connection. ``branches`` and ``updates`` are the FLOPs of all sites for one
        image. ``extra_parameters`` and ``extra_flops`` are differences from the same model with linear
        connections. ``extra_percent`` is ``extra_flops`` in percent of all FLOPs of that linear model.
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
    """Create a model with a connection on the meta device. The connection ``paper`` is :class:`PaperConnection`."""
    with torch.device("meta"):
        model = timm.create_model(f"{name}_ortho", **arguments)
        connect(model, "feature" if connection == "paper" else connection)
    for site in sites(model) if connection == "paper" else ():
        block, _, attribute = site.name.rpartition(".")
        setattr(model.get_submodule(block), attribute, PaperConnection(site.connection.dim, site.connection.eps))
    return model


# Text models of Table 11: class in transformers, arguments of its config. T5's decoder has another 24 blocks.
_TEXT_MODELS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "gpt2_xl": ("GPT2Model", dict(n_embd=1600, n_layer=48, n_head=25)),
    "llama_7b": ("LlamaModel", dict(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)),
    "t5_xl": ("T5EncoderModel", dict(d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_heads=32)),
}


def _reference(name: str) -> Optional[nn.Module]:
    """Return a model of Table 11 with linear connections, on the meta device.

    Returns:
        The model; None for a text model if transformers is not installed.
    """
    if name == "resnet1001":  # He et al. (2016), "Identity Mappings in Deep Residual Networks": CIFAR, bottlenecks
        with torch.device("meta"):
            stages = dict(layers=(111, 111, 111), channels=(64, 128, 256), stem_chs=16)
            return connect(SkipNetwork(basic=False, bottle_ratio=0.25, **stages), "linear")
    if name not in _TEXT_MODELS:
        return _on_meta(name, "linear")
    if not find_spec("transformers"):
        return None
    class_name, config = _TEXT_MODELS[name]
    cls = getattr(import_module("transformers"), class_name)
    with torch.device("meta"):
        return connect(cls(cls.config_class(**config)), "linear")


def gamma_table(models: Sequence[str]) -> list[Row]:
    """Return the paper's Table 11, a row with gamma for each model (Appendix E). Models that are unavailable have none.

    gamma is the mean width of the stream over the blocks, divided by the number of blocks. For a transformer this is
    width / blocks. For a ResNet it is sum_k(B_k C_k) / (sum_k B_k)^2, where stage k has B_k blocks of C_k channels.

    >>> gamma_table(["vit_small"])
    [{'model': 'vit_small', 'width': 384.0, 'blocks': 6, 'gamma': 64.0}]
    """
    table = []
    for name, model in zip(models, map(_reference, models), strict=True):
        if model is None:
            continue
        widths = {}
        for site in sites(model):
            block = model.get_submodule(site.name.rpartition(".")[0])
            widths[site.layer] = spec_of(block).widths(block)[site.kind]
        width = fmean(widths.values())
        table.append({"model": name, "width": width, "blocks": len(widths), "gamma": width / len(widths)})
    return table


def overhead(models: Sequence[str], **options: Any) -> list[Row]:
    """Measure the paper's Table 1b: training images per second with linear connections and with Orthogonal-F.

    The two models of an architecture are timed in turns. The time covers forward pass, cross entropy and backward pass.

    Args:
        models: Architectures without the suffix `_ortho`.
        options: Options of `timm-ortho bench`.

    Returns:
        A row for each timed setting of a model. ``linear`` and ``feature`` are median images per second. ``overhead``
        is the percentage of the linear throughput that Orthogonal-F loses, as the median over the repetitions.
        ``overhead_p20`` and ``overhead_p80`` are quantiles over the repetitions. ``note`` has the reason if something
        could not be measured.
    """
    requested = {"compile": False, **options, "what": ("models",), "models": [f"{name}_ortho" for name in models]}
    resolved = bench.resolve(requested)
    groups = [group for group in bench.model_groups(resolved) if group.labels["step"] == "training"]
    with bench.as_in_training(resolved.device):
        clock = bench.Clock(resolved.device)
        table = [_overhead_row(group, bench.measure(group.build(), resolved.repeats, clock)) for group in groups]
    return [{**row, "device": device_name(resolved.device)} for row in table]


def _overhead_row(group: bench.Group, results: Sequence[bench_results.Result]) -> Row:
    linear, feature = bench_results.rows(group.labels, group.images, results)
    labels = {name: linear[name] for name in ("model", "shape", "layout", "dtype", "mode")}
    note = linear["note"] or feature["note"]
    # ratio = time of feature / time of linear, so the lost share of the throughput is 1 - 1 / ratio
    lost = {q: None if note else 100 * (1 - 1 / feature[f"ratio_{q}"]) for q in bench_results.QUANTILES}
    return {
        **labels, "linear": linear["images_per_s"], "feature": feature["images_per_s"], "overhead": lost["p50"],
        "overhead_p20": lost["p20"], "overhead_p80": lost["p80"], "repeats": linear["repeats"], "note": note}
