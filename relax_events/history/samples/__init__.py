"""Reads samples back from the log."""
