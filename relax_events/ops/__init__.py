"""Operators' tools for a run's topics and consumer groups: apply, check, lag, purge, reset, export,
dead letters, security.
"""
