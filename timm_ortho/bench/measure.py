"""`timm-ortho bench`: what the orthogonal update costs on this machine, alone and in whole models, in time and memory.

Candidates that stand for the same work form a group: the formulas on one tensor, or a model's variants and its twin
with linear connections and the same weights. A group is measured in turns, each candidate once in every repetition. A
ratio is taken within a repetition, to the linear candidate beside it, and only then are quantiles taken, so that a
machine that is slow for a while is slow for both. Times of different groups, let alone of different runs, are not to
be compared. What the figures are is said in `bench_report`.

A call is timed by CUDA events, on a CPU by its clock, after a buffer larger than the last cache has been written. A
training step is forward, cross entropy and backward; an optimizer costs every model the same and would make the ratio
smaller. As in timm's train.py, on a GPU float32 matrix products may use TF32 and cuDNN may search for its fastest
convolution. Precisions other than float32 are dtypes of the operator's tensors, and autocast in models.

The part `launch` is about what a call costs before it touches data: 32 elements, and a ViT 64 wide, with one thread. No
buffer is written there: a GPU would hide the launches behind it, and from a CPU's cache it would drive the interpreter.
"""
import difflib
import gc
import os
import time
from argparse import Namespace
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Sequence

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from .._checks import known_name
from ..backends import choose_backend, use_backend
from ..connections import FeatureConnection, LinearConnection, sites
from ..convert import connect
from ..functional import plain_update, residual_update
from ..models._build import SUFFIXES, on_meta
from ..skips import SKIPS
from . import report as bench_report
from .report import Result

__all__ = ["DEFAULTS", "BenchError", "bench"]

EPS = 1e-6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARTS, SCOPES, STEPS = ("operator", "models", "launch"), ("feature", "global"), ("forward", "backward", "both")
MODES, MODEL_STEPS = ("eager", "inductor", "compiled"), ("training", "inference")

# Tensors that must be read or written: x, f and y forward; x, y or f, g and two gradients backward.
TENSORS_MOVED = {"forward": 3, "backward": 5, "both": 8}
MOVED_BY_LINEAR = {"forward": 3, "backward": 0, "both": 3}  # its gradients are g itself

FLUSHED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # more than the last cache of most

# By device. Shapes of three axes are tokens, of four NCHW, measured in both memory formats; models with their batch.
DEFAULTS = {
    "cpu": dict(
        what=PARTS, shapes=("16x197x384", "8x256x56x56"), scopes=SCOPES, dtypes=("float32",), compile=True,
        models={"vit_small_ortho": 16, "resnetv2_50_ortho": 8}, batch_size=8, repeats=11, copy_bytes=256 << 20),
    "cuda": dict(
        what=PARTS, shapes=("256x197x768", "64x256x56x56"), scopes=SCOPES, dtypes=("float32", "bfloat16"), compile=True,
        models=dict.fromkeys(("vit_small_patch16_224", "vit_base_patch16_224", "resnetv2_34", "resnetv2_50"), 256),
        batch_size=256, repeats=20, copy_bytes=512 << 20),
}
# Most of a quick run is torch.compile, whose time grows with the number of blocks: the models are cut short.
QUICK = dict(
    shapes=("4x197x384", "2x256x28x28"), scopes=("feature",), repeats=5, batch_size=4, copy_bytes=64 << 20,
    models={"vit_small_ortho": 4, "resnetv2_18_cifar_ortho": 4})
SHORT = {"vit_small_ortho": dict(depth=1), "resnetv2_18_cifar_ortho": dict(layers=(1,))}

# What launches decide: the tensors, and the model of `timm-ortho compare` on images of 32 x 32, by batch size.
TINY = (1, 1, 32)
SMALL, SMALL_BATCHES = dict(img_size=32, patch_size=8, embed_dim=64, num_heads=4), (1, 32)


class BenchError(ValueError):
    """What the user gave cannot be measured; the message is one line."""


