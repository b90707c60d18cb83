"""Skip transforms: exact properties, parity with dense matrices, gradients, and compilers."""
import copy
import math
import pickle
from functools import reduce

import pytest
import torch

from timm_ortho._checks import IMPORT_HINT
from timm_ortho.skips import SKIPS, create_skip, transforms as skips

WIDTHS = [1, 2, 12, 74, 192]
MAPS = {  # name: skip, arguments
    "identity": ("identity", {}),
    "mr": ("idempotent_mr", {}),
    "cmr": ("idempotent_cmr", {}),
    "tp": ("orthogonal_tp", {}),
    "random": ("orthogonal_random", {}),
    "scaled": ("scaled", {"count": 5}),
}
LAYOUTS = {  # a stream with c channels, and its channel axis
    "tokens": lambda c: (torch.randn(3, 5, c), -1),
    "nchw": lambda c: (torch.randn(2, c, 3, 5), 1),
    "channels_last": lambda c: (torch.randn(2, c, 3, 5).to(memory_format=torch.channels_last), 1),
    "one_pixel": lambda c: (torch.randn(4, c, 1, 1), 1),
    "strided": lambda c: (torch.randn(2, 3, 2 * c)[..., ::2], -1),
    "vector": lambda c: (torch.randn(c), 0),
    "channels_first": lambda c: (torch.randn(c, 7, 2), 0),
}


def dense(name, width, branches=None, **arguments):
    """Return P in float64: orthogonal maps as Kronecker products, all other maps by their definition."""
    eye = torch.eye(width, dtype=torch.float64)
    if name.startswith("idempotent"):
        branches = branches or width
        average = torch.kron(torch.ones(branches, branches), torch.eye(width // branches)).double() / branches
        return average if name == "idempotent_mr" else eye - average
    if name == "orthogonal_tp" and width & (width - 1) == 0:
        product = torch.ones(1, 1, dtype=torch.float64)
        for _ in range(int(math.log2(width))):
            product = torch.kron(product, torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64) / math.sqrt(2))
        return product
    if name in ("identity", "scaled"):
        return eye / arguments.get("count", 1)
    matrices = create_skip(name, width, **arguments).matrices
    return reduce(torch.kron, map(torch.DoubleTensor, matrices), torch.ones(1, 1).double())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# -------------------------------------------------------------------------------------------- exact properties
@pytest.mark.parametrize("branches", [1, 2, 4, 16])
@pytest.mark.parametrize("name", ["idempotent_mr", "idempotent_cmr"])
def test_idempotent_exactly(name, branches):
    """If all values of x are multiples of the number of branches, no sum is rounded, and P P x equals P x exactly."""
    skip = create_skip(name, 32, branches=branches)
    x = branches * torch.randint(-100, 100, (5, 32)).float()
    assert torch.equal(skip(skip(x)), skip(x))
    p = skip.matrix()
    assert torch.equal(p @ p, p)
    assert torch.equal(p, p.T)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("branches", [1, 2, None])
def test_ranks(width, branches):
    branches = branches if width > 1 else None
    mr, cmr = (create_skip(name, width, branches=branches) for name in ("idempotent_mr", "idempotent_cmr"))
    average = width // (branches or width)
    assert (mr.rank, cmr.rank) == (average, width - average)
    for skip in (mr, cmr):
        assert torch.linalg.matrix_rank(skip.matrix()).item() == skip.rank
        again = create_skip(skip.name, width, rank=skip.rank)
        assert torch.equal(again.matrix(), skip.matrix())
    torch.testing.assert_close(mr.matrix() + cmr.matrix(), torch.eye(width, dtype=torch.float64))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["orthogonal_tp", "orthogonal_random"])
def test_orthogonal(name, width):
    skip = create_skip(name, width)
    p = skip(torch.eye(width)).T.double()  # computed in float32 by the fast algorithm
    torch.testing.assert_close(p.T @ p, torch.eye(width).double(), rtol=0, atol=1e-6)
    assert skip.rank == width


@pytest.mark.parametrize("width", [2, 3, 5, 7, 11, 13, 37])
def test_tp_of_a_prime_mixes_all_channels(width):
    assert create_skip("orthogonal_tp", width).matrix().abs().min() > 1e-3


