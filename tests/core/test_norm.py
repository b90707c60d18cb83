"""The update and the norm after it in one kernel: derivatives, and when two steps compute them.

test_parity.py compares the kernel with float64.
"""
import copy
import functools

import pytest
import timm
import torch
from helpers.kernel_cases import BRAIN, DEVICE, EPS, SINGLE, needs_triton, planning, tensors
from helpers.norm_cases import in_one_step, in_two_steps, made
from timm.layers import LayerNorm
from torch import nn
from torch.utils.checkpoint import checkpoint

from timm_ortho import FeatureConnection
from timm_ortho.functional import residual_update, update_with_norm, use_backend
from timm_ortho.update import backend as backends

pytestmark = [needs_triton, pytest.mark.usefixtures("no_default_backend", "auto_is_triton")]


def gradients(both, x, f, norm, upstream):
    """Return y, h and the gradients by name. An upstream gradient of None means that nobody uses the output."""
    x, f = x.detach().requires_grad_(), f.detach().requires_grad_()
    outputs = both(x, f, norm)
    inputs = {"x": x, "f": f, **dict(zip("wc", norm.parameters(), strict=False))}
    used = [(output, g) for output, g in zip(outputs, upstream, strict=True) if g is not None]
    outputs_in_use, grads = zip(*used, strict=True)
    values = torch.autograd.grad(outputs_in_use, list(inputs.values()), grads, allow_unused=True)
    return {"y": outputs[0], "h": outputs[1], **dict(zip(inputs, values, strict=True))}


@pytest.mark.parametrize("used", ["y", "h"])
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_an_output_that_nobody_uses(backend, used):
    x, f, g = tensors((3, 5, 20))
    norm = made("LayerNorm", 20)
    upstream = (g, None) if used == "y" else (None, g)
    expected = gradients(in_two_steps, x, f, norm, upstream)
    for name, got in gradients(in_one_step(backend), x, f, norm, upstream).items():
        if expected[name] is None:
            assert got is None, name
        else:
            torch.testing.assert_close(got, expected[name], msg=name)


@pytest.mark.parametrize("trained", ["x", "f", "w", "c", "xc", ""])
def test_frozen_inputs(trained):
    x, f, g = tensors((3, 5, 20))
    norm = made("LayerNorm", 20)
    inputs = dict(zip("xfwc", (x, f, norm.weight, norm.bias), strict=True))
    for name, tensor in inputs.items():
        tensor.requires_grad_(name in trained)
    results = [both(x, f, norm) for both in (in_two_steps, in_one_step("auto"))]
    torch.testing.assert_close(*results)
    assert [y.requires_grad for y in results[1]] == [bool({"x", "f"} & {*trained}) or bool(trained), bool(trained)]
    if trained:
        grads = [torch.autograd.grad(h, [inputs[name] for name in trained], g) for _, h in results]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm", "without affine"])
def test_second_derivatives(norm):
    x, f, _ = tensors((2, 3, 5))
    norm = made(norm, 5)
    inputs = [x.requires_grad_(), f.requires_grad_(), *norm.parameters()]

    def second(both):
        y, h = both(x, f, norm)
        first = torch.autograd.grad(y.pow(3).sum() + h.pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(t.pow(3).sum() for t in first), inputs)

    torch.testing.assert_close(second(in_one_step("triton")), second(in_two_steps), rtol=1e-4, atol=1e-3)


def test_batched_gradients_of_the_norm():
    x, f, _ = tensors((2, 3, 5))
    norm = made("LayerNorm", 5)
    _, h = in_one_step("triton")(x.requires_grad_(), f.requires_grad_(), norm)
    g = torch.randn(4, *h.shape, device=DEVICE)
    batched = torch.autograd.grad(h, (x, f, norm.weight), g, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(h, (x, f, norm.weight), one, retain_graph=True) for one in g]
    torch.testing.assert_close(batched, tuple(torch.stack(grads) for grads in zip(*single, strict=True)))


