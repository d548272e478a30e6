"""Notifications about a run, and the receiver of Prometheus alerts."""
