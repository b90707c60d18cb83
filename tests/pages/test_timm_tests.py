"""Test how scripts/checks/timm_tests.py selects tests and reports their outcomes."""
import subprocess
import sys
from pathlib import Path

import pytest
import timm

TEST_MODELS = """
import pytest, timm

every_model = pytest.mark.parametrize("model_name", timm.list_models())

@every_model
def test_sound(model_name):
    assert timm.is_model(model_name)

@every_model
def test_left_out(model_name):
    pytest.skip("too large")

@every_model
def test_hard(model_name):
    assert "vit" not in model_name, "too hard"

@every_model
def test_unlike_its_base(model_name):
    assert "vit_ortho" not in model_name, "not what timm gives"

@pytest.mark.parametrize("model_name", [name for name in timm.list_models() if name != "test_vit"])
def test_timm_knows_better(model_name):
    assert "vit" not in model_name, "never for ViTs"
"""


@pytest.mark.slow  # a process that imports timm
def test_a_failure_is_compared_with_the_architecture(tmp_path):
    tests = tmp_path / f"timm-{timm.__version__}" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_models.py").write_text(TEST_MODELS)
    command = [sys.executable, "-m", "scripts.checks.timm_tests", "test_vit_ortho", "test_resnet_ortho"]
    done = subprocess.run([*command, "--cache", str(tmp_path)], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])
    lines = done.stdout.splitlines()
    assert lines[-4:] == [
        "EXCUSED: test_vit_ortho: test_hard: timm's test_vit: failed; AssertionError: too hard",
        "FAILED: test_vit_ortho: test_unlike_its_base: AssertionError: not what timm gives",
        "EXCUSED: test_vit_ortho: test_timm_knows_better: timm's test_vit: excluded; AssertionError: never for ViTs",
        "timm's tests on 2 variants: 5 passed, 2 skipped, 2 excused, 1 failed"], done.stderr
    assert done.returncode == 1
