#!/usr/bin/env python3
"""Check that a small model of every covered timm module trains and can be exported.

    python -m scripts.checks.modules                      # all checks that have no result yet
    python -m scripts.checks.modules --modules eva beit --checks export compile

| check | condition |
| --- | --- |
| train `_ortho`, train `_orthog` | 30 training steps on digits reduce the loss and give every parameter a gradient |
| export | the program that ``torch.export`` returns has the same outputs as the model |
| compile | under ``torch.compile(fullgraph=True, backend="aot_eager")`` the model has the same outputs |
| onnx | onnxruntime computes the model's outputs from the exported file; needs onnx, onnxscript and onnxruntime |

The check `codegen` is `compile` with the default backend of ``torch.compile``. It takes half a minute per model and
only runs on request. The suffixes `_ortho` and `_orthog` select Orthogonal-F and Orthogonal-G. Checks other than
`train` use only one of the two variants, alternating from module to module. If such a check fails, it is repeated with
timm's own model. The table marks failures of both models. The exit status is 1 if a check fails only for the variant,
if a `train` check fails, or if there are no results.
"""
import argparse
import json
import sys
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from helpers.module_checks import compiles, exports, runs_as_onnx, trains
from helpers.small_models import of_modules

from timm_ortho.models import coverage
from timm_ortho.models.names import SUFFIXES

from .timm_tests import default_cache, fingerprint

SCOPES = {suffix: connection for suffix, connection in SUFFIXES.items() if connection != "linear"}
TRAIN = {f"train {suffix}": scope for suffix, scope in SCOPES.items()}
EXPORT = {
    "export": exports,
    "compile": compiles,
    "onnx": runs_as_onnx,
    "codegen": partial(compiles, backend="inductor"),
}
CHECKS = [*TRAIN, *EXPORT]
BASE_FAILS = "timm's model fails too"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", nargs="+", metavar="MODULE", help="modules of timm.models (default: all covered)")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=[c for c in CHECKS if c != "codegen"])
    args = parser.parse_args()
    file = default_cache() / f"modules-{fingerprint()}.json"
    print(f"the results are in {file}", flush=True)
    results = json.loads(file.read_text()) if file.exists() else {}
    names = of_modules()
    for index, row in enumerate(row for row in coverage.timm_modules() if row.covered):
        outcomes = results.setdefault(row.module, {"model": names.get(row.module, "")})
        for check in args.checks:
            if check in outcomes or row.module not in (args.modules or [row.module]):
                continue
            outcomes[check] = outcome(check, row.module, names, index)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results, indent=1))
            print(f"{row.module}: {check}: {outcomes[check]}", flush=True)
    return report(results, args.checks)


def outcome(check: str, module: str, names: dict, index: int) -> str:
    """Run a check on a module's model and return `ok` or the failure."""
    if module not in names:
        return "failed: tests/helpers/small_models.py has no model of this module"
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
    except Exception as error:  # noqa: BLE001  every failure is a row of the table
        message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"failed: {type(error).__name__}: {message[:150]}"
    return "ok"


def report(results: dict, checks: list) -> int:
    print("\n| module | model | " + " | ".join(checks) + " |\n|" + " --- |" * (len(checks) + 2))
    for module, outcomes in sorted(results.items()):
        texts = [outcomes.get(check, "not run") for check in checks]
        cells = [BASE_FAILS if text.startswith(BASE_FAILS) else text for text in texts]
        print(f"| {module} | {outcomes['model']} | " + " | ".join(cells) + " |")
    ran = [outcomes[check] for outcomes in results.values() for check in checks if check in outcomes]
    failed = sum(text.startswith("failed") for text in ran)
    excused = sum(text.startswith(BASE_FAILS) for text in ran)
    print(f"\n{len(ran) - failed - excused} ok, {excused} fail for timm's model too, {failed} failed")
    return int(failed > 0 or not ran)


if __name__ == "__main__":
    sys.exit(main())
