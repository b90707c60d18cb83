"""Commands for people who work on the project; run them from a checkout: `python -m scripts.pages`."""
