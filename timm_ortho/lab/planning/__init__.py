"""From a study's YAML to the folders of its runs."""
