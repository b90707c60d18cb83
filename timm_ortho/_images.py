"""How images are made ready for a model: as timm does it, for the channels that the model takes."""
from typing import Any, Dict, Mapping, Optional

from timm.data import resolve_data_config
from torch import nn


def data_config(model: nn.Module, options: Mapping[str, Any], channels: Optional[int] = None) -> Dict[str, Any]:
    """timm's ``resolve_data_config``, which has three channels wherever no size is given.

    Args:
        model: Its ``pretrained_cfg`` says what the options leave open.
        options: timm's: ``img_size``, ``mean``, ...
        channels: Of the images; those that the model takes without it.
    """
    channels = channels or _channels(model)
    config = resolve_data_config({**options, "in_chans": channels}, model=model)
    config["input_size"] = (channels, *config["input_size"][1:])
    for key in ("mean", "std"):
        if len(config[key]) != channels:  # as timm's loaders do it
            config[key] = (sum(config[key]) / len(config[key]),) * channels
    return config


def _channels(model: nn.Module) -> int:
    """What the first convolution takes, where the configuration names one."""
    names = model.pretrained_cfg.get("first_conv") or ()
    parameters = dict(model.named_parameters())
    weights = [parameters.get(f"{name}.weight") for name in ([names] if isinstance(names, str) else names)]
    found = [weight.shape[1] for weight in weights if weight is not None and weight.ndim == 4]
    return found[0] if found else model.pretrained_cfg["input_size"][0]
