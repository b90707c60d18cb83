"""Residual blocks of a user: one with two additions, and one whose own code calls a connection."""
import torch
from torch import nn

import timm_ortho


class MyBlock(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.norm, self.f, self.g = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + self.f(self.norm(x))
        return x + self.g(x)


class Single(nn.Module):
    """A block with one addition."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.f(x)


class Written(nn.Module):
    """A block that creates and calls a connection in its own code."""

    def __init__(self, connection=None):
        super().__init__()
        self.f, self.add = nn.Linear(8, 8), connection or timm_ortho.create_connection("feature")

    def forward(self, x):
        return self.add(x, self.f(x))


def register():
    timm_ortho.register_block(MyBlock, stream="x", kinds=("attention", "mlp"), dim=-1)


def tokens():
    """Return a batch for the block. Each call returns the same values."""
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
