"""What has to be settled before the first test is imported: threads, and where the Triton kernels run. Fixtures of
several files.
"""
import os

# One thread here and, by the environment, in every process that a test starts, whatever the user has set. The tensors
# are small: a second thread costs more than it brings, and rounds sums otherwise, which tests across processes see.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import pytest
import torch
from helpers.hub_client import HubClient
from helpers.hub_server import HubServer

torch.set_num_threads(1)  # a plugin may have imported torch before

if not torch.cuda.is_available():
    # Triton's interpreter runs the kernels on the CPU. Triton asks for this variable when it is imported, which timm
    # does and torch does not: hence here, before any test imports timm. A value that is there already is left alone.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    """A Hub and its real client, in a process of its own that has run the module's IMPORTS."""
    folder = tmp_path_factory.mktemp("hub")
    imports = request.module.IMPORTS
    with HubServer(folder) as server, HubClient(folder, server.endpoint, server.add_user("me"), imports) as client:
        yield server, client


@pytest.fixture
def server(served):
    """That Hub, without a repository; the client has nothing in its cache."""
    server, client = served
    server.empty()
    client.forget()
    return server


@pytest.fixture
def client(served):
    return served[1]


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of a report's numbers: its figures are made, but not laid out and written, which takes far longer."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write("<svg/>"))
