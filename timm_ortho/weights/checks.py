"""Read the weights of a model, and compare them with the model before timm loads them.

timm reads a pickle if there are no safetensors, and leaves missing tensors random if the number of classes differs from
that of the checkpoint. This module reads only safetensors from a repository or a folder with a config.json. It raises
an error if tensors do not fit, unless timm adapts or omits them, as in the head if the number of classes differs.
"""
import warnings
from contextlib import contextmanager
from inspect import signature
from pathlib import Path, PureWindowsPath
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._kinds import ANY, MISSING, NULL, NUMBER, SINGLE, TEXT, checked as check_kind, optional
from .._text import UserError, error_text
from . import WeightsError
from .download import CacheDir, fetch
from .files import load_state_dict

SAFE = "model.safetensors"
Tensors = Dict[str, Tensor]
Filter = Callable[[Tensors, nn.Module], Tensors]


# ------------------------------------------------------------------------------------------------ source
def located(cfg: PretrainedCfg, cache_dir: CacheDir = None) -> Dict[str, Any]:
    """Read the weights of a configuration, and return the changes to it that make timm load these tensors.

    timm itself would unpickle some files, which could run code. Weights are read from the safetensors of a folder
    (``source="local-dir"``) or of a repository (``source="hf-hub"``, or ``hf_hub_id`` without ``file``), or from any
    ``file`` that :func:`load_state_dict` reads. A ``state_dict`` is loaded unchanged. Weights that cannot be read, or
    that have a URL, raise a WeightsError.
    """
    if cfg.source == "local-dir":
        file = Path(cfg.file, _safetensors_name(cfg))
    elif cfg.hf_hub_id and (cfg.source == "hf-hub" or not (cfg.file or cfg.state_dict)):
        file = fetch(cfg.hf_hub_id, _safetensors_name(cfg), cache_dir)
    elif cfg.state_dict or not (cfg.file or cfg.url):
        return {}
    elif not cfg.file:
        raise WeightsError(f"weights at a URL ({cfg.url}) are not read: download the file, and set 'file' to its path")
    else:
        file = Path(cfg.file)
    try:
        return {"state_dict": load_state_dict(file), "source": "", "custom_load": False}
    except OSError as error:
        raise WeightsError(f"{file} cannot be read ({error.strerror or error})") from None


def _safetensors_name(cfg: PretrainedCfg) -> str:
    """Return the name of the file in a repository or folder. Another person may have written it."""
    name = str(cfg.hf_hub_filename or SAFE)
    if not name.endswith(".safetensors"):
        raise WeightsError(f"{_source_name(cfg)}: {name} is not a safetensors file, and pickles are never read")
    if PureWindowsPath(name).anchor or ".." in PureWindowsPath(name).parts:  # also finds POSIX paths
        raise WeightsError(f"{_source_name(cfg)}: its file '{name}' is outside the repository")
    return name


def _is_of_file(cfg: Any) -> bool:
    """Return whether timm read a configuration from a config.json."""
    return isinstance(cfg, dict) and cfg.get("source") in ("hf-hub", "local-dir")


_FIELDS = {**optional("mean std", [NUMBER]), **optional("crop_pct", NUMBER), **optional("interpolation", TEXT),
           "label_names": ([SINGLE], {...: SINGLE}, NULL, MISSING), ...: ANY}


def checked_fields(cfg: Dict[str, Any], name: str) -> Dict[str, Any]:
    """Return a configuration. If timm read it from a config.json, check it, and use the architecture's own layers.

    timm makes weights of the layers ``classifier`` and ``first_conv`` random if they have other sizes.
    """
    if not _is_of_file(cfg):
        return cfg
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in cfg.items()}  # of an overlay
    registered = get_pretrained_cfg(name.partition(".")[0])
    layers = {key: getattr(registered, key, None) for key in ("classifier", "first_conv")}
    return {**check_kind(plain, _FIELDS, "pretrained_cfg"), **layers}


