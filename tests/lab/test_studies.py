"""lab/studies: every shipped study loads, expands to runs, and builds its models."""
import json
import re
from argparse import Namespace
from functools import cache

import pytest
import timm
import torch

import timm_ortho
from timm_ortho import cli
from timm_ortho.lab.planning import checks, design
from timm_ortho.lab.running import loop as train
from timm_ortho.models.meta import on_meta

NAMES = sorted(design.shipped())


@pytest.mark.parametrize("name", NAMES)
def test_shipped_study_is_complete(name):
    for scale in scales(name):
        found = design.load(name, scale)
        assert found.title.endswith("?")
    header = design.shipped()[name].read_text().split("title:")[0]
    assert f"timm-ortho study run {name}" in header
    assert "The paper" in header


def scales(name):
    """Return the scales of a study.

    Studies of hypotheses (`confirm_*`) may lack the scale `paper`. Studies with held-out images always lack this scale,
    because train.py cannot hold images out.
    """
    found = [scale for scale in design.SCALES if design.has_scale(name, scale)]
    assert found == [*design.SCALES[:len(found)]]
    without_paper = name.startswith("confirm_"), design.load(name, "small").hold_out > 0
    assert len(found) == 2 if without_paper[1] else len(found) == 3 or (without_paper[0] and len(found) == 2)
    return found


@pytest.mark.parametrize(
    "scale", [scale if scale == "smoke" else pytest.param(scale, marks=pytest.mark.slow) for scale in design.SCALES])
@pytest.mark.parametrize("name", NAMES)
def test_shipped_study_expands_to_runs_that_can_be_built(name, scale):
    """Build each architecture with each connection on the meta device."""
    if scale not in scales(name):
        pytest.skip(f"study {name} has no scale {scale}")
    found = design.load(name, scale)
    data = found.paper_data[0] if scale == "paper" and found.paper_data else "digits"
    variants = found.variants({"dataset": data, "device": "cpu"}, "train.py" if scale == "paper" else "lab")
    assert len({variant.name(0) for variant in variants}) == len(variants)
    built = set()
    for variant in variants:
        kwargs = json.dumps(variant.options.model_kwargs)
        if (variant.options.model, kwargs) in built:
            continue
        built.add((variant.options.model, kwargs))
        with on_meta():
            model = build(variant.options).to("meta")  # timm 1.0.16 creates some buffers on the CPU
        assert len(timm_ortho.sites(model)) > 0
        with torch.device("meta"), torch.no_grad():
            size = variant.options.img_size or variant.options.input_size[-1]
            assert model.eval()(torch.zeros(2, 1, size, size)).shape == (2, 10)


def build(options):
    size = {"img_size": options.img_size} if options.img_size and takes_img_size(options.model) else {}
    given = {"seed": 0, "num_classes": 10, "in_chans": 1, "model_kwargs": {**size, **options.model_kwargs}}
    return train.build_model(Namespace(**{**vars(options), **given}), 10, 1)


@cache
def takes_img_size(name):
    return checks._takes_img_size(timm.create_model(name))


def test_numbers_of_runs_in_the_list_and_in_headers_agree(capsys):
    """The header of a study's YAML file contains text such as `smoke: 4 runs`."""
    assert cli.main(["study", "list"]) == 0
    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == NAMES
    listed = {row[0]: row[1:3] for row in rows}
    assert listed["layer_pattern"][0] == "Table 4"
    assert listed["families"] == ["-", "9, 63, 105"]
    for name in NAMES:
        header = " ".join(design.shipped()[name].read_text().split("title:")[0].replace("#", " ").split())
        said = [header.rsplit(f" {scale}: ", 1)[1].split(" runs")[0].rpartition(" ")[2] for scale in scales(name)]
        assert listed[name][1] == ", ".join([*said, "-"][:3]), name


def test_runs_of_a_family_differ_only_in_the_connection():
    """Check all scales. At scale small, also check that the models have fewer than 300,000 parameters."""
    for scale in design.SCALES:
        variants = design.load("families", scale).variants({"dataset": "digits", "device": "cpu"})
        families = {variant.cell["family"] for variant in variants}
        assert len(families) == (3 if scale == "smoke" else 7)
        for family in families:
            three = [vars(variant.options) for variant in variants if variant.cell["family"] == family]
            assert [options["model_kwargs"].pop("connection") for options in three] == ["linear", "feature", "global"]
            assert three[0] == three[1] == three[2]
    for variant in design.load("families", "small").variants({"dataset": "digits", "device": "cpu"}):
        with on_meta():
            assert sum(parameter.numel() for parameter in build(variant.options).parameters()) < 300_000
