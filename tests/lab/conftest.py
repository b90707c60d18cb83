"""Fixtures for the tests of reports."""
import pytest
from matplotlib.figure import Figure

SAVEFIG = Figure.savefig


@pytest.fixture(scope="module")
def undrawn_module():
    """Write empty SVG files instead of plots in all tests of a module and in its fixtures. Drawing plots is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, file, **_: file.write("<svg/>"))
        yield


@pytest.fixture
def drawn(undrawn_module, monkeypatch):
    """Write real plots in one test of a module that uses `undrawn_module`."""
    monkeypatch.setattr(Figure, "savefig", SAVEFIG)
