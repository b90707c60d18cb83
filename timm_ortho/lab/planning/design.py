"""Read, check and expand a study: one YAML file becomes the runs of one scale.

The keys of a file:

| key | meaning |
| --- | --- |
| `extends` | another study, by name or file; mappings are merged, and this file's values win |
| `title` | the question |
| `paper`, `table` | the paper's table or figure, and its key in `paper.json` or `skips.json`; none by default |
| `model` | architecture, without suffix |
| `recipe` | name of the recipe of default options, or `paper` for the paper's recipes; by default as in `compare` |
| `options` | timm's options, which override the recipe's |
| `connections` | the connections of each cell |
| `seeds` | number of seeds |
| `grid` | axis -> value -> changes; a list of values sets the option with the axis's name |
| `baseline` | the baseline of differences: `connection: linear`, or a value of an axis |
| `record` | steps between two records of the connections, see `timm_ortho.record` |
| `hold_out` | number of training images to validate on instead of the validation split, for choosing settings |
| `representation` | whether to measure the features at the end |
| `paper_data` | the paper's data sets for this table; runs on further data sets are compared with the first |
| `report` | layout of tables and plots, see `layout` |
| `scales` | `smoke`, `small` and `paper`, or some of them. Each may override `model`, `recipe`, `options`,
  `connections`, `seeds`, `grid` and `record`; a list in place of an axis keeps only these values |

A value of an axis may change timm's options, `model`, `recipe` and `connections`. It may also set `connection` (the
only connection of its cell) and `switch` (`{to: feature, optimizer: kept}` or `reinitialised`). Options that begin with
`connection_` are model arguments. The `model_kwargs` of scales and values are merged with the study's.
"""
import itertools
import re
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

from .. import LabError, check_names, nearest, read_user_yaml, shipped_files
from ..options import known_options
from ..paper import architecture
from . import recipe

COMPARISON = "compare"
COST_STUDIES = ("overhead", "parameters", "gamma")  # see `lab.costs`
SCALES = ("smoke", "small", "paper")
_TYPES = {dict: "a mapping", list: "a list", int: "a whole number of at least {}", bool: "true or false", str: "text"}
_KEYS = {
    **dict.fromkeys(("options", "grid", "baseline", "report"), dict), "representation": bool,
    **dict.fromkeys(("connections", "paper_data"), list), **dict.fromkeys(("seeds", "record", "hold_out"), int),
    **dict.fromkeys(("title", "paper", "table", "model", "recipe"), str)}
_SCALED = frozenset("model recipe options connections seeds grid record".split())
_CELL = frozenset("model recipe connections connection switch".split())
# Defaults of model arguments; a run that sets such a value equals a run without the argument.
_MODEL_DEFAULTS = {"connection_eps": 1e-6, "connection_prob": 1.0, "connection_start": "orthogonal",
                   "connection_keep": "output", "connection_groups": 1}

# timm's names of the paper's data sets; an empty name is an image folder.
_TIMM_NAMES = {
    "cifar10": "torch/cifar10", "cifar100": "torch/cifar100", "svhn": "", "tiny_imagenet": "", "imagenet1k": ""}


@dataclass(frozen=True)
class Variant:
    """One cell of the grid with one connection: a run without its seed."""

    cell: Mapping[str, Any]  # axis -> value
    connection: str  # the connection at the start of training
    options: Namespace  # timm's options; the connection is in `model_kwargs`, the seed is not set
    recipe: str  # name or file
    switch_to: str = ""  # the connection of the second stage
    # True: the second stage has a new optimizer, a new schedule and as many epochs as the first (paper, Table 3).
    # False: the connection changes after half of the epochs, and training continues (Table 10).
    reinitialise: bool = False

    @property
    def final_connection(self) -> str:
        """The connection at the end of training."""
        return self.switch_to or self.connection

    def name(self, seed: int) -> str:
        """Return the name of the run with a seed: `lr=0.001-linear-seed0`."""
        cell = [f"{axis}={label}" for axis, label in self.cell.items()]
        return re.sub(r"[^\w.,=+-]", "_", "-".join([*cell, self.final_connection, f"seed{seed}"]))


