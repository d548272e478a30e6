"""Inference engines: one protocol, one file for each engine."""
