"""Text models of transformers: caches, generation, adapters, saving, compilers, and one-line errors."""
import copy
import re

import pytest
import torch
from helpers.branches import branches
from helpers.library_models import VIT
from helpers.own_block import Single
from helpers.pages import blocks, text_of
from helpers.text_models import HEADS, TEXT, cached_logits, config_of, logits, made, tokens
from torch import nn

from timm_ortho import (
    GlobalConnection,
    UnsupportedModelError,
    connect,
    connection_arguments,
    disconnect,
    register_block,
    sites,
)
from timm_ortho.blocks import spec_of, specs

QUICK = ("GPT-2", "GPT-NeoX", "Llama", "Mixtral", "BERT", "T5")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name.replace(",", "").replace(" ", "-"))
       for name in TEXT]  # pytest -k accepts neither commas nor spaces

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers uses its own deprecated arguments


# ---------------------------------------------------------------------------------------------- every model
@pytest.mark.parametrize("name", ALL)
def test_linear_equals_the_original_model_and_the_cache_equals_one_pass(name):
    host, model, ids = made(name), connect(made(name), "linear"), tokens()
    kinds = dict.fromkeys(site.kind for site in sites(model))
    assert tuple(kinds) == TEXT[name].kinds
    with torch.no_grad():
        assert torch.equal(logits(model, ids), logits(host, ids))
        if TEXT[name].task != "encoder":
            assert torch.equal(cached_logits(model, ids), cached_logits(host, ids))
            expected = logits(connect(model, "feature"), ids)
            atol = 2e-6 * expected.abs().max().item()
            torch.testing.assert_close(cached_logits(model, ids), expected, rtol=0, atol=atol)
    classes = dict.fromkeys(f"`{type(module).__name__}`" for module in model.modules() if spec_of(module))
    row = f"| {name} | {', '.join(classes)} | {', '.join(kinds)} |"
    if row not in text_of("text_models.md"):
        pytest.fail(f"add to docs/text_models.md:\n{row}", pytrace=False)


def test_the_page_lists_every_model():
    rows = re.findall(r"^\| (.+?) \| `", text_of("text_models.md"), re.MULTILINE)
    assert rows == list(TEXT), "docs/text_models.md and TEXT differ in their models or in the order"


def test_the_snippets_of_the_page(monkeypatch, tmp_path):
    """Replace the download by a tiny model, and `feature` by `hybrid`, which has parameters for snippet 3 to load."""
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(text_of("text_models.md")))
    download = 'AutoModelForCausalLM.from_pretrained("openai-community/gpt2"), "feature"'
    assert code.count(download) == 1
    names = {"tiny": made("GPT-2")}
    exec(code.replace(download, 'tiny, "hybrid"'), names)
    with torch.no_grad():
        assert torch.equal(logits(names["loaded"], tokens()), logits(names["model"], tokens()))


@pytest.mark.parametrize("name", ALL)
def test_feature_reaches_every_site_and_trains(name):
    model, ids = connect(made(name), "feature", skip="orthogonal_tp"), tokens()
    branches(model)
    reached = {}
    for site in sites(model):
        def hook(module, inputs, site=site):
            reached[site.name] = {tensor.shape[module.dim] for tensor in inputs[:2]} == {module.skip.width}
        site.connection.register_forward_pre_hook(hook)
    assert list(gradients(model, ids)) == list(gradients(made(name), ids))
    assert reached == {site.name: True for site in sites(model)}
    layers = [site.layer for site in sites(model)]
    assert layers == sorted(layers)
    assert set(layers) == set(range(4 if TEXT[name].task == "both" else 2))
    with torch.no_grad():
        assert not torch.allclose(logits(connect(model, "feature"), ids), logits(disconnect(model), ids))
    assert not sites(model)


# --------------------------------------------------------------------------------------------- global scope
class Own(GlobalConnection):
    """A user's connection with one projection per sample."""


@pytest.mark.parametrize("connection", ["global", Own])
@pytest.mark.parametrize("name", ALL)
def test_global_is_refused(name, connection):
    model = made(name)
    classes = [type(module) for module in model.modules()]
    for kind in TEXT[name].kinds:
        with pytest.raises(ValueError, match=REFUSED):
            connect(model, connection, kinds=kind)
    assert [type(module) for module in model.modules()] == classes


REFUSED = (r"^connection '(global|Own)' has one projection for all tokens of a sample, but \S+ is a .*language model.*"
           r": use 'feature' or 'hybrid', or restrict layers to other blocks\. The model is unchanged\.$")


def test_the_image_encoder_of_a_vision_language_model_may_have_global():
    transformers = pytest.importorskip("transformers", minversion="5")
    vision = transformers.CLIPVisionConfig(**VIT)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=config_of("Llama"), image_token_index=5))
    with pytest.raises(ValueError, match=REFUSED):
        connect(model, "global")
    connect(model, "global", layers=[0, 1])
    assert {site.connection.name: "vision" in site.name for site in sites(model)} == {"global": True, "linear": False}


