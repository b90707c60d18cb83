"""Test scripts/checks/rates.py: the choice of learning rates and a recipe, and the gate that the recipe must pass."""
import math

import pytest
from helpers.tiny_study import STUDY, planned, request, written

from scripts.checks import rates
from timm_ortho.lab.reporting.report import Part


def run(recipe, connection, lr, top1, loss=1.0):
    return {"cell": {"recipe": recipe, "lr": lr}, "connection": connection, "top1": top1,
            "history": [{"train_loss": 9.0}, {"train_loss": loss}]}


def test_the_lowest_of_nearly_equal_rates_is_chosen():
    assert rates.choose({1e-3: 80.5, 2e-3: 80.55, 4e-3: 80.1}, 0.1) == 1e-3
    assert rates.choose({1e-3: 80.5, 2e-3: 80.65, 4e-3: 80.66}, 0.1) == 2e-3


def test_the_floor_of_the_loss_is_the_entropy_of_the_labels():
    assert rates.smoothing_floor(0.1, 10) == pytest.approx(-(0.91 * math.log(0.91) + 0.09 * math.log(0.01)))
    assert rates.smoothing_floor(0.0, 10) == 0


def test_means_rates_and_the_shared_rate():
    made = [run("paper", which, lr, value + seed, loss=1 + lr) for which, values in (
        ("linear", (50, 54, 52)), ("feature", (51, 54, 58))) for lr, value in zip((1, 2, 4), values, strict=True)
        for seed in (0, 1)]
    found = rates.Chosen.of(made, ridge=38.0, floor=0.5)
    assert found.means["linear"] == {1: 50.5, 2: 54.5, 4: 52.5}
    assert found.rates == {"linear": 2, "feature": 4}
    assert found.shared == 4  # its mean over both connections, 55.5 %, is the highest
    assert found.edges == ["feature"]
    assert found.margins("linear") == (16.5, 2.5)


@pytest.mark.parametrize(("ridge", "floor", "passed"), [(39.5, 0.85, True), (39.6, 0.85, False), (39.5, 0.86, False)])
def test_the_gate_needs_accuracy_and_room(ridge, floor, passed):
    found = rates.Chosen.of([run("paper", "linear", 1, 54.5, loss=1.0)], ridge, floor)
    assert found.passes("linear") is passed


@pytest.mark.parametrize(("clipped", "said"), [(60.4, "paper"), (60.6, "clipped"), (50.0, "paper")])
def test_linear_chooses_the_recipe(clipped, said):
    made = [run("paper", "linear", 1, 60.0), run("clipped", "linear", 1, clipped),
            run("paper", "feature", 1, 1.0), run("clipped", "feature", 1, 99.0)]
    assert rates.recipe_of(rates.by_recipe(made, 40.0, 0.5)) == said


def test_both_recipes_must_pass_the_gate():
    """Study S3 uses both recipes."""
    def made(loss):
        return [run(recipe, which, lr, 60.0 + (lr == 2), loss if recipe == "clipped" else 1.0)
                for recipe in ("paper", "clipped") for which in ("linear", "feature") for lr in (1, 2, 4)]

    assert rates.accepted(rates.by_recipe(made(1.0), 40.0, 0.5))
    assert not rates.accepted(rates.by_recipe(made(0.6), 40.0, 0.5))


def test_the_command_reads_the_folders_of_runs(tmp_path, capsys, undrawn):
    from timm_ortho.lab.running import run as one_run
    grid = {"recipe": {"paper": {}, "clipped": {"clip_grad": 1.0}}, "lr": [1e-3, 1e-2]}
    folder = planned(request(written(tmp_path, STUDY, grid=grid, record=None, representation=False),
                             tmp_path / "out", epochs=1)).folder
    names = sorted(path.parent.name for path in folder.glob("*/run.yaml"))
    for name in names[1:]:
        one_run.run(folder / name)
    assert rates.main([folder]) == 1
    printed = capsys.readouterr()
    assert f"not finished: {names[0]}" in printed.err
    assert ("| recipe | connection | 0.001 | 0.01 | chosen rate | points above ridge regression "
            "| training loss above floor | gate |") in printed.out
    assert printed.out.count("not passed") == 4


def test_rates_of_a_study_without_recipes(monkeypatch, capsys, tmp_path):
    runs = [{"connection": which, "cell": {"lr": lr}, "top1": top1 + seed} for seed in (0, 1) for which, values in (
        ("linear", (94.0, 94.5, 94.7)), ("feature", (94.0, 93.0, 92.0)))
        for lr, top1 in zip((0.05, 0.1, 0.2), values, strict=True)]
    monkeypatch.setattr(rates, "collect", lambda folders: {tmp_path: Part.of({}, runs, [])})
    assert rates.main([tmp_path]) == 0
    assert capsys.readouterr().out == (
        "linear: 0.1 is chosen (94.50 % at 0.05, 95.00 % at 0.1, 95.20 % at 0.2)\n"
        "feature: 0.05 is chosen (94.50 % at 0.05, 93.50 % at 0.1, 92.50 % at 0.2)\n")
    monkeypatch.setattr(rates, "collect", lambda folders: {tmp_path: Part.of({}, runs, ["lr=0.1-linear-seed308"])})
    assert rates.main([tmp_path]) == 1
