"""Environments: functions that reply to the policy, and the engine that runs multi-turn samples
with them.
"""