def restore_source(model: nn.Module, cfg: PretrainedCfg) -> None:
    """Restore the original source in ``model.pretrained_cfg``, instead of the values from :func:`located`."""
    for key in ("file", "state_dict", "source", "tag"):
        model.pretrained_cfg.pop(key, None)
        if getattr(cfg, key) is not None:
            model.pretrained_cfg[key] = getattr(cfg, key)


@contextmanager
def naming_the_source(cfg: Any) -> Iterator[None]:
    """Name the repository or folder of a config.json in errors about the arguments that build its model.

    ``cfg`` is the argument ``pretrained_cfg`` of an entry point.
    """
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:  # with bad arguments, timm's constructors raise any exception
        if not _is_of_file(cfg):
            raise
        source = _source_name(PretrainedCfg(**{key: cfg.get(key) for key in ("source", "hf_hub_id", "file")}))
        raise WeightsError(
            f"{source}: the arguments of its config.json and of the call cannot build a model: "
            f"{error_text(error, named=not isinstance(error, UserError))}") from error


def _source_name(cfg: PretrainedCfg) -> str:
    """Return the source of weights in timm's notation."""
    if cfg.source == "local-dir":
        return f"local-dir:{cfg.file}"
    on_hub = cfg.hf_hub_id and (cfg.source == "hf-hub" or not cfg.file)
    return f"hf-hub:{cfg.hf_hub_id}" if on_hub else str(cfg.file or "the weights")


# ----------------------------------------------------------------------------------------------- content
# Layers after the blocks. If the number of classes changes or features_only is set, timm omits some of these layers,
# and the norm may have another name because of another pooling. In all other cases, names must agree.
_HEADS = ("attn_pool.", "head.", "head_dist.")
_NORMS = ("norm.", "fc_norm.")


def checked(filter_fn: Optional[Filter], cfg: PretrainedCfg, arguments: Dict[str, Any]) -> Filter:
    """Return a checkpoint filter that compares the weights with the model before they are loaded.

    It raises WeightsError if a tensor is missing or has another shape, or is surplus unless timm's entry point or the
    caller sets ``pretrained_strict=False``. It warns if timm replaces a classifier that would fit. If the checkpoint
    has no parameter of a connection, these parameters keep their initial values: ``hybrid`` starts from any weights.

    Args:
        filter_fn: Filter of timm or of the architecture, called first.
        cfg: Configuration of the weights.
        arguments: Arguments of ``build_model_with_cfg``.
    """
    def filtered(state_dict: Tensors, model: nn.Module) -> Tensors:
        if filter_fn is not None:
            takes_model = len(signature(filter_fn).parameters) > 1  # timm also supports filters without this argument
            try:
                state_dict = filter_fn(state_dict, model) if takes_model else filter_fn(state_dict)
            except Exception as error:  # timm's filters raise any exception for the tensors of another architecture
                raise WeightsError(
                    f"{_source_name(cfg)}: not a checkpoint of {cfg.architecture}: {error_text(error)}") from error
        own = model.state_dict()
        if not any(".connection_" in name for name in state_dict):
            state_dict = {**state_dict, **{name: own[name] for name in own if ".connection_" in name}}
        classes = getattr(model, "num_classes", 0)  # models of features may lack this attribute
        features = bool(arguments.get("features_only"))
        is_strict = arguments.get("pretrained_strict", True)
        problems = "; ".join(_problems(state_dict, own, cfg, features or classes != cfg.num_classes, is_strict))
        if problems:
            raise _misfit(cfg, problems)
        if classes != cfg.num_classes and not features:
            _warn_of_new_classifier(state_dict, own, cfg, classes)
        return state_dict

    return filtered


