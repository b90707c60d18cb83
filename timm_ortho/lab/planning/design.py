"""Read and check a study, and expand it into the variants that are trained.

A study is a YAML file that defines an experiment. Its grid has axes, each with some values. A cell of the grid is one
combination of values. Each cell is trained with some connections and seeds. A study has up to three scales: `smoke` is
a quick test, `small` is for one machine, and `paper` is the experiment of the paper. The keys of the file:

| key | meaning |
| --- | --- |
| `extends` | another study, by name or file, whose keys this file inherits and may override; mappings are merged |
| `title` | the question that the study answers |
| `paper` | the paper's table or figure, such as `Table 4`; empty by default |
| `table` | key of this table or figure in `paper.json` or `skips.json`; empty by default |
| `model` | architecture, without the suffix `_ortho`; `vit_small` without this key. The empty text '' selects the
  recipe's model. The recipe's `model_kwargs`, `img_size` and `input_size` apply only to the recipe's model |
| `recipe` | name or file of the recipe, which sets the defaults of the options and of `dataset`. `paper` selects the
  paper's recipe for each model and data set. Without this key, the recipe is `digits` for the data set `digits`, and
  `small_images` for all other data sets |
| `options` | timm's options, which override the recipe's. `batch_size` is the number of images in one update of the
  weights, over all processes and accumulated steps |
| `connections` | the connections that each cell is trained with |
| `seeds` | number of seeds |
| `grid` | for each axis, a mapping from its values to their changes, such as `{batch: {large: {batch_size: 512}}}`. An
  axis with the name of the changed key may be a list of its values, such as `{lr: [0.01, 0.001]}` |
| `baseline` | the runs that all other runs are compared with: `connection: linear`, or a value of an axis |
| `record` | number of steps between two records of the connections, see `timm_ortho.record` |
| `hold_out` | number of training images to validate on instead of the validation split, for choosing settings |
| `representation` | whether to measure the model's features after training |
| `paper_data` | the paper's data sets for this table. Runs on any other data set are compared with the paper's
  runs on the first of these. A value of an axis may have its own: at scale `paper`, other data leave its cells out |
| `report` | layout of the report's tables and plots, see `reporting.layout` |
| `scales` | a mapping with one or more of the keys `smoke`, `small` and `paper`. Each scale may override `model`,
  `recipe`, `options`, `connections`, `seeds`, `grid` and `record`. If the `grid` of a scale contains
  an axis of the study, the axis has only the values that the scale lists |

A value of an axis may change `model`, `recipe`, `connections`, and all of timm's options except `seed` and the options
of the data set, such as `dataset`, `in_chans` and `train_num_samples`. The option `weights` names a file of weights to
start from, as `timm-ortho compare --weights`. In place of `connections` it may set
`connection`, the only connection of its cells. Its key `switch` changes the connection during training, for example
`{to: feature, optimizer: kept}` or `{to: feature, optimizer: reinitialised}`. Keys that begin with `connection_` are
arguments of the model. `model_kwargs` of a scale or of an axis value are added to the study's `model_kwargs`.

A study of this package follows further rules, which `tests/lab/test_studies.py` checks:

* It has the scales `smoke` and `small`. Its `title` ends in a question mark.
* The comment above `extends` or `title` contains `timm-ortho study run NAME`. For each scale, this comment contains the
  number of runs, which `timm-ortho study list` reads, such as `Scale smoke: 4 runs`.
* A study with `paper` or `table` has the scale `paper`, and a sentence of the comment begins with "The paper".
* A study with `hold_out` lacks the scale `paper`, because timm's train.py cannot hold images out.
"""
import itertools
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

from ..._kinds import ANY, COUNT, SINGLE, TEXT, checked, kind_of
from ..._text import UserError, did_you_mean, plain_lines
from ...connections import CONNECTIONS, create_connection
from ...convert import accepts, variant_arguments
from ...run_folder import SWITCHED
from .. import LabError, check_names
from ..folder import Stage, Variant
from ..paper import architecture, experiments, numbers, section
from ..train_options import known_options
from . import recipe
from .study_file import SCALES, merged, read

