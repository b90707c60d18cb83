"""Fixtures for the tests of the Hub: a mock Hub with a client, saved small models, and trained runs."""
import pytest
from helpers.hub_client import HubClient
from helpers.hub_models import IMPORTS, saved_models
from helpers.hub_server import HubServer
from helpers.trained_runs import lab_grid


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Yield a mock Hub and a client, which all tests share, because a client takes seconds to start."""
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(folder) as server, HubClient(folder, server.endpoint, IMPORTS, server.add_user("me")) as client:
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
def saved(tmp_path_factory):
    """Return ``{repository: (files that timm saves, digest of the logits, connections)}``."""
    return saved_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def hub(server, saved):
    """Commit the small models to the mock Hub and return it."""
    for repo_id, (files, _, _) in saved.items():
        server.commit(repo_id, files)
    return server


@pytest.fixture(scope="session")
def grid(tmp_path_factory):
    """Return a folder of finished runs. Tests must not change it."""
    return lab_grid(tmp_path_factory.mktemp("grid") / "compared")
