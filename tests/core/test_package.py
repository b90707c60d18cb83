"""Import time, imports between files, versions, and names in the documentation."""
import ast
import importlib
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

import timm_ortho
from timm_ortho.hub.card import CITATIONS
from timm_ortho.lab.folder import LOG, PLAN, RESULT, SESSIONS, SWITCHED
from timm_ortho.lab.planning.plan import STUDY
from timm_ortho.lab.reporting import published

PACKAGE = Path(timm_ortho.__file__).parent
PAGES = PACKAGE.parent / "docs"

LAYERS = [  # a file may import only from its own entry and later entries
    "__main__", "cli", "lab", "hub", "bench", "runs", "models", "weights", "hub_client", "diagnostics", "convert",
    "arguments", "skips", "model_sites", "blocks", "routing", "connections", "functional", "update",
    "_bytecode", "_compat", "_checks", "_yaml", "_images", "_text",
]


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_cheap():
    """Importing the package after timm takes little time and loads few other packages."""
    code = ("import sys, time, timm; before, began = set(sys.modules), time.process_time(); import timm_ortho; "
            "print(time.process_time() - began, *(name.split('.')[0] for name in set(sys.modules) - before))")
    for _ in range(3):  # other processes can only increase the time
        seconds, *names = run(code).split()
        if float(seconds) < 0.3:
            break
    assert float(seconds) < 0.3
    assert set(names) <= {"timm_ortho", "huggingface_hub", "linecache", "difflib", "ast"} | set(sys.stdlib_module_names)


def test_files_import_only_from_later_layers():
    """Imports within functions are also checked."""
    entries, checked = set(), 0
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        entries.add(parts[0])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for imported in _within_the_package(node, parts):
                checked += imported != parts[0]
                assert LAYERS.index(imported) >= LAYERS.index(parts[0]), f"{path}, line {node.lineno}"
    assert entries == set(LAYERS)
    assert checked > 50


def test_the_labs_folders_import_only_from_below():
    layers = ["commands", "costs", "reporting", "planning", "running"]  # files directly in `lab` are below these
    for path in (PACKAGE / "lab").rglob("*.py"):
        own = path.relative_to(PACKAGE / "lab").with_suffix("").parts[0]
        rank = layers.index(own) if own in layers else len(layers)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and own != "__init__":
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert all(layers.index(name) >= rank for name in names[:2] if name in layers), f"{path}, {node.lineno}"


LAB_FILES = {  # also the ending of a run's folder
    LOG, PLAN, RESULT, SESSIONS, STUDY, SWITCHED, published.STUDY, "probe.jsonl", "records.jsonl", "results.json",
    "report.html", "report.md", "features.npy", "history.csv.gz", "probe.csv.gz", "records.csv.gz", "-seed"}


def test_only_the_lab_names_its_files():
    """Other modules read `card.json` and timm's files. The command line's help names some of the lab's files."""
    named = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}\b" for name in LAB_FILES))
    found = {path.relative_to(PACKAGE).parts: named.findall(path.read_text(encoding="utf-8"))
             for path in PACKAGE.rglob("*.py")}
    assert {path for path, names in found.items() if names and path[0] not in ("lab", "cli.py")} == set()
    assert set(found["lab", "folder.py"]) >= {LOG, PLAN, RESULT, SESSIONS}


def _within_the_package(node, parts):
    """Return the top-level files and folders of the package from which a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("timm_ortho.")]
    if not isinstance(node, ast.ImportFrom) or not node.level:
        return []
    anchor = (*parts[:len(parts) - node.level], *(node.module or "").split("."))
    named = [anchor[0]] if anchor[0] else [alias.name for alias in node.names]
    return [name for name in named if name != "__version__"]


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def of_checkout(name):
    path = PACKAGE.parent / name
    if not path.exists():
        pytest.skip("requires a checkout of the repository")
    return path.read_text(encoding="utf-8")


def test_one_version_and_one_citation():
    citation, changes = yaml.safe_load(of_checkout("CITATION.cff")), of_checkout("CHANGELOG.md")
    assert citation["version"] == re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == timm_ortho.__version__
    papers = [citation["preferred-citation"], *citation["references"]]
    for paper, key in zip(papers, ("oh2025revisiting", "wang2017orthogonal"), strict=True):
        assert f"title = {{{paper['title']}}}" in re.sub(" +", " ", CITATIONS[key])
        assert all(author["family-names"] in CITATIONS[key] for author in paper["authors"])
    assert f"Paper = \"{papers[0]['url']}\"" in of_checkout("pyproject.toml")


def test_ci_runs_the_supported_pythons():
    listed = re.findall(r"Python :: (3\.\d+)", of_checkout("pyproject.toml"))
    jobs = yaml.safe_load(of_checkout(".github/workflows/ci.yml"))["jobs"]
    other = jobs["other-pythons"]["strategy"]["matrix"]["python-version"]
    own = jobs["everything"]["steps"][1]["with"]["python-version"].split()
    assert sorted({*own, *other}, key=lambda version: int(version[2:])) == listed
    # .ci/run tests the oldest and the newest Python. The last version in `own` is the job's default Python.
    assert own[:-1] == [listed[0], listed[-1]]
    assert f'requires-python = ">={listed[0]}"' in of_checkout("pyproject.toml")


def dotted(text):
    """Return dotted names like `timm_ortho.hub.push`, and names imported by `from timm_ortho import ...`."""
    names = re.findall(r"\btimm_ortho(?:\.[A-Za-z_]\w*)+", text)
    for imported in re.findall(r"from timm_ortho import ([\w, ]+)", text):
        for name in imported.split(", "):
            names += [f"timm_ortho.{name}", *(f"timm_ortho.{used}" for used in re.findall(rf"\b{name}\.\w+", text))]
    return sorted(set(names))


def test_names_on_the_pages_exist():
    pages = of_checkout("README.md"), *(path.read_text(encoding="utf-8") for path in PAGES.glob("*.md"))
    names = dotted("\n".join(pages))
    assert {"timm_ortho.hub.push", "timm_ortho.connect", "timm_ortho.representation.compare"} <= set(names)
    run("import timm_ortho\n" + "\n".join(names))  # evaluates each name


def exists(name):
    with suppress(ModuleNotFoundError):  # the parent is not a package
        if importlib.util.find_spec(name) is not None:
            return True
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def test_names_in_docstrings_exist():
    named = {name: path.name for path in PACKAGE.rglob("*.py") for name in dotted(path.read_text(encoding="utf-8"))}
    assert "timm_ortho.hub.push" in named
    assert {name: path for name, path in named.items() if not exists(name)} == {}
