"""Compile the kernels for NVIDIA GPUs on a machine without a GPU. Print each kernel's resource usage as a JSON line.

    python tests/helpers/compiled_kernels.py 80 90        # compute capabilities 8.0 and 9.0

Triton derives a kernel's signature from the arguments of a launch. This script builds the same signatures from
``launch_of`` in :mod:`timm_ortho.kernels`.
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

from timm_ortho import kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

SIZES = {  # shape (outer, width, inner) of the view that the kernels read; dtype of x, f and gradients
    "tokens": (256 * 197, 768, 1, "bf16"),
    "tokens in float32": (256 * 197, 768, 1, "fp32"),
    "odd tokens": (1000, 1000, 1, "bf16"),
    "longest row": (256, 8192, 1, "bf16"),
    "channels": (64, 256, 56 * 56, "bf16"),
    "many channels": (64, 2048, 7 * 7, "bf16"),
    "global": (256, 197 * 768, 1, "bf16"),
}
NUMBERS = ("a", "b", "eps")
LEARNED = ("tokens", "channels", "global")  # sizes that are also compiled with a and b as tensors


def compile_kernel(kernel, pointers, numbers, constants, arch):
    """Compile a kernel for an architecture.

    As in a launch, pointers are aligned to 16 bytes, integers equal to 1 are constants, and multiples of 16 are marked
    as divisible. Pointers that ``pointers`` does not contain are None.
    """
    numbers, options = dict(numbers), {}
    for name in ("num_warps", "enable_fp_fusion"):
        options[name] = numbers.pop(name)
    signature, known, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, {**numbers, **constants}.get(parameter.name)
        if name in pointers:
            signature[name] = f"*{pointers[name]}"
            attributes[i,] = [["tt.divisibility", 16]]
        elif name in NUMBERS:
            signature[name] = "fp64"
        elif parameter.is_constexpr or value in (None, 1):
            signature[name] = "constexpr"
            known[i,] = value
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
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
    _, where = kernels.launch_of(*view)
    cut = where["BLOCK_PIECES"] > 0
    accumulated = dict.fromkeys(("s_ptr", "n_ptr", *(("a_ptr", "b_ptr") if learned else ())), "fp32")

    def pointers(names, sums):
        return {**dict.fromkeys(names.split(), dtype), **dict.fromkeys(sums, "fp32"), **accumulated}

    last = dict(ONCE=kernels._once(where), ACC=tl.float32)
    products = ("xg_ptr", "fg_ptr") if learned else ()
    parts = (("xg_parts_ptr", "fg_parts_ptr") if learned else ("xg_parts_ptr",)) if cut else ()
    yield ("forward", kernels._update_kernel, pointers("x_ptr f_ptr y_ptr", ("xx_ptr", "xf_ptr") if cut else ()), where,
           dict(STORE=True, **last))
    yield ("backward", kernels._gradients_kernel,
           pointers("x_ptr kept_ptr g_ptr grad_x_ptr grad_f_ptr", (*products, *parts)), where,
           dict(RECOVER=not learned, FOR_X=True, FOR_F=True, FOR_WEIGHTS=learned, **last))
    if cut:
        for name, same, both in (("sums forward", True, True), ("sums backward", False, learned)):
            yield (name, kernels._partial_sums_kernel,
                   pointers("p_ptr q_ptr r_ptr", ("pr_ptr", "qr_ptr") if both else ("pr_ptr",)), where,
                   dict(SAME=same, BOTH=both, ACC=tl.float32))


if __name__ == "__main__":
    for arch in map(int, sys.argv[1:]):
        for size, learned in [*((size, False) for size in SIZES), *((size, True) for size in LEARNED)]:
            for name, *arguments in launches(size, learned):
                row = dict(arch=arch, size=size, learned=learned, kernel=name)
                print(json.dumps({**row, **resources(compile_kernel(*arguments, arch))}), flush=True)
