"""scripts/checks/pairs.sh with a mock of `study run`: the seeds it starts, the files it keeps, and its exit status."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from timm_ortho.lab.planning import design

SCRIPT = Path(__file__).parents[2] / "scripts" / "checks" / "pairs.sh"
# Epochs of 2 and 3 seconds for two connections, with as many runs of each as $CELLS. The mock does not wait for them.
PYTHON = f"""#!/usr/bin/env bash
if [ "$1" = - ]; then exec {sys.executable} "$@"; fi
echo "$*" >> "$CALLS"
case "$*" in *"${{FAILS:-no such word}}"*) exit 1 ;; esac
while [ "$1" != --output ]; do shift; done
for name in $(seq -f linear%g ${{CELLS:-1}}) $(seq -f feature%g ${{CELLS:-1}}); do
    mkdir -p "$2/$name/switched"
    last=$([ ${{name%%?}} = linear ] && echo 2 || echo 3)
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

    def run(*seeds, study="cifar_vit_small", **variables):
        done = subprocess.run(
            [SCRIPT, study, tmp_path / "out", tmp_path / "data", *seeds], capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHON": str(interpreter), "CALLS": str(calls), **variables})
        seeds = [line.partition("--seeds ")[2].split()[0] for line in calls.read_text().splitlines()]
        return done, seeds

    return run


def test_seeds_that_fit(script, tmp_path):
    """A pair of 300 epochs of 3 seconds takes 945 seconds if its runs are simultaneous, and 1,575 seconds if not."""
    done, seeds = script(LIMIT="1000")
    assert done.returncode == 0, done.stderr
    assert seeds == ["0,", "300,", "301,", "302,", "303,"]  # the mock takes no time
    assert "an epoch takes 3.00 s, and the runs of a seed (300 epochs) about 9" in done.stdout
    assert "seeds finished: 4" in done.stdout
    kept = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert kept == {"log.txt", "summary.csv", "result.json"}
    assert (tmp_path / "out.work" / "runs" / "linear1" / "last.pth.tar").is_file()


@pytest.mark.parametrize(("variables", "started"), [
    (dict(LIMIT="900"), []), (dict(LIMIT="1000", PARALLEL="1"), []),
    (dict(LIMIT="1700", PARALLEL="1"), ["310,", "311,"])])
def test_a_seed_that_does_not_fit_is_not_started(script, variables, started):
    done, seeds = script("310", "311", **variables)
    assert done.returncode == 0
    assert seeds[1:] == started
    assert started or "seed 310: not started, because its runs need about " in done.stdout


def test_failures(script, tmp_path):
    done, seeds = script(LIMIT="1000", FAILS="--seeds 301,")
    assert done.returncode == 1
    assert seeds[-1] == "303,"
    assert "seed 301: FAILED or stopped" in done.stdout
    assert "seeds finished: 3" in done.stdout
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


@pytest.mark.parametrize("study", ["cifar_vit_small", "cifar_resnet18_rates", "cifar_resnet18"])
def test_seeds_and_epochs_are_those_of_the_study(study, script):
    done, seeds = script(study=study, LIMIT="5000", CELLS="3" if study.endswith("rates") else "1")
    planned = design.load(study, "small")
    options = planned.variants({})[0].options
    assert seeds == ["0,", *(f"{options.seed + number}," for number in range(planned.seeds))]
    assert f"the runs of a seed ({options.epochs} epochs) about " in done.stdout


def test_several_cells(script):
    """Two processes train the six runs of a seed of 40 epochs in 1.05 x 40 x (3 x 2 s + 3 x 3 s) / 2 = 315 seconds."""
    for limit, started in (("400", ["308,", "309,"]), ("315", [])):
        _, seeds = script(study="cifar_resnet18_rates", LIMIT=limit, CELLS="3")
        assert seeds[-1 - len(started):] == ["0,", *started]


def test_unknown_study(script, tmp_path):
    (tmp_path / "calls").touch()
    done, _ = script(study="cifar_vit_smal")
    assert done.returncode == 2
    assert done.stderr.startswith("pairs.sh: there is no study 'cifar_vit_smal': choose cifar_vit_small, ")
