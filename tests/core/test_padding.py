"""Token sequences of several lengths in one batch: what is padding has no part in a result (issue 7, item 3)."""
import dataclasses
import inspect

import pytest
import timm
import torch
from helpers.small_models import host
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.vision_transformer import Block, ResPostBlock
from torch import nn
from torch.nn.attention.bias import causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

from timm_ortho import connect, create_connection, record, register_block, residual_update, sites
from timm_ortho.blocks import routed_class, specs
from timm_ortho.connections import CONNECTIONS, MASK_LAYOUTS, real_tokens
from timm_ortho.functional import plain_update

LENGTHS = (5, 2, 7, 1)  # tokens of each sample; the batch has one token more than any of them
MASK = torch.stack([torch.arange(8) < length for length in LENGTHS]).unsqueeze(-1)


def batch(*, padding=0.0, dtype=torch.float64):
    """``x`` and ``f``, ``[4, 8, 6]``, with ``padding`` behind the real tokens."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, *MASK.shape[:2], 6, generator=generator, dtype=torch.float64).to(dtype)
    return [tensor.masked_fill(~MASK, padding).requires_grad_() for tensor in drawn]


def with_gradients(function, x, f, g):
    """``y, dL/dx, dL/df`` for ``L = <g, y>``."""
    y = function(x, f)
    return y, *torch.autograd.grad(y, (x, f), g)


# -------------------------------------------------------------------------------------------------- the formula
@pytest.mark.parametrize("padding", [0.0, 3.0, float("nan"), float("inf")])
@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.4, 0.7), (1.0, 1.0)])
def test_each_sample_is_updated_as_if_it_were_alone(weights, padding):
    """Against a loop over the samples without their padding; NaN in it does no harm, forward or backward."""
    x, f = batch(padding=padding)
    g = torch.randn_like(x)  # something comes back from padding as well
    arguments = dict(parallel=weights[0], orthogonal=weights[1], dim=(1, 2), eps=1e-3)
    found = with_gradients(lambda x, f: residual_update(x, f, mask=MASK, **arguments), x, f, g)
    for sample, length in enumerate(LENGTHS):
        alone = [tensor.detach()[sample:sample + 1, :length].requires_grad_() for tensor in (x, f, g)]
        expected = with_gradients(lambda x, f: residual_update(x, f, **arguments), *alone)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[sample, :length], b[0], rtol=1e-12, atol=1e-13)
            assert not a[sample, length:].any()


def test_gradcheck():
    x, f = batch(padding=2.0)
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for b in (1.0, weight):
        inputs = (x, f, weight)
        assert torch.autograd.gradcheck(
            lambda x, f, a, b=b: residual_update(x, f, parallel=a, orthogonal=b, dim=None, mask=MASK), inputs)
    assert torch.autograd.gradgradcheck(lambda x, f: residual_update(x, f, dim=None, mask=MASK), (x, f))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_real_is_no_mask_and_plain_is_the_same_to_the_bit(dtype):
    x, f = batch(dtype=dtype, padding=1.0)
    assert torch.equal(residual_update(x, f, dim=None, mask=torch.ones_like(MASK)), residual_update(x, f, dim=None))
    masked = residual_update(x, f, dim=None, mask=MASK)
    assert masked.dtype == dtype
    assert torch.equal(masked, plain_update(x, f, 0.0, 1.0, None, 1e-6, MASK))


@pytest.mark.parametrize(("mask", "found"), [
    (MASK.float(), "torch.float32 of shape (4, 8, 1)"), (MASK[:2], "torch.bool of shape (2, 8, 1)"),
    (MASK.squeeze(-1), "torch.bool of shape (4, 8)"), (MASK[None], "torch.bool of shape (1, 4, 8, 1)"),
])
def test_bad_masks(mask, found):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole message is compared
        residual_update(*batch(), dim=None, mask=mask)
    assert str(error.value) == (
        f"mask must be boolean and broadcast to the shape of x, got {found}; x of shape (4, 8, 6)")


# ------------------------------------------------------------------------------------------- what a mask says
def additive(allowed, nothing, dtype=torch.float32):
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, nothing)


KEYS = MASK.transpose(1, 2).unsqueeze(1)  # [B, 1, 1, N]
SQUARE = KEYS & KEYS.transpose(2, 3)
OTHERS = KEYS & ~torch.eye(8, dtype=torch.bool)  # no token attends to itself


@pytest.mark.parametrize("allowed", [KEYS, SQUARE, SQUARE.expand(-1, 3, -1, -1), KEYS & torch.ones(8, 8).bool()])
@pytest.mark.parametrize("form", [
    lambda mask: mask, lambda mask: additive(mask, -torch.inf), lambda mask: additive(mask, -1e4, torch.bfloat16),
    lambda mask: additive(mask, torch.finfo(torch.float16).min, torch.float16),
    lambda mask: additive(mask, torch.finfo(torch.float32).min).double(),
    lambda mask: additive(mask, -torch.inf) - 30 * torch.rand(8, 8),  # with a bias
])
def test_padding_is_found_in_every_form_of_mask(allowed, form):
    assert torch.equal(real_tokens(form(allowed), torch.zeros(4, 8, 6)), MASK)


@pytest.mark.parametrize("mask", [
    torch.ones(8, 8).bool().tril(), torch.ones(1, 1, 8, 8).bool().tril(), ~torch.eye(8, dtype=torch.bool),
    torch.randn(5, 8, 8), torch.zeros(4, 1, 8, 8),
], ids=["causal", "causal 4-d", "others", "bias of 5 heads", "nothing masked"])
def test_masks_without_padding_change_nothing(mask):
    assert real_tokens(mask, torch.zeros(4, 8, 6)).all()
    connection = create_connection("global")
    x, f = batch(padding=1.0)
    assert torch.equal(connection(x, f, mask), connection(x, f))


LONG, OF_SAMPLES = torch.zeros(4, 8, 6), MASK.squeeze(-1)  # [B, N]
SQUARE_X = torch.zeros(8, 8, 6)  # as many samples as tokens
RAGGED = torch.arange(8) < torch.tensor([[5], [2], [7], [1], [8], [3], [6], [4]])


@pytest.mark.parametrize("form", [
    lambda mask: mask, lambda mask: mask.long(), lambda mask: mask.int(), lambda mask: mask.to(torch.uint8),
    lambda mask: 3 * mask.long(), lambda mask: mask.float(), lambda mask: mask.half(),
    lambda mask: (mask.long() - 1) * 10000, lambda mask: additive(mask, -torch.inf),
    lambda mask: additive(mask, torch.finfo(torch.float16).min, torch.float16),
    lambda mask: additive(mask, -torch.inf) + torch.rand(mask.shape),
], ids=["bool", "int64", "int32", "uint8", "numbers of documents", "float of 0 and 1", "half of 0 and 1",
        "added integers", "-inf", "lowest", "with a bias"])
def test_padding_is_found_in_a_mask_of_samples_and_tokens(form):
    """``[B, N]`` as tokenizers, image processors and flash attention have it."""
    assert torch.equal(real_tokens(form(OF_SAMPLES), LONG), MASK)
    assert torch.equal(real_tokens(form(RAGGED), SQUARE_X, "keys"), RAGGED.unsqueeze(-1))
    assert real_tokens(form(torch.ones(4, 8).bool()), LONG).all()


@pytest.mark.parametrize("form", [lambda mask: mask.long(), lambda mask: (mask.int() - 1) * 10000])
@pytest.mark.parametrize("allowed", [KEYS, SQUARE, SQUARE.expand(-1, 3, -1, -1)])
def test_padding_is_found_in_integers(form, allowed):
    assert torch.equal(real_tokens(form(allowed), LONG), MASK)


def test_floats_of_the_scores_are_added_to_them():
    """Of 0 and 1 too, and of the logarithms by which merged tokens are weighted: they keep no token out."""
    for mask in (KEYS.float(), KEYS.double().expand(4, 1, 8, 8), torch.tensor([1.0, 2.0] * 4).log().expand(4, 1, 1, 8)):
        assert real_tokens(mask, LONG).all()


@pytest.mark.parametrize(("shape", "x", "words"), [
    ((8, 8), SQUARE_X, ["can be [B, N] or [N, N]", "[B, 1, 1, N] or as [1, 1, N, N]", "[8, 8]", "[8, 8, 6]"]),
    ((4, 8, 8), LONG, ["samples or heads as its first axis", "[B, 1, N, N] or as [1, heads, N, N]", "[4, 8, 8]"]),
    ((4, 1, 8), LONG, ["samples or heads as its first axis", "[4, 1, 8]"]),
    ((12, 8, 8), LONG, ["samples or heads as its first axis", "[12, 8, 8]"]),  # as nn.MultiheadAttention has it
    ((3, 8), LONG, ["must be [B, N], [N, N]", "[3, 8]"]),
    ((2, 1, 8, 8), LONG, ["must be [B, N], [N, N]", "[2, 1, 8, 8]"]),
    ((4, 1, 3, 8), LONG, ["must be [B, N], [N, N]", "[4, 1, 3, 8]"]),
    ((4, 1, 1, 8, 8), LONG, ["two to four axes", "[4, 1, 1, 8, 8]"]),
    ((8,), LONG, ["two to four axes", "[8]"]),
    ((8, 8), torch.zeros(4, 8, 8, 6), ["belong to a stream [B, N, C]", "[4, 8, 8, 6]"]),
])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.int64])
def test_a_mask_without_one_reading_is_refused(shape, x, words, dtype):
    with pytest.raises(ValueError, match="attention mask ") as error:
        real_tokens(torch.ones(shape, dtype=dtype), x)
    words = [*words, str(dtype), "register the block with mask=''"]
    assert all(word in str(error.value) for word in words), error.value


def test_a_mask_of_another_type_is_refused():
    with pytest.raises(ValueError, match="must be a tensor or a BlockMask, got list"):
        real_tokens([[True]], LONG)


def test_a_layout_decides_between_two_readings():
    causal, heads = torch.ones(8, 8).bool().tril(), torch.stack([torch.arange(8) < n for n in (2, 6, 3, 5)])
    assert real_tokens(causal, SQUARE_X, "scores").all()
    assert torch.equal(real_tokens(causal, SQUARE_X, "keys"), causal.unsqueeze(-1))
    assert real_tokens(heads.view(4, 1, 8), LONG, "scores").flatten().tolist() == [True] * 6 + [False] * 2
    for mask in (causal, causal[None], causal[None, None], OF_SAMPLES[:1]):  # one reading under every layout
        readings = [real_tokens(mask, LONG[:, :8], layout) for layout in MASK_LAYOUTS]
        assert all(torch.equal(reading, readings[0]) for reading in readings)
    with pytest.raises(ValueError, match="unknown mask layout 'key'"):
        create_connection("global", mask_layout="key")


def test_masks_of_flex_attention():
    lengths = torch.tensor(LENGTHS)
    mask = create_block_mask(lambda b, h, q, k: (k < lengths[b]) & (k <= q), 4, None, 8, 8, device="cpu")
    assert torch.equal(real_tokens(mask, LONG), MASK)
    for layout in MASK_LAYOUTS:
        assert real_tokens(causal_upper_left(8, 8), LONG, layout) is None


def test_a_token_of_one_head_is_real():
    halves = torch.stack([torch.arange(8) < 4, torch.arange(8) > 5]).view(2, 1, 8)  # of each head
    assert real_tokens(halves, torch.zeros(4, 8, 6)).flatten().tolist() == [True] * 4 + [False] * 2 + [True] * 2


def test_tokens_that_attend_to_others_only_are_real():
    assert torch.equal(real_tokens(OTHERS, torch.zeros(4, 8, 6))[:3], MASK[:3])  # a single token has no others


@pytest.mark.parametrize(("mask", "x"), [
    (None, torch.zeros(4, 8, 6)),
    (torch.zeros(4, 1, 8, 5).bool(), torch.zeros(4, 8, 6)),  # to tokens of another stream
    (torch.zeros(4, 5).bool(), torch.zeros(4, 8, 6)),
    (torch.zeros(8, 5), torch.zeros(4, 8, 6)),
])
def test_masks_that_say_nothing_of_these_tokens(mask, x):
    assert real_tokens(mask, x) is None


@pytest.mark.parametrize("name", CONNECTIONS)
def test_connections(name):
    """The global scope leaves padding out; in the others a token is on its own, padded or not."""
    x, f = batch(padding=2.0)
    connection = create_connection(name).double()
    y = connection(x, f, SQUARE)
    if name != "global":
        assert torch.equal(y, connection(x, f))
    for sample, length in enumerate(LENGTHS):
        alone = connection(x[sample:sample + 1, :length], f[sample:sample + 1, :length])
        torch.testing.assert_close(y[sample:sample + 1, :length], alone, rtol=1e-12, atol=1e-13)


def test_a_probability_is_drawn_once_for_real_and_padded():
    x, f = batch(padding=2.0)
    connection = create_connection("global", prob=0.5).double()
    for seed in range(8):
        torch.manual_seed(seed)
        y = connection(x, f, SQUARE)
        torch.manual_seed(seed)
        torch.testing.assert_close(y[2:3, :7], connection(x[2:3, :7], f[2:3, :7]), rtol=1e-12, atol=1e-13)


def test_torchscript_and_fx_settle_the_mask_when_they_run():
    x, f = batch(padding=2.0)
    connection = create_connection("global").double()
    for compiled in (torch.jit.script(connection), torch.fx.symbolic_trace(connection)):
        for mask in (None, SQUARE, additive(SQUARE, -torch.inf), OF_SAMPLES, OF_SAMPLES.long(), OF_SAMPLES.float()):
            torch.testing.assert_close(compiled(x, f, mask), connection(x, f, mask), rtol=1e-12, atol=1e-13)
            assert mask is None or not compiled(x, f, mask)[~OF_SAMPLES].any()
        with pytest.raises((ValueError, torch.jit.Error), match=r"can be \[B, N\] or \[N, N\]"):
            compiled(*torch.ones(2, 8, 8, 6).double(), RAGGED)


def test_the_layout_of_a_block_reaches_torchscript_and_fx():
    x, f = torch.randn(2, 8, 8, 6).double()
    connection = create_connection("global", mask_layout="keys").double()
    for form in (connection, torch.jit.script(connection), torch.fx.symbolic_trace(connection)):
        assert torch.equal(form(x, f, RAGGED).any(-1), RAGGED)


# ---------------------------------------------------------------------------------------------------- timm's blocks
def test_every_block_that_takes_a_mask_hands_it_on():
    taking = set()
    for spec in specs("timm"):
        block = host(spec)
        if block is None:
            continue
        arguments = inspect.signature(getattr(block, spec.method, block.forward)).parameters
        masks = [name for name in arguments if any(word in name for word in ("mask", "valid", "padding"))]
        assert masks in ([], ["attn_mask"]), f"{spec.name} takes {masks}"
        routed = routed_class(block, spec)
        source = inspect.getsource(getattr(routed, spec.method, routed.forward))
        calls = [line for line in source.splitlines() if "self.connection_" in line]
        assert len(calls) >= len(spec.sites)
        assert all(line.endswith(", attn_mask=attn_mask)") == bool(masks) for line in calls), spec.name
        taking |= {spec.name} if masks else set()
    assert {f"timm.models.{name}" for name in ("vision_transformer.Block", "eva.EvaBlock")} <= taking


SIZES = ((8, 12), (16, 16), (4, 20), (4, 4))  # images of 6, 16, 5 and 1 patches of 4 x 4
SMALL = dict(patch_size=4, img_size=16, embed_dim=32, depth=3, num_heads=2, init_values=None, num_classes=5)
OPTIONS = {
    "average of patches": dict(global_pool="avg", reg_tokens=4, fc_norm=True),
    "average with registers": dict(global_pool="avg", reg_tokens=2, pool_include_prefix=True),
    "average and maximum": dict(global_pool="avgmax"),
    "maximum": dict(global_pool="max", class_token=True),
    "class token": dict(global_pool="token", class_token=True, reg_tokens=2),
    "attention pooling": dict(global_pool="map", reg_tokens=1),
    "mask of keys": dict(global_pool="avg", use_key_only_attn_mask=True),
    "EVA's blocks": dict(global_pool="avg", attn_type="eva", swiglu_mlp=True),
    "rotary positions": dict(global_pool="avg", attn_type="rope", rope_type="axial", pos_embed="none"),
    "rotary, mixed": dict(global_pool="token", class_token=True, attn_type="eva", rope_type="mixed", pos_embed="none"),
    "norms after": dict(global_pool="avg", block_fn=ResPostBlock),
    "transformed stream": dict(global_pool="avg", reg_tokens=2, skip="orthogonal_tp"),
    "drawn at random": dict(global_pool="avg", connection_prob=0.5),
    "in two blocks of three": dict(global_pool="avg", connection_layers=[0, 2]),
}


def images():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, *size, generator=generator) for size in SIZES]


def collated(images, length=None):
    """What timm's collation makes of images, padded to ``length`` patches, in double precision."""
    patches = [Patchify(4)(image) for image in images]
    longest = max(len(one["patches"]) for one in patches)
    inputs, _ = NaFlexCollator(length or longest)([(one, 0) for one in patches])
    return {**inputs, "patches": inputs["patches"].double()}


