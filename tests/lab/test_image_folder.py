"""Image folders: splits, classes, images and the cache. Most faulty folders are refused before training."""
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pages import blocks, section, text_of
from helpers.tiny_study import STAND_IN, compared, one_run, planned, request, written
from PIL import Image

from timm_ortho.lab import LabError, commands, data
from timm_ortho.lab.folder import Variant
from timm_ortho.lab.planning import plan
from timm_ortho.lab.running import run, timm_script as train_py
from timm_ortho.run_folder import read_run

WHOLE = dict(train_num_samples=None, val_num_samples=None, batch_size=4)


def image_folder(root, *splits, classes=("cat", "dog"), count=6, below=""):
    """Write different random images into ROOT/SPLIT/CLASS/BELOW for each split and class. Return ``root``."""
    rng = np.random.default_rng(list("/".join(splits).encode()))
    for split in splits:
        for label in classes:
            folder = root / split / label / below
            folder.mkdir(parents=True)
            for index in range(count):
                Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return root


def samples(split):
    """Return (file, label) for each image of a data set of timm or torchvision."""
    split = getattr(split, "dataset", split)
    return getattr(split, "reader", split).samples


def options_of(root, **options):
    """Return the options of a planned run on an image folder, without writing the run's folder."""
    experiment = plan.plan(compared("unused", ["linear"], **{"dataset": "", "data_dir": str(root), **WHOLE, **options}))
    return experiment.runs["linear-seed0"].stages[0].options


def refused(message, root, **options):
    with pytest.raises(LabError, match=message) as error:
        options_of(root, **options)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------ the splits
@pytest.mark.parametrize(("splits", "split"), [
    (["train", "test"], "test"), (["train", "val", "test"], "validation"), (["training", "eval"], "validation")])
def test_validation_split_is_recorded(tmp_path, splits, split):
    assert options_of(image_folder(tmp_path, *splits))["val_split"] == split


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
def test_missing_split_is_refused(tmp_path, dataset):
    """If a split has no folder, timm would use all images of the data set for this split."""
    refused("has no folder for the validation images", image_folder(tmp_path / "a", "train"), dataset=dataset)
    refused("has no folder for the training images", image_folder(tmp_path / "b", "test", "other"), dataset=dataset)
    named = image_folder(tmp_path / "c", "train", "test")
    refused(r"no folder for the validation images \(val_split 'new'\)", named, dataset=dataset, val_split="new")


def test_flat_folder_requires_a_hold_out(tmp_path):
    """Held-out images come from the training split. If a folder has no splits, all its images are training images.

    A folder with a test split must also have a training split.
    """
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


@pytest.mark.parametrize("split", ["train/..", "../data", ".", "./train", "train[50%:]"])
def test_split_that_shares_images_is_refused(tmp_path, split):
    refused("validation image", image_folder(tmp_path / "data", "train", "test"), val_split=split)


def test_split_around_the_training_images_is_refused(tmp_path):
    root = image_folder(tmp_path / "all" / "data", "train").parent
    refused("12 of 12 training images are also validation images",
            root, train_split="data/train", val_split="data")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_linked_image_is_refused(tmp_path, link):
    root = image_folder(tmp_path, "train", "val")
    link(root / "train" / "dog" / "3.png", root / "val" / "dog" / "other.png")
    refused("1 of 12 training images is also a validation image, first .*/train/dog/3.png", root)


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
def test_links_to_folders_that_are_read_already(tmp_path, dataset):
    """With two links to its parent, a folder has 2**40 paths."""
    root = image_folder(tmp_path, "train", "val")
    for name in ("l1", "l2"):
        (root / "train" / "cat" / name).symlink_to("..")
    refused(f"{root}/train and {root}/train/cat/l[12] are the same folder: remove the link", root, dataset=dataset)


def test_a_class_map_may_leave_out_a_link_to_another_class(tmp_path):
    root = image_folder(tmp_path, "train", "val")
    (tmp_path / "map.txt").write_text("cat\ndog\n")
    (root / "train" / "alias").symlink_to(root / "train" / "cat")
    refused("alias and .*cat are the same folder|cat and .*alias are the same folder", root)
    options_of(root, class_map=str(tmp_path / "map.txt"))


def test_a_tar_file_cannot_contain_two_splits(tmp_path):
    image_folder(tmp_path, "data")
    path = shutil.make_archive(str(tmp_path / "data"), "tar", tmp_path / "data")
    refused("training and validation images would both come from .*data.tar", path)
    refused("training and validation images would both come from .*data.tar", str(tmp_path), train_split="data.tar",
            val_split="data.tar")


