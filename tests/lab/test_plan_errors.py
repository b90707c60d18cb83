"""planning/: studies, commands and options that are refused before anything is written."""
import math

import pytest
import yaml
from helpers.tiny_study import STUDY, compared, one_run, planned, request, written
from PIL import Image
from timm.data import IterableImageDataset

from timm_ortho import CONNECTIONS, HybridConnection
from timm_ortho._text import UserError
from timm_ortho.lab import LabError, data
from timm_ortho.lab.planning import design
from timm_ortho.lab.running import run


@pytest.mark.parametrize(("changed", "message"), [
    (dict(grdi={}), "the file accepts no key 'grdi'; did you mean 'grid'"),
    (dict(title=...), "'title' is missing"),
    (dict(scales={"tiny": {}}), "scales accepts no key 'tiny'"),
    (dict(scales={"smoke": {"titel": 1}}), "scale 'smoke' accepts no key 'titel'"),
    (dict(scales={"small": {}}), "there is no scale 'smoke', only small"),
    (dict(options={"epoch": 3}), "options accepts no key 'epoch'; did you mean 'epochs'"),
    (dict(grid={"lr": 3}), "axis 'lr' must be a list of values"),
    (dict(grid={"x": {"a": 3}}), "value 'a': its changes must be a mapping, such as {batch_size: 512}, not 3"),
    (dict(grid={"lr": []}), "axis 'lr' has no values: list at least one, or remove the axis"),
    (dict(grid={True: {"a": {}}}), "grid has the key True, but a key must be text: write it in quotes"),
    (dict(grid={"lr": [math.inf]}), "axis 'lr': a value must be text or a finite number, not inf"),
    (dict(grid={"lr": [0.1, math.nan]}), "axis 'lr': a value must be text or a finite number, not nan"),
    (dict(grid={"lr": [0.1, 0.2]}, seeds=5001), "cells of the grid times seeds are 10002, but must be at most 10,000"),
    (dict(seeds=3 * 10**30), "seeds is 3000000000000000000000000000000, but must be a whole number of at least 1"),
    (dict(grid={"x": {"a": {"model_kwargs": "depth=2"}}}), "option 'model_kwargs' is 'depth=2', but must be a mapping"),
    (dict(options={"model_kwargs": "depth=2"}), "option 'model_kwargs' is 'depth=2', but must be a mapping"),
    (dict(grid={"rate": [1, 2]}), "axis 'rate' is a list, so its name must be an option: a study accepts"),
    (dict(grid={"x": {"a": {"conection": "linear"}}}),
     "value 'a': a value has options, such as lr, or connection, connections, model, paper_data, recipe, switch. "
     "It accepts no key 'conection'; did you mean 'connection'"),
    (dict(grid={"x": {"a": {"switch": {"to": "linear"}}}}), "switch needs the keys 'to'"),
    (dict(grid={"x": {"a": {"switch": {"to": "hybrid", "optimizer": "kept"}}}}), "cannot switch to or from hybrid"),
    (dict(grid={"x": {"a": {"switch": {"to": "gated", "optimizer": "kept"}}}}), "cannot switch to or from gated"),
    (dict(grid={"x": {"a": {"switch": {"to": [1], "optimizer": "kept"}}}}), "switch needs the keys 'to'"),
    (dict(grid={"lr": {"a": {1: 2}}}), "It accepts no key '1'"),
    (dict(baseline={"lr": 5}), "the baseline is 5 on axis 'lr', which has no such value"),
    (dict(baseline={"lr": [5]}), "the baseline is [5] on axis 'lr', which has no such value"),
    (dict(seeds=0), "seeds is 0, but must be a whole number of at least 1"),
    (dict(representation="maybe"), "representation is 'maybe', but must be true or false"),
    (dict(options=3), "options is 3, but must be a mapping"),
    (dict(connections="feature"), "connections is 'feature', but must be a list"),
    (dict(grid={"x": {"a": {"connection": ["feature"]}}}), "connection is ['feature'], but must be text"),
    (dict(grid={"seed": [1, 2]}), "'seed' cannot be an axis, because all cells have the same seeds: use the key seeds"),
    (dict(grid={"x": {"a": {"data_dir": "b"}}}), "axis 'x', value 'a': 'data_dir' cannot be an axis"),
    (dict(grid={"scale": [[0.5, 1.0]]}), "axis 'scale': values that are lists or mappings need names: {NAME: {sca"),
])
def test_bad_study(tmp_path, monkeypatch, changed, message):
    monkeypatch.setitem(CONNECTIONS, "gated", HybridConnection)
    values = {**yaml.safe_load(STUDY), **changed}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not ...}))
    if "seeds" in changed:
        path.write_text(path.read_text().replace("seeds: 1", ""))
    with pytest.raises(LabError) as caught:
        design.load(str(path), "smoke")
    assert message in str(caught.value)
    assert str(caught.value).startswith("study 'tiny': ")


