"""Figures that this repository keeps without weights: the `results.json` of comparisons and studies."""
from pathlib import Path
from typing import Any, Optional

from timm_ortho.hub.errors import PublishError
from timm_ortho.hub.trained_run import Run, comparison_rows, load_json


class RecordedRun(Run):
    """A run of `timm-ortho compare` of which a repository keeps the figures.

    Args:
        path: `results.json` of the comparison.
        connection: Which of its connections; None for the comparison as a whole.
        seed: Which seed's weights are meant; None for no weights.

    Raises:
        PublishError: The file has no such run.
    """

    def __init__(self, path: Path, connection: Optional[str] = None, seed: Optional[int] = None) -> None:
        results = read_comparison(path)
        runs = [run for run in results["runs"] if connection in (None, run["connection"])]
        mine = [run for run in runs if seed in (None, run["seed"])]
        if not mine:
            known = ", ".join(f"{run['connection']}-seed{run['seed']}" for run in results["runs"])
            raise PublishError(f"{path} has no run of connection {connection}, seed {seed}: it has {known}")
        one = mine[0] if seed is not None else {"connection": connection, "history": []}  # a mean has no history
        self.options = dict(results["settings"]["options"], seed=seed)
        if connection is not None:
            self.options["model_kwargs"] = {**self.options["model_kwargs"], "connection": connection}
        self.history = one["history"]
        commit = {"commit": results["commit"]} if results["commit"] else {}
        self.result = {**one, "made_with": {**results["versions"], **commit, **(one.get("made_with") or {})}}
        self.epoch = self.history[-1]["epoch"] if self.history else None
        self.ema = self.evaluates_ema
        self.peers = {run["seed"]: run["top1"] for run in runs} if connection is not None else {}
        self.comparison = results["summary"]


class RecordedStudy:
    """A finished study of which a repository keeps the figures.

    Args:
        path: `results.json` of the study.

    Attributes:
        about: What was run: `name`, `title`, `paper`, `scale`, `model`, `dataset`, `seeds`, `changed`, `command`, ...
        lead: What the intervals say, in one sentence; empty for a study without training.
        rows: Its figures: `row` and `column` of the paper's table, `mean`, `std`, `seeds`, `difference`.

    Raises:
        PublishError: The file is not a finished study's.
    """

    def __init__(self, path: Path) -> None:
        results = load_json(path)
        try:
            self.about, self.lead, self.rows = (results[key] for key in ("study", "lead", "summary"))
        except (KeyError, TypeError):
            raise PublishError(f"{path} is not a study's results.json") from None
        if results.get("unfinished"):
            raise PublishError(f"{path} is of an unfinished study: the command that began it continues it")


def read_comparison(path: Path) -> dict[str, Any]:
    """The `results.json` of `timm-ortho compare`: `settings`, `versions`, `commit`, `summary` and `runs`.

    Raises:
        PublishError: It is no comparison's.
    """
    results = load_json(path)
    summary = comparison_rows(results)
    if not summary:
        raise PublishError(f"{path} is not the results.json of a comparison")
    made_with = next((run["made_with"] for run in results["runs"]), {})
    return {
        "settings": {key: results["study"][key] for key in ("options", "connections", "seeds")},
        "versions": {key: said for key, said in made_with.items() if key in ("timm-ortho", "timm", "torch")},
        "commit": made_with.get("commit"),
        "summary": summary,
        "runs": results["runs"],
    }
