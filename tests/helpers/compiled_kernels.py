"""Compile the kernels for NVIDIA GPUs on a machine without a GPU. Print each kernel's resource usage as a JSON line.

    python tests/helpers/compiled_kernels.py 80 90        # compute capabilities 8.0 and 9.0

Triton derives a kernel's signature from the arguments of a launch. This script builds the same signatures from
``tiles_of`` in :mod:`timm_ortho.update.kernels`.
"""
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from timm_ortho.update import kernels, norm

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

SIZES = {  # shape (outer, width, inner) of the view that the kernels read; dtype of x, f and gradients
    "tokens": (256 * 197, 768, 1, "bf16"),
    "tokens in float32": (256 * 197, 768, 1, "fp32"),
    "odd tokens": (1000, 1000, 1, "bf16"),
    "longest row": (256, 8192, 1, "bf16"),
    "channels": (64, 256, 56 * 56, "bf16"),
    "many channels": (64, 2048, 7 * 7, "bf16"),
    "1024 channels": (64, 1024, 14 * 14, "bf16"),
    "channels in float32": (64, 256, 56 * 56, "fp32"),
    "many channels in float32": (64, 2048, 7 * 7, "fp32"),
    "global": (256, 197 * 768, 1, "bf16"),
}
NORMED = ("tokens", "tokens in float32", "odd tokens")  # also compiled with the norm that follows
NUMBERS = ("a", "b", "eps", "norm_eps")
LEARNED = ("tokens", "channels", "global")  # sizes that are also compiled with a and b as tensors


def compile_kernel(kernel, pointers, constants, num_warps, arch):
    """Compile a kernel for an architecture.

    As in a launch, pointers are aligned to 16 bytes, integers equal to 1 are constants, and multiples of 16 are marked
    as divisible.

    Args:
        kernel: The kernel.
        pointers: Dtype of each pointer, None for a pointer that is None.
        constants: The arguments after the pointers, except floating-point numbers.
        num_warps: Number of warps of a program.
        arch: Compute capability.
    """
    signature, known, attributes = {}, {}, {}
    constants = iter(constants)
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name.endswith("_ptr"):
            dtype = pointers[i]
            signature[name] = "constexpr" if dtype is None else f"*{dtype}"
            if dtype is None:
                known[i,] = None
            else:
                attributes[i,] = [["tt.divisibility", 16]]
        elif name in NUMBERS:
            signature[name] = "fp64"
        else:
            value = next(constants)
            if parameter.is_constexpr or value == 1:
                signature[name] = "constexpr"
                known[i,] = value
            else:
                signature[name] = "i32"
                if value % 16 == 0:
                    attributes[i,] = [["tt.divisibility", 16]]
    options = dict(num_warps=num_warps, enable_fp_fusion=True)
    source = ASTSource(kernel, signature, known, attributes)
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
        loads=accesses(compiled.asm["ptx"], "ld"), stores=accesses(compiled.asm["ptx"], "st"))


def accesses(ptx, instruction):
    """Count the instructions in PTX that access global memory: ``{bytes: count}``. ``instruction`` is ld or st."""
    sizes = re.findall(rf"{instruction}\.global[\w:.]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    return Counter(int(vector or 1) * int(bits) // 8 for vector, bits in sizes)


def launches(size, learned):
    """Yield a name and the first arguments of `compile_kernel` for each kernel of a forward and a backward pass."""
    *view, dtype = SIZES[size]
    tiles = kernels.tiles_of(*view)
    parts = "fp32" if tiles.BLOCK_PIECES else None
    weights = ["fp32", "fp32"] if learned else [None, None]

    def launch(name, kernel, pointers, *constants):
        return name, kernel, pointers, (*tiles[2:], tl.float32, *constants), tiles.num_warps

    yield launch("forward", kernels._update_kernel, [dtype] * 3 + ["fp32", parts, *weights])
    products = "fp32" if learned else None
    yield launch("backward", kernels._gradients_kernel,
                 [dtype] * 3 + ["fp32", dtype, dtype, products, parts, *weights], not learned)
    if parts:
        for name, same, both in (("sums forward", True, True), ("sums backward", False, learned)):
            yield launch(name, kernels._partial_sums_kernel, [dtype] * 3 + [parts], same, both)
    if size in NORMED and not learned:
        *blocks, num_warps = norm.tile_of(tiles.width)
        constants = tiles.projections, tiles.width, True, tiles.UNIT, *blocks, tl.float32
        yield ("norm forward", norm._forward_kernel, [dtype, dtype, "fp32", "fp32", dtype, dtype, "fp32"], constants,
               num_warps)
        yield ("norm backward", norm._backward_kernel,
               [dtype] * 4 + ["fp32", "fp32", dtype, dtype, "fp32"], constants, num_warps)


if __name__ == "__main__":
    for arch in map(int, sys.argv[1:]):
        for size, learned in [*((size, False) for size in SIZES), *((size, True) for size in LEARNED)]:
            for name, *arguments in launches(size, learned):
                row = dict(arch=arch, size=size, learned=learned, kernel=name)
                print(json.dumps({**row, **resources(compile_kernel(*arguments, arch))}), flush=True)
