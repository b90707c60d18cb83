"""Padded token sequences and images in whole models: padding does not change a sample's outputs."""
import inspect

import pytest
import timm
import torch
from helpers.padded import OF_SAMPLES, RAGGED
from helpers.small_models import host
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify
from timm.models.vision_transformer import Block, ResPostBlock
from torch import nn

from timm_ortho import CONNECTIONS, connect, record, register_block, sites
from timm_ortho.blocks import routed_class, specs


def test_blocks_pass_their_mask_to_their_connections():
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
        calls = [line for line in source.splitlines() if "self.connection_" in line and "refuse_causal" not in line]
        assert len(calls) >= len(spec.sites)
        assert all(line.endswith(", attn_mask=attn_mask)") == bool(masks) for line in calls), spec.name
        taking |= {spec.name} if masks else set()
    assert {f"timm.models.{name}" for name in ("vision_transformer.Block", "eva.EvaBlock")} <= taking


SIZES = ((8, 12), (16, 16), (4, 20), (4, 4))  # images of 6, 16, 5 and 1 patches of 4 x 4
SMALL = dict(patch_size=4, img_size=16, embed_dim=32, depth=3, num_heads=2, init_values=None, num_classes=5)
OPTIONS = {
    "average of patches": dict(global_pool="avg", reg_tokens=4, fc_norm=True),
    "maximum": dict(global_pool="max", class_token=True),
    "class token": dict(global_pool="token", class_token=True, reg_tokens=2),
    "attention pooling": dict(global_pool="map", reg_tokens=1),
    "mask of keys": dict(global_pool="avg", use_key_only_attn_mask=True),
    "EVA's blocks": dict(global_pool="avg", attn_type="eva", swiglu_mlp=True),
    "rotary positions": dict(global_pool="avg", attn_type="rope", rope_type="axial", pos_embed="none"),
    "norms after": dict(global_pool="avg", block_fn=ResPostBlock),
    "transformed stream": dict(global_pool="avg", reg_tokens=2, skip="orthogonal_tp"),
    "drawn at random": dict(global_pool="avg", connection_prob=0.5),
    "in two blocks of three": dict(global_pool="avg", connection_layers=[0, 2]),
}


def images():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, *size, generator=generator) for size in SIZES]


def collated(images, length=None):
    """Return timm's collated images, padded to ``length`` patches, in float64."""
    patches = [Patchify(4)(image) for image in images]
    longest = max(len(one["patches"]) for one in patches)
    inputs, _ = NaFlexCollator(length or longest)([(one, 0) for one in patches])
    return {**inputs, "patches": inputs["patches"].double()}


def naflex(name="naflexvit_base_patch16_gap_orthog", **options):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **options}).double()


def logits_and_gradients(model, batches):
    model.zero_grad()
    torch.manual_seed(1)
    logits = torch.cat([model(inputs) for inputs in batches])
    logits.square().sum().backward()
    return {"logits": logits.detach(), **{name: parameter.grad.clone() for name, parameter in model.named_parameters()}}


