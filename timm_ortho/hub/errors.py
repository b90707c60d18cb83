"""The error that is raised if a model or run cannot be published."""


class PublishError(ValueError):
    """A model or run cannot be published. The message is one line that names the problem and what to do."""
