"""From a configuration to tensors that fit: weights come as safetensors and are compared with the model first.

timm itself reads a pickle where there are no safetensors, and where the number of classes differs it lets missing
tensors stay random. Neither happens here: nothing of a repository or of a folder with a config.json is ever unpickled,
and what does not fit is an error, the head of a model that is adapted excepted.
"""
import warnings
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from timm.models import PretrainedCfg
from torch import Tensor, nn

from .errors import WeightsError
from .fetching import CacheDir, fetch

SAFE = "model.safetensors"
Filter = Callable[[Dict[str, Tensor], nn.Module], Dict[str, Tensor]]


# --------------------------------------------------------------------------------------------- where from
def located(cfg: PretrainedCfg, cache_dir: CacheDir = None) -> Dict[str, Any]:
    """What to change in a configuration so that timm reads its weights from a safetensors file on this machine.

    Weights of the Hub are fetched, after a preflight; those of a folder (``local-dir:``) are looked for. Weights from
    elsewhere, a ``file`` or a ``state_dict``, are left to timm. That timm gets a file is also what makes releases
    before 1.0.29 read safetensors: what they find under a name of ``hf_hub_filename`` they unpickle.

    Raises:
        WeightsError: The weights cannot be had, are cut short, or are no safetensors.
    """
    source = _name(cfg.source, cfg.hf_hub_id, cfg.file)
    if cfg.source == "local-dir":
        file = in_folder(Path(cfg.file))
    elif cfg.hf_hub_id and (cfg.source == "hf-hub" or not (cfg.file or cfg.state_dict)):
        file = fetch(cfg.hf_hub_id, safe_name(source, cfg.hf_hub_filename), cache_dir)
    else:
        return {}
    _check_header(file, source)
    return {"file": str(file), "source": "", "custom_load": False}


def restore_source(model: nn.Module, cfg: PretrainedCfg) -> None:
    """Let a model's ``pretrained_cfg`` name the weights that were asked for, not where they or its sizes were found."""
    for key in ("file", "source", "tag"):
        model.pretrained_cfg.pop(key, None)
        if getattr(cfg, key) is not None:
            model.pretrained_cfg[key] = getattr(cfg, key)


@contextmanager
def naming_the_source(cfg: Any) -> Iterator[None]:
    """Where arguments come from a config.json, errors in them begin with the repository or folder that it is in.

    ``cfg`` is what an entry point was given: timm hands over a dict with ``source`` then.
    """
    try:
        yield
    except (TypeError, ValueError, AssertionError) as error:
        if not isinstance(cfg, dict) or cfg.get("source") not in ("hf-hub", "local-dir"):
            raise
        source = _name(cfg["source"], cfg.get("hf_hub_id"), cfg.get("file"))
        raise WeightsError(f"{source}: its config.json and the call make no model: {error}") from error


def _name(source: Optional[str], hf_hub_id: Optional[str], file: Optional[str]) -> str:
    """The name under which timm finds these weights, where it has one."""
    if source == "local-dir":
        return f"local-dir:{file}"
    return f"hf-hub:{hf_hub_id}" if hf_hub_id and (source == "hf-hub" or not file) else str(file or "the weights")


def safe_name(source: str, filename: Optional[str]) -> str:
    """The file that a configuration names, or the one that has weights where it names none."""
    name = filename or SAFE
    if not name.endswith(".safetensors"):
        raise WeightsError(f"{source}: {name} is no safetensors file, and pickles are never read")
    return name


def in_folder(folder: Path) -> Path:
    """The weights in a folder, which timm too prefers to whatever else is there."""
    if not (folder / SAFE).is_file():
        held = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise WeightsError(f"local-dir:{folder}: there is no {SAFE} among {held}; pickles are never read")
    return folder / SAFE