class Architecture(NamedTuple):
    """A model: its name without suffix, the suffixes of its variants, their arguments, and the shape of a batch.

    With `skips` it is measured with these transforms of the stream in place of variants, all with linear connections,
    and with `appendix` also with the formula of the paper's appendix in place of its connections.
    """

    base: str
    suffixes: Sequence[str]
    arguments: Mapping[str, Any]
    batch: tuple[int, ...]
    layouts: Sequence[str]
    skips: Sequence[str] = ()
    appendix: bool = False

    @property
    def label(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.base}({arguments})" if arguments else self.base


class Candidate(NamedTuple):
    """`run(prepare())`, of which `run` is on the clock, and what has to be known about it to report it.

    Attributes:
        name: `linear` is the baseline.
        run: Takes what `prepare` returns.
        prepare: Called before each `run`.
        backend: Names the backend that runs.
        moved: Bytes that a call must move; 0 for none, or where they are not counted.
        keep: Runs forward with gradients; what its result holds is counted as saved.
        parameters: Left out of what is saved.
        held: Bytes of inputs, parameters and buffers.
        note: Why it cannot run.
    """

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    backend: Callable[[], str] = lambda: "torch"
    moved: int = 0
    keep: Optional[Callable[[], Any]] = None
    parameters: Sequence[Tensor] = ()
    held: int = 0
    note: str = ""


class Group(NamedTuple):
    """Candidates for the same work: the columns that their rows share, images in a step, and how to make them."""

    labels: Mapping[str, str]
    images: int
    build: Callable[[], list[Candidate]]


def bench(given: Mapping[str, Any], environment: Mapping[str, str], output: Path, command: str) -> int:
    """Measures, prints the tables, and writes `bench.csv` and `bench.svg`, of what is finished if Ctrl-C stops it.

    Args:
        given: Options that replace the defaults of the device: those of `DEFAULTS`, `device`, `quick`, `img_size`,
            `model_kwargs`, `skips`.
        environment: Versions and machine, as `timm-ortho env` prints them.
        output: Folder of the files.
        command: The command line, for the CSV.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        BenchError: Something that was given cannot be measured; nothing has been, then.
    """
    options = resolve(given)
    groups = [*operator_groups(options), *model_groups(options), *launch_groups(options)]
    machine = bench_report.machine(options.device, environment, command)
    _check_output(output)
    rows, status = [], 0
    try:
        # disable=None: no bar where the output is not a terminal
        with as_in_training(options.device), tqdm(groups, leave=False, disable=None) as bar:
            for group in bar:
                bar.set_description(" ".join(filter(None, group.labels.values())))
                torch.compiler.reset()  # groups share code, and its limit of recompilations
                gc.collect()  # the last group's models may be held by a cycle
                rows += [{**row, **machine} for row in _rows(group, options)]
    except KeyboardInterrupt:
        status = 130
    finally:
        if rows:
            bench_report.write(output, rows)
    print(f"{bench_report.tables(rows)}\n\nwritten: {output / 'bench.csv'}, {output / 'bench.svg'}" if rows
          else "no group was finished: nothing is written")
    return status


def _rows(group: Group, options: Namespace) -> list[bench_report.Row]:
    launch, threads = group.labels["what"] == "launch", torch.get_num_threads()
    torch.set_num_threads(1 if launch else threads)
    try:
        clock, repeats = Clock(options.device, flushes=not launch), options.repeats * (5 if launch else 1)
        results = measure(group.build(), repeats, clock, most_calls=2000 if launch else 50)
        return bench_report.rows(group.labels, group.images, results)
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------ what to measure
def resolve(given: Mapping[str, Any]) -> Namespace:
    """All options: those of `DEFAULTS` and `device`, with `shapes` as tuples and `models` as `Architecture`s.

    Raises:
        BenchError: An unknown name, a shape or number that is none, a device that is not there.
    """
    given = {key: value for key, value in given.items() if value is not None}
    quick, device = given.pop("quick", False), _device(given.pop("device", None))
    options = Namespace(**{**DEFAULTS[device.type], **(QUICK if quick else {}), **given}, device=device)
    skips = given.get("skips", ())
    _check_known("part", options.what, PARTS)
    _check_known("dtype", options.dtypes, DTYPES)
    _check_known("skip", skips, SKIPS)
    for name in ("repeats", "batch_size", "img_size"):
        if getattr(options, name, 1) < 1:
            raise BenchError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    options.shapes = [_shape(text) for text in options.shapes]
    if "models" in given or "batch_size" in given:
        options.models = dict.fromkeys(options.models, options.batch_size)
    short = SHORT if quick and "models" not in given else {}
    options.models = [
        _architecture(
            name, batch, given.get("img_size"), {**short.get(name, {}), **given.get("model_kwargs", {})}, skips)
        for name, batch in options.models.items() if "models" in options.what]
    return options


