"""Tiny text models of transformers with random weights."""
import inspect
from typing import Any, Dict, NamedTuple

import pytest
import torch

VOCABULARY = 48
COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
GROUPED = dict(COMMON, num_key_value_heads=2)  # two query heads share a key head
GEMMA = dict(GROUPED, head_dim=8)
EXPERTS = dict(GROUPED, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
BERT = dict(COMMON, type_vocab_size=2)


class Text(NamedTuple):
    """A text model: prefix of its class names, architecture, kinds of a layer's branches, and config."""

    prefix: str
    task: str  # decoder, encoder or both (encoder and decoder)
    kinds: tuple
    config: Dict[str, Any]


TWO = ("attention", "mlp")
TEXT = {
    "GPT-2": Text("GPT2", "decoder", TWO, dict(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)),
    "GPT-NeoX": Text("GPTNeoX", "decoder", ("parallel",), COMMON),
    "GPT-NeoX, sequential": Text("GPTNeoX", "decoder", TWO, dict(COMMON, use_parallel_residual=False)),
    "OPT": Text("OPT", "decoder", TWO, dict(
        COMMON, ffn_dim=48, word_embed_proj_dim=32)),
    "MPT": Text("Mpt", "decoder", TWO, dict(
        vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)),
    "Llama": Text("Llama", "decoder", TWO, GROUPED),
    "Mistral": Text("Mistral", "decoder", TWO, dict(GROUPED, sliding_window=4)),
    "Qwen2": Text("Qwen2", "decoder", TWO, GROUPED),
    "Qwen3": Text("Qwen3", "decoder", TWO, GEMMA),
    "Gemma": Text("Gemma", "decoder", TWO, GEMMA),
    "Gemma 2": Text("Gemma2", "decoder", TWO, dict(GEMMA, sliding_window=4)),
    "Gemma 3": Text("Gemma3", "decoder", TWO, dict(GEMMA, sliding_window=4)),
    "Phi": Text("Phi", "decoder", ("parallel",), COMMON),
    "Phi-3": Text("Phi3", "decoder", TWO, GROUPED),
    "OLMo": Text("Olmo", "decoder", TWO, COMMON),
    "OLMo 2": Text("Olmo2", "decoder", TWO, COMMON),
    "OLMo 3": Text("Olmo3", "decoder", TWO, dict(COMMON, sliding_window=4)),
    "StarCoder2": Text("Starcoder2", "decoder", TWO, GROUPED),
    "SmolLM3": Text("SmolLM3", "decoder", TWO, GROUPED),
    "Granite": Text("Granite", "decoder", TWO, dict(GROUPED, residual_multiplier=0.5)),
    "Mixtral": Text("Mixtral", "decoder", TWO, dict(GROUPED, num_local_experts=4)),
    "Qwen2-MoE": Text("Qwen2Moe", "decoder", TWO, dict(EXPERTS, shared_expert_intermediate_size=24)),
    "Qwen3-MoE": Text("Qwen3Moe", "decoder", TWO, dict(EXPERTS, head_dim=8)),
    "OLMoE": Text("Olmoe", "decoder", TWO, EXPERTS),
    "gpt-oss": Text("GptOss", "decoder", TWO, dict(GEMMA, num_local_experts=4, sliding_window=4)),
    "DeepSeek-V3": Text("DeepseekV3", "decoder", TWO, dict(
        COMMON, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)),
    "BERT": Text("Bert", "encoder", TWO, BERT),
    "RoBERTa": Text("Roberta", "encoder", TWO, BERT),
    "XLM-RoBERTa": Text("XLMRoberta", "encoder", TWO, BERT),
    "DistilBERT": Text("DistilBert", "encoder", TWO, dict(
        vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64)),
    "ModernBERT": Text("ModernBert", "encoder", TWO, dict(
        COMMON, cls_token_id=1, sep_token_id=2, local_attention=8, global_attn_every_n_layers=2)),
    "T5": Text("T5", "both", ("attention", "mlp", "cross_attention"), dict(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)),
}
HEADS = {"decoder": "CausalLM", "encoder": "MaskedLM", "both": "Seq2SeqLM"}


def config_of(name: str, **changes: Any) -> Any:
    """Return the config of a text model. Skip the test if transformers is older than 5 or lacks the config's class."""
    transformers = pytest.importorskip("transformers", minversion="5")
    text = TEXT[name]
    config = f"{text.prefix}TextConfig" if text.prefix == "Gemma3" else f"{text.prefix}Config"
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    return getattr(transformers, config)(**{**text.config, **changes})


def made(name: str, **changes: Any) -> torch.nn.Module:
    """Return a text model with its head, in evaluation mode."""
    import transformers

    config, text = config_of(name, **changes), TEXT[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{HEADS[text.task]}").from_config(config)
    for parameter in model.parameters():  # with the small default weights, tokens hardly affect each other
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def tokens(length: int = 9, count: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))


def logits(model: torch.nn.Module, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Return the logits of a text model. If it has an encoder and a decoder, the encoder reads :func:`tokens`."""
    if model.config.is_encoder_decoder:
        return model(input_ids=tokens(), decoder_input_ids=ids, **arguments).logits
    return model(input_ids=ids, **arguments).logits


def cache_argument(model: torch.nn.Module) -> str:
    """Return the name of the argument for the key-value cache, which transformers 5.24 has renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cached_logits(model: torch.nn.Module, ids: torch.Tensor, prompt: int = 4) -> torch.Tensor:
    """Return a decoder's logits with a key-value cache. The decoder reads ``prompt`` tokens, then single tokens."""
    both = model.config.is_encoder_decoder
    arguments = {"encoder_outputs": model.get_encoder()(input_ids=tokens())} if both else {}
    parts, cache = [], None
    for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, ids.shape[1]))]:
        part = ids[:, start:stop]
        arguments.update({"decoder_input_ids" if both else "input_ids": part, cache_argument(model): cache})
        output = model(**arguments, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1)