@pytest.mark.parametrize("options", [dict(train_split="test"), dict(val_split="train")])
def test_the_same_torchvision_split_twice_is_refused(tmp_path, monkeypatch, options):
    from torchvision.datasets import MNIST

    def made(self, root, train, download):
        self.train, self.classes, self.transform = train, ["0", "1"], None
        self.data, self.targets = np.zeros((8, 28, 28), np.uint8), [0, 1] * 4

    monkeypatch.setattr(MNIST, "__init__", made)
    monkeypatch.setattr(MNIST, "__len__", lambda self: 8)
    monkeypatch.setattr(MNIST, "__getitem__", lambda self, index: (Image.fromarray(self.data[0]), self.targets[index]))
    options_of(tmp_path, dataset="torch/mnist")
    refused("training and validation images would both come from", tmp_path, dataset="torch/mnist", **options)


# ------------------------------------------------------------------------------------- description in reports
def data_of(root, **options):
    """Return the description of the data in a plan of `timm-ortho compare`."""
    options = {"device": "cpu", "dataset": "", "data_dir": str(root), "batch_size": 4, **options}
    return plan.plan(commands.Request(commands.comparison(["linear"], None), options, seeds=1)).study["data"]


def test_description_of_the_data(tmp_path):
    root = image_folder(image_folder(tmp_path, "train", count=8), "val", count=3)
    described = data_of(root)
    assert len(described.pop("fingerprint")) == 16
    assert described == {
        "image_size": [32, 32], "first_image": [16, 16], "channels": 3,
        "classes": 2, "train": 16, "validation": 6, "validation_split": "val", "on_device": False}
    data = data_of(root, in_chans=1, train_num_samples=10)
    assert (data["channels"], data["train"], data["validation"]) == (1, 10, 6)
    image_folder(root, "test", count=2)
    assert data_of(root, val_split="test")["validation_split"] == "test"


@pytest.mark.parametrize(("options", "size"), [
    ({"img_size": 48}, [48, 48]), ({"input_size": [3, 16, 32]}, [16, 32]), ({"model": "vit_test"}, [8, 8]),
    ({"model": "vit_test", "model_kwargs": {"img_size": 24}}, [24, 24]),
    ({"model": "vit_test", "model_kwargs": {"img_size": (16, 24)}}, [16, 24]),
])
def test_the_image_size_is_that_of_the_command_or_model(tmp_path, options, size):
    assert data_of(image_folder(tmp_path, "train", "val"), **options)["image_size"] == size


def test_description_of_a_studys_data(tmp_path):
    root = image_folder(tmp_path / "data", "train", "test")

    def described(*options, **changes):
        path = written(tmp_path, **{"grid": {}, "representation": False, **changes})
        return plan.plan(request(path, dataset="", data_dir=str(root), **WHOLE, **dict(options))).study["data"]

    assert described()["validation_split"] == "test"
    held = described(hold_out=4)
    assert (held["train"], held["validation"], held["validation_split"]) == (8, 4, "hold-out")
    models = {"model": {"vit_test": {"model": "vit_test", "img_size": 8}, "vit_small": {"img_size": 16}}}
    assert described(grid=models)["image_size"] is None


# ------------------------------------------------------------------------------------------ timm's train.py
def for_train_py(tmp_path, root, **options):
    return request(written(tmp_path, grid={}, representation=False), tmp_path / "out", train_py=STAND_IN,
                   **{"dataset": "", "data_dir": str(root), "num_classes": 2, **options})


def test_train_py_validates_on_the_test_split(tmp_path):
    """The choice of the validation split does not depend on whether num_classes is set."""
    root = image_folder(tmp_path / "data", "train", "test")
    for options in ({}, {"num_classes": None}):
        experiment = plan.plan(for_train_py(tmp_path, root, **options))
        assert {run_plan.stages[0].options["val_split"] for run_plan in experiment.runs.values()} == {"test"}


def test_shared_images_are_refused_when_train_py_starts(tmp_path):
    """A plan may be made on a machine without the data, so the splits are checked again when train.py starts."""
    experiment = planned(for_train_py(tmp_path, tmp_path / "data"))
    folder = experiment.folder / next(iter(experiment.runs))
    stage = Variant.read(folder).stages[0]
    image_folder(tmp_path / "data", "train", "test")
    with pytest.raises(LabError, match=r"planned with val_split 'validation', .* --option val_split=test"):
        train_py.train(Variant.read(folder), stage, folder)
    assert not (folder / "summary.csv").exists()


