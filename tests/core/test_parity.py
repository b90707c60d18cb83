"""Operator, kernels, norm and connections are about as exact as the plain formula, compared with float64.

helpers/parity.py defines the bound. Fixed cases cover each layout, dtype, weight and shape. Random cases are drawn by
scripts/checks/fuzz.py. Without a CUDA device, tests/conftest.py makes the kernels run in Triton's interpreter.
"""
import copy
import functools

import pytest
import torch
from helpers.half_connection import HalfConnection
from helpers.kernel_cases import (
    BRAIN,
    DEVICE,
    DOUBLE,
    EPS,
    HALF,
    LAYOUTS,
    SINGLE,
    WEIGHTS,
    both,
    layouts,
    needs_triton,
    nhwc,
    tensors,
    weight,
)
from helpers.norm_cases import NORMS, in_one_step, in_two_steps, made
from helpers.oracle import rounded, truth
from helpers.parity import problem, problem_of_update, results

from scripts.checks import fuzz
from timm_ortho import CONNECTIONS, create_connection, create_skip
from timm_ortho.functional import residual_update, use_backend

pytestmark = pytest.mark.usefixtures("no_default_backend", "auto_is_triton")
CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------- the oracle
def test_the_oracle_against_a_loop_over_numbers():
    x, f = torch.randn(2, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(-1)
    y = truth(x, f, 0.3, 0.7, [0, 2], 0.5)
    for j in range(3):
        positions = [(i, k) for i in range(2) for k in range(4)]
        s = sum(x[i, j, k] * f[i, j, k] for i, k in positions) / (sum(x[i, j, k] ** 2 for i, k in positions) + 0.5)
        for i, k in positions:
            parallel = s * x[i, j, k]
            torch.testing.assert_close(y[i, j, k], x[i, j, k] + 0.3 * parallel + 0.7 * (f[i, j, k] - parallel))


def test_the_gradients_of_the_oracle_against_finite_differences():
    x, f = torch.randn(2, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(-1)
    inputs = [t.requires_grad_() for t in (x, f, *torch.tensor([0.3, 0.7], dtype=torch.float64).unbind())]
    assert torch.autograd.gradcheck(lambda x, f, a, b: truth(x, f, a, b, [0, 2], 0.5), inputs)


# ----------------------------------------------------------------------------------- random cases of the update
@pytest.mark.parametrize(("backend", "seeds", "elements"), [
    ("torch", range(200), 3000), ("torch", range(6), 3_000_000),
    pytest.param("triton", range(30), 600, marks=needs_triton),
    pytest.param("auto", range(60, 90), 600, marks=needs_triton),
])
def test_random_cases(backend, seeds, elements):
    for case in (fuzz.Case.of(seed, elements) for seed in seeds):
        # Triton's interpreter returns NaN for a bfloat16 input and a float64 input.
        if backend == "torch" or set(case.dtypes) != {BRAIN, DOUBLE}:
            assert not fuzz.problem(case, CPU, backend), case.text


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, lambda: CPU],
                         ids=["inference mode", "no gradients", "default device"])
def test_random_cases_without_gradients(context):
    for case in (fuzz.Case.of(seed, 1000) for seed in range(100)):
        if not case.needed:
            with context():
                assert not fuzz.problem(case, CPU, "torch"), case.text


# ------------------------------------------------------------------------------------ chosen cases of the update
def check_update(backend, inputs, g, dim, keep="output", **options):
    def update(x, f, a, b):
        return residual_update(x, f, parallel=a, orthogonal=b, dim=dim, eps=EPS, keep=keep, backend=backend)

    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    assert not problem_of_update(update, inputs, g, dims, EPS, **options)
    return update


def check_case(backend, shape, dim, dtypes=(SINGLE, SINGLE), weights=(0.0, 1.0), keep="output", needed=None, scale=1.0):
    x, f, g = tensors(shape, dtypes)
    a, b = (weight(w, DOUBLE if g.dtype == DOUBLE else SINGLE) for w in weights)
    check_update(backend, dict(x=x, f=scale * f, a=a, b=b), g, dim, keep, needed=needed)


