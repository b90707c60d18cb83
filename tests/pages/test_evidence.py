"""Test the modules of the evidence page in scripts/pages: commits, contrasts, hypotheses and evidence."""
import functools
import itertools
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from scripts.pages import commits, contrasts, evidence, hypotheses, studies as pages
from timm_ortho.lab.planning import design
from timm_ortho.lab.reporting import published
from timm_ortho.lab.reporting.statistics import holm, paired_difference, pooled_contrasts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs(monkeypatch):
    """Return a function that replaces a study's runs by made-up runs with given top-1 accuracies."""
    made = {}

    def put(study, settings, axis="lr"):
        """Replace the runs. `settings` maps (axis value, connection) or (connection,) to the top-1 of each seed."""
        made[study] = [
            {"cell": {axis: setting[0]} if len(setting) > 1 else {}, "connection": setting[-1], "seed": 100 + seed,
             "top1": value} for setting, values in settings.items() for seed, value in enumerate(values)]

    monkeypatch.setattr(contrasts, "runs_of", made.__getitem__)
    return put


def contrast(weights, *studies):
    return contrasts.Contrast("", [(study, weights) for study in studies or ("study",)])


LINEAR, FEATURE = [80.0, 81.5, 79.0, 80.5], [80.5, 81.0, 80.5, 81.5]


def test_a_difference_equals_that_of_the_report(runs):
    runs("study", {("linear",): LINEAR, ("feature",): FEATURE})
    result = contrast(contrasts.difference())
    assert result.difference == paired_difference(FEATURE, LINEAR)
    assert result.difference.p == pytest.approx(stats.ttest_rel(FEATURE, LINEAR).pvalue)
    assert result.pooled.half_width == pytest.approx(result.difference.half_width)
    interval = stats.ttest_rel(FEATURE, LINEAR).confidence_interval(0.9)
    bound = max(map(abs, interval))
    assert result.within(bound * 1.001)
    assert not result.within(bound * 0.999)
    assert contrast({("linear",): 1.0}).pooled is None  # only differences have a pooled variance


def test_a_slope_is_least_squares(runs):
    rates, lead = (1e-3, 1e-2, 5e-2), [[0.1, 1.2, 1.5], [-0.3, 0.9, 2.8]]
    runs("study", {**{(rate, "linear"): [70.0, 71.0] for rate in rates},
                   **{(rate, "feature"): [70.0 + lead[0][i], 71.0 + lead[1][i]] for i, rate in enumerate(rates)}})
    result = contrast(contrasts.rates_slope(rates))
    expected = [stats.linregress([-3, -2, stats.linregress([0, 1], [0, 1]).slope * -1.3010299956639813], of).slope
                for of in lead]
    assert result.values == pytest.approx(expected)


def test_main_effects(runs):
    values = {("LL", "linear"): [1.0], ("LO", "feature"): [2.0], ("OL", "linear"): [5.0], ("OO", "feature"): [8.0]}
    runs("study", values, axis="switch")
    assert contrast(contrasts.switch(1, 0)).values == [5.0]  # ((5 + 8) - (1 + 2)) / 2
    assert contrast(contrasts.switch(0, 1)).values == [2.0]


def test_equal_differences_decide_no_hypothesis(runs, only_study):
    """If all differences are equal, their variance is treated as unknown, not as zero."""
    runs("study", {("linear",): [80.0, 81.0], ("feature",): [81.0, 82.0]})
    equal = contrast({("feature",): 1.0, ("linear",): -1.0})
    assert str(equal) == "+1.00"
    assert equal.measured(0.9).ends == (-float("inf"), float("inf"))
    assert not equal.within(5.0)
    assert equal.pooled.half_width is None
    assert contrasts.unpaired([1.0, 1.0], [2.0, 2.0]).p is None
    for claims, equivalent in (("above", None), ("different", None), ("equal", 5.0)):
        hypothesis = hypotheses.Hypothesis("H", "says", equal, claims, equivalent)
        for adjust in (holm, list):
            assert hypotheses.decided([hypothesis], adjust)[0]["decision"] == "not confirmed"


