"""Record the commit, versions, machine and backend of a result."""
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import timm
import torch

from ..update import backend

PRIVATE = frozenset({"host", "pid", "job"})  # keys of a run's `made_with` that cards and published numbers omit


def made_with() -> dict[str, str]:
    """Return the versions of timm-ortho, timm and torch, and the commit if the package runs from a checkout.

    >>> sorted(made_with())[-3:]
    ['timm', 'timm-ortho', 'torch']
    """
    from .. import __version__

    commit = commit_of(Path(__file__).parents[2])
    versions = {"timm-ortho": __version__, "timm": timm.__version__, "torch": torch.__version__}
    return {**versions, "commit": commit} if commit else versions


def made_on() -> dict[str, str]:
    """Return the values of `made_with`, and the machine: host, CPU, GPUs and their driver."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {**made_with(), "host": platform.node(), "cpu": _cpu_name(), "gpu": ", ".join(gpus), "driver": _first_line(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpus else ""}


def environment() -> dict[str, str]:
    """Return the information of `timm-ortho env`: versions, machine, device and backend."""
    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    packages = ["timm-ortho", "timm", "torch", "torchvision", "triton", "huggingface-hub", "safetensors"]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    device = "cuda" if gpus else "cpu"
    return {
        **{package: version(package) for package in packages},
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cpu": device_name(torch.device("cpu")),
        "gpu": ", ".join(gpus) or "none",
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "device": device,
        "backend": _backend(device),
    }


def _backend(device: str) -> str:
    """Return the backend of a training step and what selected it."""
    x = torch.ones(1, 1, device=device, requires_grad=True)
    requested = backend.default()
    source = "auto" if requested == "auto" else f"{backend.BACKEND_VARIABLE}={requested}"
    try:
        return f"{backend.choose_backend(x, x)} ({source})"
    except (RuntimeError, ValueError) as error:
        return f"none ({error})"


def commit_of(root: Path) -> str:
    """Return the commit of the checkout in a folder, with `-dirty` if it has changes; empty for other folders.

    New files count as changes, unless git ignores them: a new recipe or study may affect the result.
    """
    if not (root / ".git").exists():  # git would search the parent folders
        return ""
    commit = _first_line("git", "-C", str(root), "rev-parse", "HEAD")
    return f"{commit}-dirty" if commit and _first_line("git", "-C", str(root), "status", "--porcelain") else commit


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the CPU with its cores and torch's threads."""
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


def _first_line(*command: str) -> str:
    """Return the first line that a command prints; empty if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return (subprocess.run(command, capture_output=True, text=True).stdout.splitlines() or [""])[0].strip()
