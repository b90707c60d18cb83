"""Write the paper's recipes, timm_ortho/lab/recipes/*.yaml, from timm_ortho/lab/paper/paper.json.

`digits.yaml`, `small_images.yaml`, `vit_test_digits.yaml` and `skipnet_*.yaml` are written by hand.
"""
import json
import math
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from timm_ortho.lab.paper import Experiment, experiments, numbers
from timm_ortho.models.names import SUFFIXES

WIDTH = 120
# Values in the authors' published code that differ from their paper. The recipes contain them only as comments.
PUBLISHED = {
    ("vit_s", "imagenet1k"): {"scale": "0.8 to 1"},
    ("vit_b", "imagenet1k"): {"scale": "0.8 to 1", "lr": "1e-4", "weight_decay": "1e-3"},
    **{(f"resnetv2_{depth}", "tiny_imagenet"): {"scale": "0.7 to 1"} for depth in (18, 34, 50, 101)},
}
NODES, GPUS_PER_NODE = 2, 4  # numbers in the example commands of the recipes' headers
SUFFIX = {connection: suffix for suffix, connection in SUFFIXES.items()}

# Mean and standard deviation of all training pixels. The paper normalizes with them, but does not state the numbers.
STATISTICS = {
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761]),
    "tiny_imagenet": ([0.4802, 0.4481, 0.3975], [0.2770, 0.2691, 0.2821]),
    "imagenet1k": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
}

# Images per GPU in one forward pass of the authors' runs, for recipes whose batch may not fit on one GPU. The authors
# had 2 H100 for ViT-B on small images, and 8 L40S on ImageNet-1k, where ViT-B accumulated the gradients of 2 batches.
FITS = {
    ("vit_b", "cifar10"): 512, ("vit_b", "cifar100"): 512, ("vit_b", "tiny_imagenet"): 512,
    ("vit_s", "imagenet1k"): 512, ("vit_b", "imagenet1k"): 256,
}


class Option(NamedTuple):
    """A line of YAML, and the text of a comment on its value (may be empty)."""

    key: str
    value: Any
    why: str = ""


# ---------------------------------------------------------------------------------------------- options
def options(experiment: Experiment) -> list[list[Option]]:
    """Return all options of a recipe, in paragraphs."""
    vit = experiment.architecture.startswith("vit")
    paragraphs = [
        _model(experiment),
        _data(experiment),
        _adamw(experiment.recipe) if vit else _sgd(experiment),
        _cosine(experiment.recipe) if vit else _multistep(experiment.recipe),
        [*_crop(experiment.recipe), *(_augmentation(experiment.recipe) if vit else _no_augmentation())],
    ]
    published = PUBLISHED.get((experiment.architecture, experiment.dataset), {})
    return [[option._replace(why=f"the authors' published code has {published[option.key]}")
             if option.key in published else option for option in paragraph] for paragraph in paragraphs]


def _model(experiment: Experiment) -> list[Option]:
    recipe, dataset = experiment.recipe, numbers()["datasets"][experiment.dataset]
    options = [
        Option("device_modules", ["timm_ortho"], "train.py imports it, which registers the models"),
        Option("model", _model_name(experiment)),
    ]
    if "patch" in recipe:
        options.append(Option("model_kwargs", {"img_size": recipe["resolution"], "patch_size": recipe["patch"]}))
    if experiment.section == "initialisation":
        options.append(Option("model_kwargs", {"weight_init": "kaiming"}, "or xavier, or orthogonal"))
    return [*options, Option("num_classes", dataset["classes"])]


def _data(experiment: Experiment) -> list[Option]:
    mean, std = STATISTICS[experiment.dataset]
    cifar = experiment.dataset.startswith("cifar")
    runs = _runs(experiment)
    return [
        Option("dataset", f"torch/{experiment.dataset}" if cifar else "", "" if cifar else "class folders"),
        Option("img_size", experiment.recipe["resolution"]),
        Option("mean", mean, "of all training pixels, as in the paper, which does not state the numbers"),
        Option("std", std),
        Option("crop_pct", 1.0, "validation on the whole image, as in the authors' code"),
        Option("seed", 0, f"the paper has {runs} runs: use seeds 0 to {runs - 1}"),
    ]


