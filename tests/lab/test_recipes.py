"""The recipes: keys of timm's parser, the papers' values, sources in comments; optimizers, schedules, augmentation."""
import csv
import json
import math
import random
import re
from pathlib import Path

import pytest
import timm
import torch
import yaml
from helpers.tiny_study import in_this_process
from PIL import Image
from timm.data import create_transform
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs

import timm_ortho
from timm_ortho import cli
from timm_ortho.lab import LabError, paper
from timm_ortho.lab.paper import recipes
from timm_ortho.lab.planning import recipe
from timm_ortho.lab.train_options import timm_options

ROOT = Path(__file__).parents[2]
NUMBERS = paper.numbers()
NAMES = [name for name in paper.experiments() if not name.startswith("skipnet")]
IMAGENET = ["resnetv2_50_imagenet1k", "vit_base_patch16_224_imagenet1k"]  # for every architecture


def values(name):
    return yaml.safe_load(recipe.text(name))


def plain(text):
    """Return a text without line breaks and comment signs."""
    return " ".join(text.replace("\n#", " ").split())


def cell(name):
    """Split a recipe's name into the architecture, the data set, and `_initialisation` or None."""
    return re.fullmatch(
        r"(vit_[sb]|resnetv2_\d+)_(cifar100?|tiny_imagenet|imagenet1k)(_initialisation)?", name).groups()


def table(name):
    """Return the paper's hyperparameters for a recipe."""
    architecture, data, study = cell(name)
    section = NUMBERS["recipes"]["initialisation" if study else architecture.split("_")[0]]
    return {**section, **section[data]}


# ------------------------------------------------------------------------------------- keys and values
def test_the_recipes_are_all_there():
    assert len(NAMES) == 21
    assert recipe.shipped() == [
        *NAMES, "skipnet_cifar10", "skipnet_cifar100", "skipnet_svhn", IMAGENET[1], "digits", IMAGENET[0],
        "small_images", "vit_test_digits"]


def test_recipes_have_options_of_timm_alone(capsys):
    for name in recipe.shipped():
        assert values(name).keys() <= timm_options().keys()
        assert recipe.resolve(recipe.load(name)).model
        assert values(name)["device_modules"] == ["timm_ortho"]
    assert not capsys.readouterr().err


def test_a_recipe_with_an_option_that_timm_lacks_is_refused(tmp_path):
    (tmp_path / "own.yaml").write_text("crop_padding: 4\n")
    with pytest.raises(LabError, match=r"timm's train.py accepts no option 'crop_padding'"):
        recipe.load(str(tmp_path / "own.yaml"))


def test_the_lists_of_timms_options_agree():
    """`train_options.json` lacks no option that a copy of timm's parser has, if this machine has the copy."""
    copy = ROOT.parent / "shared" / "timm_train_options.json"
    if not copy.is_file():
        pytest.skip("no copy of timm's options")
    named = {key for option, entry in json.loads(copy.read_text())["options"].items() for key in [option]
             if entry["flags"]}
    assert named <= timm_options().keys()


def test_images_on_the_device_have_the_papers_crop_and_randaugment():
    assert recipes.device_options("vit_s_cifar10") == {"crop_padding": 4, "rand_augment": [9, 5]}
    assert recipes.device_options("vit_b_imagenet1k") == {"rand_augment": [9, 9]}
    assert recipes.device_options("skipnet_cifar100") == {"crop_padding": 4}
    assert recipes.device_options("skipnet_svhn") == recipes.device_options("digits") == {}
    options = recipe.resolve_variant({"lr": 0.1}, "vit_s_cifar10")
    assert (options.crop_padding, options.rand_augment, options.lr) == (4, [9, 5], 0.1)
    assert recipe.resolve_variant({"crop_padding": 2}, "vit_s_cifar10").crop_padding == 2


