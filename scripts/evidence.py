"""Recompute the decision of every tested hypothesis from the published results.

    python -m scripts.evidence            write everything that is listed below
    python -m scripts.evidence --check    write nothing; print what differs; exit status 1

`model_cards/results` contains an archive for each published study: its runs, with their accuracy after
each epoch. This script computes from the archives:

* `model_cards/decisions.csv`: a row for each hypothesis, with its difference, interval, p and decision
* the table and the notes of docs/evidence.md, and README's table of gains
* `model_cards/results/curves.svg`: training loss by step and accuracy by epoch of C1 and C2
* `model_cards/results/SHA256SUMS`: checksums of the archives, so that `--check` names a changed file

A new hypothesis is a row of `HYPOTHESES`; a new family of hypotheses is also an entry of `RULES`. A
hypothesis whose archive is missing is not run. F is Orthogonal-F (`feature`), which is compared with
plain addition (`linear`).
"""
import argparse
import hashlib
import math
import sys
from difflib import unified_diff
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import numpy as np
from scipy import stats

from scripts.pages.marked import replaced, span, table
from timm_ortho._text import csv_text, svg_text
from timm_ortho.lab.paper import section
from timm_ortho.lab.reporting.layout import grouped
from timm_ortho.lab.reporting.plots import Scene, lines_chart, progress
from timm_ortho.lab.reporting.published import STUDY, read
from timm_ortho.lab.reporting.report import layout_of
from timm_ortho.lab.reporting.statistics import (
    Difference,
    detected,
    holm,
    of_test,
    paired_difference,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "model_cards" / "results"

Run = Mapping[str, Any]
# A setting is the values of a study's axes and, at the end, the connection.
Weights = Mapping[tuple, float]  # setting -> weight
Contrast = Mapping[str, Weights]  # archive -> weights of its settings


# ------------------------------------------------------------------------------- reading archives
@cache
def archive(name: str) -> tuple[Mapping[str, Any], Sequence[Run]]:
    """Return the study and the runs of an archive."""
    study, runs, _ = read(RESULTS / "studies" / name)
    return study, runs


def is_published(name: str) -> bool:
    return (RESULTS / "studies" / name / STUDY).is_file()


def planned(study: Mapping[str, Any]) -> int:
    """Return the number of runs that a study with a full grid has."""
    cells = math.prod(map(len, study["axes"].values()))
    return cells * len(study["connections"]) * len(study["seeds"])


def setting(run: Run) -> tuple:
    return (*run["cell"].values(), run["connection"])


def arm(run: Run) -> tuple:
    """Return the arm of a run of the fine-tuning studies, whose pretraining depends on the seed."""
    return (run["cell"]["arm"],)


def top1(run: Run) -> float:
    return run["top1"]


def train_loss(run: Run) -> float:
    return run["history"][-1]["train_loss"]


def late_cosine(run: Run) -> float:
    """Return the mean cosine of x and f over the MLPs of the last two blocks in the last epoch."""
    rows = [row for row in run["dynamics"] if row["kind"] == "mlp"]
    last = max(row["layer"] for row in rows)
    step = max(row["step"] for row in rows) * (1 - 1 / run["epochs"])
    return fmean(row["cosine"] for row in rows if row["layer"] >= last - 1 and row["step"] > step)


# ------------------------------------------------------------------------------------- contrasts
def lead(*cell: Any) -> Weights:
    """Return the weights of F − linear in one cell."""
    return {(*cell, "feature"): 1.0, (*cell, "linear"): -1.0}


def slope(x: Sequence[float], settings: Sequence[Weights]) -> Weights:
    """Return the weights of a least-squares slope over x: (x_i - mean) / sum (x - mean)^2."""
    centred = np.array(x) - np.mean(x)
    shares = centred / (centred**2).sum()
    pairs = zip(shares, settings, strict=True)
    return {key: float(share) * weight for share, of in pairs for key, weight in of.items()}


def rate_slope(rates: Sequence[float]) -> Weights:
    """Return the weights of the slope of F − linear, in points for a tenfold learning rate."""
    return slope([math.log10(rate) for rate in rates], [lead(rate) for rate in rates])


def interaction(one: Weights, other: Weights) -> Weights:
    return {**one, **{key: -weight for key, weight in other.items()}}


def ahead(arm: str) -> Weights:
    """Return the weights of one arm minus the arm `linear`."""
    return {(arm,): 1.0, ("linear",): -1.0}


def pool(mixer: str) -> Weights:
    """Return the weights of F − linear in PoolFormer with one mixer."""
    return {(mixer, "both", "feature"): 1.0, (mixer, "nowhere", "linear"): -1.0}


def transforms(*skips: str) -> Weights:
    """Return the weights of the mean over transforms of the stream, minus the identity."""
    mean = {(20, skip, "linear"): 1.0 / len(skips) for skip in skips}
    return {(20, "identity", "linear"): -1.0, **mean}


FACTORS = "cifar_factors-cifar10-small"
FINE_TUNING, FINE_TUNING_IMAGENET = "fine_tuning-cifar10-small", "fine_tuning_imagenet-cifar10-small"
RESNET = "confirm_resnet-torch_fashion_mnist-small"
POOL = "confirm_poolformer-torch_fashion_mnist-small"
# The two cells of the axis `update` are the connections, each with its own learning rate.
UPDATE = {("feature", "feature"): 1.0, ("linear", "linear"): -1.0}
RATES, RATES_FASHION = (5e-4, 7e-4, 1e-3, 2e-3, 5e-3), (1e-3, 2e-3, 4e-3, 8e-3)
RANKS = (0.0, 0.0625, 0.25, 0.5, 0.75, 1.0)
SWITCH = {("OL", "linear"): 0.5, ("OO", "feature"): 0.5, ("LO", "feature"): -0.5, ("LL", "linear"): -0.5}
THREE = ("idempotent_cmr", "orthogonal_tp", "orthogonal_random")


# ------------------------------------------------------------------------------------- hypotheses
class Hypothesis(NamedTuple):
    """A hypothesis about a weighted sum of a metric over settings, computed for each seed.

    The first letter of `id` is the family in which Holm's method adjusts p. Family P is exploratory:
    its p is not adjusted, and its claim is "different" or "equal".
    """

    id: str
    hypothesis: str
    data: str
    model: str
    contrast: Contrast  # several archives are averaged
    paper: Sequence[float] = ()  # the paper's effect, or the lowest and the highest
    claim: str = "above"  # the mean is above zero
    equivalent: float = 0.0  # bound of the test of equivalence in points; 0: no such test
    of_interest: float = 0.0  # the smallest mean of interest in points
    levels: Sequence[str] = ()  # of a stopped study: the lead of F at the first level minus that at the second
    minus: Optional[Contrast] = None  # other runs, not paired with the runs of `contrast`
    metric: Callable[[Run], float] = top1
    setting: Callable[[Run], tuple] = setting  # the key of a run in the weights of `contrast`


VIT = "ViT, width 128"
MORE, SWEEP = "F is more accurate than linear", "F − linear grows with the learning rate, points for a tenfold rate"
HYPOTHESES = [
    Hypothesis("C1", MORE, "CIFAR-10", VIT, {"cifar_accuracy-cifar10-small": UPDATE}, (0.79,),
               equivalent=0.4),
    Hypothesis("C2", MORE, "Tiny ImageNet", VIT,
               {"tiny_imagenet_accuracy-tiny_imagenet-small": UPDATE}, (1.27,), equivalent=0.4),
    Hypothesis("C3", "F's lead is larger at four times the best learning rate than at the best rate",
               "CIFAR-10", "16 ViTs", {FACTORS: {}}, levels=("r4", "r1")),
    Hypothesis("C4", "F's lead is larger at width 128 than at width 64", "CIFAR-10", "16 ViTs",
               {FACTORS: {}}, levels=("w128", "w64")),
    Hypothesis("D1", MORE, "CIFAR-10", "the paper's ViT-S",
               {"cifar_vit_small-cifar10-small": lead("vit_s")}, (0.79,)),
    Hypothesis("D2", MORE, "CIFAR-10", "the paper's ResNetV2-18",
               {"cifar_resnet18-cifar10-small": lead("resnetv2_18")}, (0.20,)),
    Hypothesis("F1", "fine-tuned from linear weights, hybrid (start linear) is more accurate than linear",
               "CIFAR-10", VIT, {FINE_TUNING: ahead("hybrid")}, setting=arm),
    Hypothesis("F2", "fine-tuned from linear weights, F is more accurate than linear", "CIFAR-10", VIT,
               {FINE_TUNING: ahead("feature")}, setting=arm),
    # the arm on F's weights that `fine_tuning_rates` finds to be the better one
    Hypothesis("F3", "fine-tuning from F's weights is more accurate than linear on linear weights", "CIFAR-10", VIT,
               {FINE_TUNING: ahead("feature_on_feature")}, setting=arm),
    Hypothesis("F4", "fine-tuned from ImageNet's linear weights, F is more accurate than linear", "CIFAR-10",
               "EfficientNet-Lite0", {FINE_TUNING_IMAGENET: ahead("feature")}, setting=arm),
    Hypothesis("F5", "fine-tuned from ImageNet's linear weights, hybrid (start linear) is more accurate than linear",
               "CIFAR-10", "EfficientNet-Lite0", {FINE_TUNING_IMAGENET: ahead("hybrid")}, setting=arm),
    Hypothesis("H1", MORE, "Fashion-MNIST", "ViT, width 64",
               {"confirm_accuracy-torch_fashion_mnist-small": lead()}, (0.79, 1.94), equivalent=0.2, of_interest=0.3),
    Hypothesis("H2", SWEEP, "digits", "ViT, width 64",
               {"confirm_learning_rate-digits-small": rate_slope(RATES)}, (6.11, 6.14)),
    Hypothesis("H3", "F loses less accuracy if the mixer is pool(x) instead of pool(x) - x", "Fashion-MNIST",
               "PoolFormer", {POOL: interaction(pool("pool(x)"), pool("pool(x) - x"))}, of_interest=3.0),
    Hypothesis("H4", "transforms of the stream raise accuracy in networks with several branches", "digits",
               "Wang et al.'s networks",
               {"confirm_skips_branch4-digits-small": transforms(*THREE, "idempotent_mr"),
                "confirm_skips_depthwise-digits-small": transforms(*THREE)}, (0.95, 1.39)),
    Hypothesis("H5", "orthogonal connections in the first of two training stages raise the final accuracy",
               "Fashion-MNIST", "ViT, width 64", {"confirm_switch-torch_fashion_mnist-small": SWITCH}, (1.16, 1.54)),
    Hypothesis("P1b", "the ViT of H1 gains more from F than a ResNet", "Fashion-MNIST", "narrow ResNetV2-18",
               {"confirm_accuracy-torch_fashion_mnist-small": lead()}, claim="different", minus={RESNET: lead()}),
    Hypothesis("P2b", SWEEP, "Fashion-MNIST", "ViT, width 64",
               {"confirm_learning_rate_fashion-torch_fashion_mnist-small": rate_slope(RATES_FASHION)}, (6.11, 6.14),
               claim="different"),
    Hypothesis("P4 single", "with one branch, transforms of the stream are as accurate as the identity", "digits",
               "Wang et al.'s networks", {"confirm_skips_single-digits-small": transforms(*THREE)}, claim="equal",
               equivalent=0.5),
    Hypothesis("P4 rank", "accuracy rises with the rank of the transform, points for a rank / width from 0 to 1",
               "digits", "Wang et al.'s networks",
               {"confirm_skip_rank-digits-small": slope(RANKS, [{(rank, "linear"): 1.0} for rank in RANKS])},
               claim="different"),
    Hypothesis("P6", "with linear, the mean cosine of stream and MLP output in the last two blocks is not 0",
               "Fashion-MNIST", "ViT, width 64", {"confirm_accuracy-torch_fashion_mnist-small": {("linear",): 1.0}},
               claim="different", metric=late_cosine),
]
RULES = {  # family -> commit that added its rules, before the runs that test it
    "C": "3449521fab04114a1009b4a5bb45f80eadf115d5", "D": "56aff2cb625df06df3aeebcb93d480def63ee983",
    "F": "4e04b2ee68c70b6f42188110ddff3a2548dbf35e",
    **dict.fromkeys("HP", "9cfb7979d977a6280ba38ef9f75e3c4bca5dd67a")}


# --------------------------------------------------------------------------------------- decisions
def by_seed(contrast: Contrast, metric: Callable[[Run], float] = top1,
            setting: Callable[[Run], tuple] = setting) -> list[float]:
    """Return the weighted sum for each seed that has runs of all settings in all archives."""
    sums = []
    for name, weights in contrast.items():
        values = {(run["seed"], setting(run)): metric(run) for run in archive(name)[1] if setting(run) in weights}
        sums.append({seed: sum(weight * values[seed, key] for key, weight in weights.items())
                     for seed in dict.fromkeys(seed for seed, _ in values)
                     if all((seed, key) in values for key in weights)})
    return [fmean(of[seed] for of in sums) for seed in sums[0] if all(seed in of for of in sums)]


def mean(values: Sequence[float], level: float = 0.95) -> Difference:
    """Return the mean with Student's interval."""
    return paired_difference(values, [0.0] * len(values), level)


def measured(contrast: Contrast) -> Difference:
    return mean(by_seed(contrast))


def welch(one: Sequence[float], other: Sequence[float], level: float) -> Difference:
    """Return the difference of two means with Welch's interval: the groups may differ in variance."""
    test = stats.ttest_ind(one, other, equal_var=False)
    return of_test(test, fmean(one) - fmean(other), min(len(one), len(other)), level)


def stopped(one: Hypothesis) -> Difference:
    """Return the mean over the finished pairs of a stopped study, which have one seed, without an interval.

    The names of the cells list the levels of their factors.
    """
    runs = archive(*one.contrast)[1]
    top1_of = {(run["cell"]["cell"], run["connection"]): run["top1"] for run in runs}
    leads = {cell: top1_of[cell, "feature"] - top1_of[cell, "linear"] for cell, _ in top1_of}
    high, low = ([lead for cell, lead in leads.items() if level in cell.split("-")] for level in one.levels)
    return Difference(fmean(high) - fmean(low), None, len(leads))


def measure(one: Hypothesis, level: float = 0.95) -> Optional[Difference]:
    """Return the difference of a hypothesis, or None if it was not run."""
    if not all(map(is_published, one.contrast)):
        return None
    if one.levels:
        return stopped(one)
    values = by_seed(one.contrast, one.metric, one.setting)
    return welch(values, by_seed(one.minus, one.metric), level) if one.minus else mean(values, level)


def decision(one: Hypothesis, difference: Optional[Difference], p: Optional[float]) -> str:
    """Return the decision in words. p is adjusted by Holm's method within the family."""
    if difference is None:
        return "not run"
    if one.levels:
        study, runs = archive(*one.contrast)
        return f"stopped after {len(runs)} of {planned(study)} runs, undecided"
    if one.claim == "different" and detected(p):
        return "above zero" if difference.mean > 0 else "below zero"
    if one.claim == "above" and detected(p) and difference.mean > 0:
        small = difference.mean < one.of_interest
        limit = f", but the mean is below {one.of_interest:g} points, the smallest difference of interest"
        return "confirmed" + limit * small
    if one.equivalent and max(map(abs, measure(one, 0.9).ends)) <= one.equivalent:
        return f"equivalent within {one.equivalent:g}"
    return "contradicted" if detected(p) else "not confirmed"


def decisions() -> list[dict[str, str]]:
    """Return the rows of `decisions.csv`."""
    rows = []
    for family, members in grouped(HYPOTHESES, lambda one: one.id[0]).items():
        differences = [measure(one) for one in members]
        p = [difference and difference.p for difference in differences]  # None counts as p = 1
        adjusted = p if family == "P" else holm(p)
        rows += map(row_of, members, differences, adjusted)
    return rows


def row_of(one: Hypothesis, difference: Optional[Difference], p: Optional[float]) -> dict[str, str]:
    low, high = difference.ends if difference else (math.inf, math.inf)
    number = "{:+.4f}".format
    return {
        "id": one.id, "hypothesis": one.hypothesis, "data": one.data, "model": one.model,
        "pairs": str(difference.pairs) if difference else "",
        "difference": number(difference.mean) if difference else "",
        "low": number(low) if math.isfinite(low) else "",
        "high": number(high) if math.isfinite(high) else "",
        "p_holm": "" if p is None else f"{p:.2g}",
        "decision": decision(one, difference, p),
        "paper": span(one.paper, "{:+.2f}") if one.paper else "",
        "rule": RULES[one.id[0]][:8],
    }


# -------------------------------------------------------------------------------- tables and notes
def decisions_table() -> str:
    """Return the table of docs/evidence.md."""
    header = ["", "hypothesis", "data", "model", "pairs", "difference [95 %]", "p (Holm)", "decision", "in the paper"]
    lines = []
    for one, row in zip(HYPOTHESES, decisions(), strict=True):
        difference = measure(one)
        text = difference.text(2 if one.metric is top1 else 3) if difference else ""
        p = f"{'not adjusted: ' * (one.id[0] == 'P')}{row['p_holm']}"
        cells = [*map(row.get, ("id", "hypothesis", "data", "model", "pairs")), text, p, row["decision"], row["paper"]]
        lines.append([cell or "–" for cell in cells])
    return table(header, lines)


def gains_table() -> str:
    """Return README's table: F − linear in our runs and in the paper, for each network and data set."""
    of = {one.id: one for one in HYPOTHESES}
    accuracy = section("accuracy")

    def lead_in_paper(model: str, data: str) -> float:
        return accuracy[model][data]["feature"][0] - accuracy[model][data]["linear"][0]

    resnets = [lead_in_paper(model, data) for model, by_data in accuracy.items() if model.startswith("resnetv2_")
               for data in by_data if not data.endswith("_first_version")]
    vits = [(of["C2"], lead_in_paper("vit_s", "tiny_imagenet")), (of["C1"], lead_in_paper("vit_s", "cifar10")),
            (of["H1"], None)]
    rows = [(f"{one.model}, {one.data}", measure(one), f"{paper:+.2f} (ViT-S)" if paper else "")
            for one, paper in vits]
    rows += [
        ("narrow ResNetV2-18, Fashion-MNIST", measured({RESNET: lead()}),
         f"{span(resnets, '{:+.2f}')} (all ResNetV2s)"),
        ("PoolFormer, Fashion-MNIST", measured({POOL: pool("pool(x) - x")}), ""),
        ("ViT-B, ImageNet-1k", None, f"{lead_in_paper('vit_b', 'imagenet1k'):+.2f}"),
    ]
    lines = [(name, f"{found.text()}, {found.pairs} pairs" if found else "not run", paper or "–")
             for name, found, paper in rows]
    return table(("network, data", "F − linear, our runs", "in the paper"), lines)


def notes() -> str:
    """Return what docs/evidence.md reports beside the table of hypotheses, as a list in Markdown."""
    of = {one.id: one for one in HYPOTHESES}
    vits = [of[name] for name in ("C1", "C2", "H1")]
    runs = [run for one in vits for run in archive(next(iter(one.contrast)))[1]]
    sizes = span([run["parameters"] / 1e6 for run in runs], "{:.1f}")
    losses = [value for one in vits for value in by_seed(one.contrast, train_loss)]
    below = [measured({name: rate_slope(rates[:-1])}).text()
             for one, rates in ((of["H2"], RATES), (of["P2b"], RATES_FASHION)) for name in one.contrast]
    return (
        f"- The networks of C1, C2 and H1 have {sizes} million parameters. The final training loss of F is lower in "
        f"{sum(value < 0 for value in losses)} of their {len(losses)} pairs.\n"
        f"- Without the highest rate, the slopes of H2 and P2b are {below[0]} and {below[1]}: F loses less than linear "
        "at a rate that is far too high.")


# --------------------------------------------------------------------------------- files and check
def checksums() -> str:
    """Return the SHA-256 of each file of an archive, as `sha256sum` prints it."""
    files = sorted(path for path in RESULTS.glob("*/*/*") if path.is_file())
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(RESULTS).as_posix()}\n"
                   for path in files)