def assert_same(results, expected):
    assert list(results) == list(expected)
    for name in results:
        single = name.endswith("pos_embed")  # timm interpolates position embeddings in float32
        rtol, atol = (1e-5, 1e-7) if single else (1e-9, 1e-10)
        torch.testing.assert_close(
            results[name], expected[name], rtol=rtol, atol=atol, msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_padding_changes_nothing(options):
    """Images of four shapes have the same logits and gradients in one padded batch as in four batches of one image."""
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


def test_gradient_checkpointing_with_padding():
    model = naflex(global_pool="avg")
    expected = logits_and_gradients(model, [collated(images(), 20)])
    model.set_grad_checkpointing()
    assert_same(logits_and_gradients(model, [collated(images(), 20)]), expected)


@pytest.mark.slow
def test_compiled_as_one_graph():
    model = naflex(global_pool="avg", pos_embed="none")  # timm's position embeddings do not compile
    inputs = collated(images(), 20)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    try:
        results = logits_and_gradients(compiled, [inputs])
        results = {name.removeprefix("_orig_mod."): value for name, value in results.items()}
        assert_same(results, logits_and_gradients(model, [inputs]))
    finally:
        torch._dynamo.reset()


def test_vit_as_naflex():
    """timm can create any ViT as a NaFlexVit. Variants keep their connections."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224_orthog", use_naflex=True, **SMALL).double()
    assert type(model).__name__ == "NaFlexVit"
    assert len(sites(model)) == 6
    together, alone = model(collated(images(), 20)), [model(collated([image])) for image in images()]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("batch", [1, 3, 6])  # there are 6 tokens
@pytest.mark.parametrize("mask", [torch.ones(6, 6).bool().triu(), torch.ones(6, 6).bool().triu()[None].expand(2, 6, 6)])
def test_connections_interpret_masks_as_timms_attention_does(batch, mask):
    """The meaning of masks [N, N] and [heads, N, N] does not depend on the batch size."""
    torch.manual_seed(0)
    block = connect(Block(24, num_heads=2).double(), "global")
    x = torch.randn(batch, 6, 24).double()
    alone = [block(x[i:i + 1], attn_mask=mask) for i in range(batch)]
    torch.testing.assert_close(block(x, attn_mask=mask), torch.cat(alone), rtol=1e-9, atol=1e-10)
    with record(block, every=1) as recorder:
        block(x, attn_mask=mask)
    assert len(recorder.rows) == 2


REFUSED = "one projection for all tokens of a sample, but the attention is causal"


@pytest.mark.parametrize("method", ["forward", "forward_features", "forward_intermediates"])
@pytest.mark.parametrize(("name", "options"), [
    ("vit_test", {}), ("eva02_tiny_patch14_224", dict(patch_size=2, img_size=8, depth=1, embed_dim=24, num_heads=2))])
def test_global_refuses_causal_attention(name, options, method):
    model, images = timm.create_model(f"{name}_orthog", **options), torch.randn(2, 3, 8, 8)
    call = getattr(model, method)
    call(images)
    with pytest.raises(ValueError, match=REFUSED):
        call(images, is_causal=True)
    connect(model, "feature")
    call(images, is_causal=True)
    if name == "vit_test":  # only the MLP of the last block projects over all tokens
        connect(model, "global", layers=3, kinds="mlp")
        with pytest.raises(ValueError, match=REFUSED):
            call(images, is_causal=True)


def test_compiled_and_scripted_blocks_refuse_causal_attention():
    block, x = connect(Block(24, num_heads=2), "global"), torch.randn(2, 6, 24)
    for form in (torch.compile(block, backend="eager"), torch.jit.script(block)):
        torch.testing.assert_close(form(x), block(x))
        with pytest.raises(Exception, match="attention is causal"):  # the compiler or TorchScript wraps the ValueError
            form(x, is_causal=True)


class Keeping(nn.Module):
    """A user's block with a mask [B, N]."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 6)

    def forward(self, x, attn_mask=None):
        return x + self.f(x)


class Inverted(Keeping):
    def forward(self, x, key_padding_mask=None):
        return x + self.f(x)


def test_the_author_of_a_block_decides_what_its_mask_means():
    for block, arguments, message in (
            (Keeping, {}, "'attn_mask' may be an attention mask: pass mask='attn_mask' if True allows "),
            (Inverted, {}, "'key_padding_mask' may be an attention mask: pass mask='key_padding_mask' if True allows "),
            (Keeping, {"mask": "attn_msk"}, r"Keeping.forward has no argument 'attn_msk': correct mask"),
            (Inverted, {"mask": "key_padding_mask"}, "'key_padding_mask' is True for padding")):
        with pytest.raises(ValueError, match=message):
            register_block(block, stream="x", kinds=("mlp",), **arguments)
    register_block(Keeping, stream="x", kinds=("mlp",), mask="attn_mask[:, None, None]")
    block = connect(Keeping().double(), "global")
    for x, mask in ((torch.randn(4, 8, 6), OF_SAMPLES), (torch.randn(8, 8, 6), RAGGED)):  # B = 4 and B = N
        together = block(x.double(), mask)
        for sample, length in enumerate(mask.sum(1)):
            alone = block(x[sample:sample + 1, :length].double())
            torch.testing.assert_close(together[sample:sample + 1, :length], alone, rtol=1e-9, atol=1e-10)


def packed_attention(module, query, key, value, mask, scaling=None, **_):
    """Replace flash attention, whose mask is [B, N] or None. Attention is causal if `module.is_causal` is true."""
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


@pytest.mark.parametrize(("attention", "samples"), [("eager", 4), ("sdpa", 8), ("packed", 8)])  # there are 8 tokens
def test_text_towers_of_clip(transformers, attention, samples):
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(vocab_size=40, max_position_embeddings=8, eos_token_id=39, **SMALL_TRANSFORMER,
                                         attn_implementation=attention)
    model = connect(transformers.CLIPTextModel(config).double().eval(), "global")
    tokens, mask = torch.randint(0, 39, (samples, 8)), RAGGED[:samples].long()
    together = model(tokens, attention_mask=mask).last_hidden_state
    for sample, length in enumerate(mask.sum(1)):
        alone = model(tokens[sample:sample + 1, :length]).last_hidden_state
        # Eager attention computes its softmax in float32, whose rounding depends on the processor.
        rtol, atol = (1e-5, 1e-6) if attention == "eager" else (1e-9, 1e-10)
        torch.testing.assert_close(together[sample:sample + 1, :length], alone, rtol=rtol, atol=atol)


@pytest.mark.parametrize("attention", ["eager", "packed"])
def test_siglip_2(transformers, attention):
    """SigLIP 2 marks the padding of images of several shapes with an integer mask."""
    torch.manual_seed(0)
    config = transformers.Siglip2VisionConfig(
        **SMALL_TRANSFORMER, num_patches=16, patch_size=2, vision_use_head=False, attn_implementation=attention)
    model = connect(transformers.Siglip2VisionModel(config).double().eval(), "global")
    patches, mask = torch.randn(8, 8, 12).double(), RAGGED.int()
    shapes = torch.stack([torch.ones(8).long(), mask.sum(1)], 1)
    together = model(patches, mask, shapes).last_hidden_state
    for sample, length in enumerate(mask.sum(1)):
        one = slice(sample, sample + 1)
        alone = model(patches[one, :length], mask[one, :length], shapes[one]).last_hidden_state
        # Position embeddings are interpolated in float32.
        torch.testing.assert_close(together[one, :length], alone, rtol=1e-5, atol=1e-6)


def test_a_mask_in_an_ordinary_vit():
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224_orthog", patch_size=4, img_size=8, embed_dim=32, depth=2, num_heads=2, class_token=False,
        global_pool="", num_classes=0, dynamic_img_size=True, pos_embed="none").double()
    x = torch.randn(2, 3, 8, 16, dtype=torch.float64)
    short = x[..., :8]  # the left half, which has the first two of the four patches in each row
    half = torch.tensor([True, True, False, False] * 2)
    mask = (half & half[:, None]).expand(2, 1, 8, 8)
    torch.testing.assert_close(model(x, attn_mask=mask)[:, half], model(short), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("connection", ["linear", "global"])
def test_recorded_rows_exclude_padding(connection):
    """Recorded values of a padded batch are averages over its real tokens."""
    model = naflex(connection=connection, global_pool="avg", reg_tokens=1).train()
    tokens = [1 + size[0] * size[1] // 16 for size in SIZES]
    with record(model, every=1) as recorder:
        for inputs in (collated(images(), 20), *(collated([image]) for image in images())):
            model(inputs)
    together, *alone = ([row for row in recorder.rows if row["step"] == step] for step in range(1 + len(SIZES)))
    for site, row in enumerate(together):
        for key in ("stream", "parallel", "orthogonal", "cosine", "s", "s_added"):
            mean = sum(n * rows[site][key] for n, rows in zip(tokens, alone, strict=True)) / sum(tokens)
            assert row[key] == pytest.approx(mean, rel=1e-9, abs=1e-12), (row["name"], key)
