"""The trainer: backends behind one protocol, batches, ranks, checkpoints, replay. Import the
modules; this file imports nothing.
"""
