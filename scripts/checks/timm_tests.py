#!/usr/bin/env python3
"""Run timm's own model tests on the variants that `import timm_ortho` registers.

    python -m scripts.checks.timm_tests [OPTIONS]    all variants, the smallest first; a repeated run continues

    --marked              only the tests that timm's CI runs, which is much faster
    --above 100           only architectures of more than 100 million parameters
    --spread              forty quick variants, each of a different kind
    --only NAME ...       only the named variants, for example vit_tiny_patch16_224_ortho deit_tiny_patch16_224_orthog
    --skip TRANSFORM      use this skip transform in the variants: --only test_vit_ortho --skip orthogonal_tp

timm's `tests/test_models.py` is downloaded with the source distribution of the installed version into a cache folder.
Only `tests/` is unpacked, so the installed timm is tested. A separate process runs the tests and loads this file as a
pytest plugin (`-p timm_tests`). The plugin registers the variants before timm's tests list their models, selects the
tests of the requested models, and records each outcome.

If a process dies from lack of memory or time, a new process continues, beginning with the same test. If a process dies
in the first test that it runs, this test counts as failed.

If a variant fails a test, the test is repeated with timm's own architecture. If this architecture fails too, or timm
excludes it from the test, the result is reported as excused.
"""
import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Tuple

import pytest

# Quick variants with many kinds of blocks, stems, norms and heads. About half are _ortho, and half are _orthog.
SPREAD = (
    "test_vit_ortho", "test_vit3_orthog",  # Block; test_vit3 has LayerScale, registers and average pooling
    "vit_base_patch16_rpn_224_ortho",  # ResPostBlock
    "vit_pwee_patch16_reg1_gap_256_orthog",  # ParallelScalingBlock
    "vit_dpwee_patch16_reg1_gap_256_ortho",  # DiffParallelScalingBlock, from timm 1.0.23
    "vit_small_patch16_18x2_224_orthog",  # ParallelThingsBlock
    "deit_tiny_distilled_patch16_224_ortho",  # two heads
    "resnetv2_18_ortho", "resnetv2_50d_gn_orthog",  # PreActBasic, PreActBottleneck
    "resnetv2_101_orthog",  # deep enough to show any difference in rounding between eager mode and FX
    "vit_small_ortho", "resnetv2_18_cifar_orthog", "skipnet_20_branch4_ortho",  # the papers' own models
    # streams of tokens, [B, N, C]
    "test_vit_relpos_orthog", "eva02_tiny_patch14_224_ortho", "convit_tiny_orthog", "coat_lite_tiny_ortho",
    "pvt_v2_b0_orthog", "levit_128s_ortho", "mixer_s32_224_orthog",
    # windows and gates, channels last: [B, H, W, C]
    "swin_tiny_patch4_window7_224_ortho", "test_mambaout_orthog", "test_maxvit_orthog",
    # transformers on feature maps, [B, C, H, W]
    "test_coatnet_ortho", "poolformer_s12_ortho", "edgenext_xx_small_orthog", "mobilevitv2_050_ortho",
    "efficientvit_b0_orthog",
    # convolutions
    "test_resnet_ortho", "test_byobnet_orthog", "test_nfnet_ortho", "test_convnext_orthog", "inception_next_atto_ortho",
    "regnetx_002_orthog", "cs3darknet_focus_s_ortho", "mobilenetv4_conv_small_035_orthog", "ghostnet_050_ortho",
    "rexnetr_100_orthog", "starnet_s050_ortho", "fasternet_t0_orthog",
)
MARKED = "base or cfg or torchscript or features or fxforward or fxbackward"  # as in timm's workflow tests.yml
ANY = "all tests"  # name reported for a variant that has no tests
WANTED, ENDED, OUTCOMES, SKIP = (  # environment variables for the plugin
    "TIMM_TESTS_WANTED", "TIMM_TESTS_ENDED", "TIMM_TESTS_OUTCOMES", "TIMM_TESTS_SKIP")

PYTEST_INI = """[pytest]
markers =
    timeout: set by timm's tests for pytest-timeout, which need not be installed
    base:
    forward:
    backward:
    cfg:
    cfg_nonstd:
    torchscript:
    features:
    fxforward:
    fxbackward:
"""


# As a pytest plugin ---------------------------------------------------------------------------------------------------