def expected_vit(name):
    given = table(name)
    erasing, jitter = given["random_erasing"], given["color_jitter"]
    # timm has no options for these ranges. It uses 0.02 to 1/3 and 0.3 to 1/0.3, which are nearly equal.
    assert (erasing["scale"], erasing["ratio"]) == ([0.02, 0.33], [0.3, 3.3])
    return {
        "model_kwargs": {"img_size": given["resolution"], "patch_size": given["patch"]},
        "opt": given["optimizer"].lower(), "opt_betas": given["betas"], "sched": given["schedule"],
        "hflip": given["hflip"], "mixup": given["mixup"]["alpha"], "mixup_prob": given["mixup"]["prob"],
        "cutmix": given["cutmix"]["alpha"], "smoothing": given["smoothing"], "reprob": erasing["prob"],
        "color_jitter": [jitter[key] for key in ("brightness", "contrast", "saturation", "hue")],
        "clip_grad": None, "aa": "rand-n{operations}-m{magnitude}-p0.93-inc1-tincreasing3a".format(
            **{**given["randaugment"], "magnitude": round(given["randaugment"]["magnitude"] * 10 / 30)}),
    }


def expected_resnet(name):
    given = table(name)
    assert (given["optimizer"], given["schedule"]) == ("SGD", "multi-step")
    assert all(given[key] is None for key in ("mixup", "cutmix", "smoothing", "random_erasing", "randaugment"))
    return {
        "opt": "momentum", "momentum": given["momentum"], "sched": "multistep", "hflip": given["hflip"],
        "decay_milestones": given["decay_epochs"], "decay_rate": given["decay_factor"],
        "color_jitter": 0.0, "smoothing": 0.0, "clip_grad": 1.0,
    }


def test_values_are_the_papers():
    for name in NAMES:
        architecture, data, study = cell(name)
        given, found = table(name), values(name)
        expected = {
            "model": NUMBERS["architectures"][architecture]["model"] + ("_orthog" if study else "_ortho"),
            "num_classes": NUMBERS["datasets"][data]["classes"],
            "dataset": f"torch/{data}" if data.startswith("cifar") else "",
            "img_size": given["resolution"], "epochs": given["epochs"], "batch_size": given["batch"],
            "lr": given["lr"], "weight_decay": given["weight_decay"], "warmup_epochs": given["warmup_epochs"],
            "opt_kwargs": {"filter_bias_and_bn": False},
            **(expected_vit(name) if architecture.startswith("vit") else expected_resnet(name)),
            **({"scale": given["crop"]["scale"], "ratio": given["crop"]["ratio"]} if given["crop"] != "pad 4" else {}),
        }
        assert {key: found.get(key) for key in expected} == expected, name
        assert all(type(found[key]) is type(value) for key, value in expected.items() if key in found)


@pytest.mark.parametrize(("name", "facts"), [
    ("vit_s_cifar10", ["Table 2 of 'Revisiting", "Linear 89.82 +- 0.34, Orthogonal-F 90.61 +- 0.21", "of 5 runs",
                       "8 x NVIDIA RTX 3090, about 1 h per run", "use seeds 0 to 4", "FILE -b 128 --data-dir"]),
    ("resnetv2_34_tiny_imagenet", ["Orthogonal-G 65.38 +- 0.35", "Table 9): Linear 65.88 +- 0.22", "unknown hours",
                                   "FILE -b 16 --sync-bn", "the authors' published code has 0.7 to 1"]),
    ("vit_b_imagenet1k", ["an unknown number of runs", "Orthogonal-F 77.05 +- 0.21", "75.45 +- 0.12 (3 runs)",
                          "use seeds 0 to 2", "FILE -b 512", "DATA/train/CLASS/"]),
    ("resnetv2_50_cifar100_initialisation", ["Table 7", "Table 8", "orthogonal, Orthogonal-G 77.22 +- 0.24"]),
    ("vit_base_patch16_224_imagenet1k", ["Linear 73.27 +- 0.58", "was not trained with these options"]),
])
def test_comments_have_the_papers_numbers_and_what_8_gpus_need(name, facts):
    assert [fact for fact in facts if fact not in plain(recipe.text(name))] == []


