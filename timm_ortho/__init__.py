"""Orthogonal residual connections for timm. Importing this package registers its models with timm."""
import importlib
from typing import TYPE_CHECKING, Any

from .arguments import connection_arguments
from .blocks import not_residual, register_block
from .connections import (
    CONNECTIONS,
    Connection,
    FeatureConnection,
    GlobalConnection,
    HybridConnection,
    LinearConnection,
    Site,
    create_connection,
    register_connection,
    sites,
)
from .convert import UnsupportedModelError, connect, disconnect
from .diagnostics import Recorder, record, representation
from .functional import decompose, residual_update
from .models import paper, skip_networks, variants  # registers the models
from .routing import RoutingError
from .skips import SKIPS, Skip, create_skip
from .skips.rewrites import SkipRewriteError, absorb, diagonalise
from .weights.errors import WeightsError

if TYPE_CHECKING:  # see __getattr__
    from . import hub as hub
    from .hub import pull

__version__ = "0.1.0"

__all__ = [
    "CONNECTIONS", "SKIPS", "Connection", "FeatureConnection", "GlobalConnection", "HybridConnection",
    "LinearConnection", "Recorder", "RoutingError", "Site", "Skip", "SkipRewriteError", "UnsupportedModelError",
    "WeightsError", "absorb", "connect", "connection_arguments", "create_connection", "create_skip", "decompose",
    "diagonalise", "disconnect", "not_residual", "paper", "pull", "record", "register_block", "register_connection",
    "representation", "residual_update", "sites", "skip_networks", "variants",
]


def __getattr__(name: str) -> Any:
    """``timm_ortho.hub`` and what is in it, imported on first use: it brings what only publishing needs."""
    if name == "hub":
        return importlib.import_module(f"{__name__}.hub")
    if name == "pull":
        return importlib.import_module(f"{__name__}.hub").pull
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
