"""Check that linear connections do not change the outputs and gradients of timm's models, bit for bit.

    python -m scripts.checks.linear [--up-to MILLIONS] [PATTERN]

The test suite checks small models. This script checks models of full width and depth: it compares the outputs and all
gradients of one training step on a small image. PATTERN selects architectures by name. Models of more than `--up-to`
million parameters (default 350) are only built on the meta device, and their residual additions (sites) are counted. A
model of 1,300 million parameters needs 20 GB of memory.
"""
import argparse
import fnmatch
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from helpers.host_comparison import compare_with_host, model_on_meta

from timm_ortho import sites
from timm_ortho.models.coverage import bases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="*")
    parser.add_argument("--up-to", type=float, default=350.0, metavar="MILLIONS",
                        help="build larger models on the meta device, without comparing them (default: 350)")
    args = parser.parse_args()
    counts = Counter()
    for millions, base, count in sorted(measured(base) for base in fnmatch.filter(bases(), args.pattern)):
        start = time.perf_counter()
        result = compared(base) if millions <= args.up_to else "built on meta"
        counts[result.partition(":")[0]] += 1
        seconds = time.perf_counter() - start
        print(f"{base}: {millions:.1f} M, {count} sites, {result}, {seconds:.1f} s", flush=True)
    print(f"{counts['equal']} equal bit for bit, {counts['built on meta']} built on the meta device, "
          f"{counts['not equal']} not equal")
    return 1 if counts["not equal"] or not counts else 0


def measured(base: str) -> tuple[float, str, int]:
    """Return the millions of parameters of the model `base` + "_ortho", then `base`, then the number of sites."""
    model = model_on_meta(base + "_ortho")
    return sum(p.numel() for p in model.parameters()) / 1e6, base, len(sites(model))


def compared(base: str) -> str:
    """Return "equal", or "not equal" with the error. Errors of the comparison do not stop the script."""
    try:
        compare_with_host(base)
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"not equal: {type(error).__name__} {' '.join(str(error).split())[:200]}"
    return "equal"


if __name__ == "__main__":
    sys.exit(main())