def test_incomplete_seeds_are_ignored(runs):
    runs("one", {("linear",): LINEAR, ("feature",): FEATURE[:3]})
    runs("two", {("linear",): LINEAR, ("feature",): LINEAR})
    assert len(contrast(contrasts.difference(), "one").values) == 3
    both = contrast(contrasts.difference(), "two", "one")
    assert both.values == pytest.approx([(feature - linear) / 2 for feature, linear in zip(FEATURE[:3], LINEAR)])  # noqa: B905


def test_pooled_variance_covers_all_cells(runs):
    """Seed means are subtracted. The variance is pooled over all connections, including one that is not compared."""
    other = [79.0, 82.5, 80.0, 79.5]
    runs("study", {("linear",): LINEAR, ("feature",): FEATURE, ("global",): other})
    block = {name: dict(enumerate(of)) for name, of in (("linear", LINEAR), ("feature", FEATURE), ("global", other))}
    assert [contrast(contrasts.difference()).pooled] == pooled_contrasts(
        [block], [{(0, "feature"): 1.0, (0, "linear"): -1.0}])
    runs("study", {("linear",): LINEAR, ("feature",): FEATURE, ("global",): other[:3]})  # without global's last seed
    assert contrast(contrasts.difference()).pooled.pairs == 4


def test_pooled_variance_of_two_equal_studies(runs):
    settings = {("linear",): LINEAR, ("feature",): FEATURE}
    runs("one", settings)
    runs("two", settings)
    one, both = contrast(contrasts.difference(), "one").pooled, contrast(contrasts.difference(), "one", "two").pooled
    # Two studies together have twice as many values and degrees of freedom as one study.
    scale = stats.t.ppf(0.975, 6) / stats.t.ppf(0.975, 3) / 2 ** 0.5
    assert both.half_width == pytest.approx(one.half_width * scale)


@pytest.mark.parametrize(("paper", "expected"), [
    ({"one": 2.0, "other": 3.0}, "untestable: 100 % accuracy would give +1.50 (+2.00 to +3.00)"),
    ({"one": 1.0, "other": 3.0}, "no, smaller (+1.00 to +3.00)"),
    ({"one": 0.1}, "yes (+0.10), and zero"),
    ({"one": 0.1, "other": 1.0}, "in part (+0.10 to +1.00), and zero"),
    ({}, "the paper has no number"),
])
def test_an_effect_of_the_papers_size_is_compatible_or_untestable(runs, paper, expected):
    """The parentheses contain the paper's effects. "And zero" means that the interval also contains zero."""
    runs("study", {("linear",): [98.4, 98.5, 98.6], ("feature",): [98.5, 98.5, 98.6]})
    result = contrasts.Contrast("", [("study", contrasts.difference())], paper=paper)
    assert result.room == pytest.approx(1.5)
    assert result.compatible() == expected


def test_only_a_difference_of_accuracies_has_a_ceiling(runs):
    runs("study", {(rate, which): [98.0, 99.0] for rate in (1e-3, 1e-2) for which in ("linear", "feature")})
    one = contrasts.difference(1e-3)
    assert contrast(one).room == pytest.approx(1.5)
    assert contrasts.Contrast("", [("study", one)], read=lambda run: run["top1"]).room == float("inf")
    for weights in ({(1e-3, "linear"): 1.0}, contrasts.rates_slope([1e-3, 1e-2])):
        assert contrast(weights).room == float("inf")


def test_a_slope_over_the_rate_has_the_ceiling_of_its_linear_networks(runs):
    """The ceiling has 100 % accuracy for F above the mean rate, and linear's accuracy for F below the mean rate."""
    runs("study", {(rate, which): [98.0, 99.0] for rate in (1e-3, 1e-2) for which in ("linear", "feature")})
    result = contrasts.Contrast("", [("study", contrasts.rates_slope([1e-3, 1e-2]))], paper={"": 6.0}, bases="linear")
    assert result.room == pytest.approx(1.5)  # points per tenfold rate
    assert result.compatible() == "untestable: 100 % accuracy would give +1.50 (+6.00)"


