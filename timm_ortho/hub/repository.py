"""A model, or what a training run left, as a folder that is a repository of the Hugging Face Hub.

| file | holds |
| --- | --- |
| `model.safetensors` | the weights; no pickle is ever written |
| `config.json` | architecture, the arguments that make this model of it, connection included, images, labels |
| `README.md` | the card, see `card` |
| `training.png` | the training curve, where it is a run; it takes matplotlib |

The folder is loaded again before anybody gets to see it, and has to give the same logits to the bit.
"""
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any, Optional, Union

import timm
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from timm.data import create_dataset
from timm.models import is_model, model_entrypoint
from timm.utils import unwrap_model
from torch import nn

from .._compat import current_arguments, save_config_for_hf
from .._images import data_config
from .._text import error_text
from ..arguments import connection_arguments
from ..connections import CONNECTIONS
from ..convert import connect
from ..hub_client.download import split_revision
from ..hub_client.errors import check_repo_id, without_tokens
from ..models.arguments import is_variant_argument, pop_connect_arguments, variant_argument
from ..models.build import IMPORT_TAG, creation_arguments
from ..runs.folders import class_names, import_modules
from ..skips.rewrites import ChangeOfBasis
from .card import CURVE, Subject, draw_curve, model_card
from .errors import PublishError
from .trained_run import CheckpointRun, Run

Model = Union[nn.Module, str, Path]

_OTHER_START = ("pretrained_path", "initial_checkpoint")  # options of train.py that put other weights in their place
FILES = ("model.safetensors", "config.json", "README.md", CURVE)


def export(
        model: Model,
        folder: Union[str, Path],
        repo_id: str,
        *,
        ema: bool = False,
        labels: Optional[Sequence[str]] = None,
        license: Optional[str] = None,
        revision: Optional[str] = None,
        token: Optional[str] = None,
) -> ModelCard:
    """Write what `hub.push` would send into a folder, and load it again.

    Args:
        model, repo_id, ema, labels, license, revision: As there.
        folder: Replaced if it holds nothing but an earlier export.
        token: What the texts must not hold, beside the token in use and what looks like one.

    Returns:
        The card.

    Raises:
        PublishError: It cannot be published, or the folder holds other files.
    """
    check_repo_id(repo_id, PublishError)
    folder = Path(folder).resolve()
    run = None if isinstance(model, nn.Module) else CheckpointRun(Path(model), ema)
    if run is None and ema:
        raise PublishError("a model has no EMA weights beside its own: give the EMA's module itself, or a checkpoint")
    built = _detached(model) if run is None else run_model(run)
    began_with = getattr(built, "began_with", {})
    if run is not None and run.options.get("pretrained") and not any(run.options.get(key) for key in _OTHER_START):
        began_with = built.pretrained_cfg
    base_model = split_revision(began_with.get("hf_hub_id") or "")[0] or None  # the Hub takes no revision there
    base_license = began_with.get("license") or ""
    share_alike = (f"The weights began as those of {base_model}, which are under {base_license}: share-alike, so that "
                   "what is made of them is published under the same licence.")
    config = _config(built, run, labels, license)
    subject = Subject(
        title=repo_id.rpartition("/")[2],
        config=config,
        parameters=sum(parameter.numel() for parameter in built.parameters()),
        load=f"hf-hub:{repo_id}" + (f"@{revision}" if revision else ""),
        imports=list(_imports(run, config)),
        repo_id=repo_id,
        revision=revision,
        license=license,
        base_model=base_model,
        limits=[share_alike] if base_model and "-sa" in base_license else (),
    )
    curve = CURVE if run is not None and run.history else None
    card = ModelCard(without_tokens(str(model_card(subject, run, curve)), token))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.")
    except OSError as error:
        raise PublishError(f"nothing can be written in {folder.parent}: {error.strerror}") from None
    with made as scratch:
        _write(Path(scratch), built, config, card, token)
        if curve:
            draw_curve(run, Path(scratch, curve))
        _verify(Path(scratch), built, config)
        _move(Path(scratch), folder)
    return card