def pytest_configure(config) -> None:
    import timm
    from timm.models import _registry

    import timm_ortho  # noqa: F401  registers the variants
    from timm_ortho.models.names import base_name

    # timm's feature tests select models by module, so add each variant to its architecture's module in this process
    for name, module in list(_registry._model_to_module.items()):
        if module in ("variants", "paper", "skip_networks"):
            own = "resnetv2" if name.startswith(("resnetv2", "skipnet")) else "vision_transformer"
            home = _registry._model_to_module.get(base_name(name), own)
            _registry._module_to_models[home].add(name)
    # listing only the wanted models avoids 60,000 tests
    wanted, list_models = json.loads(os.environ[WANTED]), timm.list_models
    timm.list_models = lambda *args, **kwargs: [
        name for name in list_models(*args, **kwargs) if name.split(".")[0] in wanted]
    skip = os.environ.get(SKIP)
    for name in wanted if skip else ():
        if base_name(name) != name:
            _registry._model_entrypoints[name] = partial(_registry._model_entrypoints[name], skip=skip)


@pytest.hookimpl(trylast=True)  # run after pytest's own deselection by marker
def pytest_collection_modifyitems(config, items: list) -> None:
    """Keep the requested tests that have no outcome yet."""
    wanted, ended = json.loads(os.environ[WANTED]), set(json.loads(os.environ[ENDED]))

    def keep(item) -> bool:
        functions = wanted.get(_model_of(item)) if item.nodeid not in ended else None
        return functions is not None and (not functions or item.originalname in functions)

    kept = [item for item in items if keep(item)]
    config.hook.pytest_deselected(items=[item for item in items if not keep(item)])
    items[:] = kept
    for item in items:
        item.user_properties.append(("timm_test", [_model_of(item), item.originalname]))
    _write({"collected": [[item.nodeid, _model_of(item), item.originalname] for item in items]})
    gc.freeze()  # garbage collection after each test then skips existing objects


def _model_of(item) -> Optional[str]:
    params = getattr(item, "callspec", None)
    name = params and params.params.get("model_name")
    return name.split(".")[0] if isinstance(name, str) else None


def pytest_runtest_logstart(nodeid: str, location) -> None:
    _write({"started": nodeid})


def pytest_runtest_teardown(item) -> None:
    gc.collect()  # FX graphs keep gigabytes of models alive in reference cycles


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise C extensions report the frozen objects as leaks at exit


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" or report.outcome != "passed":
        model, test = dict(report.user_properties)["timm_test"]
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message.strip().splitlines()[0] if crash else ""
        _write({"ended": report.nodeid, "model": model, "test": test, "outcome": report.outcome, "message": message})


def _write(record: dict) -> None:
    with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


# As a script ----------------------------------------------------------------------------------------------------------

def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--spread", action="store_true", help="forty quick variants, each of a different kind")
    choice.add_argument("--only", nargs="+", metavar="NAME", help="only these variants")
    parser.add_argument("--skip", metavar="NAME", help="with --only: use this skip transform in the variants")
    parser.add_argument("--marked", action="store_true",
                        help="only the tests that timm's CI runs")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR",
                        help="folder for timm's tests and the results of full runs (default: %(default)s)")
    parser.add_argument("--above", type=float, default=0.0, metavar="MILLIONS",
                        help="in a full run, only architectures with more parameters")
    parser.add_argument("--fresh", action="store_true", help="ignore the results of earlier full runs")
    parser.add_argument("--timeout", type=float, default=3600, metavar="S",
                        help="seconds after which a process is stopped (default: 3600)")
    parser.add_argument("--workers", type=int, default=1, metavar="N",
                        help="number of parallel processes (default: 1); the largest architectures need 10 GB each")
    args = parser.parse_args(argv)

    if args.skip and not args.only:
        parser.error("--skip requires --only")
    os.environ[SKIP] = args.skip or ""
    bases = variants_and_bases()
    if args.only:
        unknown = sorted(set(args.only) - bases.keys())
        if unknown:
            parser.error(f"not a variant of timm_ortho: {', '.join(unknown)}")
    tests = timm_test_file(args.cache)

    if args.only or args.spread:
        names = args.only or [name for name in SPREAD if name in bases]
        for name in sorted(set(SPREAD) - bases.keys()) if args.spread else []:
            print(f"{name}: this timm has no such architecture")
        results = run(tests, {name: bases[name] for name in names}, args.timeout, args.marked, verbose=True)
        return summarize(results)
    return summarize(run_all(tests, bases, args))


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "timm-ortho" / "timm-tests"