def test_the_paper_has_one_effect_per_data_set():
    accuracy = hypotheses.section("accuracy")["vit_s"]
    assert {"imagenet1k", "imagenet1k_first_version"} <= accuracy.keys()
    result = hypotheses.of_paper("accuracy", hypotheses.minus("feature", "linear"), "vit_s")
    assert len(result) == len([key for key in accuracy if isinstance(accuracy[key], dict)]) - 1
    assert max(result.values()) < 2


HIGHER, EQUAL, WIDE = [0.5, 0.6, 0.55, 0.45, 0.5], [0.1, -0.1, 0.05, -0.05, 0.0], [0.6, -0.1, 0.6, -0.2, 0.4]
LOWER = [-value for value in HIGHER]


@pytest.fixture
def only_study(monkeypatch):
    """Make `study` the only published study."""
    monkeypatch.setattr(contrasts, "is_published", lambda study: study == "study")


@pytest.mark.parametrize(("values", "claims", "equivalent", "expected"), [
    (HIGHER, "above", 0.2, "confirmed"),
    (LOWER, "above", 0.2, "contradicted"),
    (EQUAL, "above", 0.2, "equivalent within 0.2"),
    (EQUAL, "above", None, "not confirmed"),
    (WIDE, "above", 0.2, "not confirmed"),
    (HIGHER, "equal", 0.2, "contradicted"),
    (LOWER, "equal", 0.2, "contradicted"),
    (EQUAL, "equal", 0.2, "equivalent within 0.2"),
    (HIGHER, "equal", 1.0, "equivalent within 1.0"),  # significantly above zero, but within the bound
    (WIDE, "equal", 0.2, "not confirmed"),
    (HIGHER, "different", None, "above zero"),
    (LOWER, "different", None, "below zero"),
    (WIDE, "different", None, "not confirmed"),
])
def test_decisions(runs, only_study, values, claims, equivalent, expected):
    runs("study", {("linear",): [0.0] * 5, ("feature",): values})
    run = hypotheses.Hypothesis("H1", "", contrast(contrasts.difference()), claims, equivalent)
    other = hypotheses.Hypothesis("H2", "", contrast(contrasts.difference(), "not there"))
    first, second = hypotheses.decided([run, other], holm)
    assert (first["decision"], second["decision"]) == (expected, "unfinished")
    # Holm's adjustment covers two hypotheses, because H2, which has no runs, counts with p = 1.
    assert first["p"] == pytest.approx(min(1.0, 2 * run.contrast.difference.p))


@pytest.mark.parametrize(("of_interest", "expected"), [
    (0.4, ""), (3.0, "but the mean is below 3 points, the smallest difference of interest")])
def test_a_confirmed_difference_below_the_threshold_of_interest_is_marked(runs, only_study, of_interest, expected):
    runs("study", {("linear",): [0.0] * 5, ("feature",): HIGHER})
    run = hypotheses.Hypothesis("H3", "", contrast(contrasts.difference()), of_interest=of_interest)
    (row,) = hypotheses.decided([run], holm)
    assert (row["decision"], row["remark"]) == ("confirmed", expected)


def test_effects_of_the_paper():
    assert hypotheses.GAINS["vit_s"]["CIFAR-10"] == pytest.approx(0.79)
    assert "is +0.20 to +0.61 for ResNetV2-18 and -0.47 to +2.01 for all ResNetV2s" in evidence.answers()["ResNets"]
    assert [result.contrast.of_paper for result in hypotheses.PART_TWO] == ["+0.79", "+1.27", "", ""]
    starts = hypotheses.of_paper("connection_switch_reinitialised", hypotheses.of_switch(1, 0))
    assert starts["CIFAR-10"] == pytest.approx((93.89 + 94.10 - 92.78 - 92.88) / 2)


def test_comparisons_outside_the_families_are_never_confirmed():
    """The preregistration calls a comparison exploratory if it is outside the families of hypotheses."""
    assert {result.claims for result in hypotheses.BESIDE} == {"different", "equal"}


@pytest.mark.parametrize(
    "hypothesis", [*hypotheses.PART_TWO, *hypotheses.PART_ONE, *hypotheses.BESIDE], ids=lambda result: result.name)
def test_hypotheses_use_settings_of_their_studies(hypothesis):
    for study, weights in hypothesis.contrast.parts:
        variants = design.load(study.partition("-")[0], "small").variants({"dataset": "digits"})
        assert set(weights) <= {(*variant.cell.values(), variant.final_connection) for variant in variants}


