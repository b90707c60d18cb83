"""planning/deviations.py: differences between a study and the paper."""
import pytest

from timm_ortho.lab import paper
from timm_ortho.lab.planning import design, recipe
from timm_ortho.lab.planning.deviations import deviations


def lines(name, scale, dataset, seeds=5, device="cpu"):
    return deviations(design.load(name, scale), {"dataset": dataset, "data_dir": "x", "device": device}, range(seeds))


def test_a_small_scale_lists_its_changes():
    changed = lines("hybrid", "small", "digits", 3)
    assert {"data set: digits here; tiny_imagenet in the paper", "seeds: 3 here; 5 in the paper",
            "epochs: 15 here; 300 in the paper", "embed_dim: 64 here; 384 in the paper"} <= set(changed)
    assert not any(line.startswith("RandAugment") for line in changed)  # scale small does not use it


@pytest.mark.parametrize(("dataset", "device"), [
    ("cifar10", "cpu"), ("cifar100", "cuda"), ("tiny_imagenet", "cpu"), ("imagenet1k", "cuda:1")])
def test_the_papers_own_values_are_not_deviations(dataset, device):
    """A run on one of the paper's data sets is compared with the paper's recipe for this data set, on any device."""
    changed = lines("accuracy", "paper", dataset, 3 if dataset == "imagenet1k" else 5, device)
    assert not any("different from the paper" in line for line in changed)
    assert not any("in the paper" in line for line in changed)
    assert any("RandAugment: " in line for line in changed)
    assert any("optimizer: AdamW, as in Table 5; the authors' published code has" in line for line in changed)
    assert any("crop: " in line for line in changed) == dataset.startswith("cifar")


def test_the_first_version_has_three_runs_on_imagenet():
    accuracy = design.load("accuracy", "paper")
    assert [accuracy.seeds_on(data) for data in ("cifar10", "imagenet1k", "tfds/imagenet1k")] == [5, 3, 3]
    assert design.load("accuracy", "smoke").seeds_on("imagenet1k") == 1


def test_deviations_are_of_the_recipes_that_are_run():
    cifar = "the paper pads by 4 pixels"
    assert [line.partition(":")[0] for line in lines("initialisation", "paper", "cifar100")] == ["crop"]
    assert any(cifar in line for line in lines("skips_branch4", "paper", "cifar100"))
    assert lines("skips_branch4", "paper", "svhn") == []
    several = [line for line in lines("accuracy", "paper", "cifar10") if "clipping" in line]
    assert several == ["resnetv2_18_cifar, resnetv2_34_cifar, resnetv2_50_cifar, resnetv2_101_cifar: clipping: at norm "
                       "1, as in Section 4.1 and the authors' published recipes; Table 6 has none"]


@pytest.mark.parametrize("name", sorted(recipe.shipped()))
def test_deviations_are_of_options_that_the_recipe_sets(name):
    values = recipe.load(name)
    assert set(paper.recipe_deviations(name)) <= set(values)
    replaced = values.get("train_crop_mode") == "rrc" and values.get("ratio") == [1.0, 1.0]
    assert replaced == ("train_crop_mode" in paper.recipe_deviations(name))


def test_a_study_without_a_paper_has_no_deviations():
    assert lines("families", "small", "digits") == []
