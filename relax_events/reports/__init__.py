"""What people look at: the terminal view, the run report, exported samples."""
