"""Read the folders of training runs, and record versions and machine."""