def _device(name: Optional[str]) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_known("device", [name.partition(":")[0]], DEFAULTS)
    try:
        device = torch.device(name)
        choose_backend(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))
    # no such device, or a backend that the environment asks for and that cannot run there
    except (AssertionError, RuntimeError, ValueError) as error:
        raise BenchError(f"--device {name}: {_first_line(error)}") from None
    return device


def _check_output(folder: Path) -> None:
    """That it can be written is known before the measurement; it is made afterwards, if there is something to write."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        reason = "is not writable" if there.is_dir() else "is a file"
        raise BenchError(f"--output {folder} cannot be written: {there} {reason}")


def _check_known(kind: str, names: Sequence[str], known: Any) -> None:
    try:
        for name in names:
            known_name(kind, name, known)
    except ValueError as error:
        raise BenchError(error) from None


def _shape(text: str) -> tuple[int, ...]:
    words = text.split("x")
    if len(words) not in (3, 4) or not all(word.isdecimal() and int(word) for word in words):
        raise BenchError(f"--shapes takes tokens as 16x197x384 or NCHW as 8x256x56x56, not '{text}'")
    return tuple(map(int, words))


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _architecture(
        name: str, batch: int, img_size: Optional[int], arguments: Mapping[str, Any], skips: Sequence[str] = (),
) -> Architecture:
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    base = name.removesuffix(suffix)
    if suffix == "_linear" or not timm.is_model(f"{base}_ortho"):
        near = difflib.get_close_matches(f"{base}_ortho", timm.list_models("*_ortho"), n=1)
        hint = f"; did you mean {near[0].removesuffix('_ortho')!r}?" if near else ""
        raise BenchError(f"no orthogonal variant {name!r}{hint}")
    cfg = timm.get_pretrained_cfg(f"{base}_ortho")
    if img_size and cfg.fixed_input_size:  # others take any size
        arguments = {"img_size": img_size, **arguments}
    try:
        with on_meta():
            model = timm.create_model(f"{base}_ortho", **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BenchError(f"{name} cannot be built with {dict(arguments)}: {_first_line(error)}") from None
    channels, height, width = cfg.input_size
    size = img_size or arguments.get("img_size")
    batch = (batch, arguments.get("in_chans", channels), size or height, size or width)
    layouts = ("nchw", "channels_last") if sites(model)[0].connection.dim == 1 else ("tokens",)
    return Architecture(base, [suffix] if suffix else ["_ortho", "_orthog"], arguments, batch, layouts, skips)


# -------------------------------------------------------------------------------------------------- the clock
class Clock:
    """Times a candidate on a device; if it flushes, a buffer larger than the last cache is written before each call."""

    def __init__(self, device: torch.device, flushes: bool = True) -> None:
        self.device = device
        self.buffer = torch.empty(flushes * FLUSHED_BYTES[device.type], dtype=torch.int8, device=device)

    def __call__(self, candidate: Candidate, calls: int) -> float:
        """Milliseconds of a call, the mean of `calls`."""
        marks = []
        for _ in range(calls):
            state = candidate.prepare()
            self.buffer.zero_()
            start = self._now()
            result = candidate.run(state)
            marks.append((start, self._now()))
            del state, result  # off the clock
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return sum(start.elapsed_time(end) for start, end in marks) / calls
        return 1e3 * sum(end - start for start, end in marks) / calls

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def as_in_training(device: torch.device) -> Iterator[None]:
    """cuDNN and TF32 on a GPU as timm's train.py sets them, for the time of the measurement."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.set_float32_matmul_precision(before[1])


def _attempt(result: Result, call: Callable[[], Any]) -> Any:
    """Calls, unless an earlier call failed. What a row states, missing memory or compiler, is noted, not raised."""
    if result.note:
        return None
    try:
        return call()
    except Exception as error:
        if not _is_stated(error):
            raise
        result.note = f"{type(error).__name__}: {_first_line(error)}"


