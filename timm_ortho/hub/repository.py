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
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Optional, Union

import timm
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.data import create_dataset
from timm.models import is_model, model_entrypoint, save_for_hf
from timm.utils import unwrap_model
from torch import nn

from .._compat import current_arguments
from .._text import UserError, error_text
from ..arguments import connection_arguments
from ..connections import CONNECTIONS
from ..hub_client.download import split_revision
from ..hub_client.errors import check_repo_id, without_tokens
from ..models import variants
from ..models.coverage import bases
from ..models.names import IMPORT_TAG, base_name, is_variant
from ..run_folder import CheckpointRun, Run, check_sources, class_names, image_config, is_local, own_modules, run_model
from ..saving import keep_arguments
from ..skips import SKIPS
from ..skips.rewrites import ChangeOfBasis
from .card import CURVE, Subject, draw_curve, model_card

Model = Union[nn.Module, str, Path]

CARD = "README.md"
FILES = (CARD, "model.safetensors", "config.json", CURVE)  # the card first, so that an interrupted export is recognised


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
    """
    publication = Publication.of(model, repo_id, ema)
    folder = Path(folder).resolve()
    with scratch_folder(folder.parent) as scratch:
        card = publication.write(scratch, labels=labels, license=license, revision=revision, token=token)
        _move(scratch, folder)
    return card


@contextmanager
def scratch_folder(parent: Optional[Path] = None) -> Iterator[Path]:
    """Yield a temporary folder. Raise an error of writing in the block, such as a full disk, as a PublishError.

    Args:
        parent: The folder that contains the temporary folder, created if missing. None: the system's folder for
            temporary files.
    """
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=parent, prefix=".timm-ortho-") as name:
            yield Path(name)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error_text(error)
        raise PublishError(f"cannot write in {parent or gettempdir()}: {reason}") from None


@dataclass(frozen=True)
class Publication:
    """A model to publish.

    Attributes:
        model: A copy of the model on the CPU, in evaluation mode.
        repo_id: `owner/name` of the repository.
        run: The run that trained the model; None if a module is published.
        initial: The pretrained_cfg of the weights that training started with, for its keys `hf_hub_id` and `license`;
            empty for random weights.
    """

    model: nn.Module
    repo_id: str
    run: Optional[CheckpointRun]
    initial: Mapping[str, Any]

    @classmethod
    def of(cls, model: Model, repo_id: str, ema: bool = False) -> "Publication":
        """Check the name of the repository, and read the checkpoint or copy the model.

        Raises:
            PublishError: The name is invalid, or the model cannot be published.
        """
        check_repo_id(repo_id, PublishError)
        if not isinstance(model, nn.Module):
            try:
                run = CheckpointRun(Path(model), ema)
                trained = run_model(run)
            except UserError as error:
                raise PublishError(str(error)) from None
            return cls(trained, repo_id, run, _initial(run.options, trained))
        if ema:
            raise PublishError("ema=True needs the path of a checkpoint; to publish a module of EMA weights, omit ema")
        return cls(_detached(model), repo_id, None, getattr(unwrap_model(model), "began_with", {}))

    def write(
            self,
            folder: Path,
            *,
            labels: Optional[Sequence[str]] = None,
            license: Optional[str] = None,
            revision: Optional[str] = None,
            token: Optional[str] = None,
    ) -> ModelCard:
        """Write the repository into an empty folder, check that it loads, and return the card.

        Args:
            folder: An existing folder.
            labels, license, revision: See :func:`timm_ortho.hub.push`.
            token: A token that the files must not contain, in addition to the token that huggingface_hub uses.

        Raises:
            PublishError: The model cannot be published.
        """
        _check_finite(self.model)
        if license is None and self._is_share_alike:
            license = self.initial["license"]
        config = self._save(folder, labels, license)
        if without_tokens(text := json.dumps(config), token) != text:
            raise PublishError("config.json would contain a token: remove it from the model's arguments and labels")
        curve = CURVE if self.run is not None and self.run.history else None
        card = model_card(self._subject(config, license, revision), self.run, curve)
        card = ModelCard(without_tokens(str(card), token))
        card.save(folder / CARD)
        if curve:
            draw_curve(self.run, folder / curve)
        _verify(folder, self.model, config)
        return card

    def _save(self, folder: Path, labels: Optional[Sequence[str]], license: Optional[str]) -> dict[str, Any]:
        """Save weights and config.json as timm does, and return the values of config.json.

        In the file, the name of a variant ends in the tag IMPORT_TAG. In the returned values, it has no tag.
        """
        _keep_arguments(self.model)
        names = _labels(self.model, self.run, labels)
        self.model.pretrained_cfg = _pretrained_cfg(self.model, self.run, license)
        try:
            save_for_hf(
                self.model, folder, safe_serialization=True, model_args=current_arguments(self.model),
                model_config={"label_names": names} if names else None)
        except (TypeError, ValueError) as error:
            raise PublishError(f"config.json cannot store the arguments of the model: {error_text(error)}") from None
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        # timm reads num_classes from the top level; transformers' TimmWrapper fails if model_args contains it too.
        config.setdefault("model_args", {}).pop("num_classes", None)
        file.write_text(json.dumps(config, indent=2), encoding="utf-8")
        return {**config, "architecture": config["architecture"].removesuffix(f".{IMPORT_TAG}")}

    def _subject(self, config: Mapping[str, Any], license: Optional[str], revision: Optional[str]) -> Subject:
        base_model = split_revision(self.initial.get("hf_hub_id") or "")[0] or None  # the Hub accepts no revision here
        share_alike = (f"Training started with the weights of {base_model}, whose license "
                       f"{self.initial.get('license')} is share-alike: publish derived weights under the same license.")
        return Subject(
            title=self.repo_id.rpartition("/")[2],
            config=config,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            load=f"hf-hub:{self.repo_id}" + (f"@{revision}" if revision else ""),
            imports=list(dict.fromkeys(_imports(self.run, config))),
            repo_id=self.repo_id,
            revision=revision,
            license=license,
            base_model=base_model,
            limits=[share_alike] if self._is_share_alike else (),
        )

    @property
    def _is_share_alike(self) -> bool:
        """Whether derived weights must have the license of the weights on the Hub that training started with."""
        return bool(self.initial.get("hf_hub_id")) and "-sa" in (self.initial.get("license") or "")


# --------------------------------------------------------------------------------------------- the model
def _detached(model: nn.Module) -> nn.Module:
    """Return a contiguous copy on the CPU in evaluation mode, without the wrappers of DDP and torch.compile."""
    bare = unwrap_model(model)
    if any(isinstance(module, ChangeOfBasis) for module in bare.modules()):
        raise PublishError("timm_ortho.absorb or diagonalise rewrote the model, and config.json cannot store this "
                           "change: publish the original model")
    if not isinstance(getattr(bare, "pretrained_cfg", None), Mapping) or not hasattr(bare, "num_classes"):
        raise PublishError(f"{type(bare).__name__} is not a classifier of timm.create_model: it has no pretrained_cfg "
                           "or no num_classes, which config.json needs")
    copy = deepcopy(bare).cpu().to(memory_format=torch.contiguous_format).eval()
    for tensor in (*copy.parameters(), *copy.buffers()):
        tensor.data = tensor.data.contiguous()
    return copy


def _keep_arguments(model: nn.Module) -> None:
    """Store the current arguments of the connections in a model, where timm reads them."""
    try:
        arguments = connection_arguments(model)
    except ValueError as error:
        raise PublishError(str(error)) from None
    problem = keep_arguments(model, arguments)
    name = model.pretrained_cfg.get("architecture")
    if not name or not is_model(name):
        raise PublishError(f"the architecture '{name}' is not registered with timm, so the published model could not "
                           "be loaded: create a registered model with timm.create_model")
    if problem:
        raise PublishError(problem)


# -------------------------------------------------------------------------------------------- config.json
def _imports(run: Optional[Run], config: Mapping[str, Any]) -> Iterator[str]:
    """Return lines of code that register the architecture, connection and skip, unless timm or timm_ortho does.

    The run's `device_modules` are the modules to import: those in the package of the definition, or else all. Without
    them, the module of the definition is imported. If it is unknown or is `__main__`, the line is a comment.
    """
    own = own_modules(run.options.get("device_modules")) if run else []
    architecture, arguments = config["architecture"], config["model_args"]
    connection, skip = arguments.get("connection", "linear"), arguments.get("skip", "identity")
    homes = {
        f"architecture '{architecture}'": _home(architecture),
        f"connection '{connection}'": CONNECTIONS[connection].__module__,
        f"skip '{skip}'": SKIPS[skip][1].__module__,
    }
    for registered, home in homes.items():
        package = home.partition(".")[0]
        if package in ("timm", "timm_ortho"):
            continue
        for module in [name for name in own if name.partition(".")[0] == package] or own or [home]:
            if module in ("__main__", "functools"):  # functools for a partial
                yield f"# run here the author's code that registers the {registered}"
            else:
                yield f"import {module}  # the author's own module"


def _home(architecture: str) -> str:
    """Return the module that registers an architecture; `__main__` if it is unknown."""
    home, base = model_entrypoint(architecture).__module__, base_name(architecture)
    if home != variants.__name__ or base in bases():
        return home
    home = model_entrypoint(base).__module__  # the author called register_variants
    return "__main__" if home.partition(".")[0] == "timm" else home


def _initial(options: Mapping[str, Any], trained: nn.Module) -> Mapping[str, Any]:
    """Return the pretrained_cfg of the weights that a run started with; of a file, only its repository on the Hub."""
    file = options.get("initial_checkpoint") or (options.get("pretrained") and options.get("pretrained_path"))
    if file:  # in huggingface_hub's cache, its path contains the repository
        cached = re.search(r"models--([\w.-]+?)--([\w.-]+)[/\\]snapshots[/\\]", str(file))
        return {"hf_hub_id": "/".join(cached.groups())} if cached else {}
    return trained.pretrained_cfg if options.get("pretrained") else {}


# Fields of a pretrained_cfg that describe the weights of the base model.
_OF_OTHER_WEIGHTS = ("license", "tag", "label_names", "label_descriptions", "label_offset")
_FOR_TESTS = ("test_input_size", "test_crop_pct", "pool_size")  # recommended test settings of the base model's weights


def _pretrained_cfg(model: nn.Module, run: Optional[Run], license: Optional[str]) -> dict[str, Any]:
    cfg = {**model.pretrained_cfg, **image_config(model, run.options if run is not None else {})}
    dropped = _OF_OTHER_WEIGHTS if run is None else _OF_OTHER_WEIGHTS + _FOR_TESTS
    cfg = {key: value for key, value in cfg.items() if key not in dropped}
    name = cfg["architecture"].removesuffix(f".{IMPORT_TAG}")
    cfg.update(architecture=f"{name}.{IMPORT_TAG}" if is_variant(name) else name, num_classes=model.num_classes,
               custom_load=False)
    return {**cfg, "license": license} if license else cfg


def _labels(model: nn.Module, run: Optional[Run], requested: Optional[Sequence[str]]) -> Optional[list[str]]:
    if requested is not None:
        if len(requested) != model.num_classes:
            raise PublishError(f"there are {len(requested)} labels for {model.num_classes} classes: pass one per "
                               "class, in the order of the classifier's outputs")
        return list(requested)
    if run is not None:
        names = run.card.labels or _labels_of_data(run.options)
    else:
        names = model.pretrained_cfg.get("label_names")
    return list(names) if names and len(names) == model.num_classes else None


def _labels_of_data(options: Mapping[str, Any]) -> Optional[list[str]]:
    """Return the class names of the run's data set if it still exists at the path in the options."""
    root = options.get("data_dir") or options.get("data")
    name = options.get("dataset") or ""
    if not root or not Path(root).is_dir() or not is_local(name) or name.lower().startswith("wds/"):
        return None
    try:
        check_sources({**options, "dataset_download": False, "pretrained": False}, "the run", {})
        return class_names(create_dataset(
            name, root=root, split=options.get("val_split") or "validation", is_training=False,
            class_map=options.get("class_map") or ""))
    except (UserError, RuntimeError, OSError, AssertionError, ValueError, ImportError):
        return None  # the data set was moved or is incomplete; class names are optional


