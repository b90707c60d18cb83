"""Names of the registered models: an architecture and a suffix that sets the connection."""
from timm.models import is_model, list_models, model_entrypoint

from .._text import did_you_mean

SUFFIXES = {"_ortho": "feature", "_orthog": "global", "_linear": "linear"}  # suffix -> connection

# Tag of the architecture in an exported config.json. If timm_ortho is not imported, timm and transformers report an
# unknown architecture with this tag, which names the package to import.
IMPORT_TAG = "import_timm_ortho"


def suffix_of(name: str) -> str:
    """Return the suffix of a variant's name, or an empty string.

    >>> suffix_of("vit_small_orthog"), suffix_of("vit_small")
    ('_orthog', '')
    """
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def base_name(name: str) -> str:
    """Return a name without the suffix of a variant.

    >>> base_name("vit_small_orthog"), base_name("vit_small")
    ('vit_small', 'vit_small')
    """
    return name.removesuffix(suffix_of(name))


def is_variant(name: str) -> bool:
    """Return whether a name, with or without tag, is registered by this package.

    >>> is_variant("vit_test_ortho.digits"), is_variant("resnet50")
    (True, False)
    """
    return bool(name) and is_model(name) and model_entrypoint(name).__module__.startswith("timm_ortho.")


def bases_with_variants() -> list[str]:
    """Return the names ``X`` for which a model ``X_ortho`` is registered."""
    return [name.removesuffix("_ortho") for name in list_models("*_ortho")]


def similar_variants(pattern: str) -> str:
    """Return text to append to a message about an unknown variant.

    The text has the reason why an architecture of timm has no variants, similar names, or how to list all variants.
    """
    from .coverage import why_left_out  # imports the table of blocks, which other functions do not need

    reason = why_left_out(base_name(pattern))
    if reason:
        return reason
    variants = [name for name in list_models() if is_variant(name)]
    return did_you_mean(pattern.strip("*"), variants, 3) or "; timm-ortho list '*' lists all variants"
