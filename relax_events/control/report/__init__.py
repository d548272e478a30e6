"""What is left of a run to look at."""
