"""Write the evidence page and its summary in README; every result is computed from the published runs.

`evidence.md.jinja` contains the text. `hypotheses.py` defines the hypotheses, and `contrasts.py` computes differences.
"""
import json
import math
import textwrap
from collections import Counter
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Callable, Mapping, Optional, Sequence

import jinja2
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import optimize, stats

from timm_ortho._text import svg_text
from timm_ortho.lab.paper import section
from timm_ortho.lab.planning import design, recipe
from timm_ortho.lab.reporting.layout import grouped
from timm_ortho.lab.reporting.plots import STYLES, ForestRow, Scene, draw_forest, lines_chart, progress
from timm_ortho.lab.reporting.statistics import Difference, holm

from ..checks import rates as tuning_rules
from ..checks.linear_floor import ALPHAS
from . import commits, studies
from .contrasts import (
    BRANCH4,
    OTHERS,
    Contrast,
    Run,
    Weights,
    difference,
    is_published,
    last_branch,
    late_cosine,
    learned_theta,
    mlp_cosine,
    placed,
    rates_slope,
    runs_of,
    setting_of,
    settings_of,
    switch,
    top1,
    unpaired,
)
from .hypotheses import (
    BESIDE,
    CIFAR,
    ELSEWHERE,
    FASHION,
    GAINS,
    NAMES,
    PART_ONE,
    PART_THREE,
    PART_TWO,
    RANKS,
    RATE_STUDIES,
    RESNET,
    RESNETS,
    TINY,
    Hypothesis,
    Sweep,
    by_epochs,
    course,
    decided,
    explored,
    rank_slope,
)
from .marked import listed, replaced, span