@both
@layouts
def test_weights(backend, layout):
    check_case(backend, *LAYOUTS[layout], keep="branch")
    for weights in WEIGHTS if backend == "torch" else WEIGHTS[:2]:  # the kernels have no learned weights
        check_case(backend, *LAYOUTS[layout], weights=weights)


DTYPES = [(DOUBLE, DOUBLE), (HALF, HALF), (BRAIN, BRAIN), (SINGLE, BRAIN), (HALF, BRAIN), (BRAIN, SINGLE),
          (DOUBLE, HALF)]


@both
@pytest.mark.parametrize(("layout", "dtypes"), [  # each dtype with two layouts
    (layout, dtypes) for i, layout in enumerate(LAYOUTS) for j, dtypes in enumerate(DTYPES) if (i + j) % 2], ids=str)
def test_dtypes(backend, layout, dtypes):
    check_case(backend, *LAYOUTS[layout], dtypes)
    if backend == "torch":
        check_case(backend, *LAYOUTS[layout], dtypes, ("a", "b"))


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("scale", [0.1, 10.0])
@layouts
def test_sizes_of_the_branch(layout, scale, dtype):
    check_case("torch", *LAYOUTS[layout], (dtype, dtype), (0.3, 0.9), scale=scale)


@both
@pytest.mark.parametrize(("shape", "dim"), [
    ((1, 1, 3), -1), ((37, 11, 1), -1), ((3, 2, 64), -1), ((2, 3, 8192), -1), ((2, 3, 9000), -1), ((2, 40000), -1),
    ((5, 33, 9, 11), None), ((5, 33, 9, 11), (2, 3)), ((5, 33, 9, 11), (1, -1)), ((5, 33, 9, 11), (-1, 1, 2)),
    ((50, 6), 0), ((4, 6, 5), (0, 1, 2)), ((300,), 0), ((2, 1024, 5), 1), ((1, 2048, 5), 1),
    ((1, 2049, 5), 1), ((1, 8, 1, 300), 1),
    ((0, 5, 3), -1), ((0, 5, 3), None), ((3, 0), -1),
], ids=str)
def test_shapes(backend, shape, dim):
    check_case(backend, shape, dim)
    if backend == "torch":
        check_case(backend, shape, dim, weights=("a", "b"))


@both
@layouts
def test_gradients_of_some_inputs(backend, layout):
    for needed in ("x", "f", "a", "b", "xa", "fb") if backend == "torch" else ("x", "f"):
        weights = tuple(name if name in needed else value for name, value in (("a", 0.0), ("b", 1.0)))
        check_case(backend, *LAYOUTS[layout], weights=weights, needed=needed)


def swapped(t):
    return t.transpose(1, 3).contiguous().transpose(1, 3)


def constant(t):
    return t[:1, :1, :1, :1].expand_as(t)  # all strides are 0, as in the gradient of y.sum()


def unaligned(t):
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)  # aligned to 4 bytes, not to 16


STRIDES = {
    "sliced": lambda x, f, g: (x[:, ::2], f[:, 1::2], g[:, 3:]),
    "narrowed": lambda x, f, g: (x[..., 1:], f[..., :3], g[..., :3]),
    "transposed": lambda x, f, g: (x.transpose(1, 3), f.transpose(1, 3), g.transpose(1, 3)),
    "dense in another order": lambda x, f, g: (swapped(x), f, nhwc(g)),
    "channels-last": lambda x, f, g: (nhwc(x), nhwc(f), nhwc(g)),
    "channels-last stream": lambda x, f, g: (nhwc(x), f, g),
    "channels-last branch": lambda x, f, g: (x, nhwc(f), g),
    "channels-last gradient": lambda x, f, g: (x, f, nhwc(g)),
    "expanded stream": lambda x, f, g: (x[:1].expand_as(x), f, g),
    "expanded stream and branch": lambda x, f, g: (x[:, :1].expand_as(x), f[:, :, :1].expand_as(f), g),
    "expanded gradient": lambda x, f, g: (x, f, constant(g)),
    "channels-last with an expanded gradient": lambda x, f, g: (nhwc(x), nhwc(f), constant(g)),
    "unaligned": lambda x, f, g: (unaligned(x), unaligned(f), unaligned(g)),
}


