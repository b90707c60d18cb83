"""List the residual blocks of transformers' image, video and audio classifiers and language models.

:mod:`timm_ortho.blocks.timm` defines which additions are sites. The table contains only the names of the classes, so
this module does not import transformers. Some classes differ in releases before 5; :func:`timm_ortho.connect` then
raises an error.
"""
from typing import Dict, List, Tuple

from torch import nn

from .spec import BlockSpec


def _name(short: str) -> str:
    """Return the full name of ``vit.ViTLayer``, or of ``folder/file.Class`` if folder and file have different names."""
    module, _, cls = short.rpartition(".")
    folder, _, file = module.partition("/")
    return f"transformers.models.{folder}.modeling_{file or folder}.{cls}"


def _blocks(names: str, *columns, **more) -> List[BlockSpec]:
    fields = {"mask": _MASK, **more}
    return [BlockSpec(_name(short), *columns, **fields) for short in names.split()]


def _attention_width(block: nn.Module) -> int:
    """Return the stream width of a mixture of experts, whose last linear layer can have another width."""
    return block.self_attn.o_proj.out_features


# masks have four axes, but masks for flash attention are [B, N]
_MASK = "attention_mask[:, None, None] > 0 if getattr(attention_mask, 'ndim', 0) == 2 else attention_mask"
_TOKENS, _NCHW = -1, 1  # channel axis of B N C and B H W C, and of B C H W
_TRANSFORMER = ("attention", "mlp")

BLOCKS: Tuple[BlockSpec, ...] = (
    # ------------------------------------------------------------------------------------------ tokens, B N C
    *_blocks(
        """vit.ViTLayer deit.DeiTLayer beit.BeitLayer dinov2.Dinov2Layer dinov2_with_registers.Dinov2WithRegistersLayer
        dinov3_vit.DINOv3ViTLayer vit_msn.ViTMSNLayer vit_mae.ViTMAELayer ijepa.IJepaLayer segformer.SegformerLayer
        blip.BlipEncoderLayer siglip.SiglipEncoderLayer siglip2.Siglip2EncoderLayer clip.CLIPEncoderLayer
        metaclip_2.MetaClip2EncoderLayer audio_spectrogram_transformer.ASTLayer""",
        "residual", _TRANSFORMER, _TOKENS),
    *_blocks("data2vec/data2vec_vision.Data2VecVisionLayer pvt.PvtLayer pvt_v2.PvtV2BlockLayer",
             "hidden_states", _TRANSFORMER, _TOKENS),
    *_blocks("swin.SwinLayer", ("shortcut", "residual"), _TRANSFORMER, _TOKENS),
    *_blocks("swinv2.Swinv2Layer donut/donut_swin.DonutSwinLayer",
             ("shortcut", "hidden_states"), _TRANSFORMER, _TOKENS),
    *_blocks("hiera.HieraLayer", ("hidden_states", "residual"), _TRANSFORMER, _TOKENS),
    *_blocks("focalnet.FocalNetLayer", ("shortcut", "hidden_state"), ("mixer", "mlp"), _TOKENS),
    *_blocks("levit.LevitResidualLayer", "hidden_state", ("branch",), _TOKENS),
    # in these layers the attention and the MLP have separate block classes
    # the stream of mobilevit has the shape [B * pixels of a patch, patches, C]
    *_blocks("cvt.CvtLayer", "hidden_state", ("attention",), _TOKENS),
    *_blocks(
        "yolos.YolosLayer videomae.VideoMAELayer mobilevit.MobileViTTransformerLayer perceiver.PerceiverAttention",
        "hidden_states", ("attention",), _TOKENS),
    *_blocks(
        "cvt.CvtOutput yolos.YolosOutput videomae.VideoMAEOutput mobilevit.MobileViTOutput",
        "input_tensor", ("mlp",), _TOKENS),
    *_blocks("perceiver.PerceiverLayer", "attention_output", ("mlp",), _TOKENS),
    # ------------------------------------------------------------------- transformers on feature maps, B C H W
    *_blocks("poolformer.PoolFormerLayer", "hidden_states", ("mixer", "mlp"), _NCHW),
    *_blocks("mobilevitv2.MobileViTV2TransformerLayer", "hidden_states", _TRANSFORMER, _NCHW),
    *_blocks("swiftformer.SwiftFormerConvEncoder", "input", ("conv",), _NCHW),
    *_blocks("swiftformer.SwiftFormerLocalRepresentation", "input", ("conv",), _NCHW),
    *_blocks("swiftformer.SwiftFormerEncoderBlock", "x", _TRANSFORMER, _NCHW),
    # --------------------------------------------------------------------------------- convolutions, B C H W
    # transformers' activations (ACT2FN) are not in place, so autograd can keep the sums
    *_blocks(
        """resnet.ResNetBasicLayer resnet.ResNetBottleNeckLayer regnet.RegNetXLayer regnet.RegNetYLayer
        convnext.ConvNextLayer convnextv2.ConvNextV2Layer dinov3_convnext.DINOv3ConvNextLayer
        mobilenet_v2.MobileNetV2InvertedResidual mobilevit.MobileViTInvertedResidual
        mobilevitv2.MobileViTV2InvertedResidual""",
        "residual", ("conv",), _NCHW),
    *_blocks("bit.BitPreActivationBottleneckLayer bit.BitBottleneckLayer", "shortcut", ("conv",), _NCHW),
    *_blocks("efficientnet.EfficientNetFinalBlockLayer", "embeddings", ("conv",), _NCHW),
    *_blocks("hgnet_v2.HGNetV2BasicLayer", "identity", ("conv",), _NCHW),
    # ------------------------------------------------------------------------------------ language models, B N C
    *_blocks(
        """llama.LlamaDecoderLayer mistral.MistralDecoderLayer qwen2.Qwen2DecoderLayer qwen3.Qwen3DecoderLayer
        gemma.GemmaDecoderLayer gemma2.Gemma2DecoderLayer gemma3.Gemma3DecoderLayer phi3.Phi3DecoderLayer
        olmo.OlmoDecoderLayer olmo2.Olmo2DecoderLayer olmo3.Olmo3DecoderLayer starcoder2.Starcoder2DecoderLayer
        smollm3.SmolLM3DecoderLayer granite.GraniteDecoderLayer opt.OPTDecoderLayer""",
        "residual", _TRANSFORMER, _TOKENS, text=True),
    *_blocks(  # mixtures of experts
        """mixtral.MixtralDecoderLayer qwen2_moe.Qwen2MoeDecoderLayer qwen3_moe.Qwen3MoeDecoderLayer
        olmoe.OlmoeDecoderLayer gpt_oss.GptOssDecoderLayer deepseek_v3.DeepseekV3DecoderLayer""",
        "residual", _TRANSFORMER, _TOKENS, text=True, width=_attention_width),
    *_blocks("gpt2.GPT2Block", "residual", ("attention", "cross_attention", "mlp"), _TOKENS, text=True,
             width=lambda block: len(block.ln_1.weight)),
    # config.use_parallel_residual selects one sum of MLP, attention and stream, whose inner addition gets None, or one
    # sum for the attention and one for the MLP
    *_blocks(
        "gpt_neox.GPTNeoXLayer", ("hidden_states", "attn_output", "hidden_states", "attn_output"),
        ("parallel", None, "attention", "mlp"), _TOKENS, text=True, sides_differ=True),
    *_blocks("mpt.MptBlock", "residual", ("attention",), _TOKENS, text=True),
    *_blocks("mpt.MptMLP", "residual", ("mlp",), _TOKENS, text=True),
    *_blocks("phi.PhiDecoderLayer", "residual", ("parallel",), _TOKENS, text=True),
    *_blocks("modernbert.ModernBertEncoderLayer", "hidden_states", _TRANSFORMER, _TOKENS, text=True),
    *_blocks("distilbert.TransformerBlock", ("hidden_states", "attention_output"), _TRANSFORMER, _TOKENS, text=True),
    *_blocks(
        """bert.BertSelfOutput roberta.RobertaSelfOutput xlm_roberta.XLMRobertaSelfOutput
        blip/blip_text.BlipTextSelfOutput""",
        "input_tensor", ("attention",), _TOKENS, text=True, depth=2),
    *_blocks("bert.BertOutput roberta.RobertaOutput xlm_roberta.XLMRobertaOutput blip/blip_text.BlipTextOutput",
             "input_tensor", ("mlp",), _TOKENS, text=True, depth=1),
    *_blocks("t5.T5LayerSelfAttention", "hidden_states", ("attention",), _TOKENS, text=True, depth=2),
    *_blocks("t5.T5LayerCrossAttention", "hidden_states", ("cross_attention",), _TOKENS, text=True, depth=2),
    *_blocks("t5.T5LayerFF", "hidden_states", ("mlp",), _TOKENS, text=True, depth=2),
)

