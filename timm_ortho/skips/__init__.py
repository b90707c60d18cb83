"""Skip transforms, fixed linear maps of the stream, and equivalences between networks (Wang et al., 2017).

:mod:`timm_ortho.skips.rewrites` contains the functions that rewrite a network as an equivalent network.
"""
from .transforms import SKIPS, Skip, create_skip, plain_skip

__all__ = ["SKIPS", "Skip", "create_skip", "plain_skip"]
