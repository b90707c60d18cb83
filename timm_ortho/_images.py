"""How images are made ready for a model: as timm does it, for the channels that the model takes."""
from typing import Any, Dict, Mapping, Optional

from PIL import Image
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


def opened(file: Any, mode: str) -> Image.Image:
    """Return the image of a file, converted to a mode of Pillow.

    Raises:
        OSError: The file is no image.
        ValueError: The image is grey with 16 or 32 bits, which Pillow's conversion to 8 bits makes white.
    """
    with Image.open(file) as image:
        if image.mode != mode and image.mode.startswith(("I", "F")):
            raise ValueError("Pillow cuts its 16 or 32 bits off at 255; convert it to 8 bits")
        return image.convert(mode)


def _channels(model: nn.Module) -> int:
    """What the first convolution takes, where the configuration names one."""
    names = model.pretrained_cfg.get("first_conv") or ()
    parameters = dict(model.named_parameters())
    weights = [parameters.get(f"{name}.weight") for name in ([names] if isinstance(names, str) else names)]
    found = [weight.shape[1] for weight in weights if weight is not None and weight.ndim == 4]
    return found[0] if found else model.pretrained_cfg["input_size"][0]