def _problems(
        state_dict: Tensors, own: Tensors, cfg: PretrainedCfg, is_adapted: bool, is_strict: bool) -> Iterator[str]:
    """Describe missing, surplus and misshapen tensors, except those that timm adapts, omits or drops.

    ``own`` has the tensors of the model. If ``is_adapted``, the model may have another head than the weights. PyTorch
    creates BatchNorm's counter, and gives lazy parameters their shape.
    """
    classifiers = _prefixes(cfg.classifier)
    heads, norms = ((*_HEADS, *classifiers), _NORMS) if is_adapted else ((), ())
    dropped = classifiers if is_adapted or cfg.label_offset else ()

    def shape(name: str, tensor: Tensor) -> Tuple[int, ...]:
        sizes = tuple(tensor.shape)
        return sizes[:1] + sizes[2:] if name.startswith(_prefixes(cfg.first_conv)) else sizes

    new = [name for name in state_dict if name not in own]
    renamed = norms if any(name.startswith(norms) for name in new) else ()
    missing = [name for name in own if name not in state_dict and not name.startswith(heads + renamed)
               and not name.endswith(".num_batches_tracked")]
    surplus = [name for name in new if is_strict and not name.startswith(heads + norms)]
    both = [name for name in own if name in state_dict and not is_lazy(own[name]) and not name.startswith(dropped)]
    misshapen = [f"{name} ({tuple(state_dict[name].shape)}, not {tuple(own[name].shape)})"
                 for name in both if shape(name, state_dict[name]) != shape(name, own[name])]
    for problem, names in (("missing", missing), ("surplus", surplus), ("wrong shape", misshapen)):
        if names:
            yield f"{problem}: {_some(names)}"


def _warn_of_new_classifier(state_dict: Tensors, own: Tensors, cfg: PretrainedCfg, classes: int) -> None:
    """Warn if timm drops a classifier that fits. timm compares only numbers of classes, not shapes."""
    names = [name for name in own if name.startswith(_prefixes(cfg.classifier))]
    if names and all(name in state_dict and state_dict[name].shape == own[name].shape for name in names):
        warnings.warn(
            f"{_source_name(cfg)}: the classifier ({', '.join(names)}) of the checkpoint fits, but timm replaces it, "
            f"because num_classes is {cfg.num_classes} in the configuration and {classes} in the model. To keep it, "
            f"add num_classes={classes} to pretrained_cfg_overlay", stacklevel=2)


def check_arguments(cfg: PretrainedCfg, arguments: Mapping[str, Any]) -> None:
    """Raise WeightsError if ``arguments``, the ``model_args`` of a config.json, change how its weights are loaded.

    With two or negative numbers of classes, timm would make a random classifier.
    """
    if "pretrained_strict" in arguments:
        raise _misfit(cfg, "model_args of config.json contain 'pretrained_strict', which only the caller may set")
    classes = arguments.get("num_classes", cfg.num_classes)
    if classes != cfg.num_classes or classes < 0:
        raise _misfit(cfg, f"config.json has {cfg.num_classes} classes and, with its model_args, {classes}")


def check_finite(model: nn.Module, cfg: PretrainedCfg, is_checked: bool) -> None:
    """Raise WeightsError if loaded weights are not finite in the dtype of the model.

    ``is_checked`` is whether the filter of :func:`checked` was called. If not, weights may be missing: also an error.
    """
    if not is_checked:
        raise _misfit(cfg, "they cannot be checked, because its entry point calls no build_model_with_cfg of timm")
    tensors = {name: t for name, t in model.state_dict().items() if not is_lazy(t) and t.is_floating_point()}
    counts = {name: int((~t.isfinite()).sum()) for name, t in tensors.items()}
    names = [f"{name} ({count} of {tensors[name].numel()} values)" for name, count in counts.items() if count]
    if names:
        raise _misfit(cfg, f"not finite: {_some(names)}")


def _misfit(cfg: PretrainedCfg, problems: str) -> WeightsError:
    return WeightsError(f"{_source_name(cfg)}: the weights do not fit {cfg.architecture}: {problems}")


def _prefixes(layers: Any) -> Tuple[str, ...]:
    """Return the prefixes of the tensors of layers, which a configuration lists or names."""
    return tuple(f"{layer}." for layer in ([layers] if isinstance(layers, str) else layers or ()))


def _some(names: List[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
