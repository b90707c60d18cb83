"""What a result was made with: the commit of the checkout, the versions, and the machine."""
import os
import platform
import shutil
import subprocess
from pathlib import Path

import timm
import torch

__all__ = ["commit_of", "device_name", "first_line", "made_with"]


def made_with() -> dict[str, str]:
    """Versions of timm-ortho, timm and torch, and the commit where the package runs from a checkout."""
    from .. import __version__

    commit = commit_of(Path(__file__).parents[2])
    versions = {"timm-ortho": __version__, "timm": timm.__version__, "torch": torch.__version__}
    return {**versions, "commit": commit} if commit else versions


def commit_of(root: Path) -> str:
    """Of the checkout in a folder, with -dirty; empty if the package is installed."""
    if not (root / ".git").exists():  # or a repository further up, around the environment, would answer
        return ""
    return first_line("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def device_name(device: torch.device) -> str:
    """Of a GPU as its driver has it; of a CPU with its cores and the threads that torch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return f"{_cpu_name()}, {cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return (names or [platform.processor() or platform.machine()])[0]


def first_line(*command: str) -> str:
    """What a program prints first; empty if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return (subprocess.run(command, capture_output=True, text=True).stdout.splitlines() or [""])[0].strip()
