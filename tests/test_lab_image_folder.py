"""Image folders: which folder is a split, and which layouts are refused before anything runs."""
import os
import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_study import compared, planned, request, written

from timm_ortho.lab import LabError, plan, recipe, run, train_py
from timm_ortho.lab.folder import RunPlan

# timm's ImageDataset leaves the closing of its files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file.*png:ResourceWarning")
STAND_IN = Path(__file__).with_name("stand_in_train.py")
WHOLE = dict(train_num_samples=None, val_num_samples=None, batch_size=4)


def image_folder(root, *splits, classes=("cat", "dog"), count=6, below=""):
    """Class folders with images of noise, no two of which are equal."""
    rng = np.random.default_rng(0)
    for split in splits:
        for label in classes:
            folder = root / split / label / below
            folder.mkdir(parents=True)
            for index in range(count):
                Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return root


def options_of(root, **given):
    """The options of a run that is planned for an image folder, and not written."""
    found = plan.plan(compared("unused", ["linear"], **{"dataset": "", "data_dir": str(root), **WHOLE, **given}))
    return found.runs["linear-seed0"].stages[0].options


def refused(message, root, **given):
    with pytest.raises(LabError, match=message) as error:
        options_of(root, **given)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------ the splits
@pytest.mark.parametrize(("splits", "split"), [
    (["train", "test"], "test"), (["train", "val", "test"], "validation"), (["training", "eval"], "validation")])
def test_validation_split_is_recorded(tmp_path, splits, split):
    assert options_of(image_folder(tmp_path, *splits))["val_split"] == split


def test_validation_on_test_folder_sees_its_images_only(tmp_path):
    root = image_folder(tmp_path / "data", "train", count=8)
    image_folder(root, "test", count=2)
    options = options_of(root)
    source = run.open_source(Namespace(**options))
    assert (len(source.train), len(source.validation), source.num_classes) == (16, 4, 2)
    assert {Path(path).parent.parent.name for path, _ in source.validation.reader.samples} == {"test"}
    assert recipe.known_options()["val_split"]["default"] == "validation"  # the split that `test` replaces


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
def test_missing_split_is_refused(tmp_path, dataset):
    """timm and its torch/image_folder read the whole folder in place of a missing split."""
    refused("has no folder for the validation images", image_folder(tmp_path / "a", "train"), dataset=dataset)
    refused("has no folder for the training images", image_folder(tmp_path / "b", "test", "other"), dataset=dataset)
    named = image_folder(tmp_path / "c", "train", "test")
    refused(r"no folder for the validation images \(val_split 'new'\)", named, dataset=dataset, val_split="new")


def test_flat_folder_is_for_hold_out_only(tmp_path):
    """A hold-out needs one split; a folder that has a test split must name its training split."""
    def hold_out(root):
        path = written(tmp_path, grid={}, hold_out=4, representation=False)
        return plan.plan(request(path, dataset="", data_dir=str(root), **WHOLE))

    flat = image_folder(tmp_path / "flat", "")
    refused("has no folder for the training images", flat)
    for root in (flat, image_folder(tmp_path / "a", "train"), image_folder(tmp_path / "b", "train", "test")):
        options = hold_out(root).runs["linear-seed0"].stages[0].options
        source = run.open_source(Namespace(**options), 4)
        assert (len(source.train), len(source.validation), source.num_classes) == (8, 4, 2)
    with pytest.raises(LabError, match="has no folder for the training images"):
        hold_out(image_folder(tmp_path / "c", "learn", "test"))


@pytest.mark.parametrize("split", ["train/..", "../data", ".", "train/cat", "train[50%:]"])
def test_split_that_shares_images_is_refused(tmp_path, split):
    refused("validation image", image_folder(tmp_path / "data", "train", "test"), val_split=split)


def test_split_around_the_training_images_is_refused(tmp_path):
    root = image_folder(tmp_path / "all" / "data", "train").parent
    refused("12 of 12 training images are also validation images",
            root, train_split="data/train", val_split="data")


def test_link_to_the_training_images_is_refused(tmp_path):
    root = image_folder(tmp_path, "train")
    (root / "val").symlink_to("train")
    refused("12 of 12 training images are also validation images, first .*/train/cat/0.png", root)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_linked_image_is_refused(tmp_path, link):
    root = image_folder(tmp_path, "train", "val")
    link(root / "train" / "dog" / "3.png", root / "val" / "dog" / "other.png")
    refused("1 of 12 training images is also a validation image, first .*/train/dog/3.png", root)


def test_copy_of_the_training_images_is_refused(tmp_path):
    """Equal names alone are no copy, nor are two equal images."""
    root = image_folder(tmp_path, "train", "val")
    shutil.copy(root / "train" / "dog" / "3.png", root / "val" / "dog" / "3.png")
    options_of(root)
    shutil.rmtree(root / "val")
    shutil.copytree(root / "train", root / "val")
    refused("the validation images are copies of the training images", root)


@pytest.mark.parametrize("given", [dict(train_split="test"), dict(val_split="train")])
def test_one_split_of_a_torchvision_data_set_twice_is_refused(tmp_path, monkeypatch, given):
    from torchvision.datasets import MNIST

    def made(self, root, train, download):
        self.train, self.classes, self.transform = train, ["0", "1"], None
        self.data, self.targets = np.zeros((8, 28, 28), np.uint8), [0, 1] * 4

    monkeypatch.setattr(MNIST, "__init__", made)
    monkeypatch.setattr(MNIST, "__len__", lambda self: 8)
    monkeypatch.setattr(MNIST, "__getitem__", lambda self, index: (Image.fromarray(self.data[0]), self.targets[index]))
    options_of(tmp_path, dataset="torch/mnist")
    refused("training and validation images would both be of", tmp_path, dataset="torch/mnist", **given)


# ------------------------------------------------------------------------------------------ timm's train.py
def for_train_py(tmp_path, root, **given):
    return request(written(tmp_path, grid={}, representation=False), tmp_path / "out", train_py=STAND_IN,
                   **{"dataset": "", "data_dir": str(root), "num_classes": 2, **given})


def test_train_py_is_given_the_test_split(tmp_path):
    """Whether or not somebody gives the number of classes."""
    root = image_folder(tmp_path / "data", "train", "test")
    for given in ({}, {"num_classes": None}):
        found = plan.plan(for_train_py(tmp_path, root, **given))
        assert {run_plan.stages[0].options["val_split"] for run_plan in found.runs.values()} == {"test"}


def test_train_py_is_refused_shared_images(tmp_path):
    with pytest.raises(LabError, match="has no folder for the validation images"):
        plan.plan(for_train_py(tmp_path, image_folder(tmp_path / "data", "train")))


def test_train_py_is_refused_shared_images_where_the_data_is(tmp_path):
    """A plan may be made on a machine without the data."""
    found = planned(for_train_py(tmp_path, tmp_path / "data"))
    folder = found.folder / next(iter(found.runs))
    stage = RunPlan.read(folder).stages[0]
    image_folder(tmp_path / "data", "train", "test")
    with pytest.raises(LabError, match=r"planned with val_split 'validation', .* --option val_split=test"):
        train_py.train(RunPlan.read(folder), stage, folder)
    assert not (folder / "summary.csv").exists()