def naflex(name="naflexvit_base_patch16_gap_orthog", **options):
    known = {field.name for field in dataclasses.fields(NaFlexVitCfg)}
    unknown = [key for key in options if key not in known and not key.startswith(("connection", "skip"))]
    if unknown or (options.get("rope_type") and "rope_grid_indexing" not in known):
        pytest.skip(f"timm {timm.__version__} has no {unknown or 'rotary positions here'}")
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **options}).double()


def logits_and_gradients(model, batches):
    model.zero_grad()
    torch.manual_seed(1)
    logits = torch.cat([model(inputs) for inputs in batches])
    logits.square().sum().backward()
    return {"logits": logits.detach(), **{name: parameter.grad.clone() for name, parameter in model.named_parameters()}}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name in found:
        single = name.endswith("pos_embed")  # timm interpolates positions in single precision
        rtol, atol = (1e-5, 1e-7) if single else (1e-9, 1e-10)
        torch.testing.assert_close(
            found[name], expected[name], rtol=rtol, atol=atol, msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_padded_is_unpadded(options):
    """Logits of each image and the gradients of all, for images of four shapes in one batch."""
    model = naflex(**options)
    assert {type(site.connection).__name__ for site in sites(model)} >= {"GlobalConnection"}
    if "connection_prob" in options:
        model.eval()
    together = logits_and_gradients(model, [collated(images(), 20)])
    alone = logits_and_gradients(model, [collated([image]) for image in images()])
    assert_same(together, alone)
    assert all(tensor.any() for tensor in together.values())


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_every_connection(connection):
    model = naflex(connection=connection, global_pool="avg", reg_tokens=1)
    together = logits_and_gradients(model, [collated(images(), 17)])
    assert_same(together, logits_and_gradients(model, [collated([image]) for image in images()]))


def test_patches_are_images():
    """A batch of images of one size, as such and as patches with padding behind them."""
    model = naflex(global_pool="avg", reg_tokens=1)
    batch = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(model(collated(list(batch), 30)), model(batch.double()), rtol=1e-9, atol=1e-10)


def test_checkpointing_the_activations():
    model = naflex(global_pool="avg")
    expected = logits_and_gradients(model, [collated(images(), 20)])
    model.set_grad_checkpointing()
    assert_same(logits_and_gradients(model, [collated(images(), 20)]), expected)


@pytest.mark.skipif(not hasattr(NaFlexVit, "_forward_embeds"), reason="its mask is that of all patches in this timm")
def test_dropped_patches():
    model = naflex(global_pool="avg", patch_drop_rate=0.5)
    assert all(tensor.isfinite().all() for tensor in logits_and_gradients(model, [collated(images(), 20)]).values())


@pytest.mark.slow
def test_compiled_as_one_graph():
    model = naflex(global_pool="avg", pos_embed="none")  # timm's positions are never compiled
    inputs = collated(images(), 20)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    try:
        found = logits_and_gradients(compiled, [inputs])
        found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
        assert_same(found, logits_and_gradients(model, [inputs]))
    finally:
        torch._dynamo.reset()


def test_exported_with_a_mask_of_any_length():
    block = naflex(global_pool="avg").blocks[0]
    x, mask = torch.randn(3, 9, 32).double(), additive(torch.rand(3, 1, 9, 9) < 0.2, -torch.inf, torch.float64)
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
    shapes = dict(x={0: batch, 1: tokens}, attn_mask={0: batch, 2: tokens, 3: tokens}, is_causal=None)
    shapes = {name: shapes[name] for name in inspect.signature(block.forward).parameters}
    shapes.pop("is_causal", None)
    program = torch.export.export(block, (x, mask), dynamic_shapes=shapes).module()
    hidden, keys = torch.randn(4, 8, 32).double(), additive(SQUARE, torch.finfo(torch.float64).min, torch.float64)
    torch.testing.assert_close(program(hidden, keys), block(hidden, keys))
    shapes["attn_mask"] = {0: tokens, 1: tokens}
    program = torch.export.export(block, (x, torch.ones(9, 9).bool().tril()), dynamic_shapes=shapes).module()
    torch.testing.assert_close(program(hidden, torch.ones(8, 8).bool()), block(hidden))


def test_bfloat16_autocast_is_as_close_as_linear():
    """Padding must not make the difference: the masks, and the sums, are in other dtypes there."""
    def distance(connection):
        model = naflex(connection=connection, global_pool="avg").float()
        padded, plain = (
            {**inputs, "patches": inputs["patches"].float()} for inputs in (collated(images(), 20), collated(images())))
        with torch.autocast("cpu", torch.bfloat16):
            return (model(padded) - model(plain)).abs().max()

    assert distance("global") <= max(2 * distance("linear"), 1e-2)


def test_vit_as_naflex():
    """timm builds any of its ViTs as NaFlex; the variant's connections go with it."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224_orthog", use_naflex=True, **SMALL).double()
    assert type(model).__name__ == "NaFlexVit"
    assert len(sites(model)) == 6
    together, alone = model(collated(images(), 20)), [model(collated([image])) for image in images()]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("batch", [1, 3, 6])  # 6: as many as tokens
@pytest.mark.parametrize("mask", [torch.ones(6, 6).bool().tril(), torch.ones(6, 6).bool().tril()[None].expand(2, 6, 6)])
def test_timms_blocks_read_masks_as_their_attention_does(batch, mask):
    """Of two axes [N, N] and of three [heads, N, N], for every batch size: a sample alone gives the same."""
    torch.manual_seed(0)
    block = connect(Block(24, num_heads=2).double(), "global")
    x = torch.randn(batch, 6, 24).double()
    alone = [block(x[i:i + 1], attn_mask=mask) for i in range(batch)]
    torch.testing.assert_close(block(x, attn_mask=mask), torch.cat(alone), rtol=1e-9, atol=1e-10)
    with record(block, every=1) as recorder:
        block(x, attn_mask=mask)
    assert len(recorder.rows) == 2


class Keeping(nn.Module):
    """A user's block, whose mask can be [B, N] or [N, N]."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 6)

    def forward(self, x, attn_mask=None):
        return x + self.f(x)


class Inverted(Keeping):
    def forward(self, x, key_padding_mask=None):
        return x + self.f(x)


def test_a_users_block_needs_a_mask_of_one_reading():
    register_block(Keeping, stream="x", kinds=("mlp",))
    block = connect(Keeping().double(), "global")
    for x, mask in ((torch.randn(4, 8, 6), OF_SAMPLES), (torch.randn(8, 8, 6), RAGGED[:, None, None])):
        together = block(x.double(), mask)
        for sample, length in enumerate(mask.flatten(1).sum(1)):
            alone = block(x[sample:sample + 1, :length].double())
            torch.testing.assert_close(together[sample:sample + 1, :length], alone, rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match=r"can be \[B, N\] or \[N, N\]"):
        block(torch.randn(8, 8, 6).double(), RAGGED)
    with pytest.raises(ValueError, match="'key_padding_mask' is True for padding"):
        register_block(Inverted, stream="x", kinds=("mlp",), mask="key_padding_mask")


def packed_attention(module, query, key, value, mask, scaling=None, **_):
    """As flash attention: the mask is [B, N] or None, and `is_causal` is an attribute of the module."""
    allowed = torch.ones(query.shape[2], key.shape[2]).bool()
    allowed = allowed.tril() if module.is_causal else allowed
    if mask is not None:
        assert mask.shape == (len(query), key.shape[2])
        allowed = allowed & mask[:, None, None].bool()
    y = nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scaling)
    return y.transpose(1, 2).contiguous(), None


