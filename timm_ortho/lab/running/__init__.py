"""From the folder of a run to its result."""
