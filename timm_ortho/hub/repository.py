"""Write a model or a training run into a folder, as the files of a Hugging Face Hub repository.

| file | content |
| --- | --- |
| `model.safetensors` | the weights; no pickle is written |
| `config.json` | the architecture, model and connection arguments, image preprocessing, class names |
| `README.md` | the model card, see `card` |
| `training.png` | the training curve of a run; needs matplotlib |

Before publication, the model is loaded from the folder. Its logits must be bit-identical to those of the original.
"""
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional, Union

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from timm.models import is_model, model_entrypoint, save_for_hf
from timm.utils import unwrap_model
from torch import nn

from .._compat import current_arguments
from .._text import UserError, error_text, escaped
from ..connections import CONNECTIONS
from ..convert import IMPORT_TAG, base_name, is_variant, keep_arguments
from ..model_sites import connection_arguments
from ..run_folder import CheckpointRun, image_config, own_modules, run_model
from ..skips import SKIPS
from ..weights import WeightsError
from ..weights.download import split_revision, without_tokens
from .card import CURVE, Subject, draw_curve, model_card
from .pulling import pull

Model = Union[nn.Module, str, Path]

CARD = "README.md"
FILES = {CARD, "model.safetensors", "config.json"}


class PublishError(UserError, ValueError):
    """A model or run cannot be published. The message is one line that names the problem and what to do."""


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
    """Write into a folder the files that `hub.push` uploads, and check that they load.

    >>> import tempfile, timm
    >>> model = timm.create_model("vit_test_ortho.digits", pretrained=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     card = export(model, folder, "me/my-model")
    ...     logits = timm.create_model(f"local-dir:{folder}", pretrained=True)(torch.zeros(1, 3, 8, 8))
    >>> card.data.library_name
    'timm'

    Args:
        model, repo_id, ema, labels, license, revision: See :func:`timm_ortho.hub.push`.
        folder: The folder to write. An earlier export in it is replaced.
        token: A token that the files must not contain, in addition to the token that huggingface_hub uses.

    Returns:
        The card.

    Raises:
        PublishError: The model cannot be published, or the folder contains files of another kind.
        RunError: The run cannot be read.
    """
    if "/" not in repo_id:
        raise PublishError(f"'{repo_id}' is not the name of a repository: pass owner/name")
    folder = Path(folder)
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names and not (FILES <= names <= FILES | {CURVE}
                      and "\n- timm-ortho\n" in (folder / CARD).read_text(encoding="utf-8", errors="replace")):
        raise PublishError(f"{folder} contains other files ({min(names - FILES or names)}): choose another folder")
    with torch.device("cpu"):  # the caller may have called torch.set_default_device
        published, run, initial = _read(model, ema)
    if license is None and _is_share_alike(initial):
        license = initial["license"]
    with TemporaryDirectory() as scratch, torch.device("cpu"):
        config = _save(published, Path(scratch), run, labels, license)
        if without_tokens(text := json.dumps(config), token) != text:
            raise PublishError("config.json would contain a token: remove it from the model's arguments and labels")
        _verify(Path(scratch), published, config)
        curve = CURVE if run is not None and run.history else None
        card = model_card(_subject(published, run, initial, config, repo_id, license, revision), run, curve)
        card = ModelCard(without_tokens(str(card), token))
        card.save(Path(scratch, CARD))
        if curve:
            draw_curve(run, Path(scratch, curve))
        for name in names:
            (folder / name).unlink()  # a copy would be written into the target of a link
        shutil.copytree(scratch, folder, dirs_exist_ok=True)
    return card


def _read(model: Model, ema: bool) -> tuple[nn.Module, Optional[CheckpointRun], Mapping[str, Any]]:
    """Return the model to publish, its run, and the configuration of the weights that training started with.

    The model is on the CPU, in evaluation mode, without the wrappers of DDP and torch.compile. The configuration is
    empty for random and for unknown weights.
    """
    if not isinstance(model, nn.Module):
        run = CheckpointRun(Path(model), ema)
        trained, options = run_model(run), run.options
        is_known = options.get("pretrained") and not (
            options.get("pretrained_path") or options.get("initial_checkpoint"))
        return trained, run, trained.pretrained_cfg if is_known else {}
    if ema:
        raise PublishError("ema=True needs the path of a checkpoint; to publish a module of EMA weights, omit ema")
    bare = unwrap_model(model)
    if not isinstance(getattr(bare, "pretrained_cfg", None), Mapping) or not hasattr(bare, "num_classes"):
        raise PublishError(f"{type(bare).__name__} is not a classifier of timm.create_model: it has no pretrained_cfg "
                           "or no num_classes, which config.json needs")
    copy = deepcopy(bare).cpu().to(memory_format=torch.contiguous_format).eval()
    return copy, None, getattr(bare, "began_with", {})