_EVERY_PARAMETER = Option(
    "opt_kwargs", {"filter_bias_and_bn": False},
    "decay all weights, as PyTorch's optimizers do; timm's default excludes biases, norms and embeddings")


def _adamw(recipe: dict) -> list[Option]:
    assert recipe["optimizer"] == "AdamW"
    return [
        _batch(recipe),
        Option("opt", "adamw", "the authors' published code has Adam, whose weight decay is an L2 penalty"),
        Option("opt_betas", recipe["betas"]),
        Option("lr", recipe["lr"]),
        Option("weight_decay", recipe["weight_decay"]),
        _EVERY_PARAMETER,
        Option("clip_grad", recipe["clip_grad"]["section_4_1"], "no clipping of ViTs (Section 4.1)"),
    ]


def _sgd(experiment: Experiment) -> list[Option]:
    recipe = experiment.recipe
    assert recipe["optimizer"] == "SGD"
    why = "from Table 8"
    if experiment.section == "accuracy":
        why = ("The paper contradicts itself: Section 4.1 clips at this norm, Table 6 does not clip. The authors' "
               "published recipes and the study of initialisations (Table 8) clip.")
    return [
        _batch(recipe),
        Option("opt", "momentum", "SGD with momentum; timm's 'sgd' has Nesterov momentum"),
        Option("momentum", recipe["momentum"]),
        Option("lr", recipe["lr"]),
        Option("weight_decay", recipe["weight_decay"]),
        _EVERY_PARAMETER,
        Option("clip_grad", next(iter(recipe["clip_grad"].values())), why),
        Option("clip_mode", "norm"),
    ]


def _batch(recipe: dict) -> Option:
    return Option(
        "batch_size", recipe["batch"],
        "the paper's batch, over all processes; train.py reads it per process, see -b above")


def _cosine(recipe: dict) -> list[Option]:
    assert recipe["schedule"] == "cosine"
    epochs, warmup = recipe["epochs"], recipe["warmup_epochs"]
    below = 100 * (1 - (1 + math.cos(math.pi * warmup / epochs)) / 2)
    return [
        Option("epochs", epochs),
        Option("sched", "cosine"),
        Option("sched_on_updates", True, "at every update, as in the authors' code"),
        Option("warmup_epochs", warmup, f"the cosine spans all {epochs} epochs; after the warmup, the rate is "
                                        f"{below:.1f} % below its maximum"),
        Option("warmup_lr", 0.0, "the rate rises linearly from zero; the paper does not state where it starts"),
        Option("min_lr", 0.0),
    ]


def _multistep(recipe: dict) -> list[Option]:
    assert recipe["schedule"] == "multi-step"
    first, second = recipe["decay_epochs"]
    return [
        Option("epochs", recipe["epochs"]),
        Option("sched", "multistep"),
        Option("decay_milestones", recipe["decay_epochs"]),
        Option("decay_rate", recipe["decay_factor"]),
        Option("sched_on_updates", True, f"timm decays one update early with this option; without it, one epoch "
                                         f"early, after epochs {first - 1} and {second - 1}"),
        Option("warmup_epochs", recipe["warmup_epochs"]),
    ]