def _json(name: str) -> Mapping[str, Any]:
    return json.loads((studies.RESULTS / name).read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------- rates, settings, accuracies
def tuned(study: str = f"confirm_tuning-{FASHION}-small") -> Optional[tuning_rules.Chosen]:
    """Return the learning rates that study P0 chose, or None before it is published.

    The chosen rate of a connection is the lowest whose accuracy is within 0.1 points of the connection's best accuracy.
    """
    if not is_published(study):
        return None
    return tuning_rules.Chosen.of(runs_of(study), _json("floors/ridge.json")[study]["top1"], _floor(study), 0.1)


def tuned_on_cifar(study: str = f"cifar_rates-{CIFAR}-small") -> Optional[list[str]]:
    """Return lines of Markdown with the rates and recipe that study S0 chose, or None before it is published."""
    if not is_published(study):
        return None
    ridge = _json("floors/ridge.json")[study]["best"]
    return tuning_rules.lines(tuning_rules.by_recipe(runs_of(study), ridge, _floor(study)))


def _floor(study: str) -> float:
    """Return the lowest training loss that a study's label smoothing allows."""
    return tuning_rules.smoothing_floor(_options(study).smoothing, len(runs_of(study)[0]["labels"]))


def _options(study: str) -> Any:
    """Return the train.py options of a study's first variant at scale `small`."""
    return design.load(study.partition("-")[0], "small").variants({})[0].options


def settings_table(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return hyperparameters by title for each column of the table: hypotheses on ViTs, then the paper's trainings."""
    studies_of = {row["hypothesis"].name: row["hypothesis"].contrast.parts[0][0] for row in rows}
    papers = {name: PAPERS.get(study.split("-")[1]) for name, study in studies_of.items()}
    return {**{name: setting(_options(study)) for name, study in studies_of.items()},
            **{f"paper, {DATA[name]}": setting(recipe.resolve_variant({"dataset": given[0]}, given[1]))
               for name, given in papers.items() if given}}


def vit_s() -> Mapping[str, Any]:
    """Return the row of the paper's ViT-S in the table of widths and depths."""
    return next(row for row in runs_of("gamma-small") if row["model"] == "vit_small")


def setting(options: Any) -> dict[str, str]:
    """Return the hyperparameters of a ViT-S by title."""
    kwargs = options.model_kwargs
    width, blocks = kwargs.get("embed_dim", vit_s()["width"]), kwargs.get("depth", vit_s()["blocks"])
    keys = {"learning rate": "lr", "batch size": "batch_size", "weight decay": "weight_decay",
            "gradient clipping": "clip_grad", "label smoothing": "smoothing", "epochs": "epochs"}
    return {"pixels, patch": f"{options.img_size}, {kwargs['patch_size']}",
            "width, blocks": f"{width:g}, {blocks:g}",
            "width over depth": f"{width / blocks:.3g}",
            "augmentation": _augmentation(options),
            **{title: _number(getattr(options, key)) for title, key in keys.items()}}


def _number(value: Any) -> str:
    return "none" if value is None else f"{value:g}"


def _augmentation(options: Any) -> str:
    if options.no_aug:
        return "none"
    strong = [title for title, key in (("RandAugment", "aa"), ("MixUp", "mixup"), ("CutMix", "cutmix"),
                                       ("erasing", "reprob")) if getattr(options, key)]
    return ", ".join([f"crop of {100 * options.scale[0]:.0f} to 100 % of the area", "flip", *strong])


OF_RESNETS = span((gain for model in RESNETS for gain in GAINS[model].values()), "{:+.2f}")  # in the paper
EXPECTED = 0.4  # the difference that ten pairs should detect with 80 % power according to hypotheses.md, in points
PAPERS = {CIFAR: ("torch/cifar10", "vit_s_cifar10"), TINY: ("", "vit_s_tiny_imagenet")}  # data set and recipe
DATA = {"C2": "Tiny ImageNet", "C1": "CIFAR-10", "H1": "Fashion-MNIST"}  # data set of each hypothesis on ViTs' accuracy


def pairs(contrast: Contrast) -> dict[str, str]:
    """Return properties of the pairs of runs that decide a hypothesis on ViTs' accuracy, by title."""
    linear, feature = (fmean(top1(run) for run in contrast.runs if run["connection"] == connection)
                       for connection in ("linear", "feature"))
    return {"pairs of runs": str(contrast.seeds),
            "mean accuracy of linear, %": f"{linear:.2f}",
            "mean accuracy of F, %": f"{feature:.2f}",
            "F − linear in single pairs, points": span(contrast.values, "{:+.2f}"),
            "detectable, points": f"{detectable_points(contrast):.2f}",
            "trained on": " and ".join(sorted({run["made_with"].get("gpu") or "CPU" for run in contrast.runs}))}


def fits(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, for each hypothesis of `rows`, F − linear in the course of training and in the final losses, in words."""
    sentences = []
    for row in rows:
        name, contrast = row["hypothesis"].name, row["hypothesis"].contrast
        by_epoch, (train, test, _) = by_epochs(contrast), course("", contrast)
        points = {max(1, int(share * len(by_epoch))) for share in (0.25, 0.5)}
        accuracy = ", ".join(f"{by_epoch[epoch]} after epoch {epoch}" for epoch in sorted(points))
        sentences.append(
            f"{DATA[name]} ({name}'s runs): F − linear is {accuracy} and {contrast} after epoch {len(by_epoch)}. "
            f"The final training loss of F is lower in {sum(value < 0 for value in train.values)} of {contrast.seeds} "
            f"pairs (mean difference {train} nats), and its final test loss is lower in "
            f"{sum(value < 0 for value in test.values)} of {contrast.seeds} ({test} nats).")
    return sentences


def times(contrast: Contrast) -> tuple[float, float, float]:
    """Return the time of a run with F divided by that of linear: the median over the seeds, the lowest, the highest."""
    seconds = {(run["seed"], run["connection"]): run["seconds"] for run in contrast.runs}
    ratios = [seconds[seed, "feature"] / seconds[seed, "linear"] for seed in {seed for seed, _ in seconds}]
    return median(ratios), min(ratios), max(ratios)


def durations(contrast: Contrast) -> str:
    """Return the device of a contrast's runs, and the minutes of the shortest and the longest run, in words."""
    devices = sorted({run["device"] for run in contrast.runs})
    minutes = [run["seconds"] / 60 for run in contrast.runs]
    return f"{' and '.join(devices)}: {min(minutes):.0f} to {max(minutes):.0f} minutes per run"


def detectable_points(contrast: Contrast) -> float:
    """Return the difference that the pairs of a contrast detect with 80 % power, from their standard deviation."""
    return stdev(contrast.values) * detectable(contrast.seeds)


def detectable(pairs: int, power: float = 0.8) -> float:
    """Return the effect, in standard deviations, that a two-sided paired 5 % test detects with probability `power`."""
    limit = stats.t.ppf(0.975, pairs - 1)
    return float(optimize.brentq(lambda d: stats.nct.sf(limit, pairs - 1, d * math.sqrt(pairs)) - power, 0.1, 3.9))


# -------------------------------------------------------------------------------------------- the first answers
def answers() -> dict[str, str]:
    """Return the summary for the evidence page and README, as a dict from subjects to answers in Markdown."""
    measured, h2 = of_vits(), decisions()["H2"]
    of_data = listed(
        f"{row['hypothesis'].contrast} on {DATA[row['hypothesis'].name]} ({row['hypothesis'].name}, {row['decision']})"
        for row in measured)
    digits, fashion = [slopes(study, data, tried) for _, study, data, tried in RATE_STUDIES]
    return {
        "ViTs": f"F − linear is {of_data}. F's training loss is lower on {lower_loss(measured)}"
                f"{higher_test_loss(measured)}.",
        "ResNets": f"F − linear is {RESNET} on Fashion-MNIST (one narrow ResNetV2-18 at a learning rate that was not "
                   f"tuned). In the paper, it is {RESNET.of_paper} for ResNetV2-18 and {OF_RESNETS} for all ResNetV2s.",
        "Learning rates":
            f"F loses less accuracy than linear if the rate is far too high. According to a fitted line, F − linear "
            f"changes by {digits[0]} on digits (H2, {h2['decision']}) and {fashion[0]} on Fashion-MNIST for a tenfold "
            f"rate. Without the highest tested rate, these slopes are {digits[1]} on digits and {fashion[1]} on "
            "Fashion-MNIST.",
    }


def decisions() -> dict[str, dict]:
    """Return the rows of `decided` by the name of the hypothesis. Holm's method adjusts p within each part."""
    families = [row for family in (PART_TWO, PART_THREE, PART_ONE) for row in decided(family, holm)]
    return {row["hypothesis"].name: row for row in [*families, *decided(BESIDE, list)]}


def of_vits() -> list[dict]:
    """Return the rows of `decided` for the hypotheses on the accuracy of ViTs that have runs."""
    rows = decisions()
    return [rows[name] for name in DATA if rows[name]["hypothesis"].is_run]


def lower_loss(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the data sets on which F's final training loss is significantly lower than linear's, in words."""
    data = [data for data, (train, _) in losses(rows).items() if train.ends[1] < 0]
    return "all of these" if len(data) == len(rows) else listed(data or ["none of these"])


def higher_test_loss(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a clause with the data sets on which F's final test loss is significantly higher, or an empty string."""
    data = [data for data, (_, test) in losses(rows).items() if test.ends[0] > 0]
    return f"; its test loss is higher on {listed(data)}" if data else ""


def losses(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Difference, Difference]]:
    """Return F − linear in final training loss and in final test loss, by data set."""
    return {DATA[row["hypothesis"].name]: tuple(one.difference for one in course("", row["hypothesis"].contrast)[:2])
            for row in rows}


def lead(sweeps: Sequence[Sweep]) -> str:
    """Return two sentences with the rates at which F − linear is significant, on digits and on Fashion-MNIST."""
    def at(sign: int) -> str:
        times = [" and ".join(f"{rate / of.best:.2g}" for rate in of.significant(sign)) for of in sweeps]
        return "at no rate" if not any(times) else "only " * all(times) + " and ".join(
            f"at {of} times linear's best rate on {data}" if of else f"at no rate on {data}"
            for of, data in zip(times, ("digits", "Fashion-MNIST"), strict=True))

    return (f"With Holm's adjustment within each study, F is significantly more accurate {at(1)}. "
            f"F is significantly less accurate {at(-1)}.")


def slopes(study: str, data: str, rates: Sequence[float]) -> tuple[Difference, Difference]:
    """Return the slope of F − linear over all rates, and without the highest rate."""
    return tuple(Contrast("", [(f"{study}-{data}-small", rates_slope(of))]).difference for of in (rates, rates[:-1]))


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the answer for ViTs in one sentence, from the decisions on accuracy and the final training losses.

    Args:
        rows: The rows of `decided` for hypotheses on the accuracy of ViTs that have runs.
    """
    words = {"confirmed": "is more accurate", "contradicted": "is less accurate"}
    by_words = grouped(rows, lambda row: words.get(row["decision"], "has no measurable accuracy gain"))
    accuracy = ", ".join(f"{word} on {listed(DATA[row['hypothesis'].name] for row in mine)}"
                         for word, mine in by_words.items())
    return (f"in narrow ViTs trained for {epochs_of(rows)}, F {accuracy} and reaches a lower training loss on "
            f"{lower_loss(rows)}; not tested: {', '.join(untested(rows))}.")


def epochs_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the numbers of epochs of the runs, such as "10 to 20 epochs"."""
    epochs = [len(run["history"]) for row in rows for run in row["hypothesis"].contrast.runs]
    return f"{span(epochs, '{}')} epochs"


def untested(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, in words, settings of the paper's ViTs that the runs of `rows` do not have."""
    tested = {row["hypothesis"].name for row in rows}
    wide = [] if is_published(f"cifar_width-{CIFAR}-small") else [f"width {vit_s()['width']:g}, as in ViT-S"]
    return [*(data for name, data in DATA.items() if name not in tested),
            "RandAugment, MixUp and CutMix",
            f"more than {epochs_of(rows).rpartition(' to ')[2]}", *wide]


# -------------------------------------------------------------------------------------------- the pictures
def pictures() -> dict[str, Figure]:
    """Return four plots.

    They show the differences of hypotheses and exploratory comparisons, the differences of all reports, F − linear
    by epoch, and the training of C1 and C2 by step and by time.
    """
    compared = [contrast for contrasts in explored().values() for contrast in contrasts if contrast.unit == "points"]
    compared = [one.contrast for one in (*PART_THREE, *PART_TWO, *PART_ONE) if one.is_run] + compared
    every = []
    for folder in studies.folders():
        for entry in studies.summary(folder):
            measured = entry["difference"]
            if entry["measure"] == "top1" and measured and measured["half_width"] is not None:
                label = ", ".join([*entry["row"], *entry["column"]])
                every.append(ForestRow(f"{folder.name.removesuffix('-small')}: {label}", "points of top-1",
                                 Difference(measured["mean"], measured["half_width"], measured["pairs"]), None,
                                 measured["paper"].values()))
    return {
        "questions": draw_forest([
            ForestRow(contrast.label, "points of top-1", contrast.difference, None, contrast.paper.values())
            for contrast in compared], 0.24),
        "differences": draw_forest(every, 0.17),
        "by_epoch": draw_by_epoch({
            DATA[one.name]: one.contrast for one in (PART_ONE[0], *PART_TWO[:2]) if one.is_run}),
        "by_time": draw_by_time([one for one in PART_TWO[:2] if one.is_run]),
    }


def draw_by_time(hypotheses: Sequence[Hypothesis]) -> Figure:
    """Draw training loss by step and accuracy by time, as in the paper's Figure 2, one row per hypothesis."""
    panels = []
    for one in hypotheses:
        loss, _, top1_by_time = progress(*scene_of(one), DATA[one.name])
        panels += [loss, top1_by_time]
    return lines_chart(panels, "", columns=2)


def scene_of(one: Hypothesis) -> tuple[Scene, Sequence[Run], Callable[[Run], str]]:
    """Return a study's scene, its runs with their batch size, and a function that names a run by its connection."""
    study = one.contrast.parts[0][0]
    layout = studies.part(studies.RESULTS / "studies" / study).layout
    runs = [{**run, "batch_size": _options(study).batch_size} for run in one.contrast.runs]
    return Scene(runs, layout, {}), runs, lambda run: run["connection"]


def draw_by_epoch(contrasts: Mapping[str, Contrast]) -> Figure:
    """Draw F − linear in accuracy after each epoch with its 95 % interval, one panel per contrast."""
    figure = Figure(figsize=(4.2 * len(contrasts), 2.8), layout="constrained")
    for axes, (title, contrast) in zip(figure.subplots(1, len(contrasts), squeeze=False)[0], contrasts.items(),
                                       strict=True):
        by_epoch = {epoch: of.difference for epoch, of in by_epochs(contrast).items()}
        low, high = zip(*(of.ends for of in by_epoch.values()), strict=True)
        colour = STYLES["feature"]["color"]
        axes.fill_between([*by_epoch], low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot([*by_epoch], [of.mean for of in by_epoch.values()], color=colour)
        axes.axhline(0, color="#222222", linewidth=0.9)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("epoch", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("F − linear, points of top-1", fontsize=9)
        axes.tick_params(labelsize=8)
    return figure


# --------------------------------------------------------------------------------------------------- the page
def text(history: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True)
    environment.filters["listed"] = listed

    def put(study: str, weights: Weights, read: Callable[[Run], float] = top1, digits: int = 2) -> str:
        return Contrast("", [(study, weights)], read).difference.text(digits)

    def mean(study: str, setting: Sequence[Any], read: Callable[[Run], float] = top1) -> float:
        return fmean(read(run) for run in runs_of(study) if setting_of(run) == tuple(setting))

    confirming = [study for part in commits.RULES for study in commits.studies_of(part)]
    every = [run for folder in studies.folders() if folder.name not in confirming
             for run in studies.part(folder).runs if studies.trains(folder)]
    # Several studies may contain the same run. Runs with equal seed, connection and metrics count as one.
    same = Counter((run["seed"], run["connection"], run["loss"], run["top1"], run["parameters"]) for run in every)
    ridge = _json("floors/ridge.json")
    floors = [(study, floor, [fmean(map(top1, runs)) for runs in settings_of(study).values()])
              for study, floor in ridge.items() if is_published(study)]
    trainers = _json("trainers/agreement.json")
    rows, vits = decisions(), of_vits()
    h1, h4 = (rows[which]["hypothesis"].contrast for which in ("H1", "H4"))
    without = h1.without(*commits.elsewhere("one", history).get(h1.parts[0][0], {"seeds": []})["seeds"])
    images = {which: ridge[f"{study}-small"]["validation"] for which, study in (
        ("digits", "confirm_learning_rate-digits"), ("fashion", f"confirm_accuracy-{FASHION}"))}
    return environment.get_template("evidence.md.jinja").render(
        answers=answers(), rows=rows, beside=[rows[one.name] for one in BESIDE], explored=explored(),
        elsewhere=ELSEWHERE, put=put, mean=mean, difference=difference, placed=placed, switch=switch,
        transforms4=BRANCH4, transforms3=OTHERS, mlp_cosine=mlp_cosine, learned_theta=learned_theta,
        last_branch=last_branch, late_cosine=late_cosine, later_ranks=rank_slope(RANKS[1:]),
        overhead=runs_of("overhead-small"), throughput=section("throughput"), floors=floors, tuning=tuned(),
        tuning_images=ridge[f"confirm_tuning-{FASHION}-small"]["validation"], cifar_tuning=tuned_on_cifar(),
        planned=[row["hypothesis"].name for row in vits if row["hypothesis"] in PART_TWO
                 and detectable_points(row["hypothesis"].contrast) > EXPECTED],
        of_paper=section("accuracy")["vit_s"]["tiny_imagenet"], without_first=without,
        widest=max(contrast.difference.half_width or 0.0 for contrast in explored()["-"]
                   if not contrast.label.startswith(("poolformer", "resnet"))),
        edge_of_alpha=[NAMES[study.split("-")[1]] for study, of, _ in floors if of.get("alpha") == max(ALPHAS)],
        runs=len(every), different=len(same),
        shared=max(count for (_, connection, *_), count in same.items() if connection == "linear"),
        trainers=unpaired(*(list(trainers[which]["top1"].values()) for which in ("train.py", "lab"))),
        settings=settings_table(vits),
        pairs={row["hypothesis"].name: pairs(row["hypothesis"].contrast) for row in vits},
        verdict=verdict(vits), untested=untested(vits), fits=fits(vits), expected=EXPECTED,
        tested_on=[DATA[row["hypothesis"].name] for row in vits],
        best_alpha_on=dict.fromkeys(NAMES[study.split("-")[1]] for study, of, _ in floors if "best" in of),
        s0_images=ridge[f"cifar_rates-{CIFAR}-small"]["train"], s0_epochs=_options("cifar_rates").epochs,
        gate=(tuning_rules.ABOVE_RIDGE, tuning_rules.ABOVE_FLOOR),
        final_loss=course("", h1)[0].mean(0, ("linear",)), floor=_floor(h1.parts[0][0]),
        durations={one.name: durations(one.contrast) for one in PART_TWO[:2] if one.is_run},
        times={row["hypothesis"].name: times(row["hypothesis"].contrast) for row in vits},
        sweeps={NAMES[data]: Sweep.of(study, data, tried) for _, study, data, tried in RATE_STUDIES}, lead=lead,
        image_points=100 / images["digits"], images=images, h4_images=abs(h4.difference.mean) * images["digits"] / 100,
        history=history, elsewhere_made={part: commits.elsewhere(part, history) for part in commits.RULES},
        not_run="".join(f"{words}; " for words, study in (
            ("ResNets on CIFAR", "cifar_resnet18"), ("the factors of C3 and C4", "cifar_factors"))
                        if not is_published(f"{study}-{CIFAR}-small")),
        without_runs=[title for title, study in (("S3", "cifar_factors"), ("S4", "cifar_width"))
                      if not is_published(f"{study}-{CIFAR}-small")],
        made_after={part: commits.made_after(part, history) for part in ("two", "three")},
        mixed=[pair for part in commits.RULES for pair in commits.mixed_pairs(part)],
        without_paper=[name for name in design.shipped() if not design.has_scale(name, "paper")],
        detectable=detectable, names=NAMES)


def recommendation() -> str:
    """Return the answer to "Should I use it?" in one paragraph, from decided hypotheses and the paper."""
    rows = of_vits()
    differences = listed(f"{row['hypothesis'].contrast} on {DATA[row['hypothesis'].name]} "
                         f"({row['hypothesis'].contrast.difference.pairs} seeds)" for row in rows)
    vit_b = section("accuracy")["vit_b"]["imagenet1k"]
    pooling = decisions()["H3"]["decision"]
    sizes = [run["parameters"] / 1e6 for row in rows for run in row["hypothesis"].contrast.runs]
    answer = " ".join([
        "For a ViT that you train from scratch, try Orthogonal-F (suffix `_ortho`). We trained narrow ViTs",
        f"({min(sizes):.1f} to {max(sizes):.1f} million parameters, {epochs_of(rows)}) with Orthogonal-F and with",
        "plain addition. The gain of Orthogonal-F in top-1 accuracy, in points with 95 % confidence intervals, is",
        f"{differences}. In the paper, ViT-B on ImageNet-1k reaches {vit_b['feature'][0]} %",
        f"with Orthogonal-F and {vit_b['linear'][0]} % with plain addition. For a ResNet, compare both on your data.",
        f"The gain is from {OF_RESNETS} over all ResNetV2s and data sets of the paper. In our one small ResNet, on",
        f"Fashion-MNIST at a learning rate that was not tuned, Orthogonal-F gains {RESNET}.",
        *["Do not use it in models whose branches subtract their input, such as PoolFormer."][:pooling == "confirmed"],
        f"We have not tested ViTs with {'; '.join(untested(rows))}; and fine-tuning",
        "([advice](docs/settings.md#fine-tuning-pretrained-weights)). See [all results](docs/evidence.md)."])
    return textwrap.fill(answer, 130, break_on_hyphens=False, break_long_words=False)


def texts(root: Path) -> dict[Path, str]:
    page, front = root / "docs" / "evidence.md", root / "README.md"
    return {page: replaced(page, {"evidence": text(commits.recorded()).strip()}),
            front: replaced(front, {"evidence": recommendation()})}


def drawings(root: Path) -> dict[Path, Callable[[Path], Any]]:
    return {root / "model_cards" / "results" / f"{title}.svg": lambda path, title=title: save(title, path)
            for title in ("questions", "differences", "by_epoch", "by_time")}


def save(title: str, path: Path) -> None:
    path.write_text(svg_text(pictures()[title], title), encoding="utf-8")
