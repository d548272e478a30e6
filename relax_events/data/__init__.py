"""Prompts: where they come from, in which order they are issued, how a model reads them."""
