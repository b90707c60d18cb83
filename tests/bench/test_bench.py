"""`timm-ortho bench`: its statistics on known numbers, the order of measurements, what it writes, what it refuses."""
import csv
import gc
import importlib.util
import io
import random
import subprocess
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import readme_bench
import timm
import torch
from torch import nn

from timm_ortho import FeatureConnection, backends, bench, cli, sites
from timm_ortho.bench import (
    clock as bench_clock,
    launch,
    models,
    operator,
    options as bench_options,
    report as bench_report,
)
from timm_ortho.bench.clock import Candidate, measure, saved_bytes
from timm_ortho.bench.report import COLUMNS, Result
from timm_ortho.functional import plain_update
from timm_ortho.runs import provenance
from timm_ortho.runs.provenance import commit_of

ROOT = Path(__file__).parents[2]
FORMULAS = ["linear", "plain", "appendix", "compiled", "torch", "torch-compiled", "inductor", "triton", "copy"]
# as torch.compile traces and differentiates, without the minute that its code generator takes
TRACED = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
TINY_VIT = ["--models", "vit_small", "--img-size", "32", "--model-kwargs", "depth=1", "embed_dim=32", "num_heads=2"]


def read(folder):
    with open(folder / "bench.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run(folder, *arguments):
    assert cli.main(["bench", "--device", "cpu", "--output", str(folder), *arguments]) == 0
    return read(folder)


@pytest.fixture(autouse=True, scope="module")
def small():
    """A copy, a flushed buffer and a collection of garbage before each group that cost nothing, and no answer from
    whoever set the backend's variable."""
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for defaults in (bench_options.DEFAULTS["cpu"], bench_options.QUICK):
            patch.setitem(defaults, "copy_bytes", 1 << 20)
        patch.setattr(bench_clock, "FLUSHED_BYTES", dict.fromkeys(bench_clock.FLUSHED_BYTES, 1 << 10))
        for name in ("TIMM_ORTHO_BACKEND", "TRITON_INTERPRET"):
            patch.delenv(name, raising=False)
        yield
    gc.unfreeze()


@pytest.fixture
def clock():
    return FakeClock({})


class FakeClock:
    """Runs a candidate for nothing and says what it was told to; remembers who was called when."""

    device = torch.device("cpu")

    def __init__(self, ms):
        self.ms = ms
        self.called = []

    def __call__(self, candidate, calls):
        self.called.append(candidate.name)
        candidate.run(candidate.prepare())
        return self.ms.get(candidate.name, 1.0)


# ------------------------------------------------------------------------------------------- statistics
def group(**candidates):
    """Rows by name, from the milliseconds of each repetition."""
    results = [Result(name, moved=6_000_000, ms=ms) for name, ms in candidates.items()]
    rows = bench_report.rows({"what": "operator", "step": "both"}, 8, results)
    return {row["candidate"]: row for row in rows}


def test_quantiles():
    assert bench_report.quantiles([11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == [3, 6, 9]
    assert bench_report.quantiles([5.0]) == [5, 5, 5]


def test_ratios_are_taken_within_a_repetition():
    # the machine is up to ten times slower at times; the candidate takes twice as long throughout
    rows = group(linear=[1.0, 10.0, 2.0, 5.0], torch=[2.0, 20.0, 4.0, 10.0])
    assert [rows["torch"][f"ratio_{q}"] for q in ("p20", "p50", "p80")] == [2.0, 2.0, 2.0]
    assert [rows["linear"][f"ratio_{q}"] for q in ("p20", "p50", "p80")] == [1.0, 1.0, 1.0]
    # the ratio of the medians would be 3, the median of the ratios is 1.5
    assert group(linear=[1.0, 2.0, 10.0], torch=[9.0, 3.0, 6.0])["torch"]["ratio_p50"] == 1.5


def test_figures():
    row = group(linear=[2.0, 2.0], appendix=[8.0, 8.0], torch=[3.0, 3.0], copy=[1.5, 1.5])["torch"]
    assert (row["ms_p50"], row["repeats"]) == (3.0, 2)
    assert row["appendix_ratio_p50"] == pytest.approx(0.375)
    assert row["gb_per_s"] == pytest.approx(2.0)  # 6 MB in 3 ms
    assert row["share_of_copy"] == pytest.approx(0.5)
    assert row["images_per_s"] == pytest.approx(8 / 3e-3)
    assert row["baseline"] == "linear"


def test_memory_is_related_to_the_linear_twin():
    results = [Result("linear", once={"peak_memory": 100, "saved_bytes": 40}, ms=[1.0]),
               Result("ortho", once={"peak_memory": 110, "saved_bytes": 50}, ms=[1.0])]
    row = bench_report.rows({"what": "models", "step": "training"}, 1, results)[1]
    assert (row["peak_ratio"], row["saved_ratio"]) == (1.1, 1.25)


def test_what_failed_is_not_measured_and_what_does_not_apply_is_empty():
    results = [Result("linear", ms=[1.0]), Result("appendix", ms=[2.0]), Result("torch", ms=[], note="no memory")]
    linear, appendix, torch_row = bench_report.rows({"what": "operator", "step": "backward"}, 0, results)
    assert all(torch_row[figure] is None for figure in bench_report.FIGURES)
    assert torch_row["note"] == "no memory"
    assert appendix["ratio_p50"] == ""  # a linear addition has no backward pass to compare with
    assert linear["peak_memory"] is None
    assert linear["images_per_s"] == linear["gb_per_s"] == ""
    results[0].note = "no memory either"
    appendix = bench_report.rows({"what": "operator", "step": "both"}, 0, results)[1]
    assert (appendix["ms_p50"], appendix["ratio_p50"]) == (2.0, None)


# --------------------------------------------------------------------------------------------- measuring
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


@pytest.mark.parametrize("error", [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
])
@pytest.mark.parametrize("when", [1, 4])
def test_an_error_that_a_row_states(clock, error, when):
    calls = []

    def fails(_):
        calls.append(1)
        if len(calls) >= when:
            raise error

    pair = [Candidate("linear", lambda _: None), Candidate("torch", fails)]
    linear, failed = measure(pair, 3, clock)
    assert len(linear.ms) == 3
    assert len(calls) == when  # not tried again
    assert failed.note == f"{type(error).__name__}: {' '.join(str(error).split())}"
    row = bench_report.rows({"step": "both"}, 0, [linear, failed])[1]
    assert row["ms_p50"] is None


def test_other_errors_are_no_rows(clock):
    def broken(_):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        measure([Candidate("linear", broken)], 1, clock)


def test_torch_compile_without_a_compiler(clock):
    torch.compiler.reset()
    number = random.random()  # that no earlier run's compiled code has
    compiled = bench_clock.compiled(lambda x: (x * number).sin())
    pair = [Candidate("linear", lambda _: None), Candidate("compiled", lambda _: compiled(torch.ones(3, 5)))]
    with importlib.import_module("torch._inductor.config").patch({"cpp.cxx": ("/nowhere/c++",)}):
        linear, failed = measure(pair, 1, clock)
    assert linear.note == ""
    assert "No working C++ compiler found" in failed.note
    torch.compiler.reset()


def test_what_comes_before_the_clock_is_not_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bench_clock.time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    candidate = Candidate("torch", lambda state: passes(2e-3), lambda: passes(5.0))
    assert bench.Clock(torch.device("cpu"))(candidate, 3) == pytest.approx(2.0)


def test_cuda_clock(monkeypatch):
    """What stands between the two events of a call, without a GPU."""
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
    clock = bench.Clock(torch.device("cpu"))
    clock.device = torch.device("cuda")
    clock.buffer = SimpleNamespace(zero_=lambda: log.append("flush"))
    candidate = Candidate("torch", lambda state: log.append("run"), lambda: log.append("prepare"))
    assert clock(candidate, 2) == 4.0
    assert log == ["prepare", "flush", "event", "run", "event"] * 2 + ["synchronize"]


def test_peak_memory_leaves_out_what_others_hold(monkeypatch):
    allocated = [1000]  # bytes of the other candidates
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
    allocate(30)  # gradients of the call before
    freed = iter([-30, 0])
    candidate = Candidate("ortho", step, lambda: allocate(next(freed)), held=200)
    assert bench_clock._peak_memory(candidate, torch.device("cuda")) == 270


def test_saved_bytes():
    a, b = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    assert saved_bytes(lambda: a * b) == 2 * 128
    assert saved_bytes(lambda: a * b, [b]) == 128
    assert saved_bytes(lambda: a * a.t().t()) == 128  # one storage
    assert saved_bytes(lambda: a + b) == 0
    assert saved_bytes(lambda: (a * b) * (a + b)) == 4 * 128  # the product and the sum as well


@pytest.mark.parametrize("dim", [-1, 1, None])
def test_the_appendix_is_the_same_update(dim):
    x, f = (torch.randn(3, 5, 4, 6, dtype=torch.float64) for _ in range(2))
    expected = plain_update(x, f, 0.0, 1.0, None if dim is None else [dim], operator.EPS)
    torch.testing.assert_close(operator.appendix_update(x, f, dim), expected, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------- the operator
@pytest.fixture(scope="module")
def operator_run(tmp_path_factory):
    folder, said = tmp_path_factory.mktemp("operator"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(operator, "compiled", TRACED)
        rows = run(folder, "--quick", "--what", "operator", "--shapes", "2x5x16", "--repeats", "4")
    return folder, rows, said.getvalue()


def test_operator_rows(operator_run):
    _, rows, _ = operator_run
    assert list(rows[0]) == list(COLUMNS)
    assert [(row["step"], row["candidate"]) for row in rows] == [
        (step, name) for step in ("forward", "backward", "both") for name in FORMULAS]
    for row in rows:
        assert (row["what"], row["shape"], row["layout"], row["dtype"], row["scope"]) == (
            "operator", "2x5x16", "tokens", "float32", "feature")
        for name in ("ms", "ratio", "appendix_ratio"):
            quantiles = [row[f"{name}_{q}"] for q in ("p20", "p50", "p80")]
            assert all(quantiles) or not any(quantiles)
            if all(quantiles):
                assert 0 < float(quantiles[0]) <= float(quantiles[1]) <= float(quantiles[2])


def test_operator_figures(operator_run):
    by = {(row["step"], row["candidate"]): row for row in operator_run[1]}
    assert float(by["forward", "linear"]["ratio_p50"]) == 1.0
    for step, tensors in (("forward", 3), ("backward", 5), ("both", 8)):
        row = by[step, "torch"]
        assert float(row["gb_per_s"]) == pytest.approx(tensors * 640 / float(row["ms_p50"]) / 1e6, rel=1e-4)
        assert float(row["share_of_copy"]) < 1
        assert bool(row["ratio_p50"]) == (step != "backward")
        assert row["backend"] == "torch"
        assert by[step, "inductor"]["backend"] == "inductor"
        assert float(by[step, "appendix"]["appendix_ratio_p50"]) == 1.0
        copy = by[step, "copy"]
        assert float(copy["share_of_copy"]) == 1.0
        assert float(copy["gb_per_s"]) == pytest.approx(2 * 2**20 / float(copy["ms_p50"]) / 1e6, rel=1e-4)
    assert by["backward", "linear"]["gb_per_s"] == ""
    assert by["both", "linear"]["saved_bytes"] == "0"
    # the update keeps x and y and two numbers a token, the plain formula x and f and more
    assert 2 * 640 <= int(by["both", "torch"]["saved_bytes"]) <= 2 * 640 + 2 * 64  # storages are padded to 64 bytes
    assert int(by["both", "plain"]["saved_bytes"]) > 2 * 640


def test_a_backend_that_cannot_run_says_why(operator_run):
    for row in operator_run[1]:
        if row["candidate"].startswith("triton"):
            assert row["note"]
            assert not any(row[figure] for figure in bench_report.FIGURES)
        else:
            assert row["note"] == ""


def test_machine_columns(operator_run):
    folder, rows, _ = operator_run
    row = rows[0]
    assert row["command"] == (f"timm-ortho bench --device cpu --output {folder} --quick --what operator "
                              "--shapes 2x5x16 --repeats 4")
    assert (row["device"], row["threads"]) == ("cpu", str(torch.get_num_threads()))
    assert (row["torch"], row["timm"]) == (provenance.environment()["torch"], timm.__version__)
    assert all(row[name] for name in ("cpu", "python", "system", "date", "timm_ortho", "triton"))
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        assert row["commit"] in (head, f"{head}-dirty")


def test_no_commit_outside_a_checkout():
    assert commit_of(ROOT / "timm_ortho") == ""  # though a folder further up has one


def test_plot(operator_run):
    folder, *_ = operator_run
    text = (folder / "bench.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for name in ("plain", "torch-compiled", "2x5x16 tokens feature float32 both"):
        assert f"<!-- {name} -->" in text
    assert "float32 backward -->" not in text
    assert sorted(path.name for path in folder.iterdir()) == ["bench.csv", "bench.svg"]


def test_convolutional_shapes_have_two_layouts_and_both_scopes():
    options = bench.resolve(dict(what=["operator"], shapes=["2x3x4", "2x3x4x4"], device="cpu", dtypes=["bfloat16"]))
    labels = [one.labels for one in operator.operator_groups(options)]
    assert [(one["layout"], one["scope"]) for one in labels if one["step"] == "both"] == [
        (layout, scope) for layout in ("tokens", "nchw", "channels_last") for scope in ("feature", "global")]
    assert bench.model_groups(options) == []


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_the_operators_tensors(layout, monkeypatch):
    seen = []
    monkeypatch.setattr(operator, "plain_update", lambda x, f, dims, **_: seen.append((x, f, dims)) or x + f)
    options = bench.resolve(dict(what=["operator"], device="cpu", compile=False))
    built = operator._operator_candidates(options, (2, 3, 4, 5), layout, "feature", "bfloat16", "both")
    plain = next(one for one in built if one.name == "plain")
    plain.run(plain.prepare())
    (x, f, dims), = seen
    assert dims == [1]
    assert x.dtype == f.dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=torch.channels_last) == (layout == "channels_last")
    assert not torch.equal(x, f)
    assert [one.name for one in built] == ["linear", "plain", "appendix", "torch", "triton", "copy"]


def test_what_is_timed_of_the_operator():
    def timed(step):
        tensors = operator.tensors(torch.device("cpu"), (2, 3), "tokens", "float32", step)
        return *tensors, *operator.timed(torch.mul, *tensors, step)

    x, f, _, run, prepare = timed("forward")
    assert prepare() is None
    assert torch.equal(run(None), x * f)
    assert not run(None).requires_grad
    for step in ("backward", "both"):
        x, f, g, run, prepare = timed(step)
        state = prepare()
        assert (state is not None) == (step == "backward")
        assert all(map(torch.equal, run(state), (f * g, x * g)))
        assert x.grad is None


# --------------------------------------------------------------------------------------------- the models
@pytest.fixture(scope="module")
def model_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return folder, run(folder, "--what", "models", *TINY_VIT, "--no-compile", "--dtypes", "float32", "bfloat16",
                       "--batch-size", "3", "--repeats", "3")


def test_model_rows(model_run):
    _, rows = model_run
    assert [(row["dtype"], row["mode"], row["step"], row["candidate"]) for row in rows] == [
        (dtype, "eager", step, name) for dtype in ("float32", "amp bfloat16") for step in ("training", "inference")
        for name in ("linear", "ortho", "orthog")]
    for row in rows:
        assert row["model"] == "vit_small(img_size=32, depth=1, embed_dim=32, num_heads=2)"
        assert (row["shape"], row["layout"], row["backend"], row["baseline"]) == ("3x3x32x32", "tokens", "torch",
                                                                                 "linear")
        assert float(row["ratio_p20"]) <= float(row["ratio_p50"]) <= float(row["ratio_p80"])
        assert float(row["images_per_s"]) == pytest.approx(3e3 / float(row["ms_p50"]), rel=1e-4)
        assert row["peak_memory"] == row["gb_per_s"] == row["note"] == ""


def test_saved_bytes_of_models(model_run):
    by = {(row["dtype"], row["step"], row["candidate"]): row for row in model_run[1]}
    linear, ortho = (int(by["float32", "training", name]["saved_bytes"]) for name in ("linear", "ortho"))
    assert 0 < linear <= ortho
    assert float(by["float32", "training", "ortho"]["saved_ratio"]) == pytest.approx(ortho / linear, rel=1e-4)
    assert by["float32", "inference", "ortho"]["saved_bytes"] == ""
    assert int(by["amp bfloat16", "training", "linear"]["saved_bytes"]) != linear


def architecture(name="vit_small_ortho"):
    return bench_options.architecture(name, 2, None, dict(img_size=32, depth=1, embed_dim=32, num_heads=2))


def built(step, one=None, layout="tokens", dtype=torch.float32, mode="eager"):
    return models._model_candidates(one or architecture(), torch.device("cpu"), layout, dtype, mode, step)


@pytest.mark.usefixtures("undrawn")
def test_transforms_of_the_stream_are_measured_against_the_identity(tmp_path):
    rows = run(tmp_path, "--what", "models", "--models", "skipnet_20_branch4_ortho", "--model-kwargs", "layers=[1,1,1]",
               "--skips", "orthogonal_tp", "scaled", "--no-compile", "--repeats", "1", "-b", "2")
    assert {row["candidate"] for row in rows} == {"linear", "orthogonal_tp", "scaled"}
    assert all(float(row["ratio_p50"]) > 0 for row in rows)
    twins = models._twins(bench_options.architecture("skipnet_20", 2, None, {"layers": (1, 1, 1)}, ["idempotent_mr"]))
    found = {name: [site.connection.skip for site in sites(model)] for name, model in twins.items()}
    assert set(found) == {"linear", "idempotent_mr"}
    assert set(found["linear"]) == {None}
    assert {skip.name for skip in found["idempotent_mr"]} == {"idempotent_mr"}
    same_weights(twins)


def test_transforms_have_the_branches_of_the_network():
    """As many as a variant of it with this transform has, unless they are given."""
    for given, branches in (({}, 4), ({"skip_branches": 8}, 8)):
        one = bench_options.architecture(
            "skipnet_20_branch4", 2, None, {"layers": (1, 1, 1), **given}, ["idempotent_mr"])
        skips = [site.connection.skip for site in sites(models._twins(one)["idempotent_mr"])]
        assert {skip.branches for skip in skips} == {branches}


def test_twins_differ_in_their_connections_only():
    twins = models._twins(architecture("vit_small"))
    assert list(twins) == ["linear", "ortho", "orthog"]
    kinds = [{type(site.connection).__name__ for site in sites(model)} for model in twins.values()]
    assert kinds == [{"LinearConnection"}, {"FeatureConnection"}, {"GlobalConnection"}]
    same_weights(twins)


def same_weights(twins):
    first, *others = (model.state_dict() for model in twins.values())
    for state in others:
        assert state.keys() == first.keys()
        assert all(torch.equal(value, first[key]) for key, value in state.items())


def test_a_training_step_is_forward_loss_and_backward():
    for one in built("training") * 2:  # the gradients of a call before are gone
        state = one.prepare()
        assert all(parameter.grad is None for parameter in one.parameters)
        one.run(state)
        assert any(parameter.grad.abs().sum() > 0 for parameter in one.parameters)
        assert one.held > sum(parameter.nbytes for parameter in one.parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_keeps_no_graph_and_autocasts(dtype):
    for one in built("inference", dtype=dtype):
        result = one.run(one.prepare())
        assert result.is_inference()
        assert result.dtype == dtype
        assert one.keep is None


def test_layouts_of_convolutional_models():
    one = bench_options.architecture("resnetv2_18_cifar_orthog", 2, 16, dict(layers=(1,)))
    assert (one.base, one.suffixes, one.batch) == ("resnetv2_18_cifar", ["_orthog"], (2, 3, 16, 16))
    assert one.layouts == ("nchw", "channels_last")
    for layout in one.layouts:
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Conv2d, "forward", watched(nn.Conv2d.forward, seen))
            built("inference", one, layout)[1].run(None)
        assert all(x.is_contiguous(memory_format=torch.channels_last) == (layout == "channels_last") for x in seen)


def watched(forward, seen):
    def call(self, x):
        if min(x.shape[1:]) > 1:  # where both layouts are the same bytes, nothing is to be seen
            seen.append(x)
        return forward(self, x)

    return call


@pytest.mark.parametrize("step", ["training", "inference"])
@pytest.mark.parametrize(("mode", "expected"), [
    ("eager", "default"), ("inductor", "inductor"), ("compiled", "compiled")])
def test_each_mode_has_its_backend(monkeypatch, mode, expected, step):
    active, seen, ran = ["default"], [], []

    @contextmanager
    def use_backend(name):
        active.append(name)
        yield
        active.pop()

    def choose(x, f):
        if torch.compiler.is_compiling():
            return "compiled"
        seen.append((f.requires_grad, torch.is_inference_mode_enabled()))
        return active[-1]

    monkeypatch.setattr(models, "use_backend", use_backend)
    monkeypatch.setattr(models, "choose_backend", choose)
    monkeypatch.setattr(FeatureConnection, "forward", lambda self, x, f, **_: ran.append(active[-1]) or x + f)
    linear, ortho = built(step, mode=mode)
    assert (linear.backend(), ortho.backend()) == ("torch", expected)
    if mode != "compiled":
        ortho.run(ortho.prepare())
        assert ran == [expected] * 2
        assert seen == [(step == "training", step == "inference")]


@pytest.mark.slow
def test_compiled_models(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "compiled", TRACED)
    monkeypatch.setattr(models, "use_backend", nullcontext)
    rows = run(tmp_path, "--what", "models", *TINY_VIT[:1], "vit_small_ortho", *TINY_VIT[2:], "-b", "2",
               "--repeats", "2")
    assert [(row["mode"], row["step"], row["candidate"], row["note"]) for row in rows] == [
        (mode, step, name, "") for mode in ("eager", "inductor", "compiled") for step in ("training", "inference")
        for name in ("linear", "ortho")]
    assert all(int(row["saved_bytes"]) > 0 for row in rows if row["step"] == "training")
    assert {row["backend"] for row in rows} == {"torch"}


# ------------------------------------------------------------------------------------------- the launches
@pytest.mark.usefixtures("undrawn")
def test_launches(tmp_path):
    rows = run(tmp_path, "--what", "launch", "--repeats", "1")
    small = "vit_small(img_size=32, patch_size=8, embed_dim=64, num_heads=4)"
    assert [(row["model"], row["shape"], row["step"], row["candidate"]) for row in rows] == [
        (model, shape, step, name) for model, shape in (("", "1x1x32"), (small, "1x3x32x32"), (small, "32x3x32x32"))
        for step in ("training", "inference") for name in ("linear", "appendix", "shortest", "ortho")]
    for row in rows:
        assert (row["threads"], row["repeats"], row["mode"], row["note"]) == ("1", "5", "eager", "")
        assert float(row["ratio_p50"]) > 0
        assert float(row["appendix_ratio_p50"]) > 0
        assert float(row["shortest_ratio_p50"]) > 0


@pytest.mark.parametrize(("what", "expected"), [("launch", [1, 0, 10, 2000]), ("models", [3, 1 << 10, 2, 50])])
def test_how_launches_are_measured(monkeypatch, what, expected):
    seen = []

    def measured(candidates, repeats, clock, most_calls):
        seen.extend([torch.get_num_threads(), clock.buffer.nbytes, repeats, most_calls])
        return []

    monkeypatch.setattr(bench, "measure", measured)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        bench._rows(bench.Group({"what": what}, 0, list), Namespace(device=torch.device("cpu"), repeats=2))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == expected


@pytest.mark.parametrize("step", ["training", "inference"])
def test_tiny_tensors(step):
    candidates = launch._tiny_candidates(torch.device("cpu"), step)
    linear, appendix, shortest, ortho = (one.run(one.prepare()) for one in candidates)
    assert isinstance(ortho, tuple) == (step == "training")  # gradients
    torch.testing.assert_close(ortho, appendix)
    torch.testing.assert_close(ortho, shortest)
    assert not torch.allclose(linear[0], ortho[0])


def test_a_model_with_pasted_formulas():
    twins = models._twins(architecture()._replace(pasted=True))
    assert list(twins) == ["linear", "appendix", "shortest", "ortho"]
    images = torch.randn(2, 3, 32, 32)
    linear, appendix, shortest, ortho = (model.forward_features(images) for model in twins.values())
    torch.testing.assert_close(appendix, ortho)
    torch.testing.assert_close(shortest, ortho)
    assert not torch.allclose(linear, ortho)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    assert cli.main(["bench", "--device", "cuda", "--shapes", "8x50x96", "2x16x9x9", *TINY_VIT, "-b", "2", "--repeats",
                     "2", "--no-compile", "--output", str(tmp_path)]) == 0
    rows = read(tmp_path)
    assert all(row["note"] == "" for row in rows)
    assert {row["backend"] for row in rows if row["candidate"] == "triton"} == {"triton"}
    assert all(int(row["peak_memory"]) > 0 and row["driver"] for row in rows)
    assert all(row["peak_ratio"] for row in rows if row["what"] == "models")


# ------------------------------------------------------------------------------------ the files, the table
def test_tables(operator_run):
    folder, _, out = operator_run
    lines = out.splitlines()
    assert lines[0].split()[:6] == ["shape", "layout", "scope", "dtype", "step", "candidate"]
    triton = next(line for line in lines if line.split()[:1] == ["triton"])
    assert triton.count("not measured") == 6
    assert "cannot run" in triton
    assert sum(line.startswith("2x5x16") for line in lines) == 1  # repeated labels are left out
    assert sum(line.split()[:1] == ["plain"] for line in lines) == 3
    assert f"written: {folder / 'bench.csv'}, {folder / 'bench.svg'}" in out


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("error", "finished"), [
    (KeyboardInterrupt, 0), (KeyboardInterrupt, 2), (RuntimeError("a bug"), 1)])
def test_what_ends_early_writes_what_is_finished(tmp_path, monkeypatch, capsys, error, finished):
    measured = []

    def interrupted(candidates, *_, **__):
        if len(measured) == finished:
            raise error
        measured.append(candidates)
        return [Result(one.name, ms=[1.0]) for one in candidates]

    monkeypatch.setattr(bench, "measure", interrupted)
    arguments = ["bench", "--device", "cpu", "--what", "operator", "--no-compile", "--shapes", "1x2x3", "--output",
                 str(tmp_path / "out")]
    with nullcontext() if error is KeyboardInterrupt else pytest.raises(RuntimeError, match="a bug"):
        assert cli.main(arguments) == 130
    if finished:
        steps = ("forward", "backward")[:finished]
        assert list(dict.fromkeys(row["step"] for row in read(tmp_path / "out"))) == [*steps]
        assert (tmp_path / "out" / "bench.svg").exists()
    else:
        assert "nothing is written" in capsys.readouterr().out
        assert not (tmp_path / "out").exists()


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    rows = bench_report.rows({"what": "operator", "step": "both"}, 0, [Result("linear", ms=[1.0])])
    bench_report.write(tmp_path, rows)
    before = (tmp_path / "bench.csv").read_bytes()
    for module, name in ((bench_report, "figure"), (bench_report.os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                bench_report.write(tmp_path, rows * 2)
    assert (tmp_path / "bench.csv").read_bytes() == before


def test_nothing_to_draw_is_no_error(tmp_path):
    failed = bench_report.rows({"what": "models", "step": "training"}, 1, [Result("linear", note="no memory")])
    bench_report.write(tmp_path, failed)
    assert read(tmp_path)[0]["note"] == "no memory"
    assert "no memory" in bench_report.tables(failed)


# ----------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(("arguments", "message"), [
    (["--what", "modles"], "unknown part 'modles', known are 'operator', 'models', 'launch'; did you mean 'models'?"),
    (["--skips", "ortho_tp"], "unknown skip 'ortho_tp', known are 'identity', 'idempotent_mr', 'idempotent_cmr', "
                              "'orthogonal_tp', 'orthogonal_random', 'scaled'; did you mean 'orthogonal_tp'?"),
    (["--dtypes", "float23"], "unknown dtype 'float23'"),
    (["--device", "tpu"], "unknown device 'tpu', known are 'cpu', 'cuda'"),
    (["--device", "cpu:x"], "--device cpu:x:"),
    (["--shapes", "16x197"], "--shapes takes tokens as 16x197x384 or NCHW as 8x256x56x56, not '16x197'"),
    (["--shapes", "2x0x4"], "not '2x0x4'"),
    (["--shapes", "2xax4"], "not '2xax4'"),
    (["--repeats", "0"], "--repeats must be at least 1, got 0"),
    (["--batch-size", "-1"], "--batch-size must be at least 1, got -1"),
    (["--img-size", "0"], "--img-size must be at least 1, got 0"),
    (["--models", "vit_smal_ortho"], "no orthogonal variant 'vit_smal_ortho'; did you mean 'vit_small'?"),
    (["--models", "vit_small_linear"], "no orthogonal variant 'vit_small_linear'"),
    (["--models", "vit_small", "--model-kwargs", "deptj=2"], "vit_small cannot be built with {'deptj': 2}: "),
    (["--models", "vit_small", "--skips", "idempotent_mr", "--model-kwargs", "skip_branches=5"],
     "branches must divide the width of the stream, got 5 branches of 384 channels"),
    (["--model-kwargs", "depth"], "'depth' is not of the form key=value"),
    (["--amp", "--dtypes", "float16"], "--amp is --dtypes bfloat16: give one of them"),
])
def test_bad_arguments(capsys, tmp_path, arguments, message):
    output = tmp_path / "out"
    assert cli.main(["bench", "--device", "cpu", "--output", str(output), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("timm-ortho: error: ")
    assert message in captured.err
    assert not output.exists()


def test_an_output_that_is_no_folder_is_told_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure", None)
    file = tmp_path / "file"
    file.touch()
    for output in (file, file / "out" / "bench"):
        assert cli.main(["bench", "--quick", "--device", "cpu", "--output", str(output)]) == 2
        message = f"timm-ortho: error: --output {output} cannot be written: {file} is a file\n"
        assert capsys.readouterr().err == message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu(capsys):
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("timm-ortho: error: --device cuda: ")


def test_a_backend_that_the_environment_asks_for_in_vain(capsys, monkeypatch):
    monkeypatch.setattr(backends, "_default", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.main(["bench", "--device", "cpu"]) == 2
    assert "TIMM_ORTHO_BACKEND" in capsys.readouterr().err


def test_missing_extra(capsys, monkeypatch):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "tqdm" else find(name))
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err.strip().endswith('bench needs tqdm: pip install "timm-ortho[lab]"')


def test_options_are_handed_on(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr("timm_ortho.bench.bench", lambda *arguments: given.extend(arguments) or 0)
    assert cli.main(["bench", "--what", "models", "--amp", "-b", "4", "--quick", "--no-compile", "--model-kwargs",
                     "depth=2", "--output", str(tmp_path)]) == 0
    options, environment, output, command = given
    assert {key: value for key, value in options.items() if value is not None} == {
        "what": ["models"], "dtypes": ["bfloat16"], "batch_size": 4, "quick": True, "compile": False,
        "model_kwargs": {"depth": 2}}
    assert environment["torch"] == provenance.environment()["torch"]
    assert output == tmp_path
    assert command.startswith("timm-ortho bench --what models --amp -b 4 ")


def test_defaults():
    options = bench.resolve({"device": "cpu"})
    assert [(one.base, one.suffixes, one.batch) for one in options.models] == [
        ("vit_small", ["_ortho"], (16, 3, 224, 224)), ("resnetv2_50", ["_ortho"], (8, 3, 224, 224))]
    assert options.shapes == [(16, 197, 384), (8, 256, 56, 56)]
    assert (options.repeats, options.compile, options.dtypes) == (11, True, ("float32",))
    quick = bench.resolve({"device": "cpu", "quick": True, "repeats": 2})
    assert [one.arguments for one in quick.models] == list(bench_options.SHORT.values())
    assert (quick.repeats, quick.scopes) == (2, ("feature",))
    named = bench.resolve({"device": "cpu", "quick": True, "models": ["vit_small_ortho"]})
    assert [(one.arguments, one.batch[0]) for one in named.models] == [({}, 4)]


# ----------------------------------------------------------------------------------------------- the pages
def fake_csv(folder, name, rows):
    common = dict(device="cpu", cpu="Some CPU, 2 cores, 2 threads", torch="2.9", triton="3.5", timm="1.0.31", driver="",
                  commit="0123456789abcdef-dirty", date="2026-01-02T03:04:05+00:00", command="timm-ortho bench",
                  baseline="linear")
    folder.mkdir(exist_ok=True)
    with open(folder / name, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**common, **row} for row in rows)


def model_row(step, mode, p50, **more):
    row = dict(what="models", model="vit_small", layout="tokens", dtype="float32", candidate="ortho", step=step,
               mode=mode, ratio_p20=p50 - 0.01, ratio_p50=p50, ratio_p80=p50 + 0.02, saved_ratio="1.0042")
    return {**row, **more}


def operator_row(step, candidate, **more):
    return dict(what="operator", shape="16x197x384", layout="tokens", dtype="float32", scope="global", step=step,
                candidate=candidate, **more)


def lines_of(results, on):
    text = readme_bench.section(readme_bench.rows_of(results))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
            if line.startswith(f"| {on} ")]


def test_the_tables_of_speed(tmp_path):
    fake_csv(tmp_path, "bench_cpu.csv", [
        model_row("training", "eager", 1.3), model_row("training", "compiled", 0.98, saved_ratio="1.137"),
        model_row("training", "inductor", 1.1),
        model_row("training", "eager", 1.0, candidate="linear"),
        operator_row("both", "torch", ratio_p50="1.5", appendix_ratio_p50="0.4"),
        operator_row("forward", "torch", share_of_copy="0.61"), operator_row("backward", "torch", share_of_copy="0.7"),
        operator_row("both", "triton", note="no GPU"),
        *(dict(what="launch", shape="1x1x32", step="inference", candidate=name, ms_p50=ms)
          for name, ms in (("linear", "0.0032"), ("appendix", "0.025"))),
        *(dict(what="launch", model="vit_small", shape="1x3x32x32", step="training", candidate=name, ms_p50=ms,
               ratio_p20="1.1", ratio_p50="1.2", ratio_p80="1.3", appendix_ratio_p20="0.8", appendix_ratio_p50="0.9",
               appendix_ratio_p80="1") for name, ms in (("linear", "1.5"), ("ortho", "1.8"))),
    ])
    model, operator, launch, *others = lines_of(tmp_path, "CPU, Some CPU")
    on = "CPU, Some CPU"
    assert model == [on, "vit_small_ortho", "tokens, float32", "1.300 [1.290, 1.320]", "1.100 [1.090, 1.120]",
                     "0.980 [0.970, 1.000]", *["not measured"] * 3, "1.004", "1.137", "not measured"]
    assert launch == [on, "1x1x32", "inference", "3.2", "25.0", *["not measured"] * 5]
    assert [line[1:4] for line in others] == [["vit_small 1x3x32x32", "training", "1,500.0"]]
    assert others[0][-3:] == ["1.200 [1.100, 1.300]", "0.900 [0.800, 1.000]", "not measured"]
    assert operator[:3] == ["CPU, Some CPU", "16x197x384, tokens", "float32, global"]
    cells = dict(zip(readme_bench.FORMULAS, operator[3:-1], strict=True))
    assert (cells["torch"], cells["triton"], operator[-1]) == ("1.50 (61%, 70%)", "not measured", "2.5 (torch)")
    unmeasured = lines_of(tmp_path, "GPU")
    assert [line[1] for line in unmeasured] == [
        *bench_options.DEFAULTS["cuda"]["models"], *bench_options.DEFAULTS["cuda"]["shapes"], *readme_bench.LAUNCHES]
    assert all(set(line[2:]) == {"not measured"} for line in unmeasured)
    assert ("* CPU, Some CPU: `timm-ortho bench`; Some CPU, 2 cores, 2 threads; torch 2.9, triton 3.5, timm 1.0.31; "
            "commit 0123456789ab with changes, 2026-01-02") in readme_bench.section(readme_bench.rows_of(tmp_path))


def test_rows_of_a_gpu(tmp_path):
    gpu = dict(device="NVIDIA H100", driver="570.1", commit="")
    fake_csv(tmp_path, "bench_h100.csv", [
        model_row("training", "eager", 1.01, model="vit_small(depth=2)", peak_ratio="1.0021", **gpu),
        {**operator_row("both", "triton", ratio_p50="2", appendix_ratio_p50="0.125"), **gpu},
        {**operator_row("both", "torch", ratio_p50="4", appendix_ratio_p50="0.5"), **gpu}])
    model, operator = lines_of(tmp_path, "NVIDIA H100")
    assert (model[1], model[-1]) == ("vit_small_ortho(depth=2)", "1.002")
    assert operator[-1] == "8.0 (triton)"
    assert [line[1] for line in lines_of(tmp_path, "GPU")] == list(readme_bench.LAUNCHES)
    assert {line[1] for line in lines_of(tmp_path, "CPU")} == {
        *bench_options.DEFAULTS["cpu"]["models"], *bench_options.DEFAULTS["cpu"]["shapes"], *readme_bench.LAUNCHES}
    assert "driver 570.1, torch 2.9" in readme_bench.section(readme_bench.rows_of(tmp_path))


def test_the_opening_of_speed_has_the_ranges_of_the_rows(tmp_path):
    assert readme_bench.opening(readme_bench.rows_of(tmp_path)) == "On a CPU: not measured. On a GPU: not measured."
    fake_csv(tmp_path, "bench_cpu.csv", [
        model_row("training", "eager", 1.3), model_row("training", "eager", 1.1, layout="nchw", model="resnetv2_50"),
        model_row("training", "eager", 1.074, layout="channels_last", model="resnetv2_50"),
        model_row("training", "compiled", 0.98), model_row("inference", "eager", 3.0),
        model_row("training", "eager", 1.0, candidate="linear"), model_row("training", "eager", 2.0, model="vit_base"),
        dict(what="launch", model="vit_small", shape="1x3x32x32", step="training", candidate="ortho",
             ratio_p50="1.2", appendix_ratio_p50="0.9")])
    text = " ".join(readme_bench.opening(readme_bench.rows_of(tmp_path)).split())
    assert "(Some CPU). ViT-S: +30 % in eager mode; -2 % under `torch.compile`. ResNetV2-50: +7 to +10 % in" in text
    assert "0.90 to 0.90 times" in text
    assert "1.20 to 1.20 times" in text
    assert text.endswith("On a GPU: not measured.")


def test_no_measurement_is_taken_twice(tmp_path):
    for name in ("bench_a.csv", "bench_b.csv"):
        fake_csv(tmp_path, name, [model_row("training", "eager", 1.3)])
    with pytest.raises(SystemExit, match="2 rows of vit_small are the same measurement"):
        readme_bench.section(readme_bench.rows_of(tmp_path))


def costs_of(results):
    lines = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in readme_bench.costs(readme_bench.rows_of(results)).splitlines()]
    return lines[0], {line[0]: line[1:] for line in lines[2:]}


def test_readmes_table_of_costs(tmp_path):
    nothing, costs = costs_of(tmp_path)
    assert nothing == ["orthogonal over linear", "CPU", "GPU"]
    assert len(costs) == 12
    assert {cell for cells in costs.values() for cell in cells} == {"not measured"}
    gpu = dict(device="NVIDIA H100", model="vit_small_patch16_224", peak_ratio="1.0021")
    fake_csv(tmp_path, "bench_cpu.csv", [
        model_row("training", "eager", 1.3), model_row("training", "eager", 1.4, model="vit_base"),
        model_row("training", "eager", 1.0, candidate="linear"), model_row("inference", "compiled", 0.9),
        model_row("training", "compiled", 1.1, model="resnetv2_50", layout="nchw"),
        model_row("training", "compiled", 1.2, model="resnetv2_50", layout="channels_last"),
        *(dict(what="launch", shape="1x1x32", step="training", candidate=name, ms_p50=ms)
          for name, ms in (("linear", "0.0032"), ("ortho", "0.0254"))),
    ])
    fake_csv(tmp_path, "bench_h100.csv", [
        model_row("training", "eager", 1.01, **gpu), model_row("training", "eager", 1.02, dtype="bfloat16", **gpu)])
    devices, costs = costs_of(tmp_path)
    assert devices[1:] == ["CPU, Some CPU", "NVIDIA H100"]
    measured = {name: cells for name, cells in costs.items() if set(cells) != {"not measured"}}
    assert measured == {
        "launch, 1x1x32, training": ["25.4 us against 3.2 us", "not measured"],
        "ViT-S: training step, eager": [
            "1.300 [1.290, 1.320]", "1.010 [1.000, 1.030] (float32); 1.020 [1.010, 1.040] (bfloat16)"],
        "ViT-S: memory kept for backward (eager)": ["1.004", "1.004 (float32); 1.004 (bfloat16)"],
        "ViT-S: peak memory, training (eager)": ["not measured", "1.002 (float32); 1.002 (bfloat16)"],
        "ResNetV2-50: training step, torch.compile": ["1.100 [1.090, 1.120]", "not measured"],
    }


def test_the_pages_are_held_to_the_rows(tmp_path, capsys):
    pages = [tmp_path / "README.md", tmp_path / "docs" / "speed.md"]
    pages[1].parent.mkdir()
    opening = "{}\nold\n{}\n".format(*readme_bench.OPENING)
    for page in pages:
        page.write_text(f"before\n{opening}{readme_bench.BEGIN}\nold\n{readme_bench.END}\nafter\n")
    fake_csv(tmp_path / "results", "bench_cpu.csv", [model_row("training", "eager", 1.3)])
    assert readme_bench.main(["--check"], tmp_path, tmp_path / "results") == 1
    assert capsys.readouterr().err.count("run python scripts/readme_bench.py") == 3
    assert all("old" in page.read_text() for page in pages)
    assert readme_bench.main([], tmp_path, tmp_path / "results") == 0
    assert readme_bench.main(["--check"], tmp_path, tmp_path / "results") == 0
    for page in pages:
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "1.300 [1.290, 1.320]" in text
        page.write_text(text.replace("1.300", "1.200"))
        assert readme_bench.main(["--check"], tmp_path, tmp_path / "results") == 1
        page.write_text("no markers")
        with pytest.raises(SystemExit, match="has no"):
            readme_bench.main([], tmp_path, tmp_path / "results")
        page.write_text(text)


def test_these_pages():
    assert readme_bench.main(["--check"]) == 0