_SCALED = frozenset("model recipe options connections seeds grid record".split())
_MOST_RUNS = 10_000  # of each connection
_CELL = frozenset("model recipe connections connection switch paper_data".split())

# Options that cannot be an axis: the data set is opened once for all cells, and each cell is trained with each seed.
_SHARED = {
    "seed": "seeds: use the key seeds, or --seeds",
    **dict.fromkeys(("dataset data_dir train_split val_split train_num_samples val_num_samples class_map "
                     "input_img_mode input_key target_key in_chans num_classes").split(),
                    "images: set it for the whole study, by its key options or by --option")}


@dataclass(frozen=True)
class Design:
    """A study at one scale.

    Apart from `name`, `scale` and `source`, the attributes are the keys of the study's file, with the changes of the
    scale applied.
    """

    name: str
    scale: str
    title: str
    source: str = ""  # the first argument of `load`; empty if `timm-ortho compare` made the study
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
        """Whether `timm-ortho compare` made the study. It then has one cell, and the user may choose its recipe."""
        return not self.source

    @property
    def dataset(self) -> Optional[str]:
        """The data set in the study's options, or else in its recipe. None if neither has one."""
        of_recipe = {} if self.recipe in (None, "paper") else recipe.load(self.recipe)
        return self.options.get("dataset", of_recipe.get("dataset"))

    def seeds_on(self, dataset: Optional[str]) -> int:
        """Return the number of seeds. At scale `paper`, it may be another on one of the paper's data sets."""
        of_data = section(self.table).get(f"runs_{str(dataset).rpartition('/')[2]}_first_version", self.seeds)
        return of_data if self.scale == "paper" else self.seeds

    @property
    def axes(self) -> dict[str, list]:
        """The values of each axis."""
        return {axis: list(values) for axis, values in self.grid.items()}

    def variants(self, requested: Mapping[str, Any]) -> list[Variant]:
        """Return the variants that can be run, see `expand`. Raise a LabError if there are none."""
        variants, left_out = self.expand(requested)
        if not variants:
            raise LabError(f"nothing of study '{self.name}' can be run: {left_out[0]}")
        return variants

    def expand(self, requested: Mapping[str, Any]) -> tuple[list[Variant], list[str]]:
        """Return the variants of all cells in order, and the reasons why cells are left out.

        Args:
            requested: timm's options from the command line, which override the study's.

        Raises:
            LabError: A requested option is unknown, or the study varies it. Or no run belongs to the baseline.
        """
        recipe.resolve(requested)  # checks names and types, before options are merged
        self._refuse_varied(requested)
        variants, left_out = [], []
        for labels in itertools.product(*self.grid.values()):
            cell = dict(zip(self.grid, labels, strict=True))
            changes = {"options": {}}
            for axis, label in cell.items():
                changes = merged(changes, self.grid[axis][label])
            data = str({**self.options, **requested}.get("dataset")).rpartition("/")[2]
            if self.scale == "paper" and data not in changes.get("paper_data", [data]):
                left_out.append(f"{self.paper} has no {', '.join(f'{axis} {label}' for axis, label in cell.items())} "
                                f"on {data}")
                continue
            connections = dict.fromkeys(changes.get("connections", self.connections))
            if "connection" in changes:
                connections = [changes["connection"]]
            try:
                variants += [self._variant(cell, connection, changes, requested) for connection in connections]
            except _NoRecipe as error:
                left_out.append(str(error))
        self._check_arguments(
            requested, {stage.connection for variant in variants for stage in variant.stages})
        settings = [{**variant.cell, "connection": variant.connection} for variant in variants]
        trained = dict.fromkeys(variant.connection for variant in variants)
        found = any(self.baseline.items() <= setting.items() for setting in settings)
        if len(trained) > 1 and not left_out and not found:
            raise LabError(f"study '{self.name}' trains no run of its baseline, {dict(self.baseline)}: set the key "
                           f"baseline to runs of the study (connections: {', '.join(trained)})")
        return variants, plain_lines(list(dict.fromkeys(left_out)))

    def _variant(
            self, cell: Mapping, connection: str, changes: Mapping, requested: Mapping[str, Any]) -> Variant:
        values = merged(merged(self.options, changes["options"]), requested)
        model = changes.get("model", requested.get("model", self.model))
        if model:
            values["model"] = model
        dataset, base = str(values.get("dataset", "digits")), changes.get("recipe", self.recipe)
        if "dataset" in values:  # otherwise keep the recipe's data set
            values["dataset"] = timm_name(dataset)
        if base is None:
            base = "digits" if dataset == "digits" else "small_images"
        elif base == "paper":
            base = _paper_recipe(model, dataset)
        options = recipe.resolve_variant(values, base, f"study '{self.name}'")
        stages = list(_stages(vars(options), connection, _switch(connection, changes.get("switch"))))
        of_study = {key: getattr(self, key) for key in ("record", "representation", "hold_out")}
        return Variant(stages, cell=cell, recipe=base, **of_study)

    def _check_arguments(self, requested: Mapping[str, Any], connections: set[str]) -> None:
        """Raise a LabError for an argument that no connection accepts."""
        cells = (changes["options"] for values in self.grid.values() for changes in values.values())
        given = {name for options in (requested, self.options, *cells) for name in options.get("model_kwargs") or {}}
        known = connections & CONNECTIONS.keys()  # `check` refuses unknown connections
        for name in sorted(given) if known else ():
            if name.startswith("connection_") and not any(accepts(connection, name) for connection in known):
                names = sorted({each for connection in known for each in variant_arguments(connection)})
                raise LabError(f"unknown argument '{name}' of {' and '.join(sorted(known))}, known are "
                               f"{', '.join(map(repr, names))}{did_you_mean(name, names)}")

    def _refuse_varied(self, requested: Mapping[str, Any]) -> None:
        flat = {**requested, **(requested.get("model_kwargs") or {})}
        for axis, values in self.grid.items():
            changed = [{*changes, *changes["options"], *(changes["options"].get("model_kwargs") or {})}
                       for changes in values.values()]
            clash = sorted(set.intersection(*changed).difference({"options", "model_kwargs"}).intersection(flat))
            if clash:
                raise LabError(f"study '{self.name}' varies '{clash[0]}' along its axis '{axis}': remove the option, "
                               "or use timm-ortho compare")


