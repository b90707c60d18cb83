"""Import the public names of the package, and thereby register its models with timm."""
from . import hub
from .blocks import not_residual, register_block
from .connections import (
    CONNECTIONS,
    Connection,
    FeatureConnection,
    GlobalConnection,
    HybridConnection,
    LinearConnection,
    create_connection,
    register_connection,
)
from .convert import UnsupportedModelError, connect, disconnect
from .diagnostics import Recorder, record
from .functional import decompose, residual_update
from .hub import pull
from .model_sites import Site, connection_arguments, sites
from .models import paper, skip_networks, variants  # registers the models
from .models.variants import register_variants
from .routing import RoutingError
from .skips import SKIPS, Skip, create_skip, register_skip
from .weights import WeightsError

__all__ = [
    "CONNECTIONS", "SKIPS", "Connection", "FeatureConnection", "GlobalConnection", "HybridConnection",
    "LinearConnection", "Recorder", "RoutingError", "Site", "Skip", "UnsupportedModelError", "WeightsError", "connect",
    "connection_arguments", "create_connection", "create_skip", "decompose", "disconnect", "hub", "not_residual",
    "paper", "pull", "record", "register_block", "register_connection", "register_skip", "register_variants",
    "residual_update", "sites", "skip_networks", "variants",
]
