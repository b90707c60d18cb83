"""Residual blocks of timm, torchvision and transformers, and block classes that users register.

To support another block class of these libraries, add the class to the library's table, and add an architecture with
such blocks to the tests.
"""
from ..routing import LIBRARIES, library_of
from .detection import has_source
from .lookup import specs
from .registry import is_residual, not_residual, register_block, spec_of
from .routed import branch_first, host_class, next_norms, reached, routed_class, written_class
from .spec import BlockSpec

__all__ = [
    "LIBRARIES", "BlockSpec", "branch_first", "has_source", "host_class", "is_residual", "library_of", "next_norms",
    "not_residual", "reached", "register_block", "routed_class", "spec_of", "specs", "written_class",
]
