"""Load a model from a repository of the Hub, or from a folder with a config.json."""
from pathlib import Path
from typing import Any, Dict, Union

import timm
from timm.layers import set_layer_config
from timm.models import model_entrypoint
from torch import nn

from .._compat import load_model_config_from_path
from .._text import did_you_mean, error_text
from ..convert import is_variant
from ..models.variants import create_plain
from ..weights import WeightsError
from ..weights.checks import naming_the_source
from ..weights.download import CacheDir, fetch, split_revision

_LARGEST = 8192  # pixels


def pull(source: Union[str, Path], *, cache_dir: CacheDir = None, **kwargs: Any) -> nn.Module:
    """Load a pretrained model from the Hub or a folder.

    The model is the same as from ``timm.create_model("hf-hub:...", pretrained=True)``. If the Hub fails,
    ``timm.create_model`` raises an error only after 23 seconds to several minutes, and reports "check your connection"
    for every cause. ``pull`` reports the cause within seconds. If the Hub cannot be reached, it uses cached files.

    >>> import tempfile, timm, timm_ortho
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     card = timm_ortho.hub.export(timm.create_model("vit_test_ortho"), folder, "me/my-model")
    ...     model = pull(f"local-dir:{folder}", num_classes=2)
    >>> model.num_classes
    2

    Args:
        source: ``owner/name`` or ``owner/name@revision``, optionally with the prefix ``hf-hub:``; or a folder, as
            ``local-dir:DIR`` or as a Path.
        cache_dir: Cache folder, huggingface_hub's by default.
        kwargs: Arguments of ``timm.create_model``, which override config.json.

    Raises:
        WeightsError: config.json or the weights cannot be read, or do not fit the model.
    """
    name = f"local-dir:{source}" if isinstance(source, Path) else source
    if name.startswith("local-dir:"):
        folder = Path(name.removeprefix("local-dir:"))
        return _created(folder, {"source": "local-dir", "file": str(folder)}, cache_dir, kwargs)
    hf_hub_id = name.removeprefix("hf-hub:")
    config = fetch(hf_hub_id, "config.json", cache_dir, newest=True)
    # Use one commit for both files, even if the branch changes meanwhile.
    commit = f"{split_revision(hf_hub_id)[0]}@{config.parent.name}"
    origin = {"source": "hf-hub", "hf_hub_id": commit, "file": None}
    model = _created(config.parent, origin, cache_dir, kwargs)
    vars(model)["pretrained_cfg"]["hf_hub_id"] = hf_hub_id
    return model


def _created(
        folder: Path, origin: Dict[str, Any], cache_dir: CacheDir, kwargs: Dict[str, Any]) -> nn.Module:
    """Create the model of the config.json in a folder as `timm.create_model` does, but with our reader of weights.

    `origin` has the fields of the configuration that locate the weights.
    """
    source = f"{origin['source']}:{origin.get('hf_hub_id') or folder}"
    try:
        cfg, architecture, of_file = load_model_config_from_path(folder)
        is_known = timm.is_model(architecture)
        if not all(0 < int(size) <= _LARGEST for size in cfg.get("input_size", ())):
            raise ValueError(f"its input_size {cfg['input_size']} is not in 1 to {_LARGEST}")
    except Exception as error:  # noqa: BLE001 another person may have written the file
        raise WeightsError(f"{source}: its config.json is not timm's: {error_text(error, named=True)}") from None
    if not is_known:
        raise WeightsError(
            f"{source}: its config.json names the architecture '{architecture}', which is not registered with timm "
            f"{timm.__version__}: import the package that registers it, or update timm"
            f"{did_you_mean(architecture, timm.list_models())}")
    entry, name = (model_entrypoint(architecture), ()) if is_variant(architecture) else (create_plain, (architecture,))
    with naming_the_source(origin):
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        overlay = kwargs.pop("pretrained_cfg_overlay", None)
        arguments = {**of_file, **kwargs}
        layers = {key: arguments.pop(key, None) for key in ("scriptable", "exportable", "no_jit")}
        # A config.json with one of these five arguments is a TypeError.
        with set_layer_config(**layers):
            model = entry(
                *name, pretrained=True, pretrained_cfg={**cfg, **origin}, cache_dir=cache_dir,
                pretrained_model_args=of_file, pretrained_cfg_overlay=overlay, **arguments)
    vars(model)["_model_args"] = arguments  # timm's own saving reads them
    return model
