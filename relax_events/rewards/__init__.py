"""Rewards: the hub of reward functions, and the child processes that run them."""
