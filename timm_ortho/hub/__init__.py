"""Publish models on the Hugging Face Hub and load them from there."""
from .pulling import pull
from .pushing import push
from .repository import PublishError, export

__all__ = ["PublishError", "export", "pull", "push"]
