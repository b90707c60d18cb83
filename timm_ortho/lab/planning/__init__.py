"""Plan a study, which is a YAML file that defines an experiment: create one folder for each of its runs."""
