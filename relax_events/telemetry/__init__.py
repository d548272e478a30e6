"""Logs, and the metrics that every worker serves."""
