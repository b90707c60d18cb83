#!/usr/bin/env python3
"""Run timm's own model tests on the variants that `import timm_ortho` registers.

    python -m scripts.checks.timm_tests [OPTIONS]    all variants; a repeated run continues

    --marked              only the tests that timm's CI runs, which is much faster
    --above 100           only architectures of more than 100 million parameters
    --spread              forty quick variants, each of a different kind
    --only NAME ...       only the named variants, for example vit_tiny_patch16_224_ortho deit_tiny_patch16_224_orthog

timm's `tests/test_models.py` is downloaded with the source distribution of the installed version into a cache folder.
Only `tests/` is unpacked, so the installed timm is tested. A separate process runs the tests and loads this file as a
pytest plugin (`-p timm_tests`). The plugin registers the variants before timm's tests list their models, selects the
tests of the requested models, and appends each outcome to a file.

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
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Union

import pytest
import timm
import torch
from timm.models import _registry

import timm_ortho
from timm_ortho.models import coverage
from timm_ortho.models.names import base_name, is_variant
from timm_ortho.run_folder import json_lines

# Quick variants with many kinds of blocks, stems, norms and heads. About half are _ortho, and half are _orthog.
SPREAD = (
    "test_vit_ortho", "test_vit3_orthog",  # Block; test_vit3 has LayerScale, registers and average pooling
    "vit_base_patch16_rpn_224_ortho",  # ResPostBlock
    "vit_pwee_patch16_reg1_gap_256_orthog",  # ParallelScalingBlock
    "vit_dpwee_patch16_reg1_gap_256_ortho",  # DiffParallelScalingBlock
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
SECONDS = 3600  # after which a process is stopped and the next process continues
WANTED, OUTCOMES = "TIMM_TESTS_WANTED", "TIMM_TESTS_OUTCOMES"  # environment variables with the plugin's files

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
    # timm's feature tests select models by module, so add each variant to its architecture's module in this process
    for name, module in list(_registry._model_to_module.items()):
        if module in ("variants", "paper", "skip_networks"):
            own = "resnetv2" if name.startswith(("resnetv2", "skipnet")) else "vision_transformer"
            home = _registry._model_to_module.get(base_name(name), own)
            _registry._module_to_models[home].add(name)
    # listing only the wanted models avoids 60,000 tests
    wanted, list_models = _wanted(), timm.list_models
    timm.list_models = lambda *args, **kwargs: [
        name for name in list_models(*args, **kwargs) if name.split(".")[0] in wanted]


@pytest.hookimpl(trylast=True)  # run after pytest's own deselection by marker
def pytest_collection_modifyitems(config, items: list) -> None:
    """Keep the requested tests that have no outcome yet."""
    wanted = _wanted()
    ended = {record.get("ended") for record in _records(Path(os.environ[OUTCOMES]))}

    def keep(item) -> bool:
        functions = wanted.get(_model_of(item)) if item.nodeid not in ended else None
        return functions is not None and (not functions or item.originalname in functions)

    kept = [item for item in items if keep(item)]
    config.hook.pytest_deselected(items=[item for item in items if not keep(item)])
    items[:] = kept
    for item in items:
        item.user_properties.append(("timm_test", {"model": _model_of(item), "test": item.originalname}))
    gc.freeze()  # garbage collection after each test then skips existing objects


def _wanted() -> Dict[str, List[str]]:
    return json.loads(Path(os.environ[WANTED]).read_text())


def _model_of(item) -> Optional[str]:
    params = getattr(item, "callspec", None)
    name = params and params.params.get("model_name")
    return name.split(".")[0] if isinstance(name, str) else None


def pytest_runtest_setup(item) -> None:
    _append(os.environ[OUTCOMES], {"started": item.nodeid, **dict(item.user_properties)["timm_test"]})


def pytest_runtest_teardown(item) -> None:
    gc.collect()  # FX graphs keep gigabytes of models alive in reference cycles


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise C extensions report the frozen objects as leaks at exit


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message.strip().splitlines()[0] if crash else ""
        _append(os.environ[OUTCOMES], {
            "ended": report.nodeid, **dict(report.user_properties)["timm_test"], "outcome": report.outcome,
            "message": message})


def _append(outcomes: Union[str, Path], record: dict) -> None:
    with open(outcomes, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _records(outcomes: Path) -> List[dict]:
    return json_lines(outcomes.read_text(encoding="utf-8"))


# As a script ----------------------------------------------------------------------------------------------------------

def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--spread", action="store_true", help="forty quick variants, each of a different kind")
    choice.add_argument("--only", nargs="+", metavar="NAME", help="only these variants")
    parser.add_argument("--marked", action="store_true",
                        help="only the tests that timm's CI runs")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR",
                        help="folder for timm's tests and the outcomes of full runs (default: %(default)s)")
    parser.add_argument("--above", type=float, default=0.0, metavar="MILLIONS",
                        help="only architectures with more parameters")
    args = parser.parse_args(argv)

    bases = variants_and_bases()
    names = args.only or (SPREAD if args.spread else list(bases))
    unknown = sorted(set(names) - bases.keys())
    if args.only and unknown:
        parser.error(f"not a variant of timm_ortho: {', '.join(unknown)}")
    for name in unknown:
        print(f"{name}: this timm has no such architecture")
    group = {name: bases[name] for name in names if name in bases
             and (not args.above or parameters(name) > 1e6 * args.above)}
    tests = timm_test_file(args.cache)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if args.only or args.spread else args.cache
        outcomes = folder / f"outcomes-{fingerprint()}{'-marked' * args.marked}.jsonl"
        outcomes.touch()
        print(f"the outcomes are in {outcomes}", flush=True)
        return summarize(run(tests, group, outcomes, args.marked))


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "timm-ortho" / "timm-tests"


def variants_and_bases() -> Dict[str, Optional[str]]:
    """Return the timm architecture of every variant; None for the papers' own models."""
    hosts = set(coverage.bases())
    return {name: base if (base := base_name(name)) in hosts else None
            for name in timm.list_models() if is_variant(name)}


