"""Every decimal number of the papers that README and docs/evidence.md print, compared with timm_ortho/lab/paper/*.json.

The effects are computed here from the stored tables, without the code that writes the pages.
"""
import math
import re
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from scripts.evidence import HYPOTHESES
from timm_ortho.lab import paper
from timm_ortho.lab.planning.study_file import shipped

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/evidence.md")
NUMBERS = paper.numbers()
NUMBER = r"[+-]?\d+\.\d+"


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


VIT, RESNET_18 = gains("vit_s"), gains("resnetv2_18", data="cifar10")
RESNETS = gains(*(model for model in NUMBERS["architectures"] if model.startswith("resnetv2_")))
SWITCH, RATES = of_sets("connection_switch_reinitialised", first_training), of_sets("learning_rate_sweep", rate_slope)
BOTH = [fmean(pair) for pair in zip(transforms("skips_branch4"), transforms("skips_depthwise"), strict=True)]
CIFAR, TINY = gains("vit_s", data="cifar10"), gains("vit_s", data="tiny_imagenet")
EFFECTS = {  # hypothesis -> the papers' effects
    "C1": CIFAR, "C2": TINY, "D1": CIFAR, "D2": RESNET_18, "H1": VIT, "H2": RATES, "H4": BOTH, "H5": SWITCH,
    "P2b": RATES}


def is_rounded(printed, value):
    """Return whether a printed number is a value, rounded to the printed digits in either direction at a half."""
    unit = 10.0 ** -len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * unit + 1e-9


def span(effects):
    """Return the smallest and the largest effect, or the only one."""
    return sorted({min(effects), max(effects)})


@pytest.fixture(scope="module")
def pages():
    return {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def test_effects_of_the_hypotheses():
    """scripts/evidence.py has the smallest and the largest effect of the papers."""
    effects = {one.id: one.paper for one in HYPOTHESES if one.paper}
    assert effects.keys() == EFFECTS.keys()
    for name, numbers in effects.items():
        assert len(numbers) == len(span(EFFECTS[name])), name
        assert all(is_rounded(f"{number:.2f}", value) for number, value in
                   zip(numbers, span(EFFECTS[name]), strict=True)), name


def test_gain_by_depth_in_the_study_of_four_branches():
    """The header has the mean gain of the transforms on CIFAR-100 at each depth of Wang et al.'s Table 2."""
    header = " ".join(shipped()["skips_branch4"].read_text(encoding="utf-8").replace("#", " ").split())
    table = {depth: skips for depth, skips in NUMBERS["skips_branch4"].items() if depth.isdecimal()}
    gains = [fmean(by_data["cifar100"][0] for skip, by_data in skips.items() if skip != "identity")
             - skips["identity"]["cifar100"][0] for skips in table.values()]
    printed = re.search(r"transforms is ([\d., and]+) points above the identity at depths ([\d, and]+)\.", header)
    assert re.findall(r"\d+", printed[2]) == [*table]
    assert all(map(is_rounded, re.findall(NUMBER, printed[1]), gains))


def test_gains_in_readme(pages):
    """README's table has the paper's gain for each of its networks."""
    table = pages["README.md"].partition("| network, data |")[2].partition("<!--")[0]
    rows = {row[0]: re.findall(NUMBER, row[2]) for line in table.splitlines()[2:]
            if len(row := line.strip("| ").split(" | ")) == 3}
    expected = {
        "ViT, width 128, Tiny ImageNet": TINY, "ViT, width 128, CIFAR-10": CIFAR,
        "narrow ResNetV2-18, Fashion-MNIST": RESNETS, "ViT-B, ImageNet-1k": gains("vit_b", data="imagenet1k")}
    assert {name for name, numbers in rows.items() if numbers} == expected.keys()
    for name, effects in expected.items():
        assert all(map(is_rounded, rows[name], span(effects))), name


def test_settings_of_the_papers_trainings(pages):
    """The last column of the table of settings equals the stored recipes for Tiny ImageNet and CIFAR-10."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in pages["docs/evidence.md"].splitlines()
            if line.startswith("|")]
    start = next(index for index, row in enumerate(rows) if row[0] == "setting")
    column = {row[0]: row[-1].split("; ") for row in rows[start + 2:start + 11]}
    vit = NUMBERS["gamma"]["models"]["vit_small"]
    recipes = [paper.experiments()[f"vit_s_{data}"].recipe for data in ("tiny_imagenet", "cifar10")]
    assert column["pixels, patch"] == [f"{recipe['resolution']}, {recipe['patch']}" for recipe in recipes]
    assert column["width, blocks"] == [f"{vit['width']}, {vit['blocks']}"]
    of_vit = recipes[0]
    jitter = "/".join(str(of_vit["color_jitter"][key]) for key in ("brightness", "contrast", "saturation", "hue"))
    (low, high), pad = recipes[0]["crop"]["scale"], recipes[1]["crop"]
    assert column["augmentation"] == [
        f"crop ({100 * low:.0f} to {100 * high:.0f} % of the image",
        f"{pad}), flip, colour jitter {jitter}, RandAugment {(*of_vit['randaugment'].values(),)}, "
        f"MixUp {of_vit['mixup']['alpha']}, CutMix {of_vit['cutmix']['alpha']}, "
        f"random erasing {of_vit['random_erasing']['prob']}"]
    for row, key in (("learning rate", "lr"), ("batch size", "batch"), ("weight decay", "weight_decay"),
                     ("label smoothing", "smoothing"), ("epochs", "epochs")):
        values = dict.fromkeys(recipe[key] for recipe in recipes)
        assert list(map(float, column[row])) == list(values), row
