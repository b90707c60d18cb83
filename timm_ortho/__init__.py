"""Orthogonal residual connections for timm. Importing this package registers its models with timm."""
import re
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _is_command_line() -> bool:
    """Return whether this process is `timm-ortho` or `python -m timm_ortho`, before the latter has read its arguments.

    The command line registers the models after it has parsed its arguments, because importing torch and timm takes
    seconds, which `--version`, `--help` and `study list` save.
    """
    if sys.argv[:1] == ["-m"]:
        return re.search(r" -\w*m ?timm_ortho( |$)", " ".join(sys.orig_argv)) is not None  # also `-um timm_ortho`
    return bool(sys.argv) and Path(sys.argv[0]).name in ("timm-ortho", "timm-ortho.exe")


def __getattr__(name: str) -> Any:
    """Import a public name, in a process in which `_is_command_line` was true."""
    if name.startswith("_"):
        raise AttributeError(f"module 'timm_ortho' has no attribute '{name}'")
    from . import _api

    return getattr(_api, name)


if not _is_command_line():
    from ._api import *  # noqa: F403 all names are in __all__
    from ._api import __all__  # noqa: F401
