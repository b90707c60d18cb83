"""Test how scripts/checks/timm_tests.py selects tests, reports their outcomes, and continues an earlier run."""
import json

import pytest
import timm

from scripts.checks import timm_tests

pytestmark = pytest.mark.slow  # the tests start processes that import timm

TEST_MODELS = """
import os, pathlib, pytest, timm

with open(pathlib.Path(__file__).with_name("processes"), "a") as file:
    file.write("one\\n")
every_model = pytest.mark.parametrize("model_name", timm.list_models())

@pytest.mark.base
@every_model
def test_sound(model_name):
    assert timm.is_model(model_name)

@pytest.mark.cfg
@every_model
def test_left_out(model_name):
    pytest.skip("too large")

@every_model
def test_without_a_marker(model_name):
    pass
"""
FAILING = TEST_MODELS + """
@pytest.mark.base
@every_model
def test_fatal(model_name):
    if model_name == "test_vit_ortho":
        os._exit(9)

@pytest.mark.base
@every_model
def test_hard(model_name):
    assert "vit" not in model_name, "too hard"

@pytest.mark.base
@every_model
def test_unlike_its_base(model_name):
    assert "vit_ortho" not in model_name, "not what timm gives"

@pytest.mark.base
@pytest.mark.parametrize("model_name", [name for name in timm.list_models() if name != "test_vit"])
def test_timm_knows_better(model_name):
    assert "vit" not in model_name, "never for ViTs"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return a cache folder that contains made-up tests, so that timm's tests are not downloaded."""
    folder = tmp_path / f"timm-{timm.__version__}"
    (folder / "tests").mkdir(parents=True)
    (folder / "pytest.ini").write_text(timm_tests.PYTEST_INI)
    (folder / "tests" / "test_models.py").write_text(TEST_MODELS)
    bases = {"test_vit_ortho": "test_vit", "test_vit_orthog": "test_vit", "test_resnet_ortho": "test_resnet"}
    monkeypatch.setattr(timm_tests, "variants_and_bases", lambda: bases)
    return tmp_path


def script(cache, capsys, *words):
    """Run the script. Return the exit status, the printed lines, and the number of test processes."""
    started = cache / f"timm-{timm.__version__}" / "tests" / "processes"
    started.write_text("")
    status = timm_tests.main([*words, "--cache", str(cache)])
    return status, capsys.readouterr().out.splitlines(), len(started.read_text().splitlines())


def test_tests_without_a_marker_run_by_default(cache, capfd):
    names = ("test_vit_ortho", "test_resnet_ortho")
    status, lines, processes = script(cache, capfd, "--only", *names)
    assert (status, lines[-1], processes) == (0, "timm's tests on 2 variants: 4 passed, 2 skipped", 1)
    status, lines, processes = script(cache, capfd, "--only", *names, "--marked")
    assert (status, lines[-1], processes) == (0, "timm's tests on 2 variants: 2 passed, 2 skipped", 1)


def test_a_failure_is_compared_with_the_architecture(cache, capfd):
    (cache / f"timm-{timm.__version__}" / "tests" / "test_models.py").write_text(FAILING)
    status, lines, processes = script(cache, capfd, "--only", "test_vit_ortho", "test_resnet_ortho", "--marked")
    told = {line.split(": ")[2]: line for line in lines if line.startswith(("EXCUSED", "FAILED: "))}
    assert told["test_hard"].startswith("EXCUSED: test_vit_ortho: test_hard: test_vit fails this test too; ")
    assert told["test_timm_knows_better"].startswith(
        "EXCUSED: test_vit_ortho: test_timm_knows_better: timm excludes test_vit from this test; ")
    assert told["test_unlike_its_base"].startswith(
        "FAILED: test_vit_ortho: test_unlike_its_base: AssertionError: not what timm gives")
    assert told["test_fatal"] == "FAILED: test_vit_ortho: test_fatal: the process died in this test (exit status 9)"
    assert lines[-1] == "timm's tests on 2 variants: 6 passed, 2 skipped, 2 excused, 2 failed"
    # Two processes die in test_fatal; the second begins with it. A third process runs the remaining tests, and a fourth
    # repeats the failed tests with test_vit.
    assert (status, processes) == (1, 4)


def test_a_variant_without_tests_is_excused_if_its_architecture_has_none(cache, capfd):
    tests = cache / f"timm-{timm.__version__}" / "tests" / "test_models.py"
    for left_out, outcome, status in (("test_vit*", "EXCUSED", 0), ("test_vit_*", "FAILED", 1)):
        tests.write_text(TEST_MODELS.replace("timm.list_models()", f"timm.list_models(exclude_filters={left_out!r})"))
        found, lines, _ = script(cache, capfd, "--only", "test_vit_ortho", "test_resnet_ortho", "--marked")
        reason = "timm excludes test_vit from these tests; " if outcome == "EXCUSED" else ""
        assert f"{outcome}: test_vit_ortho: all tests: {reason}no test was run" in lines
        assert found == status


def test_a_full_run_continues(cache, capfd, monkeypatch):
    sizes = {"test_vit_ortho": 370_000, "test_vit_orthog": 370_000, "test_resnet_ortho": 470_000}
    monkeypatch.setattr(timm_tests, "parameters", sizes.get)
    status, lines, processes = script(cache, capfd, "--marked", "--above", "0.4")
    assert (status, processes) == (0, 1)
    assert lines[-1] == "timm's tests on 1 variant: 1 passed, 1 skipped"
    (outcomes,) = cache.glob("outcomes-*-marked.jsonl")
    assert lines[0] == f"the outcomes are in {outcomes}"
    status, lines, processes = script(cache, capfd, "--marked")
    assert (status, lines[-1], processes) == (0, "timm's tests on 3 variants: 3 passed, 3 skipped", 1)
    ended = [record["ended"] for record in map(json.loads, outcomes.read_text().splitlines()) if "ended" in record]
    assert len(ended) == len(set(ended)) == 6  # no test was run twice
