"""A recipe is a training YAML of timm's `train.py`: the same keys, the same defaults, the same types.

`train_options.json` beside this file lists `train.py`'s options; where a script is at hand, its own parser is asked.

| key | says of an option |
| --- | --- |
| `type`, `default`, `choices` | what timm's parser says |
| `list`, `or_list` | it is a list; the parser takes one number, but timm.data a list too, which a YAML can hold |
| `lab` | `used` by the lab's loop, or `unused` there: it changes what is logged or stored; others stay at defaults |
| `about` | the `machine`, and so without effect on a result, or the `data`; without it, how a model is trained |
"""
import argparse
import importlib
import importlib.util
import json
import sys
from argparse import Namespace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Mapping

import timm

from ...models.names import base_name, bases_with_variants
from ...runs.folders import import_modules
from .. import LabError, check_names, nearest, one_line, read_user_yaml, shipped_files

_BY_MODEL = ("model_kwargs", "img_size", "input_size")  # what a recipe says for its own model only

# Where the lab's default is not timm's, and why.
DEFAULTS = {
    "checkpoint_hist": 1,  # timm keeps 10; a study has many runs and needs the last and the best of each
}


@cache
def known_options() -> Mapping[str, Mapping[str, Any]]:
    """The options of timm's `train.py`: name -> what is said of it, see above."""
    return json.loads(files(__package__).joinpath("train_options.json").read_text(encoding="utf-8"))


def defaults() -> dict[str, Any]:
    return {key: DEFAULTS.get(key, option["default"]) for key, option in known_options().items()}


@cache
def options_with(key: str, *values: str) -> frozenset[str]:
    """The names of the options of which the table says one of these: `options_with("lab", "used")`."""
    return frozenset(name for name, option in known_options().items() if option.get(key) in values)


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return shipped_files("recipes")


def find(name: str) -> Path:
    """The file of a shipped recipe; a LabError that has the nearest if there is none of that name."""
    known = shipped()
    if name in known:
        return known[name]
    raise LabError(f"there is no recipe '{name}': the nearest is '{nearest(name, known)[0]}', timm-ortho recipe --list "
                   "shows all, and a file of your own is given by its path")


def load(name: str) -> dict[str, Any]:
    """Reads a recipe, given as a file or as the name of a shipped one; a key that timm does not know is a LabError."""
    values = read_user_yaml(Path(name) if Path(name).is_file() else find(name), f"recipe '{name}'") or {}
    if not isinstance(values, dict):
        raise LabError(f"recipe '{name}' must be a mapping of timm's train.py options, not a {type(values).__name__}")
    check_names(values, known_options(), f"recipe '{name}': timm's train.py", "option")
    return values


def resolve(values: Mapping[str, Any], trainer: str = "lab") -> Namespace:
    """All of timm's options, typed as timm types them: those that are given, the others at their defaults.

    Args:
        values: Options by name, as they stand in a recipe or on the command line.
        trainer: `lab`, which knows some of them, or `train.py`; what it does not know, or a wrong type, is a LabError.
    """
    check_names(values, known_options(), "the options: timm's train.py", "option")
    typed = {key: _typed(key, value) for key, value in values.items()}
    if typed.get("data") is not None:  # train.py's deprecated positional argument
        typed.setdefault("data_dir", typed["data"])
    if trainer == "lab":
        changed = [key for key, value in typed.items() if not _is_default(key, value)]
        missing = [f"'{key}'" for key in changed if key not in options_with("lab", "used", "unused") | {"data"}]
        if missing:
            raise LabError(f"timm's train.py has {', '.join(missing)}, but the lab's own loop does not: remove it, or "
                           "train with --train-py")
        if str(typed.get("sched")).startswith("plateau"):
            raise LabError("the lab's own loop has no schedule that follows the figures: train with --train-py")
        unused = [key for key in changed if key in options_with("lab", "unused")]
        if unused:
            print(f"timm-ortho: the lab's own loop has no use for {', '.join(unused)}", file=sys.stderr)
    return Namespace(**{**defaults(), **typed})


