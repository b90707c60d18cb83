"""Residual blocks of timm, torchvision and transformers, and block classes that users register.

To support another block class of these libraries, add the class to the library's table, and add an architecture with
such blocks to the tests.
"""
from ..routing import is_own, library_of
from .lookup import specs
from .registry import is_residual, not_residual, register_block, spec_of
from .routed import host_class, route, routed_class, written_class
from .spec import BlockSpec

__all__ = [
    "BlockSpec", "host_class", "is_own", "is_residual", "library_of", "not_residual",
    "register_block", "route", "routed_class", "spec_of", "specs", "written_class",
]
