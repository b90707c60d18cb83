"""What a study is: one YAML file, read, checked and expanded into the runs of one scale.

The keys of a file:

| key | says |
| --- | --- |
| `extends` | a study to begin with, by name or as a file; what both have as a mapping is merged, this file winning |
| `title` | the question |
| `paper`, `table` | the paper's table or figure, its key in `paper.json` or beside it; or neither |
| `kind` | `training` (the default), or what is computed without any: `overhead`, `parameters`, `gamma` |
| `model` | architecture, without suffix |
| `recipe` | where the options begin: a recipe, or `paper` for the paper's; without it what `compare` would take |
| `options` | timm's options on top of the recipe |
| `connections` | what each cell of the grid is run with |
| `seeds` | how many |
| `grid` | axis -> value -> what it changes; a list of values changes the option of the axis's name |
| `baseline` | what differences are to: `connection: linear`, or a value of an axis |
| `record` | steps between two looks at the connections, see `timm_ortho.record` |
| `hold_out` | images of the training split to validate on, for choices; by default the validation split decides |
| `representation` | whether the features are measured at the end |
| `paper_data` | the paper's data sets for this table, the first being the one that is compared with by default |
| `arguments` | of a study without training |
| `report` | how its table and figures are laid out, see `layout` |
| `scales` | of `smoke`, `small` and `paper` those that it has: any of the keys from `model` to `connections`, `seeds`,
  `grid`, `record` and `arguments` again, on top of the study's; an axis as a list keeps only these values |

A value of an axis may change timm's options, `model`, `recipe` and `connections`, and beyond that `connection` (the
only one of this cell) and `switch` (`{to: feature, optimizer: kept}` or `reinitialised`). Options that begin with
`connection_` are arguments of the model. What a scale or a value says of `model_kwargs` joins what was said before.
"""
import itertools
import re
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

from .. import LabError, check_names, nearest, read_user_yaml, shipped_files
from ..paper import architecture
from . import recipe

SCALES = ("smoke", "small", "paper")
KINDS = ("training", "overhead", "parameters", "gamma")
_TYPES = {dict: "a mapping", list: "a list", int: "a whole number of at least {}", bool: "true or false", str: "text"}
_KEYS = {
    **dict.fromkeys(("options", "grid", "baseline", "arguments", "report"), dict), "representation": bool,
    **dict.fromkeys(("connections", "paper_data"), list), **dict.fromkeys(("seeds", "record", "hold_out"), int),
    **dict.fromkeys(("title", "paper", "table", "kind", "model", "recipe"), str)}
_SCALED = frozenset("model recipe options connections seeds grid record arguments".split())
_CELL = frozenset("model recipe connections connection switch".split())
# Model arguments that mean nothing when they stand at these values, so that runs with and without them are the same.
_MODEL_DEFAULTS = {"connection_eps": 1e-6, "connection_prob": 1.0, "connection_start": "orthogonal",
                   "connection_keep": "output", "connection_groups": 1}

# The paper's data sets by its names, as timm names them; the last three are class folders.
_TIMM_NAMES = {
    "cifar10": "torch/cifar10", "cifar100": "torch/cifar100", "svhn": "", "tiny_imagenet": "", "imagenet1k": ""}


@dataclass(frozen=True)
class Variant:
    """One cell of the grid with one connection: a run but for its seed."""

    cell: Mapping[str, Any]  # axis -> value
    connection: str  # at the start
    options: Namespace  # timm's; the connection is in `model_kwargs`, the seed open
    recipe: str  # its name or file
    switch_to: str = ""  # the connection that takes over in mid-training
    # With it optimizer and schedule begin anew, for as many epochs as before (paper, Table 3). Otherwise all go on, and
    # the switch comes at half of the epochs (Table 10).
    reinitialise: bool = False

    @property
    def final_connection(self) -> str:
        return self.switch_to or self.connection

    def name(self, seed: int) -> str:
        """Of its run with a seed: `lr=0.001-linear-seed0`."""
        cell = [f"{axis}={label}" for axis, label in self.cell.items()]
        return re.sub(r"[^\w.,=+-]", "_", "-".join([*cell, self.final_connection, f"seed{seed}"]))


