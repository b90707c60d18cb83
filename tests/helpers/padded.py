"""A batch of token sequences of several lengths, and its attention masks."""
import torch

LENGTHS = (5, 2, 7, 1)  # real tokens of each sample, followed by padding up to 8 tokens
MASK = torch.stack([torch.arange(8) < length for length in LENGTHS]).unsqueeze(-1)
KEYS = MASK.transpose(1, 2).unsqueeze(1)  # [B, 1, 1, N]
SQUARE = KEYS & KEYS.transpose(2, 3)
OF_SAMPLES = MASK.squeeze(-1)  # [B, N]
RAGGED = torch.arange(8) < torch.tensor([[5], [2], [7], [1], [8], [3], [6], [4]])  # [B, N] with B = N = 8


def batch(*, padding=0.0, dtype=torch.float64):
    """Return ``x`` and ``f`` of shape ``[4, 8, 6]``. Padding tokens have the value ``padding``."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, *MASK.shape[:2], 6, generator=generator, dtype=torch.float64).to(dtype)
    return [tensor.masked_fill(~MASK, padding).requires_grad_() for tensor in drawn]


def additive(allowed, masked, dtype=torch.float32):
    """Return an additive mask with the value ``masked`` where attention is not allowed."""
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, masked)
