"""Pretrained weights: their configurations, checks before loading, and the files of this package."""