# -------------------------------------------------------------------------------------------- the data set
def test_data_dir_alone_is_an_image_folder(tmp_path, error_of):
    """--data-dir selects an image folder unless the command, the study or the recipe sets a data set."""
    root = image_folder(tmp_path / "data", "train", "test")
    experiment = plan.plan(request("dynamics", data_dir=str(root), batch_size=4, train_num_samples=None))
    assert (experiment.study["dataset"], experiment.study["data"]["classes"]) == ("data", 2)
    with pytest.raises(LabError, match="data set digits takes no --data-dir"):
        plan.plan(request("dynamics", dataset="digits", data_dir=str(root)))
    assert plan.plan(compared(data_dir=str(root), **WHOLE)).study["dataset"] == "data"
    for arguments, message in [
            (["--recipe", "digits", "--data-dir", str(root)], "data set digits takes no --data-dir"),
            (["--data-dir", str(root), "-o", "dataset=torch/fashion_mnist"], "data set 'torch/fashion_mnist' ")]:
        assert message in error_of("compare", *arguments)


def test_folder_keeps_its_runs_when_it_moves(tmp_path):
    roots = [image_folder(tmp_path / name / "data", "train", "test") for name in ("here", "there")]
    experiments = [plan.plan(compared(dataset="", data_dir=str(root), **WHOLE)) for root in roots]
    assert experiments[0].folder == experiments[1].folder
    assert experiments[0].settings == experiments[1].settings


