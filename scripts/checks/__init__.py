"""Checks that are not part of the test suite. Run each with `python -m scripts.checks.NAME`."""
