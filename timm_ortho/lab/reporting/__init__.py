"""From the folders of runs to tables, plots and a page."""
