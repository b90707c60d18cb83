"""Fixtures of the tests of pulling: small models, saved and served by the mock Hub."""
import pytest
from helpers.hub_models import saved_models


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return ``{repository: (files that timm saves, digest of the logits, connections)}``."""
    return saved_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def hub(server, saved):
    """The mock Hub with the small models."""
    for repo_id, (files, _, _) in saved.items():
        server.commit(repo_id, files)
    return server
