"""Start timm's train.py under torchrun with the options of a recipe file. scripts/train.sh calls this module."""
import argparse
import os
import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch
from timm.models import is_model

from timm_ortho._text import UserError
from timm_ortho.lab import LabError, read_user_yaml
from timm_ortho.lab.folder import Stage, Variant
from timm_ortho.lab.planning import memory, recipe
from timm_ortho.lab.running.timm_script import torchrun
from timm_ortho.lab.train_options import defaults
from timm_ortho.models.names import similar_variants
from timm_ortho.run_folder import import_modules

ANY_MODEL = "vit_base_patch16_224_imagenet1k", "resnetv2_50_imagenet1k"  # recipes that fit every architecture


def main() -> int:
    try:
        if len(sys.argv) < 4:
            raise LabError("usage: scripts/train.sh RECIPE MODEL DATA [options of train.py ...]")
        words = [sys.executable, *command(*sys.argv[1:])]
    except UserError as error:
        print(f"train.sh: {error}", file=sys.stderr)
        return 2
    print(f"train.sh: {shlex.join(words)}", file=sys.stderr, flush=True)
    os.execv(words[0], words)


def command(name: str, model: str, data: str, *options: str) -> list[str]:
    """Return the command that trains a model with a recipe, without its first word, the Python interpreter."""
    own = argparse.ArgumentParser("scripts/train.sh", add_help=False, allow_abbrev=False)
    own.add_argument("--gpu-memory")
    of_this_script, options = own.parse_known_args(options)
    script = Path(os.environ.get("TIMM_DIR", "."), "train.py")
    parser = recipe.of_script(script)
    file = Path(name) if Path(name).is_file() else recipe.find(name)
    values = {"batch_size": parser.get_default("batch_size"), **(read_user_yaml(file, f"recipe '{name}'") or {})}
    unset = dict.fromkeys(("device", "amp", "grad_accum_steps"))
    parser.set_defaults(**{**unset, **values, "batch_size": None, "output": values.get("output") or "output/train"})
    parsed = parser.parse_args(options)
    gpus = 0 if parsed.device == "cpu" else torch.cuda.device_count()
    plan = Variant([], str(script), gpus=_number("NPROC_PER_NODE", gpus), nodes=_number("NNODES", 1))
    if plan.processes > 1 and not gpus:
        raise LabError("several processes need GPUs, but the device is the CPU: unset NPROC_PER_NODE and NNODES")
    if plan.nodes > 1 and not {"NODE_RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise LabError(f"NNODES is {plan.nodes}: set NODE_RANK (0 to {plan.nodes - 1}, different on each machine) and "
                       "MASTER_ADDR (the address of machine 0)")
    import_modules(parsed.device_modules)
    if ":" not in model and not is_model(model):  # names with a colon are repositories of the Hub
        raise LabError(f"there is no model '{model}'{similar_variants(model)}")
    given = {key: value for key, value in vars(parsed).items() if value is not None}
    whole = Namespace(**{**defaults(), **given, "model": model, "batch_size": values["batch_size"]})
    gpu_memory = memory.gpu_memory(of_this_script.gpu_memory)
    try:
        memory.step_bytes(whole, amp=False)
    except LabError as error:
        advice = f"; {' and '.join(ANY_MODEL)} fit every architecture" if values.get("model_kwargs") else ""
        raise LabError(f"recipe '{name}' does not fit {error}{advice}") from None
    words = [*torchrun(plan), str(script), "-c", str(file), "--model", model, "--data-dir", data]
    if parsed.batch_size is None:
        words += _divided(plan, whole, parsed, gpu_memory)
    last = Path(parsed.output, parsed.experiment, "last.pth.tar")
    if parsed.experiment and not parsed.resume and last.is_file():
        words += ["--resume", str(last)]
    if not gpus and parsed.device is None:
        words += ["--device", "cpu"]
    return [*words, *options]


def _divided(plan: Variant, whole: Namespace, parsed: Namespace, gpu_memory: float) -> list[str]:
    """Return the options that divide the batch, so that a step of a process fits into the memory of its GPU.

    Args:
        plan: The numbers of processes and nodes.
        whole: All options of `train.py`. Their `batch_size` is the total of all processes.
        parsed: The options of the recipe and of the command line. Options that neither sets are None.
        gpu_memory: Gigabytes of a GPU.
    """
    words = []
    if plan.gpus:
        fit = memory.fit(whole, plan.processes, gpu_memory, amp=parsed.amp, steps=parsed.grad_accum_steps)
        if parsed.grad_accum_steps is None and fit.steps > 1:
            words += ["--grad-accum-steps", str(fit.steps)]
        if fit.amp and not parsed.amp:
            words += ["--amp", "--amp-dtype", "bfloat16"]
        whole.grad_accum_steps = fit.steps
    divided = replace(plan, stages=[Stage(".", vars(whole))]).with_divided_batch().stages[0].options["batch_size"]
    return words if divided == whole.batch_size else [*words, "--batch-size", str(divided)]


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is not None and not (text.isdecimal() and int(text)):
        raise LabError(f"{variable} is '{text}', but must be a positive number")
    return default if text is None else int(text)


if __name__ == "__main__":
    sys.exit(main())
