"""Read recipes. A recipe is a YAML file with options of timm's `train.py`. `train.py -c FILE` reads it, too.

The papers' recipes are made by `paper.recipes`; the package's other recipes are files in `lab/recipes`. The options,
their defaults and their types are in the module `train_options`. If timm's script trains the runs, its parser must have
the requested options, too.
"""
import argparse
import importlib
import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any, Mapping

import timm

from ..._text import aligned, did_you_mean
from ..._yaml import load_yaml
from ...convert import base_name, bases_with_variants
from ...models.coverage import why_left_out
from ...run_folder import check_modules
from .. import LabError, check_names, one_line, read_user_yaml, shipped_files
from ..paper import recipes
from ..train_options import defaults, known_options, timm_options

_BY_MODEL = ("model_kwargs", "img_size", "input_size")  # dropped if the user chooses another model than the recipe's


def shipped() -> list[str]:
    """Return the names of the recipes in this package."""
    return [*recipes.names(), *shipped_files("recipes")]


def text(name: str) -> str:
    """Return a recipe of this package as YAML. An unknown name raises a LabError."""
    if name in recipes.names():
        return recipes.text(name)
    if name in shipped_files("recipes"):
        return shipped_files("recipes")[name].read_text(encoding="utf-8")
    raise LabError(f"there is no recipe '{name}'{did_you_mean(name, shipped())} (see timm-ortho recipe --list; "
                   "for your own recipe, use the path of its file)")


def listing() -> str:
    """Return a line for each recipe: its name, model and data set, the table in the paper, and the paper's accuracy."""
    rows = [("name", "model", "data set", "table", "top-1 in the paper")]
    for name in shipped():
        values = load(name)
        data, table, top1 = recipes.stated(name) or (str(values.get("dataset") or "any"), "-", {})
        accuracies = "; ".join(f"{label} {mean:.2f} ± {std:.2f}" for label, (mean, std) in top1.items())
        rows.append((name, values["model"], data, table, accuracies or "-"))
    return "".join(f"{line}\n" for line in aligned(rows))


def load(name: str) -> dict[str, Any]:
    """Return the options in a recipe. `name` is the recipe's name or file. An unknown option raises a LabError.

    >>> load("vit_s_cifar10")["opt"]
    'adamw'
    """
    if Path(name).is_file():
        values = read_user_yaml(Path(name), f"recipe '{name}'") or {}
    else:
        values = load_yaml(text(name))
    if not isinstance(values, dict):
        raise LabError(f"recipe '{name}' must be a mapping of timm's train.py options, not a {type(values).__name__}")
    check_names(values, timm_options(), f"recipe '{name}': timm's train.py", "option")
    resolve(values)  # checks the types, before options are merged
    return values


def resolve(values: Mapping[str, Any]) -> Namespace:
    """Return all options of timm's `train.py`, with the requested values or else the defaults.

    Args:
        values: Options by name, from a recipe or the command line. They are converted to the options' types.

    Raises:
        LabError: An option is unknown or has a wrong type.
    """
    check_names(values, known_options(), "the options: timm's train.py", "option")
    typed = {key: _typed(key, value) for key, value in values.items()}
    return Namespace(**{**defaults(), **typed})