# --------------------------------------------------------------------------------------------- the classes
def tiny_imagenet(root):
    """Write a folder in the layout of Tiny ImageNet's archive."""
    image_folder(root, "train", classes=("n01", "n02", "n03"), below="images")
    for label in ("n01", "n02", "n03"):
        (root / "train" / label / f"{label}_boxes.txt").write_text(f"{label}_0.png\t0\t0\t62\t62\n")
    (root / "val" / "images").mkdir(parents=True)
    rows = []
    for index in range(9):
        pixels = np.random.default_rng(100 + index).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "val" / "images" / f"val_{index}.png")
        rows.append(f"val_{index}.png\tn0{1 + index % 3}\t0\t0\t62\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    return root


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
def test_the_commands_of_the_guide_sort_tiny_imagenet(tmp_path, dataset):
    root = tiny_imagenet(tmp_path / "DIR")
    refused("split .* of .*Tiny ImageNet's own layout: docs/your_own_data.md has", root, dataset=dataset)
    commands, = blocks(section("your_own_data.md", "Tiny ImageNet"), "sh")
    subprocess.run(["bash", "-ec", commands], check=True, cwd=tmp_path)
    options = options_of(root, dataset=dataset)
    source = run.open_source(Namespace(**options))
    assert (len(source.train), len(source.validation), source.labels) == (18, 9, ["n01", "n02", "n03"])
    labels = {Path(path).name: label for path, label in samples(source.validation)}
    assert labels == {f"val_{index}.png": index % 3 for index in range(9)}


@pytest.mark.parametrize("table", [False, True])
def test_images_without_splits_are_divided_by_the_script_of_the_guide(tmp_path, monkeypatch, table):
    image_folder(tmp_path, "IMAGES", count=10)
    script, = blocks(text_of("your_own_data.md").partition("\n## Tiny")[0])
    if table:
        rows = [f"{path.relative_to(tmp_path / 'IMAGES')},{path.parts[-2]}\n" for path in tmp_path.rglob("*.png")]
        (tmp_path / "labels.csv").write_text("".join(["filename,label\n", *rows]))
        script = re.sub(r"images = .*\n# ", "", script)
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", script], check=True)
    source = run.open_source(Namespace(**options_of(Path("DIR"))))
    assert [Counter(label for _, label in samples(split)) for split in (source.train, source.validation)] == [
        {0: 8, 1: 8}, {0: 2, 1: 2}]
    assert source.labels == ["cat", "dog"]
    assert ({path.read_bytes() for path in Path("DIR").rglob("*.png")}
            == {path.read_bytes() for path in Path("IMAGES").rglob("*.png")})


@pytest.mark.parametrize("scale", ["lab", "train.py"])
def test_one_class_is_refused(tmp_path, scale):
    """A split with one class is refused even if num_classes is 2. Two folders cannot have the same class name."""
    def refused_by(root, message):
        with pytest.raises(LabError, match=message):
            options_of(root, num_classes=2) if scale == "lab" else plan.plan(for_train_py(tmp_path, root))

    refused_by(image_folder(tmp_path / "a", "train", "val", classes=("all",)),
               "split 'train' of .*: all images are of one class 'all', but at least two classes are needed: the")
    refused_by(image_folder(tmp_path / "b", "train", "val", classes=("",)),
               "all images are of one class, but at least two classes are needed: the images")
    refused_by(image_folder(image_folder(tmp_path / "c", "train"), "val", classes=("cat",)),
               "split 'validation' of .*: all images are of one class 'cat'")
    refused_by(image_folder(tmp_path / "d", "train", "val", below="images"),
               "class 'images' is in several folders, first 'cat/images' and 'dog/images'")


def test_one_class_with_images_is_refused_with_a_class_map(tmp_path):
    root = image_folder(tmp_path, "train", "val")
    (tmp_path / "classes.txt").write_text("cat\nbird\n")
    refused("all images are of one class 'cat'", root, class_map=str(tmp_path / "classes.txt"))
    refused("class_map none.txt cannot be read: .*Cannot locate", root, class_map="none.txt")


def test_a_class_that_a_class_map_lists_twice_is_refused(tmp_path):
    """Labels would begin with 1, and the last label would be the number of classes."""
    root = image_folder(tmp_path, "train", "val")
    (root / "train" / "classes.txt").write_text("dog\ncat\ndog \n")
    refused("class_map classes.txt has several lines with the same class", root, class_map="classes.txt")


def test_class_maps_that_timm_reads_wrongly_are_refused(tmp_path):
    """timm would skip the images of the first class, or wait for the writer of a pipe."""
    root = image_folder(tmp_path, "train", "val", classes=("cat", "dog", "emu"))
    (root / "train" / "classes.txt").write_text("cat\ndog\nemu\n", encoding="utf-8-sig")
    refused("class_map classes.txt begins with a byte order mark", root, class_map="classes.txt")
    os.mkfifo(root / "train" / "pipe.txt")
    for path in ("pipe.txt", str(root / "train" / "pipe.txt")):
        refused(f"class_map {path} cannot be read: it is not a file", root, class_map=path)


def test_class_map_is_refused_with_torchvision(tmp_path):
    """timm does not pass class_map to torchvision's data sets."""
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    refused("class_map has no effect on data set torch/image_folder", image_folder(tmp_path, "train", "val"),
            dataset="torch/image_folder", class_map=str(tmp_path / "classes.txt"))


def test_splits_of_different_classes_are_refused(tmp_path):
    """timm numbers the classes of each split separately. A label would denote different classes in the two splits."""
    root = image_folder(image_folder(tmp_path, "train", classes="abcd"), "val", classes="bcd")
    refused(r"has other classes than split 'train', 1 only in 'train' \(a\), so labels", root)
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")
    assert options_of(root, class_map=str(tmp_path / "classes.txt"))["num_classes"] == 4
    image_folder(root, "val", classes="z")
    refused(r"1 only in 'train' \(a\) and 1 only in 'validation' \(z\)", root)
    image_folder(root, "val", classes="a")
    refused(r"split 'train', 1 only in 'validation' \(z\)", root)


@pytest.mark.parametrize(("path", "message"), [
    ("train/stray.png", "'cat' is inside the split's own folder, and both contain images"),
    ("train/cat/.ipynb_checkpoints/0.png", r"'cat/\.ipynb_checkpoints' is inside 'cat'"),
    ("val/cat/more/small/0.png", "split 'validation' of .*'cat/more/small' is inside 'cat'"),
])
def test_image_between_class_folders_is_refused(tmp_path, path, message):
    root = image_folder(tmp_path, "train", "val")
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(root / path)
    refused(message, root)


def test_wrong_number_of_classes_is_refused(tmp_path):
    """The paper's recipes set num_classes for the paper's data sets. An image folder may have fewer classes."""
    root = image_folder(tmp_path / "data", "train", "val")
    refused("num_classes is 200, but data set '.*' has 2 classes: use --option num_classes=2", root, num_classes=200)
    with pytest.raises(LabError, match="num_classes is 200, but"):
        plan.plan(for_train_py(tmp_path, root, num_classes=200))


def test_classes_in_groups_are_allowed(tmp_path):
    """The innermost folder of an image is its class. Folders may group class folders, as `pets` and `birds` here."""
    root = image_folder(image_folder(tmp_path, "train/pets", "val"), "train/birds", classes=("owl",))
    image_folder(root, "val", classes=("owl",))
    assert options_of(root)["num_classes"] == 3


# ---------------------------------------------------------------------------------------------- the images
@pytest.fixture
def broken(tmp_path):
    """Return a folder with a truncated image, and the path of this image."""
    root = image_folder(tmp_path / "data", "train", "val")
    path = root / "val" / "dog" / "2.png"
    path.write_bytes(path.read_bytes()[:400])
    return root, path


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_image_fails_the_run_by_its_name(tmp_path, broken, workers, dataset):
    """timm's ImageDataset would replace a corrupt image by the next image, which would then count twice."""
    root, path = broken
    folder = one_run(tmp_path / "out", dataset=dataset, data_dir=str(root), workers=workers, **WHOLE)
    with pytest.raises(LabError, match=rf"^image {path} cannot be used \(.*\): remove or replace it$"):
        run.run(folder)
    assert read_run(folder).last_session["error"].startswith(f"image {path} cannot be used")
    assert read_run(folder).result is None


def test_corrupt_image_fails_train_py(tmp_path, monkeypatch):
    """The lab sets TIMM_DATASET_MAX_RETRIES to 1. Otherwise timm 1.0.31 replaces a corrupt image by the next image."""
    seen = tmp_path / "seen"
    script = tmp_path / "script.py"
    script.write_text(STAND_IN.read_text().replace(
        "    import timm\n", f"    Path({str(seen)!r}).write_text(os.environ['TIMM_DATASET_MAX_RETRIES'])\n"
        "    raise SystemExit\n"))
    experiment = planned(request(
        written(tmp_path, grid={}, representation=False, connections=["linear"]), tmp_path / "out", train_py=script,
        dataset="", data_dir="/nowhere", num_classes=10))
    with pytest.raises(LabError, match="after 0 of 2 epochs"):
        run.run(experiment.folder / "linear-seed0", train_py=str(script))
    assert seen.read_text() == "1"


def test_other_images_under_the_same_output_are_refused(tmp_path):
    """If an output folder had runs on different images, the report would mix their results."""
    root = image_folder(tmp_path / "data", "train", "val")

    def plan_again():
        experiment = plan.plan(compared(str(tmp_path / "out"), ["linear"], dataset="", data_dir=str(root), **WHOLE))
        experiment.write()

    plan_again()
    plan_again()
    root.rename(tmp_path / "moved")
    root = tmp_path / "moved"
    plan_again()  # the same images in a moved folder
    (root / "val" / "cat" / "0.png").rename(root / "val" / "cat" / "other.png")
    with pytest.raises(LabError, match=r"has runs on other images \(fingerprint was"):
        plan_again()
    image = (root / "train" / "cat" / "0.png").read_bytes()
    (root / "train" / "cat" / "more.png").write_bytes(image)
    with pytest.raises(LabError, match=r"has runs on other images \(train was 12 and is now 13"):
        plan_again()


def test_images_that_cannot_be_opened_are_refused_before_training(tmp_path, broken):
    root, path = broken
    path.write_bytes(b"")
    refused(f"image {path} is empty", root)
    path.unlink()
    path.symlink_to("nowhere.png")
    refused(rf"image {path} cannot be read \(No such file", root)
    path.unlink()
    first = root / "train" / "cat" / "0.png"
    first.unlink()
    os.mkfifo(first)
    path = written(tmp_path, grid={}, hold_out=4, representation=False)
    with pytest.raises(LabError, match=f"image {first} is empty"):
        plan.plan(request(path, dataset="", data_dir=str(root), **WHOLE))
    first.unlink()
    first.write_bytes(b"no image")
    refused(rf"image {first} cannot be used \(UnidentifiedImageError", root)


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
def test_16_bit_images_are_refused(tmp_path, dataset):
    """Pillow's conversion to 8 bits clips the values and makes nearly all pixels white."""
    root = image_folder(tmp_path, "train", "val")
    path = root / "train" / "cat" / "0.png"
    pixels = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    Image.fromarray(pixels).save(path)
    refused(f"image {path} cannot be used .*Pillow clips images of 16 or 32 bits to 255; convert the image to 8 bits "
            "first", root, dataset=dataset)


def saved_as(path, suffix):
    Image.open(path).save(path.with_suffix(suffix))
    path.unlink()


def test_images_that_timms_reader_skips_are_refused(tmp_path):
    """timm's reader skips some image formats, so a class could be missing. Files that are no images are allowed."""
    root = image_folder(tmp_path, "train", "val", classes=("cat", "dog", "emu"))
    for name in ("a.txt", "b.csv", "c.json", "d.pdf", "e.mpg", "f.h5", "Thumbs.db", ".DS_Store"):
        (root / "train" / "cat" / name).write_text("")
    assert options_of(root)["num_classes"] == 3
    saved_as(root / "val" / "dog" / "5.png", ".TIFF")
    refused(r"1 image of '.*/val' has a format that timm's reader skips \(.tiff: 1\)", root)
    for path in (root / "train" / "emu").iterdir():
        saved_as(path, ".webp")
    saved_as(root / "train" / "dog" / "1.png", ".bmp")
    refused(r"7 images of '.*/train' have formats that timm's reader skips \(.webp: 6, .bmp: 1\), first "
            ".*/train/dog/1.bmp: convert them to PNG or JPEG", root)
    (tmp_path / "classes.txt").write_text("cat\n")
    refused("all images are of one class 'cat'", root, class_map=str(tmp_path / "classes.txt"))


def test_webp_images_are_allowed_with_torchvision(tmp_path):
    root = image_folder(tmp_path, "train", "val")
    saved_as(root / "train" / "dog" / "1.png", ".webp")
    source = run.open_source(Namespace(**options_of(root, dataset="torch/image_folder")))
    assert len(source.train) == 12


@pytest.mark.parametrize(("key", "value"), [("in_chans", 4), ("in_chans", 2), ("input_size", [4, 32, 32])])
def test_channels_are_one_or_three(tmp_path, key, value):
    refused(f"option {key} sets [24] channels, but images have 1",
            image_folder(tmp_path, "train", "val"), **{key: value})


@pytest.mark.parametrize(("changes", "mode"), [({}, "RGB"), ({"in_chans": 1}, "L")])
def test_grey_and_colour_images_mix(tmp_path, changes, mode):
    """All images are converted to the number of channels that the run uses. The first image's mode does not matter."""
    root = image_folder(tmp_path, "train", "val")
    for label in ("cat", "dog"):
        path = root / "train" / label / "0.png"
        Image.open(path).convert("L").save(path)
    options = Namespace(**options_of(root, **changes))
    source = run.open_source(options)
    assert {image.mode for part in (source.train, source.validation) for image, _ in part} == {mode}
    assert source.in_chans == options.in_chans == len(mode)


# ------------------------------------------------------------------------------------------------- the cache
def epochs_of(options, count=2, after_first=None):
    """Return the data set, and the training batches of each epoch. The epochs use different random numbers."""
    source, stream, batches = data.open_source(options), data.DataStream(torch.device("cpu")), []
    config = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear",
              "crop_pct": 1.0}
    train, _ = data.loaders(options, source, config, torch.device("cpu"))
    for epoch in range(count):
        stream.reseed(epoch)
        batches.append(list(stream.iterate(train)))
        if epoch == 0 and after_first:
            after_first()
    return source, batches


def test_small_images_are_read_once(tmp_path, monkeypatch):
    """The second epoch reads no files. The batches equal the batches of a loader without a cache."""
    root = image_folder(tmp_path, "train", "val")
    options = Namespace(**options_of(root, aa="rand-m9-n4", color_jitter=0.4, reprob=0.5, workers=0))
    monkeypatch.setattr(data, "_CACHE_BYTES", 0)
    source, expected = epochs_of(options)
    assert source.train.cache is None
    monkeypatch.setattr(data, "_CACHE_BYTES", 12 * 16 * 16 * 4)
    source, batches = epochs_of(options, after_first=lambda: shutil.rmtree(root / "train"))
    assert len(source.train.cache) == 12
    for epoch in range(2):
        for (images, targets), (expected_images, expected_targets) in zip(batches[epoch], expected[epoch], strict=True):
            assert torch.equal(images, expected_images)
            assert torch.equal(targets, expected_targets)


def test_an_archive_is_not_a_folder(tmp_path, error_of):
    (tmp_path / "images.zip").write_bytes(b"PK")
    error = error_of("compare", "--data-dir", tmp_path / "images.zip")
    assert "images.zip is a file: unpack it, and pass the folder" in error