def test_random_rotations_differ_between_sites_and_seeds():
    """If no column were negated, half of the draws would be reflections, with a negative determinant."""
    drawn = [create_skip("orthogonal_random", width, site=site, seed=seed).matrix()
             for width in (2, 3, 6, 16) for site, seed in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 1))]
    for number, p in enumerate(drawn):
        assert torch.linalg.det(p).item() == pytest.approx(1.0)
        assert not any(q.shape == p.shape and torch.allclose(p, q) for q in drawn[:number])
    assert torch.equal(drawn[0], create_skip("orthogonal_random", 2).matrix())


def test_random_does_not_depend_on_torch():
    """Seed and site alone determine the matrix, because checkpoints do not contain it."""
    before = torch.get_rng_state()
    p = create_skip("orthogonal_random", 2, seed=3, site=7).matrix()
    assert torch.equal(torch.get_rng_state(), before)
    assert p[0].tolist() == pytest.approx([-0.29598868469501455, 0.9551914460109634], abs=1e-12)


# ------------------------------------------------------------------------------------- parity with dense matrices
@pytest.mark.parametrize("width", [1, 12, 35, 256])
@pytest.mark.parametrize("name", MAPS)
def test_equals_multiplication_by_the_dense_matrix(name, width):
    skip, arguments = MAPS[name]
    p = dense(skip, width, **arguments)
    for layout in LAYOUTS.values():
        x, dim = layout(width)
        x = x.double()
        module = create_skip(skip, width, dim=dim, **arguments)
        y = module(x)
        torch.testing.assert_close(y, (x.movedim(dim, -1) @ p.T).movedim(-1, dim))
        _, pullback = torch.func.vjp(module, x)
        torch.testing.assert_close(pullback(x)[0], (x.movedim(dim, -1) @ p).movedim(-1, dim))
        torch.testing.assert_close(module.matrix(), p)


def test_keeps_the_memory_format():
    x = torch.randn(2, 24, 3, 5).to(memory_format=torch.channels_last)
    module = create_skip("orthogonal_tp", 24, dim=1)
    assert module(x).is_contiguous(memory_format=torch.channels_last)
    assert module(x.contiguous()).is_contiguous()


@pytest.mark.parametrize("branches", [2, 3, 4])
@pytest.mark.parametrize("name", ["idempotent_mr", "idempotent_cmr"])
def test_branches_are_blocks_of_channels(name, branches):
    x = torch.randn(3, 2, 24, dtype=torch.float64)
    p = dense(name, 24, branches)
    torch.testing.assert_close(create_skip(name, 24, branches=branches)(x), x @ p.T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MAPS)
def test_rounds_once(name, dtype):
    """Only the result is rounded to the dtype of x. The matrix and intermediate results are not."""
    skip, arguments = MAPS[name]
    x = (300 * torch.randn(5, 192)).to(dtype)
    module = create_skip(skip, 192, **arguments)
    error = (module(x).double() - module(x.double())).abs()
    assert module(x).dtype == dtype
    assert (error <= 1.01 * torch.finfo(dtype).eps * module(x.double()).abs() + 1e-3).all()


@pytest.mark.parametrize("name", ["cmr", "random"])
def test_autocast_keeps_the_dtype_of_the_stream(name):
    skip, arguments = MAPS[name]
    module, x = create_skip(skip, 48, **arguments), torch.randn(3, 48, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y, of_compiler = module(x), compiled(x)
        z = module(x) + torch.randn(3, 48, dtype=torch.bfloat16)
    gradient, = torch.autograd.grad(y, x, y.detach())
    assert torch.equal(y, module(x))
    assert torch.equal(of_compiler, y)
    torch.testing.assert_close(gradient, y.detach() @ module.matrix(torch.float32))
    assert z.dtype == torch.float32


# ----------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize(("name", "layout"), [
    ("mr", "nchw"), ("cmr", "tokens"), ("tp", "channels_last"), ("random", "strided"), ("scaled", "tokens")])
