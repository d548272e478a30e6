"""Inference engines behind one protocol: `transformers`, `sglang`, `dataset`, and a router over
several.
"""
