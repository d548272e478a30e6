"""Attacks on our own walls, run by the tests and by `relax doctor --attack`."""
