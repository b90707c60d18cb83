"""scripts/checks/gpu.sh with a mock interpreter: which commands run, what is kept, and the exit status."""
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "checks" / "gpu.sh"
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
if [ "$1" = -c ] && [ "$3" != bench ]; then exit 0; fi
if [ "$3" = bench ]; then
    while [ "$1" != --output ]; do shift; done
    mkdir -p "$2"
    printf 'what\\nmodels\\n' > "$2/bench.csv"
fi
case "$*" in *"${FAILS:-no such word}"*) exit 1 ;; esac
"""
ROWS = ["bench_models_compiled_cpu.csv", "bench_models_eager_cpu.csv", "bench_operator_cpu.csv"]


@pytest.fixture
def script(tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text(PYTHON)
    interpreter.chmod(0o755)

    calls = tmp_path / "calls"

    def run(*parts, **variables):
        done = subprocess.run(
            [SCRIPT, tmp_path / "out", *parts], capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "DEVICE": "cpu", "PYTHON": str(interpreter), "CALLS": str(calls), **variables})
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def rows_in(tmp_path):
    return sorted(path.name for path in (tmp_path / "out").glob("bench_*.csv"))


def test_all_parts(script, tmp_path):
    done, calls = script()
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows_in(tmp_path) == ROWS
    assert [word for word in ("fuzz", "pytest", "timm_ortho bench") for call in calls if f"-m {word}" in call
            or f"checks.{word}" in call] == ["fuzz", "pytest", *["timm_ortho bench"] * 5]
    tests = next(call for call in calls if "-m pytest" in call)
    assert "-o addopts= " in tests
    assert "tests/core/test_kernels.py" in tests
    summary = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in summary] == [
        "tests", "fuzz", "eager", "node", "operator", "tiles", "compiled"]
    assert any(call.startswith("-c ") and "planning.TILE = 2048" in call and "bench" in call for call in calls)


@pytest.mark.parametrize(("fails", "name"), [
    ("-m pytest", "tests"), ("checks.fuzz", "fuzz"), ("out/eager", "eager"), ("out/compiled", "compiled")])
def test_a_failure_does_not_stop_the_next_parts(script, tmp_path, fails, name):
    done, _ = script(FAILS=fails)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"FAILED: {name}"
    assert rows_in(tmp_path) == ROWS


@pytest.mark.parametrize("fails", ["-m pytest", "checks.fuzz"])
def test_a_driver_without_results_cannot_fail_the_tests(script, fails):
    assert script("correct", FAILS=fails)[0].returncode == 1
    assert script("correct", FAILS=fails, FAKE_CUDA="libcuda.so.1")[0].returncode == 0


def test_usage(script):
    done, calls = script("operators")
    assert (done.returncode, calls) == (2, [])
    assert done.stderr == "unknown part 'operators', known are: correct eager node operator tiles compiled\n"
    done = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.startswith("Check this checkout on one GPU")
