"""A recipe is a training YAML of timm's `train.py`: the same keys, the same defaults, the same types.

`train_options.json` beside this file lists `train.py`'s options. A key is one of four kinds:

- implemented: it does here what it does there;
- inert: it changes what is logged or stored, never a result, and is named in a warning;
- not implemented: an error, unless it stands at timm's default, so that an `args.yaml` written by timm is a recipe too;
- unknown: an error that names the nearest known one.
"""
import difflib
import json
from argparse import Namespace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Mapping

import yaml

from . import LabError

__all__ = ["find", "load", "known_options", "resolve", "shipped"]

IMPLEMENTED = frozenset("""
    data_dir dataset train_split val_split train_num_samples val_num_samples dataset_download class_map input_img_mode
    input_key target_key dataset_trust_remote_code
    model pretrained initial_checkpoint num_classes gp img_size in_chans input_size crop_pct mean std interpolation
    batch_size validation_batch_size channels_last grad_accum_steps grad_checkpointing model_kwargs head_init_scale
    head_init_bias torchcompile torchcompile_mode device amp amp_dtype device_modules
    opt opt_eps opt_betas momentum weight_decay clip_grad clip_mode layer_decay layer_decay_min_scale
    layer_decay_no_opt_scale opt_kwargs
    sched sched_on_updates lr lr_base lr_base_size lr_base_scale lr_noise lr_noise_pct lr_noise_std lr_cycle_mul
    lr_cycle_decay lr_cycle_limit lr_k_decay warmup_lr min_lr epochs epoch_repeats decay_milestones decay_epochs
    warmup_epochs warmup_prefix cooldown_epochs patience_epochs decay_rate
    no_aug train_crop_mode scale ratio hflip vflip color_jitter color_jitter_prob grayscale_prob gaussian_blur_prob aa
    bce_loss bce_sum bce_target_thresh bce_pos_weight reprob remode recount mixup cutmix cutmix_minmax mixup_prob
    mixup_switch_prob mixup_mode mixup_off_epoch smoothing train_interpolation drop drop_path drop_block bn_momentum
    bn_eps model_ema model_ema_decay model_ema_warmup
    seed worker_seeding checkpoint_hist workers pin_mem no_prefetcher eval_metric
""".split())

# One process, no logging service, and an output folder that compare names itself.
INERT = frozenset("""
    output experiment log_interval recovery_interval save_images log_wandb wandb_project wandb_tags wandb_resume_id
    local_rank dist_bn no_ddp_bb synchronize_step
""".split())

# train.py's parser takes one number, but hands a list that stands in the YAML on to timm.data, which knows both.
_NUMBER_OR_LIST = frozenset({"color_jitter"})

# Where the lab's default is not timm's, and why.
DEFAULTS = {
    "device": None,  # timm says cuda; here the machine decides
    "checkpoint_hist": 1,  # timm keeps 10; a grid has many runs and needs the last and the best of each
}


@cache
def known_options() -> Mapping[str, Mapping[str, Any]]:
    """The options of timm's `train.py`: name -> type, default, and, where they apply, list and choices."""
    return json.loads(files(__package__).joinpath("train_options.json").read_text(encoding="utf-8"))


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    folder = Path(str(files(__package__).joinpath("recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        LabError: There is none of that name; the message has the nearest.
    """
    known = shipped()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise LabError(f"there is no recipe '{name}': the nearest is '{near[0]}', timm-ortho recipe --list shows all, "
                   "and a file of your own is given by its path")


def load(name: str) -> dict[str, Any]:
    """Reads a recipe, given as a file or as the name of a shipped one, and checks its keys.

    Raises:
        LabError: There is no such file, it is no YAML mapping, or it has a key that timm does not know.
    """
    path = Path(name) if Path(name).is_file() else find(name)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LabError(f"recipe '{name}' is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise LabError(f"recipe '{name}' must be a mapping of timm's train.py options, not a {type(values).__name__}")
    return {_known(key, f"recipe '{name}'"): value for key, value in values.items()}


def resolve(values: Mapping[str, Any]) -> tuple[Namespace, list[str]]:
    """Completes given options with timm's defaults.

    Args:
        values: Options by name, as they stand in a recipe or on the command line.

    Returns:
        All options that the lab implements, typed as timm types them, and the names of the inert ones that were given.

    Raises:
        LabError: An option is unknown, has the wrong type, or is one of timm's that the lab does not implement.
    """
    typed = {_known(key, "the options"): _typed(key, value) for key, value in values.items()}
    if typed.get("data") is not None:  # train.py's deprecated positional argument
        typed.setdefault("data_dir", typed["data"])
    missing = [key for key in typed if key not in IMPLEMENTED | INERT | {"data"} and not _is_default(key, typed[key])]
    if missing:
        raise LabError(f"timm's train.py has {_listed(missing)}, but compare does not implement it: remove it, "
                       "or train with train.py --device-modules timm_ortho")
    inert = [key for key in typed if key in INERT and not _is_default(key, typed[key])]
    options = {key: DEFAULTS.get(key, known_options()[key]["default"]) for key in sorted(IMPLEMENTED)}
    options.update({key: value for key, value in typed.items() if key in IMPLEMENTED})
    return Namespace(**options), inert


def _known(key: Any, where: str) -> str:
    if key in known_options():
        return key
    near = difflib.get_close_matches(str(key).replace("-", "_"), known_options(), n=1, cutoff=0.0)
    raise LabError(f"{where}: timm's train.py has no option '{key}'; the nearest is '{near[0]}'")


def _typed(key: str, value: Any) -> Any:
    """YAML reads 1e-3 as a string and timm's parser turns it into a number afterwards; so does this."""
    option = known_options()[key]
    if value is None:
        return option["default"]
    if option.get("list") or (key in _NUMBER_OR_LIST and isinstance(value, (list, tuple))):
        values = value if isinstance(value, (list, tuple)) else [value]
        return [_scalar(key, option["type"], item) for item in values]
    value = _scalar(key, option["type"], value)
    if "choices" in option and value not in option["choices"]:
        raise LabError(f"option '{key}' is {value!r}, but must be one of {', '.join(option['choices'])}")
    return value


def _scalar(key: str, kind: str, value: Any) -> Any:
    def fits() -> bool:
        if kind == "flag":
            return isinstance(value, bool)
        if kind == "dict":
            return isinstance(value, dict)
        return not isinstance(value, (bool, dict, list))

    if kind == "any":
        return value
    try:
        if not fits():
            raise ValueError
        if kind == "int":
            if float(value) != int(float(value)):
                raise ValueError
            return int(float(value))
        return float(value) if kind == "float" else str(value) if kind == "str" else value
    except (ValueError, OverflowError):
        expected = {"flag": "true or false", "dict": "a mapping", "int": "a whole number", "float": "a number"}
        raise LabError(f"option '{key}' is {value!r}, but must be {expected.get(kind, 'text')}") from None


def _is_default(key: str, value: Any) -> bool:
    default = known_options()[key]["default"]
    return value == default or (not value and not default)


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
