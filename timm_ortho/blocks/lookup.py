"""Look up block classes in the libraries' tables and among the classes that users registered."""
import inspect
from dataclasses import replace
from typing import Any, Dict, Optional, Tuple

from . import timm, torchvision, transformers
from .spec import BlockSpec

_TABLES = (timm, torchvision, transformers)
SPECS: Dict[str, BlockSpec] = {spec.name: spec for table in _TABLES for spec in table.BLOCKS}
NOT_RESIDUAL: Dict[str, str] = {name: reason for table in _TABLES for name, reason in table.NOT_RESIDUAL.items()}
REGISTERED: Dict[str, type] = {}  # from register_block


def class_name(cls: type) -> str:
    """Return the full name of a class, which is the same in a script and in processes that the script spawns."""
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}.{cls.__qualname__}"


def spec_of_class(cls: type) -> Optional[BlockSpec]:
    """Return the spec of a block class; None for any other class.

    A subclass that inherits ``forward`` and the method with the additions has the spec of its base class. A registered
    class that is defined again, for example in a notebook cell, has no spec until it is registered.
    """
    name = class_name(cls)
    if name in SPECS or name in NOT_RESIDUAL:
        return _listed(cls)
    bases = ((base, _listed(base)) for base in cls.__mro__[1:])
    return next((replace(spec, name=name) for base, spec in bases
                 if spec and all(method_of(cls, each) is method_of(base, each) for each in {"forward", spec.method})),
                None)


def _listed(cls: type) -> Optional[BlockSpec]:
    name = class_name(cls)
    return SPECS.get(name) if REGISTERED.get(name, cls) is cls else None


def method_of(cls: type, name: str) -> Any:
    """Return the unwrapped method of a class, None if it has none. transformers wraps ``forward`` in each subclass."""
    function: Any = getattr(cls, name, None)
    return inspect.unwrap(function)


def specs(library: str) -> Tuple[BlockSpec, ...]:
    """Return the specs of a library, given the name of its package."""
    return tuple(spec for name, spec in SPECS.items() if name.partition(".")[0] == library)
