"""Time functions in turns, and measure their memory and the bytes that autograd saves for the backward pass.

Before each call, the cache is flushed by writing a buffer larger than most last-level caches. Calls are timed by CUDA
events on a GPU and by the performance counter on a CPU. A GPU writes the buffer `BUSY` times before a call of the part
`operator`. This takes longer than Python needs to issue the call, so that the time between the events is the time of
the kernels alone.
"""
import time
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .._compat import is_compiler_error
from .._text import error_text
from .results import Result

FLUSHED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # more than most last-level caches
BUSY = 20  # one write of the buffer takes about 75 us on an H200


class Candidate(NamedTuple):
    """A function to time. Each call is `run(prepare())`; only `run` is timed."""

    name: str  # in the tables; `linear` is the baseline
    run: Callable[[Any], Any]  # receives the result of `prepare`
    prepare: Callable[[], Any] = lambda: None  # called before each `run`
    backend: str = "torch"  # name of the backend that runs
    moved: int = 0  # bytes that a call must read and write; 0 if it moves none, or if they are not counted (models)
    keep: Optional[Callable[[], Any]] = None  # forward pass with gradients, to measure the bytes saved for backward
    parameters: Sequence[Tensor] = ()  # tensors to exclude from the saved bytes
    held: int = 0  # bytes of inputs, parameters and buffers
    note: str = ""  # the reason why the candidate cannot run, empty if it can


class Group(NamedTuple):
    """Candidates that do the same work."""

    labels: Mapping[str, str]  # the columns of `bench.csv` in which all candidates agree
    images: int  # per step; 0 for an operator
    build: Callable[[], list[Candidate]]  # creates the candidates


class Clock:
    """Time candidates on a device.

    Args:
        device: CPU or CUDA device.
        flushes: How often to flush the cache before each call.

    >>> clock = Clock(torch.device("cpu"), flushes=0)
    >>> clock(Candidate("linear", lambda _: sum(range(100))), calls=2) > 0  # milliseconds
    True
    """

    def __init__(self, device: torch.device, flushes: int = 1) -> None:
        self.device, self.flushes = device, flushes
        self.buffer = torch.empty(FLUSHED_BYTES[device.type] if flushes else 0, dtype=torch.int8, device=device)

    def __call__(self, candidate: Candidate, calls: int) -> float:
        """Return the milliseconds of one call, averaged over `calls`."""
        marks = []
        for _ in range(calls):
            state = candidate.prepare()
            for _ in range(self.flushes):
                self.buffer.zero_()
            start = self._now()
            result = candidate.run(state)
            marks.append((start, self._now()))
            del state, result  # frees memory outside the timed interval
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
    """Set cuDNN and TF32 as timm's train.py does, and restore the settings at the end. No effect on a CPU.

    >>> with as_in_training(torch.device("cpu")):
    ...     pass
    """
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
    """Return `call()`, or None if `result` has a note. An out-of-memory or compiler error becomes the note."""
    if result.note:
        return None
    try:
        return call()
    except Exception as error:
        if not _is_noted(error):
            raise
        result.note = error_text(error, named=True)


def _is_noted(error: Exception) -> bool:
    """Return whether the error is an out-of-memory error or a compiler error."""
    messages = ("can't allocate memory", "Failed to find C compiler", "torch.compile", "Dynamo is not supported")
    return (isinstance(error, torch.cuda.OutOfMemoryError) or is_compiler_error(error)
            or (isinstance(error, RuntimeError) and any(message in str(error) for message in messages)))


def measure(candidates: Sequence[Candidate], repeats: int, clock: Clock, most_calls: int = 50) -> list[Result]:
    """Measure a group in turns, each candidate once per repetition. Every other repetition runs in reverse order.

    Args:
        candidates: The group. If a candidate runs out of memory or cannot be compiled, its result contains a note, and
            the remaining candidates are measured.
        repeats: Number of repetitions.
        clock: Times a candidate.
        most_calls: Maximum number of calls in one repetition. A fast candidate is called repeatedly for about 10 ms.

    Returns:
        One result for each candidate.

    >>> candidates = [Candidate("linear", lambda _: sum(range(100)))]
    >>> result, = measure(candidates, 3, Clock(torch.device("cpu"), flushes=0))
    >>> result.name, len(result.ms)
    ('linear', 3)
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
    once: dict[str, Any] = {"backend": candidate.backend}
    clock(candidate, 1)  # warm-up: compiles and lets cuDNN choose its convolution
    once["calls"] = max(1, min(most_calls, round(10 / max(clock(candidate, 1), 1e-3))))
    if clock.device.type == "cuda":
        once["peak_memory"] = _peak_memory(candidate, clock.device)
    if candidate.keep is not None:
        once["saved_bytes"] = saved_bytes(candidate.keep, candidate.parameters)
    return once


def _peak_memory(candidate: Candidate, device: torch.device) -> int:
    """Return the bytes of a candidate's own tensors plus the most that a call allocates at any time."""
    candidate.prepare()  # frees the gradients of the previous call
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    candidate.run(candidate.prepare())
    return candidate.held + torch.cuda.max_memory_allocated(device) - before


def saved_bytes(forward: Callable[[], Any], parameters: Sequence[Tensor] = ()) -> int:
    """Return the bytes that autograd saves for the backward pass of `forward()`.

    Parameters do not count. Tensors that share a storage count once.

    >>> x = torch.ones(4, requires_grad=True)
    >>> saved_bytes(lambda: x * x), saved_bytes(lambda: x + x)
    (16, 0)
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[id(storage)] = storage  # keeps the storage alive, so that its id is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    own = {id(parameter.untyped_storage()) for parameter in parameters}
    del result
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles `function` at its first call, where `measure` catches compiler errors."""
    compile_once = cache(lambda: torch.compile(function, fullgraph=True, dynamic=False))
    return lambda *args: compile_once()(*args)
