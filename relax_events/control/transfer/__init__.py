"""Moves a run's log: into files, and out of them again."""
