"""Plan a study: decide its runs, and write one folder for each run.

The output folder of a study contains:

    study.yaml      the settings, a description for the report, and the points of the grid
    <run>/          a folder for each run, see `lab.folder`, with the name `<axis>=<value>-<connection>-seed<k>`
    results.json, report.html, report.md

A point is one cell of the study's grid with one connection and one seed. Points with equal settings share a run. Runs
with the same seed are paired: they see the same batches, and start from the same weights if they differ only in the
connection. Runs are ordered by seed, so that the first seeds of an interrupted study have complete pairs.
"""
import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

from ... import __version__
from ..._text import UserError
from ..._yaml import dump_yaml
from ...convert import base_name
from ...run_folder import import_modules, read_run
from .. import LabError, write_text
from ..data import Source
from ..folder import STUDY, Variant, is_at_work, read_study
from ..image_folder import check_sources
from ..paper import recipes
from ..train_options import options_with
from .check import check
from .design import Design, load
from .identity import data_name, output_folder, refuse_difference, run_identity, study_settings
from .request import Request

# A later command may continue a study only if these properties of its data set are the same.
_OF_IMAGES = ("classes", "train", "validation", "validation_split", "fingerprint")


@dataclass
class StudyPlan:
    """A planned study."""

    folder: Path
    settings: dict  # the settings that decide the results; `write` refuses a folder with different settings
    study: dict  # the description of this command's points for a report
    describe: Callable[[Sequence[Mapping[str, Any]]], dict]  # makes this description for any points of the study
    points: list[dict]  # of this command, each with the keys `cell`, `connection`, `seed` and `run` (the run's name)
    runs: dict[str, Variant]  # the runs of this command by name
    left_out: list[str]  # reasons why cells are not run
    parameters: int  # of the first model

    def write(self) -> None:
        """Write `study.yaml` and the folders of the runs. Points that earlier commands wrote are kept.

        Raises:
            LabError: The output is not a folder, or contains files but no readable `study.yaml`, or a study with other
                settings or images, or a run with other options.
        """
        def key(point: Mapping[str, Any]) -> tuple:
            return point["cell"], point["connection"], point["seed"]

        new = [key(point) for point in self.points]
        stored = self._stored()
        kept = [point for point in stored.get("places", ()) if key(point) not in new]
        points = sorted([*kept, *self.points], key=lambda point: point["seed"])
        study = {**self.study, **self.describe(points)}
        data, earlier = (values.get("data") or {} for values in (study, stored.get("study", {})))
        if data and earlier:
            same = data["image_size"] == earlier.get("image_size")
            study["data"] = {**data, "image_size": data["image_size"] if same else None,
                             "on_device": data["on_device"] or bool(earlier.get("on_device"))}
        for folder, run in ((self.folder / name, run) for name, run in self.runs.items()):
            if folder.is_dir() and {*os.listdir(folder)} - {".lock"}:
                refuse_difference(run_identity(Variant.read(folder)), run_identity(run),
                                  f"{folder} is a run with other options", "choose another --output, or remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {"timm_ortho": __version__, "settings": self.settings, "left_out": self.left_out,
                  "study": study, "places": points}
        write_text(self.folder / STUDY, dump_yaml(values, sort_keys=False))
        for name, run in self.runs.items():
            folder = self.folder / name
            found = read_run(folder)
            if found is None or (found.result is None and not is_at_work(folder)):  # otherwise the files are in use
                run.write(folder)

    def _stored(self) -> dict:
        """Return the contents of an existing `study.yaml`, {} for a new folder. See `write` for the errors."""
        advice = "choose another --output, or remove that folder"
        if self.folder.exists() and not self.folder.is_dir():
            raise LabError(f"{self.folder} is not a folder: choose another --output")
        if not (self.folder / STUDY).is_file():
            items = [item.name for item in self.folder.iterdir()] if self.folder.exists() else []
            foreign = [name for name in items if not name.startswith(".")]
            if foreign:
                raise LabError(f"{self.folder} contains '{foreign[0]}' but no {STUDY}, so no study wrote it: {advice}")
            return {}
        stored = read_study(self.folder)
        refuse_difference(stored["settings"], self.settings, f"{self.folder} has other settings", advice)
        there, here = (study.get("data") or {} for study in (stored["study"], self.study))
        if there and here:
            there, here = ({key: data.get(key) for key in _OF_IMAGES} for data in (there, here))
            refuse_difference(there, here, f"{self.folder} has runs on other images", advice)
        return stored