@dataclass(frozen=True)
class Design:
    """A study at one scale; the attributes are the keys of its file, all plain values."""

    name: str
    scale: str
    title: str
    paper: str = ""
    table: str = ""
    kind: str = "training"
    model: str = "vit_small"  # empty for the recipe's own
    recipe: Optional[str] = None
    options: Mapping[str, Any] = field(default_factory=dict)
    connections: Sequence[str] = ("linear", "feature")
    seeds: int = 3
    grid: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)
    baseline: Mapping[str, Any] = field(default_factory=lambda: {"connection": "linear"})
    record: Optional[int] = None
    representation: bool = False
    hold_out: int = 0
    paper_data: Sequence[str] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    report: Optional[Mapping[str, Any]] = None

    @property
    def axes(self) -> dict[str, list]:
        return {axis: list(values) for axis, values in self.grid.items()}

    def variants(self, given: Mapping[str, Any], trainer: str = "lab") -> list[Variant]:
        """The cells of `expand` that can be run; a LabError if there are none."""
        variants, left_out = self.expand(given, trainer)
        if not variants:
            raise LabError(f"nothing of study '{self.name}' can be run: {left_out[0]}")
        return variants

    def expand(self, given: Mapping[str, Any], trainer: str = "lab") -> tuple[list[Variant], list[str]]:
        """The grid's cells with their connections, in order, and in words what is left out and why.

        Args:
            given: timm's options of the command line; they override the study's. What it varies is a LabError.
            trainer: `lab`, or `train.py` for options that only that has.
        """
        recipe.resolve(given, "train.py")  # their names and types, before anything is merged
        self._refuse_varied(given)
        variants, left_out = [], []
        for labels in itertools.product(*self.grid.values()):
            cell = dict(zip(self.grid, labels, strict=True))
            changes = {"options": {}}
            for axis, label in cell.items():
                changes = _merged(changes, self.grid[axis][label])
            connections = changes.get("connections", self.connections)
            if "connection" in changes:
                connections = [changes["connection"]]
            try:
                variants += [self._variant(cell, connection, changes, given, trainer) for connection in connections]
            except _NoRecipe as error:
                left_out.append(str(error))
        return variants, list(dict.fromkeys(left_out))

    def _variant(
            self, cell: Mapping, connection: str, changes: Mapping, given: Mapping[str, Any], trainer: str) -> Variant:
        values = _merged(_merged(self.options, changes["options"]), given)
        model = changes.get("model", given.get("model", self.model))
        if model:
            values["model"] = model
        dataset, base = str(values.get("dataset", "digits")), changes.get("recipe", self.recipe)
        if "dataset" in values:  # else the recipe's
            values["dataset"] = timm_name(dataset)
        if base is None:
            base = "digits" if dataset == "digits" else "small_images"
        elif base == "paper":
            base = _paper_recipe(model, dataset)
        options = recipe.resolve_variant(values, base, trainer)
        switch = _switch(connection, changes.get("switch"))
        options.model_kwargs = _effective(options.model_kwargs, {connection, switch.get("switch_to", connection)})
        options.model_kwargs["connection"] = connection
        return Variant(cell, connection, options, base, **switch)

    def _refuse_varied(self, given: Mapping[str, Any]) -> None:
        flat = {**given, **given.get("model_kwargs", {})}
        for axis, values in self.grid.items():
            changed = [{*changes, *changes.get("options", {}), *changes.get("options", {}).get("model_kwargs", {})}
                       for changes in values.values()]
            clash = sorted(set.intersection(*changed).difference({"options", "model_kwargs"}).intersection(flat))
            if clash:
                raise LabError(f"'{clash[0]}' is what study '{self.name}' varies along its axis '{axis}': "
                               "leave it out, or use timm-ortho compare")