@pytest.fixture
def transformers():
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers.masking_utils import flash_attention_mask

    transformers.AttentionInterface.register("packed", packed_attention)
    transformers.AttentionMaskInterface.register("packed", flash_attention_mask)
    return transformers


SMALL_TRANSFORMER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize("samples", [4, 8])  # 8: as many as tokens
@pytest.mark.parametrize("attention", ["eager", "sdpa", "packed"])
def test_text_towers_of_clip(transformers, attention, samples):
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(vocab_size=40, max_position_embeddings=8, eos_token_id=39, **SMALL_TRANSFORMER,
                                         attn_implementation=attention)
    model = connect(transformers.CLIPTextModel(config).double().eval(), "global")
    tokens, mask = torch.randint(0, 39, (samples, 8)), RAGGED[:samples].long()
    together = model(tokens, attention_mask=mask).last_hidden_state
    for sample, length in enumerate(mask.sum(1)):
        alone = model(tokens[sample:sample + 1, :length]).last_hidden_state
        torch.testing.assert_close(together[sample:sample + 1, :length], alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("samples", [4, 8])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "packed"])
def test_siglip_2(transformers, attention, samples):
    """Images of several shapes, whose mask is of integers."""
    torch.manual_seed(0)
    config = transformers.Siglip2VisionConfig(
        **SMALL_TRANSFORMER, num_patches=16, patch_size=2, vision_use_head=False, attn_implementation=attention)
    model = connect(transformers.Siglip2VisionModel(config).double().eval(), "global")
    patches, mask = torch.randn(samples, 8, 12).double(), RAGGED[:samples].int()
    shapes = torch.stack([torch.ones(samples).long(), mask.sum(1)], 1)
    together = model(patches, mask, shapes).last_hidden_state
    for sample, length in enumerate(mask.sum(1)):
        one = slice(sample, sample + 1)
        alone = model(patches[one, :length], mask[one, :length], shapes[one]).last_hidden_state
        torch.testing.assert_close(together[one, :length], alone, rtol=1e-5, atol=1e-6)  # positions are in float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler
