"""Read files of weights without running code from them. The package reads every checkpoint here."""
import os
import pickle
import re
import warnings
import zipfile
from argparse import Namespace
from os import PathLike
from typing import Any, Dict, Union

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import Tensor, nn

from .._text import error_text
from . import WeightsError

Path_ = Union[str, "PathLike[str]"]


def load_checkpoint(path: Path_) -> Any:
    """Return the contents of a checkpoint, on the CPU.

    torch's restricted unpickler accepts tensors, plain values and the Namespace in which timm stores its options.

    Raises:
        OSError: The file cannot be opened.
        WeightsError: The file is damaged, or contains other objects. The message is one line.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # nothing ever arrives from some pipes
        raise WeightsError(f"{path} cannot be read as a checkpoint (it is not a file)")
    # safe_globals forbids its classes when it exits, also those that the caller has allowed.
    missing = {Namespace}.difference(torch.serialization.get_safe_globals())
    try:
        if str(path).endswith(".safetensors"):
            return load_file(path)
        _verify(path)
        with torch.serialization.safe_globals([*missing]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 torch, pickle, zipfile and safetensors raise any exception for a damaged file
        raise WeightsError(f"{path} cannot be read as a checkpoint ({_reason(error)})") from None


def _verify(path: Path_) -> None:
    """Compare the contents of a zip file with its checksums, which `torch.load` ignores."""
    if not zipfile.is_zipfile(path):  # files of torch before 1.6 have no checksums
        return
    with zipfile.ZipFile(path) as file:
        if not any(entry.CRC for entry in file.infolist()):  # torch.serialization.set_crc32_options(False)
            warnings.warn(f"{path} was saved without checksums, so damage to it would not be noticed", stacklevel=3)
        elif damaged := file.testzip():
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")


def _reason(error: Exception) -> str:
    """Return the reason of an error. torch's own text recommends `weights_only=False`, which would run the code."""
    if not isinstance(error, (pickle.UnpicklingError, SafetensorError, zipfile.BadZipFile)):
        return error_text(error, named=True)
    name = re.search(r"(?:GLOBAL|class|function) (\S+\.\S+)", str(error))
    if name is None:
        return "it is damaged or not a checkpoint"
    return f"it is a pickle that calls {name[1].rstrip('`,')}, and only tensors and plain values are unpickled"


def load_state_dict(path: Path_, use_ema: bool = True) -> Dict[str, Tensor]:
    """Return the weights in a file as :func:`timm.models.load_state_dict` does, and raise as :func:`load_checkpoint`.

    If ``use_ema``, the EMA weights of a checkpoint are preferred.
    """
    weights = load_checkpoint(path)
    keys = (*(("state_dict_ema", "model_ema") if use_ema else ()), "state_dict", "model")
    if isinstance(weights, dict):
        weights = next((weights[key] for key in keys if weights.get(key) is not None), weights)
    return tensors_by_name(weights, path)


def tensors_by_name(weights: Any, path: Path_) -> Dict[str, Tensor]:
    """Return the weights in a file without prefixes of wrappers; raise WeightsError unless they are a state dict."""
    if not isinstance(weights, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) and not value.is_complex()  # torch drops the imaginary
            for name, value in weights.items()):  # part
        raise WeightsError(f"{path} cannot be read as a checkpoint (it has no dict of real tensors by name)")
    cleaned = clean_state_dict(weights)
    if len(cleaned) < len(weights):
        raise WeightsError(f"{path} cannot be read as a checkpoint (some tensors differ only in a wrapper's prefix)")
    return cleaned


def load_weights(model: nn.Module, path: Path_, use_ema: bool = True) -> None:
    """Load the weights in a file into a model; raise OSError or WeightsError if they cannot be read or do not fit."""
    weights = load_state_dict(path, use_ema)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise WeightsError(f"the weights in {path} do not fit the model: {error_text(error, named=True)}") from None
