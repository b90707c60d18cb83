"""Prepare images as timm does, for the number of channels of a model."""
from typing import Any, Dict, Mapping, Optional

from PIL import Image
from timm.data import resolve_data_config
from torch import nn


def data_config(model: nn.Module, options: Mapping[str, Any], channels: Optional[int] = None) -> Dict[str, Any]:
    """Return timm's ``resolve_data_config`` for any number of channels; without an input size timm assumes three.

    Args:
        model: The model. Its ``pretrained_cfg`` contains the defaults.
        options: timm's options, such as ``img_size`` and ``mean``.
        channels: Channels of the images; None for the model's input channels.
    """
    channels = channels or _channels(model)
    config = resolve_data_config({**options, "in_chans": channels}, model=model)
    config["input_size"] = (channels, *config["input_size"][1:])
    for key in ("mean", "std"):
        if len(config[key]) != channels:  # as in timm's loaders
            config[key] = (sum(config[key]) / len(config[key]),) * channels
    return config


def opened(file: Any, mode: str) -> Image.Image:
    """Open an image file and convert it to a mode of Pillow.

    Raises:
        OSError: The file is not an image.
        ValueError: The image has 16 or 32 bits per pixel, which Pillow clips to 255.
    """
    with Image.open(file) as image:
        if image.mode != mode and image.mode.startswith(("I", "F")):
            raise ValueError("Pillow clips its 16 or 32 bits to 255; convert it to 8 bits first")
        return image.convert(mode)


def _channels(model: nn.Module) -> int:
    """Return the input channels of the first convolution, or of the configuration if there is no first convolution."""
    names = model.pretrained_cfg.get("first_conv") or ()
    parameters = dict(model.named_parameters())
    weights = [parameters.get(f"{name}.weight") for name in ([names] if isinstance(names, str) else names)]
    channels = [weight.shape[1] for weight in weights if weight is not None and weight.ndim == 4]
    return channels[0] if channels else model.pretrained_cfg["input_size"][0]