def _check_header(file: Path, source: str) -> None:
    """A file that was cut short is found here, before a model is built: its header says how long it is to be."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{source}: {file.name} cannot be read ({error}); delete {file.resolve()} and try again") from error


# -------------------------------------------------------------------------------------------- what is in it
# Behind the blocks: what timm leaves out for other classes or features only, and renames for another pooling.
_HEADS = ("attn_pool.", "head.", "head_dist.")
_NORMS = ("norm.", "fc_norm.")


def checked(filter_fn: Optional[Filter], cfg: PretrainedCfg, arguments: Dict[str, Any]) -> Filter:
    """A checkpoint filter that ends in a comparison with the model, before anything is loaded into it.

    A model with learned connections keeps its own where the checkpoint has none, so that ``connection="hybrid"`` starts
    from any weights.

    Args:
        filter_fn: timm's or the architecture's own filter, called first.
        cfg: The configuration of the weights.
        arguments: What ``build_model_with_cfg`` is called with.

    Returns:
        A filter that raises WeightsError if a tensor is missing, has another shape or is not finite. It warns where
        timm replaces a classifier that would fit by a new one.
    """
    source = _name(cfg.source, cfg.hf_hub_id, cfg.file)

    def filtered(state_dict: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
        if filter_fn is not None:
            takes_model = len(signature(filter_fn).parameters) > 1  # timm calls both kinds
            try:
                state_dict = filter_fn(state_dict, model) if takes_model else filter_fn(state_dict)
            except (KeyError, RuntimeError, ValueError) as error:
                raise WeightsError(f"{source}: no checkpoint of {cfg.architecture}: {error}") from error
        own = model.state_dict()
        if not any(map(_is_learned_connection, state_dict)):
            state_dict = {**state_dict, **{name: own[name] for name in own if _is_learned_connection(name)}}
        is_adapted = bool(arguments.get("features_only")) or model.num_classes != cfg.num_classes
        found = [
            *(_other_names(state_dict, own, is_adapted) if arguments.get("pretrained_strict", True) else ()),
            *_other_shapes(state_dict, own, cfg, is_adapted),
            *_not_finite(state_dict),
        ]
        if found:
            raise WeightsError(f"{source}: the weights do not fit {cfg.architecture}: {'; '.join(found)}")
        if model.num_classes != cfg.num_classes and not arguments.get("features_only"):
            _warn_of_a_new_classifier(source, state_dict, own, cfg, model.num_classes)
        return state_dict

    return filtered


def _is_learned_connection(name: str) -> bool:
    return ".connection_" in name


def _other_names(state_dict: Dict[str, Tensor], own: Dict[str, Tensor], is_adapted: bool) -> Iterator[str]:
    """Tensors too few or too many. BatchNorm's counter is not needed: PyTorch starts it where a checkpoint has none."""
    missing = [name for name in own if name not in state_dict and not name.endswith(".num_batches_tracked")]
    surplus = [name for name in state_dict if name not in own]
    renamed = _NORMS if any(name.startswith(_NORMS) for name in surplus) else ()
    for what, names, excused in (("missing", missing, _HEADS + renamed), ("too many", surplus, _HEADS + _NORMS)):
        names = [name for name in names if not (is_adapted and name.startswith(excused))]
        if names:
            yield f"{what} are {_some(names)}"


def _other_shapes(
        state_dict: Dict[str, Tensor], own: Dict[str, Tensor], cfg: PretrainedCfg, is_adapted: bool) -> Iterator[str]:
    """Tensors of another shape, but for the classifier where timm drops it, and the input channels that it adapts."""
    dropped = _classifiers(cfg) if is_adapted or cfg.label_offset else ()

    def fits(name: str) -> bool:
        given, wanted = tuple(state_dict[name].shape), tuple(own[name].shape)
        if name == f"{cfg.first_conv}.weight" and given[1:2] == tuple(cfg.input_size[:1]):
            given, wanted = given[:1] + given[2:], wanted[:1] + wanted[2:]
        return given == wanted or name.startswith(dropped)

    names = [name for name in own if name in state_dict and not fits(name)]
    if names:
        found = [f"{name} ({tuple(state_dict[name].shape)}, not {tuple(own[name].shape)})" for name in names]
        yield f"of another shape are {_some(found)}"


def _warn_of_a_new_classifier(
        source: str, state_dict: Dict[str, Tensor], own: Dict[str, Tensor], cfg: PretrainedCfg, classes: int) -> None:
    """Warn that timm drops a classifier that fits, since it compares the model with the configuration only."""
    names = [name for name in own if name.startswith(_classifiers(cfg))]
    if names and all(name in state_dict and state_dict[name].shape == own[name].shape for name in names):
        warnings.warn(
            f"{source}: the classifier ({', '.join(names)}) of the checkpoint fits, and timm replaces it by a new one, "
            f"since the configuration says {cfg.num_classes} classes and the model has {classes}. To keep it, add "
            f"num_classes={classes} to pretrained_cfg_overlay; --pretrained-path of train.py sets -1.", stacklevel=2)


def _classifiers(cfg: PretrainedCfg) -> Tuple[str, ...]:
    """What the names of the classifiers' tensors begin with."""
    names = (cfg.classifier,) if isinstance(cfg.classifier, str) else tuple(cfg.classifier or ())
    return tuple(f"{name}." for name in names)


def _not_finite(state_dict: Dict[str, Tensor]) -> Iterator[str]:
    counts = {name: int((~t.isfinite()).sum()) for name, t in state_dict.items() if t.is_floating_point()}
    found = [f"{name} ({count} of {state_dict[name].numel()} values)" for name, count in counts.items() if count]
    if found:
        yield f"not finite are {_some(found)}"


def _some(names: List[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
