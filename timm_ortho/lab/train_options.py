"""List the options of timm's `train.py`, from `recipes/train_options.json`, and the options of the lab's own loop.

| key | meaning |
| --- | --- |
| `type`, `default` | as in timm's parser |
| `choices` | the values that timm's code supports; its parser checks few of them |
| `list` | true if the option is a list |
| `length` | the number of items, if a list must have this number |
| `or_list` | true if the option is a number on the command line, and a number or a list in YAML |
| `lab` | `used` if the lab's loop applies the option, `unused` if the option affects only logs and files. In the
  lab's loop, options without this key must keep their defaults |
| `about` | `machine` if the option has no effect on results, `data` if it describes the images, the model or the random
  numbers. A report lists only options without this key as differences from the paper |
"""
import json
from functools import cache
from importlib.resources import files
from typing import Any, Mapping

# Defaults that differ from timm's.
DEFAULTS = {
    "checkpoint_hist": 1,  # timm's default is 10; the many runs of a study need only their last and best checkpoints
}


# Options of `lab.device_images`, which timm's `train.py` lacks and ignores. The plan of a run contains them only if its
# images are stored on the device.
DEVICE_OPTIONS = {
    "device_images": {"type": "flag", "default": None, "lab": "used", "about": "data"},
    # pad by this many pixels and crop, in place of `train_crop_mode`
    "crop_padding": {"type": "int", "default": 0, "lab": "used", "about": "data"},
    # number of operations and magnitude (0 to 30) of torchvision's RandAugment, in place of `aa`
    "rand_augment": {"type": "int", "default": None, "list": True, "length": 2, "lab": "used", "about": "data"},
}

# A file of weights to start from, with a new classifier: short for timm's `pretrained` and `pretrained_path`. The plan
# of a run contains only timm's options.
_WEIGHTS = {"weights": {"type": "str", "default": "", "lab": "used", "about": "data"}}


@cache
def timm_options() -> Mapping[str, Mapping[str, Any]]:
    """Return the options of timm's `train.py` by name, with the keys above."""
    return json.loads(files(__package__).joinpath("recipes", "train_options.json").read_text(encoding="utf-8"))


@cache
def known_options() -> Mapping[str, Mapping[str, Any]]:
    """Return the options of timm's `train.py` and of the lab's own loop by name, with the keys above."""
    return {**timm_options(), **DEVICE_OPTIONS, **_WEIGHTS}


def defaults() -> dict[str, Any]:
    """Return the default of each option."""
    return {key: DEFAULTS.get(key, option["default"]) for key, option in known_options().items()}


@cache
def options_with(key: str, *values: str) -> frozenset[str]:
    """Return the names of the options in which `key`, such as `about`, has one of the values.

    >>> "pin_mem" in options_with("about", "machine")
    True
    """
    return frozenset(name for name, option in known_options().items() if option.get(key) in values)
