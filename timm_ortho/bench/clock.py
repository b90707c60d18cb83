"""How candidates are timed: in turns, by a clock that flushes the cache, with what memory they take and keep.

A call is timed by CUDA events, on a CPU by its clock, after a buffer larger than the last cache has been written.
"""
import time
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .._compat import is_compiler_error
from .._text import error_text
from .report import Result

FLUSHED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # more than the last cache of most


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
        result.note = f"{type(error).__name__}: {error_text(error)}"


def _is_stated(error: Exception) -> bool:
    """Whether it says that memory ran out, or that something could not be compiled here."""
    messages = ("can't allocate memory", "Failed to find C compiler", "torch.compile", "Dynamo is not supported")
    return (isinstance(error, torch.cuda.OutOfMemoryError) or is_compiler_error(error)
            or (isinstance(error, RuntimeError) and any(message in str(error) for message in messages)))


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


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile at the first call, so that its refusals come where the candidate's errors are caught."""
    made = cache(lambda: torch.compile(function, fullgraph=True, dynamic=False))
    return lambda *args: made()(*args)
