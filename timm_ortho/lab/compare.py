"""`timm-ortho compare`: one architecture, several connections, several seeds, the same data.

Runs with one seed are a pair: they start from the same weights and see the same batches, augmentations and mixtures.
The grid goes seed by seed, so that an interrupted comparison holds whole pairs.

The output folder:

    compare.yaml            the settings; a folder that has others is refused
    <connection>-seed<k>/   one run, see `training`
    results.json            every number of the finished runs
    report.html             the table and the curves
"""
import hashlib
import json
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from . import LabError, report
from .data import Source, open_source
from .grid import (
    Job,
    base_name,
    check_folders,
    check_model,
    check_run,
    check_threads,
    claimed,
    limited_threads,
    resolve_options,
    run_job,
    seeds_of,
    threads_for,
    writing_report,
)

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """What is to be compared, checked and complete.

    Attributes:
        options: timm's options, the same for every run but for `seed` and the connection in `model_kwargs`.
        source: The data set.
        connections: Names of the connections, the baseline first.
        seeds: Seeds of the runs.
        folder: Where everything is written.
    """

    options: Namespace
    source: Source
    connections: Sequence[str]
    seeds: Sequence[int]
    folder: Path

    def jobs(self) -> list[Job]:
        return [self.job(connection, seed) for seed in self.seeds for connection in self.connections]

    def job(self, connection: str, seed: int) -> Job:
        options = Namespace(**vars(self.options))
        options.seed = seed
        options.model_kwargs = {**options.model_kwargs, "connection": connection}
        name = f"{connection}-seed{seed}"
        return Job(name, f"{connection}, seed {seed}", options, self.folder / name)


def compare(
        given: Mapping[str, Any],
        *,
        recipe_name: Optional[str] = None,
        connections: Sequence[str] = ("linear", "feature", "global"),
        seeds: Sequence[int] | int = 3,
        output: Optional[str] = None,
        threads: Optional[int] = None,
) -> int:
    """Trains what is not finished yet, then writes and prints the report.

    Args:
        given: timm's options that were given beside the recipe and override it.
        recipe_name: File or name of a shipped recipe; None chooses by data set.
        connections: Connections to compare; differences are to the first, or to `linear` where it takes part.
        seeds: The seeds, or their number, counted from the option `seed`.
        output: The output folder; None for one below `output/compare` that is named after the settings.
        threads: CPU threads of each operation; None chooses by the size of the model.

    Returns:
        The exit status: 0, or 130 if Ctrl-C stopped it.

    Raises:
        LabError: Something that was given cannot be run.
    """
    check_threads(threads)
    comparison = plan(given, recipe_name, connections, seeds, output)
    jobs, folder = comparison.jobs(), comparison.folder
    grown = {"connections": list(comparison.connections), "seeds": list(comparison.seeds)}
    try:
        with (claimed(folder, "compare", vars(comparison.options), grown),
              limited_threads(threads or threads_for(jobs[0].options))):
            check_folders(jobs)
            with writing_report(folder, lambda: report.write(folder)):
                for number, job in enumerate(jobs, 1):
                    run_job(job, comparison.source, f"{number}/{len(jobs)}")
    except KeyboardInterrupt:
        print("interrupted; the same command again continues where this one stopped", file=sys.stderr)
        return 130
    return 0


# -------------------------------------------------------------------------------------------- the plan
def plan(
        given: Mapping[str, Any],
        recipe_name: Optional[str],
        connections: Sequence[str],
        seeds: Sequence[int] | int,
        output: Optional[str],
) -> Comparison:
    """Checks everything that can be checked before the first step; nothing is written."""
    options, inert = resolve_options(given, recipe_name)
    if inert:
        print(f"timm-ortho: compare has no use for {', '.join(inert)}", file=sys.stderr)
    source = open_source(options)
    options.num_classes, options.in_chans = source.num_classes, source.in_chans
    seeds, connections = seeds_of(seeds, options.seed), list(dict.fromkeys(connections))
    if not seeds or not connections:
        raise LabError("there is nothing to compare: give at least one connection and one seed")
    options.seed = None  # each run has its own
    for connection in connections:
        check_model(options, connection)
    comparison = Comparison(options, source, connections, seeds, Path(output) if output else _default_folder(options))
    check_run(comparison.job(connections[0], seeds[0]), source)
    return comparison


def _default_folder(options: Namespace) -> Path:
    """Named after the settings: the same command finds its folder again, another one never meets it."""
    digest = hashlib.sha256(json.dumps(vars(options), sort_keys=True).encode()).hexdigest()[:8]
    dataset = options.dataset.replace("/", "_") or Path(options.data_dir).name
    return Path("output", "compare", f"{dataset}-{base_name(options.model)}-{digest}")