def test_numbers_in_notes_are_those_of_the_tables():
    notes, accuracy = NUMBERS["recipe_notes"], NUMBERS["accuracy"]
    for vit in ("vit_s", "vit_b"):
        for mean, std in accuracy[vit]["imagenet1k_first_version"].values():
            assert f"{mean:.2f} +- {std:.2f}" in notes[f"{vit}_imagenet1k"]
    for mean, std in NUMBERS["final_layer_norm"]["with"].values():
        assert f"{mean:.2f} +- {std:.2f}" in notes["resnetv2_34_tiny_imagenet"]


def test_paths_in_recipes_and_studies_exist():
    files = sorted(Path(timm_ortho.__file__).parent.rglob("*.yaml"))
    for text in (*map(recipe.text, recipe.shipped()), *(file.read_text(encoding="utf-8") for file in files)):
        paths = re.findall(r"\b(?:model_cards|docs|scripts|tests|timm_ortho)/[\w./-]*\w", plain(text))
        assert [path for path in paths if not (ROOT / path).exists()] == []


# ------------------------------------------------------------------------- ImageNet, for every architecture
def test_options_for_vits_are_the_papers_for_vit_b():
    of_timm, of_paper = values("vit_base_patch16_224_imagenet1k"), values("vit_b_imagenet1k")
    assert {key: value for key, value in of_timm.items() if key != "model"} == {
        key: value for key, value in of_paper.items() if key not in ("model", "model_kwargs", "img_size")}


def test_options_for_resnets_are_timms():
    """The command for ResNeXt-50 on 8 GPUs in timm's documentation: --lr 0.6 --warmup-epochs 5 -b 192 --amp ..."""
    expected = dict(lr=0.6, warmup_epochs=5, epochs=240, weight_decay=1e-4, sched="cosine", reprob=0.4, recount=3,
                    remode="pixel", aa="rand-m7-mstd0.5-inc1", batch_size=8 * 192, amp=True)
    assert values("resnetv2_50_imagenet1k").items() >= expected.items()


def test_recipes_for_every_architecture_set_no_argument_of_a_model():
    for name in IMAGENET:
        assert not {"model_kwargs", "img_size", "input_size"} & recipe.load(name).keys()


# ------------------------------------------------------------------------------------------------ lab
def test_the_model_of_a_recipe_is_orthogonal():
    for name in NAMES:
        options = recipe.resolve(recipe.load(name))
        with torch.device("meta"):
            model = timm.create_model(options.model, num_classes=options.num_classes, **options.model_kwargs)
        assert model.num_classes == NUMBERS["datasets"][cell(name)[1]]["classes"]
        assert timm_ortho.sites(model)


@pytest.mark.usefixtures("undrawn")
def test_compare_trains_with_a_recipe_of_the_paper(tmp_path, monkeypatch, class_folders):
    """Train with RandAugment, colour jitter as a list, MixUp, CutMix and erasing.

    The learning rate rises at every update of the warm-up.
    """
    in_this_process(monkeypatch)
    assert cli.main([
        "compare", "--recipe", "vit_s_tiny_imagenet", "--data-dir", str(class_folders), "--output",
        str(tmp_path / "out"), "--connections", "feature", "--seeds", "1", "--epochs", "1", "-b", "8", "-j", "0",
        "--device", "cpu", "-o", "num_classes=2", "--model-kwargs", "depth=1", "embed_dim=12", "num_heads=2"]) == 0
    [summary] = (tmp_path / "out").rglob("summary.csv")
    [row] = csv.DictReader(summary.read_text().splitlines())
    assert math.isfinite(float(row["train_loss"]))
    args = yaml.safe_load((summary.parent / "args.yaml").read_text())
    assert args["color_jitter"] == [0.4, 0.4, 0.4, 0.1]
    assert args["model_kwargs"] == {
        "img_size": 64, "patch_size": 8, "depth": 1, "embed_dim": 12, "num_heads": 2, "connection": "feature"}


