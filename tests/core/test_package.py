"""Import time, imports between files, versions, and names in the documentation."""
import ast
import importlib
import re
import subprocess
import sys
from contextlib import suppress
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

import timm_ortho
from timm_ortho.hub.card import CITATIONS
from timm_ortho.lab.planning.plan import STUDY
from timm_ortho.lab.reporting import published
from timm_ortho.run_folder import FEATURES, LOG, PROBE, RECORDS, RUN, SWITCHED

PACKAGE = Path(timm_ortho.__file__).parent
PAGES = PACKAGE.parent / "docs"

# A file imports only from its own floor, without circles, and from the floors below it, which come later in this list.
# A file that is not listed is on the floor of its folder.
FLOORS = [
    "cli __main__",
    "lab",
    "hub bench",
    "models diagnostics run_folder",
    "convert model_sites",
    "blocks routing",
    "connections skips",
    "update functional",
    "weights _bytecode _checks _compat _images _text _yaml",
]
VIOLATIONS = set()  # (file, imported file from a higher floor); never add any


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_few_modules():
    code = "import sys, timm; before = set(sys.modules); import timm_ortho; print(*(set(sys.modules) - before))"
    names = run(code).split()
    packages = {name.partition(".")[0] for name in names}
    ours = {"timm_ortho", "torch", "huggingface_hub", "linecache", "difflib", "ast"}
    assert packages <= ours | set(sys.stdlib_module_names)
    assert not [name for name in names if name.startswith(
        ("timm_ortho.lab", "timm_ortho.bench", "timm_ortho.cli", "timm_ortho.update.kernels"))]


def test_files_import_only_from_their_floor_and_below():
    """Imports within functions are also checked."""
    floors = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
    folders = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
    files = {".".join(parts).removesuffix(".__init__"): (parts, path) for parts, path in folders.items()}
    del files["__init__"], files["_api"]  # they contain the imports of the public names
    imports = {name: set(_imported(path, parts, files)) for name, (parts, path) in files.items()}
    assert sum(map(len, imports.values())) > 300

    def floor_of(name):
        return floors[name] if name in floors or "." not in name else floor_of(name.rpartition(".")[0])

    upwards = {(name, other) for name, others in imports.items() for other in others
               if floor_of(other) < floor_of(name)}
    assert upwards == VIOLATIONS
    allowed = {name: {other for other in others if (name, other) not in upwards} for name, others in imports.items()}
    TopologicalSorter(allowed).prepare()  # raises CycleError with the files of a circle


def _imported(path, parts, files):
    """Yield the files that a file of the package imports. The file of a package is its `__init__.py`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = [*parts[:-node.level], *filter(None, [node.module])]
            names = {".".join([*module, alias.name]) for alias in node.names}
            yield from names & files.keys()
            if module and names - files.keys():
                yield ".".join(module)


LAB_FILES = {  # also the ending of a run's folder
    RUN, LOG, SWITCHED, PROBE, RECORDS, FEATURES, STUDY, published.STUDY, "results.json", "report.html", "report.md",
    "history.csv.gz", "probe.csv.gz", "records.csv.gz", "-seed"}


def test_only_the_lab_names_its_files():
    """The reader of runs' folders names their files too. The command line's help names some of the lab's files."""
    named = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}\b" for name in LAB_FILES))
    found = {path.relative_to(PACKAGE).parts: named.findall(path.read_text(encoding="utf-8"))
             for path in PACKAGE.rglob("*.py")}
    elsewhere = {path for path, names in found.items() if names and path[0] not in ("lab", "cli.py", "run_folder.py")}
    assert elsewhere == set()
    assert set(found["run_folder.py",]) >= {RUN, LOG, SWITCHED, PROBE, RECORDS, FEATURES}


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
    # .ci/run tests the newest and the oldest Python. The last version in `own` is the job's default Python.
    assert own == [listed[-1], listed[0]]
    assert f'requires-python = ">={listed[0]}"' in of_checkout("pyproject.toml")


def dotted(text):
    """Return dotted names like `timm_ortho.hub.push`, and names imported by `from timm_ortho import ...`."""
    names = re.findall(r"\btimm_ortho(?:\.[A-Za-z_]\w*)+", text)
    for imported in re.findall(r"from timm_ortho import ([\w, ]+)", text):
        for name in imported.split(", "):
            used = re.findall(rf"\b{name}\.(?!py\b)\w+", text)  # not files such as representation.py
            names += [f"timm_ortho.{name}", *(f"timm_ortho.{attribute}" for attribute in used)]
    return sorted(set(names))


def test_names_on_the_pages_exist():
    pages = of_checkout("README.md"), *(path.read_text(encoding="utf-8") for path in PAGES.glob("*.md"))
    names = set(dotted("\n".join(pages)))
    assert {"timm_ortho.hub.push", "timm_ortho.connect", "timm_ortho.lab.rewrites"} <= names
    assert [name for name in names if not exists(name)] == []


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