# ------------------------------------------------------------------------------------------ one step or two steps
def steps(change, backend, shape=(2, 3, 20)):
    """Return whether one kernel computes the update and the norm, for modules and tensors that ``change`` prepares."""
    connection, norm = FeatureConnection(), nn.LayerNorm(shape[-1]).to(DEVICE)
    x, f, _ = tensors(shape)
    with use_backend(backend):
        x, f, connection, norm = change(x, f, connection, norm) or (x, f, connection, norm)
        expected = (y := connection(x, f)), norm(y)
        torch.testing.assert_close(connection.with_norm(x, f, norm), expected)
    return any(plan and plan.norm for plan in backends.plans.values())


def hooked(name):
    def change(x, f, connection, norm):
        {"norm": norm, "connection": connection}[name].register_forward_hook(lambda *args: None)
    return change


def with_own_forward(x, f, connection, norm):
    forward = norm.forward
    norm.forward = lambda y: 2 * forward(y)


def parametrized(x, f, connection, norm):
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())


def without_weight(x, f, connection, norm):
    norm.weight = None  # the bias remains


def with_buffers(x, f, connection, norm):
    """As a frozen norm. Replicas of ``nn.DataParallel`` and FSDP's flat parameters have no own parameters either."""
    for name in ("weight", "bias"):
        delattr(norm, name)
        norm.register_buffer(name, torch.randn(20, device=DEVICE))


def with_weight(weight):
    def change(x, f, connection, norm):
        norm.weight = nn.Parameter(weight.to(DEVICE))
    return change


class Doubled(nn.LayerNorm):
    def forward(self, y):
        return 2 * super().forward(y)


CASES = {
    "plain": (lambda *args: None, True),
    "a hook on the norm": (hooked("norm"), False),
    "a hook on the connection": (hooked("connection"), False),
    "an own forward": (with_own_forward, False),
    "a parametrized norm": (parametrized, False),
    "a bias without a weight": (without_weight, False),
    "buffers instead of parameters": (with_buffers, False),
    "gaps in the weight": (with_weight(torch.randn(40)[::2]), False),
    "an expanded weight": (with_weight(torch.ones(1).expand(20)), False),
    "a subclass of a norm": (lambda x, f, c, n: (x, f, c, Doubled(20).to(DEVICE)), False),
    "another norm": (lambda x, f, c, n: (x, f, c, nn.Identity()), False),
    "two axes": (lambda x, f, c, n: (x, f, c, nn.LayerNorm([3, 20]).to(DEVICE)), False),
    "groups": (lambda x, f, c, n: (x, f, FeatureConnection(groups=2), n), False),
    "a probability": (lambda x, f, c, n: (x, f, FeatureConnection(prob=0.5).eval(), n), False),
    "the branch is kept": (lambda x, f, c, n: (x, f, FeatureConnection(keep="branch"), n), False),
    "gaps in memory": (lambda x, f, c, n: (x[..., ::2], f[..., ::2], c, nn.LayerNorm(10).to(DEVICE)), False),
    "one channel": (lambda x, f, c, n: (x[..., :1], f[..., :1], c, nn.LayerNorm(1).to(DEVICE)), False),
    "no elements": (lambda x, f, c, n: (x[:0], f[:0], c, n), False),
    "strides of axes of size 1": (lambda x, f, c, n: (x[:1, :1], f[0, 0].view(1, 1, 20), c, n), False),
}


@pytest.mark.parametrize("case", CASES)
def test_one_step_or_two(case):
    change, expected = CASES[case]
    assert not steps(change, "torch")
    assert steps(change, "triton") is expected


