"""Padding: masks of the update, forms of attention masks, and masks of connections."""
import re

import pytest
import torch
from helpers.padded import KEYS, LENGTHS, MASK, OF_SAMPLES, SQUARE, additive, batch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

from timm_ortho import CONNECTIONS, create_connection, residual_update
from timm_ortho.connections import real_tokens
from timm_ortho.functional import plain_update


def with_gradients(function, x, f, g):
    """Return ``y, dL/dx, dL/df`` for ``L = <g, y>``."""
    y = function(x, f)
    return y, *torch.autograd.grad(y, (x, f), g)


# -------------------------------------------------------------------------------------------------- the formula
@pytest.mark.parametrize("padding", [0.0, 3.0, float("nan"), float("inf")])
@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.4, 0.7), (1.0, 1.0)])
def test_each_sample_is_updated_as_without_padding(weights, padding):
    """Each sample has the same results as alone and without padding, even if the padding is NaN."""
    x, f = batch(padding=padding)
    g = torch.randn_like(x)  # upstream gradients of padding are not zero
    arguments = dict(parallel=weights[0], orthogonal=weights[1], dim=(1, 2), eps=1e-3)
    together = with_gradients(lambda x, f: residual_update(x, f, mask=MASK, **arguments), x, f, g)
    for sample, length in enumerate(LENGTHS):
        alone = [tensor.detach()[sample:sample + 1, :length].requires_grad_() for tensor in (x, f, g)]
        expected = with_gradients(lambda x, f: residual_update(x, f, **arguments), *alone)
        for a, b in zip(together, expected, strict=True):
            torch.testing.assert_close(a[sample, :length], b[0], rtol=1e-12, atol=1e-13)
            assert not a[sample, length:].any()


def test_gradcheck_with_a_mask():
    x, f = batch(padding=2.0)
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for b in (1.0, weight):
        inputs = (x, f, weight)
        assert torch.autograd.gradcheck(
            lambda x, f, a, b=b: residual_update(x, f, parallel=a, orthogonal=b, dim=None, mask=MASK), inputs)
    assert torch.autograd.gradgradcheck(lambda x, f: residual_update(x, f, dim=None, mask=MASK), (x, f))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_ones_and_the_plain_formula_give_the_same_bits(dtype):
    x, f = batch(dtype=dtype, padding=1.0)
    assert torch.equal(residual_update(x, f, dim=None, mask=torch.ones_like(MASK)), residual_update(x, f, dim=None))
    masked = residual_update(x, f, dim=None, mask=MASK)
    assert masked.dtype == dtype
    assert torch.equal(masked, plain_update(x, f, 0.0, 1.0, None, 1e-6, MASK))


@pytest.mark.parametrize(("mask", "got"), [
    (MASK.float(), "torch.float32 of shape (4, 8, 1)"), (MASK[:2], "torch.bool of shape (2, 8, 1)"),
    (MASK.squeeze(-1), "torch.bool of shape (4, 8)"), (MASK[None], "torch.bool of shape (1, 4, 8, 1)"),
])
def test_bad_masks(mask, got):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole message is compared
        residual_update(*batch(), dim=None, mask=mask)
    assert str(error.value) == (
        f"mask must be boolean and broadcast to the shape of x, got {got}; x of shape (4, 8, 6)")


# --------------------------------------------------------------------------------------- forms of attention masks
OTHERS = KEYS & ~torch.eye(8, dtype=torch.bool)  # no token attends to itself
LONG = torch.zeros(4, 8, 6)


@pytest.mark.parametrize("allowed", [KEYS, SQUARE, SQUARE.expand(-1, 3, -1, -1), KEYS & torch.ones(8, 8).bool()])
@pytest.mark.parametrize("form", [
    lambda mask: mask, lambda mask: additive(mask, -torch.inf), lambda mask: additive(mask, -1e4, torch.bfloat16),
    lambda mask: additive(mask, torch.finfo(torch.float16).min, torch.float16),
    lambda mask: additive(mask, torch.finfo(torch.float32).min).double(),
    lambda mask: additive(mask, -torch.inf) - 30 * torch.rand(8, 8),  # with a bias
])
def test_padding_in_masks_of_scores(allowed, form):
    assert torch.equal(real_tokens(form(allowed), torch.zeros(4, 8, 6)), MASK)


@pytest.mark.parametrize("mask", [
    torch.ones(8, 8).bool().tril(), torch.ones(1, 1, 8, 8).bool().tril(), ~torch.eye(8, dtype=torch.bool),
    torch.randn(5, 8, 8), torch.zeros(4, 1, 8, 8),
], ids=["causal", "causal 4-d", "others", "bias of 5 heads", "nothing masked"])
def test_masks_without_padding_change_nothing(mask):
    assert real_tokens(mask, torch.zeros(4, 8, 6)).all()
    x, f = batch(padding=1.0)
    connection = create_connection("global")
    assert torch.equal(connection(x, f, mask), connection(x, f))


