"""Define the comparisons that decide the hypotheses of docs/hypotheses.md, and the exploratory comparisons."""
import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Callable, Mapping, Optional, Sequence, Union

from timm_ortho.lab.paper import name, section
from timm_ortho.lab.reporting.statistics import detected

from .contrasts import (
    BRANCH4,
    FACTORS,
    OTHERS,
    Comparison,
    Contrast,
    Effect,
    Unpaired,
    Weights,
    after,
    apart,
    at_epoch,
    difference,
    last,
    late_cosine,
    placed,
    rates_slope,
    slope,
    summary_of,
    switch,
)

DIGITS, FASHION, CIFAR, TINY = "digits", "torch_fashion_mnist", "cifar10", "tiny_imagenet"
NAMES = {DIGITS: "digits", FASHION: "Fashion-MNIST", CIFAR: "CIFAR-10", TINY: "Tiny ImageNet"}
RATES, RATES_FASHION = (5e-4, 7e-4, 1e-3, 2e-3, 5e-3), (1e-3, 2e-3, 4e-3, 8e-3)
RANKS = (0.0, 0.0625, 0.25, 0.5, 0.75, 1.0)
KINDS_OF_START = ("orthogonal", "xavier", "kaiming")
# Weights of Orthogonal-F − linear. Each value of the axis `update` sets a connection and its learning rate.
UPDATES = {("feature", "feature"): 1.0, ("linear", "linear"): -1.0}


# ---------------------------------------------------------------------------------------- the paper's effects
def of_paper(table: str, effect: Callable[[Mapping[str, Any]], float], *path: str) -> dict[str, float]:
    """Return an effect in a table of the paper, in points, for each data set of the table.

    Args:
        table: The section of paper.json.
        effect: Computes the effect from the entry of a data set.
        path: Keys from the section to the entries of the data sets.
    """
    effects, entries = {}, section(table)
    for step in path:
        entries = entries[step]
    for key, values in entries.items():
        if isinstance(values, dict) and not key.endswith("_first_version"):  # skip the paper's first version
            try:
                effects[name("dataset", key)] = effect(values)
            except KeyError:  # the paper did not run one of the connections on this data set
                continue
    return effects


