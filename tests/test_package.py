"""The package as such: what importing it costs, loads and changes."""
import subprocess
import sys
from pathlib import Path

import timm_ortho

HOUSE = [  # a file may import only from lines below its own
    ("__main__",), ("cli",), ("lab",), ("bench",), ("bench_report",), ("hub",), ("repository",), ("card",),
    ("runs",), ("models",), ("theorems",), ("convert",), ("families",), ("routing",), ("diagnostics",),
    ("connections", "skips"), ("functional",), ("kernels",), ("provenance",),
]


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_cheap():
    code = "import timm, time; t = time.perf_counter(); import timm_ortho; print(time.perf_counter() - t)"
    seconds = [float(run(code)) for _ in range(3)]
    assert min(seconds) < 0.3


def test_import_loads_nothing_heavy():
    # torch may load Triton by itself: what counts is what this package adds
    code = ("import sys, timm; before = set(sys.modules); import timm_ortho; "
            "print(*sorted(m.split('.')[0] for m in set(sys.modules) - before))")
    assert set(run(code).split()) <= {"timm_ortho", "linecache", "difflib", "ast"} | set(sys.stdlib_module_names)


def test_files_import_only_from_below():
    package = Path(timm_ortho.__file__).parent
    level = {name: i for i, names in enumerate(HOUSE) for name in names}
    checked = 0
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        if parts == ("__init__",):
            continue
        for line in path.read_text().splitlines():
            words = line.split()
            if not words or words[0] != "from" or not words[1].startswith("."):
                continue
            dots = len(words[1]) - len(words[1].lstrip("."))
            anchor = parts[:len(parts) - dots]
            target = (*anchor, *(words[1].lstrip(".") or words[3].rstrip(",")).split("."))[0]
            if target != parts[0] and target in level:
                assert level[target] > level[parts[0]], f"{path.name}: {line.strip()}"
                checked += 1
    assert checked > 5


def test_the_marker_of_a_typed_package_is_there():
    assert (Path(timm_ortho.__file__).parent / "py.typed").exists()
