"""Make folders of runs within seconds: train runs of the lab, or write the files that timm's train.py would write."""
from argparse import Namespace
from pathlib import Path

import timm
import torch
import yaml
from helpers.tiny_study import compared, trained
from timm.utils import CheckpointSaver, ModelEmaV3, update_summary

from timm_ortho.lab import commands as study

TINY = dict(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2)


def lab_grid(folder, seeds=3):
    """Run `timm-ortho compare` on a few digits in this process and return the output folder."""
    output = trained(compared(folder, seeds=seeds, batch_size=32))
    study.report_on([output])
    return output


def timm_run(folder, ema=False, epochs=3, model="vit_small_ortho", **options):
    """Write args.yaml, summary.csv and checkpoints of random weights, as train.py does, and return the folder.

    Top-1 in row n of summary.csv is 10 n + 0.25, where the first row is n = 1.
    """
    folder = Path(folder)
    folder.mkdir(parents=True)
    args = Namespace(**{
        "model": model, "model_kwargs": dict(TINY), "num_classes": None, "in_chans": None, "input_size": [3, 16, 16],
        "dataset": "torch/cifar10", "data_dir": "/home/somebody/cifar", "val_split": "validation", "epochs": epochs,
        "batch_size": 128, "opt": "adamw", "lr": 1e-3, "seed": 42, "model_ema": ema, "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.2], "crop_pct": 1.0, "interpolation": "bilinear", "device_modules": ["timm_ortho"],
        "pretrained": False, **options,
    })
    (folder / "args.yaml").write_text(yaml.safe_dump(vars(args)))
    torch.manual_seed(0)
    net = timm.create_model(model, num_classes=7, **args.model_kwargs)
    args.num_classes = 7  # train.py sets num_classes after it writes args.yaml
    shadow = ModelEmaV3(net) if ema else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saver = CheckpointSaver(net, optimizer, args=args, model_ema=shadow, checkpoint_dir=str(folder), max_history=epochs)
    for epoch in range(epochs):
        for parameter in net.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        top1 = 10 * (epoch + 1) + 0.25
        metrics = {"loss": 1 / (epoch + 1), "top1": top1, "top5": top1 + 50}
        update_summary(epoch, {"loss": 2.5}, metrics, folder / "summary.csv", lr=0.1, write_header=epoch == 0)
        saver.save_checkpoint(epoch, metric=-abs(epoch - 1))  # best in epoch 1, unlike top-1
    return folder
