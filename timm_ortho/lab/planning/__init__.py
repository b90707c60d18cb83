"""Turn a study's YAML file into the folders of its runs."""