def minus(of: str, base: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda values: values[of][0] - values[base][0]


def rank_slope(ranks: Sequence[float]) -> Weights:
    """Return the weights of the slope of linear's accuracy over rank / width, in points per unit."""
    return slope(ranks, lambda index: {(ranks[index], "linear"): 1.0})


def of_switch(first: float, last: float) -> Callable[[Mapping[str, Any]], float]:
    weights = switch(first, last)
    return lambda values: sum(weight * values[pair][0] for (pair, _), weight in weights.items())


def of_rates(values: Mapping[str, Any]) -> float:
    weights = rates_slope(list(values["linear"]))
    return sum(weight * values[connection][rate][0] for (rate, connection), weight in weights.items())


def of_skips(table: str, weights: Weights) -> dict[str, float]:
    by_skip = section(table)["20"]
    return {name("dataset", data): sum(weight * by_skip[skip][data][0] for (_, skip, _), weight in weights.items())
            for data in by_skip["identity"]}


def _mean(*effects: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of several effects, for each data set that all of them have."""
    return {data: fmean(effect[data] for effect in effects) for data in effects[0] if all(data in e for e in effects)}


RESNETS = ("resnetv2_18", "resnetv2_34", "resnetv2_50", "resnetv2_101")
GAINS = {model: of_paper("accuracy", minus("feature", "linear"), model) for model in ("vit_s", *RESNETS)}


def _only(data: str, model: str = "vit_s") -> dict[str, float]:
    return {data: GAINS[model][data]}


# ------------------------------------------------------------------------------------------- the decisions
@dataclass(frozen=True)
class Hypothesis:
    """A preregistered hypothesis and the comparison that decides it."""

    name: str
    statement: str
    contrast: Comparison
    claims: str = "above"  # the claimed difference: "above" zero, "equal" to zero, or "different" from zero
    equivalent: Optional[float] = None  # bound of the equivalence test in points, or None without this test
    of_interest: float = 0.0  # the smallest difference of interest in points, from hypotheses.md
    pending: str = "unfinished"  # the decision before the runs are published

    @property
    def is_run(self) -> bool:
        return self.contrast.is_run

    def decision(self, p: Optional[float]) -> str:
        """Return the decision in words.

        Args:
            p: The adjusted p of the difference, or None if the differences of the seeds have no variance.
        """
        if not self.is_run:
            return self.pending
        mean, significant = self.contrast.difference.mean, detected(p)
        if self.claims == "different" and significant:
            return "above zero" if mean > 0 else "below zero"
        if self.claims == "above" and significant:
            return "confirmed" if mean > 0 else "contradicted"
        if self.equivalent and self.contrast.within(self.equivalent):
            return f"equivalent within {self.equivalent}"
        return "contradicted" if significant else "not confirmed"

    def remark(self, decision: str) -> str:
        """Return a qualification of the decision, or an empty string."""
        small = decision == "confirmed" and self.contrast.difference.mean < self.of_interest
        remark = f"but the mean is below {self.of_interest:g} points, the smallest difference of interest"
        return remark if small else ""


def _hypothesis(name: str, statement: str, study: str, weights: Weights, claims: str = "above",
                equivalent: Optional[float] = None, of_interest: float = 0.0, **more: Any) -> Hypothesis:
    contrast = Contrast(f"{name}: {statement}", [(f"{study}-small", weights)], **more)
    return Hypothesis(name, statement, contrast, claims, equivalent, of_interest)


def _effect(name: str, statement: str, factor: str) -> Hypothesis:
    return Hypothesis(name, statement, Effect(f"{name}: {statement}", f"cifar_factors-{CIFAR}-small", factor))


PART_THREE = tuple(replace(one, pending="not run: no GPU") for one in (
    _hypothesis("D1", "F is more accurate than linear (the paper's ViT-S, CIFAR-10)", f"cifar_vit_small-{CIFAR}",
                difference("vit_s"), paper=_only("CIFAR-10")),
    _hypothesis("D2", "F is more accurate than linear (the paper's ResNetV2-18, CIFAR-10)", f"cifar_resnet18-{CIFAR}",
                UPDATES, paper=_only("CIFAR-10", "resnetv2_18")),
))
H4 = "transforms of the stream raise accuracy in networks with several branches"
PART_TWO = (
    _hypothesis("C1", "F is more accurate than linear (ViT, CIFAR-10)", f"cifar_accuracy-{CIFAR}", UPDATES,
                equivalent=0.4, paper=_only("CIFAR-10")),
    _hypothesis("C2", "F is more accurate than linear (ViT, Tiny ImageNet)", f"tiny_imagenet_accuracy-{TINY}", UPDATES,
                equivalent=0.4, paper=_only("Tiny ImageNet")),
    _effect("C3", "F's lead over linear is larger at four times the best learning rate than at the best rate", "rate"),
    _effect("C4", "F's lead over linear is larger at width 128 than at width 64", "width"),
)
PART_ONE = (
    _hypothesis("H1", "F is more accurate than linear (ViT, Fashion-MNIST)", f"confirm_accuracy-{FASHION}",
                difference(), equivalent=0.2, of_interest=0.3, paper=GAINS["vit_s"]),
    _hypothesis("H2", "F − linear grows with the learning rate (points per tenfold rate, digits)",
                f"confirm_learning_rate-{DIGITS}", rates_slope(RATES), bases="linear",
                paper=of_paper("learning_rate_sweep", of_rates)),
    _hypothesis("H3", "PoolFormer loses less accuracy with F if its mixer is pool(x) instead of pool(x) - x",
                f"confirm_poolformer-{FASHION}", apart(placed("pool(x)", "both"), placed("pool(x) - x", "both")),
                of_interest=3.0),
    Hypothesis("H4", H4, Contrast(
        f"H4: {H4}",
        [(f"confirm_skips_branch4-{DIGITS}-small", BRANCH4), (f"confirm_skips_depthwise-{DIGITS}-small", OTHERS)],
        paper=_mean(of_skips("skips_branch4", BRANCH4), of_skips("skips_depthwise", OTHERS)))),
    _hypothesis("H5", "orthogonal connections in the first of two training stages raise the final accuracy",
                f"confirm_switch-{FASHION}", switch(1, 0),
                paper=of_paper("connection_switch_reinitialised", of_switch(1, 0))),
)
RESNET = Contrast("ResNetV2-18: F − linear, Fashion-MNIST, the runs of P1b",
                  [(f"confirm_resnet-{FASHION}-small", difference())], paper=GAINS["resnetv2_18"])
BESIDE = (  # outside the three families of hypotheses: their p is not adjusted, and they cannot be "confirmed"
    Hypothesis("P1b", "the ViT of H1 gains more from F than a ResNet (Fashion-MNIST)",
               Unpaired("P1b: the ViT gains more from F than the ResNet", PART_ONE[0].contrast, RESNET), "different"),
    _hypothesis("P2b", "H2's comparison on Fashion-MNIST (points per tenfold rate)",
                f"confirm_learning_rate_fashion-{FASHION}", rates_slope(RATES_FASHION), "different", bases="linear",
                paper=of_paper("learning_rate_sweep", of_rates)),
    _hypothesis("P4 single", "networks with one branch: transforms of the stream are as accurate as the identity",
                f"confirm_skips_single-{DIGITS}", OTHERS, "equal", 0.5),
    _hypothesis("P4 rank", "accuracy rises with the rank of the transform (points, if rank / width rises from 0 to 1)",
                f"confirm_skip_rank-{DIGITS}", rank_slope(RANKS), "different"),
    _hypothesis("P6", "linear: mean cosine of stream and MLP output in the last two blocks (below zero in the paper)",
                f"confirm_accuracy-{FASHION}", {("linear",): 1.0}, "different", read=late_cosine, unit="cosine"),
)


def decided(hypotheses: Sequence[Hypothesis], adjust: Callable[[Sequence[float]], Sequence[float]]) -> list[dict]:
    """Return the decision, the remark and the adjusted p of each hypothesis.

    Args:
        hypotheses: A family of hypotheses. A hypothesis without runs has p = 1.
        adjust: Adjusts the p values of the family, for example by Holm's method.
    """
    p = adjust([one.contrast.difference.p if one.is_run else 1.0 for one in hypotheses])
    decisions = [one.decision(value) for one, value in zip(hypotheses, p, strict=True)]
    return [{"hypothesis": one, "decision": decision, "remark": one.remark(decision), "p": value}
            for one, decision, value in zip(hypotheses, decisions, p, strict=True)]


# ---------------------------------------------------------------------------------- exploratory comparisons
def _both(study: str, label: str, weights: Weights, **more: Any) -> list[Comparison]:
    """Return the comparison on each data set that the study has been run on."""
    return _run([Contrast(f"{label}, {NAMES[data]}", [(f"{study}-{data}-small", weights)], **more)
                 for data in (DIGITS, FASHION)])


def _run(comparisons: Sequence[Comparison]) -> list[Comparison]:
    return [comparison for comparison in comparisons if comparison.is_run]


def course(label: str, comparison: Union[Contrast, Effect]) -> list[Comparison]:
    """Return a comparison in final training loss, in final test loss, and in accuracy after a quarter of the epochs,
    rounded down.

    Args:
        label: Beginning of the labels, for example "F − linear".
        comparison: A `Contrast` or `Effect` in final accuracy.
    """
    epochs = {len(run["history"]) for run in comparison.runs}
    quarter = f"{max(1, min(epochs) // 4)} of {min(epochs)}" if len(epochs) == 1 else "a quarter of the"
    return [replace(comparison, label=f"{label} in {metric}", read=read, unit=unit, paper={})
            for metric, read, unit in (
        ("final training loss", last("train_loss"), "nats"), ("final test loss", last("eval_loss"), "nats"),
        (f"accuracy after {quarter} epochs", after(0.25), "points"))]


def by_epochs(contrast: Contrast) -> dict[int, Contrast]:
    """Return the difference in accuracy after each epoch."""
    epochs = min(len(run["history"]) for run in contrast.runs)
    return {epoch: replace(contrast, read=at_epoch(epoch), paper={}) for epoch in range(1, epochs + 1)}


def explored() -> dict[str, list[Comparison]]:
    """Return the exploratory comparisons for each table or figure of the papers."""
    pattern, norm, start, rank = (
        section(table) for table in ("layer_pattern", "final_layer_norm", "initialisation", "representation"))
    width = f"cifar_width-{CIFAR}-small"
    of_width = [
        *(Contrast(f"ViT of width {wide}: F − linear, CIFAR-10", [(width, difference(wide))]) for wide in (128, 384)),
        Contrast("ViT: (F − linear at width 384) − (F − linear at width 128), CIFAR-10",
                 [(width, apart(difference(384), difference(128)))])]
    of_factors = [Effect(f"F − linear with {factor} {high} minus F − linear with {factor} {low}",
                         f"cifar_factors-{CIFAR}-small", factor) for factor, (low, high) in FACTORS.items()]
    decided_effects = [effect for effect in of_factors if effect.factor in ("rate", "width")]  # C3 and C4
    return {
        "Table 2, ViT-S": [
            *_both("accuracy", "ViT: F − linear", difference("vit_s"), paper=GAINS["vit_s"]),
            *(one for hypothesis in (PART_ONE[0], *PART_TWO[:2]) if hypothesis.is_run
              for one in course(f"{hypothesis.name}'s runs: F − linear", hypothesis.contrast))],
        "Table 2, ResNetV2": [
            *_both("accuracy", "ResNetV2-18: F − linear", difference("resnetv2_18"), paper=GAINS["resnetv2_18"]),
            *_run([RESNET])],
        "Width and depth (gamma)": [
            one for comparison in _run([*of_width, *of_factors]) for one in (
                *([] if comparison in decided_effects else [comparison]), *course(comparison.label, comparison))],
        "Table 3": _both("switch_reinitialised", "first of two training stages: orthogonal − linear", switch(1, 0),
                         paper=of_paper("connection_switch_reinitialised", of_switch(1, 0))),
        "Table 10": _both("switch_kept", "(first orthogonal, then linear) − always linear",
                          {("OL", "linear"): 1.0, ("LL", "linear"): -1.0},
                          paper=of_paper("connection_switch_continuous", minus("OL", "LL"))),
        "Table 4": _both("layer_pattern", "F in all blocks − F in no block",
                         {("all", "feature"): 1.0, ("none", "linear"): -1.0},
                         paper={"": pattern["all"][0] - pattern["none"][0]}),
        "Table 7": _both("initialisation", "G − linear, mean over three weight initialisations",
                         {(kind, which): weight / 3 for kind in KINDS_OF_START
                          for which, weight in (("global", 1.0), ("linear", -1.0))},
                         paper={"": fmean(start[kind]["global"][0] - start[kind]["linear"][0]
                                          for kind in KINDS_OF_START)}),
        "Table 9": _both("head_norm", "F − linear without a final LayerNorm", difference("without"),
                         paper={"": norm["without"]["feature"][0] - norm["without"]["linear"][0]}),
        "Table 3 (final version)": [
            *_both("learning_rate", "slope of F − linear, in points per tenfold rate", rates_slope(RATES),
                   bases="linear", paper=of_paper("learning_rate_sweep", of_rates)),
            *(Contrast(f"{which}'s slope without the highest rate, {NAMES[data]}",
                       [(f"{study}-{data}-small", rates_slope(rates[:-1]))], bases="linear",
                       paper=of_paper("learning_rate_sweep", of_rates))
              for which, study, data, rates in RATE_STUDIES)],
        "Figure 4": _both("probability", "accuracy at pi = 1 minus accuracy at pi = 0",
                          {(1.0, "feature"): 1.0, (0.0, "linear"): -1.0}),
        "Figure 5": _both("epsilon", "accuracy at eps = 1e-3 minus accuracy at eps = 1e-8",
                          {(1e-3, "feature"): 1.0, (1e-8, "feature"): -1.0}),
        "Table 4 (final version)": _both(
            "representation", "effective rank of the features, F relative to linear", difference(),
            # logarithms compare ratios: ranks grow with the width, and the paper's networks are wider
            read=lambda run: 100 * math.log(run["representation"]["effective_rank"]), unit="log-%",
            paper={"": 100 * math.log(rank["feature"]["effective_rank"][0] / rank["linear"]["effective_rank"][0])}),
        "Wang et al., Table 2": _both("skips_branch4", "four branches: transforms of the stream − identity", BRANCH4,
                                      paper=of_skips("skips_branch4", BRANCH4)),
        "Wang et al., Table 3": _both("skips_depthwise", "depthwise convolutions: transforms of the stream − identity",
                                      OTHERS, paper=of_skips("skips_depthwise", OTHERS)),
        "-": [contrast for family in ("swin", "convnext", "eva02", "mixer", "poolformer", "maxvit", "resnet")
              for contrast in _both("families", f"{family}: F − linear", difference(family))],
    }


RATE_STUDIES = (("H2", "confirm_learning_rate", DIGITS, RATES),
                ("P2b", "confirm_learning_rate_fashion", FASHION, RATES_FASHION))
ELSEWHERE = {
    "Table 1a": "counts of parameters and FLOPs: [report](../model_cards/studies/study_parameters-small.md)",
    "Table 1b": "throughput: [report](../model_cards/studies/study_overhead-small.md)",
    "Table 11": "widths and depths of the architectures: [report](../model_cards/studies/study_gamma-small.md)",
    "Figures 3, 10, 11 and 12": "digits and Fashion-MNIST: see *Results beyond accuracy* below",
    "Hybrid updates (final version)": "digits: see *Hybrid* below",
    "Wang et al., Table 1": "digits: see row P4 single in *Decided hypotheses*",
    "Wang et al., Figure 2": "digits: see row P4 rank in *Decided hypotheses*",
}


@dataclass(frozen=True)
class Sweep:
    """F − linear in accuracy at each learning rate of a published study.

    Attributes:
        by_rate: The difference at each rate.
        p: The p of each difference, adjusted by Holm's method over all differences in the study's report.
        best: The rate at which linear is most accurate.
    """

    by_rate: Mapping[float, Contrast]
    p: Mapping[float, Optional[float]]
    best: float

    @classmethod
    def of(cls, study: str, data: str, rates: Sequence[float]) -> "Sweep":
        folder = f"{study}-{data}-small"
        by_rate = {rate: Contrast(f"F − linear at {rate:g}", [(folder, difference(rate))]) for rate in rates}
        p = {entry["cell"]["lr"]: entry["difference"]["p_holm"] for entry in summary_of(folder)
             if entry["measure"] == "top1" and entry["difference"]}
        return cls(by_rate, p, cls._ranked(by_rate, "linear")[0])

    @staticmethod
    def _ranked(by_rate: Mapping[float, Contrast], connection: str) -> list[float]:
        """Return the rates in descending order of the accuracy of a connection."""
        return sorted(by_rate, key=lambda rate: -by_rate[rate].mean(0, (rate, connection)))

    def ranked(self) -> str:
        """Return linear's best two rates with their accuracies, in words."""
        best, second = self._ranked(self.by_rate, "linear")[:2]
        top, below = (self.by_rate[rate].mean(0, (rate, "linear")) for rate in (best, second))
        return f"{best:g} ({top:.2f} %), and the second highest at {second:g} ({below:.2f} %)"

    def at_best(self) -> Contrast:
        """Return the accuracy of F at F's best rate minus the accuracy of linear at linear's best rate."""
        study = self.by_rate[self.best].parts[0][0]
        rate = self._ranked(self.by_rate, "feature")[0]
        return Contrast(f"F at {rate:g}, linear at {self.best:g}",
                        [(study, {(rate, "feature"): 1.0, (self.best, "linear"): -1.0})])

    def significant(self, sign: int) -> list[float]:
        """Return the rates whose difference is detected (adjusted p) and positive (sign 1) or negative (sign -1)."""
        return [rate for rate, contrast in self.by_rate.items()
                if detected(self.p[rate]) and sign * contrast.difference.mean > 0]

    def excluding_zero(self, sign: int) -> list[float]:
        """Return the rates whose unadjusted 95 % interval is above zero (sign 1) or below zero (sign -1)."""
        return [rate for rate, contrast in self.by_rate.items()
                if min(sign * end for end in contrast.difference.ends) > 0]
