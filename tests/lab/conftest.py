"""Fixtures for the tests of reports."""
import pytest
from matplotlib.figure import Figure

SAVEFIG = Figure.savefig


@pytest.fixture(scope="module")
def undrawn_module():
    """Skip the layout and writing of plots, which is slow, in a test module and its module-scoped fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, file, **_: file.write("<svg/>"))
        yield


@pytest.fixture
def drawn(undrawn_module, monkeypatch):
    """Draw the plots in one test of a module that uses `undrawn_module`."""
    monkeypatch.setattr(Figure, "savefig", SAVEFIG)
