"""Execute docs/quickstart.ipynb from top to bottom and write it with its new outputs.

    python -m scripts.quickstart
"""
import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FILE = Path(__file__).resolve().parents[1] / "docs" / "quickstart.ipynb"


def execute(file: Path = FILE) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a new kernel, without warnings or timestamps.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m scripts.quickstart", description=__doc__.partition("\n")[0]).parse_args()
    nbformat.write(execute(), FILE)
