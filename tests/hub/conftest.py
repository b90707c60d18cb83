"""Fixtures for the tests of the Hub: saved small models, and a mock Hub that has them."""
import pytest
from helpers.hub_models import saved_models


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
