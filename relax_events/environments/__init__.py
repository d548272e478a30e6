"""Environments: functions and stateful objects that reply to the policy, in child processes."""
