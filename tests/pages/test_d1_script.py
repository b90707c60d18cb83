"""scripts/checks/d1.sh with a mock of `study run`: which pairs it starts, which files it keeps, and its exit status."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "checks" / "d1.sh"
# Epochs of 2 and 3 seconds. An epoch is as long for every pair, but is not waited for.
PYTHON = f"""#!/usr/bin/env bash
if [ "$1" = - ]; then exec {sys.executable} "$@"; fi
echo "$*" >> "$CALLS"
case "$*" in *"${{FAILS:-no such word}}"*) exit 1 ;; esac
while [ "$1" != --output ]; do shift; done
for name in linear feature; do
    mkdir -p "$2/$name/switched"
    last=$([ $name = linear ] && echo 2 || echo 3)
    printf 'epoch,train_seconds\\n0,9\\n1,2\\n2,%s\\n' "$last" > "$2/$name/summary.csv"
    touch "$2/$name/last.pth.tar" "$2/$name/.lock" "$2/$name/result.json"
done
"""


@pytest.fixture
def script(tmp_path):
    interpreter, calls = tmp_path / "python", tmp_path / "calls"
    interpreter.write_text(PYTHON)
    interpreter.chmod(0o755)
    (tmp_path / "data").mkdir()

    def run(*seeds, **variables):
        done = subprocess.run(
            [SCRIPT, tmp_path / "out", tmp_path / "data", *seeds], capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHON": str(interpreter), "CALLS": str(calls), **variables})
        seeds = [line.partition("--seeds ")[2].split()[0] for line in calls.read_text().splitlines()]
        return done, seeds

    return run


def test_pairs_that_fit(script, tmp_path):
    """A pair of 300 epochs of 3 seconds takes 945 seconds if its runs are simultaneous, and 1,575 seconds if not."""
    done, seeds = script(LIMIT="1000")
    assert done.returncode == 0, done.stderr
    assert seeds == ["0,", "300,", "301,", "302,", "303,"]  # the mock takes no time
    assert "an epoch takes 3.00 s, a pair of 300 epochs about 9" in done.stdout
    assert "4 pairs finished" in done.stdout
    kept = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert kept == {"log.txt", "summary.csv", "result.json"}
    assert (tmp_path / "out.work" / "runs" / "linear" / "last.pth.tar").is_file()


@pytest.mark.parametrize(("variables", "started"), [
    (dict(LIMIT="900"), []), (dict(LIMIT="1000", PARALLEL="1"), []),
    (dict(LIMIT="1700", PARALLEL="1"), ["310,", "311,"])])
def test_a_pair_that_does_not_fit_is_not_started(script, variables, started):
    done, seeds = script("310", "311", **variables)
    assert done.returncode == 0
    assert seeds[1:] == started
    assert started or "seed 310: not started, because a pair needs about " in done.stdout


def test_failures(script, tmp_path):
    done, seeds = script(LIMIT="1000", FAILS="--seeds 301,")
    assert done.returncode == 1
    assert seeds[-1] == "303,"
    assert "seed 301: FAILED or stopped" in done.stdout
    assert "3 pairs finished" in done.stdout
    done, _ = script(FAILS="--seeds 0,")
    assert done.returncode == 1
    assert "measuring failed" in done.stdout


def test_rehearsal_is_at_scale_smoke(script, tmp_path):
    done, seeds = script(DEVICE="cpu", COMPILE="inductor")
    assert done.returncode == 0
    assert seeds == ["0,", "300,"]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "--scale smoke --device cpu " in log
    assert "-o torchcompile=inductor" in log
