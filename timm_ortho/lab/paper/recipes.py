"""Make the papers' recipes from `paper.json` and `skips.json`: files with options of timm's `train.py`.

A recipe has the paper's value of each option. Where timm has no such value, it has the nearest one, and a comment names
the paper's. Options that only the lab has, the exact crop and RandAugment, are in `device_options`.
"""
import json
import re
from functools import cache
from textwrap import wrap
from typing import Any, Mapping, NamedTuple

from . import Experiment, experiments, name, numbers, skip_recipe

ANY_VIT = "vit_base_patch16_224_imagenet1k"  # the options of `vit_b_imagenet1k` for every architecture of timm
_MAGNITUDES = 30 / 10  # magnitudes of RandAugment go up to 30 in torchvision and the authors' code, up to 10 in timm


class Option(NamedTuple):
    """A line of a recipe."""

    key: str
    value: Any
    comment: str = ""


def names() -> list[str]:
    return [*experiments(), ANY_VIT, *(f"skipnet_{data}" for data in ("cifar10", "cifar100", "svhn"))]


def device_options(recipe: str) -> dict[str, Any]:
    """Return the paper's crop and RandAugment for images on the device, which replace timm's nearest options there.

    >>> device_options("vit_s_cifar10"), device_options("digits")
    ({'crop_padding': 4, 'rand_augment': [9, 5]}, {})
    """
    given = _given(recipe)
    augment = given.get("randaugment")
    return {**({"crop_padding": int(given["crop"].split()[1])} if str(given.get("crop")).startswith("pad") else {}),
            **({"rand_augment": [augment["operations"], augment["magnitude"]]} if augment else {})}


def _given(recipe: str) -> Mapping[str, Any]:
    """Return the hyperparameters that the paper states for a recipe, {} for a recipe of no paper."""
    if recipe == ANY_VIT:
        recipe = "vit_b_imagenet1k"
    if recipe in experiments():
        return experiments()[recipe].recipe
    section, data = numbers()["skip_recipe"], recipe.removeprefix("skipnet_")
    return {**section, **section[data]} if skip_recipe(recipe) else {}


@cache
def text(recipe: str) -> str:
    """Return a recipe as YAML, with its sources as comments."""
    if skip_recipe(recipe):
        header, options = _of_skipnet(recipe), _skipnet(recipe)
    elif recipe == ANY_VIT:
        header, options = _for_any_vit(), _any_vit()
    else:
        experiment = experiments()[recipe]
        header, options = _of_experiment(experiment), _experiment(experiment)
    batch = next(option.value for option in options if option.key == "batch_size")
    norm = "" if "vit" in recipe else " --sync-bn"
    header = [*header, "Keys are options of timm's train.py. It reads batch_size for each process: on 8 GPUs, torchrun "
              f"--nproc-per-node 8 train.py -c FILE -b {batch // 8}{norm} --data-dir DATA has the batch of this file. "
              "If a step does not fit into memory, divide -b, and multiply --grad-accum-steps."]
    return "\n".join([*(line for paragraph in header for line in _commented(paragraph)), *map(_line, options), ""])


def _commented(paragraph: str) -> list[str]:
    return wrap(paragraph, 100, initial_indent="# ", subsequent_indent="# ", break_long_words=False,
                break_on_hyphens=False)


def _line(option: Option) -> str:
    value = option.value
    plain = isinstance(value, str) and re.fullmatch(r"[a-z][\w./-]*", value)
    line = f"{option.key}: {value if plain else json.dumps(value)}"
    if len(line) + len(option.comment) > 110:
        return "\n".join([*_commented(option.comment), line])
    return f"{line}  # {option.comment}" if option.comment else line


# ------------------------------------------------------------------------------------------------ headers
def _of_experiment(experiment: Experiment) -> list[str]:
    section, compute = numbers()[experiment.section], numbers()["compute"][experiment.architecture]
    hardware, data = compute[experiment.dataset], experiment.dataset
    hours = "unknown hours" if hardware["hours"] is None else f"about {hardware['hours']} h per run"
    runs = "an unknown number of" if f"runs_{data}_first_version" in section else section["runs"]
    header = [
        f"{name('model', experiment.architecture)} on {name('dataset', data)}: {experiment.table} of 'Revisiting "
        f"Residual Connections' (Oh et al., NeurIPS 2025). Values are from {experiment.recipe['table']} "
        f"({experiment.recipe['source']}) unless noted.",
        f"Top-1 accuracy in the paper, %, mean and standard deviation of {runs} runs: {_accuracies(experiment)}. "
        "The models have the suffixes _linear, _ortho (Orthogonal-F) and _orthog (Orthogonal-G). "
        + ("" if experiment.section == "initialisation" else "A run's value is the mean of its 5 best epochs, the 5 "
           "largest eval_top1 in summary.csv. ")
        + " ".join(numbers()["recipe_notes"].get(key, "") for key in (experiment.architecture, experiment.name)),
        f"Hardware in the paper: {hardware['gpus']} x {hardware['gpu']}, {hours}."]
    return [*header, "train.py downloads the images with --dataset-download." if data.startswith("cifar") else _FOLDERS]