def _is_stated(error: Exception) -> bool:
    """Whether it says that memory ran out, or that something could not be compiled here."""
    compilers = ("torch._dynamo.", "torch._inductor.", "triton.")
    messages = ("can't allocate memory", "Failed to find C compiler", "torch.compile", "Dynamo is not supported")
    return (isinstance(error, torch.cuda.OutOfMemoryError) or type(error).__module__.startswith(compilers)
            or (isinstance(error, RuntimeError) and any(message in str(error) for message in messages)))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # "backend='inductor' raised:" says nothing yet
    return text[:200]


def measure(candidates: Sequence[Candidate], repeats: int, clock: Clock, most_calls: int = 50) -> list[Result]:
    """Measures a group in turns: each candidate once in every repetition, forth and back, so that no place is favoured.

    Args:
        candidates: One that fails is noted, and the others go on without it.
        repeats: Repetitions.
        clock: Times a candidate.
        most_calls: In a sample, which takes about 10 ms.
    """
    pairs = [(candidate, Result(candidate.name, candidate.moved, note=candidate.note)) for candidate in candidates]
    for candidate, result in pairs:
        result.once = _attempt(result, partial(_once, candidate, clock, most_calls)) or {}
    for repetition in range(repeats):
        for candidate, result in reversed(pairs) if repetition % 2 else pairs:
            ms = _attempt(result, lambda c=candidate, r=result: clock(c, r.once["calls"]))
            result.ms += [] if ms is None else [ms]
    return [result for _, result in pairs]


def _once(candidate: Candidate, clock: Clock, most_calls: int) -> dict[str, Any]:
    once: dict[str, Any] = {"backend": candidate.backend()}
    clock(candidate, 1)  # compiles, and searches for the fastest convolution
    once["calls"] = max(1, min(most_calls, round(10 / max(clock(candidate, 1), 1e-3))))
    if clock.device.type == "cuda":
        once["peak_memory"] = _peak_memory(candidate, clock.device)
    if candidate.keep is not None:
        once["saved_bytes"] = saved_bytes(candidate.keep, candidate.parameters)
    return once


def _peak_memory(candidate: Candidate, device: torch.device) -> int:
    """Bytes that it holds, and that a call allocates at most; not what the other candidates hold at the same time."""
    candidate.prepare()  # frees the gradients of the call before
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    candidate.run(candidate.prepare())
    return candidate.held + torch.cuda.max_memory_allocated(device) - before


def saved_bytes(forward: Callable[[], Any], parameters: Sequence[Tensor] = ()) -> int:
    """Bytes that autograd keeps for the backward pass of `forward()`, each storage once, parameters left out."""
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # kept alive, or its address could be given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    del result
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile at the first call, so that its refusals come where the candidate's errors are caught."""
    @cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False)

    return lambda *args: compiled()(*args)


# --------------------------------------------------------------------------------------------- the operator
def appendix_update(x: Tensor, f: Tensor, dim: Optional[int], eps: float = EPS) -> Tensor:
    """The update as Appendix F of the paper computes it: sums in the dtype of x, the division in float32, f_orth apart.

    `dim` None flattens each sample first, which copies tensors that are channels-last.
    """
    u, v = (x.flatten(1), f.flatten(1)) if dim is None else (x, f)
    axis = 1 if dim is None else dim
    square = (u * u).sum(axis, keepdim=True).float() + eps
    s = ((u * v).sum(axis, keepdim=True) / square).to(x.dtype)
    if dim is None:
        s = s.reshape(-1, *[1] * (x.dim() - 1))
    return x + (f - s * x)


def operator_groups(options: Namespace) -> list[Group]:
    """A group for each shape, layout, precision, scope and step of the operator."""
    groups = []
    for shape in options.shapes if "operator" in options.what else ():
        layouts = ("tokens",) if len(shape) == 3 else ("nchw", "channels_last")
        for layout, dtype, scope, step in product(layouts, options.dtypes, options.scopes, STEPS):
            labels = dict(layout=layout, scope=scope, dtype=dtype, step=step)
            build = partial(_operator_candidates, options, shape, **labels)
            groups.append(Group({"what": "operator", "shape": _times(shape), **labels}, 0, build))
    return groups


