"""Checkpoints of trainer and critic."""
