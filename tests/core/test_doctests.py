"""The examples in the package's docstrings run and have the documented output."""
import doctest
import importlib
import inspect
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch

import timm_ortho
from timm_ortho.lab import representation

ROOT = Path(timm_ortho.__file__).parents[1]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(ROOT.glob("timm_ortho/**/*.py")) if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch, capfd):
    """Examples may use torch, timm and timm_ortho without an import, and may write files to the working directory."""
    module = importlib.import_module(name)
    names = {"torch": torch, "timm": timm, "timm_ortho": timm_ortho}
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=names)
    lines = Path(module.__file__).read_text(encoding="utf-8").splitlines()
    assert sum(len(test.examples) for test in tests) == sum(line.lstrip().startswith(">>> ") for line in lines)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(timm_ortho.CONNECTIONS):  # an example may register a connection
        for test in tests:
            torch.manual_seed(0)
            runner.run(test)
    assert not runner.failures, capfd.readouterr().out


def test_public_functions_have_examples():
    public = {
        name: function for module in (timm_ortho, timm_ortho.hub, representation)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__.startswith("timm_ortho") and name[0] != "_"
    }
    assert {"connect", "push", "effective_rank"} <= public.keys()
    assert [name for name, function in public.items() if ">>> " not in function.__doc__] == []