def test_flex_attention_of_clip(transformers):
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(vocab_size=40, max_position_embeddings=8, eos_token_id=39, **SMALL_TRANSFORMER,
                                         attn_implementation="flex_attention")
    model = connect(transformers.CLIPTextModel(config).eval(), "global")
    tokens, mask = torch.randint(0, 39, (4, 8)), RAGGED[:4].long()
    with torch.no_grad():
        flex = model(tokens, attention_mask=mask).last_hidden_state
        model.set_attn_implementation("eager")
        torch.testing.assert_close(flex[mask.bool()], model(tokens, attention_mask=mask).last_hidden_state[mask.bool()])


def test_a_mask_by_hand():
    """timm's ordinary ViT takes masks as well."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224_orthog", patch_size=4, img_size=8, embed_dim=32, depth=2, num_heads=2, class_token=False,
        global_pool="", num_classes=0, dynamic_img_size=True, pos_embed="none").double()
    x = torch.randn(2, 3, 8, 16, dtype=torch.float64)
    short = x[..., :8]  # the left half: the first two of four patches in each row
    half = torch.tensor([True, True, False, False] * 2)
    mask = (half & half[:, None]).expand(2, 1, 8, 8)
    torch.testing.assert_close(model(x, attn_mask=mask)[:, half], model(short), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("connection", ["feature", "global"])
def test_gemma(connection):
    if not timm.is_model("gemma4_vit_167m"):
        pytest.skip(f"timm {timm.__version__} has no gemma4_vit")
    torch.manual_seed(0)
    from timm.models.gemma4_vit import Gemma4Block

    block = connect(Gemma4Block(dim=24, num_heads=2, head_dim=12, intermediate_size=32).double(), connection)
    x, cos, sin = torch.randn(4, 8, 24).double(), *torch.randn(2, 4, 8, 12).double()
    y = block(x, cos, sin, attn_mask=additive(KEYS, -torch.inf, torch.float64))
    for sample, length in enumerate(LENGTHS):
        alone = block(*(tensor[sample:sample + 1, :length] for tensor in (x, cos, sin)))
        torch.testing.assert_close(y[sample:sample + 1, :length], alone, rtol=1e-9, atol=1e-10)


# ----------------------------------------------------------------------------------------------------- diagnostics
@pytest.mark.parametrize("connection", ["linear", "global"])
def test_what_is_recorded_is_of_real_tokens(connection):
    """One image in a padded batch gives the rows that it gives alone; of several, the averages over their tokens."""
    model = naflex(connection=connection, global_pool="avg", reg_tokens=1).train()
    tokens = [1 + size[0] * size[1] // 16 for size in SIZES]
    with record(model, every=1) as recorder:
        for inputs in (collated(images(), 20), *(collated([image]) for image in images())):
            model(inputs)
    together, *alone = ([row for row in recorder.rows if row["step"] == step] for step in range(1 + len(SIZES)))
    for site, row in enumerate(together):
        for key in ("stream", "parallel", "orthogonal", "cosine"):
            mean = sum(n * rows[site][key] for n, rows in zip(tokens, alone, strict=True)) / sum(tokens)
            assert row[key] == pytest.approx(mean, rel=1e-9, abs=1e-12), (row["name"], key)