# ------------------------------------------------------------------------------------------ reading a file
_KINDS = {key.name: kind_of(key.type) for key in fields(Design) if key.name not in ("name", "scale", "source")}
_KINDS |= {"grid": {...: ANY}, "hold_out": COUNT}  # a file may list the values of an axis


def load(name: str, scale: str) -> Design:
    """Read a study at one scale.

    Args:
        name: Name of a study of this package, or a YAML file.
        scale: `smoke`, `small` or `paper`.

    Raises:
        LabError: The study or the scale does not exist, or the file has an error.

    >>> load("accuracy", "smoke").title
    'Does the orthogonal connection raise accuracy, and in which architectures?'
    """
    if scale not in SCALES:
        raise LabError(f"there is no scale '{scale}': choose {', '.join(SCALES[:-1])} or {SCALES[-1]}")
    values, own_name = read(name), Path(name).stem
    try:
        return replace(_design(own_name, scale, values), source=name)
    except UserError as error:
        raise LabError(f"study '{own_name}': {error}") from None


def _design(name: str, scale: str, values: Any) -> Design:
    values = {} if values is None else values  # an empty file
    _check_keys(values, {*_KINDS, "scales"}, "the file")
    for key in ("title", "scales"):
        if not values.get(key):
            raise LabError(f"'{key}' is missing")
    scales = values.pop("scales")
    _check_kinds(values)
    _check_keys(scales, set(SCALES), "scales")
    if scale not in scales:
        raise LabError(f"there is no scale '{scale}', only {', '.join(scales)}")
    for which, changes in scales.items():
        _check_keys(changes, _SCALED, f"scale '{which}'")
        _check_kinds(changes or {})
    for part in (values, *filter(None, scales.values())):
        check_names(part.get("options") or {}, known_options(), "options")
        recipe.resolve(part.get("options") or {})  # checks the types, before options are merged
    changes = scales[scale] or {}
    grid = {axis: _axis(axis, entry) for axis, entry in (values.get("grid") or {}).items()}
    for axis, entry in (changes.get("grid") or {}).items():
        grid[axis] = _scaled_axis(axis, grid.get(axis, {}), entry)
    options = merged(values.get("options") or {}, changes.get("options") or {})
    keys = {**values, **changes, "grid": grid, "options": options}
    design = Design(name=name, scale=scale, **{key: value for key, value in keys.items() if value is not None})
    _check(design)
    return design


