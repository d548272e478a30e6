"""State as a fold of the log: each class takes every event in order and answers questions about
what it has seen.
"""