def _crop(recipe: dict) -> list[Option]:
    side = recipe["resolution"]
    interpolation = Option("train_interpolation", "bilinear", "torchvision's default")
    if recipe["crop"] != "pad 4":
        return [
            Option("train_crop_mode", "rrc"),
            Option("scale", recipe["crop"]["scale"]),
            Option("ratio", recipe["crop"]["ratio"]),
            interpolation,
            Option("hflip", recipe["hflip"]),
        ]
    least = side - 4
    shown, shown_in_paper = (1 + (least / side) ** 2) / 2, (1 - 20 / 9 / side) ** 2  # the mean shift is 20 / 9 pixels
    return [
        Option("train_crop_mode", "rrc",
               f"The paper pads by 4 pixels and crops {side} x {side}, which timm cannot do. timm's mode rrc crops and "
               "rescales. Its modes rkrc and rkrr rescale half of the images, then crop or pad. The most similar mode "
               f"is rrc with a square of {least} to {side} pixels. It shows at least {least} x {least} pixels, like "
               f"the paper's crop, and on average {shown:.2f} of the image (paper: {shown_in_paper:.2f}). But rrc "
               "never shifts an image without rescaling it."),
        Option("scale", [round(least ** 2 / side ** 2, 3), 1.0]),
        Option("ratio", [1.0, 1.0]),
        Option("crop_padding", 4, "the paper's crop, with --device-images in place of rrc; train.py ignores this key"),
        interpolation,
        Option("hflip", recipe["hflip"]),
    ]


def _augmentation(recipe: dict) -> list[Option]:
    operations, magnitude = recipe["randaugment"]["operations"], recipe["randaugment"]["magnitude"]
    on_timms_scale = round(magnitude * 10 / 30)
    erasing, jitter = recipe["random_erasing"], recipe["color_jitter"]
    return [
        Option("aa", f"rand-n{operations}-m{on_timms_scale}-p0.93-inc1-tincreasing3a",
               f"The paper's RandAug (N, M) = ({operations}, {magnitude}) is {operations} operations at magnitude "
               f"{magnitude}. Magnitudes go up to 30 in torchvision, which the authors' code uses, and are whole "
               "numbers up to 10 in timm. p0.93 is the probability of an operation, since one of torchvision's 14 does "
               "nothing. inc1 makes operations stronger with the magnitude, as in torchvision. Invert and SolarizeAdd "
               "are in timm only. The t of tincreasing3a is for the name of a set of operations. timm has no set of "
               "this name and uses its usual set. The name contains 3a, so that timm keeps the colour jitter beside "
               "RandAugment."),
        Option("rand_augment", [operations, magnitude],
               "the paper's, with --device-images in place of aa; train.py ignores this key"),
        Option("color_jitter", list(jitter.values()),
               f"{', '.join(jitter)}; the command-line option --color-jitter takes only one number"),
        Option("mixup", recipe["mixup"]["alpha"]),
        Option("cutmix", recipe["cutmix"]["alpha"]),
        Option("mixup_prob", recipe["mixup"]["prob"]),
        Option("mixup_switch_prob", 0.5, "MixUp or CutMix for each batch, timm's default"),
        Option("smoothing", recipe["smoothing"]),
        Option("reprob", erasing["prob"],
               "timm erases rectangles of area 0.02 to 0.333 and ratio 0.3 to 3.33 (paper: "
               f"{_dash(erasing['scale'])}, {_dash(erasing['ratio'])}). If it uses its prefetcher, it erases after "
               "MixUp and CutMix."),
        Option("remode", "pixel", "noise, as in the authors' code"),
    ]


def _no_augmentation() -> list[Option]:
    none = "off, as in the paper; timm's default is not"
    return [Option("color_jitter", 0.0, none), Option("smoothing", 0.0, none)]


def _dash(bounds: list[float]) -> str:
    return f"{bounds[0]} to {bounds[1]}"


# ----------------------------------------------------------------------------------------------- header
def header(experiment: Experiment) -> str:
    architecture = numbers()["architectures"][experiment.architecture]["name"]
    dataset = numbers()["datasets"][experiment.dataset]["name"]
    study = ", weight initialisation" if experiment.section == "initialisation" else ""
    lines = [
        f"{architecture} on {dataset}{study}: {experiment.table} of 'Revisiting Residual Connections' (Oh et al., "
        "NeurIPS 2025).",
        f"Values are from {experiment.recipe['table']} unless noted.{_caption(experiment)} Keys are options of timm's "
        "train.py.",
        "Written by python -m scripts.pages, not by hand.",
        "",
        *_expected(experiment),
        *_compute(experiment),
        "",
        *_data_notes(experiment),
        *_commands(experiment),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for text in lines for line in _wrapped(text, WIDTH - 2))


