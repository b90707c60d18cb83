"""Test scripts/checks/survey.py, which lists the architectures whose connections can be replaced."""
import json
import sys

import pytest
import timm

from scripts.checks import survey
from timm_ortho.models import coverage


@pytest.mark.parametrize(("modules", "kept", "version"), [([], {"resnet"}, timm.__version__), (
    ["resnet"], {"gone", "resnet"}, "1.0.0")])
def test_a_full_survey_drops_modules_that_timm_no_longer_has(tmp_path, monkeypatch, modules, kept, version):
    file = tmp_path / "coverage.json"
    file.write_text(json.dumps({"timm": "1.0.0", "modules": {"gone": {"covered": {"a": 1}, "left_out": {}}}}))
    monkeypatch.setattr(coverage, "FILE", file)
    monkeypatch.setattr(coverage, "load", lambda: json.loads(file.read_text()))
    monkeypatch.setattr(survey, "list_modules", lambda: ["resnet"])
    monkeypatch.setattr(survey, "survey", lambda module: {"covered": {"b": 2}, "left_out": {}})
    monkeypatch.setattr(sys, "argv", ["coverage", *modules])
    survey.main()
    written = json.loads(file.read_text())
    assert (written["modules"].keys(), written["timm"]) == (kept, version)
