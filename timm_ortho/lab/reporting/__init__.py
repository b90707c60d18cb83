"""Turn the folders of runs into tables, plots and a page."""
