"""Test that the notebook docs/quickstart.ipynb runs from top to bottom and has small outputs."""
import json
import re
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_outputs_are_small_and_contain_no_local_paths():
    text = FILE.read_text(encoding="utf-8")
    assert len(text) < 80_000
    cells = code_cells(json.loads(text))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert "site-packages" not in outputs
    assert not re.search(r"/(home|tmp|root|usr)/", outputs)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom():
    pytest.importorskip("ipykernel")
    nbformat, preprocessors = map(pytest.importorskip, ("nbformat", "nbconvert.preprocessors"))
    notebook, _ = preprocessors.ExecutePreprocessor(timeout=600).preprocess(nbformat.read(FILE, as_version=4))
    cells = code_cells(notebook)
    texts = ["".join(output.get("text", "")) + str(output.get("data", "")) for cell in cells for output in cell.outputs]
    for expected in (
            "torch.Size([1, 10])", "Orthogonal-F", "image/svg+xml", "GlobalConnection(dim=-1", "model.safetensors"):
        assert any(expected in text for text in texts), expected