def test_every_preregistered_hypothesis_has_a_row():
    text = (ROOT / "docs" / "hypotheses.md").read_text(encoding="utf-8")
    for result in (*hypotheses.PART_ONE, *hypotheses.PART_TWO):
        assert f"**{result.name}**" in text
        assert result.contrast.label.startswith(result.name)
    for result in hypotheses.BESIDE:
        assert f"{result.name.partition(' ')[0]}" in text


# ---------------------------------------------------------------------------------- the factors of a half fraction
CELLS = list(design.load("cifar_factors", "small").grid["cell"])


def sign(cell, factor):
    return 1 if contrasts.FACTORS[factor][1] in cell.split("-") else -1


def test_the_half_fraction_has_its_defining_relation():
    """The cells are the 16 of 32 combinations of five factors whose product of signs is +1 (I = ABCDE)."""
    assert len(CELLS) == 16
    for cell in CELLS:
        product = 1
        for factor in contrasts.FACTORS:
            product *= sign(cell, factor)
        assert product == 1, cell
    for factor, other in itertools.combinations(contrasts.FACTORS, 2):
        assert sum(sign(cell, factor) * sign(cell, other) for cell in CELLS) == 0
    best = {variant.options.lr for variant in design.load("cifar_factors", "small").variants({})
            if "-r1-" in variant.cell["cell"]}
    for variant in design.load("cifar_factors", "small").variants({}):
        width, blocks, epochs, rate, recipe = variant.cell["cell"].split("-")
        kwargs, options = variant.options.model_kwargs, variant.options
        assert (f"w{kwargs['embed_dim']}", f"b{kwargs['depth']}", f"e{options.epochs}") == (width, blocks, epochs)
        assert options.lr / int(rate[1:]) in best
        assert (options.weight_decay, options.clip_grad) == {"paper": (1e-4, None), "clipped": (0.05, 1.0)}[recipe]


def test_effects_of_the_half_fraction(runs):
    """The effect of a factor is the mean of F − linear at its high level minus the mean at its low level.

    Its variance is computed after subtracting cell and seed means.
    """
    noise = random.Random(0)
    lead = {cell: [1.0 + 0.5 * sign(cell, "rate") - 0.25 * sign(cell, "width") + noise.gauss(0, 0.2) for _ in range(2)]
            for cell in CELLS}
    runs("study", {(cell, which): [70.0 + seed + (lead[cell][seed] if which == "feature" else 0.0) for seed in (0, 1)]
                   for cell in CELLS for which in ("linear", "feature")}, axis="cell")
    effects = {factor: contrasts.Effect("", "study", factor) for factor in contrasts.FACTORS}
    assert effects["rate"].difference.mean == pytest.approx(1.0, abs=0.2)
    assert effects["width"].difference.mean == pytest.approx(-0.5, abs=0.2)
    high = [value for cell in CELLS if sign(cell, "rate") > 0 for value in lead[cell]]
    low = [value for cell in CELLS if sign(cell, "rate") < 0 for value in lead[cell]]
    assert effects["rate"].difference.mean == pytest.approx(sum(high) / 16 - sum(low) / 16)
    total = sum(high + low) / 32
    by_seed = [sum(lead[cell][seed] for cell in CELLS) / 16 for seed in (0, 1)]
    rest = sum((lead[cell][seed] - sum(lead[cell]) / 2 - by_seed[seed] + total) ** 2
               for cell in CELLS for seed in (0, 1))
    error = (rest / 15 * (1 / 16 + 1 / 16)) ** 0.5
    assert effects["rate"].difference.half_width == pytest.approx(stats.t.ppf(0.975, 15) * error)
    assert effects["rate"].difference.p == pytest.approx(2 * stats.t.sf(effects["rate"].difference.mean / error, 15))
    assert effects["rate"].seeds == 2


