"""Define the request that a command line makes: which study to run, with which options, seeds, cells and trainer."""
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import torch

from .. import LabError, value_text
from ..folder import Variant
from .design import Design


@dataclass(frozen=True)
class Request:
    """The arguments of `timm-ortho study` or `compare`."""

    design: Design  # the study at the requested scale
    options: Mapping[str, Any]  # timm's options from the command line, including `dataset` and `data_dir`
    seeds: Sequence[int] | int | None = None  # a list of seeds, or how many; None for as many as the study sets
    output: Optional[str] = None  # output folder; None for a folder below `output/` whose name depends on the settings
    # Pairs of an axis and comma-separated values: only cells with one of these values are run. Empty for all cells.
    only: Sequence[tuple[str, str]] = ()
    train_py: Optional[Path] = None  # timm's train.py, which scale `paper` requires; None: the lab's own loop trains
    gpus: int = 0  # GPUs per node that each run of `train.py` uses; 0 to use `--device`
    nodes: int = 1  # machines that each run of `train.py` uses
    slurm: bool = False  # whether other machines train the runs
    command: str = ""  # the command line, which the report shows

    def device(self) -> str:
        """Return the device of the runs. The default is `cuda` if this machine has a GPU or if GPUs are requested."""
        name = self.options.get("device")
        if name is None:
            return "cuda" if self.gpus or torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError:
            raise LabError(f"there is no device '{name}': use cpu, or cuda if PyTorch sees a GPU") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count() and not (self.gpus or self.slurm):
            raise LabError(f"PyTorch sees no device '{name}' on this machine: use --device cpu")
        return str(device)

    def seed_list(self, first: int) -> list[int]:
        """Return the requested seeds. If only their number is set, count up from `first`, the recipe's seed."""
        data = self.options.get("dataset", self.design.dataset)
        seeds = self.design.seeds_on(data) if self.seeds is None else self.seeds
        seeds = list(range(first, first + seeds)) if isinstance(seeds, int) else list(dict.fromkeys(seeds))
        if not seeds:
            raise LabError("there is nothing to run: choose at least one seed")
        if max(seeds) >= 2**32:  # NumPy's limit
            raise LabError(f"a seed must be below {2**32}, got {max(seeds)}")
        return seeds

    def select(self, variants: Sequence[Variant], left_out: Sequence[str] = ()) -> list[Variant]:
        """Return the variants that `only` selects. Its axes are the study's axes and `connection`.

        `left_out` has the reasons why cells are missing, for the error about a missing value.
        """
        cells = [{axis: value_text(value)
                  for axis, value in {**variant.cell, "connection": variant.connection}.items()}
                 for variant in variants]
        selected: dict[str, list[str]] = {}
        for axis, text in self.only:
            if variants and axis not in cells[0]:
                raise LabError(f"--only {axis}: the study has no such axis, only {', '.join(cells[0])}")
            known = list(dict.fromkeys(cell[axis] for cell in cells))
            values = [text] if text in known else [_as_named(word, known) for word in text.split(",") if word]
            if not values or not set(values) <= set(known):
                raise LabError(f"--only {axis}={text}: the values of {axis} are "
                               f"{'; '.join(known) or 'none'}{'; left out: ' * bool(left_out)}{'; '.join(left_out)}")
            selected.setdefault(axis, []).extend(values)
        return [variant for variant, cell in zip(variants, cells, strict=True)
                if all(cell[axis] in values for axis, values in selected.items())]


def _as_named(word: str, known: Sequence[str]) -> str:
    """Return a known value that a word names or, as 0.001 and 1e-3 do, is equal to."""
    try:
        return word if word in known else value_text(float(word))
    except ValueError:
        return word
