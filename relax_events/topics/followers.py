"""Where a run that trains another run's samples tells how far it is: committed offsets of a group that nobody is a member of."""

from __future__ import annotations

FOLLOWER = "follower"
SAMPLES = "advantage.samples"
NEEDS_NOTHING = 2**62
"""The committed offset of a follower that has reached its goal: no record lies behind it."""