# --------------------------------------------------------------------------------------------------- commits
def test_runs_from_before_the_rules_are_reported(runs, monkeypatch):
    made = {seed: {"commit": commit, "end": "2026-01-02T03:04:05", "cpu": cpu, "torch": "2"} for seed, commit, cpu in (
        (100, "aaaaaaaa", "one"), (101, "bbbbbbbb", "one"), (102, "cccccccc", "one"))}
    runs("confirm_x-digits-small", {("linear",): LINEAR[:3], ("feature",): FEATURE[:3]})
    for run in contrasts.runs_of("confirm_x-digits-small"):
        other = run["seed"] == 102 and run["connection"] == "feature"
        run["made_with"] = {**made[run["seed"]], **({"cpu": "other"} if other else {})}
    monkeypatch.setattr(commits, "runs_of", contrasts.runs_of)
    monkeypatch.setattr(commits, "studies_of", lambda part: ["confirm_x-digits-small"])
    monkeypatch.setattr(commits, "is_published", lambda study: True)
    history = {"one": {"commits": {"aaaaaaaa": "not in the history", "bbbbbbbb": "before", "cccccccc": "after"}}}
    assert commits.elsewhere("one", history) == {"confirm_x-digits-small": {
        "runs": 4, "seeds": [100, 101], "commits": ["aaaaaaa", "bbbbbbb"], "last": "2026-01-02 03:04"}}
    contrasts.runs_of("confirm_x-digits-small")[0]["made_with"].pop("commit")
    assert commits.elsewhere("one", history)["confirm_x-digits-small"]["commits"] == [
        "aaaaaaa", "bbbbbbb", "unknown"]
    contrasts.runs_of("confirm_x-digits-small")[1]["made_with"]["commit"] = "dddddddd"
    assert commits.mixed_pairs("one") == [
        {"study": "confirm_x-digits-small", "seed": 101, "several": {"commits": ["bbbbbbb", "ddddddd"]}},
        {"study": "confirm_x-digits-small", "seed": 102, "several": {"processors": ["one", "other"]}}]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_recorded_commits_match_the_history():
    result = commits.read_history()
    if result is None:
        pytest.skip("the checkout has no git history")
    recorded = json.loads(commits.FILE.read_text(encoding="utf-8"))
    assert {part: values["commits"] for part, values in result.items()} == {
        part: values["commits"] for part, values in recorded.items()}


def test_a_mean_without_some_seeds(runs):
    runs("study", {("linear",): LINEAR, ("feature",): FEATURE})
    result, (low, high) = contrast(contrasts.difference()).without(100)
    assert result == paired_difference(FEATURE[1:], LINEAR[1:])
    assert (low, high) == pytest.approx(tuple(stats.ttest_rel(FEATURE[1:], LINEAR[1:]).confidence_interval(0.9)))


# ------------------------------------------------------------------------------------------------- the answers
@pytest.mark.parametrize(("decisions", "expected"), [
    (["not confirmed", "equivalent within 0.2"], "has no measurable accuracy gain on CIFAR-10 and Fashion-MNIST"),
    (["confirmed", "not confirmed"],
     "is more accurate on CIFAR-10, has no measurable accuracy gain on Fashion-MNIST"),
    (["confirmed", "contradicted"], "is more accurate on CIFAR-10, is less accurate on Fashion-MNIST"),
])
def test_the_verdict_follows_the_decisions(runs, only_study, monkeypatch, decisions, expected):
    history = [{"train_loss": 1.0, "eval_loss": 1.0, "eval_top1": 50.0}] * 4
    runs("study", {("linear",): LINEAR, ("feature",): FEATURE})
    for run in contrasts.runs_of("study"):
        run["history"] = history if run["connection"] == "linear" else [
            {"train_loss": 0.9 - 0.01 * run["seed"], "eval_loss": 1.1 + 0.01 * run["seed"], "eval_top1": 50.0 + epoch}
            for epoch in range(4)]
    rows = [{"hypothesis": hypotheses.Hypothesis(name, "", contrast(contrasts.difference())), "decision": decision}
            for name, decision in zip(("C1", "H1"), decisions, strict=True)]
    assert evidence.verdict(rows).startswith(
        f"in narrow ViTs trained for 4 epochs, F {expected} and reaches a lower training loss on all of these; not ")
    assert "more than 4 epochs" in evidence.verdict(rows)
    (cifar, fashion) = evidence.fits(rows)
    assert cifar.startswith("CIFAR-10 (C1's runs): F − linear is +0.00 after epoch 1, +1.00 after epoch 2 and +0.62 ")
    assert evidence.higher_test_loss(rows) == "; its test loss is higher on CIFAR-10 and Fashion-MNIST"
    for run in contrasts.runs_of("study"):
        run["history"][-1]["train_loss"] = run["seed"] % 2 - 0.1 * (run["connection"] == "feature") * (run["seed"] % 3)
    assert evidence.lower_loss(rows) == "none of these"  # lower on average, but not significantly
    assert "lower in 4 of 4 pairs (mean difference -1.115 [" in fashion
    assert "its final test loss is lower in 0 of 4 (+1.115 [" in fashion