def _axis(axis: str, entry: Any) -> dict:
    """Return an axis of a file as a mapping from value to changes, with timm's options under the key `options`."""
    if isinstance(entry, list):
        if any(isinstance(value, (list, dict)) for value in entry):
            raise LabError(f"axis '{axis}': values that are lists or mappings need names: {{NAME: {{{axis}: VALUE}}}}")
        entry = {value: {axis: value} for value in entry}
    if not isinstance(entry, dict):
        raise LabError(f"axis '{axis}' must be a list of values, or a mapping from values to changes")
    for label in entry:
        if not SINGLE.fits(label):
            raise LabError(f"axis '{axis}': a value must be text or a finite number, not {label!r:.60}")
    return {label: _changes(axis, label, changes or {}) for label, changes in entry.items()}


def _scaled_axis(axis: str, whole: Mapping, entry: Any) -> dict:
    # search a list, because an unhashable label in a mapping raises a TypeError
    if isinstance(entry, list) and all(label in [*whole] for label in entry):
        return {label: whole[label] for label in entry}
    return {label: merged(whole.get(label, {}), changes) for label, changes in _axis(axis, entry).items()}


def _changes(axis: str, label: Any, entry: Mapping[str, Any]) -> dict:
    where = f"axis '{axis}', value '{label}'"
    if not isinstance(entry, dict):
        raise LabError(f"{where}: its changes must be a mapping, such as {{batch_size: 512}}, not {entry!r}")
    changes: dict[str, Any] = {"options": {}}
    for key, value in entry.items():
        if key in _SHARED:
            raise LabError(f"{where}: '{key}' cannot be an axis, because all cells have the same {_SHARED[key]}")
        if isinstance(key, str) and key.startswith("connection_"):
            changes["options"].setdefault("model_kwargs", {})[key] = value
        elif key in _CELL:
            changes[key] = value
        elif key in known_options():
            recipe.resolve({key: value})
            changes["options"] = merged(changes["options"], {key: value})
        else:
            owner, noun = f"{where}: a value has options, such as lr, or {', '.join(sorted(_CELL))}. It", "key"
            if key == axis:
                owner, noun = f"axis '{axis}' is a list, so its name must be an option: a study", "option"
            check_names([key], [*_CELL, *known_options()], owner, noun)
    _check_kinds(changes, {**_KINDS, "connection": TEXT})
    return changes


def _check(design: Design) -> None:
    for axis, values in design.grid.items():
        if not values:
            raise LabError(f"axis '{axis}' has no values: list at least one, or remove the axis")
    runs = math.prod(map(len, design.grid.values())) * design.seeds
    if runs > _MOST_RUNS:
        raise LabError(f"cells of the grid times seeds are {runs!s:.20}, but must be at most {_MOST_RUNS:,}")
    for key, value in design.baseline.items():
        if key != "connection" and value not in list(design.grid.get(key, {})):  # `value` may be unhashable
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


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any] = _KINDS) -> None:
    """Raise a UserError if a value is of another kind. None is allowed, because null resets an inherited key."""
    for key in values.keys() & kinds.keys():
        if values[key] is not None:
            checked(values[key], kinds[key], key)