_FOLDERS = "The images must be in class folders, DATA/train/CLASS/ and DATA/val/CLASS/, see docs/your_own_data.md."


def _accuracies(experiment: Experiment) -> str:
    return ", ".join(f"{label} {mean:.2f} +- {std:.2f}" for label, (mean, std) in experiment.top1().items())


def _for_any_vit() -> list[str]:
    return ["timm's ViT-B/16, or any other architecture of timm, on ImageNet-1k with the options of the paper's ViT-B, "
            "as in the recipe vit_b_imagenet1k. That recipe trains the paper's vit_base, whose blocks have LayerNorms "
            "without weights and tanh-GELU, and whose class token has no position embedding. This recipe has no "
            "model_kwargs, so it fits every architecture.",
            f"Top-1 accuracy of the paper's vit_base, %: {_accuracies(experiments()['vit_b_imagenet1k'])}. timm's "
            "architecture was not trained with these options.", _FOLDERS]


def _of_skipnet(recipe: str) -> list[str]:
    data, table, top1 = skip_recipe(recipe)
    accuracies = ", ".join(f"{label} {mean:.2f} +- {std:.2f}" for label, (mean, std) in top1.items())
    return [f"{data} with the networks of 'Orthogonal and Idempotent Transformations for Learning Deep Neural "
            "Networks' (Wang et al., 2017), y = P x + F(x). Values are from Section 4.2 unless noted.",
            f"Top-1 accuracy of networks with four branches and depth 20 in the paper ({table}), %, mean and standard "
            f"deviation of 5 runs: {accuracies}. The transformations are --model-kwargs skip=orthogonal_tp and so on. "
            "The other networks are skipnet_{20,32,56,110}{,_branch4,_depthwise}_linear. The paper states neither "
            "hardware nor hours."]


# ------------------------------------------------------------------------------------------------ options
def _experiment(experiment: Experiment) -> list[Option]:
    given, is_vit = experiment.recipe, experiment.architecture.startswith("vit")
    suffix, model = "_ortho", numbers()["architectures"][experiment.architecture]["model"]
    arguments = []
    if experiment.section == "initialisation":
        suffix, arguments = "_orthog", [Option("model_kwargs", {"weight_init": "kaiming"}, "or xavier, or orthogonal")]
    elif is_vit:
        arguments = [Option("model_kwargs", {"img_size": given["resolution"], "patch_size": given["patch"]})]
    runs = numbers()[experiment.section]
    of_first = runs.get(f"runs_{experiment.dataset}_first_version")
    seeds = f"the paper{chr(39) + 's first version' if of_first else ''} has {of_first or runs['runs']} runs"
    return [
        *_model(model + suffix, arguments), *_images(experiment.dataset, given["resolution"]),
        Option("crop_pct", 1.0, "validation on the whole image, as in the authors' code"),
        Option("seed", 0, f"{seeds}: use seeds 0 to {(of_first or runs['runs']) - 1}"),
        Option("batch_size", given["batch"], "the paper's batch, over all processes"),
        *(_vit_training(given) if is_vit else _resnet_training(given)),
        *_crop(given), Option("hflip", given["hflip"]), *(_vit_images(given) if is_vit else _unchanged_images()),
    ]


def _any_vit() -> list[Option]:
    options = [option for option in _experiment(experiments()["vit_b_imagenet1k"])
               if option.key not in ("model_kwargs", "img_size")]
    model = Option("model", "vit_base_patch16_224_ortho", "images have the size of the model")
    return [model if option.key == "model" else option for option in options]


def _model(model: str, arguments: list[Option]) -> list[Option]:
    return [Option("device_modules", ["timm_ortho"], "train.py imports it, which registers the models"),
            Option("model", model), *arguments]


def _images(data: str, size: int) -> list[Option]:
    of_data = numbers()["datasets"][data]
    return [Option("num_classes", of_data["classes"]), Option("dataset", of_data["timm"]), Option("img_size", size),
            Option("mean", of_data["mean"],
                   "of all training pixels, as in the paper, which does not state the numbers"),
            Option("std", of_data["std"])]


_DECAY_ALL = Option("opt_kwargs", {"filter_bias_and_bn": False},
                    "decay all weights, as PyTorch's optimizers do; timm's default excludes biases, norms, embeddings")


