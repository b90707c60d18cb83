"""A model with one site, which is one residual addition."""
from torch import nn

import timm_ortho


class OneSite(nn.Module):
    """A block with one connection. The stream is the input, and the branch output is fixed."""

    def __init__(self, branch, connection="feature", dim=-1):
        super().__init__()
        self.branch = branch
        self.connection_mlp = timm_ortho.create_connection(connection, dim=dim)

    def forward(self, x):
        return self.connection_mlp(x, self.branch)
