#!/usr/bin/env python3
"""Checks with a small model of every covered module of timm: does it train, can it be exported?

    python -m scripts.checks.modules                      # all checks of all modules; goes on where it stopped
    python -m scripts.checks.modules --modules eva beit --checks export compile
    python -m scripts.checks.modules --table              # what is known so far

| check | what has to hold |
| --- | --- |
| train `_ortho`, train `_orthog` | 30 steps on digits: the loss falls, every parameter gets a gradient |
| export | ``torch.export``: the same outputs |
| compile | ``torch.compile(fullgraph=True, backend="aot_eager")``: the same outputs |
| onnx | exported to ONNX, the same outputs in onnxruntime; needs onnx, onnxscript and onnxruntime |

``inductor`` is ``compile`` with PyTorch's own code generator, run only where it is asked for: it takes half a minute a
model. The scopes take turns where a check does not name one. A check that timm's own model fails as well is not held
against the variant: the table says so, and the exit status is 1 only where a variant fails what its base passes.
"""
import argparse
import json
import sys
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.module_checks import compiles, exports, runs_as_onnx, trains
from helpers.small_models import of_modules
from timm_tests import default_cache, fingerprint

from timm_ortho.models import coverage

SCOPES = {"_ortho": "feature", "_orthog": "global"}
TRAIN = {f"train {suffix}": scope for suffix, scope in SCOPES.items()}
EXPORT = {
    "export": exports,
    "compile": compiles,
    "onnx": runs_as_onnx,
    "inductor": partial(compiles, backend="inductor"),
}
CHECKS = [*TRAIN, *EXPORT]
BASE_FAILS = "the base fails too"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", nargs="+", metavar="MODULE", help="of timm.models (default: all that are covered)")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=[c for c in CHECKS if c != "inductor"])
    parser.add_argument("--state", type=Path, metavar="FILE", help="where outcomes are kept (default: a cache folder)")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have found")
    parser.add_argument("--table", action="store_true", help="run nothing, print what earlier runs have found")
    args = parser.parse_args()
    file = args.state or default_cache() / f"modules-{fingerprint()}.json"
    found = {} if args.fresh or not file.exists() else json.loads(file.read_text())
    names = of_modules()
    for index, row in enumerate(row for row in coverage.rows() if row.covered):
        outcomes = found.setdefault(row.module, {"model": names.get(row.module, "")})
        for check in args.checks:
            if args.table or check in outcomes or row.module not in (args.modules or [row.module]):
                continue
            outcomes[check] = outcome(check, row.module, names, index)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1))
            print(f"{row.module}: {check}: {outcomes[check]}", flush=True)
    return report(found, args.checks)


def outcome(check: str, module: str, names: dict, index: int) -> str:
    """``ok``, or what went wrong."""
    if module not in names:
        return "failed: tests/helpers/small_models.py has no model of it"
    name = names[module]
    if check in TRAIN:
        return attempt(partial(trains, name, TRAIN[check]))
    scope = list(SCOPES.values())[index % 2]
    result = attempt(partial(EXPORT[check], name, scope))
    if result == "ok" or attempt(partial(EXPORT[check], name, None)) == "ok":
        return result
    return f"{BASE_FAILS}: {result.partition(': ')[2]}"


def attempt(run) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except Exception as error:  # noqa: BLE001  whatever it is, it goes into the table
        message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"failed: {type(error).__name__}: {message[:150]}"
    return "ok"


def report(found: dict, checks: list) -> int:
    print("\n| module | model | " + " | ".join(checks) + " |\n|" + " --- |" * (len(checks) + 2))
    for module, outcomes in sorted(found.items()):
        texts = [outcomes.get(check, "not run") for check in checks]
        cells = [BASE_FAILS if text.startswith(BASE_FAILS) else text for text in texts]
        print(f"| {module} | {outcomes['model']} | " + " | ".join(cells) + " |")
    ran = [outcomes[check] for outcomes in found.values() for check in checks if check in outcomes]
    failed = sum(text.startswith("failed") for text in ran)
    excused = sum(text.startswith(BASE_FAILS) for text in ran)
    print(f"\n{len(ran) - failed - excused} ok, {excused} that the base fails too, {failed} failed")
    return int(failed > 0 or not ran)


if __name__ == "__main__":
    sys.exit(main())
