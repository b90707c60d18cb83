"""Prepare images as timm does, for the number of channels of a model."""
from typing import Any, Dict, Mapping, Optional, Sequence

from PIL import Image
from timm.data import resolve_data_config
from torch import nn

from ._text import error_text


def data_config(model: nn.Module, options: Mapping[str, Any], channels: Optional[int] = None) -> Dict[str, Any]:
    """Return timm's ``resolve_data_config`` for timm's options, adapted to images of any number of channels.

    The default of ``channels`` is the number of input channels of the model.
    """
    channels = channels or _channels(model)
    requested = {key: _for_channels(options[key], channels) for key in ("mean", "std") if options.get(key)}
    config = resolve_data_config({**options, **requested, "in_chans": channels}, model=model)
    config["input_size"] = (channels, *config["input_size"][1:])
    return {**config, **{key: _for_channels(config[key], channels) for key in ("mean", "std")}}


def _for_channels(values: Sequence[float], channels: int) -> Sequence[float]:
    """Return one value for each channel. If the number of values differs, use their average, as timm's loaders do."""
    return values if len(values) == channels else (sum(values) / len(values),) * channels


def opened(file: Any, mode: str) -> Image.Image:
    """Open an image file, and return the image in a Pillow mode such as ``RGB``.

    A file that is no image raises OSError. An image that is larger than Pillow's limit, or has 16 or 32 bits per
    channel, whose values Pillow would clip to 255, raises ValueError.
    """
    try:
        image = Image.open(file)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{error_text(error)}; make the image smaller first") from None
    with image:
        if image.mode != mode and image.mode.startswith(("I", "F")):
            raise ValueError("Pillow clips images of 16 or 32 bits to 255; convert the image to 8 bits first")
        return image.convert(mode)


def _channels(model: nn.Module) -> int:
    """Return the number of input channels of the first convolution, or of ``pretrained_cfg`` if there is none."""
    names = model.pretrained_cfg.get("first_conv") or ()
    parameters = dict(model.named_parameters())
    weights = [parameters.get(f"{name}.weight") for name in ([names] if isinstance(names, str) else names)]
    channels = [weight.shape[1] for weight in weights if weight is not None and weight.ndim == 4]
    return channels[0] if channels else model.pretrained_cfg["input_size"][0]