@pytest.mark.parametrize("changes", [
    dict(baseline={"connection": "global"}), dict(connections=["feature", "global"]),
    dict(baseline={"connection": "linear", "x": "b"}, grid={"x": {"a": {}, "b": {"connections": ["feature"]}}})])
def test_a_baseline_that_no_run_has(tmp_path, changes):
    with pytest.raises(LabError, match=r"study 'tiny' trains no run of its baseline, {'connection': .*\(connections: "):
        request(written(tmp_path, **changes)).design.variants({})


@pytest.mark.parametrize(("arguments", "message"), [
    (["run", "acuracy"], "there is no study 'acuracy'; did you mean 'accuracy'? (see timm-ortho study list)"),
    (["run", "mine.yaml"], "there is no file mine.yaml: a study of your own is a YAML file, and timm-ortho study list"),
    (["run", "accuracy", "--threads", "0"], "--threads must be at least 1, got 0"),
    (["run", "accuracy", "--scale", "huge"], "there is no scale 'huge': choose smoke, small or paper"),
    (["run", "learning_rate", "-o", "lr=1"], "study 'learning_rate' varies 'lr' along its axis 'lr': remove"),
    (["run", "dynamics", "-o", "epoch=1"], "timm's train.py accepts no option 'epoch'; did you mean 'epochs'"),
    (["run", "accuracy", "--scale", "paper", "--dataset", "imagenet"], "there is no data set 'imagenet'; did you mean"),
    (["run", "dynamics", "--dataset", "cifar10"],
     "data set 'torch/cifar10' needs --data-dir: timm expects its files in DATA_DIR/cifar-10-batches-py"),
    (["run", "dynamics", "--dataset", "tiny_imagenet"],
     "an image folder needs --data-dir: the images must be in train/CLASS/"),
    (["run", "dynamics", "--dataset", "torch/fashion_mnist", "--data-dir", "nowhere"],
     "download them with --option dataset_download=true"),
    (["run", "dynamics", "--seeds", "0"], "choose at least one seed"),
    (["plan", "dynamics", "--gpus", "-1"], "--gpus must be at least 0 and --nodes at least 1, got -1 and 1"),
    (["plan", "dynamics", "--gpus", "2"], "--gpus and --nodes need timm's train.py: add --train-py"),
    (["run", "accuracy", "--scale", "paper", "--dataset", "cifar10"],
     "scale 'paper' needs timm's train.py: add --train-py"),
    (["plan", "dynamics", "-o", "model_kwargs=3"], "option 'model_kwargs' is 3, but must be a mapping"),
    (["plan", "accuracy", "--scale", "paper", "--dataset", "svhn", "--only", "model=vit_b"],
     "the values of model are none; left out: vit_small: the paper has no recipe for svhn; "),
    (["report", "nowhere"], "nowhere has no study.yaml: use the --output of timm-ortho study or compare"),
    (["status", "nowhere"], "nowhere has no study.yaml: use the --output of timm-ortho study or compare"),
])
def test_bad_commands(arguments, message, tmp_path, monkeypatch, error_of):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIMM_DIR", raising=False)
    assert message in error_of("study", *arguments)
    assert not list(tmp_path.iterdir())


def test_scale_paper_looks_for_train_py_in_timm_dir(tmp_path, monkeypatch, error_of):
    monkeypatch.setenv("TIMM_DIR", str(tmp_path / "timm"))
    error = error_of("study", "plan", "accuracy", "--scale", "paper", "--dataset", "cifar10", "--data-dir", "x")
    assert f"there is no {tmp_path / 'timm' / 'train.py'}: " in error


