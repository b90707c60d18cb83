"""Load a model from a repository of the Hub, or from a folder with a config.json."""
import json
from pathlib import Path
from typing import Any, Dict, Tuple, Union

import timm
from timm.layers import set_layer_config
from timm.models import model_entrypoint
from torch import nn

from .._compat import load_model_config_from_path
from .._text import did_you_mean
from ..convert import is_variant
from ..hub_client.download import CacheDir, fetch, split_revision
from ..hub_client.errors import WeightsError, check_repo_id
from ..models.variants import create_plain
from ..weights.checks import naming_the_source, safetensors_name, weights_in_folder


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
        if not (folder / "config.json").is_file():
            raise WeightsError(f"{name}: the folder contains no config.json")
        architecture, _ = _check_config(folder / "config.json", name)
        weights_in_folder(folder)
        return _created(architecture, folder, {"source": "local-dir", "file": str(folder)}, cache_dir, kwargs)
    hf_hub_id = name.removeprefix("hf-hub:")
    repo_id = split_revision(hf_hub_id)[0]
    check_repo_id(repo_id, WeightsError, f"; pass a folder as 'local-dir:{hf_hub_id or 'DIR'}' or as a Path")
    config = fetch(hf_hub_id, "config.json", cache_dir, newest=True)
    architecture, filename = _check_config(config, f"hf-hub:{hf_hub_id}")
    # Use one commit for both files, even if the branch changes meanwhile. timm then finds both in the cache.
    commit = f"{repo_id}@{config.parent.name}"
    fetch(commit, filename, cache_dir)
    origin = {"source": "hf-hub", "hf_hub_id": commit, "hf_hub_filename": filename, "file": None}
    model = _created(architecture, config.parent, origin, cache_dir, kwargs)
    vars(model)["pretrained_cfg"]["hf_hub_id"] = hf_hub_id
    return model


def _created(
        architecture: str, folder: Path, origin: Dict[str, Any], cache_dir: CacheDir, kwargs: Dict[str, Any],
) -> nn.Module:
    """Create a model as `timm.create_model` does. For architectures of timm too, `create` finds and checks the weights.

    Args:
        architecture: Name of the architecture in config.json.
        folder: The folder of config.json.
        origin: Fields of the configuration that locate the weights.
        cache_dir, kwargs: See `pull`.
    """
    entry, name = (model_entrypoint(architecture), ()) if is_variant(architecture) else (create_plain, (architecture,))
    with naming_the_source(origin):
        cfg, _, of_file = load_model_config_from_path(folder)
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


def _check_config(file: Path, source: str) -> Tuple[str, str]:
    """Return the architecture and the name of the weights file in a config.json.

    Raises:
        WeightsError: config.json is not timm's, its architecture is unknown to timm, or the weights are no safetensors.
    """
    try:
        config: Dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        architecture = config["architecture"]
        filename = config.get("pretrained_cfg", config).get("hf_hub_filename")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{source}: its config.json is not timm's: {type(error).__name__}: {error}") from error
    if not timm.is_model(architecture):
        raise WeightsError(
            f"{source}: its config.json names the architecture '{architecture}', which is not registered with timm "
            f"{timm.__version__}: import the package that registers it, or update timm"
            f"{did_you_mean(architecture, timm.list_models())}")
    return architecture, safetensors_name(source, filename)
