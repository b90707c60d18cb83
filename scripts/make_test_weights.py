"""Add the weights of a finished comparison to the package, with inputs and outputs for the tests.

    timm-ortho compare --recipe vit_test_digits --output output/vit_test_digits
    python -m scripts.make_test_weights output/vit_test_digits
    python -m scripts.publish --name vit_test_digits output/vit_test_digits

The second command writes two files for each connection into `timm_ortho/weights`, from the last epoch of the
run with seed 0:

    vit_test_ortho.digits.safetensors           the weights in float32; the header describes the run and its accuracy
    vit_test_ortho.digits.tensors.safetensors   input: the first validation image of each digit, preprocessed
                                                features, pre_logits, output: the model's outputs
                                                target: the labels

The third command publishes the results of all runs, from which the model cards are generated.
"""
import json
import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

import timm_ortho
from timm_ortho.lab.data import Digits
from timm_ortho.models.names import SUFFIXES
from timm_ortho.weights.pretrained import weights_file

from .publish import commit_before

ROOT = Path(__file__).parents[1]
SEED = 0


def main(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    runs = {run["connection"]: run for run in results["runs"] if run["seed"] == SEED}
    missing = [connection for connection in SUFFIXES.values() if connection not in runs]
    if missing:
        raise SystemExit(f"{folder} has no finished run with seed {SEED} of {', '.join(missing)}")
    for suffix, connection in SUFFIXES.items():
        name = f"vit_test{suffix}"
        last = folder / f"{connection}-seed{SEED}" / "last.pth.tar"  # top-1 is measured after the last epoch
        model = timm.create_model(name, checkpoint_path=str(last)).eval()
        about = {"model": name, "connection": connection, "data": "digits", "seed": SEED,
                 "commit": commit_before(folder / "study.yaml"),
                 "top1": runs[connection]["top1"], "epochs": runs[connection]["epochs"],
                 "timm_ortho": timm_ortho.__version__, "timm": timm.__version__, "torch": str(torch.__version__)}
        file = weights_file(f"{name}.digits")
        file.parent.mkdir(exist_ok=True)
        save_file(model.state_dict(), file, metadata={key: str(value) for key, value in about.items()})
        checked_by = file.with_suffix(".tensors.safetensors")
        save_file(check_tensors(model), checked_by)
        for path in (file, checked_by):
            path.chmod(0o644)  # safetensors makes files readable by their owner only
        print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 1000:.0f} kB  top-1 {runs[connection]['top1']:.2f} %")


def check_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return inputs, labels and outputs of one pass over ten images, one image of each digit; shapes [10, ...]."""
    held_out = Digits(training=False)
    held_out.transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    chosen = [held_out.targets.index(digit) for digit in range(10)]
    held_out.images = [image.convert("RGB") for image in held_out.images]
    images = torch.stack([held_out[index][0] for index in chosen])
    with torch.no_grad():
        features = model.forward_features(images)
        pre_logits = model.forward_head(features, pre_logits=True)
        output = model(images)
    tensors = {"input": images, "target": torch.arange(10), "features": features, "pre_logits": pre_logits,
               "output": output}
    # safetensors cannot store views
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
