"""Skip transforms: fixed linear maps of the stream (Wang et al., 2017).

:mod:`timm_ortho.skips.rewrites` rewrites a network that has skip transforms as an equivalent network.
"""
from .transforms import SKIPS, Skip, create_skip, plain_skip

__all__ = ["SKIPS", "Skip", "create_skip", "plain_skip"]
