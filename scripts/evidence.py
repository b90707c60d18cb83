"""What the runs say, for model_cards/README.md: every number of it computed from the runs, none typed.

    python scripts/evidence.py            writes the page's part between its marks, and results/*.svg
    python scripts/evidence.py --check    exit status 1 if the page says something else than the runs

The text is `evidence.md.jinja` beside this file, the differences are those of `contrasts.py`.
"""
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Mapping, Optional, Sequence

import jinja2
from contrasts import (
    BRANCH4,
    OTHERS,
    RESULTS,
    Contrast,
    Run,
    Weights,
    difference,
    last_branch,
    late_cosine,
    learned_theta,
    mlp_cosine,
    placed,
    rates_slope,
    results,
    results_file,
    runs_of,
    settings_of,
    slope,
    switch,
    top1,
)
from marked import replaced
from matplotlib import rc_context
from matplotlib.figure import Figure
from scipy import stats

from timm_ortho.lab.figures import Row, draw_forest
from timm_ortho.lab.paper import name, section
from timm_ortho.lab.statistics import Difference, holm

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "model_cards"
BEGIN, END = "<!-- evidence: made by scripts/evidence.py -->", "<!-- end of evidence -->"

DIGITS, FASHION = "digits", "torch_fashion_mnist"


def _json(name: str) -> Mapping[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# --------------------------------------------------------------------------------------------- the paper's
def of_paper(table: str, effect: Callable[[Mapping[str, Any]], float], *path: str) -> dict[str, float]:
    """`effect` of the paper's table, for each data set whose figures it has."""
    found, entries = {}, section(table)
    for step in path:
        entries = entries[step]
    for key, values in entries.items():
        if isinstance(values, dict) and not key.endswith("_first_version"):  # of the same data set
            try:
                found[name("dataset", key)] = effect(values)
            except KeyError:  # a connection that the paper has not run there
                continue
    return found


def _less(of: str, base: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda values: values[of][0] - values[base][0]


def _rank_slope(ranks: Sequence[float]) -> Weights:
    """Points of accuracy by rank / width."""
    return slope(ranks, lambda index: {(ranks[index], "linear"): 1.0})


def _of_switch(first: float, last: float) -> Callable[[Mapping[str, Any]], float]:
    weights = switch(first, last)
    return lambda values: sum(weight * values[pair][0] for (pair, _), weight in weights.items())


def _of_rates(values: Mapping[str, Any]) -> float:
    rates = list(values["linear"])
    weights = slope([math.log10(float(rate)) for rate in rates],
                    lambda index: {(rates[index], "feature"): 1.0, (rates[index], "linear"): -1.0})
    return sum(weight * values[connection][rate][0] for (rate, connection), weight in weights.items())


def _mean(*effects: Mapping[str, float]) -> dict[str, float]:
    """Of several tables, for each data set that all of them have."""
    return {data: fmean(found[data] for found in effects) for data in effects[0] if all(data in e for e in effects)}


def _of_skips(table: str, weights: Weights) -> dict[str, float]:
    by_skip = section(table)["20"]
    return {name("dataset", data): sum(weight * by_skip[skip][data][0] for (_, skip, _), weight in weights.items())
            for data in by_skip["identity"]}


# ------------------------------------------------------------------------------------ what was looked at
def _both(study: str, label: str, weights: Weights, **more: Any) -> list[Contrast]:
    """On every data set that the study has been run on."""
    return [Contrast(f"{label}, {said}", [(f"{study}-{data}-small", weights)], **more)
            for data, said in ((DIGITS, "digits"), (FASHION, "Fashion-MNIST"))
            if results_file(f"{study}-{data}-small").is_file()]


RATES = (5e-4, 7e-4, 1e-3, 2e-3, 5e-3)
RANKS = (0.0, 0.0625, 0.25, 0.5, 0.75, 1.0)
KINDS_OF_START = ("orthogonal", "xavier", "kaiming")


def explored() -> dict[str, list[Contrast]]:
    """By the experiment of the paper: what runs that no hypothesis preceded say of it."""
    accuracy = {model: of_paper("accuracy", _less("feature", "linear"), model) for model in ("vit_s", "resnetv2_18")}
    pattern, norm, start, rank = (
        section(table) for table in ("layer_pattern", "final_layer_norm", "initialisation", "representation"))
    return {
        "Table 2, ViT-S": _both("accuracy", "ViT: F less linear", difference("vit_s"), paper=accuracy["vit_s"]),
        "Table 2, ResNetV2": _both("accuracy", "ResNetV2-18: F less linear", difference("resnetv2_18"),
                                   paper=accuracy["resnetv2_18"]),
        "Table 3": _both("switch_reinitialised", "start orthogonal", switch(1, 0),
                         paper=of_paper("connection_switch_reinitialised", _of_switch(1, 0))),
        "Table 10": _both("switch_kept", "orthogonal to linear less linear",
                          {("OL", "linear"): 1.0, ("LL", "linear"): -1.0},
                          paper=of_paper("connection_switch_continuous", _less("OL", "LL"))),
        "Table 4": _both("layer_pattern", "all blocks less none", {("all", "feature"): 1.0, ("none", "linear"): -1.0},
                         paper={"": pattern["all"][0] - pattern["none"][0]}),
        "Table 7": _both("initialisation", "G less linear, mean of three starts",
                         {(kind, which): weight / 3 for kind in KINDS_OF_START
                          for which, weight in (("global", 1.0), ("linear", -1.0))},
                         paper={"": fmean(start[kind]["global"][0] - start[kind]["linear"][0]
                                          for kind in KINDS_OF_START)}),
        "Table 9": _both("head_norm", "F less linear, without the final norm", difference("without"),
                         paper={"": norm["without"]["feature"][0] - norm["without"]["linear"][0]}),
        "Table 3 (final version)": _both("learning_rate", "F less linear, points a decade of the rate",
                                         rates_slope(RATES), bases="linear",
                                         paper=of_paper("learning_rate_sweep", _of_rates)),
        "Figure 4": _both("probability", "pi = 1 less pi = 0",
                          {(1.0, "feature"): 1.0, (0.0, "linear"): -1.0}),
        "Figure 5": _both("epsilon", "eps = 1e-3 less 1e-8", {(1e-3, "feature"): 1.0, (1e-8, "feature"): -1.0}),
        "Table 4 (final version)": _both(
            "representation", "effective rank, F over linear", difference(),  # of other widths: as a ratio
            read=lambda run: 100 * math.log(run["representation"]["effective_rank"]), unit="log-%",
            paper={"": 100 * math.log(rank["feature"]["effective_rank"][0] / rank["linear"]["effective_rank"][0])}),
        "Wang et al., Table 2": _both("skips_branch4", "four branches: transforms less identity", BRANCH4,
                                      paper=_of_skips("skips_branch4", BRANCH4)),
        "Wang et al., Table 3": _both("skips_depthwise", "depthwise: transforms less identity", OTHERS,
                                      paper=_of_skips("skips_depthwise", OTHERS)),
        "-": [contrast for family in ("swin", "convnext", "eva02", "mixer", "poolformer", "maxvit", "resnet")
              for contrast in _both("families", f"{family}: F less linear", difference(family))],
    }


ELSEWHERE = {
    "Table 1a": "counted: [report](results/studies/parameters-small/report.md)",
    "Table 1b": "timed: [report](results/studies/overhead-small/report.md)",
    "Table 11": "counted: [report](results/studies/gamma-small/report.md)",
    "Figures 3, 10, 11 and 12": "digits and Fashion-MNIST, read out below",
    "Hybrid updates (final version)": "digits, read out below",
    "Wang et al., Table 1": "digits, P4 single above",
    "Wang et al., Figure 2": "digits, P4 rank above",
}


# ---------------------------------------------------------------------------------------------- hypotheses
@dataclass(frozen=True)
class Hypothesis:
    """What hypotheses.md says is decided, and by what."""

    name: str
    says: str
    contrast: Contrast
    claims: str = "above"  # of the contrast: above zero, "equal" to it, or "different" from it on either side
    equivalent: Optional[float] = None  # the bound within which the two are called equivalent
    of_interest: float = 0.0  # from here on, as hypotheses.md has it

    @property
    def is_run(self) -> bool:
        return all(results_file(study).is_file() for study, _ in self.contrast.parts)

    def decision(self, p: float) -> str:
        """By a p value that is adjusted already."""
        if not self.is_run:
            return "not run yet"
        mean, told_apart = self.contrast.found.mean, p < 0.05
        if self.claims == "different" and told_apart:
            return "above zero" if mean > 0 else "below zero"
        if self.claims == "above" and told_apart:
            return "confirmed" if mean > 0 else "contradicted"
        if self.equivalent and self.contrast.within(self.equivalent):
            return f"equivalent within {self.equivalent}"
        return "contradicted" if told_apart else "not confirmed"


    def remark(self, decision: str) -> str:
        """What a reader has to know of the decision besides."""
        small = decision == "confirmed" and self.contrast.found.mean < self.of_interest
        return f"below the {self.of_interest:g} from which on it is of interest" if small else ""


def _hypothesis(name: str, says: str, study: str, weights: Weights, claims: str = "above",
                equivalent: Optional[float] = None, of_interest: float = 0.0, **more: Any) -> Hypothesis:
    contrast = Contrast(f"{name}: {says}", [(f"{study}-small", weights)], **more)
    return Hypothesis(name, says, contrast, claims, equivalent, of_interest)


FAMILY = (
    _hypothesis("H1", "F is more accurate than linear (ViT)", f"confirm_accuracy-{FASHION}", difference(),
                equivalent=0.2, of_interest=0.3, paper=of_paper("accuracy", _less("feature", "linear"), "vit_s")),
    _hypothesis("H2", "F loses less at rates that are too high (points a decade)", f"confirm_learning_rate-{DIGITS}",
                rates_slope(RATES), bases="linear", paper=of_paper("learning_rate_sweep", _of_rates)),
    _hypothesis("H3", "PoolFormer's loss with F is its mixer's doing", f"confirm_poolformer-{FASHION}",
                {**placed("pool(x)", "both"),
                 **{setting: -weight for setting, weight in placed("pool(x) - x", "both").items()}}, of_interest=3.0),
    Hypothesis("H4", "transforms of the stream help networks of branches", Contrast(
        "H4: transforms of the stream help networks of branches",
        [(f"confirm_skips_branch4-{DIGITS}-small", BRANCH4), (f"confirm_skips_depthwise-{DIGITS}-small", OTHERS)],
        paper=_mean(_of_skips("skips_branch4", BRANCH4), _of_skips("skips_depthwise", OTHERS)))),
    _hypothesis("H5", "an orthogonal start helps", f"confirm_switch-{FASHION}", switch(1, 0),
                paper=of_paper("connection_switch_reinitialised", _of_switch(1, 0))),
)
BESIDE = (  # outside the family: without adjustment, and so never called confirmed
    _hypothesis("P1b", "F is more accurate than linear (ResNet)", f"confirm_resnet-{FASHION}", difference(),
                "different", paper=of_paper("accuracy", _less("feature", "linear"), "resnetv2_18")),
    _hypothesis("P2b", "H2 on Fashion-MNIST", f"confirm_learning_rate_fashion-{FASHION}",
                rates_slope((1e-3, 2e-3, 4e-3, 8e-3)), "different", bases="linear",
                paper=of_paper("learning_rate_sweep", _of_rates)),
    _hypothesis("P4 single", "one branch: transforms equal the identity", f"confirm_skips_single-{DIGITS}", OTHERS,
                "equal", 0.5),
    _hypothesis("P4 rank", "accuracy rises with the rank (points by rank / width)", f"confirm_skip_rank-{DIGITS}",
                _rank_slope(RANKS), "different"),
    _hypothesis("P6", "linear's late MLP cosine (the paper: below zero)", f"confirm_accuracy-{FASHION}",
                {("linear",): 1.0}, "different", read=late_cosine, unit="cosine"),
)


def unpaired(one: Sequence[float], other: Sequence[float]) -> Difference:
    """Welch's interval of the difference of two means whose runs share no batches."""
    test = stats.ttest_ind(one, other, equal_var=False)
    low, high = test.confidence_interval()
    return Difference((low + high) / 2, (high - low) / 2, min(len(one), len(other)), float(test.pvalue))


def decided(hypotheses: Sequence[Hypothesis], adjust: Callable[[Sequence[float]], Sequence[float]]) -> list[dict]:
    """A row for each. Those that are not run yet are adjusted for as if their p were 1: Holm's decisions about the
    others stand whatever comes."""
    p = adjust([found.contrast.found.p if found.is_run else 1.0 for found in hypotheses])
    decisions = [found.decision(value) for found, value in zip(hypotheses, p, strict=True)]
    return [{"hypothesis": found, "decision": decision, "remark": found.remark(decision), "p": value}
            for found, decision, value in zip(hypotheses, decisions, p, strict=True)]


def tuned(study: str = f"confirm_tuning-{FASHION}-small") -> Optional[dict[str, Any]]:
    """P0: mean accuracy on held-out images by connection and rate, and by its rule each connection's rate."""
    if not results_file(study).is_file():
        return None
    means: dict[str, dict[float, float]] = {}
    for runs in settings_of(study):
        means.setdefault(runs[0]["connection"], {})[runs[0]["cell"]["lr"]] = fmean(map(top1, runs))
    chosen = {connection: min(rate for rate, mean in found.items() if mean >= max(found.values()) - 0.1)
              for connection, found in means.items()}
    floor = _json("floors/ridge.json")[study]
    return {"means": means, "chosen": chosen, "seeds": len(settings_of(study)[0]), "floor": floor}


# -------------------------------------------------------------------------------------------- the pictures
def pictures() -> dict[str, Figure]:
    """Of the questions, and of all differences of all reports."""
    asked = [contrast for found in explored().values() for contrast in found if contrast.unit == "points"]
    asked = [found.contrast for found in FAMILY if found.is_run] + asked
    every = []
    for path in sorted((RESULTS / "studies").glob("*/results.json")):
        for entry in results(path.parent.name)["summary"]:
            found = entry["difference"]
            if entry["measure"] == "top1" and found and found["half_width"] is not None:
                label = ", ".join([*entry["row"], *entry["column"]])
                every.append(Row(f"{path.parent.name.removesuffix('-small')}: {label}", "points of top-1",
                                 Difference(found["mean"], found["half_width"], found["pairs"]), None,
                                 found["paper"].values()))
    return {
        "questions": draw_forest([Row(contrast.label, "points of top-1", contrast.found, None, contrast.paper.values())
                                  for contrast in asked], 0.24),
        "differences": draw_forest(every, 0.17),
    }


# --------------------------------------------------------------------------------------------------- the page
def text() -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True)
    contrasts = explored()

    def put(study: str, weights: Weights, read: Callable[[Run], float] = top1, digits: int = 2) -> str:
        return Contrast("", [(study, weights)], read).found.text(digits)

    def mean(study: str, setting: Sequence[Any], read: Callable[[Run], float] = top1) -> float:
        return fmean(read(run) for run in runs_of(study) if [*run["cell"].values(), run["connection"]] == list(setting))

    studies = [path.parent.name for path in sorted((RESULTS / "studies").glob("*/results.json"))]
    every = [run for study in studies if not study.startswith("confirm_")
             if results(study)["study"].get("kind", "training") == "training" for run in runs_of(study)]
    # equal runs of several studies end with equal figures
    same = Counter((run["seed"], run["connection"], run["loss"], run["top1"], run["parameters"]) for run in every)
    floors = [(study, floor, [fmean(map(top1, runs)) for runs in settings_of(study)])
              for study, floor in _json("floors/ridge.json").items() if results_file(study).is_file()]
    trainers = _json("trainers/agreement.json")
    gains = [next(found for found in (*FAMILY, *BESIDE) if found.name == which) for which in ("H1", "P1b")]
    family, beside = decided(FAMILY, holm), decided(BESIDE, list)
    return environment.get_template("evidence.md.jinja").render(
        family=family, beside=beside, rows={row["hypothesis"].name: row for row in family + beside},
        explored=contrasts, elsewhere=ELSEWHERE, put=put, mean=mean, difference=difference,
        placed=placed, switch=switch, transforms4=BRANCH4, transforms3=OTHERS, mlp_cosine=mlp_cosine,
        learned_theta=learned_theta, last_branch=last_branch, late_cosine=late_cosine,
        later_ranks=_rank_slope(RANKS[1:]), overhead=runs_of("overhead-small"), floors=floors, tuning=tuned(),
        runs=len(every), different=len(same),
        shared=max(count for (_, connection, *_), count in same.items() if connection == "linear"),
        gains=unpaired(*(found.contrast.values for found in gains)) if all(found.is_run for found in gains) else None,
        trainers=unpaired(*(list(trainers[which]["top1"].values()) for which in ("train.py", "lab"))))


def readme() -> str:
    """What README says of the hypotheses: each that is decided, with its difference."""
    said = [f"* {found.says}: **{row['decision']}**, {found.contrast}, "
            f"{len(found.contrast.values)} seeds{row['remark'] and ', ' + row['remark']}"
            for row in decided(FAMILY, holm) if (found := row["hypothesis"]).is_run]
    return "\n".join([f"{len(said)} of {len(FAMILY)} are decided (points of top-1, 95 % intervals):", "", *said])


def main(check: bool, cards: Path = CARDS, root: Path = ROOT) -> None:
    for page, made in ((cards / "README.md", text().strip()), (root / "README.md", readme())):
        before, after = replaced(page, BEGIN, END, made)
        if not check:
            page.write_text(after, encoding="utf-8")
        elif after != before:
            raise SystemExit(f"{page} says something else than the runs: python scripts/evidence.py writes it anew")
    if check:
        return
    for title, figure in pictures().items():
        with rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):
            figure.savefig(cards / "results" / f"{title}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
