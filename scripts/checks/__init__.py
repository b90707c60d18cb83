"""Checks beyond the test suite: `python -m scripts.checks.NAME`."""