def test_gradcheck_of_skips(name, layout):
    skip, arguments = MAPS[name]
    x, dim = LAYOUTS[layout](6)
    x = x.double().requires_grad_()
    module = create_skip(skip, 6, dim=dim, **arguments)
    assert torch.autograd.gradcheck(module, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda t: module(t).square(), (x,))


def test_transforms_of_torch_func():
    module, x = create_skip("orthogonal_tp", 12), torch.randn(4, 12, dtype=torch.float64)
    jacobian = torch.func.vmap(torch.func.jacrev(module))(x)
    torch.testing.assert_close(jacobian, module.matrix().expand(4, 12, 12))


@pytest.mark.parametrize("name", MAPS)
def test_keeps_only_matrices_for_the_backward_pass(name):
    kept, (skip, arguments) = [], MAPS[name]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        create_skip(skip, 24, **arguments)(torch.randn(100, 24, requires_grad=True))
    assert sum(tensor.numel() for tensor in kept) <= 24 * 24


# ------------------------------------------------------------------------------------------- compilers, copies
def test_copies_and_pickles():
    module, x = create_skip("orthogonal_random", 24, site=4), torch.randn(3, 24)
    expected = module(x)  # creates the cached tensors; copies do not contain them
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.half()):
        assert torch.equal(other(x), expected)
    assert not module.state_dict()
    assert b"torch._utils" not in pickle.dumps(module)


def test_inference_mode_does_not_affect_training():
    module, x = create_skip("orthogonal_tp", 24), torch.randn(3, 24, requires_grad=True)
    torch._dynamo.reset()
    for form in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        skips._cached_tensors.cache_clear()
        with torch.inference_mode():
            form(x)
        first, = torch.autograd.grad(form(x).pow(3).sum(), x, create_graph=form is module)
        if form is module:
            first.sum().backward()
        torch.func.jacrev(module)(x)


def test_repr_of_skips():
    assert repr(create_skip("idempotent_mr", 64, dim=1, branches=4)) == (
        "Skip('idempotent_mr', width=64, dim=1, branches=4, rank=16)")
    assert repr(create_skip("orthogonal_tp", 64)) == "Skip('orthogonal_tp', width=64, dim=-1, rank=64)"


# ------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(("kwargs", "message"), [
    ({"skip": "orthogonal"}, "unknown skip 'orthogonal', known are 'identity', 'idempotent_mr', 'idempotent_cmr', "
                             "'orthogonal_tp', 'orthogonal_random', 'scaled'; did you mean 'orthogonal_tp'?"
                             + IMPORT_HINT),
    ({"skip": "idempotent_mr", "branches": 5}, "branches must divide the width of the stream, got branches=5 for 12 "
                                               "channels"),
    ({"skip": "idempotent_cmr", "branches": 0}, "branches must be a whole number of at least 1, got 0"),
    ({"skip": "idempotent_mr", "rank": 0},
     "idempotent_mr of 12 channels cannot have rank 0; possible ranks are 1, 2, 3, 4, 6, 12"),
    ({"skip": "idempotent_cmr", "rank": 12},
     "idempotent_cmr of 12 channels cannot have rank 12; possible ranks are 0, 6, 8, 9, 10, 11"),
    ({"skip": "idempotent_mr", "rank": 3, "branches": 4}, "branches determines rank: pass only one, got branches=4 "
                                                          "and rank=3"),
    ({"skip": "orthogonal_tp", "rank": 6},
     "orthogonal_tp has no choice of ranks, idempotent_mr and idempotent_cmr have: omit rank, got rank=6"),
    ({"skip": "scaled", "count": 0}, "count must be a whole number of at least 1, got 0"),
    ({"skip": "orthogonal_random", "seed": "1"}, "seed must be a whole number, got '1'"),
])
def test_bad_arguments_of_create_skip(kwargs, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole message is compared
        create_skip(width=12, **kwargs)
    assert str(error.value) == message


@pytest.mark.parametrize("name", SKIPS)
def test_an_input_of_a_wrong_width(name):
    module = create_skip(name, 12, dim=1)
    with pytest.raises(ValueError, match=rf"skip '{name}' is for 12 channels on axis 1, got a stream of shape "
                                         r"\(2, 24, 3\)"):
        module(torch.randn(2, 24, 3))