@dataclass(frozen=True)
class Design:
    """A study at one scale. The attributes are the keys of its file, as plain values."""

    name: str
    scale: str
    title: str
    paper: str = ""
    table: str = ""
    model: str = "vit_small"  # empty for the recipe's model
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
    report: Optional[Mapping[str, Any]] = None

    @property
    def is_comparison(self) -> bool:
        """Whether the study is from `timm-ortho compare`, with one cell and a recipe of the user's choice."""
        return self.name == COMPARISON

    @property
    def axes(self) -> dict[str, list]:
        """The values of each axis."""
        return {axis: list(values) for axis, values in self.grid.items()}

    def variants(self, requested: Mapping[str, Any], trainer: str = "lab") -> list[Variant]:
        """Return the variants that can be run; a LabError if there are none."""
        variants, left_out = self.expand(requested, trainer)
        if not variants:
            raise LabError(f"nothing of study '{self.name}' can be run: {left_out[0]}")
        return variants

    def expand(self, requested: Mapping[str, Any], trainer: str = "lab") -> tuple[list[Variant], list[str]]:
        """Return the variants of all cells in order, and a line for each cell that is left out, with the reason.

        Args:
            requested: timm's options of the command line; they override the study's.
            trainer: `lab`, or `train.py` to allow options that the lab's loop does not have.

        Raises:
            LabError: A requested option is unknown, or the study varies it.
        """
        recipe.resolve(requested, "train.py")  # checks names and types before options are merged
        self._refuse_varied(requested)
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
                variants += [self._variant(cell, connection, changes, requested, trainer) for connection in connections]
            except _NoRecipe as error:
                left_out.append(str(error))
        return variants, list(dict.fromkeys(left_out))

    def _variant(
            self, cell: Mapping, connection: str, changes: Mapping, requested: Mapping[str, Any], trainer: str
    ) -> Variant:
        values = _merged(_merged(self.options, changes["options"]), requested)
        model = changes.get("model", requested.get("model", self.model))
        if model:
            values["model"] = model
        dataset, base = str(values.get("dataset", "digits")), changes.get("recipe", self.recipe)
        if "dataset" in values:  # without this option, the recipe's data set is used
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

    def _refuse_varied(self, requested: Mapping[str, Any]) -> None:
        flat = {**requested, **requested.get("model_kwargs", {})}
        for axis, values in self.grid.items():
            changed = [{*changes, *changes.get("options", {}), *changes.get("options", {}).get("model_kwargs", {})}
                       for changes in values.values()]
            clash = sorted(set.intersection(*changed).difference({"options", "model_kwargs"}).intersection(flat))
            if clash:
                raise LabError(f"study '{self.name}' varies '{clash[0]}' along its axis '{axis}': remove the option, "
                               "or use timm-ortho compare")


# ------------------------------------------------------------------------------------------ reading a file
def shipped() -> dict[str, Path]:
    """Return the studies of this package, by name."""
    return shipped_files("studies")


def load(name: str, scale: str) -> Design:
    """Read a study at one scale.

    Args:
        name: Name of a study of this package, or a YAML file.
        scale: `smoke`, `small` or `paper`.

    Raises:
        LabError: The study or the scale does not exist, or the file is wrong.

    >>> load("accuracy", "smoke").title
    'Does the orthogonal connection raise accuracy, and in which architectures?'
    """
    if scale not in SCALES:
        raise LabError(f"there is no scale '{scale}': choose {', '.join(SCALES[:-1])} or {SCALES[-1]}")
    values, own_name = read(name), Path(name).stem
    try:
        return _design(own_name, scale, values)
    except LabError as error:
        raise LabError(f"study '{own_name}': {error}") from None


def has_scale(name: str, scale: str) -> bool:
    """Return whether a study has a scale."""
    return scale in read(name)["scales"]


def read(name: str, extending: Sequence[Path] = ()) -> Any:
    """Return the contents of a study's file, merged with the contents of the studies named by `extends`."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else shipped().get(name)
    if path is None or not path.is_file():
        if name in COST_STUDIES:
            raise LabError(f"study '{name}' trains nothing: use timm-ortho cost {name}")
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
            raise LabError(f"study '{base}', extended by study '{path.stem}', must be a mapping, not {below!r}")
        values = _merged(below, values)
    return values


def _design(name: str, scale: str, values: Any) -> Design:
    values = {} if values is None else values  # an empty file
    _check_keys(values, {*_KEYS, "scales"}, "the file")
    for key in ("title", "scales"):
        if not values.get(key):
            raise LabError(f"'{key}' is missing")
    scales = values.pop("scales")
    _check_types(values)
    _check_keys(scales, set(SCALES), "scales")
    if scale not in scales:
        raise LabError(f"there is no scale '{scale}', only {', '.join(scales)}")
    for which, changes in scales.items():
        _check_keys(changes, _SCALED, f"scale '{which}'")
        _check_types(changes or {})
    changes = scales[scale] or {}
    grid = {axis: _axis(axis, entry) for axis, entry in (values.get("grid") or {}).items()}
    for axis, entry in (changes.get("grid") or {}).items():
        grid[axis] = _scaled_axis(axis, grid.get(axis, {}), entry)
    options = _merged(values.get("options") or {}, changes.get("options") or {})
    merged = {**values, **changes, "grid": grid, "options": options}
    design = Design(name=name, scale=scale, **{key: value for key, value in merged.items() if value is not None})
    _check(design)
    return design


def _axis(axis: str, entry: Any) -> dict:
    """Return an axis as value -> changes. Changes of timm's options are under `options`."""
    if isinstance(entry, list):
        entry = {value: {axis: value} for value in entry}
    if not isinstance(entry, dict):
        raise LabError(f"axis '{axis}' must be a list of values, or a mapping from values to changes")
    return {label: _changes(axis, label, changes or {}) for label, changes in entry.items()}


