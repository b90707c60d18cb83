"""Regenerate the generated pages, tables and plots: `python -m scripts.pages [--check]`."""