def timm_test_file(cache: Path) -> Path:
    """Return tests/test_models.py of the installed timm, downloaded into the cache if needed.

    Raises:
        SystemExit: pip could not download the source distribution.
    """
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


def parameters(name: str) -> int:
    """Return the number of parameters of a model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in timm.create_model(name).parameters())


def fingerprint() -> str:
    """Return a hash of timm's and torch's versions and this package's code, for the names of files with outcomes."""
    digest = hashlib.sha256(f"{timm.__version__} {torch.__version__}".encode())
    for file in sorted(Path(timm_ortho.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def run(tests: Path, group: Dict[str, Optional[str]], outcomes: Path, marked: bool) -> List[dict]:
    """Run timm's tests on some variants, and repeat each failed test with timm's own architecture.

    Returns:
        One dict per test and variant: model, test, outcome (passed, skipped, failed or excused) and message.
    """
    results = call_pytest(tests, {name: [] for name in group}, outcomes, marked)
    untested = group.keys() - {result["model"] for result in results}
    results += [dict(model=name, test=ANY, outcome="failed", message="no test was run") for name in sorted(untested)]

    failed = [result for result in results if result["outcome"] == "failed" and group[result["model"]]]
    wanted: Dict[str, List[str]] = {}
    for result in failed:
        tests_of_base = wanted.setdefault(group[result["model"]], [])
        tests_of_base += [result["test"]] if result["test"] != ANY else []
    of_bases = call_pytest(tests, wanted, outcomes, marked) if failed else []
    for result in failed:
        base = group[result["model"]]
        of_base = [each["outcome"] for each in of_bases
                   if each["model"] == base and result["test"] in (each["test"], ANY)]
        if "passed" not in of_base:
            reason = f"{base} fails this test too" if "failed" in of_base else (
                f"timm excludes {base} from {'these tests' if result['test'] == ANY else 'this test'}")
            result.update(outcome="excused", message=f"{reason}; {result['message']}")
    return results


def call_pytest(tests: Path, wanted: Dict[str, List[str]], outcomes: Path, marked: bool) -> List[dict]:
    """Run pytest until every test has an outcome, and return the outcomes of these models.

    Args:
        tests: timm's file of tests.
        wanted: Names of tests by model; an empty list means all tests.
        outcomes: File of outcomes. Tests with an outcome are not run again.
        marked: Whether to run only the tests of timm's CI.
    """
    while True:
        before = len(_records(outcomes))
        how = _one_process(tests, wanted, outcomes, marked)
        new = _records(outcomes)[before:]
        started = [record for record in new if "started" in record]
        if how in ("exit status 0", "exit status 1") or not started:  # all tests have an outcome, or none was run
            ended = {record["ended"]: record for record in _records(outcomes) if "ended" in record}
            return [record for record in ended.values() if record["model"] in wanted]
        first = started[0]
        if first["started"] not in [record.get("ended") for record in new]:  # the process died in its first test
            _append(outcomes, {
                "ended": first["started"], "model": first["model"], "test": first["test"], "outcome": "failed",
                "message": f"the process died in this test ({how})"})


def _one_process(tests: Path, wanted: Dict[str, List[str]], outcomes: Path, marked: bool) -> str:
    """Run pytest once, and return how the process ended."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "wanted.json").write_text(json.dumps(wanted))
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, WANTED: f"{scratch}/wanted.json", OUTCOMES: str(outcomes.resolve()), "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", str(tests), "-c", str(tests.parents[1] / "pytest.ini")]
        command += ["-p", Path(__file__).stem, "-p", "no:cacheprovider", "-W", "ignore", "-q", "--tb=short"]
        command += ["-m", MARKED] if marked else []
        try:
            return f"exit status {subprocess.run(command, cwd=scratch, env=env, timeout=SECONDS).returncode}"
        except subprocess.TimeoutExpired:
            return f"stopped after {SECONDS} s"


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