def resolve_variant(given: Mapping[str, Any], name: str, trainer: str = "lab") -> Namespace:
    """timm's options for what was given, with a recipe and timm's own defaults below; the model is a variant.

    Args:
        given: timm's options by name; they override the recipe's.
        name: File or name of a shipped recipe.
        trainer: `lab` or `train.py`.
    """
    values = load(name)
    own = base_name(str(values.get("model", "vit_small")))
    base = base_name(str(given.get("model", own)))
    if base != own:
        values = {key: value for key, value in values.items() if key not in _BY_MODEL}
    kwargs = {**(values.get("model_kwargs") or {}), **given.get("model_kwargs", {})}
    values = {**values, **given, "model": base, "model_kwargs": kwargs}
    options = resolve(values, trainer)
    # timm_ortho so that train.py --config args.yaml finds the variant, others for what they register
    options.device_modules = ["timm_ortho", *(name for name in options.device_modules or () if name != "timm_ortho")]
    import_modules(options.device_modules, LabError)
    options.model = _variant(base)
    if "amp_dtype" not in values and options.device == "cpu":
        options.amp_dtype = "bfloat16"  # timm's float16 needs a loss scaler, which the CPU does not have
    if "connection" in options.model_kwargs:
        raise LabError("the connection is not a model argument here: use --connections")
    return options


def _variant(base: str) -> str:
    name = f"{base}_ortho"
    if timm.is_model(name):
        return name
    similar = nearest(base, bases_with_variants(), 3)
    raise LabError(f"there is no orthogonal variant of '{base}'; the nearest are {', '.join(similar)} "
                   "(timm-ortho list)")


def of_script(script: Path) -> argparse.ArgumentParser:
    """The parser of a `train.py`; a LabError if that is not timm's, or too old."""
    advice = ("give timm's train.py with --train-py, or its folder as TIMM_DIR: git clone "
              "https://github.com/huggingface/pytorch-image-models")
    if not script.is_file():
        raise LabError(f"there is no {script}: {advice}")
    spec = importlib.util.spec_from_file_location("timm_train", script)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        parser = module.parser
    except Exception as error:  # noqa: BLE001 whatever somebody else's file raises
        raise LabError(f"{script} is not timm's train.py ({one_line(error)}): {advice}") from None
    known = vars(parser.parse_args([]))
    lacking = [name for name in ("device_modules", "model_kwargs", "initial_checkpoint", "resume") if name not in known]
    if lacking:
        raise LabError(f"{script} is older than timm's option {lacking[0]}: {advice}")
    return parser


def _typed(key: str, value: Any) -> Any:
    """YAML reads 1e-3 as a string and timm's parser turns it into a number afterwards; so does this."""
    option = known_options()[key]
    if value is None:
        return option["default"]
    if option.get("list") or ("or_list" in option and isinstance(value, (list, tuple))):
        values = value if isinstance(value, (list, tuple)) else [value]
        return [_scalar(key, option["type"], item) for item in values]
    value = _scalar(key, option["type"], value)
    if "choices" in option and value not in option["choices"]:
        raise LabError(f"option '{key}' is {value!r}, but must be one of {', '.join(option['choices'])}")
    return value


def _scalar(key: str, kind: str, value: Any) -> Any:
    if kind == "any":
        return value
    kinds = {"flag": (bool, "true or false"), "dict": (dict, "a mapping"), "int": (int, "a whole number"),
             "float": (float, "a number"), "str": (str, "text")}
    made, expected = kinds[kind]
    try:
        if kind in ("flag", "dict"):
            fits = isinstance(value, made)
        else:
            fits = not isinstance(value, (bool, dict, list)) and (kind != "int" or float(value) == int(float(value)))
        if fits:
            return made(float(value)) if kind == "int" else made(value)
    except (ValueError, OverflowError):
        pass
    raise LabError(f"option '{key}' is {value!r}, but must be {expected}")


def _is_default(key: str, value: Any) -> bool:
    default = known_options()[key]["default"]
    return value == default or (not value and not default)
