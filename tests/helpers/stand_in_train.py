"""A mock of timm's train.py with its options and output files. An epoch adds 1 to the bias of the head.

Top-1 after epoch n is 10 (n + 1) + seed. Two environment variables control a run: STAND_IN_SECONDS is the duration of
an epoch, and STAND_IN_KILL=n kills the process in epoch n. The resumed run is not killed again.
"""
import argparse
import importlib
import json
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import yaml

config_parser = argparse.ArgumentParser(add_help=False)
config_parser.add_argument("-c", "--config")
parser = argparse.ArgumentParser()
OPTIONS = Path(find_spec("timm_ortho").origin).parent / "lab" / "recipes" / "train_options.json"
for name, option in json.loads(OPTIONS.read_text()).items():
    if name not in ("data", "stop_epoch"):  # data is positional in train.py; older releases of timm lack stop_epoch
        kinds = {"int": dict(type=int), "float": dict(type=float), "flag": dict(action="store_true")}
        nargs = {"nargs": "+"} if option.get("list") else {}
        parser.add_argument(f"--{name.replace('_', '-')}", default=option["default"], **kinds.get(option["type"], {}),
                            **nargs)


def main():
    config, remaining = config_parser.parse_known_args()
    if config.config:
        parser.set_defaults(**yaml.safe_load(Path(config.config).read_text()))
    args = parser.parse_args(remaining)
    output = Path(args.output, args.experiment)
    output.mkdir(parents=True, exist_ok=True)
    (output / "args.yaml").write_text(yaml.safe_dump(vars(args)))

    import timm
    import torch

    for module in args.device_modules:
        importlib.import_module(module)
    torch.manual_seed(args.seed)
    model = timm.create_model(
        args.model, num_classes=args.num_classes, in_chans=args.in_chans or 3, checkpoint_path=args.initial_checkpoint,
        **args.model_kwargs)
    optimizer, start = {"epochs": 0}, 0
    if args.resume:
        before = torch.load(args.resume, weights_only=False)
        model.load_state_dict(before["state_dict"])
        optimizer, start = before["optimizer"], before["epoch"] + 1
    for epoch in range(start, args.epochs):
        time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))
        if os.environ.get("STAND_IN_KILL") == str(epoch) and not (output / "killed").exists():
            (output / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            model.head.bias += 1
        optimizer["epochs"] += 1
        with open(output / "summary.csv", "a") as file:
            if epoch == start:  # like train.py, write a second header after a resume
                file.write("epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n")
            file.write(f"{epoch},1.0,1.0,{10 * (epoch + 1) + args.seed},99.0,0.001\n")
        torch.save({"epoch": epoch, "arch": args.model, "state_dict": model.state_dict(), "optimizer": optimizer,
                    "version": 2, "args": args}, output / "tmp.pth.tar")
        os.replace(output / "tmp.pth.tar", output / "last.pth.tar")


if __name__ == "__main__":
    main()