def test_float_masks_of_scores_are_additive():
    """Float masks of scores are added to the scores, so small numbers in them exclude no token.

    0, 1 and ToMe's logarithms of the sizes of merged tokens are such numbers.
    """
    for mask in (KEYS.float(), KEYS.double().expand(4, 1, 8, 8), torch.tensor([1.0, 2.0] * 4).log().expand(4, 1, 1, 8)):
        assert real_tokens(mask, LONG).all()
    for x in (LONG, LONG[:1]):
        assert real_tokens(OF_SAMPLES[:1].float(), x).all()


@pytest.mark.parametrize(("shape", "dtype", "x"), [
    ((4, 8), torch.bool, LONG), ((3, 8), torch.bool, LONG), ((2, 1, 8, 8), torch.float16, LONG),
    ((4, 3, 8), torch.bool, LONG), ((4, 1, 3, 8), torch.bool, LONG), ((4, 1, 1, 8, 8), torch.bool, LONG),
    ((8,), torch.bool, LONG), ((8, 8), torch.bool, torch.zeros(4, 8, 8, 6)), ((4, 1, 1, 8), torch.int64, LONG),
])
def test_unsupported_masks_are_refused(shape, dtype, x):
    message = (r"attention mask must be boolean or floating-point, \[N or 1, N\], .* and belong to a stream "
               rf"\[B, N, C\]; got shape {re.escape(str(list(shape)))}, dtype {dtype}, and x of shape .*mask=''$")
    with pytest.raises(ValueError, match=message):
        real_tokens(torch.ones(shape, dtype=dtype), x)
    with pytest.raises(ValueError, match="must be a tensor or a BlockMask, got list"):
        real_tokens([[True]], LONG)


def test_a_causal_bias_is_refused():
    for name in CONNECTIONS:
        if name not in OVER_TOKENS:
            create_connection(name)(LONG, LONG, causal_lower_right(8, 8))
    for bias in (causal_lower_right(8, 8), causal_upper_left(8, 8)):
        with pytest.raises(ValueError, match=r"attention is causal: .* Use the connection 'feature' or"):
            create_connection("global")(LONG, LONG, bias)


def test_masks_of_flex_attention():
    lengths = torch.tensor(LENGTHS)
    mask = create_block_mask(lambda b, h, q, k: (k < lengths[b]) & (k <= q), 4, None, 8, 8, device="cpu")
    assert torch.equal(real_tokens(mask, LONG), MASK)


def test_a_token_that_one_head_attends_to_is_real():
    halves = torch.stack([torch.arange(8) < 4, torch.arange(8) > 5]).view(2, 1, 8)  # one mask per head
    assert real_tokens(halves, torch.zeros(4, 8, 6)).flatten().tolist() == [True] * 4 + [False] * 2 + [True] * 2


def test_tokens_need_not_attend_to_themselves():
    # The fourth sample has one token, to which no token attends, so it counts as padding.
    assert torch.equal(real_tokens(OTHERS, torch.zeros(4, 8, 6))[:3], MASK[:3])


@pytest.mark.parametrize(("mask", "x"), [
    (None, torch.zeros(4, 8, 6)),
    (torch.zeros(4, 1, 8, 5).bool(), torch.zeros(4, 8, 6)),  # the keys are tokens of another stream
    (torch.zeros(4, 5).bool(), torch.zeros(4, 8, 6)),
    (torch.zeros(8, 5), torch.zeros(4, 8, 6)),
])
def test_masks_of_other_tokens_are_ignored(mask, x):
    assert real_tokens(mask, x) is None


OVER_TOKENS = {"global"}


@pytest.mark.parametrize("name", CONNECTIONS)
def test_connections(name):
    """The global scope excludes padding. Feature-wise connections treat each token separately."""
    x, f = batch(padding=2.0)
    connection = create_connection(name).double()
    y = connection(x, f, SQUARE)
    if name not in OVER_TOKENS:
        assert torch.equal(y, connection(x, f)), "add connections with one projection per sample to OVER_TOKENS"
    for sample, length in enumerate(LENGTHS):
        alone = connection(x[sample:sample + 1, :length], f[sample:sample + 1, :length])
        torch.testing.assert_close(y[sample:sample + 1, :length], alone, rtol=1e-12, atol=1e-13)


def test_padding_changes_no_random_draw():
    x, f = batch(padding=2.0)
    connection = create_connection("global", prob=0.5).double()
    for seed in range(8):
        torch.manual_seed(seed)
        y = connection(x, f, SQUARE)
        torch.manual_seed(seed)
        torch.testing.assert_close(y[2:3, :7], connection(x[2:3, :7], f[2:3, :7]), rtol=1e-12, atol=1e-13)


def test_torchscript_and_fx_take_any_mask():
    x, f = batch(padding=2.0)
    connection = create_connection("global").double()
    traced = torch.fx.symbolic_trace(connection)
    for compiled in (torch.jit.script(connection), traced, torch.fx.symbolic_trace(traced)):
        torch.testing.assert_close(compiled(x, f, None), connection(x, f))
        for mask in (SQUARE, additive(SQUARE, -torch.inf)):
            torch.testing.assert_close(compiled(x, f, mask), connection(x, f, mask), rtol=1e-12, atol=1e-13)
            assert not compiled(x, f, mask)[~OF_SAMPLES].any()
        with pytest.raises((ValueError, torch.jit.Error), match="attention mask must be boolean or floating-point"):
            compiled(x, f, OF_SAMPLES)