# -------------------------------------------------------------------------------------------- config.json
def _save(
        model: nn.Module, folder: Path, run: Optional[CheckpointRun], labels: Optional[Sequence[str]],
        license: Optional[str]) -> dict[str, Any]:
    """Save weights and config.json as timm does, and return the values of config.json.

    In the file, the name of a variant ends in the tag IMPORT_TAG. In the returned values, it has no tag.
    """
    try:
        problem = keep_arguments(model, connection_arguments(model))
    except ValueError as error:
        problem = str(error)
    if problem:
        raise PublishError(problem)
    names = _labels(model, run, labels)
    model.pretrained_cfg = _pretrained_cfg(model, run, license)
    try:
        save_for_hf(model, folder, safe_serialization=True, model_args=current_arguments(model),
                    model_config={"label_names": names} if names else None)
    except (TypeError, ValueError, SafetensorError) as error:
        raise PublishError(f"the model cannot be saved: {error_text(error)}") from None
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    # timm reads num_classes from the top level; transformers' TimmWrapper fails if model_args contains it too.
    config.setdefault("model_args", {}).pop("num_classes", None)
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return {**config, "architecture": config["architecture"].removesuffix(f".{IMPORT_TAG}")}


# Fields of a pretrained_cfg that describe the weights of the base model.
_OF_OTHER_WEIGHTS = ("license", "tag", "label_names", "label_descriptions", "label_offset", "test_input_size",
                     "test_crop_pct", "pool_size")


def _pretrained_cfg(model: nn.Module, run: Optional[CheckpointRun], license: Optional[str]) -> dict[str, Any]:
    cfg = {**model.pretrained_cfg, **image_config(model, run.options if run is not None else {})}
    cfg = {key: value for key, value in cfg.items() if key not in _OF_OTHER_WEIGHTS}
    name = (cfg.get("architecture") or "").removesuffix(f".{IMPORT_TAG}")
    cfg.update(architecture=f"{name}.{IMPORT_TAG}" if is_variant(name) else name, num_classes=model.num_classes,
               custom_load=False)
    return {**cfg, "license": license} if license else cfg


def _labels(
        model: nn.Module, run: Optional[CheckpointRun], requested: Optional[Sequence[str]]) -> Optional[list[str]]:
    if requested is not None and len(requested) != model.num_classes:
        raise PublishError(f"there are {len(requested)} labels for {model.num_classes} classes: pass one per class, in "
                           "the order of the classifier's outputs")
    names = requested or (run.card.labels if run is not None else model.pretrained_cfg.get("label_names"))
    return list(names) if names and len(names) == model.num_classes else None


def _verify(folder: Path, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Load the model from the folder, and check that its logits are bit-identical to those of ``model``."""
    dtype = next(model.parameters()).dtype
    try:
        loaded = pull(folder).to(dtype).eval()  # refuses huge images
        images = torch.randn(2, *config["pretrained_cfg"]["input_size"], generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            same = torch.equal(loaded(images.to(dtype)), model(images.to(dtype)))
    except (WeightsError, RuntimeError) as error:
        raise PublishError(f"the saved files do not reproduce this model: {error_text(error)}") from None
    if not same:
        raise PublishError("the model that config.json describes has different logits: config.json does not store "
                           "changes that were made after create_model")


# ----------------------------------------------------------------------------------------------- the card
def _subject(
        model: nn.Module, run: Optional[CheckpointRun], initial: Mapping[str, Any], config: Mapping[str, Any],
        repo_id: str, license: Optional[str], revision: Optional[str]) -> Subject:
    base_model = split_revision(initial.get("hf_hub_id") or "")[0] or None  # the Hub accepts no revision here
    share_alike = (f"Training started with the weights of {base_model}, whose license {initial.get('license')} is "
                   "share-alike: publish derived weights under the same license.")
    return Subject(
        title=repo_id.rpartition("/")[2],
        config=config,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        imports=list(dict.fromkeys(_imports(run, config))),
        repo_id=repo_id,
        revision=revision,
        license=license,
        base_model=base_model,
        limits=[escaped(share_alike)] if _is_share_alike(initial) else (),
    )


def _is_share_alike(initial: Mapping[str, Any]) -> bool:
    """Return whether derived weights must have the license of the weights on the Hub that training started with."""
    return bool(initial.get("hf_hub_id")) and "-sa" in (initial.get("license") or "")


def _imports(run: Optional[CheckpointRun], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of code that register the author's architecture, connection and skip.

    If the model needs any, these are the run's `device_modules`, or else the modules of the definitions.
    """
    architecture, arguments = config["architecture"], config["model_args"]
    base = base_name(architecture)
    definitions = [
        model_entrypoint(base if is_model(base) else architecture),
        CONNECTIONS[arguments.get("connection", "linear")],
        SKIPS[arguments.get("skip", "identity")][1],
    ]
    own = own_modules(run.options.get("device_modules")) if run else []
    homes = [definition.__module__ for definition in definitions]
    homes = [home for home in homes if home.partition(".")[0] not in ("timm", "timm_ortho")]
    for module in (own or homes) if homes else ():
        # a partial has no module of its own
        is_module = module not in ("__main__", "functools")
        yield f"import {module}  # the author's own module" if is_module else "# run here the author's own code"
