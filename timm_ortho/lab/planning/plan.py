"""Planning: from a study, its scale, a data set and seeds to folders, one for each run, that say all there is to say.

Whatever cannot be run is refused here, before anything runs. The output folder:

    study.yaml      what is run and how it is reported, and which run stands where
    <run>/          one folder for each run, see `folder`: `<axis>=<value>-<connection>-seed<k>`
    rows.json       instead of runs, the rows of a study that trains nothing
    results.json, report.html, report.md

Runs with one seed are a pair: same start, same batches. Runs go seed by seed, so that an interrupted study holds whole
pairs; runs that several cells share are trained once. `timm-ortho compare` is a study without a paper.
"""
import hashlib
import inspect
import json
import sys
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import torch
import yaml

from ... import __version__
from ..._images import data_config
from ...models.names import base_name
from .. import LabError, write_text
from ..costs import measure as cost
from ..data import Source, open_source
from ..folder import PLAN, RunPlan, Stage, read_yaml
from ..image_folder import is_here
from ..paper import figures
from ..reporting.layout import Layout, shown
from ..running.loop import Training, build_model
from . import recipe
from .design import Design, Variant
from .deviations import changes

STUDY = "study.yaml"
# What does not change a result: a job that lands on another machine has to find its folder.
_MACHINE = recipe.options_with("about", "machine")
_OF_IMAGES = ("classes", "train", "validation", "validation_split", "fingerprint")  # of a study's `data`


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    design: Design  # the study at its scale
    given: Mapping[str, Any]  # timm's options of the command line, `dataset` and `data_dir` among them
    seeds: Sequence[int] | int | None = None  # or their number; None for as many as the scale has
    output: Optional[str] = None  # folder; by default below `output/` and named after the settings
    only: Sequence[tuple[str, str]] = ()  # axis and a value, or several with commas; all cells without it
    train_py: Optional[Path] = None  # timm's, which trains at scale `paper` and wherever it is given
    gpus: int = 0  # of each run, on each node; 0 for the CPU
    nodes: int = 1
    command: str = ""  # the command line, for the report

    @property
    def trainer(self) -> str:
        return "train.py" if self.train_py is not None or self.design.scale == "paper" else "lab"


@dataclass
class StudyPlan:
    """A planned study."""

    folder: Path
    settings: dict  # what decides the results; a folder with others is refused
    study: dict  # what a report says of it, see `report`
    places: list[dict]  # cell, connection, seed and run of each place in the grid
    runs: dict[str, RunPlan]  # by name; `places` may name runs of earlier calls that are not here
    left_out: list[str]  # in words, which cells are not run and why

    def write(self) -> None:
        """Makes the folders, or a LabError if they are another study's; places of earlier calls stay."""
        def key(place: Mapping[str, Any]) -> tuple:
            return place["cell"], place["connection"], place["seed"]

        mine = [key(place) for place in self.places]
        earlier = [place for place in self._before().get("places", ()) if key(place) not in mine]
        self.places = sorted([*earlier, *self.places], key=lambda place: place["seed"])
        self.study["seeds"] = sorted({place["seed"] for place in self.places})
        self.study["connections"] = list(dict.fromkeys(place["connection"] for place in self.places))
        for folder, run in ((self.folder / name, run) for name, run in self.runs.items()):
            if (folder / PLAN).is_file():
                _refuse_other(_identity(RunPlan.read(folder)), _identity(run), f"{folder} is a run of other options",
                              "choose another --output, or remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {"timm_ortho": __version__, "settings": self.settings, "left_out": self.left_out,
                  "study": self.study, "places": self.places}
        write_text(self.folder / STUDY, yaml.safe_dump(_plain(values), sort_keys=False))
        for name, run in self.runs.items():
            run.write(self.folder / name)

    def _before(self) -> dict:
        """What the folder's `study.yaml` says, {} if the folder is new."""
        advice = "choose another --output, or remove that folder"
        if self.folder.exists() and not self.folder.is_dir():
            raise LabError(f"{self.folder} is not a folder: choose another --output")
        if not (self.folder / STUDY).is_file():
            strangers = [item.name for item in self.folder.iterdir()] if self.folder.exists() else []
            if [name for name in strangers if not name.startswith(".")]:
                raise LabError(f"{self.folder} holds '{strangers[0]}' and no {STUDY}, so it is no study's: {advice}")
            return {}
        before = read(self.folder)
        _refuse_other(before["settings"], self.settings, f"{self.folder} belongs to other settings", advice)
        there, here = (study.get("data") or {} for study in (before["study"], self.study))
        if there and here:
            there, here = ({key: data.get(key) for key in _OF_IMAGES} for data in (there, here))
            _refuse_other(there, here, f"{self.folder} has runs on other images", advice)
        return before


