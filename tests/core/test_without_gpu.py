"""The CUDA path without a GPU: torch's CUDA front end and Triton's launchers with a driver whose kernels do nothing.

These tests check launches, streams, devices, capture and memory. They run where the variable FAKE_CUDA is the path of
such a driver, see CONTRIBUTING.md. Results are not computed: test_parity.py compares them in Triton's interpreter.
"""
import ctypes
import functools
import os
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from timm_ortho import FeatureConnection
from timm_ortho.functional import residual_update, use_backend
from timm_ortho.update import backend as backends

FAKE = os.environ.get("FAKE_CUDA")
pytestmark = pytest.mark.skipif(
    not FAKE or not torch.cuda.is_available(), reason="needs the variable FAKE_CUDA, see CONTRIBUTING.md")
SHAPES = {"rows": ((2, 5, 384), -1), "columns": ((2, 64, 8, 8), 1), "long": ((2, 9000), None)}


def launches():
    count = ctypes.CDLL(FAKE).fake_launches
    count.restype = ctypes.c_longlong
    return count()


class Logged(ctypes.Structure):
    """A launch that the driver recorded."""

    _fields_ = [("name", ctypes.c_char_p), ("stream", ctypes.c_void_p), ("device", ctypes.c_int),
                ("count", ctypes.c_int), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint),
                ("values", ctypes.c_ulonglong * 48)]


def logged(call):
    """Return the kernel, device, stream, sizes and parameters of each launch of a call."""
    driver = ctypes.CDLL(FAKE)
    driver.fake_log_at.restype = ctypes.POINTER(Logged)
    driver.fake_log(1)
    call()
    driver.fake_log(0)
    entries = [driver.fake_log_at(i).contents for i in range(driver.fake_log_size())]
    return [(e.name, e.device, e.stream, tuple(e.grid), e.block, tuple(e.values[:e.count])) for e in entries]


def inputs(shape, device="cuda"):
    return [torch.zeros(shape, device=device, requires_grad=True) for _ in range(2)]


def step(kind, device="cuda"):
    shape, dim = SHAPES[kind]
    x, f = inputs(shape, device)
    y = residual_update(x, f, dim=dim, backend="triton")
    return torch.autograd.grad(y, (x, f), torch.zeros_like(y))


@pytest.mark.parametrize("kind", SHAPES)
def test_one_launch_in_each_direction_and_two_for_long_rows(kind):
    for _ in range(2):
        shape, dim = SHAPES[kind]
        x, f = inputs(shape)
        g = torch.zeros(shape, device="cuda")
        before = launches()
        y = residual_update(x, f, dim=dim, backend="triton")
        torch.autograd.grad(y, (x, f), g)
        assert launches() - before == (4 if kind == "long" else 2)


