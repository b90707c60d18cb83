"""Commands for contributors. Run them from a checkout, for example `python -m scripts.evidence`."""
