"""Run timm's own model tests on the variants that `import timm_ortho` registers.

    python -m scripts.checks.timm_tests                          18 small variants, each of a different kind
    python -m scripts.checks.timm_tests "*_ortho" -m "base or cfg"    these variants, with options of pytest

timm's `tests/test_models.py` is downloaded with the source distribution of the installed version into a cache folder.
If a variant fails a test, the test also runs on timm's own architecture. If this architecture fails too, or timm
excludes it from the test, the result is reported as excused.
"""
import argparse
import gc
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Optional

import pytest
import timm
from timm.models import _registry

import timm_ortho  # noqa: F401  registers the variants
from timm_ortho.convert import base_name, is_variant
from timm_ortho.models import coverage

# Small variants with many kinds of blocks, stems, norms and heads. About half are _ortho, and half are _orthog.
SPREAD = (
    "test_vit_ortho", "test_vit3_orthog",  # test_vit3 has LayerScale, registers and average pooling
    "deit_tiny_distilled_patch16_224_ortho",  # two heads
    "vit_small_ortho", "resnetv2_18_cifar_orthog", "skipnet_20_branch4_ortho",  # the papers' own models
    "test_vit_relpos_orthog", "levit_128s_ortho", "pvt_v2_b0_orthog",  # streams of tokens, [B, N, C]
    "test_mambaout_orthog", "test_maxvit_orthog",  # windows and gates, channels last: [B, H, W, C]
    "test_coatnet_ortho", "edgenext_xx_small_orthog",  # transformers on feature maps, [B, C, H, W]
    # convolutions
    "test_resnet_ortho", "test_byobnet_orthog", "test_nfnet_ortho", "test_convnext_orthog",
    "mobilenetv4_conv_small_035_orthog",
)


class Outcomes:
    """A pytest plugin that selects the tests of some models and keeps their outcomes.

    Args:
        bases: timm's architecture of every model to test; None for the papers' own models.

    Attributes:
        outcomes: Outcome and message by test function and model.
    """

    def __init__(self, bases: dict[str, Optional[str]]) -> None:
        self.bases = bases
        self.outcomes: dict[tuple[str, str], tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Keep the tests of the models, and move those of timm's architectures behind them."""
        items[:] = sorted(filter(_key, items), key=lambda item: _key(item)[1] not in self.bases)
        self.keys = {item.nodeid: _key(item) for item in items}

    def pytest_runtest_setup(self, item) -> None:
        test, model = _key(item)
        variants = [name for name, base in self.bases.items() if base == model]
        if model not in self.bases and "failed" not in [self.of(test, name)[0] for name in variants]:
            pytest.skip("no variant of this architecture failed this test")

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.strip().splitlines()[0] if crash else ""
            self.outcomes[self.keys[report.nodeid]] = report.outcome, message

    def pytest_runtest_teardown(self) -> None:
        gc.collect()  # FX graphs keep gigabytes of models alive in reference cycles

    def of(self, test: str, model: Optional[str]) -> tuple[str, str]:
        return self.outcomes.get((test, model), ("excluded", ""))

    def results(self) -> list[tuple[str, str, str, str]]:
        """Return model, test, outcome (passed, skipped, excused or failed) and message of every test of a variant."""
        rows = []
        for (test, model), (outcome, message) in self.outcomes.items():
            if model in self.bases:
                base = self.bases[model]
                of_base, _ = self.of(test, base)
                if outcome == "failed" and base and of_base in ("failed", "excluded"):
                    outcome, message = "excused", f"timm's {base}: {of_base}; {message}"
                rows.append((model, test, outcome, message))
        return rows


def _key(item) -> Optional[tuple[str, str]]:
    """Return the test function and the model of a test; None for tests without a model."""
    name = getattr(item, "callspec", None) and item.callspec.params.get("model_name")
    return (item.originalname, name.split(".")[0]) if isinstance(name, str) else None


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="variants or patterns (default: 18 small variants)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="folder for timm's tests (default: %(default)s)",
                        default=Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "timm-ortho")
    args, options = parser.parse_known_args(arguments)
    hosts = coverage.bases()
    bases = {name: base_name(name) if base_name(name) in hosts else None
             for name in timm.list_models(args.names or list(SPREAD)) if is_variant(name)}
    if not bases:
        parser.error("no variant of timm_ortho matches")
    plugin = Outcomes(bases)
    list_only({*bases, *filter(None, bases.values())})
    tests = timm_test_file(args.cache)
    pytest.main([str(tests), "-c", os.devnull, f"--rootdir={tests.parent}", "-p", "no:cacheprovider", "-W", "ignore",
                 "-q", "--tb=short", *options], plugins=[plugin])
    return summarize(plugin.results(), bases)


def list_only(names: set[str]) -> None:
    """Let `timm.list_models` return only some models, as members of the modules of their architectures."""
    for name, module in list(_registry._model_to_module.items()):
        if module in ("variants", "paper", "skip_networks"):
            own = "resnetv2" if name.startswith(("resnetv2", "skipnet")) else "vision_transformer"
            home = _registry._model_to_module.get(base_name(name), own)
            _registry._module_to_models[home].add(name)
    list_models = timm.list_models
    timm.list_models = lambda *args, **kwargs: [
        name for name in list_models(*args, **kwargs) if name.split(".")[0] in names]


def timm_test_file(cache: Path) -> Path:
    """Return tests/test_models.py of the installed timm, downloaded into the cache if needed.

    Raises:
        SystemExit: pip could not download the source distribution.
    """
    file = cache / f"timm-{timm.__version__}" / "tests" / "test_models.py"
    if not file.exists():
        with tempfile.TemporaryDirectory() as download:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "timm",
                       "--dest", download, f"timm=={timm.__version__}"]
            if subprocess.run(command).returncode:
                raise SystemExit(f"pip could not download the sources of timm {timm.__version__}")
            (archive,) = Path(download).glob("timm-*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(cache, filter="data", members=[
                    member for member in tar.getmembers() if "tests" in Path(member.name).parts])
    return file


def summarize(results: list[tuple[str, str, str, str]], bases: dict[str, Optional[str]]) -> int:
    """Print failures and counts; return 1 if a test failed and was not excused, or if a variant has no test."""
    for model, test, outcome, message in results:
        if outcome in ("excused", "failed"):
            print(f"{outcome.upper()}: {model}: {test}: {message}")
    untested = sorted(bases.keys() - {model for model, *_ in results})
    for name in untested:
        print(f"FAILED: {name}: no test was run")
    counts = Counter(outcome for _, _, outcome, _ in results)
    print(f"timm's tests on {len(bases)} variants: {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}")
    return int(bool(counts["failed"] or untested))


if __name__ == "__main__":
    raise SystemExit(main())