# --------------------------------------------------------------------------------------------- the model
def _detached(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in evaluation mode, out of the wrappers of DDP and torch.compile."""
    bare = unwrap_model(model)
    if any(isinstance(module, ChangeOfBasis) for module in bare.modules()):
        raise PublishError("the model was rewritten by timm_ortho.absorb or diagonalise, which no arguments of a "
                           "variant can say: publish the one that it was made from")
    if not isinstance(getattr(bare, "pretrained_cfg", None), Mapping) or not hasattr(bare, "num_classes"):
        raise PublishError(f"{type(bare).__name__} is not a classifier that timm.create_model made: it has no "
                           "pretrained_cfg or no num_classes, and config.json could not say how to make it")
    return deepcopy(bare).cpu().to(memory_format=torch.contiguous_format).eval()


def run_model(run: CheckpointRun, name: Optional[str] = None, **given: Any) -> nn.Module:
    """Make a run's model as timm's train.py does, with the run's weights.

    Args:
        run: A run of train.py or of the lab.
        name: Another model that takes these weights, such as a variant with another connection.
        given: Arguments of the model that override the run's.

    Raises:
        PublishError: The weights do not fit the model, or a module of the run cannot be imported.
    """
    options = run.options
    import_modules(options.get("device_modules"), PublishError)
    kwargs = dict(options.get("model_kwargs") or {})
    name = name or options["model"]
    if name != options["model"] or any(map(is_variant_argument, given)):
        kwargs, connection = {key: value for key, value in kwargs.items() if not is_variant_argument(key)}, None
    else:
        connection = run.connection if run.connection != kwargs.get("connection") else None  # switched in mid-training
    kwargs.update(given)
    size = options.get("input_size")
    try:
        model = timm.create_model(
            name,
            in_chans=options.get("in_chans") or (size[0] if size else 3),
            num_classes=options.get("num_classes"),
            global_pool=options.get("gp"),
            bn_momentum=options.get("bn_momentum"),
            bn_eps=options.get("bn_eps"),
            **kwargs,
        )
        if connection is not None:
            connect(model, **{**pop_connect_arguments(kwargs, connection), "connection": connection})
        model.load_state_dict(run.state_dict)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise PublishError(f"{run.path} is not of the model that its arguments describe, '{name}': "
                           f"{error_text(error)}") from None
    return model.eval()


def _connection_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of a variant that give a model its connections; empty for a model of timm itself."""
    try:
        arguments = connection_arguments(model)
    except ValueError as error:
        raise PublishError(str(error)) from None
    if not arguments and _is_variant(model):  # after disconnect
        return {"connection": "linear"}
    return {variant_argument(name): value for name, value in arguments.items()}


def _is_variant(model: nn.Module) -> bool:
    name = model.pretrained_cfg.get("architecture")
    return bool(name) and is_model(name) and model_entrypoint(name).__module__.startswith("timm_ortho.")


def _architecture(model: nn.Module, connection: Mapping[str, Any]) -> str:
    """The registered name under which the model's connections can be had."""
    name = model.pretrained_cfg.get("architecture")
    if not name or not is_model(name):
        raise PublishError(f"architecture '{name}' is not registered with timm, so nobody could load the model: make "
                           "it with timm.create_model")
    if _is_variant(model) or not connection:
        return name
    if not is_model(f"{name}_ortho"):
        raise PublishError(f"there is no variant of '{name}' whose arguments could say its connections: timm-ortho "
                           "list shows those that there are")
    return f"{name}_ortho"


# -------------------------------------------------------------------------------------------- config.json
def _config(
        model: nn.Module,
        run: Optional[Run],
        labels: Optional[Sequence[str]],
        license: Optional[str],
) -> dict[str, Any]:
    """What timm writes, with what it leaves out and without what transformers stumbles over.

    The model, which is a copy of this module's own, gets the `pretrained_cfg` that is written.
    """
    connection = _connection_arguments(model)
    made = {name: None if is_variant_argument(name) else value  # which the connections themselves say
            for name, value in {**creation_arguments(model), **current_arguments(model)}.items()}
    labels = _labels(model, run, labels)
    model.pretrained_cfg = _pretrained_cfg(model, run, _architecture(model, connection), license)
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        try:
            save_config_for_hf(
                model,
                path,
                model_config={"label_names": labels} if labels else None,
                model_args=made,
            )
        except (TypeError, ValueError) as error:
            raise PublishError(f"config.json cannot hold what the model was made with: {error_text(error)}") from None
        config = json.loads(path.read_text(encoding="utf-8"))
    # num_classes: timm takes it from the root; transformers' TimmWrapper hands on both, and Python refuses the second
    arguments = {key: value for key, value in config.get("model_args", {}).items()
                 if key != "num_classes" and not is_variant_argument(key)}
    return {**config, "model_args": {**arguments, **connection}}


def _imports(run: Optional[Run], config: Mapping[str, Any]) -> Iterator[str]:
    """Return lines of code that register the architecture and the connection where timm_ortho does not."""
    own = [module for module in (run and run.options.get("device_modules")) or () if module != "timm_ortho"]
    connection = config["model_args"].get("connection", "linear")
    make = CONNECTIONS[connection]
    made_in = make.__module__ if isinstance(make, (type, FunctionType)) else "__main__"  # a partial has none
    for module in own or dict.fromkeys((model_entrypoint(config["architecture"]).__module__, made_in)):
        if module == "__main__":
            yield f"# run the author's lines that register the connection '{connection}' here"
        elif module.partition(".")[0] not in ("timm", "timm_ortho"):
            yield f"import {module}  # the author's own module"


# In a pretrained_cfg: what belongs to other weights than these.
_OF_OTHER_WEIGHTS = ("license", "tag", "label_names", "label_descriptions", "label_offset")
_FOR_TESTS = ("test_input_size", "test_crop_pct", "pool_size")  # what an architecture recommends for its own weights


def _pretrained_cfg(
        model: nn.Module,
        run: Optional[Run],
        architecture: str,
        license: Optional[str],
) -> dict[str, Any]:
    cfg = {**model.pretrained_cfg, **image_config(model, run.options if run is not None else {})}
    dropped = _OF_OTHER_WEIGHTS if run is None else _OF_OTHER_WEIGHTS + _FOR_TESTS
    cfg = {key: value for key, value in cfg.items() if key not in dropped}
    cfg.update(architecture=architecture, num_classes=model.num_classes, custom_load=False)
    return {**cfg, "license": license} if license else cfg


_DATA_OPTIONS = ("input_size", "img_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


def image_config(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return how images are prepared: by the options of a run, or else by the architecture's configuration."""
    config = data_config(model, {key: options[key] for key in _DATA_OPTIONS if options.get(key) is not None})
    channels, *size = config["input_size"]
    if model.pretrained_cfg.get("fixed_input_size"):
        size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    return {**config, "input_size": (channels, *size)}


def _labels(model: nn.Module, run: Optional[Run], given: Optional[Sequence[str]]) -> Optional[list[str]]:
    if given is not None:
        if len(given) != model.num_classes:
            raise PublishError(f"there are {len(given)} labels for {model.num_classes} classes: give one for each, in "
                               "the order of the classifier's outputs")
        return list(given)
    if run is not None:
        found = run.result.get("labels") or _labels_of_data(run.options)
    else:
        found = model.pretrained_cfg.get("label_names")
    return list(found) if found and len(found) == model.num_classes else None


def _labels_of_data(options: Mapping[str, Any]) -> Optional[list[str]]:
    """The class names of the data set, where it still lies where the run had it."""
    root = options.get("data_dir") or options.get("data")
    name = options.get("dataset") or ""
    if not root or not Path(root).is_dir() or name.partition("/")[0] in ("hfds", "hfids", "tfds", "wds"):
        return None
    try:
        return class_names(create_dataset(
            name, root=root, split=options.get("val_split") or "validation", is_training=False,
            class_map=options.get("class_map") or ""))
    except (RuntimeError, OSError, AssertionError, ValueError, ImportError):
        return None  # moved or incomplete: then the repository has numbers for labels, which is no error


# -------------------------------------------------------------------------------------------- the folder
def _write(folder: Path, model: nn.Module, config: Mapping[str, Any], card: ModelCard, token: Optional[str]) -> None:
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    broken = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise PublishError(f"{len(broken)} of {len(weights)} tensors hold NaN or infinities, {broken[0]} among them: "
                           "the training diverged, and nobody can use these weights")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tag = f".{IMPORT_TAG}" if _is_variant(model) else ""
    text = json.dumps({**config, "architecture": config["architecture"] + tag}, indent=2)
    if without_tokens(text, token) != text:
        raise PublishError("config.json would hold what looks like a token: take it out of the model's arguments and "
                           "labels")
    (folder / "config.json").write_text(text, encoding="utf-8")
    card.save(folder / "README.md")


def _verify(folder: Path, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Loads the folder anew and compares, weights and logits, to the bit."""
    images = torch.randn(2, *config["pretrained_cfg"]["input_size"], generator=torch.Generator().manual_seed(0))
    dtype = next(model.parameters()).dtype
    try:
        loaded = timm.create_model(f"local-dir:{folder}").to(dtype)
        loaded.load_state_dict(load_file(folder / "model.safetensors"))
        with torch.no_grad():
            same = torch.equal(loaded.eval()(images.to(dtype)), model(images.to(dtype)))
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise PublishError(f"config.json does not make this model again: {error_text(error)}. What it was made with is "
                           "stored; what was changed by hand afterwards cannot be") from None
    if not same:
        raise PublishError("the model that config.json makes has other logits than this one: it was changed by hand "
                           "after it was made, in a way that arguments cannot say")


def _move(scratch: Path, folder: Path) -> None:
    if folder.exists():
        if not folder.is_dir():
            raise PublishError(f"{folder} is a file: choose another --output")
        strangers = [item.name for item in folder.iterdir() if item.name not in FILES]
        if strangers:
            raise PublishError(f"{folder} holds other things ('{strangers[0]}'): choose another --output")
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
    folder.mkdir(exist_ok=True)
    for item in scratch.iterdir():
        shutil.move(item, folder / item.name)
