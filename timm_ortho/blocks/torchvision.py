from typing import Dict, Tuple

from .spec import BlockSpec

BLOCKS: Tuple[BlockSpec, ...] = ()
NOT_RESIDUAL: Dict[str, str] = {}