# ------------------------------------------------------------------------------------------------ variants
def _switch(connection: str, switch: Optional[Mapping[str, str]]) -> tuple[str, bool]:
    """Return the connection to switch to and whether the optimizer is reinitialised, for a value of `switch`.

    Return an empty name for no switch, and for a switch to the same connection with the same optimizer.
    """
    if switch is None:
        return "", False
    _check_keys(switch, {"to", "optimizer"}, "switch")
    if set(switch) != {"to", "optimizer"} or not isinstance(switch["to"], str) or switch["optimizer"] not in (
            "kept", "reinitialised"):
        raise LabError("switch needs the keys 'to' (a connection) and 'optimizer' (kept or reinitialised)")
    again = switch["optimizer"] == "reinitialised"
    if switch["to"] == connection and not again:
        return "", False
    learned = [name for name in (connection, switch["to"])
               if name in CONNECTIONS and [*create_connection(name).parameters()]]
    if learned and switch["to"] != connection:
        raise LabError(f"a run cannot switch to or from {learned[0]}, which has learned parameters: "
                       "choose connections without parameters")
    return switch["to"], again


def _stages(options: Mapping[str, Any], connection: str, switch: tuple[str, bool]) -> Iterator[Stage]:
    """Yield the stages of a run. `options` has the arguments of all connections.

    If the optimizer is reinitialised, the second stage has a new schedule, and as many epochs as the first (paper,
    Table 3). Otherwise, the connection changes after half of the epochs, and training continues (paper, Table 10).
    """
    to, reinitialised = switch

    def of(name: str) -> dict[str, Any]:
        return {**options, "model_kwargs": of_connection(options["model_kwargs"], name)}

    first = Stage(".", of(connection))
    if to and not reinitialised:
        first = replace(first, stop_epoch=first.scheduled_epochs // 2)
        if not first.stop_epoch:
            raise LabError("a connection cannot be switched within one epoch: use at least two epochs")
    yield first
    if to:
        yield Stage(SWITCHED, of(to), "weights" if reinitialised else "checkpoint")


class _NoRecipe(LabError):
    """The paper has no recipe for the model and data set of a cell. The cell is left out."""


def _paper_recipe(model: str, dataset: str) -> str:
    """Return the name of the paper's recipe for an architecture on a data set."""
    name = f"{'skipnet' if model.startswith('skipnet_') else architecture(model)}_{dataset.rpartition('/')[2]}"
    if name in experiments():  # the package also has recipes that are not the papers'
        return name
    raise _NoRecipe(f"{model}: the paper has no recipe for {dataset or 'a folder of images'}")


def timm_name(dataset: str) -> str:
    """Return timm's name of a data set, given timm's or the paper's name. Any other name raises a LabError.

    >>> timm_name("cifar10"), timm_name("tiny_imagenet"), timm_name("torch/mnist")
    ('torch/cifar10', '', 'torch/mnist')
    """
    if dataset in ("", "digits") or dataset.partition("/")[0] in ("torch", "tfds", "hfds", "hfids", "wds"):
        return dataset
    of_paper = numbers()["datasets"]
    if dataset in of_paper:
        return of_paper[dataset]["timm"]
    near = did_you_mean(dataset, [*of_paper, "digits", "torch/fashion_mnist"], 2, listed=True)
    raise LabError(f"there is no data set '{dataset}'{near} (or use digits, a name with one of timm's prefixes "
                   "torch/, tfds/, hfds/, hfids/ and wds/, or '' with --data-dir for an image folder)")


def of_connection(model_kwargs: Mapping[str, Any], connection: str) -> dict[str, Any]:
    """Return the arguments of a model with a connection, without the arguments that have no effect.

    Connections that are compared receive one set of arguments. Runs that are equal have equal arguments.
    """
    kept = {name: value for name, value in model_kwargs.items() if has_effect(name, value, connection)}
    return {**kept, "connection": connection}


def has_effect(name: str, value: Any, connection: str) -> bool:
    """Return whether an argument of a variant changes the model, compared with its default, with this connection.

    >>> has_effect("connection_start", "linear", "hybrid"), has_effect("connection_start", "linear", "feature")
    (True, False)
    """
    if not name.startswith("connection_") or connection not in CONNECTIONS:
        return True
    known = variant_arguments(connection)
    return connection != "linear" and accepts(connection, name) and (name not in known or known[name] != value)
