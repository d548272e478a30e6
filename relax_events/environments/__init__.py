"""Environments: functions that answer the policy, and what lets an engine's samples talk with
them.
"""
