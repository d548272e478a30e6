"""The trainer: backends behind one protocol, micro-batches, packing, ranks, checkpoints. Import the
modules; this file loads nothing.
"""
