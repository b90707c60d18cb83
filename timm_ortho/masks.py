"""Attention masks: :func:`real_tokens` finds the padding of a batch of token sequences.

Sequences of several lengths (as in timm's NaFlex models) are padded to one length. A token is padding if the mask lets
no token attend to it. Connections with one projection for all tokens of a sample exclude padding, so that it does not
change the result.
"""
from typing import Any, Optional

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ._compat import is_observed

CAUSAL_MASK = (
    "a connection has one projection for all tokens of a sample, but the attention is causal: each token would depend "
    "on later tokens. Use the connection 'feature' or 'hybrid'")
MASK_LAYOUTS = ("scores", "keys")  # layouts of masks with two axes, see real_tokens


def real_tokens(
        attn_mask: Optional[Tensor], x: Tensor, layout: str = "scores", causal: bool = True) -> Optional[Tensor]:
    """Return which tokens are real and not padding.

    A token is real if the mask lets any token attend to it, including itself. Under a causal mask every token is real,
    because each may attend to itself.

    | mask | reading |
    | --- | --- |
    | ``[B or 1, heads or 1, N or 1, N]`` | as ``scaled_dot_product_attention`` broadcasts it |
    | ``[heads or 1, N or 1, N]`` | the same, without the axis of the samples |
    | ``[N or 1, N]`` with the layout ``"scores"`` | the same, without the axes of samples and heads |
    | ``[B or 1, N]`` with the layout ``"keys"`` | one value for each key of each sample, as in flash attention |
    | last axis not N | mask over the keys of another stream: ignored |
    | boolean | True allows attention; ``nn.MultiheadAttention`` has the opposite meaning |
    | floating-point | added to the scores; values of -1000 or less forbid attention, all others allow it |
    | integer, or ``"keys"`` of 0 and 1 | 0 forbids attention; without any positive value, read as floating-point |
    | ``BlockMask`` | evaluated for every pair of tokens |

    Args:
        attn_mask: Mask of self-attention.
        x: Stream, ``[B, N, C]``.
        layout: Layout of masks with two axes, ``"scores"`` or ``"keys"``. The shape alone does not show it if a batch
            has as many samples as tokens.
        causal: Whether causal masks are allowed. In compiled, exported and scripted code, they are always allowed,
            because the values of the mask are unknown.

    Returns:
        Boolean tensor ``[B or 1, N, 1]``, True for real tokens. None if there is no mask, or if the mask covers the
        keys of another stream.

    Raises:
        ValueError: The shape is unsupported, or the mask is causal.

    Example:
        >>> real_tokens(torch.tensor([[[[True, True, False]]]]), torch.zeros(1, 3, 8)).flatten()
        tensor([ True,  True, False])
    """
    if attn_mask is None:
        return None
    if not torch.jit.is_scripting():
        if has_torch_function_variadic(attn_mask, x):
            if type(attn_mask).__name__ == "CausalBias":  # every token attends to itself: no padding
                if not causal:
                    raise ValueError(CAUSAL_MASK)
                return None
            return handle_torch_function(real_tokens, (attn_mask, x), attn_mask, x, layout, causal)  # FX records it
        if not isinstance(attn_mask, Tensor):
            attn_mask = _evaluated(attn_mask, x)
    if x.dim() == 3 and attn_mask.dim() > 1 and attn_mask.shape[-1] != x.shape[1]:
        return None
    problem = _mask_problem(attn_mask, x, layout)
    if problem != "":
        raise ValueError(
            f"attention mask {problem}; got shape {list(attn_mask.shape)}, dtype {attn_mask.dtype}, and x of shape "
            f"{list(x.shape)}. If the mask does not mark padding, register the block with mask=''")
    of_keys = attn_mask.dim() == 2 and layout == "keys"
    allowed = _allowed(attn_mask, of_keys)
    if of_keys:
        return allowed.unsqueeze(-1)
    while allowed.dim() < 4:
        allowed = allowed.unsqueeze(0)
    real = allowed.any(2).any(1).unsqueeze(-1)
    if not torch.jit.is_scripting():  # noqa: SIM102 TorchScript compiles the rest of a longer condition
        if not causal and not is_observed(attn_mask, x) and _is_causal(allowed, real):
            raise ValueError(CAUSAL_MASK)
    return real


def _is_causal(allowed: Tensor, real: Tensor) -> bool:
    """Return whether real tokens attend to earlier tokens, and no token attends to a later token.

    Queries that are padding do not count: they may attend to the only real token of a sample.
    """
    if bool(allowed[..., 0, 1:].any()):  # most masks end here, without the time of a triangle
        return False
    if allowed.shape[-2] != allowed.shape[-1] or bool(allowed.triu(1).any()):
        return False
    return bool((allowed & real.unsqueeze(1)).tril(-1).any())


def _evaluated(mask: Any, x: Tensor) -> Tensor:
    """Return flex attention's ``BlockMask`` as a tensor."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask  # slow to import

    if not isinstance(mask, BlockMask):
        raise ValueError(f"attention mask must be a tensor or a BlockMask, got {type(mask).__name__}")
    batch, heads, queries, keys = mask.shape
    return create_mask(mask.mask_mod, batch, heads, queries, keys, device=x.device)


def _mask_problem(mask: Tensor, x: Tensor, layout: str) -> str:
    """Return why the shape of a mask is unsupported, or an empty string."""
    axes = mask.dim()
    if x.dim() != 3 or axes < 2 or axes > 4:
        return "must have two to four axes and belong to a stream [B, N, C]"
    batch, tokens, leading, queries = x.shape[0], x.shape[1], mask.shape[0], mask.shape[-2]
    if axes == 2 and leading != 1 and leading != (batch if layout == "keys" else tokens):
        return "with two axes must be [N, N] for mask_layout='scores' or [B, N] for mask_layout='keys'"
    if axes > 2 and (queries not in (1, tokens) or (axes == 4 and leading not in (1, batch))):
        return "must be [heads or 1, N or 1, N] or [B or 1, heads or 1, N or 1, N]"
    return ""


def _allowed(mask: Tensor, of_keys: bool) -> Tensor:
    """Return a mask as booleans, True where attention is allowed, without data-dependent control flow."""
    if mask.dtype == torch.bool:
        return mask
    allowed = mask > -1000.0  # exp(-1000) is 0 in every dtype
    if mask.is_floating_point() and not of_keys:
        return allowed
    positive = mask > 0
    keeps = positive.any()
    if mask.is_floating_point():
        keeps = keeps & (mask == positive).all()
    return torch.where(keeps, positive, allowed)
