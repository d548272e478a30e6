"""Exports a policy version of a run as a model folder in Hugging Face layout."""
