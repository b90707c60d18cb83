"""What differs from the paper: by the scale and the call, and by what the recipes cannot do as the paper does."""
import pytest

from timm_ortho.lab import paper
from timm_ortho.lab.planning import design, recipe
from timm_ortho.lab.planning.deviations import changes


def lines(name, scale, dataset, seeds=5):
    return changes(design.load(name, scale), {"dataset": dataset, "data_dir": "x", "device": "cpu"}, range(seeds))


def test_a_small_scale_names_what_it_changed():
    found = lines("hybrid", "small", "digits", 3)
    assert {"data set: digits here, tiny_imagenet in the paper", "seeds: 3 here, 5 in the paper",
            "epochs: 15 here, 300 in the paper", "embed_dim: 64 here, 384 in the paper"} <= set(found)
    assert not any(line.startswith("RandAugment") for line in found)  # which this scale does not use


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "tiny_imagenet", "imagenet1k"])
def test_the_papers_own_values_are_no_deviations(dataset):
    """On each of the paper's data sets the runs are compared with that data set's own recipe."""
    found = lines("accuracy", "paper", dataset)
    assert not any("in the paper" in line for line in found)
    assert any("RandAugment: " in line for line in found)
    assert any("optimizer: AdamW, as Table 5 says; the authors' published code has" in line for line in found)
    assert any("crop: " in line for line in found) == dataset.startswith("cifar")


def test_deviations_are_of_the_recipes_that_are_run():
    cifar = "the paper pads by 4 pixels"
    assert [line.partition(":")[0] for line in lines("initialisation", "paper", "cifar100")] == ["crop"]
    assert any(cifar in line for line in lines("skips_branch4", "paper", "cifar100"))
    assert lines("skips_branch4", "paper", "svhn") == []
    several = [line for line in lines("accuracy", "paper", "cifar10") if "clipping" in line]
    assert several == ["resnetv2_18_cifar, resnetv2_34_cifar, resnetv2_50_cifar, resnetv2_101_cifar: clipping: at norm "
                       "1, as Section 4.1 says and the authors' published recipes do; Table 6 has none"]


@pytest.mark.parametrize("name", sorted(recipe.shipped()))
def test_deviations_are_of_options_that_the_recipe_sets(name):
    values = recipe.load(name)
    assert set(paper.deviations(name)) <= set(values)
    replaced = values.get("train_crop_mode") == "rrc" and values.get("ratio") == [1.0, 1.0]
    assert replaced == ("train_crop_mode" in paper.deviations(name))


def test_of_no_paper_and_of_no_training():
    assert lines("families", "small", "digits") == []
    found = changes(design.load("overhead", "small"), {"device": "cpu"}, [])
    assert {"batch_size: 8 here, the default at scale paper",
            "dtypes: float32 here, bfloat16 at scale paper"} <= set(found)
    assert changes(design.load("overhead", "paper"), {"device": "cuda"}, []) == []
    assert changes(design.load("gamma", "small"), {"device": "cpu"}, []) == []
