"""Pretrained weights: where they come from, how they are checked, and those that this package has in it."""