def read(folder: Path) -> dict:
    """The `study.yaml` of an output folder; a LabError if there is none, or it cannot be read."""
    if not (folder / STUDY).is_file():
        raise LabError(f"{folder} has no {STUDY}: give the --output of timm-ortho study or compare")
    values = read_yaml(folder / STUDY)
    if not isinstance(values, dict) or not {"settings", "study", "places"} <= values.keys():
        raise LabError(f"{folder / STUDY} cannot be read: remove {folder}, or choose another --output")
    return values


def _identity(run: RunPlan) -> dict:
    """What decides a run's result."""
    def of_stage(stage: Stage) -> dict:
        options = {key: value for key, value in stage.options.items() if key not in _MACHINE | {"grad_accum_steps"}}
        return {**asdict(stage), "options": {**options, "batch_size": run.whole_batch(stage)}}

    values = {**asdict(run), "stages": {str(n): of_stage(stage) for n, stage in enumerate(run.stages)},
              "trainer": "lab" if run.trainer == "lab" else "train.py"}  # wherever that is
    del values["gpus"], values["nodes"]
    return json.loads(json.dumps(values))  # lists for tuples; YAML takes a hundred times as long


def _refuse_other(there: Mapping[str, Any], here: Mapping[str, Any], what: str, advice: str) -> None:
    there, here = _flat(there), _flat(_plain(here))
    differing = [key for key in dict.fromkeys([*here, *there]) if there.get(key) != here.get(key)]
    if differing:
        values = "; ".join(f"{key.rpartition('options.')[2]} is {there.get(key)!r:.60} there and {here.get(key)!r:.60} "
                           "here" for key in differing[:3])
        more = f", and {len(differing) - 3} others differ" if len(differing) > 3 else ""
        raise LabError(f"{what} ({values}{more}): {advice}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`model_kwargs.depth` for what is inside mappings."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _plain(value: Any) -> Any:
    """As YAML gives it back: lists for tuples, and the grid's numbers as keys, which JSON would make text."""
    return yaml.safe_load(yaml.safe_dump(value, sort_keys=False))


# ---------------------------------------------------------------------------------------------------- the plan
def plan(request: Request) -> StudyPlan:
    """Checks everything that can be checked before the first step: a LabError. Nothing is written."""
    design = request.design
    given = dict(request.given)
    if design.name != "compare":  # whose recipe says which data set
        given.setdefault("dataset", design.options.get("dataset", "" if given.get("data_dir") else "digits"))
    if design.kind != "training":
        if request.only or request.seeds is not None or request.gpus:
            raise LabError(f"study '{design.name}' trains nothing: it takes no --only, --seeds and --gpus")
        cost.check(design.kind, design.arguments)
        settings = _settings(request, given)
        return StudyPlan(_folder(request, settings, given), settings, _described(request, given, [], []), [], {}, [])
    trainer = request.trainer
    if request.gpus < 0 or request.nodes < 1:
        raise LabError(f"--gpus must be at least 0 and --nodes at least 1, got {request.gpus} and {request.nodes}")
    if trainer == "lab" and (request.gpus or request.nodes > 1):
        raise LabError("--gpus and --nodes are for timm's train.py: give it with --train-py, or --device cuda alone")
    given["device"] = _device(request)
    variants, left_out = design.expand(given, trainer)
    variants = _only(variants, request.only)
    if not variants:
        raise LabError(f"nothing of study '{design.name}' can be run: {'; '.join(left_out) or 'no cell is left'}")
    if given.get("data_dir") and variants[0].options.dataset == "digits":
        raise LabError(f"data set digits takes no --data-dir ({given['data_dir']}): give --dataset too, '' for an "
                       "image folder")
    wanted, first = design.seeds if request.seeds is None else request.seeds, variants[0].options.seed
    seeds = list(range(first, first + wanted)) if isinstance(wanted, int) else list(dict.fromkeys(wanted))
    if not seeds:
        raise LabError("there is nothing to run: give at least one seed")
    source, sizes = (_checked if trainer == "lab" else _checked_for_train_py)(request, variants)
    places, runs = places_of(request, variants, seeds)
    if trainer == "lab":
        _check_runs(runs, places, seeds[0], source)
    settings = _settings(request, given, variants[0])
    folder = _folder(request, settings, given, variants[0])
    study = _described(request, given, seeds, variants)
    if source is not None:
        study["data"] = _data_of(source, sizes)
        study["dataset"] = _not_the_papers(study["dataset"], source.num_classes)
    Layout.of(study)  # a layout that cannot be is known before anything runs
    if "options" in settings:
        study["options"] = {**settings["options"], "device": given["device"]}
    return StudyPlan(folder, settings, study, places, runs, left_out)


def _settings(request: Request, given: Mapping[str, Any], first: Optional[Variant] = None) -> dict:
    """What decides the results, but for seeds and connections, of which there may be more from call to call."""
    design = {key: value for key, value in asdict(request.design).items()
              if key not in ("seeds", "connections", "baseline", "report")}
    settings = {"design": design, "given": {key: value for key, value in given.items() if key not in _MACHINE}}
    if request.design.name == "compare":  # whose recipe may be a file
        options = {key: value for key, value in vars(first.options).items() if key not in _MACHINE | {"seed"}}
        kwargs = {key: value for key, value in options["model_kwargs"].items() if key != "connection"}
        settings["options"] = {**options, "model_kwargs": kwargs}
    return _plain(settings)


def _device(request: Request) -> str:
    """Where the runs train: as asked for, on GPUs if some are asked for, else where this machine can."""
    name = request.given.get("device")
    if name is None:
        return "cuda" if request.gpus or torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LabError(f"there is no device '{name}': give cpu, or cuda where PyTorch sees a GPU") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count() and not request.gpus:
        raise LabError(f"PyTorch sees no device '{name}' here: use --device cpu")
    return str(device)


def _only(variants: Sequence[Variant], only: Sequence[tuple[str, str]]) -> list[Variant]:
    """The variants of some cells; `connection` is an axis like the grid's, and a value may have commas of its own."""
    cells = [{axis: shown(value) for axis, value in {**variant.cell, "connection": variant.final_connection}.items()}
             for variant in variants]
    wanted: dict[str, list[str]] = {}
    for axis, text in only:
        if variants and axis not in cells[0]:
            raise LabError(f"--only {axis}: there is no such axis, only {', '.join(cells[0])}")
        known = list(dict.fromkeys(cell[axis] for cell in cells))
        values = [text] if text in known else [_as_shown(word) for word in text.split(",") if word]
        if not set(values) <= set(known):
            raise LabError(f"--only {axis}={text}: there is {axis} {'; '.join(known)}")
        wanted.setdefault(axis, []).extend(values)
    return [variant for variant, cell in zip(variants, cells, strict=True)
            if all(cell[axis] in values for axis, values in wanted.items())]


def _as_shown(word: str) -> str:
    try:
        return shown(float(word))  # 1e-06 and 0.000001 are 1e-6
    except ValueError:
        return word


def places_of(
        request: Request, variants: Sequence[Variant], seeds: Sequence[int]) -> tuple[list[dict], dict[str, RunPlan]]:
    """The grid seed by seed; places with the same options share a run."""
    places, runs, names = [], {}, {}
    for seed in seeds:
        for variant in variants:
            run = _run(request, variant, seed)
            name = names.setdefault(json.dumps(_identity(run), sort_keys=True), variant.name(seed))
            runs.setdefault(name, run)
            places.append({
                "cell": dict(variant.cell), "connection": variant.final_connection, "seed": seed, "run": name})
    return places, runs


def _run(request: Request, variant: Variant, seed: int) -> RunPlan:
    options = {**vars(variant.options), "seed": seed}
    stages = [Stage(".", options)]
    if variant.switch_to:
        kwargs = {**options["model_kwargs"], "connection": variant.switch_to}
        if variant.reinitialise:
            begins_with, stop = "weights", None
        else:
            begins_with, stop = "checkpoint", stages[0].scheduled_epochs // 2
            if not stop:
                raise LabError("a connection cannot be switched in the middle of one epoch: give two epochs or more")
        stages = [Stage(".", options, stop_epoch=stop),
                  Stage("switched", {**options, "model_kwargs": kwargs}, begins_with)]
    design = request.design
    how = dict(stages=stages, record=design.record, representation=design.representation, hold_out=design.hold_out)
    if request.trainer == "lab":
        return RunPlan("lab", **how)
    script = str((request.train_py or Path("train.py")).absolute())  # without a script the runs can still be counted
    return RunPlan(script, **how, gpus=request.gpus, nodes=request.nodes).with_divided_batch()


def _folder(request: Request, settings: Mapping, given: Mapping, first: Optional[Variant] = None) -> Path:
    """Named after the settings: the same command finds its folder again, another one never meets it."""
    if request.output:
        return Path(request.output)
    design = request.design
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    data = (_data(given, first) or "none").replace("/", "_")
    if design.name == "compare":
        return Path("output", "compare", f"{data}-{base_name(first.options.model)}-{digest}")
    return Path("output", "study", "-".join([design.name, data, design.scale, digest]))


# -------------------------------------------------------------------------------- checks before the first step
_Size = tuple[list[int], str]  # height and width of the images that a model gets, and the origin of this size


def _checked(request: Request, variants: Sequence[Variant]) -> tuple[Source, list[_Size]]:
    """Opens the data set, builds every model once, and completes the options."""
    source = open_source(variants[0].options, request.design.hold_out)
    for variant in variants:
        variant.options.num_classes, variant.options.in_chans = source.num_classes, source.in_chans
        variant.options.val_split = source.val_split
    return source, [_check_models(request, variant) for variant in variants]


def _check_models(request: Request, variant: Variant) -> _Size:
    origin = _origin_of_size(request, variant)
    for connection in dict.fromkeys((variant.connection, variant.final_connection)):
        size = _check_model(variant.options, connection)
    return size, origin


def _origin_of_size(request: Request, variant: Variant) -> str:
    """Name the origin of the image size, before `_check_model` completes the options."""
    def sets(options: Mapping[str, Any]) -> bool:
        return any(options.get(key) is not None for key in ("img_size", "input_size"))

    design = request.design
    cells = (changes.get("options", {}) for values in design.grid.values() for changes in values.values())
    if sets(request.given):
        return "--img-size" if design.name == "compare" else "--option img_size"
    if sets(design.options) or any(map(sets, cells)):
        return f"study {design.name}"
    if sets(vars(variant.options)):
        return f"recipe {variant.recipe}"
    return "--model-kwargs img_size" if sets(variant.options.model_kwargs) else "the model's default"


def _data_of(source: Source, sizes: Sequence[_Size]) -> dict:
    """Describe the data for a report; `image_size` is None where the models differ."""
    (size, origin), *others = sizes
    alike = all(other == size for other, _ in others)
    return {
        "image_size": size if alike else None,
        "size_from": origin if alike else "each model's default",
        "first_image": source.first_size and list(source.first_size),
        "channels": source.in_chans,
        "classes": source.num_classes,
        "train": len(source.train),
        "validation": len(source.validation),
        "validation_split": source.validation_name,
        "fingerprint": source.fingerprint,
    }


def _not_the_papers(dataset: str, classes: int) -> str:
    """Return a data set's name that has no numbers in the paper if only the name of an image folder is the paper's."""
    expected = figures()["datasets"].get(dataset, {}).get("classes", classes)
    return dataset if classes == expected else f"{dataset} ({classes} classes)"


def _check_model(options: Namespace, connection: str) -> list[int]:
    """Builds the model and runs it on two blank images, so that wrong arguments are known at once.

    Gives a model that must know the size of its images that size, in `options.model_kwargs`, and returns it.
    """
    channels = options.in_chans or 3

    def build() -> torch.nn.Module:  # not on the meta device: older timm (1.0.16) reads drop path rates from tensors
        kwargs = {**options.model_kwargs, "connection": connection}
        trial = {"pretrained": False, "initial_checkpoint": "", "seed": 0, "model_kwargs": kwargs}
        return build_model(Namespace(**{**vars(options), **trial}), options.num_classes, channels)

    with _refused(f"{options.model} with connection '{connection}'"):
        model = build()
        if options.img_size is None and options.input_size is None:
            options.img_size = options.model_kwargs.get("img_size")
        _, height, width = data_config(model, vars(options), channels)["input_size"]
        if options.img_size is None and options.input_size is None and channels != 3:  # train.py would take three
            options.input_size = [channels, height, width]
        own = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if _takes_img_size(model) and (own is None or (height, width) != tuple(own)):
            options.model_kwargs.setdefault("img_size", height if height == width else [height, width])
            model = build()
        with torch.no_grad():
            model.eval()(torch.zeros(2, channels, height, width))
    return [height, width]


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Options that timm or torch cannot take are a LabError that says what they were for."""
    try:
        yield
    except LabError:
        raise
    except KeyError as error:  # as timm's tables of layers raise
        raise LabError(f"{what}: there is no {error}") from None
    except (ValueError, TypeError, RuntimeError, AssertionError, OSError) as error:
        raise LabError(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from None


def _takes_img_size(model: torch.nn.Module) -> bool:
    """Whether the class has to know the size of its images, as one with position embeddings does."""
    made = [vars(cls)["__init__"] for cls in type(model).__mro__ if "__init__" in vars(cls) and cls is not object]
    return any("img_size" in inspect.signature(init).parameters for init in made)


def _check_runs(runs: Mapping[str, RunPlan], places: Sequence[dict], seed: int, source: Source) -> None:
    """Makes the runs of one seed ready and lets them go: an optimizer, schedule or loader that cannot be is known."""
    for name in dict.fromkeys(place["run"] for place in places if place["seed"] == seed):
        stage = runs[name].stages[-1]
        options = Namespace(**stage.options)
        if options.epochs < 1:
            raise LabError(f"epochs must be at least 1, got {options.epochs}")
        with _refused("timm cannot make a run of these options"):
            Training(runs[name], stage, Path(), source, options)


def _checked_for_train_py(request: Request, variants: Sequence[Variant]) -> tuple[Optional[Source], list[_Size]]:
    """That the script is there and knows the options; data and GPUs may be elsewhere."""
    if request.train_py is None:
        raise LabError("scale paper trains with timm's train.py: give it with --train-py, or its folder as TIMM_DIR")
    parser = recipe.of_script(request.train_py)
    defaults = vars(parser.parse_args([]))
    if request.design.hold_out:
        raise LabError("train.py holds no images out: leave --train-py away, or give the study a val_split of its own")
    first, source, sizes = variants[0].options, None, []
    dataset, cut = first.dataset, {}
    if dataset.partition("/")[0] not in ("hfids", "tfds", "wds"):
        cut = {key: None for key in ("train_num_samples", "val_num_samples") if getattr(first, key) is not None}
    if cut:
        print(f"timm-ortho: train.py has no use for {' and '.join(cut)} where a data set is no stream, and takes all "
              f"images of '{dataset or first.data_dir}'", file=sys.stderr)
    unknown = first.num_classes is None  # the paper's recipes have it
    if unknown or is_here(first):
        source = open_source(Namespace(**{**vars(first), **cut}))
        for options in (variant.options for variant in variants):
            options.val_split = source.val_split
            if unknown:
                options.num_classes, options.in_chans = source.num_classes, source.in_chans
    for variant in variants:
        if variant.options.dataset == "digits":
            raise LabError("train.py has no data set digits: give another --dataset, or leave --train-py away")
        sizes.append(_check_models(request, variant))
        for key, option in recipe.known_options().items():
            if getattr(variant.options, key) != option["default"]:
                if key not in defaults:
                    raise LabError(f"{request.train_py} has no option {key}: it is of another release of timm")
            elif key in defaults:
                setattr(variant.options, key, defaults[key])  # which another release may have changed
            else:
                delattr(variant.options, key)
    return source, sizes


# -------------------------------------------------------------------------------------------------- in words
def _data(given: Mapping[str, Any], first: Optional[Variant]) -> str:
    """The name of the data set, as it was given or as a recipe has it; of a folder of images its own."""
    name = str(given.get("dataset") or (first.options.dataset if first is not None else "digits"))
    return name or Path(str(given.get("data_dir") or "images")).name


def _described(
        request: Request, given: Mapping[str, Any], seeds: Sequence[int], variants: Sequence[Variant]) -> dict:
    """What a report says of the study, see `report`."""
    design, training = request.design, request.design.kind == "training"
    models = list(dict.fromkeys(base_name(variant.options.model) for variant in variants))
    said = ("name", "title", "paper", "table", "kind", "axes", "baseline", "report")
    return _plain({
        **{key: getattr(design, key) for key in said},
        "scale": design.scale if design.name != "compare" else "",
        "dataset": _data(given, variants[0]) if training else None,
        "model": (models[0] if len(models) == 1 else f"{len(models)} architectures") if training else None,
        "connections": list(dict.fromkeys(variant.final_connection for variant in variants)),
        "seeds": list(seeds),
        "changed": changes(design, given, seeds, request.trainer),
        "validation": "hold-out" if design.hold_out else "test",
        "command": request.command,
    })
