"""Import time, imports between files, versions, and names in the documentation."""
import ast
import importlib
import re
import subprocess
import sys
from contextlib import suppress
from graphlib import TopologicalSorter
from pathlib import Path

import yaml

import timm_ortho
from timm_ortho.hub.card import CITATIONS

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
    "weights _bytecode _checks _compat _images _kinds _text _yaml",
]
VIOLATIONS = set()  # (file, imported file from a higher floor); never add any


CODE = """
import sys
sys.modules["triton"] = None  # as if Triton were not installed
import timm, torch
from timm.models import resnetv2, vision_transformer

def state():
    modules = resnetv2, vision_transformer, timm.models.deit
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    forwards = [(cls, id(cls.forward)) for cls in classes if "forward" in vars(cls)]
    return (forwards, [sorted(vars(cls)) for cls in classes],
            [sorted(vars(module)) for module in (resnetv2, vision_transformer, timm.layers)], torch.is_grad_enabled(),
            torch.get_default_dtype(), torch.backends.cudnn.benchmark, torch.get_rng_state().tolist())

torch.manual_seed(0)
x = torch.randn(2, 3, 160, 160)
y = timm.create_model("test_vit")(x)
before, names, modules = state(), set(timm.list_models()), set(sys.modules)
import timm_ortho
print(*(set(sys.modules) - modules))
assert names < set(timm.list_models()) and not any("ortho" in name for name in names)
timm_ortho.connect(timm.create_model("test_vit"), "feature")(x)
timm.create_model("resnetv2_18_orthog")
torch.manual_seed(0)
torch.randn(2, 3, 160, 160)
again = timm.create_model("test_vit")
assert type(again.blocks[0]) is vision_transformer.Block and torch.equal(again(x), y)
assert before == state()

model = timm.create_model("resnetv2_18_cifar_ortho", width_factor=0.25, num_classes=10)
weights = [p.clone() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2, 3, 32, 32)).square().mean().backward()
optimizer.step()
assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), weights))
assert timm_ortho.functional.choose_backend(torch.ones(1), torch.ones(1)) == "torch"
assert not {"timm_ortho.update.plan", "matplotlib", "sklearn", "transformers"} & set(sys.modules)
"""


def test_a_new_process():
    """The import loads few modules and changes nothing in timm. Training needs no Triton."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    ours = {"timm_ortho", "torch", "huggingface_hub", "linecache", "difflib", "ast"}
    assert {name.partition(".")[0] for name in names} <= ours | set(sys.stdlib_module_names)
    assert not [name for name in names if name.startswith(("timm_ortho.lab", "timm_ortho.bench", "timm_ortho.cli"))]


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


def of_checkout(name):
    return (PACKAGE.parent / name).read_text(encoding="utf-8")


def test_one_version_and_one_citation():
    citation, changes = yaml.safe_load(of_checkout("CITATION.cff")), of_checkout("CHANGELOG.md")
    assert citation["version"] == re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == timm_ortho.__version__
    papers = [citation["preferred-citation"], *citation["references"]]
    for paper, key in zip(papers, ("oh2025revisiting", "wang2017orthogonal"), strict=True):
        assert f"title = {{{paper['title']}}}" in re.sub(" +", " ", CITATIONS[key])
        assert all(author["family-names"] in CITATIONS[key] for author in paper["authors"])
    assert f"Paper = \"{papers[0]['url']}\"" in of_checkout("pyproject.toml")


def dotted(text):
    """Return dotted names like `timm_ortho.hub.push`, and names imported by `from timm_ortho import ...`."""
    names = re.findall(r"\btimm_ortho(?:\.[A-Za-z_]\w*)+", text)
    for imported in re.findall(r"from timm_ortho import ([\w, ]+)", text):
        for name in imported.split(", "):
            used = re.findall(rf"\b{name}\.(?!py\b)\w+", text)  # not files such as representation.py
            names += [f"timm_ortho.{name}", *(f"timm_ortho.{attribute}" for attribute in used)]
    return sorted(set(names))


def test_names_on_pages_and_in_docstrings_exist():
    pages = of_checkout("README.md"), *(path.read_text(encoding="utf-8") for path in PAGES.glob("*.md"))
    code = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    names = {name for text in ("\n".join(pages), *code) for name in dotted(text)}
    assert {"timm_ortho.hub.push", "timm_ortho.connect", "timm_ortho.lab.rewrites"} <= names
    assert [name for name in names if not exists(name)] == []


def exists(name):
    with suppress(ModuleNotFoundError):  # the parent is not a package
        if importlib.util.find_spec(name) is not None:
            return True
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)