def _operator_candidates(
        options: Namespace, shape: tuple[int, ...], layout: str, scope: str, dtype: str, step: str) -> list[Candidate]:
    x, f, g = _tensors(options.device, shape, layout, dtype, step)
    dim = None if scope == "global" else -1 if layout == "tokens" else 1
    plain = partial(plain_update, parallel=0.0, orthogonal=1.0, dims=None if dim is None else [dim], eps=EPS)

    def candidate(name: str, formula: Callable[[Tensor, Tensor], Tensor], **details: Any) -> Candidate:
        moved = (MOVED_BY_LINEAR if name == "linear" else TENSORS_MOVED)[step] * x.nbytes
        keep = partial(formula, x, f) if step == "both" else None
        return Candidate(name, *_timed(formula, x, f, g, step), moved=moved, keep=keep, held=3 * x.nbytes, **details)

    candidates = [candidate("linear", torch.add), candidate("plain", plain),
                  candidate("appendix", partial(appendix_update, dim=dim))]
    candidates += [candidate("compiled", _compiled(plain))] if options.compile else []
    for backend in ("torch", "inductor", "triton") if options.compile else ("torch", "triton"):
        update, can_run = partial(residual_update, dim=dim, eps=EPS, backend=backend), _can_run(x, f, backend)
        candidates.append(candidate(backend, update, **can_run))
        if options.compile and backend != "inductor":
            candidates.append(candidate(f"{backend}-compiled", _compiled(update), **can_run))
    return [*candidates, _copy(options)]


def _tensors(device: torch.device, shape: tuple[int, ...], layout: str, dtype: str, step: str) -> list[Tensor]:
    """Stream and branch output, with gradients if the step has a backward pass, and the sum's gradient."""
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x, f, g = (value.to(device, DTYPES[dtype], memory_format=memory_format) for value in values)
    return [x.requires_grad_(step != "forward"), f.requires_grad_(step != "forward"), g]


def _timed(formula: Callable, x: Tensor, f: Tensor, g: Tensor, step: str) -> tuple[Callable, Callable]:
    """What is timed, and what comes before the clock starts."""
    if step == "backward":
        return lambda y: torch.autograd.grad(y, (x, f), g), lambda: formula(x, f)
    if step == "forward":
        return lambda _: formula(x, f), lambda: None
    return lambda _: torch.autograd.grad(formula(x, f), (x, f), g), lambda: None


def _can_run(x: Tensor, f: Tensor, backend: str) -> dict[str, Any]:
    """`backend` of a candidate, or `note`, why it cannot run."""
    try:
        chosen = choose_backend(x, f, backend)
    except RuntimeError as error:
        return {"note": _first_line(error)}
    return {"backend": lambda: chosen}


