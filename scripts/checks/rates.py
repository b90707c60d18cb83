"""Choose learning rates by the preregistered rules in docs/hypotheses.md, sections S0 and D2.

    python -m scripts.checks.rates FOLDER ...    output folders of `timm-ortho study run` of one of these studies

For the study `cifar_resnet18_rates`, each connection gets the lowest rate whose mean accuracy is nearly the best. The
exit status is 1 if runs are missing.

The study `cifar_rates` has runs with two recipes, `paper` and `clipped`, and one of them is chosen, too. Both must pass
a gate, because study S3 uses both. Their accuracy must exceed the accuracy of ridge regression by a minimum margin.
Their networks must not have fitted all labels: their training loss must exceed the lowest possible loss by a minimum
margin. The exit status is 1 if runs are missing, a recipe does not pass the gate, or a chosen rate of the chosen recipe
is the lowest or highest of the tried rates.
"""
import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Iterable, Mapping, Sequence

from timm_ortho.lab.folder import RunPlan
from timm_ortho.lab.reporting.collect import collect

from ..pages.marked import table
from . import linear_floor

Run = Mapping[str, Any]
Means = Mapping[str, Mapping[float, float]]  # connection -> rate -> mean

NEARLY, SAME_RECIPE = 0.3, 0.5  # points of accuracy within which two rates, or two recipes, count as equal
ABOVE_RIDGE, ABOVE_FLOOR = 15.0, 0.15  # the gate's minimum margins, in points of accuracy and in loss


def smoothing_floor(smoothing: float, classes: int) -> float:
    """Return the lowest possible cross entropy in nats: the entropy of the smoothed labels.

    The label of the true class is 1 - s + s / K, and the label of each wrong class is s / K.
    """
    rest, true = smoothing / classes, 1 - smoothing + smoothing / classes
    return -true * math.log(true) - (classes - 1) * rest * math.log(rest) if smoothing else 0.0


def means_of(runs: Iterable[Run], read: Callable[[Run], float] = lambda run: run["top1"]) -> Means:
    values: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        values.setdefault(run["connection"], {}).setdefault(run["cell"]["lr"], []).append(read(run))
    return {connection: {rate: fmean(of) for rate, of in sorted(rates.items())} for connection, rates in values.items()}


def choose(means: Mapping[float, float], nearly: float) -> float:
    """Return the lowest rate whose mean is at most `nearly` points below the best mean."""
    return min(rate for rate, mean in means.items() if mean >= max(means.values()) - nearly)


@dataclass(frozen=True)
class Chosen:
    """Learning rates chosen from the runs of one recipe.

    Attributes:
        means: Mean accuracy on held-out images in percent, by connection and rate.
        losses: Mean training loss of the last epoch, by connection and rate.
        rates: The chosen rate of each connection.
        shared: The rate chosen from the accuracy averaged over the connections, among the rates of all connections.
        ridge: Accuracy of ridge regression on the same images, in percent.
        floor: The lowest possible training loss, from `smoothing_floor`.
    """

    means: Means
    losses: Means
    rates: Mapping[str, float]
    shared: float
    ridge: float
    floor: float

    @classmethod
    def of(cls, runs: Sequence[Run], ridge: float, floor: float, nearly: float = NEARLY) -> "Chosen":
        means = means_of(runs)
        common = set.intersection(*map(set, means.values()))
        shared = choose({rate: fmean(of[rate] for of in means.values()) for rate in common}, nearly)
        return cls(means, means_of(runs, lambda run: run["history"][-1]["train_loss"]),
                   {connection: choose(of, nearly) for connection, of in means.items()}, shared, ridge, floor)

    def margins(self, connection: str) -> tuple[float, float]:
        """Return accuracy minus `ridge` in points, and training loss minus `floor`, both at the chosen rate."""
        rate = self.rates[connection]
        return self.means[connection][rate] - self.ridge, self.losses[connection][rate] - self.floor

    def passes(self, connection: str) -> bool:
        accuracy, loss = self.margins(connection)
        return accuracy >= ABOVE_RIDGE and loss >= ABOVE_FLOOR

    @property
    def edges(self) -> list[str]:
        """The connections whose chosen rate is the lowest or the highest rate of the grid."""
        return [connection for connection, rate in self.rates.items()
                if rate in (min(self.means[connection]), max(self.means[connection]))]


