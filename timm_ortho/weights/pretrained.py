"""Configurations of the pretrained weights, and conversion of checkpoints in transformers' layout.

To add weights, add an entry to ``ENTRIES``. For all variants without an entry, ``pretrained=True`` raises timm's error.
"""
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

import torch
from timm.models import PretrainedCfg, get_pretrained_cfg
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter_fn
from torch import Tensor, nn

from .checks import SAFE
from .download import cached

_AUTHORS = dict(
    num_classes=1000,
    crop_pct=1.0,  # as in recipes/vit_b_imagenet1k.yaml and the authors' code, which validate on whole images
    license="cc-by-sa-4.0",
    origin_url="https://github.com/BootsofLagrangian/ortho-residual",
    paper_name="Revisiting Residual Connections: Orthogonal Updates for Stable and Efficient Deep Networks",
    paper_ids="arXiv:2505.11881",
)


def weights_file(name: str) -> Path:
    """Return the path in this package for weights MODEL.TAG. The file need not exist."""
    return Path(__file__).with_name(f"{name}.safetensors")


# MODEL.TAG -> num_classes, license, and the fields that differ from the architecture's configuration. MODEL ends in
# ``_ortho`` or ``_orthog``. Models of this package's own architectures may also end in ``_linear``. Weights with
# ``hf_hub_id`` are in that repository on the Hub, all others in this package. Without a tag, ``pretrained=True`` loads
# a model's first entry.
ENTRIES: Dict[str, Dict[str, Any]] = {
    **{f"vit_base_{kind}.authors_in1k": dict(
        hf_hub_id=f"BootsofLagrangian/{kind}-vit-b-imagenet1k-hf", **_AUTHORS) for kind in ("ortho", "linear")},
    **{f"vit_test_{kind}.digits": dict(num_classes=10, label_names=tuple("0123456789"), license="apache-2.0")
       for kind in ("ortho", "orthog", "linear")},
}


def pretrained_cfgs(model: str, cfg: PretrainedCfg) -> Dict[str, PretrainedCfg]:
    """Return the configurations of a model by MODEL.TAG; ``{model: cfg}`` if it has no weights."""
    cfgs = {}
    for name, fields in ENTRIES.items():
        if name.partition(".")[0] == model:
            source = dict(hf_hub_filename=SAFE) if "hf_hub_id" in fields else dict(file=str(weights_file(name)))
            cfgs[name] = replace(cfg, **source, **fields)
    return cfgs or {model: cfg}


# ---------------------------------------------------------------------------------- transformers' layout
def checkpoint_filter_fn(state_dict: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
    """Convert a checkpoint of the paper's ViT to timm's layout if it has transformers' layout, like the authors' files.

    Position and patch embeddings are resampled to the model's size, as in timm.
    """
    if "vit.embeddings.cls_token" in state_dict:
        state_dict = _from_transformers(state_dict, model)
    return timm_filter_fn(state_dict, model)


# Part of a name in transformers' layout -> its name in timm, replaced in this order. LayerNorms of blocks are missing,
# because they have no parameters.
_NAMES = {
    "vit.embeddings.position_embeddings": "pos_embed",
    "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
    "vit.embeddings.": "",
    "vit.encoder.layer.": "blocks.",
    "attention.attention.": "attn.",
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "vit.layernorm": "norm",
    "classifier": "head",
}


def _from_transformers(state_dict: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
    """Return the tensors of transformers' layout under timm's names.

    transformers adds position_embeddings, [1, 1 + patches, width], to all tokens. A model with ``no_embed_class``, the
    default of this package's ViT, adds them to patches only. The first row is therefore added to the class token here.
    """
    converted = {}
    for name, tensor in state_dict.items():
        for theirs, own in _NAMES.items():
            name = name.replace(theirs, own)
        converted[name] = tensor
    for layer in range(len(model.blocks)):
        for kind in ("weight", "bias"):
            parts = [f"blocks.{layer}.attn.{part}.{kind}" for part in ("query", "key", "value")]
            if converted.keys() >= set(parts):  # checked() reports an incomplete list
                tensors = [converted.pop(part) for part in parts]
                converted[f"blocks.{layer}.attn.qkv.{kind}"] = torch.cat(tensors)
    if model.no_embed_class and {"cls_token", "pos_embed"} <= converted.keys():
        position = converted["pos_embed"]
        converted["cls_token"] = converted["cls_token"] + position[:, :1]
        converted["pos_embed"] = position[:, 1:]
    return converted


# --------------------------------------------------------------------------------------------- overview
class Weights(NamedTuple):
    """A set of weights."""

    name: str  # model and tag, for ``timm.create_model``
    source: str  # ``this package``, or ``hf-hub:`` and the repository
    file: Optional[Path]  # in the package or in huggingface_hub's cache; None if it is not downloaded


def weights(name: str) -> Weights:
    """Return the weights of a model in ``timm.list_pretrained()``. Does not use the network.

    >>> weights("vit_test_ortho").name
    'vit_test_ortho.digits'
    """
    cfg = get_pretrained_cfg(name)
    tagged = f"{cfg.architecture}.{cfg.tag}" if cfg.tag else cfg.architecture
    if cfg.file:
        return Weights(tagged, "this package", Path(cfg.file))
    return Weights(tagged, f"hf-hub:{cfg.hf_hub_id}", cached(cfg.hf_hub_id, cfg.hf_hub_filename or SAFE))
