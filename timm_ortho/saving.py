"""Store the connections of timm's models where timm's `save_for_hf` and `push_to_hf_hub` read them."""
import warnings
from collections.abc import Mapping
from typing import Any, Dict

from timm.models import is_model
from torch import nn

from ._compat import takes_source_arguments
from .arguments import connection_arguments
from .model_sites import sites
from .models.names import IMPORT_TAG, SUFFIXES, base_name, is_variant, suffix_of


def keep_for_timm(model: nn.Module) -> None:
    """Store the variant that has the connections of each timm model in ``model``, or remove an outdated variant.

    timm reads the architecture in ``pretrained_cfg``, and from release 1.0.31 on its arguments in ``_model_args``. If
    no arguments describe the connections, ``_model_args`` gets a value that timm refuses to save.
    """
    for module in model.modules():
        if not isinstance(vars(module).get("pretrained_cfg"), Mapping):  # not a whole model of timm
            continue
        try:
            arguments: Dict[str, Any] = connection_arguments(module)
        except ValueError:
            arguments = {"connection": type(sites(module)[0].connection)}
        problem = keep_arguments(module, arguments)
        architecture = vars(module)["pretrained_cfg"].get("architecture") or ""
        if not takes_source_arguments and not _is_default(architecture, arguments):
            problem = problem or ("timm before 1.0.31 saves no arguments, so save_for_hf does not save these "
                                  "connections: use timm_ortho.hub.export")
        if problem:
            warnings.warn(problem, stacklevel=3)


def keep_arguments(model: nn.Module, arguments: Dict[str, Any]) -> str:
    """Store the arguments of ``connect`` in a model of timm, and return the reason if this is impossible."""
    cfg = vars(model)["pretrained_cfg"]
    name, _, tag = (cfg.get("architecture") or "").partition(".")
    suffix = "_orthog" if arguments.get("connection") == "global" else "_ortho"
    if is_variant(name) and tag != IMPORT_TAG:  # created as a variant
        arguments = arguments or {"connection": "linear"}
    else:
        base = base_name(name) if tag == IMPORT_TAG else name
        if arguments and not is_model(base + suffix):
            return (f"'{base}' has no variant, so config.json cannot store its connections: timm-ortho list prints the "
                    "variants")
        stored = f"{base}{suffix}.{IMPORT_TAG}" if arguments else base
        if stored != cfg.get("architecture"):
            cfg = {**cfg, "architecture": stored}
            vars(model).update(pretrained_cfg=cfg, default_cfg=cfg)
    kept = {name: value for name, value in vars(model).get("_model_args", {}).items()
            if name != "skip" and not name.startswith(("connection", "skip_"))}
    vars(model)["_model_args"] = {**kept, **{
        name if name.startswith(("connection", "skip")) else f"connection_{name}": value
        for name, value in arguments.items()}}
    return ""


def _is_default(architecture: str, arguments: Dict[str, Any]) -> bool:
    """Return whether an architecture has the connections of these arguments without any arguments."""
    connection = SUFFIXES.get(suffix_of(architecture.partition(".")[0]), "linear")
    return {"connection": "linear", "eps": 1e-6, **arguments} == {"connection": connection, "eps": 1e-6}