@pytest.mark.parametrize("kind", SHAPES)
def test_devices_streams_and_threads(kind):
    """A launch uses the device and the stream of its tensors, also if another device is current."""
    for _ in range(2):
        assert {grad.device.index for grad in step(kind, "cuda:1")} == {1}
    with torch.cuda.stream(torch.cuda.Stream()):
        step(kind)
    errors = []
    threads = [threading.Thread(target=lambda: errors.append(step(kind) is None)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [False, False]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns that this mode is a prototype
def test_the_test_of_the_kernels_waits_for_a_call_that_may_synchronise(monkeypatch):
    monkeypatch.setattr(backends, "_passed", {})
    backends.plans.clear()
    x, f = inputs((2, 5, 384))
    torch.cuda.set_sync_debug_mode("error")
    try:
        residual_update(x, f, backend="auto").backward(torch.zeros_like(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual_update(x, f, backend="auto")
    assert backends._passed == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the test may fail, because these kernels compute nothing
        residual_update(x, f, backend="auto")
    assert len(backends._passed) == 1


def test_inference_needs_only_the_memory_of_the_result():
    x, f = inputs((64, 256, 512))
    with torch.no_grad():
        residual_update(x, f, backend="triton")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        residual_update(x, f, backend="triton")
        assert torch.cuda.max_memory_allocated() - before == 4 * x.numel()


def test_out_of_memory_is_no_failure_of_the_kernels():
    x, f = inputs((64, 256, 512))
    residual_update(x, f, backend="triton")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-9)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            residual_update(x, f, backend="triton")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    residual_update(x, f, backend="triton")


# ------------------------------------------------------------------------------ the autograd function in C++
@pytest.mark.parametrize("kind", ["rows", "columns", "norm", "norm without parameters"])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_the_function_in_cpp_launches_kernels_as_python_does(kind, device):
    shape, dim = SHAPES.get(kind, SHAPES["rows"])
    x, f = (torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)
            for dtype in (torch.float32, torch.bfloat16))
    connection, norm = FeatureConnection(dim), nn.LayerNorm(384, elementwise_affine=kind == "norm").to(device)
    names, upstream = set(), torch.ones(shape, device=device)
    connection.eps = 0.37

    def step(cpp):
        torch.cuda.synchronize()
        with use_backend("triton", cpp=cpp):
            outputs = connection.with_norm(x, f, norm) if "norm" in kind else (connection(x, f),)
            names.add(type(outputs[0].grad_fn).__name__)
            grads = torch.autograd.grad(outputs, (x, f, *(norm.parameters() if "norm" in kind else ())),
                                        [upstream] * len(outputs))
        return [(t.shape, t.stride(), t.dtype, t.device) for t in (*outputs, *grads)]

    found = {cpp: (step(cpp), step(cpp), logged(lambda cpp=cpp: step(cpp)), step(cpp)) for cpp in (False, True)}
    assert names == {"KernelUpdateBackward", "CppFunction"}
    assert found[False] == found[True]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # raised in Dynamo
@pytest.mark.parametrize("with_norm", [False, True])
def test_the_function_in_cpp_leaves_everything_unusual_to_python(with_norm):
    """A second derivative, batched gradients, unaligned tensors, hooks, checkpoints, and compiled autograd."""
    x, f = inputs((2, 5, 384))
    connection, norm = FeatureConnection(), nn.LayerNorm(384).cuda()

    def run(x, f):
        return sum(connection.with_norm(x, f, norm)) if with_norm else 1.0 * connection(x, f)

    def results():
        y = run(x, f)
        first = torch.autograd.grad(y, (x, f), torch.zeros_like(y), create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), (x, f))
        y = run(x, f)
        batched = torch.autograd.grad(y, (x, f), torch.zeros(3, *y.shape, device="cuda"), is_grads_batched=True)
        odd = torch.zeros(2 * 5 * 384 + 1, device="cuda")[1:].view(2, 5, 384).requires_grad_()
        unaligned = torch.autograd.grad(run(odd, f), (odd, f), torch.zeros_like(y))
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            y = run(x, f)
        hooked = torch.autograd.grad(y, (x, f), torch.zeros_like(y).mT.contiguous().mT)
        y = checkpoint(run, x, f, use_reentrant=False)
        return [t.shape for t in (*first, *second, *batched, *unaligned, *hooked, *torch.autograd.grad(
            y, (x, f), torch.zeros_like(y)))]

    with use_backend("triton"):
        expected = results()
    with use_backend("triton", cpp=True):
        assert results() == results() == expected
        y = run(x, f)
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda y: y.backward(torch.zeros_like(y)), backend="eager")(y)
    assert x.grad.shape == x.shape


def test_without_a_compiler_there_is_one_warning_and_python_is_used(monkeypatch):
    from timm_ortho.update import node

    monkeypatch.setattr(node, "extension", functools.cache(node.extension.__wrapped__))
    monkeypatch.setattr("torch.utils.cpp_extension.load", lambda *args, **kwargs: 1 / 0)

    def steps():
        for shape in ((2, 7, 384), (1, 7, 384)):
            x, f = inputs(shape)
            for _ in range(3):
                residual_update(x, f).backward(torch.zeros_like(x))

    with use_backend("triton", cpp=True), pytest.warns(RuntimeWarning, match="It needs a C.. compiler") as caught:
        steps()
    assert len(caught) == 1
