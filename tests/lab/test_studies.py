"""lab/studies: every shipped study loads, expands to runs, and builds its models."""
import json
import re
from argparse import Namespace
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
import timm
import torch

import timm_ortho
from timm_ortho import cli
from timm_ortho.lab.planning import design, model_check, plan, study_file
from timm_ortho.lab.planning.request import Request
from timm_ortho.lab.reporting import layout, report
from timm_ortho.lab.running import loop as train

GUIDE = Path(timm_ortho.__file__).parents[1] / "docs" / "your_own_data.md"
NAMES = sorted(study_file.shipped())


def header(name):
    """Return the comment at the top of a study's file, on one line."""
    lines = takewhile(lambda line: line.startswith("#"), study_file.shipped()[name].read_text().splitlines())
    return " ".join(" ".join(line.lstrip("#") for line in lines).split())


@pytest.mark.parametrize("name", NAMES)
def test_a_study_follows_the_rules(name):
    """Check the rules in the docstring of `planning/design.py`."""
    file, values = study_file.shipped()[name], study_file.read(name)
    for scale in ("smoke", "small", *values.get("scales", ())):
        design.load(name, scale)  # its error names a missing scale or title
    assert values["title"].endswith("?"), f"{file}: title must be a question that ends in '?'"
    command = f"timm-ortho study run {name}"
    assert command in header(name), f"{file}: write '{command}' into the comment at the top"
    if values.get("paper") or values.get("table"):
        assert "The paper" in header(name), f"{file}: write a sentence 'The paper ...' into the comment at the top"
        assert "paper" in values["scales"], f"{file}: add paper to scales, or remove the keys paper and table"
    if values.get("hold_out"):
        assert "paper" not in values["scales"], (
            f"{file}: remove paper from scales, because train.py cannot hold images out (hold_out)")


@pytest.mark.parametrize("scale", [
    scale if scale == "smoke" else pytest.param(scale, marks=pytest.mark.slow) for scale in study_file.SCALES])
@pytest.mark.parametrize("name", NAMES)
def test_shipped_study_expands_to_runs_that_can_be_built(name, scale):
    """Build each architecture with each connection on the meta device."""
    if scale not in study_file.read(name)["scales"]:
        pytest.skip(f"study {name} has no scale {scale}")
    found = design.load(name, scale)
    data = found.paper_data[0] if scale == "paper" and found.paper_data else "digits"
    variants = found.variants({"dataset": data, "device": "cpu"})
    assert len({variant.name for variant in variants}) == len(variants)
    built = set()
    for variant in variants:
        kwargs = json.dumps(variant.options.model_kwargs)
        if (variant.options.model, kwargs) in built:
            continue
        built.add((variant.options.model, kwargs))
        with torch.device("meta"):
            model = build(variant.options)
        assert len(timm_ortho.sites(model)) > 0
        with torch.device("meta"), torch.no_grad():
            size = variant.options.img_size or variant.options.input_size[-1]
            assert model.eval()(torch.zeros(2, 1, size, size)).shape == (2, 10)


def build(options):
    size = {"img_size": options.img_size} if options.img_size and takes_img_size(options.model) else {}
    given = {"seed": 0, "num_classes": 10, "in_chans": 1, "model_kwargs": {**size, **options.model_kwargs},
             "pretrained": False}  # the files of the studies of fine-tuning are not part of the package
    return train.build_model(Namespace(**{**vars(options), **given}), 10, 1)


@cache
def takes_img_size(name):
    return model_check._takes_img_size(timm.create_model(name))


def test_list_of_studies(capsys):
    assert cli.main(["study", "list"]) == 0
    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:]]
    listed = {row[0]: row[1:3] for row in rows}
    assert list(listed) == NAMES
    assert listed["layer_pattern"][0] == "Table 4"
    assert listed["families"] == ["-", "9, 63, 105"]


@pytest.mark.parametrize("name", NAMES)
def test_headers_have_the_numbers_of_runs(name):
    """`timm-ortho study list` reads them there. Runs with equal settings are counted once."""
    for scale in study_file.read(name)["scales"]:
        found = design.load(name, scale)
        options = {"dataset": found.paper_data[0]} if scale == "paper" and found.paper_data else {}
        runs = plan.points_of(Request(found, options), found.variants(options), range(found.seeds))[1]
        text = f"Scale {scale}: {len(runs)} runs"
        assert text in header(name), f"{study_file.shipped()[name]}: write '{text} ...' into the comment at the top"


def test_branches_with_the_orthogonal_connection():
    found = {}
    for variant in design.load("branch_kinds", "smoke").variants({"dataset": "digits", "device": "cpu"}):
        with torch.device("meta"):
            sites = timm_ortho.sites(build(variant.options))
        found[variant.cell["branches"]] = {site.kind for site in sites if site.connection.name == "feature"}
    assert found == {"none": set(), "attention": {"attention"}, "mlp": {"mlp"}, "both": {"attention", "mlp"}}


def test_runs_of_a_family_differ_only_in_the_connection():
    """Check all scales. At scale small, also check that the models have fewer than 300,000 parameters."""
    for scale in study_file.SCALES:
        variants = design.load("families", scale).variants({"dataset": "digits", "device": "cpu"})
        families = {variant.cell["family"] for variant in variants}
        assert len(families) == (3 if scale == "smoke" else 7)
        for family in families:
            three = [vars(variant.options) for variant in variants if variant.cell["family"] == family]
            assert [options["model_kwargs"].pop("connection") for options in three] == ["linear", "feature", "global"]
            assert three[0] == three[1] == three[2]
    for variant in design.load("families", "small").variants({"dataset": "digits", "device": "cpu"}):
        with torch.device("meta"):
            assert sum(parameter.numel() for parameter in build(variant.options).parameters()) < 300_000


def test_the_study_in_the_guide_runs_and_its_tables_have_all_keys(tmp_path):
    guide = GUIDE.read_text(encoding="utf-8").partition("## Your own study")[2].partition("\n## ")[0]
    path = tmp_path / "depth.yaml"
    path.write_text(guide.partition("```yaml\n")[2].partition("```")[0])
    planned = plan.plan(Request(design.load(str(path), "small"), {"device": "cpu"}))
    assert (len(planned.runs), report.layout_of(planned.study).measures) == (12, ["top1", "loss"])
    keys, of_report = ({name for row in re.findall("^[|] (`.*?) [|]", table, re.MULTILINE)
                        for name in re.findall("`(.*?)`", row)} for table in guide.split("The keys of `report`"))
    assert keys == {*design._KEYS, "extends", "scales"}
    assert of_report == layout.Layout.__dataclass_fields__.keys() - {"study"}
