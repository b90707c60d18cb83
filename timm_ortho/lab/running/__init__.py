"""Train runs, each planned in a folder of its own, and store the results in these folders."""
