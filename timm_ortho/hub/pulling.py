"""A model out of a repository or a folder with a config.json, with the same care as one by its registered name."""
import json
from pathlib import Path
from typing import Any, Dict, Union

import timm
from torch import nn

from .._text import did_you_mean
from ..hub_client.download import CacheDir, fetch, split_revision
from ..hub_client.errors import WeightsError, check_repo_id
from ..weights.checks import SAFE, safetensors_name, weights_in_folder


def pull(source: Union[str, Path], *, cache_dir: CacheDir = None, **kwargs: Any) -> nn.Module:
    """A pretrained model of the Hub or of a folder, as ``timm.create_model("hf-hub:...", pretrained=True)`` makes it.

    timm asks the Hub for config.json by itself, which takes it 23 seconds to minutes where there is no answer and ends
    in "check your connection". This asks once, says within seconds what is wrong, and then has timm build the model
    from files on this machine. What is in the cache is taken where the Hub gives nothing.

    Args:
        source: ``owner/name``, with ``@revision`` if it is not the default branch and with or without
            ``hf-hub:``; or a folder, as ``local-dir:DIR`` or as a Path.
        cache_dir: The cache, if it is not huggingface_hub's own.
        kwargs: What ``timm.create_model`` takes, before what config.json says.

    Raises:
        WeightsError: config.json or the weights cannot be had, or do not make a model.
    """
    name = f"local-dir:{source}" if isinstance(source, Path) else source
    if name.startswith("local-dir:"):
        folder = Path(name.removeprefix("local-dir:"))
        if not (folder / "config.json").is_file():
            raise WeightsError(f"{name}: there is no config.json in it")
        _check_config(folder / "config.json", name)
        weights_in_folder(folder)
        return timm.create_model(name, pretrained=True, **kwargs)
    hf_hub_id = name.removeprefix("hf-hub:")
    check_repo_id(
        split_revision(hf_hub_id)[0], WeightsError, f"; and a folder as 'local-dir:{hf_hub_id or 'DIR'}' or as a Path")
    config = fetch(hf_hub_id, "config.json", cache_dir, newest=True)
    _check_config(config, f"hf-hub:{hf_hub_id}")
    # of one commit, whatever happens to the branch meanwhile; timm finds both in the cache then and asks nobody
    commit = f"{split_revision(hf_hub_id)[0]}@{config.parent.name}"
    fetch(commit, SAFE, cache_dir)
    model = timm.create_model(f"hf-hub:{commit}", pretrained=True, cache_dir=cache_dir, **kwargs)
    vars(model)["pretrained_cfg"]["hf_hub_id"] = hf_hub_id
    return model


def _check_config(file: Path, source: str) -> None:
    """A config.json that is of a registered model, timm's own included, and that names no pickle."""
    try:
        config: Dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        architecture = config["architecture"]
        filename = config.get("pretrained_cfg", config).get("hf_hub_filename")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{source}: its config.json is none of timm's: {type(error).__name__}: {error}") from error
    if not timm.is_model(architecture):
        raise WeightsError(
            f"{source}: its config.json names the architecture '{architecture}', which is not registered with timm "
            f"{timm.__version__}: import the package that has it, or update timm"
            f"{did_you_mean(architecture, timm.list_models())}")
    safetensors_name(source, filename)
