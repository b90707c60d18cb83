"""Add the weights of a finished comparison to the package, with inputs and outputs for the tests.

    timm-ortho compare --recipe vit_test_digits --output output/vit_test_digits
    python -m scripts.make_weights digits output/vit_test_digits
    python -m scripts.publish --name vit_test_digits output/vit_test_digits

The arguments of the second command are the tag of the weights and the output folder of the comparison. It requires
entries with this tag in `timm_ortho/weights/pretrained.py`, such as `vit_test_ortho.digits`. For each entry it writes
two files into `timm_ortho/weights`, from the last epoch of the run with the first seed:

    vit_test_ortho.digits.safetensors           the weights in float32; the header describes the run and its accuracy
    vit_test_ortho.digits.tensors.safetensors   input: the first validation image of up to 10 classes, preprocessed
                                                features, pre_logits, output: the model's outputs
                                                target: the labels

The third command publishes the results of all runs, from which the model cards are generated. Its option `--name` joins
the model's name without suffix and the tag by an underscore, as in `vit_test_digits`.
"""
import json
import sys
from argparse import Namespace
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

import timm_ortho
from timm_ortho._yaml import load_yaml
from timm_ortho.lab.data import open_source
from timm_ortho.models.names import SUFFIXES, base_name
from timm_ortho.run_folder import image_config
from timm_ortho.weights.pretrained import ENTRIES, weights_file

from .publish import commit_of, results_of

MOST_CLASSES = 10  # maximum number of images in the file for the tests, one per class


def main(tag: str, folder: Path) -> None:
    results = json.loads(results_of(folder))
    seed, base = results["study"]["seeds"][0], base_name(results["study"]["model"])
    runs = {run["connection"]: run for run in results["runs"] if run["seed"] == seed}
    names = {connection: f"{base}{suffix}" for suffix, connection in SUFFIXES.items()
             if f"{base}{suffix}.{tag}" in ENTRIES}
    if not names:
        raise SystemExit(f"there are no weights {base}*.{tag}: add an entry such as {base}_ortho.{tag} to ENTRIES in "
                         "timm_ortho/weights/pretrained.py first")
    missing = [connection for connection in names if connection not in runs]
    if missing:
        raise SystemExit(f"{folder} has no finished run with seed {seed} of {', '.join(missing)}")
    for connection, name in names.items():
        run = folder / f"{connection}-seed{seed}"
        options = Namespace(**load_yaml((run / "args.yaml").read_text(encoding="utf-8")))
        model = trained(f"{name}.{tag}", run, options)
        check_entry(f"{name}.{tag}", model, options)
        about = {"model": name, "connection": connection, "data": options.dataset, "seed": seed,
                 "commit": commit_of(results["study"], results["runs"], folder),
                 "top1": runs[connection]["top1"], "epochs": runs[connection]["epochs"],
                 "timm_ortho": timm_ortho.__version__, "timm": timm.__version__, "torch": str(torch.__version__)}
        file = weights_file(f"{name}.{tag}")
        save_file(model.state_dict(), file, metadata={key: str(value) for key, value in about.items()})
        checked_by = file.with_suffix(".tensors.safetensors")
        save_file(check_tensors(model, options), checked_by)
        for path in (file, checked_by):
            path.chmod(0o644)  # safetensors makes files readable by their owner only
        print(f"{file}  {file.stat().st_size / 1000:.0f} kB  top-1 {runs[connection]['top1']:.2f} %")


def trained(name: str, run: Path, options: Namespace) -> torch.nn.Module:
    """Return the model `name`, which is MODEL.TAG, with the weights of the run's last epoch.

    The run's top-1 is the accuracy of these weights.

    Raises:
        SystemExit: `timm.create_model(name)`, without arguments, is not the run's model.
    """
    arguments = {key: value for key, value in options.model_kwargs.items() if key not in ("connection", "img_size")}
    if arguments:
        raise SystemExit(
            f"{run} has model_kwargs {arguments}, which an entry cannot store: train without them, for example with "
            "--recipe vit_test_digits, or use timm-ortho push, whose config.json stores them")
    try:
        return timm.create_model(name, checkpoint_path=str(run / "last.pth.tar")).eval()
    except RuntimeError as error:
        problem = str(error).splitlines()[-1].strip()
        raise SystemExit(f"{run} does not fit timm.create_model('{name}'): change num_classes and input_size of the "
                         f"entry, or train at the model's default image size: {problem}") from None


def check_entry(name: str, model: torch.nn.Module, options: Namespace) -> None:
    """Raise SystemExit if the entry `name` prepares images differently from the run.

    Also raise SystemExit if the entry has label_names for another number of classes than the model has.
    """
    of_run, of_entry = image_config(model, vars(options)), timm.data.resolve_data_config(model=model)
    missing = {key: value for key, value in of_run.items() if value != of_entry[key]}
    if missing:
        raise SystemExit(f"the run prepares images differently: add {missing} to the entry {name}")
    labels = model.pretrained_cfg.get("label_names")
    if labels and len(labels) != model.num_classes:
        raise SystemExit(f"the entry {name} has {len(labels)} label_names for {model.num_classes} classes")


def check_tensors(model: torch.nn.Module, options: Namespace) -> dict[str, torch.Tensor]:
    """Return inputs, labels and outputs, [N, ...], for one image of each of the first `MOST_CLASSES` classes."""
    held_out = open_source(options).validation
    held_out.transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    first: dict[int, torch.Tensor] = {}
    for image, target in held_out:
        first.setdefault(int(target), image)
    targets = sorted(first)[:MOST_CLASSES]
    images = torch.stack([first[target] for target in targets])
    with torch.no_grad():
        features = model.forward_features(images)
        pre_logits = model.forward_head(features, pre_logits=True)
        output = model(images)
    tensors = {"input": images, "target": torch.tensor(targets), "features": features, "pre_logits": pre_logits,
               "output": output}
    # safetensors cannot store views
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