def _caption(experiment: Experiment) -> str:
    """Return a sentence on the caption of the table if it names another architecture."""
    return (" The caption of this table names only ViT-S, but Section 4.1 has one recipe for all ViTs."
            if experiment.architecture == "vit_b" else "")


def _expected(experiment: Experiment) -> list[str]:
    best = f", mean and standard deviation of {_runs(experiment)} runs"
    if experiment.section == "accuracy":
        best += ". A run's value is the mean of its 5 best epochs (the 5 largest eval_top1 in summary.csv)"
    rows = [f"  {label:25} {mean:.2f} +- {std:.2f}   {_choice(experiment, label)}"
            for label, (mean, std) in experiment.top1().items()]
    return [f"Top-1 accuracy in the paper, %{best}:", *rows, *_remarks(experiment)]


def _choice(experiment: Experiment, label: str) -> str:
    """Return the command-line options of train.py that reproduce one row of the table."""
    start, _, label = label.rpartition(", ")
    connection = next(key for key, name in numbers()["connections"].items() if name == label)
    weight_init = f" --model-kwargs weight_init={start}" if start else ""
    return f"--model {_base(experiment)}{SUFFIX[connection]}{weight_init}"


def _remarks(experiment: Experiment) -> list[str]:
    size = ["Section 4.1 has 6 blocks, as here. Section 4.2 has 22.0 M parameters, as in 12 blocks; 6 have 11.4 M on "
            "ImageNet-1k."]
    return [*_remarks_on_numbers(experiment), *(size if experiment.architecture == "vit_s" else [])]


def _remarks_on_numbers(experiment: Experiment) -> list[str]:
    cell = (experiment.architecture, experiment.dataset)
    if experiment.dataset == "imagenet1k":
        first = numbers()["accuracy"][experiment.architecture]["imagenet1k_first_version"]
        return [f"These numbers are from the final version; the first version has {_inline(first)}."]
    if experiment.section == "initialisation":
        return ["Appendix C.1 trains for 60,000 steps, Table 8 for 200 epochs, which are 78,000 steps. This recipe "
                "trains for 200 epochs."]
    if cell == ("vit_b", "cifar10"):
        return ["The standard deviation of 6.06 is as printed in the paper."]
    if cell == ("resnetv2_34", "tiny_imagenet"):
        return ["With --model-kwargs head_norm=True (Table 9):", f"  {_inline(numbers()['final_layer_norm']['with'])}"]
    return []


def _inline(top1: dict) -> str:
    return ", ".join(f"{numbers()['connections'][key]} {mean:.2f} +- {std:.2f}" for key, (mean, std) in top1.items())


def _compute(experiment: Experiment) -> list[str]:
    compute = numbers()["compute"][experiment.architecture][experiment.dataset]
    hours = "hours unknown" if compute["hours"] is None else f"about {compute['hours']} h per run"
    return [f"Hardware in the paper: {compute['gpus']} x {compute['gpu']}, {hours}."]


def _data_notes(experiment: Experiment) -> list[str]:
    if experiment.dataset == "imagenet1k":
        return ["DATA must have class folders: DATA/train/n01440764/*.JPEG, DATA/val/n01440764/*.JPEG and so on.", ""]
    if experiment.dataset == "tiny_imagenet":
        return [
            "DATA must have class folders: DATA/train/n01443537/*.JPEG, DATA/val/n01443537/*.JPEG and so on. Run "
            "these commands once in the folder from tiny-imagenet-200.zip:",
            "  for c in train/*; do mv $c/images/* $c && rmdir $c/images; done",
            "  while read -r f c _; do mkdir -p val/$c && mv val/images/$f val/$c; done < val/val_annotations.txt", "",
        ]
    return []


