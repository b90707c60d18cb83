"""Every decimal number of the papers that README and docs/evidence.md print, compared with timm_ortho/lab/paper/*.json.

The effects are computed here from the stored tables, without the code that writes the pages.
"""
import math
import re
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from timm_ortho.lab import paper

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/evidence.md")
NUMBERS = paper.numbers()
NUMBER = r"[+-]?\d+\.\d+"
OURS = rf"{NUMBER} (?:nats |points )?\[[^]]*\]"  # a measurement with its interval


def gains(*models, data=None):
    """F − linear for one or all data sets of Table 2 in the paper's final version."""
    return [entry["feature"][0] - entry["linear"][0] for model in models
            for name, entry in NUMBERS["accuracy"][model].items()
            if (not name.endswith("_first_version") if data is None else name == data)]


def of_sets(table, effect):
    return [effect(entry) for entry in NUMBERS[table].values() if isinstance(entry, dict)]


def first_training(entry):
    """Orthogonal minus linear in the first of two trainings, as the mean over the second."""
    return (entry["OO"][0] + entry["OL"][0] - entry["LO"][0] - entry["LL"][0]) / 2


def rate_slope(entry):
    """Least-squares slope of F − linear, in points per tenfold learning rate."""
    rates = [math.log10(float(rate)) for rate in entry["linear"]]
    return np.polyfit(rates, [entry["feature"][rate][0] - entry["linear"][rate][0] for rate in entry["linear"]], 1)[0]


def transforms(table):
    """Mean of all transforms minus the identity, for each data set of the networks with 20 layers."""
    by_skip = NUMBERS[table]["20"]
    return [fmean(by_data[data][0] for skip, by_data in by_skip.items() if skip != "identity")
            - by_skip["identity"][data][0] for data in by_skip["identity"]]


VIT, RESNET_18 = gains("vit_s"), gains("resnetv2_18")
RESNETS = gains(*(model for model in NUMBERS["architectures"] if model.startswith("resnetv2_")))
SWITCH, RATES = of_sets("connection_switch_reinitialised", first_training), of_sets("learning_rate_sweep", rate_slope)
KEPT = of_sets("connection_switch_continuous", lambda entry: entry["OL"][0] - entry["LL"][0])
BRANCH4, DEPTHWISE = transforms("skips_branch4"), transforms("skips_depthwise")
BOTH = [fmean(pair) for pair in zip(BRANCH4, DEPTHWISE, strict=True)]
PATTERN, NORM = NUMBERS["layer_pattern"], NUMBERS["final_layer_norm"]["without"]
RANK = {name: entry["effective_rank"][0] for name, entry in NUMBERS["representation"].items()
        if isinstance(entry, dict) and "effective_rank" in entry}
EFFECTS = {  # first cell of a row of docs/evidence.md -> the paper's effects
    "C1": gains("vit_s", data="cifar10"), "C2": gains("vit_s", data="tiny_imagenet"),
    "H1": VIT, "H2": RATES, "H4": BOTH, "H5": SWITCH, "P2b": RATES,
    "Table 2, ViT-S": VIT, "Table 2, ResNetV2": RESNET_18, "Table 3": SWITCH, "Table 10": KEPT,
    "Table 4": [PATTERN["all"][0] - PATTERN["none"][0]],
    "Table 7": [fmean(NUMBERS["initialisation"][start]["global"][0] - NUMBERS["initialisation"][start]["linear"][0]
                      for start in ("kaiming", "xavier", "orthogonal"))],
    "Table 9": [NORM["feature"][0] - NORM["linear"][0]],
    "Table 3 (final version)": RATES,
    "Table 4 (final version)": [100 * math.log(RANK["feature"] / RANK["linear"])],
    "Wang et al., Table 2": BRANCH4, "Wang et al., Table 3": DEPTHWISE,
}


def is_rounded(printed, value):
    """Return whether a printed number is a value, rounded to the printed digits in either direction at a half."""
    unit = 10.0 ** -len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * unit + 1e-9