def recipe_of(recipes: Mapping[str, Chosen]) -> str:
    """Return the recipe whose linear networks are most accurate.

    If the linear networks of `paper` are at most SAME_RECIPE points less accurate, return `paper`.
    """
    accuracy = {name: chosen.means["linear"][chosen.rates["linear"]] for name, chosen in recipes.items()}
    best = max(accuracy, key=accuracy.__getitem__)
    return "paper" if accuracy[best] - accuracy["paper"] <= SAME_RECIPE else best


def by_recipe(runs: Iterable[Run], ridge: float, floor: float) -> dict[str, Chosen]:
    runs = list(runs)
    names = dict.fromkeys(run["cell"]["recipe"] for run in runs)
    return {name: Chosen.of([run for run in runs if run["cell"]["recipe"] == name], ridge, floor) for name in names}


def lines(recipes: Mapping[str, Chosen]) -> list[str]:
    """Return the means, the choices and the gate as lines of Markdown."""
    shown = recipe_of(recipes)
    rates = sorted({rate for chosen in recipes.values() for of in chosen.means.values() for rate in of})
    header = ["recipe", "connection", *(f"{rate:g}" for rate in rates), "chosen rate",
              "points above ridge regression", "training loss above floor", "gate"]
    made = []
    for name, chosen in recipes.items():
        for connection, of in chosen.means.items():
            accuracy, loss = chosen.margins(connection)
            made.append([name, connection, *(f"{of[rate]:.2f}" if rate in of else "-" for rate in rates),
                         f"{chosen.rates[connection]:g}", f"{accuracy:+.2f}", f"{loss:+.3f}",
                         "passed" if chosen.passes(connection) else "not passed"])
    edges = [f"{name}, {connection}" for name, chosen in recipes.items() for connection in chosen.edges]
    shared = " and ".join(f"{chosen.shared:g} with `{name}`" for name, chosen in recipes.items())
    ridge, floor = next((chosen.ridge, chosen.floor) for chosen in recipes.values())
    return [table(header, made), "",
            f"Studies S1, S2 and S4 use the recipe `{shown}`. The recipe `paper` has the paper's weight decay and no "
            "gradient clipping, but not the paper's augmentation; `clipped` has a higher weight decay and "
            "clipping. All other settings are equal. "
            "In S3, both connections are trained at one shared rate, and at four times this rate. The shared rate is "
            f"chosen from the mean accuracy over both connections: {shared}. "
            f"The accuracy of ridge regression is {ridge:.2f} %. The floor is {floor:.3f}. "
            + (f"These chosen rates are the lowest or highest tested rate: {'; '.join(edges)}." if edges else
               "No chosen rate is the lowest or highest tested rate.")]


def accepted(recipes: Mapping[str, Chosen]) -> bool:
    """Return whether both recipes pass the gate, and no chosen rate of the chosen recipe is the lowest or highest."""
    passed = all(chosen.passes(connection) for chosen in recipes.values() for connection in chosen.rates)
    return passed and not recipes[recipe_of(recipes)].edges


def main(folders: Sequence[Path]) -> int:
    parts = collect(folders).values()
    missing = [name for part in parts for name in part.unfinished]
    if missing:
        print(f"not finished: {', '.join(missing)}", file=sys.stderr)
    runs = [run for part in parts for run in part.runs]
    if "recipe" not in runs[0]["cell"]:
        for connection, of in means_of(runs).items():
            means = ", ".join(f"{mean:.2f} % at {rate:g}" for rate, mean in of.items())
            print(f"{connection}: {choose(of, NEARLY):g} is chosen ({means})")
        return int(bool(missing))
    first = min(folders[0].glob("*/run.yaml")).parent
    options = RunPlan.read(first).stages[0].options
    recipes = by_recipe(runs, linear_floor.floor(first)["best"],
                        smoothing_floor(options["smoothing"], options["num_classes"]))
    print("\n".join(lines(recipes)))
    return int(bool(missing or not accepted(recipes)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.checks.rates", description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="output folder of timm-ortho study run")
    sys.exit(main(parser.parse_args().folders))