def with_gaps(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


CHANGES = {  # of the tensors, the connection or the norm after a call with x, f, FeatureConnection() and LayerNorm(20)
    "size": lambda x, f, c, n: (x[:1], f[:1], c, n),
    "strides": lambda x, f, c, n: (with_gaps(x), with_gaps(f), c, n),
    "strides of f": lambda x, f, c, n: (x, with_gaps(f), c, n),
    "dtypes": lambda x, f, c, n: (x.double(), f.double(), c, copy.deepcopy(n).double()),
    "dtype of f": lambda x, f, c, n: (x, f.to(BRAIN), c, n),
    "eps": lambda x, f, c, n: (x, f, FeatureConnection(eps=9.0), n),
    "eps of the norm": lambda x, f, c, n: (x, f, c, nn.LayerNorm(20, eps=9.0)),
    "normalized axes": lambda x, f, c, n: (x, f, c, nn.LayerNorm([3, 20], elementwise_affine=False)),
    "kind of norm": lambda x, f, c, n: (x, f, c, nn.RMSNorm(20, eps=n.eps, elementwise_affine=False)),
    "without weight": lambda x, f, c, n: (x, f, c, nn.LayerNorm(20, elementwise_affine=False)),
    "without bias": lambda x, f, c, n: (x, f, c, nn.LayerNorm(20, bias=False)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("affine", [False, True])
def test_a_plan_is_used_again_only_for_its_own_case(change, affine):
    x, f, _ = tensors((2, 3, 20))
    case = x, f, FeatureConnection(), nn.LayerNorm(20, elementwise_affine=affine).to(DEVICE)
    changed = [part.to(DEVICE) if isinstance(part, nn.Module) else part for part in CHANGES[change](*case)]
    with use_backend("triton"):
        for x, f, connection, norm in (case, changed, case):
            upstream = [torch.randn_like(x + f) for _ in range(2)]
            expected = gradients(lambda x, f, n: ((y := connection(x, f)), n(y)), x, f, norm, upstream)  # noqa: B023
            torch.testing.assert_close(gradients(connection.with_norm, x, f, norm, upstream), expected)


def test_a_full_table_of_plans_starts_again():
    """Plans of many shapes or weights would fill the memory."""
    backends.plans.update(dict.fromkeys(range(1024)))
    x, f, _ = tensors((2, 3, 20))
    in_one_step("triton")(x, f, made("LayerNorm", 20))
    residual_update(x, f, backend="triton")
    assert len(backends.plans) == 2


@pytest.mark.parametrize("weight", [
    type("Quantized", (nn.Parameter,), {})(torch.ones(20)), nn.Parameter(torch.ones(40)[::2]),
    nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(20, device="meta")),
], ids=["subclass", "gaps", "size", "device"])
def test_a_plan_is_not_used_again_for_another_kind_of_weight(weight):
    x, f, _ = tensors((2, 3, 20))
    norm = made("LayerNorm", 20)
    in_one_step("triton")(x, f, norm)
    norm.weight = weight
    assert update_with_norm(x, f, norm, EPS, "triton") is None


def test_functional_call_takes_two_steps():
    """Its tensors are no parameters. The module's own calls take one step, before and after it."""
    x, f, _ = tensors((2, 3, 20))
    norm, taken = made("LayerNorm", 20), []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self):
            taken.append(update_with_norm(x, f, self.norm, EPS, "triton") is not None)

    block, weights = Block(), {"norm.weight": torch.randn(20, 2, device=DEVICE)[:, 0]}
    for _ in range(2):
        torch.func.functional_call(block, weights)
        block()
    assert taken == [False, True, False, True]


def test_a_plan_is_used_again_only_for_the_same_autocast():
    x, f, _ = tensors((2, 3, 20), (BRAIN, BRAIN))
    norms = [LayerNorm(20).to(DEVICE, BRAIN) for _ in range(2)]
    norms[1]._fast_norm = not norms[0]._fast_norm
    for dtype in (None, BRAIN, torch.half):
        with torch.autocast(torch.device(DEVICE).type, dtype, enabled=dtype is not None), use_backend("triton"):
            dtypes = [FeatureConnection().with_norm(x, f, norm)[1].dtype for norm in norms]
            assert dtypes == [norm(x + f).dtype for norm in norms]


@pytest.mark.parametrize("fast", [False, True])
def test_the_dtype_under_autocast(fast, monkeypatch):
    x, f, _ = tensors((2, 3, 20), (SINGLE, BRAIN))
    norm = LayerNorm(20).to(DEVICE)
    norm._fast_norm = fast
    with torch.autocast(DEVICE, BRAIN):
        expected = in_two_steps(x, f, norm)
        y, h = in_one_step("auto")(x, f, norm)
    assert (y.dtype, h.dtype) == (SINGLE, expected[1].dtype)
    torch.testing.assert_close(h, expected[1], atol=2e-2, rtol=2e-2)


def test_a_norm_that_amplifies_rounding_gives_no_warning():
    """The mean of the stream is large, so y has few digits after the norm. pytest turns warnings into errors."""
    x, f, g = tensors((4, 9, 64), (BRAIN, BRAIN))
    gradients(in_one_step("auto"), x + 40.0, f, made("LayerNorm", 64, BRAIN), (g, g))
    assert set(backends._passed.values()) == {True}


@pytest.mark.parametrize(("wrong", "result"), [("update", 0), ("update", 1), *(("gradients", i) for i in (0, 1, 2, 3))])
def test_wrong_kernels_of_the_norm_are_replaced_with_a_warning(wrong, result, monkeypatch):
    original = getattr(planning.Plan, wrong)

    def spoiled(*args, **kwargs):
        results = original(*args, **kwargs)
        changed = list(results[0] if wrong == "update" else results)
        changed[result] = 1.01 * changed[result]
        return (tuple(changed), results[1]) if wrong == "update" else tuple(changed)

    monkeypatch.setattr(planning.Plan, wrong, spoiled)
    x, f, _ = tensors((3, 5, 20))
    norm = made("LayerNorm", 20)
    with pytest.warns(RuntimeWarning, match=r"Triton kernels \(.* rows norm .*are inaccurate"):
        assert update_with_norm(x, f, norm, EPS, "auto") is None
    assert update_with_norm(x, f, norm, EPS, "auto") is None  # without a second warning


# --------------------------------------------------------------------------------------------------- whole models
SMALL = dict(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2, num_classes=10)


def step(model, images, use_checkpoint=None):
    model.zero_grad()
    run = model if use_checkpoint is None else functools.partial(checkpoint, model, use_reentrant=use_checkpoint)
    y = run(images)
    y.square().mean().backward()
    return y.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return timm.create_model("vit_small_ortho", **SMALL).to(DEVICE)


@pytest.mark.parametrize("use_checkpoint", [None, False, True])
def test_a_model_takes_one_step_for_each_attention(model, calls, use_checkpoint):
    images = torch.randn(2, 3, 32, 32, device=DEVICE).requires_grad_()
    with use_backend("torch"):
        expected = step(model, images)
    for name, backend in (("auto", "auto"), ("copied", "triton")):
        with use_backend(backend):
            used = copy.deepcopy(model) if name == "copied" else model
            torch.testing.assert_close(step(used, images, use_checkpoint), expected)
    passes = 1 if use_checkpoint is None else 2
    fused = use_checkpoint is not False  # a checkpoint that is not reentrant has hooks of saved tensors
    tests = len(backends._passed)  # of the update, and of the update with its norm
    assert tests == 1 + fused
    assert calls == {"update": 2 * 4 * passes + tests, "gradients": 2 * 4 + tests}
    assert sum(bool(plan.norm) for plan in backends.plans.values()) == 2 * fused  # tested and not


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtypes"), [
    ((64, 197, 384), (SINGLE, BRAIN)), ((64, 197, 768), (BRAIN, BRAIN)), ((3, 50, 1000), (SINGLE, SINGLE)),
], ids=str)
def test_kernels_of_a_gpu_agree_with_two_steps(shape, dtypes):
    """A warning of the test at first use would fail this test."""
    x, f, g = tensors(shape, dtypes)
    norm = made("LayerNorm", shape[-1], g.dtype)
    for both in (in_one_step("auto"), in_one_step("auto")):  # the second call launches compiled kernels directly
        measured = gradients(both, x, f, norm, (g, g))
        for name, expected in gradients(in_two_steps, x, f, norm, (g, g)).items():
            limit = 2e-2 if expected.dtype == BRAIN else 1e-3
            atol = limit * expected.abs().max().item()
            torch.testing.assert_close(measured[name], expected, rtol=0, atol=atol, msg=name)