def sweep(runs, monkeypatch, leads):
    """Return a made-up learning-rate study. Linear is best at 1e-3. `leads` maps a rate to F − linear of each seed."""
    levels = {5e-4: 80.0, 1e-3: 82.0, 4e-3: 75.0}
    made = {rate: [levels[rate] + value for value in lead] for rate, lead in leads.items()}
    runs("study-digits-small", {setting: values for rate in leads for setting, values in (
        ((rate, "linear"), [levels[rate]] * 5), ((rate, "feature"), made[rate]))})
    # Holm's method adjusts the p-values of top-1 and top-5 together. Here both have the same differences.
    adjusted = holm([paired_difference(lead, [0.0] * 5).p for lead in [*leads.values()] * 2])
    summary = [{"measure": "top1", "cell": {"lr": rate}, "difference": {"p_holm": p}}
               for rate, p in zip(leads, adjusted, strict=False)]
    monkeypatch.setattr(hypotheses, "summary_of", lambda study: [
        *summary, {"measure": "top1", "cell": {"lr": 5e-4}, "difference": None},
        {"measure": "top5", "cell": {"lr": 4e-3}, "difference": {"p_holm": 0.0}}])
    return hypotheses.Sweep.of("study", "digits", tuple(leads))


def test_one_criterion_for_gains_and_losses(runs, monkeypatch):
    """Holm's method adjusts the p-values of all differences of a study, as in the study's report."""
    weak = [0.05, 0.3, 0.1, 0.25, 0.2]
    result = sweep(runs, monkeypatch, {5e-4: [-value for value in weak], 1e-3: WIDE, 4e-3: [3.0, 3.1, 2.9, 3.05, 3.2]})
    assert result.best == 1e-3
    assert (result.excluding_zero(1), result.excluding_zero(-1)) == ([4e-3], [5e-4])
    assert (result.significant(1), result.significant(-1)) == ([4e-3], [])
    assert result.ranked() == "0.001 (82.00 %), and the second highest at 0.0005 (80.00 %)"
    assert result.at_best().values == pytest.approx(WIDE)
    apart = sweep(runs, monkeypatch, {5e-4: [3.0] * 5, 1e-3: [0.5] * 5, 4e-3: WIDE}).at_best()
    assert (apart.label, apart.values) == ("F at 0.0005, linear at 0.001", pytest.approx([1.0] * 5))
    other = sweep(runs, monkeypatch, {5e-4: [-3.0, -3.1, -2.9, -3.05, -3.2], 1e-3: WIDE, 4e-3: weak})
    assert (other.significant(1), other.significant(-1)) == ([], [5e-4])
    sentence = evidence.lead([result, other])
    assert "more accurate at 4 times linear's best rate on digits and at no rate on Fashion-MNIST. " in sentence
    assert "less accurate at no rate on digits and at 0.5 times linear's best rate on Fashion-MNIST." in sentence
    assert evidence.lead([result, result]).endswith("F is significantly less accurate at no rate.")


def test_significant_rates_match_the_reports():
    result = [hypotheses.Sweep.of(study, data, rates) for _, study, data, rates in hypotheses.RATE_STUDIES]
    for of, (_, study, data, _) in zip(result, hypotheses.RATE_STUDIES, strict=True):
        reported = [entry["difference"] for entry in contrasts.summary_of(f"{study}-{data}-small")
                    if entry["measure"] == "top1" and entry["difference"] and entry["difference"]["p_holm"] < 0.05]
        significant = [of.by_rate[rate].difference.mean for rate in (*of.significant(-1), *of.significant(1))]
        assert significant == pytest.approx([difference["mean"] for difference in reported], abs=1e-5)


