"""Hold every covered architecture of timm, with linear connections, against timm's own model, bit for bit.

    python scripts/check_linear.py [--up-to MILLIONS] [PATTERN]

The test suite does this for small models; this is the same check for the others, as far as memory allows: one training
step at full width and depth on a small image, outputs and all gradients. Models above ``--up-to`` million parameters
(default 350) are built on the meta device and their sites are counted, as the suite does.
"""
import argparse
import fnmatch
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from test_variants import compare_with_host, model_on_meta

from timm_ortho import sites
from timm_ortho.models.coverage import bases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="*")
    parser.add_argument("--up-to", type=float, default=350.0, metavar="MILLIONS")
    args = parser.parse_args()
    counts = {"equal": 0, "built": 0}
    models = {base: model_on_meta(base + "_ortho") for base in fnmatch.filter(bases(), args.pattern)}
    sizes = {base: sum(p.numel() for p in model.parameters()) / 1e6 for base, model in models.items()}
    for base, millions in sorted(sizes.items(), key=lambda item: item[1]):
        start = time.perf_counter()
        run = millions <= args.up_to
        if run:
            compare_with_host(base)  # raises at the first difference
        counts["equal" if run else "built"] += 1
        print(f"{base}: {millions:.1f} M, {len(sites(models[base]))} sites, {'equal' if run else 'built on meta'}, "
              f"{time.perf_counter() - start:.1f} s", flush=True)
    print(f"{counts['equal']} equal bit for bit, {counts['built']} built on the meta device")


if __name__ == "__main__":
    main()