@pytest.mark.parametrize(("given", "message"), [
    (dict(model="vgg11"), r"no orthogonal variant of 'vgg11'; vgg11 has no variants: no residual addition"),
    (dict(img_size=33), r"images of 33 x 33 pixels are not whole numbers of patches of 8 x 8: .* --img-size 32"),
    (dict(model_kwargs={"depht": 2}), r"vit_small_ortho with connection 'linear': .*depht"),
    (dict(model_kwargs={"act_layer": "gleu"}), "vit_small_ortho with connection 'linear': unknown name 'gleu'"),
    (dict(model_kwargs={"connection_eps": 0}), r"eps must be in"),
    (dict(model_kwargs={"connection_start": "linear"}),
     r"unknown argument 'connection_start' of feature and linear, known are 'connection', .*'connection_prob'"),
    (dict(model_kwargs={"connection": "feature"}), r"use --connections of timm-ortho compare, or the key conn"),
    (dict(connections=["linear", "featur"]),
     r"unknown connection 'featur', known are 'linear', .* did you mean 'feature'"),
    (dict(connections=[]), r"there is nothing to compare: choose at least one connection"),
    (dict(batch_size=128), r"batch_size 128 is larger than the training set of 64 images: choose .* batch_size=N"),
    (dict(batch_size=7, mixup=0.2), r"mixup and cutmix need an even batch_size, not 7"),
    (dict(val_num_samples=0), "val_num_samples must be at least 1, got 0"),
    (dict(seed=2**32), "a seed must be below 4294967296, got 4294967296"),
    (dict(model="vit_tiny_patch16_224.augreg_in21k"), "names the weights 'augreg_in21k': use the model vit_tiny"),
    (dict(opt_betas=0.9), "timm cannot build a run from these options: list index out of range"),
    (dict(epochs=0), r"epochs must be at least 1, got 0"),
    (dict(num_classes=1), r"num_classes is 1, but data set 'digits' has 10 classes"),
    (dict(opt="adamm"), r"timm cannot build a run from these options: .*adamm"),
    (dict(sched="plateau"), r"has no schedule 'plateau': choose another, such as constant, or train with --train-py"),
    (dict(sched="cosin"), r"cosin"),
    (dict(kd_model_name="resnet50"), r"has 'kd_model_name', but the lab's own loop does not: remove the option"),
    (dict(device="abacus"), r"there is no device 'abacus'"),
    (dict(amp=True, amp_dtype="int8"), r"option 'amp_dtype' is 'int8', but must be one of 'float16', 'bfloat16'$"),
    (dict(device_modules=["nowhere_at_all"]), r"'device_modules': No module named 'nowhere_at_all': is its folder in"),
    (dict(dataset="torch/fashion_mnist", data_dir="x"), r"\(split 'train'\) cannot be read: .* its files in .*Fa"),
    (dict(dataset="torch/fashion_mist", data_dir="x"), r"'torch/fashion_mist' .* cannot be read: .* can download t"),
    (dict(dataset="wds/mnist", data_dir="x"), r"'x' is not a file: data sets wds/ are read from files in --data-dir"),
    (dict(dataset="", data_dir="x"), r"there is no folder x: the images must be in train/CLASS/ and in val/CLASS/"),
])
def test_bad_options(tmp_path, monkeypatch, given, message):
    """A refused command writes nothing, so the corrected command can use the same folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        planned(compared(tmp_path / "out", **given))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_text_instead_of_a_mapping_in_a_recipe(tmp_path):
    (tmp_path / "own.yaml").write_text("model_kwargs: depth=2\n")
    with pytest.raises(LabError, match="option 'model_kwargs' is 'depth=2', but must be a mapping"):
        planned(compared(tmp_path / "out", recipe=str(tmp_path / "own.yaml")))


@pytest.mark.parametrize("owner", ["study", "recipe"])
def test_modules_that_only_a_file_names_are_refused_with_its_name(tmp_path, owner):
    named, recipe = {"device_modules": ["nowhere_at_all"]}, tmp_path / "own.yaml"
    recipe.write_text(yaml.safe_dump(named if owner == "recipe" else {}))
    path = written(tmp_path, recipe=str(recipe), options=named if owner == "study" else {})
    source = "study 'tiny'" if owner == "study" else f"recipe '{recipe}'"
    with pytest.raises(UserError, match=f"option 'device_modules' of {source} names the module 'nowhere_at_all'"):
        planned(request(path, tmp_path / "out"))


def test_streamed_data_sets(tmp_path, monkeypatch):
    """A stand-in for timm's readers of webdataset and tfds, which are not installed, gives the same 64 grey images."""
    class Reader:
        def __iter__(self):
            return ((Image.new("L", (16, 16), 3 * index), index % 10) for index in range(64))

        def __len__(self):
            return 64

        def set_loader_cfg(self, num_workers):
            pass

        def set_epoch(self, count):
            epochs.append(count)

    monkeypatch.setattr(data, "create_dataset", lambda *_, **__: IterableImageDataset("", reader=Reader()))
    given = dict(dataset="tfds/mnist", data_dir="x", input_img_mode="L")
    with pytest.raises(LabError, match="number of classes of data set 'tfds/mnist' is unknown: add --option num_cla"):
        planned(compared(tmp_path / "out", **given))
    with pytest.raises(LabError, match="images cannot be held out of a streamed data set: set val_split instead"):
        planned(request(written(tmp_path, hold_out=4), tmp_path / "out", num_classes=10, **given))
    with pytest.raises(LabError, match="a streamed data set is never complete in memory"):
        planned(compared(tmp_path / "out", num_classes=10, device_images=True, **given))
    epochs = []
    run.run(one_run(tmp_path / "out", num_classes=10, **given), named={"dataset": "tfds/mnist"})
    assert epochs == [0, 1]


def test_pretrained_without_weights_names_the_option_weights(error_of):
    error = error_of("compare", "--model", "deit_tiny_patch16_224", "--option", "pretrained=true")
    assert "remove pretrained, and start from a file with --weights FILE" in error