# ------------------------------------------------------------------------------------------ from the file
def shipped() -> dict[str, Path]:
    """The studies that come with the package, by name."""
    return shipped_files("studies")


def load(name: str, scale: str) -> Design:
    """Reads a study, given as a file or as the name of a shipped one, for one scale; what cannot be is a LabError."""
    if scale not in SCALES:
        raise LabError(f"there is no scale '{scale}': give {', '.join(SCALES[:-1])} or {SCALES[-1]}")
    values, own_name = read(name), Path(name).stem
    try:
        return _design(own_name, scale, values)
    except LabError as error:
        raise LabError(f"study '{own_name}': {error}") from None


def has_scale(name: str, scale: str) -> bool:
    """Whether a shipped study has a scale."""
    return scale in read(name)["scales"]


def read(name: str, extending: Sequence[Path] = ()) -> Any:
    """What a study's file says, with what it extends below."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else shipped().get(name)
    if path is None or not path.is_file():
        raise LabError(f"there is no study '{name}'; the nearest is '{nearest(name, shipped())[0]}' (timm-ortho study "
                       "list)")
    values = read_user_yaml(path, f"study '{path.stem}'")
    if isinstance(values, dict) and "extends" in values:
        base = str(values.pop("extends"))
        if path.resolve() in extending:
            raise LabError(f"study '{path.stem}' extends itself")
        below = str(path.parent / base) if base.endswith((".yaml", ".yml")) else base
        below = read(below, [*extending, path.resolve()])
        if not isinstance(below, dict):
            raise LabError(f"study '{base}', which study '{path.stem}' extends, must be a mapping, not {below!r}")
        values = _merged(below, values)
    return values


def _design(name: str, scale: str, values: Any) -> Design:
    values = {} if values is None else values  # an empty file
    _check_keys(values, {*_KEYS, "scales"}, "it")
    for key in ("title", "scales"):
        if not values.get(key):
            raise LabError(f"'{key}' is missing")
    scales = values.pop("scales")
    _check_types(values)
    _check_keys(scales, set(SCALES), "scales")
    if scale not in scales:
        raise LabError(f"it has no scale '{scale}', only {', '.join(scales)}")
    for which, changes in scales.items():
        _check_keys(changes, _SCALED, f"scale '{which}'")
        _check_types(changes or {})
    changes = scales[scale] or {}
    grid = {axis: _axis(axis, given) for axis, given in (values.get("grid") or {}).items()}
    for axis, given in (changes.get("grid") or {}).items():
        grid[axis] = _scaled_axis(axis, grid.get(axis, {}), given)
    merged = {**values, **changes, "grid": grid}
    for key in ("options", "arguments"):
        merged[key] = _merged(values.get(key) or {}, changes.get(key) or {})
    design = Design(name=name, scale=scale, **{key: value for key, value in merged.items() if value is not None})
    _check(design)
    return design


def _axis(axis: str, given: Any) -> dict:
    """An axis as value -> changes, the changes of timm's options under `options`."""
    if isinstance(given, list):
        given = {value: {axis: value} for value in given}
    if not isinstance(given, dict):
        raise LabError(f"axis '{axis}' must be a list of values, or a mapping of values to what they change")
    return {label: _changes(axis, label, changes or {}) for label, changes in given.items()}


def _scaled_axis(axis: str, whole: Mapping, given: Any) -> dict:
    if isinstance(given, list) and set(given) <= set(whole):
        return {label: whole[label] for label in given}
    return {label: _merged(whole.get(label, {}), changes) for label, changes in _axis(axis, given).items()}


def _changes(axis: str, label: Any, given: Mapping[str, Any]) -> dict:
    where = f"axis '{axis}', value '{label}'"
    if not isinstance(given, dict):
        raise LabError(f"{where}: it must map options to values, not be {given!r}")
    changes: dict[str, Any] = {"options": {}}
    for key, value in given.items():
        if key == "seed":
            raise LabError(f"{where}: a seed is no axis: give seeds, or --seeds")
        if key.startswith("connection_"):
            changes["options"].setdefault("model_kwargs", {})[key] = value
        elif key in _CELL:
            changes[key] = value
        elif key in recipe.known_options():
            changes["options"] = _merged(changes["options"], {key: value})
        else:
            check_names([key], [*_CELL, *recipe.known_options()], where)
    _check_types(changes, {"connections": list, "connection": str, "model": str, "recipe": str})
    return changes