def _scaled_axis(axis: str, whole: Mapping, entry: Any) -> dict:
    if isinstance(entry, list) and set(entry) <= set(whole):
        return {label: whole[label] for label in entry}
    return {label: _merged(whole.get(label, {}), changes) for label, changes in _axis(axis, entry).items()}


def _changes(axis: str, label: Any, entry: Mapping[str, Any]) -> dict:
    where = f"axis '{axis}', value '{label}'"
    if not isinstance(entry, dict):
        raise LabError(f"{where}: the value must be a mapping from options to values, not {entry!r}")
    changes: dict[str, Any] = {"options": {}}
    for key, value in entry.items():
        if key == "seed":
            raise LabError(f"{where}: a seed cannot be an axis: use the key seeds, or --seeds")
        if key.startswith("connection_"):
            changes["options"].setdefault("model_kwargs", {})[key] = value
        elif key in _CELL:
            changes[key] = value
        elif key in known_options():
            changes["options"] = _merged(changes["options"], {key: value})
        else:
            check_names([key], [*_CELL, *known_options()], where)
    _check_types(changes, {"connections": list, "connection": str, "model": str, "recipe": str})
    return changes


def _check(design: Design) -> None:
    check_names(design.options, known_options(), "options")
    for key, value in design.baseline.items():
        if key != "connection" and value not in design.grid.get(key, {}):
            raise LabError(f"the baseline is {value!r} on axis '{key}', which has no such value")
    for values in design.grid.values():
        for changes in values.values():
            _switch("linear", changes.get("switch"))


def _check_keys(values: Any, known: Iterable[str], owner: str) -> None:
    if values is None:
        return
    if not isinstance(values, dict):
        raise LabError(f"{owner} must be a mapping, not {values!r}")
    check_names(values, known, owner)


def _check_types(values: Mapping[str, Any], kinds: Mapping[str, type] = _KEYS) -> None:
    """Check the types of values. null means the default, so a study can reset an inherited key."""
    for key, kind in kinds.items():
        value, least = values.get(key), int(key != "hold_out")
        if value is not None and (type(value) is not kind or (kind is int and value < least)):
            raise LabError(f"{key} is {value!r}, but must be {_TYPES[kind].format(least)}")


# ------------------------------------------------------------------------------------------------ variants
def _switch(connection: str, switch: Optional[Mapping[str, str]]) -> dict[str, Any]:
    """Return the arguments of `Variant` for a file's `switch`."""
    if switch is None:
        return {}
    _check_keys(switch, {"to", "optimizer"}, "switch")
    if set(switch) != {"to", "optimizer"} or switch["optimizer"] not in ("kept", "reinitialised"):
        raise LabError("switch needs to: CONNECTION, and optimizer: kept or reinitialised")
    again = switch["optimizer"] == "reinitialised"
    if switch["to"] == connection and not again:
        return {}
    if "hybrid" in (switch["to"], connection) and switch["to"] != connection:
        raise LabError("a run cannot switch to or from hybrid: other connections have none of its parameters")
    return {"switch_to": switch["to"], "reinitialise": again}


class _NoRecipe(LabError):
    """The paper has no recipe for a cell. Such cells are left out."""


def _paper_recipe(model: str, dataset: str) -> str:
    """Return the name of the paper's recipe for an architecture on a data set."""
    name = f"{'skipnet' if model.startswith('skipnet_') else architecture(model)}_{dataset.rpartition('/')[2]}"
    if name in recipe.shipped():
        return name
    raise _NoRecipe(f"{model}: the paper has no recipe for {dataset or 'a folder of images'}")


def timm_name(dataset: str) -> str:
    """Return timm's name of a data set that is named as in timm or in the paper. Unknown names are a LabError.

    >>> timm_name("cifar10"), timm_name("tiny_imagenet"), timm_name("torch/mnist")
    ('torch/cifar10', '', 'torch/mnist')
    """
    if dataset in ("", "digits") or dataset.partition("/")[0] in ("torch", "tfds", "hfds", "hfids", "wds"):
        return dataset
    if dataset in _TIMM_NAMES:
        return _TIMM_NAMES[dataset]
    near = nearest(dataset, [*_TIMM_NAMES, "digits", "torch/fashion_mnist"], 2)
    raise LabError(f"there is no data set '{dataset}'; the nearest are {' and '.join(near)}. timm's other names "
                   "have a prefix (torch/, tfds/, hfds/, wds/), and '' with --data-dir is an image folder")


def _effective(model_kwargs: Mapping[str, Any], connections: set[str]) -> dict[str, Any]:
    """Drop the arguments that have no effect, so that equal runs have equal arguments."""
    linear = connections == {"linear"}
    return {key: value for key, value in model_kwargs.items()
            if (key, value) not in _MODEL_DEFAULTS.items() and not (linear and key.startswith("connection_"))}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; the values of `above` win."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
