"""A user's connection."""
from typing import Optional

import torch

from timm_ortho import Connection


class HalfConnection(Connection):
    """Keep half of the parallel component. The class inherits its constructor."""

    def forward(self, x: torch.Tensor, f: torch.Tensor, attn_mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        return self.join(x, f, 0.5, 1.0, attn_mask)
