"""Find weights in safetensors files, and compare them with the model before they are loaded.

timm reads a pickle if there are no safetensors, and leaves missing tensors random if the number of classes differs from
that of the checkpoint. This module reads only safetensors from a repository or a folder with a config.json. It raises
an error if tensors do not fit, unless timm adapts or omits them, as in the head if the number of classes differs.
"""
import warnings
from contextlib import contextmanager
from inspect import signature
from pathlib import Path, PureWindowsPath
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from timm.models import PretrainedCfg
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..hub_client.download import CacheDir, fetch
from ..hub_client.errors import WeightsError
from .files import NUMPY, load_state_dict

SAFE = "model.safetensors"
Filter = Callable[[Dict[str, Tensor], nn.Module], Dict[str, Tensor]]


# ------------------------------------------------------------------------------------------------ source
def located(cfg: PretrainedCfg, cache_dir: CacheDir = None) -> Dict[str, Any]:
    """Return the changes to a configuration that keep timm from unpickling the weights, which could run code.

    | weights | timm gets |
    | --- | --- |
    | folder with a config.json (``source="local-dir"``) | the path of ``model.safetensors`` |
    | Hub (``source="hf-hub"``, or ``hf_hub_id`` without ``file`` and ``state_dict``) | the downloaded safetensors |
    | ``file`` that ends in ``.safetensors`` | the same file |
    | ``file`` that ends in ``.npz`` or ``.npy`` | the same file, read by numpy |
    | any other ``file`` | its tensors as ``state_dict``, read by :func:`load_state_dict` |
    | ``state_dict`` | no changes |

    Args:
        cfg: Configuration of the weights.
        cache_dir: Cache folder, huggingface_hub's by default.

    Raises:
        WeightsError: The weights cannot be downloaded or read, are truncated, or have a URL.
    """
    source = _source_name(cfg.source, cfg.hf_hub_id, cfg.file)
    if cfg.source == "local-dir":
        file = weights_in_folder(Path(cfg.file))
    elif cfg.hf_hub_id and (cfg.source == "hf-hub" or not (cfg.file or cfg.state_dict)):
        file = fetch(cfg.hf_hub_id, safetensors_name(source, cfg.hf_hub_filename), cache_dir)
    elif cfg.file and not cfg.state_dict:
        file = Path(cfg.file)
    elif cfg.url and not cfg.state_dict:
        raise WeightsError(f"weights at a URL ({cfg.url}) are not read: download the file, and set 'file' to its path")
    else:
        return {}
    if file.name.endswith(NUMPY):
        return {"source": "", "custom_load": True}
    if not file.name.endswith(".safetensors"):
        return {"state_dict": _tensors(file), "source": "", "custom_load": False}
    _check_header(file, source)
    return {"file": str(file), "source": "", "custom_load": False}


def _tensors(file: Path) -> Dict[str, Tensor]:
    try:
        return load_state_dict(file)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read ({error.strerror})") from None


def restore_source(model: nn.Module, cfg: PretrainedCfg) -> None:
    """Restore the original source in ``model.pretrained_cfg``, instead of the values from :func:`located`."""
    for key in ("file", "state_dict", "source", "tag"):
        model.pretrained_cfg.pop(key, None)
        if getattr(cfg, key) is not None:
            model.pretrained_cfg[key] = getattr(cfg, key)


@contextmanager
def naming_the_source(cfg: Any) -> Iterator[None]:
    """Name the repository or folder of a config.json in errors about the arguments that build its model.

    Args:
        cfg: The argument ``pretrained_cfg`` of an entry point: a dict with ``source`` if timm read a config.json.
    """
    try:
        yield
    except (TypeError, ValueError, AssertionError) as error:
        if not isinstance(cfg, dict) or cfg.get("source") not in ("hf-hub", "local-dir"):
            raise
        source = _source_name(cfg["source"], cfg.get("hf_hub_id"), cfg.get("file"))
        raise WeightsError(
            f"{source}: the arguments of its config.json and of the call cannot build a model: {error}") from error


def _source_name(source: Optional[str], hf_hub_id: Optional[str], file: Optional[str]) -> str:
    """Return the name of a source in timm's notation."""
    if source == "local-dir":
        return f"local-dir:{file}"
    return f"hf-hub:{hf_hub_id}" if hf_hub_id and (source == "hf-hub" or not file) else str(file or "the weights")