# ------------------------------------------------------------------------------ optimizers, schedules, crops
def options(name):
    return recipe.resolve(recipe.load(name))


@pytest.mark.parametrize("name", ["vit_s_cifar10", "resnetv2_50_cifar100_initialisation"])
def test_optimizer(name):
    """SGD has no Nesterov momentum. Weight decay also applies to biases and to the parameters of BatchNorm."""
    given = options(name)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(given), **given.opt_kwargs)
    groups = [(len(group["params"]), group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    assert groups == [(4, table(name)["weight_decay"], table(name)["lr"])]
    if name.startswith("vit"):
        assert isinstance(optimizer, torch.optim.AdamW)
        assert tuple(optimizer.defaults["betas"]) == (0.9, 0.999)
    else:
        assert isinstance(optimizer, torch.optim.SGD)
        assert (optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (0.9, False)


def learning_rates(name, updates_per_epoch):
    """Return the learning rate of each update. The scheduler is stepped as in train.py and the lab."""
    given = options(name)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=given.lr)
    scheduler, epochs = create_scheduler_v2(optimizer, **scheduler_kwargs(given), updates_per_epoch=updates_per_epoch)
    rates = []
    for update in range(epochs * updates_per_epoch):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step_update(num_updates=update + 1)
        if (update + 1) % updates_per_epoch == 0:
            scheduler.step((update + 1) // updates_per_epoch)
    return rates


@pytest.mark.parametrize("name", ["resnetv2_18_cifar10", "resnetv2_50_cifar100_initialisation"])
def test_multi_step_decays_after_epochs_80_and_120(name):
    steps, factor = 7, table(name)["decay_factor"]
    rates = learning_rates(name, steps)
    assert len(rates) == 200 * steps
    exact = [0.1 * factor ** ((update >= 80 * steps) + (update >= 120 * steps)) for update in range(200 * steps)]
    differing = [update for update in range(200 * steps) if not math.isclose(rates[update], exact[update])]
    assert differing == [80 * steps - 1, 120 * steps - 1]


@pytest.mark.parametrize("name", ["vit_s_cifar10", "vit_b_imagenet1k"])
def test_cosine_with_linear_warm_up(name):
    steps, peak = 4, table(name)["lr"]
    rates = learning_rates(name, steps)
    assert len(rates) == 300 * steps
    assert rates[:10 * steps] == pytest.approx([peak * update / (10 * steps) for update in range(10 * steps)])
    cosine = [peak * (1 + math.cos(math.pi * update / (300 * steps))) / 2 for update in range(300 * steps)]
    assert rates[10 * steps:] == pytest.approx(cosine[10 * steps:])
    assert 1 - rates[10 * steps] / peak == pytest.approx(0.003, abs=0.0005)  # a comment in the recipes states 0.3 %


def transforms(name):
    given = options(name)
    chain = create_transform(
        (3, given.img_size, given.img_size), is_training=True, train_crop_mode=given.train_crop_mode,
        scale=given.scale, ratio=given.ratio, hflip=given.hflip, vflip=given.vflip, color_jitter=given.color_jitter,
        auto_augment=given.aa, interpolation=given.train_interpolation, mean=tuple(given.mean), std=tuple(given.std))
    return {type(step).__name__: step for step in chain.transforms}


@pytest.mark.parametrize("name", ["vit_s_cifar10", "vit_b_imagenet1k"])
def test_vits_are_augmented(name):
    """RandAugment's magnitude is converted from a scale of 30 to timm's scale of 10. Colour jitter is applied later."""
    steps, given = transforms(name), table(name)
    augment, jitter = steps["RandAugment"], steps["ColorJitter"]
    assert (augment.num_layers, augment.choice_weights) == (given["randaugment"]["operations"], None)
    assert {op.magnitude for op in augment.ops} == {round(given["randaugment"]["magnitude"] / 3)}
    assert {op.prob for op in augment.ops} == {0.93}  # 13 / 14: one of torchvision's 14 operations is the identity
    assert len(augment.ops) == 15
    assert {"PosterizeIncreasing", "SolarizeIncreasing", "ColorIncreasing"} <= {op.name for op in augment.ops}
    assert jitter.brightness == jitter.contrast == jitter.saturation == pytest.approx((0.6, 1.4))
    assert jitter.hue == pytest.approx((-0.1, 0.1))
    assert steps["RandomHorizontalFlip"].p == 0.5
    assert list(steps).index("RandAugment") < list(steps).index("ColorJitter")
    image = Image.new("RGB", (40, 40), (10, 200, 90))
    assert jitter(augment(image)).size == (40, 40)


@pytest.mark.parametrize("name", ["resnetv2_34_cifar10", "resnetv2_34_tiny_imagenet"])
def test_resnets_are_only_cropped_and_flipped(name):
    steps = transforms(name)
    jitter = steps.pop("ColorJitter")
    assert [jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue] == [None] * 4
    assert list(steps) == ["RandomResizedCropAndInterpolation", "RandomHorizontalFlip", "MaybeToTensor", "Normalize"]


def test_crops_have_the_mean_area_of_the_papers_crops():
    crop = transforms("vit_s_cifar10")["RandomResizedCropAndInterpolation"]
    random.seed(0)
    sides = [crop.get_params(Image.new("RGB", (32, 32)), crop.scale, crop.ratio)[2:] for _ in range(4000)]
    assert all(height == width for height, width in sides)
    assert {height for height, _ in sides} == {28, 29, 30, 31, 32}
    assert sum(height * width for height, width in sides) / 32 ** 2 / len(sides) == pytest.approx(0.88, abs=0.005)
    padded = sum((32 - abs(shift)) / 32 for shift in range(-4, 5)) / 9  # mean share of a side that is not padding
    assert padded ** 2 == pytest.approx(0.87, abs=0.005)


# ------------------------------------------------------------------------------------------------- CLI
@pytest.mark.parametrize("name", ["vit_b_imagenet1k", "digits"])
def test_recipe_prints_or_writes_the_file(capsys, tmp_path, name):
    assert cli.main(["recipe", name]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["recipe", name, "--output", str(tmp_path / "recipe.yaml")]) == 0
    assert (tmp_path / "recipe.yaml").read_text(encoding="utf-8") == printed == recipe.text(name)
    assert recipe.load(str(tmp_path / "recipe.yaml")) == recipe.load(name)


def test_recipe_list(capsys):
    assert cli.main(["recipe", "--list"]) == 0
    rows = {line.split()[0]: re.split(r"  +", line)[1:] for line in capsys.readouterr().out.splitlines()}
    assert list(rows) == ["name", *recipe.shipped()]
    assert rows["resnetv2_34_cifar100"] == [
        "resnetv2_34_cifar_ortho", "CIFAR-100", "Table 2",
        "Linear 78.92 ± 0.31; Orthogonal-F 78.97 ± 0.04; Orthogonal-G 78.71 ± 0.24"]
    assert rows["digits"] == ["vit_small", "digits", "-", "-"]
    assert rows["skipnet_svhn"][:3] == ["skipnet_20_branch4_linear", "SVHN", "Table 2 of Wang et al. (2017)"]
    assert "Idempotent-MR 97.59 ± 0.05" in rows["skipnet_svhn"][3]


def test_unknown_recipe(error_of):
    error = error_of("recipe", "vit_s_cifar-10")
    assert error.startswith("timm-ortho: error: there is no recipe 'vit_s_cifar-10'; did you mean 'vit_s_ci")


# ----------------------------------------------------------------------------------------------- paper
def test_tables_name_their_source():
    sections = [value for value in NUMBERS.values() if isinstance(value, dict) and "protocol" in value]
    assert len(sections) >= 10
    for section in [*sections, *NUMBERS["recipes"].values(), NUMBERS["gamma"]]:
        assert re.match("(Table|Figure) [0-9]+", section["table"])
        assert "version" in section["source"] or section["source"] == "Wang et al. (2017)"
