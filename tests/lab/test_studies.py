"""lab/studies: every shipped study loads, expands to runs, and builds its models."""
import re
from argparse import Namespace
from functools import cache
from itertools import takewhile

import pytest
import timm
import torch
from helpers.pages import blocks, section

import timm_ortho
from timm_ortho import cli
from timm_ortho.lab.planning import check, design, plan, study_file
from timm_ortho.lab.planning.request import Request
from timm_ortho.lab.reporting import layout, report
from timm_ortho.lab.running import loop as train

NAMES = sorted(study_file.shipped())


def header(name):
    """Return the comment at the top of a study's file, on one line."""
    lines = takewhile(lambda line: line.startswith("#"), study_file.shipped()[name].read_text().splitlines())
    return " ".join(" ".join(line.lstrip("#") for line in lines).split())


@pytest.mark.parametrize("name", NAMES)
def test_a_study_follows_the_rules(name):
    """Check the rules in the docstring of `planning/design.py`."""
    file, values = study_file.shipped()[name], study_file.read(name)
    for scale in dict.fromkeys(["smoke", "small", *values["scales"]]):
        found = design.load(name, scale)  # its error names a missing scale or title
        options = {"dataset": found.paper_data[0]} if scale == "paper" and found.paper_data else {}
        runs = plan.points_of(Request(found, options), found.variants(options), range(found.seeds))[1]
        text = f"Scale {scale}: {len(runs)} runs"  # `timm-ortho study list` reads it
        assert text in header(name), f"{file}: write '{text} ...' into the comment at the top"
    assert values["title"].endswith("?"), f"{file}: title must be a question that ends in '?'"
    command = f"timm-ortho study run {name}"
    assert command in header(name), f"{file}: write '{command}' into the comment at the top"
    if values.get("paper") or values.get("table"):
        assert "The paper" in header(name), f"{file}: write a sentence 'The paper ...' into the comment at the top"
        assert "paper" in values["scales"], f"{file}: add paper to scales, or remove the keys paper and table"
    if values.get("hold_out"):
        assert "paper" not in values["scales"], (
            f"{file}: remove paper from scales, because train.py cannot hold images out (hold_out)")


def test_networks_of_the_smallest_scales_can_be_built():
    """Build each architecture on the meta device. Planning builds the networks of the other scales."""
    different = {}
    for name in NAMES:
        variants = design.load(name, "smoke").variants({"dataset": "digits", "device": "cpu"})
        assert len({variant.name for variant in variants}) == len(variants), name
        different |= {(each.options.model, str(each.options.model_kwargs), each.options.img_size): each
                      for each in variants}
    for variant in different.values():
        with torch.device("meta"), torch.no_grad():
            model = build(variant.options)
            size = variant.options.img_size or variant.options.input_size[-1]
            assert model.eval()(torch.zeros(2, 1, size, size)).shape == (2, 10)
        assert len(timm_ortho.sites(model)) > 0


def build(options):
    size = {"img_size": options.img_size} if options.img_size and takes_img_size(options.model) else {}
    given = {"seed": 0, "num_classes": 10, "in_chans": 1, "model_kwargs": {**size, **options.model_kwargs},
             "pretrained": False}  # the files of the studies of fine-tuning are not part of the package
    return train.build_model(Namespace(**{**vars(options), **given}), 10, 1)


@cache
def takes_img_size(name):
    with torch.device("meta"):
        return check.takes_img_size(timm.create_model(name))


def test_list_of_studies(capsys):
    assert cli.main(["study", "list"]) == 0
    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:]]
    listed = {row[0]: row[1:3] for row in rows}
    assert list(listed) == NAMES
    assert listed["layer_pattern"][0] == "Table 4"
    assert listed["families"] == ["-", "9, 63, 105"]


def test_branches_with_the_orthogonal_connection():
    found = {}
    for variant in design.load("branch_kinds", "smoke").variants({"dataset": "digits", "device": "cpu"}):
        with torch.device("meta"):
            sites = timm_ortho.sites(build(variant.options))
        found[variant.cell["branches"]] = {site.kind for site in sites if site.connection.name == "feature"}
    assert found == {"none": set(), "attention": {"attention"}, "mlp": {"mlp"}, "both": {"attention", "mlp"}}


def test_the_study_in_the_guide_runs_and_its_tables_have_all_keys(tmp_path):
    guide = section("your_own_data.md", "Your own study")
    path = tmp_path / "depth.yaml"
    path.write_text(blocks(guide, "yaml")[0])
    planned = plan.plan(Request(design.load(str(path), "small"), {"device": "cpu"}))
    assert (len(planned.runs), report.layout_of(planned.study).measures) == (12, ["top1", "loss"])
    keys, of_report = ({name for row in re.findall("^[|] (`.*?) [|]", table, re.MULTILINE)
                        for name in re.findall("`(.*?)`", row)} for table in guide.split("The keys of `report`"))
    assert keys == {*design._KINDS, "extends", "scales"}
    assert of_report == layout.Layout.__dataclass_fields__.keys() - {"study"}
