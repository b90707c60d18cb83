"""The update under torch.compile, and kernels compiled by ptxas without a GPU."""
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.kernel_cases import EPS, LAYOUTS, inputs_with_gradients, needs_triton, tensors, weight
from helpers.parity import results
from torch._dynamo.testing import EagerAndRecordGraphs

from timm_ortho.functional import residual_update, use_backend

pytestmark = pytest.mark.usefixtures("no_default_backend")


# ---------------------------------------------------------------------------------------------- torch.compile
COMPILED = {  # layout, memory format, weights, keep
    "rows": ("row", torch.contiguous_format, (0.0, 1.0), "output"),
    "branch kept": ("row", torch.contiguous_format, (0.0, 1.0), "branch"),
    "learned": ("row", torch.contiguous_format, ("a", "b"), "output"),
    "one learned": ("column", torch.contiguous_format, ("a", 1.0), "output"),
    "channels-last": ("column", torch.channels_last, (0.0, 1.0), "output"),
    "cut rows": ("cut row", torch.contiguous_format, (0.3, 0.7), "output"),
}


@pytest.mark.parametrize(("backend", "compiler", "case"), [
    *(("torch", "aot_eager", case) for case in COMPILED),
    pytest.param("triton", "aot_eager", "rows", marks=needs_triton),
    *(pytest.param("torch", "inductor", case, marks=pytest.mark.slow) for case in ("rows", "learned", "channels-last")),
])
def test_compiled_code_matches_eager_mode(backend, compiler, case):
    """The compiled code has plain operations with both backends."""
    layout, memory_format, weights, keep = COMPILED[case]
    shape, dim = LAYOUTS[layout]
    x, f, g = (t.contiguous(memory_format=memory_format) for t in tensors(shape))
    inputs = dict(x=x, f=f, **{w: weight(w) for w in weights if isinstance(w, str)})

    def update(x, f, a=weights[0], b=weights[1]):
        return residual_update(x, f, parallel=a, orthogonal=b, dim=dim, eps=EPS, keep=keep, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(update, fullgraph=True, backend=compiler)
    torch.testing.assert_close(results(compiled, inputs, list(inputs), g), results(update, inputs, list(inputs), g))
    y = compiled(x, f, *list(inputs.values())[2:])
    assert y.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(y, update(x, f, *list(inputs.values())[2:]))


@pytest.mark.parametrize("requested_kernels", ["auto", pytest.param("triton", marks=needs_triton)])
def test_compiled_graphs_contain_plain_operations(calls, requested_kernels):
    torch._dynamo.reset()
    recorder = EagerAndRecordGraphs()
    with use_backend(requested_kernels):
        torch.compile(residual_update, fullgraph=True, backend=recorder)(*inputs_with_gradients())
    graph, = recorder.graphs
    assert "timm_ortho" not in str(graph.graph)
    assert calls == {}


def test_compiled_once_for_all_batch_sizes():
    torch._dynamo.reset()
    recorder = EagerAndRecordGraphs()
    compiled = torch.compile(functools.partial(residual_update, eps=EPS), fullgraph=True, backend=recorder)
    for batch in (3, 5, 8):
        x, f, g = tensors((batch, 4, 33))
        for t in (x, f):
            torch._dynamo.mark_dynamic(t, 0)
        inputs = dict(x=x.requires_grad_(), f=f.requires_grad_())
        y = compiled(**inputs)
        expected = results(functools.partial(residual_update, eps=EPS, backend="torch"), inputs, "xf", g)
        torch.testing.assert_close([y, *torch.autograd.grad(y, (x, f), g)], list(expected.values()))
    assert len(recorder.graphs) == 1


# --------------------------------------------------------------------------------------- compiled ahead of time
# Bytes that kernels access at once, for some keys of SIZES in helpers/compiled_kernels.py. 1000 channels and 196 pixels
# are multiples of 8 and 4 elements.
ALIGNED = {"tokens": 16, "tokens in float32": 16, "odd tokens": 16, "longest row": 16, "channels": 16,
           "channels in float32": 16, "global": 16, "1024 channels": 8}


@pytest.fixture(scope="module")
def compiled_kernels(tmp_path_factory):
    """Return the rows that helpers/compiled_kernels.py prints for compute capabilities 8.0, 9.0 and 10.0."""
    triton = pytest.importorskip("triton")
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists():
        pytest.skip("the installed Triton has no cuobjdump")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "helpers" / "compiled_kernels.py", "80", "90", "100"],
        env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_compiled_kernels_fit_the_registers(compiled_kernels):
    """Kernels spill at most 32 bytes. The number of registers depends on Triton."""
    assert {row["arch"] for row in compiled_kernels} == {80, 90, 100}
    assert [row for row in compiled_kernels if row["stack"] > 32 or row["local"]] == []


STREAMS = {  # number of stream-sized tensors that each kernel reads and writes
    "forward": dict(loads=2, stores=1), "backward": dict(loads=3, stores=2),
    "sums": dict(loads=2),
    "norm forward": dict(loads=2, stores=2), "norm backward": dict(loads=4, stores=2),
}


@pytest.mark.slow
def test_compiled_kernels_access_16_bytes_at_once(compiled_kernels):
    rows = [row for row in compiled_kernels if row["size"] in ALIGNED]
    assert {row["size"] for row in rows} == {*ALIGNED}
    for row in rows:
        half = row["kernel"] == "norm backward" and "float32" not in row["size"]  # four elements per thread: 8 bytes
        at_once = 8 if half else ALIGNED[row["size"]]
        for name, streams in STREAMS[row["kernel"]].items():
            assert row[name].get(str(at_once), 0) >= streams, row
            assert set(row[name]) <= {"16", str(at_once), "4"}, row
            # The small tensors (s, n = |x|^2 + eps, the partial sums and the weights) take 10 accesses of 4 bytes in
            # Triton 3.8, and 6 in other releases. A stream-sized tensor in accesses of 4 bytes would add at least 8.
            assert row[name].get("4", 0) <= 12, row
