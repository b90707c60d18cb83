"""bench/clock.py: order of measurements, timed intervals, memory, and errors that become notes in the results."""
import importlib
import random
from types import SimpleNamespace

import pytest
import torch

from timm_ortho.bench import clock as clock_module
from timm_ortho.bench.clock import Candidate, Clock, measure, saved_bytes
from timm_ortho.bench.results import rows


class FakeClock:
    """A mock clock that runs candidates and returns fixed times. `called` lists the names of the candidates it ran."""

    device = torch.device("cpu")

    def __init__(self, ms):
        self.ms = ms
        self.called = []

    def __call__(self, candidate, calls):
        self.called.append(candidate.name)
        candidate.run(candidate.prepare())
        return self.ms.get(candidate.name, 1.0)


@pytest.fixture
def clock():
    return FakeClock({})


def candidates(*names, **details):
    return [Candidate(name, lambda _: None, **details) for name in names]


def test_candidates_take_turns():
    clock = FakeClock(dict(linear=20.0, torch=20.0, triton=20.0))
    results = measure(candidates("linear", "torch", "triton"), 3, clock)
    warm_up = ["linear"] * 2 + ["torch"] * 2 + ["triton"] * 2
    assert clock.called == [*warm_up, *"linear torch triton triton torch linear linear torch triton".split()]
    assert [len(result.ms) for result in results] == [3, 3, 3]


@pytest.mark.parametrize(("ms", "calls"), [(100.0, 1), (5.0, 2), (0.001, 50)])
def test_a_short_call_is_repeated_within_a_sample(ms, calls):
    assert measure(candidates("linear"), 1, FakeClock({"linear": ms}))[0].once["calls"] == calls
    assert measure(candidates("linear"), 1, FakeClock({"linear": ms}), most_calls=1)[0].once["calls"] == 1


@pytest.mark.parametrize(("error", "when"), [
    (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), 1),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 4)])
def test_out_of_memory_becomes_a_note(clock, error, when):
    calls = []

    def fails(_):
        calls.append(1)
        if len(calls) >= when:
            raise error

    linear, failed = measure([*candidates("linear"), Candidate("torch", fails)], 3, clock)
    assert len(linear.ms) == 3
    assert len(calls) == when  # after the error, the candidate is not called again
    assert failed.note == f"{type(error).__name__}: {' '.join(str(error).split())}"
    assert rows({"step": "both"}, 0, [linear, failed])[1]["ms_p50"] is None


def test_other_errors_are_raised(clock):
    def broken(_):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        measure([Candidate("linear", broken)], 1, clock)


def test_torch_compile_without_a_compiler(clock):
    torch.compiler.reset()
    number = random.random()  # a new constant, for which torch has no cached code
    compiled = clock_module.compiled(lambda x: (x * number).sin())
    pair = [Candidate("linear", lambda _: None), Candidate("compiled", lambda _: compiled(torch.ones(3, 5)))]
    with importlib.import_module("torch._inductor.config").patch({"cpp.cxx": ("/nowhere/c++",)}):
        linear, failed = measure(pair, 1, clock)
    assert linear.note == ""
    assert "No working C++ compiler found" in failed.note
    torch.compiler.reset()


def test_preparation_is_not_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    candidate = Candidate("torch", lambda state: passes(2e-3), lambda: passes(5.0))
    assert Clock(torch.device("cpu"))(candidate, 3) == pytest.approx(2.0)


def test_cuda_clock(monkeypatch):
    """In each call, only the candidate's `run` is between the two mocked events that measure the time."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            assert log[-1] == "synchronize"
            return 4.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    clock = Clock(torch.device("cpu"), flushes=2)
    clock.device = torch.device("cuda")
    clock.buffer = SimpleNamespace(zero_=lambda: log.append("flush"))
    candidate = Candidate("torch", lambda state: log.append("run"), lambda: log.append("prepare"))
    assert clock(candidate, 2) == 4.0
    assert log == ["prepare", "flush", "flush", "event", "run", "event"] * 2 + ["synchronize"]


def test_peak_memory_excludes_other_candidates(monkeypatch):
    allocated = [1000]  # bytes of all tensors, including 200 bytes of the measured candidate
    peak = [0]

    def allocate(amount):
        allocated[0] += amount
        peak[0] = max(peak[0], allocated[0])

    def step(_):
        allocate(70)  # activations
        allocate(-70 + 30)  # gradients

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, allocated[0]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    allocate(30)  # gradients of the previous call, which the first `prepare` frees
    freed = iter([-30, 0])
    candidate = Candidate("ortho", step, lambda: allocate(next(freed)), held=200)
    assert clock_module._peak_memory(candidate, torch.device("cuda")) == 270


def test_saved_bytes():
    a, b = (torch.randn(4, 8, requires_grad=True) for _ in range(2))  # 4 * 8 float32 numbers are 128 bytes
    assert saved_bytes(lambda: a * b) == 2 * 128
    assert saved_bytes(lambda: a * b, [b]) == 128
    assert saved_bytes(lambda: a * a.t().t()) == 128  # both factors share a storage
    assert saved_bytes(lambda: a + b) == 0
    assert saved_bytes(lambda: (a * b) * (a + b)) == 4 * 128  # a, b, the product and the sum
