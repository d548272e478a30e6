"""Logs, metrics, traces and experiment trackers of workers."""
