"""scripts/contrasts.py and scripts/evidence.py: what model_cards/README.md says of the runs."""
from pathlib import Path

import contrasts
import evidence
import pytest
from scipy import stats

from timm_ortho.lab import design
from timm_ortho.lab.statistics import holm, paired_difference

ROOT = Path(__file__).parents[1]


@pytest.fixture
def runs(monkeypatch):
    """Sets the runs of studies: from study -> setting -> values by seed."""
    made = {}

    def put(study, settings, axis="lr"):
        made[study] = [
            {"cell": {axis: setting[0]} if len(setting) > 1 else {}, "connection": setting[-1], "seed": 100 + seed,
             "top1": value} for setting, values in settings.items() for seed, value in enumerate(values)]

    monkeypatch.setattr(contrasts, "runs_of", made.__getitem__)
    return put


def contrast(weights, *studies):
    return contrasts.Contrast("", [(study, weights) for study in studies or ("study",)])


LINEAR, FEATURE = [80.0, 81.5, 79.0, 80.5], [80.5, 81.0, 80.5, 81.5]


def test_a_difference_is_the_reports(runs):
    runs("study", {("linear",): LINEAR, ("feature",): FEATURE})
    found = contrast(contrasts.difference())
    assert found.found == paired_difference(FEATURE, LINEAR)
    assert found.found.p == pytest.approx(stats.ttest_rel(FEATURE, LINEAR).pvalue)
    assert found.pooled.half_width == pytest.approx(found.found.half_width)  # of two settings they are one analysis
    interval = stats.ttest_rel(FEATURE, LINEAR).confidence_interval(0.9)
    bound = max(map(abs, interval))
    assert found.within(bound * 1.001)
    assert not found.within(bound * 0.999)
    assert contrast({("linear",): 1.0}).pooled is None  # each seed's mean is all there is of it


def test_a_slope_is_least_squares(runs):
    rates, lead = (1e-3, 1e-2, 5e-2), [[0.1, 1.2, 1.5], [-0.3, 0.9, 2.8]]
    runs("study", {**{(rate, "linear"): [70.0, 71.0] for rate in rates},
                   **{(rate, "feature"): [70.0 + lead[0][i], 71.0 + lead[1][i]] for i, rate in enumerate(rates)}})
    found = contrast(contrasts.rates_slope(rates))
    expected = [stats.linregress([-3, -2, stats.linregress([0, 1], [0, 1]).slope * -1.3010299956639813], of).slope
                for of in lead]
    assert found.values == pytest.approx(expected)


def test_main_effects(runs):
    values = {("LL", "linear"): [1.0], ("LO", "feature"): [2.0], ("OL", "linear"): [5.0], ("OO", "feature"): [8.0]}
    runs("study", values, axis="switch")
    assert contrast(contrasts.switch(1, 0)).values == [5.0]  # ((5 + 8) - (1 + 2)) / 2
    assert contrast(contrasts.switch(0, 1)).values == [2.0]


def test_seeds_that_are_not_complete_take_no_part(runs):
    runs("one", {("linear",): LINEAR, ("feature",): FEATURE[:3]})
    runs("two", {("linear",): LINEAR, ("feature",): LINEAR})
    assert len(contrast(contrasts.difference(), "one").values) == 3
    both = contrast(contrasts.difference(), "two", "one")
    assert both.values == pytest.approx([(feature - linear) / 2 for feature, linear in zip(FEATURE[:3], LINEAR)])  # noqa: B905


def test_pooled_over_two_studies_is_that_of_each_where_they_are_equal(runs):
    settings = {("linear",): LINEAR, ("feature",): FEATURE}
    runs("one", settings)
    runs("two", settings)
    one, both = contrast(contrasts.difference(), "one").pooled, contrast(contrasts.difference(), "one", "two").pooled
    scale = stats.t.ppf(0.975, 6) / stats.t.ppf(0.975, 3) / 2 ** 0.5  # twice the values, twice the freedom
    assert both.half_width == pytest.approx(one.half_width * scale)


@pytest.mark.parametrize(("paper", "said"), [
    ({"one": 2.0, "other": 3.0}, "no, only 1.50 points are left up to 100 % (+2.00 to +3.00)"),
    ({"one": 1.0, "other": 3.0}, "yes, and excludes it (+1.00 to +3.00)"),
])
def test_what_a_ceiling_hides_is_not_excluded(runs, paper, said):
    runs("study", {("linear",): [98.4, 98.5, 98.6], ("feature",): [98.5, 98.5, 98.6]})
    found = contrasts.Contrast("", [("study", contrasts.difference())], paper=paper)
    assert found.room == pytest.approx(1.5)
    assert found.sees() == said


def test_only_a_difference_of_accuracies_has_a_ceiling(runs):
    runs("study", {(rate, which): [98.0, 99.0] for rate in (1e-3, 1e-2) for which in ("linear", "feature")})
    one = contrasts.difference(1e-3)
    assert contrast(one).room == pytest.approx(1.5)
    assert contrasts.Contrast("", [("study", one)], read=lambda run: run["top1"]).room == float("inf")
    for weights in ({(1e-3, "linear"): 1.0}, contrasts.rates_slope([1e-3, 1e-2])):
        assert contrast(weights).room == float("inf")


def test_a_slope_over_the_rate_has_the_ceiling_of_its_linear_networks(runs):
    """Best for F: 100 % at the rates above the mean, and linear's accuracy at those below."""
    runs("study", {(rate, which): [98.0, 99.0] for rate in (1e-3, 1e-2) for which in ("linear", "feature")})
    found = contrasts.Contrast("", [("study", contrasts.rates_slope([1e-3, 1e-2]))], paper={"": 6.0}, bases="linear")
    assert found.room == pytest.approx(1.5)  # over one decade
    assert found.sees() == "no, only 1.50 points are left up to 100 % (+6.00)"


