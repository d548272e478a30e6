"""Synthetic tasks, tiny models and their preparation. The library finds them by entry points and
never imports them.
"""
