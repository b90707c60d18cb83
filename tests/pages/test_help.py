"""Test that scripts print their usage with --help instead of starting."""
import runpy
import sys

import pytest


def test_help(monkeypatch, capsys):
    name = "evidence"
    monkeypatch.delitem(sys.modules, f"scripts.{name}", raising=False)
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"scripts.{name}", run_name="__main__")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m scripts.{name} [-h]")