def test_the_detectable_difference_has_a_power_of_80_percent(runs):
    runs("study", {("linear",): LINEAR, ("feature",): FEATURE})
    for run in contrasts.runs_of("study"):
        run["made_with"] = {}
    measured = contrast(contrasts.difference())
    detectable = float(evidence.pairs(measured)["detectable, points"])
    drawn = np.random.default_rng(0).normal(detectable, np.std(measured.values, ddof=1), (20_000, len(LINEAR)))
    assert (stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.01)


def test_the_accuracy_after_a_share_of_the_epochs():
    """The share is rounded down, but at least one epoch is over."""
    for epochs, over in ((1, 1), (8, 2), (10, 2), (12, 3)):
        run = {"history": [{"eval_top1": float(epoch)} for epoch in range(1, epochs + 1)]}
        assert contrasts.after(0.25)(run) == over


def test_the_cost_is_the_median_over_pairs(runs):
    runs("study", {("linear",): [10.0, 20.0, 30.0], ("feature",): [11.0, 30.0, 36.0]})
    for run in contrasts.runs_of("study"):
        run["seconds"] = run["top1"]
    assert evidence.times(contrast(contrasts.difference())) == pytest.approx((1.2, 1.1, 1.5))


def forget_values():
    """Remove the cached values of the hypotheses of both parts, which are module-level objects."""
    for one in (*hypotheses.PART_ONE, *hypotheses.PART_TWO):
        for base in type(one.contrast).__mro__:
            for name, value in vars(base).items():
                if isinstance(value, functools.cached_property):
                    vars(one.contrast).pop(name, None)


@pytest.fixture
def part_two(tmp_path, monkeypatch):
    """Publish made-up results of S0 to S4, the studies of docs/hypotheses.md's part two, beside the real results."""
    studies = tmp_path / "studies"
    studies.mkdir()
    for path in pages.RESULTS.iterdir():
        if path.name != "studies":
            (tmp_path / path.name).symlink_to(path)
    for path in (pages.RESULTS / "studies").iterdir():
        if not path.name.startswith(("cifar_", "tiny_imagenet_")):  # do not overwrite real results with made-up ones
            (studies / path.name).symlink_to(path)
    noise = random.Random(0)
    for name, data, classes in (("cifar_rates", "cifar10", 10), ("cifar_accuracy", "cifar10", 10),
                                ("tiny_imagenet_accuracy", "tiny_imagenet", 200), ("cifar_factors", "cifar10", 10),
                                ("cifar_width", "cifar10", 10), ("cifar_vit_small", "cifar10", 10),
                                ("cifar_resnet18", "cifar10", 10)):
        result, made = design.load(name, "small"), []
        for seed, variant in itertools.product(range(result.seeds), result.variants({})):
            top1 = 70 + noise.gauss(0, 0.3) + 2 * (variant.connection == "feature")
            history = [{"epoch": epoch, "train_loss": 1.0 - epoch / 100, "eval_loss": 1.0, "eval_top1": top1,
                        "train_seconds": 1.0} for epoch in range(8)]
            made.append({
                "cell": dict(variant.cell), "connection": variant.connection, "seed": 200 + seed, "top1": top1,
                "history": history, "labels": [str(label) for label in range(classes)], "seconds": 10.0, "loss": 1.0,
                "parameters": 1, "device": "cpu",
                "made_with": {"commit": "c" * 40, "cpu": "one", "torch": "2", "end": "2026-12-01T00:00"}})
        study = {"name": name, "title": name, "kind": "training", "dataset": data, "connections": ["linear", "feature"],
                 "axes": dict(result.grid), "seeds": list(range(result.seeds)), "baseline": result.baseline,
                 "paper": "", "scale": "small", "changed": []}
        published.write(studies / f"{name}-{data}-small", study, made)
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    forget_values()
    yield
    forget_values()


