"""Fixtures for the tests of reports and of image folders."""
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

SAVEFIG = Figure.savefig


@pytest.fixture(scope="module")
def undrawn_module():
    """Write empty SVG files instead of plots in all tests of a module and in its fixtures. Drawing plots is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, file, **_: file.write("<svg/>"))
        yield


@pytest.fixture(scope="session")
def class_folders(tmp_path_factory):
    """Write class folders with 64 training and 16 validation images of 12 x 12 pixels. Return their parent folder."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 8)):
        for label, low in (("bright", 16), ("dark", 0)):
            (root / split / label).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(low, low + 240, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{index}.png")
    return root


@pytest.fixture
def drawn(undrawn_module, monkeypatch):
    """Write real plots in one test of a module that uses `undrawn_module`."""
    monkeypatch.setattr(Figure, "savefig", SAVEFIG)
