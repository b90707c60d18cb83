"""Read the folders of training runs, and record the versions and machine that a result was made with."""
