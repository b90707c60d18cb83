"""Pretrained weights: their configurations, downloads, files and checks."""


class WeightsError(RuntimeError):
    """Pretrained weights cannot be downloaded or used. The message is one line with the source and the cause."""