def texts(root: Path) -> dict[Path, str]:
    """Return the text of each generated file."""
    page, front = root / "docs" / "evidence.md", root / "README.md"
    script = "scripts.evidence"
    return {
        root / "model_cards" / "results" / "SHA256SUMS": checksums(),
        root / "model_cards" / "decisions.csv": csv_text(decisions()),
        page: replaced(page, {"decisions": decisions_table(), "notes": notes()}, script),
        front: replaced(front, {"gains": gains_table()}, script),
    }


def curves() -> str:
    """Draw training loss by step and accuracy by epoch of C1 and C2, as in the paper's Figure 2."""
    panels = []
    for one in HYPOTHESES[:2]:
        study, runs = archive(next(iter(one.contrast)))
        runs = [{**run, "batch_size": 128} for run in runs]
        panels += progress(Scene(runs, layout_of(study), {}), runs, lambda run: run["connection"], one.data)
    return svg_text(lines_chart(panels), "curves")


def differing(path: Path, text: str) -> list[str]:
    """Return the differing lines of a file (`-`) and of its text (`+`), below their numbers."""
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [*unified_diff(before.splitlines(), text.splitlines(), n=0, lineterm="")][2:]


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.evidence", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file differs")
    check = parser.parse_args(arguments).check
    found = [f"{path.relative_to(root).as_posix()}: {line}"
             for path, text in texts(root).items() for line in differing(path, text)]
    if check:
        for line in found:
            print(line)
        return int(bool(found))
    for path, text in texts(root).items():
        path.write_text(text, encoding="utf-8")
    (root / "model_cards" / "results" / "curves.svg").write_text(curves(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
