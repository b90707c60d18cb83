"""Compile the kernels for NVIDIA GPUs on a machine without a GPU. Print each kernel's resource usage as a JSON line.

    python tests/helpers/compiled_kernels.py 80 90        # compute capabilities 8.0 and 9.0

Triton derives a kernel's signature from the arguments of a launch. This script builds the same signatures from
the plans of :mod:`timm_ortho.update.plan`.
"""
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from timm_ortho.update import plan as planning

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

SIZES = {  # shape (outer, width, inner) of the view that the kernels read; dtype of x, f and gradients
    "tokens": (256 * 197, 768, 1, "bf16"),
    "tokens in float32": (256 * 197, 768, 1, "fp32"),
    "ViT-S": (256 * 197, 384, 1, "bf16"),
    "512 wide": (256 * 197, 512, 1, "bf16"),
    "narrow tokens": (4096, 192, 1, "bf16"),
    "odd tokens": (1000, 1000, 1, "bf16"),
    "longest row": (256, 8192, 1, "bf16"),
    "channels": (64, 256, 56 * 56, "bf16"),
    "many channels": (64, 2048, 7 * 7, "bf16"),
    "1024 channels": (64, 1024, 14 * 14, "bf16"),
    "512 channels": (64, 512, 28 * 28, "bf16"),
    "channels in float32": (64, 256, 56 * 56, "fp32"),
    "many channels in float32": (64, 2048, 7 * 7, "fp32"),
    "global": (256, 197 * 768, 1, "bf16"),
}
# Sizes that are also compiled with the norm that follows.
NORMED = ("tokens", "ViT-S", "narrow tokens", "tokens in float32", "odd tokens")
KEPT = ("tokens", "channels", "global")  # sizes that are also compiled with the branch output kept
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def compile_launch(launch, pointers, arch):
    """Compile the kernel of a launch for an architecture.

    As in a launch, pointers are aligned to 16 bytes, integers equal to 1 are constants, and multiples of 16 are marked
    as divisible.

    Args:
        launch: The launch.
        pointers: Dtype of each pointer, None for a pointer that is None.
        arch: Compute capability.
    """
    signature, known, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, [*pointers, *launch.constants], strict=True)):
        name = parameter.name
        if i < len(pointers):
            signature[name] = "constexpr" if value is None else f"*{value}"
            if value is None:
                known[i,] = None
            else:
                attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[name] = "constexpr"
            known[i,] = value
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, known, attributes)
    options = dict(num_warps=launch.warps, enable_fp_fusion=True)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(compiled):
    """Return a kernel's registers and memory, and its global loads and stores as ``{bytes per access: count}``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return dict(
        registers=usage["REG"], stack=usage["STACK"], local=usage["LOCAL"], shared=usage["SHARED"],
        barriers=compiled.asm["ptx"].count("bar.sync"),
        loads=accesses(compiled.asm["ptx"], "ld"), stores=accesses(compiled.asm["ptx"], "st"))


def accesses(ptx, instruction):
    """Count the instructions in PTX that access global memory: ``{bytes: count}``. ``instruction`` is ld or st."""
    sizes = re.findall(rf"{instruction}\.global[\w:.]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    return Counter(int(vector or 1) * int(bits) // 8 for vector, bits in sizes)


def launches(size, keep_branch):
    """Yield a name, a launch and its pointers for each kernel of a forward and a backward pass."""
    *view, dtype = SIZES[size]
    x = torch.empty(view, dtype=DTYPES[dtype], device="meta")
    plan = planning.Plan(x, x, [1], 1e-6, keep_branch=keep_branch)
    sums, parts = ["fp32", "fp32"], "fp32" if plan.kind == "long" else None
    yield "forward", plan.forward[True], [dtype, dtype, None, None, dtype, *sums, None, parts]
    yield "backward", plan.backward_launch, [dtype, dtype, dtype, *sums, dtype, dtype, parts]
    if parts:
        yield "sums", plan.sums_launch, [dtype, dtype, parts]
    if size in NORMED and not keep_branch:
        x = x[..., 0]
        norm = planning.Norm(1e-6, True, x.dtype, torch.float32, torch.float32)
        plan = planning.Plan(x, x, [-1], 1e-6, norm=norm)
        yield "norm forward", plan.forward[True], [dtype, dtype, *sums, dtype, *sums, dtype, None]
        yield "norm backward", plan.backward_launch, [dtype] * 4 + [*sums, "fp32", dtype, dtype, "fp32"]


if __name__ == "__main__":
    for arch in map(int, sys.argv[1:]):
        for size, keep_branch in [*((size, False) for size in SIZES), *((size, True) for size in KEPT)]:
            for name, launch, pointers in launches(size, keep_branch):
                row = dict(arch=arch, size=size, keep_branch=keep_branch, kernel=name)
                print(json.dumps({**row, **resources(compile_launch(launch, pointers, arch))}), flush=True)