def test_the_papers_effects_are_one_for_a_data_set():
    accuracy = evidence.section("accuracy")["vit_s"]
    assert {"imagenet1k", "imagenet1k_first_version"} <= accuracy.keys()
    found = evidence.of_paper("accuracy", evidence._less("feature", "linear"), "vit_s")
    assert len(found) == len([key for key in accuracy if isinstance(accuracy[key], dict)]) - 1
    assert max(found.values()) < 2


HIGHER, EQUAL, WIDE = [0.5, 0.6, 0.55, 0.45, 0.5], [0.1, -0.1, 0.05, -0.05, 0.0], [0.6, -0.1, 0.6, -0.2, 0.4]
LOWER = [-value for value in HIGHER]


@pytest.fixture
def only_study(monkeypatch):
    """There are results of `study` and of no other."""
    monkeypatch.setattr(evidence, "results_file", lambda study: ROOT / ("README.md" if study == "study" else "nothing"))


@pytest.mark.parametrize(("values", "claims", "equivalent", "said"), [
    (HIGHER, "above", 0.2, "confirmed"),
    (LOWER, "above", 0.2, "contradicted"),
    (EQUAL, "above", 0.2, "equivalent within 0.2"),
    (EQUAL, "above", None, "not confirmed"),
    (WIDE, "above", 0.2, "not confirmed"),
    (HIGHER, "equal", 0.2, "contradicted"),
    (LOWER, "equal", 0.2, "contradicted"),
    (EQUAL, "equal", 0.2, "equivalent within 0.2"),
    (HIGHER, "equal", 1.0, "equivalent within 1.0"),  # told apart from zero, and near it
    (WIDE, "equal", 0.2, "not confirmed"),
    (HIGHER, "different", None, "above zero"),
    (LOWER, "different", None, "below zero"),
    (WIDE, "different", None, "not confirmed"),
])
def test_decisions(runs, only_study, values, claims, equivalent, said):
    runs("study", {("linear",): [0.0] * 5, ("feature",): values})
    run = evidence.Hypothesis("H1", "", contrast(contrasts.difference()), claims, equivalent)
    other = evidence.Hypothesis("H2", "", contrast(contrasts.difference(), "not there"))
    first, second = evidence.decided([run, other], holm)
    assert (first["decision"], second["decision"]) == (said, "not run yet")
    # what is not run yet is adjusted for
    assert first["p"] == pytest.approx(min(1.0, 2 * run.contrast.found.p))


@pytest.mark.parametrize(("of_interest", "said"), [
    (0.4, ""), (3.0, "below the 3 from which on it is of interest")])
def test_what_is_confirmed_and_smaller_than_it_was_to_be_is_said(runs, only_study, of_interest, said):
    runs("study", {("linear",): [0.0] * 5, ("feature",): HIGHER})
    run = evidence.Hypothesis("H3", "", contrast(contrasts.difference()), of_interest=of_interest)
    (row,) = evidence.decided([run], holm)
    assert (row["decision"], row["remark"]) == ("confirmed", said)


def test_of_rates_that_are_nearly_as_good_the_lowest_is_chosen(runs, monkeypatch):
    runs("study", {
        (1e-3, "linear"): [80.0, 81.0], (2e-3, "linear"): [80.05, 81.05], (4e-3, "linear"): [80.0, 80.2],
        (1e-3, "feature"): [80.0, 81.0], (2e-3, "feature"): [80.2, 81.05], (4e-3, "feature"): [80.3, 81.0]})
    monkeypatch.setattr(evidence, "results_file", lambda study: Path(__file__))
    monkeypatch.setattr(evidence, "_json", lambda name: {"study": {"top1": 70.0}})
    found = evidence.tuned("study")
    assert found["chosen"] == {"linear": 1e-3, "feature": 2e-3}
    assert found["means"]["linear"][2e-3] == 80.55


def test_effects_of_the_paper():
    gains = evidence.of_paper("accuracy", evidence._less("feature", "linear"), "vit_s")
    assert gains["CIFAR-10"] == pytest.approx(0.79)
    starts = evidence.of_paper("connection_switch_reinitialised", evidence._of_switch(1, 0))
    assert starts["CIFAR-10"] == pytest.approx((93.89 + 94.10 - 92.78 - 92.88) / 2)


def test_what_is_outside_the_family_is_never_called_confirmed():
    """hypotheses.md: everything else is called exploratory."""
    assert {found.claims for found in evidence.BESIDE} == {"different", "equal"}


@pytest.mark.parametrize("hypothesis", [*evidence.FAMILY, *evidence.BESIDE], ids=lambda found: found.says)
def test_a_hypothesis_is_about_settings_that_its_study_has(hypothesis):
    for study, weights in hypothesis.contrast.parts:
        variants = design.load(study.partition("-")[0], "small").variants({"dataset": "digits"})
        assert set(weights) <= {(*variant.cell.values(), variant.final_connection) for variant in variants}


@pytest.mark.parametrize(("page", "said", "changed"), [
    ("model_cards/README.md", "411 runs", "412 runs"), ("README.md", " of 5 are", " of 6 are")])
def test_the_pages_are_what_the_runs_say(tmp_path, page, said, changed):
    evidence.main(check=True)
    for copied in ("model_cards/README.md", "README.md"):
        (tmp_path / copied).parent.mkdir(exist_ok=True)
        text = (ROOT / copied).read_text(encoding="utf-8")
        assert copied != page or said in text
        (tmp_path / copied).write_text(text.replace(said, changed) if copied == page else text)
    with pytest.raises(SystemExit, match="something else than the runs"):
        evidence.main(check=True, cards=tmp_path / "model_cards", root=tmp_path)
