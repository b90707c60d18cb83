"""Start timm's train.py under torchrun with the options of a recipe file. scripts/train.sh calls this module."""
import os
import shlex
import sys
from pathlib import Path

import torch

from timm_ortho.lab import LabError, read_user_yaml
from timm_ortho.lab.folder import RunPlan, Stage
from timm_ortho.lab.planning import recipe
from timm_ortho.lab.running.timm_script import torchrun


def main() -> int:
    try:
        if len(sys.argv) < 4:
            raise LabError("usage: scripts/train.sh RECIPE MODEL DATA [options of train.py ...]")
        words = [sys.executable, *command(*sys.argv[1:])]
    except LabError as error:
        print(f"train.sh: {error}", file=sys.stderr)
        return 2
    print(f"train.sh: {shlex.join(words)}", file=sys.stderr, flush=True)
    os.execv(words[0], words)


def command(name: str, model: str, data: str, *options: str) -> list[str]:
    """Return the command that trains a model with a recipe, without its first word, the Python interpreter."""
    script = Path(os.environ.get("TIMM_DIR", "."), "train.py")
    parser = recipe.of_script(script)
    file = Path(name) if Path(name).is_file() else recipe.find(name)
    values = {"batch_size": parser.get_default("batch_size"), **(read_user_yaml(file, f"recipe '{name}'") or {})}
    parser.set_defaults(**{"device": None, **values, "batch_size": None,
                           "output": values.get("output") or "output/train"})
    parsed = parser.parse_args(options)
    gpus = torch.cuda.device_count()
    plan = RunPlan(
        str(script), [Stage(".", {**values, "grad_accum_steps": parsed.grad_accum_steps})],
        gpus=_number("NPROC_PER_NODE", gpus), nodes=_number("NNODES", 1))
    if plan.processes > 1 and not gpus:
        raise LabError("several processes need GPUs, but PyTorch finds none: unset NPROC_PER_NODE and NNODES")
    if plan.nodes > 1 and not {"NODE_RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise LabError(f"NNODES is {plan.nodes}: set NODE_RANK (0 to {plan.nodes - 1}, different on each machine) and "
                       "MASTER_ADDR (the address of machine 0)")
    words = [*torchrun(plan), str(script), "-c", str(file), "--model", model, "--data-dir", data]
    if parsed.batch_size is None and plan.processes * max(1, parsed.grad_accum_steps) > 1:
        words += ["--batch-size", str(plan.with_divided_batch().stages[0].options["batch_size"])]
    last = Path(parsed.output, parsed.experiment, "last.pth.tar")
    if parsed.experiment and not parsed.resume and last.is_file():
        words += ["--resume", str(last)]
    if not gpus and parsed.device is None:
        words += ["--device", "cpu"]
    return [*words, *options]


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is not None and not (text.isdecimal() and int(text)):
        raise LabError(f"{variable} is '{text}', but must be a positive number")
    return default if text is None else int(text)


if __name__ == "__main__":
    sys.exit(main())