def _vit_training(given: Mapping[str, Any]) -> list[Option]:
    on_imagenet = given["resolution"] == 224
    return [
        Option("opt", given["optimizer"].lower(), given["comments"]["opt"]), Option("opt_betas", given["betas"]),
        Option("lr", given["lr"], "the authors' published code has 1e-4" * on_imagenet),
        Option("weight_decay", given["weight_decay"], "the authors' published code has 1e-3" * on_imagenet), _DECAY_ALL,
        Option("clip_grad", None, "no clipping of ViTs (Section 4.1)"),
        Option("epochs", given["epochs"]), Option("sched", given["schedule"]),
        Option("sched_on_updates", True, "at every update, as in the authors' code"),
        Option("warmup_epochs", given["warmup_epochs"], "the cosine spans all 300 epochs; after the warm-up, the rate "
                                                        "is 0.3 % below its maximum"),
        Option("warmup_lr", 0.0, "the rate rises linearly from zero; the paper does not state where it starts"),
        Option("min_lr", 0.0)]


def _resnet_training(given: Mapping[str, Any]) -> list[Option]:
    return [
        Option("opt", "momentum", "SGD with momentum; timm's 'sgd' has Nesterov momentum"),
        Option("momentum", given["momentum"]), Option("lr", given["lr"]),
        Option("weight_decay", given["weight_decay"]), _DECAY_ALL,
        Option("clip_grad", 1.0, given["comments"]["clip_grad"]), Option("clip_mode", "norm"),
        *_milestones(given["epochs"], given["decay_epochs"], given["decay_factor"])]


def _milestones(epochs: int, milestones: list[int], factor: float) -> list[Option]:
    return [Option("epochs", epochs), Option("sched", "multistep"), Option("decay_milestones", milestones),
            Option("decay_rate", factor),
            Option("sched_on_updates", True, "timm decays one update early; without this option, one epoch early"),
            Option("warmup_epochs", 0)]


def _crop(given: Mapping[str, Any]) -> list[Option]:
    padded = str(given["crop"]).startswith("pad")
    crop = {"scale": [0.766, 1.0], "ratio": [1.0, 1.0]} if padded else given["crop"]
    why = ("The paper pads by 4 pixels and crops 32 x 32, which timm cannot do. The nearest mode is rrc with a square "
           "of 28 to 32 pixels. It shows at least 28 x 28 pixels, like the paper's crop, and on average 0.88 of the "
           "image (paper: 0.87), but rescales instead of shifting. In the lab, images on the device are padded and "
           "cropped.")
    return [Option("train_crop_mode", "rrc", why * padded),
            Option("scale", crop["scale"], given.get("comments", {}).get("scale", "") if not padded else ""),
            Option("ratio", crop["ratio"]), Option("train_interpolation", "bilinear", "torchvision's default")]


def _vit_images(given: Mapping[str, Any]) -> list[Option]:
    operations, magnitude = given["randaugment"]["operations"], given["randaugment"]["magnitude"]
    jitter = [given["color_jitter"][key] for key in ("brightness", "contrast", "saturation", "hue")]
    return [
        Option("aa", f"rand-n{operations}-m{round(magnitude / _MAGNITUDES)}-p0.93-inc1-tincreasing3a",
               f"The paper's RandAug (N, M) = ({operations}, {magnitude}) is {operations} operations at magnitude "
               f"{magnitude}. {given['comments']['aa']}"),
        Option("color_jitter", jitter,
               "brightness, contrast, saturation, hue; the command-line option takes one number"),
        Option("mixup", given["mixup"]["alpha"]), Option("cutmix", given["cutmix"]["alpha"]),
        Option("mixup_prob", given["mixup"]["prob"]),
        Option("mixup_switch_prob", 0.5, "MixUp or CutMix for each batch, timm's default"),
        Option("smoothing", given["smoothing"]),
        Option("reprob", given["random_erasing"]["prob"], given["comments"]["reprob"]),
        Option("remode", "pixel", "noise, as in the authors' code")]


def _unchanged_images() -> list[Option]:
    return [Option(key, 0.0, "off, as in the paper; timm's default is not") for key in ("color_jitter", "smoothing")]


def _skipnet(recipe: str) -> list[Option]:
    given, data = _given(recipe), recipe.removeprefix("skipnet_")
    test = [Option("val_split", "test", "Table 2 has accuracies on the 26,032 test images")] if data == "svhn" else []
    augmented = _crop(given) if given["crop"] else [Option(
        "no_aug", True, "No augmentation, as in the paper. The paper excludes 6,000 images from training: 400 of each "
        "class of the training set and 200 of each class of the additional set; docs/your_own_data.md has the "
        "commands. To measure accuracy on these images, for example to choose a rate: --val-split validation")]
    return [
        *_model("skipnet_20_branch4_linear", []), *_images(data, 32), *test, Option("crop_pct", 1.0),
        Option("seed", 0, "the paper has 5 runs: use seeds 0 to 4"), Option("batch_size", given["batch"]),
        Option("opt", "sgd", "timm's sgd has Nesterov momentum, as in the paper"),
        Option("momentum", given["momentum"]),
        Option("lr", given["lr"]), Option("weight_decay", given["weight_decay"]), _DECAY_ALL,
        *_milestones(given["epochs"], [round(share * given["epochs"]) for share in given["decay_at"]],
                     given["decay_factor"]),
        *augmented, Option("hflip", given["hflip"]), *_unchanged_images()]
