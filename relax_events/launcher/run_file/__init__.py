"""Proposes a run file from a model's folder and a dataset."""
