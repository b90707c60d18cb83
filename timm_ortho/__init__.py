"""Orthogonal residual connections for timm. Importing this package registers its models with timm."""
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
from .models import paper, variants  # registers the models
from .models.preflight import WeightsError
from .models.pulling import pull
from .routing import RoutingError

__version__ = "0.1.0"

__all__ = [
    "CONNECTIONS", "Connection", "FeatureConnection", "GlobalConnection", "HybridConnection", "LinearConnection",
    "Recorder", "RoutingError", "Site", "UnsupportedModelError", "WeightsError", "connect", "create_connection",
    "decompose", "paper", "pull", "record", "representation", "residual_update", "sites", "variants",
]
