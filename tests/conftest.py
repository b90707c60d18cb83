"""Define shared fixtures. Set the number of threads, and select Triton's interpreter if there is no GPU.

This file runs before the tests are imported.
"""
import os
import shutil

# Tests and the processes that they start use one thread. A second thread slows down operations on small tensors. It
# also changes the rounding of sums, which some tests compare across processes.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import pytest
import torch
from helpers.hub_client import HubClient
from helpers.hub_server import HubServer

torch.set_num_threads(1)  # torch ignores the variables above if a pytest plugin has already imported it

if not torch.cuda.is_available():
    # Triton's interpreter runs the kernels on the CPU. Triton reads this variable when it is imported. Importing timm
    # imports Triton, so the variable is set before any test imports timm.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Yield a mock Hub and a client, which all tests share, because a client takes seconds to start."""
    from helpers.hub_models import IMPORTS  # imports timm

    folder = tmp_path_factory.mktemp("hub")
    with HubServer() as server, HubClient(folder, server.endpoint, IMPORTS, server.add_user("me")) as client:
        yield server, client


@pytest.fixture
def server(served):
    """Remove all repositories from the mock Hub, empty the client's cache, and return the Hub."""
    server, client = served
    server.empty()
    client.forget()
    return server


@pytest.fixture
def client(served):
    return served[1]


@pytest.fixture(scope="session")
def grid(tmp_path_factory):
    """Return a folder of the finished runs of two connections and three seeds. Tests must not change it."""
    from helpers.trained_runs import lab_grid  # imports timm

    return lab_grid(tmp_path_factory.mktemp("grid") / "compared")


@pytest.fixture
def copied(grid, tmp_path):
    return shutil.copytree(grid, tmp_path / "compared")


@pytest.fixture
def error_of(capsys):
    """Return a function that runs a command, which must fail with status 2, and returns its output, an error line."""
    from timm_ortho import cli  # imports timm

    def error_of(*words):
        capsys.readouterr()  # omits the output of earlier commands
        assert cli.main([*map(str, words)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("timm-ortho: error: ")
        return captured.err
    return error_of


@pytest.fixture
def undrawn(monkeypatch):
    """Write an empty picture instead of each plot. Drawing plots is slow, and tests of a report's numbers need none."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write("<svg/>"))
