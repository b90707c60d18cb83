from unittest import mock

import pytest
from helpers.own_block import MyBlock, register

import timm_ortho
from timm_ortho.blocks import lookup


@pytest.fixture
def restored(monkeypatch):
    """Remove the blocks and connections that a test registers."""
    for name in ("SPECS", "NOT_RESIDUAL", "REGISTERED"):
        monkeypatch.setattr(lookup, name, dict(getattr(lookup, name)))
    with mock.patch.dict(timm_ortho.CONNECTIONS):
        yield


@pytest.fixture
def registered(restored):
    """Register the class of a user's block and return it."""
    register()
    return MyBlock