def plan(request: Request) -> StudyPlan:
    """Plan a study, and check its data, models and options. No files are written.

    Raises:
        UserError: The study cannot be run as requested.
    """
    design, requested = request.design, dict(request.options)
    import_modules(requested.get("device_modules"))
    if not design.is_comparison:
        default = "" if requested.get("data_dir") else "digits"
        requested.setdefault("dataset", default if design.dataset is None else design.dataset)
    elif requested.get("data_dir") and design.recipe is None:  # a recipe may set a data set that needs --data-dir
        requested.setdefault("dataset", "")  # an image folder, as in train.py
    requested["device"] = request.device()
    every, left_out = design.expand(requested)
    variants = request.select(every, left_out)
    if not variants:
        raise LabError(f"nothing of study '{design.name}' can be run: {'; '.join(left_out) or 'no cell is left'}")
    first = variants[0]
    if requested.get("data_dir") and first.options.dataset == "digits":
        raise LabError(f"data set digits takes no --data-dir ({requested['data_dir']}): add --dataset NAME, or "
                       "--dataset '' for an image folder")
    for variant in variants:
        check_sources(vars(variant.options), f"study '{design.name}' or recipe '{variant.recipe}'", request.options)
    seeds = request.seed_list(first.options.seed)
    variants, source, sizes, parameters = check(request, variants)
    first = variants[0]  # with the options that follow from the data set and the model
    points, runs = points_of(request, variants, seeds)
    settings = study_settings(design, requested, first)
    describe = partial(_description, request, requested, every)
    study = describe(points)
    folder = Path(request.output) if request.output else output_folder(design, settings, study["dataset"], first)
    if source is not None:
        on_device = any(vars(variant.options).get("device_images") for variant in variants)
        study["data"] = {**_data_of(source, sizes), "on_device": on_device}
    if "options" in settings:
        study["options"] = {**settings["options"], "device": requested["device"]}
    return StudyPlan(folder, settings, study, describe, points, runs, left_out, parameters)


def points_of(
        request: Request, variants: Sequence[Variant], seeds: Sequence[int]) -> tuple[list[dict], dict[str, Variant]]:
    """Return the points ordered by seed, and the runs by name. Points with equal settings share a run.

    Raises:
        LabError: Runs with different settings would have the same name.
    """
    points, runs, names = [], {}, {}
    trainer = "lab" if request.train_py is None else str(request.train_py.absolute())
    for seed in seeds:
        for variant in variants:
            run = replace(variant.with_options(seed=seed), trainer=trainer, gpus=request.gpus, nodes=request.nodes)
            run, name = run.with_divided_batch(), run.name
            identity = json.dumps(run_identity(run), sort_keys=True)
            if identity not in names:
                if name in runs:
                    raise LabError(f"two different runs have the name '{name}': change the label of a "
                                   "value of an axis, or give cells with the key 'switch' only one connection")
                names[identity], runs[name] = name, run
            points.append({"cell": dict(variant.cell), "connection": variant.connection, "seed": seed,
                           "run": names[identity]})
    return points, runs


# ------------------------------------------------------------------------------------------ description
def _description(
        request: Request, requested: Mapping[str, Any], variants: Sequence[Variant],
        points: Sequence[Mapping[str, Any]]) -> dict:
    """Return the description of a study's points that its report shows. `variants` has the variants of all cells."""
    design, seeds = request.design, sorted({point["seed"] for point in points})
    planned = [(point["cell"], point["connection"]) for point in points]
    variants = [variant for variant in variants if (variant.cell, variant.connection) in planned]
    models = list(dict.fromkeys(base_name(variant.options.model) for variant in variants))
    return {
        **{key: getattr(design, key) for key in ("name", "title", "paper", "table", "axes", "baseline", "report")},
        "scale": "" if design.is_comparison else design.scale,
        "dataset": data_name(requested, variants[0]),
        "model": models[0] if len(models) == 1 else f"{len(models)} architectures",
        "connections": list(dict.fromkeys(connection for _, connection in planned)),
        "seeds": seeds,
        "weights": list(dict.fromkeys(filter(None, map(_weights, variants)))),
        "changed": not_as_in_the_paper(design, requested, seeds),
        "validation": "hold-out" if design.hold_out else "test",
        "command": request.command,
    }