def variants_and_bases() -> Dict[str, Optional[str]]:
    """Return the timm architecture of every variant; None for the papers' own models."""
    import timm

    hosts = set(timm.list_models())
    from timm_ortho.models.names import base_name

    bases: Dict[str, Optional[str]] = {}
    for name in timm.list_models():
        if name not in hosts:
            stem = base_name(name)
            bases[name] = stem if stem in hosts else None
    return bases


def timm_test_file(cache: Path) -> Path:
    """Return tests/test_models.py of the installed timm, downloaded into the cache if needed.

    Raises:
        SystemExit: pip could not download the source distribution.
    """
    import tarfile

    import timm

    folder = cache / f"timm-{timm.__version__}"
    if not (folder / "pytest.ini").exists():  # this file is written last, so without it the folder is incomplete
        with tempfile.TemporaryDirectory() as download:
            print(f"downloading the source distribution of timm {timm.__version__}", flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                       "--no-binary", "timm", "--dest", download, f"timm=={timm.__version__}"]
            if subprocess.run(command).returncode:
                raise SystemExit(f"pip could not download the sources of timm {timm.__version__}")
            (archive,) = Path(download).glob("timm-*.tar.gz")
            with tarfile.open(archive) as tar:
                for member in tar.getmembers():
                    parts = Path(member.name).parts[1:]  # path relative to timm-VERSION/
                    if member.isfile() and parts[:1] == ("tests",) and ".." not in parts:
                        target = folder.joinpath(*parts)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(tar.extractfile(member).read())
        (folder / "pytest.ini").write_text(PYTEST_INI)
    return folder / "tests" / "test_models.py"


def run_all(tests: Path, bases: Dict[str, Optional[str]], args: argparse.Namespace) -> List[dict]:
    """Test all architectures, a few per process. Architectures that the state file lists as finished are skipped."""
    state_file = args.cache / f"state-{fingerprint()}{'-marked' * args.marked}.json"
    state = {} if args.fresh or not state_file.exists() else json.loads(state_file.read_text())
    from timm_ortho.models.names import base_name

    groups: Dict[str, Dict[str, Optional[str]]] = {}
    for name, base in bases.items():
        groups.setdefault(base_name(name), {})[name] = base
    print(f"{len(state)} of {len(groups)} architectures are finished in {state_file}", flush=True)
    sizes = {stem: parameters(next(iter(group))) for stem, group in groups.items() if stem not in state}
    sizes = {stem: size for stem, size in sizes.items() if size > 1e6 * args.above}
    with ThreadPoolExecutor(args.workers) as pool:
        running = {}
        for stems in batches(sizes):
            wanted = {name: base for stem in stems for name, base in groups[stem].items()}
            running[pool.submit(run, tests, wanted, args.timeout, args.marked)] = stems
        for finished in as_completed(running):
            results = finished.result()
            for stem in running[finished]:
                state[stem] = [result for result in results if result["model"] in groups[stem]]
                print(f"[{len(state)}/{len(groups)}] {stem}: {counted(state[stem])}", flush=True)
            scratch = state_file.with_suffix(".tmp")
            scratch.write_text(json.dumps(state, indent=1))
            scratch.replace(state_file)
    return [result for stem in groups for result in state.get(stem, ())]


def batches(sizes: Dict[str, int], most: int = 10, room: float = 1e9) -> List[List[str]]:
    """Group the architectures by process: at most `most` architectures with at most `room` parameters in total.

    An architecture with more parameters has its own group. Small architectures share a process, because starting a
    process takes as long as the tests of a small architecture. The smallest architectures come first, so that an
    interrupted run has finished many of them.
    """
    groups: List[List[str]] = []
    left = 0.0
    for stem in sorted(sizes, key=sizes.__getitem__):
        if not groups or len(groups[-1]) == most or sizes[stem] > left:
            groups.append([])
            left = room
        groups[-1].append(stem)
        left -= sizes[stem]
    return groups


def parameters(name: str) -> int:
    """Return the number of parameters of a model."""
    import timm

    from timm_ortho.models.meta import on_meta

    with on_meta():
        return sum(parameter.numel() for parameter in timm.create_model(name).parameters())


