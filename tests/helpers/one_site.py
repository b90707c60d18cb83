"""A model that has one connection and a fixed branch output."""
from torch import nn

import timm_ortho


class OneSite(nn.Module):
    """A block whose stream is the input and whose branch output is given."""

    def __init__(self, branch, connection="feature", dim=-1):
        super().__init__()
        self.branch = branch
        self.connection_mlp = timm_ortho.create_connection(connection, dim=dim)

    def forward(self, x):
        return self.connection_mlp(x, self.branch)
