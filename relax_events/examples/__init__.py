"""Synthetic tasks, tiny models and their preparation. The library loads them by entry points and
never imports them.
"""
