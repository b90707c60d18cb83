"""Skip transforms: fixed linear maps of the stream (Wang et al., 2017)."""
from .transforms import IDEMPOTENT, SKIPS, Skip, create_skip, known_skip, plain_skip, register_skip

__all__ = ["IDEMPOTENT", "SKIPS", "Skip", "create_skip", "known_skip", "plain_skip", "register_skip"]
