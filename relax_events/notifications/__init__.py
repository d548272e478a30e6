"""Notifications about a run."""
