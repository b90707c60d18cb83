"""List the options of timm's `train.py`, from `recipes/train_options.json`.

| key | meaning |
| --- | --- |
| `type`, `default`, `choices` | as in timm's parser |
| `list` | true if the option is a list |
| `or_list` | true if the option is a number on the command line, and a number or a list in YAML |
| `lab` | `used` if the lab's loop applies the option, `unused` if the option affects only logs and files. In the
  lab's loop, options without this key must keep their defaults |
| `about` | `machine` if the option has no effect on results, `data` if it describes the images, the model or the seed.
  A report lists only options without this key as differences from the paper |
"""
import json
from functools import cache
from importlib.resources import files
from typing import Any, Mapping

# Defaults that differ from timm's.
DEFAULTS = {
    "checkpoint_hist": 1,  # timm's default is 10; the many runs of a study need only their last and best checkpoints
}


@cache
def known_options() -> Mapping[str, Mapping[str, Any]]:
    """Return the options of timm's `train.py` by name, with the keys above."""
    return json.loads(files(__package__).joinpath("recipes", "train_options.json").read_text(encoding="utf-8"))


def defaults() -> dict[str, Any]:
    """Return the default of each option."""
    return {key: DEFAULTS.get(key, option["default"]) for key, option in known_options().items()}


@cache
def options_with(key: str, *values: str) -> frozenset[str]:
    """Return the names of the options in which `key`, such as `about`, has one of the values.

    >>> "workers" in options_with("about", "machine")
    True
    """
    return frozenset(name for name, option in known_options().items() if option.get(key) in values)