def test_part_two_is_reported_as_soon_as_its_runs_exist(part_two, monkeypatch):
    floors = json.loads((pages.RESULTS / "floors" / "ridge.json").read_text(encoding="utf-8"))
    floors[f"tiny_imagenet_accuracy-{hypotheses.TINY}-small"] = {
        "top1": 2.0, "best": 3.0, "alpha": 10_000, "train": 100_000}
    read = evidence._json
    monkeypatch.setattr(evidence, "_json", lambda name: floors if name == "floors/ridge.json" else read(name))
    history = {**commits.recorded(), "three": {"rules": "3" * 40, "date": "2026-11-27", "commits": {"c" * 40: "after"}}}
    before = evidence.text({**history, "two": {**history["two"], "commits": {"c" * 40: "before"}}})
    after = evidence.text({**history, "two": {**history["two"], "commits": {"c" * 40: "after"}}})
    assert "runs record commits that do not come after these rules" in before
    assert "runs record commits that do not come after these rules" not in after
    assert "runs of `cifar_accuracy` record commit ccccccc, which comes after it" in after
    assert "which comes after it" not in before.partition("(part three)")[0]
    rows = {line.split(" | ")[0].strip("| "): line for line in after.splitlines() if line.startswith(("| C", "| D"))}
    assert "**confirmed** | no, larger (+0.79)" in rows["C1"]
    assert "**confirmed**" in rows["C2"]
    assert "**not confirmed**" in rows["C3"]
    assert "| 2 |" in rows["C4"]
    assert "| 4 | +" in rows["D1"]
    assert "**confirmed** | no, larger (+0.79)" in rows["D1"]
    assert "**confirmed** | no, larger (+0.20)" in rows["D2"]
    assert "The 8 runs of `cifar_resnet18` record commit ccccccc" in after.partition("(part three)")[2]
    assert "unfinished" not in after
    assert "not run: no GPU" not in after
    (untested,) = [line for line in after.splitlines() if line.startswith("- **Not tested**")]
    assert not any(word in untested for word in ("C3", "C4", "width", "ResNets on CIFAR"))
    assert "width 384" not in after.partition("## Decided")[0]
    assert "Tiny ImageNet, CIFAR-10 and Fashion-MNIST have 10,000 test images" in after
    assert "C2, C1 and H1 differ in more than their data" in after
    assert "on CIFAR-10 and Tiny ImageNet it is the best of five values for these images (on Tiny ImageNet " in after
    planned = next(line for line in after.splitlines() if line.startswith("| detectable")).strip("| ").split(" | ")[1:3]
    missed = [name for name, points in zip(("C2", "C1"), planned, strict=True) if float(points) > evidence.EXPECTED]
    assert (f"The pairs of {' and '.join(missed)} vary more than planned." in after) == bool(missed)
    assert "trained for 8 to 20 epochs, F is more accurate on Tiny ImageNet and CIFAR-10, has no" in after
    said = " ".join(evidence.recommendation().split())
    assert "8 to 20 epochs) with Orthogonal-F and with plain addition. The gain of Orthogonal-F in top-1" in said
    assert re.search(r"\[[^]]*\] on Tiny ImageNet \(\d+ seeds\), [^]]*\] on CIFAR-10 \(\d+ seeds\) and ", said)
    assert "width 384" not in said
    assert "C2's runs: F − linear in accuracy after 2 of 8 epochs" in after
    assert "F − linear with rate r4 minus F − linear with rate r1 in final training loss" in after
    assert "F − linear with rate r4 minus F − linear with rate r1 |" not in after  # C3 is in the first table
    assert "ViT: (F − linear at width 384) − (F − linear at width 128), CIFAR-10" in after
    assert "Studies S1, S2 and S4 use the recipe `" in after
    assert "\n| setting | C2 | C1 | H1 | paper, Tiny ImageNet | paper, CIFAR-10 |\n" in after
    assert "\n| width over depth | 21.3 | 21.3 | 10.7 | 64 | 64 |\n" in after
    assert set(evidence.pictures()) == {"questions", "differences", "by_epoch", "by_time"}
    shutil.rmtree(pages.RESULTS / "studies" / f"cifar_width-{hypotheses.CIFAR}-small")
    assert evidence.untested(evidence.of_vits())[-1] == "width 384, as in ViT-S"
