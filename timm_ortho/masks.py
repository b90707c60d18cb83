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
MASK_LAYOUTS = ("", "scores", "keys")  # layouts of masks with two or three axes, see real_tokens


def real_tokens(
        attn_mask: Optional[Tensor], x: Tensor, layout: str = "", causal: bool = True) -> Optional[Tensor]:
    """Return which tokens are real and not padding.

    A token is real if the mask lets any token attend to it, including itself. Under a causal mask every token is real,
    because each may attend to itself.

    | mask | reading |
    | --- | --- |
    | ``[B or 1, heads or 1, N or 1, N]`` | as ``scaled_dot_product_attention`` broadcasts it |
    | ``[N, N]``, ``[heads, N, N]`` | the same, with the leading axes omitted |
    | ``[B, N]`` | one value for each key of each sample |
    | last axis not N | mask over the keys of another stream: ignored |
    | boolean | True allows attention; ``nn.MultiheadAttention`` has the opposite meaning |
    | floating-point | added to the scores; values of -1000 or less forbid attention, all others allow it |
    | integer, or ``[B, N]`` of 0 and 1 | 0 forbids attention; without any positive value, read as floating-point |
    | ``BlockMask`` | evaluated for every pair of tokens |

    Args:
        attn_mask: Mask of self-attention.
        x: Stream, ``[B, N, C]``.
        layout: Selects the reading of an ambiguous shape. With ``"scores"``, masks ``[N, N]``, ``[1, N]`` and
            ``[heads, N, N]`` are read as ``scaled_dot_product_attention`` reads them. With ``"keys"``, a mask
            ``[B, N]`` is read as flash attention reads it.
        causal: Whether causal masks are allowed. In compiled, exported and scripted code, they are always allowed,
            because the values of the mask are unknown.

    Returns:
        Boolean tensor ``[B or 1, N, 1]``, True for real tokens. None if there is no mask, or if the mask covers the
        keys of another stream.

    Raises:
        ValueError: The shape is unsupported, or ambiguous without a ``layout``, or the mask is causal.

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
    batch, tokens, leading = x.shape[0], x.shape[1], attn_mask.shape[0]
    is_scores = leading == tokens or (leading == 1 and layout == "scores")
    of_keys = attn_mask.dim() == 2 and leading == batch and (layout == "keys" or not is_scores)
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
    """Return why the shape of a mask is unsupported or ambiguous, or an empty string."""
    axes = mask.dim()
    if x.dim() != 3 or axes < 2 or axes > 4:
        return "must have two to four axes and belong to a stream [B, N, C]"
    batch, tokens, leading, queries = x.shape[0], x.shape[1], mask.shape[0], mask.shape[-2]
    if layout == "" and batch > 1 and axes == 2 and leading == batch and leading == tokens:
        return "can be [B, N] or [N, N]: pass it as [B, 1, 1, N] or as [1, 1, N, N]"
    if layout == "" and batch > 1 and axes == 3 and leading > 1 and leading % batch == 0:
        return "can have samples or heads as its first axis: pass it as [B, 1, N, N] or as [1, heads, N, N]"
    if (queries in (1, tokens) and (axes < 4 or leading in (1, batch))) or (axes == 2 and leading == batch):
        return ""
    return "must be [B, N], [N, N], [heads, N, N] or [B or 1, heads or 1, N or 1, N]"


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