def _copy(options: Namespace) -> Candidate:
    source, target = (torch.zeros(options.copy_bytes // 4, device=options.device) for _ in range(2))
    return Candidate("copy", lambda _: target.copy_(source), moved=2 * source.nbytes, held=2 * source.nbytes)


# ----------------------------------------------------------------------------------------------- the models
def model_groups(options: Namespace) -> list[Group]:
    """A group for each architecture, layout, precision, mode and step.

    The modes are eager with the default backend, eager with `inductor`, and the whole model under torch.compile.
    """
    modes = MODES if options.compile else MODES[:1]
    return [_model_group("models", options.device, one, *how) for one in options.models
            for how in product(one.layouts, options.dtypes, modes, MODEL_STEPS)]


def _model_group(
        what: str, device: torch.device, one: Architecture, layout: str, dtype: str, mode: str, step: str) -> Group:
    labels = dict(what=what, model=one.label, shape=_times(one.batch), layout=layout,
                  dtype=dtype if dtype == "float32" else f"amp {dtype}", mode=mode, step=step)
    return Group(labels, one.batch[0], partial(_model_candidates, one, device, layout, DTYPES[dtype], mode, step))


def _model_candidates(
        one: Architecture, device: torch.device, layout: str, dtype: torch.dtype, mode: str, step: str,
) -> list[Candidate]:
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    images = torch.randn(one.batch, generator=torch.Generator().manual_seed(0)).to(device, memory_format=memory_format)
    return [_model_candidate(name, model.to(device, memory_format=memory_format).train(step == "training"), images,
                             dtype, mode)
            for name, model in _twins(one).items()]


def _twins(architecture: Architecture) -> dict[str, nn.Module]:
    """The model with linear connections, then its variants or transforms of the stream; all with the same weights."""
    first, branches = architecture.suffixes[0], architecture.arguments.get("skip_branches")
    models = {"linear": connect(_seeded(architecture, first), "linear")}
    if architecture.appendix:
        models["appendix"] = connect(_seeded(architecture, first), "linear")
        for site in sites(models["appendix"]):
            site.connection.forward = lambda x, f, attn_mask=None: appendix_update(x, f, -1)
    for name in architecture.skips:
        models[name] = connect(_seeded(architecture, first), "linear", skip=name, skip_branches=branches)
    suffixes = () if architecture.skips else architecture.suffixes
    return {**models, **{suffix[1:]: _seeded(architecture, suffix) for suffix in suffixes}}


def _seeded(architecture: Architecture, suffix: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return timm.create_model(architecture.base + suffix, **architecture.arguments)


def _model_candidate(name: str, model: nn.Module, images: Tensor, dtype: torch.dtype, mode: str) -> Candidate:
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    forward = _compiled(model) if mode == "compiled" else model
    using = partial(use_backend, "inductor") if mode == "inductor" else nullcontext

    def logits() -> Tensor:
        autocast = torch.autocast(images.device.type, dtype) if dtype != torch.float32 else nullcontext()
        with autocast, using():
            return forward(images)

    def loss() -> Tensor:
        return cross_entropy(logits().float(), labels)

    def infer(_: None) -> Tensor:
        with torch.inference_mode():
            return logits()

    parameters = list(model.parameters())
    held = sum(tensor.nbytes for tensor in (*parameters, *model.buffers(), images, labels))
    ours = not isinstance(sites(model)[0].connection, LinearConnection)
    asks = partial(_chosen_backend, images.device, using, mode == "compiled", model.training)
    backend = asks if ours else lambda: "torch"
    if not model.training:
        return Candidate(name, infer, backend=backend, held=held)
    return Candidate(name, lambda _: loss().backward(), model.zero_grad, backend, keep=loss, parameters=parameters,
                     held=held)


def _chosen_backend(device: torch.device, using: Callable[[], Any], compiled: bool, training: bool) -> str:
    """The backend that is chosen for tensors like those at a model's connections."""
    choose = torch.compile(choose_backend, backend="eager", fullgraph=True) if compiled else choose_backend
    with torch.inference_mode(not training), using():
        x = torch.ones(1, 1, device=device, requires_grad=training)
        return choose(x, x)


# ------------------------------------------------------------------------------------------------ the launches
def launch_groups(options: Namespace) -> list[Group]:
    """A group for each step of the smallest tensors, then for each batch size and step of the small model."""
    if "launch" not in options.what:
        return []
    labels = dict(what="launch", shape=_times(TINY), layout="tokens", dtype="float32", mode="eager")
    tiny = [Group({**labels, "step": step}, 0, partial(_tiny_candidates, options.device, step)) for step in MODEL_STEPS]
    small = [_architecture("vit_small_ortho", batch, None, SMALL)._replace(appendix=True) for batch in SMALL_BATCHES]
    return tiny + [_model_group("launch", options.device, one, "tokens", "float32", "eager", step)
                   for one in small for step in MODEL_STEPS]


def _tiny_candidates(device: torch.device, step: str) -> list[Candidate]:
    of_operator = "both" if step == "training" else "forward"
    x, f, g = _tensors(device, TINY, "tokens", "float32", of_operator)
    updates = {"linear": torch.add, "appendix": partial(appendix_update, dim=-1), "ortho": FeatureConnection()}
    return [Candidate(name, *_timed(update, x, f, g, of_operator), partial(choose_backend, x, f))
            for name, update in updates.items()]
