"""Synthetic tasks, tiny models and their preparation. The library loads tasks by entry points;
`relax models prepare` makes the models.
"""