def not_as_in_the_paper(design: Design, requested: Mapping[str, Any], seeds: Sequence[int]) -> list[str]:
    """Return a line such as `Not as in the paper (its value in brackets): epochs 15 (300)`.

    Runs are compared with the study at scale `paper`, on the same data set, or else on the first of the paper's. The
    list is empty if nothing differs, or if the study has no table of the paper or no scale `paper`.

    Args:
        design: The study at the scale of the runs.
        requested: timm's options from the command line, as for `Design.expand`.
        seeds: The seeds of the runs.
    """
    if not design.paper:
        return []
    own = requested.get("dataset", "").rpartition("/")[2]
    data = own if own in design.paper_data else next(iter(design.paper_data), None)
    try:
        paper = load(design.source, "paper")
        there = paper.variants({"dataset": data, "device": "cpu"} if data else {})
    except UserError:  # a user's study may have no scale `paper`
        return []
    here, stated = design.variants(requested), paper.seeds_on(data)
    changed = [f"data set {own or 'a folder of images'} ({' or '.join(design.paper_data)})"] * (data != own)
    changed += [f"seeds {len(seeds)} ({stated})"] * (len(seeds) != stated)
    changed += [f"values of {axis}" for axis, values in design.axes.items() if values != paper.axes.get(axis, values)]
    changed += _options_that_differ(here, there)
    lines = [f"Not as in the paper (its value in brackets): {', '.join(changed)}."] if changed else []
    own_recipes = dict.fromkeys(variant.recipe for variant in here if variant.recipe in recipes.names())
    return [*lines, "timm lacks some options of the paper. The recipes explain the nearest values: timm-ortho recipe "
                    f"{', '.join(own_recipes)}."] if own_recipes else lines


def _options_that_differ(here: Sequence[Variant], there: Sequence[Variant]) -> Iterator[str]:
    """Yield the options that differ from those of the paper's variant of the same cell, with values if all agree."""
    texts: dict[str, set[str]] = {}
    for variant in here:
        one, other = map(_options, (variant, next((each for each in there if each.cell == variant.cell), there[0])))
        for name in dict.fromkeys([*one, *other]):
            if one.get(name) != other.get(name):
                texts.setdefault(name, set()).add(f"{name} {one.get(name, 'default')} ({other.get(name, 'default')})")
    for name, of_cells in texts.items():
        text = of_cells.pop() if len(of_cells) == 1 else ""
        yield text if 0 < len(text) < 40 else name


def _options(variant: Variant) -> dict[str, Any]:
    """Return the settings to compare: architecture, arguments of the model, and timm's options of the training."""
    options = {key: value for key, value in vars(variant.options).items()
               if key not in options_with("about", "machine", "data")}
    kwargs = {key: value for key, value in variant.options.model_kwargs.items()
              if not key.startswith("connection") and key != "img_size"}  # img_size is also one of timm's options
    return {"architecture": base_name(variant.options.model), **kwargs, **options}


def _weights(variant: Variant) -> str:
    """Return the file or the pretrained model whose weights a variant starts from; empty for random weights."""
    options = vars(variant.options)
    path = options.get("pretrained_path")
    pretrained = options.get("pretrained") and (f"{path} with a new classifier" if path else options["model"])
    return options.get("initial_checkpoint") or pretrained or ""


def _data_of(source: Source, sizes: Sequence[list[int]]) -> dict:
    """Return the properties of the data set for a report. `image_size` is None if the models' image sizes differ."""
    return {
        "image_size": sizes[0] if all(size == sizes[0] for size in sizes) else None,
        "first_image": source.first_size and list(source.first_size),
        "channels": source.in_chans,
        "classes": source.num_classes,
        "train": len(source.train),
        "validation": len(source.validation),
        "validation_split": source.validation_name,
        "fingerprint": source.fingerprint,
    }