@pytest.mark.parametrize("causal", [True, False])
def test_a_block_that_is_registered_as_causal(restored, causal):
    register_block(Single, stream="x", kinds=["mlp"], causal=causal)
    model = nn.Sequential(Single())
    if causal:
        with pytest.raises(ValueError, match=r"0 is a .*causal.*: use 'feature'"):
            connect(model, "global")
        assert type(model[0]) is Single
    else:
        connect(model, "global")
    assert len(sites(connect(model, "feature"))) == 1


# --------------------------------------------------------------------------------- what users do with a model
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "T5"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generate(name, beams):
    model, host, ids = connect(made(name), "feature"), made(name), tokens(5)
    options = dict(do_sample=False, num_beams=beams, max_new_tokens=8, min_new_tokens=8, pad_token_id=0,
                   attention_mask=torch.ones_like(ids))
    cached, recomputed = (model.generate(ids, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, recomputed)
    assert torch.equal(connect(model, "linear").generate(ids, **options), host.generate(ids, **options))


def gradients(model, ids):
    torch.manual_seed(0)  # for dropout
    model.zero_grad()
    logits(model, ids).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "T5"])
def test_gradient_checkpointing(name):
    model, ids = connect(made(name), "feature").train(), tokens()
    model.config.use_cache = False
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    sites(model)[0].connection.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(gradients(model, ids), expected)
    assert len(calls) == 2  # the second call is the recomputation in the backward pass


@pytest.mark.parametrize("connection", ["feature", "hybrid"])
@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5"])
def test_saved_and_loaded(name, connection, tmp_path):
    import transformers
    from safetensors.torch import load_file

    model, ids = connect(made(name), connection), tokens()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("theta"):
            torch.nn.init.constant_(parameter, 0.3)
    model.save_pretrained(tmp_path)
    transformers.logging.set_verbosity_error()
    loaded = getattr(transformers, f"AutoModelFor{HEADS[TEXT[name].task]}").from_pretrained(tmp_path).eval()
    connect(loaded, **loaded.config.timm_ortho)
    assert connection_arguments(loaded) == connection_arguments(model)
    # The file contains tied weights once, so some keys are missing.
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    with torch.no_grad():
        assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "T5"])
def test_compiled_in_one_graph(name):
    model, ids = connect(made(name), "feature"), tokens()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(logits(compiled, ids), logits(model, ids))
    torch._dynamo.reset()


def test_cross_attention_is_a_site_of_a_model_that_has_it():
    import transformers

    config = config_of("GPT-2", add_cross_attention=True)
    torch.manual_seed(0)
    host = transformers.GPT2LMHeadModel(config).eval()
    model, ids, states = copy.deepcopy(host), tokens(), torch.randn(2, 5, 32)
    connect(model, "linear")
    assert [site.kind for site in sites(model)] == ["attention", "cross_attention", "mlp"] * 2
    with torch.no_grad():
        expected = host(ids, encoder_hidden_states=states).logits
        assert torch.equal(model(ids, encoder_hidden_states=states).logits, expected)
        assert not torch.allclose(connect(model, "feature")(ids, encoder_hidden_states=states).logits, expected)


# ------------------------------------------------------------------------------------------------- bad input
SMALL = dict(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
             max_position_embeddings=16, pad_token_id=0)
UNSUPPORTED = {  # arguments of the model's config, and names of its residual blocks
    "Electra": (dict(SMALL, embedding_size=16), ["ElectraSelfOutput", "ElectraOutput"]),
    "DebertaV2": (SMALL, ["DebertaV2SelfOutput", "DebertaV2Output"]),
    "MPNet": (SMALL, ["MPNetAttention", "MPNetOutput"]),
    "StableLm": (SMALL, ["StableLmDecoderLayer"]),
    "Bloom": (dict(vocab_size=40, hidden_size=16, n_layer=1, n_head=2), ["BloomAttention", "BloomMLP"]),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_text_model_is_refused(name):
    transformers = pytest.importorskip("transformers", minversion="5")
    arguments, blocks = UNSUPPORTED[name]
    supported = {spec.name.rpartition(".")[2] for spec in specs("transformers")}.intersection(blocks)
    assert not supported, f"{supported} are supported now: remove {name} from UNSUPPORTED"
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**arguments))
    model = nn.ModuleList([made("GPT-2"), model])  # beside a model that is supported
    classes = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=f"not supported: .*{blocks[0]}") as error:
        connect(model)
    assert "\n" not in str(error.value)
    unsupported = [full.rpartition(".")[2] for full in error.value.unsupported]
    assert set(blocks) <= set(unsupported)
    assert not any(word in full for full in unsupported for word in ("Embeddings", "Norm", "Pooler"))
    assert [type(module) for module in model.modules()] == classes
