"""planning/deviations.py: the line that names what differs between a study and the paper."""
import pytest

from timm_ortho.lab.planning import design
from timm_ortho.lab.planning.deviations import deviations


def lines(name, scale, dataset, seeds=5, device="cpu"):
    return deviations(design.load(name, scale), {"dataset": dataset, "data_dir": "x", "device": device}, range(seeds))


def test_a_small_scale_names_its_changes():
    line, = lines("hybrid", "small", "digits", 3)
    assert line.startswith("Not as in the paper (its value in brackets): data set digits (tiny_imagenet), seeds 3 (5)")
    for change in ("epochs 15 (300)", "embed_dim 64 (384)", " mixup 0.0 (0.8)", " aa"):
        assert change in line


@pytest.mark.parametrize(("name", "dataset", "seeds", "device"), [
    ("accuracy", "cifar10", 5, "cpu"), ("accuracy", "imagenet1k", 3, "cuda:1"), ("skips_branch4", "svhn", 5, "cpu")])
def test_the_papers_own_values_are_no_differences(name, dataset, seeds, device):
    line, = lines(name, "paper", dataset, seeds, device)
    assert line.startswith("timm lacks some options of the paper. The recipes explain")


def test_the_first_version_has_three_runs_on_imagenet():
    accuracy = design.load("accuracy", "paper")
    assert [accuracy.seeds_on(data) for data in ("cifar10", "imagenet1k", "tfds/imagenet1k")] == [5, 3, 3]
    assert design.load("accuracy", "smoke").seeds_on("imagenet1k") == 1


def test_a_study_without_a_paper_differs_from_none():
    assert lines("families", "small", "digits") == []
