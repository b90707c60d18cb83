"""Errors that are raised if a model or run cannot be published."""


class PublishError(ValueError):
    """A model or run cannot be published. The message is one line that names the problem and what to do."""


class NoRunError(PublishError):
    """A file is not the checkpoint of a training run."""