NOT_RESIDUAL: Dict[str, str] = {
    _name(name): reason
    for reason, names in {
        "masked tokens, replaced by a mask token": "hiera.HieraDecoder perceiver.PerceiverMultimodalPreprocessor",
        "a sum of feature maps of different resolutions": "hiera.HieraMultiScaleHead",
        "parallel branches, folded into one convolution by a re-parameterisation": "textnet.TextNetRepConvLayer",
        "inside a branch": """
            focalnet.FocalNetModulation swiftformer.SwiftFormerEfficientAdditiveAttention
            qwen2_moe.Qwen2MoeSparseMoeBlock deepseek_v3.DeepseekV3MoE gpt_oss.GptOssExperts""",
        "a gate or a norm of a branch": "convnextv2.ConvNextV2GRN",
        "the mean of two classifiers": """
            deit.DeiTForImageClassificationWithTeacher levit.LevitForImageClassificationWithTeacher
            swiftformer.SwiftFormerForImageClassification""",
        "pools for the head, after the last block": """
            siglip.SiglipMultiheadAttentionPoolingHead siglip2.Siglip2MultiheadAttentionPoolingHead
            audio_spectrogram_transformer.ASTModel""",
        # the T5 classes look residual only in releases before 5.2
        "concatenated outputs": "perceiver.PerceiverModel t5.T5Block t5.T5ForConditionalGeneration",
    }.items()
    for name in names.split()
}
NOT_RESIDUAL.update(
    (f"transformers.activations.{cls}", "inside a branch") for cls in ("NewGELUActivation", "AccurateGELUActivation"))
