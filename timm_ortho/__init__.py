"""Orthogonal residual connections for timm. Importing this package registers its models with timm."""
import importlib
from types import ModuleType

from .connections import (
    CONNECTIONS,
    Connection,
    FeatureConnection,
    GlobalConnection,
    HybridConnection,
    LinearConnection,
    create_connection,
)
from .convert import Site, UnsupportedModelError, connect, sites
from .diagnostics import Recorder, record, representation
from .functional import decompose, residual_update
from .models import paper, skip_networks, variants  # registers the models
from .models.preflight import WeightsError
from .models.pulling import pull
from .routing import RoutingError
from .skips import SKIPS, Skip, create_skip
from .theorems import SkipRewriteError, absorb, diagonalise

__version__ = "0.1.0"

__all__ = [
    "CONNECTIONS", "SKIPS", "Connection", "FeatureConnection", "GlobalConnection", "HybridConnection",
    "LinearConnection", "Recorder", "RoutingError", "Site", "Skip", "SkipRewriteError", "UnsupportedModelError",
    "WeightsError", "absorb", "connect", "create_connection", "create_skip", "decompose", "diagonalise", "paper",
    "pull", "record", "representation", "residual_update", "sites", "skip_networks", "variants",
]


def __getattr__(name: str) -> ModuleType:
    """``timm_ortho.hub``, imported on first use: it brings what only publishing needs."""
    if name == "hub":
        return importlib.import_module(f"{__name__}.hub")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
