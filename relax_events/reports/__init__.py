"""Views of a run for people: the terminal view, the run report, exported samples."""
