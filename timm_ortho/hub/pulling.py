"""Load a model from a repository of the Hub, or from a folder with a config.json."""
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Tuple, Union

import timm
from timm.models import PretrainedCfg
from torch import nn

from .._text import did_you_mean
from ..hub_client.download import CacheDir, fetch, split_revision
from ..hub_client.errors import WeightsError, check_repo_id
from ..models.names import is_variant
from ..weights.checks import located, naming_the_source, restore_source, safetensors_name, weights_in_folder


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
        return _created(name, architecture, PretrainedCfg(source="local-dir", file=str(folder)), cache_dir, kwargs)
    hf_hub_id = name.removeprefix("hf-hub:")
    repo_id = split_revision(hf_hub_id)[0]
    check_repo_id(repo_id, WeightsError, f"; pass a folder as 'local-dir:{hf_hub_id or 'DIR'}' or as a Path")
    config = fetch(hf_hub_id, "config.json", cache_dir, newest=True)
    architecture, filename = _check_config(config, f"hf-hub:{hf_hub_id}")
    # Use one commit for both files, even if the branch changes meanwhile. timm then finds both in the cache.
    commit = f"{repo_id}@{config.parent.name}"
    fetch(commit, filename, cache_dir)
    cfg = PretrainedCfg(source="hf-hub", hf_hub_id=commit, hf_hub_filename=filename)
    model = _created(f"hf-hub:{commit}", architecture, cfg, cache_dir, kwargs)
    vars(model)["pretrained_cfg"]["hf_hub_id"] = hf_hub_id
    return model


def _created(
        name: str, architecture: str, cfg: PretrainedCfg, cache_dir: CacheDir, kwargs: Dict[str, Any]) -> nn.Module:
    """Create a model whose weights timm does not unpickle.

    Variants locate their weights themselves. For any other architecture, timm would choose the file and its format.
    """
    if is_variant(architecture):
        return timm.create_model(name, pretrained=True, cache_dir=cache_dir, **kwargs)
    overlay = {**(kwargs.pop("pretrained_cfg_overlay", None) or {}), **located(cfg, cache_dir)}
    with naming_the_source({"source": cfg.source, "hf_hub_id": cfg.hf_hub_id, "file": cfg.file}):
        model = timm.create_model(name, pretrained=True, cache_dir=cache_dir, pretrained_cfg_overlay=overlay, **kwargs)
    restore_source(model, replace(cfg, tag=vars(model)["pretrained_cfg"].get("tag")))
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