# -------------------------------------------------------------------------------------------- the folder
def _check_finite(model: nn.Module) -> None:
    weights = model.state_dict()
    broken = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise PublishError(f"{len(broken)} of {len(weights)} tensors contain NaN or infinities, for example "
                           f"{broken[0]}: the training diverged")


def _verify(folder: Path, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Load the model from the folder, and check that its logits are bit-identical to those of ``model``."""
    images = torch.randn(2, *config["pretrained_cfg"]["input_size"], generator=torch.Generator().manual_seed(0))
    dtype = next(model.parameters()).dtype
    try:
        loaded = timm.create_model(f"local-dir:{folder}").to(dtype)
        loaded.load_state_dict(load_file(folder / "model.safetensors"))
        with torch.no_grad():
            same = torch.equal(loaded.eval()(images.to(dtype)), model(images.to(dtype)))
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise PublishError(f"config.json does not reproduce this model: {error_text(error)}. It stores the arguments "
                           "of the model, but not later changes by hand") from None
    if not same:
        raise PublishError("the model that config.json describes has different logits: config.json does not store "
                           "later changes by hand")


def _move(scratch: Path, folder: Path) -> None:
    if folder.exists():
        if not folder.is_dir():
            raise PublishError(f"{folder} is a file: choose another folder")
        names = sorted(item.name for item in folder.iterdir())
        others = [name for name in names if name not in FILES] or ([] if _is_export(folder) else names)
        if others:
            raise PublishError(f"{folder} contains other files ('{others[0]}'): choose another folder")
    folder.mkdir(exist_ok=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)  # `move` would follow a link; and the new run may have no curve
        if (scratch / name).is_file():
            shutil.move(scratch / name, folder / name)


def _is_export(folder: Path) -> bool:
    """Return whether `export` wrote the README.md of a folder, according to the tags in its metadata block."""
    try:
        metadata, _, _ = (folder / CARD).read_text(encoding="utf-8").partition("\n---")
    except (OSError, UnicodeDecodeError):
        return False
    return metadata.startswith("---") and "- timm-ortho" in metadata.splitlines()
