"""Which classes are residual blocks: the tables of the libraries, and what users register."""
import ast
import importlib
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union, cast

from torch import nn

from .._checks import known_name
from . import timm, torchvision, transformers
from .detection import calls_forward_of_base, looks_residual
from .routed import host_class, routed_class, routed_name, written_class
from .spec import BlockSpec

_TABLES = (timm, torchvision, transformers)
_SPECS: Dict[str, BlockSpec] = {spec.name: spec for table in _TABLES for spec in table.BLOCKS}
_NOT_RESIDUAL: Dict[str, str] = {name: why for table in _TABLES for name, why in table.NOT_RESIDUAL.items()}
_REGISTERED: Dict[str, type] = {}  # by users; the others are imported by their names


def register_block(
        block: type,
        *,
        stream: Union[str, Sequence[Union[str, Sequence[str]]]],
        kinds: Sequence[Optional[str]],
        dim: Union[int, Sequence[int]] = -1,
        keep: str = "output",
        method: str = "forward",
        mask: str = "attn_mask",
) -> type:
    """Make a class of residual blocks known to :func:`timm_ortho.connect`.

    Its instances get connections in place of those additions. The class itself stays as it is. Subclasses of it are
    other classes, to be registered by themselves.

    Args:
        block: An ``nn.Module`` whose method adds something to its stream: ``return x + self.f(self.norm(x))``.
        stream: What stands for the stream in an addition, as it is written there: one expression, or one for each
            addition (or several, where the sides of an ``if`` write it differently).
        kinds: A name for each addition to the stream, in the order of the source, no two alike: ``"attention"``,
            ``"mlp"``, ``"conv"`` or any identifier. None for an addition that stays as it is. Additions on the two
            sides of an ``if`` count once.
        dim: Channel axis of the stream: -1 for tokens, 1 for B C H W; one for all additions or one for each.
        keep: ``"branch"`` if the sum is changed in place afterwards, by an activation say.
        method: The method with the additions.
        mask: The argument of that method, if it has one, that says what is padding (see
            :func:`timm_ortho.connections.real_tokens`): an attention mask as ``scaled_dot_product_attention`` reads it.
            Masks of ``nn.MultiheadAttention`` have the opposite meaning; ``""`` keeps them from the connections.

    Returns:
        The class.

    Raises:
        TypeError: ``block`` is no class of modules.
        ValueError: ``kinds``, ``dim`` or ``keep`` is none, or another class of that name is known already.
        timm_ortho.RoutingError: The method cannot be read, or holds other additions; the message has those found.
    """
    if not (isinstance(block, type) and issubclass(block, nn.Module)):
        raise TypeError(f"block must be a class of torch.nn.Module, got {_shown(block)}")
    kinds = _tuple("kinds must be a sequence of names", kinds, (str, type(None)))
    named = [kind for kind in kinds if kind is not None]
    if not named or len(set(named)) < len(named) or not all(str(kind).isidentifier() for kind in named):
        raise ValueError(f"kinds must be different identifiers, one for each addition, got {kinds!r}")
    known_name("keep", keep, ("output", "branch"))
    expected = "stream must be an expression or a sequence of them"
    streams = stream if isinstance(stream, str) else tuple(
        one if isinstance(one, str) else _tuple(expected, one, str) for one in _tuple(expected, stream, object))
    for one in _flat(streams):
        try:
            ast.parse(one, mode="eval")
        except SyntaxError:
            raise ValueError(f"stream {one!r} is no expression") from None
    dims = dim if isinstance(dim, int) else _tuple("dim must be an axis or a sequence of axes", dim, int)
    for what, values in (("stream", streams), ("dim", dims)):
        if isinstance(values, tuple) and len(values) != len(kinds):
            raise ValueError(f"there are {len(values)} for {what} and {len(kinds)} kinds: give one, or one for each")
    if mask.endswith("key_padding_mask"):
        raise ValueError(f"mask {mask!r} is True for padding, connections read True as real: give mask='', or pass the "
                         "block the opposite under another name")
    name = _name(block)
    spec = BlockSpec(name, streams, kinds, dims, keep=keep, method=method, mask=mask, mask_layout="")
    if not callable(getattr(block, method, None)):
        raise ValueError(f"{name} has no method {method!r}")
    if name in _SPECS and _SPECS[name] != spec and _REGISTERED.get(name, block) is block:
        raise ValueError(f"{name} is known already, with stream {_SPECS[name].stream!r} and kinds {_SPECS[name].kinds}")
    routed_class(cast(type, block), spec)  # refuses what does not fit
    _SPECS[name], _REGISTERED[name] = spec, block
    return block


def not_residual(block: type, reason: str) -> type:
    """Say of a class that adds what follows from its input, which looks like a residual block, that it is none.

    Args:
        block: The class.
        reason: What the addition is: ``"two encoders are added"``.

    Returns:
        The class.

    Raises:
        TypeError: ``block`` is no class.
    """
    if not isinstance(block, type):
        raise TypeError(f"block must be a class, got {_shown(block)}")
    _NOT_RESIDUAL[_name(block)] = str(reason)
    return block


def spec_of(module: nn.Module) -> Optional[BlockSpec]:
    """What is known of a block, with connections or without; None for any other module.

    Subclasses of a block class are other classes: their ``forward`` may be anything.
    """
    host = host_class(module)
    name = _name(host)
    registered = _REGISTERED.get(name, host)  # a class of that name that was defined again is another one
    return _SPECS.get(name) if registered is host else None


def is_residual(module: nn.Module) -> bool:
    """Whether a module of no known class looks like a residual block."""
    return _looks_residual(written_class(module))


def _looks_residual(cls: type) -> bool:
    if _name(cls) in _NOT_RESIDUAL:
        return False
    inherits = calls_forward_of_base(cls) and any(
        _name(base) in _SPECS or _looks_residual(base) for base in cls.__bases__)
    return inherits or looks_residual(cls)


def specs(library: str) -> Tuple[BlockSpec, ...]:
    """The known blocks of a library, by the name of its package."""
    return tuple(spec for name, spec in _SPECS.items() if name.partition(".")[0] == library)


def host_and_spec(routed: str) -> Tuple[Optional[type], Optional[BlockSpec]]:
    """The block class that a routed class is named after, which is imported if need be, and what is known of it."""
    name = next((name for name in _SPECS if routed_name(name) == routed), None)
    if name is None:
        return None, None
    module, _, cls = name.rpartition(".")
    return _REGISTERED.get(name) or getattr(importlib.import_module(module), cls), _SPECS[name]


def _name(cls: type) -> str:
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__  # of the script, in a spawned process
    return f"{module}.{cls.__qualname__}"


def _flat(streams: Union[str, tuple]) -> List[str]:
    return [streams] if isinstance(streams, str) else [one for each in streams for one in _flat(each)]


def _shown(given: Any) -> str:
    """A module is named by its class: what it prints has a line for each of its children."""
    return f"a {type(given).__name__}" if isinstance(given, nn.Module) else repr(given)


def _tuple(expected: str, values: Sequence, of: Union[type, Tuple[type, ...]]) -> tuple:
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(one, of) for one in values):
        raise ValueError(f"{expected}, got {values!r}")
    return tuple(values)