def _commands(experiment: Experiment) -> list[str]:
    batch, side = experiment.recipe["batch"], experiment.recipe["resolution"]
    each = batch // (NODES * GPUS_PER_NODE)
    vit = experiment.architecture.startswith("vit")
    sync, synced = ([], "") if vit else (["--sync-bn"], " and BatchNorm over all GPUs")
    download = ["--dataset-download"] if experiment.dataset.startswith("cifar") else []
    recipe = [f'-c "$(timm-ortho recipe --path {experiment.name})"', "--data-dir DATA"]
    nodes = [f"--nnodes {NODES}", f"--nproc-per-node {GPUS_PER_NODE}", "--node-rank $NODE_RANK",
             "--master-addr $MASTER_ADDR", "--master-port 29500"]
    smoke = ["--device cpu", "--epochs 1", "-b 4", f"--train-img-sizes {side}", "--train-batches-per-epoch 3",
             '--val-split ""']
    parts = " [--grad-accum-steps N]" if _fits(experiment) < batch else ""
    return [
        "On one GPU, in a folder that contains timm's train.py:",
        *_command("python train.py", *recipe, *download, *_parts(experiment, batch)),
        f"On {NODES} nodes of {GPUS_PER_NODE} GPUs, with {each} images per GPU{synced}. Set NODE_RANK to 0 on the "
        "first node and to 1 on the second, and MASTER_ADDR to the address of the first:",
        *_command("torchrun", *nodes, "train.py", *recipe, *(_parts(experiment, each) or [f"-b {each}"]), *sync),
        "With a script, which checks train.py's version and divides the batch between the processes:",
        *_command("scripts/train.sh", experiment.name, _model_name(experiment), "DATA" + parts, *sync),
        "Smoke run of three small batches on the CPU without validation (requires train.py of timm 1.0.29 or later):",
        *_command("python train.py", *recipe, *smoke),
    ]


def _parts(experiment: Experiment, images: int) -> list[str]:
    """Return the options that split an update on one GPU into smaller batches; empty if the batch fits."""
    fits = _fits(experiment)
    return [f"-b {fits}", f"--grad-accum-steps {images // fits}"] if fits < images else []


def _fits(experiment: Experiment) -> int:
    return FITS.get((experiment.architecture, experiment.dataset), experiment.recipe["batch"])


def _command(*words: str) -> list[str]:
    """Return an indented command, wrapped between words."""
    lines = [" "]
    for word in words:
        if len(lines[-1]) + len(word) + 3 > WIDTH - 2:
            lines[-1] += " \\"
            lines.append("     ")
        lines[-1] += f" {word}"
    return lines


# ------------------------------------------------------------------------------------------------- text
def _base(experiment: Experiment) -> str:
    return numbers()["architectures"][experiment.architecture]["model"]


def _model_name(experiment: Experiment) -> str:
    return _base(experiment) + SUFFIX["global" if experiment.section == "initialisation" else "feature"]


def _runs(experiment: Experiment) -> int:
    section = numbers()[experiment.section]
    return section.get(f"runs_{experiment.dataset}", section["runs"])


def _wrapped(text: str, width: int) -> list[str]:
    """Return wrapped prose. Indented lines, which are commands or table rows, are not wrapped."""
    return textwrap.wrap(text, width, break_on_hyphens=False) if text and not text.startswith(" ") else [text]


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    if isinstance(value, bool) or value is None or value == "":
        return json.dumps(value)
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, _, exponent = f"{value:e}".partition("e")
        return f"{float(mantissa)}e{int(exponent)}"  # the decimal point is needed, because YAML 1.1 reads 1e-3 as text
    return str(value)


def _line(option: Option) -> str:
    line = f"{option.key}: {_yaml(option.value)}"
    beside = f"{line}  # {option.why}" if option.why else line
    if len(beside) <= WIDTH:
        return f"{beside}\n"
    return "".join(f"# {part}\n" for part in _wrapped(option.why, WIDTH - 2)) + f"{line}\n"


def text(experiment: Experiment) -> str:
    """Return the text of the whole recipe file."""
    paragraphs = ["".join(_line(option) for option in paragraph) for paragraph in options(experiment)]
    return header(experiment) + "\n".join(paragraphs)


def texts(root: Path) -> dict[Path, str]:
    folder = root / "timm_ortho" / "lab" / "recipes"
    return {folder / f"{name}.yaml": text(experiment) for name, experiment in experiments().items()}