def resolve_variant(requested: Mapping[str, Any], name: str, source: str = "the options") -> Namespace:
    """Return all options of timm's `train.py` for a recipe. `model` is replaced by its variant with suffix `_ortho`.

    A recipe of a paper has the paper's exact crop and RandAugment, too, for images on the device.

    Args:
        requested: timm's options by name, which override the recipe's.
        name: File or name of the recipe.
        source: The study that sets the requested options, for the message about `device_modules`.
    """
    values = {**load(name), **recipes.device_options(name)}
    own = base_name(str(values.get("model", "vit_small")))
    base = base_name(str(requested.get("model", own)))
    if base != own:
        values = {key: value for key, value in values.items() if key not in _BY_MODEL}
    kwargs = {**(values.get("model_kwargs") or {}), **(requested.get("model_kwargs") or {})}
    values = {**values, **requested, "model": base, "model_kwargs": kwargs}
    if values.get("weights"):
        values.update(pretrained=True, pretrained_path=values["weights"])
    options = resolve(values)
    del options.weights
    # train.py must import timm_ortho to find the variant; the user's modules may register models too
    options.device_modules = ["timm_ortho", *(name for name in options.device_modules or () if name != "timm_ortho")]
    check_modules(vars(options), source if "device_modules" in requested else f"recipe '{name}'")
    options.model = _variant(base)
    if "amp_dtype" not in values and (options.device == "cpu" or not options.amp):
        # timm's default is float16, whose loss scaler works on GPUs only. Without amp the value has
        # no effect. It is then the same on all devices, so that the output folder's name does not depend on the device.
        options.amp_dtype = "bfloat16"
    if "connection" in options.model_kwargs:
        raise LabError("the connection is not a model argument here: use --connections of timm-ortho compare, or the "
                       "key connections of a study")
    return options


def _variant(base: str) -> str:
    architecture, _, tag = base.partition(".")
    if tag:
        raise LabError(f"'{base}' names the weights '{tag}': use the model {architecture}, and start from a file of "
                       "weights with --weights FILE of timm-ortho compare, or with the option weights in a study")
    name = f"{base}_ortho"
    if timm.is_model(name):
        return name
    reason = why_left_out(base)
    if timm.is_model(base) and not reason:
        reason = "; call timm_ortho.register_variants in the module that registers the architecture"
    near = reason or did_you_mean(base, bases_with_variants(), 3)
    raise LabError(f"there is no orthogonal variant of '{base}'{near} (see timm-ortho list)")


def of_script(script: Path) -> argparse.ArgumentParser:
    """Return the argument parser of a `train.py`. If the script is not timm's, raise a LabError."""
    advice = ("use timm's train.py with --train-py, or set TIMM_DIR to its folder: git clone "
              "https://github.com/huggingface/pytorch-image-models")
    if not script.is_file():
        raise LabError(f"there is no {script}: {advice}")
    spec = importlib.util.spec_from_file_location("timm_train", script)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        parser = module.parser
    except Exception as error:  # noqa: BLE001 the script may raise anything
        raise LabError(f"{script} is not timm's train.py ({one_line(error)}): {advice}") from None
    return parser


def _typed(key: str, value: Any) -> Any:
    """Return a value converted to its option's type.

    YAML loads 1e-3 as text; as in timm, it becomes a number.
    """
    option = known_options()[key]
    if value is None:
        return option["default"]
    if option.get("list") or ("or_list" in option and isinstance(value, (list, tuple))):
        values = value if isinstance(value, (list, tuple)) else [value]
        value = [_scalar(key, option["type"], item) for item in values]
        if len(value) not in (0, option.get("length", len(value))):
            raise LabError(f"option '{key}' is {value}, but must be {option['length']} numbers")
    else:
        value = _scalar(key, option["type"], value)
    if "choices" in option and value not in option["choices"]:
        raise LabError(f"option '{key}' is {value!r}, but must be one of {str(option['choices'])[1:-1]}")
    return value


def _scalar(key: str, kind: str, value: Any) -> Any:
    if kind == "any":
        return value
    kinds = {"flag": (bool, "true or false"), "dict": (dict, "a mapping"), "int": (int, "a whole number"),
             "float": (float, "a number"), "str": (str, "text")}
    made, expected = kinds[kind]
    try:
        if kind in ("flag", "dict"):
            fits = isinstance(value, made) and all(isinstance(name, str) for name in (value if kind == "dict" else ()))
        else:
            fits = not isinstance(value, (bool, dict, list)) and (kind != "int" or float(value) == int(float(value)))
        if fits:
            return made(float(value)) if kind == "int" else made(value)
    except (ValueError, OverflowError):
        pass
    raise LabError(f"option '{key}' is {value!r}, but must be {expected}")


def is_unset(key: str, value: Any) -> bool:
    """Return whether an option has its default, or an empty value with the same effect."""
    default = known_options()[key]["default"]
    return value == default or (value in ("", [], {}) and not default)
