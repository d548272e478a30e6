"""Rewards: the registry of reward functions, and the child processes that run them."""