def safetensors_name(source: str, filename: Optional[str]) -> str:
    """Return a configuration's file name, by default ``model.safetensors``.

    Raises:
        WeightsError: The file has another format, or is outside the repository.
    """
    name = filename or SAFE
    if not name.endswith(".safetensors"):
        raise WeightsError(f"{source}: {name} is not a safetensors file, and pickles are never read")
    if PureWindowsPath(name).anchor or ".." in PureWindowsPath(name).parts:  # also finds POSIX paths
        raise WeightsError(f"{source}: its file '{name}' is outside the repository")
    return name


def weights_in_folder(folder: Path) -> Path:
    """Return the path of ``model.safetensors`` in a folder; raise WeightsError if it does not exist."""
    if not (folder / SAFE).is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise WeightsError(f"local-dir:{folder}: there is no {SAFE} among {names}; pickles are never read")
    return folder / SAFE


def _check_header(file: Path, source: str) -> None:
    """Raise WeightsError if a file is truncated or damaged, before the model is built."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{source}: {file.name} cannot be read ({error}); delete {file.resolve()} and try again") from error


# ----------------------------------------------------------------------------------------------- content
# Layers after the blocks. If the number of classes changes or features_only is set, timm omits some of these layers,
# and the norm may have another name because of another pooling. In all other cases, names must agree.
_HEADS = ("attn_pool.", "head.", "head_dist.")
_NORMS = ("norm.", "fc_norm.")


def checked(filter_fn: Optional[Filter], cfg: PretrainedCfg, arguments: Dict[str, Any]) -> Filter:
    """Return a checkpoint filter that compares the weights with the model before they are loaded.

    If the checkpoint contains no parameter of a connection, these parameters keep their initial values. This allows
    ``connection="hybrid"`` to start from any weights.

    Args:
        filter_fn: Filter of timm or of the architecture, called first.
        cfg: Configuration of the weights.
        arguments: Arguments of ``build_model_with_cfg``.

    Returns:
        A filter that raises WeightsError if a tensor is missing or has another shape. Surplus tensors are an error too,
        unless timm's entry point or the caller sets ``pretrained_strict=False``. The filter warns if timm replaces a
        classifier that would fit.
    """
    source = _source_name(cfg.source, cfg.hf_hub_id, cfg.file)

    def filtered(state_dict: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
        if filter_fn is not None:
            takes_model = len(signature(filter_fn).parameters) > 1  # timm also supports filters without this argument
            try:
                state_dict = filter_fn(state_dict, model) if takes_model else filter_fn(state_dict)
            except (KeyError, RuntimeError, ValueError) as error:
                raise WeightsError(f"{source}: not a checkpoint of {cfg.architecture}: {error}") from error
        own = model.state_dict()
        if not any(map(_is_learned_connection, state_dict)):
            state_dict = {**state_dict, **{name: own[name] for name in own if _is_learned_connection(name)}}
        classes = getattr(model, "num_classes", 0)  # models of features may lack this attribute
        is_adapted = bool(arguments.get("features_only")) or classes != cfg.num_classes
        problems = [
            *_other_names(state_dict, own, cfg, is_adapted, arguments.get("pretrained_strict", True)),
            *_other_shapes(state_dict, own, cfg, is_adapted),
        ]
        if problems:
            raise _misfit(cfg, "; ".join(problems))
        if classes != cfg.num_classes and not arguments.get("features_only"):
            _warn_of_new_classifier(source, state_dict, own, cfg, classes)
        return state_dict

    return filtered


def _misfit(cfg: PretrainedCfg, problems: str) -> WeightsError:
    source = _source_name(cfg.source, cfg.hf_hub_id, cfg.file)
    return WeightsError(f"{source}: the weights do not fit {cfg.architecture}: {problems}")


def check_classes(cfg: PretrainedCfg, arguments: Mapping[str, Any]) -> None:
    """Raise WeightsError for two or negative numbers of classes in a config.json: timm would make a random classifier.

    Args:
        cfg: Configuration with the number of classes at the top level of the file.
        arguments: The ``model_args`` of the file.
    """
    classes = arguments.get("num_classes", cfg.num_classes)
    if classes != cfg.num_classes or classes < 0:
        raise _misfit(cfg, f"config.json has {cfg.num_classes} classes and, with its model_args, {classes}")


def check_finite(model: nn.Module, cfg: PretrainedCfg, is_checked: bool) -> None:
    """Raise WeightsError if loaded weights are not finite in the dtype of the model.

    Args:
        model: A model with its weights.
        cfg: Configuration of the weights.
        is_checked: Whether the filter of :func:`checked` was called. If not, weights may be missing: also an error.
    """
    if not is_checked:
        raise _misfit(cfg, "they cannot be checked, because its entry point calls no build_model_with_cfg of timm")
    tensors = {name: t for name, t in model.state_dict().items() if not is_lazy(t) and t.is_floating_point()}
    counts = {name: int((~t.isfinite()).sum()) for name, t in tensors.items()}
    names = [f"{name} ({count} of {tensors[name].numel()} values)" for name, count in counts.items() if count]
    if names:
        raise _misfit(cfg, f"not finite: {_some(names)}")


def _is_learned_connection(name: str) -> bool:
    return ".connection_" in name


def _other_names(
        state_dict: Dict[str, Tensor], own: Dict[str, Tensor], cfg: PretrainedCfg, is_adapted: bool,
        is_strict: bool) -> Iterator[str]:
    """Describe missing and surplus tensors, except BatchNorm's counter, which PyTorch creates if it is missing.

    Surplus tensors are described only if `is_strict`.
    """
    missing = [name for name in own if name not in state_dict and not name.endswith(".num_batches_tracked")]
    surplus = [name for name in state_dict if name not in own]
    renamed = _NORMS if any(name.startswith(_NORMS) for name in surplus) else ()
    heads = _HEADS + _classifiers(cfg)
    for problem, names, allowed in (("missing", missing, heads + renamed), ("surplus", surplus, heads + _NORMS)):
        names = [name for name in names if not (is_adapted and name.startswith(allowed))]
        if names and (is_strict or problem == "missing"):
            yield f"{problem}: {_some(names)}"


def _other_shapes(
        state_dict: Dict[str, Tensor], own: Dict[str, Tensor], cfg: PretrainedCfg, is_adapted: bool) -> Iterator[str]:
    """Describe tensors of a wrong shape, except a dropped classifier, adapted input channels and lazy parameters."""
    dropped = _classifiers(cfg) if is_adapted or cfg.label_offset else ()

    def fits(name: str) -> bool:
        if is_lazy(own[name]):  # the parameter of a LazyLinear gets its shape from the checkpoint or the first input
            return True
        shape, own_shape = tuple(state_dict[name].shape), tuple(own[name].shape)
        if name == f"{cfg.first_conv}.weight" and shape[1:2] == tuple(cfg.input_size[:1]):
            shape, own_shape = shape[:1] + shape[2:], own_shape[:1] + own_shape[2:]
        return shape == own_shape or name.startswith(dropped)

    names = [name for name in own if name in state_dict and not fits(name)]
    if names:
        shapes = [f"{name} ({tuple(state_dict[name].shape)}, not {tuple(own[name].shape)})" for name in names]
        yield f"wrong shape: {_some(shapes)}"


def _warn_of_new_classifier(
        source: str, state_dict: Dict[str, Tensor], own: Dict[str, Tensor], cfg: PretrainedCfg, classes: int) -> None:
    """Warn if timm drops a classifier that fits. timm compares only numbers of classes, not shapes."""
    names = [name for name in own if name.startswith(_classifiers(cfg))]
    if names and all(name in state_dict and state_dict[name].shape == own[name].shape for name in names):
        warnings.warn(
            f"{source}: the classifier ({', '.join(names)}) of the checkpoint fits, but timm replaces it, because "
            f"num_classes is {cfg.num_classes} in the configuration and {classes} in the model. To keep the "
            f"checkpoint's classifier, add num_classes={classes} to pretrained_cfg_overlay. train.py's "
            "--pretrained-path sets num_classes=-1 there, so that timm always replaces the classifier.", stacklevel=2)


def _classifiers(cfg: PretrainedCfg) -> Tuple[str, ...]:
    """Return the prefixes of the classifiers' tensors."""
    names = (cfg.classifier,) if isinstance(cfg.classifier, str) else tuple(cfg.classifier or ())
    return tuple(f"{name}." for name in names)


def _some(names: List[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
