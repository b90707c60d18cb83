"""Test the rows and steps of timm_ortho.record. Training with and without recording is bit-identical."""
import contextlib
import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import timm
import torch
from helpers.kernel_cases import DEVICE, needs_triton
from helpers.one_site import OneSite
from timm.utils import ModelEmaV3
from torch import nn

import timm_ortho
from timm_ortho.diagnostics import record_dynamics
from timm_ortho.functional import use_backend
from timm_ortho.update import backend

COLUMNS = ["step", "layer", "kind", "name", "stream", "parallel", "orthogonal", "cosine", "s", "s_added", "rho",
           "theta", "parallel_share", "orthogonal_share"]


def vit(connection="feature", **arguments):
    torch.manual_seed(0)
    size = dict(img_size=16, patch_size=8, embed_dim=32, num_heads=2, depth=2, num_classes=3)
    return timm.create_model("vit_small_ortho", connection=connection, **{**size, **arguments}).train()


def resnet(**arguments):
    torch.manual_seed(0)
    return timm.create_model(
        "resnetv2_18_cifar_ortho", channels=(8, 8, 8, 8), stem_chs=8, num_classes=3, **arguments).train()


def images(seed=0, count=4):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def train(model, steps, start=0, forward=None, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    forward = model if forward is None else forward  # `forward or model` fails for a compiled model
    for step in range(start, start + steps):
        torch.manual_seed(step)
        loss = forward(images(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def same_rows(rows, others):
    assert [list(row.values()) for row in rows] == [list(row.values()) for row in others]


def same_bits(model, other):
    for (name, value), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


# --------------------------------------------------------------------------------------------- rows
def test_known_angle():
    # The angle between x = (3, 0) and f = (4, 3) is 36.87 degrees.
    model = OneSite(torch.tensor([[4.0, 3.0]]))
    with timm_ortho.record(model) as recorder:
        model(torch.tensor([[3.0, 0.0]]))
    row, = recorder.rows
    assert list(row) == COLUMNS
    assert (row["step"], row["layer"], row["kind"], row["name"]) == (0, 0, "mlp", "connection_mlp")
    expected = dict(stream=9, parallel=16, orthogonal=9, parallel_share=16 / 9, orthogonal_share=1, cosine=0.8)
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert (row["s"], row["s_added"]) == pytest.approx((4 / 3, 0), abs=1e-5)
    assert row["rho"] is row["theta"] is None


def test_shares_are_ratios_of_averages():
    # The stream's second token is zero, like the initial class token of the paper's ViTs. The share of this token alone
    # would be infinite.
    model = OneSite(torch.tensor([[4.0, 3.0], [1.0, 1.0]]))
    recorder = timm_ortho.record(model)
    model(torch.tensor([[3.0, 0.0], [0.0, 0.0]]))
    row, = recorder.rows
    assert (row["stream"], row["orthogonal"]) == pytest.approx((9 / 2, (9 + 2) / 2), rel=1e-5)
    assert (row["parallel_share"], row["orthogonal_share"]) == pytest.approx((16 / 9, (9 + 2) / 9), rel=1e-5)


def test_two_calls_of_a_connection_are_averaged():
    class Shared(OneSite):
        def forward(self, x):
            return self.connection_mlp(2 * x, self.branch) + self.connection_mlp(x, self.branch)

    model, x = Shared(torch.tensor([[4.0, 3.0]])), torch.tensor([[3.0, 0.0]])
    with timm_ortho.record(model) as recorder:
        model(x)
    row, = recorder.rows
    assert (row["stream"], row["parallel"], row["cosine"]) == pytest.approx(((36 + 9) / 2, 16, 0.8), rel=1e-5)
    site = timm_ortho.sites(model)[0]
    measured, = record_dynamics(model, x, [site])
    assert list(measured[3:7]) == [row[key] for key in ("stream", "parallel", "orthogonal", "cosine")]


@pytest.mark.parametrize("connection", timm_ortho.CONNECTIONS)
def test_rows_agree_with_record_dynamics(connection):
    model = vit(connection)
    recorder = timm_ortho.record(model)
    model(images())
    # Without dropout, training and evaluation mode agree.
    expected = record_dynamics(model, images(), timm_ortho.sites(model))
    assert len(recorder.rows) == 4
    for row, site in zip(recorder.rows, expected, strict=True):
        assert (row["layer"], row["kind"], row["name"]) == site[:3]
        for key in ("stream", "parallel", "orthogonal", "cosine", "s", "s_added"):
            assert row[key] == pytest.approx(getattr(site, key), rel=1e-5, abs=1e-7)


def test_s_added_follows_the_draws_of_a_probability():
    """In training, each call adds the parallel part or omits it. Evaluation adds its mean."""
    model = OneSite(torch.tensor([[4.0, 3.0]]))
    model.connection_mlp.prob = 0.25
    with timm_ortho.record(model, every=1) as recorder:
        for seed in range(20):
            torch.manual_seed(seed)
            model(torch.tensor([[3.0, 0.0]]))
    assert {round(row["s_added"], 3) for row in recorder.rows} == {0.0, 1.333}
    measured, = record_dynamics(model, torch.tensor([[3.0, 0.0]]), timm_ortho.sites(model))
    assert (measured.s, measured.s_added) == pytest.approx((4 / 3, 0.75 * 4 / 3), rel=1e-5)


def test_learned_weights_are_clamped():
    model = vit("hybrid")
    with torch.no_grad():
        model.blocks[0].connection_mlp.rho.fill_(-0.5)  # clamped to 0
        model.blocks[0].connection_mlp.theta.fill_(0.3)
        model.blocks[1].connection_mlp.theta.fill_(2.0)  # clamped to pi / 2
    recorder = timm_ortho.record(model)
    model(images())
    rows = {(row["layer"], row["kind"]): (row["rho"], row["theta"]) for row in recorder.rows}
    assert rows[0, "attention"] == (1.0, 0.0)
    assert rows[0, "mlp"] == pytest.approx((0.0, 0.3))
    assert rows[1, "mlp"] == pytest.approx((1.0, math.pi / 2))


def test_half_precision_does_not_overflow():
    model = OneSite(torch.full((1, 768), 300.0, dtype=torch.float16))
    recorder = timm_ortho.record(model)
    model(torch.full((1, 768), 300.0, dtype=torch.float16))
    assert recorder.rows[0]["stream"] == pytest.approx(768 * 300.0**2, rel=1e-3)
    assert recorder.rows[0]["cosine"] == pytest.approx(1.0, rel=1e-3)


# ----------------------------------------------------------------------------------------------- recorded steps
def test_counts_training_passes_and_records_every_nth():
    model = vit()
    recorder = timm_ortho.record(model, every=3)
    for _ in range(4):
        model.train()
        model(images())
        model.eval()
        model(images())
    assert recorder.step == 4
    assert [row["step"] for row in recorder.rows] == [0] * 4 + [3] * 4
    recorder.close()
    recorder.close()
    model.train()(images())
    assert recorder.step == 4
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


@pytest.mark.parametrize("transform", [
    lambda call: torch.func.vmap(lambda image: call(image[None]), randomness="same")(images()),
    lambda call: torch.func.grad(lambda x: call(x).sum())(images())], ids=["vmap", "grad"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_passes_inside_transforms_are_not_recorded(transform):
    model = vit()
    with timm_ortho.record(model, every=1) as recorder:
        model(images())
        transform(model)
        model(images())
    assert {row["step"] for row in recorder.rows} == {0, 1}
    assert all(math.isfinite(row["stream"]) for row in recorder.rows)


def test_a_sink_gets_the_rows_of_each_recorded_pass():
    model, calls = vit(), []
    recorder = timm_ortho.record(model, every=2, sink=calls.append)
    recorder.step = 2  # as after an earlier recorder
    train(model, 4)
    assert [[row["step"] for row in rows] for rows in calls] == [[2] * 4, [4] * 4]
    assert recorder.rows == []


def test_follows_a_switch_of_the_connection():
    model = vit("linear")
    recorder = timm_ortho.record(model, every=1)
    train(model, 1)
    timm_ortho.connect(model, "hybrid")
    train(model, 1)
    assert [row["rho"] for row in recorder.rows] == [None] * 4 + [1.0] * 4
    assert not any(site.connection._forward_hooks for site in timm_ortho.sites(model))


def test_invalid_arguments():
    with pytest.raises(ValueError, match=r"^VisionTransformer has no connections to record; call timm_ortho.connect\("):
        timm_ortho.record(timm.create_model("test_vit"))
    for every in (0, -1, 2.5, True, "50"):
        with pytest.raises(ValueError, match=r"^every must be a whole number of at least 1, got "):
            timm_ortho.record(vit(), every=every)
    assert timm_ortho.record(vit(), every=np.int64(2)).every == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_ends_early_leaves_no_hook_and_no_row(error):
    def interrupt(*_):
        raise error

    model = vit()
    recorder = timm_ortho.record(model, every=2)
    handle = model.blocks[1].register_forward_hook(interrupt)
    with pytest.raises(error):
        model(images())
    assert recorder.rows == []
    handle.remove()
    for _ in range(2):
        model(images())
    assert [row["step"] for row in recorder.rows] == [2] * 4
    assert not any(site.connection._forward_hooks for site in timm_ortho.sites(model))


# ------------------------------------------------------------------------------------------- effects on training
AUTOCAST = dict(device_type="cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [
    lambda: vit(drop_path_rate=0.4, proj_drop_rate=0.2), lambda: vit("hybrid"), lambda: vit(connection_prob=0.5),
    resnet,
])
def test_training_is_bit_identical(make, checkpointing, autocast):
    def run(recorded):
        model = make()
        model.set_grad_checkpointing(checkpointing)
        recorder = timm_ortho.record(model, every=2) if recorded else None

        def forward(x):
            with torch.autocast(**AUTOCAST) if autocast else contextlib.nullcontext():
                return model(x).float()

        train(model, 3, forward=forward)
        return model, torch.get_rng_state(), recorder

    (model, state, recorder), (plain, expected, _) = run(True), run(False)
    same_bits(model, plain)
    assert torch.equal(state, expected)
    sites = len(timm_ortho.sites(model))
    # The second forward pass of gradient checkpointing is not recorded.
    assert [row["step"] for row in recorder.rows] == [0] * sites + [2] * sites
    assert all(math.isfinite(row["stream"]) for row in recorder.rows)


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@needs_triton
def test_kernels_that_compute_the_norm_too_are_recorded(checkpointing, monkeypatch):
    monkeypatch.setattr(timm.layers.config, "_USE_REENTRANT_CKPT", checkpointing == "reentrant")
    backend.plans.clear()

    def run(recorded):
        model = vit().to(DEVICE)
        model.set_grad_checkpointing(checkpointing is not None)
        recorder = timm_ortho.record(model, every=2) if recorded else None
        with use_backend("triton"):
            train(model, 2, forward=lambda x: model(x.to(DEVICE)))
        return model, recorder

    (model, recorder), (plain, _) = run(True), run(False)
    assert backend.plans
    same_bits(model, plain)
    assert [(row["step"], row["name"]) for row in recorder.rows] == [(0, site.name) for site in timm_ortho.sites(model)]
    with use_backend("torch"), timm_ortho.record(again := vit().to(DEVICE)) as expected:
        again(images().to(DEVICE))
    for row, other in zip(recorder.rows, expected.rows, strict=True):
        assert {key: row[key] for key in COLUMNS[4:10]} == pytest.approx(
            {key: other[key] for key in COLUMNS[4:10]}, rel=1e-4, abs=1e-5)


def test_values_are_read_once_per_recorded_pass(monkeypatch):
    """Reading a tensor's value waits for the GPU. All values of a pass are therefore read in one transfer."""
    model, reads = vit("hybrid"), []
    for name in ("tolist", "item", "__float__", "__bool__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, o=original, n=name: (reads.append(n), o(self))[1])
    recorder = timm_ortho.record(model, every=1)
    for _ in range(3):
        model(images())
    assert reads == []
    assert not any(means.requires_grad for one in recorder._unread for calls in one.means.values() for means in calls)
    assert len(recorder.rows) == 12
    assert reads == ["tolist"] * 3


# ------------------------------------------------------------------------- copies, wrappers and compilers
def test_copies_and_pickles_of_a_recorded_model_have_no_recorder(tmp_path):
    model, calls = vit(), []
    recorder = timm_ortho.record(model, every=1, sink=lambda rows: calls.append(rows))  # a lambda cannot be pickled
    model(images())
    average = ModelEmaV3(model).module
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (average, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(other.train()(images()), model.eval()(images()))
    assert recorder.step == len(calls) == 1
    assert model.state_dict().keys() == vit().state_dict().keys()
    other = timm_ortho.record(average, every=1)  # a copy can have its own recorder
    average(images())
    assert (recorder.step, other.step, len(other.rows), len(calls)) == (1, 1, 4, 1)


@pytest.mark.parametrize("which", ["the model", "its wrapper"])
def test_distributed_data_parallel(tmp_path, which):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = vit()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            wrapper = nn.parallel.DistributedDataParallel(model)
        recorder = timm_ortho.record(model if which == "the model" else wrapper, every=2)
        train(model, 3, forward=wrapper)
    finally:
        torch.distributed.destroy_process_group()
    plain = vit()
    expected = timm_ortho.record(plain, every=2)
    train(plain, 3)
    same_rows(recorder.rows, expected.rows)


@pytest.mark.parametrize(("make", "order"), [
    (lambda: vit(drop_path_rate=0.4), "recorded, then compiled"), (resnet, "compiled in place"),
    pytest.param(resnet, "compiled, then recorded", marks=pytest.mark.slow),
])
def test_compiled_models_are_measured_in_eager_mode(order, make):
    torch.compiler.reset()

    def run(recorded):
        model = forward = make()
        recorder = timm_ortho.record(model, every=2) if recorded and order != "compiled, then recorded" else None
        if order == "compiled in place":
            model.compile(backend="aot_eager")
        else:
            forward = torch.compile(model, backend="aot_eager", fullgraph=order == "compiled, then recorded")
        if recorded and recorder is None:
            recorder = timm_ortho.record(forward, every=2)
        train(model, 3, forward=forward)
        return model, torch.get_rng_state(), recorder

    (model, state, recorder), (plain, expected, _) = run(True), run(False)
    same_bits(model, plain)  # including BatchNorm's running statistics
    assert torch.equal(state, expected)
    eager = make()
    expected = timm_ortho.record(eager, every=2)
    train(eager, 3)
    assert recorder.step == 3
    assert [row["name"] for row in recorder.rows] == [row["name"] for row in expected.rows]
    for row, other in zip(recorder.rows, expected.rows, strict=True):
        assert row["stream"] == pytest.approx(other["stream"], rel=1e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_blocks_compiled_one_by_one_cause_a_warning():
    torch.compiler.reset()
    model = vit()
    for block in model.blocks:
        block.compile(backend="eager")
    model(images())
    recorder = timm_ortho.record(model, every=1)
    with pytest.warns(UserWarning, match="measured no connection: .* the blocks are compiled one by one"):
        model(images())
    assert recorder.rows == []
    with pytest.warns(UserWarning, match="measured no connection: the model has no connections any more"):
        timm_ortho.disconnect(model)(images())


def test_a_pass_that_calls_no_connection_of_a_block_causes_one_warning():
    model = vit()
    with timm_ortho.record(model, every=1):
        model(images())
    model.blocks[1].forward = lambda x: x + model.blocks[1].mlp(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same change, found in the source by timm_ortho.sites
        recorder = timm_ortho.record(model, every=1)
        with pytest.warns(UserWarning, match=r"of step 0 called no connection of 1 blocks \(the first is 'blocks.1'\)"):
            model(images())
    with recorder, warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images())
    assert {row["layer"] for row in recorder.rows} == {0}