def fingerprint() -> str:
    """Return a hash of timm's and torch's versions and this package's code, for the name of the state file."""
    import timm
    import torch

    import timm_ortho

    digest = hashlib.sha256(f"{timm.__version__} {torch.__version__}".encode())
    for file in sorted(Path(timm_ortho.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def run(tests: Path, group: Dict[str, Optional[str]], timeout: float, marked: bool,
        verbose: bool = False) -> List[dict]:
    """Run timm's tests on some variants, and repeat each failed test with timm's own architecture.

    Returns:
        One dict per test and variant: model, test, outcome (passed, skipped, failed or excused) and message.
    """
    results = call_pytest(tests, {name: [] for name in group}, timeout, marked, verbose)
    untested = group.keys() - {result["model"] for result in results}
    results += [dict(model=name, test=ANY, outcome="failed", message="no test was run") for name in sorted(untested)]

    failed = [result for result in results if result["outcome"] == "failed" and group[result["model"]]]
    wanted: Dict[str, List[str]] = {}
    for result in failed:
        tests_of_base = wanted.setdefault(group[result["model"]], [])
        tests_of_base += [result["test"]] if result["test"] != ANY else []
    of_bases = call_pytest(tests, wanted, timeout, marked, verbose=False) if failed else []
    for result in failed:
        base = group[result["model"]]
        outcomes = [each["outcome"] for each in of_bases
                    if each["model"] == base and result["test"] in (each["test"], ANY)]
        if "passed" not in outcomes:
            reason = f"{base} fails this test too" if "failed" in outcomes else (
                f"timm excludes {base} from {'these tests' if result['test'] == ANY else 'this test'}")
            result.update(outcome="excused", message=f"{reason}; {result['message']}")
    return results


def call_pytest(
        tests: Path, wanted: Dict[str, List[str]], timeout: float, marked: bool, verbose: bool) -> List[dict]:
    """Run pytest until every test has an outcome. `wanted` maps a model to names of tests; an empty list means all."""
    ended: Dict[str, dict] = {}  # outcomes by pytest's test id
    while True:
        records, how, log = _one_process(tests, wanted, list(ended), timeout, marked, verbose)
        collected = {one: dict(model=model, test=test) for r in records for one, model, test in r.get("collected", ())}
        ended.update((r["ended"], {key: r[key] for key in ("model", "test", "outcome", "message")})
                     for r in records if "ended" in r)
        started = [record["started"] for record in records if "started" in record]
        if started and started[0] not in ended:  # the process died in the first test that it ran
            message = f"the process died in this test ({how})"
            ended[started[0]] = dict(collected[started[0]], outcome="failed", message=message)
        if not started or collected.keys() <= ended.keys():
            break
    if not ended and not verbose:
        print(log[-3000:])
    return list(ended.values())


def _one_process(tests: Path, wanted: Dict[str, List[str]], ended: List[str], timeout: float, marked: bool,
                 verbose: bool) -> Tuple[List[dict], str, str]:
    """Return the plugin's records, how the process ended, and its output."""
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = Path(scratch) / "outcomes.jsonl"
        outcomes.touch()
        env = dict(
            os.environ, **{WANTED: json.dumps(wanted), ENDED: json.dumps(ended), OUTCOMES: str(outcomes)})
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), env.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "pytest", str(tests), "-c", str(tests.parents[1] / "pytest.ini")]
        command += ["-p", Path(__file__).stem, "-p", "no:cacheprovider", "-W", "ignore", "-q", "--tb=short"]
        command += ["-m", MARKED] if marked else []
        try:
            process = subprocess.run(command, cwd=scratch, env=env, timeout=timeout, text=True,
                                     stdout=None if verbose else subprocess.PIPE, stderr=subprocess.STDOUT)
            how, log = f"exit status {process.returncode}", process.stdout or ""
        except subprocess.TimeoutExpired as late:
            how, log = f"stopped after {timeout:.0f} s", str(late.stdout or "")
        return [json.loads(line) for line in outcomes.read_text().splitlines()], how, log


def counted(results: Iterable[dict]) -> str:
    counts = Counter(result["outcome"] for result in results)
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "skipped", "excused", "failed") if counts[name])


def summarize(results: List[dict]) -> int:
    """Print failures and counts; return 1 if a test failed and was not excused, or if no test ran."""
    for outcome in ("excused", "failed"):
        for result in results:
            if result["outcome"] == outcome:
                print(f"{outcome.upper()}: {result['model']}: {result['test']}: {result['message']}")
    count = len({result["model"] for result in results})
    print(f"timm's tests on {count} variant{'s' * (count != 1)}: {counted(results)}")
    return int(not results or any(result["outcome"] == "failed" for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
