"""What an update costs: ``timm-ortho bench``."""
from .measure import BenchError, bench

__all__ = ["BenchError", "bench"]
