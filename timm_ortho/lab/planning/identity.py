"""Find the settings that decide the results of studies and runs, and derive the output folder from these settings."""
import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Mapping

from ..._text import file_name
from ..._yaml import dump_yaml, load_yaml
from ...convert import base_name
from .. import LabError
from ..folder import OF_COMMAND, OF_PLAN, OF_STAGE, Stage, Variant
from ..train_options import known_options, options_with
from .design import Design

# Options that do not change a result, such as the device. A run can therefore continue on another machine. `workers` is
# not among them, because each worker of a loader draws its own random numbers for the augmentation.
_MACHINE = options_with("about", "machine")


def run_identity(run: Variant) -> dict:
    """Return the settings that decide a run's result. Runs with equal settings have equal results."""
    def of_stage(stage: Stage) -> dict:
        unused = OF_COMMAND | ({"grad_accum_steps"} if stage.options["amp"] else {"grad_accum_steps", "amp_dtype"})
        options = {key: value for key, value in stage.options.items()
                   if key in known_options() and key not in _MACHINE | unused}  # a script may add its own options
        own = {key: getattr(stage, key) for key in OF_STAGE}
        return {**own, "options": {**options, "batch_size": run.whole_batch}}

    values = {**{key: getattr(run, key) for key in OF_PLAN if key not in ("gpus", "nodes")},
              "stages": {str(n): of_stage(stage) for n, stage in enumerate(run.stages)},
              "trainer": run.trainer_name}  # without the path of train.py
    return json.loads(json.dumps(values))  # turns tuples into lists; YAML would be a hundred times slower


def study_settings(design: Design, requested: Mapping[str, Any], first: Variant) -> dict:
    """Return the settings that decide the results of a study's runs.

    Seeds and connections are left out, because a later command may add seeds and connections to the study.

    Args:
        design: The study.
        requested: timm's options from the command line.
        first: The first variant of the grid.
    """
    keys = {key: value for key, value in asdict(design).items()
            if key not in ("source", "seeds", "connections", "baseline", "report")}
    settings = {"design": keys, "given": {key: value for key, value in requested.items() if key not in _MACHINE}}
    if design.is_comparison:  # store the recipe's options, because the recipe may be a file that the user edits later
        options = {key: value for key, value in vars(first.options).items() if key not in _MACHINE | {"seed"}}
        # `first` has none of these if it is linear, and a later command of the study may begin with another connection
        kwargs = {key: value for key, value in options["model_kwargs"].items() if not key.startswith("connection")}
        settings["options"] = {**options, "model_kwargs": kwargs}
    return settings


def output_folder(design: Design, settings: Mapping[str, Any], data: str, first: Variant) -> Path:
    """Return the default output folder. Its name has a hash of the settings: equal commands have the same folder."""
    settings = json.loads(json.dumps(settings))  # all keys become text, which can be sorted
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    if design.is_comparison:
        return Path("output", "compare", file_name(f"{data}-{base_name(first.options.model)}-{digest}"))
    return Path("output", "study", file_name("-".join([design.name, data, design.scale, digest])))


def data_name(requested: Mapping[str, Any], first: Variant) -> str:
    """Return the name of the data set. For an image folder, this is the name of the folder."""
    return (str(requested.get("dataset") or first.options.dataset)
            or Path(str(requested.get("data_dir") or "images")).name)


def refuse_difference(stored: Mapping[str, Any], new: Mapping[str, Any], subject: str, advice: str) -> None:
    """Raise a LabError if stored and new settings differ. The message lists the first three differences."""
    stored, new = _flat(stored), _flat(load_yaml(dump_yaml(new, sort_keys=False)))  # YAML turns tuples into lists
    prefix = r"^((design[.]|stages[.]\d[.])?options|given)[.]|^design[.](?=grid)"
    # a comparison stores an option in `given`, if the user sets it, and in `options`, with the default as its value
    differing = {re.sub(prefix, "", key): (stored.get(key), new.get(key)) for key in dict.fromkeys([*new, *stored])
                 if stored.get(key) != new.get(key)}
    if differing:
        values = "; ".join(f"{name} was {before!r:.60} and is now {now!r:.60}"
                           for name, (before, now) in list(differing.items())[:3])
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise LabError(f"{subject} ({values}{more}): {advice}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a mapping without nested mappings: keys are joined by dots, as in `model_kwargs.depth`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