def span(effects):
    """Return the smallest and the largest effect, or the only one."""
    return sorted({min(effects), max(effects)})


@pytest.fixture(scope="module")
def pages():
    if not all((ROOT / page).is_file() for page in PAGES):
        pytest.skip("requires a checkout of the repository")
    return {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def test_effects_in_the_tables(pages):
    """The parentheses of the last column have the smallest and the largest effect of the paper."""
    found = set()
    for line in re.findall(r"^\|.*$", pages["docs/evidence.md"], re.MULTILINE):
        name, *_, last = [cell.strip() for cell in line.strip("|").split("|")]
        printed = re.search(rf"\(({NUMBER}(?: to {NUMBER})?)\)", last)
        if printed:
            numbers = printed[1].split(" to ")
            assert len(numbers) == len(span(EFFECTS[name])), line
            assert all(map(is_rounded, numbers, span(EFFECTS[name]))), line
            found.add(name)
    assert found == set(EFFECTS)


def printed_in_text(text):
    """Yield the numbers in the clauses of a page's sentences that name a paper, except our own measurements."""
    prose = re.sub(r"^\s*\|.*$|^ {4}.*$", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)
    for sentence in re.split(r"(?<=[.:])\s(?=\s*[A-Z*-])|\n\n", prose):
        sentence = re.sub(OURS, "", re.sub(r"\s+", " ", sentence).replace("In the paper, ", "In the paper "))
        for clause in re.split(r"[,;] ", sentence):
            if re.search(r"\bpapers?\b|Wang et al\.", clause):
                yield from ((number, clause) for number in re.findall(NUMBER, clause))


def test_numbers_in_the_text(pages):
    accuracy, speed = NUMBERS["accuracy"], NUMBERS["throughput"]
    tiny = accuracy["vit_s"]["tiny_imagenet"]
    vit_b = accuracy["vit_b"]["imagenet1k"]
    expected = {  # in the order of the page
        "README.md": [vit_b["feature"][0], vit_b["linear"][0], *span(RESNETS)],
        "docs/evidence.md": [
            *span(RESNET_18), *span(RESNETS), *tiny["linear"], *tiny["feature"], *span(RESNET_18), *span(RATES),
            *span(BOTH), *span(SWITCH), speed["vit_s"][2], speed["resnetv2_34"][2]],
    }
    for page, values in expected.items():
        printed = list(printed_in_text(pages[page]))
        assert len(printed) == len(values), printed
        for (number, clause), value in zip(printed, values, strict=True):
            assert is_rounded(number, value), (clause, value)


def test_settings_of_the_papers_trainings(pages):
    """The columns of the paper in the table of settings equal the stored recipes."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in pages["docs/evidence.md"].splitlines()
            if line.startswith("|")]
    start = next(index for index, row in enumerate(rows) if row[0] == "setting")
    columns = {rows[start][place]: {row[0]: row[place] for row in rows[start:start + 12]}
               for place in range(1, len(rows[start])) if rows[start][place].startswith("paper, ")}
    assert set(columns) == {"paper, Tiny ImageNet", "paper, CIFAR-10"}
    vit = NUMBERS["gamma"]["models"]["vit_small"]
    for data in ("tiny_imagenet", "cifar10"):
        recipe = paper.experiments()[f"vit_s_{data}"].recipe
        column = columns[f"paper, {paper.name('dataset', data)}"]
        assert column["pixels, patch"] == f"{recipe['resolution']}, {recipe['patch']}"
        assert column["width, blocks"] == f"{vit['width']}, {vit['blocks']}"
        assert float(column["width over depth"]) == vit["gamma"]
        for row, key in (("learning rate", "lr"), ("batch size", "batch"), ("weight decay", "weight_decay"),
                         ("label smoothing", "smoothing"), ("epochs", "epochs")):
            assert float(column[row]) == recipe[key], (row, data)
