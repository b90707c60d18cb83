"""Train a run from its folder, and store its result there."""
