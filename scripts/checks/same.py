"""Compare outputs and gradients of small models, and the tables of published results, before and after a change.

    python -m scripts.checks.same OUT.json                      write the hashes of this checkout
    python -m scripts.checks.same OUT.json --against OLD.json   print names whose hashes differ; exit status 1 if any
    python -m scripts.checks.same OUT.json --only TEXT          only names with TEXT, such as timm/test_vit

Hashes are equal only on one machine with equal releases of all libraries. All names take 3 minutes on two idle cores.
For another checkout, set PYTHONPATH to it and run this file by its path.
"""
import argparse
import hashlib
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

import pytest
import timm
import torch
from torch.utils._pytree import tree_leaves

from timm_ortho import cli, connect, connections

sys.path.insert(0, str(Path(cli.__file__).parents[1] / "tests"))
from helpers import library_models, small_models, text_models

CHECKOUT = Path(cli.__file__).parents[1]
OWN = {  # the package's own architectures
    "vit_small": dict(img_size=32, embed_dim=48, depth=2, num_heads=2), "resnetv2_18_cifar": dict(layers=[1] * 4),
    "resnetv2_50_cifar": dict(layers=[1] * 4), "skipnet_20": {}, "skipnet_20_branch4": {}, "skipnet_20_depthwise": {}}
TIMM = [*small_models.SMALL, *small_models.LARGER, *small_models.SHARED_BLOCKS, *small_models.MADE]
TABLES = dict(timm=TIMM, own=OWN, library=library_models.MODELS, text=text_models.TEXT)
ARGUMENTS = {**{name: dict(connection=name) for name in connections.CONNECTIONS}, "prob": dict(prob=0.5),
             "groups": dict(groups=2), "start": dict(connection="hybrid", start="linear"), "skip": dict(skip="scaled")}


def built(table, name):
    torch.manual_seed(0)
    if table == "library":
        return library_models.MODELS[name]()
    if table == "text":
        ids, model = text_models.tokens(), text_models.made(name)
        return model, (ids, None, ids) if model.config.is_encoder_decoder else (ids,)
    own = (timm.create_model(f"{name}_linear", **OWN[name]), 32) if table == "own" else None
    model, size = own or small_models.build(name)
    return model, (torch.randn(2, 3, size, size),)


def tensors_of(output):
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def hashed(tensors):
    arrays = [tensor.detach().contiguous().numpy() for tensor in tensors if tensor is not None]
    return hashlib.sha256(b"".join(f"{a.shape}{a.dtype}".encode() + a.tobytes() for a in arrays)).hexdigest()[:16]


def of_connection(name, arguments):
    try:
        model, inputs = built(*name.split("/", 1))
        connect(model, **arguments)
        torch.manual_seed(1)
        with torch.no_grad():
            outputs = hashed(tensors_of(model.eval()(*inputs)))
    except (ValueError, pytest.skip.Exception) as error:  # for example `global` in a causal decoder
        return type(error).__name__
    sum(tensor.square().sum() for tensor in tensors_of(model.train()(*inputs))).backward()
    return f"outputs {outputs}, gradients {hashed(p.grad for _, p in sorted(model.named_parameters()))}"


def of(name):
    if not name.startswith("model_cards"):
        return {f"{name}/{key}": of_connection(name, arguments) for key, arguments in ARGUMENTS.items()}
    with tempfile.TemporaryDirectory() as folder:
        cli.main(["study", "report", str(CHECKOUT / name), "--output", folder])
        parts = Path(folder, "report.md").read_text(encoding="utf-8").split("\n#")
    rows = {part.split("\n")[0]: [line for line in part.split("\n") if line[:1] == "|"] for part in parts}
    return {f"{name}/{key}": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for key, lines in rows.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, settings in {"output": {}, "--against": {}, "--only": dict(default="")}.items():
        parser.add_argument(name, **settings)
    args = parser.parse_args()
    archives = [file.parent.relative_to(CHECKOUT) for file in CHECKOUT.glob("model_cards/results/*/*/study.json")]
    names = [*(f"{table}/{name}" for table, models in TABLES.items() for name in models), *map(str, sorted(archives))]
    with multiprocessing.get_context("spawn").Pool(2, torch.set_num_threads, (1,)) as pool:
        found = pool.map(of, [name for name in names if args.only in name], chunksize=1)
    hashes = {key: value for values in found for key, value in values.items()}
    Path(args.output).write_text(json.dumps(hashes, indent=0))
    known = json.loads(Path(args.against).read_text()) if args.against else hashes
    differing = [key for key in {**known, **hashes} if args.only in key and known.get(key) != hashes.get(key)]
    print(*(f"{key}: {known.get(key)} became {hashes.get(key)}" for key in differing), sep="\n")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
