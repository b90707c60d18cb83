"""Test that the code of the notebook docs/quickstart.ipynb runs, and that its outputs are small."""
import json
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

FILE = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"


def code_cells():
    return [cell for cell in json.loads(FILE.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_outputs_are_small_and_contain_no_local_paths():
    assert FILE.stat().st_size < 80_000
    assert [cell["execution_count"] for cell in code_cells()] == list(range(1, len(code_cells()) + 1))
    outputs = json.dumps([cell["outputs"] for cell in code_cells()])
    assert "site-packages" not in outputs
    assert not re.search(r"/(home|tmp|root|usr)/", outputs)
    for expected in (
            "torch.Size([1, 10])", "Orthogonal-F", "image/svg+xml", "GlobalConnection(dim=-1", "model.safetensors"):
        assert expected in outputs


@pytest.mark.slow
def test_the_code_runs(tmp_path, monkeypatch):
    (tmp_path / "notebook.py").write_text("\n\n".join("".join(cell["source"]) for cell in code_cells()))
    monkeypatch.chdir(tmp_path)  # the notebook changes the working directory, too
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    names = runpy.run_path(str(tmp_path / "notebook.py"))
    assert [type(site.connection).__name__ for site in names["timm_ortho"].sites(names["mine"])] == [
        "GlobalConnection"] * 2
    assert (Path.cwd() / "pushed" / "model.safetensors").is_file()