@both
@pytest.mark.parametrize(("strides", "dim"), [  # each placement with three axes
    (strides, dim) for i, strides in enumerate(STRIDES) for j, dim in enumerate([0, 1, -1, None, (0, 2), (1, 3)])
    if (i + j) % 2], ids=str)
def test_any_strides(backend, strides, dim):
    x, f, g = STRIDES[strides](*tensors((2, 6, 5, 4)))
    inputs = dict(x=x, f=f, a=0.0, b=1.0)
    measured = results(check_update(backend, inputs, g, dim), inputs, "xf", g)
    assert {t.stride() for t in measured.values()} == {torch.empty_like(x).stride()}


SHARED = {
    "the same": lambda x: (x, x),
    "transposed": lambda x: (x, x.transpose(0, 1)),
    "overlapping": lambda x: (x[:-1], x[1:]),
    "halves": lambda x: x.chunk(2, 1),
}


@both
@pytest.mark.parametrize("share", SHARED)
def test_stream_and_branch_that_share_memory(backend, share):
    x, _, _ = tensors((8, 8, 5))
    g = tensors(SHARED[share](x)[0].shape, seed=1)[2]
    check_update(backend, dict(x=x, a=0.5, b=1.0), g, -1, of=lambda x, a, b: (*SHARED[share](x), a, b))


def test_a_transposed_stream_projected_over_its_first_axis():
    """The axis of the sum is contiguous in memory, although it is the first axis."""
    x, f, g = (t.t() for t in tensors((1024, 2048)))
    assert x.stride(0) == 1
    check_update("torch", dict(x=x, f=f, a=0.0, b=1.0), g, 0)
    check_update("torch", dict(x=x, f=f, a=0.0, b=1.0), g, 0, needed="")


# ------------------------------------------------------------------------------------- the update and its norm
@needs_triton
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("shape", "dtypes", "of_norm"), [
    ((3, 7, 48), (SINGLE, SINGLE), SINGLE),
    ((2, 5, 197), (SINGLE, SINGLE), SINGLE),
    ((37, 33), (BRAIN, SINGLE), SINGLE),
    ((2, 3, 4, 65), (BRAIN, BRAIN), BRAIN),
    ((3, 20), (HALF, HALF), HALF),
    ((2, 9, 40), (SINGLE, BRAIN), SINGLE),
    ((1, 3, 1500), (SINGLE, SINGLE), SINGLE),
], ids=str)
def test_an_update_and_its_norm_in_one_step(norm, shape, dtypes, of_norm):
    x, f, g = tensors(shape, dtypes)
    norm = made(norm, shape[-1], of_norm)
    upstream = g, torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(g)

    def computed(both, norm, x, f, upstream):
        inputs = {"x": x, "f": f, **dict(zip("wc", norm.parameters(), strict=False))}
        return results(lambda x, f, **parameters: both(x, f, norm), inputs, [*inputs], upstream)

    exact = computed(functools.partial(in_two_steps, update=truth), copy.deepcopy(norm).double(),
                     x.double(), f.double(), [g.double() for g in upstream])
    reference = computed(functools.partial(in_two_steps, update=rounded), norm, x, f, upstream)
    # The norm can amplify rounding errors of y, and its parameters' gradients are sums over all rows.
    sizes = {name: 4 * t.abs().max().item() for name, t in exact.items()}
    found = problem(computed(in_one_step("triton"), norm, x, f, upstream), reference, exact, sizes)
    assert not found, found


# ------------------------------------------------------------------------------------------------- connections
def of_hybrid(connection):
    return tuple((connection.rho * function(connection.theta)).squeeze() for function in (torch.sin, torch.cos))