def _check(design: Design) -> None:
    if design.kind not in KINDS:
        raise LabError(f"there is no kind '{design.kind}', only {', '.join(KINDS)}")
    check_names(design.options, recipe.known_options(), "options")
    for key, value in design.baseline.items():
        if key != "connection" and value not in design.grid.get(key, {}):
            raise LabError(f"the baseline is {value!r} on axis '{key}', where there is no such value")
    for values in design.grid.values():
        for changes in values.values():
            _switch("linear", changes.get("switch"))


def _check_keys(given: Any, known: Iterable[str], where: str) -> None:
    if given is None:
        return
    if not isinstance(given, dict):
        raise LabError(f"{where} must be a mapping, not {given!r}")
    check_names(given, known, where)


def _check_types(given: Mapping[str, Any], kinds: Mapping[str, type] = _KEYS) -> None:
    """null, of a key that an extending study takes back, is its default."""
    for key, kind in kinds.items():
        value, least = given.get(key), int(key != "hold_out")
        if value is not None and (type(value) is not kind or (kind is int and value < least)):
            raise LabError(f"{key} is {value!r}, but must be {_TYPES[kind].format(least)}")


# ------------------------------------------------------------------------------------------------ variants
def _switch(connection: str, given: Optional[Mapping[str, str]]) -> dict[str, Any]:
    """A file's `switch` as arguments of `Variant`."""
    if given is None:
        return {}
    _check_keys(given, {"to", "optimizer"}, "switch")
    if set(given) != {"to", "optimizer"} or given["optimizer"] not in ("kept", "reinitialised"):
        raise LabError("switch must say to which connection (to) and whether the optimizer is kept or reinitialised")
    again = given["optimizer"] == "reinitialised"
    if given["to"] == connection and not again:
        return {}  # nothing happens
    if "hybrid" in (given["to"], connection) and given["to"] != connection:
        raise LabError("a checkpoint without hybrid knows nothing of its parameters: it cannot take over, or be left")
    return {"switch_to": given["to"], "reinitialise": again}


class _NoRecipe(LabError):
    """The paper has no recipe for a cell."""


def _paper_recipe(model: str, dataset: str) -> str:
    """The paper's recipe for an architecture on a data set."""
    name = f"{'skipnet' if model.startswith('skipnet_') else architecture(model)}_{dataset.rpartition('/')[2]}"
    if name in recipe.shipped():
        return name
    raise _NoRecipe(f"{model}: the paper has no recipe for it on {dataset or 'a folder of images'}")


def timm_name(dataset: str) -> str:
    """A data set as timm names it, given as timm or as the paper names it; a LabError if neither knows it."""
    if dataset in ("", "digits") or dataset.partition("/")[0] in ("torch", "tfds", "hfds", "hfids", "wds"):
        return dataset
    if dataset in _TIMM_NAMES:
        return _TIMM_NAMES[dataset]
    near = nearest(dataset, [*_TIMM_NAMES, "digits", "torch/fashion_mnist"], 2)
    raise LabError(f"there is no data set '{dataset}'; the nearest are {' and '.join(near)}. timm's others have a "
                   "prefix (torch/, tfds/, hfds/, wds/), and '' with --data-dir is a folder of images")


def _effective(model_kwargs: Mapping[str, Any], connections: set[str]) -> dict[str, Any]:
    """Without the arguments that make no difference, so that equal runs are seen to be equal."""
    linear = connections == {"linear"}
    return {key: value for key, value in model_kwargs.items()
            if (key, value) not in _MODEL_DEFAULTS.items() and not (linear and key.startswith("connection_"))}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, `above` winning; what both have as a mapping is merged likewise."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