CONNECTED = {  # arguments of `create_connection`; a, b or a function that computes both from the parameters
    "linear": (dict(connection="linear"), 1.0, 1.0),
    "feature": (dict(connection="feature"), 0.0, 1.0),
    "global": (dict(connection="global"), 0.0, 1.0),
    "half": (dict(connection=HalfConnection), 0.5, 1.0),
    "branch kept": (dict(connection="feature", keep="branch"), 0.0, 1.0),
    "probability": (dict(connection="global", prob=0.25), 0.75, 1.0),
    "hybrid": (dict(connection="hybrid"), of_hybrid),
    "one group": (dict(connection="feature", groups=1), 0.0, 1.0),
    "groups": (dict(connection="feature", groups=3), 0.0, 1.0),
    "a group per channel": (dict(connection="feature", groups=12), 0.0, 1.0),
    "groups, branch kept": (dict(connection="feature", groups=3, keep="branch"), 0.0, 1.0),
    "groups with a probability": (dict(connection="feature", groups=4, prob=0.25), 0.75, 1.0),
    "groups of hybrid": (dict(connection="hybrid", groups=3), of_hybrid),
    "groups with a skip": (dict(connection="feature", groups=3, skip="orthogonal_tp"), 0.0, 1.0),
}
PLACED = {  # shape, channel axis, how x and f are placed in memory
    "tokens": ((2, 5, 12), -1, lambda x, f: (x, f)),
    "NHWC": ((2, 3, 4, 12), 3, lambda x, f: (x, f)),
    "NCHW": ((2, 12, 3, 4), 1, lambda x, f: (x, f)),
    "channels-last": ((2, 12, 3, 4), -3, lambda x, f: (nhwc(x), nhwc(f))),
    "transposed": ((2, 5, 12), -1, lambda x, f: (x.mT.contiguous().mT, f.mT.contiguous().mT)),
    "branch transposed": ((2, 5, 12), -1, lambda x, f: (x, f.mT.contiguous().mT)),
}


# Each connection has each placement and each dtype. Together they have all pairs of placement and dtype.
CONNECTED_PLACED = [
    (name, placed, (DOUBLE, SINGLE, HALF, BRAIN)[(i + j) % 4])
    for i, name in enumerate(CONNECTED) for j, placed in enumerate(PLACED)]


def test_every_connection_has_a_formula():
    missing = CONNECTIONS.keys() - {arguments["connection"] for arguments, *_ in CONNECTED.values()}
    assert not missing, f"add {missing} to CONNECTED"


@both
@pytest.mark.parametrize(("name", "placed", "dtype"), CONNECTED_PLACED, ids=str)
def test_connections_are_their_formula(name, placed, dtype, backend):
    arguments, *weights = CONNECTED[name]
    arguments, groups = dict(arguments), arguments.get("groups", 1)
    shape, dim, place = PLACED[placed]
    x, f, g = tensors(shape, (dtype, dtype))
    x, f = place(x, f)
    if "skip" in arguments:
        arguments["skip"] = create_skip(arguments["skip"], 12, dim=dim)
    connection = create_connection(dim=dim, eps=EPS, **arguments).eval().to(DEVICE, DOUBLE if dtype == DOUBLE else None)
    with torch.no_grad():
        for parameter, value in zip(connection.parameters(), (0.7, -0.4, 0.2), strict=False):
            parameter.fill_(value)

    def formula(update, connection, x, f):
        a, b = weights[0](connection) if callable(weights[0]) else weights
        if connection.skip is not None:
            x = connection.skip(x)
        dims = None if name in ("global", "probability") else [dim]
        parts = zip(x.tensor_split(groups, dim), f.tensor_split(groups, dim), strict=True)
        return torch.cat([update(x, f, a, b, dims, EPS) for x, f in parts], dim)

    def computed(function, connection, x, f, g):
        inputs = {"x": x, "f": f, **dict(connection.named_parameters())}
        return results(lambda x, f, **parameters: function(connection, x, f), inputs, [*inputs], g)

    with use_backend(backend):
        measured = computed(lambda connection, x, f: connection(x, f), connection, x, f, g)
    exact = computed(functools.partial(formula, truth), copy.deepcopy(connection).double(), *(
        t.double() for t in (x, f, g)))
    reference = computed(functools.partial(formula, rounded), connection, x, f, g)
    of_weights = ((x.double().abs() + f.double().abs()) * g.double().abs()).sum().item()
    found = problem(measured, reference, exact, dict.fromkeys(dict(connection.named_parameters()), of_weights))
    assert not found, found
    assert measured["y"].stride() == (connection.carried(x) + f).stride()
